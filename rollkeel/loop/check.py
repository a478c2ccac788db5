"""What a config cannot ask for, refused in one line before anything is built, trained or written."""

from __future__ import annotations

import os

from rollkeel import advantages, rewards
from rollkeel.config import Config
from rollkeel.engines.open import NO_ADAPTERS, check_engine
from rollkeel.errors import BadInput
from rollkeel.loop.assemble import build_objective, estimator, pool_rules, refill_rounds, sampling_params
from rollkeel.models.loading import resolve_device
from rollkeel.objectives.kl import PLAIN
from rollkeel.record.trackers import check_installed
from rollkeel.rollout.schedule import read_schedule
from rollkeel.tasks import get
from rollkeel.tasks.environment import Environment


def validate(config: Config) -> None:
    """Refuse what can be refused before anything is built, trained or written."""
    advantages.find(estimator(config, build_objective(config)))
    if config.train.kl_in == "reward" and config.train.kl_estimator not in PLAIN:
        raise BadInput(
            f"train.kl_estimator: {config.train.kl_estimator} multiplies by a ratio that only a loss differentiates; set"
            f" train.kl_in=loss, or one of {', '.join(PLAIN)}"
        )
    resolve_device(config.run.device)
    check_engine(config.engine, sampling_params(config, ()))
    if config.train.lora.rank and config.engine.kind != "local":
        raise BadInput(NO_ADAPTERS.format(kind=config.engine.kind))
    check_installed(config.report.trackers)
    if config.data.path is not None:
        rewards.get(config.data.grader)
    if config.sampling.temperature == 0:
        raise BadInput(
            "sampling.temperature: expected > 0 for training, got 0; greedy rollouts of a prompt are all equal"
        )
    if config.reward.overlong.buffer > config.sampling.max_new_tokens:
        raise BadInput(
            f"reward.overlong.buffer: expected at most sampling.max_new_tokens={config.sampling.max_new_tokens}, got"
            f" {config.reward.overlong.buffer}; it is the last part of that limit"
        )
    if config.rollout.samples < 2:
        raise BadInput(f"rollout.samples: expected at least 2 for a group baseline, got {config.rollout.samples}")
    special = config.experiment
    if special.lag and config.run.loop != "sync":
        raise BadInput(
            f"experiment.lag: expected 0 with run.loop={config.run.loop}, got {special.lag}; use run.loop=sync"
        )
    task = get(config.data.task, config.data.options) if config.data.task else None
    if config.run.loop != "sync" and isinstance(task, Environment):
        raise BadInput(
            f"run.loop: expected sync with data.task={config.data.task}, whose episodes are played in rounds, got"
            f" {config.run.loop}"
        )
    if special.schedule is not None and config.run.loop != "async":
        raise BadInput(f"experiment.schedule: expected run.loop=async, which a schedule is of, got {config.run.loop}")
    if config.run.loop != "sync" and refill_rounds(config):
        raise BadInput(
            f"rollout.zero_variance: expected keep or drop with run.loop={config.run.loop}, which draws prompts ahead of"
            f" their rewards, got {config.rollout.zero_variance}"
        )
    _check_memory(config)
    if config.run.loop == "budgeted":
        _validate_budgeted(config)
    if config.run.loop == "async":
        _validate_async(config)


ROLLOUT_BYTES, TOKEN_BYTES, PROCESS_BYTES = 1500, 32, 100 * 2**20
"""What one rollout, one of its tokens and one more process take at the very least."""


def _check_memory(config: Config) -> None:
    """Refuse sizes that this machine could not hold however small the model is."""
    size, budgeted = config.rollout, config.run.loop == "budgeted"
    groups = size.prompts * (1 + config.experiment.lag)
    workers = config.reward.graders.workers
    needs = {
        "rollout.prompts × rollout.samples": 0 if budgeted else groups * size.samples * ROLLOUT_BYTES,
        "rollout.budget.capacity": size.budget.capacity * ROLLOUT_BYTES if budgeted else 0,
        "eval.items × eval.samples": 0 if config.data.path else config.eval.items * config.eval.samples * ROLLOUT_BYTES,
        "sft.batch_size": config.sft.batch_size * ROLLOUT_BYTES if config.sft.steps else 0,
        "engine.slots": config.engine.slots * config.sampling.max_new_tokens * TOKEN_BYTES,
        "engine.processes": config.engine.processes * PROCESS_BYTES,
        "train.processes": (config.train.processes - 1) * PROCESS_BYTES,
        "reward.graders.workers": workers * PROCESS_BYTES if workers > 64 else 0,
    }
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name, need in needs.items():
        if need > there:
            raise BadInput(
                f"{name}: takes at least {need / 2**30:,.0f} GB of memory, this machine has {there / 2**30:,.0f}; lower it"
            )


def _validate_async(config: Config) -> None:
    if config.engine.kind == "local" and config.engine.processes == 0:
        raise BadInput(
            "engine.processes: expected at least 1 with run.loop=async, got 0; an engine in the trainer's process cannot"
            " sample while it trains"
        )
    if config.experiment.schedule is not None:
        read_schedule(config.experiment.schedule)


def _validate_budgeted(config: Config) -> None:
    pool_rules(config)
    if config.engine.kind == "vllm":
        raise BadInput("run.loop=budgeted: expected engine.kind=local, which is advanced by decode steps, got vllm")
