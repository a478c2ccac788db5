"""The simulator is used to choose Φ, Ω and σ before anything is bought: a wrong event order would give wrong advice.

Tiny cases that can be computed by hand, the analytic time of a barrier, conservation of tokens in every policy, and the
directions in which figures must move. Not covered: whether a measured curve predicts a real run (benchmarks/c3po.py).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from tiny_run import cli

from rollkeel.errors import BadInput
from rollkeel.protocols import Engine
from rollkeel.recipe import RECIPES
from rollkeel.record.rollout_store import write_step
from rollkeel.report.simulation import observed_lengths
from rollkeel.rollout.fleet import Curve, Fleet
from rollkeel.rollout.ledger import Ledger
from rollkeel.rollout.measure import speed_curve
from rollkeel.rollout.scenario import POLICIES, LengthConfig, Lengths, Scenario, load_scenario
from rollkeel.rollout.simulate import compare, counted, overlapped, simulate
from rollkeel.types import GraderSpec, Prompt, Request, Rollout, SamplingParams, Segment, Status, TokenSpan

LINEAR = "engine.curve=[[1, 10]]"
"""Ten tokens per second, shared by whatever runs: a step with n sequences takes n / 10 s."""
BATCHED = "engine.curve=[[1, 10], [1000, 10000]]"
"""Ten tokens per second for every sequence."""
SMALL = (BATCHED, "engine.slots=16", "rollout.prompts=4", "rollout.samples=4", "iterations=24", "warmup=8")


def scenario(*overrides: str) -> Scenario:
    return load_scenario(None, [*SMALL, *overrides])


def figures(s: Scenario, observed: np.ndarray | None = None) -> dict[str, dict[str, Any]]:
    return {str(row["policy"]): row for row in compare(simulate(s, observed))}


class Given(Lengths):
    """Lengths by rollout id, over and over."""

    def __init__(self, *lengths: int) -> None:
        super().__init__(LengthConfig(), 0)
        self._given = lengths

    def of(self, prompt: int, id: int) -> int:
        return self._given[id % len(self._given)]


# -- the engines -------------------------------------------------------------------------------------------------------


def test_curve_is_linear_between_points_flat_beyond_and_bound_by_latency_below() -> None:
    curve = Curve([[2, 20], [4, 30]])
    assert curve.step_s(1) == curve.step_s(2) == 0.1
    assert curve.step_s(3) == 3 / 25
    assert curve.step_s(4) == 4 / 30
    assert curve.step_s(8) == 8 / 30
    assert (curve.peak, curve.widest) == (30, 4)


@pytest.mark.parametrize("points", [[], [[1]], [[0, 5]], [[1, 0]], [[2, 5], [1, 6]], [[1, float("nan")]]])
def test_curve_refuses(points: list[list[float]]) -> None:
    with pytest.raises(BadInput, match=r"engine\.curve: expected"):
        Curve(points)


def test_two_sequences_together_then_one() -> None:
    """Steps of 0.2 s while two run and 0.1 s for one: 3 tokens end at 0.6 s, the other two of 5 take 0.2 s."""
    fleet = Fleet(Curve([[1, 10]]), 1)
    fleet.admit(7, 0, 3)
    fleet.admit(8, 0, 5)
    assert fleet.finish_next() == {7: 3}
    assert fleet.now == pytest.approx(0.6)
    assert fleet.tokens() == {8: 3}
    assert fleet.finish_next() == {8: 5}
    assert fleet.now == pytest.approx(0.8)
    assert fleet.busy == pytest.approx(2 * 0.6 + 0.2)
    assert fleet.generated() == pytest.approx(8)


def test_a_resumed_sequence_prefills_and_owes_only_its_rest() -> None:
    fleet = Fleet(Curve([[1, 10]]), 1, prefill_tokens_s=100)
    fleet.admit(0, 40, 45, prefill=50)
    assert fleet.finish_next() == {0: 45}
    assert fleet.now == pytest.approx(0.5 + 0.5)
    slow = Fleet(Curve([[1, 10]]), 1, prefill_tokens_s=100)
    slow.admit(0, 40, 45, prefill=50, beside_s=0.25)
    slow.finish_next()
    assert slow.now == pytest.approx(0.25 + 0.5 + 0.5)


def test_more_engines_than_sequences_do_not_help() -> None:
    for engines, expected in ((1, 1.0), (2, 0.5), (50, 0.5)):
        fleet = Fleet(Curve([[1, 10]]), engines)
        fleet.admit(0, 0, 5)
        fleet.admit(1, 0, 5)
        assert fleet.finish_next() == {0: 5, 1: 5}
        assert fleet.now == pytest.approx(expected)


def test_groups_take_the_sequence_with_room_and_keep_it() -> None:
    """Group A has lengths 2 and 9, group B 4 and 4: B is idle after 0.8 s while A's last runs alone, for A's 9 + 2 steps."""
    fleet = Fleet(Curve([[1, 10]]), 2, groups=2)
    for id, length in enumerate((2, 4, 9, 4)):
        fleet.admit(id, 0, length)
    ends = []
    while len(fleet):
        ends.append((fleet.finish_next(), round(fleet.now, 9)))
    assert ends == [({0: 2}, 0.4), ({1: 4, 3: 4}, 0.8), ({2: 9}, 1.1)]


def test_removed_sequences_are_gone_and_their_neighbours_speed_up() -> None:
    fleet = Fleet(Curve([[1, 10]]), 1)
    fleet.admit(0, 0, 3)
    fleet.admit(1, 0, 5)
    fleet.remove(0)
    assert fleet.finish_next() == {1: 5}
    assert fleet.now == pytest.approx(0.5)
    assert fleet.next_end() == float("inf")


def test_an_engine_that_leaves_hands_over_and_one_that_joins_takes_new_work() -> None:
    """Two engines with a slot each, ten steps a second; 4 and 6 tokens run, 3 wait behind the first. After one step the second engine goes:
    its 6 wait, too, and lose no token. 4 end at 0.4 s, 3 at 0.7 s, and the other 5 of 6 at 1.2 s."""
    fleet = Fleet(Curve([[1, 10]]), 2, groups=2, slots=1)
    for id, length in enumerate((4, 6, 3)):
        fleet.admit(id, 0, length)
    fleet.run_to(0.1)
    moved = fleet.resize(1)
    assert moved == {1: 1}
    fleet.admit(1, moved[1], 6)
    assert fleet.tokens() == {0: 1, 1: 1, 2: 0}
    ends = []
    while len(fleet):
        ends.append((fleet.finish_next(), round(fleet.now, 9)))
    assert ends == [({0: 4}, 0.4), ({2: 3}, 0.7), ({1: 6}, 1.2)]
    assert fleet.resize(3) == {}
    assert fleet.engines == 3
    for id in (7, 8, 9):
        fleet.admit(id, 0, 2)
    assert fleet.finish_next() | fleet.finish_next() | fleet.finish_next() == {7: 2, 8: 2, 9: 2}
    assert fleet.now == pytest.approx(1.4)


# -- policies by hand --------------------------------------------------------------------------------------------------


def one_step(*extra: str) -> Scenario:
    base = ("rollout.prompts=1", "rollout.samples=2", "iterations=1", "warmup=0", "train.tokens_s=8")
    return load_scenario(None, [LINEAR, *base, *extra])


def test_two_sequences_one_slot() -> None:
    """3 and 5 tokens one after the other at 10 tokens/s: 0.8 s; 8 tokens trained at 8 per second: 1 s."""
    result = counted(one_step(), Given(3, 5), "sync", 1)
    found = result.metrics()
    assert found["rollout_s"] == pytest.approx(0.8)
    assert found["step_s"] == pytest.approx(1.8)
    assert found["idle_share"] == pytest.approx(0)
    assert [n for _, n in result.trace][-1] == 0
    assert max(n for _, n in result.trace) == 1


def test_two_sequences_two_slots_share_the_engine() -> None:
    """The same 8 tokens at the same 10 per second, but the second slot is empty for 0.2 of 0.8 s."""
    found = counted(one_step(), Given(3, 5), "sync", 2).metrics()
    assert found["rollout_s"] == pytest.approx(0.8)
    assert found["idle_share"] == pytest.approx(0.2 / 1.6)


@pytest.mark.parametrize("seed", range(3))
def test_a_barrier_without_a_queue_takes_as_long_as_the_longest(seed: int) -> None:
    s = scenario(f"seed={seed}", "warmup=0", "iterations=3", "policies=[]")
    lengths = Lengths(s.lengths, seed)
    longest = [max(lengths.of(i // 4, i) for i in range(16 * k, 16 * k + 16)) for k in range(3)]
    assert [row.rollout_s for row in counted(s, lengths, "sync", 16).rows] == pytest.approx([n / 10 for n in longest])


def test_refilled_slots_beat_waves() -> None:
    """Four slots for 16 rollouts: waves of four would take the sum of their longest."""
    s = scenario("warmup=0", "iterations=1")
    lengths = Lengths(s.lengths, 0)
    waves = sum(max(lengths.of(i // 4, i) for i in range(k, k + 4)) for k in range(0, 16, 4)) / 10
    all_tokens = sum(lengths.of(i // 4, i) for i in range(16)) / 40
    refilled = counted(s, lengths, "sync", 4).metrics()["rollout_s"]
    assert all_tokens <= refilled < waves


def test_over_sampling_drops_the_slow_group_and_april_keeps_it() -> None:
    """Groups of 9, 2 and 2 tokens, one wanted of two: the first has 2 tokens when the second ends at 0.2 s."""
    s = load_scenario(
        None, [BATCHED, "rollout.prompts=1", "rollout.samples=1", "iterations=2", "warmup=0", "lengths.median=2"]
    )
    dropped = counted(s, Given(9, 2, 2, 2), "oversample", 2, extra=1.0)
    kept = counted(s, Given(9, 2, 2, 2), "april", 2, extra=1.0, keep=True)
    assert [row.rollout_s for row in dropped.rows] == pytest.approx([0.2, 0.2])
    assert dropped.ledger.dropped_lengths == [9, 2]
    assert kept.ledger.dropped_lengths == []
    assert kept.ledger.live[0].versions == [(0, 2), (1, 2)]


# -- what must hold whatever the scenario ------------------------------------------------------------------------------

VARIANTS = [
    (),
    ("c3po.count=generated",),
    ("c3po.group=partial", "c3po.retention=0"),
    (
        "engine.engines=6",
        "engine.groups=3",
        "engine.slots=4",
        "engine.prefill_tokens_s=500",
        "lengths.prompt_tokens=20",
    ),
    ("lengths.correlation=0.7", "c3po.retention=1", "asynchronous.staleness=2", "c3po.count=generated"),
    ("engine.prefill_tokens_s=300", "kv=keep", "train.publish_s=0.5", "train.fixed_s=1", "c3po.train_capacity=8"),
]


@pytest.mark.parametrize("overrides", VARIANTS, ids=lambda v: " ".join(v) or "default")
def test_every_token_goes_to_one_place(overrides: tuple[str, ...]) -> None:
    """The ledger pops what it trains or drops, so nothing could be trained twice without a `KeyError`."""
    for result in simulate(scenario("warmup=0", *overrides)):
        book = result.ledger
        assert book.generated == book.trained + book.dropped + sum(life.tokens for life in book.live.values())
        assert book.generated == sum(row.generated for row in result.rows)
        assert book.trained == sum(row.trained for row in result.rows) == sum(book.staleness.values())
        assert len(book.issued_lengths) == len(book.trained_lengths) + len(book.dropped_lengths) + len(book.live)
        assert max(n for _, n in result.trace) <= result.slots
        found = result.metrics()
        assert 0 <= found["idle_share"] < 1
        assert 0 <= found["lost_throughput"] < 1


def test_a_rollout_cannot_be_trained_twice_or_unfinished() -> None:
    book = Ledger(Given(3))
    book.issue(0, 0)
    book.note({0: 2})
    with pytest.raises(AssertionError, match="2 of 3 tokens"):
        book.train([0])
    book.issue(0, 0)
    book.note({0: 3})
    assert book.train([0]) == 3
    with pytest.raises(KeyError):
        book.train([0])


def test_the_same_scenario_gives_the_same_figures_and_another_seed_others() -> None:
    assert figures(scenario()) == figures(scenario())
    assert figures(scenario())["c3po"]["rollout_s"] != figures(scenario("seed=1"))["c3po"]["rollout_s"]


def test_a_larger_budget_trains_more_tokens_and_is_less_stale() -> None:
    found = [figures(scenario(f"c3po.budget={phi}", "iterations=60", "warmup=20"))["c3po"] for phi in (500, 2000, 8000)]
    assert [row["trained_tokens"] for row in found] == sorted(row["trained_tokens"] for row in found)
    assert [row["rollout_s"] for row in found] == sorted(row["rollout_s"] for row in found)
    assert [row["staleness_mean"] for row in found] == sorted((row["staleness_mean"] for row in found), reverse=True)
    assert found[0]["trained_tokens"] < found[-1]["trained_tokens"]


def test_a_shorter_retention_purges_more_and_mostly_long_rollouts() -> None:
    results = [simulate(scenario(f"c3po.retention={sigma}", "iterations=80"))[3] for sigma in (0, 2, 20)]
    rates = [result.metrics()["purge_rate"] for result in results]
    assert rates[0] > rates[1] > rates[2] == 0
    by_length = [rate for _, rate in results[1].purge_rate_by_length()]
    assert by_length[-1] > 0.3 > by_length[0] == 0


def test_equal_lengths_leave_nothing_to_gain() -> None:
    found = figures(scenario("lengths.sigma=0"))
    assert found["c3po"]["speedup_rollout"] == pytest.approx(1)
    assert found["sync"]["idle_share"] == pytest.approx(0)
    assert found["c3po"]["length_bias"] == 1


def test_long_tails_are_what_the_pool_is_for() -> None:
    found = figures(scenario("iterations=60", "warmup=20", "lengths.max=4096"))
    assert found["c3po"]["speedup_rollout"] > 2 > found["sync"]["speedup_rollout"] == 1
    assert found["c3po"]["idle_share"] < 0.05 < found["sync"]["idle_share"]
    assert found["oversample"]["length_bias"] < 0.9


@pytest.mark.parametrize("bound", [1, 2, 5])
@pytest.mark.parametrize("group", ["wait", "partial"])
def test_async_keeps_its_bound(bound: int, group: str) -> None:
    s = scenario(f"asynchronous.staleness={bound}", f"c3po.group={group}", "train.tokens_s=60", "iterations=60")
    result = overlapped(s, Lengths(s.lengths, 0), 16)
    assert 0 < max(result.ledger.staleness) <= bound
    assert sum(row.trained for row in result.rows) > 0


def test_async_hides_the_shorter_of_generation_and_training() -> None:
    """One batch in training at a time: a step takes as long as the slower of the two, when training is slower."""
    s = scenario("train.tokens_s=20", "lengths.sigma=0", "c3po.group=partial", "engine.slots=32")
    result = overlapped(s, Lengths(s.lengths, 0), 32)
    seconds = [row.step_s for row in result.rows]
    assert seconds == pytest.approx([1024 / (20 * 0.5)] * len(seconds))


# -- files and the command line ----------------------------------------------------------------------------------------


def rollout(id: int, tokens: int, status: Status = Status.FINISHED) -> Rollout:
    ids = np.arange(tokens)
    span = TokenSpan(
        token_ids=ids,
        logprobs=np.full(tokens, -1, np.float32),
        kept_mass=np.ones(tokens, np.float32),
        versions=ids * 0,
        kv_versions=ids * 0,
    )
    prompt = Prompt(
        id="a", index=0, text="?", token_ids=np.array([1]), answer="1", grader=GraderSpec(name="task"), task="runsum"
    )
    return Rollout(
        id=id, group=0, member=id, prompt=prompt, span=span, status=status, sampling=SamplingParams(), engine="local",
        dtype="fp32",
    )  # fmt: skip


def test_lengths_of_a_run_leave_out_what_did_not_end(tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    ended = [rollout(0, 3), rollout(1, 5, Status.LENGTH), rollout(2, 9, Status.PARKED), rollout(3, 0, Status.LENGTH)]
    write_step(tmp_path / "rollouts" / "step_000001.parquet", ended, step=1)
    write_step(tmp_path / "rollouts" / "step_000002.parquet", [rollout(4, 7)], step=2)
    assert observed_lengths(tmp_path).tolist() == [3, 5, 7]
    lengths = Lengths(LengthConfig(), 0, observed_lengths(tmp_path))
    drawn = [lengths.of(0, i) for i in range(3000)]
    assert {n: round(drawn.count(n) / 3000, 1) for n in set(drawn)} == {3: 0.3, 5: 0.3, 7: 0.3}


def test_lognormal_lengths_have_the_median_the_cut_and_shared_difficulty() -> None:
    lengths = Lengths(LengthConfig(median=100, sigma=1, max=1600, correlation=0.8), 0)
    drawn = np.array([[lengths.of(g, g * 8 + i) for i in range(8)] for g in range(2000)])
    assert np.median(drawn) == pytest.approx(100, rel=0.08)
    assert (drawn.max(), drawn.min() >= 1) == (1600, True)
    logs = np.log(drawn)
    assert logs.mean(1).var() / logs.var() == pytest.approx(0.8 + 0.2 / 8, abs=0.05)


def test_command_writes_table_json_and_a_page_without_outside_references(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, text, err = cli(capsys, "simulate", *SMALL, "--out", tmp_path / "deep" / "out")
    assert (code, err) == (0, "")
    assert [line.split()[0] for line in text.splitlines()[1:-1]] == list(POLICIES)
    stored = json.loads((tmp_path / "deep/out/simulation.json").read_text())
    assert [row["policy"] for row in stored["policies"]] == list(POLICIES)
    html = (tmp_path / "deep/out/simulation.html").read_text()
    assert "mathdefault" not in html
    assert html.count("<svg") == 5
    assert "http" not in html
    assert "<script" not in html
    code, again, _ = cli(capsys, "simulate", tmp_path / "deep/out/scenario.yaml", "--json")
    assert (code, json.loads(again)) == (0, stored)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "recipe 'nowhere': no such file"),
        (["engine.curv=[[1, 2]]"], "did you mean engine.curve?"),
        (["engine.curve=[[1, 2], [1, 3]]"], "expected ascending numbers of sequences"),
        (["rollout.prompts=0"], "config rollout.prompts"),
        (["policies=[sink]"], "config policies.0"),
        (["warmup=30"], "expected fewer than iterations=30, got 30"),
        (["rollout.samples=1"], "group=wait needs samples"),
        (["engine.changes=[[3, 0]]"], "config engine.changes: expected pairs [iteration, engines], got [3, 0]"),
        (["lengths.rollouts=/no/such"], "no parquet files"),
        (["engine=3"], "expected a section of keys"),
    ],
)
def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    code, _, err = cli(capsys, "simulate", *words)
    assert code == 2
    assert err.count("\n") == 1
    assert err.startswith("rollkeel: ")
    assert message in err


@pytest.mark.parametrize("name", ["laptop", "ring_1t"])
def test_recipes_load(name: str) -> None:
    assert load_scenario(name) == load_scenario(str(RECIPES / "simulate" / f"{name}.yaml"))


def test_simulating_needs_no_torch() -> None:
    script = "import sys, rollkeel.report.simulation; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "False"


class Steady:
    """An engine with `slots` that takes 1 ms per decode step however many decode, 20 µs per prompt token and 0.5 ms to
    let a sequence in, by its own clock."""

    def __init__(self, slots: int) -> None:
        self.fleet = Fleet(Curve([[1, 1000], [slots, 1000 * slots]]), 1, 1, 50_000)
        self.slots, self.waiting = slots, list[Request]()

    def submit(self, requests: Sequence[Request]) -> None:
        self.waiting += requests

    def poll(self, timeout_s: float) -> list[Segment]:
        while self.waiting and len(self.fleet) < self.slots:
            r = self.waiting.pop(0)
            self.fleet.admit(r.id, 0, r.sampling.max_new_tokens, len(r.prompt_ids), 0.0005)
        done = self.fleet.finish_next()
        return [Segment(request_id=i, span=TokenSpan.empty(), status=Status.LENGTH) for i in done]


def test_measured_speeds_are_those_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Steady(8)
    monkeypatch.setattr("rollkeel.rollout.measure.time.perf_counter", lambda: engine.fleet.now)
    speeds = speed_curve(cast(Engine, engine), [1, 8], 20)
    assert [n for n, _ in speeds.curve] == [1, 8]
    assert speeds.curve[0][1] == pytest.approx(1000, rel=0.01)
    assert speeds.curve[1][1] == pytest.approx(8000, rel=0.01)
    assert speeds.prefill_tokens_s == pytest.approx(50_000, rel=0.01)
    assert speeds.prefill_s == pytest.approx(0.0005, rel=0.1)


@pytest.mark.slow
def test_a_thousand_engines_in_under_a_minute(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = cli(capsys, "simulate", "ring_1t", "--json")
    assert code == 0
    assert {row["policy"] for row in json.loads(out)["policies"]} == set(POLICIES)
