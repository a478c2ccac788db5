"""A run that was killed must end as if nothing had happened; otherwise no long run can be trusted.

Real processes, killed with SIGKILL in the middle of sampling, updating and checkpoint writing; the log proves where. The
resumed runs are compared with the uninterrupted one bit for bit. Not covered: a power cut, several engine processes, CUDA.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_run import (
    DEADLINE_S,
    STEPS,
    TINY,
    assert_same,
    cli,
    events,
    files,
    killed_in,
    rows,
    start,
    twenty_kills,
    wait_for,
    weights,
)

from rollkeel.loop.job import train
from rollkeel.models.loading import load_policy
from rollkeel.recipe import load
from rollkeel.record.live import LiveView
from rollkeel.record.runfolder import RunFolder
from rollkeel.train import checkpoint
from rollkeel.train.trainer import LocalTrainer


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The uninterrupted run; it also fills the cache of warm starts."""
    run = tmp_path_factory.mktemp("whole") / "run"
    train(load(None, [*TINY, f"run.dir={run}"]))
    found = rows(run)
    assert [row["step"] for row in found] == list(range(STEPS + 1))
    assert len({row.get("reward/mean") for row in found}) > 3
    assert all(row["optimizer/grad_norm"] > 0 for row in found[1:])
    return run


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    """A finished run to damage."""
    return Path(shutil.copytree(whole, tmp_path / "copy"))


@pytest.mark.usually("checkpoint-*")
@pytest.mark.parametrize(
    ("stage", "step", "delay_s"),
    [("rollout", 5, 0.0), ("update", 8, 0.002), ("checkpoint", 3, 0.01)],
)
def test_killed_run_continues_bit_for_bit(stage: str, step: int, delay_s: float, whole: Path, tmp_path: Path) -> None:
    run = killed_in(tmp_path, TINY, stage, step, delay_s)
    train(load(run / "config.yaml"), resume=run)
    assert_same(run, whole)


def test_a_checkpoint_that_ranks_wrote_resumes_in_one_process(copy: Path, whole: Path) -> None:
    """`trainer.save` in place of the trainer's part of the state; its files of several ranks are in tests/train/test_mesh_io.py."""
    config = load(copy / "config.yaml")
    checkpoint.drop_after(copy / "checkpoints", STEPS - 1)
    saved = checkpoint.latest(copy / "checkpoints")
    assert saved is not None
    state = checkpoint.load_state(saved.state)
    trainer = LocalTrainer(load_policy(config.model), config.train, temperature=1.0, total_updates=1)
    trainer.load_state_dict(state.pop("trainer"))

    def write(path: Path) -> dict[str, Any]:
        checkpoint.save_state(path / "state", state)
        files = trainer.save(path / "trainer")
        return {f"trainer/{name}": entry for name, entry in files.items()}

    checkpoint.save(copy / "checkpoints", saved.step, write=write, info=saved.info)
    checkpoint.verify(saved.path)
    train(config, resume=copy)
    assert weights(copy) == weights(whole)
    assert rows(copy) == rows(whole)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_killed_run_of_low_precision_continues_bit_for_bit(dtype: str, tmp_path: Path) -> None:
    """Masters and loss scale are in the checkpoint, and nowhere else."""
    words, whole = [*TINY, "run.steps=4", f"model.dtype={dtype}"], tmp_path / "whole"
    train(load(None, [*words, f"run.dir={whole}"]))
    run = killed_in(tmp_path, words, "update", 3, 0.002)
    train(load(run / "config.yaml"), resume=run)
    assert_same(run, whole)
    last = Path("checkpoints", "step_000004", "state")
    assert files(run / last) == files(whole / last)


@pytest.mark.slow
def test_twenty_kills_at_random_moments(whole: Path, tmp_path: Path) -> None:
    twenty_kills(tmp_path, TINY, whole, each=5)


