"""Chaos must harm what it says, see what became of it, and tell a run that went on from one that did not.

Logs by hand, and (slow) a real run. Not covered: several machines, whose processes cannot be harmed from here.
"""

from __future__ import annotations

import json
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster_kit import TINY, TWO
from tiny_run import cli

from rollkeel.cluster.chaos import CONTROLLER, SLOW_S, Chaos, Incident, events, line, parsed, summary
from rollkeel.errors import BadInput


def log(run: Path, *rows: dict[str, Any]) -> list[dict[str, Any]]:
    run.mkdir(exist_ok=True)
    (run / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"half')
    return events(run)


def stage(time: float, step: int = 1) -> dict[str, Any]:
    return {"time": time, "event": "stage", "step": step, "stage": "rollout"}


def actor(name: str, process: subprocess.Popen[bytes]) -> dict[str, Any]:
    return {"time": 1.0, "event": "actor", "name": name, "pid": process.pid}


def test_an_incident_is_followed_through_the_log(tmp_path: Path) -> None:
    made = Chaos([], tmp_path, parsed("kill:rank"), 0)
    incident = Incident("kill", "trainer-1", 3, 10.0)
    before = [stage(9.0), {"time": 9.5, "event": "restarted", "reason": "of before"}]
    assert not made._followed(log(tmp_path, *before, stage(10.5)), incident)
    assert incident.noticed_s is None
    lost = {"time": 12.0, "event": "actor_lost", "reason": "x"}
    assert not made._followed(log(tmp_path, *before, stage(10.5), lost), incident)
    assert (incident.noticed_s, incident.goes_on_s) == (2.0, None)
    assert made._followed(log(tmp_path, *before, stage(10.5), lost, stage(20.0)), incident)
    assert (incident.noticed_s, incident.goes_on_s) == (2.0, 10.0)
    assert "noticed after   2.00 s, went on after  10.00 s" in line(incident)


def test_the_next_fault_waits_until_actors_live_that_the_last_one_did_not_strike(tmp_path: Path) -> None:
    made = Chaos([], tmp_path, parsed("kill:rank"), 0)
    lost = {"time": 12.0, "event": "engine_lost", "name": "engine-0", "why": "x"}
    assert made._ready([stage(9.0)], 0.0)
    assert not made._ready([stage(9.0)], 10.0)
    assert not made._ready([stage(11.0), lost], 10.0)
    assert made._ready([stage(11.0), lost, stage(13.0)], 10.0)
    assert not made._ready([stage(11.0), lost, {**stage(13.0), "stage": "sft"}], 10.0)  # engines have not begun


@pytest.fixture
def begun() -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """Starts processes that look like actors of Ray."""
    made = list[subprocess.Popen[bytes]]()

    def start() -> subprocess.Popen[bytes]:
        made.append(subprocess.Popen(["ray::Engine", "600"], executable="/bin/sleep"))
        return made[-1]

    yield start
    for one in made:
        one.kill()
        one.wait()


def test_only_actors_that_live_are_struck(tmp_path: Path, begun: Callable[[], subprocess.Popen[bytes]]) -> None:
    """Engines join while steps go on, and the log names one that is dead and whose successor has not started."""
    made, dead, controller, engine = Chaos([], tmp_path, parsed("kill:engine"), 0), begun(), begun(), begun()
    dead.kill()
    dead.wait()
    log(tmp_path, stage(9.0))
    before = threading.Timer(0.1, log, [tmp_path, stage(9.0), actor("engine-0", dead)])
    after = threading.Timer(0.3, log, [tmp_path, stage(9.0), actor("engine-0", dead), actor("engine-1", engine)])
    for timer in (before, after):
        timer.start()
    assert made._one(controller, 0.0)
    assert [(i.fault, i.actor) for i in made.incidents] == [("kill", "engine-1")]
    assert engine.wait(10) == -signal.SIGKILL
    controller.kill()
    assert not made._one(controller, 0.0)


def test_who_is_never_noticed_does_not_end_the_faults(
    tmp_path: Path, begun: Callable[[], subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollkeel.cluster.chaos.PATIENCE_S", 0.1)
    made, controller = Chaos([], tmp_path, parsed("kill:engine"), 0), begun()
    engines = {f"engine-{i}": begun() for i in range(3)}
    told = [actor(name, engine) for name, engine in engines.items()]
    log(tmp_path, stage(time.time() + 600), *told)
    monkeypatch.setattr(made, "_begun", lambda *words: controller)
    said = list[str]()
    threading.Timer(2.0, controller.kill).start()
    assert made(3, 0.0, said.append) == -signal.SIGKILL
    assert sorted(i.actor for i in made.incidents) == sorted(engines)
    assert all("never noticed" in line for line in said)


def test_who_is_slow_is_followed_until_he_is_not_and_must_not_be_taken_for_dead(tmp_path: Path) -> None:
    made = Chaos([], tmp_path, parsed("slow:engine,kill:controller"), 0)
    incident = Incident("slow", "engine-0", 3, 10.0)
    assert not made._followed(log(tmp_path, stage(11.0)), incident)
    assert made._followed(log(tmp_path, stage(11.0), stage(10.1 + SLOW_S)), incident)
    assert incident.noticed_s is None
    assert "nobody was taken for dead" in line(incident)
    lost = {"time": 14.0, "event": "engine_lost", "name": "engine-0", "why": "x"}
    assert made._followed(log(tmp_path, stage(11.0), lost, stage(16.0)), incident)
    assert incident.noticed_s == 4.0


def test_what_it_says_at_the_end() -> None:
    found = {"incidents": [{}] * 3, "noticed": 2, "status": "done", "seconds": 12.4}
    assert summary(found) == "3 faults, 2 noticed; the run is done, 12 s"
    assert summary({**found, "undisturbed_seconds": 5, "same_model": False}).endswith(
        "without faults 5 s and another model"
    )


def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="--faults 'kil:rank': expected some of"):
        parsed("kill:engine,kil:rank")
    for words, told in (
        ((), "add cluster.trainers=2"),
        (TWO, "expected run.dir"),
        ((*TWO, "cluster.address=127.0.0.1:1", f"run.dir={tmp_path}"), "no cluster.address"),
        ((*TWO, "run.loop=async", "--compare"), "compare sync or budgeted"),
        ((*TWO, "--faults", "kill:grader", f"run.dir={tmp_path}"), "set cluster.graders"),
    ):
        code, _, err = cli(capsys, "chaos", *words)
        assert (code, err.count("\n")) == (2, 1), err
        assert told in err


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["sync", "budgeted", "async"])
def test_a_run_that_is_harmed_comes_to_the_model_of_one_that_is_not(
    loop: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In `async`, whose runs have no bits to compare, its rollouts are trained once and in time."""
    words = [*TINY, *TWO, "run.steps=20", "cluster.restarts=20", f"run.dir={tmp_path / 'run'}", f"run.loop={loop}"]
    words += {"budgeted": ["rollout.budget.tokens=60", "rollout.budget.capacity=24"]}.get(loop, [])
    faults = "kill:rank,kill:engine,stop:rank,stop:engine,slow:rank,slow:engine,kill:controller"
    words += ["--faults", faults, "--count", "5", "--every", "1", "--seed", "2", "--json"]
    code, out, _ = cli(capsys, "chaos", *words, *([] if loop == "async" else ["--compare"]))
    found = json.loads(out)
    assert code == 0, found
    assert found["same_model"] if loop != "async" else found["audit"]["limit"] > 0
    assert found["audit"]["fits"], found["audit"]
    assert len(found["incidents"]) == found["noticed"] >= 4
    harmed = [
        incident for incident in found["incidents"] if incident["actor"] != CONTROLLER and incident["fault"] != "slow"
    ]
    assert all(incident["noticed_s"] < 45 for incident in harmed)  # the latest of the table: who takes no weights
