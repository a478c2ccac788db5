"""What an engine did to its weights can be done again: then its record fits to the last bits, and nothing else fits at all.

Without it the doctor takes a norm that was never loaded for fewer bits. Not covered: servers, whose kernels differ from
these, and large models, which are left to `rollkeel analyze`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rollkeel.analyzer.capture import Tokens
from rollkeel.analyzer.sides import engine_forward, prefill_logprobs
from rollkeel.config import ModelConfig
from rollkeel.diagnose import recompute
from rollkeel.diagnose.guesses import sets
from rollkeel.diagnose.recompute import Sampled, _said, _taken, decided, explain, refine
from rollkeel.models.loading import Policy, load_policy
from rollkeel.models.names import checkpoint_views
from rollkeel.models.numerics import is_quantised, round_integers
from rollkeel.types import GraderSpec, Prompt, Rollout, SamplingParams, Status, TokenSpan
from rollkeel_doctor import Cause, Diagnosis

INPUT = "model.layers.1.input_layernorm.weight"


@pytest.fixture(scope="module")
def policy() -> Policy:
    """Random weights whose norms have learnt something."""
    found = load_policy(ModelConfig(path="preset:tiny-qwen3-moe"), "cpu")
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in found.model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(0.2 * noise if "norm" in name else 0.1 * noise)
    return found


def recorded(
    policy: Policy, changed: Mapping[str, torch.Tensor], mode: str = "fp32", temperature: float = 1.0
) -> Sampled:
    """What an engine in `mode` says of some tokens when these tensors are not what it was sent; it states fp32."""
    rng = np.random.default_rng(0)
    tokens = Tokens(sequences=tuple(rng.integers(3, 40, 24) for _ in range(12)), prompt_lengths=(8,) * 12)
    weights = {**checkpoint_views(policy.model), **changed}
    said = prefill_logprobs(engine_forward(policy.model.config, weights.items(), mode), tokens, temperature)
    said[~tokens.response] = float("nan")
    return Sampled(
        policy=policy,
        step=7,
        earlier={},
        began_clean=False,
        mode="fp32",
        whole=True,
        tokens=tokens,
        logprobs=said,
        temperature=temperature,
    )


def moved(policy: Policy, word: str) -> dict[str, torch.Tensor]:
    """An earlier value of every tensor with this word in its name."""
    views = checkpoint_views(policy.model)
    generator = torch.Generator().manual_seed(9)
    return {n: t + 0.02 * torch.randn(t.shape, generator=generator) for n, t in views.items() if word in n}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_norm_that_was_never_loaded(policy: Policy, temperature: float) -> None:
    one = torch.ones_like(checkpoint_views(policy.model)[INPUT])
    cause = explain(recorded(policy, {INPUT: one}, temperature=temperature))
    assert cause is not None
    assert cause.id == "wrong_weights"
    assert INPUT in cause.evidence
    assert cause.score > 0.99


@pytest.mark.parametrize("mode", ["fp8", "int8", "int4", "bf16"])
def test_a_dtype_that_was_not_stated(policy: Policy, mode: str) -> None:
    cause = explain(recorded(policy, {}, mode))
    assert cause is not None
    assert (cause.id, cause.evidence.split()[1]) == ("quantisation", mode)


def since(start: Mapping[str, torch.Tensor], sampled: Sampled) -> Sampled:
    """The same with an older checkpoint, of which the engine had what it was sent."""
    return replace(sampled, earlier={0: start}, began_clean=True)


@pytest.mark.usually("v_proj*")
@pytest.mark.parametrize(("word", "told"), [("v_proj", "v_proj"), (r"layers.1.", "layers.1.*"), ("k_norm", "k_norm")])
def test_tensors_that_a_reload_forgot(policy: Policy, word: str, told: str) -> None:
    start = moved(policy, "")
    stuck = {n: t for n, t in start.items() if word in n}
    cause = explain(since(start, recorded(policy, stuck)))
    assert cause is not None
    assert cause.id == "wrong_weights"
    assert told in cause.evidence
    assert "as first published" in cause.evidence
    assert explain(recorded(policy, stuck)) is None  # the start is what tells


@pytest.mark.usually("0.3")
@pytest.mark.parametrize("between", [0.0, 0.3])
def test_a_layer_that_stood_still_since_before_the_oldest_checkpoint(policy: Policy, between: float) -> None:
    """Its weights are further back than any that were kept: the oldest come nearest, and all of them do not."""
    views, start = checkpoint_views(policy.model), moved(policy, "")
    oldest = {n: t + (1 - between) * (start[n] - t) for n, t in views.items()}
    stuck = {n: t for n, t in start.items() if "layers.1." in n}
    cause = explain(replace(recorded(policy, stuck), earlier={9: oldest}, began_clean=True))
    assert cause is not None
    assert cause.id == "wrong_weights"
    assert "model.layers.1.* as at step 9" in cause.evidence
    late = explain(replace(recorded(policy, start), earlier={9: oldest}, began_clean=True))
    assert late is not None
    assert late.id == "stale_version"


@pytest.mark.usually("6-64")
@pytest.mark.parametrize(("bits", "size"), [(4, 16), (4, 0), (6, 64)])
def test_integers_of_other_bits_or_groups(policy: Policy, bits: int, size: int) -> None:
    weights = {n: t for n, t in checkpoint_views(policy.model).items() if is_quantised(n, t)}
    rounded = {n: round_integers(t, size or t.shape[-1], bits) for n, t in weights.items()}
    cause = explain(recorded(policy, rounded))
    assert cause is not None
    assert cause.id == "quantisation"
    assert f"int{bits} {f'in groups of {size}' if size else 'and a scale for each row'}" in cause.evidence


@pytest.mark.usually("0.2")
@pytest.mark.parametrize("between", [0.0, 0.2, 0.4])
def test_weights_that_came_late(policy: Policy, between: float) -> None:
    """An engine that stood still has weights near a checkpoint's, seldom the very ones."""
    views, start = checkpoint_views(policy.model), moved(policy, "")
    held = {n: start[n] + between * (t - start[n]) for n, t in views.items()}
    cause = explain(since(start, recorded(policy, held)))
    assert cause is not None
    assert cause.id == "stale_version"
    assert "the weights of step 0" in cause.evidence


