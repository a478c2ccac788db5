"""Three stages in a row, where a wrong path trains the wrong model without a word: examples/ring.sh, tiny and for real.

Not covered: that the shipped recipes learn anything (they are loaded by tests/test_config.py).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from tiny_run import cli, weights

from rollkeel.loop.stages import pairs_stage
from rollkeel.record.rollout_store import read_step, to_rollouts
from rollkeel.train.preferences import RewardModel

SCRIPT = Path(__file__).resolve().parent.parent / "examples" / "ring.sh"
DATA = ["eval.items=8", "eval.samples=2"]
WORDS = [*DATA, "sft.steps=220", "rollout.prompts=12", "rollout.samples=6", "train.updates_per_step=1", "eval.every=0"]


def ring(out: Path, steps: str = "run.steps=3", words: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    """`words`: further settings of runs and evaluations."""
    more = {
        "ROLLKEEL": f"{sys.executable} -m rollkeel",
        "WORDS": " ".join([*WORDS, steps, *words]),
        "EVALUATE": " ".join([*DATA, *words]),
        "REWARD": "sft.steps=4 sft.batch_size=4 sft.warmup_steps=1 checkpoint.every=2 data.eval_fraction=0.3",
    }
    return subprocess.run(
        ["bash", SCRIPT, out], env={**os.environ, **more}, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("ring") / "out"
    done = ring(out)
    assert done.returncode == 0, done.stderr
    return out


@pytest.mark.slow
def test_every_stage_leaves_what_the_next_one_takes(whole: Path) -> None:
    models = [weights(whole / name) for name in ("sft", "reasoning", "general")]
    assert len({tuple(m.values()) for m in models}) == 3
    assert all((whole / f"{name}.parquet").is_file() for name in ("sft", "reasoning", "general"))
    config = (whole / "general" / "config.yaml").read_text()
    for path in ("reasoning/model", "pairs/prompts.jsonl", "reward_model/model"):
        assert str(whole / path) in config
    model = RewardModel.load(whole / "reward_model" / "model")
    sampled = to_rollouts(read_step(whole / "general" / "rollouts" / "step_000001.parquet"))
    scores = model.score([r.prompt.text + r.text for r in sampled])
    assert [r.reward for r in sampled] == pytest.approx(scores, abs=1e-4)


@pytest.mark.slow
def test_over_a_cluster_the_stages_come_to_the_same_models(whole: Path, tmp_path: Path) -> None:
    """A rank, an engine and a grader each: what actors did otherwise would be seen three stages later."""
    words = ["cluster.trainers=1", "cluster.engines=1", "cluster.graders=1", "reward.graders.workers=1"]
    done = ring(tmp_path / "out", words=words)
    assert done.returncode == 0, done.stderr
    for name in ("sft", "reasoning", "general"):
        assert weights(tmp_path / "out" / name) == weights(whole / name), name
        assert (tmp_path / "out" / name / "actors" / "grader-0.log").is_file()
        ours, theirs = (to_rollouts(read_step(out / f"{name}.parquet")) for out in (tmp_path / "out", whole))
        assert [(r.text, r.reward, r.detail) for r in ours] == [(r.text, r.reward, r.detail) for r in theirs]


@pytest.mark.slow
def test_preference_pairs_are_a_groups_best_against_its_worst(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = pairs_stage(whole / "reasoning", tmp_path / "pairs")
    rows = [json.loads(line) for line in (tmp_path / "pairs" / "pairs.jsonl").read_text().splitlines()]
    prompts = (tmp_path / "pairs" / "prompts.jsonl").read_text().splitlines()
    assert found == {"pairs": float(len(rows)), "prompts": float(len(prompts))}
    assert len(rows) > 4
    assert all(row["chosen"] != row["rejected"] for row in rows)
    assert {row["prompt"] for row in rows} <= {json.loads(line)["prompt"] for line in prompts}
    for source, message in ((whole / "reasoning", "already exists"), (tmp_path, "report.rollouts=true")):
        out = tmp_path / ("pairs" if source != tmp_path else "other")
        code, _, err = cli(capsys, "pairs", source, "--out", out)
        assert (code, err.count("\n")) == (2, 1)
        assert message in err


@pytest.mark.slow
def test_done_stages_are_not_done_again_and_an_interrupted_one_goes_on(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    kept = (out / "reasoning" / "metrics.jsonl").stat().st_mtime_ns
    for name in ("pairs", "reward_model", "general"):
        shutil.rmtree(out / name)
    (out / "general.parquet").unlink()
    again = ring(out)
    assert again.returncode == 0, again.stderr
    assert (out / "reasoning" / "metrics.jsonl").stat().st_mtime_ns == kept
    assert (out / "general.parquet").is_file()
    pairs = [(folder / "pairs" / "pairs.jsonl").read_text() for folder in (whole, out)]
    assert pairs[0] == pairs[1]
