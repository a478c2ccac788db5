"""Conversations in which a model works on the state of program interfaces by calls, as the multi-turn part of BFCL v3 has them.

    user ─▶ calls ─▶ results ─▶ calls ─▶ … ─▶ a text without a call ─▶ user ─▶ … ─▶ reward

The interfaces are classes of the benchmark, which a user installs or names. Calls are made in a worker process that can be killed. It
plays the whole conversation from its start for every step, so that a step is a function of the row and the model's texts alone.
"""

from __future__ import annotations

import ast
import copy
import importlib.util
import inspect
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, final

from rollkeel import plugins
from rollkeel.errors import BadInput
from rollkeel.evals import reading
from rollkeel.evals.calls import Call, calls_in
from rollkeel.rewards.workers import NoVerdict, Workers
from rollkeel.tasks.base import TaskItem, excerpt
from rollkeel.tasks.environment import Environment, EnvironmentOptions, Step
from rollkeel.tasks.environments.tools import Refused, spoken

STEPS = 20
"""Steps with calls that a turn may have; with one more the conversation is lost."""
_CLASS = re.compile(r"^class (\w+)", re.MULTILINE)
_PLAYED = f"{__name__}:played"


# -- the interfaces -----------------------------------------------------------------------------------------------------


class Interfaces:
    """Classes of a package or folder by name, each with the functions that are described in the `.json` beside its `.py`."""

    def __init__(self, place: str) -> None:
        """`place`: an installed package, or a folder of files. Raises `BadInput` where neither is there."""
        spec = importlib.util.find_spec(place) if re.fullmatch(r"\w+", place) else None
        self._package = place if spec and spec.origin else ""
        self.root = Path(spec.origin).parent if spec and spec.origin else Path(place).expanduser().resolve()
        if not self.root.is_dir():
            raise BadInput(
                f"{place}: no such package or folder; pip install --no-deps bfcl-eval, or name a folder with the benchmark's "
                "classes: data.grader_options.classes=FOLDER"
            )
        self._files: dict[str, list[Path]] = {}
        for file in sorted(self.root.rglob("*.py")):
            for name in _CLASS.findall(file.read_text(encoding="utf-8", errors="replace")):
                self._files.setdefault(name, []).append(file)

    def address(self, name: str) -> str:
        """Where `plugins.load` finds the class."""
        file = self._file(name)
        if not self._package:
            return f"{file}:{name}"
        return ".".join([self._package, *file.relative_to(self.root).with_suffix("").parts]) + f":{name}"

    def functions(self, name: str) -> list[dict[str, Any]]:
        """Name, description and parameters of each function of the class that a model is told of."""
        stem = self._file(name).stem
        found = sorted(self.root.rglob(f"{stem}.json"))
        if len(found) != 1:
            raise BadInput(f"class {name}: expected one {stem}.json below {self.root}, got {len(found)}")
        try:
            functions = [json.loads(line) for line in found[0].read_text(encoding="utf-8").splitlines() if line.strip()]
        except ValueError as error:
            raise BadInput(f"{found[0]}: not valid JSON, one function a line: {error}") from None
        if not functions or not all(isinstance(f, dict) and isinstance(f.get("name"), str) for f in functions):
            raise BadInput(f"{found[0]}: expected a function a line, an object with a name")
        return functions

    def _file(self, name: str) -> Path:
        files = self._files.get(name, [])
        if len(files) != 1:
            raise BadInput(f"class {name}: expected one file below {self.root} that defines it, got {len(files)}")
        return files[0]


@lru_cache
def interfaces(place: str) -> Interfaces:
    """`Interfaces`, looked up once."""
    return Interfaces(place)


# -- one conversation ---------------------------------------------------------------------------------------------------


@final
class Conversation:
    """Two copies of every interface: the model's calls change one, the gold calls the other, and they are compared turn by turn."""

    def __init__(self, row: Mapping[str, Any]) -> None:
        """`row`: `{classes: {name: address}, config: {name: state}, long: bool, turns: [{asked, gold}]}`."""
        self._turns = row["turns"]
        self._mine, self._gold = _opened(row), _opened(row)
        self._turn, self._steps = 0, 0
        self._heard = list[str]()
        """Results of all the model's calls."""

    def step(self, text: str) -> Step:
        """Make the calls of one text; one without a call, or with a malformed one, ends the turn."""
        try:
            calls = calls_in(reading.spoken(text))
        except Refused:
            calls = []
        return self._called(calls) if calls else self._next()

    def _called(self, calls: Sequence[Call]) -> Step:
        results = [called(self._mine, name, arguments) for name, arguments in calls]
        self._heard += results
        self._steps += 1
        if self._steps > STEPS:
            return Step(done=True, detail=f"turn {self._turn + 1}: more than {STEPS} steps")
        told = "".join(f"<tool_response>\n{result}\n</tool_response>\n" for result in results)
        return Step(text=f"\n{told}", detail=excerpt("; ".join(results)))

    def _next(self) -> Step:
        if why := self._fault(self._turns[self._turn]["gold"]):
            return Step(done=True, detail=f"turn {self._turn + 1}: {why}")
        self._turn, self._steps = self._turn + 1, 0
        if self._turn == len(self._turns):
            return Step(reward=1.0, done=True, detail=f"{self._turn} turns right")
        return Step(text=f"\n{self._turns[self._turn]['asked']}\n", detail=f"turn {self._turn} right")

    def _fault(self, gold: Sequence[str]) -> str:
        """What is wrong with the turn that ends; empty where nothing is, and where no call is right, so that nothing is compared."""
        if not gold:
            return ""
        results = [called(self._gold, name, arguments) for name, arguments in gold_calls(self._gold, gold)]
        if not self._steps:
            return "no call"
        for name, wanted in self._gold.items():
            mine = vars(self._mine[name])
            for key, value in vars(wanted).items():
                if not key.startswith("_") and (key not in mine or mine[key] != value):
                    return f"{name}.{key} is {excerpt(repr(mine.get(key)))}, expected {excerpt(repr(value))}"
        missing = Counter(results) - Counter(self._heard)
        return f"no call gave {excerpt(next(iter(missing)))}" if missing else ""


