"""The same prompt and the same tokens so far are the same question: noise answers it each time otherwise, rounding does not.

Not covered: engines whose kernels depend on the batch; how far they do is a matter of their dtype.
"""

from __future__ import annotations

import numpy as np
import pytest
from simulated import simulate

from rollkeel_doctor import diagnose
from rollkeel_doctor.repeats import repeats
from rollkeel_doctor.tokens import select, taken
from rollkeel_doctor.traces.trace import Trace


def twice(noise: float = 0.3) -> Trace:
    """Every sequence two times, as if two samples of one prompt had come out alike."""
    trace = simulate(noise=noise).trace()
    pairs = np.repeat(np.arange(trace.sequences), 2)
    return taken(trace, pairs).with_(id=np.arange(2 * trace.sequences), group=pairs)


def test_an_engine_that_is_a_function_of_its_input_repeats_itself() -> None:
    trace = twice()
    found = repeats(select(trace), trace)
    assert found.repeated > 1000
    assert found.differ == pytest.approx(0, abs=1e-6)


def test_noise_does_not() -> None:
    trace = twice(noise=0.0)
    noisy = trace.rollout_logprobs + np.random.default_rng(0).normal(size=len(trace)).astype(np.float32) * 0.1
    trace = trace.with_(rollout_logprobs=noisy.clip(max=0))
    assert repeats(select(trace), trace).differ == pytest.approx(1, abs=0.05)


def test_jitter_of_routers_is_no_rounding() -> None:
    """The same noise, once as a function of the question, once drawn anew: only then it is nothing that bits do."""
    trace = twice(noise=0.0)
    draws = np.random.default_rng(0).normal(size=(2, len(trace))).astype(np.float32) * 0.08
    flips = (np.random.default_rng(1).random(len(trace)) < 0.1).astype(np.int16)
    first, second = trace.starts[:-1:2], trace.starts[1:-1:2]
    alike = draws[0].copy()
    for one, other, end in zip(first, second, trace.starts[2::2], strict=True):
        alike[other:end] = alike[one:other]
    named = []
    for noise in (alike, draws[1]):
        q = (trace.rollout_logprobs + noise * -np.expm1(trace.rollout_logprobs)).clip(max=0)
        found = diagnose(trace.with_(rollout_logprobs=q, flipped_layers=flips)).causes
        named.append([cause.id for cause in found])
    assert named == [["duplicates", "quantisation"], ["duplicates", "routing"]]  # no two samples were drawn alike


def test_another_prompt_version_or_beginning_is_another_question() -> None:
    trace = twice()
    second = np.arange(trace.sequences) % 2 == 1
    assert trace.versions is not None
    ids = np.where(second[trace.sequence] & (trace.position == 0), trace.token_ids + 1, trace.token_ids)
    other = [
        trace.with_(group=np.arange(trace.sequences)),
        trace.with_(versions=trace.versions + second[trace.sequence]),
        trace.with_(token_ids=ids),
    ]
    for changed in other:
        assert repeats(select(changed), changed).repeated == 0
    assert np.isnan(repeats(select(other[0]), other[0]).differ)


def test_the_same_ids_in_another_place_are_another_question() -> None:
    trace = twice(noise=0.0)
    brute: dict[tuple[int, ...], int] = {}
    tokens = select(trace)
    informed = set(tokens.index[(tokens.q > np.log(0.02)) & (tokens.q < np.log(0.98))].tolist())
    for s in range(trace.sequences):
        ids = trace.token_ids[trace.starts[s] : trace.starts[s + 1]].tolist()
        for t in range(len(ids)):
            if int(trace.starts[s]) + t in informed:
                key = (int(trace.group[s]), *ids[: t + 1])
                brute[key] = brute.get(key, 0) + 1
    assert repeats(tokens, trace).repeated == sum(n - 1 for n in brute.values())
