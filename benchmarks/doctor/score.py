"""The doctor's answers against what was injected: confusion matrix, accuracy, false alarms."""

from __future__ import annotations

import csv
import json
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.doctor.cases import HEALTHY, Case
from benchmarks.doctor.faults import FAULTS
from benchmarks.doctor.measure import effects, real

TARGET = 0.95


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What the doctor said of one run."""

    split: str
    fault: str
    kind: str
    base: str
    model: str
    seed: int
    named: str
    """First cause, or `healthy`."""
    causes: tuple[str, ...]
    bug: str
    """First cause that is a bug, or empty."""
    real: bool
    """Whether the fault left anything in the record (`measure.real`), decided without the doctor; True of healthy runs."""
    score: float
    seconds: float
    tokens: int
    path: str
    wanted: tuple[str, ...] = ()
    """What else would be right than `fault`."""

    @property
    def right(self) -> bool:
        return self.named in (self.fault, *self.wanted)


def ask(case: Case, root: Path) -> Answer:
    """The doctor's answer on a run that is there."""
    from rollkeel.diagnose.recompute import refine
    from rollkeel_doctor import diagnose
    from rollkeel_doctor.traces.read import read_trace

    trace = read_trace(case.path(root))
    began = time.perf_counter()
    diagnosis: Any = refine(diagnose(trace), case.path(root))
    seconds = time.perf_counter() - began
    causes = list(diagnosis.causes)
    named = causes[0].id if causes else HEALTHY if diagnosis.healthy else "not examined"
    bugs = [c.id for c in causes if c.kind == "bug"]
    return Answer(
        split=case.split,
        fault=case.fault,
        kind=case.kind,
        base=case.base,
        model=case.model,
        seed=case.seed,
        named=named,
        causes=tuple(c.id for c in causes),
        bug=bugs[0] if bugs else "",
        real=case.fault == HEALTHY or real(case.fault, effects(trace)),
        score=float(causes[0].score) if causes else 0.0,
        seconds=seconds,
        tokens=len(trace),
        path=str(case.path(root)),
        wanted=case.wanted,
    )


def ask_all(cases: Sequence[Case], root: Path, jobs: int) -> list[Answer]:
    """Answers on all cases, in order."""
    if jobs == 1:
        return [ask(case, root) for case in cases]
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        return list(pool.map(ask, cases, [root] * len(cases)))


def matrix(answers: Sequence[Answer]) -> str:
    """Rows: what was injected; columns: what was named first."""
    names = [*FAULTS, *sorted({a.fault for a in answers} - {*FAULTS, HEALTHY}), HEALTHY]
    rows = [name for name in names if any(a.fault == name for a in answers)]
    columns = [name for name in names if any(a.named == name for a in answers)]
    columns += sorted({a.named for a in answers} - set(columns))
    count = Counter((a.fault, a.named) for a in answers)
    width = max(map(len, [*rows, "injected"]))
    lines = [" " * width + "  " + " ".join(f"{i + 1:>3d}" for i in range(len(columns)))]
    for row in rows:
        cells = " ".join(f"{count[row, c] or '.':>3}" for c in columns)
        total = sum(count[row, c] for c in columns)
        lines.append(f"{row:<{width}}  {cells}   {count[row, row]}/{total}")
    lines += ["", *(f"  column {i + 1}: {name}" for i, name in enumerate(columns))]
    return "\n".join(lines)


def summary(answers: Sequence[Answer]) -> dict[str, Any]:
    """Accuracy over real faults and over all, per fault and per magnitude; false alarms of bugs on healthy runs."""
    every, well = [a for a in answers if a.fault != HEALTHY], [a for a in answers if a.fault == HEALTHY]
    ill = [a for a in every if a.real]

    def share(of: Sequence[Answer]) -> float:
        return sum(a.right for a in of) / len(of) if of else 1.0

    return {
        "faults": len(ill),
        "accuracy": share(ill),
        "not_real": len(every) - len(ill),
        "accuracy_of_all": share(every),
        "by_fault": {name: share([a for a in ill if a.fault == name]) for name in {a.fault for a in ill}},
        "by_magnitude": {
            f"{f} {k}": share([a for a in ill if (a.fault, a.kind) == (f, k)])
            for f, k in sorted({(a.fault, a.kind) for a in ill})
        },
        "healthy": len(well),
        "said_healthy": share(well),
        "false_alarms": Counter(f"{a.kind}: {a.bug}" for a in well if a.bug),
        "seconds": sum(a.seconds for a in answers),
        "tokens": sum(a.tokens for a in answers),
    }


def report(answers: Sequence[Answer], out: Path | None) -> bool:
    """Print everything and write `out`.json and `out`.csv; True if the targets are met."""
    found = summary(answers)
    print(matrix(answers))
    for label, shares in (("fault", found["by_fault"]), ("magnitude", found["by_magnitude"])):
        low = {name: value for name, value in shares.items() if value < TARGET}
        print(f"\nbelow {TARGET:.0%} by {label}: " + (", ".join(f"{n} {v:.0%}" for n, v in low.items()) or "none"))
    for a in answers:
        if not a.right and (a.fault != HEALTHY or a.bug):
            unreal = "" if a.real else " (not real)"
            print(f"  {a.fault} ({a.kind}, {a.base}){unreal} → {', '.join(a.causes[:3]) or HEALTHY}: {a.path}")
    alarms = sum(found["false_alarms"].values())
    print(
        f"\n{found['faults']} real faults: {found['accuracy']:.1%} named first (target {TARGET:.0%}), with {found['not_real']} that"
        f" are not real {found['accuracy_of_all']:.1%};"
        f" {found['healthy']} healthy runs: {alarms} false alarms of a bug (target 0) {dict(found['false_alarms']) or ''};"
        f" {found['seconds']:.1f} s for {found['tokens']:,} tokens"
    )
    if out is not None:
        out.with_suffix(".json").write_text(json.dumps({**found, "matrix": matrix(answers)}, indent=1) + "\n")
        with out.with_suffix(".csv").open("w", newline="") as stream:
            writer = csv.DictWriter(stream, fieldnames=list(asdict(answers[0])))
            writer.writeheader()
            joined = ({"causes": " ".join(a.causes), "wanted": " ".join(a.wanted)} for a in answers)
            writer.writerows(asdict(a) | words for a, words in zip(answers, joined, strict=True))
    return found["accuracy"] >= TARGET and not alarms
