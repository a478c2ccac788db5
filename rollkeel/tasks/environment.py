"""Tasks that are answered turn by turn: an environment reads what the model wrote, and writes back.

    item ─▶ prompt ─▶ model ─▶ action ─▶ step ─▶ text ─▶ model ─▶ action ─▶ … ─▶ reward

An episode is a function of its item and the actions alone. So it can be played again from those: a lost tool is replaced that
way, and a recorded episode can be checked. Where a tool is needed (a terminal), the loop hands one in: tasks know no sandbox.
"""

from __future__ import annotations

import copy
import math
import numbers
import random
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self, TypeVar

from pydantic import Field

from rollkeel import plugins
from rollkeel.errors import BadInput, RunStopped
from rollkeel.tasks.base import Task, TaskItem, TaskOptions
from rollkeel.types import GraderSpec

GRADER = "environment"
"""Name of the grader of episodes: the reward is the environment's own."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """What came of one action."""

    text: str = ""
    """What the model reads before its next turn; of no use when `done`."""
    more: tuple[str, ...] = ()
    """Further messages, where the turn is answered by several."""
    reward: float = 0.0
    """Added to the episode's."""
    done: bool = False
    detail: str = ""
    """One line for people."""

    def __post_init__(self) -> None:
        texts = all(isinstance(text, str) for text in (self.text, *self.more))
        if not (texts and isinstance(self.reward, numbers.Real) and math.isfinite(self.reward)):
            raise TypeError(
                f"Step: expected text as str and a finite reward, got {self.text!r:.40} and {self.reward!r:.40}"
            )


class Tool(Protocol):
    """Something that runs commands and keeps its state between them."""

    def run(self, command: str) -> str:
        """What the command printed, as the model is to read it. Raises `ToolLost` and `ToolEnded`."""
        ...

    def inspect(self, command: str) -> str:
        """Standard output of a command in a fresh shell over the same files, which nothing that was run before can answer for.

        Raises `ToolLost` and `ToolEnded`.
        """
        ...

    def close(self) -> None: ...


class Tools(Protocol):
    """Opens tools, from any thread."""

    def __call__(self) -> Tool: ...

    def alone(self, source: bytes, files: Mapping[str, bytes], stdin: bytes) -> bytes:
        """Standard output of a Python program that runs away from all tools, beside `files`.

        Raises `ToolLost`, and `ToolEnded` for files that it cannot be given.
        """
        ...

    def close(self) -> None:
        """End whatever is open."""
        ...


class ToolLost(RunStopped):
    """The tool broke, and what it held is gone. Not the policy's doing: the episode is played again in a new one."""


class ToolEnded(RunStopped):
    """The actions brought the tool to its end: a limit. The policy's doing: the episode is over, and lost."""


class EnvironmentOptions(TaskOptions):
    """Base of the knobs of environments."""

    turns: int = Field(0, ge=0, le=1000, description="most turns of an episode; 0 takes what the family needs")


E = TypeVar("E", bound=EnvironmentOptions)


class Environment(Task[E]):
    """A family of episodes, and one of them while it is played: `reset`, then `step` until it says `done`.

    As a task, a response is the actions of a whole episode, a line each: so items, splits and `tasks check` work as anywhere.
    Subclasses define `draw`, `actions`, `reset`, `step`, and `slip` if demonstrations may have noise.
    """

    uses_tool: ClassVar[bool] = False
    role: str = "user"
    """Whose words its texts are in a chat template."""
    tools: Tools | None = None
    """Opens a tool; the player hands it in."""

    @abstractmethod
    def reset(self, item: TaskItem) -> str:
        """Begin the episode of `item` and return its prompt, `item.text`."""

    @abstractmethod
    def step(self, action: str) -> Step:
        """Take the text of one turn, whatever it is. Raises `ToolLost`; anything else it raises is a broken environment."""

    @abstractmethod
    def actions(self, item: TaskItem) -> Sequence[str]:
        """Actions that earn 1.0, without line breaks in them."""

    def mistakes(self, item: TaskItem) -> Sequence[Sequence[str]]:
        """Episodes close to that one that must each earn 0.0; at least one. By default the last action is an empty one."""
        return [[*self.actions(item)[:-1], ""]]

    def slip(self, item: TaskItem, action: str, rng: random.Random) -> str:
        """A wrong action before a right one, for demonstrations with noise."""
        return action

    def close(self) -> None:
        """Give back what `reset` took. May be called twice, and without `reset`."""

    def schemas(self) -> Sequence[dict[str, Any]]:
        """JSON schemas of the tools that the policy may call, for the chat template."""
        return ()

    def fresh(self) -> Self:
        """The same family, for another episode."""
        return copy.copy(self)

    def tool(self) -> Tool:
        """A new tool. Raises `BadInput` where nobody handed any in."""
        if self.tools is None:
            raise BadInput(f"task {self.name}: expected a tool to play with, got none; it is played in the sandbox")
        return self.tools()

    def verify(self, item: TaskItem, response: str) -> tuple[float, str]:
        actions = response.split("\n")
        steps = play(self, item, actions)
        if not steps[-1].done or len(steps) < len(actions):
            return 0.0, f"{len(actions)} actions for an episode of {len(steps)}: {steps[-1].detail}"
        return sum(s.reward for s in steps), steps[-1].detail

    def gold(self, item: TaskItem) -> str:
        return "\n".join(self.actions(item))

    def near_misses(self, item: TaskItem) -> Sequence[str]:
        return ["\n".join(actions) for actions in self.mistakes(item)]

    def noisy(self, item: TaskItem, rng: random.Random, label_noise: float) -> str:
        out = list[str]()
        for action in self.actions(item):
            if rng.random() < label_noise:
                out.append(self.slip(item, action, rng))
            out.append(action)
        return "\n".join(out)

    def grader(self, item: TaskItem) -> GraderSpec:
        return GraderSpec(name=GRADER, options=super().grader(item).options)


class Remote(Protocol):
    """An environment in another process."""

    name: str

    def reset(self, item: TaskItem) -> str: ...
    def step(self, action: str) -> Step: ...
    def close(self) -> None: ...


Playable = Environment[Any] | Remote
"""What plays an episode."""


def taken(episode: Playable, action: str) -> Step:
    """What `step` makes of an action. Raises `BadInput` where that is no `Step`."""
    step = episode.step(action)
    if not isinstance(step, Step):
        raise BadInput(
            f"task {episode.name}: step returned {step!r:.80}, expected Step(text=…, reward=…, done=…){plugins.place(episode.step)}"
        )
    return step


def play(environment: Environment[Any], item: TaskItem, actions: Sequence[str]) -> list[Step]:
    """Steps of an episode from its start, up to the one that ends it; at least one action."""
    episode, steps = environment.fresh(), list[Step]()
    try:
        episode.reset(item)
        for action in actions:
            steps.append(taken(episode, action))
            if steps[-1].done:
                break
    finally:
        episode.close()
    return steps
