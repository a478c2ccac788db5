"""NeMo-RL: a loss function for its GRPO. Tested with the sources of commit 7ea279a.

    from rollkeel.integrations.nemo_rl import loss_function
    loss_fn = loss_function({"name": "kpop", "phi": 0.1})

in the place of `ClippedPGLossFn(cfg)`. Its global counts stay the denominator: of tokens, or of answers with
`sequence_level=True`.

A trace while it trains: `trace(policy, "mytrace")`, before `grpo_train` gets the policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rollkeel.integrations.padded import alone, flat, needing
from rollkeel.integrations.traces import before, next_step, save_sequences
from rollkeel.objectives import Objective


class RollkeelLoss:
    """An objective with the call of NeMo-RL's `LossFunction`; `loss_type` and `input_type` are set by `loss_function`."""

    loss_type: Any = None
    input_type: Any = None

    def __init__(self, objective: str | Mapping[str, Any] | Objective, sequence_level: bool = False) -> None:
        self.objective, self.sequence_level = alone(objective, "NeMo-RL"), sequence_level

    def __call__(
        self,
        next_token_logprobs: torch.Tensor,
        data: Mapping[str, torch.Tensor],
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """`next_token_logprobs`: `[S, L − 1]`; tensors of `data` are `[S, L]` and shifted here."""
        mask = (data["token_mask"] * data["sample_mask"][:, None])[:, 1:].bool()
        share = mask / global_valid_toks
        if self.sequence_level:
            share = mask / mask.sum(1, keepdim=True).clamp(min=1) / global_valid_seqs
        out = self.objective(
            flat(
                next_token_logprobs,
                mask,
                rollout_logprobs=data["generation_logprobs"][:, 1:],
                advantages=data["advantages"][:, 1:],
                coefficients=share,
                old_logprobs=data["prev_logprobs"][:, 1:],
            )
        )
        count = {"loss": out.loss.item(), "num_valid_samples": float(data["sample_mask"].sum())}
        return out.loss, {**count, **out.metrics}


def trace(policy: Any, folder: str | Path, *, temperature: float = 1.0) -> None:
    """Have a NeMo-RL policy write every batch into the trace `folder`, before it trains on it. `temperature`: the sampler's.

    The batch has no rewards; answers to equal prompts count as one group.
    """

    def save(data: Mapping[str, Any], *unused: Any, **more: Any) -> None:
        mask = data["token_mask"].bool() & data["sample_mask"].bool()[:, None]
        ids, first = data["input_ids"], data["token_mask"].int().argmax(1).tolist()
        save_sequences(
            folder,
            next_step(folder),
            ids,
            mask,
            rollout_logprobs=data["generation_logprobs"],
            train_logprobs=data["prev_logprobs"],
            advantages=data["advantages"],
            groups=[tuple(row[:n].tolist()) for row, n in zip(ids, first, strict=True)],
            sampling={"temperature": temperature},
            engine="vllm",
        )

    before(policy, "train", save)


def loss_function(objective: str | Mapping[str, Any] | Objective, sequence_level: bool = False) -> RollkeelLoss:
    """The loss with NeMo-RL's own types on it. Raises `BadInput` without NeMo-RL."""
    with needing("nemo_rl", "NeMo-RL", "run it inside NeMo-RL's environment"):
        from nemo_rl.algorithms.loss.interfaces import LossInputType, LossType  # pyright: ignore[reportMissingImports]
    made = RollkeelLoss(objective, sequence_level)
    made.loss_type = LossType.SEQUENCE_LEVEL if sequence_level else LossType.TOKEN_LEVEL
    made.input_type = LossInputType.LOGPROB
    return made
