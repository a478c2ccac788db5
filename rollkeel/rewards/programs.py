"""`code`: a program judged by what it does with the inputs of tests, in the sandbox. It sees inputs, never expected outputs.

| mode | the response's program | one test |
|---|---|---|
| `stdin` | reads standard input, prints | a run; what is printed is compared without white space at the ends of lines and of the whole |
| `function` | defines `function`, or a method as `Class.name` | a call with the list `input` as arguments (one that is no list is the only argument) |
| `expression` | is one Python expression | its value, with the mapping `input` as variables |

Values are JSON: tuples count as lists, `True` is no 1, `1.0` is 1. All calls of a program happen in one job, in order, in one process; their
values come back in a file. The program could write that file itself, which is worth nothing to it: it does not know what is expected.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from rollkeel.rewards.answers import NoAnswer, spoken
from rollkeel.rewards.sandboxed import Run, fault_of
from rollkeel.tasks.base import excerpt
from rollkeel.tasks.looks import blocks
from rollkeel.types import Rollout

MAX_PROGRAM_CHARS = 1 << 16
RESULTS = "results.jsonl"
_MARKS = {"python": ("python", "py", "python3", "python2")}
"""How a fence marks a block of a language; another language by its own name."""
_MAIN = rb"""
names = {"__name__": "__main__"}
for file in ("prelude.py", "program.py"):
    exec(compile(open(file, encoding="utf-8").read(), file, "exec"), names)
"""
_DRIVER = rb"""
import json
asked = json.load(open("asked.json", encoding="utf-8"))
source = open("program.py", encoding="utf-8").read()
if asked["function"] is None:
    code = compile(source.strip(), "program.py", "eval")
    call = lambda given: eval(code, dict(given))
else:
    names = {"__name__": "program"}
    exec(compile(asked["prelude"], "prelude.py", "exec"), names)
    exec(compile(source, "program.py", "exec"), names)
    first, *rest = asked["function"].split(".")
    target = names[first]
    for name in rest:
        target = getattr(target() if isinstance(target, type) else target, name)
    call = lambda given: target(*given) if isinstance(given, list) else target(given)
with open("results.jsonl", "w", encoding="utf-8") as out:
    for given in asked["inputs"]:
        try:
            row = json.dumps({"value": call(given)})
        except Exception as error:
            row = json.dumps({"error": f"{type(error).__name__}: {error}"[:200]})
        out.write(row + "\n")
        out.flush()
"""


class Example(BaseModel):
    """A test: what goes in and what must come out; text for `stdin`, JSON values else."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    input: Any
    output: Any


class CodeProblem(BaseModel):
    """Options of the grader `code`."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    mode: Literal["stdin", "function", "expression"] = "stdin"
    tests: tuple[Example, ...] = Field(min_length=1)
    function: str | None = None
    """Name of what is called, with `function`."""
    kind: str = "python"
    """Language, with `stdin`."""
    preload: str = "code"
    limits: Mapping[str, Any] = Field(default_factory=dict)
    """Of `rollkeel_sandbox.Limits`: of each run with `stdin`, of all calls together else."""
    prelude: str = ""
    """Python that runs before the program, in its names: imports that a benchmark gives. Not with `expression`."""
    tolerance: float | None = Field(default=None, ge=0)
    """Numbers may differ by this, absolutely or relatively; None asks for equal ones, printed alike. With 0 `0.50` is `0.5`."""
    extract: Literal["auto", "fenced", "whole"] = "auto"
    """`fenced` takes the last block between fences that is marked as the language, else the last without a mark, else the last; `auto`
    the same where there is any fence, and else the whole response."""

    def model_post_init(self, _: Any) -> None:
        if (self.mode == "function") != (self.function is not None):
            raise ValueError("expected the option function with mode function, and with no other")
        if self.prelude and (self.mode == "expression" or self.kind != "python"):
            raise ValueError("expected the option prelude with programs in Python, and not with mode expression")


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a program made of one input: a value (bytes that it printed, with `stdin`), or one line on why there is none."""

    value: Any = None
    fault: str = ""


def program_of(text: str, extract: str = "auto", kind: str = "python") -> str:
    """The program in a response, by the rule of `CodeProblem.extract`; thoughts up to `</think>` are not read.

    Raises `NoAnswer` for a fence that is not closed, and for nothing.
    """
    rest = spoken(text)
    fenced = [] if rest is None or extract == "whole" else blocks(rest)
    if rest is None or (fenced and not fenced[-1].closed):
        raise NoAnswer("no program: the response ends within a thought or fence")
    if fenced:
        marked = [block for block in fenced if block.mark in _MARKS.get(kind, (kind,))]
        rest = (marked or [block for block in fenced if not block.mark] or fenced)[-1].text
    elif extract == "fenced":
        raise NoAnswer("no program: no fence")
    if not rest.strip():
        raise NoAnswer("no program: it is empty")
    if len(rest) > MAX_PROGRAM_CHARS or "\0" in rest or any("\ud800" <= c <= "\udfff" for c in rest):
        raise NoAnswer(f"no program: longer than {MAX_PROGRAM_CHARS} characters, or not text")
    return rest


