"""AReaL: `ppo_actor_loss_fn` of `areal.utils.functional`, and `grpo_loss_fn` of `areal.trainer.ppo.actor` for M2PO."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from rollkeel.conformance.adapters import TOKEN, Claim
from rollkeel.conformance.adapters.published import modules
from rollkeel.conformance.batch import Batch

REJECTION = {"level": "token", "action": "mask", "metric": "ratio", "agg": "mean", "upper": 5.0, "lower": None}


def claims(checkout: Path | None) -> list[Claim]:
    names = ("areal.utils.functional.functional", "areal.trainer.ppo.actor")
    functional, actor = modules(names, checkout, whole=("areal.utils.functional",))

    def loss(rejection: Any = None, ratio: str = "token", low: float = 0.2, high: float = 0.2) -> Any:
        def call(b: Batch) -> torch.Tensor:
            chosen = SimpleNamespace(**{**REJECTION, **rejection}) if rejection else None
            return functional.ppo_actor_loss_fn(
                b.logprobs, b.old_logprobs, b.rollout_logprobs, b.advantages, low, b.mask, high,
                rejection_sampling=chosen, importance_sampling_level=ratio,
            )[0]  # fmt: skip

        return call

    def m2po(b: Batch) -> torch.Tensor:
        data = {
            "logprobs": b.rollout_logprobs,
            "prox_logp": b.old_logprobs,
            "advantages": b.advantages,
            "loss_mask": b.mask,
        }
        entropy = torch.ones_like(b.logprobs)
        return actor.grpo_loss_fn(b.logprobs, entropy, data, 1e9, 1e9, None, m2_threshold=0.04)

    def cispo(b: Batch) -> torch.Tensor:
        return functional.cispo_loss_fn(b.logprobs, b.old_logprobs, b.advantages, 0.2, b.mask, 0.2)[0]

    def sapo(b: Batch) -> torch.Tensor:
        return functional.sapo_loss_fn(b.logprobs, b.old_logprobs, b.advantages, 1.0, 1.05, b.mask)[0]

    return [
        Claim("ppo_actor_loss_fn", "grpo", loss(), TOKEN),
        Claim("rejection_sampling ratio, clamp, upper 2", "tis", loss({"action": "clamp", "upper": 2.0}), TOKEN),
        Claim("rejection_sampling ratio, mask, 0.5 to 5", "icepop", loss({"lower": 0.5}), TOKEN),
        Claim("rejection_sampling binary_kl, upper 0.1", "kpop", loss({"metric": "binary_kl", "upper": 0.1}), TOKEN),
        Claim("rejection_sampling ratio, sequence, mask, upper 2", "mis", loss({"level": "sequence", "upper": 2.0}),
              {"level": "sequence", "weight": "sequence", "cap": 2.0, **TOKEN}),
        Claim("m2_threshold 0.04, eps_clip off", "m2po", m2po, TOKEN),
        Claim("importance_sampling_level=sequence", "gspo", loss(None, "sequence", 3e-4, 4e-4)),
        Claim("cispo_loss_fn", "cispo", cispo, {"low": 0.8, "high": 1.2}),
        Claim("sapo_loss_fn", "sapo", sapo, TOKEN),
    ]  # fmt: skip
