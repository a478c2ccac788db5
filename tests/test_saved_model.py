"""What a run leaves is an ordinary Hugging Face folder, and it holds the policy that was trained, not a near miss of it.

Compared: log-probs of the live trainer against plain transformers on the folder. Not covered: other libraries' loaders.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import torch
from tiny_run import TINY
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from rollkeel.batch.build import build_batch
from rollkeel.loop.job import train
from rollkeel.loop.run import Run
from rollkeel.loop.stages import sft_stage
from rollkeel.models.presets import build_preset
from rollkeel.recipe import load
from rollkeel.record.rollout_store import read_step, to_rollouts

# The entropy term moves the weights whatever the rewards are.
WORDS = [*TINY, "run.steps=3", "sft.steps=10", "train.entropy_coefficient=0.1", "eval.every=0", "checkpoint.every=2"]


@torch.no_grad()
def transformers_logprobs(folder: Path, sequences: tuple, prompt_lengths: tuple[int, ...]) -> torch.Tensor:
    """`[T]` log-probs of all response tokens, one sequence at a time, without padding, packing or chunks."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    out = []
    for sequence, start in zip(sequences, prompt_lengths, strict=True):
        ids = torch.from_numpy(sequence)
        logprobs = model(input_ids=ids[None]).logits[0].float().log_softmax(-1)
        out.append(logprobs[start - 1 : -1].gather(1, ids[start:, None])[:, 0])
    return torch.cat(out)


@pytest.mark.parametrize("preset", ["tiny-qwen3-moe", "tiny-qwen3", "tiny-qwen3-tied"])
def test_saved_model_reproduces_the_trainers_logprobs(
    preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live: list[Run] = []
    monkeypatch.setattr("rollkeel.loop.job._last_word", live.append)
    path = train(load(None, [*WORDS, f"model.path=preset:{preset}", f"run.dir={tmp_path / 'run'}"]))

    rollouts = to_rollouts(read_step(path / "rollouts" / "step_000003.parquet"))
    batch = build_batch(rollouts, [0.0] * len(rollouts), "token_mean")
    trained = live[0].trainer.logprobs(batch)[0]
    saved = transformers_logprobs(path / "model", batch.sequences, batch.prompt_lengths)
    assert (trained - saved).abs().max() < 1e-5

    newest = transformers_logprobs(
        path / "checkpoints" / "step_000003" / "model", batch.sequences, batch.prompt_lengths
    )
    assert torch.equal(newest, saved)
    before = transformers_logprobs(
        path / "checkpoints" / "step_000002" / "model", batch.sequences, batch.prompt_lengths
    )
    assert (before - saved).abs().max() > 1e-3  # the comparison can fail: one step earlier is another policy

    tokenizer = AutoTokenizer.from_pretrained(path / "model")
    assert tokenizer(rollouts[0].prompt.text, add_special_tokens=False)["input_ids"] == list(
        rollouts[0].prompt.token_ids
    )


def test_a_run_can_start_from_the_model_another_one_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = train(load(None, [*WORDS, "run.steps=1", f"run.dir={tmp_path / 'first'}"]))
    words = ["run.steps=0", "sft.steps=0", f"model.path={first / 'model'}", f"run.dir={tmp_path / 'second'}"]
    second = train(load(None, [*WORDS, *words]))
    one, other = ((path / "model" / "model.safetensors").read_bytes() for path in (first, second))
    assert one == other


def test_config_and_modes_are_those_of_an_ordinary_save(tmp_path: Path) -> None:
    """Otherwise whoever generates with the folder recomputes every token, and another user cannot read it."""
    made, _ = build_preset("tiny-qwen3")
    assert made.config.use_cache is True
    before = os.umask(0o027)
    try:
        small = [
            *WORDS,
            "run.steps=1",
            "sft.steps=1",
            "eval.items=2",
            "checkpoint.every=1",
            "model.path=preset:tiny-qwen3",
        ]
        path = train(load(None, [*small, f"run.dir={tmp_path / 'run'}"]))
        sft_stage(load(None, [*small, f"model.path={path / 'model'}"]), tmp_path / "sft")
    finally:
        os.umask(before)
    folders = [path / "model", *(path / "checkpoints").iterdir(), tmp_path / "sft"]
    saved = [file for folder in folders for file in folder.rglob("*") if file.is_file()]
    assert len([file for file in saved if file.name == "model.safetensors"]) == len(folders)
    assert {stat.S_IMODE(file.stat().st_mode) for file in saved} == {0o640}
    for file in (file for file in saved if file.name == "config.json"):
        assert AutoConfig.from_pretrained(file.parent).use_cache is True
