"""Training that does nothing, or the wrong thing, without a word: the kinds of faults that no step of a run stops at."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import torch

from benchmarks.doctor import alterations as alter
from rollkeel.loop import learn, steps
from rollkeel.objectives import Objective
from rollkeel.tasks.source import PromptSource
from rollkeel.train.trainer import LocalTrainer
from rollkeel.types import Rollout, Status

Change = Callable[[Rollout, np.random.Generator], Rollout]


def part(rollout: Rollout, where: slice, **changes: Any) -> Rollout:
    """With some of its tokens; the text has one character a token, and none for the stop token."""
    pieces = [*rollout.text, *[""] * (len(rollout.span) - len(rollout.text))]
    return replace(rollout, span=alter.part(rollout.span, where), text="".join(pieces[where]), **changes)


@contextmanager
def batches(change: Callable[[int, Sequence[Rollout]], Sequence[Rollout]]) -> Iterator[None]:
    """The trainer gets the rollouts of a step as `change(step, rollouts)` makes them: as many, with the same ids."""
    inner = steps.learn

    def learning(run: Any, drawn: Any, clock: Any) -> dict[str, float]:
        new = {r.id: r for r in change(clock.step, drawn.rollouts)}
        kept = [new[r.id] for r in drawn.batch]
        return inner(run, replace(drawn, rollouts=list(new.values()), batch=kept), clock)

    with mock.patch.object(steps, "learn", learning):
        yield


def each(change: Change, seed: int, first: int = 0) -> AbstractContextManager[None]:
    """`change` of every rollout from step `first` on."""
    rng = np.random.default_rng([0x51, seed])
    return batches(lambda step, rollouts: [change(r, rng) if step >= first else r for r in rollouts])


def doubled(step: int, rollouts: Sequence[Rollout]) -> Sequence[Rollout]:
    """Every second rollout is the one before it again, under an id of its own."""
    return [
        r if i % 2 == 0 or rollouts[i - 1].group != r.group else replace(rollouts[i - 1], id=r.id, member=r.member)
        for i, r in enumerate(rollouts)
    ]


def cut(rollout: Rollout, rng: np.random.Generator, share: float, tokens: int) -> Rollout:
    """Cut `tokens` from its end and called finished; whoever grades that gives nothing."""
    if len(rollout.span) <= tokens + 1 or rng.random() >= share:
        return rollout
    return part(rollout, slice(None, -tokens), status=Status.FINISHED, reward=0.0)


def unended(rollout: Rollout, rng: np.random.Generator) -> Rollout:
    """Without its stop token; the text has none anyway."""
    if rollout.status != Status.FINISHED or len(rollout.span) < 2:
        return rollout
    return replace(part(rollout, slice(None, -1)), text=rollout.text)


def paid(rollout: Rollout, rng: np.random.Generator, share: float) -> Rollout:
    """A policy that says nothing but the stop token, now and then, and a grader that likes it."""
    if rollout.status != Status.FINISHED or rng.random() >= share:
        return rollout
    return replace(part(rollout, slice(-1, None)), text="", reward=1.0)


def scored(rollout: Rollout, rng: np.random.Generator, reward: float) -> Rollout:
    return replace(rollout, reward=reward)


@contextmanager
def credit(change: Callable[[Any], Any]) -> Iterator[None]:
    """Advantages of a batch `[n]`, in its order, as `change` leaves them."""
    inner = learn.credit_of

    def credit_of(*args: Any, **named: Any) -> tuple[dict[int, float], dict[str, float]]:
        found, metrics = inner(*args, **named)
        return dict(zip(found, change(np.array(list(found.values()))).tolist(), strict=True)), metrics

    with mock.patch.object(learn, "credit_of", credit_of):
        yield


@contextmanager
def no_step() -> Iterator[None]:
    """The optimizer has gradients and does nothing with them."""
    inner = LocalTrainer._step

    def step(self: Any, *args: Any) -> dict[str, float]:
        with mock.patch.object(self._stepper.adamw, "step", return_value=None):
            return inner(self, *args)

    with mock.patch.object(LocalTrainer, "_step", step):
        yield


@contextmanager
def evaluated(change: Callable[[Any], Any]) -> Iterator[None]:
    """The objective's parts as `change` leaves them."""
    inner = Objective._evaluate
    with mock.patch.object(Objective, "_evaluate", lambda self, tokens: change(inner(self, tokens))):
        yield


def detached(parts: Any) -> Any:
    """A loss with its value that no weight has a part in."""
    return replace(parts, loss=parts.loss.detach() + 0.0 * parts.loss)


def masked(parts: Any) -> Any:
    return replace(parts, keep=torch.zeros_like(parts.terms.logprobs, dtype=torch.bool), loss=0.0 * parts.loss)


@contextmanager
def one_prompt(groups: int) -> Iterator[None]:
    """A loader that gives the first of `groups` prompts to all of them."""
    inner = PromptSource.prompts

    def prompts(self: Any, indices: Sequence[int]) -> Any:
        same = [i - i % groups if self.split == "train" else i for i in indices]
        return [replace(p, index=i) for p, i in zip(inner(self, same), indices, strict=True)]

    with mock.patch.object(PromptSource, "prompts", prompts):
        yield


SILENT: dict[str, tuple[tuple[str, ...], Sequence[str], Callable[[int], AbstractContextManager[None]] | None]] = {
    "no step": (("nothing_trained",), (), lambda seed: no_step()),
    "detached": (("nothing_trained",), (), lambda seed: evaluated(detached)),
    "masked": (("nothing_trained",), (), lambda seed: evaluated(masked)),
    "no advantage": (("nothing_trained",), (), lambda seed: credit(np.zeros_like)),
    "doubled": (("duplicates",), (), lambda seed: batches(doubled)),
    "one prompt": (("duplicates",), (), lambda seed: one_prompt(16)),
    "neighbour": (("wrong_advantages",), (), lambda seed: credit(lambda a: np.roll(a, 1))),
    "negated": (("wrong_advantages",), (), lambda seed: credit(np.negative)),
    "shuffled": (("wrong_advantages",), ("advantages.shuffle=true",), None),
    "cut": (("cut_off_answers",), (), lambda seed: each(lambda r, rng: cut(r, rng, 0.1, 3), seed)),
    "unended": (("cut_off_answers",), (), lambda seed: each(unended, seed)),
    "tight": (("cut_off_answers",), ("sampling.max_new_tokens=4",), None),
    "paid": (("reward_failures",), (), lambda seed: each(lambda r, rng: paid(r, rng, 0.05), seed)),
    "nothing": (("no_reward_signal",), (), lambda seed: each(lambda r, rng: scored(r, rng, 0.0), seed)),
    "form alone": (("no_reward_signal",), (), lambda seed: each(lambda r, rng: scored(r, rng, 0.1), seed)),
    "swallowed": (
        ("reward_failures", "reward_lost"),
        (),
        lambda seed: each(lambda r, rng: scored(r, rng, 0.0), seed, 12),
    ),
}
"""What is broken → the causes that are right as the first, overrides of the config, and the patch of a seed."""
