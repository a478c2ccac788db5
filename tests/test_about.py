"""What a person asks first: which settings are there, what do they do, which runs have I made. A setting without a sentence is a riddle.

Not covered: how the table looks on a terminal; completion scripts, which are typer's.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_run import cli

import rollkeel
from rollkeel import config_table
from rollkeel.config import Config
from rollkeel.recipe import load

DOCS = Path(__file__).resolve().parent.parent / "docs"
LEAVES = config_table.leaves()


def flat(tree: object, prefix: str = "") -> dict[str, object]:
    if isinstance(tree, dict) and tree and prefix.count(".") < 3:
        return {k: v for name, value in tree.items() for k, v in flat(value, f"{prefix}{name}.").items()}
    return {prefix[:-1]: tree}


def test_every_setting_has_a_sentence_and_a_type() -> None:
    assert [leaf.key for leaf in LEAVES if not leaf.sentence.endswith(".") or not leaf.type] == []


def test_every_setting_is_there_with_its_default() -> None:
    plain = {leaf.key: leaf.default for leaf in LEAVES}
    expected = flat(json.loads(json.dumps(Config().model_dump(mode="json"))))
    assert plain == {key: json.dumps(value).strip('"') for key, value in expected.items()}


def test_the_page_is_what_the_code_says() -> None:
    assert (DOCS / "config.md").read_text(encoding="utf-8") == config_table.markdown(), (
        "run: rollkeel config --markdown"
    )


def test_a_section_a_key_and_a_typing_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = cli(capsys, "config", "sampling")
    assert [line.split("\t")[0] for line in out.splitlines()] == [
        f"sampling.{key}" for key in Config().sampling.model_dump()
    ]
    assert cli(capsys, "config", "engine.kind")[1].split("\t")[1:3] == ["local", "local | vllm | file.py:name"]
    code, _, err = cli(capsys, "config", "trian")
    assert (code, "did you mean train?" in err) == (2, True)


def test_the_schema_has_every_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    schema = json.loads(cli(capsys, "config", "--schema")[1])
    node = schema["$defs"]["TrainConfig"]["properties"]
    assert node["lr"]["description"] == "Highest learning rate."
    assert node["updates_per_step"]["description"].startswith("Optimizer updates per batch")


def test_runs_are_listed_with_their_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, steps, end in (("a", 2, "done"), ("b", 1, None)):
        run = tmp_path / name
        run.mkdir()
        (run / "config.yaml").write_text(load(None, ["run.steps=2"]).to_yaml())
        rows = [{"step": i, "reward/mean": i / 10, "eval/runsum/avg@k": 0.25} for i in range(steps + 1)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        events = [{"event": "run_created"}] + ([{"event": "run_end", "status": end}] if end else [])
        (run / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in events))
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "config.yaml").write_text("run: 3\n")
    lines = [line.split("\t") for line in cli(capsys, "runs", tmp_path)[1].splitlines()]
    found = {Path(line[0]).name: line[1:] for line in lines}
    assert found["a"] == ["2/2", "0.200", "0.250", "done"]
    assert found["b"] == ["1/2", "0.100", "0.250", "unfinished"]
    assert found["c"][-1].startswith("damaged")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(capsys, "--version")[:2] == (0, f"rollkeel {rollkeel.__version__}\n")


def test_options_of_the_recipes_task_go_with_it() -> None:
    assert load("default").data.options
    assert load("default", ["data.task=addition"]).data.options == {}
    assert load("default", ["data.task=runsum"]).data.options == load("default").data.options
    typed = load("default", ["data.options.terms=3", "data.task=addition", "data.options.digits=2"])
    assert typed.data.options == {"terms": 3, "digits": 2}
