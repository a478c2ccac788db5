"""AReaL: a loss for `engine.train_batch(data, loss_fn=…, loss_weight_fn=lambda d: d["loss_mask"].count_nonzero())`.

    from rollkeel.integrations.areal import loss_fn
    engine.train_batch(data, loss_fn=loss_fn({"name": "kpop", "phi": 0.1}), loss_weight_fn=…)

in the place of `grpo_loss_fn`. AReaL weighs micro-batches by their tokens: a mean over tokens stays the denominator, counted
before any mask. Tested with tensors in the layout of 2.0.0, padded and packed; it needs nothing of AReaL itself.

A trace while it trains: `trace(trainer.actor, "mytrace")`, with `use_decoupled_loss` and `recompute_logprob`, before
`trainer.train`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rollkeel.integrations.padded import alone, flat, padded
from rollkeel.integrations.traces import before, needed, next_step, save_sequences
from rollkeel.objectives import Objective


def loss_fn(objective: str | Mapping[str, Any] | Objective) -> Callable[..., torch.Tensor]:
    """A function of AReaL's (logprobs, entropy, input_data), padded `[S, L]` or packed `[T]` with `cu_seqlens`."""
    made = alone(objective, "AReaL")

    def loss(
        logprobs: torch.Tensor, entropy: torch.Tensor, input_data: Mapping[str, Any], **unused: Any
    ) -> torch.Tensor:
        mask, starts = input_data["loss_mask"].bool(), input_data.get("cu_seqlens")
        names = ("logprobs", "advantages", "prox_logp")
        held = {name: input_data.get(name) for name in names}
        values = {
            "p": logprobs,
            "entropy": entropy.detach(),
            **{n: logprobs.detach() if v is None else v for n, v in held.items()},
        }
        if mask.dim() == 1:
            assert starts is not None
            sizes = starts.diff().tolist()
            mask = padded(mask.split(sizes))
            values = {n: padded(v.split(sizes)) for n, v in values.items()}
        if not mask.any():
            return logprobs.sum() * 0.0
        return made.loss(
            flat(
                values["p"],
                mask,
                rollout_logprobs=values["logprobs"],
                advantages=values["advantages"],
                coefficients=mask / mask.sum(),
                old_logprobs=values["prox_logp"],
                entropy=values["entropy"],
            )
        )

    return loss


def trace(actor: Any, folder: str | Path, *, temperature: float = 1.0) -> None:
    """Have an AReaL actor write every batch into the trace `folder`, before `ppo_update`. `temperature`: the sampler's.

    Without `use_decoupled_loss` AReaL writes the trainer's log-probs over the sampler's, and the trace shows no gap.
    """

    def save(data: Sequence[Mapping[str, Any]], *unused: Any, **more: Any) -> None:
        parts = [{n: v for n, v in _here(part).items() if isinstance(v, torch.Tensor)} for part in data]
        sizes = [len(part["input_ids"]) for part in parts]

        def rows(name: str, of_next: bool = True) -> torch.Tensor:
            """`[S, L]`; AReaL's values at i are about token i + 1, and stand at their own token here."""
            held = [needed(part, name, "AReaL", "set recompute_logprob and use_decoupled_loss") for part in parts]
            whole = padded([row for values in held for row in values])
            return whole.roll(1, 1) if of_next else whole

        mask = rows("loss_mask").bool()
        mask[:, 0] = False
        versions = rows("versions", False) if all("versions" in part for part in parts) else None
        save_sequences(
            folder,
            next_step(folder),
            rows("input_ids", False),
            mask,
            rollout_logprobs=rows("logprobs"),
            train_logprobs=rows("prox_logp"),
            advantages=rows("advantages"),
            versions=versions,
            rewards=torch.cat([part.get("original_rewards", part["rewards"]).flatten() for part in parts]),
            groups=[group for group, size in enumerate(sizes) for _ in range(size)],
            sampling={"temperature": temperature},
        )

    before(actor, "ppo_update", save)


def _here(part: Mapping[str, Any]) -> Mapping[str, Any]:
    """Tensors of a trajectory that lie in other processes, fetched."""
    try:
        from areal.infra.rpc.rtensor import RTensor  # pyright: ignore[reportMissingImports]
    except ImportError:
        return part
    return RTensor.localize(part)
