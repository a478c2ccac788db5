"""AdamW in float32 over weights of any dtype. Beside a low-precision weight lies what restores its float32 master to the bit.

    float32    the weight is the master                                                           16 bytes a parameter
    bfloat16   the weight is the master's upper half, rounded; `rest` is its lower half, int16    16
    float16    the weight is the master, rounded; `rest` is the master                            18

All with gradient and both moments in float32; with moments of 8 bits it is six bytes less, but for 8 in every 256 parameters. A step of 1e-6 is less than half the last place of most bfloat16 weights: without
a master it would be lost in every step anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch.optim.adamw import adamw

from rollkeel.models import gpu
from rollkeel.train.eight_bit import BLOCK, pack, unpack
from rollkeel.train.mesh import local

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
    """torch's fused AdamW over masters, to the bit; a Triton kernel keeps to its arithmetic, which other versions of torch round
    otherwise. Weight decay spares vectors (norms, biases)."""

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        *,
        betas: tuple[float, float],
        weight_decay: float,
        eight_bit: bool = False,
    ) -> None:
        self.parameters = list(parameters)
        self.betas = betas
        self.weight_decay = weight_decay
        self.eps = 1e-8
        self.eight_bit = eight_bit
        self.state: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        """By parameter, made when first needed: `step`, `exp_avg`, `exp_avg_sq`, `rest` of a low-precision one, and `scales` of
        moments of 8 bits."""
        sum_in_float32(self.parameters)

    def state_of(self, p: torch.Tensor) -> dict[str, torch.Tensor]:
        """The state of `p`: as it is, or a fresh one whose master is the weight."""
        if p not in self.state:
            kinds = (torch.int8, torch.uint8) if self.eight_bit else (torch.float32, torch.float32)
            first, second = (torch.zeros_like(local(p), dtype=kind) for kind in kinds)
            step = torch.zeros((), device=p.device)
            self.state[p] = {"step": step, "exp_avg": first, "exp_avg_sq": second}
        if self.eight_bit and "scales" not in self.state[p]:
            self._pack(p)
        if p.dtype != torch.float32 and "rest" not in self.state[p]:
            here = local(p.detach())
            fresh = torch.zeros_like(here, dtype=torch.int16) if p.dtype == torch.bfloat16 else here.float()
            self.state[p]["rest"] = fresh
        return self.state[p]

    def _pack(self, p: torch.Tensor) -> None:
        """Bring what there is of `p` into 8 bits."""
        state = self.state[p]
        state["scales"] = torch.zeros(2, -(-p.numel() // BLOCK), device=p.device)
        for row, (key, kind) in enumerate((("exp_avg", torch.int8), ("exp_avg_sq", torch.uint8))):
            if state[key].dtype == torch.float32:
                codes = torch.zeros_like(p, dtype=kind)
                pack(state[key].view(-1), codes.view(-1), state["scales"][row], 0)
                state[key] = codes

    def rest(self, p: torch.Tensor) -> torch.Tensor | None:
        """What restores the master of `p`; None if `p` itself is one."""
        return None if p.dtype == torch.float32 else self.state_of(p)["rest"]

    @torch.no_grad()
    def step(self, lr: float, seed: int = 0) -> None:
        """Apply the gradients that there are. `seed`: another one in every step, of what moments of 8 bits are rounded by."""
        seed <<= 24
        for vectors in (False, True):
            weight_decay = 0.0 if vectors else self.weight_decay
            some = [p for p in self.parameters if p.grad is not None and (p.dim() <= 1) == vectors]
            if fused := [p for p in some if self._fused(p)]:
                self._update(fused, lr, weight_decay)
            for batch in _batches(p for p in some if not self._fused(p)):
                self._apply(batch, lr, weight_decay, seed)
                seed += 2 * len(batch)

    def _fused(self, p: torch.Tensor) -> bool:
        """Whether one kernel reads and writes everything of `p`, so that no master ever is in memory."""
        return p.dtype == torch.bfloat16 and not self.eight_bit and gpu.taken(p)

    def _update(self, parameters: Sequence[torch.Tensor], lr: float, weight_decay: float) -> None:
        from rollkeel.models.gpu.adamw import update

        states = [self.state_of(p) for p in parameters]
        tensors = []
        for p, state in zip(parameters, states, strict=True):
            assert p.grad is not None  # asked for by `step`
            gradient = local(p.grad).float().reshape(-1)
            held = (local(p.detach()), *(state[key] for key in ("rest", "exp_avg", "exp_avg_sq")))
            weight, rest, *moments = (tensor.view(-1) for tensor in held)
            tensors.append((weight, rest, gradient, *moments))
        about = {"lr": lr, "weight_decay": weight_decay, "betas": self.betas, "eps": self.eps}
        update(tensors, [state["step"] for state in states], **about)

    def _apply(self, batch: Sequence[tuple[torch.Tensor, slice]], lr: float, weight_decay: float, seed: int) -> None:
        held = []
        grads = []
        moments = []
        squares = []
        steps = []
        small = []
        for p, part in batch:
            state = self.state_of(p)
            rest = state.get("rest")
            held.append((local(p.detach()).view(-1)[part], None if rest is None else rest.view(-1)[part]))
            assert p.grad is not None  # asked for by `step`
            grads.append(local(p.grad).reshape(-1)[part])
            first, second = (state[key].view(-1)[part] for key in ("exp_avg", "exp_avg_sq"))
            if self.eight_bit:
                blocks = slice(part.start // BLOCK, -(-part.stop // BLOCK))
                packed = list(zip((first, second), state["scales"][:, blocks], strict=True))
                first, second = (unpack(*pair) for pair in packed)
                small += zip((first, second), packed, strict=True)
            moments.append(first)
            squares.append(second)
            steps.append(state["step"] if part.stop == local(p).numel() else state["step"].clone())
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
        for number, (values, (codes, scales)) in enumerate(small):
            pack(values, codes, scales, seed + number)


def _batches(parameters: Iterable[torch.Tensor]) -> Iterator[list[tuple[torch.Tensor, slice]]]:
    """Parts of flat parameters, at most `CHUNK` elements in all."""
    batch: list[tuple[torch.Tensor, slice]] = []
    size = 0
    for p in parameters:
        count = local(p).numel()
        for start in range(0, count, CHUNK):
            part = slice(start, min(start + CHUNK, count))
            if size + part.stop - start > CHUNK:
                yield batch
                batch, size = [], 0
            batch.append((p, part))
            size += part.stop - start
    if batch:
        yield batch
