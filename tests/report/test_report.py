"""The report is what people judge a run by, and it shows text that a model made up: it must be complete and inert.

Not covered: how a browser paints it.
"""

from __future__ import annotations

import json
import math
import re
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollkeel.config import Config
from rollkeel.errors import BadInput
from rollkeel.recipe import load
from rollkeel.record.rollout_store import write_step
from rollkeel.record.runfolder import RunFolder
from rollkeel.report import render
from rollkeel.report.charts import MAX_POINTS, correlation, matching, series, smooth
from rollkeel.report.panels import growth, panels
from rollkeel.report.samples import choose, shade, visible
from rollkeel.types import GraderSpec, Prompt, Rollout, SamplingParams, Status, TokenSpan

EVIL = '</span><script>alert("x")</script><img src=http://evil.example/x onerror=alert(1)>{{ 7 * 7 }}\x1b[2J'


def row(step: int) -> dict[str, Any]:
    rng = np.random.default_rng(step)
    noise = rng.normal()
    progress = 1 - math.exp(-step / 40)
    metrics = {
        "step": step,
        "reward/mean": 0.38 + 0.5 * progress + 0.03 * noise,
        "rollout/length_mean": 12.5 + 0.3 * noise,
        "policy/entropy": 0.34 * math.exp(-step / 90) + 0.01 * abs(noise),
        "optimizer/grad_norm": 0.4 + 0.2 * abs(noise),
        "mismatch/ratio_std": 0.08 + 0.0003 * step + 0.01 * abs(noise),
        "mismatch/equal_version/ratio_std": 0.07 + 0.01 * abs(noise),
        "mismatch/kl_k3": 0.003 * math.exp(step / 60) * (1 + 0.2 * abs(noise)),
        "mismatch/pearson": 0.993 - 0.001 * abs(noise),
        "mismatch/source": "old",
        "mask/kpop/dropped": 0.004 + 0.002 * abs(noise),
        "mask/kpop/phi": 0.1,
        "clip/high": 0.01 * abs(noise),
        "clip/low": 0.005 * abs(noise),
        "time/rollout_s": 0.06 + 0.01 * abs(noise),
        "time/update_s": 0.07 + 0.01 * abs(noise),
        "time/publish_s": 0.004,
        "throughput/rollout_tokens_s": 21000 + 500 * noise,
        "throughput/train_tokens_s": 17000 + 400 * noise,
        "memory/rss_mb": 640 + 0.2 * step,
    }
    if step % 25 == 0 or step == 1:
        metrics |= {
            "eval/runsum/avg@k": 0.38 + 0.52 * progress,
            "eval/runsum/avg@k_se": 0.015,
            "eval/runsum/greedy": 0.45 + 0.5 * progress,
            "time/eval_s": 0.5,
        }
    return metrics


def rollouts(step: int, text: str = "1 3 6 0") -> tuple[list[Rollout], dict[int, np.ndarray], dict[int, np.ndarray]]:
    rng = np.random.default_rng(step)
    made, train, keep = [], {}, {}
    for i in range(8):
        n = 13
        q = -rng.exponential(0.3, n).astype(np.float32)
        span = TokenSpan(
            token_ids=rng.integers(3, 20, n),
            logprobs=q,
            kept_mass=np.ones(n, np.float32),
            versions=np.full(n, step - 1),
            kv_versions=np.full(n, step - 1),
        )
        prompt = Prompt(
            id="ab",
            index=i,
            text=f"runsum 1 2 3 4 {text} =",
            token_ids=np.arange(4),
            answer=f"1 3 6 0 {text}",
            grader=GraderSpec(name="task"),
            task="runsum",
        )
        made.append(
            Rollout(
                id=8 * step + i,
                group=step,
                member=i,
                prompt=prompt,
                span=span,
                status=Status.FINISHED,
                sampling=SamplingParams(),
                engine="local",
                dtype="fp8",
                reward=float(i % 2),
                text=text,
                detail=f"said {text}",
            )
        )
        train[made[-1].id] = np.minimum(q + rng.normal(0, 0.15, n), 0).astype(np.float32)
        keep[made[-1].id] = np.abs(np.exp(train[made[-1].id]) - np.exp(q)) < 0.15
    return made, train, keep


