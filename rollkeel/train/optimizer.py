"""AdamW with warm-up, clipping and one rule: a step with a non-finite number in it does not happen."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from rollkeel.config import SftConfig
from rollkeel.errors import BadInput, NonFinite

PACK_TOKENS = 8192
"""Least tokens of a forward pass in supervised training: its sequences are short and packed without padding."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Learning rate of update 0, 1, …: linear warm-up, then constant or a cosine to `lr · min_lr_ratio`."""

    lr: float
    warmup_steps: int = 0
    """The first update already moves: it uses `lr / warmup_steps`."""
    kind: Literal["constant", "cosine"] = "constant"
    total: int = 0
    """Updates of the whole run; the cosine ends at the last of them."""
    min_lr_ratio: float = 0.0

    def __call__(self, update: int) -> float:
        if update < self.warmup_steps:
            return self.lr * (update + 1) / self.warmup_steps
        if self.kind == "constant":
            return self.lr
        span = max(1, self.total - 1 - self.warmup_steps)
        done = min(1.0, (update - self.warmup_steps) / span)
        return self.lr * (self.min_lr_ratio + (1 - self.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * done)))


class ChangedShare:
    """What share of the weights an update changed, told by about 16,384 of them. Costs two visits to those."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters, self._places, self._views = parameters, list[int](), list[torch.Tensor]()
        # An odd stride meets every column; a parameter shorter than it is told by its first element.
        self._stride = sum(p.numel() for p in parameters) // 16384 | 1

    def look(self) -> torch.Tensor:
        """The sampled weights as they are now."""
        places = [p.data_ptr() for p in self._parameters]
        if places != self._places:
            self._views = [p.detach().reshape(-1)[:: self._stride] for p in self._parameters]
            self._places = places
        return (
            torch.cat(self._views)
            if len({v.dtype for v in self._views}) == 1
            else torch.cat([v.float() for v in self._views])
        )

    def since(self, before: torch.Tensor) -> float:
        """Share of the sampled weights that are not what `look` returned earlier."""
        return float((self.look() != before).float().mean())


class Stepper:
    """Clips, checks and applies the gradients of named parameters; counts updates.

    Weight decay is not applied to vectors (norms, biases). Parameters without `requires_grad` are never touched.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        schedule: Schedule,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        clip_norm: float = 1.0,
    ) -> None:
        self.named = [(n, p) for n, p in named_parameters if p.requires_grad]
        if not self.named:
            raise BadInput("optimizer: expected at least one trainable parameter, got none; is everything frozen?")
        self.schedule, self.clip_norm = schedule, clip_norm
        self.updates = 0
        matrices = [p for _, p in self.named if p.dim() > 1]
        vectors = [p for _, p in self.named if p.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self._adamw = torch.optim.AdamW([g for g in groups if g["params"]], lr=schedule.lr, betas=betas, fused=True)

    def zero_grad(self) -> None:
        """Forget gradients."""
        self._adamw.zero_grad(set_to_none=True)

    def step(self) -> dict[str, float]:
        """Apply the accumulated gradients, clipped to `clip_norm` in global 2-norm.

        Returns `optimizer/grad_norm` (before clipping) and `optimizer/lr`. Raises `NonFinite`, naming the first parameter
        with a bad gradient; weights, moments and the update count are then as before.
        """
        grads = [p.grad for _, p in self.named if p.grad is not None]
        if not grads:
            raise BadInput("optimizer: no parameter received a gradient; does the loss depend on the model?")
        norm = torch.nn.utils.get_total_norm(grads)
        value = float(norm)
        if not math.isfinite(value):
            name = self._culprit()
            self.zero_grad()
            raise NonFinite(
                f"update {self.updates}: gradient of {name} is not finite (norm {value}); weights left untouched"
            )
        torch.nn.utils.clip_grads_with_norm_([p for _, p in self.named], self.clip_norm, norm)
        lr = self.schedule(self.updates)
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        self.zero_grad()
        self.updates += 1
        return {"optimizer/grad_norm": value, "optimizer/lr": lr}

    def _culprit(self) -> str:
        for name, p in self.named:
            if p.grad is not None and not bool(torch.isfinite(p.grad).all()):
                return name
        return "all parameters together"

    def state_dict(self) -> dict[str, Any]:
        """Moments and step counts by parameter name, and the number of updates. Tensors are shared, not copied."""
        moments = {n: dict(self._adamw.state[p]) for n, p in self.named if p in self._adamw.state}
        return {"updates": self.updates, "moments": moments}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue as if nothing had happened. Raises `BadInput` if names or shapes differ."""
        known = dict(self.named)
        for name, moments in state["moments"].items():
            if name not in known:
                raise BadInput(
                    f"optimizer state has parameter {name} which the model lacks or has frozen; resume with the same model"
                )
            shape = moments["exp_avg"].shape
            if shape != known[name].shape:
                raise BadInput(
                    f"optimizer state of {name}: the model has shape {list(known[name].shape)}, the checkpoint {list(shape)}"
                )
        self._adamw.state.clear()
        for name, moments in state["moments"].items():
            p = known[name]
            # `step` stays float32: it is a count, and bfloat16 stops counting at 256.
            self._adamw.state[p] = {
                k: v.detach().clone().to(p.device, torch.float32 if k == "step" else p.dtype)
                for k, v in moments.items()
            }
        self.updates = int(state["updates"])


def supervised(model: torch.nn.Module, config: SftConfig, weight_decay: float) -> Stepper:
    """The optimizer of supervised training: a cosine to a tenth of the learning rate, gradients clipped to a norm of 1."""
    schedule = Schedule(
        lr=config.lr, warmup_steps=config.warmup_steps, kind="cosine", total=config.steps, min_lr_ratio=0.1
    )
    return Stepper(model.named_parameters(), schedule, weight_decay=weight_decay)
