"""Stage 10: how far engine and trainer are apart, and what closing the gap costs."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu import correctness, models, rl
from benchmarks.gpu.bench import Bench
from rollkeel.batch.build import TrainingBatch
from rollkeel.errors import BadInput


def run(bench: Bench) -> None:
    for dtype in correctness.DTYPES:
        bench.attempt(f"gap, {dtype}", gaps, dtype)


def gaps(bench: Bench, dtype: str) -> None:
    off = measured(bench, dtype, "auto", {})
    if not models.has(rl.LocalTrainer, "parity"):
        bench.absent(f"parity on, {dtype}", "this version has no such mode")
        return
    try:
        on = measured(bench, dtype, "parity", {"parity": True})
    except BadInput as error:
        bench.absent(f"parity on, {dtype}", str(error))
        return
    bench.check(f"max gap of log p to log q, {dtype}, parity on", on[0], 0)
    prices = {"sampling": on[1] / off[1], "scoring": on[2] / off[2]}
    bench.row(f"price of parity, {dtype}", max(prices.values()), "times", **prices)


def measured(bench: Bench, dtype: str, forward: str, more: dict[str, Any]) -> tuple[float, float, float]:
    """Largest gap, seconds of sampling and seconds of scoring, each the second time."""
    made = correctness.small(bench, "Qwen3-0.6B", correctness.DTYPES[dtype])
    trainer = rl.LocalTrainer(made, rl.TrainConfig(), temperature=1.0, total_updates=1, device=bench.device, **more)
    drawn: list[TrainingBatch] = []
    correctness.sampled(bench, made, dtype, False, forward)
    sampling = bench.once(lambda: drawn.append(correctness.sampled(bench, made, dtype, False, forward)))
    apart = (rl.logprobs(trainer, drawn[0]) - drawn[0].rollout_logprobs).abs()
    scoring = bench.once(lambda: rl.logprobs(trainer, drawn[0]))
    about = {"same_bits": float((apart == 0).double().mean()), "mean": float(apart.mean())}
    words = "parity on" if more else "parity off"
    bench.row(f"gap of log p to log q, {dtype}, {words}", float(apart.max()), "largest", **about)
    return float(apart.max()), sampling, scoring
