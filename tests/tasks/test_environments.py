"""An episode must be a function of item and actions, and its demonstration must show the model exactly what a rollout would.

Sudoku by hand, replay, demonstrations token by token, chat templates, text that names special tokens. Not covered: the loop
(tests/rollout/test_episodes.py) and the terminal's sandbox (tests/sandbox/test_environment_terminal.py).
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from rollkeel import tasks
from rollkeel.config import DataConfig
from rollkeel.errors import BadInput
from rollkeel.models.presets import EOS, VOCAB_SIZE, build_tokenizer
from rollkeel.tasks.base import TaskItem
from rollkeel.tasks.environment import Environment, Step, play
from rollkeel.tasks.environments.sudoku_turns import SudokuTurns
from rollkeel.tasks.source import PromptSource
from rollkeel.tasks.turns import Dialogue

TOKENIZER: Any = build_tokenizer()
ITEM = TaskItem(text="1.34/3412/2.43/4321:", answer="1234/3412/2143/4321")


def sudoku(**options: Any) -> Environment[Any]:
    task = tasks.get("sudoku_turns", options)
    assert isinstance(task, Environment)
    return task


def said(steps: list[Step]) -> list[tuple[str, float, bool]]:
    return [(s.text, s.reward, s.done) for s in steps]


def test_sudoku_by_hand() -> None:
    steps = play(sudoku(holes=2, turns=9), ITEM, ["113", "123", "12", " 122\n", "122", "3 2 1", "321", "321"])
    left, done = "1234/3412/2.43/4321:", "1234/3412/2143/4321:"
    assert said(steps) == [
        ("\nfilled\n" + ITEM.text, 0.0, False),
        ("\nwrong\n" + ITEM.text, 0.0, False),
        ("\nunreadable\n" + ITEM.text, 0.0, False),
        ("\nok\n" + left, 0.0, False),
        ("\nfilled\n" + left, 0.0, False),
        ("\nunreadable\n" + left, 0.0, False),
        ("\nok\n" + done, 1.0, True),  # what comes after is not taken
    ]


@pytest.mark.parametrize(("turns", "ended"), [(0, 2), (3, 3), (4, 3)])
def test_a_wrong_turn_is_a_turn_less(turns: int, ended: int) -> None:
    steps = play(sudoku(holes=2, turns=turns), ITEM, ["123", "122", "321"])
    assert (len(steps), steps[-1].done) == (ended, True)
    assert sum(s.reward for s in steps) == float(turns != 0)


@pytest.mark.parametrize("options", [{}, {"holes": 1}, {"holes": 8}, {"side": 9, "holes": 30}])
def test_check_proves_every_level(options: dict[str, Any]) -> None:
    report = tasks.check(sudoku(**options), 20)
    assert report.failures == ()
    assert report.scored > 60 * 15


def test_an_episode_is_a_function_of_item_and_actions() -> None:
    family = sudoku(holes=3)
    for index in range(20):
        item, rng = family.item(0, "train", index), random.Random(index)
        actions = [f"{rng.randint(1, 4)}{rng.randint(1, 4)}{rng.randint(1, 4)}" for _ in range(5)]
        first = play(family, item, actions)
        play(family, ITEM, ["122"])  # another episode between leaves no trace
        assert play(family, TaskItem.from_json(item.to_json()), actions) == first


@pytest.mark.parametrize(
    ("response", "why"),
    [
        ("122", "1 cells empty"),
        ("122\n321\n", "3 actions for an episode of 2"),
        ("", "unreadable"),
        ("122\n322", "wrong"),
    ],
)
def test_as_a_task_a_response_is_all_actions_and_no_more(response: str, why: str) -> None:
    family = sudoku(holes=2)
    assert family.score(ITEM, "122\n321") == (1.0, "ok: 321, 0 cells empty")
    reward, detail = family.score(ITEM, response)
    assert reward == 0.0
    assert why in detail


def test_a_tool_must_be_handed_in() -> None:
    terminal = tasks.get("terminal")
    with pytest.raises(BadInput, match="expected a tool to play with, got none"):
        terminal.score(terminal.item(0, "train", 0), "done")


def source(**changes: Any) -> PromptSource:
    config = DataConfig(task="sudoku_turns", options={"holes": 2, "turns": 3})
    settings = {"seed": 0, "split": "sft", "vocab_size": VOCAB_SIZE, "max_prompt": 64, "context": 200, **changes}
    return PromptSource(config, TOKENIZER, **settings)


def test_a_demonstration_shows_what_is_said_and_marks_what_is_the_models() -> None:
    made = source()
    prompt, response, own = made.demonstration(3)
    item = TaskItem.from_json(made.prompt(3).grader.options["item"])
    family = sudoku(holes=2, turns=3)
    first, second = family.actions(item)
    heard = play(family, item, [first])[0].text
    assert TOKENIZER.decode(prompt) == item.text
    assert TOKENIZER.decode(response) == f"{first}<eos>{heard}{second}<eos>"
    assert TOKENIZER.decode(response[own]) == f"{first}<eos>{second}<eos>"
    assert (own.dtype, own[0], own[-1]) == (bool, True, True)


def test_noise_slips_and_recovers_while_turns_last() -> None:
    made, seen = source(), set()
    for index in range(12):
        _, response, own = made.demonstration(index, label_noise=0.5)
        turns = TOKENIZER.decode(response[own]).split("<eos>")[:-1]
        item = TaskItem.from_json(made.prompt(index).grader.options["item"])
        steps = play(sudoku(holes=2, turns=3), item, turns)
        assert len(steps) == len(turns)
        assert steps[-1].done
        seen.add((len(turns), sum(s.reward for s in steps)))
        assert np.array_equal(made.demonstration(index, label_noise=0.5)[1], response)
    assert seen == {(2, 1.0), (3, 1.0), (3, 0.0)}


def test_an_episode_beyond_the_context_is_refused() -> None:
    with pytest.raises(BadInput, match="prompt and answer take 52 tokens, expected at most 51"):
        source(context=51).demonstration(0)
    source(context=52).demonstration(0)


CHAT = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@pytest.mark.parametrize("cut", [False, True])
def test_in_a_chat_the_environment_is_the_user(cut: bool) -> None:
    tokenizer: Any = build_tokenizer()
    tokenizer.chat_template = CHAT
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    ids = Dialogue(tokenizer, chat=True).between(["ok?"], None if cut else end)
    assert tokenizer.decode(ids) == ("<|end|>" if cut else "") + "<|user|>ok?<|end|><|assistant|>"
    whole = tokenizer.apply_chat_template(
        [{"role": r, "content": c} for r, c in (("user", "1"), ("assistant", "2"), ("user", "ok?"))],
        tokenize=False, add_generation_prompt=True,
    )  # fmt: skip
    assert whole.endswith("2" + ("" if cut else "<|end|>") + tokenizer.decode(ids))


def test_a_template_that_hides_turns_is_refused() -> None:
    tokenizer: Any = build_tokenizer()
    tokenizer.chat_template = "{{ messages[-1].content }}"
    with pytest.raises(BadInput, match="expected a template that shows every turn once"):
        Dialogue(tokenizer, chat=True)


def test_a_tool_cannot_write_special_tokens() -> None:
    text = "cat: <eos> <|end|>\n"
    ids = Dialogue(TOKENIZER, chat=False).between([text], EOS)
    assert EOS not in ids
    assert min(ids) >= 8  # bytes alone
    assert TOKENIZER.decode(ids) == text
    assert EOS in TOKENIZER(text)["input_ids"]  # as it would be
    assert Dialogue(TOKENIZER, chat=False).between([""], EOS).tolist() == []


def test_families_are_named_and_final() -> None:
    assert {"sudoku_turns", "terminal"} <= set(tasks.names())
    assert SudokuTurns().grader(ITEM).name == "environment"
