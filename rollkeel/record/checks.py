"""What no healthy step does: each step's rollouts and row are measured, and every row of `CHECKS` is asked about it.

`oddities.py` measures before the optimizer, `changeable` before anything is trained; what they measure are metrics of the
step's row, and a check is a rule over that row. So a resumed run that is shown its old rows goes on where the whole one was.
A check warns (`alarms.on_alarm` says what follows) after so many steps in a row, and may stop the run after more. Checks that
name an impossibility of the data (`early`) stop it before the weights are touched, unless `alarms.on_impossible` only warns; so do
those of `train/soundness.py`, which need the pass or its gradient.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rollkeel.config import Config
from rollkeel.errors import Impossible, StoppedByCheck
from rollkeel.events import EventLog
from rollkeel.models.routers import unreached_experts
from rollkeel.record.check_table import CHANGEABLE, CHECKS, RECENT, REMEMBERED, Check, Row, advice

WINDOW = 10
"""A check is told again after so many steps without it."""


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


class Usual:
    """What is usual, from the steps so far."""

    def __init__(self) -> None:
        self._groups: deque[tuple[float, float, float]] = deque(maxlen=RECENT)
        self._gaps: deque[float] = deque(maxlen=RECENT)
        self._unlikely = 0.0

    def observe(self, row: Row) -> dict[str, float]:
        """What rules compare a row with; nothing where too little came before."""
        return {**self._rewards(row), **self._gap(row)}

    def _gap(self, row: Row) -> dict[str, float]:
        """The gap between engine and trainer for its staleness, over the largest of recent steps."""
        gap = row.get("mismatch/logprob_abs_diff")
        if gap is None:
            return {}
        gap, most = gap / (1 + row.get("staleness/mean", 0.0)), max(self._gaps, default=0.0)
        known = len(self._gaps) > 1 and most > 0
        self._gaps.append(gap)
        return {"gap_times": gap / most} if known else {}

    def _rewards(self, row: Row) -> dict[str, float]:
        """Of a step that has equal rewards alone, lower than usual: how unlikely it and those like it before are by chance, in nats.

        Each of its groups would have equal rewards with the share that recent groups had them."""
        groups, mean = row.get("groups/count", 0.0), row.get("reward/mean", 0.0)
        if not groups:
            return {}
        if row.get("reward/std", 0.0) > 1e-9 * max(1.0, abs(mean)):
            self._groups.append((groups, row.get("groups/zero_variance", 0.0), mean))
            self._unlikely = 0.0
            return {}
        usual = sum(mean for *_, mean in self._groups) / max(len(self._groups), 1)
        if len(self._groups) < RECENT // 4 or mean >= usual:
            return {}
        every, equal = (sum(row[i] for row in self._groups) for i in (0, 1))
        self._unlikely -= groups * math.log((equal + 1) / (every + 2))
        return {"unlikely": self._unlikely, "usual": usual}


class Checks:
    """Sees a run's rows in order."""

    def __init__(
        self, peak_lr: float = 0.0, left: float = 1.0, *, parity: bool = False, pooled: bool = False, stops: bool = True
    ) -> None:
        """`peak_lr`: learning rate after the warm-up; at a tenth of it weights may well stay as they are. `left`: share of the
        tokens that masks are asked to leave. `parity`: of `run.parity`; `pooled`: a step may have no rollouts; `stops`: whether
        `early` checks do."""
        self._asked = {"peak_lr": peak_lr, "left": left, "parity": float(parity), "pooled": float(pooled)}
        self._stops = stops
        self._usual = Usual()
        self._before = -1.0
        self._trained: deque[tuple[int, frozenset[int]]] = deque(maxlen=REMEMBERED)
        self._streak: Counter[str] = Counter()
        self._said: dict[str, int] = {}
        self._steps = 0

    @classmethod
    def of(cls, config: Config, left: float) -> Checks:
        """Those of a run."""
        stops, pooled = config.alarms.on_impossible == "stop", config.run.loop == "budgeted"
        return cls(config.train.lr, left, parity=config.run.parity, pooled=pooled, stops=stops)

    def refuse(self, step: int, metrics: Row) -> list[Finding]:
        """Findings that must stop the run before its update."""
        return [f for check in CHECKS if check.early for f in self._found(check, step, metrics, 1) if f.stops]

    def beside(self, step: int, metrics: Row) -> list[Finding]:
        """What a step that is stopped would have been warned of."""
        row = {**metrics, **self._asked}
        return [f for check in CHECKS for f in self._found(check, step, row, 1) if not f.stops]

    def trained(self, step: int, ids: Sequence[int]) -> dict[str, float]:
        """`rollout/trained_before`: how many of these rollouts of `step` another step had, of the last `REMEMBERED`."""
        again = sum(any(i in had for other, had in self._trained if other != step) for i in ids)
        self._trained.append((step, frozenset(ids)))
        return {"rollout/trained_before": float(again)} if again else {}

    def observe(self, row: Row) -> tuple[dict[str, float], list[Finding]]:
        """`checks/<name>` = 1 for every check that is raised in this row, and those to tell: new ones, and ones that stop."""
        step = int(row["step"])
        if step < 1:
            self._before = row.get("version", -1.0)
            return {}, []
        self._steps += 1
        row = {**row, **self._asked, **self._usual.observe(row), "before": self._before}
        self._before = row.get("version", -1.0)
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

    def _found(self, check: Check, step: int, row: Row, streak: int) -> Iterator[Finding]:
        evidence = check.rule(row)
        if evidence and streak >= check.after:
            stops = 0 < check.stop <= streak and (self._stops or not check.early)
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


def refused(error: Impossible, step: int) -> Finding:
    """What stopped the update of `step`."""
    return Finding(check=error.check, step=step, evidence=str(error), advice=advice(error.check), stops=True)


def doctor_said(word: str) -> dict[str, str]:
    """The doctor's verdict, as alarms carry it in the log."""
    return {"doctor": word} if word else {}


def tell(findings: Sequence[Finding], events: EventLog, note: Callable[[str], None], doctor: str = "") -> None:
    """Log and say each; those that stop the run are said by its end. Raises `StoppedByCheck` for the first of those."""
    for f in findings:
        about = {"evidence": [f.evidence], "advice": f.advice, **doctor_said(doctor)}
        events.emit("check", step=f.step, check=f.check, **about)
        if not f.stops:
            note(f.line)
    for f in findings:
        if f.stops:
            raise StoppedByCheck(f.line)
