"""What a run trained twice, lost or trained too late must be counted, or runs under faults that do it pass.

Files by hand with one mistake each. Not covered: runs (tests/cluster/test_cluster_faults.py, tests/test_budgeted.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollkeel.cluster.audit import Audit, audit
from rollkeel.recipe import load
from rollkeel.record.rollout_store import write_step
from rollkeel.types import GraderSpec, Prompt, Rollout, SamplingParams, Status, TokenSpan

Steps = Mapping[int, Sequence[tuple[int, Sequence[int]]]]
"""Id and versions of the tokens of every trained rollout, by step. A step begins with weights twice its number, less 2."""


def rollout(id: int, versions: Sequence[int]) -> Rollout:
    facts = {name: np.array(versions) for name in ("token_ids", "versions", "kv_versions")}
    floats = {name: np.zeros(len(versions), np.float32) for name in ("logprobs", "kept_mass")}
    prompt = Prompt(
        id="p", index=0, text="?", token_ids=np.array([8]), answer="1", grader=GraderSpec(name="exact"), task="t"
    )
    about: dict[str, Any] = {
        "sampling": SamplingParams(),
        "engine": "local",
        "dtype": "fp32",
        "text": "1",
        "reward": 1.0,
    }
    span = TokenSpan(**facts, **floats)
    return Rollout(id=id, group=id // 4, member=id % 4, prompt=prompt, span=span, status=Status.FINISHED, **about)


def audited(folder: Path, steps: Steps, *words: str, untrained: Sequence[int] = (), **last: float) -> Audit:
    (folder / "rollouts").mkdir()
    rows = [{"step": step, "version": 2 * step} for step in range(max(steps) + 1)]
    rows[-1] |= last
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for step, trained in steps.items():
        made = [rollout(i, versions) for i, versions in trained]
        keep = {i: np.ones(len(versions), bool) for i, versions in trained}
        more = [rollout(i, [2 * step - 2]) for i in untrained] if step == max(steps) else []
        write_step(folder / "rollouts" / f"step_{step:06}.parquet", [*made, *more], step=step, keep=keep)
    return audit(folder, load(None, ["rollout.overlap.max_staleness=3", *words]))


SOUND: Steps = {1: [(0, [0, 0]), (1, [0])], 2: [(2, [0, 2]), (3, [2])], 3: [(4, [1, 3]), (5, [4])]}


@pytest.mark.parametrize(
    ("steps", "wrong"),
    [
        (SOUND, {}),
        ({**SOUND, 3: [(4, [1]), (5, [4]), (1, [4])]}, {"twice": 1}),
        ({**SOUND, 3: [(4, [1]), (4, [1]), (5, [4])]}, {"twice": 1}),
        ({1: SOUND[1], 2: [(3, [2])], 3: SOUND[3]}, {"lost": 1, "trained": 5}),
        ({**SOUND, 3: [(4, [0, 4]), (5, [4])]}, {"oldest": 4}),
        ({**SOUND, 3: [(4, [4, 5]), (5, [4])]}, {"later": 1, "oldest": 2}),
    ],
)
def test_every_mistake_is_counted(steps: Steps, wrong: dict[str, int], tmp_path: Path) -> None:
    told = audited(tmp_path, steps, "run.loop=async")
    assert vars(told) == {"trained": 6, "twice": 0, "lost": 0, "later": 0, "oldest": 3, "limit": 3} | wrong
    assert told.fits == (not wrong)


def test_what_failed_or_was_not_chosen_is_not_lost(tmp_path: Path) -> None:
    """And the loop `sync` trains no token of older weights."""
    fresh: Steps = {step: [(i, [2 * step - 2]) for i, _ in trained] for step, trained in SOUND.items()}
    told = audited(tmp_path, fresh, "run.loop=sync", untrained=[6, 8], **{"failures/engine": 1.0})
    assert vars(told) == {"trained": 6, "twice": 0, "lost": 0, "later": 0, "oldest": 0, "limit": 0}
    assert told.fits


@pytest.mark.parametrize(("finished", "lost"), [(8.0, 0), (9.0, 1)])
def test_in_a_pool_what_ended_is_held_or_in_a_file(finished: float, lost: int, tmp_path: Path) -> None:
    told = audited(tmp_path, SOUND, "run.loop=budgeted", **{"pool/finished": finished, "pool/held": 2.0})
    assert (told.lost, told.limit, told.fits) == (lost, None, not lost)
    assert str(told).startswith(f"6 rollouts trained, 0 twice, {lost} lost; tokens up to 3 versions old")
