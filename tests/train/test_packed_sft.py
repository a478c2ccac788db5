"""Supervised fine-tuning on cleaned rows, packed: what lies beside a sequence in a pack must not change its loss, and nothing is cut.

Real rows through `rollkeel data clean`, the real source and the tiny model. Covers packs of up to 65,536 tokens (slow). Does not
cover a GPU's kernels.
"""

from __future__ import annotations

import json
import resource
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from rollkeel.batch.packing import pack, plan
from rollkeel.config import Config, DataConfig, ModelConfig, SftConfig
from rollkeel.data import clean, read_options
from rollkeel.errors import BadInput
from rollkeel.loop.assemble import prompt_source
from rollkeel.loop.stages import sft_stage
from rollkeel.models.loading import Policy, load_policy
from rollkeel.recipe import load
from rollkeel.train.logprobs import PolicyForward
from rollkeel.train.sft import Example, run_sft


def cleaned(folder: Path, solutions: Sequence[str]) -> Config:
    """A config that learns from the cleaned rows of prompts `p 0`, `p 1`, … with these solutions."""
    (folder / "rows.jsonl").write_text(
        "".join(
            json.dumps({"prompt": f"p {i}\u200b=", "answer": str(i), "cot": s}) + "\n" for i, s in enumerate(solutions)
        )
    )
    words = ["columns.solution=cot", "near.enabled=false", "part_rows=3"]
    clean([str(folder / "rows.jsonl")], folder / "clean", read_options(None, words))
    data = ["data.task=null", f"data.path={folder / 'clean'}", "data.solution_column=solution", "data.eval_fraction=0"]
    return load(None, ["model.path=preset:tiny-qwen3", *data])


def test_a_cleaned_folder_is_learnt_from(tmp_path: Path) -> None:
    config = cleaned(tmp_path, [f"think {i}" for i in range(7)])
    policy = load_policy(config.model)
    source = prompt_source(config, policy, "sft")
    assert source.size == 7  # of three files
    texts = set()
    for prompt, response in source.demonstrations(range(7)):
        assert response[-1] in policy.stop_token_ids
        texts.add(policy.tokenizer.decode(prompt) + policy.tokenizer.decode(response[:-1]))
    assert texts == {f"p {i}=think {i}" for i in range(7)}
    assert {source.prompt(i).answer for i in range(7)} == {str(i) for i in range(7)}  # RL is still graded on the answer
    metrics = run_sft(policy, source.demonstrations, SftConfig(steps=2, batch_size=7), pack_tokens=65_536)
    assert metrics["sft/steps"] == 2


def test_epochs_count_the_rows_of_the_file(tmp_path: Path) -> None:
    asked = SftConfig(epochs=3, batch_size=4, warmup_steps=0, min_lr_ratio=0.25)
    config = cleaned(tmp_path, ["think"] * 7).model_copy(update={"sft": asked})
    metrics = sft_stage(config, tmp_path / "model")
    assert metrics["sft/steps"] == 6  # 21 examples, 4 at a time
    assert metrics["optimizer/lr"] == 0.25 * asked.lr
    endless = config.model_copy(update={"data": DataConfig()})
    with pytest.raises(BadInput, match=r"sft.epochs=3: generated and mixed examples have no end"):
        sft_stage(endless, tmp_path / "other")


def test_a_demonstration_that_does_not_fit_is_refused_and_not_cut(tmp_path: Path) -> None:
    config = cleaned(tmp_path, ["short", "long " * 2000])
    policy = load_policy(config.model)
    source = prompt_source(config, policy, "sft")
    with pytest.raises(BadInput, match=r"prompt and answer take \d+ tokens, expected at most 4096"):
        source.demonstrations(range(2))


def examples(lengths: Sequence[int]) -> list[Example]:
    rng = np.random.default_rng(0)
    return [(rng.integers(4, 260, 5), rng.integers(4, 260, length)) for length in lengths]


def first_loss(policy: Policy, batch: Sequence[Example], tokens: int) -> float:
    config = SftConfig(steps=1, batch_size=len(batch))
    return run_sft(policy, lambda indices: batch, config, pack_tokens=tokens)["sft/loss"]


@pytest.mark.parametrize("preset", ["tiny-qwen3", "tiny-qwen3-moe"])
def test_packed_loss_is_the_unpacked_loss(preset: str) -> None:
    batch = examples([3, 200, 40, 1, 41, 44, 9, 300, 2, 44])
    alone, packed = (first_loss(load_policy(ModelConfig(path=f"preset:{preset}")), batch, n) for n in (1, 10_000))
    assert packed == pytest.approx(alone, rel=1e-5)


def test_what_lies_beside_a_sequence_does_not_reach_it() -> None:
    """Other neighbours, of other lengths: log-probs of the sequence move by rounding alone."""
    policy = load_policy(ModelConfig(path="preset:tiny-qwen3"))
    forward = PolicyForward(policy.model)
    kept = examples([50])[0]

    def scores(others: list[Example]) -> torch.Tensor:
        sequences = [np.concatenate(e) for e in (others[0], kept, *others[1:])]
        starts = np.cumsum([0, *(len(s) - 5 for s in sequences)])[:-1].tolist()
        micro = pack(range(len(sequences)), sequences, [5] * len(sequences), starts)
        with torch.no_grad():
            return forward.score(micro).logprobs[starts[1] : starts[1] + 50]

    first, second = scores(examples([30, 60])), scores([(np.full(5, 9), np.full(77, 9)), *examples([3, 90])])
    torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_pack_of_65536_tokens_runs_in_bounded_memory() -> None:
    """One forward and backward over 64k tokens in 16 sequences; an attention matrix over the pack would take 16 GiB per head."""
    batch = examples([4091] * 16)
    assert plan([len(p) + len(r) for p, r in batch], 65_536) == [list(range(16))]
    policy = load_policy(ModelConfig(path="preset:tiny-qwen3"))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    packed = first_loss(policy, batch, 65_536)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20 < 6
    alone = first_loss(load_policy(ModelConfig(path="preset:tiny-qwen3")), batch, 1)
    assert packed == pytest.approx(alone, rel=1e-5)
