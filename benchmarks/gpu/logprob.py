"""Stage 7: log-probs and entropies of a large vocabulary, forward and backward, beside the plain way."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from benchmarks.gpu import probe
from benchmarks.gpu.bench import Bench
from rollkeel.train.logprobs import token_logprobs


def run(bench: Bench) -> None:
    for width in (32,) if bench.toy else (1024, 2560):
        for way, inside in bench.ways.items():
            with inside:
                bench.attempt(f"token_logprobs, {way}, width {width}", ours, width, way)
    if "Triton" in bench.ways:
        bench.attempt("kernels of log-probs", kernels)
    else:
        bench.absent("kernels of log-probs", "they run on a GPU")
    for width in (32,) if bench.toy else (1024, 2560):
        bench.attempt(f"plain, width {width}", plain, width, least=5.0)


def inputs(bench: Bench, width: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    vocab = 288 if bench.toy else 151_936
    about = {"device": bench.device, "dtype": torch.bfloat16}
    hidden = torch.randn(tokens, width, **about).requires_grad_()  # type: ignore[arg-type]
    weight = (torch.randn(vocab, width, **about) * width**-0.5).requires_grad_()  # type: ignore[arg-type]
    return hidden, weight, torch.randint(0, vocab, (tokens,), device=bench.device)


def tell(bench: Bench, name: str, hidden: torch.Tensor, weight: torch.Tensor, forward: float, whole: float) -> None:
    """Rows of a forward and a backward: what share of the measured product speed they reach, counting 2 and 4 products."""
    tokens, (vocab, width) = len(hidden), weight.shape
    flops, speed = 2.0 * tokens * vocab * width, bench.probed(probe.PRODUCT)
    least = None if speed is None else flops / speed / 1e12
    bandwidth = bench.probed(probe.COPY)
    for part, seconds, products in (("forward", forward, 1), ("backward", max(whole - forward, 1e-9), 2)):
        bench.row(
            f"{name} {part}, {tokens} × {vocab}, width {width}",
            seconds * 1e3,
            "ms",
            share_of_product_speed=bench.share(least and products * least, seconds),
            logits_read_and_written_gb_s=8e-9 * tokens * vocab / seconds,
            copy_gb_s=bandwidth,
            peak_gb=bench.peak_gb,
        )


def ours(bench: Bench, width: int, way: str) -> None:
    hidden, weight, targets = inputs(bench, width, 64 if bench.toy else 16_384)
    ones = torch.ones(len(targets), device=bench.device)

    def forward() -> None:
        with torch.no_grad():
            token_logprobs(hidden, weight, targets)

    def whole() -> None:
        logprobs, _, _ = token_logprobs(hidden, weight, targets)
        torch.autograd.grad(logprobs, (hidden, weight), ones)

    tell(bench, f"token_logprobs, {way},", hidden, weight, bench.timed(forward), bench.timed(whole))


def kernels(bench: Bench) -> None:
    """Each on given logits alone: what share of the copy bandwidth it reaches with the bytes that it has to read and write."""
    from rollkeel.models.gpu.logprobs import gradient, statistics

    rows, vocab = (64, 288) if bench.toy else (4096, 151_936)
    logits = torch.randn(rows, vocab, device=bench.device)
    targets = torch.randint(0, vocab, (rows,), device=bench.device)
    up = torch.randn(rows, device=bench.device)
    room = {name: torch.empty_like(up) for name in ("normaliser", "logprobs", "entropies")}
    topk, low = logits.new_empty(0, 0), torch.empty_like(logits, dtype=torch.bfloat16)

    def measure() -> None:
        statistics(logits, targets, None, 1.0, 0.0, topk=topk, **room)

    def differentiate(entropies: bool, out: torch.Tensor) -> None:
        about = room["normaliser"], room["entropies"], up, up if entropies else None
        gradient(logits, targets, *about, 1.0, 0.0, out)

    work: list[tuple[str, Callable[[], None], int]] = [
        ("statistics", measure, 4),
        ("gradient in bfloat16", lambda: differentiate(False, low), 6),
        ("gradient in bfloat16, of entropies too", lambda: differentiate(True, low), 6),
        ("gradient in place", lambda: differentiate(False, logits), 8),  # the last, because it changes them
    ]
    bandwidth = bench.probed(probe.COPY)
    for name, call, size in work:
        seconds = bench.timed(call, 10)
        speed = 1e-9 * size * rows * vocab / seconds
        share = None if bandwidth is None else speed / bandwidth
        bench.row(f"kernel of {name}, {rows} × {vocab}", speed, "GB/s", share_of_copy=share, ms=seconds * 1e3)


def plain(bench: Bench, width: int) -> None:
    """As a transformers loss computes it: all logits at once in float32, of as many tokens as that leaves room for."""
    hidden, weight, targets = inputs(bench, width, 64 if bench.toy else 8192)

    def loss() -> torch.Tensor:
        return F.cross_entropy(F.linear(hidden, weight).float(), targets, reduction="none")

    def forward() -> None:
        with torch.no_grad():
            loss()

    def whole() -> None:
        torch.autograd.grad(loss().sum(), (hidden, weight))

    tell(bench, "cross_entropy of all logits", hidden, weight, bench.timed(forward), bench.timed(whole))
