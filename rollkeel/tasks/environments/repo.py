"""A repository with failing tests: it is looked at and edited in a shell, then judged by tests that were never near it."""

from __future__ import annotations

import base64
import hashlib
import json
import random
import re
import secrets
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

from pydantic import Field

from rollkeel.tasks.base import ASCII_SPACE, TaskItem, excerpt
from rollkeel.tasks.environment import Environment, EnvironmentOptions, Step, Tool, ToolEnded
from rollkeel.tasks.environments import bugs
from rollkeel.tasks.environments.swe_rows import load
from rollkeel.tasks.environments.terminal import DONE, LOOK, digests, write_files

APART = Path(__file__).with_name("apart.py")
SHOWN = 1500
"""Characters of files in the prompt; beyond it are their names."""
NAME = re.compile(r"[\w.+-]+(/[\w.+-]+){0,9}", re.ASCII)
"""Paths that are taken out of the terminal."""
EDIT = re.compile(r"edit (\S+) ([1-9]\d{0,5}) ?(.*)")
NO_LINE = "edit: no such line\n"
HEAD = f"Mend the code. A turn is a shell command or edit FILE LINE TEXT; end with {DONE}.\n"


class RepoOptions(EnvironmentOptions):
    level: int = Field(1, ge=1, le=5, description=f"of generated ones: {bugs.LEVELS}")
    functions: int = Field(2, ge=1, le=6, description="functions of a generated file")
    path: str = Field(
        "", description="rows in SWE-bench's form with the files inline, as .jsonl; empty: generated ones"
    )


