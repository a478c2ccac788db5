"""Objectives under weights that are many steps old: which one, what its trust region is anchored to, and how little is enough."""

from __future__ import annotations

from collections.abc import Sequence

from rollkeel.lab.claims import (
    COMMON,
    DRIFT,
    ENTROPY,
    MEAN,
    REWARD,
    above,
    alike,
    any_of,
    inside,
    judged,
    over_last,
)
from rollkeel.lab.preset import Arm, Preset
from rollkeel.lab.presets import bases
from rollkeel.lab.presets.bases import arm

BAD = "bad updates (share), last 20 steps"
_BAD = {BAD: over_last("mask/bad_updates")}
_ABOVE_GRPO = (
    "dppo_binary_kl",
    "mask_negative",
    "dppo_binary_tv",
    "grpo_clip_higher",
    "tis",
    "minirl",
    "pg_is",
    "icepop",
    "pg_tis",
    "kpop",
)
OBJECTIVES_STALE = Preset(
    name="objectives-stale",
    question="How do the objectives rank when nothing is rounded and the sampler's weights are 8 steps old?",
    paper="DPPO §5, Fig. 3",
    expected="DPPO leads, every rollout-anchored or corrected objective ends above GRPO, and untruncated policy gradients trail DPPO.",
    arms=(*(arm(name, name) for name in _ABOVE_GRPO), arm("kpop, φ = 0.01", "kpop", phi=0.01), arm("grpo", "grpo")),
    words=bases.STALE,
    readings=COMMON | _BAD,
    judge=judged(
        *(above(name, "grpo", claim=f"{name} ends above GRPO", source="rollkeel, prototype") for name in _ABOVE_GRPO),
        *(
            above("dppo_binary_kl", name, claim=f"DPPO-KL ends above {name}", source="DPPO Fig. 3")
            for name in ("pg_is", "pg_tis", "grpo_clip_higher", "minirl")
        ),
        *(
            above("dppo_binary_tv", name, claim=f"DPPO-TV ends above {name}", source="DPPO Fig. 3")
            for name in ("pg_is", "pg_tis", "grpo_clip_higher", "minirl")
        ),
        inside("dppo_binary_tv", 0.5, 1.0, claim="DPPO-TV ends above 0.5", source="rollkeel, prototype", banded=True),
        inside("dppo_binary_kl", 0.5, 1.0, claim="DPPO-KL ends above 0.5", source="rollkeel, prototype", banded=True),
    ),
    notes=(
        bases.SAME_STALENESS,
        "Each objective has its own defaults of aggregation and advantage, as its paper has.",
    ),
)

ANCHOR = Preset(
    name="anchor",
    question="Must the trust region be anchored to the policy that sampled, or will the recomputed one do?",
    paper="DPPO §5.2, Fig. 4",
    expected="DPPO-KL anchored to the recomputed policy lets the gap grow and collapses.",
    arms=(arm("rollout", "dppo_binary_kl"), arm("old", "dppo_binary_kl", anchor="old")),
    words=bases.STALE,
    readings=COMMON | _BAD,
    judge=judged(
        above("rollout", "old", claim="the rollout anchor ends above the recomputed one", source="DPPO Fig. 4"),
        above(
            "old", "rollout", reading=DRIFT, claim="under the recomputed anchor the gap is larger", source="DPPO Fig. 4"
        ),
    ),
    notes=(bases.SAME_STALENESS,),
)

