"""What has to hold whatever the run: an inequality, an expectation, a count. Thresholds that fit other runs do not carry over.

Not covered: what a checkpoint proves, see `tests/diagnose/test_recompute.py`.
"""

from __future__ import annotations

import numpy as np
import pytest
from simulated import STEPS, Simulated, simulate

from rollkeel_doctor import diagnose
from rollkeel_doctor.tokens import taken
from rollkeel_doctor.traces.trace import Facts, Trace


def causes(trace: Trace) -> list[str]:
    return [c.id for c in diagnose(trace).causes]


def test_ids_that_nobody_sampled_in_short_answers() -> None:
    """Too short for a break to show, and in a mixture where other ids choose other experts. The mean of ρ hangs on its tails."""
    sim = simulate(noise=0.01, per_step=128, sharpness=5.0)
    starts = np.arange(0, len(sim.train) // 3 * 3 + 1, 3)
    step = np.sort(np.arange(len(starts) - 1) % STEPS) + 1
    short = Simulated(
        rng=sim.rng, starts=starts, step=step, train=sim.train[: starts[-1]], engine=sim.engine[: starts[-1]]
    )
    trace = short.trace(facts=Facts(engine_dtype="bf16", train_dtype="fp32", temperature=1.0, top_p=1.0))
    assert trace.train_logprobs is not None
    other = trace.sequence % 3 == 0
    o = trace.train_logprobs.copy()
    o[other] = sim.rng.permutation(o[other])
    flips = (other & (sim.rng.random(len(trace)) < 0.8)).astype(np.int16)
    assert causes(trace.with_(flipped_layers=0 * flips)) == []
    assert causes(trace.with_(train_logprobs=o, flipped_layers=flips))[0] == "retokenised"


@pytest.mark.parametrize("noise", [0.3, 1.5])
def test_other_weights_never_look_like_other_ids(noise: float) -> None:
    assert "retokenised" not in causes(simulate(noise=noise, per_step=96).trace())


def answers(answers: int = 6) -> Trace:
    """One token each, of a few that all are likely; eight to a prompt."""
    rng, count = np.random.default_rng(3), 64 * STEPS
    logits = np.where(np.arange(32) < answers, 0.0, -30.0) + rng.normal(size=(count // 8, 32))
    each = np.repeat(logits, 8, axis=0)
    step = np.repeat(np.arange(1, STEPS + 1), 64)
    sim = Simulated(rng=rng, starts=np.arange(count + 1), step=step, train=each, engine=each)
    return sim.trace(group=np.arange(count) // 8)


def test_copies_among_answers_that_are_often_alike() -> None:
    """Of a rollout of probability Q chance leaves (n − 1) Q copies, however large Q is."""
    trace = answers()
    assert causes(trace) == []
    twice = taken(trace, np.arange(trace.sequences) // 2 * 2).with_(id=trace.id)
    assert causes(twice)[0] == "duplicates"
    # A sampler that is sharper than its log-probs say draws alike as well; without entropies nothing tells.
    sharp = np.where(np.arange(trace.sequences) % 2, 1, 0)
    assert "duplicates" not in causes(taken(trace, np.arange(trace.sequences) - sharp).with_(id=trace.id, entropy=None))


def test_one_prompt_where_steps_do_not_end_with_groups_of_it() -> None:
    trace = simulate(per_step=28, steps=24).trace()
    alike = trace.with_(prompt_text=[f"what is {(g + 3) // 14}?" for g in trace.group])
    assert causes(alike)[0] == "duplicates"
    assert causes(trace.with_(prompt_text=[f"what is {g // 3}?" for g in trace.group])) == []


def test_a_few_rewards_that_all_came_in_the_first_step() -> None:
    """Half of the steps would have half of them by chance: three in one of twelve are proof."""
    trace = simulate(per_step=64).trace()
    rows = [{"step": s, "clip/high": 0.1 * (s == 1)} for s in range(1, STEPS + 1)]
    first = np.flatnonzero(trace.step == 1)
    dead = trace.with_(reward=np.zeros(trace.sequences), metrics=rows)

    def named(wins: np.ndarray) -> list[str]:
        reward = dead.reward.copy()
        reward[wins] = 1.0
        return causes(dead.with_(reward=reward))

    assert named(first[::12])[0] == "learning_rate"
    assert "learning_rate" not in named(np.concatenate([first[:2], np.flatnonzero(trace.step == 5)[:1]]))
