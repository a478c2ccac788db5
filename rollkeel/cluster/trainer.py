"""The trainer on ranks, as the loop sees it: numbers per token go out once, and what the first rank says about them comes back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
import torch

from rollkeel.batch.build import TrainingBatch
from rollkeel.cluster import wire
from rollkeel.cluster.calls import Ranks
from rollkeel.errors import EngineFailure
from rollkeel.models.checksum import MASK
from rollkeel.objectives import Objective
from rollkeel.train.scores import Scores, UpdateOutput


class RemoteTrainer:
    """Implements `rollkeel.loop.machines.Trainer`, and `rollkeel.cluster.publish.Source`.

    Ranks have the objective too, built alike; its state goes with every update and comes back, so that the one here is
    always the newest.
    """

    def __init__(self, ranks: Ranks, padded: str, deadline_s: float) -> None:
        """`padded`: as the ranks told it; `deadline_s`: of an engine that takes weights."""
        self.device = torch.device("cpu")
        self.version, self.padded = 0, padded
        self.carried = 0
        """Bytes of numbers per token that went to ranks and came back. What goes is put into the object store once for all ranks."""
        self._ranks, self._deadline_s = ranks, deadline_s
        self._kept: tuple[TrainingBatch, Any] | None = None

    def score(self, batch: TrainingBatch, *, experts: bool = False) -> Scores:
        return wire.scores_in(self._counted(self._ranks.call("score", self._put(batch), experts)))

    def ref_logprobs(self, batch: TrainingBatch) -> torch.Tensor:
        return wire.tensors_in(self._counted(self._ranks.call("ref_logprobs", self._put(batch))))["logprobs"]

    def update(
        self,
        batch: TrainingBatch,
        objective: Objective,
        *,
        old_logprobs: torch.Tensor | None = None,
        old_topk_logprobs: torch.Tensor | None = None,
        ref_logprobs: torch.Tensor | None = None,
        old_is_current: bool = False,
        experts: bool = False,
    ) -> UpdateOutput:
        tensors = {
            "old_logprobs": old_logprobs,
            "old_topk_logprobs": old_topk_logprobs,
            "ref_logprobs": ref_logprobs,
        }
        flags = {"old_is_current": old_is_current, "experts": experts}
        about = self._counted(wire.tensors_out(tensors))
        told = self._ranks.call("update", self._put(batch), objective.state_dict(), about, flags)
        objective.load_state_dict(told["objective"])
        self.version = told["version"]
        return wire.output_in(self._counted(told["output"]))

    def stream(self, head: Any, sinks: Sequence[Any]) -> Sequence[int]:
        """See `rollkeel.cluster.publish.Source`: from all ranks to the engines, past this process."""
        sent = self._ranks.gather("stream", head, ray.put(list(sinks)), self._deadline_s)
        for failed in (each for each in sent if isinstance(each, EngineFailure)):
            raise failed
        return [sum(sums) & MASK for sums in zip(*sent, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        """Its version; the rest the ranks write themselves (`Machines.save`)."""
        return {"updates": self.version}

    def load(self, folder: str) -> list[str]:
        """Have the ranks read their parts of the checkpoint `folder`."""
        self.version, lacking = self._ranks.call("restore", folder)
        return lacking

    def close(self) -> None:
        """The ranks end with the machines."""

    def _counted(self, told: dict[str, Any]) -> dict[str, Any]:
        self.carried += wire.size_of(told)
        return told

    def _put(self, batch: TrainingBatch) -> Any:
        """The batch in the object store; the last one is still there, for several passes over it."""
        if self._kept is None or self._kept[0] is not batch:
            told = self._counted(wire.batch_out(batch))
            self._kept = batch, ray.put(told)
        return self._kept[1]
