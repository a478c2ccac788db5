"""Rollouts at equal weights: a warm-started policy, an engine in some numeric mode that serves it, and the trainer's view."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from rich.console import Console

from rollkeel.batch.build import TrainingBatch, build_batch
from rollkeel.config import Config
from rollkeel.events import EventLog
from rollkeel.loop.assemble import answers, opened, policy_of, sampling_params
from rollkeel.loop.warm_start import warm_start
from rollkeel.models.loading import Policy
from rollkeel.recipe import load
from rollkeel.record.live import LiveView
from rollkeel.record.stopping import StopFlag
from rollkeel.train.trainer import LocalTrainer


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """Tokens that an engine sampled and a trainer with the same weights can score."""

    config: Config
    policy: Policy
    batch: TrainingBatch

    def trainer(self, *, replay_routing: bool = False) -> LocalTrainer:
        """The trainer of these weights; nothing is ever updated."""
        c = self.config
        settings = {"temperature": c.sampling.temperature, "rounding": c.experiment.rounding}
        return LocalTrainer(self.policy, c.train, total_updates=1, replay_routing=replay_routing, **settings)


def warm_policy(config: Config) -> Policy:
    """The policy of `config` after its warm start, which the cache may have."""
    policy = policy_of(config, config.train.lora)
    if config.sft.on:
        with LiveView(console=Console(file=io.StringIO())) as view:
            warm_start(policy, config, view, StopFlag(), EventLog(None))
    return policy


def sample(words: Sequence[str], seed: int, *, advantages: float = 1.0) -> Sampled:
    """Sample `rollout.prompts` × `rollout.samples` answers under the warm-started weights, with the experts of each token."""
    config = load(None, [*words, f"run.seed={seed}", "run.device=cpu"])
    policy = warm_policy(config)
    with opened(config, policy) as engine:
        experts = engine.capabilities.returns_experts
        asked = {"return_experts": experts, "return_prompt_experts": experts}
        sampling = replace(sampling_params(config, policy.stop_token_ids), **asked)
        sampled = answers(config, policy, engine, sampling, config.rollout.prompts, config.rollout.samples)
    graded = [replace(r, reward=0.0) for r in sampled]
    batch = build_batch(graded, np.full(len(graded), advantages), "token_mean")
    return Sampled(config=config, policy=policy, batch=batch)
