"""Stage 9: whole steps of GRPO, seconds by part."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.gpu import models, rl
from benchmarks.gpu.bench import Bench
from rollkeel import tasks
from rollkeel.types import SamplingParams

PARTS = ("rollout", "grading", "update", "sync")


def run(bench: Bench) -> None:
    bench.attempt("GRPO step, Qwen3-0.6B", steps, least=15.0)


def loop(bench: Bench, made: Any, groups: int, samples: int, new: int, stop: bool, **train: Any) -> rl.Loop:
    task = tasks.get("runsum", {"digits": 4 if bench.toy else 6})
    sampling = SamplingParams(max_new_tokens=new, stop_token_ids=(2,) if stop else ())
    engine = models.engine(bench, made, groups * samples, new + 64)
    publisher, _ = models.publisher(engine, made)
    trainer = rl.trainer(bench, made, micro_batch_tokens=16_384, **train)
    return rl.Loop(bench, made, task, engine, publisher, trainer, groups, samples, sampling)


def steps(bench: Bench) -> None:
    """Answers of forced length, so that every step is the same work."""
    groups, samples, new = (2, 2, 8) if bench.toy else (32, 8, 512)
    made = loop(bench, models.policy(bench, "Qwen3-0.6B"), groups, samples, new, False, lr=1e-6)
    for number in range(1 if bench.toy else 3):
        if number and bench.left < 15:
            break
        told = made.step()
        total = sum(made.times.values())
        bench.row(
            f"GRPO step {number + 1}, Qwen3-0.6B, {groups} × {samples} × {new}",
            total,
            "s",
            **{f"{part}_s": made.times[part] for part in PARTS},
            tokens_s=told["tokens"] / total,
            ratio_std=told["mismatch/ratio_std"],
            logprob_gap=told.get("mismatch/logprob_abs_diff_mean"),
            peak_gb=bench.peak_gb,
            reserved_gb=torch.cuda.max_memory_reserved() / 1e9 if bench.cuda else None,
        )
    if bench.cuda and bench.left > 20:
        idle(bench, made)


def idle(bench: Bench, made: rl.Loop) -> None:
    """Share of a step in which the device computes nothing."""
    made.sampling = rl.replace(made.sampling, max_new_tokens=64)
    made.step()
    spent, _, longest = bench.on_device(made.step)
    bench.row("idle share of the device, steps of 64 tokens", 1 - spent / sum(made.times.values()), note=longest)
