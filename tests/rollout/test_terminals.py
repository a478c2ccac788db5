"""The terminal environment in the real sandbox: right work earns 1, nearly right work 0, and no shell can talk its way to a reward.

Gold and near-miss episodes of generated items, tricks, limits, lost cages. Not covered: escapes (tests/sandbox/test_escapes.py).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from functools import partial

import pytest

from rollkeel.errors import RunStopped
from rollkeel.rollout.terminals import LIMITS, TerminalTools
from rollkeel.tasks.base import TaskItem
from rollkeel.tasks.environment import Step, ToolLost, play
from rollkeel.tasks.environments.terminal import GOALS, Terminal
from rollkeel_sandbox import Level, Sandbox, probe

pytestmark = pytest.mark.skipif(probe().plan().level < Level.NAMESPACES, reason="namespaces do not hold here")


@pytest.fixture(scope="module")
def tools() -> Iterator[TerminalTools]:
    made = TerminalTools(timeout_s=2.0)
    yield made
    made.close()


def terminal(tools: TerminalTools, **options: int) -> Terminal:
    made = Terminal(options)
    made.tools = tools
    return made


ITEM = TaskItem(
    text="", answer="echo hi > a.txt", metadata={"start": {"d/old.txt": "x\n"}, "near": "", "expected": {
        "d/old.txt": "73cb3858a687a8494ca3323053016282f3dad39d42cf62ca4e79dda2aac7d9ac",
        "a.txt": "98ea6e4f216f2fb4b69fff9b3a44842c38686ca685f3f55dc48c5d3fb1107be4",
    }},
)  # fmt: skip


SHOWN = "; ".join(f"echo '{digest}  ./{path}'" for path, digest in ITEM.metadata["expected"].items())
FORGED = f"find() {{ {SHOWN}; }}"
"""A session that shows what was asked for instead of doing it."""


def scores(family: Terminal, count: int, split: str) -> None:
    done = set()
    for index in range(count):
        item = family.item(0, split, index)
        steps = play(family, item, family.actions(item))
        assert (sum(s.reward for s in steps), steps[-1].done) == (1.0, True), (item.answer, steps[-1])
        for actions in family.mistakes(item):
            steps = play(family, item, actions)
            assert (sum(s.reward for s in steps), steps[-1].done) == (0.0, True), (actions, steps[-1])
        done |= {line.split()[0] for line in item.answer.split("\n")}
    assert len(done) > 4


def test_gold_episodes_earn_1_and_near_misses_0(tools: TerminalTools) -> None:
    scores(terminal(tools), 30, "train")


@pytest.mark.slow
def test_of_many_with_several_goals(tools: TerminalTools) -> None:
    for goals in (2, 4):
        scores(terminal(tools, goals=goals, files=6), 100, "eval")


def test_every_goal_is_drawn() -> None:
    family = Terminal({"goals": 4})
    said = " ".join(family.item(0, "train", i).text for i in range(40))
    words = ("Make the", "Add a last", "put ", "how many", "List in", "Move ", "Delete every", "sorted")
    assert len(words) == len(GOALS)
    assert [word for word in words if word not in said] == []


def test_the_session_lasts_and_is_looked_at_when_turns_are_over(tools: TerminalTools) -> None:
    family = terminal(tools, turns=3)
    steps = play(family, ITEM, ["cd d; x=hi", "cat old.txt; ls nothing", "echo $x > ../a.txt"])
    assert steps[0] == Step(text="\n$ ", detail="cd d; x=hi")
    assert steps[1].text.startswith("\nx\nls: ")
    assert steps[1].text.endswith("[exit code 2]\n$ ")
    assert (steps[2].done, steps[2].reward, steps[2].detail) == (True, 1.0, "all files as asked")


@pytest.mark.parametrize(
    "trick",
    [
        "find() { echo 98ea; }; sha256sum() { :; }; alias find='echo x'",
        "exit() { :; }; true",
        "trap 'echo hi > a.txt' EXIT; kill -9 $$",
        "exit() { for f in /proc/$$/fd/*; do echo ended 0 > $f; done 2>/dev/null; }; " + FORGED,
        "exit() { for f in /proc/$$/fd/*; do { echo shell 1; echo ended 0; } > $f; done 2>/dev/null; }; " + FORGED,
        "PATH=/nowhere; export PATH",
        "printf '%s  ./a.txt\\n' 98ea6e4f216f2fb4b69fff9b3a44842c38686ca685f3f55dc48c5d3fb1107be4 > a.txt",
        "echo hi > $'a.txt\\n'",
        "ln -s d/old.txt a.txt",
        "echo hi > a.txt; rm -r d; mkdir d; echo x > d/old.txt; touch d/more",
    ],
)
def test_talk_is_not_work(tools: TerminalTools, trick: str) -> None:
    steps = play(terminal(tools), ITEM, [trick, "done"])
    assert (steps[-1].done, steps[-1].reward) == (True, 0.0), steps


def test_what_a_command_does_to_itself_is_its_own_loss(tools: TerminalTools) -> None:
    steps = play(terminal(tools), ITEM, ["sleep 60", "echo hi > a.txt", "done"])
    assert steps[0].text.endswith("\n[stopped after 2 s]\n$ ")
    assert steps[-1].reward == 1.0
    greedy = f"python3 -Sc \"x = b'x' * ({LIMITS.memory_mb + 64} << 20); import time; time.sleep(5)\""
    steps = play(terminal(tools), ITEM, [greedy, "done"])
    assert (steps[0].done, steps[0].reward) == (True, 0.0)
    assert f"more than {LIMITS.memory_mb} MB" in steps[0].detail
    assert len(play(terminal(tools), ITEM, ["yes | head -c 50000"])[0].text) < 1100


def test_a_cage_that_dies_is_a_lost_tool_and_the_next_one_works() -> None:
    tools = TerminalTools()
    family = terminal(tools)
    try:
        tool = tools()
        (sandbox,) = tools._open
        for pid in sandbox.server_pids().values():
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(ToolLost):
            tool.run("sleep 1; sleep 1")  # its supervisor dies a moment later
        tool.close()
        assert sum(s.reward for s in play(family, ITEM, ["echo hi > a.txt", "done"])) == 1.0
        assert tools._open == {sandbox: 0}
    finally:
        tools.close()


def test_a_machine_that_isolates_too_little_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollkeel.rollout.terminals.Sandbox", partial(Sandbox, without=("seccomp",)))
    tools = TerminalTools()
    with pytest.raises(RunStopped, match="untrusted work needs isolation level namespaces"):
        tools()
    assert list(tools._open.values()) == [0]
    tools.close()


def test_more_terminals_than_a_sandbox_has_uids_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollkeel.rollout.terminals.EACH", 2)
    tools = TerminalTools()
    try:
        open_now = [tools() for _ in range(3)]
        assert list(tools._open.values()) == [2, 1]
        assert [tool.run(f"echo {i}") for i, tool in enumerate(open_now)] == ["0\n", "1\n", "2\n"]
        open_now[0].close()
        open_now[0].close()
        tools()
        assert list(tools._open.values()) == [2, 1]
    finally:
        tools.close()
