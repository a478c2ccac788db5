"""Turn by turn, ids must stay what was sampled, and a run must not depend on how long an environment thinks or whether it breaks.

A real engine on a tiny model where arithmetic matters, a scripted one where every token must be known; environments with known
behaviour: slow, broken, hanging, losing their tool. Not covered: real terminals (tests/sandbox/test_environment_terminal.py).
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "engines"))

from engine_kit import engine_of, model_of
from test_collect import ScriptedEngine, span_of

from rollkeel import rewards
from rollkeel.errors import EngineFailure, GraderFailure, Interrupted
from rollkeel.models.presets import EOS, build_tokenizer
from rollkeel.rollout.budgeted import BudgetedRollouts
from rollkeel.rollout.collect import collect, issue
from rollkeel.rollout.episodes import Episodes, answers, turns_of
from rollkeel.rollout.pool import PoolRules
from rollkeel.tasks.base import TaskItem
from rollkeel.tasks.environment import Environment, EnvironmentOptions, Step, Tool, ToolLost
from rollkeel.tasks.turns import Dialogue
from rollkeel.types import GraderSpec, Prompt, Request, Rollout, SamplingParams, Segment, Status

TOKENIZER: Any = build_tokenizer()
SAMPLING = SamplingParams(max_new_tokens=24, stop_token_ids=(EOS,), seed=7)
Answer = Callable[[str, int], Step]


class Toy(Environment[EnvironmentOptions]):
    """Answers `(action, turn number)` as it is told to; `before` is called in its thread at every step."""

    name, summary, options_type = "toy", "for tests", EnvironmentOptions
    answer: Answer = staticmethod(lambda action, n: Step(text=f"<{n}:{action}>", reward=n / 8, done=n == 3))
    before: Callable[[Toy], None] = staticmethod(lambda toy: None)

    def draw(self, rng: random.Random) -> TaskItem:
        raise AssertionError("items are made by hand here")

    def actions(self, item: TaskItem) -> Sequence[str]:
        return ["x"]

    mistakes = actions  # type: ignore[assignment]

    def reset(self, item: TaskItem) -> str:
        self.of, self.turn, self.heard = item, 0, list[str]()
        return item.text

    def step(self, action: str) -> Step:
        self.before(self)
        self.turn += 1
        self.heard.append(action)
        return self.answer(action, self.turn)


def toy(**changes: Any) -> Toy:
    made = Toy()
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def prompts(count: int, grader: str = "environment") -> list[Prompt]:
    items = [TaskItem(text=f"{i}?", answer="") for i in range(count)]
    return [
        Prompt(
            id=f"p{i}", index=i, text=item.text, token_ids=np.array(TOKENIZER(item.text)["input_ids"]), answer="", task="toy",
            grader=GraderSpec(name=grader, options={"task": "toy", "options": {}, "item": item.to_json()}),
        )
        for i, item in enumerate(items)
    ]  # fmt: skip


def episodes(environment: Environment[Any], **changes: Any) -> Episodes:
    settings = {"turn_tokens": 0, "threads": 3, "deadline_s": 5.0, **changes}
    return Episodes(environment, Dialogue(TOKENIZER, chat=False), **settings)


class Says(ScriptedEngine):
    """The n-th turn of a rollout is `words[n]`, and the end-of-sequence token unless that is cut at the limit."""

    def __init__(self, *words: str, version: int = 4) -> None:
        super().__init__([])
        self.words, self.version = words, version
        self.asked: list[Request] = []
        self.turns: dict[int, int] = {}

    def poll(self, timeout_s: float) -> list[Segment]:
        now, self.requests = self.requests, []
        return [self.said(r) for r in now[::-1]]

    def said(self, request: Request) -> Segment:
        self.asked.append(request)
        n = self.turns[request.id] = self.turns.get(request.id, -1) + 1
        ids = [*TOKENIZER(self.words[n])["input_ids"], EOS]
        room = request.sampling.max_new_tokens - len(request.prefix)
        status = Status.FINISHED if len(ids) <= room else Status.LENGTH
        return Segment(request_id=request.id, span=span_of(ids[:room], self.version), status=status)


def play(environment: Environment[Any], engine: Any, count: int = 2, sampling: SamplingParams = SAMPLING, **changes: Any) -> list[Rollout]:  # fmt: skip
    gather = episodes(environment, **changes)
    try:
        return gather(engine, issue(prompts(count), 1, sampling, 0, engine), TOKENIZER, deadline_s=5.0)
    finally:
        gather.close()


def test_ids_stay_as_sampled_and_the_text_between_is_marked() -> None:
    engine = Says("a", "bb", "c")
    first, second = play(toy(), engine)
    assert first.text == "a<eos><1:a>bb<eos><2:bb>c"
    assert TOKENIZER.decode(first.span.token_ids[first.span.own]) == "a<eos>bb<eos>c<eos>"
    assert first.span.sampled is not None
    assert first.span.logprobs[~first.span.sampled].tolist() == [0.0] * 11
    assert set(first.span.versions.tolist()) == {4}
    assert (first.status, first.reward, first.detail) == (Status.FINISHED, 6 / 8, "")
    assert first.sampling == SAMPLING
    assert (second.id, second.reward) == (1, 6 / 8)
    third = [r for r in engine.asked if r.id == 0][2]
    assert TOKENIZER.decode(third.prefix.token_ids) == "a<eos><1:a>bb<eos><2:bb>"
    assert np.array_equal(third.prefix.token_ids, first.span.token_ids[: len(third.prefix)])
    graded = rewards.Graders().grade([first])[0]
    assert (graded.reward, graded.status) == (6 / 8, Status.FINISHED)


def test_ids_that_no_tokenizer_would_make_survive() -> None:
    """Broken UTF-8, stop tokens inside: what was sampled stands in the next request as it is."""
    odd = [8 + 0xE2, 8 + 0x82, 1, 3, EOS]

    class Odd(Says):
        def said(self, request: Request) -> Segment:
            super().said(request)
            return Segment(request_id=request.id, span=span_of(odd, 4), status=Status.FINISHED)

    engine, heard = Odd(*"xxx"), []
    done = play(toy(before=lambda t: heard.append(t.heard[-1:])), engine, 1)[0]
    assert engine.asked[1].prefix.token_ids[:5].tolist() == odd
    assert done.span.token_ids[done.span.own].tolist() == odd * 3
    assert heard[1] == [TOKENIZER.decode(odd[:-1])]


@pytest.mark.parametrize(
    ("limits", "text", "status", "reward"),
    [
        ({"sampling": 6}, "aa<eos><1:aa>bb<eos>", Status.LENGTH, 3 / 8),  # both turns whole, no token left for a third
        ({"sampling": 5}, "aa<eos><1:aa>bb", Status.LENGTH, 3 / 8),
        ({"sampling": 9}, "aa<eos><1:aa>bb<eos><2:bb>cc", Status.FINISHED, 6 / 8),
        ({"turn_tokens": 1}, "a<1:a>b<2:b>c", Status.LENGTH, 6 / 8),  # a turn that is cut is an action too
        ({"max_length": 14}, "aa<eos><1:aa>bb", Status.LENGTH, 3 / 8),
    ],
)
def test_limits_end_an_episode_with_the_reward_so_far(
    limits: dict[str, int], text: str, status: Status, reward: float
) -> None:
    engine = Says("aa", "bb", "cc")
    engine.capabilities = replace(engine.capabilities, max_length=limits.get("max_length", 64))
    sampling = replace(SAMPLING, max_new_tokens=limits.get("sampling", 24))
    done = play(toy(), engine, 1, sampling, turn_tokens=limits.get("turn_tokens", 0))[0]
    assert (done.status, done.reward) == (status, reward)
    assert TOKENIZER.decode(done.span.token_ids).removesuffix("<eos>") == text.removesuffix("<eos>")
    assert done.span.sampled is None or done.span.sampled[-1]  # nothing behind the last turn


def test_one_turn_is_the_ordinary_path_to_the_bit() -> None:
    def score(text: str) -> float:
        return len(text) / 100

    engine = engine_of(model_of(), max_length=64)
    sampling = SamplingParams(max_new_tokens=12, stop_token_ids=tuple(range(2, 40)), seed=3, temperature=1.3)
    plain = collect(engine, issue(prompts(6), 4, sampling, 0, engine), TOKENIZER, deadline_s=30)
    gather = episodes(toy(answer=lambda action, n: Step(reward=score(action), done=True, detail="once")))
    played = gather(engine, issue(prompts(6), 4, sampling, 0, engine), TOKENIZER, deadline_s=30)
    gather.close()
    assert {r.status for r in plain} == {Status.FINISHED, Status.LENGTH}
    for a, b in zip(plain, played, strict=True):
        for name in ("token_ids", "logprobs", "kept_mass", "versions", "kv_versions"):
            assert getattr(a.span, name).tobytes() == getattr(b.span, name).tobytes()
        assert (b.span.sampled, b.reward) == (None, score(b.text))
        assert replace(b, span=a.span, prompt=a.prompt, reward=None, detail="") == a


def test_how_long_environments_think_changes_no_bit() -> None:
    def once(seed: int) -> list[Rollout]:
        rng = random.Random(seed)
        engine = engine_of(model_of(), max_length=96, slots=5)
        sampling = SamplingParams(max_new_tokens=20, stop_token_ids=tuple(range(2, 60)), seed=1)
        environment = toy(before=lambda t: time.sleep(rng.random() * 0.01 * seed))
        return play(environment, engine, 10, sampling, turn_tokens=6)

    quick, slow = once(0), once(1)
    assert len({len(r.span) for r in quick}) > 3
    for a, b in zip(quick, slow, strict=True):
        assert a.span.logprobs.tobytes() == b.span.logprobs.tobytes()
        assert (a.text, a.status, a.reward) == (b.text, b.status, b.reward)


def test_steps_go_on_beside_each_other() -> None:
    """Three threads, three steps that only end together: one after the other they would never."""
    together = threading.Barrier(3, timeout=5)
    done = play(toy(before=lambda t: together.wait() and None), Says("a", "b", "c"), 3)
    assert [r.reward for r in done] == [6 / 8] * 3


def test_a_broken_environment_is_no_reward_and_stops_nobody() -> None:
    def broken(toy: Toy) -> None:
        if toy.of.text == "1?" and toy.turn == 1:
            raise KeyError("board\nlost")

    one, two, three = play(toy(before=broken), Says("a", "b", "c"), 3)
    assert (two.status, two.reward) == (Status.GRADER_FAILURE, None)
    at = f"{__file__}:{broken.__code__.co_firstlineno + 2} in step"
    assert two.detail == f"environment toy: turn 2: KeyError: 'board\\nlost' ({at})"
    assert [r.reward for r in (one, three)] == [6 / 8] * 2
    assert rewards.FailureBudget(0.5).check([one, two, three])["failures/grader"] == 1
    with pytest.raises(GraderFailure, match="environment toy: turn 2: KeyError"):
        rewards.FailureBudget(0.1).check([one, two, three])


def test_one_that_hangs_is_given_up_and_named() -> None:
    def hang(toy: Toy) -> None:
        if toy.of.text in ("2?", "4?") and toy.turn == 1:
            time.sleep(30)

    began = time.monotonic()
    done = play(toy(before=hang), Says("a", "b", "c"), 6, threads=2, deadline_s=0.5)
    assert time.monotonic() - began < 10
    failed = "environment toy: turn 2: no answer for 0.5 s (6 times reward.graders.deadline_s)"
    assert [r.detail for r in done] == ["", "", failed, "", failed, ""]
    assert [r.reward for r in done] == [6 / 8, 6 / 8, None, 6 / 8, None, 6 / 8]  # 0 and 1 waited behind those that hang
    assert {r.status for r in (done[2], done[4])} == {Status.GRADER_FAILURE}


@dataclass
class FakeTool:
    """Counts its commands; breaks at those named."""

    log: list[str]
    breaks: dict[str, int]
    said: list[str] = field(default_factory=list)

    def run(self, command: str) -> str:
        if self.breaks.get(command, 0) > 0:
            self.breaks[command] -= 1
            raise ToolLost("the cage died")
        self.said.append(command)
        return " ".join(self.said)

    inspect = run

    def close(self) -> None:
        self.log.append(f"closed after {' '.join(self.said)}")


@dataclass
class FakeTools:
    breaks: dict[str, int]
    log: list[str] = field(default_factory=list)
    opened: int = 0

    def __call__(self) -> Tool:
        self.opened += 1
        return FakeTool(self.log, self.breaks)

    def close(self) -> None:
        self.log.append("all closed")


class Shell(Toy):
    uses_tool = True
    held: Tool | None = None

    def reset(self, item: TaskItem) -> str:
        self.held = self.tool()
        self.held.run("setup")
        return super().reset(item)

    def step(self, action: str) -> Step:
        assert self.held is not None
        self.turn += 1
        return Step(text=self.held.run(action), reward=0.25, done=self.turn == 3, detail=f"turn {self.turn}")

    def close(self) -> None:
        if self.held is not None:
            self.held.close()
        self.held = None


@pytest.mark.parametrize("at", ["setup", "b", "c"])
def test_a_lost_tool_is_replaced_once_and_its_actions_played_again(at: str) -> None:
    environment = Shell()
    environment.tools = tools = FakeTools({at: 1})
    done = play(environment, Says("a", "b", "c"), 1)[0]
    assert done.text == "a<eos>setup ab<eos>setup a bc"
    assert (done.status, done.reward, done.detail) == (Status.FINISHED, 0.75, "turn 3")
    first = {"setup": "", "b": "setup a", "c": "setup a b"}[at]
    assert tools.log == [f"closed after {first}", "closed after setup a b c", "all closed"]


def test_a_tool_lost_twice_is_a_failure() -> None:
    environment = Shell()
    environment.tools = FakeTools({"b": 2})
    done = play(environment, Says("a", "b", "c"), 1)[0]
    assert (done.status, done.reward) == (Status.GRADER_FAILURE, None)
    assert done.detail.startswith("environment shell: turn 2: ToolLost: the cage died (")
    assert done.text == "a<eos>setup ab"


def test_engine_failures_interrupts_and_silence_are_those_of_collecting() -> None:
    class Failing(Says):
        def said(self, request: Request) -> Segment:
            found = super().said(request)
            failed = self.turns[request.id] == 1 and request.id == 0
            return replace(found, status=Status.ENGINE_FAILURE, detail="worker died") if failed else found

    one, two = play(toy(), Failing("a", "b", "c"))
    assert (one.status, one.detail, one.reward) == (Status.ENGINE_FAILURE, "worker died", None)
    assert two.reward == 6 / 8

    class Silent(Says):
        def poll(self, timeout_s: float) -> list[Segment]:
            return super().poll(timeout_s) if len(self.asked) < 2 else []

    gather = episodes(toy())
    with pytest.raises(EngineFailure, match="waiting for 2 of 2 rollouts"):
        gather(Silent("a", "b"), issue(prompts(2), 1, SAMPLING, 0, Says()), TOKENIZER, deadline_s=0.2)
    with pytest.raises(Interrupted):
        gather(Says("a", "b"), issue(prompts(2), 1, SAMPLING, 0, Says()), TOKENIZER, deadline_s=5, should_stop=lambda: True)  # fmt: skip
    gather.close()


@pytest.mark.parametrize(
    ("ids", "sampled", "limit", "turns"),
    [
        ([], [], 0, [[]]),
        ([5, 6], [1, 1], 0, [[5, 6]]),
        ([5, EOS], [1, 1], 0, [[5, EOS], []]),
        ([5, EOS, 9, 9, 6], [1, 1, 0, 0, 1], 0, [[5, EOS], [6]]),
        ([5, EOS, 6], [1, 1, 1], 0, [[5, EOS], [6]]),  # the environment had nothing to say
        ([5, 6, 7, 8], [1, 1, 1, 1], 2, [[5, 6], [7, 8], []]),
        ([5, 9, 6, 7, 9], [1, 0, 1, 1, 0], 2, [[5], [6, 7], []]),
    ],
)
def test_turns_are_read_off_the_tokens(ids: list[int], sampled: list[int], limit: int, turns: list[list[int]]) -> None:
    span = replace(span_of(ids, 4), sampled=np.array(sampled, bool))
    assert turns_of(span, (EOS,), limit) == turns
    if all(sampled):
        assert turns_of(replace(span, sampled=None), (EOS,), limit) == turns


def said(asked: Rollout, word: str, status: Status = Status.FINISHED) -> Rollout:
    """`asked` with a turn of the model, or the beginning of one, behind it."""
    ids = [*TOKENIZER(word)["input_ids"], *([EOS] if status is Status.FINISHED else [])]
    return replace(asked, span=asked.span.append(span_of(ids, 4)), status=status)


def test_a_parked_episode_is_played_again_from_its_tokens() -> None:
    """Parked in the middle of its second turn: its tool is closed, and a new one brought to where it was."""
    environment, engine = Shell(), Says(version=6)
    environment.tools = tools = FakeTools({})
    gather = episodes(environment, turn_tokens=4)
    table = gather.table(engine, TOKENIZER)
    rollout = issue(prompts(1), 1, SAMPLING, 0, engine)[0]
    assert table.take(said(table.asked(rollout), "a")) is None
    (answered,) = answers(table, lambda: False)
    asked = table.asked(answered)
    assert asked.sampling.max_new_tokens == len(asked.span) + 4
    parked = table.take(said(asked, "b", Status.PARKED))
    assert parked is not None
    assert (parked.sampling, parked.status, parked.reward) == (SAMPLING, Status.PARKED, None)
    assert tools.log == ["closed after setup a"]
    table = gather.table(engine, TOKENIZER)
    asked = table.asked(parked)
    assert asked.sampling.max_new_tokens == len(asked.span) + 3  # one token of this turn is there
    assert table.take(said(asked, "c")) is None
    (answered,) = answers(table, lambda: False)
    kept = table.park(answered)  # between two turns: with what the tool said
    assert TOKENIZER.decode(kept.span.token_ids) == "a<eos>setup abc<eos>setup a bc"
    assert tools.log[1:] == ["closed after setup a bc"]
    table = gather.table(engine, TOKENIZER)
    assert table.take(said(table.asked(kept), "d")) is None
    (done,) = answers(table, lambda: False)
    assert (done.status, done.reward, done.detail) == (Status.FINISHED, 0.75, "turn 3")
    assert tools.log[2:] == ["closed after setup a bc d"]
    gather.close()


def test_an_episode_that_ends_earlier_when_played_again_is_broken() -> None:
    times = [0]

    def moody(action: str, n: int) -> Step:
        times[0] += 1
        return Step(done=times[0] == 3)  # the first step of the second time

    gather = episodes(toy(answer=moody))
    table, rollout = gather.table(Says(), TOKENIZER), issue(prompts(1), 1, SAMPLING, 0, Says())[0]
    for word in "ab":
        assert table.take(said(table.asked(rollout), word)) is None
        (rollout,) = answers(table, lambda: False)
    parked = table.park(rollout)
    assert table.take(said(table.asked(parked), "c")) is None
    (failed,) = answers(table, lambda: False)
    assert (failed.status, failed.reward) == (Status.GRADER_FAILURE, None)
    assert "task toy: played again, it ended after 1 of 3 actions" in failed.detail
    gather.close()


def test_no_tool_outlives_an_iteration_of_the_pool() -> None:
    """Finished, parked, purged and stopped in the middle: whatever became of an episode, its tool is closed."""
    environment, engine = Shell(), engine_of(model_of(), max_length=64, slots=3)
    tools = FakeTools({})
    environment.tools = tools
    rules = PoolRules(budget=30, capacity=6, retention=0, samples=2)
    gather, pooled = episodes(environment, turn_tokens=5), BudgetedRollouts(rules, lambda i: prompts(i + 1)[i])
    sampling = SamplingParams(max_new_tokens=18, stop_token_ids=tuple(range(2, 60)), seed=1)
    lost = 0
    for stop in (False, False, False, True):
        before = tools.opened
        steps = iter(range(99))
        arguments = {"deadline_s": 30, "gather": gather, "should_stop": lambda: stop and next(steps) > 8}  # noqa: B023
        if stop:
            with pytest.raises(Interrupted):
                pooled.sample(engine, sampling, TOKENIZER, **arguments)
        else:
            part = pooled.sample(engine, sampling, TOKENIZER, **arguments)
            assert {r.status for r in part.ended} <= {Status.FINISHED, Status.LENGTH}
            assert sum(r.span.own_count for r in part.ended) == pooled.pool.spent
            assert any(r.span.sampled is not None for r in part.ended)
            lost += len(part.purged)
            pooled.settle(part.ended)
        assert len(tools.log) == tools.opened > before
    assert lost > 0
    gather.close()
