"""Several models' answers to the same prompts: whether what was learnt is still there, and which of two a judge prefers.

Files are those of `rollkeel eval --out`. An item is a prompt, with all answers to it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rollkeel import plugins, rewards
from rollkeel.config import Config
from rollkeel.errors import BadInput
from rollkeel.evals import record
from rollkeel.evals.estimators import paired_difference, wilson
from rollkeel.evals.summary import rewards_of
from rollkeel.loop.assemble import open_graders
from rollkeel.record.rollout_store import read_step
from rollkeel.rewards import FailureBudget
from rollkeel.rewards.answers import spoken
from rollkeel.rewards.trial import rollout_of
from rollkeel.tasks.base import keyed_rng
from rollkeel.tasks.source import Problem
from rollkeel.types import GraderSpec, Rollout

Scores = dict[str, dict[str, list[float]]]
"""Domain → item → rewards of its answers."""


def retained(this: Path, earlier: Sequence[Path], allow: float) -> dict[str, Any]:
    """Each domain's score of `this` against the best of the `earlier` ones, paired by item; `kept` where no more than the share
    `allow` of the best is lost. JSON values.

    Raises `BadInput` for other items than those of an earlier stage, or a domain that `this` lacks.
    """
    mine = _scores(this)
    others = {str(path): _scores(path) for path in earlier}
    domains = {name for scores in others.values() for name in scores}
    found: dict[str, Any] = {}
    for name in sorted(domains):
        stages = {path: scores[name] for path, scores in others.items() if name in scores}
        for path, items in stages.items():
            if mine.get(name, {}).keys() != items.keys():
                raise BadInput(f"{this}: other items of {name!r} than {path} has; evaluate all stages alike")
        best = max(stages, key=lambda path: _mean(stages[path]))
        before, now = _by_item(stages[best]), _by_item(mine[name])
        lost = _mean(stages[best]) - _mean(mine[name])
        found[name] = {
            "value": _mean(mine[name]),
            "best": _mean(stages[best]),
            "stage": best,
            "difference": paired_difference(before, now).to_json(),
            "kept": lost <= allow * abs(_mean(stages[best])),
        }
    return found


def _by_item(items: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {item: float(np.mean(v)) for item, v in items.items() if v}


def _mean(items: Mapping[str, Sequence[float]]) -> float:
    """Over items that have a reward, of the mean over its answers. Raises `BadInput` for none."""
    if not any(items.values()):
        raise BadInput("retained: a domain has no reward at all; evaluate it again")
    return float(np.mean([*_by_item(items).values()]))


def _scores(path: Path) -> Scores:
    found: Scores = {}
    if path.is_dir():
        for name in record.read_results(path)["benchmarks"]:
            items = record.load(path / name / record.ITEMS).values()
            found[name] = {f"{item['key']} {item['hash']}": rewards_of(item) for item in items}
        return found
    for row in read_step(path, ["task", "prompt_text", "grader", "reward"]).to_pylist():
        items = found.setdefault(row["task"], {}).setdefault(f"{row['grader']} {row['prompt_text']}", [])
        items += [] if row["reward"] is None else [row["reward"]]
    return found


def win_rate(config: Config, first: Path, second: Path) -> dict[str, Any]:
    """How often the judge `data.grader` prefers the answers of `second` to those of `first`, of all and of each domain, with a
    Wilson interval over items; JSON values.

    The n-th answer meets the n-th, thoughts aside. The judge sees a response, with the other one where the gold answer would be, and
    says what the response earns, from 0 to 1; it is asked in both orders, in an order of pairs that `run.seed` shuffles, and sees
    nothing that tells models apart. Equal answers are a tie and silence loses, unasked. Raises `BadInput` for other prompts, a grader that does not
    compare, or a verdict out of range, and `GraderFailure` above `rollout.failure_budget`.
    """
    spec = GraderSpec(name=config.data.grader, options=config.data.grader_options)
    if not plugins.is_own(spec.name) and (spec.name, spec.options.get("kind")) != ("judge_model", "pairwise"):
        raise BadInput(
            f"data.grader={spec.name}: does not compare two answers; set judge_model with data.grader_options.kind=pairwise, or"
            " your own file.py:name"
        )
    rewards.get(spec.name)
    meetings = _meetings(first, second)
    verdicts = _verdicts(config, spec, meetings)
    by_item: dict[tuple[str, str], list[float]] = {}
    swayed: list[bool] = []
    for meeting, (one, other) in zip(meetings, verdicts, strict=True):
        if one is None or other is None:
            continue
        by_item.setdefault((meeting.domain, meeting.prompt), []).append((other + 1 - one) / 2)
        swayed.append(abs(one + other - 1) > 1e-9)
    if not by_item:
        raise BadInput(f"{first}, {second}: expected answers that could be compared, got none")
    domains: dict[str, list[float]] = {}
    for (domain, _), won in by_item.items():
        domains.setdefault(domain, []).append(float(np.mean(won)))
    everything = [won for items in domains.values() for won in items]
    return {
        "all": wilson(everything).to_json(),
        "domains": {name: wilson(domains[name]).to_json() for name in sorted(domains)},
        "pairs": len(meetings),
        "failed": len(meetings) - len(swayed),
        "swayed": float(np.mean(swayed)),
    }


@dataclass(frozen=True, kw_only=True)
class _Meeting:
    """Two answers to one prompt."""

    domain: str
    prompt: str
    metadata: Mapping[str, Any]
    texts: tuple[str, str]


def _meetings(first: Path, second: Path) -> list[_Meeting]:
    one, other = _answers(first), _answers(second)
    if one.keys() != other.keys():
        raise BadInput(f"{second}: other prompts than {first} has; evaluate both alike")
    return [
        _Meeting(
            domain=domain,
            prompt=prompt,
            metadata=json.loads(a["metadata"]),
            texts=(a["text"], b["text"]),
        )
        for domain, prompt in one
        for a, b in zip(one[domain, prompt], other[domain, prompt], strict=False)
    ]


def _answers(path: Path) -> dict[tuple[str, str], list[dict[str, Any]]]:
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in read_step(path, ["task", "prompt_text", "metadata", "text"]).to_pylist():
        row["text"] = (spoken(row["text"]) or "").strip()
        found.setdefault((row["task"], row["prompt_text"]), []).append(row)
    return found


def _verdicts(
    config: Config, spec: GraderSpec, meetings: Sequence[_Meeting]
) -> list[tuple[float | None, float | None]]:
    """What each side of each meeting earns beside the other."""
    earned: dict[tuple[int, int], float | None] = {}
    asked: list[tuple[int, int]] = []
    for number, meeting in enumerate(meetings):
        one, other = meeting.texts
        if one == other or not one or not other:
            earned[number, 0] = (bool(one) - bool(other) + 1) / 2
            earned[number, 1] = (bool(other) - bool(one) + 1) / 2
        else:
            asked += [(number, 0), (number, 1)]
    keyed_rng("judge", config.run.seed).shuffle(asked)
    rollouts: list[Rollout] = []
    for number, side in asked:
        meeting = meetings[number]
        problem = Problem(
            text=meeting.prompt,
            answer=meeting.texts[1 - side],
            grader=spec,
            metadata=meeting.metadata,
        )
        blind = rollout_of(meeting.domain, problem, meeting.texts[side])
        rollouts.append(replace(blind, id=len(rollouts)))
    with open_graders(config) as grader:
        graded = grader.grade(rollouts)
    FailureBudget(config.rollout.failure_budget).check(graded)
    for key, rollout in zip(asked, graded, strict=True):
        if rollout.reward is not None and not 0 <= rollout.reward <= 1:
            raise BadInput(f"judge {spec.name}: expected what a response earns, from 0 to 1, got {rollout.reward:g}")
        earned[key] = rollout.reward
    return [(earned[number, 0], earned[number, 1]) for number in range(len(meetings))]
