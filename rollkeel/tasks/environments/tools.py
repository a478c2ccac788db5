"""Tools that a policy calls in the form of chat templates: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, one or several in a turn.

Functions with type hints and a docstring are tools. The tokenizer's template shows their JSON schema and speaks their results, as messages of
the role `tool`; a turn without a call is the answer, and ends the episode.
"""

from __future__ import annotations

import inspect
import json
import random
import re
import shlex
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, get_type_hints

from pydantic import Field, ValidationError, create_model

from rollkeel.errors import BadInput, fault
from rollkeel.tasks.base import ASCII_SPACE, TaskItem, excerpt
from rollkeel.tasks.environment import E, Environment, EnvironmentOptions, Step, Tool, ToolEnded, ToolLost

if TYPE_CHECKING:
    from rollkeel.tasks.environments.mcp_tools import Server

OPEN, CLOSE = "<tool_call>", "</tool_call>"
SHOWN = 4000
"""Characters of a result that the model reads."""
MOST = 16
"""Calls of a turn."""
OPENED, CLOSED = re.compile(OPEN + r"[ \t\r\n]*"), re.compile(r"[ \t\r\n]*" + CLOSE)
DECODER = json.JSONDecoder()


class Refused(ValueError):
    """A call that cannot be made; the message is the tool's result."""


class Called(Protocol):
    """A tool."""

    name: str

    def schema(self) -> dict[str, Any]:
        """As chat templates take it."""
        ...

    def call(self, arguments: Any) -> str:
        """What the model reads. Raises `Refused`, `ToolLost` and `ToolEnded`."""
        ...


class Function:
    """A Python function as a tool."""

    def __init__(self, function: Callable[..., Any]) -> None:
        """Raises `BadInput` for one without a docstring, or with a parameter without a type."""
        self._function = function
        self.name = function.__name__
        self._about = inspect.getdoc(function)
        hints, fields = get_type_hints(function, include_extras=True), dict[str, Any]()
        for name, parameter in inspect.signature(function).parameters.items():
            if name not in hints or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                raise BadInput(f"tool {self.name}: expected a type for parameter {name}, one value each")
            needed = parameter.default is parameter.empty
            fields[name] = (hints[name], ... if needed else parameter.default)
        if not self._about:
            raise BadInput(f"tool {self.name}: expected a docstring, which is what the model reads of it")
        self._model = create_model(self.name, __config__={"extra": "forbid"}, **fields)

    def schema(self) -> dict[str, Any]:
        parameters = self._model.model_json_schema()
        parameters.pop("title")
        about = {"name": self.name, "description": self._about, "parameters": parameters}
        return {"type": "function", "function": about}

    def call(self, arguments: Any) -> str:
        try:
            values = self._model.model_validate(arguments)
        except ValidationError as error:
            where, why = fault(error)
            raise Refused(f"{self.name}: {'.'.join(where)}: {why}") from None
        try:
            result = self._function(**dict(values))
        except (ToolLost, ToolEnded):
            raise
        except Exception as error:  # a tool's failure is told to the model
            raise Refused(f"{self.name}: {type(error).__name__}: {error}") from None
        if isinstance(result, str):
            return result
        return json.dumps(result, ensure_ascii=False, default=str)


def parse(action: str) -> list[tuple[str, Any] | Refused]:
    """Calls of a turn, in order: name and arguments, or why one is malformed. Empty where there is none."""
    calls, at = list[tuple[str, Any] | Refused](), 0
    while opened := OPENED.search(action, at):
        at = opened.end()
        try:
            value, end = DECODER.raw_decode(action, at)
            if not (closed := CLOSED.match(action, end)):
                raise Refused(f"expected {CLOSE} behind a call")
            if not isinstance(value, dict) or set(value) != {"name", "arguments"} or not isinstance(value["name"], str):
                raise Refused('expected {"name": …, "arguments": {…}}')
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()  # what Python reads and others do not
            calls.append((value["name"], value["arguments"]))
            at = closed.end()
        except Refused as error:
            calls.append(error)
        except (ValueError, RecursionError) as error:
            calls.append(Refused(f"not valid JSON: {getattr(error, 'msg', error)}"))
    return calls if len(calls) <= MOST else [Refused(f"{len(calls)} calls in a turn; there may be {MOST}")]


def result(tools: Mapping[str, Called], call: tuple[str, Any] | Refused) -> str:
    """What the model reads of a call. Raises `ToolLost` and `ToolEnded`."""
    try:
        if isinstance(call, Refused):
            raise call
        name, arguments = call
        if name not in tools:
            raise Refused(f"no tool {name!r:.80}; there are {', '.join(tools)}")
        text = tools[name].call(arguments)
    except Refused as error:
        text = f"error: {error}"
    return text.encode(errors="replace").decode()[:SHOWN]  # half a surrogate has no tokens


