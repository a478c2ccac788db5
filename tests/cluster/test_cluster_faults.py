"""Whatever dies, the run says so, leaves nothing that computes, and goes on to the same end.

Matters because a cluster loses machines: a resumed run that differs from the undisturbed one would be another experiment. Real
processes, killed with SIGKILL, each in a Ray of its own or in one of two nodes on this host. Minutes long. Not covered: a network that is
cut, several hosts, storage that is lost.
"""

from __future__ import annotations

import functools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from cluster_kit import TINY, TWO, assert_audited, kill_when, pid_of, run_of, tokens
from tiny_run import assert_same, events, rows, wait_for, weights

from rollkeel.errors import RunStopped
from rollkeel.loop.job import train
from rollkeel.recipe import load

pytestmark = pytest.mark.slow
DEADLINE_S = 300.0


def begin(*words: str | Path) -> subprocess.Popen[str]:
    """`rollkeel train` as a terminal starts it: the first of a process group of its own."""
    command = [sys.executable, "-m", "rollkeel", "train", *map(str, words)]
    return subprocess.Popen(
        command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def living(pids: list[int]) -> list[int]:
    def lives(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
        except OSError:
            return False

    return [pid for pid in pids if lives(pid)]


def assert_gone(run: Path) -> None:
    """No actor of the run computes any more."""
    pids = [e["pid"] for e in events(run) if e["event"] == "actor"]
    end = time.monotonic() + 20
    while living(pids) and time.monotonic() < end:
        time.sleep(0.1)
    assert pids
    assert living(pids) == []


def finished(run: Path) -> None:
    process = begin("--resume", run)
    _, err = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, err) == (0, "")
    assert_gone(run)


def test_a_killed_controller_leaves_nothing_and_the_run_goes_on(whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = begin(*TINY, *TWO, f"run.dir={run}")
    wait_for(run, process, "update", 2, DEADLINE_S)  # type: ignore[arg-type]
    process.kill()
    process.communicate(timeout=DEADLINE_S)
    assert_gone(run)
    finished(run)
    assert_same(run, whole)


def test_a_killed_controller_loses_neither_pool_nor_queue_nor_the_bound_on_staleness(
    ray_cluster: None, tmp_path: Path
) -> None:
    """`budgeted`: the pool of unfinished rollouts, to the bit. `async`: every rollout is trained once, none too old."""
    budgeted = ["run.loop=budgeted", "rollout.budget.tokens=60", "rollout.budget.capacity=24"]
    for name, words in (("budgeted", budgeted), ("async", ["run.loop=async"])):
        run = tmp_path / name
        process = begin(*TINY, *TWO, *words, "run.steps=6", f"run.dir={run}")
        wait_for(run, process, "update", 3, DEADLINE_S)  # type: ignore[arg-type]
        process.kill()
        process.communicate(timeout=DEADLINE_S)
        finished(run)
        assert_audited(run)
        if name == "budgeted":
            assert_same(run, run_of(tmp_path / "whole", *TWO, *words, "run.steps=6"))
            continue
        trained = [row["id"] for step in tokens(run) for row in step]
        assert sorted(trained) == list(range(6 * 8 * 4))
        limit = load(None, [*TINY, *words]).rollout.overlap.max_staleness
        assert 0 < max(row.get("staleness/max", 0) for row in rows(run)) <= limit


def test_ctrl_c_in_a_terminal_reaches_all_processes_and_ends_with_a_checkpoint(whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = begin(*TINY, *TWO, f"run.dir={run}")
    wait_for(run, process, "rollout", 2, DEADLINE_S)  # type: ignore[arg-type]
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, err.count("\n")) == (130, 1)
    assert err.startswith("rollkeel: stopped")
    done = rows(run)[-1]["step"]
    assert (run / "checkpoints" / f"step_{done:06d}" / "manifest.json").is_file()
    assert_gone(run)
    finished(run)
    assert_same(run, whole)


def test_a_killed_engine_that_is_not_replaced_is_told_and_the_resumed_run_is_the_undisturbed_one(
    whole: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    killer = kill_when(run, "engine-0", "update", 2)
    with pytest.raises(RunStopped, match="engine") as stopped:
        run_of(run, *TWO, "cluster.restarts=0")
    killer.join()
    assert "\n" not in str(stopped.value)
    train(load(run / "config.yaml"), resume=run)
    assert_same(run, whole)


def test_the_only_engine_is_killed_while_it_samples_for_later_steps(ray_cluster: None, tmp_path: Path) -> None:
    """In `async` no other one can get the weights that are served: the run goes on from its newest checkpoint."""
    run = tmp_path / "run"
    killer = kill_when(run, "engine-0", "rollout", 4)
    run_of(run, *TWO, "run.loop=async", "run.steps=6", "engine.slots=1")
    killer.join()
    assert [row["step"] for row in rows(run)] == list(range(7))
    assert not any(row.get("failures/engine") for row in rows(run))
    assert_audited(run)
    (told,) = [e for e in events(run) if e["event"] == "restarted"]
    assert "no engine actor is left: actor 0 (node" in told["reason"]


@pytest.mark.parametrize("name", ["trainer-1", "engine-0"])
def test_who_is_stopped_is_told_within_a_deadline_with_his_stack(
    name: str, ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By SIGSTOP, as a machine that swaps or a debugger does it; the run goes on."""
    monkeypatch.setattr("rollkeel.cluster.calls.SILENT_S", 20.0)
    run, words = tmp_path / "run", [*TWO, "run.steps=12", "engine.deadline_s=30"]
    fell = list[float]()

    def stop() -> None:
        end = time.monotonic() + DEADLINE_S
        stage = "rollout" if name == "engine-0" else "update"
        while time.monotonic() < end and not any(
            e["event"] == "stage" and (e["step"], e["stage"]) == (6, stage) for e in events(run)
        ):
            time.sleep(0.005)
        os.kill(pid_of(run, name), signal.SIGSTOP)
        fell.append(time.time())

    stopper = threading.Thread(target=stop, daemon=True)
    stopper.start()
    run_of(run, *words)
    (told,) = [e for e in events(run) if e["event"] in ("restarted", "ranks_restarted", "engine_lost")]
    assert told["time"] - fell[0] < 45
    assert "was stopped by a signal" in told.get("reason", told.get("why"))
    assert "(most recent call first)" in (run / "actors" / f"{name}.log").read_text()
    assert_same(run, run_of(tmp_path / "whole", *words))


def test_twenty_kills_at_random_moments(ray_cluster: None, tmp_path: Path) -> None:
    """One run that goes on by itself whoever dies, any rank or the engine, at any moment after they have started."""
    words, draw, run = [*TWO, "run.steps=150"], random.Random(20), tmp_path / "run"
    fell, over = list[str](), threading.Event()

    def killer() -> None:
        while len(fell) < 20 and not over.is_set():
            seen = len(events(run)) if run.is_dir() else 0
            time.sleep(draw.uniform(0.0, 3.0))
            name = draw.choice(("trainer-0", "trainer-1", "engine-0"))
            if seen and any(e["event"] == "stage" for e in events(run)[seen:]) and living([pid_of(run, name)]):
                os.kill(pid_of(run, name), signal.SIGKILL)
                fell.append(name)

    thread = threading.Thread(target=killer, daemon=True)
    thread.start()
    try:
        run_of(run, *words, "cluster.restarts=40")
    finally:
        over.set()
        thread.join()
    print(f"kills: {fell}")
    assert len(fell) >= 15
    assert len(set(fell)) == 3
    assert_audited(run)
    assert_same(run, run_of(tmp_path / "longer", *words))


NODES = """
import sys
from ray.cluster_utils import Cluster
node = {"num_cpus": 2, "node_ip_address": "127.0.0.1", "object_store_memory": 128 << 20}
cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
cluster.add_node(**node)
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[str]:
    """The address of a cluster of two nodes of two CPUs each, on the loopback; they end with this fixture."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        nodes = subprocess.Popen([sys.executable, "-c", NODES], text=True, **pipes)  # type: ignore[call-overload]
        assert nodes.stdout is not None
        try:
            yield nodes.stdout.readline().strip()
        finally:
            nodes.communicate("", timeout=60)


@pytest.mark.parametrize("placement", ["colocated", "disaggregated"])
@pytest.mark.parametrize("loop", ["sync", "budgeted", "async"])
def test_two_nodes(loop: str, placement: str, two_nodes: str, whole: Path, tmp_path: Path) -> None:
    """Three places do not fit on one node of two CPUs; a colocated run shares two places among two ranks and two engines."""
    if (loop, placement) == ("async", "colocated"):
        pytest.skip("refused: tests/cluster/test_cluster_inputs.py")
    run = tmp_path / "run"
    words = [f"cluster.address={two_nodes}", f"cluster.placement={placement}", f"run.loop={loop}"]
    words += {"budgeted": ["rollout.budget.tokens=60", "rollout.budget.capacity=24"]}.get(loop, [])
    process = begin(*TINY, *TWO, *words, f"run.dir={run}")
    _, err = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, err) == (0, "")
    assert_gone(run)
    assert [row["step"] for row in rows(run)] == [0, 1, 2, 3]
    if loop == "sync":
        assert rows(run) == rows(whole)
        assert weights(run) == weights(whole)


ACCURACY, SEEDS = "eval/runsum/avg@k", (0, 1, 2)
LOOPS = {"budgeted": ["rollout.budget.tokens=1280", "rollout.budget.capacity=128"]}


def learnt(folder: Path, loop: str, *words: str) -> list[float]:
    """Held-out accuracy of the default recipe, the mean of its last three evaluations, of each seed."""
    out = []
    for seed in SEEDS:
        run = folder / str(seed)
        process = begin(
            "default", f"run.seed={seed}", f"run.loop={loop}", *LOOPS.get(loop, ()), *words, f"run.dir={run}"
        )
        _, err = process.communicate(timeout=1200)
        assert (process.returncode, err) == (0, "")
        seen = [row[ACCURACY] for row in rows(run) if ACCURACY in row]
        out.append(sum(seen[-3:]) / 3)
    return out


@pytest.fixture(scope="module")
def learnt_alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[float]]:
    @functools.cache
    def learnt_by(loop: str) -> list[float]:
        beside = ["engine.processes=1"] if loop == "async" else []  # else nothing samples while it trains
        return learnt(tmp_path_factory.mktemp(loop), loop, *beside)

    return learnt_by


PAIRS = [
    ("sync", "colocated"), ("sync", "disaggregated"), ("budgeted", "colocated"), ("budgeted", "disaggregated"),
    ("async", "disaggregated"),
]  # fmt: skip


@pytest.mark.parametrize(("loop", "placement"), PAIRS)
def test_two_nodes_learn_what_one_process_learns(
    loop: str, placement: str, two_nodes: str, learnt_alone: Callable[[str], list[float]], tmp_path: Path
) -> None:
    """Within 2 standard errors over three seeds, or of what an evaluation of 512 samples can tell."""
    words = [f"cluster.address={two_nodes}", f"cluster.placement={placement}", *TWO]
    there, here = np.array(learnt(tmp_path, loop, *words)), np.array(learnt_alone(loop))
    print(f"{loop} {placement}: {there.round(3)} over two nodes, {here.round(3)} in one process")
    spread = (there.var(ddof=1) + here.var(ddof=1)) / len(SEEDS) + 2 * 0.9 * 0.1 / (512 * 3 * len(SEEDS))
    assert abs(there.mean() - here.mean()) <= 2 * spread**0.5
    assert there.mean() > 0.8
