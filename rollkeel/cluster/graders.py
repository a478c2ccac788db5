"""Actors that grade and play, as the loop sees them: a thread for each hands out what there is to do, and hears what came of it.

Who does it decides nothing: a grading is a function of its rollout, an episode of its item and actions. So a lost actor's
gradings are given to another one, and its episodes are played again there.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from rollkeel import plugins
from rollkeel.cluster import logs
from rollkeel.cluster.grader import Act, Asked, Broke, Left
from rollkeel.cluster.patience import Patience
from rollkeel.cluster.pulse import SILENT_S
from rollkeel.config import GradersConfig
from rollkeel.errors import BadInput, GraderFailure
from rollkeel.rewards.grading import Scorer
from rollkeel.rewards.here import Outcome
from rollkeel.tasks.base import TaskItem
from rollkeel.tasks.environment import Step, ToolLost
from rollkeel.types import Rollout

START_S = 120.0
"""Longest time for an actor to begin."""
CLOSE_S = 5.0
AT_ONCE = 4
"""Gradings that an actor has, for each of its workers."""
SPARE_S = 0.5
"""What a call to an actor may take beyond the deadline of one grading."""
THREADS = 8
"""Steps of environments that are under way, for each actor."""


class _Lost(Exception):
    """The actor that held an episode is gone."""


@dataclass(eq=False)
class _Work:
    what: Asked
    future: Future[Any] = field(default_factory=Future)
    lost: bool = False
    """Once an actor died of it, or of what it did beside it. It is done again alone, so that its second death is its own doing."""


@dataclass
class _Grader:
    index: int
    handle: Any
    about: Mapping[str, Any] = field(default_factory=dict)
    incarnation: int = 0
    queue: deque[_Work] = field(default_factory=deque)
    """Of its own episodes."""
    flying: dict[int, _Work] = field(default_factory=dict)
    episodes: int = 0
    patience: Patience = field(default_factory=lambda: Patience(SILENT_S))
    dead: str = ""

    @property
    def name(self) -> str:
        return f"grader-{self.index}"


class GraderActors:
    """Implements `rollkeel.rewards.here.Elsewhere`, and opens episodes for `rollkeel.rollout.episodes`. Thread-safe; close it."""

    def __init__(
        self, start: Callable[[int], Any], count: int, settings: GradersConfig, renewals: int, tell: Callable[..., None]
    ) -> None:
        """`start`: makes the actor of a number; `renewals`: how many lost ones are replaced, in all; `tell`: is given name and fields of
        an event, from any thread."""
        self._start, self._tell = start, tell
        self._deadline_s = settings.deadline_s
        self._room = AT_ONCE * settings.workers
        self._left = renewals
        self._more = threading.Condition()
        self._pending = deque[_Work]()
        self._numbers = itertools.count()
        self._closed = False
        self._driving = list[threading.Thread]()
        self.threads = THREADS * count
        self.scorers: Mapping[str, Any] = {}
        """`rollkeel.cluster.scorer.ActorScorer` by path."""
        self.parts = [_Grader(i, start(i)) for i in range(count)]

    def begin(self, check: Callable[[str, Mapping[str, str]], None]) -> None:
        """Wait for all of them. `check`: is given each one's name and versions, and may raise."""
        for grader in self.parts:
            try:
                grader.about = self._met(grader)
            except RayError as error:
                raise BadInput(f"cluster.graders: {grader.name} did not begin ({type(error).__name__})") from None
            check(f"{grader.name} (node {grader.about['host']})", grader.about["versions"])
            thread = threading.Thread(target=self._driven, args=(grader,), daemon=True, name=grader.name)
            thread.start()
            self._driving.append(thread)

    def grade(self, rollout: Rollout) -> Future[Outcome]:
        return self._ask(_Work(rollout)).future

    def scorer(self, path: str) -> Scorer | None:
        """The reward model of that path, if it has an actor."""
        return self.scorers.get(path)

    def opened(self, name: str) -> Played:
        """An episode of the run's environment `name`, to be reset."""
        return Played(self, name)

    def states(self) -> dict[str, str]:
        """What every one does now."""
        with self._more:
            found = {g.name: g.dead or _doing(g) for g in self.parts}
        return found | {scorer.name: scorer.state for scorer in self.scorers.values()}

    def close(self) -> None:
        """End them, with workers, sandboxes and terminals. What is not done fails."""
        self._over("graders: the actors were closed")
        with suppress(RayError):
            calls = [g.handle.close.remote() for g in self.parts if not g.dead]
            ray.wait(calls, num_returns=len(calls), timeout=CLOSE_S) if calls else None
        for grader in self.parts:
            ray.kill(grader.handle, no_restart=True)
        for scorer in self.scorers.values():
            scorer.close()
        for thread in self._driving:
            thread.join(CLOSE_S)

    # -- episodes ------------------------------------------------------------------------------------------------------

    def home(self) -> tuple[_Grader, int, int]:
        """Who takes the next episode, its incarnation, and the episode's number."""
        with self._more:
            living = [g for g in self.parts if not g.dead]
            if not living:
                raise GraderFailure(self._end())
            home = min(living, key=lambda g: g.episodes)
            home.episodes += 1
            return home, home.incarnation, next(self._numbers)

    def act(self, home: _Grader, incarnation: int, what: Act) -> Future[Any]:
        """Have it play on."""
        return self._ask(_Work(what), home, incarnation).future

    def leave(self, home: _Grader, incarnation: int, episode: int) -> None:
        """The episode is over."""
        with self._more:
            home.episodes -= home.incarnation == incarnation
        self._ask(_Work(Left(episode)), home, incarnation)

    # -- the threads ---------------------------------------------------------------------------------------------------

    def _ask(self, work: _Work, home: _Grader | None = None, incarnation: int = 0) -> _Work:
        with self._more:
            gone = home is not None and (home.dead or home.incarnation != incarnation)
            none = self._closed or all(g.dead for g in self.parts)
            if not (gone or none):
                (self._pending if home is None else home.queue).append(work)
                self._more.notify_all()
                return work
        _fail([work], _Lost() if gone else GraderFailure(self._end()))
        return work

    def _over(self, why: str) -> None:
        with self._more:
            self._closed = True
            left = [*self._pending, *(w for g in self.parts for w in (*g.queue, *g.flying.values()))]
            self._more.notify_all()
        _fail(left, GraderFailure(why))

    def _driven(self, grader: _Grader) -> None:
        try:
            self._drive(grader)
        except Exception as error:  # else what it has would be waited for for ever
            self._over(f"graders: what speaks to {grader.name} broke: {type(error).__name__}: {error}".splitlines()[0])
            raise

    def _drive(self, grader: _Grader) -> None:
        while (asked := self._next(grader)) is not None:
            limit_s = max(grader.patience.limit_s, self._deadline_s + SPARE_S)  # one grading may take its deadline
            began = time.monotonic()
            try:
                (told,) = ray.get([grader.handle.step.remote([(n, w.what) for n, w in asked])], timeout=limit_s)
            except RayError as error:
                if self._closed or not self._replaced(grader, lost(error, limit_s, grader.about)):
                    return
                continue
            grader.patience.heard(now := time.monotonic() - began)
            with self._more:
                done = [(grader.flying.pop(number), value) for number, value in told]
            now = time.perf_counter()  # other machines have other clocks
            for work, value in done:
                if isinstance(value, Outcome):
                    value = replace(value, began=now - (value.ended - value.began), ended=now)
                _answer(work, value)

    def _next(self, grader: _Grader) -> list[tuple[int, _Work]] | None:
        """What it is to begin; perhaps nothing, where something is under way. None at the end."""
        with self._more:
            while not self._closed:
                asked = [(next(self._numbers), work) for work in self._taken(grader)]
                grader.flying |= {n: work for n, work in asked if not isinstance(work.what, Left)}
                if asked or grader.flying:
                    return asked
                self._more.wait()
        return None

    def _taken(self, grader: _Grader) -> list[_Work]:
        """All that its episodes ask, and of the gradings a share that leaves some to the others."""
        taken, grader.queue = list(grader.queue), deque()
        living = sum(not g.dead for g in self.parts)
        share = max(1, len(self._pending) // (2 * living))
        room = min(self._room - len(grader.flying), share)
        while self._pending and room > 0 and not any(w.lost for w in (*grader.flying.values(), *taken)):
            if self._pending[0].lost and (grader.flying or taken):
                break
            taken.append(self._pending.popleft())
            room -= 1
        return taken

    def _replaced(self, grader: _Grader, why: str) -> bool:
        """Start another one in its place, and give what it did to others; False if that may not be done any more."""
        while not self._closed:
            with suppress(RayError):
                ray.kill(grader.handle, no_restart=True)
            self._tell("grader_lost", name=grader.name, why=why)
            if not self._bereft(grader, why):
                return False
            try:
                grader.handle, grader.patience = self._start(grader.index), Patience(SILENT_S)
                grader.about = self._met(grader)
            except RayError as error:
                why = f"did not begin again ({type(error).__name__})"
                continue
            self._tell("grader_renewed", name=grader.name)
            return True
        return False

    def _bereft(self, grader: _Grader, why: str) -> bool:
        """Take from a lost one what it did, for others to do; whether another one may take its place."""
        with self._more:
            works = [*grader.flying.values(), *grader.queue]
            grader.flying = {}
            grader.queue = deque()
            grader.episodes = 0
            grader.incarnation += 1
            may, self._left = self._left > 0, max(0, self._left - 1)
            grader.dead = "" if may else why
            gradings = [w for w in works if isinstance(w.what, Rollout)]
            deadly = [w for w in gradings if w.lost]
            for work in gradings:
                work.lost = True
            self._pending.extendleft(w for w in gradings if w not in deadly)
            none = list(self._pending) if all(g.dead for g in self.parts) else []
            self._more.notify_all()
        _fail([w for w in works if w not in gradings], _Lost())
        _fail(none, GraderFailure(self._end()))
        for work in deadly:
            name = plugins.short(work.what.prompt.grader.name)  # type: ignore[union-attr]
            _answer(work, Outcome(reward=None, detail=f"grader {name}: two actors died of it"))
        return may

    def _met(self, grader: _Grader) -> Mapping[str, Any]:
        (about,) = ray.get([grader.handle.about.remote()], timeout=START_S)
        self._tell("actor", name=grader.name, host=about["host"], pid=about["pid"])
        return about

    def _end(self) -> str:
        dead = next((f"{g.name} {g.dead}" for g in reversed(self.parts) if g.dead), "they were closed")
        return f"cluster.graders: no actor is left that grades, {dead}; see actors/ in the run folder, and cluster.restarts"


class Played:
    """An episode of an environment in another process. Implements `rollkeel.tasks.environment.Remote`."""

    def __init__(self, of: GraderActors, name: str) -> None:
        self.name = name
        self._of = of
        self._item: TaskItem | None = None
        self._actions = list[str]()
        self._home: tuple[_Grader, int, int] | None = None

    def reset(self, item: TaskItem) -> str:
        """As the environment's; who holds it is chosen with the first action."""
        self.close()
        self._item, self._actions = item, []
        return item.text

    def step(self, action: str) -> Step:
        """As the environment's. One whose actor is lost is played again in another one. Raises what the environment raised, as `BadInput`."""
        self._actions.append(action)
        told = self._played()
        if told is None:
            told = self._played()
        if told is None:
            raise ToolLost("the actor that held the episode was lost twice")
        if isinstance(told, Broke):
            raise (ToolLost if told.lost else BadInput)(told.why)
        return told

    def close(self) -> None:
        """The episode is over, or will be played again."""
        if self._home is not None:
            grader, incarnation, episode = self._home
            self._of.leave(grader, incarnation, episode)
            self._home = None

    def _played(self) -> Step | Broke | None:
        """What the last action brought; None if the actor is lost."""
        item, actions = None, self._actions[-1:]
        if self._home is None:
            self._home = self._of.home()
            item = self._item
            actions = self._actions
        grader, incarnation, episode = self._home
        try:
            return self._of.act(grader, incarnation, Act(episode, item, tuple(actions))).result()
        except _Lost:
            self._home = None
            return None


def lost(error: RayError, limit_s: float, about: Mapping[str, Any]) -> str:
    """How an actor was lost that was waited for so long; one that is stopped writes where it stands into its log."""
    if not isinstance(error, GetTimeoutError):
        return f"died ({type(error).__name__})"
    return f"said nothing for {limit_s:.3g} s{logs.ask_for_stacks([about['pid']] if about else [])}"


def _doing(grader: _Grader) -> str:
    gradings = sum(isinstance(w.what, Rollout) for w in grader.flying.values())
    told = [f"{gradings} gradings"] * bool(gradings) + [f"{grader.episodes} episodes"] * bool(grader.episodes)
    return ", ".join(told) or "idle"


def _answer(work: _Work, value: Any) -> None:
    """Unless the run has ended meanwhile."""
    if not work.future.done():
        work.future.set_result(value)


def _fail(works: list[_Work], error: Exception) -> None:
    for work in works:
        if not work.future.done():
            work.future.set_exception(error)
