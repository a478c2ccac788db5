"""A guide that names files which have moved sends people to nowhere. Not covered: whether what it says of them is true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
GUIDE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
PATHS = sorted(set(re.findall(r"`([\w./]*/[\w.*/]+)`", GUIDE)) - {"engines/vllm*", "cluster/", "path/file.py:name"})


@pytest.mark.parametrize("path", PATHS)
def test_every_path_exists(path: str) -> None:
    assert list(ROOT.glob(path.rstrip("/"))), path


def test_there_are_paths() -> None:
    assert len(PATHS) > 20


def test_targets_are_those_of_the_makefile() -> None:
    targets = re.findall(r"^make ([\w-]+)", GUIDE, re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert targets
    assert [t for t in targets if not re.search(rf"^{t}:", makefile, re.MULTILINE)] == []
