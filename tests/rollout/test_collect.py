"""Collecting puts answers back to their prompts: a swapped, lost or silently missing answer would train on the wrong reward.

A scripted engine whose every segment is known in advance: order, silence, stopping, decoding. Not covered: sampling itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from rollkeel.errors import EngineFailure, Interrupted
from rollkeel.models.presets import EOS, build_tokenizer
from rollkeel.protocols import Engine
from rollkeel.rollout import collect as collect_module
from rollkeel.rollout.collect import collect, decode, issue
from rollkeel.types import (
    Capabilities,
    GraderSpec,
    Prompt,
    Proof,
    Request,
    SamplingParams,
    Segment,
    Status,
    TokenSpan,
    WeightUpdate,
)

TOKENIZER = build_tokenizer()
SAMPLING = SamplingParams(max_new_tokens=8, stop_token_ids=(EOS,))


def span_of(ids: Sequence[int], version: int = 0) -> TokenSpan:
    n = len(ids)
    stamp = np.full(n, version, np.int64)
    return TokenSpan(
        token_ids=np.array(ids, np.int64),
        logprobs=np.full(n, -0.5, np.float32),
        kept_mass=np.ones(n, np.float32),
        versions=stamp,
        kv_versions=stamp,
    )


class ScriptedEngine:
    """Answers each poll with as many requests as the script says, in an order it chooses; then with silence."""

    version = 0
    capabilities = Capabilities(name="scripted", dtype="fp32", max_length=64)

    def __init__(self, script: Sequence[int], order: Callable[[list[Request]], list[Request]] = list) -> None:
        self.script, self.order = list(script), order
        self.requests: list[Request] = []
        self.interrupted = False

    def submit(self, requests: Sequence[Request]) -> None:
        self.requests += self.order(list(requests))

    def poll(self, timeout_s: float) -> list[Segment]:
        if self.interrupted:  # one at a time, as worker processes report
            count, status = 1, Status.INTERRUPTED
        else:
            count, status = (self.script.pop(0) if self.script else 0), Status.FINISHED
        now, self.requests = self.requests[:count], self.requests[count:]
        if not now and self.requests:
            time.sleep(min(timeout_s, 0.01))
        return [Segment(request_id=r.id, span=span_of(self.answer(r)), status=status) for r in now]

    def answer(self, request: Request) -> list[int]:
        return [8 + request.id % 200, EOS]

    def interrupt(self, ids: Sequence[int] | None = None) -> None:
        assert ids is None
        self.interrupted = True

    def update_weights(self, update: WeightUpdate) -> Proof:
        raise AssertionError("nobody publishes here")

    def close(self) -> None:
        self.requests.clear()


def prompts_of(count: int, task: str = "toy") -> list[Prompt]:
    return [
        Prompt(
            id=f"p{i}", index=i, text=f"{i}?", token_ids=np.array([8 + i]), answer=str(i), grader=GraderSpec(name="exact"), task=task,
        )
        for i in range(count)
    ]  # fmt: skip


def test_issue_numbers_rollouts_by_group_alone() -> None:
    engine = ScriptedEngine([])
    assert isinstance(engine, Engine)
    out = issue(prompts_of(3), 2, SAMPLING, 10, engine)
    assert [(r.id, r.group, r.member) for r in out] == [(20, 10, 0), (21, 10, 1), (22, 11, 0), (23, 11, 1), (24, 12, 0), (25, 12, 1)]  # fmt: skip
    assert [r.prompt.index for r in out] == [0, 0, 1, 1, 2, 2]
    assert {(r.engine, r.dtype, r.status, len(r.span)) for r in out} == {("scripted", "fp32", Status.PARKED, 0)}


@pytest.mark.parametrize("order", [list, lambda r: r[::-1], lambda r: sorted(r, key=lambda q: (q.id * 7) % 12)])
@pytest.mark.parametrize("script", [[12], [1] * 12, [0, 5, 0, 0, 7]])
def test_order_of_arrival_does_not_matter(order: Callable, script: list[int]) -> None:
    engine = ScriptedEngine(script, order)
    issued = issue(prompts_of(4), 3, SAMPLING, 0, engine)
    done = collect(engine, issued, TOKENIZER, deadline_s=5)
    assert [(r.id, r.group, r.member, r.prompt.index) for r in done] == [(i, i // 3, i % 3, i // 3) for i in range(12)]
    for rollout in done:
        assert rollout.span.token_ids.tolist() == [8 + rollout.id, EOS]
        assert rollout.text == TOKENIZER.decode([8 + rollout.id])
        assert rollout.status is Status.FINISHED
        assert rollout.reward is None


def test_a_resumed_rollout_keeps_its_prefix_in_front() -> None:
    engine = ScriptedEngine([1])
    [rollout] = issue(prompts_of(1), 1, SAMPLING, 0, engine)
    part = replace(rollout, span=span_of([50, 51], version=3))
    [done] = collect(engine, [part], TOKENIZER, deadline_s=5)
    assert done.span.token_ids.tolist() == [50, 51, 8, EOS]
    assert done.span.versions.tolist() == [3, 3, 0, 0]
    assert done.text == TOKENIZER.decode([50, 51, 8])


def test_prefix_travels_with_the_request() -> None:
    engine = ScriptedEngine([0])
    [rollout] = issue(prompts_of(1), 1, SAMPLING, 0, engine)
    part = replace(rollout, span=span_of([50]))
    with pytest.raises(EngineFailure):
        collect(engine, [part], TOKENIZER, deadline_s=0.02)
    [request] = engine.requests
    assert request.prefix.token_ids.tolist() == [50]
    assert (request.id, request.sampling) == (0, SAMPLING)


def test_silence_beyond_the_deadline_names_what_is_missing() -> None:
    engine = ScriptedEngine([2, 0, 1])
    with pytest.raises(EngineFailure, match=r"scripted: nothing for .* waiting for 3 of 6 rollouts") as failed:
        collect(engine, issue(prompts_of(6), 1, SAMPLING, 0, engine), TOKENIZER, deadline_s=0.1)
    assert "\n" not in str(failed.value)


def test_a_slow_engine_that_still_answers_is_not_silent() -> None:
    """The deadline is the longest silence, not the whole time."""
    engine = ScriptedEngine([1, *[0] * 5] * 12)
    start = time.monotonic()
    done = collect(engine, issue(prompts_of(12), 1, SAMPLING, 0, engine), TOKENIZER, deadline_s=0.3)
    assert len(done) == 12
    assert time.monotonic() - start > 0.3


def test_stopping_empties_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect_module, "POLL_S", 0.02)
    engine = ScriptedEngine([2, 0, 0, 0])
    asked = iter([False, False, True])
    with pytest.raises(Interrupted):
        collect(engine, issue(prompts_of(6), 1, SAMPLING, 0, engine), TOKENIZER, deadline_s=5, should_stop=lambda: next(asked))  # fmt: skip
    assert engine.interrupted
    assert engine.requests == []


def test_a_finished_step_is_not_thrown_away_by_a_late_stop() -> None:
    engine = ScriptedEngine([2])
    done = collect(
        engine, issue(prompts_of(2), 1, SAMPLING, 0, engine), TOKENIZER, deadline_s=5, should_stop=lambda: True
    )
    assert len(done) == 2


def test_failures_come_back_as_data() -> None:
    class Failing(ScriptedEngine):
        def poll(self, timeout_s: float) -> list[Segment]:
            out = super().poll(timeout_s)
            return [
                replace(s, span=TokenSpan.empty(), status=Status.ENGINE_FAILURE, detail="worker 1 died")
                if s.request_id == 1
                else s
                for s in out
            ]

    engine = Failing([3])
    done = collect(engine, issue(prompts_of(3), 1, SAMPLING, 0, engine), TOKENIZER, deadline_s=5)
    assert [r.status for r in done] == [Status.FINISHED, Status.ENGINE_FAILURE, Status.FINISHED]
    assert (done[1].detail, done[1].text, len(done[1].span)) == ("worker 1 died", "", 0)


def _bad_logprob(span: TokenSpan, value: float) -> TokenSpan:
    return replace(span, logprobs=np.array([-0.5, value], np.float32))


IMPOSSIBLE = {
    "a log-prob that is not a number": (lambda s: [replace(s, span=_bad_logprob(s.span, np.nan))], "got nan at position 1"),
    "a positive log-prob": (lambda s: [replace(s, span=_bad_logprob(s.span, 0.5))], "got 0.5 at position 1"),
    "twice": (lambda s: [s, s], "request 1: returned, but it is not in flight"),
    "never asked for": (lambda s: [replace(s, request_id=99)], "request 99: returned, but it is not in flight"),
    "behind a stop token": (lambda s: [replace(s, span=span_of([EOS, 8]))], f"request 1, position 2: went on behind the stop token {EOS}"),
    "more than was asked for": (lambda s: [replace(s, span=span_of([8] * 7))], "request 1, position 8: a token beyond the 8"),
    "of a version to come": (lambda s: [replace(s, span=span_of([8, EOS], version=1))], "request 1, position 2: sampled by version 1, but the newest"),
    "no token": (lambda s: [replace(s, span=span_of([-1, EOS]))], "request 1, position 2: token id -1"),
    "interrupted by nobody": (lambda s: [replace(s, status=Status.INTERRUPTED)], "request 1: interrupted, which nobody asked for"),
    "without the facts of its prefix": (lambda s: [replace(s, span=replace(s.span, experts=np.zeros((2, 1, 1), np.int16)))], "request 1: TokenSpan.append: one part carries experts"),
}  # fmt: skip


@pytest.mark.parametrize("what", IMPOSSIBLE)
def test_an_engine_that_tells_the_impossible_is_one_line_with_its_request_and_position(what: str) -> None:
    """These were tracebacks, or trained on."""
    make, message = IMPOSSIBLE[what]

    class Lying(ScriptedEngine):
        def poll(self, timeout_s: float) -> list[Segment]:
            return [told for s in super().poll(timeout_s) for told in (make(s) if s.request_id == 1 else [s])]

    engine = Lying([3])
    issued = [replace(r, span=span_of([50, 51])) for r in issue(prompts_of(3), 1, SAMPLING, 0, engine)]
    with pytest.raises(EngineFailure) as failed:
        collect(engine, issued, TOKENIZER, deadline_s=5)
    assert str(failed.value).startswith("engine scripted: ")
    assert message in str(failed.value)
    assert "\n" not in str(failed.value)
    assert failed.value.exit_code == 3


@pytest.mark.parametrize(
    ("ids", "kept"),
    [
        ([70, 71, EOS], [70, 71]),
        ([70, EOS, 71], [70, EOS, 71]),
        ([70, EOS, EOS], [70, EOS]),
        ([EOS], []),
        ([], []),
        ([70, 7], [70, 7]),
        ([5, 70, 0, 9], [5, 70, 0, 9]),
    ],
)
def test_decode_strips_the_trailing_stop_token_alone(ids: list[int], kept: list[int]) -> None:
    """Specials inside stay visible: a grader that does not see them would accept answers nobody would."""
    text = decode(np.array(ids, np.int64), (EOS,), TOKENIZER)
    assert text == "".join(TOKENIZER.decode([i], skip_special_tokens=False) for i in kept)
