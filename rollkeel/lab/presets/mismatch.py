"""The gap without training: equal weights, engines that round, and what the masks would do about it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from rollkeel.lab.claims import over_last
from rollkeel.lab.preset import (
    Arm,
    Finding,
    Preset,
    Readings,
    apart,
    held,
    shown,
    within,
)

SOFTMAX, DRAWN = "bf16 softmax", "drawn from it"
ENGINES = ("fp32", "bf16", "fp8", "int8", "int4")


def measure(words: Sequence[str], seed: int) -> Mapping[str, float]:
    """One row of an arm: of an engine, or of a softmax alone."""
    from rollkeel.lab import gap  # with torch, which listing the presets does without

    return gap.softmax_ratio(seed, drawn=DRAWN in words) if SOFTMAX in words else gap.engine_gap(words, seed)


def _judge_softmax(readings: Readings) -> list[Finding]:
    bands = {"mean": (0.99995, 1.00005), "std": (0.0046, 0.0050), "max": (1.018, 1.022), "min": (0.975, 0.982)}
    found = []
    for arm, how in ((SOFTMAX, "alone"), (f"{SOFTMAX}, {DRAWN}", "that the tokens are drawn from")):
        table = {name: readings[name][arm] for name in bands}
        met = all(within(table[name], *band) for name, band in bands.items())
        found.append(
            Finding(
                claim=f"a softmax in bf16 {how} gives ratios of mean 1.0000, std .0048, max 1.0189, min .9815",
                source="stability study, Table 2",
                numbers=", ".join(f"{name} {np.mean(values):.4f}" for name, values in table.items()),
                verdict=held(met, *table.values()),
                met=met,
            )
        )
    rounded, exact = (readings[f"levels, {name}"][f"{SOFTMAX}, {DRAWN}"] for name in ("bf16", "fp32"))
    found.append(
        Finding(
            claim="tokens drawn in bf16 share a few probabilities, at least ten times fewer than the same tokens have in fp32",
            source="stability study, Fig. 13; the factor is rollkeel's",
            numbers=f"{np.mean(rounded):,.0f} probabilities of 50,000 tokens in bf16, {np.mean(exact):,.0f} in fp32",
            verdict=held(np.all(10 * rounded < exact), rounded, exact),
        )
    )
    kl = readings["kl"][f"{SOFTMAX}, {DRAWN}"]
    found.append(
        Finding(
            claim="the distribution in bf16 is 0.014 to 0.047 nats from that in fp32",
            source="stability study, Table 2, column KL Divergence",
            numbers=f"{shown(kl, '{:.2e}')} nats",
            verdict=held(within(kl, 0.014, 0.047), kl),
        )
    )
    return found


def _judge(readings: Readings) -> Sequence[Finding]:
    found = _judge_softmax(readings)
    std, flips = readings["std of the ratio"], readings["tokens with a routing flip"]
    ordered = ("fp32", "bf16", "fp8", "int4")
    grows = all(np.all(std[a] < std[b]) for a, b in itertools.pairwise(ordered))
    found.append(
        Finding(
            claim="the gap grows from fp32 over bf16 and fp8 to int4",
            source="rollkeel, prototype",
            numbers=", ".join(f"{name} {shown(std[name], '{:.2g}')}" for name in ordered),
            verdict=held(grows, *(std[name] for name in ordered)),
            met=bool(grows),
        )
    )
    on, off = readings["rms log ratio, flipped"]["bf16"], readings["rms log ratio, elsewhere"]["bf16"]
    found.append(
        Finding(
            claim="tokens whose experts flip make the tail: in bf16 their gap is more than ten times that of the others",
            source="rollkeel, prototype",
            numbers=f"{shown(on)} on {shown(100 * flips['bf16'], '{:.1f}')} % of tokens, {shown(off)} elsewhere",
            verdict=held(np.all(on > 10 * off), on, off),
        )
    )
    before, after = readings["kl_k3"]["bf16"], readings["kl_k3, replayed"]["bf16"]
    found.append(
        Finding(
            claim="replaying the engine's experts in the trainer takes at least four fifths of the bf16 gap (k3) away",
            source="DPPO §5.3, Fig. 8; rollkeel, prototype",
            numbers=f"{shown(before, '{:.2e}')} to {shown(after, '{:.2e}')}: {np.mean(before) / max(np.mean(after), 1e-12):.1f} times lower",
            verdict=held(np.mean(before) > 5 * np.mean(after), before, after),
        )
    )
    low, high = readings["icepop drops, mean q"]["int4"], readings["kpop drops, mean q"]["int4"]
    found.append(
        Finding(
            claim="IcePop drops tokens of low probability, KPop does not",
            source="rollkeel, prototype",
            numbers=f"mean q of dropped tokens under int4: {shown(low, '{:.2f}')} and {shown(high, '{:.2f}')}",
            verdict=apart(high, low),
        )
    )
    return found


_SHOWN = {
    "std of the ratio": "mismatch/ratio_std",
    "correlation": "mismatch/pearson",
    "E[1/ρ]": "mismatch/inverse_ratio_mean",
    "kl_k3": "mismatch/kl_k3",
    "tokens with a routing flip": "routing/flipped_tokens",
}
_PLAIN = (
    "icepop drops",
    "kpop drops",
    "icepop drops, mean q",
    "kpop drops, mean q",
    "icepop drops, mean entropy",
    "kpop drops, mean entropy",
    "mean entropy",
    "kl_k3, replayed",
    "rms log ratio, flipped",
    "rms log ratio, elsewhere",
    "mean",
    "std",
    "max",
    "min",
    "kl",
    "levels, bf16",
    "levels, fp32",
)

NO_TRAIN = Preset(
    name="no-train",
    question="How far apart are engine and trainer at equal weights, and what would the masks drop?",
    paper="stability study, Table 2 and Appendix C; DPPO Fig. 2 and 8",
    expected="Ratios as in Table 2 from a bf16 softmax alone; the gap grows with rounding; flipped experts make its tail.",
    arms=(
        *(Arm(name=dtype, words=(f"engine.dtype={dtype}",)) for dtype in ENGINES),
        Arm(name=SOFTMAX, words=(SOFTMAX,)),
        Arm(name=f"{SOFTMAX}, {DRAWN}", words=(SOFTMAX, DRAWN)),
    ),
    words=("rollout.prompts=64", "rollout.samples=16", "engine.slots=256"),
    seeds=2,
    measure=measure,
    readings={name: over_last(key, 1) for name, key in _SHOWN.items()} | {name: over_last(name, 1) for name in _PLAIN},
    judge=_judge,
    charts=(),
    notes=(
        "Table 2's KL column cannot be a mean divergence of the distributions: ratios of deviation 0.0048 make it 0.0048²/2 = 1.2e-5. The study has no "
        "formula for it. A sum of q log(q/p) over the 50,000 tokens gives 0.008 ± 0.020 over 30 seeds, with either sign; the histograms of Fig. 13 give what "
        "one wants by the number of bins and what stands for an empty one.",
    ),
)


def _judge_fp16(readings: Readings) -> Sequence[Finding]:
    findings = []
    for name, times in (("std of the ratio", 4), ("kl_k3", 16)):
        low, high = readings[name]["fp16"], readings[name]["bf16"]
        smaller = bool(np.all(times * low < high))
        findings.append(
            Finding(
                claim=f"fp16 on both sides makes the gap ({name}) more than {times} times smaller than bf16 on both sides",
                source="Qi et al. 2025, abstract; the factors are rollkeel's",
                numbers=f"bf16 {shown(high, '{:.2g}')}, fp16 {shown(low, '{:.2g}')}: {np.mean(high) / max(np.mean(low), 1e-12):.0f} times",
                verdict=held(smaller, low, high),
                met=smaller,
            )
        )
    return findings


FP16 = Preset(
    name="fp16",
    question="How much of the gap between a bf16 engine and a bf16 trainer do three more bits take away?",
    paper="Defeating the training-inference mismatch via FP16 (Qi et al. 2025, arXiv 2510.26788)",
    expected="With fp16 on both sides the gap is a fraction of what it is with bf16 on both sides.",
    arms=(
        Arm(name="bf16", words=("engine.dtype=bf16", "model.dtype=bfloat16")),
        Arm(name="fp16", words=("engine.dtype=fp16", "model.dtype=float16")),
    ),
    words=("model.path=preset:tiny-qwen3", "sft.steps=40", "rollout.prompts=16", "engine.slots=256"),
    seeds=3,
    measure=measure,
    readings={name: over_last(_SHOWN[name], 1) for name in ("std of the ratio", "kl_k3", "E[1/ρ]")},
    judge=_judge_fp16,
    charts=(),
    notes=(
        "Each arm is warm-started in its own dtype, so that the policies differ as well; for 40 steps, since CPUs multiply fp16 slowly.",
        "Logits are float32 in both arms and on both sides; the paper's engines may round them.",
    ),
)
PRESETS = (NO_TRAIN, FP16)
