"""The faults, each with magnitudes for the splits: overrides of the config and broken parts, see `sizes` and `patches`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.doctor import patches as broken
from benchmarks.doctor import sizes
from benchmarks.doctor.held_out import HELD_OUT
from benchmarks.doctor.sizes import Magnitude
from benchmarks.doctor.workloads import ADDITION, BEGINNING, LONGER, UNSURE

DIGITS = "0123456789"
LETTERS = "abcdefghij"
ALL = ("plain", "bf16", "truncated", "tempered", "stale")
UNTRUNCATED = ("plain", "bf16", "tempered", "stale")
BASES: dict[str, dict[str, list[str]]] = {
    "plain": {"dev": [], "dev2": [], "dev3": [], "dev4": [], "dev5": [], "test": []},
    "bf16": {
        "dev": ["engine.dtype=bf16"],
        "dev2": ["engine.dtype=bf16", "objective.name=grpo"],
        "dev3": ["engine.dtype=bf16", "objective.name=gspo"],
        "dev4": ["engine.dtype=bf16", "objective.name=dapo"],
        "dev5": ["engine.dtype=bf16", "objective.name=cispo"],
        "test": ["engine.dtype=bf16", "objective.name=dppo_binary_kl"],
    },
    "truncated": {
        "dev": ["sampling.top_p=0.9"],
        "dev2": ["sampling.top_p=0.95", "sampling.top_k=20"],
        "dev3": ["sampling.top_p=0.97", "sampling.min_p=0.01"],
        "dev4": ["sampling.top_p=0.92", "sampling.top_k=8"],
        "dev5": ["sampling.top_p=0.94", "sampling.top_k=12"],
        "test": ["sampling.top_p=0.96", "sampling.min_p=0.02"],
    },
    "tempered": {
        "dev": ["sampling.temperature=0.8"],
        "dev2": ["sampling.temperature=1.2"],
        "dev3": ["sampling.temperature=0.9"],
        "dev4": ["sampling.temperature=1.1"],
        "dev5": ["sampling.temperature=0.85"],
        "test": ["sampling.temperature=1.15"],
    },
    "stale": {
        "dev": ["rollout.lag=1"],
        "dev2": ["rollout.lag=2", "objective.name=grpo"],
        "dev3": ["rollout.lag=3", "objective.name=dppo_binary_tv"],
        "dev4": ["rollout.lag=4", "objective.name=icepop"],
        "dev5": ["rollout.lag=2", "objective.name=minirl"],
        "test": ["rollout.lag=3", "objective.name=cispo"],
    },
}
"""What a run is without its fault; seeds take turns, so that no fault is judged on one kind of run alone."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A cause that the doctor should name."""

    id: str
    bug: bool
    """True if a program is wrong; False for settings and numbers that do not go together."""
    about: str
    dev: dict[str, Sequence[Magnitude]]
    """By model: `any`, or `moe` and `dense`."""
    dev2: dict[str, Sequence[Magnitude]]
    dev3: dict[str, Sequence[Magnitude]]
    dev4: dict[str, Sequence[Magnitude]]
    """What was or is held out since stands in `held_out`."""
    bases: tuple[str, ...] = ("plain",)
    models: tuple[str, str] = ("moe", "dense")
    brief: bool = False
    """It is there from the first step on: half as many steps do in `BRIEF` splits."""

    def magnitudes(self, split: str, model: str) -> Sequence[Magnitude]:
        found: dict[str, Sequence[Magnitude]] = HELD_OUT[split][self.id] if split in HELD_OUT else getattr(self, split)
        return found.get(model) or found["any"]


