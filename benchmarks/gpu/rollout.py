"""Stage 5: sampling speed against what must be read, at one, 64 and 256 sequences of 512 + 512 tokens."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.gpu import models, probe
from benchmarks.gpu.bench import Bench, without_triton
from rollkeel.engines.local import LocalEngine
from rollkeel.engines.sampling import SamplingRows, sample
from rollkeel.models.loading import Policy
from rollkeel.models.numerics import logits_of

SECONDS = 2.0
"""Of decode steps that are timed."""


def run(bench: Bench) -> None:
    for name in filter(bench.wanted, models.MODELS[::3] if bench.toy else models.MODELS):
        bench.attempt(f"{models.title(name)} rollout", rollout, name, least=6.0)
    if not bench.wanted("Qwen3-0.6B"):
        return
    if bench.cuda and models.has(LocalEngine, "graphs"):
        bench.attempt("without graphs", eager, least=8.0)
    if "Triton" in bench.ways:
        bench.attempt("without kernels of ours", plain, least=8.0)
    bench.attempt("HF generate, Qwen3-0.6B", generate, least=8.0)


def eager(bench: Bench) -> None:
    """The same engine, every launch from Python."""
    decode(bench, "Qwen3-0.6B", models.policy(bench, "Qwen3-0.6B"), 64, ", no graphs", graphs=models.Eager())


def plain(bench: Bench) -> None:
    """The same engine by PyTorch alone."""
    with without_triton():
        decode(bench, "Qwen3-0.6B", models.policy(bench, "Qwen3-0.6B"), 64, ", PyTorch alone")


def rollout(bench: Bench, name: str) -> None:
    made = models.policy(bench, name)
    for count in (1, 3) if bench.toy else (256, 64, 1):
        bench.attempt(f"{models.title(name)} decode {count}", decode, name, made, count, least=4.0)


def decode(bench: Bench, name: str, made: Policy, count: int, way: str = "", **more: Any) -> None:
    prompt, new = (16, 40) if bench.toy else (512, 512)
    engine = models.engine(bench, made, count, prompt + new, **more)
    vocab = made.vocab_size
    engine.submit(
        models.requests(count, prompt, new, vocab, first=10_000)
    )  # kernels are compiled and graphs recorded here
    engine.advance(4 if bench.toy else 24)
    engine.interrupt()
    engine.poll(0.0)
    engine.submit(models.requests(count, prompt, new, vocab))
    prefill = bench.once(lambda: engine.advance(1))
    first = bench.once(lambda: engine.advance(8)) / 8
    steps = max(1, min(new - 24, int(SECONDS / first))) if not bench.toy else 2
    begun = sum(engine.progress().values())
    seconds = bench.once(lambda: engine.advance(steps))
    made_tokens = sum(engine.progress().values()) - begun
    lengths = [prompt + n - steps // 2 for n in engine.progress().values()]
    bandwidth = bench.probed(probe.COPY)
    least = models.decode_bytes(models.shape(bench, name), lengths, 2)
    title, step = f"{models.title(name)}{way}", seconds / steps
    bench.row(
        f"{title} decode {count}",
        made_tokens / seconds,
        "tokens/s",
        ms_per_step=step * 1e3,
        share_of_floor=bench.share(bandwidth and least / bandwidth / 1e9, step),
        must_read_gb=least / 1e9,
        peak_gb=bench.peak_gb,
        note=f"{steps} steps, forward {engine.capabilities.forward}"
        + ("" if made_tokens == steps * count else ", NOT ALL IN FLIGHT"),
    )
    bench.row(f"{title} prefill {count}", count * prompt / max(prefill - step, 1e-9), "tokens/s", seconds=prefill)
    if bench.cuda:
        busy(bench, f"{title} decode {count}", engine, step)
        sampling(bench, made, count, step)


def busy(bench: Bench, title: str, engine: LocalEngine, step: float) -> None:
    """What of a step the device computes, in how many kernels; the rest it waits for the host."""
    spent, kernels, longest = bench.on_device(lambda: engine.advance(8))
    about = {"share_of_step": spent / 8 / step, "kernels": kernels / 8, "note": f"of 8 steps: {longest}"}
    bench.row(f"{title}, of it on the device", spent / 8 * 1e3, "ms", **about)


def sampling(bench: Bench, made: Policy, count: int, step: float) -> None:
    """Head and draw by themselves, in the shapes of that step."""
    weight = made.model.get_output_embeddings().weight  # type: ignore[union-attr]
    hidden = torch.randn(count, weight.shape[1], device=bench.device, dtype=weight.dtype)
    one, none = torch.ones(count, device=bench.device), torch.zeros(count, device=bench.device)
    rows = SamplingRows(one, one, none.long(), none, truncated=False, tempered=False)
    uniform = torch.rand(count, device=bench.device, dtype=torch.float64)
    with torch.inference_mode():
        head = bench.timed(lambda: logits_of(hidden, weight))
        whole = bench.timed(lambda: sample(logits_of(hidden, weight), rows, uniform))
    bench.row(f"head {count} × {len(weight)}", head * 1e3, "ms", share_of_step=head / step)
    bench.row(f"sampling {count} × {len(weight)}", (whole - head) * 1e3, "ms", share_of_step=(whole - head) / step)


def generate(bench: Bench) -> None:
    """The peer: transformers' own loop, KV cache, no log-probs."""
    made, count = models.policy(bench, "Qwen3-0.6B"), 2 if bench.toy else 64
    prompt, new = (16, 4) if bench.toy else (512, 48)
    ids = torch.randint(8, 264, (count, prompt), device=bench.device)
    about = {"do_sample": True, "min_new_tokens": new, "max_new_tokens": new, "pad_token_id": 0}
    with torch.inference_mode():
        made.model.generate(ids, **{**about, "min_new_tokens": 2, "max_new_tokens": 2})  # type: ignore[operator]
        short = bench.once(lambda: made.model.generate(ids, **{**about, "min_new_tokens": 1, "max_new_tokens": 1}))  # type: ignore[operator]
        seconds = bench.once(lambda: made.model.generate(ids, **about)) - short  # type: ignore[operator]
    bench.row(f"HF generate, Qwen3-0.6B decode {count}", count * (new - 1) / seconds, "tokens/s", ms_per_step=seconds / (new - 1) * 1e3, peak_gb=bench.peak_gb)  # fmt: skip
