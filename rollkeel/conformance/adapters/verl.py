"""verl: policy losses and advantages of `verl.trainer.ppo.core_algos`, corrections of `rollout_corr_helper`."""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from rollkeel.conformance.adapters import TOKEN, Claim
from rollkeel.conformance.adapters.published import modules
from rollkeel.conformance.batch import Batch

GSPO = {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}
BAND = "0.5_5.0"


class Config(SimpleNamespace):
    """What verl's losses read of an `ActorConfig`, with its defaults."""

    stands_for = "ActorConfig"
    clip_ratio, clip_ratio_low, clip_ratio_high, clip_ratio_c = 0.2, None, None, 3.0
    loss_scale_factor = None

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)


def _loss(
    core: Any,
    correction: Any,
    mode: str,
    aggregate: str = "token-mean",
    weight: Any = None,
    reject: Any = None,
    **config: Any,
) -> Any:
    def call(b: Batch) -> torch.Tensor:
        mask, weights = b.mask.to(b.logprobs.dtype), None
        ratio = b.old_logprobs - b.rollout_logprobs
        if weight:
            level, threshold = weight
            weights = correction.compute_rollout_correction_weights(ratio, mask, level, threshold)[0]
        if reject:
            mask = correction.compute_rollout_rejection_mask(ratio, mask, *reject)[0]
        tokens = mask.sum() if reject else b.tokens  # verl counts over the mask that its batch carries by then
        counts = {"dp_size": 1, "batch_num_tokens": tokens, "global_batch_size": b.sequences}
        old = b.rollout_logprobs if mode.startswith("dppo") else b.old_logprobs
        args = (old, b.logprobs, b.advantages, mask, aggregate, Config(global_batch_info=counts, **config))
        return core.get_policy_loss_fn(mode)(*args, rollout_is_weights=weights)[0]

    return call


def _credit(core: Any, name: str) -> Any:
    def call(b: Batch) -> torch.Tensor:
        rewards = torch.zeros_like(b.advantages)
        rewards[torch.arange(len(b.groups)), b.mask.cumsum(1).argmax(1)] = b.rewards
        config = SimpleNamespace(gamma=1.0)
        args = {"response_mask": b.mask.float(), "index": b.groups.numpy(), "config": config}
        return core.get_adv_estimator_fn(name)(token_level_rewards=rewards, **args)[0]

    return call


def claims(checkout: Path | None) -> list[Claim]:
    core, correction = modules(("verl.trainer.ppo.core_algos", "verl.trainer.ppo.rollout_corr_helper"), checkout)
    loss, credit = functools.partial(_loss, core, correction), functools.partial(_credit, core)

    def kl(kind: str) -> Any:
        return lambda b: (core.kl_penalty(b.logprobs, b.ref_logprobs, kind) * b.mask).sum() / b.tokens

    return [
        Claim("vanilla", "grpo", loss("vanilla"), TOKEN),
        Claim("vanilla, seq-mean-token-mean", "grpo", loss("vanilla", "seq-mean-token-mean")),
        Claim("rollout_is=token, threshold 2.0", "tis", loss("vanilla", weight=("token", 2.0)), TOKEN),
        Claim(f"rollout_is=token, threshold {BAND}", "icepop", loss("vanilla", weight=("token", BAND)), TOKEN),
        Claim(f"rollout_rs=token_k1, threshold {BAND}", "icepop", loss("vanilla", reject=("token_k1", BAND)), TOKEN),
        Claim("dppo_tv", "dppo_binary_tv", loss("dppo_tv", clip_ratio=0.15), TOKEN),
        Claim("dppo_kl", "dppo_binary_kl", loss("dppo_kl", clip_ratio=0.05), TOKEN),
        Claim("gspo", "gspo", loss("gspo", "seq-mean-token-mean", **GSPO)),
        Claim("geo_mean", "gmpo", loss("geo_mean", clip_ratio_low=0.4, clip_ratio_high=0.4)),
        Claim("sapo", "sapo", loss("sapo", tau_pos=1.0, tau_neg=1.05)),
        Claim("cispo", "cispo", loss("cispo"), {"low": 0.8, "high": 1.2}),
        Claim("kl_penalty k3", "kl:k3", kl("k3"), TOKEN),
        Claim("kl_penalty k3+", "kl:k3", kl("k3+"), TOKEN),
        Claim("reinforce_plus_plus_baseline", "advantages:reinforce_plus_plus", credit("reinforce_plus_plus_baseline")),
        Claim("grpo", "advantages:grpo", credit("grpo")),
        Claim("rloo", "advantages:rloo", credit("rloo")),
        Claim("opo", "advantages:opo", credit("opo")),
    ]
