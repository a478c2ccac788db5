"""Text environments with Gymnasium's interface as a task: `gymnasium` with `environment=my_game.py:Game`, or an id such as
`FrozenLake-v1`.

    env.reset(seed=7) → observation, info        env.step(action) → observation, reward, terminated, truncated, info

The policy's turn is the action, its text without space around it. Gymnasium itself (extra `gymnasium`) is needed for ids alone.
Tested with 1.4.0.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, final

from pydantic import Field

from rollkeel import plugins
from rollkeel.errors import BadInput
from rollkeel.tasks.base import ASCII_SPACE, TaskItem, excerpt
from rollkeel.tasks.environment import Environment, EnvironmentOptions, Step

TURNS = 32


class GymnasiumOptions(EnvironmentOptions):
    environment: str = Field("", description="`module:name` or `file.py:name` of a class or function, or an id")
    arguments: dict[str, Any] = Field({}, description="what it is made with")
    prompt: str = Field("", description="text before the first observation: what the policy is to do")
    words: list[str] = Field([], description="of a Discrete action space: the words for actions 0, 1, …")
    render: bool = Field(False, description="the policy reads `render()` in the place of observations that are no text")


@final
class Gymnasium(Environment[GymnasiumOptions]):
    """Episodes of an environment by seed. The reward is the sum of its rewards; after `turns` (32) an episode is cut.

    Right actions are known where the environment has `solution()`, which returns them from here on. Without it there are no
    demonstrations (`sft.steps=0`), and `tasks check` has nothing to prove.
    """

    name = "gymnasium"
    summary = "a text environment with Gymnasium's interface"
    junk: ClassVar[tuple[str, ...]] = ()
    """What it makes of text around an action is its own matter."""
    _env: Any = None

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        super().__init__(options)
        self._make = _maker(self.options.environment)

    def draw(self, rng: random.Random) -> TaskItem:
        return TaskItem(text="", answer="", metadata={"seed": rng.randrange(2**31)})

    def identity(self, item: TaskItem) -> str:
        """Its seed: episodes that begin alike under two seeds count as two."""
        return str(item.metadata["seed"])

    def finish(self, item: TaskItem, rng: random.Random) -> TaskItem | None:
        episode = self.fresh()
        try:
            text = episode._begin(item)
            solution = getattr(getattr(episode._env, "unwrapped", episode._env), "solution", None)
            answer = "\n".join(map(str, solution())) if solution else ""
        finally:
            episode.close()
        return TaskItem(text=text, answer=answer, metadata=item.metadata)

    def reset(self, item: TaskItem) -> str:
        if (text := self._begin(item)) != item.text:
            raise BadInput(
                f"task gymnasium: reset(seed={item.metadata['seed']}) began {text!r:.60}, before {item.text!r:.60}"
            )
        return text

    def _begin(self, item: TaskItem) -> str:
        self.close()
        self._env = self._make(**self.options.arguments)
        self._left = self.options.turns or TURNS
        begun = self._env.reset(seed=item.metadata["seed"])
        return self.options.prompt + self._text(begun[0] if isinstance(begun, tuple) else begun)

    def step(self, action: str) -> Step:
        self._left -= 1
        said = action.strip(ASCII_SPACE)
        taken: Any = said
        if words := self.options.words:
            if said not in words:
                text = f"error: expected one of {', '.join(words)}"
                return Step(text=text, done=self._left <= 0, detail=excerpt(action))
            taken = words.index(said)
        observation, reward, *ended, _ = self._env.step(taken)
        done = any(map(bool, ended))
        text = "" if done else self._text(observation)
        return Step(text=text, reward=float(reward), done=done or self._left <= 0, detail=excerpt(action))

    def _text(self, observation: Any) -> str:
        if self.options.render and not isinstance(observation, str):
            observation = self._env.render()
        return observation if isinstance(observation, str) else str(observation)

    def actions(self, item: TaskItem) -> Sequence[str]:
        if not item.answer:
            raise BadInput(
                "task gymnasium: nobody knows right actions, the environment has no solution(); set sft.steps=0"
            )
        return item.answer.split("\n")

    def close(self) -> None:
        if self._env is not None and hasattr(self._env, "close"):
            self._env.close()
        self._env = None


def _maker(name: str) -> Callable[..., Any]:
    if plugins.is_own(name):
        return plugins.load(name, "task gymnasium: environment", "a class or a function", callable)
    if not name:
        raise BadInput(
            "task gymnasium: set data.options.environment to module:name, file.py:name or an id of Gymnasium"
        )
    try:
        gymnasium: Any = importlib.import_module("gymnasium")
    except ImportError as error:
        raise BadInput(f"task gymnasium: {error}; install it with: pip install 'rollkeel[gymnasium]'") from None
    try:
        gymnasium.spec(name)
    except gymnasium.error.Error as error:
        raise BadInput(f"task gymnasium: environment {name!r}: {excerpt(str(error), 200)}") from None
    return lambda **arguments: gymnasium.make(name, **arguments)
