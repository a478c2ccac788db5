"""Small jobs in a shell: `Put the lines of notes.txt that hold fox into found.txt.` → commands, turn by turn → `done`."""

from __future__ import annotations

import hashlib
import random
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import final

from pydantic import Field

from rollkeel.tasks.base import ASCII_SPACE, TaskItem, excerpt
from rollkeel.tasks.environment import Environment, EnvironmentOptions, Step, Tool, ToolEnded

WORDS = (
    "amber", "birch", "cedar", "delta", "ember", "fox", "grove", "heron", "iris", "jade", "kite", "lotus", "maple", "north",
    "olive", "pearl", "quartz", "river",
)  # fmt: skip
FOLDERS = ("docs", "data", "logs", "notes")
ENDINGS = ("txt", "log", "csv")
DONE = "done"
LOOK = "find . -type f -exec sha256sum {} +"

Files = dict[str, str]
"""Path → content."""
Goal = tuple[str, str, str, Files]
"""What to do, in words; a command that does it; one that nearly does; the files afterwards."""


class TerminalOptions(EnvironmentOptions):
    files: int = Field(4, ge=2, le=12, description="files at the start")
    lines: int = Field(4, ge=2, le=50, description="lines of a file")
    goals: int = Field(1, ge=1, le=4, description="things to do, one after the other")


@final
class Terminal(Environment[TerminalOptions]):
    """An action is a shell command; the session lasts over the episode. `done`, or the last turn, has the files looked at from
    a fresh shell: reward 1 if they are exactly what they should be, path by path, and else 0. What they should be stays outside.
    """

    summary = "file jobs in a shell, in the sandbox"
    uses_tool = True
    junk = (" x", "\n1")
    _tool: Tool | None = None

    def draw(self, rng: random.Random) -> TaskItem:
        files = start = _files(rng, self.options)
        goals: list[Goal] = []
        while len(goals) < self.options.goals:
            goals.append(rng.choice(GOALS if files else GOALS[:1])(rng, files))
            files = goals[-1][3]
        steps = "\n".join(f"{i}. {goal[0]}" for i, goal in enumerate(goals, 1))
        text = f"Work on the files of this folder, one shell command per turn, then say {DONE}. Leave no other files.\n{steps}\n$ "
        hashes = {path: hashlib.sha256(content.encode()).hexdigest() for path, content in files.items()}
        facts = {"start": start, "expected": hashes, "near": goals[-1][2]}
        return TaskItem(text=text, answer="\n".join(goal[1] for goal in goals), metadata=facts)

    def identity(self, item: TaskItem) -> str:
        return item.text + repr(sorted(item.metadata["start"].items()))

    def reset(self, item: TaskItem) -> str:
        self._item, self._left = item, self.options.turns or self.options.goals + 4
        self._tool = self.tool()
        write_files(self._tool, item.metadata["start"])
        return item.text

    def step(self, action: str) -> Step:
        assert self._tool is not None  # `reset` opened it
        self._left -= 1
        command, said = action.strip(ASCII_SPACE), ""
        try:
            if command != DONE:
                said = self._tool.run(command)
                if self._left > 0:
                    return Step(text=f"\n{said}$ ", detail=excerpt(command))
            return self._judged(self._tool.inspect(LOOK))
        except ToolEnded as error:
            return Step(done=True, detail=str(error))

    def _judged(self, shown: str) -> Step:
        found = digests(shown)
        expected = self._item.metadata["expected"]
        other = sorted(p for p in found.keys() | expected.keys() if found.get(p) != expected.get(p))
        right = not other and len(shown.splitlines()) == len(
            expected
        )  # a name with a line break in it is written otherwise
        detail = "all files as asked" if right else f"not as asked: {excerpt(', '.join(other) or 'strange names')}"
        return Step(reward=float(right), done=True, detail=detail)

    def close(self) -> None:
        if self._tool is not None:
            self._tool.close()
        self._tool = None

    def actions(self, item: TaskItem) -> Sequence[str]:
        return [*item.answer.split("\n"), DONE]

    def mistakes(self, item: TaskItem) -> Sequence[Sequence[str]]:
        *before, last = item.answer.split("\n")  # what is wrong earlier may be deleted later
        return [[*before, item.metadata["near"], DONE], [*before, DONE], [*before, last, "touch extra", DONE]]


def write_files(tool: Tool, files: Mapping[str, str]) -> None:
    """Make the files in the tool's folder."""
    parts = list[str]()
    for path, content in files.items():
        parts.append(f"mkdir -p {shlex.quote(path.rpartition('/')[0] or '.')}")
        parts.append(f"printf %s {shlex.quote(content)} > {shlex.quote(path)}")
    if error := tool.run(" && ".join(parts)):
        raise RuntimeError(f"the files could not be made: {excerpt(error)}")


