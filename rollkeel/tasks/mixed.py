"""Several sources of prompts in given shares: which source a group is of, and which of its prompts.

A *slot* is a position in the run's order of prompts. It is filled when somebody first asks for it, and stays as it is: what
filled it is part of the checkpoint, so that a rollout that waits (in a pool, in a queue) keeps its prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np

from rollkeel.config_data import SourceConfig
from rollkeel.errors import BadInput
from rollkeel.tasks.base import keyed_rng
from rollkeel.tasks.source import Problem, Problems
from rollkeel.types import Rollout

PASSED_OVER = 0.75
"""Share of prompts outside the band that `draw=pass_rate` passes over: they may change, so a quarter of them is asked again."""


def due(shares: Sequence[float], counts: Sequence[int]) -> int:
    """The source of the next group after `counts` groups of each. Shares sum to 1.

    Earliest deadline among those that may (Tijdeman, The chairman assignment problem, 1980): after any number of groups no
    source is a whole group away from its share.
    """
    slack = 1 / max(2 * len(shares) - 2, 1)
    total = sum(counts) + 1
    chosen, first = 0, float("inf")
    for number, share in enumerate(shares):
        owed = share * total - counts[number]
        deadline = (1 - slack - owed) / share
        if owed >= slack - 1e-9 and deadline < first:
            chosen, first = number, deadline
    return chosen


@final
class MixedProblems(Problems):
    """The problems of several sources, interleaved by their shares."""

    name, size = "sources", None

    def __init__(self, sources: Sequence[SourceConfig], parts: Sequence[Problems], seed: int) -> None:
        """Raises `BadInput` where prompts have no value by which they would be drawn."""
        self.parts = tuple(parts)
        self._sources = tuple(sources)
        self._seed = seed
        whole = sum(source.share for source in sources)
        self._shares = [source.share / whole for source in sources]
        for source, part in zip(sources, parts, strict=True):
            known = part.problem(0).metadata if source.draw == "pass_rate" else {source.draw_by: 0}
            if source.draw_by not in known:
                raise BadInput(
                    f"data.sources {source.name!r}: draw_by={source.draw_by} is nothing that its prompts have; expected one of"
                    f" {', '.join(sorted(known)) or 'nothing: set draw=uniform'}"
                )
        self._fill_anew([])
        self._trained = [0] * len(parts)
        self._back, self._back_now = [0] * len(parts), [0] * len(parts)
        """Slots of each source whose groups were of no use, up to the last step and in this one: they count as not taken."""
        self._rewards: list[dict[str, float]] = [{} for _ in parts]
        """Mean reward of alike prompts in the last step that had any."""

    def problem(self, index: int) -> Problem:
        source, place = self._at(index)
        return self.parts[source].problem(place)

    def response(self, index: int, label_noise: float) -> str:
        source, place = self._at(index)
        return self.parts[source].response(place, label_noise)

    def source(self, index: int) -> str:
        return self.parts[self.number(index)].name

    def number(self, index: int) -> int:
        """Which source the slot is of."""
        return self._at(index)[0]

    def _at(self, index: int) -> tuple[int, int]:
        while len(self._filled) <= index:
            self._fill(due(self._shares, self._counted()))
        return self._filled[index]

    def _counted(self) -> list[int]:
        return [taken - back - now for taken, back, now in zip(self._taken, self._back, self._back_now, strict=True)]

    def _fill_anew(self, filled: Sequence[tuple[int, int]]) -> None:
        """Source, and place in it, of every slot so far; of each source how many slots, and the place behind the last."""
        self._filled = list(filled)
        self._taken = [0] * len(self.parts)
        self._next = [0] * len(self.parts)
        for source, place in filled:
            self._taken[source] += 1
            self._next[source] = place + 1

    def _fill(self, source: int) -> None:
        place = self._next[source]
        while self._passed_over(source, place):
            place += 1
        self._filled.append((source, place))
        self._taken[source] += 1
        self._next[source] = place + 1

    def _passed_over(self, source: int, place: int) -> bool:
        about, rewards = self._sources[source], self._rewards[source]
        if about.draw == "uniform" or not rewards:
            return False
        low, high = about.band
        reward = rewards.get(str(self.parts[source].problem(place).metadata[about.draw_by]))
        if reward is None or low < reward < high:
            return False
        return keyed_rng("passed over", self._seed, about.name, place).random() < PASSED_OVER

    def observe(self, rollouts: Sequence[Rollout]) -> None:
        """What a step's rollouts say about prompts like theirs."""
        for number, about in enumerate(self._sources):
            found: dict[str, list[float]] = {}
            for r in rollouts if about.draw == "pass_rate" else ():
                if r.reward is not None and r.prompt.task == about.name:
                    found.setdefault(str(r.prompt.metadata[about.draw_by]), []).append(r.reward)
            for key, rewards in found.items():
                self._rewards[number][key] = float(np.mean(rewards))

    # -- for dynamic sampling, which asks for the groups that were of no use again ----------------------------------------

    def wanted(self, groups: int) -> list[int]:
        """Sources of the next `groups` groups to train on; one that could not fill its groups gets them again."""
        counts, chosen = list(self._trained), list[int]()
        for _ in range(groups):
            chosen.append(due(self._shares, counts))
            counts[chosen[-1]] += 1
        return chosen

    def assign(self, first: int, sources: Sequence[int]) -> None:
        """Fill the slots from `first` on with these sources."""
        if len(self._filled) > first:  # a step that was interrupted, or prompts that were looked at before the first
            self._fill_anew(self._filled[:first])
        for source in sources:
            self._fill(source)

    def trained(self, groups: Mapping[int, int], asked: int) -> None:
        """So many groups of each source were trained in a step of `asked`. What a source owes beyond a quarter of its share of a
        step, or one group, is forgotten: one that has nothing left to teach must not take the place of the others."""
        counts = [count + groups.get(n, 0) for n, count in enumerate(self._trained)]
        self._trained = [max(pair) for pair in zip(counts, self._least(counts, asked), strict=True)]

    def _least(self, counts: Sequence[int], asked: int) -> list[int]:
        """What sources with `counts` groups count as at least."""
        return [int(share * sum(counts) - max(1, share * asked / 4)) for share in self._shares]

    # -- for dynamic sampling with a pool, whose next group begins while others are under way ------------------------------

    def begin(self, consumed: int) -> None:
        """A step begins behind `consumed` slots. Others were only looked at, or are of the same step, which was interrupted."""
        self._fill_anew(self._filled[:consumed])
        self._back_now = [0] * len(self.parts)

    def useless(self, rollouts: Sequence[Rollout]) -> None:
        """Groups that are not trained: the next slots are of their sources."""
        names = {source.name: number for number, source in enumerate(self._sources)}
        for task in {r.group: r.prompt.task for r in rollouts}.values():
            self._back_now[names[task]] += 1

    def end(self, trained: int) -> None:
        """The step trained so many groups. What a source owes is forgotten as in `trained`."""
        self._back = [back + now for back, now in zip(self._back, self._back_now, strict=True)]
        self._back_now = [0] * len(self.parts)
        counts = self._counted()
        least = self._least(counts, trained)
        self._back = [back - max(0, few - count) for back, few, count in zip(self._back, least, counts, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        """For `train.state.save_state`."""
        filled = np.array(self._filled, np.int64).reshape(-1, 2)
        names = [source.name for source in self._sources]
        return {
            "names": names,
            "filled": filled,
            "trained": self._trained,
            "back": self._back,
            "rewards": self._rewards,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self._fill_anew([(int(source), int(place)) for source, place in np.asarray(state["filled"])])
        self._trained = [int(count) for count in state["trained"]]
        self._back = [int(count) for count in state.get("back", [0] * len(self.parts))]
        self._rewards = [dict(rewards) for rewards in state["rewards"]]
