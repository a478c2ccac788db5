"""The stages of the pipeline over a cluster are those of one process: a model that was trained or measured otherwise would look alike.

Not covered: several hosts, and what refuses to run over a cluster (test_cluster_inputs.py).
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from cluster_kit import TINY, TWO
from safetensors.torch import load_file

from rollkeel.errors import BadInput, Interrupted
from rollkeel.evals.benchmarks import get
from rollkeel.evals.run import run_benchmarks
from rollkeel.loop import stages
from rollkeel.loop.stages import eval_stage, reward_model_stage, rollout_stage, sft_stage
from rollkeel.recipe import load
from rollkeel.record.rollout_store import read_step, to_rollouts
from rollkeel.record.stopping import StopFlag

WORDS = [*TINY, "sft.steps=4", "sft.lr=1e-3"]


def loaded(folder: Path) -> torch.Tensor:
    """All weights."""
    return torch.cat([w.flatten() for _, w in sorted(load_file(folder / "model.safetensors").items())])


@pytest.mark.slow
def test_supervised_training_on_two_ranks_is_that_of_one_process(
    ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = sft_stage(load(None, WORDS), tmp_path / "one"), sft_stage(load(None, [*WORDS, *TWO]), tmp_path / "two")
    assert two.keys() == one.keys()
    assert two == pytest.approx(one, rel=1e-5, abs=1e-5)
    ours, theirs = loaded(tmp_path / "two"), loaded(tmp_path / "one")
    assert float((ours - theirs).norm() / theirs.norm()) < 1e-5
    assert {f.name for f in (tmp_path / "two").iterdir()} == {f.name for f in (tmp_path / "one").iterdir()}

    class Stopped(StopFlag):
        def __call__(self) -> bool:
            return True

    monkeypatch.setattr(stages, "StopFlag", Stopped)
    with pytest.raises(Interrupted, match="it goes on at step"):
        sft_stage(load(None, [*WORDS, *TWO, "sft.steps=4000"]), tmp_path / "three")
    assert (tmp_path / ".unfinished-three" / "warm_start").is_dir()
    assert sorted(f.name for f in tmp_path.iterdir()) == [".unfinished-three", "one", "two"]


@pytest.mark.slow
def test_a_reward_model_of_ranks_is_that_of_one_process(
    ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = tmp_path / "pairs.jsonl"
    rows = [{"prompt": f"{i}=", "chosen": "7" * (i % 5 + 1), "rejected": "1" * (i % 7 + 1)} for i in range(40)]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [*WORDS, "sft.epochs=1", "sft.batch_size=8", "data.eval_fraction=0.3", "data.chat_template=true"]
    one = reward_model_stage(load(None, words), pairs, tmp_path / "one")
    ranks = {"single": ["cluster.trainers=1"], "shards": TWO, "replicas": ["train.mesh.replicate=2"]}
    for name, more in ranks.items():
        out = tmp_path / name
        found = reward_model_stage(load(None, [*words, *more]), pairs, out)
        assert found == (one if name == "single" else pytest.approx(one, rel=1e-5, abs=1e-6))
        ours, theirs = (loaded(folder / "model") for folder in (out, tmp_path / "one"))
        assert float((ours - theirs).norm() / theirs.norm()) < 1e-5
        assert sorted(f.name for f in out.iterdir()) == sorted(f.name for f in (tmp_path / "one").iterdir())
    for name in ("metrics.jsonl", "model/model.safetensors"):
        assert (tmp_path / "single" / name).read_bytes() == (tmp_path / "one" / name).read_bytes()

    class Stopped(StopFlag):
        def __call__(self) -> bool:
            return True

    endless = [*words, *TWO, "sft.epochs=0", "sft.steps=4000"]
    with monkeypatch.context() as inside:
        inside.setattr(stages, "StopFlag", Stopped)
        with pytest.raises(Interrupted, match="the same command goes on"):
            reward_model_stage(load(None, endless), pairs, tmp_path / "three")
    assert (tmp_path / "three" / "checkpoints").is_dir()
    with pytest.raises(BadInput, match=r"three: was begun with sft"):
        reward_model_stage(load(None, [*words, *TWO]), pairs, tmp_path / "three")


@pytest.mark.slow
def test_actors_of_a_cluster_sample_what_one_process_samples(
    ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for words in (TWO, ["cluster.trainers=2", "cluster.engines=2"]):
        alone, spread = load(None, WORDS), load(None, [*WORDS, *words])
        assert eval_stage(spread, None) == eval_stage(alone, None)
        name = f"{len(words[1])}-{words[1][-1]}"
        rollout_stage(alone, Path(f"{name}-one.parquet"), 2)
        rollout_stage(spread, Path(f"{name}-two.parquet"), 2)
        one, two = (to_rollouts(read_step(Path(f"{name}-{who}.parquet"))) for who in ("one", "two"))
        assert [r.text for r in one] == [r.text for r in two]
        assert all(np.allclose(a.span.logprobs, b.span.logprobs, atol=1e-5) for a, b in zip(one, two, strict=True))
    assert sorted(f.suffix for f in tmp_path.iterdir()) == [".parquet"] * 4  # nothing of the actors is left


@pytest.mark.slow
def test_a_benchmark_over_a_cluster_has_the_results_of_one_process(ray_cluster: None, tmp_path: Path) -> None:
    rows = tmp_path / "train.jsonl"
    rows.write_text("".join(json.dumps({"problem": f"{i} + 1 =", "answer": str(i + 1)}) + "\n" for i in range(5)))
    aime, words = get("aime25").load(rows), ["model.path=preset:tiny-qwen3", "sampling.max_new_tokens=3"]
    actors = ["cluster.trainers=2", "cluster.engines=2", "cluster.graders=1", "reward.graders.workers=1"]
    found = {}
    for out, more in (("one", []), ("two", actors)):
        config = load(None, [*words, *more])
        found[out] = run_benchmarks(config, [aime], tmp_path / out, samples=2, greedy=True, contexts={"aime25": 120})
        found[out] = {key: value for key, value in found[out].items() if key != "config"}
        kept = sorted((tmp_path / out / "aime25" / "items.jsonl").read_text().splitlines())
        found[f"{out}-lines"] = [json.loads(line) for line in kept]
    assert found["two"] == found["one"]  # the checksum of the weights too
    assert found["two-lines"] == found["one-lines"]
    with pytest.raises(BadInput, match="seed"):
        run_benchmarks(load(None, [*words, *actors, "run.seed=9"]), [aime], tmp_path / "two", samples=2, greedy=True)
