"""Supervised warm start: packed sequences, loss on responses only, cosine schedule with warm-up."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from rollkeel.batch.coefficients import coefficients
from rollkeel.batch.packing import MicroBatch, pack, plan
from rollkeel.config import Recompute, SftConfig
from rollkeel.errors import BadInput, NonFinite
from rollkeel.models.loading import Policy
from rollkeel.train.logprobs import PolicyForward
from rollkeel.train.mesh import Mesh
from rollkeel.train.optimizer import PACK_TOKENS, supervised
from rollkeel.train.passes import Passes
from rollkeel.train.scores import Scores
from rollkeel.train.sharded import Layout
from rollkeel.train.trained import Supervised, Trained

if TYPE_CHECKING:
    from rollkeel.train.trainer import LocalTrainer

Example = Sequence[Sequence[int] | np.ndarray]
"""Prompt ids and response ids, at least one of each; the response ends with the stop token. Of an episode, third, `[R]` bool:
the response tokens to learn, for those of an environment are only read."""


class Kept(Protocol):
    """Where the state of an unfinished run is kept; on several ranks each calls it."""

    def load(self, trained: Trained) -> dict[str, Any] | None:
        """Let `trained` be what it was, and return what was saved `about` it; None, and nothing changes, if nothing is kept."""
        ...

    def due(self) -> bool: ...
    def save(self, step: int, trained: Trained, about: dict[str, Any]) -> None: ...


def cuts(
    config: SftConfig, rows: int | None = None, examples: Callable[[Sequence[int]], Sequence[Example]] | None = None
) -> Sequence[int]:
    """Where optimizer batches begin in the stream of examples, and where the last one ends: one more than there are steps.

    `rows`: examples of one epoch, None where they never repeat. `examples`: as `run_sft` takes them, for
    `config.batch_tokens` alone; all are read once. Raises `BadInput` for epochs of examples that never repeat.
    """
    if config.epochs and not rows:
        raise BadInput(
            f"sft.epochs={config.epochs}: generated and mixed examples have no end; set sft.epochs=0 and sft.steps"
        )
    end = config.epochs * (rows or 0)
    if not config.batch_tokens:
        size = config.batch_size
        return [*range(0, end, size), end] if end else range(0, (config.steps + 1) * size, size)
    if examples is None:
        raise BadInput(
            f"sft.batch_tokens={config.batch_tokens}: counts the tokens of demonstrations: set sft.batch_size"
        )
    out = [0]
    held = 0
    index = 0
    while index < end if end else len(out) <= config.steps:
        for prompt, response, *_ in examples(range(index, min(index + 256, end or index + 256))):
            size = len(prompt) + len(response)
            if held and held + size > config.batch_tokens:
                out.append(index)
                held = 0
            held, index = held + size, index + 1
    return [*out, end] if end else out[: config.steps + 1]


def run_sft(
    policy: Policy,
    examples: Callable[[Sequence[int]], Sequence[Example]],
    config: SftConfig,
    *,
    batches: Sequence[int] | None = None,
    weight_decay: float = 0.0,
    pack_tokens: int = PACK_TOKENS,
    recompute: Recompute = Recompute(),
    seed: int = 0,
    progress: Callable[[int, dict[str, float]], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
    kept: Kept | None = None,
    trainer: LocalTrainer | None = None,
) -> dict[str, float]:
    """Train `policy.model` in place on its own device; the loss of a step is the mean over its response tokens.

    Step s sees `examples(range(batches[s], batches[s + 1]))`: the order is the index, so the same source gives the same
    weights. `batches`: of `cuts`; None takes those of `config` for examples that never repeat. `pack_tokens`: of one forward pass, whole sequences that do not see each other. `recompute`: as
    `train.checkpointing`. `seed` keys torch's generator for architectures that draw random numbers. `progress(step, metrics)` is called after every step; `should_stop()` is asked before each and ends the run early.
    `kept`: where an interrupted run left its state; it goes on from there, bit for bit on a CPU.
    `trainer`: of `policy`, on whose ranks it is trained: every rank makes the same call, with a `kept` of `UnfinishedTogether`; its reference
    is then the model as it is behind it, and `weight_decay` and `recompute` are the trainer's.
    Returns the metrics of the last step (`sft/loss`, `sft/entropy`, `sft/target_probability`,
    `optimizer/*`) and `sft/steps`, `sft/tokens` done. Raises `NonFinite` (weights of the last good step kept) and
    `BadInput` for an empty prompt or response.
    """
    model = policy.model.eval()
    device = next(model.parameters()).device
    batches = cuts(config, examples=examples) if batches is None else batches
    steps = len(batches) - 1
    if trainer is not None:
        work = trainer.supervised(config, steps, pack_tokens)
    else:
        work = _alone(policy, config, steps, weight_decay, pack_tokens, recompute)
    stepper, mesh = work.stepper, work.trained.layout.mesh
    metrics: dict[str, float] = {}
    tokens = 0
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        if kept is not None and (state := kept.load(work.trained)) is not None:
            torch.set_rng_state(state["random"])
            tokens = state["tokens"]

        for step in range(stepper.updates, steps):
            stopped = should_stop is not None and any(mesh.everyone(should_stop()))
            if kept is not None and (stopped or any(mesh.everyone(kept.due()))):
                kept.save(step, work.trained, {"random": torch.get_rng_state(), "tokens": tokens})
            if stopped:
                break
            batch = examples(range(batches[step], batches[step + 1]))
            metrics = _step(work, batch, pack_tokens, device)
            tokens += sum(len(places) for places in map(_learnt, batch))
            if progress is not None:
                progress(step, metrics)
    if trainer is not None:
        trainer.start_here()
    return {**metrics, "sft/steps": float(stepper.updates), "sft/tokens": float(tokens)}


def _alone(
    policy: Policy, config: SftConfig, steps: int, weight_decay: float, pack_tokens: int, recompute: Recompute
) -> Supervised:
    model, mesh = policy.model, Mesh()
    stepper = supervised(model, config, steps, weight_decay)
    forward = PolicyForward(model, recompute=recompute)
    trained = Trained(Layout(model, mesh), model, stepper, None, {})
    return Supervised(forward, Passes(pack_tokens, 1.0, mesh=mesh), stepper, trained, lambda: None)


def _learnt(example: Example) -> np.ndarray:
    """Where the tokens to learn stand in prompt and response."""
    places = np.flatnonzero(example[2]) if len(example) > 2 else np.arange(len(example[1]))
    return places + len(example[0])


def _step(work: Supervised, batch: Sequence[Example], max_tokens: int, device: torch.device) -> dict[str, float]:
    stepper = work.stepper
    forward = work.forward
    mesh = work.trained.layout.mesh
    for i, (prompt, response, *_) in enumerate(batch):
        if len(prompt) == 0 or len(response) == 0:
            raise BadInput(
                f"sft example {i} of update {stepper.updates}: expected a prompt and a response, got {len(prompt)} and {len(response)} tokens"
            )
    sequences = [np.concatenate([np.asarray(part) for part in example[:2]]).astype(np.int64) for example in batch]
    prompts, positions = [len(example[0]) for example in batch], [_learnt(example) for example in batch]
    responses = [len(places) for places in positions]
    starts = np.concatenate([[0], np.cumsum(responses)]).tolist()
    weights = coefficients("token_mean", responses).to(device)
    totals = np.zeros(3)

    def loss_of(micro: MicroBatch, scores: Scores) -> torch.Tensor:
        nonlocal totals
        c = weights.index_select(0, micro.indices)
        loss = -(c * scores.logprobs).sum()
        with torch.no_grad():  # read at once: each look is a wait for the device
            told = torch.stack([loss, (c * scores.entropy).sum(), (c * scores.logprobs.exp()).sum()]).tolist()
        if not math.isfinite(told[0]):
            raise NonFinite(f"sft update {stepper.updates}: loss is {told[0]}; weights left untouched")
        totals += told
        return loss * stepper.scale

    lengths = [len(s) for s in sequences]
    if mesh.workers > 1 and work.passes.by_sum:
        max_tokens = min(max_tokens, max(max(lengths), -(-sum(lengths) // (2 * mesh.workers))))
    plans = plan(lengths, max_tokens, padded=not forward.packed.varlen)
    micros = [pack(members, sequences, prompts, starts, device, positions) for members in plans]
    stepper.zero_grad()
    work.passes.backward(forward, micros, loss_of)
    work.add_gradients()
    if mesh.size > 1:
        totals = mesh.total(torch.from_numpy(totals).to(device)).cpu().numpy()
    stepped = stepper.step()
    names = ("sft/loss", "sft/entropy", "sft/target_probability")
    return {**dict(zip(names, totals.tolist(), strict=True)), **stepped}
