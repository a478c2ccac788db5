"""A person's first wish is to train on their own task: it must be possible to name it, and a mistake in it must not cost an hour.

The README's own file is taken as it stands: named in every kind of place, killed, resumed from another folder. Mistakes of every
kind get one line with their place. Not covered: own objectives (tests/objectives), engines that sample otherwise than ours.
"""

from __future__ import annotations

import ast
import json
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_run import TINY, assert_same, cli, kill_at, start

from rollkeel import advantages, plugins, tasks
from rollkeel.errors import BadInput
from rollkeel.lab.presets import find
from rollkeel.recipe import load
from rollkeel.tasks.base import Task

README = (Path(__file__).resolve().parent.parent / "README.md").read_text(encoding="utf-8")
MINE = re.findall(r"cat > \S+/mine.py <<'EOF'\n(.*?)^EOF", README, re.DOTALL | re.MULTILINE)[0]
REST = """
import dataclasses, shutil
from rollkeel.engines.local import LocalEngine
from rollkeel.loop.feeds import Whole
from rollkeel.lab.preset import Arm, Preset

def graded(text, answer, options):
    return float(text == answer), "in a worker"

class Log:
    def __init__(self, folder, config, resume_step):
        self.file = folder / "mine.txt"
    def log(self, step, metrics):
        with self.file.open("a") as file:
            print(step, file=file)
    def close(self):
        pass

class Copy(Log):
    def log(self, step, metrics):
        if step == 5 and self.file.parent.name == "whole":
            shutil.copytree(self.file.parent, self.file.parent.with_name("run"), ignore=lambda *_: [".lock"])

def engine(hf_config, config, device, max_length):
    return LocalEngine(hf_config, config, device=device, max_length=max_length, name="mine")

class Backwards(Whole):
    name = "backwards"
    drawn = 0
    def __init__(self, config, sampler):
        super().__init__(sampler, config.rollout.prompts, config.rollout.samples)
        self.file = open("drawn.txt", "a", buffering=1)
    def draw(self, clock, version):
        step = super().draw(clock, version)
        self.drawn += 1
        print(self.drawn, step.batch[0].group, file=self.file)
        return dataclasses.replace(step, batch=step.batch[::-1])
    def state_dict(self):
        return {"drawn": self.drawn}
    def load_state_dict(self, state, *, step, version):
        self.drawn = state["drawn"]

class Hasty(Backwards):
    def draw(self, clock, version):
        return self.nothing

class Deaf_engine:
    version = 0
    def __init__(self, hf_config, config, device, max_length):
        pass
    def submit(self, requests):
        pass

class Torn(LocalEngine):
    def __init__(self, hf_config, config, device, max_length):
        super().__init__(hf_config, config, device=device, max_length=max_length)
    def poll(self, timeout_s):
        return self.nothing

def measured(words, seed, more=0):
    return {"seed": seed + more}

class Deaf:
    def __init__(self, folder, config, resume_step):
        pass
    def log(self, step, metrics):
        pass

PRESET = Preset(name="mine", question="?", paper="", expected="", arms=(Arm(name="a"),), judge=lambda readings: [],
                readings={"seed": lambda rows: rows[0]["seed"]}, measure=measured, seeds=1, charts=())
"""
BASE = [word for word in TINY if "digits" not in word and "checkpoint" not in word]
BASE += ["run.steps=6", "sft.steps=20", "eval.every=0", "eval.items=2", "eval.greedy=false", "checkpoint.every=2"]
OWN = ["data.task=mine.py:Reverse", "advantages.name=mine.py:centred", *BASE]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the README's file and rows for its grader."""
    folder = tmp_path / "here now.d"
    folder.mkdir()
    (folder / "mine.py").write_text(MINE + REST)
    rows = [{"prompt": f"{n}=", "answer": str(n)} for n in range(100, 200)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return folder


def test_each_example_of_the_readme_is_at_most_fifteen_lines() -> None:
    sizes = {
        node.name: (node.end_lineno or 0) - node.lineno + 1
        for node in ast.parse(MINE).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef)
    }
    assert set(sizes) == {"Reverse", "Sorting", "matches", "centred"}
    assert max(sizes.values()) <= 15


