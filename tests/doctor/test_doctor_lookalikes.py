"""Two causes that look alike, or a fault and a healthy run that does: each sign must fire on the one and be silent on the other.

Not covered: how far apart the two are in real runs; the development splits of benchmarks/doctor set the thresholds by that.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from simulated import STEPS, Simulated, simulate, stopped

from rollkeel_doctor import causes_logging, diagnose
from rollkeel_doctor.causes_weights import learning
from rollkeel_doctor.evidence import measure
from rollkeel_doctor.signs import Surprisal
from rollkeel_doctor.tokens import Mean, Tokens, gap, select
from rollkeel_doctor.traces.trace import Facts, Trace

FP32 = Facts(engine_dtype="fp32", train_dtype="fp32", temperature=1.0, top_p=1.0, max_new_tokens=99)
BF16 = replace(FP32, engine_dtype="bf16")


def first(trace: Trace) -> str:
    found = diagnose(trace)
    return found.causes[0].id if found.causes else "healthy"


def by_token(sim: Simulated, size: float) -> Simulated:
    """The engine's logits off by a fixed offset of each vocabulary entry, in every context alike."""
    offset = np.random.default_rng(7).normal(size=sim.train.shape[1]) * size
    return replace(sim, engine=sim.train + offset)


# -- weights -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [0.85, 1.2])
def test_a_scale_on_all_logits_is_a_temperature_only_where_one_was_forgotten(scale: float) -> None:
    sim = simulate()
    scaled = replace(sim, engine=sim.train * scale)
    assert first(scaled.trace(facts=FP32)) == "wrong_weights"
    assert first(scaled.trace(facts=replace(FP32, temperature=scale))) == "temperature"  # the trainer forgot it
    assert first(scaled.trace(facts=replace(FP32, temperature=1 / scale))) == "temperature"  # the sampler did
    assert first(scaled.trace(facts=replace(FP32, temperature=None))) == "temperature"
    assert first(scaled.trace(facts=replace(FP32, temperature=scale**4))) == "wrong_weights"


def test_rounding_does_not_know_which_token_it_is_about() -> None:
    spread, fixed = simulate(noise=0.3), by_token(simulate(), 0.3)
    assert gap(select(spread.trace())).by_token < 0.02
    assert gap(select(fixed.trace())).by_token > 0.5
    assert first(spread.trace(facts=BF16)) == "quantisation"
    assert first(fixed.trace(facts=BF16)) == "wrong_weights"


def test_ids_that_are_unknown_or_never_repeat_say_nothing() -> None:
    trace = simulate().trace()
    tokens = select(trace)
    assert np.isnan(gap(replace(tokens, token_ids=np.full(len(tokens), -1))).by_token)
    assert np.isnan(gap(replace(tokens, token_ids=np.arange(len(tokens)))).by_token)


def test_a_gap_behind_the_routers_is_not_rounding() -> None:
    sim = simulate(noise=0.3)
    flips = sim.rng.random(len(sim.train)) < 0.2
    rounded = sim.trace(facts=BF16, flipped_layers=flips.astype(np.int16))
    assert first(rounded) == "quantisation"
    few = np.zeros(len(sim.train), np.int16)
    few[:20] = 1
    assert first(rounded.with_(flipped_layers=few)) == "wrong_weights"


def flipping(share: float, size: float, noise: float = 0.0) -> tuple[Simulated, np.ndarray]:
    sim = simulate(noise=noise)
    flipped = sim.rng.random(len(sim.train)) < share
    return replace(sim, engine=sim.engine + flipped[:, None] * sim.rng.normal(size=sim.train.shape) * size), flipped


def test_routers_at_fault_within_what_the_dtype_explains() -> None:
    sim, flipped = flipping(0.12, 0.15, 0.03)
    trace = sim.trace(facts=BF16, flipped_layers=flipped.astype(np.int16))
    assert gap(select(trace)).k3 < 3e-3  # bfloat16 alone would explain that
    assert first(trace) == "routing"
    honest = simulate(noise=0.03)
    some = (honest.rng.random(len(honest.train)) < 0.03).astype(np.int16)
    assert first(honest.trace(facts=BF16, flipped_layers=some)) == "healthy"


