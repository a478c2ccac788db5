"""docs/objectives.md is what people cite, so what it says about options must be what the code does.

Every recipe has a section, every default is printed and equal to the code's, every figure exists, and the code blocks run.
Not covered: whether the prose is right.
"""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollkeel import advantages
from rollkeel.objectives import RECIPES, build
from rollkeel.objectives.compose import MASKS
from rollkeel.objectives.kl import ESTIMATORS
from rollkeel.objectives.statistics import STATISTICS
from rollkeel.objectives.surrogates import SURROGATES
from rollkeel.objectives.weights import WEIGHTS
from rollkeel.report.regions import NOT_DRAWN

OWN = [name for name, recipe in RECIPES.items() if recipe.__module__.startswith("rollkeel.")]
"""Without what other tests register."""
DOCS = Path(__file__).resolve().parents[2] / "docs"
TEXT = (DOCS / "objectives.md").read_text(encoding="utf-8")
SECTIONS = {
    found[1]: found[2] for found in re.finditer(r"^### `(\w+)`\n(.*?)(?=^##)", TEXT + "\n## end", flags=re.S | re.M)
}


def printed(section: str) -> dict[str, Any]:
    """Options of the line `Defaults: `a=1, b='x'``."""
    (text,) = re.findall(r"^Defaults: `(.*)`", section, flags=re.M)
    call = ast.parse(f"f({text})", mode="eval").body
    assert isinstance(call, ast.Call)
    return {k.arg: ast.literal_eval(k.value) for k in call.keywords if k.arg}


def test_every_recipe_has_its_section_in_order() -> None:
    assert list(SECTIONS) == OWN


@pytest.mark.parametrize("name", OWN)
def test_defaults_are_the_code_s(name: str) -> None:
    assert printed(SECTIONS[name]) == dict(RECIPES[name].__kwdefaults__ or {})


@pytest.mark.parametrize("name", OWN)
def test_section_says_what_a_reader_needs(name: str) -> None:
    section = SECTIONS[name]
    for word in ("Source:", "Coefficient of A·∇log p:", "Drops:"):
        assert word in section
    figure = f"(figures/{name}.svg)"
    assert (figure in section) == (name not in NOT_DRAWN)
    assert name in NOT_DRAWN or (DOCS / "figures" / f"{name}.svg").is_file()


@pytest.mark.parametrize("name", OWN)
def test_aggregate_and_advantage_are_the_recipe_s(name: str) -> None:
    built = build(name)
    assert f"Aggregate `{built.aggregate}`, advantage `{built.advantage}`" in SECTIONS[name]


def test_every_part_and_its_defaults_are_in_the_table() -> None:
    for registry in (MASKS, SURROGATES, WEIGHTS):
        for name, builder in registry.items():
            options = [p for p in inspect.signature(builder).parameters.values() if p.name != "name"]
            assert f"`{name}`({', '.join(f'{p.name}={p.default!r}' for p in options)})" in TEXT
    for name in (*STATISTICS, *ESTIMATORS, *advantages.ESTIMATORS):
        assert f"`{name}`" in TEXT


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT, flags=re.S | re.M)


def test_config_blocks_build() -> None:
    trees = [yaml.safe_load(block)["objective"] for block in blocks("yaml")]
    assert len(trees) >= 3
    for tree in trees:
        if ":" not in tree["name"]:
            build(tree.pop("name"), tree)


def test_what_reproduces_other_libraries_builds() -> None:
    table = TEXT.split("## The same name elsewhere")[1]
    trees = [yaml.safe_load(text) for text in re.findall(r"`(\{name: [^`…]*\})`", table)]
    assert len(trees) > 20
    for tree in trees:
        build(tree.pop("name"), tree)


def python(code: str, folder: Path) -> None:
    environment = {"PYTHONPATH": str(DOCS.parent), "PATH": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_python_blocks_run_and_the_own_objective_is_short(tmp_path: Path) -> None:
    use, check, own = blocks("python")
    python(check, tmp_path)
    assert len([line for line in own.splitlines() if line.strip()]) < 15
    (tmp_path / "mine.py").write_text(own)
    python(
        f"""{use}
from rollkeel.objectives import build
half = build("mine:half_corrected", {{"delta": 0.05, "perturb": ["weight_noise"]}})
assert build("half_corrected").parameters == {{"delta": 0.1}}
assert half(tokens).keep.tolist() == [True, False, True]
assert abs(half(tokens).weight[0].item() - (0.90 / 0.92) ** 0.5) < 1e-6
""",
        tmp_path,
    )
