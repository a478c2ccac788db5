"""The sandbox against a bare subprocess: how long a trivial Python job takes, how many a second, and what many of them leave.

    python -m benchmarks.sandbox                    # a minute on two quiet cores
    python -m benchmarks.sandbox --jobs 100000      # the leak count at length

Each job prints one word. Latency is from the call of `run` to its result, one job at a time; throughput is with as many
callers as workers, in five parts, each with what is held after it. Targets: p50 ≤ 10 ms, p99 ≤ 50 ms; ≥ 150 jobs/s with p99 ≤ 200 ms; nothing left and < 50 MiB growth.
The load of the machine is printed: with other work beside, the figures say little.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rollkeel_sandbox import Job, Level, Sandbox, Status

HELLO = "print('hello')"
PARTS = 5
BWRAP = [
    "bwrap",
    "--unshare-all",
    "--die-with-parent",
    "--ro-bind",
    "/",
    "/",
    "--dev",
    "/dev",
    "--proc",
    "/proc",
    "--tmpfs",
    "/tmp",
]


@dataclass(frozen=True)
class Held:
    """What the tree of a fork server and this process hold."""

    processes: int
    descriptors: int
    mounts: int
    resident_mb: float


def plain(command: list[str]) -> Callable[[], bool]:
    def run() -> bool:
        return subprocess.run(command, capture_output=True, timeout=60).stdout == b"hello\n"

    return run


def sandboxed(sandbox: Sandbox) -> Callable[[], bool]:
    job = Job(source=HELLO.encode())

    def run() -> bool:
        result = sandbox.run(job)
        return result.status is Status.OK and result.stdout == b"hello\n" and result.attempts == 1

    return run


def latency(run: Callable[[], bool], count: int) -> list[float]:
    """Milliseconds of `count` runs, one after the other, a few first ones left out."""
    taken = []
    for i in range(count + 5):
        start = time.perf_counter()
        assert run()
        if i >= 5:
            taken.append((time.perf_counter() - start) * 1e3)
    return taken


def throughput(run: Callable[[], bool], count: int, workers: int) -> tuple[float, list[float]]:
    """Jobs per second with `workers` callers, and the milliseconds of each job."""
    taken: list[list[float]] = [[] for _ in range(workers)]

    def caller(mine: list[float]) -> None:
        mine += latency(run, count // workers)

    threads = [threading.Thread(target=caller, args=(mine,)) for mine in taken]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spent = time.perf_counter() - start
    return (count // workers + 5) * workers / spent, [ms for mine in taken for ms in mine]


def tree(pid: int) -> list[int]:
    """`pid` and its descendants."""
    parents = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            text = Path(f"/proc/{name}/stat").read_text(errors="replace")
        except OSError:
            continue
        parents[int(name)] = int(text[text.rindex(")") + 2 :].split()[1])
    found = [pid]
    for member in found:
        found += [child for child, parent in parents.items() if parent == member]
    return found


def held(sandbox: Sandbox) -> Held:
    """Counted while no job runs: this process, launcher, server, and the cages that wait for a job, two processes each."""
    time.sleep(1.0)
    members = [os.getpid(), *(pid for launcher in sandbox.server_pids().values() for pid in tree(launcher))]
    pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in members[:3])
    return Held(
        processes=len(members),
        descriptors=sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in members[:3]),
        mounts=sum(len(Path(f"/proc/{pid}/mounts").read_text().splitlines()) for pid in members[:3]),
        resident_mb=pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
    )


def row(name: str, ms: list[float], rate: str = "") -> None:
    ordered = sorted(ms)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    print(f"{name:<34} p50 {statistics.median(ms):6.1f} ms   p99 {p99:6.1f} ms   {rate}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300, help="jobs per latency figure")
    parser.add_argument("--jobs", type=int, default=2000, help="jobs of the throughput and leak figure")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    print(f"load before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; Python {sys.version.split()[0]}")
    python = [sys.executable, "-I", "-c", HELLO]
    row("subprocess, python -I", latency(plain(python), options.count))
    # Without `site`, which in a large environment takes longer than everything else.
    row("subprocess, python -I -S", latency(plain([sys.executable, "-I", "-S", "-c", HELLO]), options.count))
    if shutil.which("bwrap"):
        row("bubblewrap, python -I", latency(plain([*BWRAP, *python]), options.count))
    for warm in (True, False):
        with Sandbox(workers=options.workers, warm=warm, minimum=Level.NONE) as sandbox:
            name = f"sandbox ({sandbox.level.name.lower()}{'' if warm else ', no spare cage'})"
            row(name, latency(sandboxed(sandbox), options.count))
    rate, ms = throughput(plain(python), options.count * options.workers, options.workers)
    row(f"subprocess, {options.workers} at a time", ms, f"{rate:.0f} jobs/s")
    with Sandbox(workers=options.workers, minimum=Level.NONE) as sandbox:
        throughput(sandboxed(sandbox), 20 * options.workers, options.workers)
        before, done = held(sandbox), 0
        print(f"held before: {before}")
        for part in range(1, PARTS + 1):
            count = part * options.jobs // PARTS - done
            rate, ms = throughput(sandboxed(sandbox), count, options.workers)
            done += len(ms)
            row(f"sandbox, {options.workers} at a time", ms, f"{rate:.0f} jobs/s")
            print(f"held after {done} jobs: {held(sandbox)}", flush=True)
    print(f"load after: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
