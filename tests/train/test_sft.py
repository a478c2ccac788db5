"""The warm start: loss on responses only, in index order, learning something a model of this size must learn.

Real preset, a two-token toy task. Not covered: the accuracy of the default recipe, which takes longer than a test may.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from rollkeel.config import ModelConfig, SftConfig
from rollkeel.errors import BadInput
from rollkeel.models.loading import Policy, load_policy
from rollkeel.train.sft import Example, cuts, run_sft
from rollkeel.train.unfinished import Unfinished

CONFIG = SftConfig(steps=4, batch_size=6, warmup_steps=1)


def policy(seed: int = 0) -> Policy:
    return load_policy(ModelConfig(path="preset:tiny-qwen3"), seed=seed)


def example(index: int) -> Example:
    """Copy the last of two letters, then stop."""
    r = np.random.default_rng(index)
    prompt = r.integers(100, 110, 2 + index % 3)
    return prompt, np.array([prompt[-1], 2])


def source(indices: Sequence[int]) -> list[Example]:
    return [example(i) for i in indices]


def weights(p: Policy) -> dict[str, torch.Tensor]:
    return {n: w.detach().clone() for n, w in p.model.named_parameters()}


def test_it_learns_to_copy() -> None:
    losses: list[float] = []
    config = SftConfig(steps=60, batch_size=32, lr=1e-2)
    metrics = run_sft(policy(), source, config, progress=lambda _step, m: losses.append(m["sft/loss"]))
    assert losses[0] > 4.5  # ln 288 = 5.66 before anything is learnt
    assert metrics["sft/loss"] < 0.5
    assert metrics["sft/target_probability"] > 0.6
    assert metrics["sft/steps"] == 60
    assert metrics["sft/tokens"] == 60 * 32 * 2


def test_first_loss_is_the_mean_over_response_tokens_of_transformers() -> None:
    p, seen = policy(), []
    parts = []
    for i in range(CONFIG.batch_size):
        prompt, response = example(i)
        ids = torch.from_numpy(np.concatenate([prompt, response]))
        log_p = torch.log_softmax(p.model(input_ids=ids[None]).logits[0], -1)
        parts.append(log_p[len(prompt) - 1 : -1].gather(1, ids[len(prompt) :, None]))
    want = -torch.cat(parts).mean().item()
    run_sft(p, source, CONFIG, progress=lambda _step, m: seen.append(m))
    assert seen[0]["sft/loss"] == pytest.approx(want, rel=1e-5)
    assert [m["optimizer/lr"] for m in seen] == pytest.approx([CONFIG.lr * f for f in (1, 1, 0.55, 0.1)])


def test_examples_are_asked_for_in_index_order() -> None:
    asked: list[int] = []

    def watched(indices: Sequence[int]) -> list[Example]:
        asked.extend(indices)
        return source(indices)

    run_sft(policy(), watched, CONFIG)
    assert asked == list(range(24))


def test_same_source_same_bits_and_packing_does_not_matter_for_the_loss() -> None:
    one, two = policy(), policy()
    a = run_sft(one, source, CONFIG, seed=1)
    b = run_sft(two, source, CONFIG, seed=1)
    assert a == b
    assert all(torch.equal(w, weights(two)[n]) for n, w in weights(one).items())
    first: list[float] = []
    for tokens in (8192, 1):
        config = CONFIG.model_copy(update={"micro_batch_tokens": tokens})
        run_sft(policy(), source, config, progress=lambda step, m: first.append(m["sft/loss"]) if step == 0 else None)
    assert first[0] == pytest.approx(first[1], rel=1e-6)


def test_prompts_get_no_loss() -> None:
    """Two different response positions (and four prompt and padding ones that must not count) leave two directions."""
    p = policy()
    head = p.model.get_output_embeddings().weight
    grads: list[torch.Tensor] = []
    head.register_post_accumulate_grad_hook(lambda w: grads.append(w.grad.clone()))

    def fixed(indices: Sequence[int]) -> list[Example]:
        return [(np.array([100, 101, 102]), np.array([200, 2])) for _ in indices]

    run_sft(p, fixed, SftConfig(steps=1, batch_size=2))
    # The head's gradient is a sum of (p − 1[target]) ⊗ h over the positions that carry loss; both examples are equal.
    assert torch.linalg.matrix_rank(grads[0].double(), rtol=1e-5) == 2


def test_stop_ends_the_run_early() -> None:
    done: list[int] = []
    metrics = run_sft(
        policy(), source, CONFIG, progress=lambda s, _m: done.append(s), should_stop=lambda: len(done) == 2
    )
    assert done == [0, 1]
    assert metrics["sft/steps"] == 2


@pytest.mark.parametrize("bad", [([], [1]), ([1], [])])
def test_empty_examples_are_refused(bad: tuple[list[int], list[int]]) -> None:
    with pytest.raises(BadInput, match="expected a prompt and a response"):
        run_sft(policy(), lambda indices: [bad for _ in indices], CONFIG)


def test_no_steps_change_nothing() -> None:
    p = policy()
    before = weights(p)
    assert run_sft(p, source, SftConfig(steps=0)) == {"sft/steps": 0.0, "sft/tokens": 0.0}
    assert all(torch.equal(w, before[n]) for n, w in weights(p).items())


@pytest.mark.parametrize("damage", [None, "another key", "a byte"])
def test_one_that_was_stopped_goes_on_bit_for_bit(damage: str | None, tmp_path: Path) -> None:
    whole = policy()
    expected = run_sft(whole, source, CONFIG)
    asked = iter([False, False, True])
    stopped = run_sft(policy(), source, CONFIG, should_stop=lambda: next(asked), kept=Unfinished(tmp_path / "u", "a"))
    assert stopped["sft/steps"] == 2
    if damage == "a byte":
        file = tmp_path / "u" / "step_000002" / "state" / "tensors.safetensors"
        file.write_bytes(file.read_bytes()[:-1] + b"x")
    seen: list[int] = []
    kept = Unfinished(tmp_path / "u", "b" if damage == "another key" else "a")
    again = policy()
    metrics = run_sft(again, source, CONFIG, progress=lambda step, _: seen.append(step), kept=kept)
    assert seen == ([2, 3] if damage is None else [0, 1, 2, 3])
    assert metrics == expected
    assert all(torch.equal(a, b) for a, b in zip(weights(again).values(), weights(whole).values(), strict=True))
    kept.remove()
    assert list(tmp_path.iterdir()) == []


def test_one_that_was_killed_goes_on_from_what_was_saved_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollkeel.train.unfinished.EVERY_S", 0.0)

    def killed(step: int, _: object) -> None:
        if step == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_sft(policy(), source, CONFIG, progress=killed, kept=Unfinished(tmp_path, "a"))
    again, whole, seen = policy(), policy(), list[int]()
    run_sft(again, source, CONFIG, progress=lambda step, _: seen.append(step), kept=Unfinished(tmp_path, "a"))
    run_sft(whole, source, CONFIG)
    assert seen == [2, 3]
    assert all(torch.equal(a, b) for a, b in zip(weights(again).values(), weights(whole).values(), strict=True))


def test_epochs_and_token_batches_cut_the_stream_of_examples() -> None:
    """Examples have 4, 5, 6, 4, 5, 6, … tokens."""
    assert list(cuts(CONFIG, 7)) == [0, 6, 12, 18, 24]
    assert list(cuts(SftConfig(steps=0, epochs=3, batch_size=6), 7)) == [0, 6, 12, 18, 21]
    tokens = SftConfig(steps=3, batch_tokens=14)
    assert list(cuts(tokens, 5, source)) == [0, 2, 4, 6]
    assert list(cuts(tokens.model_copy(update={"epochs": 1}), 5, source)) == [0, 2, 4, 5]
    assert list(cuts(tokens.model_copy(update={"batch_tokens": 15}), None, source)) == [0, 3, 6, 9]
    assert list(cuts(tokens.model_copy(update={"batch_tokens": 1}), None, source)) == [0, 1, 2, 3]
    long = cuts(SftConfig(epochs=100, batch_tokens=15), 9, source)
    assert list(long) == list(range(0, 901, 3))


def test_the_cosine_of_epochs_ends_at_zero_and_goes_on_bit_for_bit(tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"epochs": 3, "batch_tokens": 14, "min_lr_ratio": 0.0})
    batches = cuts(config, 4, source)
    rates: list[float] = []
    whole, again = policy(), policy()
    asked = iter([False] * 3 + [True])
    run_sft(whole, source, config, batches=batches, progress=lambda _step, m: rates.append(m["optimizer/lr"]))
    assert len(rates) == len(batches) - 1 == 6
    assert rates[-1] == 0.0 < rates[-2]
    for stop in (lambda: next(asked), None):
        run_sft(again, source, config, batches=batches, should_stop=stop, kept=Unfinished(tmp_path / "u", "a"))
    assert all(torch.equal(a, b) for a, b in zip(weights(again).values(), weights(whole).values(), strict=True))


@pytest.mark.parametrize(("config", "rows"), [({"epochs": 2}, None), ({"batch_tokens": 9}, 7)])
def test_what_cannot_be_counted_is_refused(config: dict[str, int], rows: int | None) -> None:
    with pytest.raises(BadInput, match=f"sft.{next(iter(config))}=") as error:
        cuts(SftConfig(**config), rows)
    assert "set sft." in str(error.value)
