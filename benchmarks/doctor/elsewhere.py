"""A held-out set of another kind: tasks, lengths, loops and models that no threshold was set by. Scored once.

Two worlds: words woven into one by a dense model of four layers, answers of 8 to 14 letters, and the game of 24, seldom won, by a
mixture of 32 experts. Of both, warm starts alone were tried: 0.77 of the answers right after 900 steps, 0.05 after 700.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.doctor import patches as broken
from benchmarks.doctor import sizes
from benchmarks.doctor.full import Full, silent
from benchmarks.doctor.silent import SILENT
from benchmarks.doctor.sizes import Magnitude
from benchmarks.doctor.weaving import Weaving

WORLDS: Mapping[str, Sequence[str]] = {
    "weaving": (
        f"data.task={Weaving.name}",
        'data.options={"shortest": 4, "longest": 7}',
        "model.path=preset:tiny-qwen3-tied",
        'model.overrides={"hidden_size": 96, "num_hidden_layers": 4}',
        "sft.steps=800",
        "sft.label_noise=0.04",
        "sampling.max_new_tokens=18",
        "rollout.prompts=12",
        "rollout.samples=12",
        "run.steps=40",
        "checkpoint.every=10",
        "checkpoint.keep=5",
    ),
    "cards": (
        "data.task=game24",
        'data.options={"cards": 3, "max_card": 18}',
        "model.path=preset:tiny-qwen3-moe",
        'model.overrides={"num_experts": 32, "num_experts_per_tok": 2, "moe_intermediate_size": 24}',
        "sft.steps=700",
        "sft.label_noise=0.08",
        "sampling.max_new_tokens=15",
        "rollout.prompts=20",
        "rollout.samples=10",
        "run.steps=48",
        "checkpoint.every=12",
        "checkpoint.keep=2",
    ),
}
_BUDGET = ("run.loop=budgeted", "rollout.budget.tokens=1500", "rollout.budget.capacity=96")
_ASYNC = ("run.loop=async", "engine.processes=1", "rollout.overlap.max_staleness=8")
HEALTHY: Mapping[str, Sequence[str]] = {
    "fp32": (),
    "bf16": ("engine.dtype=bf16", "objective.name=gspo"),
    "fp8": ("engine.dtype=fp8", "run.steps=90"),
    "fp8_weights": ("engine.dtype=fp8_weights", "run.steps=90"),
    "int8": ("engine.dtype=int8", "objective.name=cispo"),
    "int4": ("engine.dtype=int4", "objective.name=icepop", "run.steps=90"),
    "dapo": ("objective.name=dapo", "rollout.dynamic_rounds=3", "engine.dtype=bf16"),
    "dropped": ("rollout.drop_zero_variance=true", "engine.dtype=fp8"),
    "rloo": ("advantages.name=rloo", "objective.name=pg_is"),
    "whitened": ("advantages.name=reinforce_plus_plus", "objective.name=grpo"),
    "overlong": ("reward.overlong.buffer=6", "objective.name=grpo"),
    "budgeted": _BUDGET,
    "budgeted_fp8": (*_BUDGET, "engine.dtype=fp8", "run.steps=90"),
    "async": _ASYNC,
    "async_bf16": (*_ASYNC, "engine.dtype=bf16"),
    "cool": ("sampling.temperature=0.75", "engine.dtype=bf16"),
    "cut": ("sampling.top_p=0.92", "sampling.top_k=10"),
}


def _everywhere(world: str) -> dict[str, tuple[str, Magnitude]]:
    """Old faults at sizes of their own."""
    moe = world == "cards"
    found: list[tuple[str, Magnitude]] = [
        ("temperature", sizes.temperature(0.72)),
        ("temperature", sizes.temperature(1.28)),
        ("truncation", sizes.truncation("top_p=0.91")),
        ("truncation", sizes.truncation("top_k=7")),
        ("alignment", sizes.alignment(1)),
        ("alignment", sizes.alignment(-2, 0.3)),
        ("mask", sizes.prompt(7)),
        ("mask", sizes.tool("[k]" if not moe else "(9)", 5)),
        ("wrong_weights", sizes.weights("gates of the first publication", broken.keep_first(r"gate_proj"))),
        ("wrong_weights", sizes.weights("key norms not loaded", broken.constant(r"k_norm", 1.0))),
        ("stale_version", sizes.stale_version("none after the twentieth", lambda n: n < 20)),
        ("stale_version", sizes.stale_version("four of seven arrive", lambda n: n % 7 < 4)),
        ("stale_kv", sizes.stale_kv(3.8e-4, 1100)),
        ("quantisation", sizes.quantised("int4 in groups of 20", "int4", int4_group=20)),
        ("quantisation", sizes.quantised("fp8", "fp8")),
        ("policy_lag", sizes.lag(11, 6e-4)),
        ("reward_failures", sizes.reward(0.09, "HTTP 500 from the judge: connection reset")),
        ("reward_failures", sizes.reward(0.12, "")),
        ("learning_rate", sizes.rate(7.5e-3)),
        ("learning_rate", sizes.rate(5e-3)),
    ]
    if moe:
        found += [("routing", sizes.coarse(0.45)), ("routing", sizes.jitter(0.22))]
    else:
        ring = "klmnopqrst"
        found += [
            ("retokenised", sizes.retokenised(0.2, ring, ring, 18)),
            ("length_truncation", sizes.room(11)),
            ("entropy_collapse", sizes.entropy_sign(1.2, "sft.steps=600")),
        ]
    return {f"{cause} {size.name}": (cause, size) for cause, size in found}


def _table() -> dict[str, Full]:
    out: dict[str, Full] = {}
    for world, words in WORLDS.items():
        for name, more in HEALTHY.items():
            out[f"{world}/healthy {name}"] = Full(words=(*words, *more))
        for name, (cause, size) in _everywhere(world).items():
            for base in ((), ("engine.dtype=bf16",)):
                label = f"{world}/{name}{' bf16' if base else ''}"
                out[label] = Full(words=(*words, *base, *size.words), wanted=(cause,), patches=size.patches)
        for place, name in enumerate(SILENT):
            bases = {"sync": (), "other": (_BUDGET, _ASYNC)[place % 2]}
            for label, base in bases.items():
                out[f"{world}/silent {name} {label}"] = silent(name, (*words, *base))
    return out


ELSEWHERE = _table()
"""Healthy kinds are made with two seeds, faults with one."""
