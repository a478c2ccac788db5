"""A run: everything the loop works with, put together from a config, and how it is saved and restored."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from rollkeel import objectives
from rollkeel.config import Config
from rollkeel.diagnostics.alarms import Alarms
from rollkeel.diagnostics.checks import Checks
from rollkeel.diagnostics.clock import Clock
from rollkeel.diagnostics.live import LiveView
from rollkeel.diagnostics.runfolder import RunFolder
from rollkeel.diagnostics.stopping import StopFlag
from rollkeel.diagnostics.trackers import Tracker, open_trackers, text_rows
from rollkeel.engines.open import check_engine, open_engine
from rollkeel.errors import BadInput
from rollkeel.models.loading import Policy, resolve_device, save_policy
from rollkeel.models.names import checkpoint_views
from rollkeel.objectives import Objective
from rollkeel.play import gather
from rollkeel.protocols import Engine
from rollkeel.rewards import FailureBudget, Graders
from rollkeel.rewards.grading import Scorer
from rollkeel.rollout.budgeted import BudgetedRollouts
from rollkeel.rollout.collect import collect
from rollkeel.rollout.episodes import Episodes, Gather
from rollkeel.rollout.feeder import OverlappedRollouts, Source
from rollkeel.rollout.lag import LaggedBatches
from rollkeel.rollout.overlap import Gate
from rollkeel.rollout.pool import PoolRules
from rollkeel.rollout.schedule import Recorded, Replayed
from rollkeel.sync.proof import Probes, probe_sequences
from rollkeel.sync.publish import DirectPublisher
from rollkeel.tasks.source import Problems, PromptSource
from rollkeel.train import checkpoint
from rollkeel.train.probe import SequenceScorer
from rollkeel.train.trainer import LocalTrainer
from rollkeel.types import Prompt, Rollout, SamplingParams

EVAL_SEED = 0x5EED
"""Mixed into the run seed for evaluation draws, so that they never repeat those of training."""


@dataclass
class Run:
    """The pieces a loop needs. Made by `assemble`."""

    config: Config
    folder: RunFolder
    policy: Policy
    source: PromptSource
    eval_prompts: Sequence[Prompt]
    engine: Engine
    publisher: DirectPublisher
    trainer: LocalTrainer
    objective: Objective
    grader: Graders
    budget: FailureBudget
    view: LiveView
    stop: StopFlag
    gather: Gather = collect
    """How its prompts are sampled: in one turn, or played with their environment."""
    trackers: Sequence[Tracker] = ()
    consumed: int = 0
    """Prompts taken from `source` so far: the next step draws those behind them."""
    budgeted: BudgetedRollouts | None = None
    """Rollouts that one step hands to the next; only with `run.loop=budgeted`."""
    overlap: OverlappedRollouts | None = None
    """Rollouts that are sampled while others are trained; only with `run.loop=async`."""
    lagged: LaggedBatches | None = None
    """Batches that wait to be trained; only with `rollout.lag` above 0."""
    alarms: Alarms = field(default_factory=Alarms)
    """What the rows so far say about those to come."""
    checks: Checks = field(default_factory=Checks)
    """What no healthy step does."""

    @property
    def sampling(self) -> SamplingParams:
        """Sampling parameters of training rollouts, with the facts per token that the objective and the metrics need."""
        return replace(
            sampling_params(self.config, self.policy.stop_token_ids),
            return_topk=self.objective.topk,
            return_experts=self.config.rollout.return_experts and self.engine.capabilities.returns_experts,
        )

    @property
    def eval_sampling(self) -> SamplingParams:
        """The same distribution, other random numbers."""
        return sampling_params(self.config, self.policy.stop_token_ids, EVAL_SEED)

    def clock(self, step: int) -> Clock:
        """A stopwatch for one step."""
        return Clock(self.folder.events, step)

    def publish(self) -> dict[str, float]:
        """Bring the trainer's weights to the engine, proven. What the proof measured: `sync/…`, empty for engines without."""
        with nullcontext() if self.overlap is None else self.overlap.publishing():
            told = self.publisher.publish(self.trainer.named_weights(), self.trainer.version)
        return {key: value for key, value in told.items() if key.startswith("sync/")}

    @property
    def carried(self) -> dict[str, BudgetedRollouts | OverlappedRollouts | LaggedBatches | None]:
        """What one step hands to the next besides weights, by the name of the loop that does so."""
        return {"budgeted": self.budgeted, "async": self.overlap, "lag": self.lagged}

    def save(self, step: int) -> None:
        """Checkpoint the state after `step`; its metrics row is on disk already."""

        def write(path: Path) -> None:
            save_policy(self.policy, path / "model")
            state = {
                "step": step,
                "consumed": self.consumed,
                "trainer": self.trainer.state_dict(),
                "objective": self.objective.state_dict(),
                **{name: None if part is None else part.state_dict() for name, part in self.carried.items()},
            }
            checkpoint.save_state(path / "state", state)

        self.folder.sync_rollouts()
        info = {
            "objective": self.objective.describe(),
            "version": self.trainer.version,
            "config": self.folder.digest,
        }
        checkpoint.save(self.folder.checkpoints, step, write=write, info=info, keep=self.config.checkpoint.keep)

    def restore(self, saved: checkpoint.Checkpoint) -> None:
        """Continue from a checkpoint. Raises `BadInput` when the model, the objective or the loop is another one."""
        state = checkpoint.load_state(saved.state)
        wanted, got = (
            next((n for n in self.carried if parts.get(n) is not None), "sync") for parts in (self.carried, state)
        )
        if wanted != got:
            name = {"lag": "sync with rollout.lag"}
            raise BadInput(
                f"checkpoint: expected one of run.loop={name.get(wanted, wanted)}, got one of {name.get(got, got)}; resume with it"
            )
        self.trainer.load_state_dict(state["trainer"])
        self.objective.load_state_dict(state["objective"])
        self.consumed = state["consumed"]
        if self.budgeted is not None:
            self.budgeted.load_state_dict(state["budgeted"])
        if self.overlap is not None:
            self.overlap = overlapped(self, after=saved.step)
            self.overlap.load_state_dict(
                state["async"],
                version=self.trainer.version,
                updates=self.config.train.updates_per_step,
                limit=self.config.rollout.overlap.max_staleness,
            )
        if self.lagged is not None:
            self.lagged.load_state_dict(state["lag"], saved.step)

    def track(self, resume_step: int | None) -> None:
        """Open the optional trackers; steps after `resume_step` are dropped from them."""
        self.trackers = open_trackers(
            self.config.report.trackers,
            self.folder.path,
            self.config.model_dump(mode="json"),
            resume_step=resume_step,
            on_failure=self.view.error,
        )

    def close(self) -> None:
        """End what has threads, processes or files of its own: feeder, graders, engine, trainer, environments, trackers."""
        if self.overlap is not None:
            self.overlap.close()
        self.grader.close()
        self.engine.close()
        self.trainer.close()
        if isinstance(self.gather, Episodes):
            self.gather.close()
        for tracker in self.trackers:
            tracker.close()

    def record(self, row: Mapping[str, Any], shown: Sequence[Rollout] = ()) -> None:
        """Append a metrics row and show it; trackers also get the texts of a few of the rollouts `shown`."""
        self.folder.append_metrics(row)
        for tracker in self.trackers:
            tracker.log(int(row["step"]), row)
            if shown and self.config.report.samples:
                tracker.texts(int(row["step"]), text_rows(shown, self.config.report.samples))
        self.view.step(int(row["step"]), row)


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
    """The held-out items every evaluation of a run uses; empty when a file keeps none back."""
    if config.data.path is not None and config.data.eval_fraction == 0:
        return []
    source = prompt_source(config, policy, "eval")
    count = config.eval.items if source.size is None else min(config.eval.items, source.size)
    return source.prompts(range(count))


