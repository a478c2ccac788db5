"""How hard a prompt is for a policy: the share of its graded rollouts that passed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rollkeel.data.features import digest, spaced
from rollkeel.data.normalise import clean
from rollkeel.data.options import PassRateOptions
from rollkeel.errors import BadInput

BUCKETS = ((0.0, "unsolved"), (0.25, "hard"), (0.75, "medium"), (1.0, "easy"))
"""Largest pass rate of each bucket, the last one exclusive; a rate of 1 is `solved`."""


@dataclass(frozen=True)
class Rate:
    passed: int
    attempts: int

    @property
    def share(self) -> float:
        return self.passed / self.attempts

    @property
    def bucket(self) -> str:
        return next((name for most, name in BUCKETS if self.share <= most < 1 or self.share < most), "solved")


def prompt_key(text: str) -> int:
    """What identifies a prompt: its hash, cleaned and with white space as single spaces."""
    return digest(spaced(text))


def pass_rates(options: PassRateOptions) -> Mapping[int, Rate]:
    """Pass rate by `prompt_key` over all rollouts that have a reward. Raises `BadInput` when there are none."""
    passed, attempts = Counter[int](), Counter[int]()
    for file in rollout_files(options):
        for text, reward in _graded(file):
            key = prompt_key(clean(text.removeprefix(options.prefix).removesuffix(options.suffix)))
            passed[key] += reward >= options.passed
            attempts[key] += 1
    if options.rollouts and not attempts:
        raise BadInput(f"pass_rate.rollouts: {', '.join(options.rollouts)} holds no graded rollouts; name a run folder")
    return {key: Rate(passed[key], count) for key, count in attempts.items()}


def rollout_files(options: PassRateOptions) -> list[Path]:
    """Parquet files behind `pass_rate.rollouts`. Raises `BadInput` for a path without any."""
    rollouts: list[Path] = []
    for name in options.rollouts:
        path = Path(name).expanduser()
        files = [path] if path.is_file() else sorted(path.glob("rollouts/*.parquet")) or sorted(path.glob("*.parquet"))
        if not files:
            raise BadInput(f"pass_rate.rollouts {name}: no parquet files; name a run folder, a folder of them or one")
        rollouts += files
    return rollouts


def _graded(file: Path) -> list[tuple[str, float]]:
    try:
        table = pq.read_table(file, columns=["prompt_text", "reward"])
    except (pa.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise BadInput(f"pass_rate.rollouts {file}: expected rollouts with prompt_text and reward: {reason}") from None
    texts, rewards = table["prompt_text"].to_pylist(), table["reward"].to_numpy(zero_copy_only=False).astype(float)
    return [(texts[i], float(rewards[i])) for i in np.flatnonzero(np.isfinite(rewards)).tolist()]
