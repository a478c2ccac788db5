"""A batch through a model, micro-batch by micro-batch: in this process, with helpers beside it, or each rank its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from rollkeel.batch.build import TrainingBatch
from rollkeel.batch.packing import MicroBatch
from rollkeel.models.routers import RoutingShape
from rollkeel.train.balance import shares
from rollkeel.train.logprobs import PolicyForward
from rollkeel.train.mesh import Mesh
from rollkeel.train.parallel import Helper, LossOf, Sink, by_logprobs
from rollkeel.train.tree import Tree, rounds

Round = tuple[MicroBatch, bool, int]
"""A micro-batch, whether it is this rank's own (else it is run for the others' sake and counts nothing), ranks that have one."""


class Passes:
    """Runs batches with at most `tokens` in a pass, at a sampling temperature.

    `helpers` know the policy's weights alone. `replay`: the policy takes the experts that the engine chose.
    """

    def __init__(
        self,
        tokens: int,
        temperature: float,
        *,
        helpers: Sequence[Helper] = (),
        mesh: Mesh,
        tree: Tree | None = None,
        replay: RoutingShape | None = None,
        pair: float = 0.0,
    ) -> None:
        """`pair`: see `balance.pair_cost`."""
        self._tokens = tokens
        self._temperature = temperature
        self._replay = replay
        self._helpers = list(helpers)
        self._mesh = mesh
        self._tree = tree
        self._pair = pair

    @property
    def by_sum(self) -> bool:
        """False if gradients are added along a tree, for which micro-batches must not depend on the number of ranks."""
        return self._tree is None

    @torch.no_grad()
    def score(
        self, forward: PolicyForward, batch: TrainingBatch, sink: Sink, *, experts: bool, policy: bool = True
    ) -> None:
        """Every micro-batch that is run here goes to `sink` with its scores. `policy`: it is not the reference's `forward`."""
        helpers = self._helpers if policy else []
        own, *others = self._shares(forward, batch, 1 + len(helpers), policy)
        for helper, share in zip(helpers, others, strict=True):
            helper.start(share, self._temperature, sink=sink, experts=experts)
        try:
            for micro, real, _ in self._rounds(own):
                scores = forward.score(micro, temperature=self._temperature, experts=experts)
                if real:
                    sink(micro, scores)
        finally:
            self._finish(helpers)

    def differentiate(
        self, forward: PolicyForward, batch: TrainingBatch, loss_of: LossOf, *, experts: bool, entropy: bool
    ) -> None:
        """Gradients of `loss_of` into the parameters, but those of the helpers: `add_gradients`. `entropy`: it is differentiated too."""
        own, *others = self._shares(forward, batch, 1 + len(self._helpers), True)
        for helper, share in zip(self._helpers, others, strict=True):
            helper.start(share, self._temperature, by_logprobs(loss_of, entropy), experts=experts)
        error: Exception | None = None
        try:
            error = self._through(forward, own, loss_of, experts)
        finally:
            self._finish(self._helpers)
        self._mesh.agree(error)

    def backward(self, forward: PolicyForward, micros: Sequence[MicroBatch], loss_of: LossOf) -> None:
        """The same of these micro-batches, which are the same on all ranks; without helpers."""
        self._mesh.agree(self._through(forward, micros, loss_of, False))

    def _through(
        self, forward: PolicyForward, micros: Sequence[MicroBatch], loss_of: LossOf, experts: bool
    ) -> Exception | None:
        """An error of this rank's where there are others: they are in the middle of the pass, and are told behind it."""
        error: Exception | None = None
        for micro, real, count in self._rounds(micros):
            scores = forward.score(micro, temperature=self._temperature, experts=experts)
            loss = scores.logprobs.sum() * 0.0
            try:
                loss = loss_of(micro, scores) if real and error is None else loss
            except Exception as failed:
                if self._mesh.size == 1:
                    raise
                error = failed
            if self._tree is not None:
                self._tree.begin(count)
            loss.backward()
            if self._tree is not None:
                self._tree.take()
        return error

    def _rounds(self, micros: Sequence[MicroBatch]) -> Iterator[Round]:
        """What this rank runs. Ranks that wait for each other in a pass, for weights or tokens, run equally many, and others one at
        least: all have gradients to add."""
        if self._tree is not None:
            for micro, count in rounds(micros, self._mesh):
                yield micro or micros[0], micro is not None, count
            return
        dealt = shares(micros, self._mesh.workers, self._pair) if self._mesh.workers > 1 else [list(micros)]
        own = dealt[self._mesh.worker]
        most = max(map(len, dealt)) if self._mesh.in_step else max(1, len(own))
        for number in range(most):
            real = number < len(own)
            yield own[number] if real else micros[0], real, self._mesh.workers

    def _shares(
        self, forward: PolicyForward, batch: TrainingBatch, processes: int, policy: bool
    ) -> list[list[MicroBatch]]:
        """Micro-batches of each process on this machine, its own first; several processes or ranks get pieces small enough to balance.

        `policy`: for the policy, which replays the engine's routing if it is to.
        """
        replay = self._replay if policy else None
        if replay is not None:
            replay.check(batch.experts)
        pieces = 1 if self._tree is not None else processes * self._mesh.workers
        share, replays = forward.packed.varlen, replay is not None
        micros = list(batch.micro_batches(self._tokens, replay=replays, share=share, processes=pieces))
        if replay is not None and batch.read_experts is not None:
            for micro in micros:
                replay.check(micro.experts)
        return shares(micros, processes, self._pair) if processes > 1 else [micros]

    def _finish(self, helpers: Sequence[Helper]) -> None:
        """Wait for every helper before the first error is raised: none may be left in the middle of a pass."""
        errors = []
        for helper in helpers:
            try:
                helper.finish()
            except BaseException as error:
                errors.append(error)
        if errors:
            raise errors[0]
