"""A GRPO loop through the public parts alone: no run folder, no report, nothing that a bare machine may lack."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.bench import Bench
from rollkeel import advantages, objectives, tasks
from rollkeel.batch.build import TrainingBatch, build_batch
from rollkeel.config import SftConfig, TrainConfig
from rollkeel.engines.local import LocalEngine
from rollkeel.models.loading import Policy
from rollkeel.record.mismatch import mismatch_metrics
from rollkeel.rollout.collect import collect, issue
from rollkeel.sync.publish import DirectPublisher
from rollkeel.tasks.base import keyed_rng
from rollkeel.train.sft import run_sft
from rollkeel.train.trainer import LocalTrainer, UpdateOutput
from rollkeel.types import Prompt, Rollout, SamplingParams, Status, TokenSpan

NOISE = 0.07
"""Share of demonstration steps made wrong, so that rewards differ within a group."""


def prompts(policy: Policy, task: tasks.Task, indices: Sequence[int], split: str = "train") -> list[Prompt]:
    """Prompts of a task family by index."""
    made = []
    for index in indices:
        item = task.item(0, split, index)
        ids = np.array(policy.tokenizer(item.text)["input_ids"], np.int64)
        made.append(
            Prompt(
                id=f"{split}{index}",
                index=index,
                text=item.text,
                token_ids=ids,
                answer=item.answer,
                grader=task.grader(item),
                task=task.name,
            )
        )
    return made


def warm(policy: Policy, task: tasks.Task, config: SftConfig) -> list[float]:
    """Supervised training on demonstrations; the loss of every step."""
    losses: list[float] = []

    def examples(indices: Sequence[int]) -> list[tuple[np.ndarray, np.ndarray]]:
        out = []
        for prompt in prompts(policy, task, indices, "sft"):
            rng = keyed_rng("gpu suite", prompt.index)
            text = task.demonstration(task.item(0, "sft", prompt.index), rng, NOISE)
            answer = [*policy.tokenizer(text)["input_ids"], policy.tokenizer.eos_token_id]
            out.append((prompt.token_ids, np.array(answer, np.int64)))
        return out

    run_sft(policy, examples, config, progress=lambda step, metrics: losses.append(metrics["sft/loss"]))
    return losses


def graded(task: tasks.Task, rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Rewards by the task's own verifier."""
    return [
        replace(r, reward=task.verify(task.item(0, "train", r.prompt.index), r.text)[0] if r.status.complete else 0.0)
        for r in rollouts
    ]


def synthetic(lengths: Sequence[tuple[int, int]], vocab: int, group: int = 8, shared: bool = False) -> TrainingBatch:
    """A batch of random tokens: (prompt, response) lengths, advantages of both signs. `shared`: the members of a group, which are of
    one length, have one prompt."""
    rng = np.random.default_rng(0)
    rollouts = []
    grader = tasks.get("runsum").grader(tasks.get("runsum").item(0, "train", 0))
    for i, (prompt, response) in enumerate(lengths):
        ids = rng.integers(8, min(vocab, 264), prompt + response)
        if shared and i % group:
            ids[:prompt] = rollouts[i - i % group].prompt.token_ids
        n, zeros = response, np.zeros(response, np.int64)
        span = TokenSpan(
            token_ids=ids[prompt:],
            logprobs=np.full(n, -np.log(vocab), np.float32),
            kept_mass=np.ones(n, np.float32),
            versions=zeros,
            kv_versions=zeros,
        )
        asked = Prompt(id=str(i), index=i, text="", token_ids=ids[:prompt], answer="", grader=grader, task="synthetic")
        rollouts.append(
            Rollout(
                id=i, group=i // group, member=i % group, prompt=asked, span=span, status=Status.FINISHED,
                sampling=SamplingParams(), engine="none", dtype="bf16", reward=float(i % 2),
            )
        )  # fmt: skip
    return build_batch(rollouts, [1.0 if i % 2 else -1.0 for i in range(len(lengths))], "token_mean")


@dataclass
class Loop:
    """Samples, learns, publishes."""

    bench: Bench
    policy: Policy
    task: tasks.Task
    engine: LocalEngine
    publisher: DirectPublisher
    trainer: LocalTrainer
    groups: int
    samples: int
    sampling: SamplingParams
    times: dict[str, float] = field(default_factory=dict)
    """Seconds of the last step, by part."""
    made: int = 0

    def step(self) -> dict[str, float]:
        """One step of GRPO; what it measured."""
        objective = objectives.build("grpo", {})
        first = self.made * self.groups
        asked = prompts(self.policy, self.task, range(first, first + self.groups))
        issued = issue(asked, self.samples, self.sampling, first, self.engine)
        rollouts: list[Rollout] = []
        self.time(
            "rollout", lambda: rollouts.extend(collect(self.engine, issued, self.policy.tokenizer, deadline_s=600))
        )
        self.time("grading", lambda: rollouts.__setitem__(slice(None), graded(self.task, rollouts)))
        rewards = [float(r.reward or 0.0) for r in rollouts]
        lengths = [len(r.span) for r in rollouts]
        credit = advantages.compute(objective.advantage, rewards, [r.group for r in rollouts], lengths)
        batch = build_batch(rollouts, credit, objective.aggregate).to(self.trainer.device)
        outputs: list[UpdateOutput] = []
        self.time("update", lambda: outputs.append(self.trainer.update(batch, objective, old_is_current=True)))
        tokens = batch.tokens(outputs[0].logprobs, old_logprobs=outputs[0].logprobs)
        mismatch = mismatch_metrics(tokens, self.trainer.version - 1)
        self.time("sync", self.publish)
        self.made += 1
        total = float(sum(lengths))
        return {
            **mismatch,
            "reward": float(np.mean(rewards)),
            "tokens": total,
            "grad_norm": outputs[0].metrics["optimizer/grad_norm"],
        }

    def publish(self) -> None:
        self.publisher.publish(self.trainer.named_weights(), self.trainer.version)

    def time(self, part: str, work: Callable[[], object]) -> None:
        self.times[part] = self.bench.once(work)


def trainer(bench: Bench, policy: Policy, **config: object) -> LocalTrainer:
    """A trainer of this policy, settings of `train` by name."""
    settings = TrainConfig.model_validate(config)
    return LocalTrainer(policy, settings, temperature=1.0, total_updates=100, device=bench.device)


def logprobs(made: LocalTrainer, batch: TrainingBatch) -> torch.Tensor:
    """What the trainer says about the batch's tokens."""
    return made.score(batch).logprobs


def detached(tree: object) -> Any:
    """A nest of tensors, copied."""
    if isinstance(tree, torch.Tensor):
        return tree.detach().clone()
    if isinstance(tree, dict):
        return {k: detached(v) for k, v in tree.items()}
    return [detached(v) for v in tree] if isinstance(tree, list) else tree
