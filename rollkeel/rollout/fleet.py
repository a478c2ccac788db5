"""Engines as a simulator sees them: groups of engines that decode in step, and a speed curve. Nothing is done per token.

All sequences of a group advance together, one token per decode step. A group's clock counts its steps, so a sequence ends
when the clock has gone on by what was missing, whatever happened to the speed in between: one heap entry per stay.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from rollkeel.errors import BadInput

_ROUNDING = 1e-6
"""Steps; clocks are whole at every event of a single group, and within this of it otherwise."""


class Curve:
    """Tokens per second of one engine by the number of sequences it decodes together, linear between given points.

    Below the first point a decode step takes as long as there; beyond the last point the throughput stays what it is.
    Raises `BadInput` unless sequences ascend from ≥ 1 and speeds are positive.
    """

    def __init__(self, points: Sequence[Sequence[float]]) -> None:
        if not points or any(len(p) != 2 for p in points):
            raise BadInput(f"engine.curve: expected pairs [sequences, tokens_per_second], got {points!r}")
        self.sequences, self.speeds = (np.array(column, float) for column in zip(*points, strict=True))
        if not np.isfinite([self.sequences, self.speeds]).all() or self.sequences[0] < 1 or (self.speeds <= 0).any():
            raise BadInput(f"engine.curve: expected sequences ≥ 1 and speeds > 0, got {points!r}")
        if any(a >= b for a, b in pairwise(self.sequences)):
            raise BadInput(f"engine.curve: expected ascending numbers of sequences, got {self.sequences.tolist()}")

    @property
    def peak(self) -> float:
        """Highest tokens per second of one engine."""
        return float(self.speeds.max())

    @property
    def widest(self) -> float:
        """Number of sequences at which the peak is reached first."""
        return float(self.sequences[self.speeds.argmax()])

    def step_s(self, load: float) -> float:
        """Seconds of one decode step with `load` sequences per engine."""
        if load <= self.sequences[0]:
            return float(self.sequences[0] / self.speeds[0])
        return load / float(np.interp(load, self.sequences, self.speeds))


@dataclass
class _Group:
    clock: float = 0.0
    """Decode steps done."""
    at: float = 0.0
    """Time at which the clock was read; in the future while the group is stalled."""
    running: int = 0
    step_s: float = 0.0
    ends: list[tuple[float, int]] = field(default_factory=list)
    """Heap of (clock at which the sequence ends, id); entries of removed sequences are skipped."""
    waiting: deque[int] = field(default_factory=deque)
    """Sequences for which it has no slot yet."""


@dataclass(frozen=True)
class _Stay:
    group: int
    start: float
    tokens: int
    """Response tokens at admission."""
    length: int
    waits: bool = False


class Fleet:
    """`engines` (any positive number) in `groups`; new sequences go to the group with the fewest, inside one they are even.

    `prefill_tokens_s` is the speed of one engine at computing KV of tokens it did not just sample; 0 means it is free. `slots`: most
    sequences that one engine decodes together; the others of its group wait, in order.
    """

    def __init__(
        self, curve: Curve, engines: float, groups: int = 1, prefill_tokens_s: float = 0.0, slots: float | None = None
    ) -> None:
        self.now = 0.0
        self.busy = 0.0
        """Sequence-seconds so far: running sequences, summed over time."""
        self.trace: list[tuple[float, int]] | None = None
        """(time, running sequences) at every change, when a list."""
        self._generated = 0.0
        self._curve = curve
        self._size = engines / groups
        self._prefill = prefill_tokens_s
        self._slots = slots
        self._groups, self._whole = [_Group() for _ in range(groups)], groups == 1
        self._stays: dict[int, _Stay] = {}
        self._steps: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._stays)

    def __contains__(self, id: int) -> bool:
        return id in self._stays

    def admit(self, id: int, tokens: int, length: int, prefill: float = 0, beside_s: float = 0.0) -> None:
        """Start or resume a sequence of `tokens < length` tokens; its engine first computes KV of `prefill` tokens and is busy
        for `beside_s` with what else that takes."""
        load = [g.running + len(g.waiting) for g in self._groups] if len(self._groups) > 1 else [0]
        index = load.index(min(load))
        group = self._groups[index]
        self._read(group)
        self._stays[id] = _Stay(index, group.clock, tokens, length, waits=True)
        group.waiting.append(id)
        self._enter(group)
        group.at += (beside_s + (prefill / self._prefill if self._prefill else 0.0)) / self._size

    def remove(self, id: int) -> None:
        """Take a sequence out."""
        stay = self._stays.pop(id)
        group = self._groups[stay.group]
        self._read(group)
        if stay.waits:
            group.waiting.remove(id)
        else:
            self._resize(group, -1)
            self._enter(group)

    def resize(self, engines: float) -> dict[int, int]:
        """So many engines from now on: groups of engines come and go, or the only one has another size. Returns tokens of the sequences
        whose engines are gone; they are out."""
        for group in self._groups:
            self._read(group)
        if self._whole:
            count, going = 1, sorted(self._stays)[round(len(self._stays) * min(1.0, engines / self._size)) :]
            self._size = engines
            self._steps.clear()
            self._resize(self._groups[0], 0)
        else:
            count = max(1, round(engines / self._size))
            going = [id for id in sorted(self._stays) if self._stays[id].group >= count]
            self._groups += [_Group(at=self.now) for _ in range(count - len(self._groups))]
        tokens = self.tokens(going)
        for id in going:
            self.remove(id)
        del self._groups[count:]
        self._enter(self._groups[0])
        return tokens

    @property
    def engines(self) -> float:
        """How many there are now."""
        return self._size * len(self._groups)

    def clear(self) -> None:
        """Take all sequences out and forget what the groups were busy with."""
        self._stays.clear()
        for group in self._groups:
            self._read(group)
            group.ends.clear()
            group.waiting.clear()
            group.at, group.running = self.now, 0
        self._note()

    def stall(self, seconds: float) -> None:
        """All groups do nothing for so long, behind what already holds them up."""
        for group in self._groups:
            self._read(group)
            group.at += seconds

    def pause(self, seconds: float) -> None:
        """Time passes in which nothing is generated, and which does not count as busy."""
        self.stall(seconds)
        self.now += seconds

    def generated(self) -> float:
        """Tokens sampled so far, in all; parts of decode steps included."""
        for group in self._groups:
            self._read(group)
        return self._generated

    def next_end(self) -> float:
        """Time at which the next sequence ends; infinite when none runs."""
        return min(map(self._end_of, self._groups))

    def run_to(self, time: float) -> None:
        """Let time pass; no sequence may end before `time`."""
        self.busy += len(self._stays) * (time - self.now)
        self.now = time

    def finish_next(self) -> dict[int, int]:
        """Run until sequences end, in one decode step of one group: their ids and lengths, by id."""
        group = min(self._groups, key=self._end_of)
        self.run_to(self._end_of(group))
        self._set(group, group.ends[0][0])
        done: dict[int, int] = {}
        while group.ends and (group.ends[0][0] <= group.clock + _ROUNDING or group.ends[0][1] not in self._stays):
            _, id = heapq.heappop(group.ends)
            if id in self._stays:
                done[id] = self._stays.pop(id).length
        self._resize(group, -len(done))
        self._enter(group)
        return dict(sorted(done.items()))

    def tokens(self, ids: Iterable[int] | None = None) -> dict[int, int]:
        """Whole response tokens so far of the running sequences, by id."""
        clocks = [self._clock(group) for group in self._groups]
        found: dict[int, int] = {}
        for id in sorted(self._stays) if ids is None else ids:
            stay = self._stays[id]
            if stay.waits:
                found[id] = stay.tokens
                continue
            made = int(clocks[stay.group] - stay.start + _ROUNDING)
            found[id] = min(stay.length, stay.tokens + made)
        return found

    def when_generated(self, tokens: int) -> float:
        """Time at which so many more tokens will have been sampled if no sequence ends before.

        Exact (after the decode step that reaches them) for one group; with several, their mean speed is used.
        """
        if len(self._groups) == 1:
            group = self._groups[0]
            whole = -(-tokens // max(group.running, 1))
            return group.at + whole * group.step_s
        return self.now + tokens / sum(g.running / g.step_s for g in self._groups if g.running)

    def _enter(self, group: _Group) -> None:
        """Those that wait take slots that are free."""
        room = len(group.waiting)
        if self._slots is not None:
            room = max(0, math.ceil(self._slots * self._size - _ROUNDING) - group.running)
        for id in [group.waiting.popleft() for _ in range(min(room, len(group.waiting)))]:
            stay = replace(self._stays[id], start=group.clock, waits=False)
            self._stays[id] = stay
            heapq.heappush(group.ends, (group.clock + stay.length - stay.tokens, id))
            self._resize(group, 1)

    def _clock(self, group: _Group) -> float:
        return group.clock + max(0.0, self.now - group.at) / group.step_s if group.running else group.clock

    def _read(self, group: _Group) -> None:
        self._set(group, self._clock(group))

    def _set(self, group: _Group, clock: float) -> None:
        self._generated += group.running * (clock - group.clock)
        group.clock, group.at = clock, max(group.at, self.now)

    def _end_of(self, group: _Group) -> float:
        while group.ends and group.ends[0][1] not in self._stays:
            heapq.heappop(group.ends)
        return group.at + (group.ends[0][0] - group.clock) * group.step_s if group.ends else float("inf")

    def _resize(self, group: _Group, change: int) -> None:
        group.running += change
        if group.running and group.running not in self._steps:
            self._steps[group.running] = self._curve.step_s(max(1.0, group.running / self._size))
        group.step_s = self._steps[group.running] if group.running else 0.0
        self._note()

    def _note(self) -> None:
        if self.trace is not None:
            self.trace.append((self.now, len(self._stays)))