def test_flips_that_come_with_old_weights_are_not_the_routers_fault() -> None:
    sim = simulate(per_step=64)
    rng = np.random.default_rng(7)
    size = 0.3 * np.maximum(sim.token_step - 6, 0)
    flipped = (size > 0) & (rng.random(len(size)) < 0.5)
    away = (size * np.where(flipped, 1.0, 0.4))[:, None] * rng.normal(size=sim.engine.shape)
    trace = replace(sim, train=sim.engine + away).trace(flipped_layers=flipped.astype(np.int16))
    assert first(trace) == "stale_version"


def test_flips_that_come_and_go_with_the_gap_are_not_the_routers_fault() -> None:
    sim = simulate(steps=20)
    rng = np.random.default_rng(7)
    size = 0.3 * ((sim.token_step - 1) % 2)  # every second update is lost
    flipped = (size > 0) & (rng.random(len(size)) < 0.3)
    away = (size * np.where(flipped, 1.0, 0.2))[:, None] * rng.normal(size=sim.engine.shape)
    trace = replace(sim, train=sim.engine + away).trace(flipped_layers=flipped.astype(np.int16))
    assert first(trace) == "stale_version"


def tokens_of(sharpening: float, rising: float, seed: int = 0) -> tuple[Tokens, Trace]:
    """Tokens of a trainer that grows surer from step to step, and of a sampler that does by a share of that."""
    sim = simulate(seed, per_step=64)
    later = (sim.token_step - 1)[:, None] / STEPS
    sim = replace(sim, engine=sim.train * (1 + sharpening * later), train=sim.train * (1 + later))
    trace = sim.trace()
    level = 0.4 + rising * (trace.step - 1) / STEPS
    right = (np.random.default_rng([9, seed]).random(trace.sequences) < level).astype(float)
    return select(trace), trace.with_(reward=right)


@pytest.mark.parametrize("seed", range(5))
def test_a_sampler_that_learns_is_not_one_that_stands_still(seed: int) -> None:
    assert abs(learning(*tokens_of(0.0, 0.0, seed))) < 3  # standard normal
    assert learning(*tokens_of(0.7, 0.3, seed)) > 4


def test_an_old_policy_that_some_sequences_of_seem_moved_is_not_misaligned() -> None:
    """A shift of a few sequences counts where the others agree, not where all of them differ."""
    sim = simulate(per_step=64)
    trace = sim.trace()
    few = np.isin(trace.sequence, np.arange(0, trace.sequences, 25))
    at = np.clip(np.arange(len(trace)) + 1, trace.starts[:-1][trace.sequence], trace.starts[1:][trace.sequence] - 1)
    assert first(trace.with_(rollout_logprobs=np.where(few, trace.rollout_logprobs[at], trace.rollout_logprobs))) == (
        "alignment"
    )
    old = sim.token_step > 1
    engine = np.where(old[:, None], sim.train + sim.rng.normal(size=sim.train.shape) * 1.2, sim.train)
    versions = np.where(old, sim.token_step, sim.token_step + 8)
    far = replace(sim, engine=engine).trace(versions=versions, train_version=sim.step + 8)
    few &= trace.step[trace.sequence] > 1
    moved = far.with_(rollout_logprobs=np.where(few, far.rollout_logprobs[at], far.rollout_logprobs))
    assert first(moved) == "policy_lag"


def test_what_a_shift_leaves_behind_is_not_another_cause() -> None:
    """Sequences of four tokens are too short to show a shift, and are shifted all the same."""
    sim = simulate(per_step=64)
    trace = sim.trace()
    moved = (np.arange(trace.sequences) % 4 == 0)[trace.sequence]
    short = np.isin(np.arange(trace.sequences) % 4, (1, 2))[trace.sequence]
    at = np.clip(np.arange(len(trace)) + 1, trace.starts[:-1][trace.sequence], trace.starts[1:][trace.sequence] - 1)
    q = np.where(moved | short, trace.rollout_logprobs[at], trace.rollout_logprobs)
    mask = ~short | (trace.position < 4)
    assert first(trace.with_(rollout_logprobs=q, mask=mask)) == "alignment"


