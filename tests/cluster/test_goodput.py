"""A simulated month decides how often people save and what they build, so its arithmetic must be right where it can be checked.

Timelines by hand, conservation of time, the closed form of a job with exponential faults, Young's interval against a search. Not
covered: whether the assumed rates and costs are those of anybody's machines.
"""

from __future__ import annotations

import json
import math

import pytest
from tiny_run import cli

from rollkeel.cluster.goodput import (
    DAY_S,
    CostsConfig,
    GoodputScenario,
    MechanismsConfig,
    RatesConfig,
    _Job,
    compared,
    interval,
    simulate,
)

NEVER = RatesConfig(crash=0, process=0, hang=0, slow=0)
BARE = MechanismsConfig(**dict.fromkeys(MechanismsConfig.model_fields, False))
BY_HAND = GoodputScenario(
    gpus=32, rollout_s=10, train_s=5, overlap=False, days=1000 / DAY_S, slow_factor=0.5, rates=NEVER,
    costs=CostsConfig(
        every=90, save=10, crash_noticed=1, deadline=20, person=200, slow_noticed=40, all_start=30, trainer_start=7, engine_start=5,
        spare=2, replaced=50,
    ),
)  # fmt: skip
"""Two trainer nodes and two engines; steps of 15 s."""


def job(scenario: GoodputScenario, **mechanisms: bool) -> _Job:
    return _Job(scenario.model_copy(update={"mechanisms": MechanismsConfig(**mechanisms)}), 0)


def test_without_faults_only_checkpoints_cost() -> None:
    month = job(BY_HAND).run()
    assert month.kept == pytest.approx(900)
    assert month.losses == pytest.approx({**dict.fromkeys(month.losses, 0.0), "saving": 100})
    assert month.faults == 0


@pytest.mark.parametrize(
    ("kind", "has", "kept", "losses"),
    [
        # At 140 s: 90 + 40 s of work, the last step begun at 30 of these 40.
        ("process", {}, 120, {"lost work": 10, "noticing": 1, "starting": 7}),
        ("process", {"peer_memory": False}, 90, {"lost work": 40, "noticing": 1, "starting": 7}),
        ("process", {"trainer_alone": False}, 120, {"lost work": 10, "noticing": 1, "starting": 30}),
        ("crash", {}, 120, {"lost work": 10, "noticing": 1, "places": 2, "starting": 7}),
        ("crash", {"spares": False}, 120, {"lost work": 10, "noticing": 1, "places": 50, "starting": 7}),
        ("hang", {}, 120, {"lost work": 10, "noticing": 20, "starting": 7}),
        ("hang", {"deadlines": False}, 120, {"lost work": 10, "noticing": 200, "starting": 7}),
    ],
)
def test_a_rank_s_fault_by_hand(kind: str, has: dict[str, bool], kept: float, losses: dict[str, float]) -> None:
    one = job(BY_HAND, **has)
    one._advance(140)
    assert one.month.kept == pytest.approx(130)
    one._fault(kind, "trainer")
    down = sum(seconds for seconds, _ in one._down)
    one._advance(140 + down)
    assert one.month.kept == pytest.approx(kept)
    found = {name: value for name, value in one.month.losses.items() if value}
    assert found == pytest.approx({"saving": 10, **losses})
    one._advance(140 + down + 10)
    assert one.month.kept == pytest.approx(kept + 10)


def test_a_lost_engine_slows_sampling_until_another_has_its_weights() -> None:
    one = job(BY_HAND)
    one._fault("crash", "engine")  # 10 s of sampling become 20: 15 s of work take 25
    assert one._events[0][0] == 1 + 2 + 5
    one._advance(8)
    assert one.month.kept == pytest.approx(8 * 15 / 25)
    one._happen(*one._events.pop()[2:])
    one._advance(18)
    assert one.month.kept == pytest.approx(8 * 15 / 25 + 10)
    assert sum(one.month.losses.values()) == pytest.approx(8 * 10 / 25)
    both = job(BY_HAND)
    both._fault("crash", "engine")
    both._fault("process", "engine")
    both._fault("process", "engine")  # nobody is left to die
    both._advance(5)
    assert (both.month.kept, both._out) == (0, 2)


