"""Stage 12: an update whose members carry their prompt once, beside one of as many tokens with prompts of their own."""

from __future__ import annotations

from benchmarks.gpu import models, rl
from benchmarks.gpu.bench import Bench
from rollkeel import objectives

GROUPS = {"4 × 8 × (512 + 256)": (4, 512, 256), "1 × 8 × (4,096 + 256)": (1, 4096, 256)}
TOYS = {"2 × 8 × (40 + 8)": (2, 40, 8)}
MEMBERS = 8


def run(bench: Bench) -> None:
    if bench.wanted("Qwen3-0.6B"):
        for size, about in (TOYS if bench.toy else GROUPS).items():
            bench.attempt(f"shared prompts, {size}", update, size, *about, least=6.0)


def update(bench: Bench, size: str, groups: int, prompt: int, answer: int) -> None:
    lengths, spent = [(prompt, answer)] * (groups * MEMBERS), dict[bool, float]()
    objective = objectives.build("grpo", {})
    for shared in (False, True):
        made = models.policy(bench, "Qwen3-0.6B")
        trainer = rl.trainer(bench, made, lr=1e-6, micro_batch_tokens=sum(map(sum, lengths)), checkpointing="layer")
        batch = rl.synthetic(lengths, made.vocab_size, MEMBERS, shared=shared).to(bench.device)
        spent[shared] = bench.timed(lambda t=trainer, b=batch: t.update(b, objective, old_is_current=True), 3, 2)
    bench.row(
        f"update of Qwen3-0.6B, {size}, prompts shared",
        spent[False] / spent[True],
        "times",
        apart_s=spent[False],
        shared_s=spent[True],
        peak_gb=bench.peak_gb,
    )
