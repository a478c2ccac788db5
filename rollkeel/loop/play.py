"""Who hands environments what they play with: the sandbox's terminals, the tokenizer, the loop's limits."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

from rollkeel.config import Config
from rollkeel.rollout.collect import collect
from rollkeel.rollout.episodes import Episodes, Gather
from rollkeel.tasks import get
from rollkeel.tasks.environment import Environment, Playable
from rollkeel.tasks.turns import Dialogue


@contextmanager
def equipped(environment: Environment[Any] | None) -> Iterator[None]:
    """Inside, an environment that needs tools has them: terminals in the sandbox, which starts with the first."""
    if environment is None or not environment.uses_tool:
        yield
        return
    from rollkeel.rollout.terminals import TerminalTools

    environment.tools = TerminalTools()
    try:
        yield
    finally:
        environment.tools.close()


class Players(Protocol):
    """Opens episodes in other processes."""

    threads: int
    """Steps that may be under way."""

    def opened(self, name: str) -> Playable:
        """One of the environment of `config.data`, whose name this is."""
        ...


@contextmanager
def gathering(
    config: Config, tokenizer: Any, environment: Environment[Any] | None = None, players: Players | None = None
) -> Iterator[Gather]:
    """`gather`, or episodes of the environment given; closed at the end."""
    made = gather(config, tokenizer, players) if environment is None else episodes(config, tokenizer, environment)
    try:
        yield made
    finally:
        if isinstance(made, Episodes):
            made.close()


def gather(config: Config, tokenizer: Any, players: Players | None = None) -> Gather:
    """How prompts of `config.data` are sampled: in one turn, or played, by `players` if there are any. An `Episodes` is to be closed."""
    environment = None if config.data.task is None else get(config.data.task, config.data.options)
    if not isinstance(environment, Environment):
        return collect
    if players is not None:
        opened = partial(players.opened, environment.name)
        return episodes(config, tokenizer, environment, threads=players.threads, opened=opened)
    if environment.uses_tool:
        from rollkeel.rollout.terminals import TerminalTools

        environment.tools = TerminalTools()
    return episodes(config, tokenizer, environment)


def episodes(config: Config, tokenizer: Any, environment: Environment[Any], **about: Any) -> Episodes:
    """Who plays an environment within the limits of `config`. To be closed. `about`: further options of `Episodes`."""
    return Episodes(
        environment,
        # A copy: the asynchronous loop plays in another thread than the one that encodes prompts.
        Dialogue(copy.deepcopy(tokenizer), chat=config.data.chat_template, role=environment.role),
        turn_tokens=config.rollout.environment.turn_tokens,
        deadline_s=6 * config.reward.graders.deadline_s,
        **about,
    )