@pytest.mark.parametrize("by", [-2, 3])
def test_a_shift_across_short_turns_is_neither_a_mask_nor_a_temperature(by: int) -> None:
    """It carries the log q of 0 that an environment's tokens have into the mask, and leaves few pairs in any one sequence."""
    trace = simulate(per_step=64).trace()
    environment = trace.position % 6 >= 4
    q = np.where(environment, 0, trace.rollout_logprobs).astype(np.float32)
    assert first(trace.with_(rollout_logprobs=q, mask=~environment)) == "healthy"
    low, high = trace.starts[:-1][trace.sequence], trace.starts[1:][trace.sequence] - 1
    moved = q[np.clip(np.arange(len(trace)) + by, low, high)]
    assert first(trace.with_(rollout_logprobs=moved, mask=~environment)) == "alignment"
    unsampled = trace.position % 6 >= 3  # one of them inside the mask: no shift explains that
    q = np.where(unsampled, 0, trace.rollout_logprobs).astype(np.float32)
    assert first(trace.with_(rollout_logprobs=q, mask=~environment)) == "mask"


def test_a_stated_cut_that_takes_little_is_no_hidden_one() -> None:
    """The few tokens that top-k leaves out are the most surprising: 0.2 % of the mass lower the surprisal by 7 % of the entropy."""
    stated = simulate().trace(
        facts=replace(FP32, top_k=12), kept_mass=np.full(len(simulate().train), 0.998, np.float32)
    )
    e = measure(stated)
    low = Surprisal(Mean(-0.022, 0.0037), entropy=0.317, inverse_temperature=1.1, cut=1.0, lost=0.01)
    assert causes_logging.truncation(replace(e, surprisal=low)) is None
    lower = low._replace(difference=Mean(-0.08, 0.0037))
    for seen in (replace(e, surprisal=lower), replace(measure(simulate().trace()), surprisal=low)):
        cause = causes_logging.truncation(seen)
        assert cause is not None
        assert "improbable tokens are missing altogether" in cause.evidence


@pytest.mark.parametrize("temperature", [0.9, 1.15])
def test_a_forgotten_temperature_shows_on_stale_tokens_too(temperature: float) -> None:
    """Where only one step in twelve is fresh: honest log-probs have E_q[ρ] = 1 whatever the weights."""
    sim = simulate(noise=0.1)
    versions = np.where(sim.token_step == 1, 0, sim.token_step - 2)
    facts = replace(FP32, engine_dtype="fp8", temperature=temperature)
    how: dict[str, Any] = {"sampled_at": temperature, "trained_at": temperature, "facts": facts, "versions": versions}
    assert first(sim.trace(**how)) == "temperature"
    assert first(sim.trace(**how, logged_at=temperature)) == "healthy"


def of_old_weights(sim: Simulated, size: float) -> tuple[Simulated, dict[str, Any]]:
    """Only the first step is of the trainer's version; the others are off by `size` in logits and stated four versions old."""
    old = sim.token_step > 1
    engine = np.where(old[:, None], sim.train + sim.rng.normal(size=sim.train.shape) * size, sim.train)
    return replace(sim, engine=engine), {
        "versions": np.where(old, sim.token_step, sim.token_step + 4),
        "train_version": sim.step + 4,
    }


@pytest.mark.parametrize("temperature", [0.9, 1.15])
@pytest.mark.parametrize("forgetful", ["logged_at", "trained_at"])
def test_few_fresh_tokens_show_a_forgotten_temperature_by_its_slope(temperature: float, forgetful: str) -> None:
    sim, versions = of_old_weights(simulate(), 0.25)
    at = dict.fromkeys(("sampled_at", "logged_at", "trained_at"), temperature)
    how: dict[str, Any] = versions | {"facts": replace(FP32, temperature=temperature)}
    assert first(sim.trace(**at, **how)) == "healthy"
    found = diagnose(sim.trace(**(at | {forgetful: 1.0}), **how))
    assert found.causes[0].id == "temperature"
    assert ("log q" if forgetful == "logged_at" else "log o") + " had no temperature" in found.causes[0].evidence


def test_a_cut_that_the_record_knows_nothing_of_is_seen_under_any_staleness() -> None:
    sim, how = of_old_weights(simulate(), 0.3)
    how["facts"] = replace(FP32, top_p=0.95)
    assert first(sim.trace(mass=0.95, **how)) == "healthy"
    ones = np.ones(len(sim.train), np.float32)
    assert first(sim.trace(mass=0.95, renormalise=False, kept_mass=ones, **how)) == "truncation"
    assert (
        first(sim.trace(mass=0.95, kept_mass=ones, **how)) == "truncation"
    )  # renormalised, by a mass that is not recorded


