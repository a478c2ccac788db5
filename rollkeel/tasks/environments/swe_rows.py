"""Rows in SWE-bench's form: a problem statement, a patch that solves it, a patch of tests, and which of them must pass.

Where SWE-bench names a repository and a commit, a row here has the files themselves: `files`, path → content, before both patches.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rollkeel.errors import BadInput
from rollkeel.tasks.base import TaskItem, excerpt
from rollkeel.tasks.rows import read_files

COLUMNS = ("files", "problem_statement", "patch", "test_patch", "FAIL_TO_PASS", "PASS_TO_PASS")
_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+\d+(?:,(\d+))? @@")


class BadPatch(ValueError):
    """A diff that cannot be read, or does not fit the files."""


def load(path: str) -> list[TaskItem]:
    """All rows of a file. Raises `BadInput` with the row for the first that cannot be used."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise BadInput(f"task repo: path {path!r}: no such file")
    items = list[TaskItem]()
    for number, row in enumerate(read_files([file], file), 1):
        try:
            items.append(_item(row))
        except (BadPatch, KeyError, TypeError, ValueError) as error:
            raise BadInput(f"task repo: path {path!r} row {number}: {excerpt(str(error), 200)}") from None
    if not items:
        raise BadInput(f"task repo: path {path!r}: expected at least one row, got an empty file")
    return items


def _item(row: Mapping[str, Any]) -> TaskItem:
    if missing := [name for name in COLUMNS if name not in row]:
        raise ValueError(f"no column {missing[0]!r}")
    files = _json(row["files"])
    if not isinstance(files, dict) or not files or not all(isinstance(text, str) for text in files.values()):
        raise ValueError("files: expected an object of paths and texts")
    if not all(isinstance(row[name], str) for name in COLUMNS[1:4]):
        raise ValueError(f"{', '.join(COLUMNS[1:4])}: expected text")
    mended, tested = patched(files, row["patch"]), patched(files, row["test_patch"])
    failing = _json(row["FAIL_TO_PASS"])
    ids = [*failing, *_json(row["PASS_TO_PASS"])]
    tests = dict[str, str]()
    for test in ids:
        path, _, name = test.partition("::")
        if not name or path not in tested:
            raise ValueError(f"test {test!r}: expected path::name, of a file that is there after test_patch")
        tests[path] = tested[path]
    paths = sorted(files.keys() | mended)
    changed = [path for path in paths if files.get(path) != mended.get(path)]
    if not failing or not changed:
        raise ValueError("expected a patch that changes something, and at least one test in FAIL_TO_PASS")
    start = {path: text for path, text in files.items() if path not in tests or tested[path] == text}
    facts = {
        "start": start,
        "tests": tests,
        "ids": ids,
        "near": ["true"],
        "mended": changed,
        "modules": paths,
    }
    names = "".join(f"{path}\n" for path in sorted(start))
    how = "Mend it: a shell command per turn, or edit FILE LINE TEXT. Then say done."
    return TaskItem(
        text=f"{row['problem_statement']}\n\n{how}\n{names}$ ",
        answer="\n".join(_written(path, mended.get(path)) for path in changed),
        metadata=facts,
    )


def _json(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) else value


def _written(path: str, text: str | None) -> str:
    """A command in one line that makes the file, or removes it."""
    if text is None:
        return f"rm {path}"
    escaped = text.replace("\\", "\\\\").replace("\n", "\\n").replace("'", "'\\''")
    folder = path.rpartition("/")[0] or "."
    return f"mkdir -p {folder}; printf %b '{escaped}' > {path}"


def patched(files: Mapping[str, str], diff: str) -> dict[str, str]:
    """Files after a unified diff. Raises `BadPatch`: nothing is searched for, every line must be where the diff says."""
    out = dict(files)
    lines = iter(diff.split("\n"))
    old = ""
    new = ""
    at = list[str]()
    shift = 0
    for line in lines:
        if line.startswith(("rename ", "Binary files", "GIT binary")):
            raise BadPatch(f"patch: {line!r} cannot be followed")
        if line.startswith("--- "):
            old, new = _path(line), _path(next(lines, ""))
            at, shift = out.pop(old, "").split("\n") if old else [""], 0
            if new:
                out[new] = "\n".join(at)
        elif match := _HUNK.match(line):
            first, count = int(match[1]), int(match[2] or 1)
            before, after = _hunk(lines, count, int(match[3] or 1))
            start = max(first - 1, 0) + shift if count else first + shift
            if at[start : start + count] != before:
                raise BadPatch(f"patch: {old or new} line {first}: not what the diff says")
            at[start : start + count] = after
            shift += len(after) - count
            if new:
                out[new] = "\n".join(at)
    return out


def _path(line: str) -> str:
    path = line[4:].split("\t")[0]
    return "" if path == "/dev/null" else path.partition("/")[2]


def _hunk(lines: Iterator[str], count: int, added: int) -> tuple[list[str], list[str]]:
    """Lines before and after."""
    before, after = list[str](), list[str]()
    while len(before) < count or len(after) < added:
        line = next(lines, None)
        if line is None:
            raise BadPatch("patch: it ends within a hunk")
        if line[:1] in (" ", "-", ""):
            before.append(line[1:])
        if line[:1] in (" ", "+", ""):
            after.append(line[1:])
    return before, after
