"""The run folder is what survives a kill: a row lost, doubled or rounded here breaks exact resume and every report.

Not covered: a power cut (only fsync calls are made, not proven), network file systems.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollkeel.config import Config
from rollkeel.errors import BadInput, Corrupt, NonFinite
from rollkeel.recipe import load
from rollkeel.record.lock import is_locked
from rollkeel.record.runfolder import SCHEDULE, RunFolder


def make(path: Path, steps: int = 0) -> RunFolder:
    run = RunFolder.create(path, Config())
    for step in range(1, steps + 1):
        run.append_metrics({"step": step, "loss": 0.1 * step})
        run.rollouts(step).write_bytes(b"x")
    return run


def events(path: Path) -> list[str]:
    return [json.loads(line)["event"] for line in (path / "events.jsonl").read_text().splitlines()]


def test_create_saves_a_config_that_loads_to_the_same_tree(tmp_path: Path) -> None:
    config = load(overrides=["objective.name=kpop", "objective.phi=0.2", "train.lr=1e-4", "run.steps=7"])
    RunFolder.create(tmp_path / "a" / "b", config).close()
    assert RunFolder.open(tmp_path / "a" / "b", lock=False).config == config


def test_create_refuses_a_folder_that_is_a_run_and_leaves_it_alone(tmp_path: Path) -> None:
    make(tmp_path / "run", 2).close()
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file() and p.name != ".lock"}
    with pytest.raises(BadInput, match=r"already holds a run.*--resume"):
        RunFolder.create(tmp_path / "run", Config())
    assert before == {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file() and p.name != ".lock"}
    RunFolder.open(tmp_path / "run").close()  # and the refusal left no lock behind


def test_create_under_a_file_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="cannot be made") as error:
        RunFolder.create(tmp_path / "file" / "deep" / "run", Config())
    assert "\n" not in str(error.value)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def in_child(code: str, *args: str, limit: int | None = None) -> subprocess.CompletedProcess[str]:
    def cap() -> None:
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    return subprocess.run(
        [sys.executable, "-c", code, *args], capture_output=True, text=True, preexec_fn=cap, check=False
    )


def test_create_without_space_leaves_nothing(tmp_path: Path) -> None:
    code = """
import sys
from rollkeel.config import Config
from rollkeel.record.runfolder import RunFolder
from rollkeel.errors import BadInput
try:
    RunFolder.create(sys.argv[1], Config())
except BadInput as error:
    print(error)
"""
    done = in_child(code, str(tmp_path / "new" / "run"), limit=100)
    assert "cannot write" in done.stdout, done.stderr
    assert done.stdout.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_row_that_does_not_fit_is_taken_back_whole(tmp_path: Path) -> None:
    run = make(tmp_path / "run", 2)
    run.close()
    before = run.path.joinpath("metrics.jsonl").read_bytes()
    code = """
import sys
from rollkeel.record.runfolder import RunFolder
from rollkeel.errors import BadInput
run = RunFolder.open(sys.argv[1], lock=False)
try:
    run.append_metrics({"step": 3, "text": "x" * 5000})
except BadInput as error:
    print(error)
