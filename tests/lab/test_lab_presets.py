"""An experiment that is wrong in its words or keys is noticed after an hour, or never: every arm and every reading is tried.

Configs are resolved and validated, judges are fed made-up readings, and (slow) every different arm trains a few steps whose
rows must hold every metric that is read. Not covered: what the experiments find at full size; `docs/lab.md` says that.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tiny_run import TINY

from rollkeel.config import Config
from rollkeel.lab import gap, restart
from rollkeel.lab.claims import above, alike, any_of, best, growth, inside, over_last
from rollkeel.lab.preset import NOT_REPRODUCED, REPRODUCED, UNDECIDED, Preset, Rows
from rollkeel.lab.presets import PRESETS
from rollkeel.lab.runs import plan
from rollkeel.loop.check import validate
from rollkeel.loop.job import train
from rollkeel.recipe import load
from rollkeel.record.runfolder import read_rows

TRAINING = [preset for preset in PRESETS.values() if preset.measure is None]
VERDICTS = {REPRODUCED, NOT_REPRODUCED, UNDECIDED}


@pytest.mark.parametrize("preset", PRESETS.values(), ids=lambda p: p.name)
def test_every_arm_is_a_run_that_may_begin(preset: Preset, tmp_path: Path) -> None:
    runs = plan(preset, [0], tmp_path)
    assert len({run.arm for run in runs}) == len(runs), "arms go by their names"
    assert len({run.folder for run in runs}) == len(runs), "no two arms are one run"
    for run in runs:
        if run.config is not None:
            validate(run.config)
    assert preset.question.endswith("?")
    assert preset.expected.endswith(".")
    assert preset.seeds >= 2, "one run of each decides nothing"


def test_experiments_that_ask_for_the_same_run_share_it(tmp_path: Path) -> None:
    folders = {(preset.name, run.arm): run.folder for preset in TRAINING for run in plan(preset, [0], tmp_path)}

    def same(*of: tuple[str, str]) -> bool:
        return len({folders[which] for which in of}) == 1

    assert same(("async-fp8", "icepop"), ("correction", "icepop"), ("icepop-range", "[0.5, 5]"))
    assert same(("async-fp8", "grpo"), ("correction", "grpo"), ("replay-routing", "grpo"))
    assert same(("objectives-stale", "grpo"), ("lr-control", "lr 3e-4, staleness 8"))
    assert same(("objectives-stale", "dppo_binary_kl"), ("anchor", "rollout"))
    assert same(("objectives-stale", "pg_is"), ("minimal-mask", "no mask"))
    assert same(("objectives-stale", "mask_negative"), ("minimal-mask", "δ = 0.5"))
    assert same(("objectives-stale", "grpo_clip_higher"), ("relax", "α = 0"))
    assert same(("clip-strength", "gspo"), ("distortion", "δ = 1"))
    assert same(("async-fp8", "grpo"), ("early-warning", "grpo, fp8, 16 steps old"))
    assert same(("clip-strength", "ε 0.2 (strong)"), ("early-warning", "grpo, fp8"))


@pytest.mark.parametrize("preset", PRESETS.values(), ids=lambda p: p.name)
def test_judges_take_whatever_runs_give(preset: Preset) -> None:
    noise = np.random.default_rng(0)
    for make in (lambda: noise.random(5), lambda: np.full(5, np.nan), lambda: noise.random(1), lambda: np.zeros(3)):
        readings = {name: {arm.name: make() for arm in preset.arms} for name in preset.readings}
        findings = preset.judge(readings)
        assert findings
        assert {f.verdict for f in findings} <= VERDICTS
        assert len({f.claim for f in findings}) == len(findings), "each claim once"
    nothing = {name: {arm.name: np.full(5, np.nan) for arm in preset.arms} for name in preset.readings}
    assert all(f.verdict == UNDECIDED and f.met is not True for f in preset.judge(nothing))


R = {"r": {"a": np.array([0.8, 0.9]), "b": np.array([0.1, 0.2]), "one": np.array([0.5])}}


@pytest.mark.parametrize(
    ("a", "b", "margin", "expected"),
    [
        ([0.50, 0.51], [0.50, 0.52], 0.1, REPRODUCED),
        ([0.80, 0.81], [0.50, 0.52], 0.1, NOT_REPRODUCED),
        ([0.50, 0.51], [0.80, 0.82], 0.1, NOT_REPRODUCED),
        ([0.20, 0.80], [0.30, 0.70], 0.1, UNDECIDED),
        ([0.50], [0.50], 0.1, UNDECIDED),
        ([np.nan, 0.5], [0.5, 0.5], 0.1, UNDECIDED),
    ],
)
def test_no_difference_needs_proof_too(a: list[float], b: list[float], margin: float, expected: str) -> None:
    claim = alike("a", "b", claim="", source="", reading="r", margin=margin)
    assert claim({"r": {"a": np.array(a), "b": np.array(b)}}).verdict == expected


@pytest.mark.parametrize(
    ("values", "expected", "met"),
    [
        ([0.80, 0.82], REPRODUCED, True),
        ([0.40, 0.42], NOT_REPRODUCED, False),
        ([0.60, 0.90], UNDECIDED, True),
        ([0.30, 0.90], UNDECIDED, False),
        ([0.90], UNDECIDED, True),
        ([1.0, 1.0], REPRODUCED, True),
        ([np.nan, 0.9], UNDECIDED, False),
    ],
)
def test_a_range_is_kept_or_left_by_two_errors(values: list[float], expected: str, met: bool) -> None:
    readings = {"r": {"a": np.array(values)}}
    claim = inside("a", 0.7, 1.0, claim="", source="", reading="r", banded=True)(readings)
    assert (claim.verdict, claim.met) == (expected, met)
    assert inside("a", 0.7, 1.0, claim="", source="", reading="r")(readings).met is None


def test_above_says_what_was_measured() -> None:
    found = above("a", "b", claim="more", source="x", reading="r")(R)
    assert (found.verdict, found.numbers) == (
        REPRODUCED,
        "r: 0.850 ± 0.050 against 0.150 ± 0.050, apart by 0.700 ± 0.000",
    )
    assert above("b", "a", claim="more", source="x", reading="r")(R).verdict == NOT_REPRODUCED
    assert above("a", "one", claim="more", source="x", reading="r")(R).verdict == UNDECIDED


def rows_of(values: list[float]) -> Rows:
    return [{"step": 0}, *({"step": i + 1, "x": v} for i, v in enumerate(values))]


def test_readings_over_windows() -> None:
    rows = rows_of([1.0] * 20 + [9.0] * 5 + [2.0] * 20)
    assert over_last("x")(rows) == 2.0
    assert over_last("x", 100)(rows_of([1.0, 3.0])) == 2.0, "a run that ended early is read where it ended"
    assert np.isnan(over_last("y")(rows))
    assert growth("x")(rows) == 2.0
    assert np.isnan(growth("x")(rows_of([1.0] * 39)))
    assert np.isnan(growth("x")(rows_of([0.0] * 20 + [1.0] * 20)))
    assert best("x", 5)(rows) == 9.0
    assert np.isnan(best("x", 5)(rows_of([1.0] * 4)))
    assert any_of(("y", "x"))(rows) == 2.0
    assert np.isnan(any_of(("y", "z"))(rows))


SHORT_STEPS = 3
SHORT = {
    "run": {"steps": SHORT_STEPS},
    "data": {"options": {"digits": 2}},
    "sft": {"steps": 60, "lr": 1e-2},
    "sampling": {"max_new_tokens": 4},
    "rollout": {"prompts": 8, "samples": 4},
    "train": {"lr": 3e-3, "warmup_steps": 0},
    "report": {"samples": 0},
}
"""Rewards that vary and steps long enough that clips and masks have something to cut."""


@pytest.mark.slow
def test_every_arm_trains_and_every_reading_finds_its_metric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rollkeel.loop.job import train

    monkeypatch.setenv("ROLLKEEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("rollkeel.report.render", lambda _: None)
    found: dict[Path, Rows] = {}
    for preset in TRAINING:
        seen: set[str] = set()
        for run in plan(preset, [0], tmp_path):
            if run.folder not in found:
                assert run.config is not None
                found[run.folder] = _few_steps(train, run.config, run.folder)
            seen |= {name for name, read in preset.readings.items() if not np.isnan(read(found[run.folder]))}
            assert all(any(key in row for row in found[run.folder]) for key in preset.charts), (preset.name, run.arm)
        assert seen == set(preset.readings), (preset.name, set(preset.readings) - seen)


def _few_steps(train: Callable[[Config], Path], config: Config, folder: Path) -> Rows:
    """Rows of a short run, told over and over until every window is full."""
    parts = {**SHORT, "run": {**SHORT["run"], "dir": str(folder)}}
    short = config.model_copy(
        update={name: getattr(config, name).model_copy(update=part) for name, part in parts.items()}
    )
    train(short)
    rows = [row for row in read_rows(folder / "metrics.jsonl")[0] if row["step"] > 0]
    assert len(rows) == SHORT_STEPS
    assert all(np.isfinite(row["loss/total"]) for row in rows)
    return [{**row, "step": i + 1} for i, row in enumerate(itertools.chain.from_iterable([rows] * 40))]


@pytest.mark.slow
def test_a_restart_begins_from_the_checkpoint_with_other_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLKEEL_CACHE", str(tmp_path / "cache"))
    begun: list[Config] = []
    real = restart.train
    monkeypatch.setattr(restart, "train", lambda config: (begun.append(config), real(config)))
    words = [*TINY, "checkpoint.every=6", "checkpoint.keep=9", "run.steps=12", "report.samples=0"]
    row = restart.restarts(words, 5, collapse="grpo", cure="dppo_binary_tv", early=6, late=12)
    assert set(row) >= {"first run", "early restart", "late restart", "cured restart", "cured restart: best"}
    assert all(np.isfinite(value) for value in row.values())
    assert [config.objective.name for config in begun] == ["grpo", "grpo", "grpo", "dppo_binary_tv"]
    assert len({config.run.seed for config in begun}) == 4
    assert [config.sft.steps > 0 for config in begun] == [True, False, False, False]
    assert [Path(config.model.path).parent.name for config in begun[1:]] == [
        "step_000006",
        "step_000012",
        "step_000012",
    ]
    lost = restart.restarts([*words, "checkpoint.every=0"], 5, collapse="grpo", cure="grpo", early=6, late=12)
    assert set(lost) == {
        "first run",
        "first run: best",
        "late restart",
        "late restart: best",
        "cured restart",
        "cured restart: best",
    }


def test_the_docs_list_every_experiment_and_their_example_works(tmp_path: Path) -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "lab.md").read_text()
    for preset in PRESETS.values():
        row = f"| `{preset.name}` | {preset.question} | {preset.paper} | {preset.expected} | {len(preset.arms)} × {preset.seeds} |"
        assert row in text, f"docs/lab.md lacks: {row}"
    space: dict[str, object] = {}
    exec(text.split("```python\n")[1].split("```")[0], space)
    example = space["WEIGHT_CAP"]
    assert isinstance(example, Preset)
    shared = {run.folder for run in plan(PRESETS["async-fp8"], [0], tmp_path)}
    assert [run.folder in shared for run in plan(example, [0], tmp_path)] == [True, False]


@pytest.mark.parametrize("drawn", [False, True])
def test_a_softmax_in_bf16_takes_few_probabilities(drawn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gap, "TOKENS", 4000)
    row = gap.softmax_ratio(0, drawn=drawn)
    assert row["mean"] == pytest.approx(1.0, abs=3e-4)
    assert row["std"] == pytest.approx(0.0048, abs=2e-4)
    assert row["levels, fp32"] > 3950
    assert row["levels, bf16"] < 1500
    assert row["kl"] == pytest.approx(0.0048**2 / 2, rel=0.1), "half of the variance of the log ratio"
    assert row != gap.softmax_ratio(0, drawn=not drawn)


@pytest.mark.slow
def test_stale_256_trains_on_batches_that_are_256_updates_old(tmp_path: Path) -> None:
    words = [*PRESETS["stale-256"].words, *PRESETS["stale-256"].arms[0].words]
    few = ["rollout.prompts=2", "run.steps=260", "eval.every=0", "eval.items=2", "checkpoint.every=0", "sft.steps=60"]
    config = load(None, [*words, *few, f"run.dir={tmp_path / 'run'}"])
    assert config.objective.options == {}, "the published bounds"
    train(config)
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")[0][1:]
    assert [row["staleness/mean"] for row in rows] == [min(step, 256) for step in range(260)]
    assert {row["staleness/span"] for row in rows} == {0}
