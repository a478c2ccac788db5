"""NeMo-RL: `ClippedPGLossFn` of `nemo_rl.algorithms.loss.loss_functions`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from rollkeel.conformance.adapters import TOKEN, Claim
from rollkeel.conformance.adapters.published import modules
from rollkeel.conformance.batch import Batch

DEFAULTS: dict[str, Any] = {
    "disable_ppo_ratio": False,
    "token_level_loss": True,
    "sequence_level_importance_ratios": False,
    "ratio_clip_min": 0.2,
    "ratio_clip_max": 0.2,
    "ratio_clip_c": None,
    "reference_policy_kl_penalty": 0.0,
    "reference_policy_kl_type": "k3",
    "kl_input_clamp_value": 20.0,
    "kl_output_clamp_value": 10.0,
    "use_kl_in_reward": False,
    "use_importance_sampling_correction": False,
    "truncated_importance_sampling_type": None,
    "truncated_importance_sampling_ratio": None,
    "truncated_importance_sampling_ratio_min": None,
    "use_on_policy_kl_approximation": False,
    "force_on_policy_ratio": False,
    "use_cispo": False,
    "positive_example_nll_weight": 0.0,
}
"""Of `ClippedPGLossConfig`, but for the KL penalty."""


def claims(checkout: Path | None) -> list[Claim]:
    (losses,) = modules(("nemo_rl.algorithms.loss.loss_functions",), checkout, absent=("nemo_rl.utils.logger",))

    def loss(kind: str | None = None, ratio: float | None = None, least: float | None = None, **config: Any) -> Any:
        own = {
            "use_importance_sampling_correction": kind is not None,
            "truncated_importance_sampling_type": kind,
            "truncated_importance_sampling_ratio": ratio,
            "truncated_importance_sampling_ratio_min": least,
        }
        function = losses.ClippedPGLossFn(SimpleNamespace(**{**DEFAULTS, **own, **config}))

        def call(b: Batch) -> torch.Tensor:
            def shifted(values: torch.Tensor) -> torch.Tensor:
                return torch.cat((values[:, :1], values), 1)

            data = {
                "input_ids": shifted(b.mask.long()),
                "advantages": shifted(b.advantages),
                "prev_logprobs": shifted(b.old_logprobs),
                "generation_logprobs": shifted(b.rollout_logprobs),
                "reference_policy_logprobs": shifted(b.ref_logprobs),
                "token_mask": shifted(b.mask.to(b.logprobs.dtype)),
                "sample_mask": torch.ones(len(b.groups), dtype=b.logprobs.dtype),
            }
            counts = (torch.tensor(float(b.sequences)), torch.tensor(float(b.tokens)))
            return function(b.logprobs, data, *counts)[0]

        return call

    mean: dict[str, Any] = {"token_level_loss": False}
    gspo: dict[str, Any] = {
        "sequence_level_importance_ratios": True,
        "ratio_clip_min": 3e-4,
        "ratio_clip_max": 4e-4,
        **mean,
    }
    kl: dict[str, Any] = {"reference_policy_kl_penalty": 1.0}
    whole = {"level": "geometric", "cap": 1.002, **TOKEN}
    return [
        Claim("ClippedPGLossFn", "grpo", loss(), TOKEN),
        Claim("ClippedPGLossFn, sequence level", "grpo", loss(**mean)),
        Claim("truncated_importance_sampling_type=tis, 2", "tis", loss("tis", 2.0), TOKEN),
        Claim("truncated_importance_sampling_type=icepop, 0.5 to 5", "icepop", loss("icepop", 5.0, 0.5), TOKEN),
        Claim("truncated_importance_sampling_type=seq-mask-tis", "mis", loss("seq-mask-tis", 1.002, 1e-9), whole),
        Claim("sequence_level_importance_ratios", "gspo", loss(**gspo)),
        Claim("use_cispo", "cispo", loss(use_cispo=True), {"low": 0.8, "high": 1.2}),
        Claim("reference_policy_kl_type=k3", "kl:k3", loss(**kl), TOKEN),
        Claim("use_on_policy_kl_approximation", "kl:uk3", loss(use_on_policy_kl_approximation=True, **kl), TOKEN),
    ]
