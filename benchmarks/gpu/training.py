"""Stage 6: an update of 16,384 tokens, its share of the measured product speed and its memory, beside transformers' own modules."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.gpu import models, probe, rl
from benchmarks.gpu.bench import Bench
from rollkeel import objectives
from rollkeel.config import Config, ModelConfig, SamplingConfig, TrainConfig
from rollkeel.memory.plan import OF_ENGINE, RESERVED, Setting, plan, with_values

LISTED = {"H100": 989.0, "H200": 989.0, "A100": 312.0}
"""Dense bfloat16 TFLOP/s that vendors state."""
BATCHES = {"8 × 2,048": [(512, 1536)] * 8, "1 × 16,384": [(512, 15_872)]}
TOYS = {"4 × 24": [(8, 16)] * 4, "1 × 96": [(8, 88)]}


def run(bench: Bench) -> None:
    batches = TOYS if bench.toy else BATCHES
    short, long = list(batches)
    runs = [("Qwen3-0.6B", short, "none"), ("Qwen3-0.6B", long, "none")]
    runs += [] if bench.toy else [("Qwen3-1.7B", short, "none"), ("Qwen3-1.7B", long, "layer")]
    runs += [("Qwen3-4B", short, "layer"), ("Qwen3-4B", short, "some layers"), ("Qwen3-30B-A3B", short, "layer")]
    for name, size, mode in (run for run in runs if bench.wanted(run[0])):
        bench.attempt(
            f"{models.title(name)} update {size}, checkpointing {mode}",
            update,
            name,
            size,
            batches[size],
            mode,
            least=6.0,
        )
    if not bench.wanted("Qwen3-0.6B"):
        return
    if "compile" in TrainConfig.model_fields and bench.cuda:
        about = ("Qwen3-0.6B", short, batches[short], "none", True)
        bench.attempt(f"Qwen3-0.6B update {short}, compiled", update, *about, least=45.0)
    bench.attempt(f"HF eager, Qwen3-0.6B {short}", peer, "Qwen3-0.6B", short, batches[short], False, least=6.0)
    bench.attempt(f"HF compiled, Qwen3-0.6B {short}", peer, "Qwen3-0.6B", short, batches[short], True, least=40.0)


def tell(bench: Bench, title: str, name: str, lengths: list[tuple[int, int]], seconds: float, **more: Any) -> None:
    tokens, speed = sum(map(sum, lengths)), bench.probed(probe.PRODUCT)
    flops = models.training_flops(models.shape(bench, name), [a + b for a, b in lengths], sum(b for _, b in lengths))
    listed = next((peak for card, peak in LISTED.items() if card in (bench.card or "")), None)
    mfu = bench.share(speed and flops / speed / 1e12, seconds)
    bench.row(
        title,
        tokens / seconds,
        "tokens/s",
        seconds=seconds,
        tflop_s=flops / seconds / 1e12,
        mfu_of_measured_product=mfu,
        mfu_of_listed=bench.share(listed and flops / listed / 1e12, seconds),
        peak_gb=bench.peak_gb,
        **more,
    )


def update(
    bench: Bench, name: str, size: str, lengths: list[tuple[int, int]], mode: str, compiled: bool = False
) -> None:
    made = models.policy(bench, name)
    tokens = sum(map(sum, lengths))
    about = settings(bench, name, tokens, mode)
    again = about.train.recompute.of(models.shape(bench, name).layers)
    said = f"checkpointing {mode if mode != 'some layers' else f'of {again} layers'}"
    trainer = rl.trainer(bench, made, **{**about.train.model_dump(), "compile": compiled})
    batch, objective = rl.synthetic(lengths, made.vocab_size).to(bench.device), objectives.build("grpo", {})
    seconds = bench.timed(lambda: trainer.update(batch, objective, old_is_current=True), 3, 2)
    tell(
        bench,
        f"{models.title(name)} update {size}, {said}{', compiled' if compiled else ''}",
        name,
        lengths,
        seconds,
        planned_gb=planned(bench, name, about),
        note=f"padded: {trainer.padded}" if trainer.padded else None,
    )
    if bench.cuda and bench.left > 5:
        spent, kernels, longest = bench.on_device(lambda: trainer.update(batch, objective, old_is_current=True))
        about = {"share": spent / seconds, "kernels": kernels, "note": longest}
        bench.row(f"{models.title(name)} update {size}, of it on the device", spent * 1e3, "ms", **about)


def settings(bench: Bench, name: str, tokens: int, mode: str) -> Config:
    """Of an update in one micro-batch; `mode` "some layers": as few as the plan allows on this device, of a toy the first."""
    train = TrainConfig(lr=1e-6, micro_batch_tokens=tokens, checkpointing="layer" if mode == "some layers" else mode)  # type: ignore[arg-type]
    config = Config(model=ModelConfig(dtype="bfloat16"), train=train, sampling=SamplingConfig(max_new_tokens=1))
    if mode != "some layers":
        return config
    space = torch.cuda.get_device_properties(0).total_memory * (1 - RESERVED) / 1e9 if bench.cuda else 0.0
    ways = [with_values(config, "train", checkpointed_layers=n) for n in range(models.shape(bench, name).layers)]
    return next((way for way in ways if bench.cuda and planned(bench, name, way) <= space), ways[1])


def planned(bench: Bench, name: str, config: Config) -> float:
    """GB that `rollkeel plan` counts for the trainer's part."""
    parts = plan(config, models.shape(bench, name), Setting(prompt=1)).parts
    return sum(count for part, count in parts.items() if part not in OF_ENGINE) / 1e9


def peer(bench: Bench, name: str, size: str, lengths: list[tuple[int, int]], compiled: bool) -> None:
    """Plain transformers: padded rows, all logits of a row pair in float32, bfloat16 weights with torch's fused AdamW, no masters."""
    made = models.policy(bench, name)
    if compiled:
        for layer in made.model.model.layers:  # type: ignore[union-attr]
            layer.compile(backend="eager" if bench.toy else "inductor")
    optimizer = torch.optim.AdamW(made.model.parameters(), 1e-6, fused=bench.cuda)
    length = sum(lengths[0])
    ids = torch.randint(8, 264, (len(lengths), length), device=bench.device)

    def work() -> None:
        for row in ids.split(2):
            logits = made.model(row).logits[:, lengths[0][0] - 1 : -1].float()
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), row[:, lengths[0][0] :].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    seconds = bench.timed(work, 3, 2)
    tell(bench, f"HF {'compiled' if compiled else 'eager'}, {name} {size}", name, lengths, seconds)
