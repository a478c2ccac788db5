"""Turns as tokens: what an environment says is tokenised once, alone, and put behind the ids that were sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np
from jinja2 import TemplateError

from rollkeel.errors import BadInput
from rollkeel.types import IntArray

_MODEL, _TEXT = "model-turn-8d1f", "environment-turn-8d1f"


def as_chat(tokenizer: Any, text: str | Sequence[Mapping[str, str]]) -> str:
    """`text`, the user's one turn or a list of messages, in the tokenizer's chat template, up to where the model's turn begins."""
    messages = [{"role": "user", "content": text}] if isinstance(text, str) else list(text)
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        roles = ", ".join(message["role"] for message in messages)
        raise BadInput(f"data.chat_template: the tokenizer's template refuses messages of {roles}: {error}") from None


@final
class Dialogue:
    """What stands between two turns of the model. It never sees the ids of a turn but for the last one."""

    def __init__(self, tokenizer: Any, *, chat: bool) -> None:
        """`chat`: environments speak as the user of the tokenizer's chat template. Raises `BadInput` for one that cannot."""
        self._tokenizer, self._before, self._after = tokenizer, "", ""
        if chat:
            turns = [("user", "x"), ("assistant", _MODEL), ("user", _TEXT)]
            messages = [{"role": role, "content": text} for role, text in turns]
            shown = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            if shown.count(_MODEL) != 1 or shown.count(_TEXT) != 1:
                raise BadInput("data.chat_template: expected a template that shows every turn once; set it to false")
            self._before, self._after = shown.split(_MODEL)[1].split(_TEXT)

    def between(self, text: str, last: int | None) -> IntArray:
        """Ids `[n]` of `text` behind a turn that ended with the stop token `last`, or was cut (None).

        In `text` the names of special tokens are plain text: what a tool prints must not end a turn.
        """
        before = self._before if last is None else self._before.removeprefix(self._tokenizer.decode([last]))
        parts = [self._ids(before), self._ids(text, split_special_tokens=True), self._ids(self._after)]
        return np.concatenate(parts)

    def _ids(self, text: str, **options: bool) -> IntArray:
        found = self._tokenizer(text, add_special_tokens=False, **options)["input_ids"] if text else []
        return np.asarray(found, np.int64)
