"""A recorded step that cannot be done again cannot be explained: replays must be the record bit for bit, in every loop.

Real runs on a CPU, sampled and trained again from checkpoints and from the start model; one factor changed; files damaged, read
only, missing. Not covered: how tables and files are compared (tests/diagnose/test_replayed.py), servers, GPUs.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tiny_run import TINY, cli, files, start, wait_for

from rollkeel.diagnose.replay.step import distance, replay_step
from rollkeel.errors import BadInput
from rollkeel.loop.job import train
from rollkeel.recipe import load
from rollkeel.record.live import LiveView

STEPS = 4
SHORT = [
    *TINY,
    f"run.steps={STEPS}",
    "sft.steps=25",
    "sampling.max_new_tokens=8",
    "eval.every=0",
    "eval.items=2",
    "checkpoint.every=2",
]
STATEFUL = [*SHORT, "engine.dtype=int4", "objective.phi={drop_rate: 0.05}"]
"""An engine that disagrees with the trainer, and a threshold that follows the batches."""


def made(path: Path, *words: str) -> Path:
    train(load(None, [*words, f"run.dir={path}"]), view=quiet())
    return path


def quiet() -> LiveView:
    import io

    from rich.console import Console

    return LiveView(console=Console(file=io.StringIO()))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 2 and 4 are left: steps 1 and 2 begin from the start model."""
    return made(tmp_path_factory.mktemp("whole") / "run", *STATEFUL)


def verdict(path: Path, step: int, part: str = "both", *overrides: str) -> dict[str, Any]:
    return replay_step(path, step, part, overrides, quiet()).to_json()


@pytest.mark.parametrize(("step", "part"), [(1, "both"), (2, "update"), (3, "rollout"), (4, "both")])
def test_a_step_is_the_record_bit_for_bit(run: Path, step: int, part: str) -> None:
    found = verdict(run, step, part)
    assert found["identical"], found["parting"]
    assert found["start"] == ("the start model" if step <= 2 else "checkpoint of step 2")
    assert found["between"] == (step - 1) % 2
    assert found["rollouts"] == 32
    assert found["tokens"] > 32
    assert found["metrics"] > (5 if part == "rollout" else 100)
    assert found["saved"] == (f"step_{step:06d}" if step % 2 == 0 else "")


