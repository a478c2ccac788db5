"""Supervised warm start: packed sequences, loss on responses only, cosine schedule with warm-up."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from rollkeel.batch.coefficients import coefficients
from rollkeel.batch.packing import pack, plan
from rollkeel.config import SftConfig
from rollkeel.errors import BadInput, NonFinite
from rollkeel.models.adapters import load_trained, trained_state
from rollkeel.models.loading import Policy
from rollkeel.train.logprobs import PolicyForward
from rollkeel.train.optimizer import PACK_TOKENS, Stepper, supervised

Example = Sequence[Sequence[int] | np.ndarray]
"""Prompt ids and response ids, at least one of each; the response ends with the stop token. Of an episode, third, `[R]` bool:
the response tokens to learn, for those of an environment are only read."""


class Kept(Protocol):
    """Where the state of an unfinished run is kept."""

    def load(self) -> dict[str, Any] | None: ...
    def due(self) -> bool: ...
    def save(self, step: int, state: dict[str, Any]) -> None: ...


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
    out, held, index = [0], 0, 0
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
    checkpointing: str = "none",
    seed: int = 0,
    progress: Callable[[int, dict[str, float]], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
    kept: Kept | None = None,
) -> dict[str, float]:
    """Train `policy.model` in place on its own device; the loss of a step is the mean over its response tokens.

    Step s sees `examples(range(batches[s], batches[s + 1]))`: the order is the index, so the same source gives the same
    weights. `batches`: of `cuts`; None takes those of `config` for examples that never repeat. `pack_tokens`: of one forward pass, whole sequences that do not see each other. `checkpointing`: as
    `train.checkpointing`. `seed` keys torch's generator for architectures that draw random numbers. `progress(step, metrics)` is called after every step; `should_stop()` is asked before each and ends the run early.
    `kept`: where an interrupted run left its state; it goes on from there, bit for bit on a CPU.
    Returns the metrics of the last step (`sft/loss`, `sft/entropy`, `sft/target_probability`,
    `optimizer/*`) and `sft/steps`, `sft/tokens` done. Raises `NonFinite` (weights of the last good step kept) and
    `BadInput` for an empty prompt or response.
    """
    model = policy.model.eval()
    device = next(model.parameters()).device
    batches = cuts(config, examples=examples) if batches is None else batches
    stepper = supervised(model, config, len(batches) - 1, weight_decay)
    forward = PolicyForward(model, checkpointing=checkpointing)
    metrics: dict[str, float] = {}
    tokens = 0
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        if kept is not None and (state := kept.load()) is not None:
            load_trained(model, state["weights"])
            stepper.load_state_dict(state["optimizer"])
            torch.set_rng_state(state["random"])
            tokens = state["tokens"]

        for step in range(stepper.updates, len(batches) - 1):
            if should_stop is not None and should_stop():
                if kept is not None:
                    kept.save(step, _state(model, stepper, tokens))
                break
            if kept is not None and kept.due():
                kept.save(step, _state(model, stepper, tokens))
            batch = examples(range(batches[step], batches[step + 1]))
            metrics = _step(forward, stepper, batch, pack_tokens, device)
            tokens += sum(len(places) for places in map(_learnt, batch))
            if progress is not None:
                progress(step, metrics)
    return {**metrics, "sft/steps": float(stepper.updates), "sft/tokens": float(tokens)}


def _state(model: torch.nn.Module, stepper: Stepper, tokens: int) -> dict[str, Any]:
    random = torch.get_rng_state()
    return {"weights": trained_state(model), "optimizer": stepper.state_dict(), "random": random, "tokens": tokens}


def _learnt(example: Example) -> np.ndarray:
    """Where the tokens to learn stand in prompt and response."""
    places = np.flatnonzero(example[2]) if len(example) > 2 else np.arange(len(example[1]))
    return places + len(example[0])


def _step(
    forward: PolicyForward, stepper: Stepper, batch: Sequence[Example], max_tokens: int, device: torch.device
) -> dict[str, float]:
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
    stepper.zero_grad()
    for members in plan([len(s) for s in sequences], max_tokens, padded=not forward.packed.varlen):
        micro = pack(members, sequences, prompts, starts, device, positions)
        scores = forward.score(micro)
        c = weights.index_select(0, micro.indices)
        loss = -(c * scores.logprobs).sum()
        with torch.no_grad():  # read at once: each look is a wait for the device
            told = torch.stack([loss, (c * scores.entropy).sum(), (c * scores.logprobs.exp()).sum()]).tolist()
        if not math.isfinite(told[0]):
            raise NonFinite(f"sft update {stepper.updates}: loss is {told[0]}; weights left untouched")
        totals += told
        (loss * stepper.scale).backward()
    stepped = stepper.step()
    names = ("sft/loss", "sft/entropy", "sft/target_probability")
    return {**dict(zip(names, totals.tolist(), strict=True)), **stepped}
