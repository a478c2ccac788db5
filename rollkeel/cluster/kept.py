"""Ranks that begin again by themselves when one of them is lost: what each held after the last publication lies in memory.

    publication ─▶ every rank leaves its state in the object store of its node, the next rank's node gets a copy
         │
         ├─▶ score, update, … are noted ─✗ a rank is lost
         ▼                                ▼
       dropped at the next one        new ranks take the state, do again what was noted, and then what was asked

The store is Ray's and the controller owns what lies there, so that it outlives the ranks. Engines, Ray and the loop notice nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from rollkeel.cluster.calls import Ranks
from rollkeel.cluster.pulse import CONTROL
from rollkeel.errors import EngineFailure, RankLost, RunStopped
from rollkeel.loop.machines import Restarts

DONE_AGAIN = ("score", "ref_logprobs", "update")
"""Calls that leave something in a rank."""
SHARE = 0.5
"""Most of the object store for states: those of the last publication and of the one before, while they are written."""


class BegunAgain(EngineFailure):
    """A publication broke off because a rank was lost; there are new ones, that can make it from its beginning."""


class KeptRanks(Ranks):
    """`Ranks` whose calls go on with others after `RankLost`, as long as `restarts` are left."""

    def __init__(
        self,
        start: Callable[[], Sequence[Any]],
        meet: Callable[[], None],
        tell: Callable[[tuple[Any, ...]], None],
        restarts: Restarts,
    ) -> None:
        """`start`: actors in the places of the ranks; `meet`: has them meet, once they have started; `restarts`: spent here and by who
        begins again from a checkpoint."""
        super().__init__(start(), tell)
        self._start = start
        self._meet = meet
        self._restarts = restarts
        self.nodes = list[str]()
        """Of the ranks, as Ray names them, once they are known."""
        self._fixed, self._kept = list[Any](), list[Any]()
        """Every rank's state: what no step changes, and the rest."""
        self._next: tuple[Any, ...] | None = None
        """The same that is being written: whether it is, both, and how many of the noted calls are in it."""
        self._noted = list[tuple[Any, ...]]()
        self._renewing = False

    def room(self, state_bytes: int) -> bool:
        """Whether the nodes of the ranks have memory for states of so many bytes each, twice and with copies."""
        nodes = {n["NodeID"]: n["Resources"].get("object_store_memory", 0.0) for n in ray.nodes() if n["Alive"]}
        copies = 2 if len(set(self.nodes)) > 1 else 1
        most = max(self.nodes.count(node) * state_bytes / (SHARE * nodes.get(node, 0.0) or 1.0) for node in self.nodes)
        return 2 * copies * most <= 1.0

    def keep(self) -> None:
        """Have the ranks leave their states behind what they were told so far; nobody waits for it. The one before is held until then."""
        self._settle()
        made = [actor.keep.options(num_returns=3).remote(not self._fixed) for actor in self.actors]
        self._next = *(list(refs) for refs in zip(*made, strict=True)), len(self._noted)
        for rank, (_, *state) in enumerate(made):
            other = next((r for r in range(rank + 1, rank + len(made)) if self._node(r) != self._node(rank)), None)
            if other is not None:
                self.actors[other % len(made)].hold.options(concurrency_group=CONTROL).remote(rank, *state)

    def begin_from_nothing(self) -> None:
        """New ranks that have met, and know nothing."""
        self._fixed = []
        self._kept = []
        self._noted = []
        self._renew()

    def gather(self, what: str, *args: Any, **about: Any) -> list[Any]:
        while True:
            try:
                answers = super().gather(what, *args, **about)
                break
            except RankLost as lost:
                if not self._again(str(lost).partition("; resume")[0]):
                    raise
                if what == "stream":
                    raise BegunAgain(f"{lost}") from None
        if what in DONE_AGAIN and not self._renewing:
            self._noted.append((what, *args))
        return answers

    def _node(self, rank: int) -> str:
        return self.nodes[rank % len(self.nodes)]

    def _settle(self, timeout_s: float = 0.0) -> None:
        """Drop the older state if the newer one is whole."""
        if self._next is None:
            return
        written, kept, fixed, calls = self._next
        if len(ray.wait(written, num_returns=len(written), timeout=timeout_s)[0]) < len(written):
            return
        self._next = None
        try:
            if not all(ray.get(written)):
                return
        except RayError:
            return  # a rank died before: the older one holds
        self._fixed = self._fixed or fixed
        self._kept = kept
        self._noted = self._noted[calls:]

    def _again(self, why: str) -> bool:
        """Begin again with new ranks; whether there are some."""
        if self._renewing:
            return False
        self._settle(timeout_s=1.0)
        began, self._renewing = time.monotonic(), True
        try:
            while self._restarts.left and self._kept:
                self._restarts.left -= 1
                try:
                    self._begin_anew()
                except RankLost:
                    continue
                except RunStopped as error:  # the states were lost, too, so that nobody has begun again
                    self._restarts.left += 1
                    self._tell(("events", "emit", ("states_lost",), {"reason": str(error)}))
                    return False
                about = {"reason": why, "seconds": round(time.monotonic() - began, 3), "calls": len(self._noted)}
                self._tell(("events", "emit", ("ranks_restarted",), about))
                self._tell(("view", "note", (f"{why}; the ranks began again in {about['seconds']:.1f} s",), {}))
                return True
            return False
        finally:
            self._renewing = False

    def _renew(self) -> None:
        self.close()
        self.pids, self.nodes = [], []
        self.actors, self._asked = list(self._start()), [None] * len(self.names)
        self.failed = ""
        self._gone = False
        self._next = None
        self._meet()

    def _begin_anew(self) -> None:
        self._renew()
        super().gather("load")
        super().gather("begin")
        super().gather("take", self._fixed, self._kept)
        for what, *args in self._noted:
            super().gather(what, *args)
