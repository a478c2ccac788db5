"""C3PO++ against the synchronous barrier: the real loop and engine, forced long-tailed lengths, the same steps of training.

    python -m benchmarks.c3po                                   # a quarter of an hour on two quiet cores
    python -m benchmarks.c3po --median 8 --prompts 4 --steps 2 --warmup 1 --slots 16 --rounds 1   # does it run
    python -m benchmarks.c3po --engine vllm --model tiny --slots 32 --rounds 1    # on a vLLM server, started for each measurement

Answer lengths are lognormal (σ of the logarithm 1.0), at least one token and at most 16 × the median: `max_new_tokens` of
each request, without stop tokens. A barrier step samples `--prompts` × 8 rollouts with as many slots as given and refills
them; the slot count with the most tokens per second is its best. C3PO++ takes the same tokens per step as its budget, and as
many rollouts in flight as there are slots; its best number counts too. Rates are trained tokens per second over all measured
steps: of the rollout phase, and of the whole step (rollout, reward, passes, updates, publication). Targets: 2.5× and 1.5×.

Beside them, how lengths are treated: mean length of what was trained against the mean of the distribution; share purged.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
from rich.console import Console

from rollkeel.config import Config
from rollkeel.engines.open import open_engine
from rollkeel.loop import steps as loop
from rollkeel.loop.assemble import assemble
from rollkeel.models.loading import load_policy, resolve_device
from rollkeel.recipe import load
from rollkeel.record.live import LiveView
from rollkeel.record.runfolder import RunFolder
from rollkeel.record.stopping import StopFlag
from rollkeel.rollout.scenario import LengthConfig, Lengths
from rollkeel.types import Request

TARGETS = {"rollout": 2.5, "step": 1.5}
SAMPLES, CUT, SIGMA = 8, 16, 1.0
MODELS: dict[str, dict[str, Any]] = {
    "tiny": {},
    "wide": {
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "moe_intermediate_size": 256,
        "num_experts": 32,
        "num_experts_per_tok": 4,
    },
}
"""Changes to the tiny mixture of experts: as it is, everything fits a cache and a decode step is nearly as cheap per token with
8 sequences as with 64; `wide`, 26 M parameters, reads its weights from memory as large models do."""


def lengths_of(median: int, sigma: float = SIGMA, cut: int = CUT, observed: np.ndarray | None = None) -> Lengths:
    """Tokens of every rollout, a function of its id alone; `observed` are drawn from instead, at most `cut` × `median`."""
    return Lengths(LengthConfig(median=median, sigma=sigma, max=cut * median), seed=0xC3, observed=observed)


class Forced:
    """An engine whose requests end after their length in tokens; everything else is the engine's own."""

    def __init__(self, engine: Any, lengths: Lengths) -> None:
        self._engine, self._lengths = engine, lengths

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, requests: Sequence[Request]) -> None:
        self._engine.submit([self._forced(r) for r in requests])

    def _forced(self, r: Request) -> Request:
        limit = self._lengths.of(0, r.id)
        return replace(r, sampling=replace(r.sampling, max_new_tokens=limit, stop_token_ids=()))

    # Named here too, because a protocol is recognised by the class.
    def advance(self, steps: int) -> Any:
        return self._engine.advance(steps)

    def progress(self) -> Any:
        return self._engine.progress()

    def poll(self, timeout_s: float) -> Any:
        return self._engine.poll(timeout_s)

    def interrupt(self, ids: Sequence[int] | None = None) -> None:
        self._engine.interrupt(ids)

    def update_weights(self, update: Any) -> Any:
        return self._engine.update_weights(update)

    def close(self) -> None:
        self._engine.close()

    @property
    def version(self) -> int:
        return self._engine.version

    @property
    def capabilities(self) -> Any:
        return self._engine.capabilities


class ForcedServer(Forced):
    """The same of a server."""

    def score(self, sequences: Any) -> Any:
        return self._engine.score(sequences)


def config_of(args: argparse.Namespace, slots: int, budgeted: bool) -> Config:
    count = args.prompts * SAMPLES
    budget = {
        "tokens": round(count * args.lengths.mean()),
        "capacity": slots * max(args.processes, 1),
        "retention": args.retention,
    }
    words = [
        f"run.loop={'budgeted' if budgeted else 'sync'}",
        f"run.steps={args.warmup + args.steps}",
        f"model.overrides={json.dumps(MODELS[args.model] | {'max_position_embeddings': CUT * args.median + 64})}",
        f"sampling.max_new_tokens={CUT * args.median}",
        f"rollout.prompts={args.prompts}",
        f"rollout.samples={SAMPLES}",
        f"rollout.budget={json.dumps(budget)}",
        f"engine.kind={args.engine}",
        f"engine.kv_memory_gb={1 if args.engine == 'vllm' else 'null'}",
        f"engine.slots={slots}",
        f"engine.kv={args.kv if budgeted else 'recompute'}",
        f"engine.processes={args.processes}",
        f"train.processes={max(args.processes, 1)}",
        f"train.updates_per_step={args.updates}",
        "eval.every=0",
        "checkpoint.every=0",
        "report.rollouts=false",
    ]
    return load(None, words)