def build_objective(config: Config) -> Objective:
    """The config's objective with the trainer's KL and entropy terms; KL in the reward is none of its business."""
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
    count = config.engine.server.probe_prompts
    if config.engine.kind == "local" or not count:
        return None
    source = source or prompt_source(config, policy, "train")
    if source.size is not None:
        count = min(count, source.size)
    prompts = [prompt.token_ids for prompt in source.prompts(range(count))]
    context = min(policy.context, config.engine.max_length or policy.context)
    return Probes(
        sequences=probe_sequences(prompts, policy.vocab_size, context),
        trainer=SequenceScorer(policy.model, chunk=config.train.logprob_chunk),
        dtype="bf16" if config.engine.dtype == "fp32" and config.model.dtype == "bfloat16" else config.engine.dtype,
        tolerance=config.engine.server.tolerance,
    )


def open_graders(config: Config) -> Graders:
    """The config's graders, which whoever asks closes."""

    def load_model(path: str) -> Scorer:
        from rollkeel.train.preferences import RewardModel  # pyright: ignore[reportMissingImports]

        return RewardModel.load(path, resolve_device(config.run.device))

    return Graders(config.reward.graders, seed=config.run.seed, load_model=load_model)


def serve(config: Config, policy: Policy) -> Engine:
    """The config's engine with the policy's weights in it, proven; whoever asks closes it."""
    check_engine(config.engine, sampling_params(config, ()))
    probes = run_probes(config, policy)
    engine = open_engine(policy.model.config, config.engine, resolve_device(config.run.device))
    try:
        DirectPublisher([engine], probes).publish(checkpoint_views(policy.model).items(), 0)
    except BaseException:
        engine.close()
        raise
    return engine


