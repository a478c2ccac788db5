"""Environments that people already have must play by rollkeel's rules: the same episode for the same turns, every reward counted once, no turn
that the policy did not speak.

Gymnasium's interface is played without the library; with it, an id of its own is played too. verifiers is played by itself: a taskset
written as its documentation says. Skipped without these libraries. Not covered: their own environments' quality.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from tasks.test_tools import HERMES
from tiny_run import cli, rows

from rollkeel import tasks
from rollkeel.errors import BadInput
from rollkeel.models.presets import build_preset
from rollkeel.tasks.environment import Environment, play
from rollkeel.tasks.environments.tools import spoken

GAMES = """
class Guess:
    '''A number is to be guessed; solution() knows it.'''

    def __init__(self, most=3, newer=True):
        self.most, self.newer = most, newer

    def reset(self, seed=None):
        self.secret, self.closed = 1 + seed % self.most, False
        said = f"1 to {self.most}? #{seed}:"
        return (said, {}) if self.newer else said

    def step(self, action):
        right = action == str(self.secret)
        low = action.isascii() and action.isdigit() and int(action) < self.secret
        seen = "more" if low else "less"
        return (seen, float(right), right, False, {}) if self.newer else (seen, float(right), right, {})

    def solution(self):
        return [str(self.secret)]

    def close(self):
        self.closed = True


class Blind(Guess):
    solution = None


class Steps:
    '''A Discrete action space, and a picture of text.'''

    def reset(self, seed=None):
        self.at = 0
        return 0, {}

    def step(self, action):
        assert action in (0, 1)
        self.at += 2 * action - 1
        return self.at, float(self.at == 2), self.at == 2, self.at == -2, {}

    def render(self):
        return f"<{self.at}>"
"""


@pytest.fixture
def games(tmp_path: Path) -> str:
    (tmp_path / "games.py").write_text(GAMES)
    return str(tmp_path / "games.py")


def made(name: str, **options: Any) -> Environment[Any]:
    task = tasks.get(name, options)
    assert isinstance(task, Environment)
    return task


def test_an_episode_is_one_of_its_seed(games: str) -> None:
    for newer in (True, False):  # terminated and truncated, or done alone
        task = made("gymnasium", environment=f"{games}:Guess", arguments={"most": 5, "newer": newer}, prompt="Guess. ")
        item = task.item(0, "train", 3)
        assert task.item(0, "train", 3) == item
        assert item.text == f"Guess. 1 to 5? #{item.metadata['seed']}:"
        secret = int(item.answer)
        steps = play(task, item, [str(secret - 1), f" {secret + 1}\n", str(secret)])
        assert [(s.text, s.reward, s.done) for s in steps] == [
            ("more", 0.0, False),
            ("less", 0.0, False),
            ("", 1.0, True),
        ]
    report = tasks.check(task, 10)
    assert report.failures == ()


def test_turns_are_limited_and_words_are_actions(games: str) -> None:
    task = made("gymnasium", environment=f"{games}:Steps", words=["left", "right"], render=True, turns=4)
    item = task.item(0, "train", 0)
    assert item.text == "<0>"
    steps = play(task, item, ["right", "jump", "right"])
    assert [(s.text, s.reward, s.done) for s in steps] == [
        ("<1>", 0.0, False),
        ("error: expected one of left, right", 0.0, False),
        ("", 1.0, True),
    ]
    assert [s.done for s in play(task, item, ["left", "right", "left", "right", "left"])] == [False, False, False, True]
    assert [s.done for s in play(task, item, ["left", "left", "left"])] == [False, True]  # truncated


def test_what_cannot_be_played_is_one_line(games: str, monkeypatch: pytest.MonkeyPatch) -> None:
    blind = made("gymnasium", environment=f"{games}:Blind")
    with pytest.raises(BadInput, match=r"nobody knows right actions.*set sft.steps=0"):
        blind.gold(blind.item(0, "train", 0))
    for options, said in (
        ({}, "set data.options.environment"),
        ({"environment": f"{games}:Gues"}, "no 'Gues'.*did you mean Guess"),
    ):
        with pytest.raises(BadInput, match=said):
            tasks.get("gymnasium", options)
    for library in ("gymnasium", "verifiers"):
        for name in [m for m in sys.modules if m.split(".")[0] == library]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, library, None)
        option = {"gymnasium": "environment", "verifiers": "taskset"}[library]
        with pytest.raises(BadInput, match=rf"pip install 'rollkeel\[{library}\]'") as caught:
            tasks.get(library, {option: "Some-v1"})
        assert "\n" not in str(caught.value)


def test_a_game_is_trained_on(games: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["data.task=gymnasium", f"data.options={{environment: '{games}:Guess', turns: 2}}", "rollout.prompts=4"]
    words += ["rollout.samples=2", "sft.steps=3", "sft.batch_size=4", "run.steps=2", "eval.items=4", "eval.samples=1"]
    code, _, err = cli(capsys, "train", "default", *words, "sampling.max_new_tokens=6", f"run.dir={tmp_path / 'run'}")
    assert (code, err) == (0, "")
    assert rows(tmp_path / "run")[-1]["failures/grader"] == 0
    code, _, err = cli(capsys, "train", "default", *words[:1], f"data.options.environment={games}:Blind", "run.steps=1")
    assert (code, "set sft.steps=0" in err) == (2, True)


def installed(library: str) -> Any:
    return pytest.mark.skipif(not importlib.util.find_spec(library), reason=f"the extra {library} is not installed")


@installed("gymnasium")
def test_gymnasiums_own_ids_are_played() -> None:
    about = {"is_slippery": False, "render_mode": "ansi"}
    words = ["left", "down", "right", "up"]
    task = made("gymnasium", environment="FrozenLake-v1", arguments=about, words=words, render=True)
    item = task.item(0, "train", 0)
    assert "SFFF" in item.text.replace("\x1b[41mS\x1b[0m", "S")
    path = ["down", "down", "right", "right", "down", "right"]
    assert [s.reward for s in play(task, item, path)] == [0, 0, 0, 0, 0, 1]
    assert [s.done for s in play(task, item, ["right", "down", "down"])] == [False, True]  # a hole
    with pytest.raises(BadInput, match="Frozenlake-v1"):
        tasks.get("gymnasium", {"environment": "Frozenlake-v1"})


TASKSETS = """
import asyncio
import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=0.75)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.25)
    async def short(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) < 5)

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


