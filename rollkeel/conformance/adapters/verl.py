"""verl: policy losses and advantages of `verl.trainer.ppo.core_algos`, corrections of `rollout_corr_helper`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from rollkeel.conformance.adapters import Claim
from rollkeel.conformance.adapters.published import modules
from rollkeel.conformance.batch import Batch


class Config(SimpleNamespace):
    """What verl's losses read of an `ActorConfig`, with its defaults."""

    stands_for = "ActorConfig"
    clip_ratio, clip_ratio_low, clip_ratio_high, clip_ratio_c = 0.2, None, None, 3.0
    loss_scale_factor = None

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)


def claims(checkout: Path | None) -> list[Claim]:
    names = ("verl.trainer.ppo.core_algos", "verl.trainer.ppo.rollout_corr_helper")
    core, correction = modules(names, checkout)

    def loss(mode: str, aggregate: str = "token-mean", weight: Any = None, reject: Any = None, **config: Any) -> Any:
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
            about = Config(global_batch_info=counts, **config)
            old = b.rollout_logprobs if mode.startswith("dppo") else b.old_logprobs
            args = (old, b.logprobs, b.advantages, mask, aggregate, about)
            return core.get_policy_loss_fn(mode)(*args, rollout_is_weights=weights)[0]

        return call

    def credit(name: str) -> Any:
        def call(b: Batch) -> torch.Tensor:
            rewards = torch.zeros_like(b.advantages)
            last = b.mask.cumsum(1).argmax(1)
            rewards[torch.arange(len(last)), last] = b.rewards
            config = SimpleNamespace(gamma=1.0)
            args = {
                "token_level_rewards": rewards,
                "response_mask": b.mask.float(),
                "index": b.groups.numpy(),
                "config": config,
            }
            return core.get_adv_estimator_fn(name)(**args)[0]

        return call

    def kl(kind: str) -> Any:
        return lambda b: (core.kl_penalty(b.logprobs, b.ref_logprobs, kind) * b.mask).sum() / b.tokens

    token = {"aggregate": "token_mean"}
    return [
        Claim("vanilla", "grpo", loss("vanilla"), token),
        Claim("vanilla, seq-mean-token-mean", "grpo", loss("vanilla", "seq-mean-token-mean")),
        Claim("rollout_is=token, 2.0", "tis", loss("vanilla", weight=("token", 2.0)), token),
        Claim('rollout_is_threshold="0.5_5.0"', "icepop", loss("vanilla", weight=("token", "0.5_5.0")), token),
        Claim('rollout_rs=token_k1, "0.5_5.0"', "icepop", loss("vanilla", reject=("token_k1", "0.5_5.0")), token),
        Claim("dppo_tv", "dppo_binary_tv", loss("dppo_tv", clip_ratio=0.15), token),
        Claim("dppo_kl", "dppo_binary_kl", loss("dppo_kl", clip_ratio=0.05), token),
        Claim("gspo", "gspo", loss("gspo", "seq-mean-token-mean", clip_ratio_low=3e-4, clip_ratio_high=4e-4)),
        Claim("geo_mean", "gmpo", loss("geo_mean", clip_ratio_low=0.4, clip_ratio_high=0.4)),
        Claim("sapo", "sapo", loss("sapo", tau_pos=1.0, tau_neg=1.05)),
        Claim("cispo", "cispo", loss("cispo"), {"low": 0.8, "high": 1.2}),
        Claim("kl_penalty k3", "kl:k3", kl("k3"), token),
        Claim("kl_penalty k3+", "kl:k2", kl("k3+"), token),
        Claim("reinforce_plus_plus_baseline", "advantages:reinforce_plus_plus", credit("reinforce_plus_plus_baseline")),
        Claim("grpo", "advantages:grpo", credit("grpo")),
        Claim("rloo", "advantages:rloo", credit("rloo")),
        Claim("opo", "advantages:opo", credit("opo")),
    ]