def make_run(path: Path, steps: int, *, text: str = "1 3 6 0", piece: Any = lambda i: f"{i}\n"[-3:]) -> RunFolder:
    run = RunFolder.create(path, load(overrides=["engine.dtype=fp8", f"run.steps={max(steps, 1)}"]))
    (path / "metrics.jsonl").write_text("".join(json.dumps(row(step)) + "\n" for step in range(1, steps + 1)))
    if steps:
        made, train, keep = rollouts(steps, text)
        write_step(run.rollouts(steps), made, step=steps, train_logprobs=train, keep=keep, piece=piece)
    return run


class Page(HTMLParser):
    """Tags, attributes and text of a page, checking that what opens is closed."""

    VOID = frozenset({"meta", "img", "br", "link", "input", "hr"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.words.append(data)

    def assert_inert(self) -> None:
        """Nothing runs and nothing is fetched."""
        for tag, attrs in self.tags:
            assert tag not in ("script", "iframe", "object", "embed", "link", "base", "form", "a"), tag
            for name, value in attrs.items():
                assert not name.startswith("on"), name
                if name in ("src", "href", "xlink:href", "action", "srcset"):
                    assert value is not None
                    assert value.startswith(("#", "data:image/png;base64,")), value
                if name == "style":
                    assert "url(" not in (value or "")


def page(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


def test_a_full_run_shows_everything_fast_and_small(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 150)
    run.events.emit("objective", name="kpop", phi=0.1, clip_low=0.2)
    run.events.emit("checkpoint_refused", step=125, path="step_000125", reason="model/a does not match its checksum")
    run.end("done")
    start = time.process_time()
    path = render(tmp_path / "run")
    seconds = time.process_time() - start  # of this process: other load does not count
    assert path == tmp_path / "run" / "report.html"
    assert path.stat().st_size < 1_500_000
    assert seconds < 15, "5 s on an idle machine"
    shown = page(path)
    shown.assert_inert()
    for part in (
        "done",
        "150 of 150 steps",
        "objective kpop",
        "Learned runsum avg@k",
        "Alarms None.",
        "phi 0.1",
        "Reward and accuracy",
        "Mismatch: spread of the ratio",
        "Masked and clipped tokens",
        "Entropy",
        "Gradient norm",
        "Response length",
        "Time per stage",
        "Throughput",
        "Memory",
        "Largest gap between the engines",
        "most tokens dropped",
        "checkpoint_refused",
        "step_000125",
        "model/a does not match its checksum",
        "preset:tiny-qwen3-moe",
        "nats/token",
        "time (s/step)",
        "tokens/s",
    ):
        assert part in shown.text, part
    assert sum(tag in ("svg", "img") for tag, _ in shown.tags) == 11 + 7  # of metrics and of tokens
    assert "NaN" not in path.read_text()


def test_tokens_carry_both_probabilities_and_dropped_ones_are_struck(tmp_path: Path) -> None:
    make_run(tmp_path / "run", 3).end("done")
    made, train, keep = rollouts(3)
    worst = max(made, key=lambda r: float(np.abs(np.exp(train[r.id]) - np.exp(r.span.logprobs)).max()))
    shown = page(render(tmp_path / "run"))
    titles = [attrs["title"] or "" for tag, attrs in shown.tags if tag == "span" and "title" in attrs]
    for position in range(13):
        q, p = math.exp(worst.span.logprobs[position]), math.exp(train[worst.id][position])
        mine = [t for t in titles if f"q = {q:.6g} " in t and f"p = {p:.6g} " in t and f"position {position}," in t]
        assert len(mine) == 1
        assert ("dropped" in mine[0]) == (not keep[worst.id][position])
    struck = sum(tag == "s" for tag, _ in shown.tags) - 1  # one in the legend
    assert struck == sum("dropped by a mask" in title for title in titles) > 0


def test_text_of_the_model_stays_text(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 2, text=EVIL, piece=lambda _: EVIL)
    run.events.emit(EVIL, reason=EVIL)
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 3, EVIL: 1.0, f"mask/{EVIL.replace('/', '')}$x^2$/dropped": 0.5}) + "\n")
    run.end("failed", EVIL)
    path = render(tmp_path / "run")
    shown = page(path)
    shown.assert_inert()
    assert "<script" not in path.read_text()
    assert "{{ 7 * 7 }}" in shown.text
    assert "\x1b" not in " ".join(attrs.get("title") or "" for _, attrs in shown.tags)