def sums(kind, config, count=60):
    return [kind(SumData(prompt=f"{i} + {i} =", system_prompt="Add.", answer=str(2 * i)), config) for i in range(count)]
"""
PLAIN = """
class Sums(vf.Taskset[SumTask]):
    def load(self):
        return sums(SumTask, self.config.task)


__all__ = ["Sums"]
"""
TALK = """
class TalkTask(SumTask):
    @vf.reward
    async def grew(self, trace: vf.Trace) -> float:
        return float([m.content for m in trace.assistant_messages] == ["a", "b"])


class Talk(vf.SingleAgentEnv):
    async def run(self, task, agents):
        async with agents.agent.interaction(task) as talk:
            await asyncio.sleep(0)
            segment = await talk.turn(f"first {task.data.answer}")
            while not segment.terminated:
                segment = await talk.turn(f"you said {segment.last_reply}")
                if segment.last_reply == "b":
                    break


class Talks(vf.Taskset[TalkTask]):
    INFINITE = True

    def load(self):
        i = 0
        while True:
            yield TalkTask(SumData(answer=str(i)))
            i += 1


__all__ = ["Talk", "Talks"]
"""
TOOLS = """
class Book(vf.State):
    asked: list[str] = []


class Facts(vf.Toolset[vf.ToolsetConfig, Book]):
    TOOL_PREFIX = "facts"

    @vf.tool
    async def lookup(self, name: str) -> str:
        "Look up a number."
        self.state.asked.append(name)
        return {"one": "1", "two": "2"}[name]

    @vf.tool(name="count")
    def size(self) -> int:
        "How many there are."
        return 2


class FactTask(vf.Task[SumData, Book]):
    @classmethod
    def toolsets(cls, config):
        return [Facts(vf.ToolsetConfig())]

    @vf.reward
    async def looked(self, trace: vf.Trace) -> float:
        return float(trace.state.asked == ["one", "two"] and trace.last_reply == self.data.answer)


class FactSet(vf.Taskset[FactTask]):
    def load(self):
        return [FactTask(SumData(prompt=f"#{i}: one plus two?", answer=str(3))) for i in range(60)]


__all__ = ["FactSet"]
"""
BOXED = """
class BoxedTask(SumTask):
    @vf.reward
    async def ran(self, trace: vf.Trace, runtime: vf.Runtime) -> float:
        return 1.0


class Boxed(vf.Taskset[BoxedTask]):
    def load(self):
        return sums(BoxedTask, self.config.task)


