"""A run is resumed from one integer, so prompt `index` must be the same for ever; and what does not fit the model must be refused.

Covers `PromptSource` over generated tasks and files with the real byte-level tokenizer. Does not cover subword tokenizers, whose
prompt and response are tokenised apart in the same way.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollkeel.config import DataConfig
from rollkeel.errors import BadInput
from rollkeel.models.presets import EOS, VOCAB_SIZE, build_tokenizer
from rollkeel.tasks.base import content_hash
from rollkeel.tasks.source import PromptSource

TOKENIZER = build_tokenizer()


def source(config: DataConfig | None = None, **changes: Any) -> PromptSource:
    arguments: dict[str, Any] = {"seed": 0, "split": "train", "vocab_size": VOCAB_SIZE, "max_prompt": 64, **changes}
    return PromptSource(config or DataConfig(), TOKENIZER, **arguments)


def file_config(folder: Path, rows: list[tuple[str, str]], **changes: Any) -> DataConfig:
    path = folder / "math.jsonl"
    path.write_text("".join(json.dumps({"prompt": p, "answer": a}) + "\n" for p, a in rows))
    return DataConfig(task=None, path=str(path), **changes)


def test_generated_prompt_carries_what_scoring_needs() -> None:
    prompt = source().prompt(7)
    assert prompt.index == 7
    assert prompt.task == "runsum"
    assert prompt.token_ids.dtype == np.int64
    assert TOKENIZER.decode(prompt.token_ids) == prompt.text
    assert len(prompt.token_ids) == 13  # one token per character: 12 digits and "="
    assert prompt.id == content_hash("runsum", prompt.text, prompt.answer)
    assert prompt.grader.name == "task"
    options = json.loads(json.dumps(prompt.grader.options))
    assert options["item"] == {"text": prompt.text, "answer": prompt.answer, "metadata": {}}


@pytest.mark.parametrize("task", ["runsum", "addition", "countdown"])
def test_index_alone_decides(task: str) -> None:
    config = DataConfig(task=task)
    one = [source(config).prompt(i).id for i in (5, 3, 5, 0)]
    together = [p.id for p in source(config).prompts([0, 3, 5])]
    assert one == [together[2], together[1], together[2], together[0]]
    assert source(config, seed=1).prompt(5).id != one[0]


def test_splits_share_no_prompt() -> None:
    ids = {s: {p.text for p in source(split=s).prompts(range(300))} for s in ("sft", "train", "eval")}
    assert not ids["sft"] & ids["train"]
    assert not ids["eval"] & (ids["train"] | ids["sft"])


def test_demonstration_is_prompt_and_gold_with_eos() -> None:
    sft = source(split="sft")
    prompt_ids, response_ids = sft.demonstration(4)
    prompt = sft.prompt(4)
    assert prompt_ids.tolist() == prompt.token_ids.tolist()
    assert response_ids.dtype == np.int64
    assert response_ids[-1] == EOS
    assert TOKENIZER.decode(response_ids[:-1]) == prompt.answer
    assert source(split="sft", eos_token_id=9).demonstration(4)[1][-1] == 9


def test_label_noise_is_reproducible_and_leaves_prompts_alone() -> None:
    sft = source(split="sft")
    clean, noisy = sft.demonstrations(range(200)), sft.demonstrations(range(200), 0.05)
    again = [source(split="sft").demonstration(i, 0.05) for i in range(200)]
    assert all(np.array_equal(a[0], b[0]) for a, b in zip(clean, noisy, strict=True))
    assert all(np.array_equal(a[1], b[1]) for a, b in zip(noisy, again, strict=True))
    share_right = np.mean([np.array_equal(a[1], b[1]) for a, b in zip(clean, noisy, strict=True)])
    assert abs(share_right - 0.95**12) < 0.15


def test_file_epochs_are_shuffled_permutations(tmp_path: Path) -> None:
    config = file_config(tmp_path, [(f"q{i}", f"{i}") for i in range(40)])
    train, held_out = source(config), source(config, split="eval")
    n, m = train.size, held_out.size
    assert n is not None
    assert m is not None
    assert n + m == 40
    epochs = [[train.prompt(e * n + i).text for i in range(n)] for e in range(3)]
    assert len({tuple(e) for e in epochs}) == 3
    assert {frozenset(e) for e in epochs} == {frozenset(epochs[0])}
    assert not set(epochs[0]) & {held_out.prompt(i).text for i in range(m)}
    # Out of order, as after a resume in the middle of an epoch.
    fresh = source(config)
    assert [fresh.prompt(i).text for i in (2 * n + 1, 0, n)] == [epochs[2][1], epochs[0][0], epochs[1][0]]
    assert [source(config, seed=1).prompt(i).text for i in range(n)] != epochs[0]


def test_file_prompt_and_demonstration(tmp_path: Path) -> None:
    config = file_config(tmp_path, [("two plus two?", "4")], eval_fraction=0.0, grader="numeric")
    prompt = source(config).prompt(3)
    assert (prompt.text, prompt.answer, prompt.task, prompt.grader.name) == ("two plus two?", "4", "math", "numeric")
    assert prompt.metadata == {"split": "train", "row": 1}
    assert source(config, split="sft").size == 1
    assert TOKENIZER.decode(source(config, split="sft").demonstration(0)[1]) == "4<eos>"


def test_a_split_without_rows_is_refused(tmp_path: Path) -> None:
    config = file_config(tmp_path, [("a", "1")], eval_fraction=0.0)
    with pytest.raises(BadInput, match=r"none of 1 rows is in the eval split at data\.eval_fraction=0\.0; raise it"):
        source(config, split="eval")


def test_chat_template(tmp_path: Path) -> None:
    prompt = source(DataConfig(chat_template=True)).prompt(0)
    assert prompt.text == f"<|user|>{source().prompt(0).text}<|end|><|assistant|>"
    assert len(prompt.token_ids) == 13 + 3  # the template's markers are single tokens
    bare = build_tokenizer()
    bare.chat_template = None
    with pytest.raises(BadInput, match="expected a tokenizer with a chat template"):
        PromptSource(DataConfig(chat_template=True), bare, seed=0, split="train", vocab_size=288, max_prompt=64)


def test_a_prompt_longer_than_the_context_names_index_length_and_limit(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"runsum train prompt 2 '\d+=': 13 tokens, expected at most 12; shorten"):
        source(max_prompt=12).prompt(2)
    assert len(source(max_prompt=13).prompt(2).token_ids) == 13
    config = file_config(tmp_path, [("x" * 65, "1")], eval_fraction=0.0)
    with pytest.raises(BadInput, match=r"math train prompt 0 \(row 1\) 'xxx.*': 65 tokens, expected at most 64"):
        source(config).prompt(0)


def test_a_demonstration_longer_than_the_context() -> None:
    assert source(split="sft", context=26).demonstration(0)[1].shape == (13,)
    with pytest.raises(BadInput, match="prompt and answer take 26 tokens, expected at most 25"):
        source(split="sft", context=25).demonstration(0)


def test_token_ids_outside_the_vocabulary() -> None:
    with pytest.raises(BadInput, match=r"token id \d+ at position \d+ is outside the model's vocabulary of 30"):
        source(vocab_size=30).prompt(0)
    with pytest.raises(BadInput, match="token id 400 at position 12 is outside"):
        source(split="sft", eos_token_id=400).demonstration(0)


def test_special_text_in_answers_and_missing_eos(tmp_path: Path) -> None:
    config = file_config(tmp_path, [("q", "4<eos>5")], eval_fraction=0.0)
    with pytest.raises(BadInput, match="the answer holds the EOS token 2 before its end"):
        source(config, split="sft").demonstration(0)
    no_eos = build_tokenizer()
    no_eos.eos_token = None
    with pytest.raises(BadInput, match="expected a tokenizer with an EOS token"):
        PromptSource(DataConfig(), no_eos, seed=0, split="sft", vocab_size=288, max_prompt=64).demonstration(0)


def test_bad_arguments() -> None:
    with pytest.raises(BadInput, match=r"split 'evl': unknown; did you mean eval\?"):
        source(split="evl")
    with pytest.raises(BadInput, match="expected ≥ 0, got -1"):
        source().prompt(-1)
    with pytest.raises(BadInput, match="unknown option 'digit'"):
        source(DataConfig(options={"digit": 3}))
    assert source().prompts([]) == []
