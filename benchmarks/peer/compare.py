"""rollkeel against TRL in one run: same model, rollouts, lengths and cores; medians, ratios, targets, peak memory.

    python -m benchmarks.peer.compare                     # everything, about 20 minutes
    python -m benchmarks.peer.compare --only rollout --rounds 1

Both sides run alternately, each measurement in a process of its own. First every variant (layout of processes × threads,
for TRL also the implementation of its experts) is scouted once; those within `KEEP` of their side's fastest are measured
in `--rounds` further rounds, and a side's number is the median over the timings of its best variant in these rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.peer import workload as w

ROOT = Path(__file__).resolve().parents[2]
LAYOUTS = ("1x1", "1x2", "2x1")
KEEP = 1.2
TIMEOUT_S = 600


@dataclass(frozen=True)
class Stage:
    """One row of the table: what is measured and the ratio to reach."""

    name: str
    what: str
    lengths: str
    target: float


STAGES = (
    Stage("rollout", "rollout", "equal", 3.0),
    Stage("train-lognormal", "train", "lognormal", 1.5),
    Stage("train-equal", "train", "equal", 1.2),
    Stage("step", "step", "equal", 2.5),
)


@dataclass(frozen=True)
class Variant:
    """One way a side may be run."""

    side: str
    processes: int
    threads: int
    options: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return " ".join([f"{self.processes}x{self.threads}", *(o for o in self.options if not o.startswith("--"))])


def variants(side: str, stage: Stage, layouts: Sequence[str] = LAYOUTS) -> list[Variant]:
    """All variants of a side that the best is chosen from."""
    choices: tuple[tuple[str, ...], ...] = ((),)
    if side == "trl":
        # Eager experts lose clearly in decoding and are about equal in training.
        kinds = ("grouped_mm",) if stage.what == "rollout" else ("grouped_mm", "eager")
        choices = tuple(("--experts", kind) for kind in kinds)
    sizes = [[int(n) for n in name.split("x")] for name in layouts]
    return [Variant(side, p, t, o) for p, t in sizes for o in choices]


def run_once(variant: Variant, stage: Stage, python: str, model: str, repeats: int, tuned_peer: bool) -> dict[str, Any]:
    """One measurement in a fresh process. Raises `RuntimeError` with the end of its stderr when it fails."""
    command = [python, "-W", "ignore", "-m", f"benchmarks.peer.{variant.side}_side", "--what", stage.what]
    command += ["--lengths", stage.lengths, "--model", model, "--repeats", str(repeats), *variant.options]
    command += ["--processes", str(variant.processes), "--threads", str(variant.threads)]
    env = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "MKL_", "GOMP_", "KMP_"))}
    env |= {"PYTHONPATH": str(ROOT), **(w.allocator() if tuned_peer and variant.side == "trl" else {})}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or len(lines) != 1:
        raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr[-3000:]}")
    return json.loads(lines[0].removeprefix("RESULT "))


class Results:
    """Everything measured, per stage and variant."""

    def __init__(self) -> None:
        self.runs: list[dict[str, Any]] = []

    def add(self, phase: str, stage: Stage, variant: Variant, result: dict[str, Any]) -> float:
        """Store one measurement; returns its fastest timing, which a busy moment of the machine disturbs least."""
        self.runs.append({"phase": phase, "stage": stage.name, "variant": variant.name, **result})
        return min(result["seconds"])

    def timings(self, phase: str, stage: Stage, variant: Variant) -> list[float]:
        """All seconds of a variant in a phase."""
        return [s for run in self._of(phase, stage, variant) for s in run["seconds"]]

    def _of(self, phase: str, stage: Stage, variant: Variant) -> list[dict[str, Any]]:
        key = (phase, stage.name, variant.side, variant.name)
        return [r for r in self.runs if (r["phase"], r["stage"], r["side"], r["variant"]) == key]

    def row(self, stage: Stage, kept: dict[str, list[Variant]]) -> dict[str, Any]:
        """Best variant, median, range and memory of both sides, and the ratio."""
        row: dict[str, Any] = {"stage": stage.name, "target": stage.target}
        for side, candidates in kept.items():
            best = min(candidates, key=lambda v: median(self.timings("measure", stage, v)))
            runs = self._of("measure", stage, best)
            rates = sorted(runs[0]["tokens"] / s for s in self.timings("measure", stage, best))
            row[side] = {
                "variant": best.name,
                "tokens": runs[0]["tokens"],
                "tokens_per_s": median(rates),
                "tokens_per_s_range": [rates[0], rates[-1]],
                "seconds": median(self.timings("measure", stage, best)),
                "memory_loaded_mb": median(r["memory_loaded_mb"] for r in runs),
                "memory_peak_mb": median(r["memory_peak_mb"] for r in runs),
            }
        if len(kept) == 2:
            row["ratio"] = row["rollkeel"]["tokens_per_s"] / row["trl"]["tokens_per_s"]
        return row


def measure_stage(stage: Stage, args: argparse.Namespace, model: str, results: Results) -> dict[str, Any]:
    """Scout all variants, then measure the fast ones, both phases alternating between the sides."""
    everything = {side: variants(side, stage, args.layouts) for side in args.sides}
    scouted = {v: results.add("scout", stage, v, _run(v, stage, args, model)) for v in _alternate(everything)}
    kept = {}
    for side, candidates in everything.items():
        fastest = min(scouted[v] for v in candidates)
        kept[side] = [v for v in candidates if scouted[v] <= KEEP * fastest]
    for _ in range(args.rounds):
        for variant in _alternate(kept):
            results.add("measure", stage, variant, _run(variant, stage, args, model))
    return results.row(stage, kept)


def _alternate(sides: dict[str, list[Variant]]) -> list[Variant]:
    """A B A B …; the side with more variants ends the list."""
    longest = max(len(v) for v in sides.values())
    return [v[i] for i in range(longest) for v in sides.values() if i < len(v)]


def _run(variant: Variant, stage: Stage, args: argparse.Namespace, model: str) -> dict[str, Any]:
    python = args.peer_python if variant.side == "trl" else args.python
    result = run_once(variant, stage, python, model, args.repeats, args.tuned_peer)
    rate = result["tokens"] / median(result["seconds"])
    note = (
        f"{stage.name:16} {variant.side:9} {variant.name:16} {rate:9,.0f} tokens/s  {result['memory_peak_mb']:7,.0f} MB"
    )
    print(note, file=sys.stderr, flush=True)
    return result


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: one line per stage."""
    lines = [
        "| stage | rollkeel tokens/s (range) | layout | TRL tokens/s (range) | layout | ratio | target "
        "| peak MB rollkeel / TRL | of it loaded |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [row["stage"]]
        for side in ("rollkeel", "trl"):
            r = row.get(side)
            if r is None:
                cells += ["–", "–"]
                continue
            low, high = r["tokens_per_s_range"]
            cells += [f"{r['tokens_per_s']:,.0f} ({low:,.0f}–{high:,.0f})", r["variant"]]
        ratio = row.get("ratio")
        cells.append("–" if ratio is None else f"**{ratio:.2f}×**{'' if ratio >= row['target'] else ' (below)'}")
        cells.append(f"{row['target']}×")
        for field in ("memory_peak_mb", "memory_loaded_mb"):
            cells.append(" / ".join(f"{row[s][field]:,.0f}" if s in row else "–" for s in ("rollkeel", "trl")))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    p = argparse.ArgumentParser(description="Measure rollkeel and TRL alternately on the same work and cores.")
    p.add_argument("--python", default=sys.executable, help="interpreter with rollkeel")
    p.add_argument("--peer-python", default=str(ROOT / ".venv-bench" / "bin" / "python"), help="interpreter with TRL")
    p.add_argument("--only", nargs="+", choices=[s.name for s in STAGES], help="stages; default all")
    p.add_argument("--sides", nargs="+", choices=("rollkeel", "trl"), default=["rollkeel", "trl"])
    p.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=LAYOUTS, help="processes x threads to choose from")
    p.add_argument("--rounds", type=int, default=3, help="measurements of each kept variant")
    p.add_argument("--repeats", type=int, default=3, help="timings in each measurement, after one for warm-up")
    p.add_argument("--cores", type=int, nargs="+", help="cores to use; default the first two this process may use")
    p.add_argument(
        "--tuned-peer", action="store_true", help="give TRL, too, the allocator settings that rollkeel makes for itself"
    )
    p.add_argument("--out", default=str(ROOT / "benchmarks" / "results"), help="folder for peer.json and peer.md")
    args = p.parse_args()
    for name, python in (("--python", args.python), ("--peer-python", args.peer_python)):
        if not Path(python).is_file():
            p.error(f"{name} {python}: no such interpreter; `make bench` builds the peer's environment")
    return args