def test_a_slow_node_is_found_or_stays() -> None:
    found, stays = job(BY_HAND), job(BY_HAND, slow_found=False)
    for one in (found, stays):
        one._fault("slow", "trainer")  # 5 s of training become 10
        one._advance(40)
        assert one.month.kept == pytest.approx(40 * 15 / 20)
    found._happen(*found._events.pop()[2:])
    assert [name for _, name in found._down] == ["noticing", "places", "starting"]
    assert (found._slow_trainer, stays._slow_trainer, stays._events) == (False, True, [])


def test_no_second_is_lost_or_counted_twice() -> None:
    for seed in range(20):
        for has in (MechanismsConfig(), BARE):
            rates = RatesConfig(crash=3.0, process=3.0, hang=1.0, slow=2.0)
            scenario = GoodputScenario(gpus=64, days=3, rates=rates, mechanisms=has, engine_nodes=1 + seed % 2)
            month = _Job(scenario, seed).run()
            assert month.faults > 100
            assert month.kept + sum(month.losses.values()) == pytest.approx(3 * DAY_S)
            assert min(month.losses.values()) >= 0


def test_faults_that_come_by_chance_cost_what_renewal_theory_says() -> None:
    """A checkpoint's work and save take (1/λ + R)(e^{λ(w+s)} − 1) on average, if restarts are not disturbed: R ≪ 1/λ."""
    work, save, restart, nodes = 600.0, 30.0, 20.0, 8
    scenario = GoodputScenario(
        gpus=8 * nodes, days=60, repeats=10, mechanisms=BARE, rates=RatesConfig(crash=0, hang=0, slow=0, process=5.0),
        costs=CostsConfig(every=work, save=save, crash_noticed=0, all_start=restart),
    )  # fmt: skip
    rate = nodes * 5.0 / DAY_S
    expected = work / ((1 / rate + restart) * (math.exp(rate * (work + save)) - 1))
    found = simulate(scenario)
    assert abs(found["goodput"] - expected) <= 4 * found["goodput_se"] + 0.001
    assert 0.5 < expected < 0.9


def test_the_chosen_interval_is_as_good_as_a_search_finds() -> None:
    scenario = GoodputScenario(gpus=4096, days=30, mechanisms=BARE, repeats=8)
    chosen = interval(scenario)
    shares = {
        factor: simulate(scenario.model_copy(update={"costs": CostsConfig(every=chosen * factor)}))["goodput"]
        for factor in (0.25, 0.5, 1.0, 2.0, 4.0)
    }
    assert shares[1.0] >= max(shares.values()) - 0.004
    assert shares[1.0] > max(shares[0.25], shares[4.0])


def test_no_mechanism_hurts_and_all_help_together() -> None:
    rows = compared(GoodputScenario(gpus=4096, repeats=6), [4096])
    by = {row["mechanisms"]: row for row in rows}
    best, none = by.pop("all of these"), by.pop("none")
    assert len(by) == len(MechanismsConfig.model_fields)
    for row in by.values():
        assert row["goodput"] <= best["goodput"] + 2 * (row["goodput_se"] + best["goodput_se"])
        assert row["goodput"] >= none["goodput"] - 2 * (row["goodput_se"] + none["goodput_se"])
    assert best["goodput"] - none["goodput"] > 0.03


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate-goodput", "month", "repeats=2", "days=2", "--gpus", "64", "--gpus", "512"]
    code, out, err = cli(capsys, *words)
    assert (code, err) == (0, "")
    assert out.count("all of these") == 2
    assert "assumed" in out
    code, out, _ = cli(capsys, *words, "--json")
    assert [row["gpus"] for row in json.loads(out)] == [64] * 8 + [512] * 8
    code, _, err = cli(capsys, "simulate-goodput", "rates.crush=1")
    assert (code, err.count("\n")) == (2, 1)
