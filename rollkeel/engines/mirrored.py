"""An engine that takes whole updates, for weights that come in parts: they are written to a copy in host memory and proven there, and go on
from it as one update.

    ranks ── buckets ──▶ copy ── one update ──▶ server: boxes or folder, proven again in its own memory

It samples on while weights travel, and a server that is lost starts again with what is here. The price is memory of the host for the served
weights once more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from rollkeel.errors import BadInput, EngineFailure
from rollkeel.models.checksum import MASK, tensor_checksum
from rollkeel.models.forward import Zeros
from rollkeel.models.numerics import compute_dtype, held_checksum
from rollkeel.models.routers import is_router
from rollkeel.protocols import ProbedEngine, SteppedEngine
from rollkeel.types import FloatArray, IntArray, Proof, Request, Segment, WeightSlice, WeightUpdate

PLAIN = ("fp32", "bf16", "fp16")
WAIT_S = 0.005
"""Longest time in which the engine's caller does not hear messages."""
_APART = 64
"""Elements; each weight begins at a multiple."""


@dataclass(frozen=True)
class _Copy:
    destinations: dict[str, torch.Tensor]
    adapters: dict[str, torch.Tensor]


class Mirrored:
    """What `part.serve` and `Intake` ask of an embedded engine, in front of another one."""

    def __init__(self, engine: SteppedEngine, shapes: Mapping[str, Sequence[int]], zeros: Zeros = torch.zeros) -> None:
        """`shapes`: of all weights, by checkpoint name; `zeros`: makes the copy. Raises `BadInput` for an engine whose numbers are not
        stored as they are."""
        self.capabilities = engine.capabilities
        mode = self.capabilities.dtype
        if mode not in PLAIN:
            raise BadInput(
                f"engine.dtype={mode}: weights of this engine come over a cluster as {', '.join(PLAIN)}; set one of them"
            )
        self._engine = engine
        self.weights = _views(shapes, mode, zeros)
        self.memory = _Copy(self.weights, {})
        self.steps = 0
        """Of the engine's caller: a server tells none."""
        self._held = -1
        """Version of what is here; -1 while it is not whole."""
        self._flying = set[int]()

    @property
    def version(self) -> int:
        """Of what the engine serves."""
        return self._engine.version

    @property
    def busy(self) -> bool:
        return bool(self._flying)

    def submit(self, requests: Sequence[Request]) -> None:
        self._engine.submit(requests)
        self._flying |= {request.id for request in requests}

    def poll(self, timeout_s: float) -> list[Segment]:
        return self._ended(self._engine.poll(max(timeout_s, WAIT_S)))

    def advance(self, steps: int) -> list[Segment]:
        return self._ended(self._engine.advance(steps))

    def progress(self) -> dict[int, int]:
        return self._engine.progress()

    def interrupt(self, ids: Sequence[int] | None = None) -> None:
        self._engine.interrupt(ids)

    def score(self, sequences: Sequence[IntArray]) -> list[FloatArray] | None:
        """See `ProbedEngine.score`; None of an engine that is none."""
        return self._engine.score(sequences) if isinstance(self._engine, ProbedEngine) else None

    def retire(self) -> int:
        """See `LocalEngine.retire`. The engine serves what it has until `serve`."""
        held, self._held = self._held, -1
        return held

    def serve(self, version: int, checksum: int, _: int) -> Proof:
        """Have the engine serve what is here, which has this checksum. Raises `EngineFailure` where either has not."""
        slices = [WeightSlice(name=n, tensor=t, checksum=tensor_checksum(n, t)) for n, t in self.weights.items()]
        total, as_sent = (
            sum(sums) & MASK for sums in zip(*((s.checksum, self._as_sent(s)) for s in slices), strict=True)
        )
        if as_sent != checksum:
            raise EngineFailure(f"weight update {version}: memory changed behind its proof")
        self._held = version
        update = WeightUpdate(kind="full", base_version=None, version=version, slices=slices, checksum=total)
        proof = self._engine.update_weights(update)
        if (proof.version, proof.checksum) != (version, total):
            raise EngineFailure(
                f"engine {self.capabilities.name}: expected proof of version {version} with checksum {total:016x}, got version"
                f" {proof.version} with {proof.checksum:016x}; weights did not arrive"
            )
        return Proof(version=version, checksum=checksum)

    def close(self) -> None:
        self._engine.close()

    def _as_sent(self, piece: WeightSlice) -> int:
        mode = self.capabilities.dtype
        exact = piece.tensor.dtype == compute_dtype(mode)
        return piece.checksum if exact else held_checksum(piece.name, piece.tensor, mode)

    def _ended(self, segments: list[Segment]) -> list[Segment]:
        self.steps += 1
        self._flying -= {segment.request_id for segment in segments}
        return segments


def _views(shapes: Mapping[str, Sequence[int]], mode: str, zeros: Zeros) -> dict[str, torch.Tensor]:
    """Memory for each weight. What is added to a router's scores stays float32: servers compute with it so."""
    dtypes = {n: torch.float32 if is_router(n) and n.endswith("bias") else compute_dtype(mode) for n in shapes}
    out = dict[str, torch.Tensor]()
    for dtype in dict.fromkeys(dtypes.values()):
        mine = [name for name in shapes if dtypes[name] == dtype]
        ends = list(accumulate(-(-math.prod(shapes[name]) // _APART) * _APART for name in mine))
        whole = zeros(ends[-1], dtype=dtype, device=torch.device("cpu"))
        for name, end in zip(mine, [0, *ends], strict=False):
            out[name] = whole[end : end + math.prod(shapes[name])].view(tuple(shapes[name]))
    return {name: out[name] for name in shapes}
