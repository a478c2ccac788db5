"""A conversation is right when the state behind it is: whoever compares too little gives points for nothing, whoever compares too much
takes them away. Two small interfaces of our own, rows in the published form, truth tables of what a model may do.

Where the benchmark's package is installed (`pip install --no-deps bfcl-eval`), its own rows, classes and checker are held against ours.
Not covered: what a real model says.
"""

from __future__ import annotations

import copy
import importlib
import json
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "rollout"))

from test_collect import ScriptedEngine, span_of

from rollkeel.config import Config
from rollkeel.errors import BadInput
from rollkeel.evals import conversations, run
from rollkeel.evals.benchmarks import Item, Loaded, Options, get
from rollkeel.evals.conversations import STEPS, Conversation, Conversations
from rollkeel.loop import serving
from rollkeel.loop.eval_sets import problems_in
from rollkeel.models.presets import EOS, build_tokenizer
from rollkeel.protocols import Capabilities
from rollkeel.recipe import load
from rollkeel.rewards.workers import Workers
from rollkeel.tasks.base import TaskItem
from rollkeel.tasks.environments.tools import spoken
from rollkeel.types import Request, Segment, Status

NAME = "bfcl_v3_multi_turn"
TOKENIZER: Any = build_tokenizer()
SHELF = """
import time

class ShelfAPI:
    def _load_scenario(self, scenario, long_context=False):
        self.books = dict(scenario.get("books", {}), **({"filler": 99} if long_context else {}))
        self._looks = 0

    def put(self, title, copies=1):
        self.books[title] = self.books.get(title, 0) + copies
        return {"copies": self.books[title]}

    def take(self, title):
        if not self.books.get(title):
            raise ValueError(f"no {title}")
        self.books[title] -= 1
        return {"copies": self.books[title]}

    def look(self):
        self._looks += 1
        return sorted(self.books)

    def wait(self):
        time.sleep(60)

    def fill(self):
        self.books = bytearray(1 << 40)
"""
ADDER = """
class AdderAPI:
    def add(self, name, a, b=0):
        return {"name": name, "sum": a + b}
"""
BOOKS = {"ShelfAPI": {"books": {"Emma": 1}}}


