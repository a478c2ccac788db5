"""Environments of the library verifiers as a task: `verifiers` with `taskset=my_taskset`, an installed package or a module here.

An environment's own `run` plays the episode, and its task's rewards judge it; rollkeel takes the place of the agent. So the turns
are those of the policy that trains, token by token. Tools are called as those of `tools.py` are: a tokenizer's template shows them.
Refused are environments of several agents, and tasks that need a runtime (a container, files, commands).
Tested with 0.4.0; install it with `pip install 'rollkeel[verifiers]'`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import itertools
import json
import os
import random
import sys
import threading
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from typing import Any, ClassVar, TypeVar, final

from pydantic import Field

from rollkeel.errors import BadInput
from rollkeel.tasks.base import ASCII_SPACE, TaskItem, excerpt
from rollkeel.tasks.environment import Environment, EnvironmentOptions, Step
from rollkeel.tasks.environments.tools import Function, parse, result

TURNS = 32
T = TypeVar("T")


class VerifiersOptions(EnvironmentOptions):
    taskset: str = Field("", description="id of a taskset, as `--env.taskset.id` takes it")
    config: dict[str, Any] = Field({}, description="of its environment, as verifiers' `env` section: `{taskset: {…}}`")
    problems: int = Field(1000, ge=1, description="how many are taken of a taskset that never ends")
    answer: str = Field("", description="field of a problem whose text earns 1: demonstrations are made of it")


@final
class Verifiers(Environment[VerifiersOptions]):
    """Episodes of a taskset. The reward is the sum of its weighted rewards, judges included; after `turns` (32) the exchange ends
    and is judged as it stands. A system prompt stands before the first text."""

    name = "verifiers"
    summary = "an environment of the library verifiers"
    junk: ClassVar[tuple[str, ...]] = ()
    """What its rewards make of text around an answer is their own matter."""
    _game: _Game | None = None

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        super().__init__(options)
        self._vf, self._env = _loaded(self.options)
        self._problems = list(itertools.islice(self._env.taskset, self.options.problems))
        _refuse(self.options.taskset, self._env, self._problems[:1])
        self._shared = type(self._env.taskset).toolsets(self._env.taskset.config)
        self._ready = False
        if self._shared or type(self._problems[0]).toolsets(self._problems[0].config):
            self.role = "tool"

    def draw(self, rng: random.Random) -> TaskItem:
        return TaskItem(text="", answer="", metadata={"index": rng.randrange(len(self._problems))})

    def identity(self, item: TaskItem) -> str:
        data = self._problems[item.metadata["index"]].data
        return data.model_dump_json(exclude={"idx"}, exclude_none=True)

    def finish(self, item: TaskItem, rng: random.Random) -> TaskItem | None:
        episode = self.fresh()
        try:
            text = episode._begin(item)
        finally:
            episode.close()
        data = self._problems[item.metadata["index"]].data
        answer = str(getattr(data, self.options.answer)) if self.options.answer else ""
        return TaskItem(text=text, answer=answer, metadata=item.metadata)

    def reset(self, item: TaskItem) -> str:
        if (text := self._begin(item)) != item.text:
            raise BadInput(f"task verifiers: {self.options.taskset} began {text!r:.60}, before {item.text!r:.60}")
        return text

    def _begin(self, item: TaskItem) -> str:
        self.close()
        if not self._ready:
            for toolset in self._shared:
                _wait(toolset.setup())
            self._ready = True
        self._left = self.options.turns or TURNS
        self._game = _Game(self._vf, self._env, self._problems[item.metadata["index"]], self._shared)
        text = _wait(self._game.go())
        if text is None:
            raise BadInput(f"task verifiers: {self.options.taskset} ended before the policy's first turn")
        return text

    def step(self, action: str) -> Step:
        game = self._game
        assert game is not None
        self._left -= 1
        calls = parse(action) if game.tools else []
        results = [result(game.tools, call) for call in calls]
        game.spoke(action, calls, results)
        if calls and self._left > 0:
            return Step(text=results[0], more=tuple(results[1:]), detail=excerpt(action))
        text = None if calls else _wait(game.go("answered"))
        if text is not None and self._left > 0:
            if game.tools:
                raise BadInput(
                    "task verifiers: an environment with tools gave a user's turn; rollkeel's speak in one role"
                )
            return Step(text=text, detail=excerpt(action))
        while not game.over:
            _wait(game.go("ended"))
        return Step(reward=game.reward, done=True, detail=excerpt(game.detail))

    def actions(self, item: TaskItem) -> Sequence[str]:
        if not item.answer:
            raise BadInput(
                "task verifiers: nobody knows right turns; name a field by data.options.answer, or set sft.steps=0"
            )
        return [item.answer]

    def schemas(self) -> list[dict[str, Any]]:
        if self.role == "user":
            return []
        task = self._problems[0]
        return [tool.schema() for tool in _tools([*self._shared, *type(task).toolsets(task.config)]).values()]

    def close(self) -> None:
        if self._game is not None:
            _wait(self._game.stop())
        self._game = None


class _Game:
    """An episode of an environment's `run`, which waits wherever it asks its agent for a turn."""

    def __init__(self, vf: Any, env: Any, task: Any, shared: Sequence[Any]) -> None:
        self._vf, self._env, self._task = vf, env, task
        self._toolsets, self._shared = type(task).toolsets(task.config), shared
        self.tools = _tools([*shared, *self._toolsets])
        about = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        self._episode = vf.Episode(env=vf.EnvInfo(id=env.config.env_id), task=about)
        self._running: asyncio.Task[None] | None = None
        self._said: list[Any] = []
        self._asked, self._text = asyncio.Event(), ""
        self._reply: asyncio.Future[Any] | None = None
        self._ended = False

    @property
    def over(self) -> bool:
        return self._running is not None and self._running.done()

    @property
    def reward(self) -> float:
        return float(sum(trace.reward for trace in self._episode.traces))

    @property
    def detail(self) -> str:
        rewards = {
            name: r.value for trace in self._episode.traces for name, r in trace.rewards.items() if r is not None
        }
        return ", ".join(f"{name} {value:g}" for name, value in rewards.items())

    async def go(self, how: str = "begin") -> str | None:
        """Let it run until it asks for a turn, and return what the policy reads; None when it is over."""
        self._asked.clear()
        if how == "begin":
            self._running = asyncio.create_task(self._play())
        elif self._reply is not None:
            self._ended = how == "ended" and not self._said
            self._reply.set_result(self._vf.Segment(messages=self._said, terminated=self._ended))
            self._said = []
        asked = asyncio.create_task(self._asked.wait())
        assert self._running is not None
        await asyncio.wait({self._running, asked}, return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        if not self._running.done():
            return self._text
        self._running.result()
        return None

    async def stop(self) -> None:
        if self._running is not None and not self._running.done():
            self._running.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await self._running

    def spoke(self, action: str, calls: Sequence[Any], results: Sequence[str]) -> None:
        """Put a turn of the policy into the trace, with what came of its calls."""
        vf, made, answers = self._vf, [], []
        for number, (call, text) in enumerate(zip(calls, results, strict=True)):
            name, arguments = call if isinstance(call, tuple) else ("", {})
            id = f"call_{len(self._trace.nodes)}_{number}"
            made.append(vf.ToolCall(id=id, name=name, arguments=json.dumps(arguments)))
            answers.append(vf.ToolMessage(tool_call_id=id, content=text, name=name))
        content = action.split("<tool_call>")[0].strip(ASCII_SPACE) if made else action
        self._add(vf.AssistantMessage(content=content, tool_calls=made or None), sampled=True)
        for answer in answers:
            self._add(answer)
        self._said += [node.message for node in self._trace.nodes[-1 - len(answers) :]]

    def _add(self, message: Any, sampled: bool = False) -> None:
        nodes = self._trace.nodes
        nodes.append(self._vf.MessageNode(parent=len(nodes) - 1 if nodes else None, message=message, sampled=sampled))

    async def _play(self) -> None:
        agents = self._vf.Agents(self._env.config, lambda name, spec: _Seat(self, name, spec))
        await self._env.setup(agents)
        await self._env.run(self._task, agents)
        await self._env.finalize(self._task, self._episode)

    @contextlib.asynccontextmanager
    async def seated(self, task: Any, name: str, spec: Any) -> AsyncIterator[Any]:
        """A rollout of `task`: its trace from the first message to its rewards."""
        vf = self._vf
        from verifiers.v1.state import state_cls  # pyright: ignore[reportMissingImports]
        from verifiers.v1.utils.decorators import invoke  # pyright: ignore[reportMissingImports]

        about = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        config = spec.model_copy(update={"sampling": vf.SamplingConfig()})
        self._trace = vf.Trace(task=about, agent=vf.AgentInfo(config=config, name=name), state=state_cls(type(task))())
        for toolset in self._toolsets:
            await toolset.setup()
            await toolset.setup_task(task.data)
        for toolset in (*self._shared, *self._toolsets):
            if isinstance(self._trace.state, type(toolset._inert_state)):
                toolset._inert_state = self._trace.state
        await invoke(task.setup, {"trace": self._trace, "runtime": None})
        if task.data.system_prompt:
            self._add(vf.SystemMessage(content=task.data.system_prompt))
        yield _Talk(self, task)
        await invoke(task.finalize, {"trace": self._trace, "runtime": None})
        await task.score(self._trace, None)
        self._trace.is_completed = self._trace.ok = True
        self._episode.traces.append(self._trace)

    async def ask(self, messages: Sequence[Any]) -> Any:
        """A turn of the policy behind these messages."""
        if self._ended:
            raise RuntimeError("the exchange is over; read interaction.trace")
        for message in messages:
            self._add(message)
        seen = [node.message for node in self._trace.nodes] if not self._trace.assistant_messages else messages
        self._text = "\n\n".join(text for m in seen if (text := _content(m)))
        self._reply = asyncio.get_running_loop().create_future()
        self._asked.set()
        return await self._reply


class _Seat:
    """What verifiers' `Agent` is to an environment."""

    def __init__(self, game: _Game, name: str, spec: Any) -> None:
        self._game, self._name, self._spec, self.trainable = game, name, spec, True

    def interaction(self, task: Any, **unused: Any) -> Any:
        return self._game.seated(task, self._name, self._spec)

    async def run(self, task: Any, **unused: Any) -> Any:
        async with self.interaction(task) as talk:
            await talk.turn()
        return talk.trace


class _Talk:
    """What verifiers' `Interaction` is to an environment."""

    def __init__(self, game: _Game, task: Any) -> None:
        self._game, self._task, self._begun = game, task, False
        self.trace = game._trace

    async def turn(self, message: Any = None) -> Any:
        vf = self._game._vf
        if message is None:
            if self._begun or self._task.data.prompt is None:
                raise ValueError("turn: expected a message; only the prompt of a task is answered without one")
            message = self._task.data.prompt
        self._begun = True
        parts = [vf.UserMessage(content=message)] if isinstance(message, str) else message
        return await self._game.ask([vf.UserMessage(**m) if isinstance(m, dict) else m for m in parts])


def _content(message: Any) -> str:
    """Text of a message. Raises `BadInput` for one with pictures."""
    if isinstance(message.content, str):
        return message.content
    if any(getattr(part, "type", "text") != "text" for part in message.content or ()):
        raise BadInput("task verifiers: expected messages of text, got one with an image")
    return "\n".join(part.text for part in message.content or ())


def _tools(toolsets: Sequence[Any]) -> dict[str, Function]:
    """Functions of toolsets, by the names that verifiers gives them."""
    from verifiers.v1.utils.decorators import discover_decorated  # pyright: ignore[reportMissingImports]

    tools = {}
    for toolset in toolsets:
        for method in discover_decorated(toolset, "tool"):
            own = getattr(method, "tool_name", None) or method.__name__
            made = Function(_plain(method, f"{toolset.server_name}_{own}" if toolset.server_name else own))
            tools[made.name] = made
    return tools


def _plain(method: Any, name: str) -> Any:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        came = method(*args, **kwargs)
        return _wait(came) if inspect.iscoroutine(came) else came

    call.__name__ = name
    return call


def _loaded(options: VerifiersOptions) -> tuple[Any, Any]:
    if not options.taskset:
        raise BadInput("task verifiers: set data.options.taskset to a taskset's id")
    try:
        import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise BadInput(f"task verifiers: {error}; install it with: pip install 'rollkeel[verifiers]'") from None
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    settings = {**options.config, "taskset": {**options.config.get("taskset", {}), "id": options.taskset}}
    try:
        return vf, vf.load_environment(vf.resolve_env_config(settings))
    except Exception as error:  # an import, a config, data that is not there: whatever its author's code raises
        why = " ".join(str(error).split()) or type(error).__name__
        raise BadInput(f"task verifiers: taskset {options.taskset!r}: {excerpt(why, 300)}") from None


def _refuse(name: str, env: Any, problems: Sequence[Any]) -> None:
    """Raise `BadInput` for what cannot be played."""
    if not problems:
        raise BadInput(f"task verifiers: taskset {name!r} has no tasks")
    (task,) = problems
    hooks = [*task.hooks("reward"), *task.hooks("metric"), *(j.score for j in task.plugged_judges())]
    needs = [fn.__name__ for fn in hooks if _needed(fn)]
    needs += [n for n in ("setup", "finalize") if getattr(type(task), n).__module__ != "verifiers.v1.task"
              and _needed(getattr(task, n))]  # fmt: skip
    if task.NEEDS_CONTAINER or task.data.image:
        needs.append("its container")
    if needs:
        raise BadInput(
            f"task verifiers: taskset {name!r} needs a runtime ({', '.join(needs)}), which rollkeel does not start"
        )
    if len(env._agent_specs) != 1:
        raise BadInput(
            f"task verifiers: expected an environment of one agent, {name!r} has {', '.join(env._agent_specs)}"
        )


def _needed(fn: Any) -> bool:
    parameter = inspect.signature(fn).parameters.get("runtime")
    return parameter is not None and parameter.default is parameter.empty


_LOOP: list[asyncio.AbstractEventLoop] = []
_LOCK = threading.Lock()


def _wait(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine. All of them share one loop in a thread of its own, as their authors expect; the caller may have
    a loop itself, as a notebook has."""
    with _LOCK:
        if not _LOOP:
            _LOOP.append(asyncio.new_event_loop())
            threading.Thread(target=_LOOP[0].run_forever, name="verifiers", daemon=True).start()
    return asyncio.run_coroutine_threadsafe(work, _LOOP[0]).result()
