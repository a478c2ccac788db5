"""What no healthy step does: each step's rollouts and row are measured, and every row of `CHECKS` is asked about it.

`oddities.py` measures before the optimizer, `changeable` before anything is trained; what they measure are metrics of the
step's row, and a check is a rule over that row. So a resumed run that is shown its old rows goes on where the whole one was.
A check warns (`alarms.on_alarm` says what follows) after so many steps in a row, and may stop the run after more. Checks that
name an impossibility of the data (`early`) stop it before the weights are touched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rollkeel.errors import RunStopped
from rollkeel.events import EventLog
from rollkeel.models.routers import unreached_experts

Row = Mapping[str, Any]
WINDOW = 10
"""A check is told again after so many steps without it."""
MASKED, TRUNCATED, CHANGED, CHANGEABLE = 0.99, 0.95, 0.02, 0.5
"""Shares: of the tokens that masks were to leave, dropped; of answers, cut; both above which, and of weights that an update changed
and could change, below which something is wrong. Healthy float32 runs change 0.3 to 1 of the weights (experts without tokens keep
theirs)."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """A rule over one row: the evidence in one line, or empty."""

    name: str
    rule: Callable[[Row], str]
    advice: str
    after: int = 1
    """Steps in a row after which it is said."""
    stop: int = 0
    """Steps in a row after which the run stops; 0 never."""
    early: bool = False
    """Asked before the update; it stops the run there."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A check that was raised."""

    check: str
    step: int
    evidence: str
    advice: str
    stops: bool = False

    @property
    def line(self) -> str:
        return f"check at step {self.step}: {self.check}: {self.evidence}. {self.advice}"


def _signal(row: Row) -> float:
    """Groups whose rewards differ."""
    return row.get("groups/count", 0.0) - row.get("groups/zero_variance", 0.0)


def _when(key: str, text: str) -> Callable[[Row], str]:
    """True for a count that should be 0."""
    return lambda row: text.format(row[key]) if row.get(key, 0) > 0 else ""


def _credit(row: Row) -> float:
    """Share of the trained rollouts that have an advantage: some estimators give none where rewards differ, or some where none do."""
    return row.get("advantages/nonzero", 0.0)


def _no_signal(row: Row) -> str:
    if not row.get("groups/count") or _signal(row) or _credit(row):
        return ""
    spread = "" if row.get("reward/std") else f", all rewards are {row.get('reward/mean', 0.0):.3g}"
    return f"no group of {row['groups/count']:.0f} has rewards that differ{spread}"


def _gradient(row: Row) -> str:
    credit = row.get("advantages/kept", _credit(row))  # a mask may keep a few tokens, none of them with credit
    learns = row.get("optimizer/updates") and credit and row.get("objective/kept", 1.0) > 1 - MASKED
    return "the gradient is 0 where advantages are not" if learns and row.get("optimizer/grad_norm") == 0 else ""


def _no_credit(row: Row) -> str:
    return "rewards differ and every advantage is 0" if _signal(row) and row.get("advantages/nonzero") == 0 else ""


def _changed(row: Row) -> float | None:
    """Share of weights that a real update changed. None where nothing could be expected: no gradient, or hardly a learning rate."""
    lr = row.get("optimizer/lr", 0.0)
    return (
        row.get("optimizer/changed_share")
        if row.get("optimizer/grad_norm", 0.0) > 0 and lr >= 0.1 * row["peak_lr"] and lr > 0
        else None
    )


def _truncated(row: Row) -> str:
    share = row.get("rollout/truncated", 0.0)
    return f"{share:.0%} of the answers end at the length limit" if share >= TRUNCATED and not _signal(row) else ""


def _masked(row: Row) -> str:
    share = row.get("mask/dropped_share", 0.0)
    return f"masks drop {share:.2%} of the tokens" if 1 - share <= (1 - MASKED) * row["left"] else ""


def _parted(row: Row) -> str:
    gap = row.get("mismatch/equal_version/logprob_abs_diff", 0.0)
    return f"log-probs of fresh tokens differ by {gap:.3g} nats on average" if row["parity"] and gap != 0 else ""