def main() -> None:
    args = parse()
    available = sorted(os.sched_getaffinity(0))
    cores = args.cores or available[:2]
    os.sched_setaffinity(0, cores)
    machine = {
        "cpu": _cpu_model(),
        "cores": cores,
        "load_before": os.getloadavg()[0],
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
        "python": platform.python_version(),
    }
    if machine["load_before"] > 0.5:
        print(f"load is {machine['load_before']:.1f} before the start: numbers will be noisy", file=sys.stderr)
    results, rows = Results(), []
    with tempfile.TemporaryDirectory() as folder:
        model = str(Path(folder) / "model")
        subprocess.run(
            [args.python, "-m", "benchmarks.peer.model", model], cwd=ROOT, check=True, stdout=subprocess.DEVNULL
        )
        for stage in STAGES:
            if args.only is None or stage.name in args.only:
                rows.append(measure_stage(stage, args, model, results))
    text = table(rows)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    record = {"machine": machine, "stages": [asdict(s) for s in STAGES], "rows": rows, "runs": results.runs}
    (out / "peer.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    caption = f"{machine['cpu']}, cores {cores}, {machine['time']}; {w.ROLLOUTS} rollouts, fp32; medians, (range) of all timings."
    (out / "peer.md").write_text(f"{caption}\n\n{text}\n", encoding="utf-8")
    print(f"{caption}\n\n{text}")


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


if __name__ == "__main__":
    main()
