"""Speeds of an engine: what the simulator needs to know about it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rollkeel.errors import EngineFailure
from rollkeel.protocols import Engine, ProbedEngine, SteppedEngine
from rollkeel.rollout.fleet import Curve
from rollkeel.types import Request, SamplingParams

_ROUNDS = 8
_POLL_S = 60.0
_PROMPT = 16


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """Fields of `FleetConfig`."""

    curve: list[list[float]]
    prefill_tokens_s: float
    prefill_s: float
    resume_s: float


def speed_curve(engine: Engine, sizes: Sequence[int], tokens: int) -> Speeds:
    """Measure decoding of `sizes` sequences (ascending; the last fills the engine's slots) of `tokens` tokens each.

    The curve is the slope between `tokens` and twice as many, so that what a sequence costs on entry is not in it;
    prefill is the slope over prompt lengths. `prefill_s` is what remains of the time to the first token of a sequence alone:
    prompts enter one by one where places become free one by one. Each time is the fastest of a few repetitions, the one
    that other programs and compilation disturbed least.
    """
    size = sizes[-1]
    jobs = [([n] * count, 1) for count in sizes for n in (tokens, 2 * tokens)]
    jobs += [([1] * size, _PROMPT), ([1] * size, _PROMPT + tokens), ([1], _PROMPT)]
    *pairs, alone = _fastest(engine, jobs)
    slopes = [max(long - short, long / 10) for short, long in zip(pairs[::2], pairs[1::2], strict=True)]
    curve = [[float(count), count * tokens / slope] for count, slope in zip(sizes, slopes, strict=False)]
    prefill = size * tokens / slopes[-1]
    server = isinstance(engine, ProbedEngine)  # its steps are chunks
    return Speeds(
        curve=curve,
        prefill_tokens_s=prefill,
        prefill_s=max(0.0, alone - _PROMPT / prefill - Curve(curve).step_s(1)),
        resume_s=_resume_seconds(engine, size, tokens) if isinstance(engine, SteppedEngine) and not server else 0.0,
    )


def _resume_seconds(engine: SteppedEngine, size: int, tokens: int) -> float:
    """Seconds per sequence that `size` sequences take to leave the engine and to come back with what they have."""
    requests = _requests([tokens + 4 * _ROUNDS] * size, _PROMPT, 0)
    engine.submit(requests)
    engine.advance(tokens)
    plain, moved = [], []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        engine.advance(1)
        plain.append(time.perf_counter() - start)
        engine.interrupt()
        parts = {segment.request_id: segment for segment in engine.advance(0)}
        requests = [replace(r, prefix=r.prefix.append(parts[r.id].span), kv=parts[r.id].kv) for r in requests]
        engine.submit(requests)
        engine.advance(1)
        moved.append(time.perf_counter() - start - plain[-1])
    engine.interrupt()
    engine.advance(0)
    return max(0.0, min(moved) - min(plain)) / size


def _fastest(engine: Engine, jobs: Sequence[tuple[Sequence[int], int]]) -> list[float]:
    """Shortest time of each job over rounds of all jobs, so that a busy moment of the machine hits one round of each."""
    rounds: list[list[float]] = []
    first = 0
    for _ in range(_ROUNDS):
        rounds.append([])
        for lengths, prompt in jobs:
            rounds[-1].append(_seconds(engine, lengths, prompt, first))
            first += len(lengths)
    return [min(times) for times in zip(*rounds, strict=True)]


def _seconds(engine: Engine, lengths: Sequence[int], prompt: int, first: int) -> float:
    """Wall time of one request per length, without stop tokens, each with its own prompt of `prompt` tokens."""
    requests = _requests(lengths, prompt, first)
    start = time.perf_counter()
    engine.submit(requests)
    ended = 0
    while ended < len(requests):
        heard = engine.poll(_POLL_S)
        if not heard:
            raise EngineFailure(
                f"measuring engine {engine.capabilities.name}: nothing for {_POLL_S:.0f} s from {len(requests)} "
                "sequences; measure fewer sequences or tokens"
            )
        ended += len(heard)
    return time.perf_counter() - start


def _requests(lengths: Sequence[int], prompt: int, first: int) -> list[Request]:
    rng = np.random.default_rng(first)
    return [
        Request(
            id=id,
            prompt_ids=rng.integers(0, 200, prompt, dtype=np.int64),
            sampling=SamplingParams(max_new_tokens=length),
        )
        for id, length in enumerate(lengths, first)
    ]
