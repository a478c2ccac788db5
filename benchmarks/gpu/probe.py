"""Stage 0: what the machine is, how fast it copies and multiplies, and what a launch costs."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Callable
from importlib import metadata

import torch

from benchmarks.gpu.bench import Bench

COPY, PRODUCT, LAUNCH, REPLAY = (
    "copy bandwidth",
    "bf16 product 8192³",
    "launch of an empty kernel",
    "kernel in a graph replay",
)
PACKAGES = ("torch", "triton", "transformers", "numpy", "numba", "pydantic", "safetensors", "trl", "pytest")


def run(bench: Bench) -> None:
    bench.row("versions", note=f"Python {platform.python_version()}, " + ", ".join(map(version, PACKAGES)))
    bench.attempt("device", device)
    bench.attempt(COPY, copy)
    bench.attempt(PRODUCT, product)
    bench.attempt(LAUNCH, launches)
    bench.attempt("packed attention", varlen)


def version(package: str) -> str:
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return f"{package} not there"


def device(bench: Bench) -> None:
    if not bench.cuda:
        bench.row("device", note=f"{platform.machine()} processor, {torch.get_num_threads()} thread")
        return
    about = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info()
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(asked, capture_output=True, text=True).stdout.strip() if shutil.which(asked[0]) else "?"
    bench.row("device", total / 1e9, "GB", free=free / 1e9, note=f"{about.name}, {about.multi_processor_count} multiprocessors, capability {about.major}.{about.minor}, CUDA {torch.version.cuda}, driver {driver}")  # fmt: skip


def copy(bench: Bench) -> None:
    source = torch.empty(2**20 if bench.toy else 2**31, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    seconds = bench.timed(lambda: target.copy_(source), 10)
    bench.row(COPY, 2 * source.numel() / seconds / 1e9, "GB/s")


def product(bench: Bench) -> None:
    n = 128 if bench.toy else 8192
    a, b = (torch.randn(n, n, device=bench.device, dtype=torch.bfloat16) for _ in range(2))
    seconds = bench.timed(lambda: a @ b, 10)
    bench.row(PRODUCT, 2 * n**3 / seconds / 1e12, "TFLOP/s")


def launches(bench: Bench) -> None:
    x, count = torch.zeros(1, device=bench.device), 10 if bench.toy else 2000

    def work() -> None:
        for _ in range(count):
            x.add_(1)

    bench.row(LAUNCH, bench.timed(work) / count * 1e6, "us")
    if not bench.cuda:
        bench.absent(REPLAY, "no CUDA graphs on a CPU")
        return
    graph = captured(work)
    bench.row(REPLAY, bench.timed(graph.replay) / count * 1e6, "us")


def captured(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """`work` as a graph, behind a warm-up on another stream."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def varlen(bench: Bench) -> None:
    from benchmarks.gpu.models import policy
    from rollkeel.models.packed import PackedModel

    packed = PackedModel(policy(bench, "Qwen3-0.6B", num_hidden_layers=2, vocab_size=288).model)
    bench.check("packed attention", float(packed.varlen), 1, least=True, note=packed.padded or "packed")
