"""What a script or a notebook does with rollkeel must be what the command line does: the same settings, runs, numbers and refusals.

Not covered: Jupyter itself (the example notebook runs cell by cell in plain Python), threads other than the main one, runs over a cluster.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_run import TINY, assert_same, cli, rows, weights

import rollkeel
from rollkeel import api
from rollkeel.errors import BadInput

ROOT = Path(__file__).resolve().parent.parent
FEW = {"run.steps": 3, **dict(word.split("=", 1) for word in TINY[1:])}
SETTINGS = {name: json.loads(value) if isinstance(value, str) else value for name, value in FEW.items()}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> rollkeel.Run:
    return rollkeel.train("default", **SETTINGS, **{"run.dir": str(tmp_path_factory.mktemp("api") / "run")})


def test_a_run_is_that_of_the_command(run: rollkeel.Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"{name}={value}" for name, value in FEW.items()]
    code, _, err = cli(capsys, "train", "default", *words, f"run.dir={tmp_path / 'run'}")
    assert code == 0, err
    assert_same(run.path, tmp_path / "run")
    assert (run.status, repr(run)) == ("done", f"Run({str(run.path)!r}, done)")


def test_it_goes_on_as_one_run(run: rollkeel.Run, tmp_path: Path) -> None:
    part = rollkeel.train("default", **(SETTINGS | {"run.steps": 2}), **{"run.dir": tmp_path / "run"})
    again = rollkeel.train(resume=part, run={"steps": 3})
    assert again.path == part.path
    assert weights(again.path) == weights(run.path)
    assert again.rollouts(3).equals(run.rollouts(3))
    with pytest.raises(BadInput, match="leave the recipe out"):
        rollkeel.train("default", resume=part)


def test_settings_mean_what_they_mean_when_typed() -> None:
    given = {"lr": 1e-5, "mesh": {"shard": 2}}
    made = api.config("default", train=given, data={"options": {"digits": 3}}, **{"run.steps": 7})
    typed = api.load("default", ["train.lr=1e-5", "train.mesh={shard: 2}", "data.options={digits: 3}", "run.steps=7"])
    assert made == typed
    assert given == {"lr": 1e-5, "mesh": {"shard": 2}}
    tree = {"objective": {"name": "icepop"}}
    assert api.config(tree, run={"steps": 7}) == api.load(None, ["objective.name=icepop", "run.steps=7"])
    assert tree == {"objective": {"name": "icepop"}}
    assert api.config(made, run={"steps": 8}).run.steps == 8
    assert api.config(made).train == made.train
    assert api.config() == api.load()


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"train": {"learning_rate": 1}}, "config train.learning_rate: unknown key; known: lr, warmup_steps,"),
        ({"train": {"lr": float("nan")}}, "settings: expected a finite number, got nan"),
        ({"data": {"grader": len}}, "code of your own is named as module:name or file.py:name"),
        ({"run": {"steps": {1, 2}}}, "expected text, a number, a list or a mapping, got set"),
    ],
)
def test_what_cannot_be_is_one_line(settings: dict[str, Any], line: str) -> None:
    with pytest.raises(BadInput) as refused:
        api.config("default", **settings)
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)


def test_metrics_are_the_rows_of_the_folder(run: rollkeel.Run) -> None:
    table = run.metrics()
    kept = [{name: value for name, value in row.items() if value is not None} for row in table.to_pylist()]
    assert kept == [
        {name: value for name, value in row.items() if value is not None} for row in rows(run.path, volatile=True)
    ]
    assert table["step"].to_pylist() == [0, 1, 2, 3]
    assert table["reward/mean"].to_pylist()[0] is None  # nothing was sampled before the first step


def test_rollouts_are_those_of_the_steps_asked_for(run: rollkeel.Run) -> None:
    assert run.rollouts().num_rows == 3 * 32
    assert set(run.rollouts(2)["step"].to_pylist()) == {2}
    assert run.rollouts([1, 3], columns=["id", "step"]).column_names == ["id", "step"]
    assert run.rollouts([1, 3], columns=["step"])["step"].to_pylist() == [1] * 32 + [3] * 32
    with pytest.raises(BadInput, match=r"no rollouts of step 9; it has steps 1 to 3"):
        run.rollouts(9)


def test_a_model_is_measured_as_by_the_command(
    run: rollkeel.Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scores = rollkeel.evaluate(run, out=tmp_path / "answers.parquet")
    code, out, err = cli(capsys, "eval", str(run.path / "config.yaml"), f"model.path={run.model}", "--json")
    assert code == 0, err
    assert {name: round(value, 6) for name, value in scores.items()} == json.loads(out)
    assert (tmp_path / "answers.parquet").is_file()
    other = rollkeel.evaluate("preset:tiny-qwen3-moe", run.config)
    assert other["eval/runsum/avg@k"] == 0.0  # never trained
    assert scores["eval/runsum/avg@k"] > 0


def test_rollouts_of_a_model(run: rollkeel.Run, tmp_path: Path) -> None:
    sampled = rollkeel.rollout(run, out=tmp_path / "sampled.parquet", rollout={"prompts": 2, "samples": 3})
    assert [r.group for r in sampled] == [0, 0, 0, 1, 1, 1]
    assert {r.reward for r in sampled} == {None}
    assert (tmp_path / "sampled.parquet").is_file()
    with pytest.raises(BadInput, match="expected a step of 1 or more, got 0"):
        rollkeel.rollout(run, step=0)


def test_the_doctor_says_what_the_command_says(run: rollkeel.Run, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = cli(capsys, "doctor", "--no-recompute", run.path, "--json")
    assert json.loads(json.dumps(run.doctor().to_json())) == json.loads(out)
    with pytest.raises(BadInput, match="no such file"):
        rollkeel.doctor(run.path / "nowhere")


def test_an_unfinished_run_may_be_asked(run: rollkeel.Run, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_bytes((run.path / "config.yaml").read_bytes())
    young = rollkeel.Run(tmp_path)
    assert young.metrics().num_rows == 0
    assert str(tmp_path) in young._repr_html_()
    with pytest.raises(BadInput, match=r"no model yet; the run is killed"):
        _ = young.model
    with pytest.raises(BadInput, match=r"no rollouts yet; the run is killed"):
        young.rollouts()
    with pytest.raises(BadInput, match=r"expected a folder with config\.yaml"):
        rollkeel.Run(tmp_path / "nowhere")


@pytest.mark.usefixtures("drawn")
def test_curves_and_what_a_notebook_shows(run: rollkeel.Run) -> None:
    figure = run.plot("reward/mean", "time/*")
    legends = [axes.get_legend() for axes in figure.axes]
    names = [[text.get_text() for text in legend.get_texts()] for legend in legends if legend is not None]
    assert names[0] == ["reward/mean"]
    assert len(names[1]) > 1
    assert figure._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]  # a notebook asks for it
    page = run._repr_html_()
    assert page.count("<svg") == 1
    assert ": done" in page
    assert "<b>Doctor</b>" in page
    with pytest.raises(BadInput, match="no metric 'nowhere'"):
        run.plot("nowhere")


def test_a_package_and_a_function_have_one_name() -> None:
    import rollkeel.rollout.pool
    import rollkeel.train.trainer

    assert callable(rollkeel.train)
    assert callable(rollkeel.rollout)
    assert rollkeel.train.trainer is sys.modules["rollkeel.train.trainer"]  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="no attribute 'tarin'"):
        _ = rollkeel.tarin  # type: ignore[attr-defined]
    assert {"train", "evaluate", "doctor", "rollout", "Run", "objectives"} <= set(dir(rollkeel))


def test_asking_for_a_run_costs_no_torch() -> None:
    script = "import sys, rollkeel; rollkeel.Run; rollkeel.train; rollkeel.doctor; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "False"


def cells() -> Iterator[str]:
    notebook = json.loads((ROOT / "examples" / "notebook.ipynb").read_text(encoding="utf-8"))
    yield from ("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code")


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What its last line of each cell gives is shown as Jupyter shows it."""
    monkeypatch.chdir(tmp_path)
    space: dict[str, Any] = {}
    shown = []
    for cell in cells():
        tree = ast.parse(cell)
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "cell", "exec"), space)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), space)
            shown.append(value._repr_html_() if hasattr(value, "_repr_html_") else repr(value))
            assert hasattr(value, "_repr_png_") or not repr(value).startswith(("<", "[<", "Figure"))
    assert ": done" in shown[0]
    assert len(shown) >= 4
