"""docs/seeds.md says what of the papers is here. It is worth nothing if a row names a test, recipe, preset or metric that does
not exist, or says `yes` and shows nothing. Not covered: whether the test that a row names proves what the row says.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from functools import cache
from pathlib import Path

import pytest

from rollkeel.lab.presets import PRESETS
from rollkeel.recipe import RECIPES
from rollkeel.record.glossary import meaning

ROOT = Path(__file__).parents[1]
TRAINED = {str(file.relative_to(RECIPES).with_suffix("")) for file in RECIPES.rglob("*.yaml")}
LINES = (ROOT / "docs" / "seeds.md").read_text().splitlines()


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def papers() -> dict[str, list[list[str]]]:
    """Rows of each paper's table, by its heading."""
    tables, rows = dict[str, list[list[str]]](), list[list[str]]()
    for line in LINES:
        if line.startswith("## "):
            rows = tables[line[3:]] = []
        elif tables and line.startswith("|") and not line.startswith(("|---", "| what it")):
            rows.append(cells(line))
    return tables


ROWS = [row for rows in papers().values() for row in rows]


@cache
def functions(file: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)}


def missing(name: str) -> str:
    """Why what a row names between backticks in its column "shown by" shows nothing; empty if it does."""
    words = name.split()
    if name.startswith("tests/"):
        file, _, function = name.partition("::")
        if not (ROOT / file).is_file():
            return "no such file"
        return "" if not function or function in functions(ROOT / file) else "no such test"
    known = {"lab": PRESETS, "train": TRAINED}
    if words[0] == "rollkeel" and words[1] in known:
        return "" if words[2] in known[words[1]] else "no such name"
    if words[:2] == ["python", "-m"]:
        return "" if importlib.util.find_spec(words[2]) else "no such module"
    return "neither a test nor a command"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:50])
def test_a_row_shows_what_it_says(row: list[str]) -> None:
    assert len(row) == 4, row
    shown = re.findall(r"`([^`]*)`", row[2])
    assert row[3] in ("yes", "part", "no")
    assert bool(shown) == (row[3] != "no"), row
    assert [(name, missing(name)) for name in shown if missing(name)] == []


def test_the_counts_are_those_of_the_rows() -> None:
    head = {row[0]: [int(n) for n in row[1:]] for row in map(cells, LINES) if len(row) == 5 and row[1].isdigit()}
    for paper, rows in papers().items():
        states = [row[3] for row in rows]
        assert head[paper.split(":")[0]] == [len(rows), *map(states.count, ("yes", "part", "no"))], paper


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:50])
def test_what_a_row_points_at_is_there(row: list[str]) -> None:
    names = re.findall(r"`([^`]*)`", row[1])
    presets = set(re.findall(r"preset `([^`]*)`", row[1]))
    assert presets <= set(PRESETS)
    for name in names:
        if name.startswith(("rollkeel/", "examples/", "benchmarks/")):
            assert (ROOT / name).exists(), name
        elif name.startswith("papers/"):
            assert name in TRAINED, name
        elif re.match(r"(mismatch|bias|mask|clip|policy|controller|staleness)/", name) and not name.endswith("*"):
            assert meaning(name), name
