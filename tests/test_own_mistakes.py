"""What is wrong with a person's own grader, task or answers must be said before the warm start, in one line, and not after an hour.

Each mistake is made in a file and named on the command line. Not covered: mistakes that loading alone shows (test_own_code.py), and
what a grader does later in a run (tests/rewards).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from test_own_code import BASE
from tiny_run import cli, rows

GRADERS = """import time
from rollkeel.types import GraderSpec
def forgets(rollout):
    if rollout.text == rollout.prompt.answer:
        return 1.0
def nan(rollout): return float("nan")
def text(text, answer, options): return "1.0"
async def waits(rollout): return 1.0
def later(rollout): return waits(rollout)
def helper(rollout):
    return 1 / 0
def raises(rollout):
    return helper(rollout)
def parses(text, answer, options):
    return float(int(text) == int(answer))
def types(rollout): return float(rollout.text == int(rollout.prompt.answer)), "no"
def ends(rollout): raise SystemExit
def constant(rollout): return 1.0
def prefix(rollout): return float(rollout.prompt.answer.startswith(rollout.text))
def penalty(rollout): return float(rollout.text == rollout.prompt.answer) - 1
def sandboxed(rollout):
    from rollkeel_sandbox import Job
    return Job(source=b"", kind="cobol")
def short(rollout): return 1 / rollout.span.own_count
"""
TASKS = """import random
from rollkeel.tasks import Environment, Step, Task, TaskItem
from rollkeel.types import GraderSpec
class Word(Task):
    def draw(self, rng):
        word = "".join(rng.choices("abc", k=6))
        return TaskItem(text=word + "=", answer=word)
class Empty(Word):
    def draw(self, rng): return TaskItem(text=f"{rng.random()}=", answer="")
class Sometimes(Word):
    def draw(self, rng): return TaskItem(text=f"{rng.random()}=", answer="b" * (rng.random() < 0.8))
class Lax(Word):
    def verify(self, item, response): return float(item.answer.startswith(response)), ""
class Number(Word):
    def draw(self, rng): return TaskItem(text="1+1=", answer=2)
class Forgets(Word):
    def draw(self, rng): pass
class Waits(Word):
    async def verify(self, item, response): return 1.0
class Walled(Word):
    def draw(self, rng):
        from rollkeel_sandbox import Refused
        raise Refused("sandbox: this machine gives none")
class NoReward(Word):
    def verify(self, item, response): return "right"
class Parses(Word):
    def verify(self, item, response):
        return self.read(response) == self.read(item.answer)
    def read(self, text):
        return 1 / ("?" not in text)
class Init(Word):
    def __init__(self, options):
        self.size = options["size"]
class Few(Word):
    def draw(self, rng):
        letter = rng.choice("ab")
        return TaskItem(text=letter, answer=letter)
class Graded(Word):
    def grader(self, item): return GraderSpec(name="graders.py:nan")
class Play(Environment):
    def draw(self, rng):
        word = "".join(rng.choices("abc", k=2))
        return TaskItem(text=f"{rng.randrange(1000)}{word}:", answer=word)
    def actions(self, item): return [item.answer]
    def reset(self, item):
        self.word = item.answer
        return item.text
    def step(self, action): return Step(reward=float(action == self.word), done=True)
class Pair(Play):
    def step(self, action): return "?", 1.0, True, {}
class Unpaid(Play):
    def step(self, action): return Step(reward=None, done=True)
class Digits(Play):
    def step(self, action): return Step(reward=float({"a": 1}[action[0]] > 0), done=True)
class Lost(Play):
    def reset(self, item):
        return self.board
class LateDraw(Word):
    drawn = 0
    def draw(self, rng):
        LateDraw.drawn += 1
        if LateDraw.drawn > 150:
            raise LookupError("no more words")
        return super().draw(rng)
class LateStep(Play):
    def step(self, action):
        if action not in (self.word, "???", ""):
            raise LookupError("lost")
        return super().step(action)
