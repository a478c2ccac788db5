"""Builders: the pieces of a run, made from its config."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError

from rollkeel import objectives, plugins
from rollkeel.config import Config, LoraConfig
from rollkeel.engines.local import LocalEngine
from rollkeel.engines.open import check_engine, open_engine
from rollkeel.errors import BadInput
from rollkeel.loop.feeds import Budgeted, Feed, Lagged, Overlapped, Sampler, Whole
from rollkeel.loop.machines import Helpers, Machines
from rollkeel.loop.play import gather as gathered
from rollkeel.loop.run import HeldOut, Run
from rollkeel.models.adapters import named_adapters
from rollkeel.models.loading import Policy, load_policy, quiet_transformers, resolve_device
from rollkeel.models.names import checkpoint_views, move_into
from rollkeel.models.numerics import mode_of, multiply_in_tf32
from rollkeel.objectives import Objective
from rollkeel.protocols import Engine
from rollkeel.record.checks import Checks
from rollkeel.record.live import LiveView
from rollkeel.record.runfolder import RunFolder
from rollkeel.record.stopping import StopFlag
from rollkeel.rewards import FailureBudget, Graders
from rollkeel.rewards.grading import Scorer
from rollkeel.rollout.budgeted import BudgetedRollouts
from rollkeel.rollout.collect import collect, issue
from rollkeel.rollout.feeder import OverlappedRollouts, Source
from rollkeel.rollout.lag import LaggedBatches
from rollkeel.rollout.overlap import Gate
from rollkeel.rollout.pool import PoolRules
from rollkeel.rollout.schedule import Recorded, Replayed
from rollkeel.sync.proof import TOLERANCES, Probes, probe_sequences
from rollkeel.sync.publish import DirectPublisher
from rollkeel.sync.shared import engine_drops, two_copies
from rollkeel.tasks.source import Problems, PromptSource, problems_of
from rollkeel.train.probe import SequenceScorer
from rollkeel.types import Prompt, Rollout, SamplingParams

EVAL_SEED = 0x5EED
"""Mixed into the run seed for evaluation draws, so that they never repeat those of training."""
SMALL = 20_000_000
"""Parameters below which `run.device=auto` stays on the CPU."""
PROBE_PROMPTS = 8
"""Sequences whose log-probs are compared with the trainer's after every publication: some hundred tokens tell wrong weights."""
OWN_FEED = "config, sampler"
"""What a feed of one's own is made of."""
REFILL_ROUNDS = 4
"""Most rounds of `rollout.zero_variance=refill`: enough for one useful prompt in four, and an end where there is none."""


def device_of(config: Config) -> torch.device:
    """`run.device`; `auto` leaves a GPU to models of some size, as launches take longer than a tiny one's arithmetic, without parity."""
    if config.run.device == "auto" and config.run.parity:
        return torch.device("cpu")
    if config.run.device == "auto" and torch.cuda.is_available():
        from rollkeel.memory.shapes import shape_of

        # Of sizes that are not known here, or a fault that is told where the model is loaded.
        with suppress(BadInput, StrictDataclassError, TypeError, ValueError):
            if shape_of(config.model.path, config.model.overrides).parameters < SMALL:
                return torch.device("cpu")
    return resolve_device(config.run.device)


def policy_of(config: Config, lora: LoraConfig | None = None) -> Policy:
    """The policy of `model.path` on `run.device`, with adapters to train if `lora` says so; torch gets `run.threads` threads."""
    quiet_transformers()
    torch.set_num_threads(config.run.threads)
    multiply_in_tf32(config.run.tf32)
    return load_policy(config.model, device_of(config), lora=lora)


def sampling_params(config: Config, stop_token_ids: Sequence[int], salt: int = 0) -> SamplingParams:
    """The config's sampling section as the engine takes it."""
    s = config.sampling
    return SamplingParams(
        temperature=s.temperature,
        top_p=s.top_p,
        top_k=s.top_k,
        min_p=s.min_p,
        max_new_tokens=s.max_new_tokens,
        stop_token_ids=tuple(stop_token_ids),
        seed=config.run.seed * 2**20 + salt,
    )


