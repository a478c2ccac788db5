"""Runs that collapse, or do not, by objective: where the gap comes from staleness and rounding that are real."""

from __future__ import annotations

from collections.abc import Sequence

from rollkeel.lab.preset import (
    NOT_REPRODUCED,
    REPRODUCED,
    UNDECIDED,
    Arm,
    Finding,
    Preset,
    Readings,
    apart,
    over_steps,
    shown,
    within,
)


def _judge_async_fp8(readings: Readings) -> Sequence[Finding]:
    reward = readings["reward, last 20 steps"]
    bands = {"grpo": (0.0, 0.25), "icepop": (0.4, 1.0), "kpop": (0.4, 1.0), "dppo_binary_tv": (0.5, 1.0)}
    found = [
        Finding(
            claim=f"{arm} ends {'below' if low == 0 else 'above'} {high if low == 0 else low}",
            source="rollkeel, prototype",
            numbers=shown(reward[arm]),
            verdict=REPRODUCED if within(reward[arm], low, high) else NOT_REPRODUCED,
            met=within(reward[arm], low, high),
        )
        for arm, (low, high) in bands.items()
    ]
    for arm in ("icepop", "kpop", "dppo_binary_tv"):
        found.append(
            Finding(
                claim=f"{arm} learns where GRPO collapses",
                source={"dppo_binary_tv": "DPPO §5, Fig. 3"}.get(arm, "Ring-1T §2.4.1, Fig. 6"),
                numbers=f"{shown(reward[arm])} against {shown(reward['grpo'])}",
                verdict=apart(reward[arm], reward["grpo"]),
            )
        )
    return found


ASYNC_FP8 = Preset(
    name="async-fp8",
    question="Which objectives survive a sampler in fp8 whose weights are 16 steps old?",
    paper="Ring-1T report §2.4.1; DPPO §5",
    expected="GRPO collapses below 0.25; IcePop and KPop stay above 0.4, DPPO-TV above 0.5. IcePop against KPop is not separable here.",
    arms=tuple(
        Arm(name=name, words=(f"objective.name={name}",)) for name in ("grpo", "icepop", "kpop", "dppo_binary_tv")
    ),
    words=("engine.dtype=fp8", "rollout.lag=16", "run.steps=100"),
    readings={
        "reward, last 20 steps": over_steps("reward/mean", 80, 99),
        "gap (ratio std), last 20 steps": over_steps("mismatch/ratio_std", 80, 99),
    },
    judge=_judge_async_fp8,
    seeds=2,
)


def _judge_neg_int4(readings: Readings) -> Sequence[Finding]:
    reward = readings["reward, last 20 steps"]
    fp32, int4 = reward["fp32 sampler"], reward["int4 sampler"]
    through = reward["int4 sampler, int4 trainer"]
    return [
        Finding(
            claim="an int4 sampler alone destroys a run on negative advantages",
            source="rollkeel, prototype",
            numbers=f"{shown(int4)} against {shown(fp32)} with an fp32 sampler",
            verdict=REPRODUCED if within(int4, 0, 0.15) and within(fp32, 0.4, 1) else UNDECIDED,
            met=within(int4, 0, 0.15) and within(fp32, 0.4, 1),
        ),
        Finding(
            claim="with the trainer on the same int4 weights (straight-through, ρ = 1) it learns: the gap kills, not the rounding",
            source="rollkeel, prototype",
            numbers=f"{shown(through)} against {shown(int4)}",
            verdict=REPRODUCED if within(through, 0.4, 1) else NOT_REPRODUCED,
            met=within(through, 0.4, 1),
        ),
    ]


PRESETS = (ASYNC_FP8,)
