"""Cleaning takes minutes and machines go away: whatever ended it, the same command must give the same bytes in the end.

Real SIGKILLs of a real process, interruptions between any two chunks, two processes. Does not cover a power cut, after which the
last chunks may be empty files.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from data_rows_kit import digests, rows_file, written

from benchmarks.data_rows import plant
from rollkeel.data import CleanOptions, clean, read_options
from rollkeel.data.clean import Progress
from rollkeel.errors import BadInput

ROWS = 400
WORDS = [
    "chunk_rows=40",
    "part_rows=100",
    "near.bands=4",
    "columns.domain=domain",
    "mix.proportions={math: 2, code: 1, stem: 1}",
]


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("planted") / "rows"
    plant(folder, ROWS, 1)
    return folder


def options(folder: Path, *more: str) -> CleanOptions:
    return read_options(None, [*WORDS, f"decontaminate.benchmarks=[{folder / 'benchmark.jsonl'}]", *more])


@pytest.fixture(scope="module")
def whole(planted: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    out = tmp_path_factory.mktemp("whole") / "out"
    clean([str(planted / "data.jsonl")], out, options(planted))
    assert len(written(out)) > 100
    assert not (out / "work").exists()
    return digests(out)


def test_interrupted_between_any_two_chunks(planted: Path, whole: dict[str, str], tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def until(calls: int) -> Progress:
        left = iter(range(calls))

        def progress(stage: str, done: int, total: int | None) -> None:
            if next(left, None) is None:
                raise Stop

        return progress

    ended = 0
    for attempt in range(80):  # one step further in every attempt
        try:
            clean([str(planted / "data.jsonl")], tmp_path / "out", options(planted), progress=until(attempt + 2))
            break
        except Stop:
            ended += 1
            (tmp_path / "out" / "work" / "000007.99.tmp").mkdir(exist_ok=True)  # a chunk that was being written
            (tmp_path / "out" / "part-00000.parquet.tmp").write_bytes(b"half")
    assert ended > 15
    assert digests(tmp_path / "out") == whole


def test_two_processes_change_nothing(planted: Path, whole: dict[str, str], tmp_path: Path) -> None:
    clean([str(planted / "data.jsonl")], tmp_path / "out", options(planted), processes=2)
    assert digests(tmp_path / "out") == whole


@pytest.mark.slow
def test_ctrl_c_while_its_processes_start_is_the_callers(
    planted: Path, whole: dict[str, str], tmp_path: Path, interrupted_at_birth: list[int]
) -> None:
    clean([str(planted / "data.jsonl")], tmp_path / "out", options(planted), processes=2)
    assert digests(tmp_path / "out") == whole
    assert len(interrupted_at_birth) == 2


def test_killed_without_warning(planted: Path, tmp_path: Path) -> None:
    (tmp_path / "slow_filter.py").write_text("import time\ndef judge(row):\n    time.sleep(0.002)\n")
    words = [*WORDS, f"decontaminate.benchmarks=[{planted / 'benchmark.jsonl'}]", "harmful.hook='slow_filter:judge'"]
    program = [
        sys.executable,
        "-c",
        "from rollkeel.cli import main; main()",
        "data",
        "clean",
        str(planted / "data.jsonl"),
    ]
    paths = [p for p in (os.environ.get("PYTHONPATH"), str(Path(__file__).parents[2])) if p]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}

    def start(out: str, processes: int = 1) -> subprocess.Popen[bytes]:
        pipe, more = subprocess.DEVNULL, ["--processes", str(processes)]
        command = [*program, "--out", out, *words, *more]
        return subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=pipe, stderr=pipe)

    assert start("whole").wait(timeout=120) == 0
    for shards, processes in ((2, 1), (5, 2)):
        process = start("out", processes)
        deadline = time.monotonic() + 60
        while len(list((tmp_path / "out").glob("work/00000?"))) < shards:
            assert process.poll() is None, "ended before it was killed"
            assert time.monotonic() < deadline
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        assert not (tmp_path / "out" / "report.json").exists()
    assert start("out").wait(timeout=120) == 0
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")


def test_work_of_other_options_or_inputs_is_not_mixed_in(tmp_path: Path) -> None:
    def stop(stage: str, done: int, total: int | None) -> None:
        if stage == "rows":
            raise KeyboardInterrupt

    file, out = rows_file(tmp_path, [("a b", "1"), ("c d", "2")]), tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        clean([str(file)], out, progress=stop)
    with pytest.raises(BadInput, match="unfinished work of other options; run it as it was"):
        clean([str(file)], out, read_options(None, ["near.shingle=3"]))
    file.write_text(file.read_text() + json.dumps({"prompt": "e", "answer": "f"}))
    with pytest.raises(BadInput, match="unfinished work of other inputs"):
        clean([str(file)], out)


def test_what_is_decided_last_may_be_decided_anew(tmp_path: Path) -> None:
    file, words = rows_file(tmp_path, [("a b", "1"), ("c d", "2")], field="x"), ["columns.domain=field"]
    with pytest.raises(BadInput, match="no row of domain 'y' is left"):
        clean([str(file)], tmp_path / "out", read_options(None, [*words, "mix.proportions={y: 1}"]))
    before = (tmp_path / "out" / "work" / "000000").stat().st_mtime_ns
    seen = []

    def progress(stage: str, done: int, total: int | None) -> None:
        if stage == "near duplicates":
            seen.append((tmp_path / "out" / "work" / "000000").stat().st_mtime_ns)

    clean([str(file)], tmp_path / "out", read_options(None, [*words, "mix.proportions={x: 1}"]), progress=progress)
    assert set(seen) == {before}  # the work on rows was not done again
    assert written(tmp_path / "out") == ["a b", "c d"]


def test_folders_that_are_somebody_elses(tmp_path: Path) -> None:
    file = rows_file(tmp_path, [("a b", "1")])
    clean([str(file)], tmp_path / "done")
    with pytest.raises(BadInput, match="already finished"):
        clean([str(file)], tmp_path / "done")
    with pytest.raises(BadInput, match="choose a new or unfinished folder"):
        clean([str(file)], tmp_path)
    (tmp_path / "busy" / "work").mkdir(parents=True)
    with (tmp_path / "busy" / "work" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(BadInput, match="another process works on it"):
            clean([str(file)], tmp_path / "busy")
