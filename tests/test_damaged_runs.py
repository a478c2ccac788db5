"""A page or a diagnosis of half a run that does not say so is worse than none: what is damaged is named, and the exit code is 4.

Not covered: how a damaged checkpoint is refused (tests/test_resume.py), what the page shows of the rest (tests/report).
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tiny_run import cli

from rollkeel.config import Config
from rollkeel.recipe import load
from rollkeel.record.rollout_store import write_step
from rollkeel.record.runfolder import RunFolder
from rollkeel.types import GraderSpec, Prompt, Rollout, SamplingParams, Status, TokenSpan

STEPS, LENGTH = 12, 40


def rollouts(step: int) -> list[Rollout]:
    """Eight answers, half of them right, on which engine and trainer agree."""
    made = []
    for i in range(8):
        ids = np.random.default_rng([step, i]).integers(8, 200, LENGTH)
        ids[-1] = 2  # the stop token
        stamp = np.full(LENGTH, step - 1)
        facts = {"kept_mass": np.ones(LENGTH, np.float32), "versions": stamp, "kv_versions": stamp}
        q = np.log(np.random.default_rng([step, i, 1]).uniform(0.2, 1.0, LENGTH)).astype(np.float32)
        span = TokenSpan(token_ids=ids, logprobs=q, **facts)
        prompt = Prompt(
            id=str(step),
            index=step,
            text="?",
            token_ids=np.array([8]),
            answer="1",
            grader=GraderSpec(name="exact"),
            task="t",
        )
        about = {
            "sampling": SamplingParams(),
            "engine": "local",
            "dtype": "fp32",
            "text": str(1 if i % 2 else i + 2),
            "reward": float(i % 2),
        }
        made.append(
            Rollout(id=8 * step + i, group=step, member=i, prompt=prompt, span=span, status=Status.FINISHED, **about)
        )
    return made


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = RunFolder.create(tmp_path / "run", load(overrides=[f"run.steps={STEPS}"]))
    for step in range(1, STEPS + 1):
        folder.append_metrics({"step": step, "reward/mean": 0.5, "optimizer/grad_norm": 1.0})
        made = rollouts(step)
        scored = {r.id: r.span.logprobs for r in made}
        versions = dict.fromkeys(scored, step - 1)
        write_step(folder.rollouts(step), made, step=step, train_logprobs=scored, train_version=versions)
    folder.end("done")
    return folder.path


def cut(run: Path) -> None:
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:3]))


def garbage(run: Path) -> None:
    (run / "metrics.jsonl").write_bytes(os.urandom(2000) + b"\n" + b"garbage\n")


def hole(run: Path) -> None:
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:3] + lines[5:]))


def config(run: Path) -> None:
    (run / "config.yaml").write_text("a: [")


def shorter(run: Path) -> None:
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text[: text.index("train:")])


def parquet(run: Path) -> None:
    file = run / "rollouts" / "step_000004.parquet"
    file.write_bytes(file.read_bytes()[:-200])


DAMAGE: list[tuple[Callable[[Path], None], str]] = [
    (cut, "metrics.jsonl: ends at step 3, rollouts go up to step 12"),
    (garbage, "metrics.jsonl: "),
    (hole, "metrics.jsonl: step 6 follows step 3"),
    (config, "config.yaml cannot be read"),
    (shorter, "config.yaml: damaged, or edited by hand"),
    (parquet, "step_000004.parquet cannot be read"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGE, ids=[d.__name__ for d, _ in DAMAGE])
def test_report_and_doctor_say_what_is_damaged(
    damage: Callable[[Path], None], message: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(run)
    code, out, err = cli(capsys, "report", run)
    assert (code, err.count("\n"), out) == (4, 1, f"{run / 'report.html'}\n"), "the page is written all the same"
    assert message in err
    code, out, err = cli(capsys, "doctor", run, "--json")
    if damage is parquet:
        assert (code, json.loads(out)["healthy"]) == (0, True), "the other files are enough"
        assert any("step_000004.parquet" in note for note in json.loads(out)["notes"])
        return
    assert (code, err.count("\n"), json.loads(out)["healthy"]) == (4, 1, None)
    assert message in err


def test_a_whole_run_is_not_damaged(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = cli(capsys, "doctor", run)
    assert (code, err, "\nhealthy" in out) == (0, "", True)
    assert cli(capsys, "report", run)[::2] == (0, "")


def test_a_run_that_goes_on_or_was_killed_is_not_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = RunFolder.create(tmp_path / "run", Config())
    folder.append_metrics({"step": 1, "reward/mean": 0.5})
    for step in (1, 2):
        write_step(folder.rollouts(step), rollouts(step), step=step)
    with (folder.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "rew')
    assert cli(capsys, "report", folder.path)[::2] == (0, "")
    folder.close()
    assert cli(capsys, "report", folder.path)[::2] == (0, "")


def test_a_report_of_a_run_that_cannot_be_written_to(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    disk = run.parent / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(disk)], capture_output=True, check=False).returncode:
        pytest.skip("a read-only file system can only be mounted by root")
    try:
        subprocess.run(["cp", "-r", str(run), str(disk)], check=True)
        run = disk / "run"
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        code, _, err = cli(capsys, "report", run)
        assert (code, err.count("\n")) == (2, 1), err
        assert "Read-only file system" in err
        assert "or give --out FILE" in err
        page = disk.parent / "page.html"
        assert cli(capsys, "report", run, "--out", page) == (0, f"{page}\n", "")
        assert page.read_text().startswith("<!DOCTYPE html>")
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=False)
