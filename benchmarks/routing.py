"""Routing replay: how much of the gap it takes away, and what it costs the rollouts and the update.

    python -m benchmarks.routing                               # a quarter of an hour on two quiet cores
    python -m benchmarks.routing --steps 10 --rounds 3         # does it run

Gap: a run of the default recipe with a rounded sampler; at every checkpointed step the same rollouts are scored by the
trainer with its own routing and with the engine's. Cost: the rollout phase with and without returned experts, and the
update with and without replay, alternating on the same requests; the ratio of each pair, median and quartiles.
Targets: kl_k3 at least 5x lower, under 10 % of rollout time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import torch

from rollkeel import objectives
from rollkeel.batch.build import build_batch
from rollkeel.loop.assemble import opened, prompt_source, sampling_params
from rollkeel.loop.job import train
from rollkeel.models.loading import Policy, load_policy
from rollkeel.objectives.kl import k3
from rollkeel.recipe import load
from rollkeel.record.rollout_store import read_step, to_rollouts
from rollkeel.rollout.collect import collect, issue
from rollkeel.train.trainer import LocalTrainer
from rollkeel.types import Rollout

GAP, COST = 5.0, 0.10


def gap(policy: Policy, config: Any, rollouts: list[Rollout], replay: bool) -> float:
    """mean(ρ − 1 − log ρ) of the trainer against the engine over all tokens of `rollouts`."""
    trainer = LocalTrainer(policy, config.train, temperature=1.0, total_updates=1, replay_routing=replay)
    batch = build_batch(rollouts, np.zeros(len(rollouts)), "token_mean")
    return float(k3(batch.rollout_logprobs.double(), trainer.score(batch).logprobs.double()).mean())


def gaps(words: list[str], steps: int, every: int) -> list[tuple[int, float, float]]:
    """`(step, k3, k3 with replay)` along a run, at equal weights."""
    found = []
    with tempfile.TemporaryDirectory() as path:
        words = [*words, f"run.steps={steps}", f"run.dir={path}/run", f"checkpoint.every={every}"]
        folder = train(load(None, [*words, f"checkpoint.keep={steps}", "eval.every=0"]))
        for saved in sorted((folder / "checkpoints").glob("step_*"))[:-1]:
            step = int(saved.name[5:])
            config = load(None, [*words, f"model.path={saved / 'model'}"])
            rollouts = to_rollouts(read_step(folder / "rollouts" / f"step_{step + 1:06d}.parquet"))
            found.append((step, *(gap(load_policy(config.model), config, rollouts, r) for r in (False, True))))
    return found


def pairs(first: Callable[[], float], second: Callable[[], float], rounds: int) -> list[float]:
    """second / first of alternating timings, after a warm-up of both."""
    found = []
    for _ in range(rounds + 1):
        before = first()
        found.append(second() / before)
    return found[1:]


def costs(words: list[str], rounds: int) -> dict[str, list[float]]:
    """Time with routing over time without, of the rollout phase and of the update."""
    config = load(None, [*words, "run.device=cpu"])
    policy = load_policy(config.model)
    prompts = prompt_source(config, policy, "train").prompts(range(config.rollout.prompts))
    base = sampling_params(config, ())
    with opened(config, policy) as engine:
        sampled: dict[bool, list[Rollout]] = {}

        def rollout(experts: bool) -> float:
            sampling = type(base)(**{**vars(base), "return_experts": experts})
            issued = issue(prompts, config.rollout.samples, sampling, 0, engine)
            start = time.perf_counter()
            sampled[experts] = collect(engine, issued, policy.tokenizer, deadline_s=600.0, should_stop=lambda: False)
            return time.perf_counter() - start

        found = {"rollout": pairs(lambda: rollout(False), lambda: rollout(True), rounds)}
    answered = [replace(r, reward=0.0) for r in sampled[True]]
    batch = build_batch(answered, np.ones(len(answered)), "token_mean")
    trainers = {
        r: LocalTrainer(policy, config.train, temperature=1.0, total_updates=1, replay_routing=r) for r in (False, True)
    }

    def update(replay: bool) -> float:
        start = time.perf_counter()
        trainers[replay].update(batch, objectives.kpop(), old_is_current=True, experts=True)
        return time.perf_counter() - start

    found["update"] = pairs(lambda: update(False), lambda: update(True), rounds)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--dtype", default="bf16", help="of the engine, for the gap")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="config overrides to try")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print("| cost of | setting | time with / without | quartiles | target |\n|---|---|---|---|---|")
    for name, words in {"short": [], "long": ["sampling.max_new_tokens=256"]}.items():
        for stage, ratios in costs([*words, *args.set], args.rounds).items():
            low, middle, high = statistics.quantiles(ratios, n=4)
            target = f"< {1 + COST:.2f}" if stage == "rollout" else ""
            print(f"| {stage} | {name} | {middle:.3f} | {low:.3f} to {high:.3f} | {target} |", flush=True)
    found = gaps([f"engine.dtype={args.dtype}", *args.set], args.steps, args.every)
    print("\n| step | kl_k3 | with replay | times lower |\n|---|---|---|---|")
    for step, plain, replayed in found:
        print(f"| {step} | {plain:.2e} | {replayed:.2e} | {plain / replayed:.1f} |")
    total = sum(p for _, p, _ in found) / sum(r for _, _, r in found)
    print(f"\nover the run {total:.1f}x lower (target {GAP:.0f}x)")


if __name__ == "__main__":
    main()
