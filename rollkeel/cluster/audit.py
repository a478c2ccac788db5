"""What a run trained, by its own files: no rollout twice, none lost, no token older than its loop allows.

Every step is asked for that while it runs (`record.oddities`, `rollout.feeder`). This shares nothing with the loop but its files, so that it
also sees what a killed and resumed run has forgotten.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollkeel.config import Config
from rollkeel.record.oddities import Stated
from rollkeel.record.rollout_store import per_token, read_step
from rollkeel.record.runfolder import METRICS, read_rows, rollout_files


@dataclass(frozen=True, kw_only=True)
class Audit:
    """Of all steps of a run."""

    trained: int
    """Rollouts."""
    twice: int
    """Those of them that several steps trained, or one several times."""
    lost: int
    """Rollouts that were begun before the last one that was trained, and that no file has; in `budgeted`, that ended and no file has."""
    later: int
    """Trained rollouts with tokens of weights that were not made when their step began."""
    oldest: int
    """Versions between the oldest token and the weights that its step began with."""
    limit: int | None
    """What `oldest` may be; None without a bound."""

    @property
    def fits(self) -> bool:
        return not (self.twice or self.lost or self.later) and (self.limit is None or self.oldest <= self.limit)

    def __str__(self) -> str:
        bound = "" if self.limit is None else f" of {self.limit}"
        told = f"{self.trained} rollouts trained, {self.twice} twice, {self.lost} lost; tokens up to {self.oldest}{bound} versions old"
        return told + (f", {self.later} rollouts from weights of later" if self.later else "")


def audit(run: Path, config: Config) -> Audit:
    """Of a run that wrote its rollouts (`report.rollouts`). Raises `Corrupt` for a damaged file."""
    rows = {row["step"]: row for row in read_rows(run / METRICS)[0]}
    trained, known = Counter[int](), set[int]()
    graded = later = oldest = 0
    for step, file in rollout_files(run):
        table = read_step(file, ["id", "versions", "keep"])
        ids, chosen = table["id"].to_pylist(), per_token(table, "keep")
        known.update(ids)
        graded += len(ids)
        trained.update(i for i in ids if i in chosen)
        begun = rows[step - 1]["version"]
        ages = [
            begun - versions for i, versions in per_token(table, "versions").items() if i in chosen and len(versions)
        ]
        oldest = max([oldest, *(int(age.max()) for age in ages)])
        later += sum(int(age.min()) < 0 for age in ages)
    if config.run.loop == "budgeted":
        lost = _sum(rows, "pool/finished") - _last(rows, "pool/held") - graded
    else:
        lost = max(known, default=-1) + 1 - len(known)
    failed = _sum(rows, "failures/grader", "failures/engine")
    limit = Stated.of(config, 0, None).oldest
    twice = sum(count > 1 for count in trained.values())
    return Audit(trained=len(trained), twice=twice, lost=lost - failed, later=later, oldest=oldest, limit=limit)


def _sum(rows: dict[int, dict[str, Any]], *names: str) -> int:
    return int(sum(row.get(name, 0) for row in rows.values() for name in names))


def _last(rows: dict[int, dict[str, Any]], name: str) -> int:
    return int(rows[max(rows)].get(name, 0)) if rows else 0
