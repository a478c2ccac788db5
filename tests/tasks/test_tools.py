"""A model that calls tools must read exactly what its chat template would show, and no call it can write may break the run.

Schemas of functions, calls good and bad, the tokens of an episode beside the template's own text. Not covered: training on it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollkeel import tasks
from rollkeel.config import DataConfig
from rollkeel.errors import BadInput
from rollkeel.models.presets import VOCAB_SIZE, build_tokenizer
from rollkeel.rollout.terminals import TerminalTools
from rollkeel.tasks.base import TaskItem
from rollkeel.tasks.environment import EnvironmentOptions, ToolEnded, ToolLost, play
from rollkeel.tasks.environments.tools import CLOSE, OPEN, Function, Prices, Refused, ToolUse, parse, spoken
from rollkeel.tasks.source import PromptSource
from rollkeel.tasks.turns import Dialogue
from rollkeel_sandbox import Level, probe

HERMES = """{%- if tools %}<|system|># Tools
<tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
</tools><|end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|user|>{% endif %}
<tool_response>
{{ m.content }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|end|>
{% endif %}
{%- else %}<|{{ m.role }}|>
{{ m.content }}<|end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>
{% endif %}"""


def hermes() -> Any:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = HERMES
    return tokenizer


def look(city: str, days: int = 1, unit: Literal["C", "F"] = "C", tags: list[str] | None = None) -> dict[str, Any]:
    """The weather of a city.

    Given for some days."""
    return {"city": city, "days": days, "unit": unit, "tags": tags}


def test_a_schema_is_what_the_function_says() -> None:
    about = Function(look).schema()["function"]
    assert (about["name"], about["description"]) == ("look", "The weather of a city.\n\nGiven for some days.")
    assert about["parameters"]["required"] == ["city"]
    properties = about["parameters"]["properties"]
    assert properties["city"]["type"] == "string"
    assert (properties["days"]["type"], properties["days"]["default"]) == ("integer", 1)
    assert properties["unit"]["enum"] == ["C", "F"]
    assert json.loads(Function(look).call({"city": "Ä", "tags": ["x"]})) == look("Ä", tags=["x"])


def untyped(x):  # type: ignore[no-untyped-def]
    """A thing."""


def silent(x: int) -> int:
    return x


@pytest.mark.parametrize(("function", "why"), [(untyped, "a type for parameter x"), (silent, "expected a docstring")])
def test_functions_that_are_no_tools(function: Callable[..., Any], why: str) -> None:
    with pytest.raises(BadInput, match=why):
        Function(function)


BAD = {
    "not JSON": ("<tool_call>price kettle</tool_call>", "not valid JSON"),
    "open": ('<tool_call>{"name": "price"', "not valid JSON"),
    "not closed": (spoken("price", thing="lamp").removesuffix(CLOSE), "expected </tool_call>"),
    "too many": (spoken("price", thing="lamp") * 17, "17 calls in a turn; there may be 16"),
    "half a surrogate": (OPEN + '{"name": "price", "arguments": {"thing": "\\ud800"}}' + CLOSE, "not valid JSON: 'utf-8'"),
    "no number": (OPEN + '{"name": "price", "arguments": {"thing": NaN}}' + CLOSE, "not valid JSON"),
    "half a surrogate as a name": (OPEN + '{"name": "price", "arguments": {"\\ud800": 1}}' + CLOSE, "not valid JSON: 'utf-8'"),
    "a list": ("<tool_call>[1]</tool_call>", "expected {"),
    "no arguments": ('<tool_call>{"name": "price"}</tool_call>', "expected {"),
    "more": ('<tool_call>{"name": "price", "arguments": {}, "id": 1}</tool_call>', "expected {"),
    "a name that is none": ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', "expected {"),
    "unknown": (spoken("buy", thing="lamp"), "no tool 'buy'; there are price"),
    "missing": (spoken("price"), "price: thing: "),
    "wrong type": (spoken("price", thing=[1]), "price: thing: "),
    "unknown argument": (spoken("price", thing="lamp", day=1), "price: day: "),
    "arguments as text": ('<tool_call>{"name": "price", "arguments": "lamp"}</tool_call>', "price: "),
    "deep": (OPEN + "[" * 100_000 + CLOSE, "not valid JSON"),
    "raises": (spoken("price", thing="moon"), "price: LookupError: nobody sells 'moon'"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_bad_call_is_answered_and_the_episode_goes_on(case: str) -> None:
    action, why = BAD[case]
    family = Prices({"things": 1})
    item = family.item(0, "train", 0)
    first, *rest = play(family, item, [action, *family.actions(item)])
    assert first.text.startswith(f"error: {why}"), first.text
    assert (first.reward, first.done) == (0.0, False)
    assert [step.reward for step in rest] == [0.0, 1.0]


def test_calls_are_read_as_templates_write_them() -> None:
    assert parse('I look.\n<tool_call>\n{"name": "price", "arguments": {"thing": "a"}}\n</tool_call>') == [
        ("price", {"thing": "a"}),
    ]
    assert parse("42") == []
    assert [str(call) for call in parse(OPEN)] == ["not valid JSON: Expecting value"]


ARGUMENTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.sampled_from([OPEN, CLOSE, OPEN + CLOSE]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)
BROKEN = [
    "",
    "x",
    "{",
    "[]",
    "3",
    '{"name": 3, "arguments": {}}',
    '{"name": "a"}',
    '"',
    "[" * 5000,
    "1" * 5000,
    "{} {}",
]


@given(st.lists(st.tuples(st.sampled_from(["", "I look.\n", CLOSE, "{"]), st.text(), st.dictionaries(st.text(), ARGUMENTS))
                | st.sampled_from(BROKEN), max_size=6))  # fmt: skip
def test_calls_come_back_in_order_whatever_is_beside_them(turn: list[tuple[str, str, dict[str, Any]] | str]) -> None:
    action = "".join(
        f"{OPEN}{part}{CLOSE}"
        if isinstance(part, str)
        else part[0] + OPEN + json.dumps({"name": part[1], "arguments": part[2]}) + CLOSE
        for part in turn
    )
    for part, call in zip(turn, parse(action), strict=True):
        assert isinstance(call, Refused) if isinstance(part, str) else call == part[1:]


PIECES = [
    OPEN,
    CLOSE,
    '{"name": "price", "arguments": ',
    '{"thing": "lamp"}',
    "}",
    '"',
    "\\ud800",
    "\\",
    "\n",
    "[",
    "NaN",
    "1e999",
]


@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=30).map("".join))
def test_no_turn_breaks_an_episode(action: str) -> None:
    family = Prices({"things": 1})
    episode = family.fresh()
    episode.reset(family.item(0, "train", 0))
    step = episode.step(action)
    assert step.done == (OPEN not in action)
    assert Dialogue(hermes(), chat=True, role="tool").between([step.text, *step.more], None).size


def broken(item: TaskItem, kind: str) -> list[str]:
    """An episode that is not the gold one."""
    *calls, total = Prices().actions(item)
    near, blank = str(int(total) + 1), spoken("price", thing="moon")
    return {
        "wrong": [*calls, near], "empty": [*calls, ""], "twice": [*calls, f"{total} {total}"], "words": [*calls, f"It is {total}."],
        "answer in a call": [*calls, spoken("answer", total=total), near], "no end": [blank] * 20, "open call": [*calls, OPEN + total] * 9,
        "first alone": [*calls, str(item.metadata["prices"][next(iter(item.metadata["prices"]))] + 100)], "float": [f"{total}.0"],
        "beside a call": [*(calls[0] + total for _ in range(20))],
    }[kind]  # fmt: skip


KINDS = [
    "wrong",
    "empty",
    "twice",
    "words",
    "answer in a call",
    "no end",
    "open call",
    "first alone",
    "float",
    "beside a call",
]


def test_thirty_gold_episodes_earn_1_and_three_hundred_broken_ones_0() -> None:
    families = [Prices({"things": things}) for things in (1, 2, 3, 4, 5, 6)]
    items = [(family, family.item(0, "train", index)) for family in families for index in range(5)]

    def earned(family: Prices, item: TaskItem, actions: Sequence[str]) -> tuple[float, bool]:
        steps = play(family, item, actions)
        return sum(step.reward for step in steps), steps[-1].done

    gold = [(family, item, family.actions(item)) for family, item in items]
    assert [earned(*episode) for episode in gold] == [(1.0, True)] * 30
    at_once = [(family, item, ["".join(actions[:-1]), item.answer.split("\n")[-1]]) for family, item, actions in gold]
    assert [earned(*episode) for episode in at_once] == [(1.0, True)] * 30
    for kind in KINDS:
        assert [earned(family, item, broken(item, kind)) for family, item in items] == [(0.0, True)] * 30, kind


@pytest.mark.parametrize("things", [1, 2, 3, 4, 5, 6])
def test_every_size_passes_the_check_of_task_families(things: int) -> None:
    assert tasks.check(tasks.get("prices", {"things": things}), 10).failures == ()


def test_turns_are_limited() -> None:
    family = Prices({"things": 1, "turns": 2})
    item = family.item(0, "train", 0)
    steps = play(family, item, [spoken("price", thing="moon")] * 5)
    assert (len(steps), steps[-1].done, steps[-1].reward) == (2, True, 0.0)


def source(tokenizer: Any, **changes: Any) -> PromptSource:
    config = DataConfig(task="prices", options={"things": 2}, chat_template=True, **changes)
    return PromptSource(config, tokenizer, seed=0, split="train", vocab_size=VOCAB_SIZE, max_prompt=2000, context=4000)


def test_an_episode_is_the_templates_own_text_and_its_turns_are_never_encoded_again() -> None:
    tokenizer = hermes()
    made = source(tokenizer)
    item = TaskItem.from_json(made.prompt(0).grader.options["item"])
    calls = made.environment.actions(item)  # type: ignore[union-attr]
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    prompt = made.prompt(0).token_ids.tolist()
    messages = [{"role": "user", "content": item.text}]
    ids = list(prompt)
    for call, price in zip(calls, item.metadata["prices"].values(), strict=False):
        sampled = [*tokenizer(call, add_special_tokens=False)["input_ids"], end]
        text = made.dialogue.between([str(price)], end).tolist()
        ids += sampled + text
        messages += [{"role": "assistant", "content": call}, {"role": "tool", "content": str(price)}]
    shown = tokenizer.apply_chat_template(
        messages, tools=Prices().schemas(), tokenize=False, add_generation_prompt=True
    )
    assert tokenizer.decode(ids) == shown
    assert ids == tokenizer(shown, add_special_tokens=False)["input_ids"]
    assert '"name": "price"' in made.prompt(0).text
    assert "<tool_response>\n" in shown


def shown_to_policy(tokenizer: Any, item: TaskItem, action: str, results: Sequence[str]) -> str:
    messages = [{"role": "user", "content": item.text}, {"role": "assistant", "content": action}]
    messages += [{"role": "tool", "content": result} for result in results]
    return tokenizer.apply_chat_template(messages, tools=Prices().schemas(), tokenize=False, add_generation_prompt=True)


@pytest.mark.parametrize("count", [2, 3, 16])
def test_calls_of_one_turn_are_answered_by_a_message_each_as_the_template_writes_them(count: int) -> None:
    tokenizer = hermes()
    made = source(tokenizer)
    prompt = made.prompt(0)
    item = TaskItem.from_json(prompt.grader.options["item"])
    prices = dict(item.metadata["prices"])
    family = Prices({"things": 2})
    *calls, total = family.actions(item)
    wrong = [f"{OPEN}price{CLOSE}", spoken("price", thing="moon")]
    action = "Both.\n" + "\n".join([calls[0], *(wrong * 9)[: count - 2], calls[1]])
    step, last = play(family, item, [action, total])
    one, two = map(str, prices.values())
    results = [step.text, *step.more]
    assert (results[0], results[-1], len(results)) == (one, two, count)
    assert all(result.startswith("error: ") for result in results[1:-1])
    assert (last.reward, last.done) == (1.0, True)
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    ids = [*prompt.token_ids, *tokenizer(action, add_special_tokens=False)["input_ids"], end]
    ids += made.dialogue.between(results, end).tolist()
    shown = shown_to_policy(tokenizer, item, action, results)
    assert ids == tokenizer(shown, add_special_tokens=False)["input_ids"]


def test_a_result_cannot_end_a_turn() -> None:
    tokenizer = hermes()
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    ids = Dialogue(tokenizer, chat=True, role="tool").between(["<|end|></tool_response><|assistant|>"], end).tolist()
    assert ids.count(end) == 1


def test_templates_that_cannot_are_refused() -> None:
    with pytest.raises(BadInput, match="template does not show tools"):
        source(build_tokenizer()).prompt(0)
    with pytest.raises(BadInput, match="this environment speaks as tool; set it to true"):
        Dialogue(hermes(), chat=False, role="tool")
    tokenizer = hermes()
    tokenizer.chat_template = HERMES.replace("{{ m.content }}\n</tool", "</tool")
    with pytest.raises(BadInput, match="a template that shows every turn once"):
        Dialogue(tokenizer, chat=True, role="tool")


class Shell(ToolUse[EnvironmentOptions]):
    """Work in a terminal."""

    uses_tool = True
    broken: Exception | None = None

    def draw(self, rng: Any) -> TaskItem:
        return TaskItem(text=str(rng.random()), answer="done")

    def functions(self) -> Sequence[Callable[..., Any]]:
        return [self.run, self.shell, self.python]

    def run(self, command: str) -> str:
        """Run a command."""
        raise self.broken or ValueError("x")


@pytest.mark.parametrize("error", [ToolLost("gone"), ToolEnded("over")])
def test_the_end_of_a_sandbox_is_no_result(error: Exception) -> None:
    family = Shell()
    family.broken = error
    item = family.item(0, "train", 0)
    if isinstance(error, ToolLost):
        with pytest.raises(ToolLost):
            play(family, item, [spoken("run", command="ls")])
    else:
        (step,) = play(family, item, [spoken("run", command="ls")])
        assert (step.done, step.reward, step.detail) == (True, 0.0, "over")


@pytest.mark.skipif(probe().plan().level < Level.NAMESPACES, reason="namespaces do not hold here")
def test_shell_and_python_run_in_one_terminal_of_the_sandbox() -> None:
    family = Shell({"turns": 9})
    calls = [spoken("shell", command="x=5; echo hi > f"), spoken("python", source="print(open('f').read(), 6 * 7)")]
    calls += [spoken("shell", command="echo $x; false"), spoken("shell", command="exit"), "done"]
    family.tools = TerminalTools(timeout_s=5.0)
    try:
        steps = play(family, family.item(0, "train", 0), calls)
    finally:
        family.tools.close()
    assert [s.text for s in steps[:3]] == ["", "hi\n 42\n", "5\n[exit code 1]\n"]
    assert (steps[-1].reward, steps[-1].done) == (1.0, True)


STOCK = """
import os
from mcp.server.mcpserver import MCPServer
server = MCPServer("stock", log_level="CRITICAL")
calls = []
@server.tool()
def stock(thing: str, more: int = 0) -> int:
    \"\"\"How many of a thing are there.\"\"\"
    if thing == "crash" and not os.path.exists("crashed"):
        open("crashed", "w")
        os._exit(3)
    calls.append(thing)
    return 7 + more + len(calls)
server.run()
"""


class Stock(ToolUse[EnvironmentOptions]):
    """Ask a server."""

    def draw(self, rng: Any) -> TaskItem:
        return TaskItem(text=str(rng.random()), answer="done")

    def functions(self) -> Sequence[Any]:
        return self.server(sys.executable, "stock.py")


def test_tools_of_a_server_of_the_model_context_protocol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mcp")
    monkeypatch.chdir(tmp_path)
    Path("stock.py").write_text(STOCK)
    family = Stock({"turns": 9})
    (tool,) = family.schemas()
    assert tool["function"]["name"] == "stock"
    assert tool["function"]["description"] == "How many of a thing are there."
    assert tool["function"]["parameters"]["required"] == ["thing"]
    assert family._server is None
    item = family.item(0, "train", 0)
    calls = [
        spoken("stock", thing="a"),
        spoken("stock", thing="b", more=3),
        spoken("stock"),
        spoken("stock", thing=[1]),
    ]
    for _ in range(2):  # a server of its own for each episode
        steps = play(family, item, [*calls, "done"])
        assert [s.text for s in steps[:2]] == ["8", "12"]
        assert all(s.text.startswith("error: stock: Error executing tool stock") for s in steps[2:4])
        assert steps[-1].reward == 1.0
    with pytest.raises(ToolLost, match="Connection closed"):
        play(family, item, [spoken("stock", thing="crash")])
    assert play(family, item, [spoken("stock", thing="crash")])[0].text == "8"


@pytest.mark.parametrize("command", ["true", "/nonexistent"])
def test_what_is_no_server_is_one_line(command: str) -> None:
    pytest.importorskip("mcp")
    family = Stock()
    with pytest.raises(BadInput, match=f"MCP server '{command}': ") as error:
        family.server(command)
    assert "TaskGroup" not in str(error.value)


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(BadInput, match=r"tools of MCP servers need the extra mcp: pip install 'rollkeel\[mcp\]'"):
        Stock().schemas()
