"""Stage 8: publication of proven weights against a plain copy, and of as many tensors as a 30B-A3B has."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.gpu import models, probe
from benchmarks.gpu.bench import Bench
from rollkeel.models.checksum import tensor_checksum
from rollkeel.models.names import checkpoint_views
from rollkeel.sync.publish import DirectPublisher

THIN = {"hidden_size": 64, "moe_intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 288}  # fmt: skip
"""A mixture with every tensor of a 30B-A3B, each of them small."""


def run(bench: Bench) -> None:
    for way, inside in bench.ways.items():
        with inside:
            bench.attempt(f"checksum, {way}", checksum, way)
    for name in filter(bench.wanted, ("Qwen3-0.6B",) if bench.toy else ("Qwen3-0.6B", "Qwen3-4B")):
        bench.attempt(f"publication of {name}", publication, name, {})
    layers = 2 if bench.toy else 48
    bench.attempt(
        "publication of every tensor of a 30B-A3B", publication, "Qwen3-30B-A3B", {**THIN, "num_hidden_layers": layers}
    )


def checksum(bench: Bench, way: str) -> None:
    tensor = torch.empty(2**16 if bench.toy else 2**29, dtype=torch.bfloat16, device=bench.device).normal_()
    seconds = bench.timed(lambda: tensor_checksum("w", tensor), 3, 1)
    bandwidth = bench.probed(probe.COPY)
    gb = 2e-9 * tensor.numel()
    bench.row(f"checksum, {way}", gb / seconds, "GB/s", share_of_copy=bench.share(bandwidth and gb / bandwidth, seconds), peak_gb=bench.peak_gb)  # fmt: skip


def publication(bench: Bench, name: str, fields: dict[str, Any]) -> None:
    made = models.policy(bench, name, **fields)
    engine = models.engine(bench, made, 2, 64)
    weights = checkpoint_views(made.model)
    gb = sum(t.numel() * t.element_size() for t in weights.values()) / 1e9
    publish = DirectPublisher([engine]).publish
    seconds = bench.timed(lambda: publish(weights.items(), engine.version + 1), 3, 1)
    shared, one_copy = models.publisher(engine, made)
    if one_copy:
        held = checkpoint_views(made.model)
        proof = bench.timed(lambda: shared.publish(held.items(), engine.version + 1), 3, 1)
        bench.row(f"publication of one copy, {len(held):,} tensors, proven", proof * 1e3, "ms", gb=gb)
    else:
        bench.absent(f"publication of one copy, {len(weights):,} tensors", "engine and trainer hold a copy each")
    bandwidth = bench.probed(probe.COPY)
    bench.row(
        f"publication, {len(weights):,} tensors, proven",
        seconds * 1e3,
        "ms",
        gb=gb,
        gb_s=gb / seconds,
        times_a_plain_copy=bandwidth and seconds / (2 * gb / bandwidth),
        peak_gb=bench.peak_gb,
        note=models.title(name) if not fields else f"{name}'s layout at width {fields['hidden_size']}",
    )
