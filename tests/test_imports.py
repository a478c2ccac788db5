"""The arrow: data passes left to right and imports only point left. A cycle between stages starts with one careless import.

Read from the syntax trees of all modules, imports inside functions included. Not covered: what modules do to each other
through objects handed in at run time, which is how stages are meant to meet.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "rollkeel"
ALONE = ("rollkeel_sandbox", "rollkeel_doctor")
"""Distributions of this repository that need nothing of another one."""
MAX_FILE, MAX_FUNCTION = 400, 60

LEFT_TO_RIGHT = (
    {"tasks"},
    {"data"},
    {"engines", "rollout"},
    {"rewards"},
    {"advantages", "batch"},
    {"objectives"},
    {"train"},
    {"sync"},
)
"""Stages; those in one set stand side by side and must not import each other."""
WATCHERS = (
    {"record"},
    {"analyzer"},
    {"report"},
    {"board"},
    {"memory", "cluster"},
    {"lab", "conformance", "integrations"},
)
"""They may look at every stage and at what stands before them here; no stage knows them."""
FOUNDATIONS = {
    "arrays",
    "types",
    "protocols",
    "config",
    "config_cluster",
    "config_data",
    "config_table",
    "config_train",
    "yaml_numbers",
    "plugins",
    "recipe",
    "renamed",
    "errors",
    "events",
    "models",
    "host",
    "warm",
    "named_twice",
}
MEETING_PLACES = {"loop", "diagnose", "evals", "api", "scaffold", "cli", "__main__"}
"""The files in which stages meet."""
OF_FOUNDATIONS = {
    "arrays": set(),
    "errors": set(),
    "host": set(),
    "warm": {"host"},
    "named_twice": set(),
    "types": {"errors"},
    "protocols": {"types"},
    "yaml_numbers": set(),
    "config": {"config_cluster", "config_data", "config_train", "errors", "plugins", "yaml_numbers"},
    "config_cluster": {"config_data"},
    "config_data": set(),
    "config_table": {"config", "config_cluster", "config_data", "config_train", "errors"},
    "config_train": {"config_cluster", "config_data"},
    "plugins": {"errors", "events"},
    "recipe": {"config", "config_data", "errors", "plugins", "renamed"},
    "renamed": {"errors"},
    "events": {"errors"},
    "models": {"errors", "types", "config", "events"},
}
ONLY_IN = {
    "ray": "cluster/",
    "vllm": "engines/vllm",
    "rollkeel_doctor": ("api", "cli/", "report/", "board/", "diagnose/", "integrations/"),
}

MODULES = sorted(PACKAGE.rglob("*.py"))
OTHERS = [f for name in ALONE for f in sorted((ROOT / name).rglob("*.py")) if f.relative_to(ROOT).parts[1] != "build"]


def place(file: Path) -> str:
    """Stage, foundation or meeting place that a file belongs to."""
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(tree: ast.AST, file: Path) -> Iterator[str]:
    """Dotted names of all modules that a syntax tree imports; `from rollkeel import x` counts as `rollkeel.x`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            base = node.module or ""
            yield from (f"{base}.{alias.name}" for alias in node.names) if base == "rollkeel" else (base,)


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def runtime_tree(file: Path) -> ast.Module:
    """Syntax tree without blocks that only a type checker reads."""

    class Strip(ast.NodeTransformer):
        def visit_If(self, node: ast.If) -> ast.AST | None:
            return None if is_type_checking(node) else self.generic_visit(node)

    return Strip().visit(ast.parse(file.read_text(encoding="utf-8")))


def allowed(user: str) -> set[str]:
    """Places that `user` may import besides itself."""
    if user in OF_FOUNDATIONS:
        return OF_FOUNDATIONS[user]
    out, everything = set(FOUNDATIONS), set().union(*LEFT_TO_RIGHT)
    for side_by_side in LEFT_TO_RIGHT:
        if user in side_by_side:
            # A rollout is made with an engine: the pair is drawn in one column, the engine on the left.
            return out | ({"engines"} if user == "rollout" else set())
        out |= side_by_side
    for watchers in WATCHERS:
        if user in watchers:
            return out | (MEETING_PLACES if user in ("lab", "cluster") else set())
        out |= watchers
    assert user in MEETING_PLACES | {"__init__"}, f"{user}: a new place; say in this test where it stands on the arrow"
    return everything | out | MEETING_PLACES


def faults(user: str, names: Iterator[str]) -> list[str]:
    inside = {name.split(".")[1] for name in names if name.startswith("rollkeel.")}
    return sorted(f"{user} imports {used}" for used in inside - allowed(user) - {user} if used != "__version__")


def test_imports_point_left() -> None:
    assert [fault for file in MODULES for fault in faults(place(file), imported(runtime_tree(file), file))] == []


