"""What the front of several sandbox nodes costs: requests a second, latency, and CPU time of the front's one process per request.

    python -m benchmarks.sandbox_front                        # against three nodes whose answers cost nothing; a minute
    python -m benchmarks.sandbox_front --chaos 50000          # real nodes, killed and frozen at random; some minutes

The nodes, the client and the front share the machine, so that requests a second of the whole say less than the front's CPU time: a core
of its own gives 1 s / (CPU time per request). Chaos: every job must have one result, and no node's run of it beyond two.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rollkeel_sandbox import Job, Status
from rollkeel_sandbox.http1 import Reader
from rollkeel_sandbox.remote import RemoteSandbox

TOKEN = "a-token-of-the-benchmark"
BODY = b'{"source": "", "id": "%s"}'


class Caller(asyncio.Protocol):
    """One connection that asks again as soon as it is answered."""

    def __init__(self, count: int, took: list[float], done: asyncio.Event) -> None:
        self._left, self._took, self._done = count, took, done
        self._reader, self._name = Reader(1 << 20), uuid.uuid4().hex[:12]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._ask()

    def _ask(self) -> None:
        body = BODY % f"{self._name}-{self._left}".encode()
        head = (
            f"POST /v1/run HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        self._began = time.perf_counter()
        self._transport.write(head.encode() + body)

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        while answer := self._reader.next():
            assert answer.head.first[1] == b"200", answer
            self._took.append(time.perf_counter() - self._began)
            self._left -= 1
            if self._left > 0:
                self._ask()
            else:
                self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._done.set()


async def press(port: int, requests: int, connections: int) -> list[float]:
    """Seconds of each request."""
    took: list[float] = []
    ends = [asyncio.Event() for _ in range(connections)]
    for end in ends:
        caller = functools.partial(Caller, requests // connections, took, end)
        await asyncio.get_running_loop().create_connection(caller, "127.0.0.1", port)
    await asyncio.gather(*(end.wait() for end in ends))
    return took


def start(*words: str) -> tuple[subprocess.Popen[str], str]:
    """A process of this package or its nodes, and the address that it prints."""
    process = subprocess.Popen([sys.executable, "-m", *words], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    return process, "http://" + line.split("http://")[1].split()[0].rstrip(",")


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def throughput(requests: int, connections: Sequence[int], token: str) -> None:
    nodes = [start("benchmarks.sandbox_stub", "--workers", "64") for _ in range(3)]
    urls = ",".join(url for _, url in nodes)
    front, url = start("rollkeel_sandbox", "front", "--nodes", urls, "--port", "0", "--token-file", token)
    port = int(url.rsplit(":", 1)[1])
    try:
        asyncio.run(press(port, 2000, 16))
        for count in connections:
            before, began = cpu_s(front.pid), time.perf_counter()
            took = sorted(asyncio.run(press(port, requests, count)))
            wall, used = time.perf_counter() - began, cpu_s(front.pid) - before
            micros = 1e6 * used / len(took)
            print(
                f"{count:4d} connections: {len(took) / wall:6.0f} requests/s, p50 {1e3 * took[len(took) // 2]:6.1f} ms, "
                f"p99 {1e3 * took[int(0.99 * len(took))]:6.1f} ms; the front's CPU {micros:5.0f} µs a request = {1e6 / micros:6.0f}/s a core",
                flush=True,
            )
    finally:
        for process, _ in [*nodes, (front, url)]:
            process.kill()


class Nodes:
    """Real nodes at fixed ports, that something happens to."""

    def __init__(self, folder: str, token: str, count: int) -> None:
        self._folder, self._token = folder, token
        self._ports = [0] * count
        self._made = [self._start(i) for i in range(count)]
        self.events: Counter[str] = Counter()

    def _start(self, i: int) -> subprocess.Popen[str]:
        words = ["rollkeel_sandbox", "serve", "--workers", "2", "--minimum", "restricted", "--token-file", self._token]
        words += ["--port", str(self._ports[i]), "--state", f"{self._folder}/{i}"]
        process, url = start(*words)
        self._ports[i] = int(url.rsplit(":", 1)[1])
        return process

    @property
    def urls(self) -> str:
        return ",".join(f"http://127.0.0.1:{port}" for port in self._ports)

    def harm(self, rng: random.Random) -> None:
        """One of them, for a while: the next harm comes when it is back."""
        i = rng.randrange(len(self._made))
        if rng.random() < 0.5:
            self.events["killed"] += 1
            self._made[i].kill()
            self._made[i].wait()
            time.sleep(rng.uniform(0, 1))
            self._made[i] = self._start(i)
        else:
            self.events["frozen"] += 1
            self._made[i].send_signal(signal.SIGSTOP)
            time.sleep(rng.uniform(0.2, 6))
            self._made[i].send_signal(signal.SIGCONT)
        time.sleep(rng.uniform(2, 6))

    def close(self) -> None:
        for process in self._made:
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()


def chaos(count: int, folder: str, token: str) -> None:
    nodes = Nodes(folder, token, 3)
    front, url = start("rollkeel_sandbox", "front", "--nodes", nodes.urls, "--port", "0", "--token-file", token, "--check", "0.3")  # fmt: skip
    results: Counter[str] = Counter()
    over, rng = threading.Event(), random.Random(0)

    def harm() -> None:
        time.sleep(3)
        while not over.is_set():
            nodes.harm(rng)

    def one(number: int) -> None:
        result = remote.run(Job(source=b"print(input())", stdin=b"%d" % number), id=f"job-{number}")
        right = result.status is Status.OK and result.stdout == b"%d\n" % number
        results["right" if right else result.status.value] += 1

    began, villain = time.monotonic(), threading.Thread(target=harm)
    villain.start()
    try:
        with RemoteSandbox(url, TOKEN) as remote, ThreadPoolExecutor(8) as pool:
            for _ in pool.map(one, range(count)):
                pass
    finally:
        over.set()
        villain.join()
        nodes.close()
        front.kill()
    print(f"{count} jobs in {time.monotonic() - began:.0f} s; nodes {dict(nodes.events)}; results {dict(results)}")
    runs: Counter[str] = Counter()
    for ledger in Path(folder).glob("*/ledger-*.jsonl"):
        for line in ledger.read_text().splitlines():
            if '"event": "start"' in line:
                runs[line.split('"id": "')[1].split('"')[0]] += 1
    print(f"starts by job, of those in what is left of the ledgers: {dict(Counter(runs.values()))}")
    assert sum(results.values()) == count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=40_000)
    parser.add_argument("--chaos", type=int, default=0, help="jobs on real nodes that are killed and frozen, instead")
    options = parser.parse_args()
    print(f"load before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; Python {sys.version.split()[0]}")
    with tempfile.TemporaryDirectory() as folder:
        token = Path(folder) / "token"
        token.touch(mode=0o600)
        token.write_text(TOKEN)
        if options.chaos:
            chaos(options.chaos, folder, str(token))
        else:
            throughput(options.requests, (1, 16, 64, 256), str(token))


if __name__ == "__main__":
    main()