CHECKS = (
    Check(
        name="repeated_ids",
        rule=_when("rollout/repeated_ids", "{:.0f} rollouts have an id that another one of the step has"),
        advice="Data reach the trainer twice: look at what collects rollouts.",
        stop=1,
        early=True,
    ),
    Check(
        name="unstopped",
        rule=_when("rollout/unstopped", "{:.0f} rollouts are called finished and do not end with a stop token"),
        advice="The engine cuts answers or drops their last token: return status `length` for a cut, and the stop token with a whole one.",
        stop=1,
        early=True,
    ),
    Check(
        name="duplicates",
        rule=_when("rollout/duplicates", "{:.0f} rollouts repeat another of their prompt, which the policy's probabilities rule out"),
        advice="Look for requests with the same random numbers, or data that are collected twice.",
    ),
    Check(
        name="credit",
        rule=_when("rollout/miscredited", "{:.0f} rollouts have less advantage than one of their group with a lower reward"),
        advice="Advantages do not belong to their rollouts: look at the order of rollouts and advantages.",
    ),
    Check(
        name="same_prompt",
        rule=_when("rollout/same_prompt", "all {:.0f} groups have the same prompt"),
        advice="Look at the data source: every step should have other prompts.",
        after=3,
    ),
    Check(
        name="empty_rewarded",
        rule=_when("rollout/empty_rewarded", "{:.0f} answers without text have the highest reward of the step"),
        advice="Look at the grader: rollkeel tasks check TASK.",
    ),
    Check(
        name="right_unrewarded",
        rule=_when("rollout/right_unrewarded", "{:.0f} answers that are the gold answer to the letter got no reward"),
        advice="Look at the grader: rollkeel tasks check TASK.",
        after=2,
    ),
    Check(
        name="no_signal",
        rule=_no_signal,
        advice="Nothing is learnt from it: make the task easier or harder, warm-start longer, or look at the grader.",
        after=10,
    ),
    Check(
        name="gradient",
        rule=_gradient,
        advice="The loss does not depend on the model, or clips and weights cancel all of it: look at the objective.",
        stop=5,
    ),
    Check(
        name="no_credit",
        rule=_no_credit,
        advice="Nothing is learnt from these steps: look at the advantage estimator, or take one that pays every difference (grpo, rloo).",
        after=3,
    ),
    Check(
        name="unchanged",
        rule=lambda row: "the update left every weight as it was" if _changed(row) == 0 else "",
        advice="The optimizer does not step, or train.lr is below float32's precision: raise train.lr.",
        stop=2,
    ),
    Check(
        name="update_too_small",
        rule=lambda row: f"an update changed {share:.2%} of the weights" if 0 < (share := _changed(row) or 0) < CHANGED else "",
        advice="Float32 cannot follow: raise train.lr.",
        after=2,
    ),
    Check(
        name="masked",
        rule=_masked,
        advice="Hardly anything is trained: widen the objective's thresholds, or lower the staleness or the engine's rounding.",
        after=3,
    ),
    Check(
        name="all_masked",
        rule=lambda row: "masks drop every token" if row.get("mask/dropped_share", 0.0) >= 1 else "",
        advice="Nothing is trained: widen the objective's thresholds, or lower the staleness or the engine's rounding.",
        after=3,
        stop=20,
    ),
    Check(
        name="parity",
        rule=_parted,
        advice="Under run.parity both sides have the same bits, so this is a fault: rollkeel analyze RUN names where they part.",
        stop=1,
    ),
    Check(
        name="truncated",
        rule=_truncated,
        advice="No answer may fit: raise sampling.max_new_tokens, or warm-start until answers end.",
        after=5,
    ),
)  # fmt: skip


