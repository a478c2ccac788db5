"""Stage 4: a run that learns: a random 0.6B, a warm start on demonstrations with mistakes, then GRPO."""

from __future__ import annotations

import statistics

from benchmarks.gpu import models, rl, step
from benchmarks.gpu.bench import Bench
from rollkeel.config import SftConfig

LOOK = 5
"""Steps at each end whose rewards are compared."""


def run(bench: Bench) -> None:
    bench.attempt("a run that learns", learns, least=15.0)


def learns(bench: Bench) -> None:
    """Nothing is loaded: what the model can at the end it learnt here."""
    made = models.policy(bench, "Qwen3-0.6B")
    count, groups, samples, steps = (2, 2, 4, 2) if bench.toy else (160, 16, 8, 40)
    whole = step.loop(bench, made, groups, samples, 8, True, lr=5e-6)
    losses: list[float] = []
    sft = SftConfig(steps=count, batch_size=4 if bench.toy else 128, lr=2e-4, warmup_steps=10)
    seconds = bench.once(lambda: losses.extend(rl.warm(made, whole.task, sft)))
    bench.check("warm start, loss at the end over loss at the start", losses[-1] / losses[0], 2.0 if bench.toy else 0.5, first=losses[0], last=losses[-1], steps=count, seconds=seconds)  # fmt: skip
    whole.publish()
    rewards, moved = list[float](), 0.0
    for _ in range(steps):
        if bench.left < 4 and not bench.toy:
            break
        told = whole.step()
        rewards.append(told["reward"])
        moved = max(moved, told["grad_norm"])
    first, last = (statistics.fmean(part) for part in (rewards[:LOOK], rewards[-LOOK:]))
    about = {"first_five": first, "last_five": last, "steps": len(rewards), "largest_gradient": moved}
    bench.check("reward, last five GRPO steps over first five", last - first, -1.0 if bench.toy else 0.0, least=True, peak_gb=bench.peak_gb, **about)  # fmt: skip
