"""`python -m benchmarks.gpu` survives its stages: device time is rare, and a suite that dies on the way, or writes rows that cannot
be read, has wasted all of it.

Real processes that raise, hang and are killed; every stage at toy size on a CPU, also without packages that a bare machine lacks.
Not covered: anything on a card, and what the numbers are.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import driver
from benchmarks.gpu.bench import ROWS, Bench, append, rows
from benchmarks.gpu.table import markdown

ROOT = Path(__file__).resolve().parent.parent
BARE = ("typer", "rich", "pyarrow", "matplotlib", "jinja2", "click", "pandas", "trl", "peft", "datasets", "pytest")
"""What a machine may lack that has torch, Triton, transformers, numpy and numba."""
BROKEN = {
    "raises": "raise RuntimeError('on purpose')",
    "hangs": "import subprocess, time; open({here!r}, 'w').write(str(subprocess.Popen(['sleep', '60']).pid)); time.sleep(60)",
    "killed": "import os, signal; os.write(os.open(str(bench.out / 'rows.jsonl'), os.O_APPEND | os.O_WRONLY), b'{half'); os.kill(os.getpid(), signal.SIGKILL)",
    "fine": "bench.attempt('breaks', lambda b: 1 / 0); bench.attempt('works', lambda b: b.row('works', 2.0, 's'))",
}  # fmt: skip


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Stages that end badly, and a last one that does not; where the hanging one tells of a process that it started."""
    here = tmp_path / "pid"
    for name, text in BROKEN.items():
        body = text.format(here=str(here)) if "{here" in text else text
        (tmp_path / f"stage_{name}.py").write_text(f"def run(bench):\n    bench.row('before', 1.0, 's')\n    {body}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(driver, "STAGES", {name: (f"stage_{name}", 3.0) for name in BROKEN})
    yield here
    for name in BROKEN:
        sys.modules.pop(f"stage_{name}", None)


def test_a_stage_that_ends_badly_is_a_row_and_not_the_end(broken: Path, tmp_path: Path) -> None:
    seen = driver.run(list(BROKEN), 1.0, tmp_path / "out", "cpu", True)
    by = {(r["stage"], r["row"]): r for r in seen}
    assert [r["stage"] for r in seen if r["row"] == "stage"] == list(BROKEN)
    assert all((name, "before") in by for name in BROKEN)
    assert by["raises", "stage"]["failed"] == "stage failed: RuntimeError: on purpose"
    assert by["hangs", "stage"]["failed"].startswith("stage failed: over its")
    assert by["killed", "stage"]["failed"] == "stage failed: killed by SIGKILL"
    assert "failed" not in by["fine", "stage"]
    assert by["fine", "works"]["value"] == 2
    assert by["fine", "breaks"]["failed"] == "ZeroDivisionError: division by zero"
    child = Path(f"/proc/{broken.read_text()}/stat")  # what the hanging stage started went with it
    wait = time.monotonic() + 10
    while child.exists() and child.read_text().split()[2] != "Z":
        assert time.monotonic() < wait
        time.sleep(0.05)
    table = (tmp_path / "out" / driver.TABLE).read_text()
    assert "4 of " in table
    assert "toy=true" in table


@pytest.mark.slow
def test_a_stage_may_begin_afresh_as_on_a_card(broken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "STAGES", {name: (f"stage_{name}", 90.0) for name in ("killed", "fine")})
    seen = driver.run(["killed", "fine"], 9.0, tmp_path / "out", "cpu", True, "spawn")
    told = {r["stage"]: r.get("failed") for r in seen if r["row"] == "stage"}
    assert told == {"killed": "stage failed: killed by SIGKILL", "fine": None}
    assert [r["value"] for r in seen if r["row"] == "works"] == [2]


@pytest.mark.slow
def test_what_stages_are_forked_from_has_not_begun_to_use_a_card() -> None:
    script = (
        "import torch, sys; began = []; torch.cuda._lazy_init = torch.cuda.init = lambda *_: began.append(1)\n"
        "import benchmarks.gpu.preload; from benchmarks.gpu.driver import STAGES\n"
        "print(began, torch.cuda.is_initialized(), all(module in sys.modules for module, _ in STAGES.values()), sys.modules['numba'])"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.stdout.split() == ["[]", "False", "True", "None"], done.stderr


def test_no_stage_begins_behind_the_time_that_is_left(broken: Path, tmp_path: Path) -> None:
    seen = driver.run(["hangs", "fine"], (driver.TABLE_S + 2) / 60, tmp_path / "out", "cpu", True)
    last = seen[-1]
    assert (last["stage"], last["row"]) == ("fine", "stage")
    assert last["failed"].startswith("skipped")
    assert not [r for r in seen if r["stage"] == "fine" and r["row"] == "before"]


def test_rows_are_whole_and_finite(tmp_path: Path) -> None:
    bench = Bench("here", tmp_path, "cpu", True, 100)
    bench.row("a", math.nan, "ms")
    bench.check("b", 2.0, 1.0, note="x | y")
    bench.check("c", 2.0, 1.0, least=True)
    bench.row("d", 123456.7, "GB/s", share=0.123456789, nothing=None)
    with pytest.raises(ValueError, match="not JSON compliant"):
        append(tmp_path, {"value": math.inf})
    a, b, c, d = rows(tmp_path)
    assert (a["failed"], "value" in a) == ("nan", False)
    assert (b["ok"], c["ok"], d["share"], "nothing" in d) == (False, True, 0.123457, False)
    with (tmp_path / ROWS).open("a") as file:
        file.write('{"half')
    assert len(list(rows(tmp_path))) == 4
    assert "2 of 4 rows failed or do not hold" in markdown([a, b, c, d])
    assert r"x \| y" in markdown([b])


def test_carried_wheels_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without pip: as on a machine that has none of them, in a process of its own."""
    with zipfile.ZipFile(tmp_path / "pydantic-0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("pydantic/__init__.py", "here = 1")
    script = (
        "import importlib.util, sys; real = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name: None if name == 'pydantic' else real(name)\n"
        "from benchmarks.gpu.driver import bare; bare('cuda'); import pydantic; print(pydantic.here, sys.modules['numba'])"
    )
    monkeypatch.setenv("ROLLKEEL_WHEELS", str(tmp_path))
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.stdout.split() == ["1", "None"], done.stderr


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The rows of all stages, with those packages hidden that a bare machine may lack."""
    out = tmp_path_factory.mktemp("suite")
    hidden = f"import sys; sys.modules.update(dict.fromkeys({BARE!r}))\n"
    words = ["suite", "--toy", "--device", "cpu", "--out", str(out), "--minutes", "9"]
    script = f"{hidden}sys.argv = {words!r}; from benchmarks.gpu.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, (
        f"{done.stdout[-3000:]}\n{done.stderr[-2000:]}\n{(out / driver.LOG).read_text()[-3000:]}"
    )
    assert (out / driver.TABLE).is_file()
    return [json.loads(line) for line in (out / ROWS).read_text().splitlines()]


def test_every_stage_runs_at_toy_size_without_what_a_bare_machine_lacks(toy: list[dict[str, Any]]) -> None:
    ended = [r for r in toy if r["row"] == "stage"]
    assert [r["stage"] for r in ended] == list(driver.STAGES)
    assert [r for r in toy if "failed" in r or r.get("ok") is False] == []


def test_nobody_takes_a_toy_row_for_a_cards(toy: list[dict[str, Any]]) -> None:
    for row in toy:
        assert (row["device"], row["toy"]) == ("cpu", True)
        assert "card" not in row
        assert math.isfinite(row["value"]) if "value" in row else row["note"]
    assert "say nothing about a card" in markdown(toy)
