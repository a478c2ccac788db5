"""Does a distorted objective make the gap between engines grow? The stability study's claims at equal weights."""

from __future__ import annotations

from rollkeel.lab.claims import COMMON, GROWTH, REWARD, above, alike, any_of, growth, judged
from rollkeel.lab.preset import Preset
from rollkeel.lab.presets import bases
from rollkeel.lab.presets.bases import arm

_K3_GROWTH = "gap (k3), last 20 steps over first 20"
_CLIPPED = "tokens clipped (high side), last 20 steps"
_READINGS = COMMON | {_K3_GROWTH: growth("mismatch/kl_k3"), _CLIPPED: any_of(("clip/high",))}
_SHORT = "200 steps of 4 updates at lr 3e-4 with a sampler in fp8, instead of hundreds of steps of a 30B model with bf16 engines."
_GSPO = "gspo"

CLIP_STRENGTH = Preset(
    name="clip-strength",
    question="Does stronger token-level clipping accelerate the growth of the gap?",
    paper="stability study §4.3, Fig. 4, Table 1",
    expected="The gap grows faster the stronger the clip (upper ε 0.2 over 0.24 over 0.28), and not under sequence-level clipping.",
    arms=(
        arm("ε 0.2 (strong)", "grpo"),
        arm("ε 0.24", "grpo", clip_high=0.24),
        arm("ε 0.28 (weak)", "grpo", clip_high=0.28),
        arm(_GSPO, "gspo"),
    ),
    words=bases.SYNC_FP8,
    readings=_READINGS,
    judge=judged(
        above(
            "ε 0.2 (strong)",
            "ε 0.24",
            reading=GROWTH,
            claim="ε 0.2 grows the gap faster than 0.24",
            source="stability study Fig. 4",
        ),
        above(
            "ε 0.24",
            "ε 0.28 (weak)",
            reading=GROWTH,
            claim="ε 0.24 grows it faster than 0.28",
            source="stability study Fig. 4",
        ),
        above(
            "ε 0.2 (strong)",
            "ε 0.28 (weak)",
            reading=GROWTH,
            claim="ε 0.2 grows it faster than 0.28",
            source="stability study Fig. 4",
        ),
        above(
            "ε 0.28 (weak)",
            _GSPO,
            reading=GROWTH,
            claim="token clipping grows it faster than GSPO",
            source="stability study Fig. 4",
        ),
        above(
            "ε 0.2 (strong)",
            "ε 0.28 (weak)",
            reading=_CLIPPED,
            form="{:.1e}",
            claim="the stronger clip cuts more tokens",
            source="stability study, Table 1",
        ),
    ),
    notes=(_SHORT, "The prototype did not reproduce this."),
)

_DELTAS = ("3", "2", "1.2", "0")


def _distorted(delta: str) -> str:
    return f"δ = {delta}"


DISTORTION = Preset(
    name="distortion",
    question="Do weights that favour rare tokens make the gap grow, and does unbiased noise on the weights not?",
    paper="stability study §4.4, §5.1, Figs. 5, 6 and 12",
    expected="The gap grows with the distortion (δ 3 over 2 over 1.2), also for δ = 0; noise of σ = 0.2 does nothing.",
    arms=(
        arm("δ = 1", "gspo"),
        *(
            arm(_distorted(delta), "gspo", perturb=f"[{{distort_low_probability: {{delta: {delta}}}}}]")
            for delta in _DELTAS
        ),
        arm("noise σ = 0.2", "gspo", perturb="[{weight_noise: {sigma: 0.2}}]"),
    ),
    words=bases.SYNC_FP8,
    readings=_READINGS | {"bias J, last 20 steps": any_of(("bias/j",))},
    judge=judged(
        *(
            above(
                _distorted(d),
                "δ = 1",
                reading=GROWTH,
                claim=f"δ = {d} makes the gap grow faster than none",
                source=source,
            )
            for d, source in zip(_DELTAS, ("Fig. 5", "Fig. 5", "Fig. 5", "Appendix B.2"), strict=True)
        ),
        above("δ = 3", "δ = 1.2", reading=GROWTH, claim="a stronger distortion grows it faster", source="Fig. 5"),
        above("δ = 1", "δ = 3", reading=REWARD, claim="the distortion costs reward", source="§4.4"),
        alike(
            "noise σ = 0.2", "δ = 1", reading=GROWTH, margin=0.2, claim="noise does not make it grow", source="Fig. 12"
        ),
    ),
    charts=("reward/mean", "mismatch/ratio_std", "bias/j", "policy/entropy"),
    notes=(_SHORT, "The prototype did not reproduce the effect of δ."),
)

PRESETS = (CLIP_STRENGTH, DISTORTION)
