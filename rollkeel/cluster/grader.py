"""An actor that grades, and holds the environments of episodes: one method, which runs in the main thread.

Graders of somebody's own are interrupted by a signal when they take too long, and signals arrive in the main thread. What can
wait (workers, sandbox, environments) does so in threads. Imports neither torch nor an engine.
"""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

from rollkeel import plugins
from rollkeel.cluster import logs
from rollkeel.config import Config
from rollkeel.host import collect_as_usual, versions
from rollkeel.rewards.graders import Lane
from rollkeel.rewards.here import Here, Part, part_of
from rollkeel.tasks import get
from rollkeel.tasks.base import TaskItem
from rollkeel.tasks.environment import Environment, Step, ToolLost, taken
from rollkeel.types import Rollout

WAIT_S = 0.1
"""Longest time of a call that computes nothing itself."""
EPISODES = 64
"""Steps of environments at one time; one that hangs keeps its thread."""


class Act(NamedTuple):
    """Take these actions of an episode, which with `item` begins with them."""

    episode: int
    item: TaskItem | None
    actions: tuple[str, ...]


class Left(NamedTuple):
    """Close an episode; nothing answers."""

    episode: int


class Broke(NamedTuple):
    """An environment raised an error."""

    why: str
    lost: bool
    """It was its tool, see `ToolLost`."""


Asked = Rollout | Act | Left
"""A rollout is one grading: see `rollkeel.rewards.here.movable`."""


def about() -> dict[str, Any]:
    """Where this process is, and with what."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "versions": versions()}


class GraderActor:
    """Grades and plays, in a process of its own."""

    def __init__(self, config: Config) -> None:
        logs.write_there()
        collect_as_usual()
        self._config = config
        self._here = Here(config.reward.graders)
        self._waiting = deque[tuple[int, Part]]()
        self._under_way = dict[Future[Any], int]()
        self._family: Environment[Any] | None = None
        self._episodes = dict[int, Environment[Any]]()
        self._threads = ThreadPoolExecutor(EPISODES, "environment")

    def about(self) -> dict[str, Any]:
        return about()

    def step(self, asked: list[tuple[int, Asked]]) -> list[tuple[int, Any]]:
        """Begin what is asked, and return what has ended since, by number: an `Outcome`, a `Step`, or what `Broke`."""
        for number, what in asked:
            self._begin(number, what)
        told, end = list[tuple[int, Any]](), time.monotonic() + WAIT_S
        while self._waiting and time.monotonic() < end:
            number, part = self._waiting.popleft()
            self._here.inline([part])
            told.append((number, part.outcome))
        if self._under_way:
            ended, _ = wait(self._under_way, 0 if told or self._waiting else WAIT_S, FIRST_COMPLETED)
            told += [(self._under_way.pop(future), future.result()) for future in ended]
        return told

    def close(self) -> None:
        """End workers, sandbox and terminals."""
        self._here.close()
        if self._family is not None and self._family.tools is not None:
            self._family.tools.close()

    def _begin(self, number: int, what: Asked) -> None:
        if isinstance(what, Act):
            self._under_way[self._threads.submit(self._act, what)] = number
        elif isinstance(what, Left):
            if (left := self._episodes.pop(what.episode, None)) is not None:
                self._threads.submit(left.close)
        elif (part := part_of(what)).entry.lane is Lane.INLINE:
            self._waiting.append((number, part))
        else:
            self._under_way[self._here.start(part)] = number

    def _act(self, what: Act) -> Step | Broke:
        """The last action's step. Whatever an environment throws is data."""
        try:
            if what.item is not None:
                self._episodes[what.episode] = self._opened()
                self._episodes[what.episode].reset(what.item)
            return [taken(self._episodes[what.episode], action) for action in what.actions][-1]
        except ToolLost as lost:
            return Broke(str(lost), lost=True)
        except (Exception, SystemExit) as error:
            return Broke(plugins.trouble(error), lost=False)

    def _opened(self) -> Environment[Any]:
        if self._family is None:
            family = get(str(self._config.data.task), self._config.data.options)
            assert isinstance(family, Environment)  # else nobody asks
            if family.uses_tool:
                from rollkeel.rollout.terminals import TerminalTools

                family.tools = TerminalTools()
            self._family = family
        return self._family.fresh()
