"""Stable-RL, the DPPO paper's code (a fork of verl): `POLICY_LOSS_REGISTRY` of `core_algos`, top-K divergences of
`actor.utils`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rollkeel.conformance.adapters import Claim
from rollkeel.conformance.adapters.published import modules
from rollkeel.conformance.adapters.verl import Config
from rollkeel.conformance.batch import Batch


def logits(b: Batch) -> torch.Tensor:
    """`[S, L, 4]`: log-probs of a vocabulary of four that has the batch's top-K and sampled tokens; 3 is all the rest."""
    out = torch.full((*b.mask.shape, 4), -torch.inf, dtype=b.logprobs.dtype)
    out = out.scatter(-1, b.topk_ids, b.topk_logprobs)
    out[..., 0] = b.logprobs.detach()
    rest = (1 - out[..., :3].exp().sum(-1)).clamp(min=1e-12)
    return torch.cat((out[..., :3], rest.log()[..., None]), -1)


def claims(checkout: Path | None) -> list[Claim]:
    core, utils = modules(("verl.trainer.ppo.core_algos", "verl.workers.actor.utils"), checkout)

    def loss(mode: str, aggregate: str = "seq-mean-token-sum", cap: float = 1e9, **config: Any) -> Any:
        def call(b: Batch) -> torch.Tensor:
            kl, tv = utils.compute_topk_kl(logits(b), b.topk_ids.clone(), b.rollout_topk_logprobs)
            counts = {"dp_size": 1, "batch_num_tokens": b.tokens, "global_batch_size": b.sequences}
            args = (b.old_logprobs, b.logprobs, b.advantages, b.mask.to(b.logprobs.dtype), aggregate)
            about = Config(global_batch_info=counts, clip_ratio_c=cap, **config)
            entropy = torch.zeros_like(b.logprobs)
            return core.get_policy_loss_fn(mode)(
                *args, about, rollout_log_prob=b.rollout_logprobs, topk_kl=kl, topk_tv=tv, entropy=entropy
            )[0]

        return call

    return [
        Claim("dppo_binary_tv", "dppo_binary_tv", loss("dppo_binary_tv", clip_ratio=0.15)),
        Claim("dppo_binary_kl", "dppo_binary_kl", loss("dppo_binary_kl", clip_ratio=0.05)),
        Claim("dppo_topk_tv", "dppo_topk_tv", loss("dppo_topk_tv", cap=5.0, clip_ratio=0.2)),
        Claim("dppo_topk_kl", "dppo_topk_kl", loss("dppo_topk_kl", cap=5.0, clip_ratio=0.05)),
        Claim("ppo", "grpo_clip_higher", loss("ppo", clip_ratio_low=0.2, clip_ratio_high=0.28)),
        Claim("ppo_recompute", "minirl", loss("ppo_recompute", clip_ratio_low=0.2, clip_ratio_high=0.28)),
        Claim("pg_no_mask", "pg_tis", loss("pg_no_mask", cap=3.0)),
    ]
