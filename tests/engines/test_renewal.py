"""An engine that dies must cost time and nothing else: who takes its place comes to the same tokens, bit for bit, and answers once.

Parts that live in this process and die at any message or decode step, some of them again and again; the embedded engine decodes in
them. Not covered: real actors (tests/cluster/test_engines.py), deaths while weights arrive, requests that arrive while a part decodes
on its own, whose bits depend on when.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from engine_kit import drain, engine_of, facts_of, model_of, prompts_of, requests_of, run, same

from rollkeel.engines.messages import segments_out
from rollkeel.engines.part import Part, _answer, unknown
from rollkeel.engines.parts import PartedEngine
from rollkeel.errors import BadInput, EngineFailure, RankLost
from rollkeel.types import Segment, Status

MODEL = model_of()


class Inline:
    """What a part's process does, without a process; it ends when its fuse has burnt down."""

    def __init__(self, fuse: int) -> None:
        self.engine, self.fuse, self.free = engine_of(MODEL, slots=2), fuse, False
        self.said: deque[Any] = deque([("answer", self.engine.capabilities, 0)])

    def burn(self, error: type[Exception]) -> None:
        self.fuse -= 1
        if self.fuse < 0:
            raise error

    def hear(self, message: tuple[Any, ...]) -> None:
        self.burn(OSError)
        self.free = {"run": True, "advance": False}.get(message[0], message[2] if message[0] == "submit" else self.free)
        try:
            self.said.append(("answer", _answer(self.engine, message, lambda _, m: unknown(m)), self.engine.steps))
        except BadInput as error:
            self.said.append(("error", error, self.engine.steps))

    def say(self) -> Any:
        while not self.said:
            self.burn(EOFError)
            assert self.free, "waited for something that nobody says"
            assert self.engine.busy
            segments = self.engine.poll(0)
            self.free = self.engine.busy
            if segments:
                return "segments", segments_out(segments), self.engine.steps
        self.burn(EOFError)
        return self.said.popleft()


@dataclass(kw_only=True)
class InlinePart(Part):
    life: Inline
    deaths: int = field(default=0)

    def send(self, message: tuple[Any, ...]) -> None:
        self.life.hear(message)

    def ready(self, timeout_s: float) -> bool:
        return True

    def receive(self) -> Any:
        return self.life.say()

    def kill(self) -> None:
        self.life.fuse = 0

    def fate(self) -> str:
        self.deaths += 1
        return "died"


class InlineEngine(PartedEngine[InlinePart]):
    def __init__(self, fuses: Sequence[Sequence[int]], *, renews: bool = True) -> None:
        """`fuses`: of each part, those of the ones that follow each other; the last of them lives for ever."""
        super().__init__(MODEL.config.vocab_size, 60)
        self.lives = [deque([*fuse, 10**9]) for fuse in fuses]
        self.renews, self._hands_over = renews, not renews
        self.parts = [
            InlinePart(i, f"part {i}", life=Inline(lives.popleft() + 1)) for i, lives in enumerate(self.lives)
        ]
        assert self.capabilities
        self._version = 0

    def _wait(self, parts: Sequence[InlinePart], timeout_s: float) -> Sequence[InlinePart]:
        return parts

    def _may_renew(self, part: InlinePart) -> bool:
        return self.renews and bool(self.lives[part.index])

    def _renew(self, part: InlinePart) -> None:
        part.life, part.dead = Inline(self.lives[part.index].popleft() + 1), ""
        self._answers([part], 60, "to start")


def script(engine: InlineEngine, seed: int) -> tuple[dict[Any, tuple[Any, ...]], list[Any]]:
    """Three phases that end with nothing in flight. Every segment, and what was told of steps and progress."""
    draw, got, told, first = random.Random(seed), dict[Any, tuple[Any, ...]](), list[Any](), 0

    def keep(segments: Sequence[Segment]) -> None:
        for segment in segments:
            assert (first, segment.request_id) not in got, "a request was answered twice"
            got[(first, segment.request_id)] = facts_of(segment)

    for _ in range(3):
        count = draw.randint(2, 7)
        requests = requests_of(prompts_of(count, first), first, max_new_tokens=draw.randint(4, 20), seed=seed)
        mine = draw.randint(0, count)
        engine.submit(requests, [mine, count - mine])
        for _ in range(draw.randint(0, 4)):
            keep(engine.advance_each([draw.randint(1, 6), draw.randint(1, 6)]))
            told += [engine.steps, engine.progress()] if draw.random() < 0.7 else []
        if draw.random() < 0.3:
            engine.interrupt()
        while segments := engine.poll(1):
            keep(segments)
        told.append(engine.steps)
        first += count
    return got, told


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(i, marks=pytest.mark.slow) for i in range(3, 20))])
def test_whatever_dies_whenever_the_bits_are_those_of_an_undisturbed_run(seed: int) -> None:
    whole = script(InlineEngine([(), ()]), seed)
    draw, deaths = random.Random(seed), 0
    for _ in range(4):
        engine = InlineEngine([[int(draw.expovariate(1 / 12)) for _ in range(draw.randint(0, 3))] for _ in range(2)])
        assert script(engine, seed) == whole
        deaths += sum(part.deaths for part in engine.parts)
    assert deaths >= 2


def test_who_cannot_be_replaced_for_another_s_death_is_not_tried_again() -> None:
    """The weights are gone with a rank of the trainer: the run must hear of that, and begin again."""
    engine, tried = InlineEngine([[4, 4, 4], []]), list[int]()

    def renew(part: InlinePart) -> None:
        tried.append(part.index)
        raise RankLost("trainer rank 1 died")

    engine._renew = renew  # type: ignore[method-assign]
    engine.submit(requests_of(prompts_of(4), max_new_tokens=30, seed=3))
    with pytest.raises(RankLost, match="rank 1"):
        drain(engine)
    assert tried == [0]


def test_others_take_over_what_nobody_can_do_again() -> None:
    requests = requests_of(prompts_of(6), max_new_tokens=12, seed=3)
    alone = run(engine_of(MODEL, slots=2), requests)
    for fuse in range(0, 24, 3):
        engine = InlineEngine([[fuse], []], renews=False)
        engine.submit(requests)
        got = dict[int, Segment]()
        while segments := engine.poll(1):
            got |= {s.request_id: s for s in segments}
        assert engine.parts[0].dead == "part 0 died" or fuse > 15
        assert got.keys() == alone.keys()
        assert all(same(got[i].span, alone[i].span) and got[i].status == alone[i].status for i in alone)


def test_the_last_one_s_requests_fail_by_name() -> None:
    engine = InlineEngine([[6], [6]], renews=False)
    engine.submit(requests_of(prompts_of(4), max_new_tokens=30, seed=3))
    got = list[Segment]()
    while segments := engine.poll(1):
        got += segments
    assert {s.status for s in got if s.status is Status.ENGINE_FAILURE} == {Status.ENGINE_FAILURE}
    assert len({s.request_id for s in got}) == 4
    assert "died" in next(s.detail for s in got if s.status is Status.ENGINE_FAILURE)
    with pytest.raises(EngineFailure, match=r"no part is left \(part 0 died; part 1 died\)"):
        engine.submit(requests_of(prompts_of(1), 9, max_new_tokens=2))