def pool_rules(config: Config) -> PoolRules:
    """The config's `rollout.budget` as the pool takes it. Raises `BadInput` for sizes under which it could never train."""
    b = config.rollout.budget
    return PoolRules(budget=b.tokens, samples=config.rollout.samples, **b.model_dump(exclude={"tokens"}))


def prompt_source(config: Config, policy: Policy, split: str, problems: Problems | None = None) -> PromptSource:
    """Prompts of `split` (`sft`, `train`, `eval`) for this policy's tokenizer and context; of `problems` where given."""
    limit = min(policy.context, config.engine.max_length or policy.context)
    if split != "sft" and config.sampling.max_new_tokens >= limit:
        raise BadInput(
            f"sampling.max_new_tokens: expected at most {limit - 1}, got {config.sampling.max_new_tokens}; prompt and response"
            f" share {limit} tokens of context (engine.max_length, model)"
        )
    return PromptSource(
        config.data,
        policy.tokenizer,
        seed=config.run.seed,
        split=split,
        vocab_size=policy.vocab_size,
        max_prompt=limit - 1,
        context=limit,
        eos_token_id=policy.stop_token_ids[0] if policy.stop_token_ids else None,
        problems=problems,
    )


def eval_prompts(config: Config, policy: Policy) -> list[Prompt]:
    """The held-out items every evaluation of a run uses, of each source; empty when a file keeps none back."""
    found: list[Prompt] = []
    for part in config.data.parts or [config.data]:
        if part.path is None or part.eval_fraction:
            source = prompt_source(config, policy, "eval", problems_of(part, config.run.seed, "eval"))
            found += source.prompts(range(min(config.eval.items, source.size or config.eval.items)))
    return found


def further_evaluations(config: Config, policy: Policy) -> list[HeldOut]:
    """Those of `eval.sets`."""
    if not config.eval.sets:
        return []
    from rollkeel.loop.eval_sets import eval_sets

    return eval_sets(config, policy)


def build_objective(config: Config) -> Objective:
    """The config's objective with the trainer's KL and entropy terms; it does not see KL in the reward."""
    return objectives.build(
        config.objective.name,
        config.objective.options,
        kl_coefficient=config.train.kl_coefficient if config.train.kl_in == "loss" else 0.0,
        kl_estimator=config.train.kl_estimator,
        entropy_coefficient=config.train.entropy_coefficient,
    )


def estimator(config: Config, objective: Objective) -> str:
    """Name of the advantage estimator: the one asked for, RLOO for parts of groups, or the objective's."""
    partial = config.run.loop == "budgeted" and config.rollout.budget.group == "partial"
    return config.advantages.name or ("rloo" if partial else objective.advantage)


def run_probes(config: Config, policy: Policy, source: PromptSource | None = None) -> Probes | None:
    """What an inference server is asked after every publication; None for the embedded engine, whose memory is checked.

    `source`: of the training prompts, opened here where none is given and prompts are needed.
    """
    if config.engine.kind == "local":
        return None
    source = source or prompt_source(config, policy, "train")
    count = min(PROBE_PROMPTS, source.size or PROBE_PROMPTS)
    prompts = [prompt.token_ids for prompt in source.prompts(range(count))]
    context = min(policy.context, config.engine.max_length or policy.context)
    return Probes(
        sequences=probe_sequences(prompts, policy.vocab_size, context),
        trainer=SequenceScorer(policy.model),
        dtype=max(config.engine.dtype, mode_of(policy.model.dtype), key=lambda mode: TOLERANCES[mode].median),
        tolerance=config.engine.server.tolerance,
    )


def open_graders(config: Config, helpers: Helpers | None = None) -> Graders:
    """The config's graders; the caller closes them. `helpers`: grade what need not be graded in this process."""

    def load_model(path: str) -> Scorer:
        if helpers is not None and (there := helpers.scorer(path)) is not None:
            return there
        from rollkeel.train.preferences import RewardModel  # pyright: ignore[reportMissingImports]

        return RewardModel.load(path, device_of(config))

    return Graders(config.reward.graders, seed=config.run.seed, load_model=load_model, elsewhere=helpers)


