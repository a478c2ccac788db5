"""A run that learnt nothing, from nothing, or lost it again must never be called healthy, and one that sharpened must be.

Simulated traces, one thing broken at a time. Not covered: real runs of each kind, which `benchmarks/doctor` makes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from simulated import STEPS, Simulated, simulate, stopped

from rollkeel_doctor import CAUSES, diagnose
from rollkeel_doctor.tokens import taken
from rollkeel_doctor.traces.trace import Facts, Trace

BF16 = Facts(engine_dtype="bf16", train_dtype="fp32", temperature=1.0, top_p=1.0, max_new_tokens=99)


def first(trace: Trace) -> str:
    found = diagnose(trace)
    return found.causes[0].id if found.causes else str(found.healthy)


# -- selection is not evidence -----------------------------------------------------------------------------------------


def sharpened(late: float = 0.0, until: int = 20) -> Simulated:
    """Two tokens a context. Their margin grows step by step but for a few contexts that the policy stays torn about, where rounding
    weighs twenty times as much: as a whole run under bf16 has it.

    `late`: noise of all contexts from the tenth step on; `until`: step from which the sampler stands still.
    """
    sim = simulate(per_step=128, steps=20)
    count = len(sim.train)
    torn = sim.rng.random(count) < 0.04
    margin = np.linspace(1.5, 5.5, 20)[np.minimum(sim.token_step, until) - 1] + sim.rng.normal(size=count) * 0.5
    train = np.full(sim.train.shape, -30.0)
    train[:, 0], train[:, 1] = np.where(torn, sim.rng.normal(size=count), margin), 0.0
    size = np.where(torn, 0.5, 0.025) + late * (sim.token_step >= 10)
    return replace(sim, train=train, engine=train + sim.rng.normal(size=train.shape) * size[:, None])


def test_the_noise_of_the_few_that_are_left_is_selection() -> None:
    trace = sharpened().trace(facts=BF16)
    assert first(trace) == "True"
    assert first(taken(trace, np.flatnonzero(trace.step > 12))) == "True"


def test_noise_of_all_is_not() -> None:
    assert first(sharpened(late=0.4).trace(facts=BF16)) in ("stale_version", "wrong_weights")
    assert first(sharpened().trace(facts=replace(BF16, engine_dtype="fp32"))) == "quantisation"


def test_versions_that_do_not_arrive_late_in_a_sharp_policy() -> None:
    """Hardly a token is of middling probability by then, and those that are far apart stand alone among sure ones."""
    sim = sharpened(until=12)
    for away in (np.maximum(sim.token_step - 12, 0) * 0.15, 0.4 * ((sim.token_step > 8) & (sim.token_step % 3 > 0))):
        engine = sim.engine + sim.rng.normal(size=sim.train.shape) * away[:, None]
        assert first(replace(sim, engine=engine).trace(facts=BF16)) == "stale_version"


# -- rewards -----------------------------------------------------------------------------------------------------------


def level(trace: Trace, at: np.ndarray) -> np.ndarray:
    """Rewards of 0 and 1 with the mean `at[step − 1]`."""
    return (np.random.default_rng(4).random(trace.sequences) < at[trace.step - 1]).astype(float)


def test_a_run_that_never_had_a_reward() -> None:
    trace = simulate().trace()
    for steps in (1, 2, STEPS):
        few = taken(trace, np.flatnonzero(trace.step <= steps))
        assert first(few.with_(reward=np.zeros(few.sequences))) == "no_reward_signal"
        assert first(few.with_(reward=np.full(few.sequences, 0.1))) == "no_reward_signal"  # for its form alone
    assert first(trace.with_(reward=level(trace, np.full(STEPS, 0.05)))) == "True"


def test_a_reward_that_is_gone_without_a_cause_that_shows() -> None:
    trace = simulate(per_step=64).trace()
    assert first(trace.with_(reward=level(trace, np.repeat([0.4, 0.0], STEPS // 2)))) == "reward_lost"
    assert first(trace.with_(reward=level(trace, np.repeat([0.1, 0.6, 0.2], STEPS // 3)))) == "reward_lost"
    assert first(trace.with_(reward=level(trace, np.repeat([0.4, 0.33], STEPS // 2)))) == "True"
    bare = trace.with_(train_logprobs=None, entropy=None, reward=level(trace, np.repeat([0.4, 0.0], STEPS // 2)))
    assert first(bare) == "reward_lost"  # a dump of rewards and texts


def test_a_dump_that_tells_hardly_anything_is_not_healthy() -> None:
    trace = simulate().trace()
    bare = trace.with_(rollout_logprobs=np.full(len(trace), np.nan, np.float32), train_logprobs=None, entropy=None)
    found = diagnose(bare.with_(versions=None, train_version=None, kept_mass=None, facts=Facts()))
    assert found.healthy is None
    assert found.verdict == f"not examined: {len(found.not_examined)} of {len(CAUSES)} causes could not be tested"


def test_rewards_that_are_swallowed_from_a_step_on() -> None:
    """The gold answer scored until then: the grader is gone, and not what the policy knows."""
    trace = simulate(per_step=64).trace()
    right = trace.reward > 0
    texts = [str(i // 4) if ok else "no" for i, ok in enumerate(right)]
    told = trace.with_(text=texts, answer=[str(i // 4) for i in range(trace.sequences)])
    assert first(told.with_(reward=np.where(trace.step > 3, 0.0, trace.reward))) == "reward_failures"


def test_a_reward_for_nothing() -> None:
    trace = simulate().trace()
    empty = np.arange(trace.sequences) % 20 == 0
    told = trace.with_(text=["" if e else f"so {i}" for i, e in enumerate(empty)], answer=["4"] * trace.sequences)
    assert first(told.with_(reward=np.where(empty, 1.0, trace.reward))) == "reward_failures"
    assert first(told.with_(reward=np.where(empty, 0.0, trace.reward))) == "True"


# -- training ----------------------------------------------------------------------------------------------------------


def trained(**changes: Any) -> Trace:
    """With advantages that follow from the rewards, and metrics of updates."""
    trace = simulate().trace()
    mean = np.bincount(trace.group, trace.reward)[trace.group] / np.bincount(trace.group)[trace.group]
    rows = [{"step": s, "optimizer/grad_norm": 0.5, "optimizer/changed_share": 0.9} for s in range(1, STEPS + 1)]
    known = {"advantages": (trace.reward - mean)[trace.sequence], "keep": np.ones(len(trace), bool), "metrics": rows}
    return trace.with_(**(known | changes))


def test_training_that_does_nothing() -> None:
    honest = trained()
    assert first(honest) == "True"
    assert honest.advantages is not None
    none = [{**row, "optimizer/grad_norm": 0.0} for row in honest.metrics]
    still = [{**row, "optimizer/changed_share": 0.0} for row in honest.metrics]
    broken: list[dict[str, Any]] = [
        {"metrics": none},
        {"metrics": still},
        {"keep": np.zeros(len(honest), bool)},
        {"advantages": np.zeros(len(honest))},
        {"facts": replace(honest.facts, unmoved=(6, 12))},
    ]
    for change in broken:
        cause = diagnose(honest.with_(**change)).causes[0]
        assert (cause.id, cause.kind) == ("nothing_trained", "bug"), change
    # Without differing rewards there is no gradient either, and that is what is wrong.
    assert first(honest.with_(metrics=none, reward=np.zeros(honest.sequences))) == "no_reward_signal"


def test_a_trainer_that_stands_still_on_prompts_that_come_again() -> None:
    """The same sequences in every step: the log-probs of a policy that learns move, or its prompts do not come again."""
    once = taken(simulate(steps=1, per_step=64).trace(), np.arange(64))
    again = taken(once, np.tile(np.arange(64), 6))
    step = np.repeat(np.arange(1, 7), 64)
    changes: dict[str, Any] = {"step": step, "id": np.arange(384), "group": np.arange(384) // 4, "train_version": step}
    again = again.with_(**changes, versions=step[again.sequence], prompt_text=[str(i % 64) for i in range(384)])
    assert first(again) == "nothing_trained"
    moved = 1e-3 * step[again.sequence] * np.random.default_rng(0).normal(size=len(again))
    assert again.train_logprobs is not None
    both = {
        "train_logprobs": (again.train_logprobs - np.abs(moved)).astype(np.float32),
        "rollout_logprobs": (again.rollout_logprobs - np.abs(moved)).astype(np.float32),
    }
    assert first(again.with_(**both)) == "True"


@pytest.mark.parametrize("stated", [None, True])
def test_advantages_of_other_rollouts(stated: bool | None) -> None:
    honest = trained()
    assert honest.advantages is not None
    each = honest.advantages[honest.starts[:-1]]
    for wrong in (np.random.default_rng(0).permutation(each), np.roll(each, 1), -each):
        changed = honest.with_(advantages=wrong[honest.sequence], facts=replace(honest.facts, shuffled=stated))
        cause = diagnose(changed).causes[0]
        assert cause.id == "wrong_advantages"
        assert ("experiment.advantages" in cause.evidence) is bool(stated)
    noisy = each + 0.2 * np.random.default_rng(0).normal(size=len(each))  # a penalty for length, say
    assert first(honest.with_(advantages=noisy[honest.sequence])) == "True"


def test_rollouts_that_are_in_the_batch_twice() -> None:
    trace = simulate().trace()
    twice = taken(trace, np.repeat(np.arange(trace.sequences), 2)).with_(id=np.arange(2 * trace.sequences))
    assert first(twice) == "duplicates"
    # A sure policy says the same each time, and may.
    assert first(simulate(sharpness=60.0).trace()) == "True"


def test_one_prompt_for_a_whole_batch() -> None:
    trace = simulate().trace()
    own = [f"what is {g}?" for g in trace.group]
    assert first(trace.with_(prompt_text=own)) == "True"
    assert first(trace.with_(prompt_text=[f"what is {s}?" for s in trace.step])) == "duplicates"
    assert first(trace.with_(prompt_text=[f"what is {s % 2}?" for s in trace.step])) == "duplicates"
    few = [f"what is {s} + {g % 2}?" for s, g in zip(trace.step, trace.group, strict=True)]
    assert first(trace.with_(prompt_text=few)) == "duplicates"  # two prompts for many groups, others in the next step
    assert first(trace.with_(prompt_text=[f"what is {g % 2}?" for g in trace.group])) == "True"  # data of two prompts


def test_answers_that_are_cut() -> None:
    trace = stopped(simulate().trace())
    told = trace.with_(status=["finished"] * trace.sequences, prompt_text=[f"{g}?" for g in trace.group])
    assert first(told) == "True"
    whole, half = simulate().trace(), trace.token_ids.copy()
    bare = told.with_(token_ids=whole.token_ids)
    assert first(bare.with_(source="rollkeel run")) == "cut_off_answers"  # the stop token is cut off
    assert first(bare) == "True"  # others may write none at all
    ends = trace.starts[1:][::4] - 1
    half[ends] = whole.token_ids[ends]
    assert first(told.with_(token_ids=half)) == "cut_off_answers"  # some are cut and called finished


def test_a_limit_below_every_right_answer() -> None:
    trace = simulate().trace()
    cut = {"status": ["length"] * trace.sequences, "reward": np.zeros(trace.sequences)}
    told = trace.with_(**cut, text=["12"] * trace.sequences)
    assert first(told.with_(answer=["1234"] * trace.sequences)) == "cut_off_answers"
    assert first(told.with_(answer=["3"] * trace.sequences)) == "no_reward_signal"  # it babbles


def test_the_verdict_is_one_line() -> None:
    found = diagnose(trained(keep=np.zeros(len(trained()), bool)))
    assert found.verdict.startswith("nothing_trained (bug): ")
    assert "\n" not in found.verdict
    assert diagnose(trained()).verdict.startswith("healthy")
