"""What a reader asks first: did it learn, did anything warn, is anything broken. One line each, with what stands behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rollkeel.record.runfolder import rollout_files
from rollkeel.report.charts import Rows, is_number, matching
from rollkeel.report.run_files import RunFiles
from rollkeel_doctor import diagnose
from rollkeel_doctor.traces.run import read_run_trace

Tone = Literal["good", "bad", "warn", "plain"]
MAX_ROLLOUT_BYTES = 100_000_000
"""Of recorded rollouts that the page's diagnosis reads, the last ones: 5 s of a run's end. `rollkeel doctor` reads all."""
_STEPS = 10
"""Steps at each end whose mean training reward is compared where nothing was evaluated."""
_WIDE = 1.96
"""Standard errors to each side of a 95 % interval."""


@dataclass(frozen=True, kw_only=True)
class Word:
    """One line of the verdict."""

    about: str
    tone: Tone
    text: str
    more: tuple[str, ...] = ()
    """Evidence, one line each."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """First against last value of a score, with the half-width of the difference's 95 % interval."""

    name: str
    first: float
    last: float
    half: float
    start: str
    """Where the first value stands: `step 0`, `steps 1–10`."""
    end: str
    best: str = ""
    """Where it was clearly better than at the end; empty if nowhere."""

    @property
    def word(self) -> str:
        """`learned`, `got worse` or `did not learn`."""
        low, high = self.last - self.first - self.half, self.last - self.first + self.half
        return "learned" if low > 0 else "got worse" if high < 0 else "did not learn"

    @property
    def line(self) -> str:
        """For example: runsum avg@k 0.314 → 0.934, +0.620 (95 % interval +0.571 to +0.669), step 0 to step 150."""
        change = self.last - self.first
        interval = f"95 % interval {change - self.half:+.3f} to {change + self.half:+.3f}"
        return f"{self.name} {self.first:.3f} → {self.last:.3f}, {change:+.3f} ({interval}), {self.start} to {self.end}{self.best}"


def changes(rows: Rows) -> list[Change]:
    """Of every evaluated task; of the training reward where none was evaluated twice; nothing for a run too short.

    The two evaluations count as independent: they share their items, so that the interval is rather too wide.
    """
    evaluated = [_evaluated(rows, key) for key in matching(rows, ("eval/*/avg@k",))]
    return [c for c in evaluated if c is not None] or _rewarded(rows)


def _evaluated(rows: Rows, key: str) -> Change | None:
    held = [row for row in rows if is_number(row.get(key))]
    if len(held) < 2:
        return None
    # Of one item nobody knows the error: at most half of the scale.
    errors = [float(row[f"{key}_se"]) if is_number(row.get(f"{key}_se")) else 0.5 for row in held]
    best = max(range(len(held)), key=lambda i: held[i][key])
    lost = held[best][key] - held[-1][key] > _WIDE * np.hypot(errors[best], errors[-1])
    return Change(
        name=f"{key.split('/')[1]} avg@k",
        first=held[0][key],
        last=held[-1][key],
        half=_WIDE * float(np.hypot(errors[0], errors[-1])),
        start=f"step {held[0]['step']}",
        end=f"step {held[-1]['step']}",
        best=f"; best {held[best][key]:.3f} at step {held[best]['step']}" if lost and best else "",
    )


def _rewarded(rows: Rows) -> list[Change]:
    found = [(row["step"], float(row["reward/mean"])) for row in rows if is_number(row.get("reward/mean"))]
    count = min(_STEPS, len(found) // 2)
    if count < 2:
        return []
    ends = (found[:count], found[-count:])
    means = [float(np.mean([value for _, value in end])) for end in ends]
    errors = [float(np.std([value for _, value in end], ddof=1)) / count**0.5 for end in ends]
    start, end = (f"steps {e[0][0]}–{e[-1][0]}" for e in ends)
    half = _WIDE * float(np.hypot(*errors))
    return [Change(name="training reward", first=means[0], last=means[1], half=half, start=start, end=end)]


def verdict(run: RunFiles) -> list[Word]:
    """Learning, alarms, doctor; only what the run has something to say about."""
    return [*of_metrics(run), *_doctor(run.path)] if run.rows else []


def of_metrics(run: RunFiles) -> list[Word]:
    """Learning and alarms of a run with rows: what needs no token."""
    tones: dict[str, Tone] = {"learned": "good", "got worse": "bad", "did not learn": "warn"}
    words = [Word(about=c.word.capitalize(), tone=tones[c.word], text=f"{c.line}.") for c in changes(run.rows)[:3]]
    unknown = Word(about="Learning", tone="plain", text="Too early to say: fewer than two evaluations or four steps.")
    return [*(words or [unknown]), _alarms(run)]


def _alarms(run: RunFiles) -> Word:
    alarms = [event for event in run.events if event.get("event") in ("alarm", "check")]
    section = run.config.get("alarms")
    if isinstance(section, Mapping) and section.get("on_alarm") == "off":
        return Word(about="Alarms", tone="plain", text="Switched off (alarms.on_alarm=off).")
    if not alarms:
        return Word(about="Alarms", tone="good", text="None.")
    kinds = ", ".join(f"{a.get('alarm', a.get('check'))} at step {a.get('step')}" for a in alarms[:8])
    more = f" and {len(alarms) - 8} more" if len(alarms) > 8 else ""
    lines = [
        f"Step {a.get('step')}: {_sentence(a.get('evidence'))} {a.get('advice', '')}{_said(a)}" for a in alarms[:8]
    ]
    late = [event for event in run.events if event.get("event") == "doctor" and event.get("verdict")]
    lines += [f"Doctor, asked before step {e.get('step')} ended: {e['verdict']}" for e in late[-4:]]
    return Word(about="Alarms", tone="warn", text=f"{len(alarms)}: {kinds}{more}.", more=tuple(lines))


def _said(alarm: Mapping[str, Any]) -> str:
    return f" Doctor: {alarm['doctor']}" if alarm.get("doctor") else ""


def _doctor(path: Path) -> list[Word]:
    files = [file for _, file in rollout_files(path)]
    if not files:
        return []
    last = last_steps(files)
    part = f" Of the last {last} steps; rollkeel doctor RUN reads all." if last < len(files) else ""
    try:
        found = diagnose(read_run_trace(path, last=last))
    except Exception as error:  # A page without its doctor is still a page.
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        return [Word(about="Doctor", tone="warn", text=f"Could not say: {reason}. rollkeel doctor RUN tells more.")]
    tone: Tone = "warn" if found.healthy is None else "good" if found.healthy else "bad"
    lines = [f"{c.id}: {c.evidence} Do: {c.advice}" for c in found.causes] or found.observed
    text = f"{found.verdict.rstrip('.')}.{part}"
    return [Word(about="Doctor", tone=tone, text=text, more=tuple(lines))]


def last_steps(files: Sequence[Path]) -> int:
    """How many of the last rollouts files hold `MAX_ROLLOUT_BYTES` in all, at least one."""
    size = np.cumsum([file.stat().st_size for file in reversed(files)])
    return max(int(np.searchsorted(size, MAX_ROLLOUT_BYTES, side="right")), 1)


def _sentence(evidence: Any) -> str:
    parts = [str(part) for part in evidence] if isinstance(evidence, Sequence) and not isinstance(evidence, str) else []
    return f"{'; '.join(parts)}." if parts else ""
