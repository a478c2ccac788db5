"""One stage at a time, from files to files, so that each can be run and debugged alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from rollkeel import rewards
from rollkeel.config import Config
from rollkeel.errors import BadInput
from rollkeel.evals.record import open_folder
from rollkeel.events import write_atomic
from rollkeel.loop.assemble import (
    EVAL_SEED,
    eval_prompts,
    open_graders,
    opened,
    policy_of,
    prompt_source,
    sampling_params,
)
from rollkeel.loop.play import gathering
from rollkeel.loop.reward_model import reward_model
from rollkeel.loop.serving import served_policy, serving
from rollkeel.loop.warm_start import sft, warm_start_key
from rollkeel.models import adapter_files
from rollkeel.models.loading import save_policy
from rollkeel.recipe import load
from rollkeel.record.live import LiveView
from rollkeel.record.rollout_store import read_step, to_rollouts, write_step
from rollkeel.record.stopping import StopFlag
from rollkeel.rewards import FailureBudget
from rollkeel.rollout.collect import issue
from rollkeel.rollout.evaluate import evaluate
from rollkeel.rollout.measure import speed_curve
from rollkeel.rollout.scenario import Scenario
from rollkeel.tasks.base import content_hash
from rollkeel.train import checkpoint
from rollkeel.train.preferences import load_pairs, split_pairs
from rollkeel.train.unfinished import Unfinished
from rollkeel.types import Rollout

PAIRS, PROMPTS = "pairs.jsonl", "prompts.jsonl"
RANKS = "ranks"
"""In the folder of a reward model, until it is done: what its ranks print."""


def sft_stage(config: Config, out: Path) -> dict[str, float]:
    """Warm-start `model.path` on demonstrations and write a Hugging Face folder to `out`; called again, it goes on where it was."""
    _refuse_existing(out)
    if not config.sft.on:
        raise BadInput("sft.steps=0 trains nothing: set sft.steps to 1 or more, or sft.epochs")
    kept = Unfinished(out.with_name(f".unfinished-{out.name}"), warm_start_key(config))
    with LiveView() as view, StopFlag(view) as stop:
        if config.clustered:
            from rollkeel.cluster import check, stage

            check.check_cluster(config)
            with stage.machines(config, kept.folder, view, sampling=False) as ranks:
                metrics = ranks.sft(stop)
                checkpoint.replace_folder(out, ranks.save_model)
        else:
            policy = policy_of(config, config.train.lora)
            metrics = sft(policy, config, view, stop, kept)
            checkpoint.replace_folder(out, lambda path: save_policy(policy, path))
    kept.remove()
    return metrics


def merge_stage(config: Config, out: Path) -> None:
    """Write the whole model that the adapters of `model.path` make of their base, as `model.dtype`, to the folder `out`."""
    _refuse_existing(out)
    _alone(config, "rollkeel merge")
    if not (Path(config.model.path).expanduser() / adapter_files.CONFIG).is_file():
        raise BadInput(f"model.path {config.model.path!r}: expected a folder of adapters with {adapter_files.CONFIG}")
    policy = policy_of(config)
    checkpoint.replace_folder(out, lambda path: save_policy(policy, path))


def rollout_stage(config: Config, out: Path, step: int) -> list[Rollout]:
    """Sample the prompts of training step `step` with `model.path` and write ungraded rollouts to `out` (parquet)."""
    _refuse_existing(out)
    policy = served_policy(config)
    size = config.rollout
    first = (step - 1) * size.prompts
    prompts = prompt_source(config, policy, "train").prompts(range(first, first + size.prompts))
    with (
        StopFlag() as stop,
        serving(config, policy) as (engine, helpers, _),
        gathering(config, policy.tokenizer, players=helpers) as gather,
    ):
        issued = issue(prompts, size.samples, sampling_params(config, policy.stop_token_ids), first, engine)
        sampled = gather(engine, issued, policy.tokenizer, deadline_s=config.engine.deadline_s, should_stop=stop)
    _make_parent(out)
    write_step(out, sampled, step=step, piece=lambda i: policy.tokenizer.decode([i]))
    return sampled


def score_stage(config: Config, source: Path, out: Path, failure_budget: float) -> dict[str, float]:
    """Grade the rollouts of a parquet file by `reward.graders` and write them, with rewards, to `out`.

    Of the config also `run.seed` (which are graded twice) and `run.device` (of reward models).
    """
    _refuse_existing(out)
    table = read_step(source)
    rollouts = to_rollouts(table)
    if not rollouts:
        raise BadInput(f"{source}: expected rollouts, found none")
    with open_graders(config) as grader:
        done = {r.id: r for r in grader.grade([r for r in rollouts if r.status.complete])}
    graded = [done.get(r.id, r) for r in rollouts]
    metrics = FailureBudget(failure_budget).check(graded)
    step = int(table.column("step")[0].as_py())
    _make_parent(out)
    write_step(out, graded, step=step)
    known = [r.reward for r in graded if r.reward is not None]
    return {**metrics, "reward/mean": sum(known) / len(known) if known else 0.0, "rollout/count": float(len(graded))}


def eval_stage(config: Config, out: Path | None) -> dict[str, float]:
    """Evaluate `model.path` on the held-out items; the answers go to `out` (parquet) if given."""
    if out is not None:
        _refuse_existing(out)
    policy = served_policy(config)
    for part in config.data.parts or [config.data]:
        if part.path is not None:
            rewards.get(part.grader)
    prompts = eval_prompts(config, policy)
    if not prompts:
        raise BadInput("eval: data.eval_fraction=0 holds nothing back to evaluate on; raise it")
    with (
        StopFlag() as stop,
        serving(config, policy) as (engine, helpers, _),
        gathering(config, policy.tokenizer, players=helpers) as gather,
        open_graders(config, helpers) as grader,
    ):
        metrics, answers = evaluate(
            engine,
            grader,
            policy.tokenizer,
            prompts,
            sampling_params(config, policy.stop_token_ids, EVAL_SEED),
            samples=config.eval.samples,
            greedy=config.eval.greedy,
            deadline_s=config.engine.deadline_s,
            should_stop=stop,
            gather=gather,
        )
    if out is not None:
        sampled = [r for r in answers if r.sampling.temperature > 0]
        _make_parent(out)
        write_step(out, sampled or answers, step=0, piece=lambda i: policy.tokenizer.decode([i]))
    return metrics


def pairs_stage(run: Path, out: Path) -> dict[str, float]:
    """Preference pairs of a run's rollouts: in every group the best answer against the worst, the second best against the second
    worst, and so on, where rewards differ.

    Writes `pairs.jsonl` (prompt, chosen, rejected) and `prompts.jsonl` (prompt, answer), each prompt once, for a run that follows.
    """
    files = sorted((run / "rollouts").glob("step_*.parquet"))
    if not files:
        raise BadInput(f"{run}: expected rollouts of a run, found none; set report.rollouts=true in its recipe")
    groups: dict[tuple[str, int], list[Any]] = {}
    for file in files:
        for rollout in to_rollouts(read_step(file)):
            if rollout.reward is not None:
                groups.setdefault((file.name, rollout.group), []).append(rollout)
    pairs, prompts = {}, {}
    for members in groups.values():
        members.sort(key=lambda r: r.reward)
        prompt = members[0].prompt
        prompts[prompt.text] = {"prompt": prompt.text, "answer": prompt.answer}
        for worse, better in zip(members, reversed(members), strict=True):
            if better.reward > worse.reward and better.text.strip() and better.text != worse.text:
                row = {"prompt": prompt.text, "chosen": better.text, "rejected": worse.text}
                pairs[tuple(row.values())] = row
    _refuse_existing(out)
    _make_parent(out / PAIRS)
    for name, rows in ((PAIRS, pairs), (PROMPTS, prompts)):
        write_atomic(out / name, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows.values()))
    return {"pairs": float(len(pairs)), "prompts": float(len(prompts))}


def reward_model_stage(config: Config, pairs: Path, out: Path) -> dict[str, float]:
    """Train a reward model on the preference pairs of a file, from the body of `model.path`, into the folder `out`.

    Of the config: `model`, `sft` (steps, pairs per step, learning rate), `train.weight_decay`, `train.micro_batch_tokens`, `data.eval_fraction` (held out), `data.chat_template`,
    `checkpoint.every`, `run.seed`, `run.device`, `run.threads`, `cluster` and `train.mesh`. Called again with the same it goes on.
    """
    _refuse_meshes(config)
    if config.train.lora.rank:
        raise BadInput("train.lora.rank: a reward model is trained whole; set it to 0")
    train, held_out = split_pairs(load_pairs(pairs), config.data.eval_fraction)
    if config.clustered:
        from rollkeel.cluster import check, skeleton

        check.check_cluster(config)
        policy = skeleton.skeleton(config.model)
    else:
        policy = policy_of(config)
    quoted = [[p.prompt, p.chosen, p.rejected, p.margin] for p in (*train, *held_out)]
    kept = {"model": config.model, "sft": config.sft, "data": config.data, "run": config.run}
    settings = {k: v.model_dump(mode="json", exclude={"dir", "name"}) for k, v in kept.items()}
    open_folder(out, {"pairs": content_hash("pairs", json.dumps(quoted), ""), **settings})
    both = train, held_out
    with LiveView() as view, StopFlag(view) as stop:
        if not config.clustered:
            return reward_model(policy, config, both, out, view, stop)
        from rollkeel.cluster import stage

        with stage.machines(config, out / RANKS, view, sampling=False, loading=False) as ranks:
            metrics = ranks.reward_model(both, out, stop)
    shutil.rmtree(out / RANKS, ignore_errors=True)
    return metrics


def measured(scenario: Scenario) -> Scenario:
    """The scenario with the decode and prefill speeds of the embedded engine, as `measure` says, on this machine."""
    asked = scenario.measure
    sizes = sorted(set(asked.sequences))
    config = load(asked.recipe, [f"engine.slots={sizes[-1]}", f"engine.kv={scenario.kv}", "engine.processes=0"])
    with opened(config, policy_of(config)) as engine:
        speeds = speed_curve(engine, sizes, asked.tokens)
    update = {
        "curve": speeds.curve,
        "prefill_tokens_s": speeds.prefill_tokens_s,
        "prefill_s": speeds.prefill_s,
        "resume_s": speeds.resume_s,
    }
    return scenario.model_copy(update={"engine": scenario.engine.model_copy(update=update)})


def _refuse_meshes(config: Config) -> None:
    """Raises `BadInput` for ranks that cannot train a reward model together."""
    asked = {f"train.mesh.{name}": getattr(config.train.mesh, name) > 1 for name in ("expert", "context", "tensor")}
    asked["train.reduce"] = config.train.reduce == "tree" and config.mesh.size > 1
    if names := ", ".join(name for name, there in asked.items() if there):
        raise BadInput(
            f"{names}: a reward model is trained by replicate and shard ranks, with train.reduce=sum; leave {names} out"
        )


def _alone(config: Config, command: str) -> None:
    if config.clustered:
        raise BadInput(f"cluster, train.mesh: {command} runs in one process; leave them out")


def _refuse_existing(out: Path) -> None:
    if out.exists():
        raise BadInput(f"{out}: already exists; choose another --out or remove it")


def _make_parent(out: Path) -> None:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"cannot write {out}: {error.strerror or error}; choose another --out") from None


__all__ = [
    "eval_stage",
    "measured",
    "merge_stage",
    "pairs_stage",
    "reward_model_stage",
    "rollout_stage",
    "score_stage",
    "sft_stage",
]
