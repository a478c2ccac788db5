"""prime-rl: `ipo_loss_fn` and `default_loss_fn` of `prime_rl.trainer.rl.loss`, summed by its `compute_loss`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from rollkeel.conformance.adapters import TOKEN, Claim
from rollkeel.conformance.adapters.published import modules
from rollkeel.conformance.batch import Batch


def claims(checkout: Path | None) -> list[Claim]:
    (losses,) = modules(("prime_rl.trainer.rl.loss",), checkout, below="src")

    def loss(name: str, **config: float) -> Any:
        about = SimpleNamespace(adv_tau=1.0, **config)

        def call(b: Batch) -> torch.Tensor:
            def rows(values: torch.Tensor) -> list[torch.Tensor]:
                return list(values.unbind())

            return losses.compute_loss(
                rows(b.logprobs), rows(b.rollout_logprobs), None, rows(b.advantages), rows(b.mask), None, None, None,
                lambda inputs: getattr(losses, name)(inputs, about), b.tokens, 1, 1,
            )[0]  # fmt: skip

        return call

    ipo = {"delta": 0.1, "gap_penalty": 1e-3}
    dppo = {"delta": 0.2, "directional": True, "gap_penalty": 1e-3}
    masks = {"dppo_mask_low": 0.15, "dppo_mask_high": 0.15}
    return [
        Claim("type=ipo", "ipo", loss("ipo_loss_fn", ipo_threshold=0.1, kl_tau=1e-3), ipo),
        Claim("type=default", "ipo", loss("default_loss_fn", dppo_mask_low=0.2, dppo_mask_high=0.2, kl_tau=1e-3), dppo),
        Claim(
            "type=default, kl_tau 0, masks 0.15", "dppo_binary_tv", loss("default_loss_fn", kl_tau=0.0, **masks), TOKEN
        ),
    ]
