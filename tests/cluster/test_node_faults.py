"""What takes several processes at once: a machine that is lost or cut off, Ray's head that is gone, a disk that is full, memory that runs out.

Matters because a cluster loses whole machines, and because what others say of such a loss names everything but its cause. Nodes are raylets on
this host, killed or stopped with all that they started. Minutes long. Not covered: several hosts, a network that loses some packets.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster_kit import TINY, assert_audited, pid_of, tokens
from tiny_run import assert_same, events, rows, weights

pytestmark = pytest.mark.slow
DEADLINE_S = 300.0
NODES = """
import json, sys
from ray.cluster_utils import Cluster
about = {"node_ip_address": "127.0.0.1", "object_store_memory": 128 << 20}
sizes = json.loads(sys.argv[1])
cluster = Cluster(initialize_head=True, head_node_args={**about, "num_cpus": sizes[0], "include_dashboard": False})
others = [cluster.add_node(**about, num_cpus=size) for size in sizes[1:]]
pids = [[one.process.pid for one in node.all_processes["raylet"]] for node in (cluster.head_node, *others)]
head = [one.process.pid for one in cluster.head_node.all_processes["gcs_server"]]
print(json.dumps({"address": cluster.address, "raylets": [p for p, in pids], "gcs": head[0]}), flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@pytest.fixture
def nodes() -> Iterator[Callable[..., dict[str, Any]]]:
    """Starts a cluster of nodes with so many CPUs each; ends it."""
    made = list[subprocess.Popen[str]]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")

        def start(*sizes: int) -> dict[str, Any]:
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            made.append(subprocess.Popen([sys.executable, "-c", NODES, json.dumps(sizes)], text=True, **pipes))
            assert made[-1].stdout is not None
            return json.loads(made[-1].stdout.readline())

        yield start
        for each in made:
            lost(each.pid, signal.SIGCONT)  # else those that are stopped never end
            each.communicate("", timeout=120)


def tree(pid: int) -> list[int]:
    """A process and all that it started."""
    found, children = [pid], dict[int, list[int]]()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(folder.name))
    for one in found:
        found += children.get(one, [])
    return found


def home(cluster: dict[str, Any], run: Path, name: str) -> int:
    """The raylet whose node an actor is on."""
    pid = pid_of(run, name)
    return next(raylet for raylet in cluster["raylets"] if pid in tree(raylet))


def on(raylet: int, run: Path) -> list[str]:
    """The engines on its node."""
    below = tree(raylet)
    return [name for name in ("engine-0", "engine-1") if pid_of(run, name) in below]


def when(run: Path, stage: str, step: int, harm: Callable[[], None]) -> threading.Thread:
    """Do it as soon as the log says that `stage` of `step` has begun."""

    def wait() -> None:
        end = time.monotonic() + DEADLINE_S
        while time.monotonic() < end:
            seen = events(run) if run.is_dir() else []
            if any(e["event"] == "stage" and e["stage"] == stage and e["step"] >= step for e in seen):
                return harm()
            time.sleep(0.01)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def trained(run: Path, *words: str, cluster: dict[str, Any] | None = None) -> tuple[int, str]:
    """Exit code and standard error of `rollkeel train` over this cluster, or over a Ray of its own."""
    there = [] if cluster is None else [f"cluster.address={cluster['address']}"]
    command = [sys.executable, "-m", "rollkeel", "train", *words, *there]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    return done.returncode, done.stderr