def _opened(row: Mapping[str, Any]) -> dict[str, Any]:
    """An instance of every class, in the row's state."""
    made = dict[str, Any]()
    for name, address in row["classes"].items():
        made[name] = plugins.load(address, "data.grader_options.classes")()
        if hasattr(made[name], "_load_scenario"):  # those without a state have none to load
            made[name]._load_scenario(copy.deepcopy(row["config"].get(name, {})), long_context=row["long"])
    return made


def called(instances: Mapping[str, Any], name: str, arguments: Any) -> str:
    """What a call returns, as text; an error of the interface is a result too. Of two classes with one function the later has it."""
    try:
        function = _function(instances, name)
        if not isinstance(arguments, dict):
            raise TypeError(f"{name}: expected arguments by name")
        result = function(**arguments)
    except MemoryError:  # the worker's limit, not the interface's word
        raise
    except Exception as error:  # whatever the interface raises is told to the model
        return f"Error during execution: {error}"
    if not isinstance(result, dict):
        return str(result)
    try:
        return json.dumps(result)
    except (TypeError, ValueError):
        return str(result)


def _function(instances: Mapping[str, Any], name: str) -> Any:
    for instance in reversed([*instances.values()]):
        method = None if name.startswith("_") else getattr(instance, name, None)
        if inspect.ismethod(method):
            return method
    raise NameError(f"name {name!r} is not defined")


def gold_calls(instances: Mapping[str, Any], gold: Sequence[str]) -> list[Call]:
    """Gold calls, Python text of literals, with their arguments by name. Raises `ValueError` for any other text."""
    calls = list[Call]()
    for text in gold:
        name, positional, named = parsed(text)
        bound = inspect.signature(_function(instances, name)).bind(*positional, **named)
        calls.append((name, dict(bound.arguments)))
    return calls


def parsed(text: str) -> tuple[str, list[Any], dict[str, Any]]:
    """Function, positional and named arguments of a call. Raises `ValueError` for what is no call of literals."""
    try:
        node = ast.parse(text.strip(), mode="eval").body
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            named = {str(each.arg): ast.literal_eval(each.value) for each in node.keywords}
            return node.func.id, [ast.literal_eval(each) for each in node.args], named
    except (SyntaxError, ValueError, RecursionError):
        pass
    raise ValueError(f"gold call {text!r:.80}: expected name(arguments) with literals alone")


# -- as an environment --------------------------------------------------------------------------------------------------


def played(actions: str, answer: str, options: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """In a worker: what comes of the last of `actions` (JSON) in the conversation of the row `options`."""
    conversation, step = Conversation(options), Step()
    for action in json.loads(actions):
        step = conversation.step(action)
    return {"text": step.text, "reward": step.reward, "done": step.done}, step.detail


@final
class Conversations(Environment[EnvironmentOptions]):
    """Conversations of a benchmark. Nothing is drawn: items are its rows."""

    name = "conversations"
    summary = "conversations of a benchmark about the state of program interfaces"

    def __init__(self, workers: Workers) -> None:
        """`workers`: where calls are made."""
        super().__init__({})
        self._workers = workers

    def draw(self, rng: Any) -> TaskItem:
        raise BadInput("conversations: a benchmark draws no items; nothing is trained on it")

    def reset(self, item: TaskItem) -> str:
        self._row, self._actions = item.metadata, list[str]()
        return item.text

    def step(self, action: str) -> Step:
        """Where the calls of `action` hang or eat the memory, and the conversation without them does not, they are to blame."""
        before, self._actions = self._actions, [*self._actions, action]
        try:
            told, detail = self._workers.run(_PLAYED, json.dumps(self._actions), "", self._row)
        except NoVerdict as error:
            self._workers.run(_PLAYED, json.dumps(before), "", self._row)
            return Step(done=True, detail=f"the calls have no result: {error}")
        return Step(**told, detail=detail)

    def actions(self, item: TaskItem) -> Sequence[str]:
        """The gold calls of each turn in one text, and a text without a call behind it."""
        instances, texts = _opened(item.metadata), list[str]()
        for turn in item.metadata["turns"]:
            calls = gold_calls(instances, turn["gold"])
            texts += ["".join(spoken(name, **arguments) for name, arguments in calls)] if calls else []
            texts.append("Done.")
        return texts
