"""The trainer on ranks, as the loop sees it: numbers per token go out once, and what the first rank says about them comes back."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import ray
import torch

from rollkeel.batch.build import TrainingBatch
from rollkeel.cluster import wire
from rollkeel.cluster.calls import Ranks
from rollkeel.errors import DeltaRefused, EngineFailure
from rollkeel.models.checksum import MASK
from rollkeel.objectives import Objective
from rollkeel.sync.last_sent import Traffic
from rollkeel.train.scores import Scores, UpdateOutput


class RemoteTrainer:
    """Implements `rollkeel.loop.machines.Trainer`, and `rollkeel.cluster.publish.Source`.

    Ranks have the objective too, built alike; its state goes with every update and comes back, so that the one here is
    always the newest.
    """

    def __init__(self, ranks: Ranks, padded: str, deadline_s: float, *, replays: bool) -> None:
        """`padded`: as the ranks told it; `deadline_s`: of an engine that takes weights; `replays`: passes take the engine's experts."""
        self.device = torch.device("cpu")
        self.version, self.padded = 0, padded
        self.carried = 0
        """Bytes that went to ranks and came back. What goes is put into the object store once for all ranks."""
        self._ranks = ranks
        self._deadline_s = deadline_s
        self._replays = replays
        self.traffic = Traffic()
        """Of the last publication."""
        self._whole: TrainingBatch | None = None
        """The batch that the ranks have, and in `_told` what they told about it."""
        self._told: dict[str, torch.Tensor | None] = {}

    def score(self, batch: TrainingBatch, *, experts: bool = False) -> Scores:
        scores = wire.scores_in(self._call("score", batch, {"experts": experts}))
        if batch is self._whole:
            self._told |= {"old_logprobs": scores.logprobs, "old_topk_logprobs": scores.topk_logprobs}
        return scores

    def ref_logprobs(self, batch: TrainingBatch) -> torch.Tensor:
        found = wire.tensors_in(self._call("ref_logprobs", batch, {}))["ref_logprobs"]
        if batch is self._whole:
            self._told["ref_logprobs"] = found
        return found

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
        named = {
            "old_logprobs": old_logprobs,
            "old_topk_logprobs": old_topk_logprobs,
            "ref_logprobs": ref_logprobs,
        }
        known = {n: wire.view_out(v, self._told.get(n)) for n, v in named.items() if v is not None}
        tensors = wire.tensors_out({name: named[name] for name, rows in known.items() if rows is None})
        about = {"state": objective.state_dict(), "tensors": tensors, "known": {n: r for n, r in known.items() if r}}
        about["flags"] = {"old_is_current": old_is_current, "experts": experts}
        told = self._call("update", batch, about)
        objective.load_state_dict(told["objective"])
        self.version = told["version"]
        return wire.output_in(told["output"])

    def prepare(self, head: Any) -> None:
        """See `rollkeel.cluster.publish.Source`."""
        self._ranks.gather("prepare", head)

    def stream(self, head: Any, sinks: Sequence[Any]) -> Sequence[int]:
        """See `rollkeel.cluster.publish.Source`: from all ranks to the engines, past this process."""
        sent = self._ranks.gather("stream", head, ray.put(list(sinks)), self._deadline_s)
        failed = [each for each in sent if isinstance(each, EngineFailure)]
        for each in sorted(failed, key=lambda error: isinstance(error, DeltaRefused)):  # another failure says more
            raise each
        self.traffic = Traffic(*map(sum, zip(*(traffic for _, traffic in sent), strict=True)))
        return [sum(sums) & MASK for sums in zip(*(sums for sums, _ in sent), strict=True)]

    def state_dict(self) -> dict[str, Any]:
        """Its version; the rest the ranks write themselves (`Machines.save`)."""
        return {"updates": self.version}

    def load(self, folder: str) -> list[str]:
        """Have the ranks read their parts of the checkpoint `folder`."""
        self.version, lacking = self._ranks.call("restore", folder)
        return lacking

    def close(self) -> None:
        """The ranks end with the machines."""

    def _call(self, what: str, batch: TrainingBatch, about: dict[str, Any]) -> Any:
        """`Rank.run(what, …)` with a batch that the ranks have, part of one, or another one."""
        rows = None if self._whole is None or batch is self._whole else wire.rows_of(batch, self._whole)
        whole = None
        if rows is None and batch is not self._whole:
            self._whole, self._told = batch, {}
            whole = self._put(wire.batch_out(batch, replays=self._replays))
        part = None if rows is None else wire.part_out(batch, rows)
        answer = self._ranks.call(what, whole, self._put({"part": part, **about}))
        self.carried += len(answer)
        return pickle.loads(answer)

    def _put(self, told: Any) -> Any:
        """In the object store."""
        message = pickle.dumps(told)
        self.carried += len(message)
        return ray.put(message)