"""
FILE = ["data.task=null", "data.path=rows.jsonl"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the mistakes and rows of numbers."""
    (tmp_path / "graders.py").write_text(GRADERS)
    (tmp_path / "own.py").write_text(TASKS)
    rows = [{"prompt": f"{n}=", "answer": str(n)} for n in range(100, 200)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def line_of(file: Path, text: str) -> str:
    """`file:line` of the first line that holds `text`."""
    return f"{file}:{file.read_text().partition(text)[0].count(chr(10)) + 1}"


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line with which a run is refused before anything is trained or kept."""
    code, out, err = cli(capsys, "train", *BASE, *words, "run.dir=run")
    assert (code, err.count("\n"), Path("run").exists()) == (2, 1, False), err
    assert "sft" not in out
    return err


@pytest.mark.parametrize(
    ("name", "message", "line", "method"),
    [
        ("forgets", "expected a real number as reward, got NoneType", "def forgets", "forgets"),
        ("nan", "expected a finite reward, got nan", "def nan", "nan"),
        ("text", "expected a real number as reward, got str", "def text", "text"),
        ("later", "expected a real number as reward, got coroutine", "def later", "later"),
        ("raises", "ZeroDivisionError: division by zero", "return 1 / 0", "raises"),
        ("parses", "ValueError: invalid literal for int", "float(int(text)", "parses"),
        ("ends", "SystemExit", "raise SystemExit", "ends"),
        ("sandboxed", "sandboxed: sandbox job: kind 'cobol' is unknown", "return Job", "sandboxed"),
    ],
)
def test_a_grader_that_breaks_is_refused_before_the_warm_start(
    name: str, message: str, line: str, method: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, *FILE, f"data.grader=graders.py:{name}")
    assert f"grader graders.py:{name}: " in said
    assert message in said
    assert f"({line_of(here / 'graders.py', line)} in {method})" in said


def test_an_async_grader_is_refused_by_its_kind(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, *FILE, "data.grader=graders.py:waits")
    assert f"got async waits(rollout) ({line_of(here / 'graders.py', 'async def waits')})" in said


@pytest.mark.usefixtures("here")
def test_gold_answers_that_earn_nothing_are_refused_with_what_came_or_told_without_a_warm_start(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [*FILE, "data.grader=graders.py:types"]
    said = refused(capsys, *words)
    assert "a gold answer earns 0 (no), on the response '" in said
    assert "and so does that of each of 4 problems tried" in said
    code, out, err = cli(capsys, "train", *BASE, *words, "sft.steps=0", "run.steps=1", "run.dir=run")
    assert (code, err) == (0, "")
    assert "check at step 0: reward_untold: grader graders.py:types" in out
    assert '"check": "reward_untold"' in Path("run/events.jsonl").read_text()


@pytest.mark.usefixtures("here")
def test_rows_that_a_grader_of_ours_cannot_read_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "is none of the letters ABCD" in refused(capsys, *FILE, "data.grader=choice")


@pytest.mark.parametrize(
    ("name", "told"),
    [("constant", "'???' 1"), ("prefix", "an empty response 1"), ("penalty", ""), ("short", "'???' 0.25")],
)
@pytest.mark.usefixtures("here")
def test_rewards_that_do_not_tell_right_from_wrong_are_told(
    name: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*FILE, f"data.grader=graders.py:{name}", "sft.steps=0", "run.steps=1", "run.dir=run"]
    code, out, err = cli(capsys, "train", *BASE, *words)
    assert (code, err) == (0, "")
    assert ("check at step 0: reward_untold" in out) == bool(told)
    assert told in out


@pytest.mark.parametrize(
    ("name", "message", "line", "method"),
    [
        ("Empty", "is empty, and so is silence", 'answer="")', "draw"),
        ("Sometimes", "is empty, and so is silence", 'answer="b" *', "draw"),
        ("Lax", "an empty response to ", "item.answer.startswith", "verify"),
        ("Number", "expected text and answer as str, got '1+1=' and 2", "answer=2", "draw"),
        ("Forgets", "draw returned None, expected a TaskItem", "def draw(self, rng): pass", "draw"),
        ("Waits", "expected a plain method, got async verify", "async def verify", "verify"),
        ("NoReward", "verify returned 'right', expected a reward from 0 to 1", 'return "right"', "verify"),
        ("Parses", "ZeroDivisionError", "return 1 /", "verify"),
        ("Init", "KeyError: 'size'", 'options["size"]', "__init__"),
        ("Few", "1000 draws gave 2 different problems, none in split ", "", ""),
        ("Graded", "grader graders.py:nan: ValueError", "", ""),
        ("Pair", "step returned ('?', 1.0, True, {}), expected Step(", 'return "?", 1.0', "step"),
        ("Unpaid", "expected text as str and a finite reward, got '' and None", "Step(reward=None", "step"),
        ("Digits", "KeyError", '{"a": 1}[', "step"),
        ("Lost", "has no attribute 'board'", "self.board", "reset"),
    ],
)
def test_a_mistake_in_a_task_is_named_with_line_and_method(
    name: str, message: str, line: str, method: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, f"data.task=own.py:{name}")
    assert message in said
    if line:
        assert f"({line_of(here / 'own.py', line)} in {method})" in said
    if name == "Few":
        assert "let draw make fifty or more" in said


@pytest.mark.parametrize(("returned", "reward"), [("True", 1), ("0.25", 0.25), ("1.0, 'fine'", 1)])
def test_a_verifier_may_return_a_number_alone(
    returned: str, reward: float, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (
        TASKS
        + "class Plain(Word):\n    def verify(self, item, response):\n        if response != item.answer: return 0\n"
    )
    (here / "plain.py").write_text(text + f"        return {returned}\n")
    code, _, err = cli(capsys, "tasks", "show", "plain.py:Plain", "-n", "1")
    assert (code, "scores 0.25, expected 1" in err) == ((0, False) if reward == 1 else (2, True)), err


def test_a_refusal_of_the_sandbox_in_own_code_keeps_its_words_and_exit_code(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = cli(capsys, "tasks", "show", "own.py:Walled")
    assert (code, err) == (3, "rollkeel: sandbox: this machine gives none\n")


@pytest.mark.parametrize(
    ("name", "line", "method"),
    [("LateDraw", 'LookupError("no more', "draw"), ("LateStep", 'LookupError("lost', "step")],
)
def test_a_mistake_during_training_stops_the_run_with_its_place(
    name: str, line: str, method: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"data.task=own.py:{name}", "sft.steps=0", "run.steps=40", "eval.items=1", "run.dir=run"]
    code, _, err = cli(capsys, "train", *BASE, *words)
    assert (code, err.count("\n")) == (3, 1), err
    assert f"LookupError: {'no more words' if name == 'LateDraw' else 'lost'}" in err
    assert f"({line_of(here / 'own.py', line)} in {method})" in err
    assert rows(here / "run")


LATE = """from rollkeel.objectives import Objective
from rollkeel.objectives.recipes import grpo
calls = 0
def tick(name):
    global calls
    calls += 1
    if calls > 12:
        raise LookupError(name + " lost")
def objective():
    whole = grpo()
    class Late(Objective):
        def __call__(self, tokens):
            tick("objective")
            return super().__call__(tokens)
    return Late(**{f: getattr(whole, f) for f in whole.__dataclass_fields__})
def credit(groups):
    tick("credit")
    return groups.rewards - groups.rewards.mean()
"""


@pytest.mark.parametrize("word", ["objective.name=late.py:objective", "advantages.name=late.py:credit"])
def test_an_objective_or_estimator_that_fails_later_stops_the_run_with_its_place(
    word: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "late.py").write_text(LATE)
    sys.modules.pop(f"rollkeel.plugins.{here}/late%2Epy", None)
    code, _, err = cli(
        capsys, "train", *BASE, "data.task=own.py:Word", "sft.steps=0", "run.steps=40", word, "run.dir=run"
    )
    assert (code, err.count("\n")) == (3, 1), err
    key, _, name = word.partition("=")
    assert f"{key} '{here / name}': LookupError: " in err
    assert f"({line_of(here / 'late.py', 'LookupError(name')} in " in err
    assert rows(here / "run")