def answers(run: Run, problem: CodeProblem, program: str, inputs: Sequence[Any]) -> Iterator[Answer]:
    """What the program makes of each input, one after another; a run or call that ended all others is the last answer.

    Raises `Broken` when the sandbox failed, which says nothing about the program, and whatever `run` raises.
    """
    from rollkeel_sandbox.job import Job, Limits

    limits = Limits(**problem.limits)
    about: dict[str, Any] = {"preload": problem.preload, "limits": limits}
    if problem.mode == "stdin":
        source, files = program.encode(), {}
        if problem.prelude:
            source, files = _MAIN, {"prelude.py": problem.prelude.encode(), "program.py": source}
        for given in inputs:
            result = run(Job(source=source, kind=problem.kind, stdin=str(given).encode(), files=files, **about))
            fault = fault_of(result) or ("printed too much" if result.stdout_truncated else "")
            yield Answer(fault=fault) if fault else Answer(value=result.stdout)
        return
    about_calls = {"function": problem.function, "prelude": problem.prelude, "inputs": list(inputs)}
    asked = json.dumps(about_calls).encode()
    files = {"program.py": program.encode(), "asked.json": asked}
    result = run(Job(source=_DRIVER, files=files, collect=(RESULTS,), **about))
    fault = fault_of(result)
    rows = result.files.get(RESULTS, b"").split(b"\n")[:-1][: len(inputs)]
    yield from map(_answer, rows)
    if len(rows) < len(inputs):
        yield Answer(fault=fault or "ended early, without a result")


def equal(problem: CodeProblem, value: Any, expected: Any) -> bool:
    """Whether a value (printed bytes, with `stdin`) is what a test expects."""
    if problem.mode != "stdin":
        return _same_value(value, expected, problem.tolerance)
    from rollkeel_sandbox.cases import same

    wanted = str(expected).encode()
    if same(value, wanted) or problem.tolerance is None:
        return same(value, wanted)
    rows = [[line.split() for line in text.decode("utf-8", "replace").rstrip().split("\n")] for text in (value, wanted)]
    return [len(row) for row in rows[0]] == [len(row) for row in rows[1]] and all(
        a == b or _same_number(a, b, problem.tolerance)
        for left, right in zip(*rows, strict=True)
        for a, b in zip(left, right, strict=True)
    )


def judge(run: Run, problem: CodeProblem, program: str) -> tuple[float, str]:
    """1 when the program passes all tests; else 0 and the first that it does not. Raises like `answers`."""
    tests = problem.tests
    for i, answer in enumerate(answers(run, problem, program, [t.input for t in tests])):
        where = f"test {i + 1} of {len(tests)}"
        if answer.fault:
            return 0.0, f"{where}: {answer.fault}"
        if not equal(problem, answer.value, tests[i].output):
            shown = answer.value.decode("utf-8", "replace") if isinstance(answer.value, bytes) else repr(answer.value)
            return 0.0, f"{where}: got {excerpt(shown)}, expected {excerpt(str(tests[i].output))}"
    return 1.0, f"{len(tests)} tests passed"


def grade(run: Run, rollout: Rollout) -> tuple[float, str]:
    """Reward and detail. Raises for what is no fault of the program: options, sandbox, server."""
    problem = CodeProblem(**rollout.prompt.grader.options)
    try:
        program = program_of(rollout.text, problem.extract, problem.kind)
    except NoAnswer as none:
        return 0.0, str(none)
    return judge(run, problem, program)


def _answer(row: bytes) -> Answer:
    try:
        said = json.loads(row)
        return Answer(value=said["value"]) if "value" in said else Answer(fault=str(said["error"])[:200])
    except (ValueError, RecursionError, KeyError, TypeError):
        return Answer(fault="a result that cannot be read")


def _same_number(a: str, b: str, tolerance: float) -> bool:
    try:
        # By decimals, since floats take two long integers for one.
        return Decimal(a) == Decimal(b) if tolerance == 0 else _same_value(float(a), float(b), tolerance)
    except (ArithmeticError, ValueError):
        return False


def _same_value(a: Any, b: Any, tolerance: float | None) -> bool:
    if isinstance(a, bool) or isinstance(b, bool) or a is None or b is None:
        return a is b
    if isinstance(a, int | float) and isinstance(b, int | float):
        try:
            return a == b or (tolerance is not None and math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance))
        except OverflowError:  # an integer beyond floating point
            return False
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(_same_value(x, y, tolerance) for x, y in zip(a, b, strict=True))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return set(a) == set(b) and all(_same_value(a[k], b[k], tolerance) for k in a)
    return type(a) is type(b) and a == b
