"""Who grades, and where an episode is played, must decide nothing: not a bit of a reward, not a word of a detail, whoever dies.

Real actors on a local Ray, graders and environments with known behaviour, some of which end their process. Not covered: several hosts,
terminals of the sandbox inside an actor, and what single graders say (tests/rewards).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cluster_kit import ONE, kill_when, run_of
from tiny_run import assert_same, events

sys.path.insert(0, str(Path(__file__).parent.parent / "rewards"))
from test_graders import rollout

from rollkeel.cluster import graders as of_actors
from rollkeel.cluster.scorer import ActorScorer, ScorerActor, reward_models
from rollkeel.config import Config, GradersConfig, ModelConfig
from rollkeel.errors import BadInput, GraderFailure
from rollkeel.models.loading import load_policy
from rollkeel.recipe import load
from rollkeel.rewards import Graders
from rollkeel.tasks import get
from rollkeel.tasks.environment import ToolLost, play
from rollkeel.train.preferences import RewardModel
from rollkeel.types import GraderSpec, Rollout, Status, TokenSpan

OWN = """
import os, time
from rollkeel.tasks.environment import Step, ToolLost
from rollkeel.tasks.environments.sudoku_turns import SudokuTurns

def says(rollout):
    what = rollout.text
    if what == "die":
        time.sleep(0.2)  # what came with it has begun
        os._exit(3)
    if what == "raise":
        raise ValueError("no verdict")
    if what.startswith("sleep"):
        time.sleep(float(what.split()[1]))
    return float(len(rollout.span)), what

def three(text, answer, options):
    return float(len(text)), os.path.basename(__file__)
