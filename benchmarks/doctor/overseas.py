"""A fourth held-out set of another kind, scored once, whose magnitudes are drawn from the ranges that the other splits span.

Four worlds. `climbing`: a dense model of six narrow layers writes 5 to 20 characters, right or wrong as a whole, by MiniRL-TIS.
`knights`: 13 experts, five a token, write four letters at the end of long prompts, by OPSM. `guessing`: a tied model with narrow
heads finds numbers in up to six turns, by TOPR. `tallying`: 15 wide experts, one a token, count letters, paid by the letter, by LUSPO.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

from benchmarks.doctor import patches as broken
from benchmarks.doctor import sizes
from benchmarks.doctor.climbing import Climbing
from benchmarks.doctor.full import Full, silent
from benchmarks.doctor.guessing import Guessing
from benchmarks.doctor.silent import SILENT
from benchmarks.doctor.sizes import Magnitude
from benchmarks.doctor.tallying import Tallying

WORLDS: Mapping[str, Sequence[str]] = {
    "climbing": (
        f"data.task={Climbing.name}",
        'data.options={"fewest": 3, "most": 7}',
        "model.path=preset:tiny-qwen3",
        'model.overrides={"hidden_size": 48, "num_hidden_layers": 6, "num_attention_heads": 3, "num_key_value_heads": 3, "intermediate_size": 112}',
        "sft.steps=320",
        "experiment.label_noise=0.02",
        "sampling.max_new_tokens=24",
        "rollout.prompts=9",
        "rollout.samples=7",
        "objective.name=minirl_tis",
        "train.lr=2e-4",
        "train.updates_per_step=3",
        "run.steps=26",
    ),
    "knights": (
        "data.task=knights",
        "data.options.people=4",
        "model.path=preset:tiny-qwen3-moe",
        'model.overrides={"hidden_size": 72, "num_attention_heads": 2, "num_key_value_heads": 1, "num_experts": 13, "num_experts_per_tok": 5, "moe_intermediate_size": 20}',
        "sft.steps=160",
        "experiment.label_noise=0.1",
        "sampling.max_new_tokens=8",
        "rollout.prompts=8",
        "rollout.samples=15",
        "objective.name=opsm",
        "advantages.name=rloo",
        "train.updates_per_step=2",
        "run.steps=26",
    ),
    "guessing": (
        f"data.task={Guessing.name}",
        "data.options.largest=24",
        "model.path=preset:tiny-qwen3-tied",
        'model.overrides={"hidden_size": 80, "num_hidden_layers": 3, "num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 16, "intermediate_size": 96}',
        "sft.steps=160",
        "experiment.label_noise=0.3",
        "sampling.max_new_tokens=26",
        "rollout.prompts=9",
        "rollout.samples=6",
        "objective.name=topr",
        "train.updates_per_step=1",
        "train.lr=2e-4",
        "run.steps=24",
    ),
    "tallying": (
        f"data.task={Tallying.name}",
        "model.path=preset:tiny-qwen3-moe",
        'model.overrides={"hidden_size": 112, "num_key_value_heads": 4, "num_experts": 15, "num_experts_per_tok": 1, "moe_intermediate_size": 72}',
        "sft.steps=150",
        "experiment.label_noise=0.1",
        "sampling.max_new_tokens=15",
        "rollout.prompts=8",
        "rollout.samples=11",
        "objective.name=luspo",
        "train.lr=5e-4",
        "advantages.name=batch_std",
        "train.updates_per_step=2",
        "run.steps=26",
    ),
}
_LAG = ("experiment.lag=2",)
_BUDGET: Mapping[str, Sequence[str]] = {
    "climbing": ("run.loop=budgeted", "rollout.budget.tokens=650", "rollout.budget.capacity=60"),
    "knights": (
        "run.loop=budgeted",
        "rollout.budget.tokens=480",
        "rollout.budget.capacity=104",
        "rollout.budget.count=generated",
    ),
    "guessing": _LAG,
    "tallying": ("run.loop=budgeted", "rollout.budget.tokens=600", "rollout.budget.capacity=88"),
}
_ASYNC = ("run.loop=async", "engine.processes=1", "rollout.overlap.max_staleness=6")
_OVERLAPPED: Mapping[str, Sequence[str]] = dict.fromkeys(WORLDS, _ASYNC) | {"guessing": ("engine.processes=1",)}
"""Episodes of several turns are played in whole batches alone: there a lag, and an engine in its own process."""


def _healthy(world: str) -> dict[str, Sequence[str]]:
    """What people set."""
    kept = _LAG if world == "guessing" else (*_BUDGET[world], "engine.kv=keep")
    return {
        "long": ("run.steps=70",),
        "sure": ("experiment.label_noise=0.0", "engine.dtype=bf16", "objective.name=dapo"),
        "fp16, int8 moments": ("engine.dtype=fp16", "train.moments=int8", "train.schedule=cosine"),
        "fp8, trm": ("engine.dtype=fp8", "objective.name=trm", "advantages.name=maxrl"),
        "int8, cut": ("engine.dtype=int8", "objective.name=mask_negative", "sampling.top_p=0.93"),
        "int4, kl": ("engine.dtype=int4", "objective.name=relax_clip", "train.kl_coefficient=0.01"),
        "budgeted, fp8_weights": (*kept, "engine.dtype=fp8_weights", "objective.name=mis_po"),
        "overlapped, bf16": (*_OVERLAPPED[world], "engine.dtype=bf16", "objective.name=vespo"),
    }


_WEIGHTS: Mapping[str, Sequence[Magnitude]] = {
    "climbing": [
        sizes.weights("layers 2 and 4 exchanged", broken.exchanged("layers.2.", "layers.4.")),
        sizes.weights("layers 3 to 5 of the first publication", broken.keep_first(r"layers\.[345]\.")),
        sizes.weights("query heads of layer 5 rolled by two", broken.heads_rolled(5, 64)),
    ],
    "knights": [
        sizes.weights("experts of layer 1 rolled by six", broken.experts_rolled(1, 6)),
        sizes.weights("experts of layer 0 of the first publication", broken.keep_first(r"layers\.0\.mlp\.experts")),
        sizes.weights("second norm of layer 1 not loaded", broken.constant(r"layers\.1\.post_attention", 1.0)),
    ],
    "guessing": [
        sizes.weights("query heads of layer 0 rolled by two", broken.heads_rolled(0, 32)),
        sizes.weights("down projections of the first publication", broken.keep_first(r"down_proj")),
        sizes.weights("MLPs of layers 1 and 2 exchanged", broken.exchanged("layers.1.mlp", "layers.2.mlp")),
    ],
    "tallying": [
        sizes.weights("experts of layer 0 rolled by four", broken.experts_rolled(0, 4)),
        sizes.weights("attentions of the first publication", broken.keep_first(r"self_attn")),
        sizes.weights("key norms not loaded", broken.constant(r"k_norm", 1.0)),
    ],
}
_DETAILS = ("", None, "503: no judge is free", "SandboxError: killed")
_BEHIND = {"climbing": (2, 10), "knights": (2, 3), "tallying": (2, 4)}
"""Tokens before a tool's output."""
_PARKED = {"climbing": (500, 900), "knights": (350, 600), "tallying": (400, 800)}
"""Tokens of a step whose sequences are parked."""
_TOOL = {"climbing": ";ok;", "knights": "[ans]", "tallying": "<1>"}
_PAIRS = {"climbing": ("0123456789", ",", 10), "knights": ("NK", "NK", 4), "tallying": ("abcdef", "1234", 24)}
_ROOM = {"climbing": (8, 14), "guessing": (8, 12), "tallying": (6, 8)}
_TIGHT = {"climbing": 6, "knights": 3, "guessing": 5, "tallying": 4}
_WHOLE_ANSWERS = ("cut", "unended", "paid")
"""Silent faults that edit an answer of one turn."""


