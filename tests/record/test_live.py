"""People decide from this view whether to wait or to stop, so rate, ETA and the shown numbers must be right.

Not covered: how it looks on a particular terminal.
"""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from rollkeel.objectives import kpop
from rollkeel.objectives.described import in_words
from rollkeel.record.live import LiveView, duration, select, sparkline, stage_times

ROW = {
    "step": 3,
    "reward/mean": 0.5,
    "eval/runsum/avg@k": 0.625,
    "eval/runsum/avg@k_se": 0.01,
    "mismatch/ratio_std": 0.0123,
    "mismatch/source": "old",
    "mask/kpop/dropped": 0.0044,
    "policy/entropy": 0.34,
    "time/rollout_s": 0.1,
    "time/update_s": 75.0,
}


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def view(terminal: bool = False) -> tuple[LiveView, io.StringIO, Clock]:
    file, clock = io.StringIO(), Clock()
    console = Console(file=file, force_terminal=terminal, width=120, height=40, legacy_windows=False)
    return LiveView(console=console, clock=clock), file, clock


def test_plain_output_is_one_line_per_step_without_escapes() -> None:
    live, file, clock = view()
    with live:
        live.phase("rl", 10)
        for i in (1, 2):
            clock.now += 2
            live.step(i, ROW)
        live.note("[bold]hello[/bold]\x1b[2J\nworld")
        live.error("boom")
    lines = file.getvalue().splitlines()
    assert lines[0] == "rl: 10 steps"
    assert lines[2] == (
        "rl 2/10  reward 0.500  accuracy 0.625  ratio std 0.0123  masked 0.44%  entropy 0.340  2.00 s/step  ETA 16 s"
    )
    assert lines[3:] == ["[bold]hello[/bold] [2J world", "error: boom"]
    assert "\x1b" not in file.getvalue()


def test_long_lines_are_not_wrapped() -> None:
    live, file, _ = view()
    with live:
        live.note("x" * 500)
    assert file.getvalue() == "x" * 500 + "\n"


def test_rate_and_eta_count_only_the_steps_of_this_process() -> None:
    live, _, clock = view()
    with live:
        live.phase("rl", 150)
        assert live.eta_s is None
        clock.now += 3
        live.step(101, {})  # resumed at 100
        assert live.seconds_per_step == pytest.approx(3)
        assert live.eta_s == pytest.approx(3 * 49)
        for i in range(102, 142):  # old, slow steps leave the window
            clock.now += 0.5
            live.step(i, {})
        assert live.seconds_per_step == pytest.approx(0.5)
        live.phase("eval", 1)
        assert live.seconds_per_step is None


def test_terminal_shows_progress_metrics_times_and_notes() -> None:
    live, file, clock = view(terminal=True)
    with live:
        live.phase("rl", 10)
        clock.now += 2
        live.step(1, ROW)
        live.step(2, {"step": 4, "reward/mean": 0.75})  # the evaluation stays visible
        live.note("checkpoint saved")
        live.error("[red]refused[/red]")
    text = file.getvalue()
    for part in (
        "rl",
        "2/10",
        "reward  ▁█  0.500 → 0.750",
        "0.625",
        "0.0123",
        "0.44%",
        "rollout 0.10 s",
        "update 1m15s",
        "checkpoint saved",
    ):
        assert part in text, part
    assert "error: [red]refused[/red]" in text


def test_the_view_ends_when_the_body_raises() -> None:
    live, _, _ = view(terminal=True)

    def body() -> None:
        with live:
            live.phase("rl", 2)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        body()
    assert live._live is None


def test_select_skips_what_is_missing_or_not_a_number() -> None:
    assert select({"reward/mean": "?", "policy/entropy": 1}) == [("entropy", "1.000")]
    assert select({}) == []
    assert stage_times({"time/a_s": 1.0, "time/b": 2.0, "memory/rss_mb": 1}) == [("a", 1.0)]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.137, "0.14 s"), (12.4, "12 s"), (185, "3m05s"), (7620, "2h07m"), (3599.9, "1h00m")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_a_sparkline_by_hand() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([0.3, 0.3]) == "▁▁"
    assert sparkline([0, 0, 1, 1, 2, 2], width=3) == "▁▅█"


def test_an_objective_is_told_in_one_line_and_not_as_a_dict() -> None:
    told = in_words(kpop(phi=0.1).describe())
    assert told == (
        "kpop: phi 0.1; mode decoupled; clip_low 0.2; clip_high 0.2; masks kpop; weight mismatch; surrogate ppo_clip"
    )
