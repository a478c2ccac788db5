"""Turns as tokens: what an environment says is tokenised once, alone, and put behind the ids that were sampled."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np
from jinja2 import TemplateError

from rollkeel.errors import BadInput
from rollkeel.types import IntArray

_TURN = re.compile(r"turn-8d1f-\d+-")


def as_chat(tokenizer: Any, text: str | Sequence[Mapping[str, str]], tools: Sequence[dict[str, Any]] = ()) -> str:
    """`text`, the user's one turn or a list of messages, in the tokenizer's chat template, up to where the model's turn begins.

    `tools`: JSON schemas that the template is to show; `BadInput` if it does not.
    """
    messages = [{"role": "user", "content": text}] if isinstance(text, str) else list(text)
    try:
        shown = tokenizer.apply_chat_template(messages, tools=tools or None, tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        roles = ", ".join(message["role"] for message in messages)
        raise BadInput(f"data.chat_template: the tokenizer's template refuses messages of {roles}: {error}") from None
    if tools and shown == as_chat(tokenizer, text):
        raise BadInput("data.chat_template: the tokenizer's template does not show tools")
    return shown


@final
class Dialogue:
    """What stands between two turns of the model. It never sees the ids of a turn but for the last one."""

    def __init__(self, tokenizer: Any, *, chat: bool, role: str = "user") -> None:
        """`chat`: environments speak as `role` of the tokenizer's chat template. Raises `BadInput` for one that cannot."""
        if role != "user" and not chat:
            raise BadInput(f"data.chat_template: this environment speaks as {role}; set it to true")
        self._tokenizer = tokenizer
        self._chat = chat
        self._role = role
        self._frames = {count: self._frame(count) for count in ((1, 2) if role == "tool" else (1,))}

    def between(self, texts: Sequence[str], last: int | None) -> IntArray:
        """Ids `[n]` of `texts`, a message each, behind a turn that ended with the stop token `last`, or was cut (None).

        In `texts` the names of special tokens are plain text: what a tool prints must not end a turn.
        """
        if len(texts) not in self._frames:
            self._frames[len(texts)] = self._frame(len(texts))
        before, *behind = self._frames[len(texts)]
        parts = [self._ids(before if last is None else before.removeprefix(self._tokenizer.decode([last])))]
        for text, frame in zip(texts, behind, strict=True):
            parts += [self._ids(text, split_special_tokens=True), self._ids(frame)]
        return np.concatenate(parts)

    def _frame(self, count: int) -> list[str]:
        """What the template puts before, between and behind so many messages after the model's turn."""
        if not self._chat:
            return [""] * (count + 1)
        marks = [f"turn-8d1f-{n}-" for n in range(count + 1)]
        turns = zip(["assistant", *[self._role] * count], marks, strict=True)
        messages = [{"role": "user", "content": "x"}, *({"role": who, "content": text} for who, text in turns)]
        shown = as_chat(self._tokenizer, messages)
        if _TURN.findall(shown) != marks:
            raise BadInput("data.chat_template: expected a template that shows every turn once; set it to false")
        return _TURN.split(shown)[1:]

    def _ids(self, text: str, **options: bool) -> IntArray:
        found = self._tokenizer(text, add_special_tokens=False, **options)["input_ids"] if text else []
        return np.asarray(found, np.int64)