def resumed(run: Path, *words: str) -> None:
    code, err = trained(run, "--resume", str(run), *words)
    assert (code, err) == (0, "")
    assert_audited(run)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks and two engines; six steps."""
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    assert trained(run, *WORDS, f"run.dir={run}") == (0, "")
    return run


WORDS = [*TINY, "cluster.trainers=2", "cluster.engines=2", "run.steps=6"]


def lost(pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """A machine goes, or is cut off: its processes all end or stop at once."""
    for one in tree(pid):
        os.kill(one, number)


def test_a_node_with_an_engine_is_lost_and_the_others_take_over(
    nodes: Callable[..., dict[str, Any]], undisturbed: Path, tmp_path: Path
) -> None:
    cluster, run = nodes(3, 1), tmp_path / "run"
    there = list[str]()  # Ray chooses which engine the second node gets

    def harm() -> None:
        there.extend(on(cluster["raylets"][1], run))
        lost(cluster["raylets"][1])

    killer = when(run, "rollout", 2, harm)
    assert trained(run, *WORDS, f"run.dir={run}", cluster=cluster)[0] == 0
    killer.join()
    assert_audited(run)
    assert tokens(run) == tokens(undisturbed)  # log-probs differ in their last bits: others were beside them in a batch
    assert [row["step"] for row in rows(run)] == list(range(7))
    (told,) = [e for e in events(run) if e["event"].startswith(("engine_", "ranks_", "restarted"))]
    assert (told["event"], [told["name"]]) == ("engine_lost", there)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_node_with_a_rank_is_lost_and_another_node_goes_on_from_its_neighbours_copy(
    number: signal.Signals, nodes: Callable[..., dict[str, Any]], undisturbed: Path, tmp_path: Path
) -> None:
    cluster, run = nodes(1, 1, 1, 1, 1), tmp_path / "run"

    def harm() -> None:
        victim = next(n for n in ("trainer-1", "trainer-0") if home(cluster, run, n) != cluster["raylets"][0])
        lost(home(cluster, run, victim), number)

    killer = when(run, "update", 3, harm)
    assert trained(run, *WORDS, f"run.dir={run}", "checkpoint.every=0", cluster=cluster)[0] == 0
    killer.join()
    assert_audited(run)
    assert rows(run) == rows(undisturbed)
    assert weights(run) == weights(undisturbed)
    (told,) = [e for e in events(run) if e["event"] == "ranks_restarted"]
    print(told)
    assert number == signal.SIGSTOP or "its node, or the connection to it, was lost" in told["reason"]


def test_a_node_that_is_cut_off_is_treated_as_lost_and_changes_nothing_when_it_comes_back(
    nodes: Callable[..., dict[str, Any]], undisturbed: Path, tmp_path: Path
) -> None:
    cluster, run = nodes(3, 1), tmp_path / "run"
    there = list[str]()

    def harm() -> None:
        there.extend(on(cluster["raylets"][1], run))
        lost(cluster["raylets"][1], signal.SIGSTOP)
        end = time.monotonic() + DEADLINE_S
        while not any(e["event"] == "engine_lost" for e in events(run)) and time.monotonic() < end:
            time.sleep(0.1)
        lost(cluster["raylets"][1], signal.SIGCONT)

    killer = when(run, "rollout", 2, harm)
    assert trained(run, *WORDS, f"run.dir={run}", cluster=cluster)[0] == 0
    killer.join()
    assert_audited(run)
    assert tokens(run) == tokens(undisturbed)
    assert [e["name"] for e in events(run) if e["event"] == "engine_lost"] == there


def test_the_head_of_ray_is_gone_in_one_line_and_the_run_resumes(
    nodes: Callable[..., dict[str, Any]], undisturbed: Path, tmp_path: Path
) -> None:
    cluster, run = nodes(4), tmp_path / "run"
    killer = when(run, "update", 2, lambda: os.kill(cluster["gcs"], signal.SIGKILL))
    code, err = trained(run, *WORDS, f"run.dir={run}", "run.steps=500", cluster=cluster)
    killer.join()
    assert code == 3, err
    assert f"rollkeel: Ray's head at {cluster['address']} has not answered for 10 s" in err
    assert events(run)[-1]["status"] == "stopped"
    resumed(run, f"run.steps={(last := rows(run)[-1]['step']) + 1}", "cluster.address=null")
    assert [row["step"] for row in rows(run)] == list(range(last + 2))
    whole = min(last, 5) + 1  # the last step of either run is evaluated
    assert rows(run)[:whole] == rows(undisturbed)[:whole]


def test_a_disk_that_is_full_is_one_line_and_the_run_resumes(undisturbed: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("cannot mount a small disk here")
    try:
        run = disk / "run"
        code, err = trained(run, *WORDS, f"run.dir={run}")
        assert (code, err.count("\n")) == (2, 1), err
        assert "No space left on device" in err
        assert [p.name for p in (run / "checkpoints").iterdir() if p.name.startswith(".")] == []
        subprocess.run(["mount", "-o", "remount,size=256m", str(disk)], check=True)
        resumed(run)
        assert_same(run, undisturbed)
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=False)


def test_memory_that_runs_out_is_named_where_an_actor_was_killed(undisturbed: Path, tmp_path: Path) -> None:
    """The kernel ends a process with signal 9, and says so to nobody but its own log."""
    run = tmp_path / "run"
    killers = [
        when(run, "rollout", 2, lambda: os.kill(pid_of(run, "engine-1"), signal.SIGKILL)),
        when(run, "update", 4, lambda: os.kill(pid_of(run, "trainer-0"), signal.SIGKILL)),
    ]
    assert trained(run, *WORDS, f"run.dir={run}") == (0, "")
    for killer in killers:
        killer.join()
    assert_audited(run)
    assert_same(run, undisturbed)
    told = [str(e.get("why", e.get("reason"))) for e in events(run) if e["event"] in ("engine_lost", "ranks_restarted")]
    assert len(told) == 2
    assert all("(signal 9), as the kernel does when memory runs out" in why for why in told)


@pytest.mark.parametrize("name", ["trainer-1", "engine-0"])
def test_who_is_slow_is_not_taken_for_dead(name: str, undisturbed: Path, tmp_path: Path) -> None:
    """Stopped for four fifths of the time, as on a machine that swaps or shares its cores."""
    run, over = tmp_path / "run", threading.Event()

    def harm() -> None:
        pid = pid_of(run, name)
        try:
            while not over.wait(0.05):
                os.kill(pid, signal.SIGSTOP)
                time.sleep(0.2)
                os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            return

    slower = when(run, "rollout", 1, harm)
    try:
        assert trained(run, *WORDS, f"run.dir={run}") == (0, "")
    finally:
        over.set()
        slower.join()
    assert_same(run, undisturbed)
    assert not [e for e in events(run) if e["event"] in ("engine_lost", "ranks_restarted", "restarted", "actor_lost")]
