"""A third held-out set of another kind, scored once: turns that depend on what was said, copied answers, lines paid one by one.

Three worlds. `coins`: a narrow dense model of five layers pays amounts in one to eight turns, by Dr. GRPO. `sudoku`: 28 experts, six
a token, write answers of one length of which most is copied, by SAPO. `turning`: a tied model of eight heads writes 5 to 24
characters, paid by the line, by TIS. Warm starts alone were tried before: mean rewards 0.56, 0.52 and 0.47.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from benchmarks.doctor import patches as broken
from benchmarks.doctor import sizes
from benchmarks.doctor.coins import Coins
from benchmarks.doctor.full import Full, silent
from benchmarks.doctor.silent import SILENT
from benchmarks.doctor.sizes import Magnitude
from benchmarks.doctor.turning import Turning

WORLDS: Mapping[str, Sequence[str]] = {
    "coins": (
        f"data.task={Coins.name}",
        "data.options.largest=130",
        "model.path=preset:tiny-qwen3",
        'model.overrides={"num_hidden_layers": 5, "num_attention_heads": 3, "num_key_value_heads": 1, "intermediate_size": 120}',
        "sft.steps=100",
        "experiment.label_noise=0.12",
        "sampling.max_new_tokens=36",
        "rollout.prompts=18",
        "rollout.samples=4",
        "objective.name=dr_grpo",
        "train.lr=2e-4",
        "run.steps=32",
    ),
    "sudoku": (
        "data.task=sudoku",
        "data.options.holes=7",
        "model.path=preset:tiny-qwen3-moe",
        'model.overrides={"hidden_size": 96, "num_attention_heads": 6, "num_experts": 28, "num_experts_per_tok": 6, "moe_intermediate_size": 20}',
        "sft.steps=250",
        "experiment.label_noise=0.03",
        "sampling.max_new_tokens=22",
        "rollout.prompts=10",
        "rollout.samples=10",
        "objective.name=sapo",
        "train.updates_per_step=2",
        "train.lr=2.5e-4",
        "run.steps=30",
    ),
    "turning": (
        f"data.task={Turning.name}",
        "data.options.rows=4",
        "model.path=preset:tiny-qwen3-tied",
        'model.overrides={"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 256}',
        "sft.steps=130",
        "experiment.label_noise=0.1",
        "sampling.max_new_tokens=28",
        "rollout.prompts=14",
        "rollout.samples=7",
        "objective.name=tis",
        "advantages.name=batch_std",
        "train.updates_per_step=3",
        "run.steps=26",
    ),
}
_LAG = ("experiment.lag=2",)
_BUDGET: Mapping[str, Sequence[str]] = {
    "coins": _LAG,
    "sudoku": (
        "run.loop=budgeted",
        "rollout.budget.tokens=1500",
        "rollout.budget.count=generated",
        "rollout.budget.capacity=110",
    ),
    "turning": ("run.loop=budgeted", "rollout.budget.tokens=1000", "rollout.budget.capacity=72"),
}
_OVERLAPPED: Mapping[str, Sequence[str]] = {
    "coins": ("engine.processes=1",),
    "sudoku": ("run.loop=async", "engine.processes=1", "rollout.overlap.max_staleness=4"),
    "turning": ("run.loop=async", "engine.processes=1", "rollout.overlap.max_staleness=3"),
}
"""Episodes of several turns are played in whole batches alone: there a lag, and an engine in its own process."""


def _healthy(world: str) -> dict[str, Sequence[str]]:
    """What people set."""
    trained = ("rollout.routing=replay",) if world == "sudoku" else ("experiment.rounding=int8", "engine.dtype=int8")
    return {
        "long": ("run.steps=100",) if world == "turning" else ("run.steps=60",),
        "bf16, gmpo": ("engine.dtype=bf16", "objective.name=gmpo"),
        "fp8, mis": ("engine.dtype=fp8", "objective.name=mis"),
        "fp8_weights, cosine": ("engine.dtype=fp8_weights", "objective.name=pg_tis", "train.schedule=cosine"),
        "int8, hot": ("engine.dtype=int8", "objective.name=m2po", "sampling.temperature=1.1", "sampling.min_p=0.02"),
        "int4, ipo": ("engine.dtype=int4", "objective.name=ipo", "run.steps=50"),
        "cool, top_k": ("sampling.temperature=0.85", "sampling.top_k=12", "engine.dtype=bf16"),
        "kl in the reward": ("train.kl_coefficient=0.01", "train.kl_in=reward", "train.kl_estimator=k1"),
        "gpg, one update": ("objective.name=gpg", "train.updates_per_step=1", "rollout.zero_variance=drop"),
        "budgeted, fp8": (*_BUDGET[world], "engine.dtype=fp8"),
        "overlapped, bf16": (*_OVERLAPPED[world], "engine.dtype=bf16", "objective.name=cispo"),
        "same numbers": (*trained, "train.lr=4e-4"),
    }


def _stated(dtype: str, computed: str) -> Magnitude:
    return replace(sizes.quantised(f"{computed} where {dtype} is stated", computed), words=[f"engine.dtype={dtype}"])


def _parked(lr: float, tokens: int) -> Magnitude:
    """Answers of one length all end at once: what counts is tokens as they are generated."""
    size = sizes.stale_kv(lr, tokens)
    return replace(size, words=[*size.words, "rollout.budget.count=generated"])


_BY_ENGINE: Mapping[str, dict[str, Sequence[Magnitude]]] = {
    "coins": {
        "temperature": [sizes.temperature(0.5), sizes.temperature(1.12), sizes.temperature(0.81)],
        "wrong_weights": [
            sizes.weights("layers 1 and 3 exchanged", broken.exchanged("layers.1.", "layers.3.")),
            sizes.weights("layers 3 and 4 of the first publication", broken.keep_first(r"layers\.[34]\.")),
            sizes.weights("query heads of layer 3 rolled", broken.heads_rolled(3, 32)),
        ],
        "stale_version": [
            sizes.stale_version("none after the third", lambda n: n < 3),
            sizes.stale_version("none from the eighth to the twentieth", lambda n: not 8 <= n < 20),
            sizes.stale_version("every sixth arrives", lambda n: n % 6 == 0),
        ],
        "quantisation": [
            sizes.quantised("int4 in groups of 40", "int4", int4_group=40),
            _stated("int8", "int4"),
            sizes.quantised("fp8", "fp8"),
        ],
    },
    "sudoku": {
        "temperature": [sizes.temperature(1.6), sizes.temperature(0.57), sizes.temperature(1.32)],
        "wrong_weights": [
            sizes.weights("experts of layer 1 rolled by thirteen", broken.experts_rolled(1, 13)),
            sizes.weights("queries and keys of the first publication", broken.keep_first(r"[qk]_proj")),
            sizes.weights("norms of queries and keys not loaded", broken.constant(r"[qk]_norm", 1.0)),
        ],
        "stale_version": [
            sizes.stale_version("none after the fifteenth", lambda n: n < 15),
            sizes.stale_version("every fifth arrives", lambda n: n % 5 == 0),
        ],
        "quantisation": [
            sizes.quantised("int4 in groups of 48", "int4", int4_group=48),
            _stated("fp8", "int4"),
            sizes.quantised("fp8 weights", "fp8_weights"),
        ],
        "routing": [
            sizes.coarse(0.55),
            sizes.coarse(0.8),
            sizes.coarse(0.33),
            sizes.jitter(0.16),
            sizes.jitter(0.28),
            sizes.jitter(0.4),
        ],
    },
    "turning": {
        "temperature": [sizes.temperature(0.87), sizes.temperature(1.18), sizes.temperature(0.6)],
        "wrong_weights": [
            sizes.weights("layers 0 and 1 exchanged", broken.exchanged("layers.0.", "layers.1.")),
            sizes.weights("MLP of layer 2 of the first publication", broken.keep_first(r"layers\.2\.mlp")),
            sizes.weights("query heads of layer 2 rolled by four", broken.heads_rolled(2, 128)),
        ],
        "stale_version": [
            sizes.stale_version("none after the second", lambda n: n < 2),
            sizes.stale_version("five of six arrive", lambda n: n % 6 < 5),
            sizes.stale_version("two of seven arrive", lambda n: n % 7 < 2),
        ],
        "quantisation": [sizes.quantised("int4 in groups of 64", "int4", int4_group=64), _stated("bf16", "int4")],
    },
}
"""What is broken in the engine: it shows in whichever loop drives an engine of this process."""
_BY_RECORD: Mapping[str, dict[str, Sequence[Magnitude]]] = {
    "coins": {
        "truncation": [sizes.truncation("top_p=0.82"), sizes.truncation("min_p=0.12")],
        "alignment": [sizes.alignment(1), sizes.alignment(-1, 0.7), sizes.alignment(-3)],
        "mask": [sizes.prompt(2), sizes.prompt(3)],
        "reward_failures": [sizes.reward(0.22, "upstream timed out after 60 s"), sizes.reward(0.17, "")],
    },
    "sudoku": {
        "truncation": [
            sizes.truncation("top_p=0.75"),
            sizes.truncation("top_p=0.9", "top_k=8"),
            sizes.truncation("min_p=0.2"),
        ],
        "alignment": [sizes.alignment(-3), sizes.alignment(2, 0.25), sizes.alignment(1, 0.45)],
        "mask": [sizes.prompt(10), sizes.prompt(1)],
        "reward_failures": [sizes.reward(0.35, ""), sizes.reward(0.1, "429: quota exceeded")],
    },
    "turning": {
        "truncation": [
            sizes.truncation("min_p=0.15"),
            sizes.truncation("top_p=0.84"),
            sizes.truncation("top_p=0.94", "min_p=0.03"),
        ],
        "alignment": [sizes.alignment(4), sizes.alignment(-2, 0.6), sizes.alignment(1, 0.4)],
        "mask": [sizes.prompt(12), sizes.prompt(3)],
        "reward_failures": [sizes.reward(0.25, None), sizes.reward(0.2, "judge: invalid JSON in reply")],
    },
}
"""What is broken between engine and trainer: it shows in every loop."""
_IN_ITS_LOOP: Mapping[str, dict[str, Sequence[Magnitude]]] = {
    "coins": {
        "policy_lag": [sizes.lag(5, 1.2e-3), sizes.lag(15, 5e-4, "run.steps=40")],
        "learning_rate": [sizes.rate(1.5e-2), sizes.rate(5.8e-3)],
        "length_truncation": [sizes.room(10), sizes.room(13), sizes.room(8)],
        "entropy_collapse": [sizes.entropy_sign(1.1, "sft.steps=50"), sizes.entropy_sign(6.0, "sft.steps=60")],
    },
    "sudoku": {
        "mask": [sizes.tool("{8}", 10), sizes.tool("\n>>\n", 3)],
        "retokenised": [
            sizes.retokenised(0.18, "1234", "1234/", 9, "sft.steps=280"),
            sizes.retokenised(0.45, "1234", "1234/", 6, "sft.steps=300"),
        ],
        "stale_kv": [_parked(6e-4, 1400), _parked(4.5e-4, 1000), _parked(8e-4, 1900)],
        "policy_lag": [sizes.lag(8, 1.2e-3), sizes.lag(18, 7e-4, "run.steps=44")],
        "learning_rate": [sizes.rate(2e-2), sizes.rate(9.5e-3)],
        "entropy_collapse": [sizes.entropy_sign(1.8, "sft.steps=130"), sizes.entropy_sign(0.75, "sft.steps=110")],
    },
    "turning": {
        "mask": [sizes.tool("<o>", 6), sizes.tool("[exit 0]", 2)],
        "retokenised": [
            sizes.retokenised(0.22, "abcdefghi", "abcdefghi", 22, "sft.steps=170"),
            sizes.retokenised(0.38, "abcdefghi", "abcdefghi", 16, "sft.steps=160"),
            sizes.retokenised(0.1, "abcdefghi", "abcdefghi/", 24, "sft.steps=180"),
        ],
        "stale_kv": [sizes.stale_kv(5.5e-4, 800), sizes.stale_kv(7e-4, 1200), sizes.stale_kv(4e-4, 500)],
        "policy_lag": [sizes.lag(6, 1e-3), sizes.lag(12, 7e-4, "run.steps=34")],
        "learning_rate": [sizes.rate(1.1e-2), sizes.rate(2.5e-2)],
        "length_truncation": [sizes.room(16), sizes.room(11), sizes.room(14)],
        "entropy_collapse": [sizes.entropy_sign(2.2, "sft.steps=90"), sizes.entropy_sign(0.85, "sft.steps=80")],
    },
}
"""What one loop alone has, or what another would blur."""
_TIGHT = {"coins": 6, "sudoku": 9, "turning": 8}
_WHOLE_ANSWERS = ("cut", "unended", "paid")
"""Silent faults that edit an answer of one turn."""


def _loops(world: str) -> list[tuple[Mapping[str, Sequence[Magnitude]], list[Sequence[str]]]]:
    """Faults, and the bases that take turns under them."""
    cispo = ("engine.dtype=bf16", "objective.name=cispo")
    return [
        (_BY_ENGINE[world], [(), _BUDGET[world], (*_LAG, *cispo)]),
        (_BY_RECORD[world], [_OVERLAPPED[world], (), _BUDGET[world], cispo]),
        (_IN_ITS_LOOP[world], [(), ("engine.dtype=bf16",)]),
    ]


def _table() -> dict[str, Full]:
    out: dict[str, Full] = {}
    for shift, (world, words) in enumerate(WORLDS.items()):
        for name, more in _healthy(world).items():
            out[f"{world}/healthy {name}"] = Full(words=(*words, *more))
        for faults, bases in _loops(world):
            every = [(cause, size) for cause, magnitudes in faults.items() for size in magnitudes]
            for place, (cause, size) in enumerate(every):
                more = (*words, *bases[place % len(bases)], *size.words)
                out[f"{world}/{cause} {size.name}"] = Full(words=more, wanted=(cause,), patches=size.patches)
        for place, name in enumerate(SILENT):
            if world == "coins" and name in _WHOLE_ANSWERS:
                continue
            base = (_OVERLAPPED[world], (), _BUDGET[world])[(place + shift) % 3]
            made = silent(name, (*words, *base))
            room = (f"sampling.max_new_tokens={_TIGHT[world]}",) if name == "tight" else ()
            out[f"{world}/silent {name}"] = replace(made, words=(*made.words, *room))
    return out


ABROAD = _table()
"""Healthy kinds are made with two seeds, faults with one."""