__all__ = ["Boxed"]
"""


@pytest.fixture
def tasksets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, body in (("plain", PLAIN), ("talk", TALK), ("tools", TOOLS), ("boxed", BOXED)):
        (tmp_path / f"own_{name}.py").write_text(TASKSETS + body)
        monkeypatch.delitem(sys.modules, f"own_{name}", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@installed("verifiers")
def test_a_taskset_is_judged_by_its_own_rewards(tasksets: Path) -> None:
    task = made("verifiers", taskset="own-plain", answer="answer")
    item = task.item(0, "train", 0)
    i = item.metadata["index"]
    assert item.text == f"Add.\n\n{i} + {i} ="
    assert task.role == "user"
    for action, reward in ((str(2 * i), 1.0), ("x", 0.25), ("far too long", 0.0), ("", 0.25)):
        (step,) = play(task, item, [action])
        assert (step.reward, step.done) == (reward, True)
    assert play(task, item, ["x"])[0].detail == "right 0, short 0.25"
    splits = {s: {task.item(0, s, n).metadata["index"] for n in range(40)} for s in ("train", "eval", "sft")}
    assert splits["train"].isdisjoint(splits["eval"] | splits["sft"])
    assert task.score(item, str(2 * i))[0] == 1.0


@installed("verifiers")
def test_an_environments_own_run_leads_the_talk(tasksets: Path) -> None:
    task = made("verifiers", taskset="own_talk", problems=80)
    item = task.item(0, "train", 0)
    assert item.text == f"first {item.metadata['index']}"
    steps = play(task, item, ["a", "b"])
    assert [(s.text, s.done) for s in steps] == [("you said a", False), ("", True)]
    assert steps[-1].reward == 1.25  # `grew`, and `short` of SumTask
    cut = play(made("verifiers", taskset="own_talk", problems=80, turns=2), item, ["c", "c", "c"])
    assert [(s.done, s.reward) for s in cut] == [(False, 0.0), (True, 0.25)]  # cut, and judged as it stands
    with pytest.raises(BadInput, match=r"nobody knows right turns.*set sft.steps=0"):
        task.gold(item)


@installed("verifiers")
def test_tools_are_called_and_share_the_states_of_their_episode(tasksets: Path) -> None:
    task = made("verifiers", taskset="own_tools")
    assert task.role == "tool"
    shown = {s["function"]["name"]: s["function"] for s in task.schemas()}
    assert shown["facts_lookup"]["description"] == "Look up a number."
    assert list(shown["facts_lookup"]["parameters"]["properties"]) == ["name"]
    assert set(shown) == {"facts_lookup", "facts_count"}
    item = task.item(0, "train", 0)
    calls = [spoken("facts_lookup", name="one") + spoken("facts_lookup", name="two"), spoken("facts_count"), "3"]
    for _ in range(2):  # an episode knows nothing of the one before
        steps = play(task, item, calls)
        assert [(s.text, s.more, s.reward) for s in steps] == [("1", ("2",), 0.0), ("2", (), 0.0), ("", (), 1.0)]
    assert play(task, item, [spoken("facts_lookup", name="ten"), "3"])[0].text.startswith(
        "error: facts_lookup: KeyError"
    )
    assert play(task, item, ["3"])[-1].reward == 0.0
    endless = [spoken("facts_count")] * 40
    assert len(play(task, item, endless)) == 32


@installed("verifiers")
def test_what_needs_a_container_is_refused(tasksets: Path) -> None:
    for options, said in (
        ({"taskset": "own_boxed"}, r"needs a runtime \(ran\)"),
        ({"taskset": "nowhere_at_all"}, "nowhere_at_all"),
        ({"taskset": "own_plain", "config": {"taskset": {"nonsense": 1}}}, "nonsense"),
    ):
        with pytest.raises(BadInput, match=said) as caught:
            tasks.get("verifiers", options)
        assert "\n" not in str(caught.value)


@installed("verifiers")
def test_a_taskset_is_trained_on(tasksets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["data.task=verifiers", f"data.options={json.dumps({'taskset': 'own_plain', 'answer': 'answer'})}"]
    words += ["rollout.prompts=4", "rollout.samples=2", "sft.steps=3", "sft.batch_size=4", "run.steps=2"]
    words += ["eval.items=4", "eval.samples=1", "sampling.max_new_tokens=6", "run.dir=run"]
    code, _, err = cli(capsys, "train", "default", *words)
    assert (code, err) == (0, "")
    assert rows(tasksets / "run")[-1]["failures/grader"] == 0
    assert rows(tasksets / "run")[-1]["reward/mean"] > 0  # a short answer earns a quarter


@installed("verifiers")
def test_a_chat_template_shows_its_tools(tasksets: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, tokenizer = build_preset("tiny-qwen3-moe")
    tokenizer.chat_template = HERMES
    model.save_pretrained("model")
    tokenizer.save_pretrained("model")
    words = ["data.task=verifiers", "data.options={taskset: own_tools, turns: 3}", "model.path=model"]
    words += ["rollout.prompts=2", "rollout.samples=2", "sft.steps=0", "run.steps=1", "eval.every=0", "eval.items=2"]
    code, _, err = cli(capsys, "train", *words, "data.chat_template=true", "run.dir=run")
    assert (code, err) == (0, "")
    prompts = pq.read_table("run/rollouts/step_000001.parquet").column("prompt_text").to_pylist()
    assert all('"name": "facts_lookup"' in prompt and "one plus two?" in prompt for prompt in prompts)
    code, _, err = cli(capsys, "train", *words, "run.dir=other")
    assert (code, "data.chat_template: this environment speaks as tool" in err) == (2, True)