def test_nothing_in_the_folder_changes_and_none_of_it_need_be_writable(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    before, folders = files(copy), [copy, *(p for p in copy.rglob("*") if p.is_dir())]
    times = [folder.stat().st_mtime_ns for folder in folders]
    for folder in folders:
        folder.chmod(0o555)
    try:
        assert verdict(copy, 3, "both", "train.lr=1e-2")["identical"]
        assert files(copy) == before
        # A superuser may write all the same: a file that came and went leaves its folder another time.
        assert [folder.stat().st_mtime_ns for folder in folders] == times
    finally:
        for folder in folders:
            folder.chmod(0o755)


def test_another_number_format_of_the_engine_changes_the_gap(run: Path) -> None:
    found = verdict(run, 4, "both", "engine.dtype=fp32")
    assert found["identical"]
    assert found["effects"]["recorded"]["kl_k3"] > 1e-4
    assert found["effects"]["replayed"]["kl_k3"] < 1e-9
    change = next(c for c in found["changes"] if c["name"] == "mismatch/kl_k3")
    assert change["replayed"] < 1e-9 < change["recorded"]
    assert found["distance"]["apart"] > 0


def test_routing_replay_narrows_the_gap(run: Path) -> None:
    found = verdict(run, 4, "update", "rollout.routing=replay")
    assert found["effects"]["rollouts_equal"] == 32
    assert found["effects"]["replayed"]["logprob_gap"] < 0.99 * found["effects"]["recorded"]["logprob_gap"]


def test_a_tighter_threshold_drops_more_and_another_objective_other_tokens(run: Path) -> None:
    tight = verdict(run, 4, "update", "objective.phi=1e-4")
    assert tight["effects"]["replayed"]["dropped"] > tight["effects"]["recorded"]["dropped"] + 10
    assert tight["effects"]["keep_differs"] > 10
    example = tight["effects"]["examples"][0]
    assert (example["recorded"], example["replayed"]) == ("kept", "dropped")
    assert 0 < tight["distance"]["relative"] < 2
    other = verdict(run, 4, "update", "objective.name=icepop", "objective.low=0.98", "objective.high=1.02")
    assert other["effects"]["keep_differs"] > 0
    assert {c["name"] for c in other["changes"]} >= {"mask/icepop/dropped", "mask/kpop/dropped"}


def test_a_factor_that_is_none_changes_nothing(run: Path) -> None:
    found = verdict(run, 3, "update", "eval.items=3")
    assert found["changes"] == []
    assert found["distance"]["apart"] == 0
    assert found["effects"]["keep_differs"] == 0


def tampered(run: Path, to: Path, step: int, column: str, change: float) -> Path:
    """A copy of the run whose recorded step says something else of one token."""
    shutil.copytree(run, to)
    file = to / "rollouts" / f"step_{step:06d}.parquet"
    table = pq.read_table(file)
    values = table[column].to_pylist()
    row = next(i for i, v in enumerate(values) if v)
    values[row][0] += change
    place = table.column_names.index(column)
    pq.write_table(table.set_column(place, column, pa.array(values, table[column].type)), file)
    return to


def test_a_record_that_is_not_what_happened_is_found_out(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tampered(run, tmp_path / "a", 4, "train_logprobs", -1e-6)
    code, out, _ = cli(capsys, "replay", other, "--step", "4", "--only", "update", "--json")
    assert code == 1
    assert json.loads(out)["parting"]["step"] == 4
    assert "train_logprobs" in json.loads(out)["parting"]["place"]
    assert "token 0" in json.loads(out)["parting"]["place"]
    # Sampled log-probs are what the update is made of: the step behind a forged one is no longer reached.
    forged = tampered(run, tmp_path / "b", 3, "logprobs", -0.5)
    found = verdict(forged, 4, "update")
    assert not found["identical"]
    assert found["parting"]["step"] == 3
    other = verdict(tampered(run, tmp_path / "c", 1, "logprobs", -0.5), 2, "update", "train.lr=1e-2")
    assert other["parting"]["step"] == 1
    assert other["effects"] == {}  # nothing to compare a change with
    assert "may not be that of the run" in other["notes"][-1]
    code, out, _ = cli(capsys, "replay", forged, "--step", "3", "--only", "rollout")
    assert code == 1
    assert "not the record" in out
    assert "logprobs of rollout" in out


def test_a_damaged_checkpoint_is_passed_over_and_a_damaged_file_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    weights = copy / "checkpoints" / "step_000002" / "state" / "tensors.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    found = verdict(copy, 3, "update")
    assert found["identical"]
    assert found["start"] == "the start model"
    assert "step_000002" in found["notes"][0]
    file = copy / "rollouts" / "step_000003.parquet"
    file.write_bytes(file.read_bytes()[:100])
    code, _, err = cli(capsys, "replay", copy, "--step", "3")
    assert code == 4
    assert "step_000003" in err
    file.unlink()
    assert cli(capsys, "replay", copy, "--step", "4")[0] == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--step", "9"], "step 9 is not recorded; its steps are 1 to 4"),
        (["--step", "2", "train.lr"], "expected key=value"),
        (["--step", "2", "train.lrr=1"], "did you mean train.lr?"),
        (["--step", "2", "experiment.lag=1"], "a replay keeps experiment.lag"),
        (["--step", "2", "--only", "rollouts"], "did you mean rollout?"),
        ([], "expected --step N, or --objective"),
        (["--step", "2", "--objective", "kpop"], "not both"),
        (["--objective", "kpop", "train.lr=1"], "belong to --step"),
        (["--step", "2", "--only", "update", "train.freeze_router=true"], "frozen"),
    ],
)
def test_bad_input_is_one_line(run: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    code, out, err = cli(capsys, "replay", run, *words)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1


def test_the_terminal_says_it_in_eighty_columns(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = cli(capsys, "replay", run, "--step", "4", "--only", "update", "objective.phi=1e-4")
    assert code == 0
    assert "the same bit for bit" in " ".join(out.split())
    assert "mask/kpop/dropped" in out
    assert max(map(len, out.splitlines())) <= 80


def test_the_objective_of_the_run_drops_what_the_run_dropped(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From recorded tokens alone, threshold after threshold; another one drops other tokens."""
    words = ["replay", run, "--objective", "kpop:phi={drop_rate: 0.05},icepop:low=0.98:high=1.02", "--json"]
    code, out, _ = cli(capsys, *words)
    assert code == 0
    found = json.loads(out)
    recorded, own, other = found["objectives"]
    assert recorded["overall"]["dropped"] == own["overall"]["dropped"] > 0
    assert found["differ"]["share"][0][1] == 0 < found["differ"]["share"][0][2]
    assert other["dropped_tokens"]["positive"][0]["piece"]


def test_objectives_on_a_terminal_and_in_a_page(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "page.html"
    file = run / "rollouts" / "step_000002.parquet"
    code, text, _ = cli(capsys, "replay", file, "--objective", "icepop,dppo_topk_tv", "--html", out)
    assert code == 0
    assert "not judged: dppo_topk_tv" in text
    assert "<svg" in out.read_text()
    assert cli(capsys, "replay", run, "--objective", "kpop", "--steps", "8:9")[0] == 2
    assert cli(capsys, "replay", run, "--objective", "kpop", "--html", tmp_path / "no" / "x.html")[0] == 2
    assert cli(capsys, "replay", tmp_path / "none", "--objective", "kpop")[0] == 2


def test_distance_between_updates_of_known_size() -> None:
    import torch

    start, one, two = ({"w": torch.tensor(v)} for v in ([0.0, 0.0], [3.0, 0.0], [0.0, 4.0]))
    found = distance(start, one, two)
    assert found == {"update": 3.0, "changed_update": 4.0, "apart": 5.0, "relative": 5 / 3, "cosine": 0.0}


def test_an_asynchronous_step_refuses_changes_to_its_sampling() -> None:
    from rollkeel.diagnose.replay.step import changed_config

    config = load(None, ["run.loop=async", "engine.processes=1"])
    with pytest.raises(BadInput, match="use --only update"):
        changed_config(config, "both", ["train.lr=1e-3"])
    assert changed_config(config, "update", ["train.lr=1e-3"]).train.lr == 1e-3


SYNC = [
    *TINY,
    "engine.dtype=fp8",
    "objective.phi={drop_rate: 0.05}",
    "rollout.zero_variance=3",
    "reward.overlong.buffer=2",
    "train.kl_in=reward",
    "checkpoint.every=5",
]
BUDGETED = [
    *TINY,
    "run.loop=budgeted",
    "sampling.max_new_tokens=8",
    "rollout.budget={tokens: 36, capacity: 30, retention: 1}",
    "engine.slots=12",
    "engine.kv=keep",
    "objective.name=dppo_binary_tv",
    "rollout.zero_variance=drop",
    "checkpoint.every=4",
]
ASYNC = [
    *TINY,
    "run.loop=async",
    "rollout.overlap.max_staleness=4",
    "sampling.max_new_tokens=8",
    "engine.processes=1",
    "engine.slots=32",
    "engine.deadline_s=60",
    "objective.name=ac_mis_po",
    "checkpoint.every=5",
]
LAGGED = [*TINY, "experiment.lag=3", "engine.dtype=bf16", "objective.name=m2po", "checkpoint.every=5"]


@pytest.mark.slow
@pytest.mark.parametrize("words", [SYNC, BUDGETED, ASYNC, LAGGED], ids=["sync", "budgeted", "async", "lag"])
def test_twenty_random_steps_of_every_loop_are_bit_identical(tmp_path: Path, words: list[str]) -> None:
    """As a run leaves them: checkpoints of the last two intervals, the rest from the start model."""
    path = made(tmp_path / "run", *words)
    chance = random.Random(5)
    for _ in range(20):
        step, part = chance.randint(1, 12), chance.choice(("both", "both", "rollout", "update"))
        found = verdict(path, step, part)
        assert found["identical"], (step, part, found["parting"])


@pytest.mark.slow
def test_a_run_that_goes_on_is_not_disturbed(tmp_path: Path) -> None:
    path = tmp_path / "run"
    made(tmp_path / "other", *SHORT)  # the warm start is cached
    process = start("train", *SHORT, "run.steps=400", f"run.dir={path}")
    try:
        wait_for(path, process, "update", 4)
        assert verdict(path, 3, "both")["identical"]
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate()
    assert verdict(path, 3, "update")["identical"]


@pytest.mark.slow
def test_helpers_and_dropped_groups_replay(tmp_path: Path) -> None:
    more = ["train.processes=2", "rollout.zero_variance=drop", "train.freeze_router=true", "objective.name=icepop"]
    path = made(tmp_path / "run", *SHORT, *more)
    assert verdict(path, 4)["identical"]