def assemble(
    config: Config, folder: RunFolder, policy: Policy, view: LiveView, stop: StopFlag, engine: Engine | None = None
) -> Run:
    """Build every piece of a run on `config.run.device`, with the config's engine or this one; nothing is written."""
    device = resolve_device(config.run.device)
    torch.set_num_threads(config.run.threads)
    objective = build_objective(config)
    if objective.topk > policy.vocab_size:
        raise BadInput(
            f"objective {objective.name}: needs the {objective.topk} most likely tokens, the vocabulary has"
            f" {policy.vocab_size}; lower its k"
        )
    source = prompt_source(config, policy, "train")
    held_out = eval_prompts(config, policy)
    trainer = LocalTrainer(
        policy,
        config.train,
        temperature=config.sampling.temperature,
        total_updates=config.run.steps * config.train.updates_per_step,
        device=device,
        replay_routing=config.rollout.replay_routing,
    )
    try:
        log = folder.path / "server.log"
        engine = engine or open_engine(policy.model.config, config.engine, device, log_path=log)
    except BaseException:
        trainer.close()
        raise
    run = Run(
        config=config,
        folder=folder,
        policy=policy,
        source=source,
        eval_prompts=held_out,
        engine=engine,
        publisher=DirectPublisher([engine], run_probes(config, policy, source)),
        trainer=trainer,
        objective=objective,
        grader=open_graders(config),
        budget=FailureBudget(config.rollout.failure_budget),
        gather=gather(config, policy.tokenizer),
        checks=Checks(config.train.lr, objective.left),
        view=view,
        stop=stop,
    )
    try:
        carry(run)
    except BaseException:
        run.close()
        raise
    return run


def carry(run: Run) -> None:
    """Give `run` what its loop hands from step to step."""
    config = run.config
    if config.run.loop == "budgeted":
        run.budgeted = BudgetedRollouts(pool_rules(config), run.source.prompt)
    elif config.run.loop == "async":
        run.overlap = overlapped(run)
    elif config.rollout.lag:
        run.lagged = LaggedBatches(config.rollout.lag, config.run.steps, run.source.prompt)


def overlapped(run: Run, after: int = 0) -> OverlappedRollouts:
    """The rollouts of an asynchronous run, before the first. `after`: step behind which a schedule is replayed."""
    config, engine = run.config, run.engine
    gate = Gate(
        prompts=config.rollout.prompts,
        samples=config.rollout.samples,
        look_ahead=config.rollout.overlap.max_staleness // config.train.updates_per_step,
        steps=config.run.steps,
    )
    source = Source(
        prompts=run.source.prompts,
        engine=engine,
        sampling=lambda: run.sampling,
        # A copy: the feeder decodes while the trainer encodes prompts.
        tokenizer=copy.deepcopy(run.policy.tokenizer),
        grader=run.grader,
    )
    file = config.run.schedule
    calls = Recorded(engine, run.folder.append_schedule) if file is None else Replayed(engine, file, after)
    return OverlappedRollouts(gate, calls, source, deadline_s=config.engine.deadline_s)