def about(*names: str) -> str:
    return "".join(
        json.dumps({"name": n, "description": f"{n}.", "parameters": {"type": "dict"}}) + "\n" for n in names
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Interfaces, what is told of them, and rows of all four categories."""
    (tmp_path / "api").mkdir()
    (tmp_path / "api" / "shelf.py").write_text(SHELF)
    (tmp_path / "api" / "adder.py").write_text(ADDER)
    (tmp_path / "doc").mkdir()
    (tmp_path / "doc" / "shelf.json").write_text(about("put", "take", "look", "wait", "fill"))
    (tmp_path / "doc" / "adder.json").write_text(about("add"))
    gold = [["put(title='Ulysses', copies=2)", "take('Emma')"], [], ["add(name='x', a=2)", "look()"]]
    rows = [
        row("base_0", ["Two Ulysses in, Emma out.", "Thanks.", "What is 2 + 0? What is there?"]),
        row("miss_func_0", ["In.", None, "Look."], missed_function={"1": ["look", "add"]}),
        row("miss_param_0", ["In.", "Add.", "2 and 0."]),
        row("long_context_0", ["In.", "Hm.", "Look."]),
        row("composite_0", ["x"]),
    ]
    answers = [{"id": each["id"], "ground_truth": gold} for each in rows]
    for name, some in (("BFCL_v3_multi_turn_base", rows), ("possible_answer/BFCL_v3_multi_turn_base", answers)):
        file = tmp_path / f"{name}.json"
        file.parent.mkdir(exist_ok=True)
        file.write_text("".join(json.dumps(each) + "\n" for each in some))
    return tmp_path


def row(key: str, said: Sequence[str | None], **more: Any) -> dict[str, Any]:
    question = [[] if text is None else [{"role": "user", "content": text}] for text in said]
    more |= {"initial_config": BOOKS, "involved_classes": ["ShelfAPI", "AdderAPI"], "path": []}
    return {"id": f"multi_turn_{key}", "question": question, **more}


def loaded(folder: Path) -> Loaded:
    return get(NAME).load(folder, Options(classes=str(folder)))


def item_of(item: Item) -> TaskItem:
    return TaskItem.from_json(item.grader.options["item"])


def test_rows_are_told_with_the_functions_that_there_are(folder: Path) -> None:
    base, missing, *others = loaded(folder).items
    assert [i.group for i in (base, missing, *others)] == ["base", "miss_func", "miss_param", "long_context"]
    assert base.text.endswith("\n\nTwo Ulysses in, Emma out.")
    assert [f'"{name}"' in base.text for name in ("put", "look", "add")] == [True, True, True]
    assert [f'"{name}"' in missing.text for name in ("put", "look", "add")] == [True, False, False]
    told = item_of(missing).metadata["turns"][1]["asked"]
    assert [f'"{name}"' in told for name in ("put", "look", "add")] == [False, True, True]
    assert [item_of(i).metadata["long"] for i in (base, *others)] == [False, False, True]


PUT, TAKE = spoken("put", title="Ulysses", copies=2), spoken("take", title="Emma")
ADD, LOOK = spoken("add", name="x", a=2), spoken("look")
END = "That is all."
WAYS: list[tuple[str, list[str], float, str]] = [
    ("gold", [PUT + TAKE, END, END, ADD + LOOK, END], 1, "3 turns right"),
    ("one at a time, another order", [TAKE, PUT, END, END, LOOK, ADD, END], 1, "3 turns right"),
    ("a thought is not a call", [PUT + TAKE, f"<think>{PUT}</think>So.", END, ADD + LOOK, END], 1, ""),
    ("another way to the same state", [PUT + TAKE + spoken("put", title="Emma") + TAKE, END, END, ADD + LOOK, END], 1, ""),
    ("what is private may differ", [LOOK + PUT + TAKE, END, END, ADD + LOOK, END], 1, ""),
    ("an answer heard in an earlier turn counts", [PUT + TAKE, END, ADD + LOOK, END, LOOK, END], 1, ""),
    ("an error on the way", [spoken("take", title="X") + PUT + TAKE, END, END, ADD + LOOK, END], 1, ""),
    ("calls where none is right do not count against it", [PUT + TAKE, END, LOOK, END, ADD + LOOK, END], 1, ""),
    ("a state that differs", [PUT, END], 0, "turn 1: ShelfAPI.books is {'Emma': 1, 'Ulysses': 2}, expected {'Emma': 0, 'Ulysses': 2}"),
    ("a type that differs", [spoken("put", title="Ulysses", copies="2") + TAKE, END], 0, "turn 1: ShelfAPI.books is"),
    ("a state changed where nothing was asked", [PUT + TAKE, END, PUT, END, ADD + LOOK, END], 0, "turn 3: ShelfAPI.books is"),
    ("a result that nothing gave", [PUT + TAKE, END, END, LOOK, END], 0, "turn 3: no call gave {\"name\": \"x\", \"sum\": 2}"),
    ("a result that was made another way", [PUT + TAKE, END, END, LOOK + spoken("add", name="y", a=2), END], 0, "turn 3: no call gave"),
    ("no call", [END], 0, "turn 1: no call"),
    ("no call in the last turn", [PUT + TAKE, END, ADD + LOOK, END, END], 0, "turn 3: no call"),
    ("a malformed call ends the turn, and the others of its text are not made", [PUT + TAKE + "<tool_call>{"], 0, "turn 1: no call"),
    ("too many steps", [LOOK] * (STEPS + 1), 0, f"turn 1: more than {STEPS} steps"),
    ("as many as there may be", [*[LOOK] * (STEPS - 1), PUT + TAKE, END, END, ADD + LOOK, END], 1, ""),
]  # fmt: skip


@pytest.mark.parametrize(("said", "reward", "detail"), [w[1:] for w in WAYS], ids=[w[0] for w in WAYS])
def test_what_a_model_may_do(said: list[str], reward: float, detail: str, folder: Path) -> None:
    conversation = Conversation(item_of(loaded(folder).items[0]).metadata)
    steps = [conversation.step(text) for text in said]
    assert [s.done for s in steps] == [False] * (len(said) - 1) + [True]
    assert steps[-1].reward == reward
    assert steps[-1].detail.startswith(detail)


RESULTS: list[tuple[str, Any, str]] = [
    ("put", {"title": "Emma"}, '{"copies": 2}'),
    ("look", {}, "['Emma']"),
    ("take", {"title": "X"}, "Error during execution: no X"),
    ("nothing", {}, "Error during execution: name 'nothing' is not defined"),
    ("books", {}, "Error during execution: name 'books' is not defined"),
    ("_load_scenario", {"scenario": {}}, "Error during execution: name '_load_scenario' is not defined"),
    ("__init__", {}, "Error during execution: name '__init__' is not defined"),
    ("put", ["Emma"], "Error during execution: put: expected arguments by name"),
    ("put", {"self": 1, "title": "Emma"}, "Error during execution: "),
]


@pytest.mark.parametrize(("name", "arguments", "result"), RESULTS)
def test_what_a_call_returns(name: str, arguments: Any, result: str, folder: Path) -> None:
    conversation = Conversation(item_of(loaded(folder).items[0]).metadata)
    said = conversation.step(f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>")
    assert said.text.startswith(f"\n<tool_response>\n{result}")
    assert said.text.endswith("\n</tool_response>\n")


def test_gold_calls_earn_1_in_every_category_and_leave_rows_as_they_are(folder: Path) -> None:
    with Workers() as workers:
        player = Conversations(workers)
        for item in map(item_of, loaded(folder).items):
            before, episode = copy.deepcopy(item), player.fresh()
            assert episode.reset(item) == item.text
            *early, last = [episode.step(action) for action in player.actions(item)]
            assert (last.reward, last.done, [s.done for s in early]) == (1.0, True, [False] * len(early))
            assert item == before


@pytest.mark.parametrize("name", ["wait", "fill"])
def test_calls_that_hang_or_eat_the_memory_lose_and_harm_nobody_else(name: str, folder: Path) -> None:
    item = item_of(loaded(folder).items[0])
    with Workers(deadline_s=1.5) as workers:
        one, other = Conversations(workers), Conversations(workers)
        one.reset(item)
        other.reset(item)
        assert not one.step(PUT).done
        lost = one.step(spoken(name))
        assert (lost.done, lost.reward) == (True, 0.0)
        assert lost.detail.startswith("the calls have no result: ")
        assert [other.step(a).reward for a in other.actions(item)][-1] == 1.0


class Scripted(ScriptedEngine):
    """The n-th turn of the rollout of item i is `words[i][n]`."""

    capabilities = Capabilities(name="scripted", dtype="fp32", max_length=8192)

    def __init__(self, words: Sequence[Sequence[str]]) -> None:
        super().__init__([])
        self.words, self.turns = words, dict[int, int]()
        self.prefixes = list[str]()

    def poll(self, timeout_s: float) -> list[Segment]:
        now, self.requests = self.requests, []
        return [self._said(r) for r in now]

    def _said(self, request: Request) -> Segment:
        n = self.turns[request.id] = self.turns.get(request.id, -1) + 1
        self.prefixes.append(TOKENIZER.decode(request.prefix.token_ids))
        ids = [*TOKENIZER(self.words[request.id // run.MEMBERS][n])["input_ids"], EOS]
        return Segment(request_id=request.id, span=span_of(ids), status=Status.FINISHED)


def test_an_evaluation_plays_every_item_and_says_what_came(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    whole = loaded(folder)
    gold = [[*Conversations(Workers()).actions(item_of(i))] for i in whole.items]
    engine = Scripted([gold[0], [END], gold[2], gold[3]])

    @contextmanager
    def opened(config: Config, policy: Any) -> Iterator[Scripted]:
        yield engine

    monkeypatch.setattr(serving, "opened", opened)
    config = load(None, ["model.path=preset:tiny-qwen3"])
    results = run.run_benchmarks(config, [whole], tmp_path / "out", contexts={NAME: 8192})
    lines = [json.loads(line) for line in (tmp_path / "out" / NAME / "items.jsonl").read_text().splitlines()]
    told = {line["key"]: line["samples"][0] for line in lines}
    assert {k.removeprefix("multi_turn_"): s["reward"] for k, s in told.items()} == {
        "base_0": 1.0,
        "miss_func_0": 0.0,
        "miss_param_0": 1.0,
        "long_context_0": 1.0,
    }
    assert told["multi_turn_miss_func_0"]["detail"] == "turn 1: no call"
    sampled = sum(len(TOKENIZER(text)["input_ids"]) + 1 for text in gold[0])
    assert told["multi_turn_base_0"]["tokens"] == sampled, "results and messages are not the model's tokens"
    metrics = results["benchmarks"][NAME]["metrics"]
    assert metrics["avg@k"]["value"] == 0.75
    assert any("'Ulysses'" in prefix and "Thanks." in prefix and "filler" not in prefix for prefix in engine.prefixes)
    assert any("'filler'" in prefix for prefix in engine.prefixes)


def test_what_cannot_be_played_is_refused_in_one_line(folder: Path) -> None:
    benchmark, answers = get(NAME), folder / "possible_answer" / "BFCL_v3_multi_turn_base.json"
    with pytest.raises(
        BadInput, match=r"^no_such_package: no such package or folder; pip install --no-deps bfcl-eval, or name"
    ):
        benchmark.load(folder, Options(classes="no_such_package"))
    with pytest.raises(BadInput, match=r"^class ShelfAPI: expected one file below .*doc that defines it, got 0$"):
        benchmark.load(folder, Options(classes=str(folder / "doc")))
    with pytest.raises(BadInput, match=r"^class ShelfAPI: expected one shelf.json below .*api, got 0$"):
        benchmark.load(folder, Options(classes=str(folder / "api")))
    with pytest.raises(
        BadInput, match=r"^bfcl_v3_multi_turn: data.grader_options: expected classes=PACKAGE or FOLDER, got"
    ):
        benchmark.graded_by(Options(), {"class": "x"})
    answers.write_text(answers.read_text().replace("take('Emma')", "take(open('x'))"))
    with pytest.raises(
        BadInput, match=r"row 1: gold call \"take\(open\('x'\)\)\": expected name\(arguments\) with literals alone$"
    ):
        benchmark.load(folder, Options(classes=str(folder)))
    rows = folder / "BFCL_v3_multi_turn_base.json"
    rows.write_text(rows.read_text().replace('{"1": ["look"', '{"7": ["look"'))
    answers.write_text(answers.read_text().replace("take(open('x'))", "take('Emma')"))
    with pytest.raises(BadInput, match=r"row 2: column 'missed_function': expected turns 0 to 2, got \[7\]$"):
        benchmark.load(folder, Options(classes=str(folder)))
    config = load(None, [f"eval.sets=[{{benchmark: {NAME}, path: x}}]"])
    with pytest.raises(
        BadInput, match=r"^eval.sets: bfcl_v3_multi_turn is played in turns; use rollkeel eval --benchmark"
    ):
        problems_in(config, config.eval.sets[0])


# -- the published classes, rows and checker ----------------------------------------------------------------------------


def changed(rng: random.Random, turns: list[list[list[Any]]]) -> list[list[list[Any]]]:
    """Steps of each turn, with one call dropped, doubled, moved, put elsewhere or given another argument."""
    at = rng.choice([n for n, steps in enumerate(turns) if steps])
    flat = [call for step in turns[at] for call in step]
    n, way = rng.randrange(len(flat)), rng.choice(("drop", "double", "shuffle", "argument", "move"))
    name, arguments = flat[n]
    if way == "drop":
        del flat[n]
    elif way == "double":
        flat.insert(n, flat[n])
    elif way == "shuffle":
        rng.shuffle(flat)
    elif way == "argument":
        flat[n] = (name, {**arguments, rng.choice([*arguments, "other"]): rng.choice(["x", 3, None])})
    elif at + 1 < len(turns):
        turns[at + 1].insert(0, [flat.pop(n)])
    turns[at] = [[call] for call in flat] if len(flat) < STEPS else [flat]
    return turns


def test_verdicts_are_those_of_the_published_checker() -> None:
    package = pytest.importorskip("bfcl_eval")
    checker = importlib.import_module("bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker")
    kept: dict[str, Any] = vars(importlib.import_module("bfcl_eval.eval_checker.multi_turn_eval.multi_turn_utils"))
    data = Path(package.__file__).parent / "data"
    rows = {
        r["id"]: r for f in data.glob("BFCL_v*_multi_turn_*.json") for r in map(json.loads, f.open(encoding="utf-8"))
    }
    items, rng, verdicts = get(NAME).load(data).items, random.Random(0), list[bool]()
    assert len(items) == 800
    for item in items[::7]:
        row = item_of(item).metadata
        texts = [t["gold"] for t in row["turns"]]
        gold = [conversations.gold_calls(conversations._opened(row), calls) for calls in texts]
        whole = [[calls] if calls else [] for calls in gold]
        for turns in (whole, *(changed(rng, copy.deepcopy(whole)) for _ in range(3))):
            ours = conversation_of(row, turns)
            calls = [
                [[f"{n}({', '.join(f'{k}={v!r}' for k, v in a.items())})" for n, a in step] for step in t]
                for t in turns
            ]
            theirs = checker.multi_turn_checker(calls, texts, rows[item.key], item.group, "model")["valid"]
            for name in [name for name in kept if name.endswith("_instance")]:
                del kept[name]
            assert ours == theirs, (item.key, turns)
            verdicts.append(ours)
    assert 0.3 < sum(verdicts) / len(verdicts) < 0.9


def conversation_of(row: Any, turns: Sequence[Sequence[Sequence[Any]]]) -> bool:
    conversation = Conversation(row)
    for steps in turns:
        for text in (*("".join(spoken(n, **a) for n, a in step) for step in steps), END):
            step = conversation.step(text)
            if step.done:
                return step.reward == 1.0
    raise AssertionError("a conversation of all turns has no end")
