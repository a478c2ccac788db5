"""Small programs judged by hidden tests: `1>3,2>5,5>11:` → `2*x+1`, then functions over lists, then programs that read and print."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any, final

from pydantic import Field

from rollkeel.errors import GraderFailure
from rollkeel.tasks import pipelines
from rollkeel.tasks.base import LIMITS, Task, TaskItem, TaskOptions
from rollkeel.types import GraderSpec

EDGES = ([], [0], [-4, -4, 7], [5, 5, 5])
"""Among the hidden tests of every list program."""
_ATTEMPTS = 200


class ProgramsOptions(TaskOptions):
    level: int = Field(
        1,
        ge=1,
        le=5,
        description="1: a*x+b; 2: more operations; 3: list function of 2 steps; 4: of 4 steps; 5: stdin program of 3 steps",
    )
    examples: int = Field(3, ge=2, le=8, description="input-output pairs in the prompt")
    tests: int = Field(10, ge=6, le=50, description="hidden tests, none of them shown")


@final
class Programs(Task[ProgramsOptions]):
    """The whole response is the program: an expression in `x` (levels 1 and 2), `def f(xs)` (3 and 4), a script (5).

    Expected outputs come from the interpreter of `pipelines`, not from the gold source. Splits are disjoint by prompt; at level 1
    there are 144 different expressions in all, so that the same one is met behind other examples.
    """

    summary = "small Python programs with hidden tests, run in the sandbox"
    junk = (" x", "=", "(", "²", "\x00", "'''")

    def draw(self, rng: random.Random) -> TaskItem:
        return self._expression(rng) if self.options.level <= 2 else self._pipeline(rng)

    def _expression(self, rng: random.Random) -> TaskItem:
        o = self.options
        node = pipelines.draw_expression(rng, o.level)
        shown = sorted(rng.sample(range(10), o.examples))
        others = [x for x in [*range(10), -1, -2, -7, 10, 13, 29, 100] if x not in shown]
        hidden = [*others, *rng.sample(range(101, 1000), max(0, o.tests - len(others)))]
        pairs = [(x, pipelines.evaluate(node, x)) for x in shown]
        return TaskItem(
            text=",".join(f"{x}>{y}" for x, y in pairs) + ":",
            answer=pipelines.source(node),
            metadata={
                "mode": "expression",
                "shown": [{"input": {"x": x}, "output": y} for x, y in pairs],
                "tests": [
                    {"input": {"x": x}, "output": pipelines.evaluate(node, x)} for x in rng.sample(hidden, o.tests)
                ],
            },
        )

    def _pipeline(self, rng: random.Random) -> TaskItem:
        o = self.options
        for _ in range(_ATTEMPTS):
            steps = pipelines.draw_steps(rng, {3: 2, 4: 4, 5: 3}[o.level])
            lists = [list(EDGES[i]) if i < len(EDGES) else _numbers(rng) for i in range(o.tests)]
            shown = [xs for xs in (_numbers(rng) for _ in range(o.examples)) if xs not in lists]
            if len(shown) == o.examples and _every_step_matters(steps, lists):
                return self._item(steps, shown, lists)
        raise AssertionError("no pipeline in which every step matters")

    def _item(self, steps: list[pipelines.Step], shown: list[list[int]], lists: list[list[int]]) -> TaskItem:
        told = "".join(f"{i}. {pipelines.describe(step)}\n" for i, step in enumerate(steps, 1))
        if self.options.level < 5:
            cases = [[{"input": [xs], "output": pipelines.run(steps, xs)} for xs in part] for part in (shown, lists)]
            examples = "".join(f"f({c['input'][0]}) == {c['output']}\n" for c in cases[0])
            text = f"Write a Python function f(xs) that takes a list of integers and does the following:\n{told}{examples}Answer with the program only."
            answer = pipelines.function(steps)
        else:
            cases = [[_case(steps, shown)], [_case(steps, lists[i:] + lists[:i]) for i in range(3)]]
            text = (
                "Write a Python program. The first line of standard input is a number n; each of the next n lines holds integers "
                f"separated by spaces, or none. For each of them, print on a line of its own the result of:\n{told}"
                f"A list is printed with spaces in between. Example input:\n{cases[0][0]['input']}Its output:\n{cases[0][0]['output']}"
                "Answer with the program only."
            )
            answer = _script(pipelines.function(steps))
        mode: dict[str, Any] = {"mode": "stdin"} if self.options.level == 5 else {"mode": "function", "function": "f"}
        return TaskItem(text=text, answer=answer, metadata={**mode, "shown": cases[0], "tests": cases[1]})

    def grader(self, item: TaskItem) -> GraderSpec:
        about = {key: item.metadata[key] for key in ("mode", "function", "tests") if key in item.metadata}
        return GraderSpec(name="code", options={**about, "limits": LIMITS})

    def verify(self, item: TaskItem, response: str) -> tuple[float, str]:
        """Always raises: programs of a model are not run in this process."""
        raise GraderFailure(
            "task programs: answers are programs; grade them in the sandbox through `rollkeel.rewards` (grader `code`)"
        )

    def near_misses(self, item: TaskItem) -> Sequence[str]:
        """Right on what is shown and on little else; off by one; wrong for one hidden input, for lists the empty one."""
        shown = item.metadata["shown"]
        tests = item.metadata["tests"]
        mode = item.metadata["mode"]
        if mode == "expression":
            table = {case["input"]["x"]: case["output"] for case in shown}
            x, y = tests[-1]["input"]["x"], tests[-1]["output"]
            return f"{table}.get(x,{y + 1})", f"{item.answer}+1", f"{item.answer} if x!={x} else {y + 1}"
        off = _around(item.answer, "r + 1 if isinstance(r, int) else [*r, 0]")
        edge = _around(item.answer, "r if xs else None")
        if mode == "function":
            learnt = {tuple(case["input"][0]): case["output"] for case in shown}
            return f"def f(xs):\n    return {learnt}.get(tuple(xs))", off, edge
        learnt = {case["input"]: case["output"] for case in shown}
        return f"import sys\nprint({learnt}.get(sys.stdin.read(), '?'))", off, edge

    def noisy(self, item: TaskItem, rng: random.Random, label_noise: float) -> str:
        """Each number in the gold program is replaced by its neighbour with probability `label_noise`."""
        return re.sub(r"\d+", lambda m: str(int(m[0]) + 1) if rng.random() < label_noise else m[0], item.answer)


def _numbers(rng: random.Random) -> list[int]:
    return [rng.randint(-9, 20) for _ in range(rng.randint(3, 8))]


def _every_step_matters(steps: list[pipelines.Step], lists: Sequence[list[int]]) -> bool:
    """The outputs differ, so that no constant (or silence) passes, and no step can be left out without changing one."""
    whole = [pipelines.run(steps, xs) for xs in lists]
    less = ([pipelines.run(steps[:i] + steps[i + 1 :], xs) for xs in lists] for i in range(len(steps)))
    return len({str(output) for output in whole}) > 2 and all(outputs != whole for outputs in less)


def _case(steps: list[pipelines.Step], lists: Sequence[list[int]]) -> dict[str, str]:
    results = [pipelines.run(steps, xs) for xs in lists]
    lines = [" ".join(map(str, r)) if isinstance(r, list) else str(r) for r in results]
    given = "".join(" ".join(map(str, xs)) + "\n" for xs in lists)
    return {"input": f"{len(lists)}\n{given}", "output": "".join(line + "\n" for line in lines)}


def _script(function: str) -> str:
    return (
        f"import sys\n\n{function}\n\nlines = sys.stdin.read().split('\\n')\nfor line in lines[1:int(lines[0])+1]:\n"
        "    r = f([int(word) for word in line.split()])\n    print(*r) if isinstance(r, list) else print(r)"
    )


def _around(program: str, result: str) -> str:
    """The program with its `f` renamed to `g` and another `f` that spoils what `g` gives."""
    head, _, rest = program.partition("def f(xs):")
    body, _, main = rest.partition("\n\n")
    return f"{head}def g(xs):{body}\n\ndef f(xs):\n    r = g(xs)\n    return {result}\n\n{main}"
