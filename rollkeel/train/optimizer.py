"""AdamW with warm-up, clipping and one rule: a step with a non-finite number in it does not happen."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from rollkeel.config import SftConfig
from rollkeel.errors import BadInput, NonFinite
from rollkeel.train.adamw import AdamW, master
from rollkeel.train.eight_bit import unpack
from rollkeel.train.mesh import Mesh, local, summed
from rollkeel.train.tree import norm as norm_by_rows

PACK_TOKENS = 8192
"""Least tokens of a forward pass in supervised training: its sequences are short and packed without padding."""
FIRST_SCALE, LAST_SCALE, GROWTH = 2.0**15, 2.0**24, 1000
"""Loss scale of float16: where it starts, where it stops to double, and the updates without overflow between two doublings."""


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
    """What share of the weights an update changed, told by about 16,384 of them. Costs two visits to those.

    Of a low-precision weight its float32 master counts: that is what an update moves, the weight follows in time.
    """

    def __init__(self, adamw: AdamW, mesh: Mesh = Mesh(), counted: Sequence[torch.nn.Parameter] | None = None) -> None:
        """`counted`: the parameters that this rank counts, all if not given."""
        self._adamw = adamw
        self._mesh = mesh
        self._places = list[int]()
        self._counted = adamw.parameters if counted is None else counted
        self._views: dict[torch.dtype, list[tuple[torch.Tensor, torch.Tensor | None]]] = {}
        # An odd stride meets every column; a parameter shorter than it is told by its first element.
        self._stride = sum(local(p).numel() for p in self._counted) // 16384 | 1

    def look(self) -> torch.Tensor:
        """The sampled weights as they are now."""
        held = [(local(p.detach()), self._adamw.rest(p)) for p in self._counted]
        places = [t.data_ptr() for pair in held for t in pair if t is not None]
        if places != self._places:
            self._views = {}
            for p, rest in held:
                view = (self._sample(p), None if rest is None else self._sample(rest))
                self._views.setdefault(p.dtype, []).append(view)
            self._places = places
        return torch.cat([_masters(*zip(*views, strict=True)) for views in self._views.values()])

    def _sample(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.reshape(-1)[:: self._stride]

    def since(self, before: torch.Tensor) -> float:
        """Share of the sampled weights that are not what `look` returned earlier."""
        changed = self.look() != before
        if not self._mesh.in_step:
            return float(changed.float().mean())
        counts = torch.stack([changed.sum(), changed.new_tensor(len(changed), dtype=torch.int64)])
        moved, every = self._mesh.over_model(counts).tolist()
        return moved / every


def _masters(weights: tuple[torch.Tensor, ...], rests: tuple[Any, ...]) -> torch.Tensor:
    """Those of weights of one dtype, one after the other: a few kernels instead of a few for each."""
    return master(torch.cat(weights), None if rests[0] is None else torch.cat(rests))


class Stepper:
    """Clips, checks and applies the gradients of named parameters; counts updates.

    Parameters without `requires_grad` are never touched. Gradients of float16 weights must come from a loss times `scale`:
    small ones would be 0 in float16. The scale halves whenever they overflow and doubles after `GROWTH` updates without
    (Micikevicius et al. 2018).
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        schedule: Schedule,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        clip_norm: float = 1.0,
        eight_bit: bool = False,
        mesh: Mesh = Mesh(),
        by_rows: bool = False,
        counts: Callable[[str], bool] = lambda name: True,
    ) -> None:
        """`mesh`: whose parts the parameters are, if they are sharded; `by_rows`: take the norm as `tree.norm` does; `counts`: whether
        this rank counts a parameter in sums over the model."""
        every = list(named_parameters)
        self.named = [(n, p) for n, p in every if p.requires_grad]
        if not self.named:
            raise BadInput("optimizer: expected at least one trainable parameter, got none; is everything frozen?")
        self.schedule, self.clip_norm = schedule, clip_norm
        self._mesh, self._by_rows = mesh, by_rows
        self.counted = [p for n, p in self.named if counts(n)]
        """Those that this rank counts in sums over the model."""
        self.updates = 0
        """Updates so far, with those that an overflow left out."""
        parameters = [p for _, p in self.named]
        self.adamw = AdamW(parameters, betas=betas, weight_decay=weight_decay, eight_bit=eight_bit)
        # Gradients of float32 adapters come through the float16 weights that they stand beside.
        self._scaled = any(p.dtype == torch.float16 for _, p in every)
        self.scale = FIRST_SCALE if self._scaled else 1.0
        """What a loss is multiplied by before its backward pass; 1 without float16."""
        self._sound = 0

    def zero_grad(self) -> None:
        """Forget gradients."""
        for _, p in self.named:
            p.grad = None

    def step(self, judge: Callable[[float], None] = lambda norm: None) -> dict[str, float]:
        """Apply the accumulated gradients, clipped to `clip_norm` in global 2-norm. `judge`: is asked about it first, and may raise.

        Returns `optimizer/grad_norm` (before clipping) and `optimizer/lr`; with float16 also `optimizer/loss_scale` and
        `optimizer/skipped`, 1 for an update that an overflow of the scaled gradients left out, which has no norm. Raises
        `NonFinite`, naming the first parameter with a bad gradient; weights, moments and the update count are then as before.
        """
        grads = [p.grad for _, p in self.named if p.grad is not None]
        if not grads:
            raise BadInput("optimizer: no parameter received a gradient; does the loss depend on the model?")
        lr, told = self.schedule(self.updates), {"optimizer/loss_scale": self.scale} if self._scaled else {}
        if self._scaled:
            torch._foreach_mul_(list(map(local, grads)), 1.0 / self.scale)  # type: ignore[attr-defined]
        norm = self._norm(grads)
        value = float(norm)
        if not math.isfinite(value) and self.scale == 1.0:
            name = self._culprit()
            self.zero_grad()
            raise NonFinite(
                f"update {self.updates}: gradient of {name} is not finite (norm {value}); weights left untouched"
            )
        if math.isfinite(value):
            judge(value)
            if value + 1e-6 > 0.99 * self.clip_norm:  # else the factor is 1
                factor = (self.clip_norm / (norm + 1e-6)).clamp(max=1.0)
                torch._foreach_mul_(list(map(local, grads)), factor)  # type: ignore[attr-defined]
            self.adamw.step(lr, self.updates)
            told["optimizer/grad_norm"] = value
        self.zero_grad()
        self.updates += 1
        if self._scaled:
            told["optimizer/skipped"] = float(not math.isfinite(value))
            self._rescale(math.isfinite(value))
        return {**told, "optimizer/lr": lr}

    @torch.no_grad()
    def _norm(self, grads: list[torch.Tensor]) -> torch.Tensor:
        if self._by_rows:
            return norm_by_rows([p for _, p in self.named], self._mesh)
        if not self._mesh.in_step:
            return torch.nn.utils.get_total_norm(grads)
        counted = [local(p.grad) for p in self.counted if p.grad is not None]
        squares = summed((g.float().square().sum() for g in counted), local(grads[0]).device)
        return self._mesh.over_model(squares).sqrt()

    def _rescale(self, sound: bool) -> None:
        self._sound = self._sound + 1 if sound else 0
        if not sound:
            self.scale /= 2
        elif self._sound % GROWTH == 0:
            self.scale = min(2 * self.scale, LAST_SCALE)

    def _culprit(self) -> str:
        for name, p in self.named:
            if p.grad is not None and not bool(torch.isfinite(local(p.grad)).all()):
                return name
        return "all parameters together"

    def state_dict(self) -> dict[str, Any]:
        """State of AdamW by parameter name, the number of updates and the loss scale. Tensors are shared, not copied."""
        moments = {n: dict(self.adamw.state[p]) for n, p in self.named if p in self.adamw.state}
        return {"updates": self.updates, "moments": moments, "scale": self.scale, "sound": self._sound}

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Continue as if nothing had happened, the weights being loaded already. Raises `BadInput` if names or shapes differ.

        Returns lines for people: what the state lacks."""
        known, lacking = dict(self.named), []
        for name, moments in state["moments"].items():
            if name not in known:
                raise BadInput(
                    f"optimizer state has parameter {name} which the model lacks or has frozen; resume with the same model"
                )
            shape, expected = moments["exp_avg"].shape, local(known[name]).shape
            if shape != expected:
                raise BadInput(
                    f"optimizer state of {name}: the model has shape {list(expected)}, the checkpoint {list(shape)}"
                )
        self.adamw.state.clear()
        for name, moments in state["moments"].items():
            p = known[name]
            self.adamw.state[p] = moments_of(moments, p.device, self.adamw.eight_bit)
            expected, rest = self.adamw.rest(p), moments.get("rest")
            if expected is not None and rest is not None and rest.dtype == expected.dtype:
                expected.copy_(rest)
            elif expected is not None:
                lacking.append(name)
        self.updates, self._sound = int(state["updates"]), int(state.get("sound", 0))
        if self._scaled:
            self.scale = float(state.get("scale", FIRST_SCALE))
        if not lacking:
            return []
        return [f"the checkpoint has no float32 masters of {len(lacking)} weights: they start from the rounded weights"]


def moments_of(saved: Mapping[str, torch.Tensor], device: torch.device, eight_bit: bool) -> dict[str, torch.Tensor]:
    """A copy of saved moments of a parameter: as they are if they have 8 bits and may have, else in float32."""
    kept = {name: tensor.detach().clone().to(device) for name, tensor in saved.items() if name != "rest"}
    if eight_bit and "scales" in kept:
        return kept
    for row, name in zip(kept.pop("scales", (None, None)), ("exp_avg", "exp_avg_sq"), strict=True):
        values = kept[name]
        kept[name] = values.float() if row is None else unpack(values.view(-1), row).view(values.shape)
    return kept


def supervised(model: torch.nn.Module, config: SftConfig, steps: int, weight_decay: float, **held: Any) -> Stepper:
    """The optimizer of supervised training of so many steps: a cosine, gradients clipped to a norm of 1. `held`: of `Stepper`, how
    ranks hold the model."""
    warmup, low = config.warmup_steps, config.min_lr_ratio
    schedule = Schedule(lr=config.lr, warmup_steps=warmup, kind="cosine", total=steps, min_lr_ratio=low)
    return Stepper(model.named_parameters(), schedule, weight_decay=weight_decay, **held)
