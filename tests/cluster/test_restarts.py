"""A run goes on `cluster.restarts` times after ranks were lost, wherever their state comes from, and not twice as often; what a rank
answers says what went wrong, also where its log has no room.

Ranks here are no actors. Not covered: real losses (tests/cluster/test_cluster_runs.py), other budgets.
"""

from __future__ import annotations

import errno
import io
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from rollkeel.cluster.calls import Ranks
from rollkeel.cluster.kept import KeptRanks
from rollkeel.cluster.ranks import Rank
from rollkeel.config import ClusterConfig, Config
from rollkeel.errors import RankLost, RunStopped
from rollkeel.loop import job
from rollkeel.loop.machines import Restarts


@pytest.mark.parametrize("kept", [(), ("first",), ("second",), ("first", "second", "third", "fourth")])
@pytest.mark.parametrize("states_lost", [False, True])
def test_restarts_from_memory_and_from_a_checkpoint_have_one_budget(
    kept: tuple[str, ...], states_lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`kept`: attempts whose ranks have left their states in memory; `states_lost`: which are then not to be had."""

    def gather(self: Ranks, what: str, *args: Any, **about: Any) -> list[Any]:
        if what == "update":
            raise RankLost("trainer rank 1 died; resume the run")
        if what == "take" and states_lost:
            raise RunStopped("its owner has died")
        return []

    monkeypatch.setattr(Ranks, "gather", gather)
    restarts, begun, attempts = Restarts(3), list[str](), iter(("first", "second", "third", "fourth"))

    def start() -> list[Any]:
        begun.append("begun")
        return []

    ranks = KeptRanks(start, lambda: None, lambda said: None, restarts)

    def attempt(*_: Any) -> None:
        if (name := next(attempts)) != "first":
            ranks.begin_from_nothing()
        ranks._kept = [name] if name in kept else []
        ranks.gather("update")

    monkeypatch.setattr(job, "_begin", attempt)
    monkeypatch.setattr(job, "_resume", attempt)
    monkeypatch.setattr(job, "Restarts", lambda left: restarts)
    quiet = SimpleNamespace(note=lambda line: None, emit=lambda *a, **k: None)
    folder: Any = SimpleNamespace(events=quiet)
    config = Config(cluster=ClusterConfig(restarts=3))
    with pytest.raises(RankLost):
        job._until_done(config, folder, quiet, lambda: False, fresh=True)  # type: ignore[arg-type]
    tried = (
        len({*kept} - {"fourth"}) * states_lost
    )  # a restart whose states were lost is no restart: a checkpoint takes over
    assert len(begun) == 1 + 3 + tried
    assert restarts.left == 0


class FullDisk(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_log_on_a_full_disk_does_not_hide_what_went_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = OSError(errno.ENOSPC, "No space left on device", "checkpoints/step_000001")

    def save(folder: str) -> None:
        raise wrong

    monkeypatch.setattr(sys, "stderr", FullDisk())
    rank: Any = SimpleNamespace(_save=save)
    assert Rank.run(rank, "save", "checkpoints") == (None, wrong)
