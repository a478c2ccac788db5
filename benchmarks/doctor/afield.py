"""A second held-out set of another kind, scored once: several turns, graded rewards, long answers, a shipped family of no corpus.

Three worlds. `ledger`: a dense model of three wide layers writes balances in four turns, each worth a quarter. `maze`: a mixture of
40 small experts, eight a token, in four layers, walks by any shortest path. `unpacking`: a dense model with one key head writes 6 to
42 letters, paid by the share up to the first wrong one. Warm starts alone were tried before: mean rewards 0.42, 0.41 and 0.48.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.doctor import patches as broken
from benchmarks.doctor import sizes
from benchmarks.doctor.full import Full, silent
from benchmarks.doctor.ledger import Ledger
from benchmarks.doctor.silent import SILENT
from benchmarks.doctor.sizes import Magnitude
from benchmarks.doctor.unpacking import Unpacking

WORLDS: Mapping[str, Sequence[str]] = {
    "ledger": (
        f"data.task={Ledger.name}",
        "model.path=preset:tiny-qwen3",
        'model.overrides={"hidden_size": 128, "num_hidden_layers": 3, "intermediate_size": 224}',
        "sft.steps=400",
        "sft.label_noise=0.1",
        "sampling.max_new_tokens=24",
        "rollout.prompts=16",
        "rollout.samples=6",
        "run.steps=36",
        "checkpoint.every=9",
        "checkpoint.keep=4",
    ),
    "maze": (
        "data.task=maze",
        'data.options={"size": 3, "loops": 0.35}',
        "model.path=preset:tiny-qwen3-moe",
        'model.overrides={"num_experts": 40, "num_experts_per_tok": 8, "moe_intermediate_size": 16, "num_hidden_layers": 4}',
        "sft.steps=300",
        "sft.label_noise=0.05",
        "sampling.max_new_tokens=16",
        "rollout.prompts=10",
        "rollout.samples=16",
        "train.lr=4e-4",
        "run.steps=40",
        "checkpoint.every=8",
        "checkpoint.keep=3",
    ),
    "unpacking": (
        f"data.task={Unpacking.name}",
        "model.path=preset:tiny-qwen3-tied",
        'model.overrides={"hidden_size": 160, "num_hidden_layers": 2, "num_key_value_heads": 1}',
        "sft.steps=250",
        "sft.label_noise=0.02",
        "sampling.max_new_tokens=48",
        "rollout.prompts=12",
        "rollout.samples=5",
        "train.updates_per_step=2",
        "run.steps=32",
        "checkpoint.every=8",
        "checkpoint.keep=6",
    ),
}
_BUDGET: Mapping[str, Sequence[str]] = {
    "ledger": ("rollout.lag=1",),
    "maze": ("run.loop=budgeted", "rollout.budget.tokens=900", "rollout.budget.capacity=160"),
    "unpacking": ("run.loop=budgeted", "rollout.budget.tokens=1400", "rollout.budget.capacity=48"),
}
_ASYNC = ("run.loop=async", "engine.processes=1", "rollout.overlap.max_staleness=6")
_OVERLAPPED: Mapping[str, Sequence[str]] = {"ledger": ("engine.processes=1",), "maze": _ASYNC, "unpacking": _ASYNC}
"""Episodes of several turns are played in whole batches alone: there a step of lag, and an engine in its own process."""


def _healthy(world: str) -> dict[str, Sequence[str]]:
    """What people set; none of these names has been a kind of the corpora before, or not in such a world."""
    budget, turns = _BUDGET[world], world == "ledger"
    refilled = ("objective.name=dapo", "rollout.dynamic_rounds=2")
    return {
        "fp32": ("run.steps=80",),
        "bf16, one update": ("engine.dtype=bf16", "train.updates_per_step=1"),
        "fp8, dppo": ("engine.dtype=fp8", "objective.name=dppo_binary_tv"),
        "fp8_weights, kl": ("engine.dtype=fp8_weights", "train.kl_coefficient=0.02"),
        "int8, cosine": ("engine.dtype=int8", "train.schedule=cosine", "train.weight_decay=0.01", "run.steps=60"),
        "int4": ("engine.dtype=int4", "run.steps=60"),
        "opo, hot": ("advantages.name=opo", "objective.name=grpo", "sampling.temperature=1.25"),
        "min_p": ("sampling.min_p=0.03", "engine.dtype=bf16", "objective.name=cispo"),
        "minirl, fp8, long": ("objective.name=minirl", "engine.dtype=fp8", "run.steps=100"),
        "budgeted, fp8_weights": (*budget, "engine.dtype=fp8_weights"),
        "budgeted, partial": refilled if turns else (*budget, "rollout.budget.group=partial", "engine.dtype=bf16"),
        "async, int8": (*_OVERLAPPED[world], "engine.dtype=int8"),
    }


def _broken(world: str) -> dict[str, tuple[str, Magnitude]]:
    """Old faults at sizes of their own."""
    wrong = {
        "ledger": [
            sizes.weights("layer 2 of the first publication", broken.keep_first(r"layers\.2\.")),
            sizes.weights("input norms of layer 0 not loaded", broken.constant(r"layers\.0\.input_", 1.0)),
        ],
        "maze": [
            sizes.weights("experts of layer 3 rolled by eleven", broken.experts_rolled(3, 11)),
            sizes.weights("up projections of the first publication", broken.keep_first(r"up_proj")),
        ],
        "unpacking": [
            sizes.weights("query heads of layer 0 rolled", broken.heads_rolled(0, 32)),
            sizes.weights("attentions of the first publication", broken.keep_first(r"self_attn")),
        ],
    }
    lost = {"ledger": 0.14, "maze": 0.08, "unpacking": 0.1}
    table: list[tuple[str, Magnitude]] = [
        ("temperature", sizes.temperature(0.68)),
        ("temperature", sizes.temperature(1.45)),
        ("truncation", sizes.truncation("top_p=0.86")),
        ("truncation", sizes.truncation("min_p=0.07")),
        ("alignment", sizes.alignment(-1, 0.5)),
        ("alignment", sizes.alignment(3)),
        ("mask", sizes.prompt(4)),
        *(("wrong_weights", size) for size in wrong[world]),
        ("stale_version", sizes.stale_version("none after the twelfth", lambda n: n < 12)),
        ("stale_version", sizes.stale_version("four arrive, four do not", lambda n: n % 8 < 4)),
        ("quantisation", sizes.quantised("int4 in groups of 28", "int4", int4_group=28)),
        ("quantisation", sizes.quantised("fp8 weights", "fp8_weights")),
        ("policy_lag", sizes.lag(9, 8e-4)),
        ("reward_failures", sizes.reward(lost[world], "ReadTimeout: judge did not answer in 30 s")),
        ("learning_rate", sizes.rate(6.5e-3)),
        ("learning_rate", sizes.rate(1.2e-2)),
    ]
    if world == "maze":
        table += [("routing", sizes.coarse(0.6)), ("routing", sizes.jitter(0.25))]
    if world != "ledger":
        table += [("stale_kv", sizes.stale_kv(4.4e-4, 1000 if world == "unpacking" else 600))]
        table += [("reward_failures", sizes.reward(0.12, ""))]
    if world == "unpacking":
        table += [
            ("mask", sizes.tool("{z}", 7)),
            ("retokenised", sizes.retokenised(0.3, "abcdefgh", "abcdefgh", 20)),
            ("length_truncation", sizes.room(18)),
            ("entropy_collapse", sizes.entropy_sign(1.6, "sft.steps=60")),
        ]
    return {f"{cause} {size.name}": (cause, size) for cause, size in table}


_OTHER = {"ledger": ("engine.dtype=bf16",), "maze": ("train.updates_per_step=1",), "unpacking": ("engine.dtype=bf16",)}
"""Second base of the faults of a world."""
_WHOLE_ANSWERS = ("cut", "unended", "paid")
"""Silent faults that edit an answer of one turn."""


def _table() -> dict[str, Full]:
    out: dict[str, Full] = {}
    for world, words in WORLDS.items():
        for name, more in _healthy(world).items():
            out[f"{world}/healthy {name}"] = Full(words=(*words, *more))
        for place, (name, (cause, size)) in enumerate(_broken(world).items()):
            for label, base in (("", ()), (" other", _OTHER[world]))[: 1 + (place % 3 < 2)]:
                more = (*words, *base, *size.words)
                out[f"{world}/{name}{label}"] = Full(words=more, wanted=(cause,), patches=size.patches)
        for place, name in enumerate(SILENT):
            if world == "ledger" and name in _WHOLE_ANSWERS:
                continue
            base = ((), _BUDGET[world], _OVERLAPPED[world])[place % 3]
            room = ("sampling.max_new_tokens=9",) if name == "tight" and world != "maze" else ()
            made = silent(name, (*words, *base))
            out[f"{world}/silent {name}"] = Full(
                words=(*made.words, *room), wanted=made.wanted, patches=made.patches, recipe=made.recipe
            )
    return out


AFIELD = _table()
"""Healthy kinds are made with two seeds, faults with one."""
