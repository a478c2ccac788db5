"""A reward model that ranks wrongly, or scores by the company a text keeps, turns RL against its users, quietly.

The loss against numbers by hand, scores alone and in batches, training on synthetic preferences, and resuming bit for bit. Not
covered: pretrained reward models, whose quality is their own affair.
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollkeel.config import ModelConfig, SftConfig
from rollkeel.errors import BadInput, Interrupted
from rollkeel.models.loading import load_policy, save_policy
from rollkeel.train.mesh import Mesh
from rollkeel.train.preferences import Pair, RewardModel, bradley_terry, load_pairs, split_pairs
from rollkeel.train.reward_training import Training, _batch, _metrics, train_reward_model
from rollkeel.train.sharded import Sharded

FEW = SftConfig(steps=6, batch_size=4, lr=1e-3, warmup_steps=2)


def fresh(seed: int = 0, preset: str = "tiny-qwen3") -> RewardModel:
    return RewardModel.from_policy(load_policy(ModelConfig(path=f"preset:{preset}")), seed)


def sevens(count: int, seed: int = 0) -> list[Pair]:
    """Of two answers of ten digits, the one with more 7s is preferred."""
    rng = random.Random(seed)
    pairs: list[Pair] = []
    while len(pairs) < count:
        a, b = ("".join(rng.choice("0123456777") for _ in range(10)) for _ in range(2))
        if a.count("7") != b.count("7"):
            chosen, rejected = sorted((a, b), key=lambda text: -text.count("7"))
            pairs.append(Pair(prompt=f"{rng.randrange(10**6)}=", chosen=chosen, rejected=rejected))
    return pairs


@pytest.mark.parametrize(
    ("chosen", "rejected", "margin", "loss", "gradient"),
    [
        # Equal rewards: ln 2, and half a unit each way.
        (0.0, 0.0, 0.0, math.log(2), 0.5),
        # σ(ln 3) = 3/4.
        (math.log(3), 0.0, 0.0, math.log(4 / 3), 0.25),
        (0.0, math.log(3), 0.0, math.log(4), 0.75),
        # A margin of ln 3 that is just met.
        (math.log(3), 0.0, math.log(3), math.log(2), 0.5),
        (1000.0, 0.0, 0.0, 0.0, 0.0),
        (0.0, 1000.0, 0.0, 1000.0, 1.0),
    ],
)
def test_bradley_terry_and_its_gradient_by_hand(
    chosen: float, rejected: float, margin: float, loss: float, gradient: float
) -> None:
    c, r = (torch.tensor([x], dtype=torch.float64, requires_grad=True) for x in (chosen, rejected))
    value = bradley_terry(c, r, margin)
    value.sum().backward()
    assert value.item() == pytest.approx(loss, abs=1e-12)
    assert c.grad is not None
    assert r.grad is not None
    assert (c.grad.item(), r.grad.item()) == pytest.approx((-gradient, gradient), abs=1e-12)


@given(st.floats(-30, 30), st.floats(-30, 30), st.floats(-30, 30))
def test_swapping_the_sides_swaps_the_chances_and_a_shift_changes_nothing(a: float, b: float, shift: float) -> None:
    a_, b_ = torch.tensor([a], dtype=torch.float64), torch.tensor([b], dtype=torch.float64)
    wins, loses = torch.exp(-bradley_terry(a_, b_)).item(), torch.exp(-bradley_terry(b_, a_)).item()
    assert wins + loses == pytest.approx(1.0, abs=1e-9)
    assert bradley_terry(a_ + shift, b_ + shift).item() == pytest.approx(bradley_terry(a_, b_).item(), abs=1e-9)


@pytest.mark.parametrize("preset", ["tiny-qwen3", "tiny-qwen3-moe"])
def test_a_text_scores_the_same_alone_and_in_any_batch(preset: str) -> None:
    model = fresh(preset=preset)
    texts = ["", "7", "12=7777777", "x" * 150, "12=7777777", "a<pad>", "Ünicode €"]
    alone = [model.score([text])[0] for text in texts]
    together = model.score(texts)
    model.max_tokens = 40
    small = model.score(texts)
    assert together == pytest.approx(alone, abs=1e-5)
    assert small == pytest.approx(alone, abs=1e-5)
    assert model.score(texts) == small
    assert together[2] == pytest.approx(together[4], abs=1e-6)
    assert len({round(s, 6) for s in together}) >= 5
    assert model.score([]) == []


def test_saved_and_loaded_scores_the_same(tmp_path: Path) -> None:
    model = fresh()
    model.save(tmp_path / "rm")
    assert RewardModel.load(tmp_path / "rm").score(["7", "77"]) == model.score(["7", "77"])


def test_the_body_is_the_policys_and_the_head_is_drawn_from_the_seed() -> None:
    policy = load_policy(ModelConfig(path="preset:tiny-qwen3"))
    one, other, again = (RewardModel.from_policy(policy, seed) for seed in (0, 1, 0))
    body = policy.model.base_model.state_dict()
    assert all(torch.equal(body[name], tensor) for name, tensor in one.model.base_model.state_dict().items())
    assert one.score(["7"]) == again.score(["7"]) != other.score(["7"])
    assert policy.model.config.num_labels != 1  # the policy's own config is left alone


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("saved", [False, True])
def test_weights_that_are_drawn_or_read_in_parts_are_those_of_the_whole(
    dtype: Any, saved: bool, tmp_path: Path
) -> None:
    config = ModelConfig(path="preset:tiny-qwen3-moe", dtype=dtype)
    if saved:
        save_policy(load_policy(config), tmp_path)
        config = ModelConfig(path=str(tmp_path), dtype=dtype)
    whole, parts = (RewardModel.from_policy(load_policy(config, whole=whole), 3) for whole in (True, False))
    assert all(p.is_meta for p in parts.model.parameters())
    Sharded(parts.model, Mesh(), None, parts.source, torch.device("cpu"))
    expected = dict(whole.model.named_parameters())
    assert [name for name, _ in parts.model.named_parameters()] == list(expected)
    assert all(torch.equal(p, expected[name]) for name, p in parts.model.named_parameters())
    assert parts.score(["7", "77"]) == whole.score(["7", "77"])


def test_what_is_no_reward_model_is_refused(tmp_path: Path) -> None:
    policy = load_policy(ModelConfig(path="preset:tiny-qwen3"))
    policy.model.save_pretrained(tmp_path / "lm")
    policy.tokenizer.save_pretrained(tmp_path / "lm")
    with pytest.raises(BadInput, match=r"no trained classifier, it lacks score\.weight|expected a classifier with one"):
        RewardModel.load(tmp_path / "lm")
    with pytest.raises(BadInput, match=r"config\.json"):
        RewardModel.load(tmp_path)
    model = fresh().model
    model.config.num_labels = 2
    with pytest.raises(BadInput, match="one logit, got 2"):
        RewardModel(model, policy.tokenizer)
    with pytest.raises(BadInput, match="4097 tokens, expected at most 4096"):
        fresh().score(["7" * 4097])


def test_micro_batches_change_neither_loss_nor_weights(tmp_path: Path) -> None:
    found = []
    for name, tokens in (("one", 10**6), ("many", 1)):
        training = Training(sft=FEW.model_copy(update={"steps": 2}), pack_tokens=tokens)
        metrics = train_reward_model(fresh, sevens(8), sevens(8, 1), training, tmp_path / name)
        found.append([metrics["train/loss"], metrics["eval/loss"], metrics["optimizer/grad_norm"]])
    assert found[0] == pytest.approx(found[1], rel=1e-4)


def test_metrics_by_hand() -> None:
    rewards = {"a": 2.0, "b": 1.0, "c": 0.0, "d": 0.0}
    chosen, rejected = torch.tensor([[rewards[side] for side in pair] for pair in ("ab", "ba", "cd", "ac")]).T
    found = _metrics(chosen, rejected, torch.zeros(4))
    # Right, wrong, tied, right: 2.5 of 4; sample std of (1, 0, ½, 1) is √(11/48).
    assert found["accuracy"] == 0.625
    assert found["accuracy_se"] == pytest.approx(math.sqrt(11 / 48) / 2)
    assert found["margin"] == pytest.approx((1 - 1 + 0 + 2) / 4)
    losses = [math.log1p(math.exp(-gap)) for gap in (1, -1, 0, 2)]
    assert found["loss"] == pytest.approx(sum(losses) / 4)


def test_every_pair_is_seen_once_before_any_is_seen_again() -> None:
    pairs = sevens(10)
    seen = [p for step in range(5) for p in _batch(pairs, range(4 * step, 4 * step + 4), 0)]
    assert sorted(p.prompt for p in seen[:10]) == sorted(p.prompt for p in seen[10:]) == sorted(p.prompt for p in pairs)
    assert seen[:10] != seen[10:]


@pytest.mark.parametrize("stop_at", [1, 2, 3])
def test_resumed_is_the_uninterrupted_training_bit_for_bit(stop_at: int, tmp_path: Path) -> None:
    training = Training(sft=FEW, pack_tokens=128, every=2)
    whole = train_reward_model(fresh, sevens(20), sevens(6, 1), training, tmp_path / "whole")
    calls = iter(range(10))
    with pytest.raises(Interrupted, match=f"after {stop_at} of 6"):
        train_reward_model(
            fresh, sevens(20), sevens(6, 1), training, tmp_path / "cut", should_stop=lambda: next(calls) == stop_at
        )
    assert not (tmp_path / "cut" / "model").exists()
    assert train_reward_model(fresh, sevens(20), sevens(6, 1), training, tmp_path / "cut") == whole
    for name in ("model/model.safetensors", "metrics.jsonl"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert train_reward_model(fresh, sevens(20), sevens(6, 1), training, tmp_path / "cut") == whole


@pytest.mark.slow
def test_more_sevens_are_learnt_from_preferences(tmp_path: Path) -> None:
    config = SftConfig(steps=120, batch_size=32, lr=3e-3, warmup_steps=10)
    train, held_out = split_pairs(sevens(2400), 0.15)
    metrics = train_reward_model(fresh, train, held_out, Training(sft=config, pack_tokens=4096), tmp_path)
    assert metrics["eval/accuracy"] >= 0.95
    model = RewardModel.load(tmp_path / "model")
    graded = model.score([f"5={'7' * n}{'1' * (10 - n)}" for n in (0, 4, 8)])
    assert graded == sorted(graded)


def test_no_prompt_is_on_both_sides() -> None:
    pairs = [Pair(prompt=f"{i // 2}  =", chosen="7", rejected=str(i % 2)) for i in range(400)]
    train, held_out = split_pairs(pairs, 0.2)
    assert not {p.prompt for p in train} & {p.prompt for p in held_out}
    assert 40 <= len(held_out) <= 120
    assert split_pairs(pairs, 0.0) == (pairs, [])
    with pytest.raises(BadInput, match="give more"):
        split_pairs(pairs[:1], 0.5)


def test_pairs_from_files(tmp_path: Path) -> None:
    rows = [
        {"prompt": "p", "chosen": "a", "rejected": "b"},
        {"prompt": "p", "chosen": "a", "rejected": "", "margin": 0.5},
    ]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    expected = [Pair(prompt="p", chosen="a", rejected="b"), Pair(prompt="p", chosen="a", rejected="", margin=0.5)]
    assert load_pairs(tmp_path / "x.jsonl") == expected
    pq.write_table(pa.Table.from_pylist([{**row, "margin": row.get("margin")} for row in rows]), tmp_path / "x.parquet")
    assert load_pairs(tmp_path / "x.parquet") == expected


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "p", "chosen": "a"}, "row 1: no column 'rejected'; present: 'prompt', 'chosen'"),
        ({"prompt": "p", "chosen": "a", "rejected": None}, "no column 'rejected'; present: 'prompt', 'chosen'"),
        ({"prompt": "p", "chosen": " ", "rejected": "b"}, "row 1: chosen: expected text"),
        ({"prompt": "p", "chosen": "a", "rejected": "a"}, "are equal"),
        ({"prompt": "p", "chosen": "a", "rejected": "b", "margin": -1}, "margin: expected a finite number"),
    ],
)
def test_pairs_that_are_refused(row: dict[str, object], message: str, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(BadInput, match=message):
        load_pairs(tmp_path / "x.jsonl")
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(BadInput, match="at least one"):
        load_pairs(tmp_path / "empty.jsonl")


def test_battles_of_people_are_pairs_and_those_that_nobody_won_are_left_out(tmp_path: Path) -> None:
    asked, said = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
    one, other, longer = [asked, said], [asked, {**said, "content": "5"}], [asked, said, asked, said]
    battles = [("model_a", one, other), ("tie", one, other), ("model_b", one, other), ("model_a", longer, longer)]
    rows = [{"winner": w, "conversation_a": json.dumps(a), "conversation_b": b, "judge": 1} for w, a, b in battles]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.warns(UserWarning, match="2 battles without a winner or of several turns left out"):
        pairs = load_pairs(tmp_path / "x.jsonl")
    assert pairs == [Pair(prompt="2+2?", chosen=c, rejected=r) for c, r in ("45", "54")]
    (tmp_path / "x.jsonl").write_text(json.dumps({**rows[0], "winner": "me"}) + "\n")
    with pytest.raises(BadInput, match="row 1: winner: expected model_a, model_b or a tie, got 'me'"):
        load_pairs(tmp_path / "x.jsonl")
