"""What the service around the sandbox costs: the same jobs through `Sandbox`, through `Service`, and over HTTP.

    python -m benchmarks.sandbox_service                  # a minute on two quiet cores
    python -m benchmarks.sandbox_service --jobs 20000     # with growth of the server at length

Each job prints one word. Latency: one job at a time, from the call to the result; throughput: `--callers` threads. The server is a process
of its own on the same cores as everything else. Growth: resident memory, threads, descriptors and processes of the server, before and
after. The load of the machine is printed: with other work beside, the figures say little.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from rollkeel_sandbox import Job, Level, Result, Sandbox, Status
from rollkeel_sandbox.partition import Partition
from rollkeel_sandbox.remote import RemoteSandbox
from rollkeel_sandbox.service import Service

HELLO = Job(source=b"print('hello')")
TOKEN = "a-token-of-the-benchmark"
Run = Callable[[Job], Result]


def timed(run: Run, count: int) -> list[float]:
    """Milliseconds of `count` jobs, one after the other."""
    out = []
    for _ in range(count):
        start = time.perf_counter()
        result = run(HELLO)
        out.append((time.perf_counter() - start) * 1e3)
        assert (result.status, result.stdout) == (Status.OK, b"hello\n"), result
    return out


def measure(name: str, run: Run, count: int, jobs: int, callers: int) -> None:
    """One row: latency alone, then throughput and latency under load."""
    timed(run, 10)
    alone = timed(run, count)
    loaded: list[list[float]] = [[] for _ in range(callers)]
    threads = [threading.Thread(target=lambda m=mine: m.extend(timed(run, jobs // callers))) for mine in loaded]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rate = (jobs // callers) * callers / (time.perf_counter() - start)
    under = [ms for mine in loaded for ms in mine]
    shown = f"p50 {statistics.median(alone):6.1f}   p99 {quantile(alone, 0.99):6.1f} ms alone"
    print(
        f"{name:<10} {shown}   {rate:6.0f} jobs/s, p99 {quantile(under, 0.99):6.1f} ms with {callers} callers",
        flush=True,
    )


def quantile(values: list[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def held(pid: int) -> dict[str, float]:
    """What a server holds while nothing runs."""
    time.sleep(1.0)
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    children = sum(len(p.read_text().split()) for p in Path(f"/proc/{pid}/task").glob("*/children"))
    return {
        "resident_mb": round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1),
        "threads": len(os.listdir(f"/proc/{pid}/task")),
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "fork servers": children,
    }


def over_http(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        token = Path(folder) / "token"
        token.touch(mode=0o600)
        token.write_text(TOKEN)
        command = [sys.executable, "-m", "rollkeel_sandbox", "serve", "--port", "0", "--state", f"{folder}/state"]
        command += ["--token-file", str(token), "--workers", str(options.workers), "--minimum", "restricted"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            url = server.stdout.readline().split()[2]
            try:
                with RemoteSandbox(url, TOKEN) as remote:
                    timed(remote.run, 50)
                    before = held(server.pid)
                    measure("HTTP", remote.run, options.count, options.jobs, options.callers)
                    print(f"server before: {before}\nserver after:  {held(server.pid)}")
            finally:
                server.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300, help="jobs of the latency figure")
    parser.add_argument("--jobs", type=int, default=2000, help="jobs of the throughput figure")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--callers", type=int, default=8)
    options = parser.parse_args()
    print(f"load before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; Python {sys.version.split()[0]}")
    with Sandbox(workers=options.workers, minimum=Level.NONE) as sandbox:
        measure("Sandbox", sandbox.run, options.count, options.jobs, options.callers)
    parts = [Partition(name="default", workers=options.workers)]
    with tempfile.TemporaryDirectory() as folder, Service(parts, minimum=Level.NONE, state=Path(folder)) as service:
        measure("Service", service.run, options.count, options.jobs, options.callers)
    over_http(options)
    print(f"load after: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
