"""What a stage is given: a device, a clock, and a file of rows that survives whatever happens to the stage."""

from __future__ import annotations

import gc
import importlib.util
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

ROWS = "rows.jsonl"


def append(out: Path, row: dict[str, Any]) -> None:
    """One line, in one write: readers see whole lines even if the writer is killed."""
    line = json.dumps({k: v for k, v in row.items() if v is not None}, allow_nan=False) + "\n"
    file = os.open(out / ROWS, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)


def rows(out: Path) -> Iterator[dict[str, Any]]:
    """Every whole row so far."""
    text = (out / ROWS).read_text(encoding="utf-8") if (out / ROWS).exists() else ""
    yield from (json.loads(line) for line in text.split("\n")[:-1])


SWITCH = "ROLLKEEL_TRITON"
"""Of rollkeel.models.gpu: 0 turns its kernels off."""


@contextmanager
def without_triton() -> Iterator[None]:
    """Inside, PyTorch computes what kernels of ours would."""
    before = os.environ.get(SWITCH)
    os.environ[SWITCH] = "0"
    try:
        yield
    finally:
        os.environ.pop(SWITCH)
        if before is not None:
            os.environ[SWITCH] = before


class Bench:
    """Rows of one stage on one device."""

    def __init__(self, stage: str, out: Path, device: str, toy: bool, seconds: float, only: Sequence[str] = ()) -> None:
        self.stage, self.out, self.device, self.toy = stage, out, torch.device(device), toy
        self.cuda, self._only = self.device.type == "cuda", only
        self.card = torch.cuda.get_device_name() if self.cuda else None
        self._end = time.monotonic() + seconds

    @property
    def ways(self) -> dict[str, AbstractContextManager[None]]:
        """By what operations that have a kernel of ours can be computed here."""
        kernels = self.cuda and importlib.util.find_spec("rollkeel.models.gpu") is not None
        return {**({"Triton": nullcontext()} if kernels else {}), "PyTorch": without_triton()}

    def wanted(self, model: str) -> bool:
        """Whether the suite was asked for rows of this model."""
        return not self._only or model in self._only

    @property
    def left(self) -> float:
        """Seconds until the stage is killed."""
        return self._end - time.monotonic()

    def row(self, name: str, value: float | None = None, unit: Any = "", **more: Any) -> None:
        """Write a row; a value that is not finite is a failure of that row."""
        about = {"stage": self.stage, "row": name, "device": self.device.type, "toy": self.toy, "card": self.card}
        if value is not None and not math.isfinite(value):
            value, more = None, {**more, "failed": f"{value}"}
        clean = {k: float(f"{v:.6g}") if isinstance(v, float) and math.isfinite(v) else v for k, v in more.items()}
        told = {"value": None if value is None else float(f"{value:.6g}"), "unit": unit or None, **clean}
        append(self.out, {**about, **told})

    def check(self, name: str, value: float, bound: float, *, least: bool = False, **more: Any) -> None:
        """A row that holds or does not: `value` at most `bound`, or with `least` at least."""
        holds = value >= bound if least else value <= bound
        self.row(name, value, ok=bool(holds), bound=f"{'≥' if least else '≤'} {bound:g}", **more)

    def absent(self, name: str, why: str) -> None:
        """A row for what cannot be measured here."""
        self.row(name, note=f"not there: {why}")

    def attempt(self, name: str, work: Callable[..., None], *about: Any, least: float = 2.0) -> None:
        """Do `work(self, *about)`, which writes rows; what it throws, or too little time, is a row, and the stage goes on."""
        if self.left < (0 if self.toy else least):
            self.row(name, note=f"skipped: {self.left:.0f} s were left, this needs {least:.0f}")
            return
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
        try:
            work(self, *about)
        except Exception as error:
            out_of_memory = isinstance(error, torch.OutOfMemoryError)
            why = "out of memory" if out_of_memory else f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            self.row(name, failed=why)
            if not out_of_memory:
                import traceback

                traceback.print_exc()
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()

    def sync(self) -> None:
        """Wait for the device."""
        if self.cuda:
            torch.cuda.synchronize()

    def once(self, work: Callable[[], Any]) -> float:
        """Seconds of one call, the device's part included."""
        self.sync()
        start = time.perf_counter()
        work()
        self.sync()
        return time.perf_counter() - start

    def timed(self, work: Callable[[], Any], repeats: int = 5, warm: int = 2) -> float:
        """Median seconds of a call behind `warm` others."""
        repeats, warm = (1, 1) if self.toy else (repeats, warm)
        for _ in range(warm):
            work()
        return statistics.median(self.once(work) for _ in range(repeats))

    def on_device(self, work: Callable[[], Any]) -> tuple[float, int, str]:
        """Seconds of `work` in which the device computes, in how many kernels, and the longest of these."""
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            work()
            self.sync()
        kernels = [e for e in seen.key_averages() if e.device_type.name == "CUDA" and not e.is_user_annotation]
        kernels.sort(key=lambda e: -e.self_device_time_total)
        longest = "; ".join(f"{e.key[:60]} × {e.count} {e.self_device_time_total / 1e3:.2f} ms" for e in kernels[:14])
        return sum(e.self_device_time_total for e in kernels) * 1e-6, sum(e.count for e in kernels), longest

    @property
    def peak_gb(self) -> float | None:
        """Most memory that tensors of this attempt took, GB; None on a CPU."""
        return torch.cuda.max_memory_allocated() / 1e9 if self.cuda else None

    def probed(self, name: str) -> float | None:
        """A number that stage 0 measured in this suite."""
        told = (r.get("value") for r in rows(self.out) if r["stage"] == "probe" and r["row"] == name)
        return next(told, None)

    def share(self, floor_s: float | None, seconds: float) -> float | None:
        """How near to its floor a time is."""
        return None if floor_s is None else floor_s / seconds
