"""A corpus of injected faults for `rollkeel doctor`, and its confusion matrix.

    python -m benchmarks.doctor build   --split dev  --corpus FOLDER      # runs, a few seconds each; what is there stays
    python -m benchmarks.doctor measure --split dev  --corpus FOLDER      # is every fault real? one line per run
    python -m benchmarks.doctor score   --split test --corpus FOLDER      # build, ask the doctor, print the matrix

`full` has whole runs of the recipes and what is silent; `elsewhere`, `afield`, `abroad` and `overseas` are other kinds of runs (--seeds 1 --healthy-seeds 2).
`dev` to `dev5` are there to set thresholds by; `test` has another task, other models, other instances and magnitudes, and is
scored once, with thresholds that were committed before. `--split healthy` is all splits' runs with nothing wrong in them. Exit
code of `score` is 1 if under 95 % of the real faults (see `measure`) are named first, or any healthy run is said to have a bug.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from benchmarks.doctor.cases import TABLES, Case, build_all, fault_cases, healthy_cases, told_cases
from benchmarks.doctor.measure import show
from benchmarks.doctor.score import ask_all, report
from benchmarks.doctor.workloads import SPLITS


def chosen(args: argparse.Namespace) -> list[Case]:
    """Cases of the arguments: the healthy runs belong to every split."""
    if args.split in TABLES:
        return list(told_cases(args.split, args.seeds, args.healthy_seeds, args.only))
    splits = SPLITS if args.split == "healthy" else (args.split,)
    cases: list[Case] = []
    for split in splits:
        if args.split != "healthy":
            cases += fault_cases(split, args.seeds, args.only)
        if not args.only or args.split == "healthy" or "healthy" in args.only:
            cases += healthy_cases(split, args.healthy_seeds, args.only)
    return cases


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.doctor", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("build", "measure", "score"))
    parser.add_argument("--split", choices=(*SPLITS, "healthy", *TABLES), default="dev")
    parser.add_argument(
        "--corpus", type=Path, required=True, help="folder of the runs; what is there is not made again"
    )
    parser.add_argument("--seeds", type=int, default=10, help="runs of each fault and model")
    parser.add_argument("--healthy-seeds", type=int, default=2, help="runs of each healthy kind and model")
    parser.add_argument("--only", nargs="*", default=[], help="faults, healthy kinds, or `healthy`")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--out", type=Path, help="score: also write OUT.json and OUT.csv")
    args = parser.parse_args()
    cases = chosen(args)
    if not cases:
        parser.error(f"no case for --only {' '.join(args.only)}")
    began = time.perf_counter()
    spent = build_all(cases, args.corpus, args.jobs)
    print(
        f"{len(cases)} runs in {args.corpus}; made in {spent:.0f} s of runs, {time.perf_counter() - began:.0f} s on the clock"
    )
    if args.what == "measure":
        show(cases, args.corpus)
    if args.what == "score":
        return 0 if report(ask_all(cases, args.corpus, args.jobs), args.out) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