def _by_engine(world: str, rng: random.Random) -> dict[str, list[Magnitude]]:
    """What is broken in the engine: it shows in whichever loop drives an engine of this process."""
    after, of = rng.randint(2, 20), rng.randint(3, 7)
    arrive, group = rng.randint(1, of - 1), rng.randint(7, 64)
    dtype = rng.choice(("fp8", "fp8_weights", "int8"))
    out: dict[str, list[Magnitude]] = {
        "temperature": [_temperature(rng, 0.5, 0.9), _temperature(rng, 1.12, 1.6)],
        "wrong_weights": [*_WEIGHTS[world]],
        "stale_version": [
            sizes.stale_version(f"none after {after}", lambda n: n < after),
            sizes.stale_version(f"{arrive} of {of} arrive", lambda n: n % of < arrive),
        ],
        "quantisation": [
            sizes.quantised(f"int4 in groups of {group}", "int4", int4_group=group),
            sizes.quantised(f"{dtype} unstated", dtype),
        ],
    }
    if world in ("knights", "tallying"):
        out["routing"] = [
            sizes.coarse(round(rng.uniform(0.25, 0.8), 2)),
            sizes.jitter(round(rng.uniform(0.12, 0.4), 2)),
        ]
        out["routing"] += [rng.choice((sizes.coarse, sizes.jitter))(round(rng.uniform(0.25, 0.4), 2))]
    return out


