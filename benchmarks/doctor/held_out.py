"""Magnitudes of splits that were committed before any of their runs was made: `test` is the one that is scored once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.doctor import patches as broken
from benchmarks.doctor import sizes
from benchmarks.doctor.sizes import Magnitude
from benchmarks.doctor.workloads import HALFWAY, PARTWAY

RING = "abcdefghi"
EIGHT = "abcdefgh"
FOURTH: Mapping[str, dict[str, Sequence[Magnitude]]] = {
    "temperature": {"any": [sizes.temperature(0.83), sizes.temperature(0.55), sizes.temperature(1.4)]},
    "truncation": {
        "any": [sizes.truncation("top_p=0.88"), sizes.truncation("top_k=5"), sizes.truncation("min_p=0.08")]
    },
    "alignment": {"any": [sizes.alignment(-1), sizes.alignment(1, 0.2), sizes.alignment(2, 0.4)]},
    "mask": {"any": [sizes.prompt(6), sizes.tool(" # 4\n", 4)]},
    "retokenised": {
        "any": [
            sizes.retokenised(0.08, RING, RING, 14, "sft.steps=260"),
            sizes.retokenised(0.35, RING, RING, 14, "sft.steps=260"),
        ]
    },
    "wrong_weights": {
        "moe": [
            sizes.weights("experts of layer 2 rolled by three", broken.experts_rolled(2, 3)),
            sizes.weights("key projections of the first publication", broken.keep_first(r"k_proj")),
            sizes.weights("second norm of layer 0 not loaded", broken.constant(r"layers\.0\.post_attention", 1.0)),
        ],
        "dense": [
            sizes.weights("attentions of layers 0 and 2 exchanged", broken.exchanged("layers.0.self", "layers.2.self")),
            sizes.weights("layer 0 of the first publication", broken.keep_first(r"layers\.0\.")),
            sizes.weights("input norms not loaded", broken.constant(r"input_layernorm", 1.0)),
        ],
    },
    "stale_version": {
        "any": [
            sizes.stale_version("none after the fifth", lambda n: n < 5),
            sizes.stale_version("two of five arrive", lambda n: n % 5 < 2),
        ]
    },
    "stale_kv": {"any": [sizes.stale_kv(5e-4, 600), sizes.stale_kv(3.2e-4, 900)]},
    "quantisation": {
        "any": [
            sizes.quantised("int4 in groups of 24", "int4", int4_group=24),
            sizes.quantised("fp8 weights", "fp8_weights"),
            sizes.quantised("int8", "int8"),
        ]
    },
    "routing": {"any": [sizes.coarse(0.35), sizes.jitter(0.18)]},
    "policy_lag": {"any": [sizes.lag(9, 4e-4, "run.steps=20"), sizes.lag(6, 7e-4, "run.steps=20")]},
    "entropy_collapse": {
        "any": [
            sizes.entropy_sign(0.8, *HALFWAY, "run.steps=24"),
            sizes.entropy_sign(2.5, *HALFWAY, "run.steps=24"),
        ]
    },
    "reward_failures": {
        "any": [sizes.reward(0.06, ""), sizes.reward(0.13, "connection reset by peer"), sizes.reward(0.18, None)]
    },
    "length_truncation": {"any": [sizes.room(8), sizes.room(6)]},
    "learning_rate": {"any": [sizes.rate(4.5e-3), sizes.rate(9e-3)]},
}
FIFTH: Mapping[str, dict[str, Sequence[Magnitude]]] = {
    "temperature": {"any": [sizes.temperature(0.77), sizes.temperature(0.62), sizes.temperature(1.35)]},
    "truncation": {
        "any": [sizes.truncation("top_p=0.87"), sizes.truncation("top_k=6"), sizes.truncation("min_p=0.05")]
    },
    "alignment": {"any": [sizes.alignment(2), sizes.alignment(-1, 0.35), sizes.alignment(1, 0.15)]},
    "mask": {"any": [sizes.prompt(5), sizes.tool("[7]", 3)]},
    "retokenised": {
        "any": [
            sizes.retokenised(0.15, EIGHT, EIGHT, 12, "sft.steps=320"),
            sizes.retokenised(0.28, EIGHT, EIGHT, 12, "sft.steps=320"),
        ]
    },
    "wrong_weights": {
        "moe": [
            sizes.weights("experts of layer 0 rolled by two", broken.experts_rolled(0, 2)),
            sizes.weights("query projections of the first publication", broken.keep_first(r"q_proj")),
            sizes.weights("second norms not loaded", broken.constant(r"post_attention_layernorm", 1.0)),
        ],
        "dense": [
            sizes.weights("query heads of layer 1 rolled by three", broken.heads_rolled(1, 96)),
            sizes.weights("down projections of the first publication", broken.keep_first(r"down_proj")),
            sizes.weights("norms of layer 2 not loaded", broken.constant(r"layers\.2\.\w+_layernorm", 1.0)),
        ],
    },
    "stale_version": {
        "any": [
            sizes.stale_version("none after the eighth", lambda n: n < 8),
            sizes.stale_version("three of five arrive", lambda n: n % 5 < 3),
        ]
    },
    "stale_kv": {"any": [sizes.stale_kv(4.2e-4, 650), sizes.stale_kv(3.6e-4, 950)]},
    "quantisation": {
        "any": [
            sizes.quantised("int4 in groups of 8", "int4", int4_group=8),
            sizes.quantised("bf16", "bf16"),
            sizes.quantised("fp8", "fp8"),
        ]
    },
    "routing": {"any": [sizes.coarse(0.28), sizes.jitter(0.14)]},
    "policy_lag": {"any": [sizes.lag(7, 7e-4, "run.steps=20"), sizes.lag(13, 4e-4, "run.steps=20")]},
    "entropy_collapse": {
        "any": [
            sizes.entropy_sign(0.9, *PARTWAY, "run.steps=24"),
            sizes.entropy_sign(3.5, *PARTWAY, "run.steps=24"),
        ]
    },
    "reward_failures": {
        "any": [sizes.reward(0.08, ""), sizes.reward(0.11, "rate limit exceeded (429)"), sizes.reward(0.16, None)]
    },
    "length_truncation": {"any": [sizes.room(8), sizes.room(7)]},
    "learning_rate": {"any": [sizes.rate(5.5e-3), sizes.rate(8.5e-3)]},
}
HELD_OUT = {"dev5": FOURTH, "test": FIFTH}
