"""Benchmarks through an engine: k samples per item, item by item onto disk, interrupted and resumed at any point."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollkeel.config import Config
from rollkeel.errors import BadInput, EngineFailure, GraderFailure, Interrupted
from rollkeel.evals import record
from rollkeel.evals.benchmarks import Loaded
from rollkeel.evals.summary import summarize
from rollkeel.events import write_atomic
from rollkeel.loop.assemble import EVAL_SEED, open_graders, prompt_source, sampling_params
from rollkeel.loop.play import gathering
from rollkeel.loop.serving import served_policy, serving
from rollkeel.models.loading import Policy
from rollkeel.models.names import checkpoint_views
from rollkeel.protocols import Engine
from rollkeel.record.stopping import StopFlag
from rollkeel.rewards import Graders
from rollkeel.rewards.workers import Workers
from rollkeel.rollout.collect import completed, unbegun
from rollkeel.sync.publish import full_update
from rollkeel.types import Prompt, Rollout, SamplingParams

TOGETHER = 64
"""Episodes that are played at once."""
MEMBERS = 4096
"""Rollout ids of an item: its place times this. The first 4 of 16 samples are then those of a run with 4."""


def run_benchmarks(
    config: Config,
    benchmarks: Sequence[Loaded],
    out: Path,
    *,
    samples: int | None = None,
    greedy: bool = False,
    contexts: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Evaluate `model.path` on all items of `benchmarks` and write `settings.json`, `config.yaml`, `NAME/items.jsonl`, `results.json` to `out`.

    `contexts`: tokens of prompt and response by benchmark, in the place of `sampling.max_new_tokens`; beyond its own context the model
    is extended by YaRN. `samples` per item, None takes each benchmark's own, 0 only the greedy answer. Called again with the same settings it
    resumes: finished items stay, those with a failure are asked again. Returns what is in `results.json`. Raises `Interrupted` after
    Ctrl-C, and after the results are written `EngineFailure` or `GraderFailure` above `rollout.failure_budget`.
    """
    counts = {b.benchmark.name: b.benchmark.k if samples is None else samples for b in benchmarks}
    _check(config, counts, greedy)
    by_context: dict[int, list[Loaded]] = {}
    for b in benchmarks:
        by_context.setdefault((contexts or {}).get(b.benchmark.name, 0), []).append(b)
    settings: dict[str, Any] = {}
    found: dict[str, Any] = dict.fromkeys(counts)
    for context, some in by_context.items():
        stretched = _stretched(config, context)
        policy = served_policy(stretched)
        prompts = [_prompts(stretched, policy, b) for b in some]

        def begin(weights: int) -> dict[str, Any]:
            found = _settings(config, weights, benchmarks, counts, greedy)
            found |= {"contexts": dict(contexts)} if contexts else {}
            record.open_folder(out, found)
            write_atomic(out / "config.yaml", config.to_yaml())
            return found

        if not (settings or config.clustered):
            settings = begin(full_update(checkpoint_views(policy.model).items(), 0).checksum)
        with (
            StopFlag() as stop,
            serving(stretched, policy) as (engine, helpers, checksum),
            open_graders(config, helpers) as graders,
            Workers(deadline_s=config.reward.graders.deadline_s) as workers,
        ):
            settings = settings or begin(checksum or 0)  # the weights of a cluster are on its actors
            ask = _Asking(stretched, policy, engine, graders, workers, stop)
            for loaded, asked in zip(some, prompts, strict=True):
                name = loaded.benchmark.name
                records = ask.answers(loaded, asked, counts[name], greedy, out / name / record.ITEMS)
                found[name] = summarize(loaded, records, counts[name])
    results = {"benchmarks": found, **settings, "config": config.model_dump(mode="json")}
    write_atomic(out / record.RESULTS, json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    _check_failures(config, found)
    return results


class _Asking:
    """One engine and grader, asked about one benchmark after another."""

    def __init__(
        self,
        config: Config,
        policy: Policy,
        engine: Engine,
        grader: Graders,
        workers: Workers,
        stop: Callable[[], bool],
    ) -> None:
        """`workers`: for benchmarks that are played turn by turn."""
        self.config = config
        self.policy = policy
        self.engine = engine
        self.grader = grader
        self.workers, self.stop = workers, stop

    def answers(
        self, loaded: Loaded, prompts: Sequence[Prompt], samples: int, greedy: bool, file: Path
    ) -> list[record.Record]:
        """Records of all items in their order; those that are missing are sampled, graded and appended as they finish."""
        file.parent.mkdir(exist_ok=True)
        records = {key: r for key, r in record.load(file).items() if record.scored(r)}
        wanted = [i for i, item in enumerate(loaded.items) if item.key not in records]
        issued = [r for i in wanted for r in self._issue(i, prompts[i], samples, greedy)]
        try:
            ended = self._played(loaded, issued) if loaded.benchmark.played else self._answered(issued)
            for index, done in self._by_item(ended, samples + greedy):
                item, read = loaded.items[index], loaded.benchmark.read
                line = record.record_of(item, done[:samples], done[samples] if greedy else None, read)
                record.append(file, line)
                records[item.key] = line
        except Interrupted:
            raise Interrupted(
                f"stopped with {len(records)} of {len(prompts)} items of {loaded.benchmark.name}; the same command resumes"
            ) from None
        return [records[item.key] for item in loaded.items]

    def _issue(self, index: int, prompt: Prompt, samples: int, greedy: bool) -> Iterator[Rollout]:
        about, sampling = self.engine.capabilities, sampling_params(self.config, self.policy.stop_token_ids, EVAL_SEED)
        for member in range(samples):
            yield unbegun(index * MEMBERS + member, index, member, prompt, sampling, about)
        if greedy:
            yield unbegun((index + 1) * MEMBERS - 1, index, samples, prompt, _greedy(sampling), about)

    def _answered(self, issued: Sequence[Rollout]) -> Iterator[Rollout]:
        """Answers of one turn, as they end."""
        deadline, tokenizer = self.config.engine.deadline_s, self.policy.tokenizer
        return completed(self.engine, issued, tokenizer, deadline_s=deadline, should_stop=self.stop, grader=self.grader)

    def _played(self, loaded: Loaded, issued: Sequence[Rollout]) -> Iterator[Rollout]:
        """Episodes, some at a time, so that an evaluation that is stopped keeps those before."""
        assert loaded.benchmark.played is not None
        environment, config = loaded.benchmark.played(self.workers), self.config
        with gathering(config, self.policy.tokenizer, environment) as gather:
            for start in range(0, len(issued), TOGETHER):
                some, deadline = issued[start : start + TOGETHER], config.engine.deadline_s
                yield from gather(self.engine, some, self.policy.tokenizer, deadline_s=deadline, should_stop=self.stop)

    def _by_item(self, ended: Iterable[Rollout], each: int) -> Iterator[tuple[int, list[Rollout]]]:
        """Items whose `each` answers are all there, graded, in the order they finish."""
        open_items: dict[int, list[Rollout]] = {}
        for rollout in ended:
            open_items.setdefault(rollout.group, []).append(rollout)
            whole = [g for g, r in open_items.items() if len(r) == each and all(map(self.grader.ready, r))]
            yield from ((group, self._graded(open_items.pop(group))) for group in whole)
        yield from ((group, self._graded(members)) for group, members in open_items.items())

    def _graded(self, members: Sequence[Rollout]) -> list[Rollout]:
        graded = {r.id: r for r in self.grader.grade([r for r in members if r.status.complete])}
        return sorted((graded.get(r.id, r) for r in members), key=lambda r: r.member)


def _stretched(config: Config, context: int) -> Config:
    """The config with prompts and responses of up to `context` tokens together; as it is for 0."""
    if not context:
        return config
    parts = {
        "model": config.model.model_copy(update={"context": max(context, config.model.context or 0)}),
        "engine": config.engine.model_copy(update={"max_length": context}),
        "sampling": config.sampling.model_copy(update={"max_new_tokens": context - 1}),
    }
    return config.model_copy(update=parts)


def _greedy(sampling: SamplingParams) -> SamplingParams:
    return replace(sampling, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)


def _prompts(config: Config, policy: Policy, loaded: Loaded) -> list[Prompt]:
    return prompt_source(config, policy, "eval", loaded.problems()).prompts(range(len(loaded.items)))


def _check(config: Config, counts: dict[str, int], greedy: bool) -> None:
    for name, count in counts.items():
        if not 0 <= count < MEMBERS or count + greedy < 1:
            raise BadInput(f"--samples: expected 1 to {MEMBERS - 1}, or 0 with --greedy, got {count} for {name}")
        if count and config.sampling.temperature == 0:
            raise BadInput("sampling.temperature: expected > 0 for samples, got 0; use --samples 0 --greedy")


def _settings(
    config: Config, weights: int, benchmarks: Sequence[Loaded], counts: dict[str, int], greedy: bool
) -> dict[str, Any]:
    """Everything that decides an answer, and so must be the same when an evaluation resumes. `weights`: their checksum."""
    return {
        "model": config.model.path,
        "weights": f"{weights:016x}",
        "sampling": config.sampling.model_dump(mode="json"),
        "engine": [config.engine.kind, config.engine.dtype, config.engine.max_length],
        "seed": config.run.seed,
        "chat_template": config.data.chat_template,
        "greedy": greedy,
        "samples": counts,
        "items": {b.benchmark.name: [len(b.items), b.digest] for b in benchmarks},
    }


def _check_failures(config: Config, found: dict[str, Any]) -> None:
    for name, result in found.items():
        counts = result["counts"]
        failed = {kind: counts[f"{kind}_failures"] for kind in ("engine", "grader")}
        if sum(failed.values()) > config.rollout.failure_budget * counts["answers"] + 1e-9:
            error = EngineFailure if failed["engine"] >= failed["grader"] else GraderFailure
            raise error(
                f"{name}: {failed['engine']} of {counts['answers']} answers failed in the engine, {failed['grader']} in the "
                f"grader, budget {config.rollout.failure_budget:g}; see `detail` in {record.ITEMS}; the same command asks them again"
            )
