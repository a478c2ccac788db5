"""Which runs the corpus has, where they lie, and how they are made: several processes, each run once."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from benchmarks.doctor.abroad import ABROAD
from benchmarks.doctor.afield import AFIELD
from benchmarks.doctor.elsewhere import ELSEWHERE
from benchmarks.doctor.faults import BASES, FAULTS
from benchmarks.doctor.full import FULL, QUICK
from benchmarks.doctor.healthy import KINDS
from benchmarks.doctor.overseas import OVERSEAS
from benchmarks.doctor.workloads import BRIEF, make, words_of

HEALTHY = "healthy"
TABLES = {"full": FULL, "elsewhere": ELSEWHERE, "afield": AFIELD, "abroad": ABROAD, "overseas": OVERSEAS}
"""Splits whose runs are each told in whole."""
OWN_START = ("retokenised", "length_truncation", "entropy_collapse")
"""Faults whose warm start is another one."""
FIRST_SEED = {"dev": 0, "dev2": 1000, "dev3": 2000, "dev4": 3000, "dev5": 4000, "test": 10000, "healthy": 5000}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run of the corpus."""

    split: str
    """One of `SPLITS`: whose task and models."""
    fault: str
    """Key of `FAULTS`, or `healthy`."""
    kind: str
    """Name of the magnitude, or the key of `KINDS`."""
    base: str
    """Key of `BASES`."""
    model: str
    seed: int
    index: int
    """Of the magnitude."""

    @property
    def wanted(self) -> tuple[str, ...]:
        """What is right as the first cause."""
        return (TABLES[self.split][self.kind].wanted if self.split in TABLES else ()) or (self.fault,)

    def path(self, root: Path) -> Path:
        kind = self.kind if self.fault == HEALTHY else str(self.index)
        if self.split in TABLES:
            return root / self.split / f"{self.kind}-{self.seed}".replace(" ", "_")
        return root / self.split / self.fault / f"{self.model}-{kind}-{self.base}-{self.seed}"


def fault_cases(split: str, seeds: int, only: Sequence[str] = ()) -> Iterator[Case]:
    """`seeds` runs of every fault and model; magnitudes and bases take turns over the seeds."""
    for fault in FAULTS.values():
        if only and fault.id not in only:
            continue
        for model in fault.models:
            sizes = fault.magnitudes(split, model)
            for n in range(seeds):
                base = fault.bases[n // len(sizes) % len(fault.bases)]
                index = n % len(sizes)
                yield Case(
                    split=split,
                    fault=fault.id,
                    kind=sizes[index].name,
                    base=base,
                    model=model,
                    seed=FIRST_SEED[split] + n,
                    index=index,
                )


def healthy_cases(split: str, seeds: int, only: Sequence[str] = ()) -> Iterator[Case]:
    """`seeds` runs of every healthy kind and model."""
    for place, (name, kind) in enumerate(KINDS.items()):
        if only and name not in only and HEALTHY not in only:
            continue
        for model in kind.models:
            for n in range(seeds):
                seed = FIRST_SEED[HEALTHY] + FIRST_SEED[split] + 10 * place + n
                yield Case(split=split, fault=HEALTHY, kind=name, base="plain", model=model, seed=seed, index=0)


def told_cases(split: str, seeds: int, healthy_seeds: int, only: Sequence[str] = ()) -> Iterator[Case]:
    """Runs of a table, healthy ones first, every kind of a seed before the next seed."""
    for seed in range(max(seeds, healthy_seeds)):
        for name, run in sorted(TABLES[split].items(), key=lambda item: bool(item[1].wanted)):
            if seed < (seeds if run.wanted else healthy_seeds) and (not only or name in only):
                fault = run.wanted[0] if run.wanted else HEALTHY
                yield Case(split=split, fault=fault, kind=name, base=run.recipe, model="own", seed=seed, index=0)


def build(case: Case, root: Path, steps: int | None = None) -> float:
    """Make the run of a case unless it is there. Seconds it took."""
    cache, extra = root / "warm", [f"run.steps={steps}"] if steps else []
    about = {"fault": case.fault, "kind": case.kind, "base": case.base, "model": case.model, "split": case.split}
    if case.split in TABLES:
        run = TABLES[case.split][case.kind]
        words = [*QUICK, f"run.seed={case.seed}", *run.words, *extra]
        if case.fault == "retokenised":
            cache = root / "warm-retokenised"
        own = case.split == "full"
        return make(case.path(root), words, run.patches(case.seed), cache, about, recipe=run.recipe, own_start=own)
    if case.fault == HEALTHY:
        kind = KINDS[case.kind]
        words = words_of(case.split, case.model, case.seed, [*kind.words, *extra])
        return make(case.path(root), words, (), cache, about, kind.killed_at)
    size = FAULTS[case.fault].magnitudes(case.split, case.model)[case.index]
    brief = ["run.steps=8"] if case.split in BRIEF and FAULTS[case.fault].brief else []
    words = words_of(case.split, case.model, case.seed, [*BASES[case.base][case.split], *brief, *size.words, *extra])
    if case.fault == "retokenised":
        cache = root / f"warm-{case.fault}-{case.index}"
    return make(case.path(root), words, size.patches(case.seed), cache, about)


def _begin() -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"


def build_all(cases: Sequence[Case], root: Path, jobs: int, steps: int | None = None) -> float:
    """Make what is missing, `jobs` at a time; one line each. Processor seconds of the runs made. Raises what a run raised."""
    first = {}
    for case in [] if jobs == 1 else cases:  # one run of each warm start alone, or all of them would train it
        first.setdefault((case.split, case.model, case.fault in OWN_START and (case.fault, case.index)), case)
    rest = [case for case in cases if case not in first.values()]
    total, done = 0.0, 0
    with ProcessPoolExecutor(jobs, get_context("spawn"), _begin) as pool:
        for part in ([*first.values()], rest):
            running = {pool.submit(build, case, root, steps): case for case in part}
            for future in as_completed(running):
                case, done = running[future], done + 1
                try:
                    seconds = future.result()
                except Exception as error:
                    raise RuntimeError(f"{case.path(root)}: {type(error).__name__}: {error}") from error
                total += seconds
                if seconds:
                    print(f"{done:4d}/{len(cases)}  {seconds:6.1f} s  {case.path(root).relative_to(root)}", flush=True)
    return total
