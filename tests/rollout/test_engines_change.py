"""An engine more or fewer must cost the simulator what it costs the loop, or a plan made with the one fails in the other.

The real pool, rollout phase and dealing of requests over fake engines that sample one token a step, against the simulator with steps of one
second. Not covered: speeds of real engines, which a scenario's curve says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from test_budgeted_phase import Counting, graded, phase, pooled

from rollkeel.engines.parts import even_shares
from rollkeel.rollout.scenario import Lengths, load_scenario
from rollkeel.rollout.simulate import simulate
from rollkeel.types import Capabilities, Request, Segment


class Slots(Counting):
    """Decodes so many at a time; the others wait in order."""

    def __init__(self, lengths: Mapping[int, int], slots: int) -> None:
        super().__init__(lengths)
        self.slots, self.queue = slots, list[Request]()

    def submit(self, requests: Sequence[Request]) -> None:
        self.queue += requests

    def advance(self, steps: int) -> list[Segment]:
        if steps:
            for request in [self.queue.pop(0) for _ in range(min(len(self.queue), self.slots - len(self.flying)))]:
                self.flying[request.id] = request, 0
        return super().advance(steps)

    def interrupt(self, ids: Sequence[int] | None = None) -> None:
        self.flying |= {r.id: (r, 0) for r in self.queue}
        self.queue.clear()
        super().interrupt(ids)


class Several:
    """Engines side by side; requests are dealt as `PartedEngine` deals them."""

    def __init__(self, engines: Sequence[Slots]) -> None:
        self.engines, self.version = engines, 0
        self.capabilities = Capabilities(name="several", dtype="fp32", max_length=64, returns_experts=True)

    def submit(self, requests: Sequence[Request]) -> None:
        left = list(requests)
        loads = [len(e.flying) + len(e.queue) for e in self.engines]
        for engine, share in zip(self.engines, even_shares(loads, len(left)), strict=True):
            engine.submit([left.pop(0) for _ in range(share)])

    def advance(self, steps: int) -> list[Segment]:
        done = [segment for engine in self.engines for segment in engine.advance(steps)]
        return sorted(done, key=lambda segment: segment.request_id)

    def interrupt(self, ids: Sequence[int] | None = None) -> None:
        for engine in self.engines:
            engine.interrupt(ids)


CHANGES = {0: 2, 3: 4, 6: 1, 10: 3}


@pytest.mark.parametrize("seed", range(5))
def test_steps_of_the_loop_are_those_of_the_simulator_when_engines_come_and_go(seed: int) -> None:
    scenario = load_scenario(
        None,
        [
            "iterations=14", "warmup=0", "policies=[c3po]", "rollout.prompts=3", "rollout.samples=4", "lengths.median=8", f"seed={seed}",
            "lengths.max=16", "engine.engines=2", "engine.groups=2", "engine.slots=3", "engine.curve=[[1, 1], [1000, 1000]]",
            "engine.changes=[[3, 4], [6, 1], [10, 3]]", "c3po.budget=90", "c3po.retention=99", "train.tokens_s=1000000000",
        ],
    )  # fmt: skip
    (predicted,) = [result for result in simulate(scenario) if result.name == "c3po"]
    draws = Lengths(scenario.lengths, seed)
    lengths = {i: draws.of(i // 4, i) for i in range(1000)}
    state, seen = pooled(budget=90, capacity=6, retention=99, samples=4), []
    for step in range(scenario.iterations):
        count = [n for at, n in CHANGES.items() if at <= step][-1]
        part = phase(state, Several([Slots(lengths, 3) for _ in range(count)]))  # type: ignore[arg-type]
        seen.append((part.steps, sum(len(r.span) for r in state.settle(graded(part)))))
    assert seen == [(round(row.rollout_s, 6), row.trained) for row in predicted.rows]
    assert len({steps for steps, _ in seen}) > 5
