"""Whole runs on a card: what `test_pretend_device.py` proves of devices, with real kernels, streams and dtypes.

Every loop with every model and dtype, and the settings beside them; each must end, with finite numbers, the proven weights in the
engine, and log-probs of engine and trainer as near as their dtypes allow. Not covered: speed, memory, several cards, servers.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from device_runs import LOOPS, MODELS, NUMBERS, ON_A_CARD, RUNS, TINY, combined

from rollkeel.loop import job
from rollkeel.recipe import load

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
NEAR = {"fp32": 1e-3, "bf16": 0.1, "fp16": 0.03, "int8": 0.3, "lora": 1e-3}
"""Most that an importance ratio of fresh tokens spreads: random models, so nearly flat distributions."""


def ran(settings: list[str], folder: Path) -> list[dict[str, float]]:
    job.train(load("default", [*TINY, *settings, "run.device=cuda", f"run.dir={folder}"]))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] == int(next((s.split("=")[1] for s in reversed(settings) if s.startswith("run.steps=")), 1))
    for row in rows:
        assert all(math.isfinite(v) for v in row.values() if isinstance(v, float)), row
    return rows


@pytest.mark.parametrize("name", RUNS | ON_A_CARD)
def test_a_run_ends_on_a_card(name: str, tmp_path: Path) -> None:
    ran((RUNS | ON_A_CARD)[name], tmp_path / "run")


@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("loop", LOOPS)
def test_every_loop_with_every_model_and_dtype(loop: str, model: str, numbers: str, tmp_path: Path) -> None:
    rows = ran(combined(loop, model, numbers), tmp_path / "run")
    fresh = [r["mismatch/equal_version/ratio_std"] for r in rows if "mismatch/equal_version/ratio_std" in r]
    assert all(value < NEAR[numbers] for value in fresh), fresh