@contextmanager
def opened(config: Config, policy: Policy) -> Iterator[Engine]:
    """The config's engine, which serves the policy's weights and has proven it; closed at the end."""
    check_engine(config.engine, sampling_params(config, ()))
    probes = run_probes(config, policy)
    device, adapters = device_of(config), named_adapters(policy.model)
    engine, apart = _opened_engine(config, policy, device)
    with closing(engine):
        publisher = DirectPublisher([engine], probes, shared=not apart)
        publisher.publish(checkpoint_views(policy.model).items(), 0, adapters)
        yield engine


def answers(
    config: Config, policy: Policy, engine: Engine, sampling: SamplingParams, prompts: int, samples: int
) -> list[Rollout]:
    """`samples` answers to each of the first `prompts` training prompts."""
    source = prompt_source(config, policy, "train")
    issued = issue(source.prompts(range(prompts)), samples, sampling, 0, engine)
    return collect(engine, issued, policy.tokenizer, deadline_s=config.silence_s)


def _objective_for(config: Config, policy: Policy) -> Objective:
    objective = build_objective(config)
    if objective.topk > policy.vocab_size:
        raise BadInput(
            f"objective {objective.name}: needs the {objective.topk} most likely tokens, the vocabulary has"
            f" {policy.vocab_size}; lower its k"
        )
    return objective


def assemble(
    config: Config,
    folder: RunFolder,
    policy: Policy,
    view: LiveView,
    stop: StopFlag,
    engine: Engine | None = None,
    machines: Machines | None = None,
) -> Run:
    """Build every piece of a run, with the config's engine or this one; nothing is written. `machines`: this process if not given."""
    if machines is None:
        from rollkeel.loop.one_process import OneProcess

        machines = OneProcess(config, policy)
    torch.set_num_threads(config.run.threads)
    objective = _objective_for(config, policy)
    source = prompt_source(config, policy, "train")
    held_out = eval_prompts(config, policy)
    with ExitStack() as made:
        trainer = machines.trainer()
        made.callback(trainer.close)
        if engine is None:
            engine, apart = machines.engine(folder)
        else:
            apart = "the engine was made elsewhere"
        made.callback(engine.close)
        sampler = _sampler(config, policy, source, engine, objective.topk, stop, machines)
        made.callback(sampler.grader.close)
        run = Run(
            config=config,
            folder=folder,
            policy=policy,
            source=source,
            eval_prompts=held_out,
            engine=engine,
            apart=apart,
            machines=machines,
            publisher=machines.publisher(engine, run_probes(config, policy, source), shared=not apart),
            trainer=trainer,
            objective=objective,
            grader=sampler.grader,
            gather=sampler.gather,
            sampling=sampler.sampling,
            eval_sampling=sampling_params(config, policy.stop_token_ids, EVAL_SEED),
            eval_sets=further_evaluations(config, policy),
            feed=open_feed(config, sampler, source, view, folder),
            checks=Checks.of(config, objective.left),
            view=view,
            stop=stop,
        )
        made.pop_all()
    return run


def own_engine(config: Config, policy: Policy, folder: RunFolder, device: torch.device) -> tuple[Engine, str]:
    """The config's engine, and why it has weights of its own; empty if those of `policy` lie in its memory from now on."""
    planned = None
    if device.type == "cuda":
        from rollkeel.loop.room import beside_engine

        planned = beside_engine(config, policy)
    log, pauses = folder.path / "server.log", config.run.loop != "async"
    about = {"planned": planned, "log_path": log, "pauses": pauses, "offload": engine_drops(config)}
    return _opened_engine(config, policy, device, **about)


def _opened_engine(config: Config, policy: Policy, device: torch.device, **about: Any) -> tuple[Engine, str]:
    """The config's engine, opened with what `about` says (see `open_engine`), and why it has weights of its own, as `own_engine`."""
    apart = two_copies(config)
    aside = device.type == "cuda" and not apart
    if aside:  # it may not hold them twice
        policy.model.cpu()
    engine = open_engine(policy.model.config, config.engine, device, lora=policy.lora, **about)
    if not apart and (name := move_into(policy.model, engine.weights if isinstance(engine, LocalEngine) else {})):
        apart = f"the engine lays {name} out otherwise"
    if aside:
        policy.model.to(device)  # type: ignore[arg-type]
    return engine, apart


