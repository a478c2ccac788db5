"""ms-swift: `_compute_loss_and_metrics` of its `GRPOTrainer`, on a stand-in for the trainer with the arguments that it
reads."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from rollkeel.conformance.adapters import Claim
from rollkeel.conformance.adapters.published import Trainer, modules
from rollkeel.conformance.batch import Batch

ABSENT = ("swift.infer_engine.protocol", "transformers", "accelerate", "trl")
DEFAULTS: dict[str, Any] = {
    "loss_type": "grpo",
    "importance_sampling_level": "token",
    "epsilon_low": 0.2,
    "epsilon_high": 0.2,
    "tau_pos": 1.0,
    "tau_neg": 1.05,
    "rollout_importance_sampling_mode": None,
    "rollout_importance_sampling_threshold": 2.0,
    "off_policy_sequence_mask_delta": None,
    "compute_entropy": False,
    "overlong_filter": False,
    "beta": 0.0,
    "kl_in_reward": False,
    "log_rollout_offpolicy_metrics": False,
    "disable_rollout_importance_sampling": False,
    "_has_teacher": False,
    "sdar_loss_coef": 0.0,
    "chord_sft_iterator": None,
    "max_completion_length": 1024,
}


def claims(checkout: Path | None) -> list[Claim]:
    (trainer,) = modules(("swift.rlhf_trainers.grpo_trainer",), checkout, absent=ABSENT)

    def loss(delta: float | None = None, **config: Any) -> Any:
        def call(b: Batch) -> torch.Tensor:
            every = SimpleNamespace(num_processes=1, gather_for_metrics=lambda x: x)
            about = Trainer(
                of=trainer.GRPOTrainer,
                model=SimpleNamespace(training=True),
                args=SimpleNamespace(delta=delta, log_entropy=False, top_entropy_quantile=1.0),
                accelerator=every,
                _get_per_token_logps_and_entropies=lambda *_, **__: (b.logprobs, None),
                **{**DEFAULTS, **config},
            )
            batch = SimpleNamespace(
                completion_mask=b.mask,
                truncated_mask=torch.zeros(len(b.groups), dtype=torch.bool),
                old_per_token_logps=b.old_logprobs,
                rollout_per_token_logps=b.rollout_logprobs,
                ref_per_token_logps=b.ref_logprobs,
                teacher_per_token_logps=None,
                advantages=b.advantages,
                num_items_in_batch=b.tokens,
            )
            return about._compute_loss_and_metrics(about.model, {}, batch)[0]

        return call

    def corrected(mode: str, threshold: float = 2.0) -> Any:
        return loss(rollout_importance_sampling_mode=mode, rollout_importance_sampling_threshold=threshold)

    gspo = {"epsilon_low": 3e-4, "epsilon_high": 4e-4}
    whole = {"level": "sequence", "cap": 2.0}
    return [
        Claim("loss_type=grpo", "grpo", loss()),
        Claim("loss_type=grpo, delta 3", "grpo", loss(3.0)),
        Claim("loss_type=dapo", "dapo", loss(loss_type="dapo", epsilon_high=0.28)),
        Claim("rollout_importance_sampling_mode=token_truncate", "tis", corrected("token_truncate")),
        Claim("rollout_importance_sampling_mode=token_mask", "mis", corrected("token_mask")),
        Claim("rollout_importance_sampling_mode=sequence_mask", "mis", corrected("sequence_mask"), whole),
        Claim("rollout_importance_sampling_mode=sequence_truncate", "tis", corrected("sequence_truncate")),
        Claim(
            "importance_sampling_level=sequence_token", "gspo", loss(importance_sampling_level="sequence_token", **gspo)
        ),
        Claim("loss_type=sapo", "sapo", loss(loss_type="sapo")),
        Claim("loss_type=cispo, epsilon_high 5", "cispo", loss(loss_type="cispo", epsilon_high=5.0)),
        Claim("off_policy_sequence_mask_delta", "opsm", loss(off_policy_sequence_mask_delta=1e-4)),
    ]