def test_ctrl_c_checkpoints_and_a_running_run_is_refused(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    process = start("train", *TINY, "checkpoint.every=5", f"run.dir={run}")
    wait_for(run, process, "rollout", 7)
    process.send_signal(signal.SIGSTOP)
    try:
        before = files(run)
        code, _, err = cli(capsys, "train", "--resume", run)
        assert (code, err.count("\n")) == (2, 1)
        assert f"in use by process {process.pid}" in err
        assert files(run) == before
    finally:
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGCONT)
        _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130
    assert err.count("\n") == 1
    assert err.startswith("rollkeel: stopped")
    done = rows(run)[-1]["step"]
    assert 6 <= done < STEPS
    assert (run / "checkpoints" / f"step_{done:06d}" / "manifest.json").is_file()
    assert events(run)[-1]["status"] == "interrupted"
    train(load(run / "config.yaml"), resume=run)
    assert_same(run, whole)


def test_damaged_newest_checkpoint_is_refused_by_name_and_the_one_before_used(
    copy: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(copy / "model")
    state = copy / "checkpoints" / f"step_{STEPS:06d}" / "state" / "tensors.safetensors"
    data = bytearray(state.read_bytes())
    data[len(data) // 2] ^= 1
    state.write_bytes(bytes(data))
    code, out, err = cli(capsys, "train", "--resume", copy)
    assert (code, err) == (0, "")
    assert f"step_{STEPS:06d}: state/tensors.safetensors does not match its checksum" in out
    assert f"resumed at step {STEPS - 1}" in out
    refused = [e["path"] for e in events(copy) if e["event"] == "checkpoint_refused"]
    assert refused == [f"step_{STEPS:06d}"]
    assert_same(copy, whole)


def test_half_written_checkpoint_is_refused_too(copy: Path, whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (copy / "checkpoints" / f"step_{STEPS:06d}" / "manifest.json").unlink()
    (copy / "checkpoints" / ".tmp-step_000013-77").mkdir()
    code, out, _ = cli(capsys, "train", "--resume", copy)
    assert code == 0
    assert f"step_{STEPS:06d}: manifest.json is missing" in out
    assert_same(copy, whole)


def test_only_damaged_checkpoints_are_a_corrupt_artefact(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in (copy / "checkpoints").iterdir():
        (folder / "manifest.json").write_text("{}")
    before = files(copy, ".lock")
    code, _, err = cli(capsys, "train", "--resume", copy)
    assert (code, err.count("\n")) == (4, 1)
    assert "every checkpoint is damaged" in err
    assert files(copy, ".lock") == before


def test_a_warm_start_that_was_stopped_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*TINY, "run.steps=0", "sft.steps=12", "eval.items=2"]
    monkeypatch.setenv("ROLLKEEL_CACHE", str(tmp_path / "cache"))
    train(load(None, [*words, f"run.dir={tmp_path / 'whole'}"]))
    monkeypatch.setenv("ROLLKEEL_CACHE", str(tmp_path / "other"))
    step = LiveView.step

    def stopping(self: LiveView, i: int, metrics: Any) -> None:
        step(self, i, metrics)
        if i == 5:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(LiveView, "step", stopping)
        code, _, err = cli(capsys, "train", *words, f"run.dir={tmp_path / 'run'}")
    assert (code, err) == (130, "rollkeel: stopped during the warm start; it goes on at step 5 of 12 on resume\n")
    code, out, err = cli(capsys, "train", "--resume", tmp_path / "run")
    assert (code, err, "warm start goes on at step 5 of 12" in out) == (0, "", True)
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")
    assert not (tmp_path / "run" / "warm_start").exists()


@pytest.mark.parametrize("damage", ["cut", "empty", "edited"])
def test_a_config_that_is_not_the_runs_own_is_refused_by_name(
    damage: str, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A cut file is valid YAML of fewer settings: the rest was trained with defaults."""
    text = (copy / "config.yaml").read_text()
    other = {"cut": text[: text.index("train:")], "empty": "", "edited": text.replace("digits: 2", "digits: 5")}[damage]
    assert other != text
    (copy / "config.yaml").write_text(other)
    before = files(copy, ".lock")
    code, _, err = cli(capsys, "train", "--resume", copy)
    assert (code, err.count("\n")) == (4, 1)
    assert "config.yaml: damaged, or edited by hand: it is not the file this run wrote" in err
    assert files(copy, ".lock") == before
    (copy / "events.jsonl").unlink()  # the checkpoints know it as well
    assert cli(capsys, "train", "--resume", copy)[0] == 4
    (copy / "config.yaml").write_text(text)
    assert RunFolder.open(copy, lock=False).config.data.options == {"digits": 2}


def test_a_run_without_recorded_digests_is_resumed_as_its_config_stands(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs of earlier versions have none."""
    shutil.rmtree(copy / "checkpoints")
    (copy / "metrics.jsonl").unlink()
    (copy / "events.jsonl").unlink()
    (copy / "config.yaml").write_text((copy / "config.yaml").read_text() + "# mine\n")
    code, _, err = cli(capsys, "train", "--resume", copy, "run.steps=0")
    assert (code, err) == (0, "")


def test_rows_without_a_checkpoint_are_not_thrown_away(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(copy / "checkpoints")
    before = files(copy, ".lock")
    code, _, err = cli(capsys, "train", "--resume", copy)
    assert (code, err.count("\n")) == (4, 1)
    assert f"metrics go up to step {STEPS}, but there is no checkpoint to resume from; put checkpoints/ back" in err
    assert files(copy, ".lock") == before


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("data.options.digits=5", "data.options.digits: the run has 2, got 5; resume with the same digits, or start"),
        ("data.task=addition", "data.task: the run has 'runsum', got 'addition'"),
        ("data.grader=math", "data.grader: the run has 'exact', got 'math'"),
        ("sft.lr=1", "sft.lr: the run has 0.01, got 1.0"),
        ("run.seed=1", "run.seed: the run has 0, got 1"),
        ("rollout.samples=2", "rollout.samples: the run has 4, got 2"),
    ],
)
def test_resume_with_settings_of_another_run_changes_nothing(
    word: str, message: str, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(copy, ".lock")
    words = [word, "data.options={}"] if word.startswith("data.task") else [word]
    code, _, err = cli(capsys, "train", "--resume", copy, *words, "run.steps=20")
    assert (code, err.count("\n")) == (2, 1), err
    assert message in err
    assert files(copy, ".lock") == before


def test_settings_that_may_change_on_resume_are_told_and_logged(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train.lr=1e-4", "eval.every=7", "checkpoint.keep=1", "engine.slots=3", f"run.steps={STEPS + 1}"]
    code, out, err = cli(capsys, "train", "--resume", copy, *words)
    assert (code, err) == (0, "")
    assert "train.lr: 0.001 until here, 0.0001 from here on" in out
    assert "until here" not in out.replace("train.lr: 0.001 until here", ""), "how long, where and how fast is not told"
    (changed,) = (e["changed"] for e in events(copy) if e["event"] == "config_changed")
    assert changed["train.lr"] == [0.001, 0.0001]
    assert sorted(changed) == ["checkpoint.keep", "engine.slots", "eval.every", "run.steps", "train.lr"]
    assert cli(capsys, "train", "--resume", copy)[0] == 0, "the changed config is the run's own now"


def test_resume_of_a_finished_run_has_nothing_to_do(
    copy: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(copy)
    torchless = "import sys; sys.modules['torch'] = None; from rollkeel.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", torchless, "train", "--resume", copy], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"nothing to do: the checkpoint is at step {STEPS} of {STEPS}" in done.stdout
    assert files(copy) == before
    (copy / "report.html").unlink()
    code, out, err = cli(capsys, "train", "--resume", copy)
    assert (code, err) == (0, "")
    assert "nothing to do" in out
    assert (copy / "report.html").is_file()


def test_kill_after_the_last_checkpoint_still_gets_its_model(copy: Path, whole: Path) -> None:
    shutil.rmtree(copy / "model")
    (copy / ".tmp-model-77").mkdir()
    train(load(copy / "config.yaml"), resume=copy)
    assert_same(copy, whole)


def test_more_steps_on_resume_go_on_as_one_run_and_are_remembered(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    train(load(None, [*TINY, "run.steps=9", "eval.every=3", f"run.dir={run}"]))
    code, out, _ = cli(capsys, "train", "--resume", run, f"run.steps={STEPS}")
    assert code == 0
    assert "resumed at step 9" in out
    plain = [{k: v for k, v in row.items() if not k.startswith("eval/")} for row in rows(run)]
    assert plain == [{k: v for k, v in row.items() if not k.startswith("eval/")} for row in rows(whole)]
    assert weights(run) == weights(whole)
    assert load(run / "config.yaml").run.steps == STEPS


STATEFUL = {
    "controller": ["objective={name: ac_mis_po, steps: 8}"],
    "controllers, draws and dynamic sampling": [
        "objective={name: icepop, high: {drop_rate: 0.02}, perturb: [{weight_noise: {sigma: 0.2}}]}",
        "rollout.zero_variance=3",
        "reward.overlong.buffer=2",
        "train.kl_in=reward",
    ],
    "best tokens": ["objective={name: dppo_topk_kl, k: 5, delta: {drop_rate: 0.05}}"],
}


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(words, id=name, marks=() if "controllers" in name else pytest.mark.slow)
        for name, words in STATEFUL.items()
    ],
)
def test_what_an_objective_and_the_data_source_remember_survives_a_kill(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Thresholds, counters of draws and the place in the prompts: the resumed run goes on with the same bounds."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    common = [*TINY, "run.steps=6", "eval.every=0", "checkpoint.keep=9", "engine.dtype=fp8", *words]
    train(load(None, [*common, f"run.dir={whole}"]))
    shutil.copytree(whole, killed)
    for step in (4, 5, 6):  # as if it had died behind step 3
        shutil.rmtree(killed / "checkpoints" / f"step_{step:06d}")
    shutil.rmtree(killed / "model")
    code, out, err = cli(capsys, "train", "--resume", killed)
    assert (code, err) == (0, "")
    assert "resumed at step 3" in out
    bounds = [{k: v for k, v in row.items() if k.startswith("controller/")} for row in rows(whole)]
    assert bounds[1] != bounds[4] != bounds[6]
    assert_same(killed, whole)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.overrides.hidden_size=96", "model has shape"),
        ("model.path=preset:tiny-qwen3", "weight model.layers.0"),
        ("objective.name=grpo", "objective grpo"),
        ("train.lrr=1", "did you mean train.lr?"),
    ],
)
def test_resume_with_another_model_or_objective_changes_nothing(
    override: str, message: str, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for extra in ([], ["run.steps=20"]):
        before = files(copy, ".lock")
        code, _, err = cli(capsys, "train", "--resume", copy, override, *extra)
        assert (code, err.count("\n")) == (2, 1), err
        assert message in err
        assert files(copy, ".lock") == before


def test_without_checkpoints_on_the_way_a_run_keeps_only_what_a_resume_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A small disk: nothing at the start, and at the end no second copy of the model. A killed run of that kind starts over."""
    words, other, run = [*TINY, "eval.every=2"], tmp_path / "other", tmp_path / "run"
    train(load(None, [*words, "run.steps=4", f"run.dir={other}"]))
    train(load(None, [*words, "run.steps=2", "checkpoint.every=0", f"run.dir={run}"]))
    (saved,) = (run / "checkpoints").iterdir()
    assert sorted(path.name for path in saved.iterdir()) == ["manifest.json", "state"]
    assert cli(capsys, "train", "--resume", run)[0] == 0
    assert cli(capsys, "train", "--resume", run, "run.steps=4")[0] == 0
    assert_same(run, other)
    shutil.rmtree(run / "checkpoints")
    shutil.rmtree(run / "model")
    assert cli(capsys, "train", "--resume", run)[0] == 0
    assert_same(run, other)
