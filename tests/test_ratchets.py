"""What has grown once comes back in small steps. These numbers may fall; one that rises needs its reason in the commit.

Counted on the files of the packages: lines as `wc -l` counts them, tokens without comments, docstrings and blank lines. Not covered: whether
fewer lines read better.
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tokenize
from pathlib import Path

from rollkeel.config_table import leaves

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "rollkeel"
ALONE = {"rollkeel_sandbox": 10_157, "rollkeel_doctor": 5_787}
"""Most lines of this repository's other distributions. Aim: doctor 5,000."""
BESIDE = {"board": 1_040, "lab": 2_205, "data": 1_914, "evals": 3_065, "conformance": 1_971, "integrations": 1_233}
"""Most lines of what stands beside the core."""
CORE, EVERYTHING = 66_150, 93_520
"""Most lines of the rest, and of all. Aims: 26,000 and 50,000."""
SETTINGS = Path(__file__).with_name("settings.txt")
"""The settings themselves, so that a new one is seen in review. Aim: fewer than 95."""
DENSITY = 10.45
"""Tokens per line of code. Aim: 9.0."""
LOADED = 38_070
"""Lines of ours that a plain `train default` imports. Aim: 20,000."""
NOTHING = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.ENCODING,
}


def sources(folder: Path) -> list[Path]:
    return [file for file in folder.rglob("*.py") if file.relative_to(folder).parts[0] != "build"]


def lines(folder: Path) -> int:
    return sum(file.read_text(encoding="utf-8").count("\n") for file in sources(folder))


def test_lines_of_packages() -> None:
    counted = {name: lines(PACKAGE / name) for name in BESIDE}
    assert {name: count for name, count in counted.items() if count > BESIDE[name]} == {}
    alone = {name: lines(ROOT / name) for name in ALONE}
    assert {name: count for name, count in alone.items() if count > ALONE[name]} == {}
    whole = lines(PACKAGE)
    assert whole + sum(alone.values()) <= EVERYTHING
    assert whole - sum(counted.values()) <= CORE


def test_settings() -> None:
    assert sorted(leaf.key for leaf in leaves()) == SETTINGS.read_text().splitlines()


def test_tokens_per_line() -> None:
    tokens, code = 0, 0
    for file in [file for name in ("rollkeel", *ALONE) for file in sources(ROOT / name)]:
        text = file.read_text(encoding="utf-8")
        bare = (n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))
        prose = {line for n in bare for line in range(n.lineno, (n.end_lineno or n.lineno) + 1)}
        found = [t for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type not in NOTHING]
        kept = [t for t in found if t.start[0] not in prose]
        tokens += len(kept)
        code += len({line for t in kept for line in range(t.start[0], t.end[0] + 1)})
    assert tokens / code <= DENSITY, f"{tokens / code:.2f}"


def test_lines_that_a_plain_run_loads(tmp_path: Path) -> None:
    script = (
        "import sys; from rollkeel.loop.job import train; from rollkeel.recipe import load\n"
        f"train(load('default', ['run.steps=1', 'sft.steps=2', 'eval.items=2', 'run.dir={tmp_path / 'run'}']))\n"
        "print(*sorted(m.__file__ for n, m in sys.modules.items() if n.startswith('rollkeel') and m.__file__), sep='\\n')"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=True)
    files = [Path(line) for line in done.stdout.splitlines() if line.endswith(".py")]
    assert PACKAGE / "loop" / "steps.py" in files
    loaded = sum(file.read_text(encoding="utf-8").count("\n") for file in files)
    assert loaded <= LOADED, f"{loaded}"
