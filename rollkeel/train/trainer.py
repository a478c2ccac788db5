"""The trainer in this process: packed forward, backward, step. It does not know which objective it serves."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rollkeel.batch.build import TrainingBatch
from rollkeel.batch.packing import MicroBatch
from rollkeel.config import LoraConfig, SftConfig, TrainConfig
from rollkeel.errors import BadInput, NonFinite, RunStopped
from rollkeel.models.adapter_files import checksum_of
from rollkeel.models.adapters import holding, parameters
from rollkeel.models.loading import Policy, save_policy
from rollkeel.models.lora import ADAPTER
from rollkeel.models.names import checkpoint_views
from rollkeel.models.routers import is_frozen
from rollkeel.train.balance import pair_cost
from rollkeel.train.logprobs import PolicyForward
from rollkeel.train.mesh import Mesh, add_gradients, local
from rollkeel.train.optimizer import ChangedShare, Schedule, Stepper, supervised
from rollkeel.train.parallel import Helper, LossOf
from rollkeel.train.parts import Deal
from rollkeel.train.passes import Passes
from rollkeel.train.rounding import Rounding
from rollkeel.train.scores import Scores, ScoreSheet, TrainableObjective, UpdateOutput
from rollkeel.train.sharded import Layout, Pieces, Sharded, all_adapters, check_ranks, gathered, pieces_of, tensors_of
from rollkeel.train.soundness import Fresh, finite, judged, still
from rollkeel.train.trained import Supervised, Trained, load_trained, save_model, save_trained
from rollkeel.train.tree import Tree

PREPASS = "prepare"
"""In `objective.needs`: `prepare` must see log-probs of the current weights, not a stand-in."""


class LocalTrainer:
    """Trains `policy.model` in place with whole optimizer batches.

    Args: `temperature`: of the sampler, so that log-probs are those of the distribution it drew from (0 counts as 1);
    `total_updates`: updates of the whole run, for the cosine schedule; `device`: where `policy.model` lies or is moved to;
    `replay_routing`: send every token to the experts that the engine chose for it, in `score` and `update` alike, weighted
    by the routers as they are now (rollout routing replay, Ma et al. 2025; the reference model keeps its own choice);
    `mesh`: this process's place among the ranks that train together, all with the same arguments and calls;
    `rounding`: numeric mode of an engine that passes compute with, see `Rounding`; `parity`: in the arithmetic of `models.parity`.
    Same inputs give bit-identical weights on a CPU. The model runs in eval mode: dropout would make log-probs of the same
    weights differ between passes.
    """

    settle: Callable[[], None] = staticmethod(lambda: None)
    """Called before an update looks at moments and masters: they may still be on their way from where they waited."""

    fresh: Fresh | None = None
    """Judges passes over tokens that these very weights sampled."""

    def __init__(
        self,
        policy: Policy,
        config: TrainConfig,
        *,
        temperature: float,
        total_updates: int,
        device: torch.device | str = "cpu",
        replay_routing: bool = False,
        rounding: str = "none",
        parity: bool = False,
        mesh: Mesh = Mesh(),
    ) -> None:
        self.policy, self.config, self.temperature = policy, config, temperature
        self.device = torch.device(device)
        self.model = (policy.model if policy.source else policy.model.to(self.device)).eval()  # type: ignore[arg-type]
        if (policy.lora or LoraConfig()) != config.lora:
            raise BadInput("train.lora: expected a policy with these adapters; load it with lora=config.train.lora")
        self._mesh = self.mesh = mesh
        self._freeze()
        check_ranks(mesh, config, policy, rounding, parity)
        how: dict[str, Any] = {"recompute": config.recompute, "compiled": config.compile, "parity": parity}
        self._pieces, self._deal, pair = pieces_of(self.model, mesh), Deal.of(self.model, mesh), pair_cost(self.model)
        self._tree = Tree(mesh) if config.reduce == "tree" else None
        self._rounding = Rounding(self.model, rounding)
        start = self._kept_reference() if config.keeps_reference else None
        layout = Layout(self.model, mesh)
        self._sharded = Sharded(self.model, mesh, self._tree, policy.source, self.device)
        self._forward = self._sharded.forward(self.model, **how)
        replay = self._sharded.once(self._forward.packed.replayable) if replay_routing else None
        adapters = parameters(self.model) if start is self.model else {}
        self._start = {name: local(p.detach()).clone() for name, p in adapters.items()}
        """The reference's adapters, beside the policy's own weights."""
        self._frozen = self._sharded if self._start else None
        if start is not None and not self._start:
            self._frozen = Sharded(start, mesh, self._tree, policy.source, self.device)
        self._reference = self._frozen.forward(start) if self._frozen is not None else None
        self._sharded.share(self._forward, self._reference)
        schedule = Schedule(lr=config.lr, warmup_steps=config.warmup_steps, kind=config.schedule, total=total_updates)
        self._held: dict[str, Any] = {"mesh": mesh, "by_rows": self._tree is not None, "counts": self._deal.counts}
        self._stepper = Stepper(
            self.model.named_parameters(),
            schedule,
            betas=config.betas,
            weight_decay=config.weight_decay,
            clip_norm=config.clip_norm,
            eight_bit=config.moments == "int8",
            **self._held,
        )
        beside = None if start is None else self._start or tensors_of(start)
        self._trained = Trained(layout, self.model, self._stepper, beside, policy.base)
        self._changed = ChangedShare(self._stepper.adamw, mesh, self._stepper.counted)
        self._in_tree(self._stepper)
        self._helpers = self._started(config.processes, how)
        self._views, self._places = dict[str, torch.Tensor](), list[int]()
        about: dict[str, Any] = {"mesh": mesh, "tree": self._tree, "replay": replay, "pair": pair}
        self._passes = Passes(config.micro_batch_tokens, temperature, helpers=self._helpers, **about)
        if policy.lora and "checksum" not in policy.base:
            policy.base["checksum"] = checksum_of(self.named_weights())

    def _started(self, processes: int, how: dict[str, Any]) -> list[Helper]:
        if processes > 1 and self.device.type != "cpu":
            raise BadInput(f"train.processes={processes}: helpers share CPU memory, the device is {self.device}")
        if processes > 1:
            self.model.share_memory()
        return [Helper(i, self.model, torch.get_num_threads(), how) for i in range(1, processes)]

    def _freeze(self) -> None:
        for name, p in self.model.named_parameters():
            frozen = ADAPTER not in name if self.policy.lora else is_frozen(name, self.config.freeze_router)
            p.requires_grad_(not frozen)

    def _in_tree(self, stepper: Stepper) -> None:
        if self._tree:
            self._tree.parameters = [p for _, p in stepper.named]

    def _kept_reference(self) -> Any:
        """The model that the reference computes with."""
        if self.policy.lora:
            return self.model
        with self.computing():
            return copy.deepcopy(self.model).requires_grad_(False)

    def computing(self) -> AbstractContextManager[None]:
        """Inside, `model` holds the weights that passes compute with: rounded ones under `experiment.rounding`."""
        return self._rounding.applied()

    @property
    def padded(self) -> str:
        """Why its passes are padded instead of packed; empty if they are packed."""
        return self._forward.packed.padded

    @property
    def version(self) -> int:
        """Version of the weights: the number of updates made so far."""
        return self._stepper.updates

    def score(self, batch: TrainingBatch, *, experts: bool = False) -> Scores:
        """What the current weights say about every response token, without gradient; at the batch's `topk_ids` too.

        `experts`: with the routing of the pass, of a batch that holds the engine's.
        """
        scores = self._score(self._forward, batch, experts)
        judged(self.fresh, batch, scores.logprobs, self.version, self._mesh)
        return scores

    def logprobs(self, batch: TrainingBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs and entropies of `score`, `[T]` float32 each."""
        return self.score(batch)[:2]

    def ref_logprobs(self, batch: TrainingBatch) -> torch.Tensor:
        """`[T]` log-probs under the frozen start model. Raises `BadInput` if the config keeps none."""
        if self._reference is None:
            raise BadInput(
                "ref_logprobs: train.kl_coefficient and train.kl_every are 0, which keeps no reference; set one"
            )
        with self.computing() if self._start else nullcontext(), holding(self.model, self._start):
            return self._score(self._reference, replace(batch, topk_ids=None)).logprobs

    def update(
        self,
        batch: TrainingBatch,
        objective: TrainableObjective,
        *,
        old_logprobs: torch.Tensor | None = None,
        old_topk_logprobs: torch.Tensor | None = None,
        ref_logprobs: torch.Tensor | None = None,
        old_is_current: bool = False,
        experts: bool = False,
    ) -> UpdateOutput:
        """One optimizer step on `batch`.

        `old_logprobs`, `ref_logprobs`: `[T]`, `old_topk_logprobs`: `[T, K]`, when the objective needs them.
        `old_is_current`: the batch's old policy is the current one (its only update), so the pass's own detached log-probs
        serve as the old ones and no extra pass is made. `experts`: return the routing of the pass too.
        `objective.prepare` sees the whole batch first, once, with log-probs of the current weights if `"prepare"` is in
        `needs` and else with `old_logprobs` (or `rollout_logprobs`) standing in for them. Raises `NonFinite` for a
        log-prob, loss or gradient that is NaN or infinite, `Impossible` for what `soundness` tells: weights and optimizer state are
        then untouched.
        """
        batch = batch.to(self.device)
        shared: dict[str, Any] = {"old_logprobs": old_logprobs, "old_topk_logprobs": old_topk_logprobs}
        shared["ref_logprobs"] = ref_logprobs
        self._prepare(batch, objective, shared, old_is_current)
        sheet = ScoreSheet(batch, experts=experts and self._forward.packed.num_moe_layers > 0)
        if old_is_current:
            shared |= {"old_logprobs": sheet.logprobs, "old_topk_logprobs": sheet.topk_logprobs}

        losses = list[torch.Tensor]()

        def loss_of(micro: MicroBatch, scores: Scores) -> torch.Tensor:
            sheet.put(micro.indices, scores)
            # An entropy nobody differentiates must not make the backward compute the logits again.
            entropy = scores.entropy if "entropy" in objective.needs else scores.entropy.detach()
            about: dict[str, Any] = {"entropy": entropy, "topk_logprobs": scores.topk_logprobs}
            about |= {"indices": micro.indices, "sequences": micro.sequences}
            tokens = batch.tokens(scores.logprobs, **about, **shared)
            loss = objective.loss(tokens)
            if not loss.requires_grad:
                raise RunStopped(
                    f"update {self.version}: the loss of objective {getattr(objective, 'name', '')} does not depend on the model;"
                    " return one that is computed from logprobs"
                )
            losses.append(loss.detach())
            return loss * self._stepper.scale

        metrics = self._step(batch, loss_of, sheet, losses, objective)
        seen = sheet.scores
        with torch.no_grad():
            about: dict[str, Any] = {"entropy": seen.entropy, "topk_logprobs": seen.topk_logprobs}
            output = objective(batch.tokens(seen.logprobs, **about, **shared))
        metrics.update(output.metrics)
        means = torch.stack((seen.entropy.mean(), seen.logprobs.exp().mean())).tolist()
        metrics["policy/entropy"], metrics["policy/prob_mean"] = means
        cut = getattr(output, "cut", None)  # which somebody's own objective need not have
        return UpdateOutput(metrics, seen.logprobs, seen.entropy, output.keep, output.weight, seen.experts, cut)

    def _step(
        self, batch: TrainingBatch, loss_of: LossOf, sheet: ScoreSheet, losses: list[torch.Tensor], objective: Any
    ) -> dict[str, float]:
        """Forward, backward and optimizer step over all micro-batches, here and in the helpers; `optimizer/*` metrics.

        `sheet` and `losses` hold what `loss_of` saw: looked at once, because each look is a wait for the device.
        """
        self._stepper.zero_grad()
        try:
            with self.computing():
                try:
                    about = {"experts": sheet.experts is not None, "entropy": "entropy" in objective.needs}
                    self._passes.differentiate(self._forward, batch, loss_of, **about)
                except (BadInput, NonFinite):
                    finite(batch, sheet.logprobs, self.version)  # it says more than an objective can
                    raise
            sheet.gather(self._mesh)
            finite(batch, sheet.logprobs, self.version)
            told = judged(self.fresh, batch, sheet.logprobs, self.version, self._mesh)
            every = self._mesh.losses(losses, self.device)
            for loss in every:
                if not math.isfinite(loss):
                    raise NonFinite(f"update {self.version}: loss is {loss}; weights left untouched")
            for helper in self._helpers:
                helper.add_gradients()
            self._add_gradients(self._stepper)
            self.settle()
            before = self._changed.look()
            metrics = self._stepper.step(still(self.fresh, batch, objective, every))
            return {**told, **metrics, "optimizer/changed_share": self._changed.since(before)}
        finally:
            self._stepper.zero_grad()

    def _add_gradients(self, stepper: Stepper) -> None:
        if self._tree is not None:
            self._tree.finish()
        else:
            add_gradients(stepper.named, self._mesh, self._deal.adds)

    def supervised(self, config: SftConfig, steps: int, tokens: int) -> Supervised:
        """What supervised training on these ranks works with, which trains frozen routers too; `tokens`: of a pass."""
        if not self.policy.lora:
            self.model.requires_grad_(True)
        stepper = supervised(self.model, config, steps, self.config.weight_decay, **self._held)
        self._in_tree(stepper)
        passes = Passes(tokens, 1.0, mesh=self._mesh, tree=self._tree)
        trained = replace(self._trained, stepper=stepper, reference=None)
        return Supervised(self._forward, passes, stepper, trained, partial(self._add_gradients, stepper))

    @property
    def start(self) -> Trained:
        """Of a trainer that has made no update: the weights that it starts from."""
        return replace(self._trained, reference=None)

    def held(self) -> dict[str, list[dict[str, torch.Tensor]]]:
        """See `Trained.held`."""
        return self._trained.held()

    def start_here(self) -> None:
        """Supervised training is over: the reference is the model as it is now."""
        self.model.zero_grad()
        self._freeze()
        self._in_tree(self._stepper)
        self._trained.start_here()

    def look(self, call: Callable[[], Any]) -> Any:
        """`call()`, which runs the model without gradients: inside, it has the weights that passes compute with. Collective."""
        with self.computing():
            return self._sharded.once(call)

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face checkpoint name, view of the live weight): experts one by one, tied tensors once."""
        if self._mesh.in_step:
            yield from gathered(self.model, self._pieces, self._deal)
            return
        places = [p.data_ptr() for p in self.model.parameters()]
        if places != self._places:  # somebody gave a parameter other memory
            self._views, self._places = checkpoint_views(self.model), places
        yield from self._views.items()

    @property
    def parts(self) -> tuple[Layout, Pieces]:
        """Which boxes of a parameter lie on a rank, and which piece of a parameter each checkpoint tensor is."""
        self._pieces = self._pieces or pieces_of(self.model)
        return self._trained.layout, self._pieces

    def named_adapters(self) -> dict[str, torch.Tensor]:
        """PEFT's name → live tensor of what is trained beside `named_weights`; empty where those are trained themselves."""
        return all_adapters(self.model, self._deal)

    def state_dict(self) -> dict[str, Any]:
        """What a bit-identical resume needs: weights by parameter name, moments, updates, reference weights; of adapters these and which
        base they stand beside. On several ranks: what lies on this one."""
        return self._trained.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Continue from `state_dict`. Raises `BadInput` naming the first tensor whose name or shape does not fit, or for another base.
        Returns lines for people: what the state lacks."""
        return self._trained.load_state_dict(state)

    def save(self, folder: str | Path) -> dict[str, dict[str, Any]]:
        """Write `state_dict` of all ranks into `folder`, each its part. Collective. Returns size and SHA-256 of every file by name.
        Not atomic by itself: call it inside `checkpoint.save`."""
        return save_trained(Path(folder), self._trained)

    def load(self, folder: str | Path) -> list[str]:
        """Continue from what `save` wrote on any mesh, or from the `state` folder of a run in one process. Collective. Raises and returns
        what `load_state_dict` does, and `Corrupt` naming the file that is missing or damaged."""
        return load_trained(Path(folder), self._trained)

    def save_model(self, folder: str | Path) -> dict[str, dict[str, Any]]:
        """Write the Hugging Face folder that one process would write; every rank calls it and holds one parameter whole at a time.
        Returns, on the first, size and SHA-256 of the files with weights, by name."""
        if self._mesh.in_step and not self.policy.lora:
            return save_model(Path(folder), self.policy, self._trained.layout, self._pieces, self.named_weights())
        adapters = self.named_adapters()
        return self._mesh.attempt(lambda: save_policy(self.policy, folder, adapters) if self._mesh.rank == 0 else {})

    def close(self) -> None:
        """End the helper processes, if there are any."""
        for helper in self._helpers:
            helper.close()
        self._helpers = []

    @torch.no_grad()
    def _score(self, forward: PolicyForward, batch: TrainingBatch, experts: bool = False) -> Scores:
        batch = batch.to(self.device)
        sheet = ScoreSheet(batch, experts=experts and forward.packed.num_moe_layers > 0)
        policy = forward is self._forward

        def keep(micro: MicroBatch, scores: Scores) -> None:
            sheet.put(micro.indices, scores)

        with self.computing() if policy else nullcontext():
            try:
                self._passes.score(forward, batch, keep, experts=sheet.experts is not None, policy=policy)
            finally:
                for sharded in filter(None, (self._sharded, self._frozen)):
                    sharded.rest()
        sheet.gather(self._mesh)
        finite(batch, sheet.logprobs, self.version)
        return sheet.scores

    def _prepare(
        self,
        batch: TrainingBatch,
        objective: TrainableObjective,
        shared: Mapping[str, Any],
        old_is_current: bool,
    ) -> None:
        """Show the whole batch to the objective. Without a pass, the newest log-probs there are stand in for the current."""
        old, old_topk = shared["old_logprobs"], shared["old_topk_logprobs"]
        scores = self.score(batch) if PREPASS in objective.needs else None
        current = scores.logprobs if scores else batch.rollout_logprobs if old is None else old
        topk = scores.topk_logprobs if scores else batch.rollout_topk_logprobs if old_topk is None else old_topk
        if old_is_current:
            shared = {**shared, "old_logprobs": current, "old_topk_logprobs": topk}
        about: dict[str, Any] = {"entropy": scores.entropy if scores else None, "topk_logprobs": topk}
        with torch.no_grad():
            objective.prepare(batch.tokens(current, **about, **shared))
