"""A guide that names files which have moved, or shows code that does not run, sends people to nowhere. Not covered: whether what it
says of those files is true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tiny_run import TINY, rows

from rollkeel.loop.job import train
from rollkeel.recipe import load

ROOT = Path(__file__).resolve().parent.parent
GUIDE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
PATHS = sorted(set(re.findall(r"`([\w./]*/[\w.*/]+)`", GUIDE)) - {"engines/vllm*", "cluster/", "path/file.py:name"})


@pytest.mark.parametrize("path", PATHS)
def test_every_path_exists(path: str) -> None:
    assert list(ROOT.glob(path.rstrip("/"))), path


def test_there_are_paths() -> None:
    assert len(PATHS) > 20


def test_its_feed_runs(tmp_path: Path) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", GUIDE, re.DOTALL | re.MULTILINE)
    file = tmp_path / "guide.py"
    file.write_text(code)
    words = [*TINY, "run.steps=1", "sft.steps=0", "eval.items=2", f"run.dir={tmp_path / 'run'}"]
    train(load(None, [*words, f"run.loop={file}:Reversed"]))
    assert [row["step"] for row in rows(tmp_path / "run")] == [0, 1]


def test_targets_are_those_of_the_makefile() -> None:
    targets = re.findall(r"^make ([\w-]+)", GUIDE, re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert targets
    assert [t for t in targets if not re.search(rf"^{t}:", makefile, re.MULTILINE)] == []
