"""SkyRL: policy losses of `skyrl.backends.skyrl_train.utils.ppo_utils`, with its scaling of advantages as the denominator."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from rollkeel.conformance.adapters import TOKEN, Claim
from rollkeel.conformance.adapters.published import modules
from rollkeel.conformance.batch import Batch

CORRECTION: dict[str, Any] = {
    "tis_ratio_type": None,
    "token_tis_ratio_clip_high": 2.0,
    "sequence_tis_ratio_clip_high": 5.0,
    "sequence_mask_metric": None,
    "geo_mask_high": 1.01,
    "geo_mask_low": 0.99,
    "product_mask_high": 2.0,
    "product_mask_low": 0.5,
    "outlier_token_is_threshold_low": None,
    "outlier_token_is_threshold_high": None,
    "token_mask_is_threshold_low": None,
    "token_mask_is_threshold_high": None,
}
"""Defaults of its `OffPolicyCorrectionConfig`."""


def claims(checkout: Path | None) -> list[Claim]:
    names = (
        "skyrl.backends.skyrl_train.utils.ppo_utils",
        "skyrl.backends.skyrl_train.utils.off_policy_correction_utils",
    )
    losses, _ = modules(names, checkout)

    def loss(
        name: str, kind: str = "regular", reduction: str = "token_mean", correction: Any = None, **config: Any
    ) -> Any:
        about = SimpleNamespace(
            policy_loss_type=kind,
            off_policy_correction=SimpleNamespace(**{**CORRECTION, **(correction or {})}),
            **{"eps_clip_low": 0.2, "eps_clip_high": 0.2, "clip_ratio_c": 3.0, **config},
        )

        def call(b: Batch) -> torch.Tensor:
            mask = b.mask.to(b.logprobs.dtype)
            rows, width = mask.shape
            scaled = losses.apply_loss_reduction_to_advantages_minibatch(b.advantages, mask, reduction, rows, width)
            function = getattr(losses, name)
            return function(b.logprobs, b.old_logprobs, scaled, about, mask, b.rollout_logprobs)[0]

        return call

    band = {"tis_ratio_type": "token", "token_tis_ratio_clip_high": 1e9,
            "token_mask_is_threshold_low": 0.5, "token_mask_is_threshold_high": 5.0}  # fmt: skip
    cispo = SimpleNamespace(cispo_eps_clip_low=0.2, cispo_eps_clip_high=0.2, cispo_anchor="old")
    tv, kl = (
        SimpleNamespace(dppo_type=f"binary_{t}", delta_low=d, delta_high=d) for t, d in (("tv", 0.15), ("kl", 0.05))
    )
    return [
        Claim("regular", "grpo", loss("ppo_policy_loss"), TOKEN),
        Claim("dual_clip", "grpo", loss("ppo_policy_loss", "dual_clip"), TOKEN),
        Claim("regular, sequence_mean", "grpo", loss("ppo_policy_loss", reduction="sequence_mean")),
        Claim("tis_ratio_type=token", "tis", loss("ppo_policy_loss", correction={"tis_ratio_type": "token"}), TOKEN),
        Claim(
            "token_mask 0.5 to 5 with tis_ratio_type=token", "icepop", loss("ppo_policy_loss", correction=band), TOKEN
        ),
        Claim("rollout_is", "icepop", loss("rollout_is_policy_loss", "rollout_is"), {"low": 0.8, "high": 1.2, **TOKEN}),
        Claim("dppo, binary_tv", "dppo_binary_tv", loss("dppo_policy_loss", "dppo", dppo=tv), TOKEN),
        Claim("dppo, binary_kl", "dppo_binary_kl", loss("dppo_policy_loss", "dppo", dppo=kl), TOKEN),
        Claim("cispo", "cispo", loss("compute_policy_loss_cispo", "cispo", cispo=cispo), {"low": 0.8, "high": 1.2}),
    ]