class Checks:
    """Sees a run's rows in order."""

    def __init__(self, peak_lr: float = 0.0, left: float = 1.0, *, parity: bool = False) -> None:
        """`peak_lr`: learning rate after the warm-up; at a tenth of it weights may well stay as they are. `left`: share of the
        tokens that masks are asked to leave. `parity`: of `run.parity`."""
        self._asked = {"peak_lr": peak_lr, "left": left, "parity": float(parity)}
        self._streak: Counter[str] = Counter()
        self._said: dict[str, int] = {}
        self._steps = 0

    def refuse(self, step: int, metrics: Row) -> list[Finding]:
        """Findings that must stop the run before its update."""
        return [f for check in CHECKS if check.early for f in self._found(check, step, metrics, 1)]

    def observe(self, row: Row) -> tuple[dict[str, float], list[Finding]]:
        """`checks/<name>` = 1 for every check that is raised in this row, and those to tell: new ones, and ones that stop."""
        step = int(row["step"])
        if step < 1:
            return {}, []
        self._steps += 1
        row = {**row, **self._asked}
        metrics, told = dict[str, float](), list[Finding]()
        for check in CHECKS:
            self._streak[check.name] = self._streak[check.name] + 1 if check.rule(row) else 0
            for finding in self._found(check, step, row, self._streak[check.name]):
                metrics[f"checks/{check.name}"] = 1.0
                last = self._said.get(check.name)
                self._said[check.name] = step
                if finding.stops or last is None or step - last > WINDOW:
                    told.append(finding)
        return metrics, told

    def at_end(self, step: int) -> list[Finding]:
        """What a run that was too short to be told is told at its end: no step had a signal."""
        check = next(c for c in CHECKS if c.name == "no_signal")
        if not 0 < self._steps == self._streak[check.name] or check.name in self._said:
            return []
        return [
            Finding(
                check=check.name,
                step=step,
                evidence="no step had a group with rewards that differ",
                advice=check.advice,
            )
        ]

    @staticmethod
    def _found(check: Check, step: int, row: Row, streak: int) -> Iterator[Finding]:
        evidence = check.rule(row)
        if evidence and streak >= check.after:
            stops = 0 < check.stop <= streak
            yield Finding(check=check.name, step=step, evidence=evidence, advice=check.advice, stops=stops)


@torch.no_grad()
def changeable(parameters: Sequence[torch.Tensor], lr: float) -> tuple[float, int]:
    """Of how many float32 masters: those that a step of `lr` can change, for which it must be more than half a unit in their last
    place, and all."""
    able, total = 0.0, 0
    for p in parameters:
        part = p.detach().reshape(-1)[:: p.numel() // 4096 | 1]  # an odd stride meets every column
        _, exponent = torch.frexp(part.float())
        half = torch.ldexp(torch.full_like(part, torch.finfo(torch.float32).eps / 4, dtype=torch.float32), exponent)
        able += int(((half < lr) | (part == 0)).sum()) * p.numel() / max(part.numel(), 1)
        total += p.numel()
    return able, total


def unreached(model: torch.nn.Module) -> list[Finding]:
    """Before anything is trained: a mixture of experts whose routing is out of reach (`experts_not_found`)."""
    name = unreached_experts(model)
    evidence = (
        f"{type(model).__name__} has routed experts ({name}), none of them behind transformers' experts interface"
    )
    advice = "There are no routing/* metrics and no routing replay; use a transformers that has this family in it."
    return [Finding(check="experts_not_found", step=0, evidence=evidence, advice=advice)] if name else []


def too_small(
    parameters: Sequence[torch.Tensor], lr: float, everyone: Callable[[Any], list[Any]] = lambda own: [own]
) -> list[Finding]:
    """Before anything is trained: weights whose precision `lr` cannot reach (`update_too_small`). `everyone`: brings together what
    ranks count that hold some of them each."""
    able, total = map(sum, zip(*everyone(changeable(parameters, lr)), strict=True))
    share = able / max(total, 1)
    if share >= CHANGEABLE:
        return []
    check = next(c for c in CHECKS if c.name == "update_too_small")
    evidence = f"train.lr={lr:g} is below half a unit in the last place of {1 - share:.0%} of the weights, in float32"
    return [Finding(check=check.name, step=0, evidence=evidence, advice=check.advice)]


def untold(evidence: str) -> list[Finding]:
    """Before anything is trained: rewards that do not tell right from wrong (`reward_untold`), where there is `evidence`."""
    advice = "A policy that learns from it need not answer: look at the grader and the answers."
    return [Finding(check="reward_untold", step=0, evidence=evidence, advice=advice)] if evidence else []


def tell(findings: Sequence[Finding], events: EventLog, note: Callable[[str], None]) -> None:
    """Log and say each; those that stop the run are said by its end. Raises `RunStopped` for the first of those."""
    for f in findings:
        events.emit("check", step=f.step, check=f.check, evidence=[f.evidence], advice=f.advice)
        if not f.stops:
            note(f.line)
    for f in findings:
        if f.stops:
            raise RunStopped(f.line)
