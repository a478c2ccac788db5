"""A recipe that loads and never trained may hold settings that exclude each other, or a rate at which nothing moves.

Every file under rollkeel/recipes/papers runs three steps: its own objective, dtype, masters, schedule, replay, grader and rates, on a
model, lengths and batches of toy size. What the papers say of lengths, precision, replay and C3PO++ is written down again
here, with its place. Not covered: the papers' models and batches, engines of kind vllm, whether anything is learnt.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import rows

from rollkeel.config import ModelConfig
from rollkeel.loop.job import train
from rollkeel.loop.stages import sft_stage
from rollkeel.models.loading import load_policy
from rollkeel.recipe import RECIPES, load
from rollkeel.train import checkpoint
from rollkeel.train.preferences import RewardModel

RECIPE = sorted(file.stem for file in (RECIPES / "papers").glob("*.yaml"))
FAST = ("dppo_dense_base", "ring_1t_sft")
SLOW = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in RECIPE]

# Longest response, longest sequence (None: not given), replay (R3), budget (C3PO++), staleness in updates at the step's start.
NEWEST = {"experiment.lag": 0, "run.loop": "sync", "rollout.routing": "record"}
RUNS: dict[str, dict[str, Any]] = {
    # DPPO, Appendix F, Table 1: max_prompt_length 1024 and max_response_length; R3 in one experiment alone.
    "dppo_dense_base": {**NEWEST, "sampling.max_new_tokens": 8000, "engine.max_length": 9024},
    "dppo_moe_base": {**NEWEST, "sampling.max_new_tokens": 16384, "engine.max_length": 17408},
    "dppo_moe_base_lora": {**NEWEST, "sampling.max_new_tokens": 8000, "engine.max_length": 9024},
    "dppo_moe_base_r3": {**NEWEST, "sampling.max_new_tokens": 16384, "engine.max_length": 17408, "rollout.routing": "replay"},
    "dppo_moe_thinking": {**NEWEST, "sampling.max_new_tokens": 16384, "engine.max_length": 17408},
    # DPPO, Appendix D: a context of 8,000 tokens, models trained in BFloat16.
    "dppo_stability": {**NEWEST, "engine.max_length": 8000},
    # Ring-1T, section 2.3.4: C3PO++ in reasoning RL alone.
    "ring_1t_reasoning_rl": {**NEWEST, "sampling.max_new_tokens": 65536, "run.loop": "budgeted"},
    "ring_1t_general_rl": {**NEWEST, "sampling.max_new_tokens": 32768},
    # Ring-1T, section 2.2: packs of 64k tokens, 3 epochs, a cosine behind 30 steps of warm-up.
    "ring_1t_sft": {"train.micro_batch_tokens": 65536, "sft.epochs": 3, "sft.warmup_steps": 30, "run.steps": 0},
    # Stability study, section 4.1: at most 8K tokens of response.
    **{f"stability_study_{run}": {**NEWEST, "sampling.max_new_tokens": 8192} for run in ("distortion", "grpo", "gspo", "noise", "tis")},
    # AC-MIS-PO, section 4.1: data 256 iterations old, one update each; at most 1,024 tokens; bfloat16.
    "ac_mis_po": {**NEWEST, "sampling.max_new_tokens": 1024, "experiment.lag": 256, "train.updates_per_step": 1},
}  # fmt: skip


@pytest.mark.parametrize("name", RECIPE)
def test_precision_lengths_replay_and_schedule_are_the_paper_s(name: str) -> None:
    config = load(f"papers/{name}").model_dump()

    def value(key: str) -> Any:
        section, leaf = key.split(".")
        return config[section][leaf]

    assert {key: value(key) for key in RUNS[name]} == RUNS[name]
    assert config["model"]["dtype"] == "bfloat16"
    assert name == "ring_1t_sft" or config["engine"]["dtype"] == "bf16"


def written(file: Path) -> Path:
    """Sums, every other one wrong in its worked answer, so that rewards differ within a group."""
    numbers = [(a, b) for a in range(3) for b in range(3)] * 2
    lines = [
        {"prompt": f"{a}+{b}=", "problem": f"{a}+{b}=", "answer": str(a + b), "solution": f"\\boxed{{{a + b + i % 2}}}"}
        for i, (a, b) in enumerate(numbers)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with rows, for each preset a policy that answers half of them right, and a reward model. Embeddings are tied to the head: those
    of tokens that never occur would otherwise get no gradient."""
    folder = tmp_path_factory.mktemp("start")
    data = ["data.task=null", f"data.path={written(folder / 'rows.jsonl')}", "data.solution_column=solution"]
    for preset in ("tiny-qwen3", "tiny-qwen3-moe"):
        words = [
            f"model.path=preset:{preset}",
            "model.overrides.tie_word_embeddings=true",
            "data.eval_fraction=0.0",
            "sft.steps=60",
            "sft.batch_size=18",
            "sft.lr=1e-2",
        ]
        sft_stage(load(None, [*words, *data]), folder / preset)
    RewardModel.from_policy(load_policy(ModelConfig(path="preset:tiny-qwen3"))).save(folder / "judge")
    return folder