def test_a_relative_file_becomes_absolute_in_the_config(here: Path) -> None:
    parts = "data.grader_options={parts: [{grader: mine.py:matches}, {grader: exact}]}"
    words = ["data.task=mine.py:Reverse", "report.trackers=[wandb, mine.py:Log]", "objective.name=a.b:c", parts]
    config = load(None, words)
    assert config.data.task == f"{here}/mine.py:Reverse"
    assert config.report.trackers == ("wandb", f"{here}/mine.py:Log")
    assert config.objective.name == "a.b:c"
    assert [p["grader"] for p in config.data.grader_options["parts"]] == [f"{here}/mine.py:matches", "exact"]
    assert load(None, [f"data.task={config.data.task}"]).data.task == config.data.task


@pytest.mark.usefixtures("here")
def test_what_is_pickled_here_is_found_in_another_process() -> None:
    Path("mine.py").write_text(MINE)  # without torch
    script = "import pickle, sys; print(type(pickle.load(sys.stdin.buffer)).__name__)"
    sent = pickle.dumps(tasks.get("mine.py:Reverse"))
    done = subprocess.run([sys.executable, "-c", script], input=sent, capture_output=True, cwd="/", check=False)
    assert done.stdout.decode().strip() == "Reverse", done.stderr.decode()


