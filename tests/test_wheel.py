"""People install wheels, not a clone: one without the recipes cannot train anything, one that needs the others does not stand alone.

Wheels are built from a copy of the sources, without network or build isolation, and run where nothing else of ours can be imported:
the sandbox's without any of rollkeel, and in the slow test both together. Not covered: that its dependencies can be downloaded.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import urllib.request
import zipfile
from pathlib import Path

import pytest

import rollkeel
import rollkeel_doctor
import rollkeel_sandbox
from rollkeel_sandbox import Level, probe

ROOT = Path(__file__).resolve().parent.parent
BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"


FILES = {
    "rollkeel": {
        "rollkeel/recipes/default.yaml",
        "rollkeel/report/template.html.j2",
        "rollkeel/board/page/tokens.js",
        "rollkeel/py.typed",
    },
    "rollkeel_sandbox": {"rollkeel_sandbox/agent.py", "rollkeel_sandbox/py.typed"},
    "rollkeel_doctor": {"rollkeel_doctor/traces/verl.py", "rollkeel_doctor/py.typed"},
}
"""Distribution → a few files that it must have."""
ALONE = "import sys; sys.modules.update(dict.fromkeys({!r})); from {}.cli import main; main()"
"""A command line in a process that cannot import the named modules."""


def built(package: str, folder: Path) -> Path:
    """The wheel of a distribution: rollkeel's from the root with its package alone, any other from its own folder."""
    root = folder / package
    ignore = shutil.ignore_patterns("__pycache__", "build", "*.egg-info")
    if package == "rollkeel":
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            (root / name).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, root)
        for other in FILES.keys() - {package}:
            shutil.copytree(ROOT / other, root / other, ignore=ignore)  # must stay out
        shutil.copytree(ROOT / package, root / package, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copytree(ROOT / package, root, ignore=ignore)
    subprocess.run([sys.executable, "-P", "-c", BUILD, "dist"], cwd=root, check=True, capture_output=True)
    return next((root / "dist").glob("*.whl"))


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {package: built(package, tmp_path_factory.mktemp("wheels")) for package in FILES}


@pytest.fixture
def site(wheels: dict[str, Path], tmp_path: Path) -> Path:
    """An empty folder to work in, beside the site folder that `environment` names."""
    for wheel in wheels.values():
        zipfile.ZipFile(wheel).extractall(tmp_path / wheel.name.split("-")[0])
    (tmp_path / "empty").mkdir()
    return tmp_path


def environment(site: Path, *packages: str) -> dict[str, str]:
    """With `python -S`: no site folder, hence no editable install; the libraries are named instead."""
    places = [*(str(site / package) for package in packages), sysconfig.get_paths()["purelib"]]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(places)}


@pytest.mark.parametrize("package", FILES)
def test_every_file_of_the_package_is_in_the_wheel(wheels: dict[str, Path], package: str) -> None:
    files = [p.relative_to(ROOT) for p in (ROOT / package).rglob("*") if p.is_file()]
    beside = {f"{package}/{name}" for name in ("pyproject.toml", "README.md", "LICENSE")}
    ours = {str(p) for p in files if "__pycache__" not in p.parts and p.parts[1] != "build" and ".egg" not in str(p)}
    there = {name for name in zipfile.ZipFile(wheels[package]).namelist() if ".dist-info/" not in name}
    assert there == ours - beside
    assert there >= FILES[package]


def test_distributions_are_of_one_version() -> None:
    projects = [tomllib.loads((ROOT / place / "pyproject.toml").read_text()) for place in (".", *list(FILES)[1:])]
    versions = {project["project"]["version"] for project in projects}
    assert versions == {rollkeel.__version__} == {rollkeel_sandbox.__version__} == {rollkeel_doctor.__version__}
    for name in ("rollkeel-sandbox", "rollkeel-doctor"):
        assert f"{name}=={rollkeel.__version__}" in projects[0]["project"]["dependencies"]


@pytest.mark.skipif(probe().plan().level < Level.NAMESPACES, reason="namespaces do not hold here")
def test_the_wheel_of_the_sandbox_runs_and_serves_without_rollkeel(site: Path) -> None:
    empty, env = site / "empty", environment(site, "rollkeel_sandbox")
    (empty / "a.py").write_text("print(6 * 7)")

    def command(*words: str, without: tuple[str, ...]) -> list[str]:
        return [sys.executable, "-S", "-c", ALONE.format(without, "rollkeel_sandbox"), *words]

    heavy = ("rollkeel", "torch", "numpy", "pyarrow")
    bare = (*heavy, "fastapi", "uvicorn", "mcp")
    words = ("run", "a.py")
    done = subprocess.run(
        command(*words, without=bare), cwd=empty, env=env, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "42\n", "")
    done = subprocess.run(
        command("serve", without=bare), cwd=empty, env=env, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "pip install 'rollkeel-sandbox[service]'" in done.stderr
    serve = command("serve", "--port", "0", "--state", "state", "--workers", "1", without=heavy)
    with subprocess.Popen(serve, cwd=empty, env=env, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout
        try:
            url = server.stdout.readline().split()[2]
            token = (empty / "state" / "token").read_text().strip()
            headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
            body = json.dumps({"source": "print(6 * 7)"}).encode()
            with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/run", body, headers), timeout=60) as answer:
                assert json.load(answer)["stdout"] == "42\n"
        finally:
            server.terminate()


def test_the_wheel_of_the_doctor_reads_a_dump_without_rollkeel(site: Path) -> None:
    """As verl dumps it: a reward that rises, falls to nothing and stays there."""
    empty, env = site / "empty", environment(site, "rollkeel_doctor")
    (empty / "dump").mkdir()
    for step in range(1, 25):
        rows = [
            {"input": f"prompt {step} {i // 4}", "output": "a", "score": float(step < 12 and i % 2), "step": step}
            for i in range(32)
        ]
        (empty / "dump" / f"{step}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    script = ALONE.format(("rollkeel", "torch", "transformers"), "rollkeel_doctor")
    done = subprocess.run(
        [sys.executable, "-S", "-c", script, "dump", "--json"],
        cwd=empty,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, "")
    said = json.loads(done.stdout)
    assert (said["source"], [cause["id"] for cause in said["causes"]]) == ("verl generations", ["reward_lost"])


@pytest.mark.slow  # a run in a process that loads everything
def test_the_wheels_train_in_an_empty_folder(site: Path) -> None:
    empty, env = site / "empty", environment(site, *FILES)
    said = subprocess.run(
        [sys.executable, "-S", "-c", "import rollkeel; print(rollkeel.__file__)"],
        cwd=empty,
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout.strip() == str(site / "rollkeel" / "rollkeel" / "__init__.py")
    for words in (["train", "default", "sft.steps=2", "run.steps=2", "run.dir=run"], ["simulate", "laptop"]):
        command = [sys.executable, "-S", "-m", "rollkeel", *words]
        done = subprocess.run(command, cwd=empty, env=env, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
    assert (empty / "run" / "report.html").is_file()