def test_an_empty_a_running_and_a_killed_run(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", Config())
    shown = page(render(run.path))
    assert "running" in shown.text
    assert "No steps have been logged yet" in shown.text
    run.close()
    assert "killed" in page(render(run.path)).text
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "metrics.jsonl").write_text('{"step": 1, "policy/entropy": 0.5}\n{"step": 2, "pol')
    shown = page(render(tmp_path / "bare"))
    assert "1 steps" in shown.text
    assert "config.yaml cannot be read" in shown.text
    (tmp_path / "bare" / "config.yaml").write_text("{a: " * 100_000)
    assert (
        "config.yaml cannot be read: lists and mappings are nested deeper than 100"
        in page(render(tmp_path / "bare")).text
    )


@pytest.mark.usually("*1")
@pytest.mark.parametrize(
    "values",
    [
        lambda n: pa.array([["a"]] * n),
        lambda n: pa.array([1.0] * n),
        lambda n: pa.array([[-0.5]] * n, pa.list_(pa.float32())),
        lambda n: pa.array([[]] * n, pa.list_(pa.float32())),
    ],
)
def test_torn_token_columns_cost_no_report(values: Any, tmp_path: Path) -> None:
    """Another type, or fewer log-probs than tokens."""
    make_run(tmp_path / "run", 3).close()
    (file,) = (tmp_path / "run" / "rollouts").iterdir()
    table = pq.read_table(file)
    at = table.column_names.index("logprobs")
    pq.write_table(table.set_column(at, "logprobs", values(table.num_rows)), file)
    assert render(tmp_path / "run").is_file()


def test_no_run_folder_is_one_line(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(BadInput, match=r"no such folder|holds neither") as error:
            render(path)
        assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_damaged_files_are_named_and_the_rest_is_shown(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 4)
    made, train, keep = rollouts(3, "earlier answer")
    write_step(run.rollouts(3), made, step=3, train_logprobs=train, keep=keep)
    run.rollouts(4).write_bytes(b"PAR1 not really")
    lines = (run.path / "metrics.jsonl").read_text().splitlines()
    (run.path / "metrics.jsonl").write_text("\n".join([lines[0], "garbage", *lines[2:]]) + "\n")
    with (run.path / "events.jsonl").open("a") as file:
        file.write("[1]\n{broken\n5\n")
    (run.path / "config.yaml").write_text("a: [")
    shown = page(render(run.path))
    for part in (
        "metrics.jsonl: 1 damaged line left out",
        "events.jsonl: 1 damaged line",
        "step_000004.parquet",
        "config.yaml cannot be read",
        "step 3 · group 3",
        "earlier answer",
        "⟨",  # neither pieces nor a tokenizer: ids
    ):
        assert part in shown.text, part


@pytest.mark.usually(r"- 1\n")
@pytest.mark.parametrize("config", ["run: 3\nreport: []\nobjective: x\n", "- 1\n", "", "run: {steps: many}\n"])
def test_a_strange_config_does_not_stop_the_report(tmp_path: Path, config: str) -> None:
    run = make_run(tmp_path / "run", 2)
    (run.path / "config.yaml").write_text(config)
    page(render(run.path))


def test_rows_with_missing_and_odd_values(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 0)
    rows = [
        {"step": 1, "reward/mean": None, "time/a_s": 1, "eval/x/avg@k": 0.5, "policy/entropy": "high"},
        {"step": 2, "reward/mean": [1, 2], "optimizer/grad_norm": 0.0, "mismatch/kl_k3": -1e-9, "flag": True},
        {"step": 3, "optimizer/grad_norm": 1e30, "mask/m/dropped": 1, "memory/rss_mb": 10**9},
    ]
    (run.path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows) + '{"step": 4, "x": NaN}\n')
    page(render(run.path)).assert_inert()


