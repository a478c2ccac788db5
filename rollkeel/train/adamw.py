"""AdamW in float32 over weights of any dtype. Beside a low-precision weight lies what restores its float32 master to the bit.

    float32    the weight is the master                                                           16 bytes a parameter
    bfloat16   the weight is the master's upper half, rounded; `rest` is its lower half, int16    16
    float16    the weight is the master, rounded; `rest` is the master                            18

All with gradient and both moments in float32. A step of 1e-6 is less than half the last place of most bfloat16 weights: without
a master it would be lost in every step anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch.optim.adamw import adamw

CHUNK = 2**24
"""Most elements whose masters exist at one time, in multiples of what a vector unit takes, so that it changes no bit."""


def master(weight: torch.Tensor, rest: torch.Tensor | None) -> torch.Tensor:
    """Float32 values of `[n]` weights: memory that holds them where there is such, else a copy for `put_back`."""
    if rest is None or rest.dtype == torch.float32:
        return weight if rest is None else rest
    out = torch.empty(len(weight), device=weight.device)
    low, high = out.view(torch.int16).view(-1, 2).unbind(1)
    low.copy_(rest)
    high.copy_(weight.view(torch.int16) + (rest >> 15))
    return out


def put_back(values: torch.Tensor, weight: torch.Tensor, rest: torch.Tensor | None) -> None:
    """Store changed `values` of `master`. A bfloat16 weight is the nearest one, ties away from 0: with ties to even, 65,537
    masters would share an even weight, and 16 bits tell 65,536 apart."""
    if rest is None:
        return
    if rest.dtype == torch.float32:
        weight.copy_(values)
        return
    low, high = values.view(torch.int16).view(-1, 2).unbind(1)
    rest.copy_(low)
    weight.view(torch.int16).copy_(high - (rest >> 15))


def sum_in_float32(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Let gradients of micro-batches add up in float32, whatever the dtype of the weights."""
    for p in parameters:
        if p.requires_grad and p.dtype != torch.float32:
            p.grad = None
            p.grad_dtype = torch.float32


class AdamW:
    """torch's fused AdamW over masters, to the bit. Weight decay spares vectors (norms, biases)."""

    def __init__(
        self, parameters: Iterable[torch.nn.Parameter], *, betas: tuple[float, float], weight_decay: float
    ) -> None:
        self.parameters, self.betas, self.weight_decay, self.eps = list(parameters), betas, weight_decay, 1e-8
        self.state: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        """By parameter, made when first needed: `step`, `exp_avg`, `exp_avg_sq`, and `rest` of a low-precision one."""
        sum_in_float32(self.parameters)

    def state_of(self, p: torch.Tensor) -> dict[str, torch.Tensor]:
        """The state of `p`: as it is, or a fresh one whose master is the weight."""
        if p not in self.state:
            zeros = torch.zeros_like(p, dtype=torch.float32)
            self.state[p] = {"step": zeros.new_zeros(()), "exp_avg": zeros, "exp_avg_sq": zeros.clone()}
        if p.dtype != torch.float32 and "rest" not in self.state[p]:
            fresh = torch.zeros_like(p, dtype=torch.int16) if p.dtype == torch.bfloat16 else p.detach().float()
            self.state[p]["rest"] = fresh
        return self.state[p]

    def rest(self, p: torch.Tensor) -> torch.Tensor | None:
        """What restores the master of `p`; None if `p` itself is one."""
        return None if p.dtype == torch.float32 else self.state_of(p)["rest"]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Apply the gradients that there are."""
        for vectors in (False, True):
            some = [p for p in self.parameters if p.grad is not None and (p.dim() <= 1) == vectors]
            for batch in _batches(some):
                self._apply(batch, lr, 0.0 if vectors else self.weight_decay)

    def _apply(self, batch: Sequence[tuple[torch.Tensor, slice]], lr: float, weight_decay: float) -> None:
        held, grads, moments, squares, steps = [], [], [], [], []
        for p, part in batch:
            state = self.state_of(p)
            rest = state.get("rest")
            held.append((p.detach().view(-1)[part], None if rest is None else rest.view(-1)[part]))
            assert p.grad is not None  # asked for by `step`
            grads.append(p.grad.reshape(-1)[part])
            moments.append(state["exp_avg"].view(-1)[part])
            squares.append(state["exp_avg_sq"].view(-1)[part])
            steps.append(state["step"] if part.stop == p.numel() else state["step"].clone())
        masters = [master(*pair) for pair in held]
        adamw(
            masters,
            grads,
            moments,
            squares,
            [],
            steps,
            fused=True,
            amsgrad=False,
            beta1=self.betas[0],
            beta2=self.betas[1],
            lr=lr,
            weight_decay=weight_decay,
            eps=self.eps,
            maximize=False,
        )
        for values, pair in zip(masters, held, strict=True):
            put_back(values, *pair)


def _batches(parameters: Iterable[torch.Tensor]) -> Iterator[list[tuple[torch.Tensor, slice]]]:
    """Parts of flat parameters, at most `CHUNK` elements in all."""
    batch: list[tuple[torch.Tensor, slice]] = []
    size = 0
    for p in parameters:
        for start in range(0, p.numel(), CHUNK):
            part = slice(start, min(start + CHUNK, p.numel()))
            if size + part.stop - start > CHUNK:
                yield batch
                batch, size = [], 0
            batch.append((p, part))
            size += part.stop - start
    if batch:
        yield batch