@pytest.mark.usefixtures("here")
def test_tasks_are_listed_shown_and_checked(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = cli(capsys, "tasks", "list", "mine.py")
    assert "runsum " in out
    assert out.splitlines()[-2:] == [
        "mine.py:Reverse A word backwards.",
        "mine.py:Sorting The smallest digit that is left, turn by turn.",
    ]
    assert "→" in cli(capsys, "tasks", "show", "mine.py:Reverse")[1]
    for name in ("Reverse", "Sorting"):
        assert cli(capsys, "tasks", "check", f"mine.py:{name}", "-n", "20")[0] == 0


@pytest.mark.slow
def test_resumed_from_another_folder_it_is_the_same_run(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the files that a kill between a step's row and its checkpoint would leave."""
    whole, run = here / "whole", here / "run"
    code, _, err = cli(capsys, "train", *OWN, "report.trackers=[mine.py:Copy]", f"run.dir={whole}")
    assert (code, err) == (0, "")
    monkeypatch.chdir(tmp_path)
    code, out, err = cli(capsys, "train", "--resume", run)
    assert (code, err) == (0, "")
    assert "changed" not in out
    assert "resumed at step 4" in out
    assert_same(run, whole)
    (here / "mine.py").write_text(MINE + REST + "# another\n")
    said = f"{here}/mine.py changed since this run last used it"
    assert said in cli(capsys, "train", "--resume", run, "run.steps=7")[1]


ROWS = ["data.task=null", "data.path={here}/rows.jsonl"]


@pytest.mark.slow  # three processes each
@pytest.mark.parametrize(
    "words",
    [
        ["data.task=mine.py:Sorting", "advantages.name=mine.py:centred"],
        [*ROWS, "data.grader=mine.py:matches"],
        [*ROWS, "data.grader=mine:graded", "engine.processes=1"],
        ["data.task=mine:Reverse", "engine.kind=mine.py:engine", "report.trackers=[mine.py:Log]"],
    ],
    ids=["environment", "grader", "worker", "engine"],
)
def test_every_kind_is_killed_and_resumed(
    words: list[str], here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*(word.format(here=here) for word in words), *BASE]
    first = start("train", *words, f"run.dir={here / 'whole'}")
    assert first.communicate()[1] == ""
    kill_at(here / "run", words, "rollout", 4, 0.0)
    monkeypatch.chdir(tmp_path)
    again = start("train", "--resume", here / "run")
    assert again.communicate()[1] == ""
    assert again.returncode == 0
    assert_same(here / "run", here / "whole")


@pytest.mark.slow  # four models are loaded
@pytest.mark.usefixtures("here")
def test_stages_take_own_code_too(capsys: pytest.CaptureFixture[str]) -> None:
    rows = ["data.task=null", "data.path=rows.jsonl", "data.grader=mine.py:graded", "engine.kind=mine.py:engine"]
    small = [*BASE, "rollout.prompts=2", "eval.items=2", "sft.steps=1"]
    assert cli(capsys, "sft", "data.task=mine.py:Reverse", *small, "--out", "model")[0] == 0
    assert cli(capsys, "eval", *rows, *small)[0] == 0
    assert cli(capsys, "rollout", *rows, *small, "--out", "r.parquet")[0] == 0
    assert cli(capsys, "score", "r.parquet", "--out", "s.parquet")[0] == 0
    assert cli(capsys, "objectives", "show", "mine.py:centred")[0] == 2  # a function, and its result is no objective


def test_a_tracker_and_an_engine(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*OWN, "run.steps=1", "sft.steps=0", "engine.kind=mine.py:engine", "report.trackers=[mine.py:Log]"]
    assert cli(capsys, "train", *words, "run.dir=run")[0] == 0
    assert (here / "run" / "mine.txt").read_text() == "0\n1\n"


def test_a_feed_schedules_and_keeps_its_state(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*OWN, "sft.steps=0", "run.steps=2", "checkpoint.every=1", "run.loop=mine.py:Backwards", "run.dir=run"]
    assert cli(capsys, "train", *words)[0] == 0
    assert cli(capsys, "train", "--resume", "run", "run.steps=4")[0] == 0
    assert (here / "drawn.txt").read_text() == "1 0\n2 8\n3 16\n4 24\n"
    code, _, err = cli(capsys, "train", "--resume", "run", "run.steps=5", "run.loop=sync")
    assert (code, err) == (
        2,
        "rollkeel: checkpoint: expected one of run.loop=sync, got one of backwards; resume with it\n",
    )


@pytest.mark.parametrize(
    ("word", "exit_code", "message"),
    [
        ("run.loop=mine.py:Hasty", 3, "'Hasty' object has no attribute 'nothing' ({file}:{draw} in draw)"),
        ("run.loop=mine.py:graded", 2, "a class or function of (config, sampler), got graded(text, answer, options)"),
        ("run.loop=mine.py:Log", 2, "a class or function of (config, sampler), got class Log"),
        ("run.loop=bad.py:two", 2, "expected a rollkeel.loop.feeds.Feed, got 0.0 without draw, publishing, published"),
        ("engine.kind=mine.py:Deaf_engine", 2, "without capabilities, poll, interrupt, update_weights, close"),
        ("engine.kind=mine.py:Torn", 2, "'Torn' object has no attribute 'nothing' ({file}:{poll} in poll)"),
    ],
)
def test_mistakes_in_a_feed_or_an_engine_are_one_line(
    word: str, exit_code: int, message: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "bad.py").write_text(MISTAKES)
    code, _, err = cli(capsys, "train", *OWN, "sft.steps=0", word, "run.dir=run")
    lines = (here / "mine.py").read_text().splitlines()
    draw, poll = (n for n, text in enumerate(lines, 1) if text == "        return self.nothing")
    assert code == exit_code, err
    assert err.count("\n") == 1
    assert message.format(file=here / "mine.py", draw=draw, poll=poll) in err


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_a_preset_from_a_file_is_measured_in_a_worker(capsys: pytest.CaptureFixture[str]) -> None:
    assert find("./mine.py").name == find("mine.py:PRESET").name == "mine"
    partial = "OTHER = dataclasses.replace(PRESET, measure=functools.partial(PRESET.measure, more=2))"
    Path("other.py").write_text(f"import dataclasses, functools\nfrom mine import PRESET\n{partial}\n")
    for name in ("./mine.py", "other.py:OTHER"):
        code, out, err = cli(capsys, "lab", name, "--json")
        assert (code, "done" in err) == (0, True), err
        assert '"mine"' in out
        assert json.loads(out)["readings"]["seed"]["a"] == [2.0 if name == "other.py:OTHER" else 0.0]


@pytest.mark.usefixtures("here")
def test_a_file_is_called_what_it_was_called(capsys: pytest.CaptureFixture[str]) -> None:
    Path("syntax.py").write_text("x = (\n")
    Path("none.py").write_text("x = 1\n")
    for command, wanted in (
        ("tasks list", "a subclass of rollkeel.tasks.Task"),
        ("lab", "a rollkeel.lab.preset.Preset"),
    ):
        for file, said in (
            ("syntax.py", "SyntaxError: '(' was never closed"),
            ("none.py", f"expected {wanted}, got none"),
            ("no.py", "no such file"),
        ):
            code, out, err = cli(capsys, *command.split(), file)
            assert (code, out, err.count("\n")) == (2, "", 1)
            assert err.startswith(f"rollkeel: {command} '{file}': {said}")
    assert "expected a file or module without :name" in cli(capsys, "tasks", "list", "mine.py:Reverse")[2]


def test_a_judge_that_asks_for_what_there_is_not_is_refused_before_any_run(here: Path) -> None:
    (here / "unjudged.py").write_text(
        "from rollkeel.lab.preset import Arm, Preset\n"
        "P = Preset(name='p', question='', paper='', expected='', arms=(Arm(name='a'),), readings={'r': len},\n"
        "           judge=lambda readings: [readings['r']['b']])\n"
    )
    with pytest.raises(BadInput, match=r"its judge asks for 'b', neither an arm \(a\) nor a reading \(r\)"):
        find("unjudged.py:P")


MISTAKES = """import math; import dataclasses, random
from rollkeel.tasks import Environment, Step, Task, TaskItem
number = 3
def two(a, b): return 0.0
class NoDraw(Task): pass
class Broken(Task):
    def draw(self, rng):
        return TaskItem(text="a", answer=undefined)
class Half(Task):
    def draw(self, rng):
        return TaskItem(text=str(rng.random()), answer="b")
    def verify(self, item, response):
        return 0.5, "half"
def crash(groups):
    return groups.nothing
def scalar(groups):
    return 1.0
def nothing(groups):
    groups.centred
def few(groups):
    return groups.rewards[:3] * 0 + 1
def words(groups):
    return list("abcd")
def typo():
    import rollkeel.objectives as o
    from rollkeel.objectives.weights import Weight
    made = o.grpo()
    return dataclasses.replace(made, weight=Weight("w", lambda terms: terms.log_corr.exp()))
class Chance(Task):
    def draw(self, rng):
        return TaskItem(text=f"{random.random()}=", answer="b")
class Silent(Environment):
    def draw(self, rng):
        return TaskItem(text=f"{rng.randrange(99)}:", answer="b")
    def actions(self, item):
        return ["b"]
    def reset(self, item):
        pass
    def step(self, action):
        return Step(text="", reward=float(action == "b"), done=True)
"""
BAD = [
    ("data.task=bad.py:Brokn", "no 'Brokn' in {file}; did you mean Broken?"),
    ("data.task=bad.py:math", "expected a subclass of rollkeel.tasks.Task"),
    ("data.task=bad.py:number", "got 3 ({file}:3)"),
    ("data.task=bad.py:NoDraw", "got class NoDraw without draw ({file}:5)"),
    ("data.task=bad.py:Broken", "NameError: name 'undefined' is not defined ({file}:8 in draw)"),
    ("data.task=bad.py:Half", "scores 0.5, expected 1 (half)"),
    ("data.task=nowhere.py:Half", "no such file"),
    ("data.task=dir/bad:Half", "expected path/file.py:name or module:name"),
    ("advantages.name=bad.py:two", "expected a function of (groups), got two(a, b) ({file}:4)"),
    ("advantages.name=bad.py:crash", "no attribute 'nothing' ({file}:15 in crash)"),
    ("advantages.name=bad.py:scalar", "expected 4 finite numbers, one for each rollout, got 1.0"),
    ("advantages.name=bad.py:nothing", "expected 4 finite numbers, one for each rollout, got None"),
    ("advantages.name=bad.py:few", "one for each rollout, got array([1., 1., 1.]) of shape [3]"),
    ("advantages.name=bad.py:words", "one for each rollout, got ['a', 'b', 'c', 'd']"),
    ("data.task=sys:T", "expected a module that is a file, got <module 'sys' (built-in)>"),
    ("data.task=nosuch.mine:T", "No module named 'nosuch'"),
    ("data.task=nosuch:T", "no module nosuch in {folder}"),
    ("objective.name=bad.py:typo", "no attribute 'log_corr' ({file}:28 in <lambda>)"),
    ("data.task=bad.py:Chance", "draw gave two items for one seed"),
    ("data.task=bad.py:Silent", "reset returned None, expected the prompt, item.text="),
    ("report.trackers=[bad.py:two]", "function of (run folder, config, resume step), got two(a, b)"),
    (
        "report.trackers=[mine.py:Deaf]",
        "a class (with log and close) or function of (run folder, config, resume step), got",
    ),
    ("engine.kind=bad.py:two", "a class or function of (hf_config, engine config, device, max_length), got two(a, b)"),
    ("data.grader=bad.py:two", "a function of (rollout), or of (text, answer, options), got two(a, b) ({file}:4)"),
    ("data.task=syntax.py:x", "SyntaxError: '(' was never closed ({folder}/syntax.py:2)"),
    ("data.task=raises.py:x", "ZeroDivisionError: division by zero ({folder}/raises.py:2)"),
    ("data.task=exits:x", "SystemExit: 7 ({folder}/exits.py:2)"),
]


@pytest.mark.parametrize(("word", "message"), BAD, ids=[word for word, _ in BAD])
def test_a_mistake_is_one_line_before_anything_is_trained(
    word: str, message: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "bad.py").write_text(MISTAKES)
    for name, line in (("syntax", "x = ("), ("raises", "1 / 0"), ("exits", "raise SystemExit(7)")):
        (here / f"{name}.py").write_text(f"import math\n{line}\n")
    file_data = ["data.task=null", "data.path=rows.jsonl"] if word.startswith("data.grader") else []
    code, out, err = cli(capsys, "train", *BASE, *file_data, word, "run.dir=run")
    assert (code, out) == (2, "")
    assert message.format(file=here / "bad.py", folder=here) in err
    assert err.count("\n") == 1
    assert not (here / "run").exists()


def test_the_same_file_twice_is_one_module_and_another_of_that_name_is_another(here: Path) -> None:
    (here / "sub.dir").mkdir()
    (here / "sub.dir" / "mine.py").write_text("from helper import answer\n")
    (here / "sub.dir" / "helper.py").write_text("answer = 42\n")
    assert plugins.load("mine.py:Reverse", "x") is plugins.load(f"{here}/mine.py:Reverse", "x")
    assert plugins.load("sub.dir/../mine.py:Reverse", "x") is plugins.load("mine.py:Reverse", "x")
    assert plugins.load("sub.dir/mine.py:answer", "x") == 42  # with the file beside it


@pytest.mark.usefixtures("here")
def test_an_estimator_of_ones_own_gives_zero_where_all_rewards_are_equal() -> None:
    got = advantages.compute("mine.py:centred", [1.0, 0.0, 0.1, 0.1], [0, 0, 1, 1])
    assert got.tolist() == [0.5, -0.5, 0.0, 0.0]
    with pytest.raises(BadInput, match="did you mean grpo"):
        advantages.find("grpoo")


def test_defaults_of_a_task_that_only_draws(here: Path) -> None:
    task = tasks.get("mine.py:Reverse")
    assert isinstance(task, Task)
    assert (task.name, task.summary, task.describe()) == ("reverse", "A word backwards.", "")
    item = task.item(0, "train", 0)
    assert task.grader(item).options["task"] == f"{here}/mine.py:Reverse"
    assert task.score(item, f" {item.answer}\n")[0] == 1.0
    assert [task.score(item, wrong)[0] for wrong in task.near_misses(item)] == [0.0, 0.0]