def test_long_runs_and_long_rollouts_stay_under_a_megabyte_and_a_half(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", load(overrides=["report.samples=16"]))
    (run.path / "metrics.jsonl").write_text("".join(json.dumps(row(step)) + "\n" for step in range(1, 3001)))
    with (run.path / "events.jsonl").open("a") as file:
        for i in range(3000):
            file.write(json.dumps({"time": i, "event": "engine_failure", "detail": "x" * 2000}) + "\n")
    n = 5000
    made = [
        Rollout(
            **{
                **vars(r),
                "text": "y" * 100_000,
                "span": TokenSpan(
                    token_ids=np.full(n, 7),
                    logprobs=np.full(n, -0.5, np.float32),
                    kept_mass=np.ones(n, np.float32),
                    versions=np.zeros(n, int),
                    kv_versions=np.zeros(n, int),
                ),
            }
        )
        for r in rollouts(1)[0]
    ]
    train = {r.id: np.full(n, -1.0, np.float32) for r in made}
    write_step(run.rollouts(3000), made, step=3000, train_logprobs=train, piece=lambda _: "<&\"'>" * 50)
    path = render(run.path)
    assert path.stat().st_size < 1_500_000
    shown = page(path)
    assert "more tokens" in shown.text
    assert "Older events are in events.jsonl" in shown.text


def test_pieces_come_from_the_tokenizer_of_the_run_when_the_file_has_none(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    run = make_run(tmp_path / "run", 2, piece=None)
    vocabulary = {f"tok{i}": i for i in range(30)}
    run.model.mkdir()
    (run.model / "tokenizer.json").write_text("{")
    folder = run.checkpoints / "step_000002" / "model"
    folder.mkdir(parents=True)
    Tokenizer(models.WordLevel(vocabulary, unk_token="tok0")).save(str(folder / "tokenizer.json"))
    shown = page(render(run.path))
    made = rollouts(2)[0]
    assert f"tok{made[0].span.token_ids[0]}" in shown.text
    assert "tokenizer.json cannot be read" in shown.text


def test_duration_leaves_out_the_time_between_sessions(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 1)
    run.close()
    rows = [(100, "run_created"), (160, "x"), (5000, "run_opened"), (5030, "run_end")]
    (run.path / "events.jsonl").write_text(
        "".join(json.dumps({"time": t, "event": e, "status": "done"}) + "\n" for t, e in rows)
    )
    assert "1 of 1 steps · 1m30s" in page(render(run.path)).text


def test_series_and_smoothing_by_hand() -> None:
    rows = [{"step": i, "a": float(i), "b/x/c": 1} for i in range(1, 5)] + [{"step": 5, "a": None}]
    steps, values = series(rows, "a")
    assert steps.tolist() == values.tolist() == [1, 2, 3, 4]
    assert matching(rows, ("b/*/c", "a", "none")) == ["b/x/c", "a"]
    assert smooth(np.array([3.0, 0.0, 6.0, 9.0])).tolist() == pytest.approx([3, 3, 5, 9])
    assert smooth(np.arange(100.0)).tolist() == pytest.approx(list(range(100)))
    long = [{"step": i, "a": float(i)} for i in range(3 * MAX_POINTS)]
    steps, values = series(long, "a")
    assert len(steps) == MAX_POINTS
    assert values[:2].tolist() == [1.0, 4.0]  # means of 0 1 2 and 3 4 5


def test_choice_of_samples_by_hand() -> None:
    base = {"keep": None, "train_logprobs": [-1.0], "logprobs": [-1.0]}
    rows = [
        {**base, "id": 0, "reward": 0.5},
        {**base, "id": 1, "reward": 0.0, "keep": [False]},
        {**base, "id": 2, "reward": 1.0, "train_logprobs": [-0.1]},
        {**base, "id": 3, "reward": None, "train_logprobs": None},
    ]
    assert [(r["id"], why) for why, r in choose(rows, 9)] == [
        (2, "Largest gap between the engines, highest reward"),
        (1, "Most tokens dropped, lowest reward"),
        (0, "Next in order"),
        (3, "Next in order"),
    ]
    assert choose([], 3) == []
    assert len(choose(rows, 2)) == 2


def test_shade_and_visible() -> None:
    assert shade(0.0) == shade(1e-6) == ""
    assert shade(0.25) == shade(0.9) == "background:rgb(var(--more)/0.75)"
    assert shade(-0.0625) == "background:rgb(var(--less)/0.38)"
    assert visible("a\n\x00\t") == "a↵\n\\x00⇥\t"
    assert visible("") == "∅"


def test_charts_are_small_svg_without_outside_references() -> None:
    made, _ = panels([row(step) for step in range(1, 151)])
    assert [c.title for c in made][:2] == ["Reward and accuracy", "Mismatch: spread of the ratio"]
    for chart in made:
        assert chart.markup.startswith("<svg")
        assert len(chart.markup) < 64_000
        assert "http" not in chart.markup
        assert "var(--s1)" in chart.markup
        assert not re.search(r"#[0-9a-f]{6}\b(?!\")", chart.markup.replace("url(#", "").replace('href="#', ""))


def test_bias_is_correlated_with_steps_and_rewards_of_its_own_rows() -> None:
    """r of (1, 2, 3, 4) and (1, 3, 2, 4) is 4/5; the row without a bias counts nowhere."""
    data = [{"step": step, "bias/j": bias} for step, bias in ((1, 1.0), (2, 3.0), (3, 2.0), (4, 4.0))]
    rows = [*data, {"step": 99}, {"step": 100, "reward/mean": 1.0}]
    assert correlation(rows, "bias/j", "step") == pytest.approx(0.8)
    assert correlation(rows, "bias/j", "reward/mean") is None
    assert correlation([{**row, "bias/j": 1.0} for row in data], "bias/j", "step") is None
    drawn, _ = panels(rows)
    (chart,) = [chart for chart in drawn if chart.title == "Objective bias J"]
    assert "0.80 with step<" in chart.markup


def test_acceptance_is_correlated_with_the_second_moment() -> None:
    """Ranks of the moments 1, 2, 2, 9 are 1, 2.5, 2.5, 4: with 1, 2, 3, 4 that is 9/√(20·18/4) = √0.9, whatever the 9 is."""
    pairs = ((0.9, 1.0), (0.92, 2.0), (0.94, 2.0), (0.96, 9.0))
    rows = [
        {"step": i, "controller/acceptance": 0.9, "objective/kept": kept, "mismatch/second_moment": moment}
        for i, (kept, moment) in enumerate(pairs, 1)
    ]
    names = ("objective/kept", "mismatch/second_moment")
    assert correlation(rows, *names, ranks=True) == pytest.approx(0.9**0.5)
    assert correlation(rows, *names) == pytest.approx(np.corrcoef(np.array(pairs).T)[0, 1])
    (chart,) = [chart for chart in panels(rows)[0] if chart.title == "Controlled acceptance"]
    assert "objective/kept with mismatch/second_moment: correlation 0.84, of ranks 0.95<" in chart.markup
    assert "correlation" not in next(c for c in panels(rows[:2])[0] if c.title == "Controlled acceptance").markup


def test_what_masks_and_clips_cut_has_its_probability_and_entropy() -> None:
    plain = {"policy/entropy": 0.3, "mask/kpop/dropped": 0.1}
    cut = {"mask/kpop/dropped_rollout_probability": 0.2, "clip/cut_rollout_probability": 0.1, "clip/cut_entropy": 1.0}

    def titles(extra: dict[str, float]) -> list[str]:
        drawn, _ = panels([{"step": step, **plain, **extra} for step in (1, 2)])
        return [c.title for c in drawn if c.title.endswith("masked and clipped tokens")]

    assert titles({}) == []
    assert titles(cut) == ["Probability of masked and clipped tokens", "Entropy of masked and clipped tokens"]


def test_growth_of_the_gap_is_the_rate_it_was_made_with() -> None:
    steps = np.arange(50.0)
    rate, error = growth(steps, 1e-4 * 1.05**steps) or (0.0, 1.0)
    assert (rate, error) == (pytest.approx(0.05), pytest.approx(0.0, abs=1e-9))
    noise = np.exp(0.3 * np.random.default_rng(0).normal(size=(200, 50)))
    fits = np.array([growth(steps, 1e-4 * 1.02**steps * factor) for factor in noise])
    assert fits[:, 0].mean() == pytest.approx(0.02, abs=1e-3)
    assert fits[:, 1].mean() == pytest.approx(fits[:, 0].std(), rel=0.2)  # the error is the spread over runs
    assert growth(steps, np.zeros(50)) is None
