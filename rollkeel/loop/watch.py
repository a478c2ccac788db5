"""Show and log what goes wrong in a step: alarms, checks, graders that misbehave."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rollkeel.loop.run import Run
from rollkeel.record import checks
from rollkeel.record.alarms import Alarm
from rollkeel.types import Rollout, StepRollouts

PATIENCE_S, LAST_PATIENCE_S = 1.0, 30.0
"""How long an alarm waits for the doctor, and a run that ends."""


def tell_warnings(
    run: Run, findings: Sequence[checks.Finding], row: Mapping[str, Any] | None = None
) -> list[Alarm | checks.Finding]:
    """Tell and log findings that warn, and alarms about the steps to come that the row raises; returns both. With a row the doctor is
    asked why, and says so with them, or behind them if he takes long."""
    if run.config.alarms.on_alarm == "off":
        return []
    raised = [] if row is None else run.alarms.observe(row)
    warnings = [f for f in findings if not f.stops]
    word = run.doctor.ask(PATIENCE_S) if row is not None and (raised or warnings) else ""
    said = checks.doctor_said(word)
    for alarm in raised:
        about = {"evidence": list(alarm.evidence), "advice": alarm.advice, **said}
        run.folder.events.emit("alarm", step=alarm.step, alarm=alarm.kind, **about)
        run.view.note(alarm.line)
    checks.tell(warnings, run.folder.events, run.view.note, word)
    if word:
        run.view.note(f"doctor: {word}")
    return [*raised, *warnings]


def tell_doctor(run: Run, step: int, word: str) -> None:
    """Tell and log what the doctor says behind an alarm."""
    if word:
        run.folder.events.emit("doctor", step=step, verdict=word)
        run.view.note(f"doctor: {word}")


def with_doctor(line: str, word: str) -> str:
    """A line for people, with the doctor's verdict if there is one."""
    return f"{line} Doctor: {word}" if word else line


def tell_graders(run: Run, step: int) -> dict[str, float]:
    """Metrics of the graders since the last step; those that are slow or do not agree with themselves are told and logged."""
    metrics, events = run.grader.report()
    for event in events:
        run.folder.events.emit(event.pop("event"), step=step, **event)
    if metrics["failures/grader_nondeterministic"]:
        differing = next(e for e in events if "values" in e)
        run.view.note(
            f"grader {differing['grader']}: rollout {differing['rollout']} was graded twice, with {differing['values'][0]} and"
            f" {differing['values'][1]}; see events.jsonl for all"
        )
    return metrics


def describe(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Lengths (tokens that the policy sampled) and endings of a step's rollouts."""
    if not rollouts:
        return {}
    lengths = np.array([r.span.own_count for r in rollouts])
    masks = [r.span.sampled for r in rollouts if r.span.sampled is not None]
    ends = sum(int(np.sum(mask[:-1] > mask[1:])) for mask in masks)  # of turns but the last
    played = {"rollout/turns_mean": 1 + ends / len(rollouts)} if masks else {}
    return played | {
        "rollout/length_mean": float(lengths.mean()),
        "rollout/length_max": float(lengths.max()),
        "rollout/length_min": float(lengths.min()),
        "rollout/truncated": float(np.mean([r.status == "length" for r in rollouts])),
        "rollout/tokens": float(lengths.sum()),
        "rollout/count": float(len(rollouts)),
    }


def by_source(names: Sequence[str], drawn: StepRollouts) -> dict[str, float]:
    """Mean reward of each source's rollouts in a step, and how many groups of it are trained."""
    metrics = {}
    for name in names:
        rewards = [r.reward for r in drawn.rollouts if r.prompt.task == name and r.reward is not None]
        if rewards:
            metrics[f"reward/{name}"] = float(np.mean(rewards))
        groups = {r.group for r in drawn.batch if r.prompt.task == name}
        metrics[f"source/{name}/groups"] = float(len(groups))
    return metrics
