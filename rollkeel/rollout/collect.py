"""Issue a step's requests, wait for all of them, and put segments back together with their prompts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from rollkeel.errors import EngineFailure, Interrupted
from rollkeel.host import within
from rollkeel.protocols import Engine, Grader, OverlappedGrader
from rollkeel.types import Capabilities, KeptKV, Prompt, Request, Rollout, SamplingParams, Segment, Status, TokenSpan

POLL_S = 1.0


def issue(
    prompts: Sequence[Prompt], samples: int, sampling: SamplingParams, first_group: int, engine: Engine
) -> list[Rollout]:
    """Empty rollouts, `samples` per prompt, with ids that follow from the group number alone."""
    about = engine.capabilities
    return [
        unbegun(g * samples + member, g, member, prompt, sampling, about)
        for g, prompt in enumerate(prompts, first_group)
        for member in range(samples)
    ]


def unbegun(id: int, group: int, member: int, prompt: Prompt, sampling: SamplingParams, about: Capabilities) -> Rollout:
    """A rollout without tokens, for an engine that says this `about` itself."""
    return Rollout(
        id=id,
        group=group,
        member=member,
        prompt=prompt,
        span=TokenSpan.empty(),
        status=Status.PARKED,
        sampling=sampling,
        engine=about.name,
        dtype=about.dtype,
    )


def collect(
    engine: Engine,
    issued: Sequence[Rollout],
    tokenizer: Any,
    *,
    deadline_s: float,
    should_stop: Callable[[], bool] = lambda: False,
    grader: Grader | None = None,
) -> list[Rollout]:
    """Sample every issued rollout to its end; returned in the order given, whatever order the engine finished them in.
    `grader` begins on each as it ends, and is to be given all of them afterwards.

    `deadline_s` is the longest silence: `EngineFailure` names how many rollouts were still missing. `should_stop` is asked
    between polls; then the engine is emptied and `Interrupted` raised.
    """
    stream = completed(engine, issued, tokenizer, deadline_s=deadline_s, should_stop=should_stop, grader=grader)
    done = {rollout.id: rollout for rollout in stream}
    return [done[r.id] for r in issued]


def completed(
    engine: Engine,
    issued: Sequence[Rollout],
    tokenizer: Any,
    *,
    deadline_s: float,
    should_stop: Callable[[], bool] = lambda: False,
    grader: Grader | None = None,
) -> Iterator[Rollout]:
    """The same, one by one as the engine finishes them."""
    waiting = {r.id: r for r in issued}
    engine.submit([request_of(r) for r in issued])
    heard = time.monotonic()
    while waiting:
        late = hung(engine, deadline_s, f"{len(waiting)} of {len(issued)} rollouts")
        with heard_from(engine), within(deadline_s, late):
            segments = engine.poll(POLL_S)
        ended = [extended(waiting.pop(s.request_id, None), s, tokenizer, engine) for s in segments]
        if parked := [r.id for r in ended if r.status is Status.PARKED]:
            raise EngineFailure(
                f"engine {engine.capabilities.name}: request {parked[0]}: interrupted, which nobody asked for"
            )
        begin(grader, ended)
        yield from ended
        now = time.monotonic()
        heard = now if segments else heard
        if waiting and should_stop():
            engine.interrupt()
            while waiting and (left := engine.poll(POLL_S)):
                for segment in left:
                    waiting.pop(segment.request_id, None)
            raise Interrupted("stopped while sampling; the step is repeated on resume")
        if now - heard > deadline_s:
            raise EngineFailure(
                f"engine {engine.capabilities.name}: nothing for {now - heard:.0f} s while waiting for {len(waiting)} of "
                f"{len(issued)} rollouts (engine.deadline_s={deadline_s:g})"
            )


def hung(engine: Engine, deadline_s: float, what: str) -> EngineFailure:
    """Of an engine in this process that does not return."""
    name = engine.capabilities.name
    return EngineFailure(
        f"engine {name}: a call for {what} did not return for {deadline_s:g} s (engine.deadline_s={deadline_s:g})"
    )


def begin(grader: Grader | None, ended: Sequence[Rollout]) -> None:
    """Let `grader` start on what is complete, if it is one that works beside sampling."""
    if isinstance(grader, OverlappedGrader):
        grader.begin([r for r in ended if r.status.complete])


def request_of(rollout: Rollout, kv: KeptKV | None = None) -> Request:
    """The engine's request: continue behind the rollout's tokens, with its KV where that was kept."""
    return Request(
        id=rollout.id, prompt_ids=rollout.prompt.token_ids, sampling=rollout.sampling, prefix=rollout.span, kv=kv
    )


@contextmanager
def heard_from(engine: Engine) -> Iterator[None]:
    """A `ValueError` of an engine, such as a span that cannot be true, is a failure of that engine."""
    try:
        yield
    except ValueError as error:
        raise EngineFailure(f"engine {engine.capabilities.name}: {' '.join(str(error).split())}") from error


def extended(rollout: Rollout | None, segment: Segment, tokenizer: Any, engine: Engine) -> Rollout:
    """`rollout` with the tokens of `segment` behind its own, ended as the segment did, and decoded; parked if it was interrupted.

    Raises `EngineFailure`, naming engine, request and position, for a segment that cannot be the truth. `rollout` is None when
    nobody waits for the segment.
    """
    where = f"engine {engine.capabilities.name}: request {segment.request_id}"
    if rollout is None:
        raise EngineFailure(f"{where}: returned, but it is not in flight: it came twice, or nobody asked for it")
    if fault := _impossible(segment.span, rollout, engine.version):
        raise EngineFailure(f"{where}, {fault}")
    try:
        span = rollout.span.append(segment.span)
    except ValueError as error:
        raise EngineFailure(f"{where}: {error}") from error
    if segment.status is Status.INTERRUPTED:
        return replace(rollout, span=span, status=Status.PARKED)
    text = decode(span.token_ids, rollout.sampling.stop_token_ids, tokenizer)
    return replace(rollout, span=span, status=segment.status, detail=segment.detail, text=text)


def _impossible(new: TokenSpan, rollout: Rollout, version: int) -> str:
    """The first position of the response at which `new` tokens cannot be what was asked for, and why; else empty."""
    sampling = rollout.sampling
    first = len(rollout.span)
    ids = new.token_ids.tolist()
    for place, (token, stamp) in enumerate(zip(ids, new.versions.tolist(), strict=True), first):
        if place >= sampling.max_new_tokens:
            return f"position {place}: a token beyond the {sampling.max_new_tokens} that were asked for"
        if token < 0:
            return f"position {place}: token id {token}, expected at least 0"
        if token in sampling.stop_token_ids and place < first + len(ids) - 1:
            return f"position {place}: went on behind the stop token {token}"
        if stamp > version:
            return f"position {place}: sampled by version {stamp}, but the newest that was published is {version}"
    return ""


def decode(token_ids: np.ndarray, stop_token_ids: Sequence[int], tokenizer: Any) -> str:
    """Response text without its final stop token. Other special tokens stay visible: a grader must not overlook them."""
    ids = token_ids.tolist()
    if ids and ids[-1] in stop_token_ids:
        ids = ids[:-1]
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