@final
class Repo(Environment[RepoOptions]):
    """An action is a shell command, `edit FILE LINE TEXT`, which keeps the line's indentation, or `done`.

    At the end the files that changed are taken out of the terminal and put into another cage, where tests that were in no place the
    policy could see call the code from a process of their own (`apart.py`): reward 1 if all pass, and else 0.
    """

    summary = "a repository with a bug, mended in the sandbox, judged by hidden tests"
    uses_tool = True
    junk = (" x", "\n1")
    _tool: Tool | None = None

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        super().__init__(options)
        self._rows = load(self.options.path) if self.options.path else []

    def draw(self, rng: random.Random) -> TaskItem:
        if self._rows:
            return rng.choice(self._rows)
        made = bugs.draw(rng, self.options.level, self.options.functions)
        facts = {
            "start": dict(made.files),
            "tests": {"hidden.py": made.tests},
            "ids": [f"hidden.py::{name}" for name in (*made.failing, *made.passing)],
            "near": [*map(str, made.gold[:-1]), str(made.wrong)],
            "mended": [edit.path for edit in made.gold],
            "modules": sorted(made.files),
        }
        shown = "".join(_numbered(path, text) for path, text in made.files.items())
        return TaskItem(text=f"{HEAD}{shown}$ ", answer="\n".join(map(str, made.gold)), metadata=facts)

    def reset(self, item: TaskItem) -> str:
        spare = 16 if self._rows else 4
        self._left = self.options.turns or len(self.actions(item)) + spare
        self._item = item
        self._files = dict(item.metadata["start"])
        return item.text

    def step(self, action: str) -> Step:
        self._left -= 1
        command, said = action.replace("\0", "").strip(ASCII_SPACE), ""
        try:
            if command != DONE:
                said = self._take(command)
                if self._left > 0:
                    return Step(text=f"\n{said}$ ", detail=excerpt(command))
            return self._judged(self._changed())
        except ToolEnded as error:
            return Step(done=True, detail=str(error))

    def _take(self, command: str) -> str:
        """What is printed; the terminal opens with the first command that needs one."""
        match = EDIT.fullmatch(command)
        if self._tool is None and match and match[1] in self._files:
            path = match[1]
            line = int(match[2]) - 1
            text = match[3]
            lines = self._files[path].split("\n")
            if line >= len(lines) - (not lines[-1]):
                return NO_LINE
            lines[line] = re.sub(r"^([ \t]*).*$", lambda m: m[1] + text, lines[line])
            self._files[path] = "\n".join(lines)
            return ""
        if self._tool is None:
            self._tool = self.tool()
            write_files(self._tool, self._files)
            # An edit within the second that keeps a file's size would leave the compiled one in use.
            self._tool.run("export PYTHONDONTWRITEBYTECODE=1")
        return self._tool.run(_in_shell(match) if match else command)

    def _changed(self) -> dict[str, bytes]:
        """The files as they are now, as far as they have plain names."""
        before = {path: text.encode() for path, text in self._files.items()}
        if self._tool is None:
            return before
        now = digests(self._tool.inspect(LOOK))
        kept, others = dict[str, bytes](), list[str]()
        for path in sorted(filter(NAME.fullmatch, now)):
            if path in before and hashlib.sha256(before[path]).hexdigest() == now[path]:
                kept[path] = before[path]
            else:
                others.append(path)
        command = "; ".join(f"base64 -w0 < {shlex.quote(path)}; echo" for path in others)
        shown = self._tool.inspect(command).split("\n")[:-1] if others else []
        try:
            for path, line in zip(others, shown, strict=True):
                kept[path] = base64.b64decode(line, validate=True)
        except ValueError:
            raise ToolEnded("more was changed than is taken out of the terminal, or while it was") from None
        return kept

    def _judged(self, files: Mapping[str, bytes]) -> Step:
        facts = self._item.metadata
        if files == {path: text.encode() for path, text in facts["start"].items()}:
            return Step(done=True, detail="nothing changed")
        assert self.tools is not None
        seal = secrets.token_hex(16)
        asked = {
            "seal": seal,
            "tests": facts["tests"],
            "ids": facts["ids"],
            "modules": _tops(facts["modules"]),
        }
        inside = {f"repo/{path}": content for path, content in files.items()}
        printed = self.tools.alone(APART.read_bytes(), inside, json.dumps(asked).encode())
        try:
            told = json.loads(printed)
        except ValueError:
            told = {}
        if told.get("seal") != seal:
            return Step(done=True, detail="the tests came to no end: a limit, or the code ended them")
        passed = 0
        for test in facts["ids"]:
            if why := told["verdicts"][test]:
                detail = f"{test}: {excerpt(why)}"
                return Step(done=True, detail=f"after {passed} of {len(facts['ids'])} hidden tests, {detail}")
            passed += 1
        return Step(reward=1.0, done=True, detail=f"{passed} hidden tests pass")

    def close(self) -> None:
        if self._tool is not None:
            self._tool.close()
        self._tool = None

    def actions(self, item: TaskItem) -> Sequence[str]:
        return [*item.answer.split("\n"), DONE]

    def mistakes(self, item: TaskItem) -> Sequence[Sequence[str]]:
        gold, facts = item.answer.split("\n"), item.metadata
        emptied = [f"echo > {shlex.quote(path)}" for path in facts["start"] if "test" in path]
        removed = f"rm {shlex.quote(facts['mended'][-1])}"
        return [[*facts["near"], DONE], [*gold[:-1], DONE], [*emptied, DONE], [*gold, removed, DONE]]

    def slip(self, item: TaskItem, action: str, rng: random.Random) -> str:
        return item.metadata["near"][-1] if action != DONE else action


def _in_shell(edit: re.Match[str]) -> str:
    path, line = shlex.quote(edit[1]), edit[2]
    text = re.sub(r"([\\/&])", r"\\\1", edit[3])
    script = shlex.quote(f"{line}s/^\\([ \t]*\\).*$/\\1{text}/")
    there = f'[ -f {path} ] && [ -n "$(sed -n {line}= {path})" ]'
    change = f"{{ rm {path}; sed {script} > {path}; }} < {path}"
    return f"if {there}; then {change}; else printf %s {shlex.quote(NO_LINE)}; fi"


def _numbered(path: str, text: str) -> str:
    lines = "".join(f"{n} {line}\n" for n, line in enumerate(text.splitlines(), 1))
    return f"== {path}\n{lines}"


def _tops(paths: Sequence[str]) -> list[str]:
    """Top names by which Python files are imported."""
    parts = [path.removeprefix("src/").split("/") for path in paths if path.endswith(".py")]
    return sorted({first.removesuffix(".py") for first, *_ in parts})
