"""The engine of a run that samples nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from rollkeel.errors import EngineFailure
from rollkeel.types import Capabilities, Proof, Request, Segment, WeightUpdate


@final
class IdleEngine:
    """Implements `rollkeel.protocols.Engine` for updates on recorded rollouts: it holds no weights and refuses requests."""

    version = -1
    capabilities = Capabilities(name="none", dtype="none", max_length=2**31)

    def submit(self, requests: Sequence[Request]) -> None:
        """Raises `EngineFailure` if there is one."""
        if requests:
            raise EngineFailure(f"engine none: got {len(requests)} requests, expected none; it samples nothing")

    def poll(self, timeout_s: float) -> list[Segment]:
        """Nothing."""
        return []

    def interrupt(self, ids: Sequence[int] | None = None) -> None:
        """Nothing is in flight."""

    def update_weights(self, update: WeightUpdate) -> Proof:
        """Raises `EngineFailure`: weights that sample nothing prove nothing."""
        raise EngineFailure(f"engine none: got weights of version {update.version}, expected none; it samples nothing")

    def close(self) -> None:
        """Nothing is open."""