def neighbours(trace: Trace, by: int) -> np.ndarray:
    """Place of the token `by` further on in the same sequence, of its last one where there is none."""
    low, high = trace.starts[:-1][trace.sequence], trace.starts[1:][trace.sequence] - 1
    return np.clip(np.arange(len(trace)) + by, low, high)


def test_a_shift_in_a_part_of_the_sequences_shows_beside_an_old_policy() -> None:
    """Those of old weights differ all, so that few are sure to be moved; E_q[ρ] says that the record is wrong."""
    sim, how = of_old_weights(simulate(per_step=64), 0.9)
    trace = sim.trace(**how)
    few = trace.sequence % 5 == 0
    q = np.where(few, trace.rollout_logprobs[neighbours(trace, -1)], trace.rollout_logprobs)
    assert first(trace.with_(rollout_logprobs=q)) == "alignment"
    assert first(trace) == "policy_lag"


def test_what_only_old_sequences_show_is_not_the_records_fault() -> None:
    """Sequences displaced from a token on, among those of old weights alone; in all alike it is encoding anew."""
    sim, how = of_old_weights(simulate(per_step=64), 0.2)
    trace = sim.trace(**how)
    later = neighbours(trace, -1)
    moved = (trace.sequence % 3 == 0) & (trace.position >= 4)
    old = trace.step[trace.sequence] > 1
    everywhere = np.where(moved, trace.rollout_logprobs[later], trace.rollout_logprobs)
    assert first(trace.with_(rollout_logprobs=everywhere)) == "retokenised"
    assert first(trace.with_(rollout_logprobs=np.where(old, everywhere, trace.rollout_logprobs))) != "retokenised"


def test_ids_that_spoil_what_follows_are_no_flips() -> None:
    """Odd tokens of no absurd size: where the gap goes on behind them the trainer read another text, else other experts."""
    sim = simulate(per_step=64)
    sequence, total = sim.sequence, len(sim.train)
    position = np.arange(total) - np.repeat(sim.starts[:-1], np.diff(sim.starts))
    hit = (sequence % 12 == 0) & (position == 5)
    behind = (sequence % 12 == 0) & (position > 5)
    other = sim.rng.normal(size=sim.train.shape) * 2.0
    spoilt = replace(sim, engine=sim.train + other * (hit | behind)[:, None]).trace(flipped_layers=hit.astype(np.int16))
    assert first(spoilt) == "retokenised"
    lone = sim.rng.random(total) < 0.05
    flips = replace(sim, engine=sim.train + other * lone[:, None]).trace(flipped_layers=lone.astype(np.int16))
    assert first(flips) == "routing"


# -- training ----------------------------------------------------------------------------------------------------------


def groups(trace: Trace, differ: np.ndarray, level: np.ndarray) -> np.ndarray:
    """Rewards of groups of four with mean `level` by step; a share `differ` of the groups has both rewards in it."""
    rng = np.random.default_rng(5)
    count = trace.sequences // 4
    step = trace.step[::4] - 1
    mixed = rng.random(count) < differ[step]
    whole = rng.random(count) < level[step]
    each = rng.random((count, 4)) < level[step][:, None]
    each[:, :2] = [True, False]
    return np.where(mixed[:, None], each, whole[:, None]).astype(float).ravel()


def test_entropy_that_falls_without_success() -> None:
    sim = simulate(per_step=64)
    sharp = np.linspace(1, 12, STEPS)[sim.token_step - 1][:, None]
    trace = replace(sim, train=sim.train * sharp, engine=sim.engine * sharp).trace()
    flat, rises = np.full(STEPS, 0.3), np.concatenate([np.linspace(0.3, 0.7, 6), np.full(6, 0.7)])
    fewer, as_ever = np.linspace(0.9, 0.1, STEPS), np.full(STEPS, 0.7)
    assert first(trace.with_(reward=groups(trace, fewer, flat))) == "entropy_collapse"
    assert first(trace.with_(reward=groups(trace, fewer, rises))) == "healthy"  # success explains it
    soon = np.concatenate([[0.3], np.linspace(0.4, 0.56, 3), np.full(8, 0.58)])
    assert first(trace.with_(reward=groups(trace, fewer, soon))) == "healthy"  # also where most of it came early
    assert first(trace.with_(reward=groups(trace, as_ever, flat))) == "healthy"  # groups still differ
    calm = simulate(per_step=64).trace()
    assert first(calm.with_(reward=groups(calm, fewer, flat))) == "healthy"  # and so does the policy


