"""The first file that a newcomer changes is one that `rollkeel init` wrote. If it did not train, or its test could not fail, he would
build on sand. Not covered: that what it writes learns well.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_run import cli, rows

from rollkeel.scaffold import Kind

ROOT = Path(__file__).resolve().parent.parent
SHORT = ["run.steps=2", "sft.steps=5", "rollout.prompts=4", "rollout.samples=4", "eval.every=0", "eval.items=4"]
BROKEN = {
    "task": ("read == item.answer", "read != ''"),
    "environment": ("action.strip() == self.left[0]", "True"),
    "grader": ("same / max(len(read), len(answer), 1)", "same / max(len(answer), 1)"),
    "objective": ("0.5 * terms", "1.0 * terms"),
}
"""A mistake in each, that its own test must find."""


def pytest_there(folder: Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--rootdir", str(folder)]
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.usually("environment")
@pytest.mark.parametrize("kind", list(Kind))
def test_it_trains_and_its_test_tests_it(
    kind: Kind, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = cli(capsys, "init", kind, "word_count", "--out", tmp_path)
    assert code == 0, err
    written = sorted(path.name for path in tmp_path.iterdir())
    assert {"word_count.py", "word_count_test.py", "word_count.yaml"} <= set(written)
    assert all(str(tmp_path / name) in out for name in written)
    for name in written:
        assert not re.search(r"[Ee]xample|scaffold", (tmp_path / name).read_text()), name

    passed = pytest_there(tmp_path)
    assert passed.returncode == 0, passed.stdout
    monkeypatch.chdir(tmp_path)
    code, _, err = cli(capsys, "train", "word_count.yaml", *SHORT, "run.dir=run")
    assert code == 0, err
    assert [row["step"] for row in rows(tmp_path / "run")][-2:] == [1, 2]

    file = tmp_path / "word_count.py"
    right, wrong = BROKEN[kind]
    text = file.read_text()
    assert text.count(right) == 1
    file.write_text(text.replace(right, wrong))
    failed = pytest_there(tmp_path)
    assert failed.returncode == 1, failed.stdout


def test_the_check_of_tasks_takes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli(capsys, "init", "task", "mirror")[0] == 0
    code, out, _ = cli(capsys, "tasks", "check", "mirror.py:Mirror", "-n", "20")
    assert (code, out.splitlines()[-1].endswith("0 failures")) == (0, True)


@pytest.mark.parametrize("name", ["Words", "1st", "two words", "class", "json", "torch", "../up", ""])
def test_a_name_that_cannot_be_is_one_line(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = cli(capsys, "init", "task", name, "--out", tmp_path)
    assert (code, len(err.splitlines())) == (2, 1)
    assert err.startswith("rollkeel: init ")
    assert list(tmp_path.iterdir()) == []


def test_no_file_is_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.yaml").write_text("kept")
    code, _, err = cli(capsys, "init", "grader", "mine", "--out", tmp_path)
    assert (code, "mine.yaml is there already" in err) == (2, True)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("mine.yaml", "kept")]
    code, _, err = cli(capsys, "init", "loss", "mine", "--out", tmp_path)
    assert (code, "loss" in err) == (2, True)