"""
    done = in_child(code, str(run.path), limit=2000)
    assert "cannot write" in done.stdout, done.stderr
    assert run.path.joinpath("metrics.jsonl").read_bytes() == before


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_floats_keep_every_bit(value: float) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder, RunFolder.create(Path(folder) / "r", Config()) as run:
        run.append_metrics({"step": 1, "x": value, "y": np.float32(value % 1), "n": np.int64(3), "s": "old", "z": None})
        (row,) = run.metrics()
    assert np.float64(row["x"]).tobytes() == np.float64(value).tobytes()
    assert np.float32(row["y"]) == np.float32(value % 1)
    assert (row["n"], row["s"], row["z"]) == (3, "old", None)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), np.float32("-inf"), [1.0, float("nan")]])
def test_non_finite_values_are_refused_by_name(tmp_path: Path, bad: object) -> None:
    run = make(tmp_path / "run", 1)
    with pytest.raises(NonFinite, match=r"step 2.*policy/entropy"):
        run.append_metrics({"step": 2, "policy/entropy": bad})
    assert [row["step"] for row in run.metrics()] == [1]


@pytest.mark.parametrize("step", [2, 4, 0, -1, True, 1.5])
def test_no_step_can_be_doubled_or_skipped(tmp_path: Path, step: object) -> None:
    run = make(tmp_path / "run", 2)
    with pytest.raises(ValueError, match="step"):
        run.append_metrics({"step": step})


def test_truncate_drops_later_rows_and_rollouts_and_the_run_goes_on(tmp_path: Path) -> None:
    make(tmp_path / "run", 5).close()
    lines = (tmp_path / "run" / "metrics.jsonl").read_bytes().splitlines()
    run = RunFolder.open(tmp_path / "run")
    (run.path / SCHEDULE).write_text('{"step": 2}\n{"step": 4}\n')  # of run.loop=async
    run.truncate_after(3)
    assert (run.path / "metrics.jsonl").read_bytes().splitlines() == lines[:3]
    assert (run.path / SCHEDULE).read_text() == '{"step": 2}\n'
    assert json.loads((run.path / "events.jsonl").read_text().splitlines()[-1])["rows_dropped"] == 2
    assert [step for step, _ in run.rollout_files()] == [1, 2, 3]
    run.append_metrics({"step": 4})
    assert [row["step"] for row in run.metrics()] == [1, 2, 3, 4]
    run.truncate_after(0)
    assert run.metrics() == []
    run.append_metrics({"step": 1})


def test_a_half_written_row_is_dropped_with_an_event(tmp_path: Path) -> None:
    make(tmp_path / "run", 3).close()
    with (tmp_path / "run" / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 4, "los')
    run = RunFolder.open(tmp_path / "run")
    assert len(run.metrics()) == 3
    run.truncate_after(3)
    run.append_metrics({"step": 4})
    assert [row["step"] for row in run.metrics()] == [1, 2, 3, 4]
    assert "metrics_half_line_dropped" in events(run.path)


def test_a_row_that_lost_only_its_newline_is_kept(tmp_path: Path) -> None:
    make(tmp_path / "run", 3).close()
    file = tmp_path / "run" / "metrics.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    run = RunFolder.open(tmp_path / "run")
    run.truncate_after(3)
    assert file.read_bytes() == whole


@pytest.mark.parametrize(
    ("steps", "what"),
    [([1, 3, 4], "step 3 where 2"), ([1, 2], "nothing after step 2"), ([1, 2, 2, 3], "step 2 where 3")],
)
def test_a_gap_or_double_in_the_rows_is_corrupt_and_changes_nothing(
    tmp_path: Path, steps: list[int], what: str
) -> None:
    make(tmp_path / "run", 3).close()
    file = tmp_path / "run" / "metrics.jsonl"
    file.write_text("".join(json.dumps({"step": s}) + "\n" for s in steps))
    before = file.read_bytes()
    run = RunFolder.open(tmp_path / "run")
    with pytest.raises(Corrupt, match=f"metrics.jsonl.*{what}"):
        run.truncate_after(3)
    assert file.read_bytes() == before
    assert len(run.rollout_files()) == 3


def test_damaged_and_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no such folder"):
        RunFolder.open(tmp_path / "none")
    with pytest.raises(BadInput, match=r"config\.yaml is missing"):
        RunFolder.open(tmp_path)
    make(tmp_path / "run", 3).close()
    file = tmp_path / "run" / "metrics.jsonl"
    file.write_bytes(b"\xff" + file.read_bytes())
    with pytest.raises(Corrupt, match=r"metrics.jsonl: line 1 "):
        RunFolder.open(tmp_path / "run", lock=False).metrics()
    for broken in ("a: [", "- 1\n", "nonsense: 1\n", "train: {lr: x}\n"):
        (tmp_path / "run" / "config.yaml").write_text(broken)
        with pytest.raises(Corrupt, match=r"config\.yaml"):
            RunFolder.open(tmp_path / "run")


HOLD = """
import sys, time
from rollkeel.record.runfolder import RunFolder
run = RunFolder.open(sys.argv[1])
import os
if os.fork() == 0:
    time.sleep(60)  # a worker that outlives its parent must not keep the lock
print("held", flush=True)
time.sleep(60)
"""


def test_one_writer_at_a_time_and_the_lock_dies_with_the_process(tmp_path: Path) -> None:
    make(tmp_path / "run").close()
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        assert is_locked(tmp_path / "run")
        with pytest.raises(BadInput, match=f"in use by process {child.pid}"):
            RunFolder.open(tmp_path / "run")
        child.send_signal(signal.SIGKILL)
        child.wait()
        time.sleep(0.05)
        assert not is_locked(tmp_path / "run")
        RunFolder.open(tmp_path / "run").close()
    finally:
        os.killpg(child.pid, signal.SIGKILL)


def test_asking_and_a_second_open_in_this_process_do_not_lose_the_lock(tmp_path: Path) -> None:
    run = make(tmp_path / "run")
    assert is_locked(run.path)
    with pytest.raises(BadInput, match="in use by this process"):
        RunFolder.open(run.path)
    RunFolder.open(run.path, lock=False)
    code = """
import sys
from rollkeel.record.lock import is_locked
from pathlib import Path
print(is_locked(Path(sys.argv[1])))
"""
    assert in_child(code, str(run.path)).stdout == "True\n"
    run.end("done")
    assert in_child(code, str(run.path)).stdout == "False\n"
    assert events(run.path) == ["run_created", "run_end"]


def test_an_event_after_a_half_written_one_starts_on_its_own_line(tmp_path: Path) -> None:
    make(tmp_path / "run").close()
    with (tmp_path / "run" / "events.jsonl").open("a") as file:
        file.write('{"event": "ha')
    RunFolder.open(tmp_path / "run").close()
    last = (tmp_path / "run" / "events.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["event"] == "run_opened"