def metrics_of(args: argparse.Namespace, slots: int, budgeted: bool) -> list[dict[str, Any]]:
    """Rows of `metrics.jsonl` of the measured steps of one run."""
    config = config_of(args, slots, budgeted)
    quiet = LiveView(console=Console(file=io.StringIO()))
    with tempfile.TemporaryDirectory() as path, quiet as view, StopFlag(view) as stop:
        folder = RunFolder.create(Path(path) / "run", config)
        policy = load_policy(config.model, "cpu")
        policy.model.generation_config.eos_token_id = []  # lengths alone end a request
        forced = Forced if args.engine == "local" else ForcedServer
        engine: Any = forced(open_engine(policy.model.config, config.engine, resolve_device("cpu")), args.lengths)
        run = assemble(config, folder, policy, view, stop, engine)
        try:
            run.publish()
            for step in range(1, args.warmup + args.steps):  # the last step would evaluate and save
                loop.step_once(run, step)
        finally:
            run.close()
        rows = folder.metrics()[args.warmup :]
        folder.close()
    return rows


def measure(args: argparse.Namespace, slots: int, budgeted: bool) -> dict[str, float]:
    """Trained tokens per second of the rollout phase and of the step, lengths, purges, over the measured steps."""
    rows = metrics_of(args, slots, budgeted)
    total = {name: sum(r.get(name, 0.0) for r in rows) for r in rows for name in r if isinstance(r[name], int | float)}
    trained = total["rollout/tokens"]
    left = total.get("pool/purged", 0.0) + total.get("pool/finished", total["rollout/count"])
    return {
        "rollout": trained / total["time/rollout_s"],
        "step": trained / total["time/step_s"],
        "tokens": trained,
        "length": trained / total["rollout/count"],
        "purged": total.get("pool/purged", 0.0) / left,
        "staleness": float(np.mean([r.get("staleness/mean", 0.0) for r in rows])),
    }


def show(label: str, found: dict[str, float], issued: float) -> None:
    print(
        f"{label:>24}  {found['rollout']:9.0f} tokens/s rollout  {found['step']:9.0f} tokens/s step"
        f"  length {found['length']:6.1f} (issued {issued:.1f})  purged {found['purged']:6.2%}"
        f"  staleness {found['staleness']:.2f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--median", type=int, default=32, help="tokens")
    parser.add_argument("--prompts", type=int, default=2, help="prompts of a barrier step")
    parser.add_argument("--slots", type=int, nargs="+", default=[16, 32, 64], help="slot counts to try, per process")
    parser.add_argument("--steps", type=int, default=12, help="measured steps")
    parser.add_argument("--warmup", type=int, default=10, help="steps before them, in which the pool fills")
    parser.add_argument("--retention", type=int, default=16, help="σ of C3PO++")
    parser.add_argument("--model", choices=tuple(MODELS), default="wide")
    parser.add_argument("--engine", choices=("local", "vllm"), default="local")
    parser.add_argument("--updates", type=int, default=1, help="optimizer updates per step")
    parser.add_argument("--kv", choices=("keep", "recompute"), default="keep", help="of parked rollouts")
    parser.add_argument("--processes", type=int, default=0, help="engine workers and trainer processes")
    parser.add_argument("--rounds", type=int, default=3, help="of everything; the median of their speed-ups counts")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    args = parser.parse_args()
    args.steps += 1  # step_once on the last step of a run would also evaluate
    args.lengths = lengths_of(args.median)
    issued = args.lengths.mean()
    rounds: list[dict[str, dict[str, float]]] = []
    for _ in range(args.rounds):
        best: dict[str, dict[str, float]] = {}
        for name, budgeted in (("barrier", False), ("c3po++", True)):
            for slots in args.slots:
                found = measure(args, slots, budgeted) | {"slots": float(slots)}
                show(f"{name}, {slots} slots", found, issued)
                if name not in best or found["rollout"] > best[name]["rollout"]:
                    best[name] = found
        rounds.append(best)
    ratios = {kind: sorted(best["c3po++"][kind] / best["barrier"][kind] for best in rounds) for kind in TARGETS}
    for kind, target in TARGETS.items():
        middle = statistics.median(ratios[kind])
        verdict = "" if middle >= target else "  below target"
        print(
            f"{kind} speed-up {middle:.2f}x ({ratios[kind][0]:.2f} to {ratios[kind][-1]:.2f}, target {target}x){verdict}"
        )
    bias = {name: statistics.median(best[name]["length"] / issued - 1 for best in rounds) for name in rounds[0]}
    print("length bias " + ", ".join(f"{name} {b:+.1%}" for name, b in bias.items()))
    if args.json:
        args.json.write_text(json.dumps({"rounds": rounds, "ratios": ratios, "issued_length": issued}, indent=1) + "\n")


if __name__ == "__main__":
    main()
