"""What a verb of `rollkeel data` writes is worth nothing if no run can read it: all of it trains in one run, by its own graders.

The commands on small files, then a real run of two steps on a tiny model. Not covered: what a model learns from such data.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from test_graders import rollout
from tiny_run import cli, rows

from rollkeel.evals.benchmarks import Item
from rollkeel.evals.record import append, record_of
from rollkeel.loop.job import train
from rollkeel.recipe import load
from rollkeel.record.rollout_store import read_step
from rollkeel.types import GraderSpec
from rollkeel_sandbox import Level, probe

SOLUTIONS = ["def f(x): return max(x)", "def f(x): return sorted(x)[-1]"]


def write(file: Path, lines: list[dict]) -> Path:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@pytest.mark.skipif(probe().plan(()).level < Level.RESTRICTED, reason="no isolation can be had here")
def test_what_the_verbs_write_are_sources_of_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cities = {"France": ["Paris", "Rome"], "Italy": ["Rome", "Paris"], "Spain": ["Madrid", "Rome"]}
    choices = write(
        tmp_path / "choices.jsonl",
        [
            *({"question": f"Capital of {land}?", "choices": c, "answer": 0} for land, c in cities.items()),
            {"question": "How long is it?", "choices": ["5 m", "6 m"], "answer": 1},
        ],
    )
    problem = {
        "prompt": "Largest?",
        "fn_name": "f",
        "tests": [{"input": [[1, 5]], "output": 5}],
        "solutions": SOLUTIONS,
    }
    problems = write(tmp_path / "problems.jsonl", [{**problem, "prompt": f"Largest {i}?"} for i in range(3)])
    items = tmp_path / "items.jsonl"
    for i in range(8):
        item = Item(key=str(i), text=f"{i}+1=", answer=str(i + 1), grader=GraderSpec(name="exact"))
        right = rollout(item.answer, item.answer, reward=1.0)
        append(items, record_of(item, [replace(right, prompt=replace(right.prompt, text=item.text))], None, None))
    opened, more, samples = (tmp_path / f"{name}.jsonl" for name in ("open", "more", "samples"))
    for words in (
        ["open", choices, "--out", opened],
        ["tests", problems, "--out", more, "--count", "6", "--keep", "2"],
        ["samples", items, "--out", samples],
    ):
        code, _, told = cli(capsys, "data", *words)
        assert code == 0, told
    sources = [
        {"path": str(opened), "grader": "row"},
        {"path": str(more), "grader": "code"},
        {"path": str(samples), "grader": "exact"},
    ]
    words = ["run.steps=2", "rollout.prompts=6", "rollout.samples=2", "sampling.max_new_tokens=4", "eval.items=2"]
    words += ["data.task=null", f"data.sources={json.dumps(sources)}", "data.solution_column=solution", "sft.steps=2"]
    train(load("default", [*words, f"run.dir={tmp_path / 'run'}"]))
    row = rows(tmp_path / "run")[-1]
    assert {name: row[f"source/{name}/groups"] for name in ("open", "more", "samples")} == dict.fromkeys(
        ("open", "more", "samples"), 2
    )
    table = read_step(tmp_path / "run" / "rollouts" / "step_000002.parquet")
    assert {*zip(table["task"].to_pylist(), table["grader"].to_pylist(), strict=True)} <= {
        ("open", "set"), ("open", "quantity"), ("more", "code"), ("samples", "exact"),
    }  # fmt: skip
    assert set(table["status"].to_pylist()) <= {"finished", "length"}  # no grader failed