@pytest.mark.parametrize("alive", [3, 0])
def test_a_gradient_that_no_reward_explains(alive: int) -> None:
    """Rewards that die take the gradient with them. Where it stays, something else took the entropy, and the rewards with it."""
    sim = simulate(per_step=64)
    sharp = np.linspace(1, 12, STEPS)[sim.token_step - 1][:, None]
    trace = replace(sim, train=sim.train * sharp, engine=sim.engine * sharp).trace()
    dead = trace.with_(reward=np.where(trace.step <= alive, groups(trace, np.ones(STEPS), np.full(STEPS, 0.3)), 0.0))

    def named(gradient: float, reward: np.ndarray = dead.reward) -> str:
        norms = np.where(np.arange(1, STEPS + 1) <= alive, 2.0, gradient)
        rows = [{"step": s, "clip/high": 0.1 * (s == 2), "optimizer/grad_norm": n} for s, n in enumerate(norms, 1)]
        return first(dead.with_(reward=reward, metrics=rows))

    assert named(2.0) == "entropy_collapse"
    assert named(0.0) == ("learning_rate" if alive else "no_reward_signal")
    assert named(2.0, np.where(trace.step <= alive, dead.reward, 1.0)) == "healthy"  # a task that is solved


def test_a_cut_that_costs_a_policy_which_is_seldom_right() -> None:
    trace = stopped(simulate(per_step=64).trace())
    trace = trace.with_(group=np.arange(trace.sequences) // 8)
    cut = np.arange(trace.sequences) % 2 == 0
    status = np.where(cut, "length", "finished").tolist()
    nth = np.arange(trace.sequences) // 2
    costs = np.where(cut, nth % 10 == 0, nth % 10 < 2).astype(float)  # 0.1 against 0.2
    assert first(trace.with_(status=status, reward=costs)) == "length_truncation"
    alike = (nth % 10 < 2).astype(float)
    assert first(trace.with_(status=status, reward=alike)) == "healthy"
    rare = np.where(np.arange(trace.sequences) % 20 == 0, "length", "finished").tolist()
    assert first(trace.with_(status=rare, reward=costs)) == "healthy"


def test_rewards_without_a_word_of_the_grader() -> None:
    trace = simulate().trace()
    texts = [f"answer {i}" for i in range(trace.sequences)]  # no answer was given twice
    lost = (np.arange(trace.sequences) % 20 == 0) & (trace.reward == 0)
    said = np.where(lost, "", "read it").tolist()
    told = trace.with_(prompt_text=["?"] * trace.sequences, text=texts, detail=said)
    assert first(told) == "reward_failures"
    wrong_in_silence = np.where(trace.reward == 0, "", "read it").tolist()
    assert first(told.with_(detail=wrong_in_silence)) == "healthy"
    assert first(told.with_(detail=[""] * trace.sequences)) == "healthy"
    empty = [("" if gone else text) for gone, text in zip(lost, texts, strict=True)]
    assert first(told.with_(text=empty)) == "healthy"  # there was nothing to say something of


# -- what is no entropy ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.001, 1.0])
def test_negative_entropies_are_left_out_with_a_note(share: float) -> None:
    trace = simulate().trace()
    assert trace.entropy is not None
    wrong = np.random.default_rng(0).random(len(trace)) < share
    found = diagnose(trace.with_(entropy=np.where(wrong, -trace.entropy - 0.1, trace.entropy)))
    assert found.healthy
    assert any("below 0" in note for note in found.notes)
    assert ("truncation" in found.not_examined) is (share == 1.0)
    rounded = diagnose(trace.with_(entropy=np.where(wrong, -1e-6, trace.entropy).astype(np.float32)))
    assert not any("below 0" in note for note in rounded.notes)
