"""An alarm that cries wolf is turned off, and one that comes after the fall is a chart: both are tried on made-up runs.

Not covered: how early it comes on real collapses; the lab measures that over seeds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_run import TINY, cli, events, rows

from rollkeel.record.alarms import WINDOW, Alarms, alarms_of


def healthy(step: int, **changes: float) -> dict[str, Any]:
    """A row of a run that goes on as it began."""
    row = {
        "step": step,
        "reward/mean": 0.5,
        "reward/std": 0.5,
        "rollout/count": 128.0,
        "mismatch/prob_abs_diff": 0.03,
        "mismatch/kl_k3": 0.03,
        "mismatch/ess": 0.95,
        "mismatch/pearson": 0.97,
        "mask/bad_updates": 0.001,
        "policy/entropy": 0.4,
        "optimizer/grad_norm": 1.0,
        "objective/kept": 0.97,
    }
    return row | {key.replace("__", "/"): value for key, value in changes.items()}


def kinds(run: list[dict[str, Any]]) -> list[tuple[str, int]]:
    return [(alarm.kind, alarm.step) for alarm in alarms_of(run)]


def test_a_run_that_stays_as_it_is_says_nothing() -> None:
    assert kinds([healthy(step) for step in range(200)]) == []


def test_growth_alone_and_level_alone_say_nothing() -> None:
    grown = [healthy(s, mismatch__prob_abs_diff=0.03 if s < 20 else 0.09) for s in range(1, 60)]
    assert kinds(grown) == [], "no other signal confirms it"
    high = [healthy(s, mismatch__kl_k3=0.5, mismatch__ess=0.2) for s in range(1, 60)]
    assert kinds(high) == [], "it was so from the first step on"
    tiny = [healthy(s, mismatch__prob_abs_diff=1e-6 * s, mismatch__kl_k3=0.5) for s in range(1, 60)]
    assert kinds(tiny) == [], "growth of what does not matter"


def test_growth_with_a_second_signal_is_an_alarm_once_a_window_agrees() -> None:
    run = [
        healthy(s, **({} if s <= 30 else {"mismatch__prob_abs_diff": 0.06, "mismatch__kl_k3": 0.2}))
        for s in range(1, 60)
    ]
    # With five of ten the median is the mean of both levels, which is the limit.
    assert kinds(run) == [("gap", 35)]
    (alarm,) = alarms_of(run)
    assert "abs(o−q) 0.045, 1.5 times" in alarm.evidence[0]
    assert alarm.evidence[1].startswith("mismatch/kl_k3 0.115")


def test_masks_that_drop_less_while_the_gap_grows_are_named() -> None:
    late = {"mismatch__prob_abs_diff": 0.05, "mismatch__ess": 0.1, "objective__kept": 0.999}
    (alarm,) = alarms_of([healthy(s, **(late if s > 30 else {})) for s in range(1, 50)])
    assert any(line.startswith("masks drop") for line in alarm.evidence)


def test_a_fall_of_the_reward_must_exceed_its_noise() -> None:
    rng = np.random.default_rng(0)
    noise = rng.normal(0, 0.5 / np.sqrt(32), 300)
    run = [healthy(s, reward__mean=float(0.2 + noise[s]), rollout__count=32.0) for s in range(300)]
    assert kinds(run) == []
    fallen = [healthy(s, reward__mean=0.5 if s < 50 else 0.3) for s in range(1, 100)]
    assert kinds(fallen) == [("reward", 54)], "five of ten steps at 0.3: 20 % below"


def test_a_solved_task_may_lose_its_entropy() -> None:
    solved = [
        healthy(s, policy__entropy=0.4 if s < 20 else 0.01, reward__mean=min(0.98, 0.3 + 0.02 * s)) for s in range(90)
    ]
    assert kinds(solved) == []
    lost = [
        healthy(s, policy__entropy=0.4 if s < 40 else 0.01, reward__mean=0.5 if s < 40 else 0.35) for s in range(90)
    ]
    assert {kind for kind, _ in kinds(lost)} == {"reward", "entropy"}


def test_an_alarm_is_said_once_until_it_has_passed() -> None:
    bad = {"mismatch__prob_abs_diff": 0.2, "mismatch__kl_k3": 1.0}
    run = [healthy(s, **(bad if 30 <= s < 60 or 100 <= s < 120 else {})) for s in range(1, 150)]
    assert [kind for kind, _ in kinds(run)] == ["gap", "gap"]


def test_a_resumed_watch_continues_the_whole_one() -> None:
    bad = {"mismatch__prob_abs_diff": 0.2, "mismatch__kl_k3": 1.0}
    run = [healthy(s, **(bad if s >= 40 else {})) for s in range(1, 80)]
    whole = alarms_of(run)
    for cut in (10, 44, 50, 70):
        alarms = Alarms()
        for row in run[:cut]:
            alarms.observe(row)
        assert [a for row in run[cut:] for a in alarms.observe(row)] == [a for a in whole if a.step > cut]


def test_metrics_that_a_run_does_not_have_raise_nothing() -> None:
    assert kinds([{"step": s, "reward/mean": 0.5} for s in range(3 * WINDOW)]) == []
    assert kinds([{"step": s} for s in range(3 * WINDOW)]) == []


def test_a_gradient_that_began_at_zero_is_an_alarm_and_not_an_error() -> None:
    """It killed runs: the rule divided by the first level."""
    run = [
        healthy(s, optimizer__grad_norm=0.0 if s < 30 else 1.0, reward__mean=0.5 if s < 40 else 0.3)
        for s in range(1, 70)
    ]
    assert {kind for kind, _ in kinds(run)} == {"gradient", "reward"}
    assert any("gradient norm 1, first level 0" in line for a in alarms_of(run) for line in a.evidence)
    still = [healthy(s, optimizer__grad_norm=0.0, reward__mean=0.5 if s < 40 else 0.3) for s in range(1, 70)]
    assert {kind for kind, _ in kinds(still)} == {"reward"}, "a gradient that stays 0 has not grown"


ODD = (
    0.0,
    -0.0,
    1e-320,
    -1.0,
    1e308,
    10**400,
    float("nan"),
    float("inf"),
    -float("inf"),
    None,
    "0.5",
    True,
    [1.0],
    0.5,
)


@pytest.mark.filterwarnings("error")
def test_no_number_that_a_row_can_hold_breaks_an_alarm() -> None:
    """An alarm advises; it must never be what ends a run. Each key takes odd values for half a run, or goes missing."""
    rng = np.random.default_rng(0)
    for _ in range(40):
        run = [healthy(s, reward__mean=0.5 if s < 25 else 0.1, mismatch__prob_abs_diff=0.03 * s) for s in range(1, 40)]
        for key in rng.permutation(list(run[0])[1:])[:6]:
            first, choice = rng.integers(0, 30), ODD[rng.integers(len(ODD))]
            for row in run[first : first + 22]:
                row[key] = choice
                if choice is None:
                    del row[key]
        for alarm in alarms_of(run):
            assert alarm.line


@pytest.mark.parametrize("action", ["warn", "checkpoint", "stop"])
def test_a_run_acts_on_its_alarm(
    action: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real run whose alarm limits are set to where it passes them."""
    monkeypatch.setattr("rollkeel.record.alarms.WINDOW", 3)
    monkeypatch.setattr("rollkeel.record.alarms.TV", -1.0)
    monkeypatch.setattr("rollkeel.record.alarms.TV_GROWTH", -1.0)
    monkeypatch.setattr("rollkeel.record.alarms.K3", -1.0)
    run = tmp_path / "run"
    words = [*TINY, "run.steps=8", "checkpoint.every=0", f"alarms.on_alarm={action}", f"run.dir={run}"]
    code, _, err = cli(capsys, "train", *words)
    said = [e for e in events(run) if e["event"] == "alarm"]
    assert [e["alarm"] for e in said] == ["gap"]
    at = said[0]["step"]
    assert at == 6, "two windows of three steps"
    saved = [e["step"] for e in events(run) if e["event"] == "checkpoint_saved"]
    if action == "warn":
        assert (code, at in saved) == (0, False)
    elif action == "checkpoint":
        assert (code, at in saved) == (0, True)
    else:
        assert (code, saved[-1], rows(run)[-1]["step"]) == (3, at, at)
        assert "alarm at step 6" in err
        assert cli(capsys, "train", "--resume", run)[0] == 0
        assert rows(run)[-1]["step"] == 8