"""
SETTINGS = GradersConfig(workers=1, deadline_s=1.0)
DIGITS = {"side": 4, "holes": 3}


class Actors:
    """Actors as a run has them, and what they told."""

    def __init__(self, count: int, renewals: int, config: Config) -> None:
        import ray

        from rollkeel.cluster.grader import GraderActor

        self.told = list[tuple[str, dict[str, Any]]]()
        environment = {"env_vars": {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}}
        kind: Any = ray.remote(max_restarts=0, num_cpus=0.5, runtime_env=environment)(GraderActor)
        about = (count, SETTINGS, renewals, lambda what, **about: self.told.append((what, about)))
        self.made = of_actors.GraderActors(lambda index: kind.remote(config), *about)
        self.made.begin(lambda name, versions: None)

    def pid(self, index: int) -> int:
        return self.made.parts[index].about["pid"]

    def events(self) -> list[str]:
        return [what for what, _ in self.told]


@pytest.fixture(scope="module")
def config() -> Config:
    return load(None, ["data.task=sudoku_turns", "reward.graders.workers=1", "reward.graders.deadline_s=1"])


@pytest.fixture(scope="module")
def actors(ray_cluster: None, config: Config) -> Iterator[Actors]:
    made = Actors(2, 50, config)
    yield made
    made.made.close()


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("own") / "own.py"
    file.write_text(OWN)
    return str(file)


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def graded(given: list[Rollout], elsewhere: Any = None, **about: Any) -> tuple[list[Any], dict[str, float]]:
    with Graders(SETTINGS, elsewhere=elsewhere, **{"regrade": 0.5, **about}) as made:
        found = made.grade(given)
        metrics, _ = made.report()
    return [(r.id, r.reward, r.detail, r.status, r.span is g.span) for r, g in zip(found, given, strict=True)], metrics


def batch(own: str) -> list[Rollout]:
    """All that actors do, and some that they do not, in mixed order."""
    specs = [
        GraderSpec(name="exact"),
        GraderSpec(name=f"{own}:says"),
        GraderSpec(name=f"{own}:three"),
        GraderSpec(name="mix", options={"parts": [{"grader": f"{own}:three", "weight": 0.25}, {"grader": "numeric"}]}),
        GraderSpec(name="code", options={"tests": [{"stdin": "2", "stdout": "4"}]}),
    ]
    texts = ("4", "raise", "print(int(input()) * 2)")
    given = [rollout(texts[i % 3], grader=specs[i % len(specs)], id=i) for i in range(30)]
    return [replace(r, span=TokenSpan.empty().given(np.arange(i % 4), 0)) for i, r in enumerate(given)]


def test_actors_give_the_bits_of_this_process(actors: Actors, own: str) -> None:
    here, metrics = graded(batch(own))
    there, measured = graded(batch(own), actors.made)
    assert there == here
    assert {reward for _, reward, *_ in here} >= {0.0, 1.0, 2.0, 3.0}  # an own grader sees the tokens
    assert {status for _, _, _, status, _ in here} == {Status.FINISHED, Status.GRADER_FAILURE}
    timeless = [{k: v for k, v in found.items() if not k.startswith("time/")} for found in (metrics, measured)]
    assert timeless[0] == timeless[1]
    assert measured.keys() == metrics.keys()
    assert max(v for k, v in measured.items() if k.startswith("time/grader_")) < 60  # on the clock of this process


def test_a_function_that_only_this_process_knows_is_called_here(
    actors: Actors, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rollkeel.rewards import graders

    monkeypatch.setattr(graders, "_GRADERS", dict(graders._GRADERS))
    graders.register("here", lambda r: float(os.getpid()))
    ((_, reward, *_),), _ = graded([rollout("4", grader="here")], actors.made)
    assert reward == os.getpid()


def test_one_that_takes_too_long_is_interrupted_and_the_actor_goes_on(actors: Actors, own: str) -> None:
    given = [rollout(text, grader=f"{own}:says", id=i) for i, text in enumerate(("sleep 30", "4"))]
    (late, good), _ = graded(given, actors.made, regrade=0.0)
    assert late[1:4] == (
        None,
        "grader own.py:says: no answer for 1 s (reward.graders.deadline_s)",
        Status.GRADER_FAILURE,
    )
    assert good[1:3] == (0.0, "4")
    assert "grader_lost" not in actors.events()


def test_ctrl_c_in_a_terminal_which_reaches_all_processes_ends_no_actor(actors: Actors, own: str) -> None:
    given, before = [rollout("sleep 0.2", grader=f"{own}:says", id=i) for i in range(4)], len(actors.told)
    with Graders(SETTINGS, regrade=0.0, elsewhere=actors.made) as graders:
        graders.begin(given)
        for index in range(2):
            os.kill(actors.pid(index), signal.SIGINT)
        assert [r.detail for r in graders.grade(given)] == ["sleep 0.2"] * 4
    assert len(actors.told) == before


def test_a_killed_one_is_replaced_and_nothing_is_lost(actors: Actors, own: str) -> None:
    given = [rollout(f"sleep 0.{i % 3}", grader=f"{own}:says", id=i) for i in range(20)]
    here, _ = graded(given)
    made, before = actors.made, len(actors.told)
    with Graders(SETTINGS, regrade=0.5, elsewhere=made) as graders:
        graders.begin(given)
        until(lambda: bool(made.parts[1].flying))
        os.kill(actors.pid(1), signal.SIGKILL)
        found = graders.grade(given)
    assert [(r.id, r.reward, r.detail, r.status, True) for r in found] == here
    until(lambda: actors.events()[before:] == ["grader_lost", "actor", "grader_renewed"])
    assert actors.told[before][1]["name"] == "grader-1"


def test_a_rollout_that_is_graded_twice_at_once_survives_a_lost_actor(actors: Actors) -> None:
    """Built-in graders are sent no tokens: two gradings of one rollout are equal, and still two."""
    given = [rollout("4", grader="exact", id=i) for i in range(8)]
    here, _ = graded(given)
    for index in range(2):  # or the other one may have done them all before the thread of this one wakes up
        os.kill(actors.pid(index), signal.SIGSTOP)
    with Graders(SETTINGS, regrade=1.0, elsewhere=actors.made) as graders:
        with actors.made._more:  # or its thread may wake up for the first of them alone
            graders.begin(given)
        until(lambda: len(actors.made.parts[1].flying) > 1)
        os.kill(actors.pid(1), signal.SIGKILL)
        os.kill(actors.pid(0), signal.SIGCONT)
        found = graders.grade(given)
    assert [(r.id, r.reward, r.detail, r.status, True) for r in found] == here


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_breaks_the_thread_of_an_actor_ends_the_step_in_one_line(
    ray_cluster: None, config: Config, own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Actors(1, 0, config)

    def broken(*_: Any) -> bool:
        raise ValueError("two\nlines")

    monkeypatch.setattr(made.made, "_replaced", broken)
    given = [rollout("die", grader=f"{own}:says")]
    with pytest.raises(GraderFailure) as failed:
        graded(given, made.made)
    assert str(failed.value) == "graders: what speaks to grader-0 broke: ValueError: two"
    made.made.close()


def test_a_stopped_one_is_replaced(actors: Actors, own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for part in actors.made.parts:
        monkeypatch.setattr(part, "patience", of_actors.Patience(0.5))
    before = len(actors.told)
    os.kill(actors.pid(0), signal.SIGSTOP)
    given = [rollout("4", grader=f"{own}:says", id=i) for i in range(8)]
    assert graded(given, actors.made)[0] == graded(given)[0]
    until(lambda: "grader_renewed" in actors.events()[before:])
    assert actors.told[before][0] == "grader_lost"
    assert "said nothing for 1.5 s" in actors.told[before][1]["why"]


def test_a_grading_that_kills_two_actors_has_failed(actors: Actors, own: str) -> None:
    texts = ["4", "die", "four", "raise"] * 2
    texts[5] = "4"
    given = [rollout(text, grader=f"{own}:says", id=i) for i, text in enumerate(texts)]
    before = len(actors.told)
    found, _ = graded(given, actors.made, regrade=0.0)
    others, _ = graded([r for r in given if r.text != "die"], regrade=0.0)
    assert found.pop(1)[1:4] == (None, "grader own.py:says: two actors died of it", Status.GRADER_FAILURE)
    assert found == others
    assert actors.events()[before:].count("grader_lost") == 2


def test_an_episode_goes_on_where_it_was_in_another_actor(actors: Actors, config: Config) -> None:
    environment: Any = get("sudoku_turns", config.data.options)
    items = [environment.item(0, "train", i) for i in range(6)]
    wrong = [[*environment.actions(item)[:-1], "x"] for item in items]

    def played(number: int) -> list[Any]:
        episode, steps = actors.made.opened("sudoku_turns"), []
        try:
            assert episode.reset(items[number]) == items[number].text
            for turn, action in enumerate(wrong[number]):
                if number == 0 and turn == 1:
                    assert episode._home is not None
                    os.kill(actors.pid(episode._home[0].index), signal.SIGKILL)
                steps.append(episode.step(action))
        finally:
            episode.close()
        return steps

    with ThreadPoolExecutor(6) as threads:
        found = list(threads.map(played, range(6)))
    assert found == [play(environment, item, actions) for item, actions in zip(items, wrong, strict=True)]
    until(lambda: all(state == "idle" for state in actors.made.states().values()))


def test_what_an_environment_raises_is_told_as_in_this_process(ray_cluster: None, own: str, tmp_path: Path) -> None:
    file = tmp_path / "played.py"
    file.write_text(OWN + BREAKS)
    made = Actors(1, 0, load(None, [f"data.task={file}:Breaks", "reward.graders.deadline_s=1"]))
    try:
        environment: Any = get(f"{file}:Breaks", {})
        item, episode = environment.item(0, "train", 0), made.made.opened("breaks")
        episode.reset(item)
        with pytest.raises(BadInput, match=rf"^ValueError: at odds \({file}:\d+ in step\)$"):
            episode.step("odd")
        episode.reset(item)
        with pytest.raises(ToolLost, match=r"^the tool is gone$"):
            episode.step("tool")
        os.kill(made.pid(0), signal.SIGKILL)  # the last one
        episode.reset(item)
        with pytest.raises((GraderFailure, ToolLost)):
            episode.step("111")
        with pytest.raises(GraderFailure, match=r"no actor is left that grades, grader-0 died \(\w+\)"):
            graded([rollout("4")], made.made)
    finally:
        made.made.close()


@pytest.mark.slow
def test_a_reward_model_in_an_actor_gives_the_bits_of_this_process(ray_cluster: None, tmp_path: Path) -> None:
    import ray

    RewardModel.from_policy(load_policy(ModelConfig(path="preset:tiny-qwen3")), 3).save(tmp_path / "good")
    told = list[str]()
    kind: Any = ray.remote(max_restarts=0, num_cpus=1)(ScorerActor)
    about = (300.0, 1, lambda what, **_: told.append(what))
    scorers = {
        str(path): ActorScorer("reward-model-0", lambda: kind.remote(1), (str(path), "cpu"), *about)
        for path in (tmp_path / "good", tmp_path / "none")
    }
    texts = ["4", "forty-two", "", "4" * 90]
    given = [
        rollout(texts[i % 4], grader=GraderSpec(name="reward_model", options={"path": path, "batch_size": 3}), id=i)
        for i, path in enumerate([str(tmp_path / "good")] * 7 + [str(tmp_path / "none")])
    ]
    here, _ = graded(given, load_model=RewardModel.load)
    try:
        assert graded(given, load_model=scorers.__getitem__)[0] == here
        assert [reward is None for _, reward, *_ in here] == [False] * 7 + [True]
        good = scorers[str(tmp_path / "good")]
        os.kill(good._about["pid"], signal.SIGKILL)
        assert graded(given[:7], load_model=scorers.__getitem__)[0] == here[:7]
        assert told == ["actor", "grader_lost", "grader_renewed", "actor"]
        os.kill(good._about["pid"], signal.SIGKILL)
        with pytest.raises(GraderFailure, match=r"reward-model-0 died \(\w+\); see actors/"):
            good.score(["4"])
    finally:
        for scorer in scorers.values():
            scorer.close()


def test_reward_models_of_a_recipe_have_actors_where_there_are_graders() -> None:
    words = ["data.task=null", "data.path=x.jsonl", "data.grader=mix"]
    parts = "{grader: exact}, {grader: reward_model, options: {path: b}}, {grader: reward_model, options: {path: a}}"
    words.append(f"data.grader_options={{parts: [{parts}]}}")
    assert reward_models(load(None, [*words, "cluster.graders=1"])) == ["a", "b"]
    assert reward_models(load(None, words)) == []
    assert reward_models(load(None, ["cluster.graders=1"])) == []


BREAKS = """
class Breaks(SudokuTurns):
    name = "breaks"

    def step(self, action):
        if action == "odd":
            raise ValueError("at odds")
        if action == "tool":
            raise ToolLost("the tool is gone")
        return super().step(action)
"""


@pytest.mark.slow
@pytest.mark.parametrize("task", ["addition", "sudoku_turns"])
def test_a_run_that_loses_graders_is_the_run_of_one_process(task: str, ray_cluster: None, tmp_path: Path) -> None:
    words = [] if task == "addition" else [f"data.task={task}", "data.options={side: 4, holes: 3}", "sampling.max_new_tokens=24"]  # fmt: skip
    run = tmp_path / "run"
    killer = kill_when(run, "grader-1", "rollout", 2)
    run_of(run, *words, *ONE, "cluster.graders=2", "reward.graders.workers=1")
    killer.join()
    assert_same(run, run_of(tmp_path / "alone", *words))
    assert [e["event"] for e in events(run) if e.get("name") == "grader-1"][:3] == ["actor", "grader_lost", "actor"]
    assert (run / "actors" / "grader-0.log").is_file()