def spoken(name: str, /, **arguments: Any) -> str:
    """A call as the policy writes it, on one line."""
    return OPEN + json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False) + CLOSE


class ToolUse(Environment[E]):
    """Base of families whose turns are tool calls: a subclass defines `draw`, `functions`, `actions`, and `answered` if needed."""

    role: str = "tool"
    junk: ClassVar[tuple[str, ...]] = ("0", " x", ".")
    playing: TaskItem
    _schemas: list[dict[str, Any]] | None = None
    _terminal: Tool | None = None
    _server: Server | None = None

    @abstractmethod
    def functions(self) -> Sequence[Any]:
        """The tools: functions, or methods that read and change this episode. `self.playing` is what it is about.

        With `uses_tool`, `self.shell` and `self.python` are two that run in the sandbox. `self.server` has those of a server."""

    def answered(self, item: TaskItem, text: str) -> tuple[float, str]:
        """Reward and detail of the answer: by default 1 for the item's own and space around it."""
        return float(text == item.answer.rpartition("\n")[2]), excerpt(text)

    def schemas(self) -> list[dict[str, Any]]:
        if self._schemas is None:
            self._schemas = [tool.schema() for tool in self._tools().values()]
            self.close()
        return self._schemas

    def _tools(self) -> dict[str, Called]:
        tools: list[Called] = [Function(tool) if inspect.isroutine(tool) else tool for tool in self.functions()]
        return {tool.name: tool for tool in tools}

    def reset(self, item: TaskItem) -> str:
        self.playing = item
        self._left = self.options.turns or len(self.actions(item)) + 2
        return item.text

    def step(self, action: str) -> Step:
        self._left -= 1
        calls = parse(action)
        if not calls:
            reward, detail = self.answered(self.playing, action.strip(ASCII_SPACE))
            return Step(reward=reward, done=True, detail=detail)
        tools = self._tools()
        try:
            text, *more = [result(tools, call) for call in calls]
        except ToolEnded as error:
            return Step(done=True, detail=str(error))
        return Step(text=text, more=tuple(more), done=self._left <= 0, detail=excerpt(action))

    def shell(self, command: str) -> str:
        """Run a command in a terminal whose files and variables last."""
        if self._terminal is None:
            self._terminal = self.tool()
        return self._terminal.run(command)

    def python(self, source: str) -> str:
        """Run a Python program and return what it prints."""
        return self.shell(f"python3 -c {shlex.quote(source)}")

    def server(self, *command: str) -> Sequence[Called]:
        """Tools of an MCP server that speaks on its standard input and output, which runs for this episode."""
        if self._server is None:
            from rollkeel.tasks.environments.mcp_tools import Server

            self._server = Server(command)
        return self._server.tools()

    def close(self) -> None:
        for held in (self._terminal, self._server):
            if held is not None:
                held.close()
        self._terminal = self._server = None

    def actions(self, item: TaskItem) -> Sequence[str]:
        return item.answer.split("\n")


THINGS = (
    "apple",
    "bread",
    "chair",
    "dress",
    "engine",
    "flute",
    "guitar",
    "hammer",
    "igloo",
    "jacket",
    "kettle",
    "lamp",
)


class PricesOptions(EnvironmentOptions):
    things: int = Field(2, ge=1, le=6, description="things to buy, each priced by a call")


class Prices(ToolUse[PricesOptions]):
    """What things cost together, when only a tool knows their prices."""

    name = "prices"

    def draw(self, rng: random.Random) -> TaskItem:
        prices = {thing: rng.randint(1, 99) for thing in rng.sample(THINGS, self.options.things)}
        total = str(sum(prices.values()))
        calls = [spoken("price", thing=thing) for thing in prices]
        text = f"What do {', '.join(prices)} cost together? Ask for each price, then answer with the number alone."
        return TaskItem(text=text, answer="\n".join([*calls, total]), metadata={"prices": prices})

    def identity(self, item: TaskItem) -> str:
        return repr(sorted(item.metadata["prices"].items()))

    def functions(self) -> Sequence[Callable[..., Any]]:
        return [self.price]

    def price(self, thing: str) -> int:
        """The price of a thing."""
        prices: Mapping[str, int] = self.playing.metadata["prices"]
        if thing not in prices:
            raise LookupError(f"nobody sells {thing!r:.40}")
        return prices[thing]

    def mistakes(self, item: TaskItem) -> Sequence[Sequence[str]]:
        *calls, total = self.actions(item)
        return [[*calls, str(int(total) + 1)], [*calls, ""], [*calls, f"{total} {total}"]]
