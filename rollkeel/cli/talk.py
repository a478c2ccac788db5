"""`rollkeel chat`: talk to a model through the embedded engine, the one that samples in training."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, TextIO

import numpy as np

from rollkeel.config import Config
from rollkeel.errors import BadInput, EngineFailure
from rollkeel.loop.assemble import opened, policy_of, sampling_params
from rollkeel.protocols import SteppedEngine
from rollkeel.rollout.budgeted import stepped
from rollkeel.types import Request

TOKENS = 4
"""Tokens between two looks at an answer: each look parks the sequence with its KV and takes it up again."""
NEW = "/new"
"""A line that begins another conversation."""


def chat(config: Config, source: TextIO, out: TextIO, *, plain: bool = False) -> None:
    """Answer every line of `source` on `out` as it is sampled, until its end.

    With the model's chat template, if it has one and unless `plain`. Then the lines of a terminal are one conversation;
    otherwise each line is a prompt of its own.
    Raises `BadInput` for a prompt that the model's context or vocabulary cannot hold.
    """
    policy = policy_of(config)
    tokenizer = policy.tokenizer
    templated = not plain and bool(getattr(tokenizer, "chat_template", None))
    sampling = sampling_params(config, policy.stop_token_ids)
    history: list[dict[str, str]] = []
    with opened(config, policy) as served:
        engine = stepped(served)
        for number, line in enumerate(_lines(source, out)):
            if line == NEW or not (templated and source.isatty()):
                history = []
            if line in ("", NEW):
                continue
            history.append({"role": "user", "content": line})
            request = Request(id=number, prompt_ids=_ids(tokenizer, history, templated), sampling=sampling)
            answer = ""
            for piece in _pieces(tokenizer, stream(engine, request), policy.stop_token_ids):
                answer += piece
                out.write(piece)
                out.flush()
            out.write("\n")
            out.flush()
            history.append({"role": "assistant", "content": answer})


def stream(engine: SteppedEngine, request: Request) -> Iterator[list[int]]:
    """The tokens of the answer, a few at a time; the same ones as if it had been sampled in one go."""
    while True:
        engine.submit([request])
        ended = engine.advance(TOKENS)
        if not ended:
            engine.interrupt()
            ended = engine.poll(0.0)
        (segment,) = ended
        if segment.status.complete or len(segment.span):
            yield segment.span.token_ids.tolist()
        if segment.status.complete:
            return
        if segment.detail:
            raise EngineFailure(f"engine {engine.capabilities.name}: {segment.detail}")
        request = replace(request, prefix=request.prefix.append(segment.span), kv=segment.kv)


def _lines(source: TextIO, out: TextIO) -> Iterator[str]:
    if not source.isatty():
        yield from (line.rstrip("\n") for line in source)
        return
    print(f"Ctrl-D ends, {NEW} begins another conversation.", file=sys.stderr)
    while True:
        out.write("> ")
        out.flush()
        line = source.readline()
        if not line:
            out.write("\n")
            return
        yield line.rstrip("\n")


def _ids(tokenizer: Any, history: list[dict[str, str]], templated: bool) -> np.ndarray:
    """The conversation as the chat template shows it, or its last line."""
    text = history[-1]["content"]
    if templated:
        text = tokenizer.apply_chat_template(history, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if not ids:
        raise BadInput(f"chat: the tokenizer makes no token of {text[:60]!r}")
    return np.asarray(ids, np.int64)


def _pieces(tokenizer: Any, tokens: Iterable[list[int]], stops: Iterable[int]) -> Iterator[str]:
    """New text as tokens come; half a character waits for its other half."""
    seen: list[int] = []
    shown = 0
    for more in tokens:
        seen += [i for i in more if i not in stops]
        text = tokenizer.decode(seen, skip_special_tokens=True)
        if not text.endswith("\ufffd"):
            yield text[shown:]
            shown = len(text)
    yield tokenizer.decode(seen, skip_special_tokens=True)[shown:]
