"""Runs unlike those that thresholds were set by: graded rewards, one prompt a step, rare rewards, graders with much to say.

What holds for 0 and 1, many groups and silent graders alone must not decide. Not covered: real runs of these kinds.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from simulated import STEPS, simulate, stopped

from rollkeel_doctor import causes_logging, diagnose, evidence, signs
from rollkeel_doctor.causes_weights import learning
from rollkeel_doctor.evidence import measure
from rollkeel_doctor.series import series
from rollkeel_doctor.tokens import clustered, select
from rollkeel_doctor.traces.trace import Facts, Trace

FP32 = Facts(engine_dtype="fp32", train_dtype="fp32", temperature=1.0, top_p=1.0, max_new_tokens=99)


def causes(trace: Trace) -> list[str]:
    return [c.id for c in diagnose(trace).causes]


def test_graded_rewards_that_seldom_agree_are_no_selection() -> None:
    """Groups of equal rewards are missing because marks differ, not because they were dropped: surprisal is asked."""
    trace = simulate(per_step=64).trace(sampled_at=0.8)
    graded = np.random.default_rng(1).random(trace.sequences).round(3)
    assert causes(trace.with_(reward=graded)) == ["temperature"]


def test_equal_rewards_that_were_dropped_are_still_noticed() -> None:
    trace = simulate(per_step=64).trace(sampled_at=0.8)
    mixed = np.where(np.arange(trace.sequences) % 4 < 2, 0.0, 1.0)
    assert causes(trace.with_(reward=mixed)) == []


@pytest.mark.parametrize("seed", range(4))
def test_a_sampler_that_stands_still_under_prompts_of_its_own_kind(seed: int) -> None:
    """Answers to one prompt are right or wrong together: their number is not what counts."""
    trace = simulate(seed, per_step=64).trace()
    group = np.arange(trace.sequences) // 32
    right = (np.random.default_rng([5, seed]).random(group[-1] + 1) < 0.5).astype(float)[group]
    assert abs(learning(select(trace), trace.with_(group=group, reward=right))) < 4


def test_one_prompt_a_step_does_not_know_its_level_exactly() -> None:
    trace = simulate(per_step=16, steps=24).trace()
    hard = np.random.default_rng(2).permutation(np.linspace(0.0, 1.0, 24))
    hard[-6:] = np.sort(hard)[:6].mean()  # the last prompts happen to be the hard ones
    right = (np.random.default_rng(3).random(trace.sequences) < hard[trace.step - 1]).astype(float)
    one = trace.with_(reward=right, group=trace.step)
    assert series(one).reward_error.min() > 0.1
    assert "reward_lost" not in causes(one)
    assert clustered(right, np.zeros(len(right), int)).z == 0


def test_the_luckiest_of_many_steps_is_no_peak() -> None:
    """Rare rewards and a gradient norm that goes with them."""
    trace = simulate(per_step=40, steps=48).trace()
    level = np.full(48, 4)
    level[5] = 16
    member = np.arange(trace.sequences) % 40
    right = (
        (np.argsort(np.argsort(np.random.default_rng(1).random((48, 40)), 1), 1)[trace.step - 1, member])
        < level[trace.step - 1]
    )
    rows = [{"step": s, "optimizer/grad_norm": 6.0 if s == 6 else 1.0} for s in range(1, 49)]
    lucky = trace.with_(reward=right.astype(float), group=np.arange(trace.sequences), metrics=rows)
    assert "learning_rate" not in causes(lucky)
    gone = lucky.with_(reward=np.where(trace.step > 6, 0.0, lucky.reward))
    assert causes(gone)[0] == "learning_rate"


def punished(coefficient: float | None) -> Trace:
    sim = simulate(per_step=64)
    surer = (1 + 2 * (sim.token_step - 1) / STEPS)[:, None]
    trace = replace(sim, train=sim.train * surer, engine=sim.engine * surer).trace(
        facts=replace(FP32, entropy_coefficient=coefficient)
    )
    return trace.with_(advantages=np.where(trace.reward[trace.sequence] > 0, 0.5, -0.5).astype(np.float32))


def test_a_bonus_for_entropy_that_takes_it() -> None:
    assert causes(punished(1.2)) == ["entropy_collapse"]
    assert causes(punished(0.01)) == causes(punished(None)) == []  # so small a bonus may lose to the rewards


def test_groups_that_always_were_alike_are_no_collapse() -> None:
    """Where an answer is seldom right, most groups have none, of a policy that explores and of one that grew sure."""
    sim = simulate(per_step=64)
    surer = np.where(sim.token_step < 7, 1.0, 4.0)[:, None]
    trace = replace(sim, train=sim.train * surer, engine=sim.engine * surer).trace()
    rng, first, later = np.random.default_rng(1), trace.group % 4, trace.step > 6
    rare = (first == 0) & (rng.random(trace.sequences) < 0.5)
    assert causes(trace.with_(reward=rare.astype(float))) == []
    fewer = rare | (~later & (rng.random(trace.sequences) < 0.2))
    assert "entropy_collapse" in causes(trace.with_(reward=fewer.astype(float)))


def test_old_kv_among_flips() -> None:
    """k3 of both parts hangs on rare flips; what tells is that all tokens behind the change are further apart."""
    sim = simulate(per_step=96, noise=0.03)
    position = np.arange(len(sim.train)) - np.repeat(sim.starts[:-1], np.diff(sim.starts))
    resumed = (sim.sequence % 2 == 1) & (sim.token_step > 1)
    behind = resumed & (position >= 8)
    versions = np.where(resumed & ~behind, sim.token_step - 2, sim.token_step - 1)
    flipped = sim.rng.random(len(sim.train)) < 0.01
    size = np.where(flipped, 1.5, np.where(behind, 0.1, 0.0))[:, None]
    sim = replace(sim, engine=sim.engine + sim.rng.normal(size=sim.train.shape) * size)
    trace = sim.trace(versions=versions, kv_versions=versions, facts=replace(FP32, engine_dtype="bf16"))
    assert causes(trace)[0] == "stale_kv"


def test_noise_grows_as_the_temperature_falls() -> None:
    """Logits are divided by it, and so are their errors."""
    sim = simulate(noise=0.05 * 0.75)
    cool = replace(sim, train=sim.train, engine=sim.engine).trace(
        sampled_at=0.6, logged_at=0.6, trained_at=0.6, facts=replace(FP32, engine_dtype="bf16", temperature=0.6)
    )
    assert causes(cool) == []
    assert causes(simulate(noise=0.08).trace(facts=replace(FP32, engine_dtype="bf16"))) == ["quantisation"]


def graded(detail: str, text: str = "a") -> Trace:
    trace = stopped(simulate().trace())
    n = trace.sequences
    wrong = trace.reward == 0
    return trace.with_(
        prompt_text=[f"what is {i // 4}?" for i in range(n)],
        text=[f"{text} {i}" for i in range(n)],
        status=["finished"] * n,
        detail=[detail if w else "right" for w in wrong],
    )


def test_a_program_that_fails_its_test_is_no_failure_of_the_grader() -> None:
    assert causes(graded("test 2 of 5: exit code 1: NameError: name 'x' is not defined")) == []
    assert causes(graded("TimeoutError: no answer from the sandbox"))[0] == "reward_failures"


def test_words_of_the_response_are_not_the_graders() -> None:
    assert causes(graded("not a number: the exception proves", "the exception proves the rule")) == []


def test_one_prompt_that_asks_for_another_answer_each_time() -> None:
    trace = graded("wrong")
    n = trace.sequences
    same = trace.with_(
        prompt_text=["guess my number"] * n,
        text=["seven"] * n,
        detail=["no" if r == 0 else "yes" for r in trace.reward],
    )
    assert causes(same)[:1] == ["reward_failures"]
    told = ["7" if r > 0 else str(100 + i) for i, r in enumerate(trace.reward)]
    assert "reward_failures" not in causes(same.with_(answer=told))


def test_a_part_of_the_answer_earns_a_part_of_the_reward() -> None:
    """What was cut is no longer than the right answer: the limit took the rest, whatever the beginning earned."""
    trace = stopped(simulate().trace())
    rng = np.random.default_rng(1)
    cut, marks = rng.random(trace.sequences) < 0.6, rng.random(trace.sequences)
    told = trace.with_(
        status=np.where(cut, "length", "finished").tolist(),
        reward=np.where(cut, 0.85 * marks, marks),
        text=["1234"] * trace.sequences,
    )
    assert causes(told.with_(answer=["123456"] * trace.sequences)) == ["length_truncation"]
    assert causes(told.with_(answer=["12"] * trace.sequences)) == []
    assert causes(told.with_(answer=["123456"] * trace.sequences, reward=marks)) == []


def test_a_limit_below_every_answer_that_leaves_a_part_of_the_reward() -> None:
    trace = simulate().trace()
    marks = np.random.default_rng(1).random(trace.sequences)
    told = trace.with_(status=["length"] * trace.sequences, text=["12"] * trace.sequences, reward=marks)
    assert causes(told.with_(answer=["1234"] * trace.sequences)) == ["cut_off_answers"]
    assert causes(told.with_(answer=["1234"] * trace.sequences, reward=np.ones(trace.sequences))) == []


def test_episodes_that_end_at_the_limit_before_their_environment_ends_them() -> None:
    trace = simulate().trace()
    mask = np.ones(len(trace), bool)
    mask[trace.starts[:-1] + 2] = False
    share = np.random.default_rng(1).choice([0.0, 0.25, 0.5, 1.0], trace.sequences, p=[0.5, 0.3, 0.19, 0.01])
    assert "cut_off_answers" in causes(trace.with_(mask=mask, reward=share, status=["length"] * trace.sequences))
    assert "cut_off_answers" not in causes(trace.with_(mask=mask, reward=share, status=["finished"] * trace.sequences))


def test_ids_are_not_blamed_where_sequences_with_their_own_are_as_far_off() -> None:
    """Answers that repeat a letter fit themselves when moved."""
    e = measure(simulate().trace())
    odd = np.unique(e.tokens.sequence)[::3]
    apart = 2.0
    far = replace(e.tokens, q=e.tokens.o - apart)
    shift = signs.Shift(-1, apart, 0.5, odd, e.trace.starts[odd], 1.4, e.trace.sequences)
    assert evidence._as_far(shift, far)
    assert not evidence._as_far(shift, e.tokens)
    cause = causes_logging.retokenised(replace(e, displaced=shift))
    assert cause is not None
    assert cause.id == "retokenised"
