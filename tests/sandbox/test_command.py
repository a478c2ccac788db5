"""`rollkeel-sandbox run` and `doctor`, which are `rollkeel sandbox` too, as a shell sees them: what the program printed, its exit code, one line for the rest."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import rollkeel_sandbox
from rollkeel import cli as core
from rollkeel_sandbox import Level, cli, enclosure, probe
from rollkeel_sandbox.job import KINDS

pytestmark = pytest.mark.skipif(probe().plan().level < Level.NAMESPACES, reason="namespaces do not hold here")


def shell(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[bytes]:
    """As a process of its own, which takes seconds."""
    command, environment = (
        [sys.executable, "-m", "rollkeel_sandbox", *words],
        os.environ | {"PYTHONPATH": str(cwd or "")},
    )
    return subprocess.run(command, capture_output=True, timeout=120, cwd=cwd, env=environment if cwd else None)


@pytest.fixture(params=["rollkeel-sandbox", "rollkeel sandbox"])
def command(
    request: pytest.FixtureRequest, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., subprocess.CompletedProcess[bytes]]:
    """The same in this process, by either name."""

    def run(*words: str) -> subprocess.CompletedProcess[bytes]:
        capfdbinary.readouterr()
        monkeypatch.setattr(sys, "argv", [*request.param.split(), *words])
        with pytest.raises(SystemExit) as ended:
            (cli if request.param == "rollkeel-sandbox" else core).main()
        out, err = capfdbinary.readouterr()
        return subprocess.CompletedProcess(words, ended.value.code or 0, out, err)  # type: ignore[arg-type]

    return run


Command = Callable[..., subprocess.CompletedProcess[bytes]]


def test_run_as_a_process_from_a_checkout_that_nobody_else_may_enter(tmp_path: Path) -> None:
    home = tmp_path / "ä b"
    home.mkdir(mode=0o700)
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(rollkeel_sandbox.__file__).parent, home / "rollkeel_sandbox", ignore=ignore)
    (home / "a.py").write_text("import sys, sqlite3; print('hi', sys.argv[1]); sys.exit(4)")
    done = shell("run", str(home / "a.py"), "x", cwd=home)
    assert (done.returncode, done.stdout, done.stderr) == (4, b"hi x\n", b"")


@pytest.mark.parametrize(
    ("name", "source", "code", "stdout", "stderr"),
    [
        ("a.py", "print('hi', __import__('sys').argv[1])", 0, b"hi x\n", b""),
        ("a.py", "raise SystemExit(5)", 5, b"", b""),
        ("a.py", "import time; time.sleep(9)", 124, b"", b"sandbox: a.py killed after 1 s\n"),
        ("a.sh", "echo $1; kill -TERM $$", 143, b"x\n", b""),
    ],
)
def test_run(tmp_path: Path, command: Command, name: str, source: str, code: int, stdout: bytes, stderr: bytes) -> None:
    (tmp_path / name).write_text(source)
    done = command("run", "--timeout", "1", str(tmp_path / name), "x")
    assert (done.returncode, done.stdout, done.stderr) == (code, stdout, stderr)


def test_run_prints_json(tmp_path: Path, command: Command) -> None:
    (tmp_path / "a.py").write_text("import sys; sys.stdout.buffer.write(b'\\xff'); print(open(0).read())")
    (tmp_path / "in").write_text("fed")
    done = command("run", "--json", "--stdin", str(tmp_path / "in"), str(tmp_path / "a.py"))
    result = json.loads(done.stdout)
    assert (result["status"], result["exit_code"], result["stdout"]) == ("ok", 0, "\\xfffed\n")
    assert result["level"] in ("namespaces", "full")
    assert "seccomp" in result["isolation"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("gone.py",), b"gone.py: no such file"),
        (("--minimum", "fulll", "gone.py"), b"did you mean full"),
        (("--timeout", "0", "gone.py"), b"--timeout"),
    ],
)
def test_bad_input_gets_one_line(command: Command, words: tuple[str, ...], said: bytes) -> None:
    done = command("run", *words)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count(b"\n") == 1


def test_doctor(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(enclosure, "doctor", lambda: {"bubblewrap": ("full", "user: own uid")})
    done = command("doctor", "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 0
    assert found["layers"]["seccomp"] == {"holds": True, "how": "allow list"}
    assert found["level"] == probe().plan().level.name.lower()
    assert found["kinds"]["python"]["runs"]
    assert set(found["kinds"]) == set(KINDS)
    text = command("doctor").stdout.decode()
    assert "bubblewrap    full user: own uid\n" in text
    assert text.splitlines()[-1] == f"isolation level: {found['level']}"
