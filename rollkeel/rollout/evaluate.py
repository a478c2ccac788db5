"""Accuracy on held-out items: avg@k with its standard error, and greedy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rollkeel.protocols import Engine, Grader
from rollkeel.rollout.collect import collect, issue
from rollkeel.rollout.episodes import Gather
from rollkeel.types import Prompt, Rollout, SamplingParams


def evaluate(
    engine: Engine,
    grader: Grader,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    *,
    samples: int,
    greedy: bool,
    deadline_s: float,
    should_stop: Callable[[], bool] = lambda: False,
    gather: Gather = collect,
) -> tuple[dict[str, float], list[Rollout]]:
    """`eval/<task>/avg@k` (mean over items of the mean over `samples` answers), its standard error over items, `greedy`.

    The same items draw the same random numbers at every evaluation. Rollouts whose engine or grader failed are left out
    and counted in `eval/<task>/failed`.
    """
    rounds = [(samples, sampling, "avg@k")] if samples else []
    if greedy:
        rounds.append((1, replace(sampling, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0), "greedy"))
    metrics: dict[str, float] = {}
    seen: list[Rollout] = []
    for count, params, kind in rounds:
        issued = issue(prompts, count, params, 0, engine)
        answers = gather(engine, issued, tokenizer, deadline_s=deadline_s, should_stop=should_stop, grader=grader)
        graded = grader.grade([r for r in answers if r.status.complete])
        seen += graded
        for task in sorted({p.task for p in prompts}):
            mine = [r for r in graded if r.prompt.task == task and r.reward is not None]
            issued_here = sum(r.prompt.task == task for r in issued)
            key = f"eval/{task}"
            metrics[f"{key}/failed"] = metrics.get(f"{key}/failed", 0.0) + issued_here - len(mine)
            if not mine:
                continue
            scores = _by_item(mine)
            if kind == "greedy":
                metrics[f"{key}/greedy"] = float(scores.mean())
            else:
                metrics[f"{key}/avg@k"] = float(scores.mean())
                if len(scores) > 1:  # one item has no standard error; 0 would be wrong
                    metrics[f"{key}/avg@k_se"] = float(scores.std(ddof=1) / len(scores) ** 0.5)
                metrics[f"{key}/k"] = float(count)
    return metrics, seen


def _by_item(rollouts: Sequence[Rollout]) -> np.ndarray:
    """Mean reward of each item (group)."""
    items: dict[int, list[float]] = {}
    for r in rollouts:
        assert r.reward is not None
        items.setdefault(r.group, []).append(r.reward)
    return np.array([np.mean(v) for v in items.values()])