_MASKS = {
    "no mask": arm("no mask", "pg_is"),
    "δ = 0.5": arm("δ = 0.5", "mask_negative"),
    "δ = 0.8": arm("δ = 0.8", "mask_negative", delta=0.8),
    "δ = 0.5, recomputed": arm("δ = 0.5, recomputed", "mask_negative", anchor="old"),
}
MINIMAL_MASK = Preset(
    name="minimal-mask",
    question="Which updates make a policy gradient unstable, and how small a mask stops them?",
    paper="DPPO §5.3, Fig. 5",
    expected="Dropping negative samples with q − p ≥ 0.5 is enough; δ = 0.8 and the recomputed anchor fail; bad updates stay below 0.5 %.",
    arms=tuple(_MASKS.values()),
    words=bases.STALE,
    readings=COMMON | _BAD,
    judge=judged(
        *(
            above("δ = 0.5", name, claim=f"δ = 0.5 ends above {name}", source="DPPO Fig. 5")
            for name in ("no mask", "δ = 0.8", "δ = 0.5, recomputed")
        ),
        inside(
            "no mask",
            0.0,
            0.005,
            reading=BAD,
            form="{:.1e}",
            claim="without a mask at most 0.5 % of updates are bad",
            source="DPPO §5.3",
        ),
        above(
            "no mask",
            "δ = 0.5",
            reading=BAD,
            form="{:.1e}",
            claim="the mask makes bad updates rarer",
            source="DPPO Fig. 5",
        ),
    ),
    notes=(bases.SAME_STALENESS,),
)

_CLIPPED, _CLIPPED_ENTROPY = "probability of clipped tokens", "entropy of clipped tokens"
_MASK_NAMES = ("relax_clip", "grpo_clip_higher")
RELAX = Preset(
    name="relax",
    question="Does the ratio clip hold back rare tokens, and on which side should it be relaxed?",
    paper="DPPO §6, Figs. 6 and 7",
    expected="Relaxing below 0.1 learns faster than the clip; clipped tokens are rare ones; both sides beat either; low alone loses entropy.",
    arms=(
        arm("α = 0", "grpo_clip_higher"),
        arm("α = 0.1", "relax_clip"),
        arm("α = 0.3", "relax_clip", alpha=0.3),
        arm("high", "relax_clip", side="high"),
        arm("low", "relax_clip", side="low"),
    ),
    words=bases.STALE,
    readings=COMMON
    | {
        _CLIPPED: any_of([f"mask/{name}/dropped_rollout_probability" for name in _MASK_NAMES]),
        _CLIPPED_ENTROPY: any_of([f"mask/{name}/dropped_entropy" for name in _MASK_NAMES]),
    },
    judge=judged(
        above("α = 0.1", "α = 0", reading=MEAN, claim="relaxing below 0.1 learns faster", source="DPPO Fig. 6"),
        inside(
            "α = 0", 0.0, 0.15, reading=_CLIPPED, claim="clipped tokens are below 0.15 on average", source="DPPO Fig. 6"
        ),
        above(
            "α = 0.1",
            "α = 0",
            reading=_CLIPPED,
            claim="with α the clipped tokens' probability rises",
            source="DPPO Fig. 6",
        ),
        above(
            "α = 0.1", "high", reading=MEAN, claim="both sides learn faster than the high side", source="DPPO Fig. 7"
        ),
        above("α = 0.1", "low", reading=REWARD, claim="both sides end above the low side", source="DPPO Fig. 7"),
        above(
            "high", "low", reading=ENTROPY, claim="the high side keeps more entropy than the low", source="DPPO Fig. 7"
        ),
    ),
    notes=(bases.SAME_STALENESS, "The paper's runs are nearly on-policy; here the clip has staleness to act on."),
)

_SCALING = {"preset": "scaling"}
TOPK = Preset(
    name="topk",
    question="Is the binary divergence as good as the one over the 20 likeliest tokens?",
    paper="DPPO §7, Fig. 10",
    expected="Binary and top-K end alike, both above the baselines.",
    arms=(
        arm("binary TV", "dppo_binary_tv", **_SCALING),
        arm("top-K TV", "dppo_topk_tv"),
        arm("binary KL", "dppo_binary_kl", **_SCALING),
        arm("top-K KL", "dppo_topk_kl"),
        arm("GRPO-ClipHigher", "grpo_clip_higher", **_SCALING),
        arm("CISPO", "pg_tis", **_SCALING),
    ),
    words=bases.STALE,
    readings=COMMON,
    judge=judged(
        alike("binary TV", "top-K TV", claim="binary and top-K TV end within 0.1", source="DPPO Fig. 10"),
        alike("binary KL", "top-K KL", claim="binary and top-K KL end within 0.1", source="DPPO Fig. 10"),
        *(
            above(ours, base, claim=f"{ours} ends above {base}", source="DPPO Fig. 10")
            for ours in ("binary TV", "top-K TV", "binary KL", "top-K KL")
            for base in ("GRPO-ClipHigher", "CISPO")
        ),
    ),
    notes=(bases.SAME_STALENESS, "K = 20 of a vocabulary of a few hundred tokens covers more than it does of 150,000."),
)

