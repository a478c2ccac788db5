"""The early-warning experiment counts runs; a miscount would praise an alarm that comes too late, or never.

Readings and findings on made-up rows with known steps. Not covered: the alarms' own limits (`tests/record/test_alarms.py`).
"""

from __future__ import annotations

import numpy as np
import pytest

from rollkeel.lab.preset import NOT_REPRODUCED, REPRODUCED, UNDECIDED, Rows
from rollkeel.lab.presets import warning
from rollkeel.lab.presets.warning import COLLAPSING, EARLY_WARNING, first_alarm, first_fall, first_move

HEALTHY = [arm.name for arm in EARLY_WARNING.arms if arm.name != COLLAPSING]
NEVER = np.inf


def rows_of(values: list[float], key: str = "reward/mean") -> Rows:
    return [{"step": 0, key: 99.0}, *({"step": i + 1, key: v} for i, v in enumerate(values))]


def test_the_fall_is_of_ten_step_means_against_the_best_so_far() -> None:
    assert first_fall(rows_of([0.5] * 30)) == NEVER
    assert first_fall(rows_of([0.5] * 20 + [0.0] * 20)) == 23, "three zeros among ten: 0.35 of 0.5"
    assert first_fall(rows_of([0.1] * 20 + [0.5] * 10 + [0.42] * 30)) == NEVER
    assert first_fall(rows_of([0.04] * 20 + [0.0] * 20)) == NEVER, "what never rose cannot fall"
    assert np.isnan(first_fall(rows_of([0.5] * 9)))
    assert np.isnan(first_fall([]))


def test_a_move_is_twice_the_first_level_and_half_of_it_where_asked() -> None:
    up, down = rows_of([1.0] * 20 + [3.0] * 20, "x"), rows_of([1.0] * 20 + [0.4] * 20, "x")
    assert first_move("x")(up) == 26, "six of ten values carry a median"
    assert first_move("x")(down) == NEVER
    assert first_move("x", down=True)(down) == 26
    assert first_move("x")(rows_of([1.0] * 30, "x")) == NEVER
    assert np.isnan(first_move("y")(up))


def test_no_alarm_is_never_and_no_rows_are_unknown() -> None:
    assert first_alarm(rows_of([0.5] * 40)) == NEVER
    assert np.isnan(first_alarm([]))
    gap = [{"step": i + 1, "mismatch/prob_abs_diff": 0.03 if i < 15 else 0.3, "mismatch/kl_k3": 0.5} for i in range(40)]
    assert 15 < first_alarm(gap) < 30


def judged(alarm: list[float], fall: list[float], healthy: list[float]) -> dict[str, tuple[str, bool | None, str]]:
    """Verdict, band and numbers of the first two findings."""
    readings = {name: {arm.name: np.full(10, NEVER) for arm in EARLY_WARNING.arms} for name in EARLY_WARNING.readings}
    readings[warning._ALARM][COLLAPSING] = np.array(alarm)
    readings[warning._FALL][COLLAPSING] = np.array(fall)
    for name, steps in zip(HEALTHY, np.array_split(np.array(healthy), 3), strict=True):
        readings[warning._ALARM][name] = steps
    found = EARLY_WARNING.judge(readings)
    return {key: (f.verdict, f.met, f.numbers) for key, f in zip(("before", "silent"), found, strict=False)}


@pytest.mark.parametrize(
    ("late", "false", "before", "silent"),
    [
        (1, 1, (REPRODUCED, True, "9 of 10"), (REPRODUCED, True, "29 of 30")),
        (2, 2, (NOT_REPRODUCED, False, "8 of 10"), (NOT_REPRODUCED, False, "28 of 30")),
    ],
)
def test_nine_of_ten_and_twenty_nine_of_thirty(
    late: int, false: int, before: tuple[str, bool, str], silent: tuple[str, bool, str]
) -> None:
    found = judged([50.0] * late + [20.0] * (10 - late), [50.0] * 10, [30.0] * false + [NEVER] * (30 - false))
    for key, (verdict, met, count) in {"before": before, "silent": silent}.items():
        assert found[key][:2] == (verdict, met)
        assert found[key][2].startswith(count)


def test_an_alarm_in_a_run_that_does_fall_is_no_false_one() -> None:
    readings = {name: {arm.name: np.full(10, NEVER) for arm in EARLY_WARNING.arms} for name in EARLY_WARNING.readings}
    readings[warning._ALARM][HEALTHY[0]][:3] = 30.0
    readings[warning._FALL][HEALTHY[0]][:2] = 60.0
    found = EARLY_WARNING.judge(readings)[1]
    assert found.numbers == "29 of 30 runs; 27 silent, 2 fell"
    assert found.met


def test_runs_that_did_not_fall_do_not_count_and_few_decide_nothing() -> None:
    found = judged([20.0] * 10, [50.0] * 4 + [NEVER] * 6, [NEVER] * 30)
    assert found["before"][:2] == (UNDECIDED, True)
    assert found["before"][2].startswith("4 of 4 runs")
    assert judged([NEVER] * 10, [NEVER] * 10, [NEVER] * 30)["before"][1] is False
