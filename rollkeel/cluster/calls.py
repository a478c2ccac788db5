"""Calls from the controller to all ranks: each with the same arguments, until all have answered or the first has failed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, OutOfMemoryError, RayActorError, RayError

from rollkeel.cluster import logs
from rollkeel.cluster.patience import Patience
from rollkeel.cluster.pulse import CONTROL
from rollkeel.errors import RankLost, RunStopped

BEAT_S = 1.0
"""Between two questions to a rank whether it lives, while it computes."""
SILENT_S = 30.0
"""A rank that answers none of them for so long counts as stopped; less once it is known how long it takes, see `Patience`."""
GRACE_S = 2.0
"""For the other ranks to tell their error, after the first has told one."""


class Ranks:
    """Handles of the trainer's ranks, in order. After an error nothing more can be called: ranks may wait for each other."""

    def __init__(self, actors: Sequence[Any], tell: Callable[[tuple[Any, ...]], None]) -> None:
        """`tell`: is given what a rank says while it computes."""
        self.actors, self._tell = list(actors), tell
        self.pids = list[int]()
        """Processes of the ranks, once they are known."""
        self._patience = dict[str, Patience]()
        self.names = [f"trainer rank {i}" for i in range(len(actors))]
        """As messages call them; nodes are added when they are known."""
        self.failed = ""
        self.doing = ""
        self._gone = False
        self._heard = [0.0] * len(actors)
        self._asked: list[Any] = [None] * len(actors)

    def call(self, what: str, *args: Any, stop: Callable[[], bool] = lambda: False) -> Any:
        """`Rank.run(what, *args)` on all ranks; the first rank's answer. `stop`: asked while they compute; they are told.

        Raises the first error of a rank, and `RunStopped` naming a rank that died or fell silent."""
        return self.gather(what, *args, stop=stop)[0]

    def first(self, what: str, *args: Any, stop: Callable[[], bool] = lambda: False) -> Any:
        """The same on the first rank alone."""
        return self.gather(what, *args, ranks=[0], stop=stop)[0]

    def gather(
        self,
        what: str,
        *args: Any,
        ranks: Sequence[int] | None = None,
        stop: Callable[[], bool] = lambda: False,
        patience_s: float = 0.0,
    ) -> list[Any]:
        """The same with the answers of all. `patience_s`: of ranks that have to start first."""
        if self.failed:
            kind = RankLost if self._gone else RunStopped
            raise kind(f"{self.failed}; resume the run with rollkeel train --resume")
        asked = range(len(self.actors)) if ranks is None else ranks
        self.doing = what
        waiting = {self.actors[i].run.remote(what, *args): i for i in asked}
        answers: dict[int, Any] = {}
        errors: list[Exception] = []
        self._heard, end = [time.monotonic()] * len(self.actors), float("inf")
        while waiting and time.monotonic() < end:
            done, _ = ray.wait(list(waiting), num_returns=1, timeout=GRACE_S if errors else BEAT_S)
            for ref in done:
                rank = waiting.pop(ref)
                answers[rank], error = self._answer(rank, ref, what)
                errors += [error] if error is not None else []
            if errors and end == float("inf"):
                end = time.monotonic() + GRACE_S
            if not done and not errors:
                self._look(list(waiting.values()), what, stop(), patience_s)
        self._drain(asked)
        self.doing = ""
        if errors:
            self.failed = self.failed or f"{what} failed on the ranks"
            # A rank whose neighbour died tells of a broken connection; the death says more.
            raise next((e for kind in (RankLost, RunStopped) for e in errors if isinstance(e, kind)), errors[0])
        return [answers[i] for i in asked]

    def close(self) -> None:
        """End them."""
        for actor in self.actors:
            ray.kill(actor, no_restart=True)
        self.actors = []

    def _answer(self, rank: int, ref: Any, what: str) -> tuple[Any, Exception | None]:
        try:
            value, error = ray.get(ref)
        except (RayActorError, OutOfMemoryError) as died:
            return None, self._lost(f"{self.names[rank]} died while it did {what}: {reason(died)}")
        except RayError as broke:
            return None, RunStopped(f"{self.names[rank]}: {what}: {reason(broke)}")
        return value, error

    def _lost(self, why: str) -> RankLost:
        self.failed, self._gone = why, True
        self._tell(("events", "emit", ("actor_lost",), {"reason": why}))
        return RankLost(f"{why}; resume the run with rollkeel train --resume")

    def _look(self, ranks: Sequence[int], what: str, stop: bool, patience_s: float) -> None:
        """Ask ranks that compute whether they live. Raises `RankLost` for one that has been silent too long."""
        now = time.monotonic()
        patience = self._patience.setdefault(what, Patience(SILENT_S))
        for rank in ranks:
            if self._asked[rank] is not None and ray.wait([self._asked[rank]], timeout=0)[0]:
                self._say(rank)
                patience.heard(now - self._heard[rank])
                self._heard[rank] = now
            if self._asked[rank] is None:
                status = self.actors[rank].status.options(concurrency_group=CONTROL)
                self._asked[rank] = status.remote(stop)
            silent_s = max(patience.limit_s, patience_s)
            if now - self._heard[rank] > silent_s:
                why = logs.ask_for_stacks(self.pids)
                raise self._lost(f"{self.names[rank]} has said nothing for {silent_s:.3g} s while it did {what}{why}")

    def _say(self, rank: int) -> None:
        ref, self._asked[rank] = self._asked[rank], None
        try:
            for said in ray.get(ref):
                self._tell(said)
        except RayError:
            return  # it died: its call says so

    def _drain(self, ranks: Sequence[int]) -> None:
        """Hear what was said last."""
        for rank in ranks:
            if self._asked[rank] is None:
                continue
            if ray.wait([self._asked[rank]], timeout=GRACE_S)[0]:
                self._say(rank)
                status = self.actors[rank].status.options(concurrency_group=CONTROL)
                self._asked[rank] = status.remote()
                if ray.wait([self._asked[rank]], timeout=GRACE_S)[0]:
                    self._say(rank)


def reason(error: Exception) -> str:
    """What Ray says about it, in one line; of a process that ended without a word, who does that."""
    said = str(error)
    if "node has died" in said or isinstance(error, ActorUnavailableError):
        return f"{type(error).__name__}: its node, or the connection to it, was lost"
    if "connection error code 2" in said or isinstance(error, OutOfMemoryError):
        return (
            f"{type(error).__name__}: its process crashed or was killed (signal 9), as the kernel does when memory runs out: see its"
            " log and dmesg"
        )
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    told = next((one for one in lines if one.startswith(("The actor", "The node", "Worker"))), "".join(lines[:1]))
    return f"{type(error).__name__}" + (f" ({told[:160]})" if told else "")
