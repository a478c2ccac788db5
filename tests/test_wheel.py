"""People install a wheel, not a clone: one without the recipes cannot train anything.

The wheel is built from a copy of the sources, without network or build isolation. The slow test runs it where nothing else of ours
can be imported. Not covered: that its dependencies can be downloaded.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(ROOT / "rollkeel", folder / "rollkeel", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run([sys.executable, "-c", BUILD, "dist"], cwd=folder, check=True, capture_output=True)
    return next((folder / "dist").glob("*.whl"))


def test_every_file_of_the_package_is_in_the_wheel(wheel: Path) -> None:
    ours = {
        str(p.relative_to(ROOT)) for p in (ROOT / "rollkeel").rglob("*") if p.is_file() and "__pycache__" not in p.parts
    }
    there = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert there == ours
    assert {"rollkeel/recipes/default.yaml", "rollkeel/report/template.html.j2", "rollkeel/py.typed"} <= there


@pytest.mark.slow  # a run in a process that loads everything
def test_the_wheel_alone_trains_in_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    site, empty = tmp_path / "site", tmp_path / "empty"
    zipfile.ZipFile(wheel).extractall(site)
    empty.mkdir()
    # -S: no site folder, hence no editable install; the libraries are named instead.
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(site), sysconfig.get_paths()["purelib"]))}
    said = subprocess.run(
        [sys.executable, "-S", "-c", "import rollkeel; print(rollkeel.__file__)"],
        cwd=empty,
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout.strip() == str(site / "rollkeel" / "__init__.py")
    for words in (["train", "default", "sft.steps=2", "run.steps=2", "run.dir=run"], ["simulate", "laptop"]):
        command = [sys.executable, "-S", "-m", "rollkeel", *words]
        done = subprocess.run(command, cwd=empty, env=env, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
    assert (empty / "run" / "report.html").is_file()