_ACCEPTED, _MOMENT = "tokens kept, last 20 steps", "second moment of ρ, last 20 steps"
_WIDE = {"bound_low": 0.0018, "bound_high": 0.089}


def _filtering(name: str, arms: Sequence[Arm], words: Sequence[str], notes: Sequence[str]) -> Preset:
    return Preset(
        name=name,
        question="Under extreme staleness, does controlling the acceptance of trajectories beat fixed bounds, and chance?",
        paper="AC-MIS-PO, Tables 1 and 2",
        expected="AC-MIS-PO leads; its final bound fixed does nearly as well; M2PO, fixed MIS-PO and GRPO trail. Random rejection must lose.",
        arms=(*arms, arm("M2PO", "m2po"), arm("GRPO", "grpo")),
        words=("train.updates_per_step=1", "train.lr=1e-4", *words),
        readings=COMMON | {_ACCEPTED: over_last("objective/kept"), _MOMENT: over_last("mismatch/second_moment")},
        judge=judged(
            *(
                above("AC-MIS-PO", name, claim=f"AC-MIS-PO ends above {name}", source="AC-MIS-PO Table 1")
                for name in ("MIS-PO", "M2PO", "GRPO")
            ),
            alike(
                "AC-MIS-PO",
                "fixed at final bound",
                claim="the final bound, fixed, does as well",
                source="AC-MIS-PO Table 2",
            ),
            above(
                "fixed at final bound",
                "MIS-PO",
                claim="the tighter fixed bound beats the wider",
                source="AC-MIS-PO Table 2",
            ),
            above(
                "AC-MIS-PO",
                "random rejection",
                claim="filtering by ratio beats rejecting as many at random",
                source="rollkeel: the control that the paper lacks",
            ),
        ),
        charts=("reward/mean", "objective/kept", "mismatch/second_moment", "policy/entropy"),
        notes=tuple(notes),
    )


STALE_64 = _filtering(
    "stale-64",
    (
        arm("AC-MIS-PO", "ac_mis_po", **_WIDE),
        arm("AC-MIS-PO, published bounds", "ac_mis_po"),
        arm("fixed at final bound", "fixed_at_final_bound", trajectory_low=0.9982, trajectory_high=1.0018),
        arm("MIS-PO", "mis_po", trajectory_low=0.965, trajectory_high=1.009),
        arm("random rejection", "random_rejection", like="{name: ac_mis_po, bound_low: 0.0018, bound_high: 0.089}"),
    ),
    ("experiment.lag=64", "run.steps=250", "checkpoint.every=125"),
    (
        "Staleness is 64 updates instead of 256, the learning rate 1e-4 with one update per step.",
        "Answers have 13 tokens instead of 1,024: a geometric mean over so few scatters about nine times as far, so trajectory"
        " bounds are nine times as wide (ln) as published; one arm keeps the published ones.",
    ),
)

STALE_256 = _filtering(
    "stale-256",
    (
        arm("AC-MIS-PO", "ac_mis_po"),
        arm("AC-MIS-PO, wider bounds", "ac_mis_po", **_WIDE),
        arm("fixed at final bound", "fixed_at_final_bound"),
        arm("MIS-PO", "mis_po"),
        arm("random rejection", "random_rejection", like="{name: ac_mis_po}"),
    ),
    ("experiment.lag=256", "run.steps=400", "rollout.samples=4", "checkpoint.every=200"),
    (
        "Staleness, steps, answers per prompt and bounds are the paper's; the learning rate is 1e-4 instead of 2e-6. The first 257"
        " batches are the start model's, as they must be.",
        "Answers have 13 tokens instead of 1,024, over which a geometric mean scatters about nine times as far: the published"
        " bounds reject more here. One arm has bounds nine times as wide (ln).",
    ),
)

PRESETS = (OBJECTIVES_STALE, ANCHOR, MINIMAL_MASK, RELAX, TOPK, STALE_64, STALE_256)