def digests(shown: str) -> dict[str, str]:
    """Path → SHA-256 of what `LOOK` printed; a name with a line break in it is written otherwise, and left out."""
    return {path: digest for digest, path in re.findall(r"^([0-9a-f]{64})  \./(.*)$", shown, re.MULTILINE)}


def _files(rng: random.Random, options: TerminalOptions) -> Files:
    out: Files = {}
    while len(out) < options.files:
        folder = rng.choice(("", *(f"{f}/" for f in FOLDERS)))
        lines = [" ".join(rng.choices(WORDS, k=rng.randint(1, 4))) for _ in range(options.lines)]
        out[f"{folder}{rng.choice(WORDS)}.{rng.choice(ENDINGS)}"] = "".join(f"{line}\n" for line in lines)
    return out


def _new(rng: random.Random, files: Mapping[str, str], folder: str = "") -> str:
    """A path that is not there yet."""
    return next(p for p in iter(lambda: f"{folder}{rng.choice(WORDS)}-{rng.randint(1, 99)}.txt", "") if p not in files)


def _word(rng: random.Random, content: str) -> str:
    return rng.choice(re.findall("[a-z]+|[0-9]+", content))


def _write(rng: random.Random, files: Files) -> Goal:
    path, text = _new(rng, files), " ".join(rng.choices(WORDS, k=3))
    near = f"echo {text.title()} > {path}"
    return f"Make the file {path} with the one line: {text}", f"echo {text} > {path}", near, files | {path: f"{text}\n"}


def _append(rng: random.Random, files: Files) -> Goal:
    path, word = rng.choice(sorted(files)), rng.choice(WORDS)
    return (
        f"Add a last line with the word {word} to {path}.",
        f"echo {word} >> {path}",
        f"echo {word} > {path}",
        files | {path: f"{files[path]}{word}\n"},
    )


def _replace(rng: random.Random, files: Files) -> Goal:
    path = rng.choice(sorted(files))
    old = _word(rng, files[path])
    new = rng.choice([w for w in WORDS if w != old])
    return (
        f"In {path}, put {new} in the place of every {old}.",
        f"sed -i s/{old}/{new}/g {path}",
        f"sed -i s/{old}/{new}x/g {path}",
        files | {path: files[path].replace(old, new)},
    )


def _count(rng: random.Random, files: Files) -> Goal:
    path = rng.choice(sorted(files))
    word, out = _word(rng, files[path]), _new(rng, files)
    count = sum(word in line for line in files[path].splitlines())
    return (
        f"Write into {out} how many lines of {path} hold the word {word}, as a number.",
        f"grep -c {word} {path} > {out}",
        f"grep -vc {word} {path} > {out}; echo 0 >> {out}",
        files | {out: f"{count}\n"},
    )


def _find(rng: random.Random, files: Files) -> Goal:
    word, out = _word(rng, rng.choice(sorted(files.values()))), _new(rng, files)
    holding = sorted(path for path, content in files.items() if word in content)
    return (
        f"List in {out} the paths of all files that hold the word {word}, one per line, in the order of LC_ALL=C sort, like dir/name.",
        f"found=$(grep -rl {word} . | sed 's|^./||' | LC_ALL=C sort); echo \"$found\" > {out}",
        f"grep -rL {word} . > {out}",
        files | {out: "".join(f"{path}\n" for path in holding)},
    )


def _move(rng: random.Random, files: Files) -> Goal:
    path, folder = rng.choice(sorted(files)), f"{rng.choice(WORDS)}-box/"
    kept = {p: c for p, c in files.items() if p != path}
    return (
        f"Move {path} into the new folder {folder}",
        f"mkdir -p {folder} && mv {path} {folder}",
        f"mkdir -p {folder} && cp {path} {folder}",
        kept | {folder + path.rpartition("/")[2]: files[path]},
    )


def _delete(rng: random.Random, files: Files) -> Goal:
    ending = rng.choice(sorted({path.rpartition(".")[2] for path in files}))
    kept = {p: c for p, c in files.items() if not p.endswith(f".{ending}")}
    return (
        f"Delete every file, in all folders, whose name ends in .{ending}",
        f"find . -name '*.{ending}' -delete",
        f"find . -name '*.{ending}' -exec truncate -s 0 {{}} +",
        kept,
    )


def _sort(rng: random.Random, files: Files) -> Goal:
    path, out = rng.choice(sorted(files)), _new(rng, files)
    lines = sorted(files[path].splitlines())
    return (
        f"Write the lines of {path} into {out}, sorted as LC_ALL=C sort does.",
        f"LC_ALL=C sort {path} > {out}",
        f"LC_ALL=C sort {path} > {out}; echo >> {out}",
        files | {out: "".join(f"{line}\n" for line in lines)},
    )


GOALS: tuple[Callable[[random.Random, Files], Goal], ...] = (
    _write, _append, _replace, _count, _find, _move, _delete, _sort,
)  # fmt: skip