@pytest.mark.parametrize("name", SLOW)
def test_three_toy_steps_move_the_weights(name: str, start: Path, tmp_path: Path) -> None:
    pytest.importorskip("math_verify")
    preset = (
        "tiny-qwen3"
        if load(f"papers/{name}").model.path in ("Qwen/Qwen3-8B-Base", "Qwen/Qwen3-1.7B")
        else "tiny-qwen3-moe"
    )
    words = [
        f"model.path={start / preset}",
        f"data.path={start / 'rows.jsonl'}",
        "data.chat_template=false",
        "eval.items=2",
    ]
    words += [
        "eval.every=0",
        "eval.sets=[]",
        "eval.samples=1",
        "rollout.prompts=8",
        "run.steps=3",
        f"run.dir={tmp_path / 'run'}",
    ]
    words += ["engine.kind=local", "engine.max_length=32", "sampling.max_new_tokens=12"]
    if name == "ring_1t_reasoning_rl":
        words += ["rollout.budget.tokens=500", "rollout.budget.capacity=64"]
    if name == "ring_1t_general_rl":
        rows_of = str(start / "rows.jsonl")
        judged = {"answer_column": "prompt", "grader": "reward_model", "grader_options": {"path": str(start / "judge")}}
        rules = {"path": rows_of, "grader": "row", "grader_options": {"grader": "math"}, "name": "instructions"}
        sources = [{"path": rows_of, "name": "questions", **judged}, rules]
        words = [word for word in words if not word.startswith("data.path=")] + [f"data.sources={json.dumps(sources)}"]
    if name == "ring_1t_sft":
        config = load(
            f"papers/{name}", [*words, "data.eval_fraction=0.0", "sft.batch_tokens=260", "sft.warmup_steps=1"]
        )
        metrics = sft_stage(config, tmp_path / "model")
        assert (metrics["sft/steps"], metrics["optimizer/lr"]) == (3, 0.0)
        return moved(start / preset, tmp_path / "model")
    train(load(f"papers/{name}", words))
    steps = [row for row in rows(tmp_path / "run") if row["step"] > 0]
    assert len(steps) == 3
    assert steps[-1]["optimizer/changed_share"] > 0.9
    saved = checkpoint.latest(tmp_path / "run" / "checkpoints")
    assert saved is not None
    state = checkpoint.load_state(saved.state)["trainer"]
    assert {w.dtype for w in state["weights"].values()} == {torch.float32 if "lora" in name else torch.bfloat16}


def moved(before: Path, after: Path) -> None:
    """More than 90 % of the weights of two saved models differ."""
    one, two = (load_policy(ModelConfig(path=str(path))).model.state_dict() for path in (before, after))
    changed = sum(int((one[n] != two[n]).sum()) for n in one)
    assert changed > 0.9 * sum(w.numel() for w in one.values())
