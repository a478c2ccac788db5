"""RL whose rewards come from the sandbox, by hidden tests or a judge: a server that dies in the middle must cost time and nothing else.

A run graded by a `rollkeel-sandbox serve` that is killed with force and started again all the time, against one with sandboxes of
its own: the same metrics, rewards, details and weights, bit for bit. Not covered: how well such a run learns (rollkeel/recipes/programs.yaml,
rollkeel/recipes/game24.yaml).
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tiny_run import TINY, rows, weights

from rollkeel.loop.job import train
from rollkeel.recipe import load
from rollkeel.record.rollout_store import read_step
from rollkeel.record.runfolder import rollout_files
from rollkeel_sandbox import Level, probe

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(probe().plan(()).level < Level.RESTRICTED, reason="no isolation can be had here"),
]
STEPS = 8
WORDS = [
    *(word for word in TINY if not word.startswith("data.")),
    "sampling.max_new_tokens=12",
    "sft.steps=200",
    f"run.steps={STEPS}",
    "eval.every=0",
    "checkpoint.every=0",
    "reward.graders.sandbox_level=restricted",
]
FAMILIES = {
    "programs": ["data.options.level=1"],
    "game24": ["data.options={cards: 3, max_card: 12, target: 12, sandbox: true}"],
}


def rewarded(run: Path) -> list[tuple[float, str]]:
    """Of every rollout: its reward and what the grader said."""
    found: list[tuple[float, str]] = []
    for _, path in rollout_files(run):
        table = read_step(path)
        found += zip(table["reward"].to_pylist(), table["detail"].to_pylist(), strict=True)
    return found


def kills_until(over: threading.Event, server: Any) -> list[float]:
    """Kills the server a second and a half after it answers, and starts it, until told to stop; when it did."""
    at = []
    while not over.wait(1.5):
        server.kill()
        at.append(time.time())
        server.start()
    return at


@pytest.mark.parametrize("family", FAMILIES)
def test_killing_the_server_all_the_time_changes_nothing(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fastapi")
    monkeypatch.syspath_prepend(Path(__file__).parent / "sandbox")
    from service_host import TOKEN, Server  # pyright: ignore[reportMissingImports]

    words = [*WORDS, f"data.task={family}", *FAMILIES[family]]
    here = train(load(None, [*words, f"run.dir={tmp_path / 'here'}"]))
    monkeypatch.setenv("ROLLKEEL_SANDBOX_TOKEN", TOKEN)
    server, over, kills = Server(tmp_path, "--minimum", "restricted"), threading.Event(), []
    killer = threading.Thread(target=lambda: kills.extend(kills_until(over, server)))
    remote = [f"reward.graders.sandbox={server.url}"]
    killer.start()
    try:
        there = train(load(None, [*words, *remote, f"run.dir={tmp_path / 'there'}"]))
    finally:
        over.set()
        killer.join()
        server.close()
        sys.modules.pop("service_host", None)
    times = [path.stat().st_mtime for _, path in rollout_files(there)]
    assert sum(times[0] < at < times[-1] for at in kills) >= 3, "all was over before the server was killed"
    assert rewarded(there) == rewarded(here)
    assert len({reward for reward, _ in rewarded(here)}) == 2
    assert rows(there) == rows(here)
    assert weights(there) == weights(here)
    assert all(row["failures/grader"] == 0 for row in rows(there)[1:])
