"""Correctness and speed of training and sampling on one accelerator, in one call.

python -m benchmarks.gpu --minutes 9 --out DIR                # on a card: docs/gpu.md says what to carry
python -m benchmarks.gpu --toy --device cpu --out DIR         # does it run
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

from benchmarks.gpu.driver import STAGES, TABLE, bare, run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9.0, help="of the whole suite")
    parser.add_argument("--out", type=Path, required=True, help="folder for rows.jsonl, table.md and log.txt")
    parser.add_argument("--stages", default=",".join(STAGES), help="some of them, separated by commas")
    parser.add_argument("--models", default="", help="some of them, separated by commas: Qwen3-0.6B,Qwen3-4B")
    parser.add_argument("--add", action="store_true", help="keep the rows of an earlier call in DIR")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--toy", action="store_true", help="tiny models, one repeat: does it run")
    args = parser.parse_args()
    names = args.stages.split(",")
    if unknown := [name for name in names if name not in STAGES]:
        parser.error(f"--stages: no stage {unknown[0]!r}; there are {', '.join(STAGES)}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device=cuda: there is none here; use --toy --device=cpu")
    if args.device == "cpu":  # what every forked stage needs, once
        bare("cpu")
        import benchmarks.gpu.rl  # noqa: F401
    only = [name for name in args.models.split(",") if name]
    rows = run(names, args.minutes, args.out, args.device, args.toy, add=args.add, only=only)
    bad = [row for row in rows if "failed" in row or row.get("ok") is False]
    print(f"{len(rows)} rows, {len(bad)} failed or do not hold: {args.out / TABLE}", flush=True)
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