def _sampler(
    config: Config, policy: Policy, source: PromptSource, engine: Engine, topk: int, stop: StopFlag, machines: Machines
) -> Sampler:
    length = engine.capabilities.max_length
    if config.sampling.max_new_tokens >= length:
        raise BadInput(
            f"sampling.max_new_tokens: expected at most {length - 1}, got {config.sampling.max_new_tokens}; prompt and response"
            f" share the {length} tokens that the engine's KV memory holds: raise engine.kv_memory_gb"
        )
    sampling = replace(
        sampling_params(config, policy.stop_token_ids),
        # The facts per token that the objective and the metrics need.
        return_topk=topk,
        return_experts=config.rollout.routing != "off" and engine.capabilities.returns_experts,
        return_prompt_experts=config.rollout.routing == "replay" and engine.capabilities.returns_experts,
    )
    return Sampler(
        prompts=source.prompts,
        engine=engine,
        sampling=sampling,
        tokenizer=policy.tokenizer,
        grader=open_graders(config, machines.graders()),
        gather=gathered(config, policy.tokenizer, machines.graders()),
        budget=FailureBudget(config.rollout.failure_budget),
        deadline_s=config.silence_s,
        should_stop=stop,
        mixed=source.mixed,
    )


def open_feed(config: Config, sampler: Sampler, source: PromptSource, view: LiveView, folder: RunFolder) -> Feed:
    """The feed of `run.loop` and `experiment.lag`."""
    if plugins.is_own(config.run.loop):
        return plugins.made(config.run.loop, "run.loop", OWN_FEED, Feed, config, sampler)
    size = config.rollout
    varied_only = size.zero_variance == "drop"
    if config.run.loop == "budgeted":
        heard = {"useless": source.mixed.useless} if source.mixed else {}
        pooled = BudgetedRollouts(pool_rules(config), source.prompt, **heard)
        return Budgeted(sampler, pooled, rounds=refill_rounds(config), varied_only=varied_only)
    if config.run.loop == "async":
        limit, updates = size.overlap.max_staleness, config.train.updates_per_step
        if limit < updates:
            view.note(
                f"rollout.overlap.max_staleness={limit} is below train.updates_per_step={updates}: nothing overlaps"
            )
        return Overlapped(
            lambda after: overlapped(config, sampler, folder, after),
            size.prompts,
            sampler.budget,
            sampler.should_stop,
            max_staleness=limit,
            updates=updates,
            varied_only=varied_only,
        )
    whole = Whole(sampler, size.prompts, size.samples, rounds=refill_rounds(config), varied_only=varied_only)
    if not (lag := config.experiment.lag):
        return whole
    return Lagged(whole, LaggedBatches(lag, config.run.steps, source.prompt), view.note)


def refill_rounds(config: Config) -> int:
    """Most rounds of dynamic sampling in a step; 0 without it."""
    what = config.rollout.zero_variance
    return what if isinstance(what, int) else REFILL_ROUNDS if what == "refill" else 0


def overlapped(config: Config, sampler: Sampler, folder: RunFolder, after: int) -> OverlappedRollouts:
    """Rollouts of an asynchronous run for the steps after `after`; a recorded schedule, if the config names one, is replayed from there."""
    gate = Gate(
        prompts=config.rollout.prompts,
        samples=config.rollout.samples,
        look_ahead=config.rollout.overlap.max_staleness // config.train.updates_per_step,
        steps=config.run.steps,
    )
    source = Source(
        prompts=sampler.prompts,
        engine=sampler.engine,
        sampling=lambda: sampler.sampling,
        # A copy: the feeder decodes while the trainer encodes prompts.
        tokenizer=copy.deepcopy(sampler.tokenizer),
        grader=sampler.grader,
        gather=sampler.gather,
    )
    file = config.experiment.schedule
    calls = Recorded(sampler.engine, folder.append_schedule) if file is None else Replayed(sampler.engine, file, after)
    return OverlappedRollouts(gate, calls, source, deadline_s=config.silence_s)