def test_what_began_clean_is_no_dtype(policy: Policy) -> None:
    """A norm at its initial value would have shown in the first checkpoint's tokens."""
    start, one = moved(policy, ""), torch.ones_like(checkpoint_views(policy.model)[INPUT])
    assert explain(since(start, recorded(policy, {INPUT: one}))) is None
    assert explain(since(start, recorded(policy, {}, "int8"))) is None


def test_experts_in_another_order(policy: Policy) -> None:
    views = checkpoint_views(policy.model)
    name, by = "model.layers.1.mlp.experts.{}.{}.weight", 3
    count = sum(name.format(e, "up_proj") in views for e in range(64))
    parts = ("gate_proj", "up_proj", "down_proj")
    rolled = {name.format(e, p): views[name.format((e + by) % count, p)] for e in range(count) for p in parts}
    cause = explain(recorded(policy, rolled))
    assert cause is not None
    assert cause.id == "wrong_weights"
    assert "model.layers.1.mlp.experts 3 places further" in cause.evidence


def test_query_heads_in_another_order(policy: Policy) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    weight, heads = checkpoint_views(policy.model)[name], policy.model.config.num_attention_heads
    cause = explain(recorded(policy, {name: weight.roll(len(weight) // heads, 0)}))
    assert cause is not None
    assert cause.id == "wrong_weights"
    assert f"{name} 1 heads further" in cause.evidence


@pytest.mark.usually("mlp.")
@pytest.mark.parametrize("part", ["mlp.", "self_attn.", ""])
def test_layers_in_each_others_place(policy: Policy, part: str) -> None:
    views, places = checkpoint_views(policy.model), ("model.layers.0.", "model.layers.1.")
    moved = {
        name.replace(one, other): tensor
        for one, other in (places, places[::-1])
        for name, tensor in views.items()
        if name.startswith(one + part)
    }
    cause = explain(recorded(policy, moved))
    assert cause is not None
    assert cause.id == "wrong_weights"
    assert f"{places[0]}{part}* and {places[1]}{part}*" in cause.evidence


def test_a_small_gap_of_float32_is_one(policy: Policy) -> None:
    """Honest engines miss by 3e-7; a norm that had hardly learnt anything was 2.5e-4 off."""
    honest = recorded(policy, {})
    assert not honest.strays
    assert replace(honest, logprobs=honest.logprobs - 2.5e-4).strays


def test_nothing_is_said_where_nothing_fits(policy: Policy) -> None:
    honest = recorded(policy, {})
    rng = torch.Generator().manual_seed(1)
    noisy = replace(honest, logprobs=honest.logprobs + 0.1 * torch.randn(honest.logprobs.shape, generator=rng))
    other = recorded(policy, moved(policy, "q_proj"))
    assert [explain(found) for found in (honest, noisy, other)] == [None] * 3


def noisy(lost: bool) -> Diagnosis:
    """What tokens alone say of a model on which a dtype makes more noise than on others."""
    causes = [Cause(id=name, score=0.7, evidence="", advice="") for name in ("quantisation", "length_truncation")]
    return Diagnosis(source="rollkeel run", path="run", tokens=1, sequences=1, steps=1, causes=causes, lost=lost)


def test_noise_that_the_stated_dtype_makes_of_this_model_is_no_cause(policy: Policy) -> None:
    honest = replace(recorded(policy, {}, "int4"), mode="int4")
    refined = decided(noisy(lost=False), honest)
    assert [c.id for c in refined.causes] == ["length_truncation"]
    assert "computed in int4 as stated" in refined.observed[0]
    assert len(decided(noisy(lost=True), honest).causes) == 2  # noise may be why the reward was lost
    assert decided(noisy(lost=False), replace(honest, mode="fp32")).causes[0].id == "quantisation"


def test_a_checkpoint_decides_where_tokens_show_nothing(
    policy: Policy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A small gap of stale tokens alone looks like none; what the checkpoint computes is another matter."""
    (tmp_path / "config.yaml").write_text("", encoding="utf-8")
    whole = replace(noisy(lost=False), causes=[])
    honest = recorded(policy, {})
    int8 = recorded(policy, {}, "int8")
    other = replace(
        honest,
        logprobs=honest.logprobs + 0.1 * torch.randn(honest.logprobs.shape, generator=torch.Generator().manual_seed(1)),
    )

    def refined(*samples: Sampled, found: Diagnosis = whole) -> Diagnosis:
        monkeypatch.setattr(recompute, "_samples", lambda folder: iter(samples))
        return refine(found, tmp_path)

    assert not refined(honest).causes
    assert "computed as stated, give the log-probs that the engine recorded" in refined(honest, honest).observed[-1]
    assert refined() is whole
    assert refined(honest, int8).causes[0].id == "quantisation"  # an older checkpoint shows what the newest does not
    assert refined(other).causes[0].id == "wrong_weights"
    assert "no weights or dtype that were tried come near" in refined(other).causes[0].evidence
    assert refined(replace(other, whole=False)) is whole  # old KV behind it may be all that is wrong
    shifted = replace(whole, causes=[Cause(id="alignment", score=0.9, evidence="", advice="")])
    assert refined(other, found=shifted) is shifted  # the record itself is wrong


def test_sets_of_names() -> None:
    names = ["norm", "layers.0.a", "layers.0.e.0.w", "layers.0.e.1.w", "layers.1.a", "layers.1.e.0.w", "layers.1.e.1.w"]
    found = dict(sets(names))
    assert found == {
        "norm": ["norm"],
        "layers.*.a": ["layers.0.a", "layers.1.a"],
        "layers.*.e.*.w": [n for n in names if n.endswith("w")],
        "layers.0.*": names[1:4],
        "layers.1.*": names[4:],
        "layers.0.a": ["layers.0.a"],
        "layers.0.e.*.w": names[2:4],
        "layers.1.a": ["layers.1.a"],
        "layers.1.e.*.w": names[5:],
        "all of them": names,
    }


def test_a_folder_that_cannot_tell_changes_nothing(tmp_path: Path) -> None:
    found = Diagnosis(
        source="rollkeel run",
        path=str(tmp_path),
        tokens=1,
        sequences=1,
        steps=1,
        causes=[Cause(id="quantisation", score=0.5, evidence="", advice="")],
    )
    assert refine(found, tmp_path) is found
    (tmp_path / "config.yaml").write_text("run: [", encoding="utf-8")
    refined = refine(found, tmp_path)
    assert refined.causes == found.causes
    assert "not recomputed" in refined.notes[-1]


def test_only_what_these_weights_sampled_is_compared() -> None:
    """What an environment wrote has a place and a log-prob of 0 in the response; older weights may have begun it, or its KV."""
    prompt = Prompt(
        id="p", index=0, text="", token_ids=np.array([3, 4]), answer="", grader=GraderSpec(name="x"), task="t"
    )
    span = TokenSpan(
        token_ids=np.arange(5, 10),
        logprobs=np.array([-1.0, 0.0, -2.0, -1.0, -1.0], np.float32),
        kept_mass=np.ones(5, np.float32),
        versions=np.array([1, 1, 1, 0, 1]),
        kv_versions=np.array([1, 1, 1, 0, 0]),
        sampled=np.array([True, False, True, True, True]),
    )
    rollout = Rollout(
        id=0, group=0, member=0, prompt=prompt, span=span, status=Status.FINISHED, sampling=SamplingParams(),
        engine="local", dtype="fp32", reward=1.0,
    )  # fmt: skip
    policy = load_policy(ModelConfig(path="preset:tiny-qwen3"), "cpu")
    sampled = _taken(policy, 1, _said([rollout], 1))
    assert sampled is not None
    assert sampled.logprobs.isnan().tolist() == [True, True, False, True, False, True, True]
    assert not sampled.whole
    assert _said([rollout], 2) == []