@pytest.mark.parametrize("name", ALONE)
def test_a_distribution_that_stands_alone_imports_no_other(name: str) -> None:
    files = [file for file in OTHERS if file.is_relative_to(ROOT / name)]
    assert len(files) > 10
    tops = {(n.split(".")[0], file.name) for file in files for n in imported(ast.parse(file.read_text("utf-8")), file)}
    assert [use for use in sorted(tops) if use[0].startswith("rollkeel") and use[0] != name] == []


def test_the_rule_catches_an_import_to_the_right() -> None:
    def of(user: str, text: str) -> list[str]:
        return faults(user, imported(ast.parse(text), Path("x.py")))

    assert of("tasks", "from rollkeel.rewards import get") == ["tasks imports rewards"]
    assert of("tasks", "def f():\n    from rollkeel import rewards") == ["tasks imports rewards"]
    assert of("engines", "import rollkeel.rollout.collect") == ["engines imports rollout"]
    assert of("batch", "from rollkeel.advantages import compute") == ["batch imports advantages"]
    assert of("train", "from rollkeel.record.mismatch import x") == ["train imports record"]
    assert of("types", "from rollkeel.config import Config") == ["types imports config"]
    assert of("train", "from rollkeel.objectives import kpop\nfrom rollkeel.types import Rollout") == []
    assert of("loop", "from rollkeel.sync.publish import DirectPublisher") == []


def test_heavy_libraries_stay_in_their_place() -> None:
    users = {
        (library, str(file.relative_to(PACKAGE)))
        for file in MODULES
        for name in imported(ast.parse(file.read_text(encoding="utf-8")), file)
        if (library := name.split(".")[0]) in ONLY_IN
    }
    assert [(library, user) for library, user in sorted(users) if not user.startswith(ONLY_IN[library])] == []


def test_transformers_is_imported_by_module() -> None:
    """Its root names all that there is: a type checker would read 2,500 files more, which is a quarter of its time."""
    for file in MODULES:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            assert "transformers" not in names, file


ENGINES = ("vllm", "ray")


@pytest.mark.parametrize(
    ("modules", "absent"),
    [
        ("rollkeel.objectives", ("transformers", *ENGINES)),
        (
            "rollkeel, rollkeel.types, rollkeel.protocols, rollkeel.recipe, rollkeel.config, rollkeel.errors, rollkeel.events, rollkeel.cli, rollkeel.tasks,"
            " rollkeel.tasks.source, rollkeel.data, rollkeel.record.runfolder, rollkeel.rewards",
            ("torch", "transformers", "tokenizers", *ENGINES),
        ),
        ("rollkeel_sandbox.sandbox, rollkeel_sandbox.cli", ("rollkeel", "numpy", "pydantic", "fastapi")),
        (
            "rollkeel_doctor.verdict, rollkeel_doctor.traces.read, rollkeel_doctor.cli",
            ("rollkeel", "torch", "pydantic"),
        ),
        ("rollkeel_doctor.cli", ("numpy", "pyarrow")),
        (
            "rollkeel.cluster.engine_actor, rollkeel.engines.local",
            ("transformers.modeling_utils", "torch._dynamo", "vllm"),
        ),
    ],
    ids=["objectives", "instant", "sandbox", "doctor", "its help", "an engine's actor"],
)
def test_what_an_import_brings_in(modules: str, absent: tuple[str, ...]) -> None:
    script = f"import sys; import {modules}; print(' '.join(m for m in {absent!r} if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == ""


def test_files_and_functions_can_be_read_in_one_sitting() -> None:
    long = []
    for file in [*MODULES, *OTHERS]:
        text, name = file.read_text(encoding="utf-8"), str(file.relative_to(ROOT))
        if (lines := text.count("\n")) >= MAX_FILE:
            long.append(f"{name}: {lines} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                size = (node.end_lineno or 0) - node.lineno + 1
                if size >= MAX_FUNCTION:
                    long.append(f"{name}: {node.name} has {size} lines")
    assert long == []


def swallows(handler: ast.ExceptHandler) -> bool:
    """True for a handler of everything that does nothing with what it caught."""
    caught = handler.type
    broad = caught is None or (isinstance(caught, ast.Name) and caught.id in ("Exception", "BaseException"))
    return broad and all(isinstance(n, ast.Pass | ast.Continue) for n in handler.body)


def test_no_exception_is_swallowed() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for file in [*MODULES, *OTHERS]
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ExceptHandler) and swallows(node)
    ]
    assert found == []


def test_the_rule_catches_a_swallowed_exception() -> None:
    tree = ast.parse("try:\n    f()\nexcept Exception:\n    pass\n")
    assert [swallows(n) for n in ast.walk(tree) if isinstance(n, ast.ExceptHandler)] == [True]
    tree = ast.parse("try:\n    f()\nexcept Exception as e:\n    raise ValueError from e\n")
    assert [swallows(n) for n in ast.walk(tree) if isinstance(n, ast.ExceptHandler)] == [False]
