"""Evaluations of a run besides that of its own held-out items: each with its own prompts, sampling, interval and samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rollkeel.config import Config
from rollkeel.config_data import EvalSet
from rollkeel.errors import BadInput
from rollkeel.loop.assemble import EVAL_SEED, prompt_source, sampling_params
from rollkeel.loop.run import HeldOut
from rollkeel.models.loading import Policy
from rollkeel.tasks.source import Problems, problems_of
from rollkeel.types import SamplingParams


def sampled_as(config: Config, one: EvalSet) -> Config:
    """The config with the sampling of `one`."""
    given = one.sampling.model_dump(exclude_none=True)
    return config.model_copy(update={"sampling": config.sampling.model_copy(update=given)})


def evaluation_params(config: Config, one: EvalSet, stop_token_ids: Sequence[int]) -> SamplingParams:
    """How `one` is sampled: nothing is trained on its answers, so a server may leave out tokens."""
    return replace(sampling_params(sampled_as(config, one), stop_token_ids, EVAL_SEED), evaluation=True)


def problems_in(config: Config, one: EvalSet) -> Problems:
    """What `one` asks. Raises `BadInput` for files, names and options that are not there."""
    if one.benchmark is not None:
        from rollkeel.evals import benchmarks

        benchmark = benchmarks.get(one.benchmark)
        if benchmark.played:
            raise BadInput(
                f"eval.sets: {one.benchmark} is played in turns; use rollkeel eval --benchmark {one.benchmark}"
            )
        options = benchmark.graded_by(benchmarks.Options(), config.data.whole(one).grader_options)
        problems = benchmark.load(one.path, options).problems()
        problems.name = one.called + "_judged" * benchmark.judged
        return problems
    part = next((part for part in config.data.parts if part.name == one.source), None) or config.data.whole(one)
    whole_file = {"eval_fraction": 1.0} if one.path else {}
    part = part.model_copy(update={"name": one.called, **whole_file})
    return problems_of(part, config.run.seed, "eval")


def eval_sets(config: Config, policy: Policy) -> list[HeldOut]:
    """The evaluations that `eval.sets` names, with their prompts."""
    made = []
    for one in config.eval.sets:
        source = prompt_source(sampled_as(config, one), policy, "eval", problems_in(config, one))
        whole = source.size if one.benchmark or one.path else None
        count = one.items or whole or config.eval.items
        made.append(
            HeldOut(
                prompts=source.prompts(range(min(count, source.size or count))),
                sampling=evaluation_params(config, one, policy.stop_token_ids),
                samples=one.samples or config.eval.samples,
                every=config.eval.every if one.every is None else one.every,
            )
        )
    return made