def _by_record(world: str, rng: random.Random) -> dict[str, list[Magnitude]]:
    """What is broken between engine and trainer: it shows in every loop."""
    cuts = [
        sizes.truncation(f"top_p={rng.uniform(0.75, 0.95):.2f}"),
        sizes.truncation(f"top_k={rng.randint(2, 8)}"),
        sizes.truncation(f"min_p={rng.uniform(0.04, 0.2):.2f}"),
    ]
    lost = rng.sample(_DETAILS, 2)
    return {
        "truncation": rng.sample(cuts, 2),
        "alignment": [
            sizes.alignment(rng.choice((-3, -2, -1, 1, 2, 3, 4))),
            sizes.alignment(rng.choice((-2, -1, 1, 2)), round(rng.uniform(0.15, 0.7), 2)),
        ],
        "mask": [sizes.prompt(rng.randint(1, 12))],
        "reward_failures": [sizes.reward(round(rng.uniform(0.04, 0.35), 2), detail) for detail in lost],
    }


def _in_its_loop(world: str, rng: random.Random) -> dict[str, list[Magnitude]]:
    """What one loop alone has, or what another would blur."""
    steps = rng.randint(5, 16)
    sft = next(int(word.split("=")[1]) for word in WORLDS[world] if word.startswith("sft.steps="))
    out: dict[str, list[Magnitude]] = {
        "policy_lag": [sizes.lag(steps, round(rng.uniform(3e-4, 1.2e-3), 5), f"run.steps={steps + 24}")],
        "learning_rate": [sizes.rate(round(rng.uniform(4.5e-3, 2.5e-2), 4)) for _ in range(2)],
        "entropy_collapse": [sizes.entropy_sign(round(rng.uniform(0.7, 4.0), 1), f"sft.steps={sft // 2}")],
    }
    if world in _ROOM:
        out["length_truncation"] = [sizes.room(tokens) for tokens in rng.sample(range(*_ROOM[world]), 2)]
    if world in _PARKED:
        out["mask"] = [sizes.tool(_TOOL[world], rng.randint(*_BEHIND[world]))]
        out["retokenised"] = [sizes.retokenised(round(rng.uniform(0.05, 0.45), 2), *_PAIRS[world])]
        out["stale_kv"] = [_stale_kv(world, rng) for _ in range(2)]
    return out


def _temperature(rng: random.Random, low: float, high: float) -> Magnitude:
    return sizes.temperature(round(rng.uniform(low, high), 2))


def _stale_kv(world: str, rng: random.Random) -> Magnitude:
    """Answers of one length all end at once: what counts there is tokens as they are generated."""
    size = sizes.stale_kv(round(rng.uniform(3e-4, 8e-4), 5), rng.randint(*_PARKED[world]))
    return replace(size, words=[*size.words, "rollout.budget.count=generated"]) if world == "knights" else size


def _table() -> dict[str, Full]:
    out: dict[str, Full] = {}
    for shift, (world, words) in enumerate(WORLDS.items()):
        for name, more in _healthy(world).items():
            out[f"{world}/healthy {name}"] = Full(words=(*words, *more))
        rng = random.Random(f"overseas/{world}")
        budget, bf16 = _BUDGET[world], ("engine.dtype=bf16", "objective.name=cispo")
        loops: Sequence[tuple[Mapping[str, Sequence[Magnitude]], Sequence[Sequence[str]]]] = (
            (_by_engine(world, rng), [(), budget, (*_LAG, "objective.name=cispo")]),
            (_by_record(world, rng), [budget, (), _OVERLAPPED[world], bf16]),
            (_in_its_loop(world, rng), [(), ("engine.dtype=bf16",)]),
        )
        for faults, bases in loops:
            every = [(cause, size) for cause, magnitudes in faults.items() for size in magnitudes]
            for place, (cause, size) in enumerate(every):
                more = (*words, *bases[place % len(bases)], *size.words)
                out[f"{world}/{cause} {size.name}"] = Full(words=more, wanted=(cause,), patches=size.patches)
        for place, name in enumerate(SILENT):
            if (place + shift) % 4 == 3 or (world == "guessing" and name in _WHOLE_ANSWERS):
                continue
            made = silent(name, (*words, *((), budget, (), bf16, _OVERLAPPED[world])[(place + shift) % 5]))
            room = (f"sampling.max_new_tokens={_TIGHT[world]}",) if name == "tight" else ()
            out[f"{world}/silent {name}"] = replace(made, words=(*made.words, *room))
    return out


OVERSEAS = _table()
"""Healthy kinds are made with two seeds, faults with one."""
