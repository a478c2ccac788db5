"""Controls: what looks like a gap between engines and is the learning rate, and what every stable algorithm must reach."""

from __future__ import annotations

from rollkeel.lab.claims import BEST, COMMON, REWARD, above, inside, judged
from rollkeel.lab.preset import Arm, Preset
from rollkeel.lab.presets.bases import arm

LR_CONTROL = Preset(
    name="lr-control",
    question="Which collapses are the learning rate's, with no gap between engines at all?",
    paper="rollkeel's prototype; no paper runs this control",
    expected="lr 1e-3 without warm-up collapses on an fp32 sampler with the weights of now; a smaller rate cures GRPO of staleness 8.",
    arms=(
        Arm(name="lr 3e-4"),
        Arm(name="lr 1e-3", words=("train.lr=1e-3",)),
        Arm(name="lr 1e-3, no warm-up", words=("train.lr=1e-3", "train.warmup_steps=0")),
        Arm(name="lr 3e-4, staleness 8", words=("experiment.lag=8",)),
        Arm(name="lr 1e-4, staleness 8", words=("experiment.lag=8", "train.lr=1e-4")),
    ),
    words=("objective.name=grpo", "run.steps=200"),
    readings=COMMON,
    judge=judged(
        inside("lr 3e-4", 0.7, 1.0, claim="lr 3e-4 learns (above 0.7)", source="rollkeel, prototype", banded=True),
        inside(
            "lr 1e-3, no warm-up",
            0.0,
            0.3,
            claim="lr 1e-3 without warm-up collapses (below 0.3)",
            source="rollkeel, prototype",
        ),
        above(
            "lr 1e-4, staleness 8",
            "lr 3e-4, staleness 8",
            claim="at staleness 8 the smaller rate ends higher",
            source="rollkeel, prototype",
        ),
    ),
    notes=("All samplers are fp32: what collapses here does so without a gap between engines.",),
)

_STABLE = ("dppo_binary_kl", "dppo_binary_tv", "icepop", "kpop")
_BASELINES = ("pg_is", "pg_tis", "grpo_clip_higher", "minirl", "grpo")
SANITY = Preset(
    name="sanity",
    question="On problems that the start model can all solve, which objectives reach full training accuracy?",
    paper="DPPO §5 and Appendix D, after Qi et al. 2025",
    expected="DPPO reaches 100 %; policy gradients without a trust region and ratio clips fall short or collapse.",
    arms=tuple(arm(name, name) for name in (*_STABLE, *_BASELINES)),
    words=("data.options.digits=6", "engine.dtype=bf16", "run.steps=150"),
    readings=COMMON,
    judge=judged(
        *(
            inside(name, 0.97, 1.0, claim=f"{name} ends above 97 %", source="DPPO §5, Fig. 3")
            for name in ("dppo_binary_kl", "dppo_binary_tv")
        ),
        *(
            inside(name, 0.99, 1.0, reading=BEST, claim=f"{name} reaches 99 % over ten steps", source="DPPO §5")
            for name in ("dppo_binary_kl", "dppo_binary_tv")
        ),
        *(
            above("dppo_binary_kl", name, reading=REWARD, claim=f"DPPO-KL ends above {name}", source="DPPO Fig. 3")
            for name in _BASELINES
        ),
    ),
    notes=(
        "Problems have 6 digits; the start model solves each with some probability; the paper picks 1,460 such problems.",
        "The sampler is bf16 and the trainer fp32; the paper trains in bf16.",
    ),
)

PRESETS = (LR_CONTROL, SANITY)
