"""What an objective costs: every recipe, with all its metrics, as a share of a training step of the tiny model.

    python -m benchmarks.objectives                          # T = 32,768, every recipe: some minutes on one quiet core
    python -m benchmarks.objectives --only kpop,icepop --steps 1
    python -m benchmarks.objectives --tokens 2048 --repeats 3   # a quick look; the share is not that of the target

A row is the median over `--repeats` timings of what the trainer asks of an objective for one optimizer batch: `prepare` on the
whole batch, loss and its gradient by log-probs over the micro-batches, all metrics of the whole batch; and `mismatch_metrics`.
The step is `LocalTrainer.update` with a recipe that costs next to nothing, less that recipe's own cost. Target: under 2 %.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import torch

from rollkeel.batch.build import TrainingBatch, build_batch
from rollkeel.config import ModelConfig, TrainConfig
from rollkeel.models.loading import load_policy
from rollkeel.objectives import RECIPES
from rollkeel.objectives.objective import Objective
from rollkeel.record.mismatch import mismatch_metrics
from rollkeel.train.trainer import LocalTrainer
from rollkeel.types import GraderSpec, Prompt, Rollout, SamplingParams, Status, TokenBatch, TokenSpan

TARGET = 0.02
PROMPT, RESPONSE, TOPK = 16, 128, 20
PLAIN = "pg_is"
OPTIONS: dict[str, dict[str, Any]] = {"random_rejection": {"acceptance": 0.5}, "mis": {"cap": 2.0}}
"""Options of recipes that have one without a default."""


@dataclass(frozen=True)
class Cost:
    """Seconds per optimizer batch, medians."""

    prepare: float
    loss: float
    metrics: float
    mismatch: float

    @property
    def total(self) -> float:
        return self.prepare + self.loss + self.metrics + self.mismatch


def training_batch(count: int, vocabulary: int, seed: int = 0) -> TrainingBatch:
    """`count` response tokens in sequences of 128, in groups of 8, with rollout log-probs near those of a fresh model."""
    g = np.random.default_rng(seed)
    rollouts = []
    for i in range(max(count // RESPONSE, 1)):
        ids = g.integers(8, vocabulary, PROMPT)
        prompt = Prompt(
            id=str(i), index=i, text="", token_ids=ids, answer="", grader=GraderSpec(name="exact"), task="bench"
        )
        span = TokenSpan(
            token_ids=g.integers(8, vocabulary, RESPONSE),
            logprobs=np.full(RESPONSE, -np.log(vocabulary), np.float32),
            kept_mass=np.ones(RESPONSE, np.float32),
            versions=np.zeros(RESPONSE, np.int64),
            kv_versions=np.zeros(RESPONSE, np.int64),
        )
        common: dict[str, Any] = {"status": Status.FINISHED, "sampling": SamplingParams(), "engine": "local"}
        rollouts.append(
            Rollout(id=i, group=i // 8, member=i % 8, prompt=prompt, span=span, dtype="fp32", reward=0.0, **common)
        )
    return build_batch(rollouts, g.standard_normal(len(rollouts)), "token_mean")


def token_batch(batch: TrainingBatch, seed: int = 1) -> TokenBatch:
    """The batch with log-probs of realistic spread: q exponential, o and p a few per cent beside it, tails included."""
    g = torch.Generator().manual_seed(seed)
    n = len(batch)

    def noise(scale: float, *shape: int) -> torch.Tensor:
        return scale * torch.randn(*shape, generator=g)

    q = -torch.empty(n).exponential_(1.0, generator=g)
    o = (q + noise(0.03, n)).clamp(max=0.0)
    top = torch.log_softmax(noise(2.0, n, 2 * TOPK), -1)[:, :TOPK]
    tokens = batch.tokens((o + noise(0.02, n)).clamp(max=0.0), old_logprobs=o, entropy=noise(0.2, n).abs())
    return replace(
        tokens,
        rollout_logprobs=q,
        ref_logprobs=(o + noise(0.1, n)).clamp(max=0.0),
        token_ids=torch.zeros(n, dtype=torch.int64),
        topk_ids=torch.arange(TOPK).expand(n, TOPK),
        rollout_topk_logprobs=top,
        old_topk_logprobs=(top + noise(0.03, n, TOPK)).clamp(max=0.0),
        topk_logprobs=(top + noise(0.03, n, TOPK)).clamp(max=0.0),
    )


def pick(tokens: TokenBatch, part: slice) -> TokenBatch:
    return replace(tokens, **{n: v[part] for n, v in vars(tokens).items() if v is not None})


def timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def differentiate(objective: Objective, micros: list[TokenBatch]) -> None:
    for micro in micros:
        live = replace(micro, logprobs=micro.logprobs.detach().requires_grad_())
        torch.autograd.grad(objective.loss(live), live.logprobs)


def cost(objective: Objective, tokens: TokenBatch, micro_tokens: int, repeats: int) -> Cost:
    """Medians of `repeats` timings of each part, after one warm-up."""
    size = max(micro_tokens // (PROMPT + RESPONSE), 1) * RESPONSE
    micros = [pick(tokens, slice(i, i + size)) for i in range(0, tokens.logprobs.numel(), size)]

    def metrics() -> None:
        with torch.no_grad():
            objective(tokens)

    parts: dict[str, Callable[[], Any]] = {
        "prepare": lambda: objective.prepare(tokens),
        "loss": lambda: differentiate(objective, micros),
        "metrics": metrics,
        "mismatch": lambda: mismatch_metrics(tokens, 0),
    }
    for call in parts.values():
        call()
    return Cost(**{name: median(timed(call) for _ in range(repeats)) for name, call in parts.items()})


def step_seconds(batch: TrainingBatch, config: TrainConfig, steps: int) -> float:
    """Median of `steps` updates of the tiny model after a warm-up, objective included."""
    trainer = LocalTrainer(
        load_policy(ModelConfig(path="preset:tiny-qwen3-moe")), config, temperature=1.0, total_updates=steps + 1
    )
    objective = RECIPES[PLAIN]()
    found = [timed(lambda: trainer.update(batch, objective)) for _ in range(steps + 1)]
    return median(found[1:])


def row(name: str, found: Cost, step: float) -> str:
    share = found.total / (step + found.total)
    parts = " | ".join(
        f"{1000 * x:.1f}" for x in (found.prepare, found.loss, found.metrics, found.mismatch, found.total)
    )
    return f"| `{name}` | {parts} | {100 * share:.2f} %{'' if share < TARGET else ' (above)'} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32_768, help="response tokens of the optimizer batch")
    parser.add_argument("--repeats", type=int, default=11, help="timings per recipe and part")
    parser.add_argument("--steps", type=int, default=3, help="timed training steps, after one warm-up")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", default="", help="comma-separated recipes")
    parser.add_argument("--out", type=Path, help="also keep the numbers in this JSON file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    names = args.only.split(",") if args.only else list(RECIPES)
    unknown = [name for name in names if name not in RECIPES]
    if unknown:
        parser.error(f"--only: expected recipes, got {', '.join(unknown)}; known: {', '.join(RECIPES)}")

    config = TrainConfig()
    batch = training_batch(args.tokens, 256)
    tokens = token_batch(batch)
    plain = cost(RECIPES[PLAIN](), tokens, config.micro_batch_tokens, args.repeats)
    # `update` calls prepare, loss and metrics itself, and no mismatch metrics: what is left is the model's work.
    step = step_seconds(batch, config, args.steps) - (plain.total - plain.mismatch)
    print(f"T = {len(batch):,}, {args.threads} thread(s), torch {torch.__version__}, {platform.processor() or 'CPU'}")
    print(f"training step of tiny-qwen3-moe without the objective: {step:.2f} s (median of {args.steps})\n")
    print("| recipe | prepare ms | loss + gradient ms | metrics ms | mismatch ms | total ms | share of step |")
    print("|---|---|---|---|---|---|---|")
    results = {}
    for name in names:
        found = cost(RECIPES[name](**OPTIONS.get(name, {})), tokens, config.micro_batch_tokens, args.repeats)
        print(row(name, found, step), flush=True)
        results[name] = {**vars(found), "share": found.total / (step + found.total)}
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({"tokens": len(batch), "step_s": step, "recipes": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
