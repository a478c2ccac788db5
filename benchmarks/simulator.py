"""The simulator against the real loop: C3PO++'s rollout speed-up over the barrier, predicted and measured, for three distributions.

    python -m benchmarks.simulator                  # ten minutes on two quiet cores
    python -m benchmarks.simulator --model tiny --steps 3

The speed curve is measured first, by a run of its own; then each distribution is simulated from it and run for real, with
the same length for the same rollout. Only ratios are compared. Every round of a run takes the same steps, so each step counts
with its shortest time over the rounds, as the points of the curve do: what other programs took is in neither. Target: within 15 %.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np

from benchmarks import c3po
from rollkeel.loop.assemble import opened
from rollkeel.models.loading import load_policy
from rollkeel.rollout.measure import Speeds, speed_curve
from rollkeel.rollout.scenario import C3poConfig, FleetConfig, LengthConfig, Lengths, Scenario, WorkConfig
from rollkeel.rollout.simulate import best_barrier, budgeted, compare

TARGET = 0.15
PROMPT_TOKENS = 14


@dataclass(frozen=True)
class Shape:
    """A distribution of lengths."""

    name: str
    median: int
    sigma: float = 1.0
    cut: int = 16
    observed: np.ndarray | None = None

    @property
    def lengths(self) -> Lengths:
        return c3po.lengths_of(self.median, self.sigma, self.cut, self.observed)


def shapes(median: int) -> list[Shape]:
    rng = np.random.default_rng(5)
    short, long = rng.integers(1, median, 900), rng.integers(6 * median, 8 * median, 100)
    return [
        Shape("lognormal, sigma 1.0", median),
        Shape("lognormal, sigma 0.5", median, 0.5, 4),
        Shape("one in ten is long", median, 1.0, 8, np.concatenate([short, long])),
    ]


def measured_curve(args: argparse.Namespace, slots: list[int]) -> Speeds:
    """Decode and prefill speeds of the engine that the runs use, from sequences of their mean length."""
    args.lengths = c3po.lengths_of(args.median)
    config = c3po.config_of(args, slots[-1], budgeted=True)
    policy = load_policy(config.model, "cpu")
    with opened(config, policy) as engine:
        return speed_curve(engine, sorted({1, 2, 4, 8, *slots}), args.median)


def scenario_of(args: argparse.Namespace, shape: Shape, speeds: Speeds, slots: int) -> Scenario:
    return Scenario(
        iterations=args.warmup + args.steps,
        warmup=args.warmup,
        policies=["c3po"],
        lengths=LengthConfig(
            median=shape.median, sigma=shape.sigma, max=shape.cut * shape.median, prompt_tokens=PROMPT_TOKENS
        ),
        engine=FleetConfig(
            curve=speeds.curve,
            prefill_tokens_s=speeds.prefill_tokens_s,
            prefill_s=speeds.prefill_s,
            resume_s=speeds.resume_s,
            slots=slots,
        ),
        rollout=WorkConfig(prompts=args.prompts, samples=c3po.SAMPLES),
        kv=args.kv,
        c3po=C3poConfig(retention=args.retention),
    )


def predicted(args: argparse.Namespace, shape: Shape, speeds: Speeds, slots: int) -> tuple[float, int]:
    """Speed-up, and the barrier's best slot count."""
    scenario = scenario_of(args, shape, speeds, slots)
    barrier = best_barrier(scenario, shape.lengths)
    table = compare([barrier, budgeted(scenario, shape.lengths, slots)])
    return float(table[1]["speedup_rollout"]), barrier.slots


def rate(rounds: list[list[dict[str, Any]]]) -> float:
    """Trained tokens per second of the rollout phase, each step at its shortest time over `rounds` of one run."""
    tokens = [[row.get("rollout/tokens") or 0.0 for row in rows] for rows in rounds]
    if any(other != tokens[0] for other in tokens):
        raise RuntimeError("rounds of one run trained on other tokens; their steps cannot be compared")
    return sum(tokens[0]) / float(np.min([[row["time/rollout_s"] for row in rows] for rows in rounds], axis=0).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--median", type=int, default=32, help="tokens")
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--slots", type=int, nargs="+", default=[16, 64], help="of the barrier; C3PO++ takes the last")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--retention", type=int, default=16)
    parser.add_argument(
        "--rounds",
        type=int,
        default=3,
        help="repetitions of every real run, alternating; each step's shortest time counts",
    )
    parser.add_argument("--kv", choices=("keep", "recompute"), default="keep")
    parser.add_argument("--model", choices=tuple(c3po.MODELS), default="wide")
    parser.set_defaults(engine="local")
    args = parser.parse_args()
    args.processes, args.updates = 0, 1
    speeds = measured_curve(args, args.slots)
    print("curve " + ", ".join(f"{n:.0f}: {s:.0f}" for n, s in speeds.curve) + " tokens/s")
    worst, slots = 0.0, args.slots[-1]
    for shape in shapes(args.median):
        expected, best = predicted(args, shape, speeds, slots)
        run = argparse.Namespace(
            **vars(args) | {"lengths": shape.lengths, "median": shape.median, "steps": args.steps + 1}
        )
        real: dict[str, list[list[dict[str, Any]]]] = {}
        for _ in range(args.rounds):
            for size in args.slots:
                real.setdefault(f"barrier {size}", []).append(c3po.metrics_of(run, size, False))
            real.setdefault("c3po", []).append(c3po.metrics_of(run, slots, True))
        rates = {name: rate(rounds) for name, rounds in real.items()}
        barrier = max((name for name in rates if name != "c3po"), key=lambda name: rates[name])
        found = rates["c3po"] / rates[barrier]
        worst = max(worst, abs(expected / found - 1))
        print(
            f"{shape.name:>22}: measured {found:.2f}x over {barrier} slots, simulated {expected:.2f}x over {best} slots,"
            f" {expected / found - 1:+.0%}",
            flush=True,
        )
    print(f"largest error {worst:.0%} (target {TARGET:.0%}){'' if worst <= TARGET else '  above target'}")


if __name__ == "__main__":
    main()
