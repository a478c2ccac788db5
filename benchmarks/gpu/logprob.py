"""Stage 7: log-probs and entropies of a large vocabulary, forward and backward, beside the plain way."""

from __future__ import annotations

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
