"""What a config cannot ask for, refused in one line before anything is built, trained or written."""

from __future__ import annotations

import os

from rollkeel import advantages, plugins, rewards
from rollkeel.config import Config
from rollkeel.engines.open import NO_ADAPTERS, check_engine
from rollkeel.errors import BadInput
from rollkeel.loop.assemble import OWN_FEED, build_objective, estimator, pool_rules, refill_rounds, sampling_params
from rollkeel.models import jit
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
    if config.clustered:
        from rollkeel.cluster.check import check_cluster

        check_cluster(config)
    check_engine(config.engine, sampling_params(config, ()))
    _check_sets(config)
    if config.train.lora.rank and config.engine.kind != "local":
        raise BadInput(NO_ADAPTERS.format(kind=config.engine.kind))
    check_installed(config.report.trackers)
    for part in config.data.parts or [config.data]:
        if part.path is not None or (config.data.sources and part.grader):
            rewards.get(part.grader)
        if config.data.sources and part.task and isinstance(get(part.task, part.options), Environment):
            raise BadInput(
                f"data.sources: {part.task} is played in turns, which a mixture does not do; give it data.task alone"
            )
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
    if config.train.checkpointed_layers is not None and config.train.checkpointing == "none":
        raise BadInput(
            "train.checkpointed_layers: expected train.checkpointing=layer or selective beside it, got none; set it to null"
        )
    special = config.experiment
    if special.lag and config.run.loop != "sync":
        raise BadInput(
            f"experiment.lag: expected 0 with run.loop={config.run.loop}, got {special.lag}; use run.loop=sync"
        )
    if config.data.task:
        get(config.data.task, config.data.options)
    if special.schedule is not None and config.run.loop != "async":
        raise BadInput(f"experiment.schedule: expected run.loop=async, which a schedule is of, got {config.run.loop}")
    if refill_rounds(config):
        _check_refill(config)
    _check_memory(config)
    _check_parity(config)
    if plugins.is_own(config.run.loop):
        plugins.maker(config.run.loop, "run.loop", OWN_FEED)
    if config.run.loop == "budgeted":
        pool_rules(config)
    if config.run.loop == "async":
        _validate_async(config)


def _check_refill(config: Config) -> None:
    """Refuse dynamic sampling where nobody could tell which groups are whole."""
    where = {
        "async": "run.loop=async, which draws prompts ahead of their rewards",
        "partial": "rollout.budget.group=partial, which trains whatever finished",
    }
    kind = config.rollout.budget.group if config.run.loop == "budgeted" else config.run.loop
    if kind in where:
        raise BadInput(
            f"rollout.zero_variance: expected keep or drop with {where[kind]}, got {config.rollout.zero_variance}"
        )


def _check_sets(config: Config) -> None:
    if not config.eval.sets:
        return
    from rollkeel.loop.eval_sets import evaluation_params

    for one in config.eval.sets:
        check_engine(config.engine, evaluation_params(config, one, ()))
        if one.benchmark is not None:
            from rollkeel.evals import benchmarks

            benchmarks.get(one.benchmark)
        elif one.task is not None and isinstance(get(one.task, one.options), Environment):
            raise BadInput(f"eval.sets: {one.task} is played in turns; make it data.task")
        elif one.path is not None:
            rewards.get(config.data.whole(one).grader)


def _check_parity(config: Config) -> None:
    """Refuse what does not have the same bits on both sides."""
    if not config.run.parity:
        if config.engine.forward == "parity":
            raise BadInput(
                "engine.forward=parity: the trainer computes likewise under run.parity=true alone; set that instead"
            )
        return
    engine = config.engine
    sampling = config.sampling
    dtype = config.model.dtype
    needed = {
        "run.tf32": (config.run.tf32, False),
        "engine.kind": (engine.kind, "local"),
        "engine.forward": (engine.forward, "parity"),
        "engine.kv": (engine.kv, "recompute"),
        "engine.dtype": (engine.dtype, {"float32": "fp32"}.get(dtype, "bf16")),
        "model.dtype": (dtype, dtype if dtype != "float16" else "bfloat16"),
        "sampling.top_p": (sampling.top_p, 1.0),
        "sampling.top_k": (sampling.top_k, 0),
        "sampling.min_p": (sampling.min_p, 0.0),
        "experiment.rounding": (config.experiment.rounding, "none"),
        "train.lora.rank": (config.train.lora.rank, 0),
        "train.checkpointing": (
            config.train.checkpointing,
            "layer" if config.train.checkpointing == "layer" else "none",
        ),
        "train.compile": (config.train.compile, False),
    }
    for key, (got, wanted) in needed.items():
        if got != wanted:
            raise BadInput(f"run.parity=true: expected {key}={wanted}, with which both sides compute alike, got {got}")
    if config.run.device != "cuda" and not jit.FOUND:
        raise BadInput(
            "run.parity=true: expected numba on x86-64 Linux, which its arithmetic is compiled by; pip install rollkeel[cpu]"
        )


ROLLOUT_BYTES, TOKEN_BYTES, PROCESS_BYTES = 1500, 32, 100 * 2**20
"""What one rollout, one of its tokens and one more process take at the very least."""


def _check_memory(config: Config) -> None:
    """Refuse sizes that this machine could not hold however small the model is, and moves where nobody takes turns."""
    if config.memory.offload in ("optimizer", "all"):
        from rollkeel.loop.resident import alone

        if why := alone(config):
            raise BadInput(
                f"memory.offload={config.memory.offload}: nothing can leave with {why}, or memory.offload=none"
            )
    size, budgeted = config.rollout, config.run.loop == "budgeted"
    groups = size.prompts * (1 + config.experiment.lag)
    workers = config.reward.graders.workers
    needs = {
        "rollout.prompts × rollout.samples": 0 if budgeted else groups * size.samples * ROLLOUT_BYTES,
        "rollout.budget.capacity": size.budget.capacity * ROLLOUT_BYTES if budgeted else 0,
        "eval.items × eval.samples": 0 if config.data.path else config.eval.items * config.eval.samples * ROLLOUT_BYTES,
        "sft.batch_size": config.sft.batch_size * ROLLOUT_BYTES if config.sft.on else 0,
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
    if config.engine.kind == "local" and config.engine.processes == 0 and not config.clustered:
        raise BadInput(
            "engine.processes: expected at least 1 with run.loop=async, got 0; an engine in the trainer's process cannot"
            " sample while it trains"
        )
    if config.experiment.schedule is not None:
        read_schedule(config.experiment.schedule)
