"""Stage 11: adapters beside a frozen model, in the update and in decode steps; each beside the same without adapters, where that fits."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.gpu import models, rl, training
from benchmarks.gpu.bench import Bench
from rollkeel import objectives
from rollkeel.config import LoraConfig
from rollkeel.models.adapters import attach, named_adapters
from rollkeel.models.loading import Policy
from rollkeel.models.names import checkpoint_views
from rollkeel.sync.publish import DirectPublisher

RANK = 32


def run(bench: Bench) -> None:
    for name, experts in (("Qwen3-4B", False), ("Qwen3-30B-A3B", False), ("Qwen3-30B-A3B", True)):
        if bench.wanted(name):
            title = f"{models.title(name)}, rank {RANK}{', experts too' if experts else ''}"
            bench.attempt(f"{title}, update", update, name, title, experts, least=6.0)
            bench.attempt(f"{title}, decode", decode, name, title, experts, least=6.0)


def policy(bench: Bench, name: str, experts: bool) -> Policy:
    made = replace(models.policy(bench, name), lora=LoraConfig(rank=RANK, experts=experts))
    assert made.lora is not None
    attach(made.model, made.lora)
    return made


def update(bench: Bench, name: str, title: str, experts: bool) -> None:
    sizes = training.TOYS if bench.toy else training.BATCHES
    size, lengths = next(iter(sizes.items()))
    made, tokens = policy(bench, name, experts), sum(map(sum, lengths))
    about = {"lr": 1e-5, "micro_batch_tokens": tokens, "checkpointing": "layer", "lora": made.lora}
    trainer = rl.trainer(bench, made, **about)
    batch, objective = rl.synthetic(lengths, made.vocab_size).to(bench.device), objectives.build("grpo", {})
    seconds = bench.timed(lambda: trainer.update(batch, objective, old_is_current=True), 3, 2)
    bench.row(
        f"{title}, update {size}, checkpointing layer",
        tokens / seconds,
        "tokens/s",
        seconds=seconds,
        trained=sum(p.numel() for p in named_adapters(made.model).values()),
        peak_gb=bench.peak_gb,
    )


def decode(bench: Bench, name: str, title: str, experts: bool) -> None:
    made = policy(bench, name, experts)
    count, prompt, new, steps = (3, 16, 40, 2) if bench.toy else (256, 512, 256, 64)
    engine = models.engine(bench, made, count, prompt + new, lora=made.lora)
    publisher = DirectPublisher([engine])
    publisher.publish(checkpoint_views(made.model).items(), 1, named_adapters(made.model))
    engine.submit(models.requests(count, prompt, new, made.vocab_size))
    engine.advance(8)  # kernels are compiled and graphs recorded here
    seconds = bench.once(lambda: engine.advance(steps)) / steps
    sync = bench.once(lambda: publisher.publish([], 2, named_adapters(made.model)))
    bench.row(
        f"{title}, decode {count}",
        count / seconds,
        "tokens/s",
        ms_per_step=seconds * 1e3,
        publication_ms=sync * 1e3,
        peak_gb=bench.peak_gb,
        note=f"forward {engine.capabilities.forward}",
    )