def _faults() -> list[Fault]:
    return [
        Fault(
            id="temperature",
            bug=True,
            about="sampled at T ≠ 1, log-probs logged at T = 1",
            dev={"any": [sizes.temperature(0.7), sizes.temperature(1.3)]},
            dev2={"any": [sizes.temperature(0.85), sizes.temperature(0.6), sizes.temperature(1.2)]},
            dev3={"any": [sizes.temperature(0.9), sizes.temperature(0.75), sizes.temperature(1.15)]},
            dev4={"any": [sizes.temperature(0.8), sizes.temperature(0.65), sizes.temperature(1.25)]},
            bases=("plain", "bf16", "stale"),
            brief=True,
        ),
        Fault(
            id="truncation",
            bug=True,
            about="sampled from a cut distribution, log-probs not renormalised and the kept mass not recorded",
            dev={"any": [sizes.truncation("top_p=0.9"), sizes.truncation("top_k=4")]},
            dev2={
                "any": [sizes.truncation("top_p=0.95"), sizes.truncation("top_p=0.8"), sizes.truncation("min_p=0.1")]
            },
            dev3={"any": [sizes.truncation("top_p=0.93"), sizes.truncation("top_k=3"), sizes.truncation("min_p=0.06")]},
            dev4={"any": [sizes.truncation("top_p=0.85"), sizes.truncation("min_p=0.04"), sizes.truncation("top_k=2")]},
            bases=("plain", "bf16", "stale"),
            brief=True,
        ),
        Fault(
            id="alignment",
            bug=True,
            about="log-probs of the neighbouring token",
            dev={"any": [sizes.alignment(1)]},
            dev2={"any": [sizes.alignment(1), sizes.alignment(-1), sizes.alignment(2)]},
            dev3={"any": [sizes.alignment(-2), sizes.alignment(1, 0.3), sizes.alignment(-1)]},
            dev4={"any": [sizes.alignment(2), sizes.alignment(-1, 0.25), sizes.alignment(-2, 0.5)]},
            bases=ALL,
            brief=True,
        ),
        Fault(
            id="mask",
            bug=True,
            about="tokens that the policy did not sample count as its response, with log-prob 0",
            dev={"any": [sizes.prompt(4), sizes.tool(" ok\n", 3)]},
            dev2={"any": [sizes.prompt(1), sizes.prompt(8), sizes.tool("<r>", 2)]},
            dev3={"any": [sizes.prompt(2), sizes.prompt(5), sizes.tool("=7;", 4)]},
            dev4={"any": [sizes.prompt(3), sizes.tool("\nout: 8\n", 5)]},
            bases=("plain", "bf16", "tempered"),
            brief=True,
        ),
        Fault(
            id="retokenised",
            bug=True,
            about="the response's text was encoded anew; log-probs stay at their positions",
            dev={
                "any": [
                    sizes.retokenised(0.1, DIGITS, DIGITS, 8, "sft.steps=400"),
                    sizes.retokenised(0.3, DIGITS, DIGITS, 8, "sft.steps=400"),
                ]
            },
            dev2={"any": [sizes.retokenised(0.2, "+-*/", DIGITS, 24), sizes.retokenised(0.05, "+-*/", DIGITS, 24)]},
            dev3={
                "any": [
                    sizes.retokenised(0.06, LETTERS, LETTERS, 20, "sft.steps=300"),
                    sizes.retokenised(0.25, LETTERS, LETTERS, 20, "sft.steps=300"),
                ]
            },
            dev4={
                "any": [
                    sizes.retokenised(0.12, DIGITS, DIGITS, 16, "sft.steps=160"),
                    sizes.retokenised(0.4, DIGITS, DIGITS, 16, "sft.steps=160"),
                ]
            },
            bases=("plain", "bf16"),
            brief=True,
        ),
        Fault(
            id="wrong_weights",
            bug=True,
            about="the engine computes with other weights than it was given",
            dev={
                "moe": [
                    sizes.weights("experts of layer 1 rolled by one", broken.experts_rolled(1, 1)),
                    sizes.weights("head of the first publication", broken.keep_first(r"lm_head")),
                ],
                "dense": [
                    sizes.weights("query heads of layer 1 rolled", broken.heads_rolled(1, 32)),
                    sizes.weights("head of the first publication", broken.keep_first(r"lm_head")),
                ],
            },
            dev2={
                "moe": [
                    sizes.weights("experts of layer 2 rolled by four", broken.experts_rolled(2, 4)),
                    sizes.weights("experts of the first publication", broken.keep_first(r"experts")),
                    sizes.weights("final norm not loaded", broken.constant(r"^model\.norm\.weight", 1.0)),
                ],
                "dense": [
                    sizes.weights("query heads of layer 2 rolled", broken.heads_rolled(2, 32)),
                    sizes.weights("MLPs of the first publication", broken.keep_first(r"mlp")),
                    sizes.weights("final norm not loaded", broken.constant(r"^model\.norm\.weight", 1.0)),
                ],
            },
            dev3={
                "moe": [
                    sizes.weights("experts of layer 0 rolled by three", broken.experts_rolled(0, 3)),
                    sizes.weights("attention outputs of the first publication", broken.keep_first(r"o_proj")),
                    sizes.weights("key norms not loaded", broken.constant(r"k_norm", 1.0)),
                ],
                "dense": [
                    sizes.weights("query heads of layer 0 rolled by two", broken.heads_rolled(0, 64)),
                    sizes.weights("layer 1 of the first publication", broken.keep_first(r"layers\.1\.")),
                    sizes.weights("norms of layer 1 not loaded", broken.constant(r"layers\.1\.\w+_layernorm", 1.0)),
                ],
            },
            dev4={
                "moe": [
                    sizes.weights("experts of layer 1 rolled by five", broken.experts_rolled(1, 5)),
                    sizes.weights("value projections of the first publication", broken.keep_first(r"v_proj")),
                    sizes.weights("input norm of layer 1 not loaded", broken.constant(r"layers\.1\.input_", 1.0)),
                ],
                "dense": [
                    sizes.weights("MLPs of layers 0 and 1 exchanged", broken.exchanged("layers.0.mlp", "layers.1.mlp")),
                    sizes.weights("embeddings of the first publication", broken.keep_first(r"embed_tokens|lm_head")),
                    sizes.weights("query norms not loaded", broken.constant(r"q_norm", 1.0)),
                ],
            },
            bases=("plain", "bf16"),
        ),
        Fault(
            id="stale_version",
            bug=True,
            about="the engine stamps versions whose weights did not arrive",
            dev={
                "any": [
                    sizes.stale_version("none after the sixth", lambda n: n < 6),
                    sizes.stale_version("every fourth arrives", lambda n: n % 4 == 0),
                ]
            },
            dev2={
                "any": [
                    sizes.stale_version("none after the tenth", lambda n: n < 10),
                    sizes.stale_version("every third arrives", lambda n: n % 3 == 0),
                ]
            },
            dev3={
                "any": [
                    sizes.stale_version("none after the ninth", lambda n: n < 9),
                    sizes.stale_version("every second arrives", lambda n: n % 2 == 0),
                ]
            },
            dev4={
                "any": [
                    sizes.stale_version("none after the seventh", lambda n: n < 7),
                    sizes.stale_version("two of three arrive", lambda n: n % 3 != 2),
                ]
            },
            bases=("plain", "bf16"),
        ),
        Fault(
            id="stale_kv",
            bug=True,
            about="resumed sequences keep old KV, stated to be recomputed",
            dev={"any": [sizes.stale_kv(5e-4, 700), sizes.stale_kv(3e-4, 1000)]},
            dev2={"any": [sizes.stale_kv(4e-4, 350), sizes.stale_kv(4e-4, 500)]},
            dev3={"any": [sizes.stale_kv(3.5e-4, 450), sizes.stale_kv(3e-4, 600)]},
            dev4={"any": [sizes.stale_kv(4.5e-4, 800), sizes.stale_kv(3.5e-4, 550)]},
        ),
        Fault(
            id="quantisation",
            bug=False,
            about="the engine computes in fewer bits than it states",
            dev={"any": [sizes.quantised("int4", "int4"), sizes.quantised("fp8", "fp8")]},
            dev2={
                "any": [
                    sizes.quantised("int4 per row", "int4", int4_group=7),
                    sizes.quantised("fp8 weights", "fp8_weights"),
                ]
            },
            dev3={
                "any": [sizes.quantised("int4 in groups of 12", "int4", int4_group=12), sizes.quantised("int8", "int8")]
            },
            dev4={
                "any": [
                    sizes.quantised("int4 in groups of 16", "int4", int4_group=16),
                    sizes.quantised("bf16", "bf16"),
                    sizes.quantised("fp8", "fp8"),
                ]
            },
            bases=("plain", "tempered", "truncated"),
            brief=True,
        ),
        Fault(
            id="routing",
            bug=False,
            about="the engine's routers choose other experts than the trainer's",
            dev={"any": [sizes.coarse(0.5), sizes.jitter(0.3)]},
            dev2={"any": [sizes.coarse(0.25), sizes.jitter(0.2)]},
            dev3={"any": [sizes.coarse(0.3), sizes.jitter(0.15)]},
            dev4={"any": [sizes.coarse(0.4), sizes.jitter(0.12)]},
            bases=("plain", "bf16"),
            models=("moe", "moe2"),
            brief=True,
        ),
        Fault(
            id="policy_lag",
            bug=False,
            about="batches many steps old at a high learning rate, stated",
            dev={"any": [sizes.lag(6, 5e-4), sizes.lag(10, 3e-4)]},
            dev2={"any": [sizes.lag(8, 5e-4), sizes.lag(14, 4e-4)]},
            dev3={"any": [sizes.lag(7, 6e-4, "run.steps=20"), sizes.lag(12, 5e-4, "run.steps=20")]},
            dev4={"any": [sizes.lag(5, 8e-4, "run.steps=20"), sizes.lag(16, 3e-4, "run.steps=24")]},
        ),
        Fault(
            id="entropy_collapse",
            bug=False,
            about="the policy becomes nearly deterministic before it is good",
            dev={
                "any": [
                    sizes.entropy_sign(4.0, *ADDITION, "run.steps=40"),
                    sizes.entropy_sign(10.0, *ADDITION, "run.steps=40"),
                ]
            },
            dev2={"any": [sizes.entropy_sign(0.7), sizes.entropy_sign(2.0)]},
            dev3={
                "any": [
                    sizes.entropy_sign(1.5, *UNSURE, "run.steps=24"),
                    sizes.entropy_sign(5.0, *UNSURE, "run.steps=24"),
                ]
            },
            dev4={
                "any": [
                    sizes.entropy_sign(1.0, *BEGINNING, "run.steps=24"),
                    sizes.entropy_sign(3.0, *BEGINNING, "run.steps=24"),
                ]
            },
        ),
        Fault(
            id="reward_failures",
            bug=True,
            about="a grader's failures count as wrong answers",
            dev={"any": [sizes.reward(0.1, ""), sizes.reward(0.3, "")]},
            dev2={"any": [sizes.reward(0.05, ""), sizes.reward(0.2, "TimeoutError")]},
            dev3={"any": [sizes.reward(0.07, ""), sizes.reward(0.12, None)]},
            dev4={
                "any": [sizes.reward(0.04, ""), sizes.reward(0.1, "judge returned HTTP 502"), sizes.reward(0.15, None)]
            },
            bases=ALL,
            brief=True,
        ),
        Fault(
            id="length_truncation",
            bug=False,
            about="too little room for the answers",
            dev={"any": [sizes.room_for_the_end(3, *ADDITION, "run.steps=40")]},
            dev2={"any": [sizes.room(7, *LONGER), sizes.room(8, *LONGER)]},
            dev3={"any": [sizes.room(7), sizes.room(6)]},
            dev4={"any": [sizes.room(9), sizes.room(7)]},
            bases=("plain", "bf16", "tempered"),
            brief=True,
        ),
        Fault(
            id="learning_rate",
            bug=False,
            about="steps so large that the policy gets worse",
            dev={"any": [sizes.rate(5e-3), sizes.rate(1e-2)]},
            dev2={"any": [sizes.rate(4e-3), sizes.rate(8e-3)]},
            dev3={"any": [sizes.rate(3e-3), sizes.rate(6e-3)]},
            dev4={"any": [sizes.rate(3.5e-3), sizes.rate(7e-3)]},
            bases=("plain", "bf16"),
        ),
    ]


FAULTS: dict[str, Fault] = {fault.id: fault for fault in _faults()}
