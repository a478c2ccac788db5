"""A published data set that is read wrongly trains on the wrong thing: another column's answer, the loser of a pair, a test that the
policy was to be graded by.

Rows are written here in the columns that the data sets have. Every form becomes what it should, is graded by what it names, and a bad row
of each is refused with what was expected. Not covered: the data sets themselves.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_run import cli

from rollkeel.config import DataConfig, GradersConfig
from rollkeel.errors import BadInput
from rollkeel.rewards import Graders
from rollkeel.rewards.trial import rollout_of
from rollkeel.tasks.constraints import _RLVR
from rollkeel.tasks.data import Row
from rollkeel.tasks.graded import convert, load_graded, records
from rollkeel.tasks.published import FORMS, Issue, Pair, read
from rollkeel.tasks.source import FileProblems
from rollkeel.tasks.tests_form import Refused
from rollkeel_sandbox import Level, probe

ASKED, SAID = {"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "It is 4."}
SYSTEM = {"role": "system", "content": "Be brief."}
MATH = ("math", {})
DIFF = "diff --git a/x.py b/x.py\n--- a/x.py\n+++ b/x.py\n@@ -1 +1 @@\n-a\n+b\n"


def verl(**changes: Any) -> dict[str, Any]:
    return {"data_source": "math_dapo", "prompt": [ASKED], "ability": "MATH", "reward_model": {"ground_truth": "4", "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": "9a9b6eb4-a1cb"}, **changes}  # fmt: skip


def truth(name: str, **arguments: Any) -> str:
    every = dict.fromkeys(["N", "quantifier", "keyword_list", "word", "first_word", "i", "options", "forbidden_words", "letter", "language",
                           "postscript_marker", "original_prompt", "end_phrase", "section_splitter"])  # fmt: skip
    return json.dumps({"func_name": name, **every, **arguments})


def rlvr(ground_truth: Any, **changes: Any) -> dict[str, Any]:
    return {
        "messages": [ASKED],
        "ground_truth": ground_truth,
        "dataset": "ifeval",
        "constraint_type": "x",
        "constraint": "y",
        **changes,
    }


def arena(winner: str, **changes: Any) -> dict[str, Any]:
    a, b = ([ASKED, {"role": "assistant", "content": text}] for text in ("4", "5"))
    return {
        "question_id": "1",
        "model_a": "m",
        "model_b": "n",
        "winner": winner,
        "conversation_a": a,
        "conversation_b": b,
        **changes,
    }


def issue(**changes: Any) -> dict[str, Any]:
    return {"instance_id": "own__it-1", "repo": "own/it", "base_commit": "abc123", "problem_statement": "It fails.", "hints_text": "", "version": "1.0",
            "patch": DIFF, "test_patch": DIFF, "FAIL_TO_PASS": '["t.py::test_a"]', "PASS_TO_PASS": '["t.py::test_b"]', **changes}  # fmt: skip


PARTS = [{"type": "text", "text": "What is 2 + 2?", "image": None}]
# row → prompt, answer, solution, grader, number of messages that a template must be given
PROBLEMS: list[tuple[str, dict[str, Any], tuple[str, str, str | None, Any, int]]] = [
    ("dapo", verl(), ("What is 2 + 2?", "4", None, MATH, 0)),
    ("verl with a system turn and a worked answer", verl(prompt=[SYSTEM, ASKED], data_source="openai/gsm8k", ability=None, extra_info={"answer": "2 + 2 = 4 #### 4"}),
     ("Be brief.\n\nWhat is 2 + 2?", "4", "2 + 2 = 4 #### 4", MATH, 2)),
    ("verl as JSON text, as CSV has it", verl(prompt=json.dumps([ASKED]), reward_model='{"ground_truth": 4}', extra_info=None), ("What is 2 + 2?", "4", None, MATH, 0)),
    ("verl of something else", verl(data_source="poems", ability="poetry"), ("What is 2 + 2?", "4", None, None, 0)),
    ("rlvr-ifeval", rlvr(truth("validate_word_constraint", N=50, quantifier="at most")),
     ("What is 2 + 2?", "", None, ("constraints", {"constraints": [{"kind": "length_constraints:number_words", "num_words": 50, "relation": "at most"}]}), 0)),
    ("rlvr-ifeval, later", rlvr([truth("validate_no_commas")]), ("What is 2 + 2?", "", None, ("constraints", {"constraints": [{"kind": "punctuation:no_comma"}]}), 0)),
    ("rlvr-math", rlvr("4", dataset="MATH"), ("What is 2 + 2?", "4", None, MATH, 0)),
    ("ifeval", {"key": 1, "prompt": "Write.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{"num_words": None}]},
     ("Write.", "", None, ("constraints", {"constraints": [{"kind": "punctuation:no_comma"}]}), 0)),
    ("magpie", {"uuid": "1", "instruction": "What is 2 + 2?", "response": "It is 4.", "conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]},
     ("What is 2 + 2?", "It is 4.", "It is 4.", None, 0)),
    ("alpaca", {"instruction": "Add.", "input": "2 2", "output": "4"}, ("Add.\n\n2 2", "4", "4", None, 0)),
    ("conversations", {"conversations": [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]},
     ("Be brief.\n\nHi", "Ho", "Ho", None, 2)),
    ("messages without an answer", {"messages": [ASKED]}, ("What is 2 + 2?", "", None, None, 0)),
    ("wmt", {"translation": {"de": "Guten Tag.", "en": "Good day."}}, ("Translate from German into English:\n\nGuten Tag.", "Good day.", None, ("translation", {}), 0)),
    ("wmt24++", {"lp": "en-de_DE", "source": "Good day.", "target": "Guten Tag."}, ("Translate from English into German:\n\nGood day.", "Guten Tag.", None, ("translation", {}), 0)),
    ("source and target alone", {"source": "Good day.", "target": "Guten Tag."}, ("Translate:\n\nGood day.", "Guten Tag.", None, ("translation", {}), 0)),
    ("our own", {"prompt": "2+2=", "answer": "4", "grader": "numeric", "grader_options": None}, ("2+2=", "4", None, ("numeric", {}), 0)),
    ("our own, options as text", {"prompt": "Pick.", "answer": "A", "grader": "choice", "grader_options": '{"letters": "AB"}', "solution": "It is A."},
     ("Pick.", "A", "It is A.", ("choice", {"letters": "AB"}), 0)),
    ("math", {"problem": "What is 2 + 2?", "answer": "4", "solution": "2 + 2 = 4."}, ("What is 2 + 2?", "4", "2 + 2 = 4.", None, 0)),
    ("code", {"prompt": "Double.", "tests": [{"input": "2", "output": "4"}], "solution": "print(4)"},
     ("Double.", "print(4)", None, ("code", {"mode": "stdin", "tests": [{"input": "2", "output": "4"}]}), 0)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "record", "made"), PROBLEMS, ids=[name for name, *_ in PROBLEMS])
def test_problems(name: str, record: dict[str, Any], made: tuple[str, str, str | None, Any, int]) -> None:
    row = read(record, 7)
    assert isinstance(row, Row)
    assert row.number == 7
    grader = row.grader and (row.grader.name, row.grader.options)
    assert (row.prompt, row.answer, row.solution, grader, len(row.messages)) == made


@pytest.mark.parametrize(
    ("record", "pair"),
    [
        (arena("model_a"), Pair(prompt="What is 2 + 2?", chosen="4", rejected="5")),
        (arena("model_b"), Pair(prompt="What is 2 + 2?", chosen="5", rejected="4")),
        (arena("model_b", conversation_a=json.dumps([ASKED, SAID]), conversation_b=json.dumps([ASKED, {**SAID, "content": "5"}])),
         Pair(prompt="What is 2 + 2?", chosen="5", rejected="It is 4.")),
        (arena("model_a", conversation_a=[{"role": "user", "content": PARTS}, SAID]), Pair(prompt="What is 2 + 2?", chosen="It is 4.", rejected="5")),
        ({"prompt": "Hi", "chosen": "a", "rejected": "", "margin": 0.5}, Pair(prompt="Hi", chosen="a", rejected="", margin=0.5)),
        ({"prompt": "What is 2 + 2?", "chosen": [ASKED, SAID], "rejected": [ASKED, {**SAID, "content": "No."}]},
         Pair(prompt="What is 2 + 2?", chosen="It is 4.", rejected="No.")),
        ({"chosen": [ASKED, SAID], "rejected": [ASKED, {**SAID, "content": "No."}]}, Pair(prompt="What is 2 + 2?", chosen="It is 4.", rejected="No.")),
    ],
)  # fmt: skip
def test_preference_pairs(record: dict[str, Any], pair: Pair) -> None:
    assert read(record) == pair


def test_issues_of_repositories() -> None:
    made = read(issue())
    assert isinstance(made, Issue)
    assert (made.repo, made.fail_to_pass, made.pass_to_pass) == ("own/it", ("t.py::test_a",), ("t.py::test_b",))
    assert made == read(issue(FAIL_TO_PASS=["t.py::test_a"], PASS_TO_PASS=["t.py::test_b"]))
    assert asdict(made)["patch"] == DIFF


BAD: list[tuple[Any, str]] = [
    (None, "expected a JSON object"),
    ({"text": "x"}, "expected the columns of a known form .*, got text"),
    (verl(prompt=[]), "prompt: expected a list of messages, got '\\[\\]'"),
    (verl(prompt=[{"role": "pirate", "content": "x"}]), "prompt: expected role or from .*, got 'pirate'"),
    (verl(prompt=[{"role": "user", "content": None}]), "prompt: expected text, got nothing"),
    (verl(prompt=[ASKED, SAID]), "expected a conversation that ends with a question"),
    (verl(prompt=" "), "prompt: expected text, got str ' '"),
    (verl(prompt="\ud800"), "prompt: holds a lone surrogate"),
    (verl(reward_model="{"), "reward_model: expected JSON, got '{'"),
    (verl(reward_model=[1]), "reward_model: expected a mapping with ground_truth, got list"),
    (verl(reward_model={"style": "rule"}), r"reward_model\.ground_truth: expected text, got nothing"),
    (verl(reward_model={"ground_truth": {"target": ["4"]}}), r"reward_model\.ground_truth: expected text, got dict"),
    (rlvr(truth("validate_rhymes")), "func_name 'validate_rhymes': unknown"),
    (rlvr(truth("validate_word_constraint", N=50)), "expected N, quantifier, quantifier missing"),
    (rlvr(truth("validate_word_constraint", N=50, quantifier="some")), "relation: expected one of at least"),
    (rlvr(truth("verify_keywords", keyword_list="a")), "keywords: expected texts, got 'a'"),
    (rlvr(truth("validate_choice", options="a/b")), "options: expected texts, got 'a/b'"),
    (rlvr("{not json"), "ground_truth: expected JSON"),
    ({"instruction_id_list": ["x"], "kwargs": [], "prompt": "Hi"}, "expected instruction_id_list and kwargs of one length"),
    ({"instruction_id_list": [], "kwargs": [], "prompt": "Hi"}, "at least one constraint"),
    ({"eval_func": ["def check(r): pass"], "prompt": "Hi"}, "eval_func: expected sources of def evaluate"),
    ({"eval_func": [["def evaluate(r): pass", 1.0]], "query": "Hi"}, "instruction: expected text, got nothing"),
    (arena("tie"), "a tie prefers nothing"),
    (arena("both_bad"), "a tie prefers nothing"),
    (arena("model_c"), "winner: expected model_a, model_b or a tie, got 'model_c'"),
    (arena("model_a", conversation_b=[ASKED, SAID, ASKED, SAID]), "conversations of several turns"),
    (arena("model_a", conversation_b=[{**ASKED, "content": "?"}, SAID]), "got two questions"),
    (arena("model_a", conversation_a=[{"role": "user", "content": [{"type": "image", "image": "x"}]}, SAID]), "got other media"),
    ({"prompt": "Hi", "chosen": "a", "rejected": "a"}, "chosen and rejected are equal"),
    ({"prompt": "Hi", "chosen": "a", "rejected": "b", "margin": -1}, "margin: expected a finite number"),
    ({"translation": {"de": "a"}}, "texts of two languages"),
    ({"translation": {"de": "a", "en": ""}}, "en: expected text, got str ''"),
    (issue(repo="it"), "repo: expected owner/name, got 'it'"),
    (issue(patch="mend it"), "patch: expected a unified diff, got 'mend it'"),
    (issue(FAIL_TO_PASS="[]"), "FAIL_TO_PASS: expected at least one test"),
    (issue(FAIL_TO_PASS="t.py"), "FAIL_TO_PASS: expected JSON"),
    (issue(PASS_TO_PASS=["t.py::test_a"]), "both have 't.py::test_a'"),
    ({"prompt": "x", "grader": "numeric", "grader_options": "[1]"}, "grader_options: expected a mapping, got list"),
    ({"prompt": "x", "tests": "["}, "tests is not JSON"),
]  # fmt: skip


@pytest.mark.parametrize(("record", "why"), BAD)
def test_a_bad_row_is_refused_with_what_was_expected(record: Any, why: str) -> None:
    with pytest.raises(Refused, match=why):
        read(record)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(['[{"role": "user"}]', "[1]", "{}", "model_a", "[{"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "from", "value", "func_name", "ground_truth", "de"]), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
known = sorted({column for columns, _ in FORMS for column in columns} | {"query", "lp", "grader_options", "margin"})


@given(
    st.sampled_from([columns for columns, _ in FORMS]),
    st.dictionaries(st.sampled_from(known), anything, max_size=4),
    st.data(),
)
@settings(deadline=None, max_examples=400)
def test_any_row_is_read_or_refused(columns: set[str], more: dict[str, Any], data: st.DataObject) -> None:
    record = {**more, **{column: data.draw(anything) for column in sorted(columns)}}
    kept, refused = convert([(3, record)], read)
    assert len(kept) + len(refused) == 1
    assert all("\n" not in reason for _, reason in refused)


def config(path: Path, **changes: Any) -> DataConfig:
    return DataConfig(task=None, path=str(path), grader="row", eval_fraction=0.0, **changes)


@pytest.fixture(scope="module")
def graders() -> Iterator[Graders]:
    with Graders(GradersConfig(sandbox_level="restricted"), regrade=0.0) as made:
        yield made


def test_a_run_grades_each_row_by_its_own_grader_and_others_by_the_default(tmp_path: Path, graders: Graders) -> None:
    pytest.importorskip("math_verify")
    pytest.importorskip("langdetect")
    path = tmp_path / "mixed.jsonl"
    rows = [
        verl(),
        rlvr(truth("validate_no_commas")),
        {"question": "Name it.", "answer": "tin"},
        {"text": "?"},
        arena("model_a"),
    ]
    path.write_text("not json\n" + "\n".join(map(json.dumps, rows)) + "\n")
    options = {"grader": "exact", "options": {}}
    with pytest.warns(
        UserWarning, match=r"3 of 6 rows refused: expected a JSON object \(1, first row 1\); expected the columns"
    ):
        problems = FileProblems(config(path, grader_options=options), 0, "train")
    by_row = {p.metadata["row"]: p for p in (problems.problem(i) for i in range(3))}
    assert {number: p.grader.name for number, p in by_row.items()} == {2: "math", 3: "constraints", 4: "exact"}
    right, wrong = {2: r"So \boxed{4}.", 3: "Four it is", 4: "tin"}, {2: r"So \boxed{5}.", 3: "Well, four", 4: "iron"}
    for texts, reward in ((right, 1.0), (wrong, 0.0)):
        done = graders.grade([rollout_of("t", by_row[number], text) for number, text in texts.items()])
        assert [r.reward for r in done] == [reward] * 3, [r.detail for r in done]
    with pytest.raises(BadInput, match="no reference solution to show"):
        problems.response(next(i for i in range(3) if problems.problem(i).metadata["row"] == 3), 0.0)
    with pytest.warns(UserWarning, match=r"names no grader; set data.grader_options.grader \(1, first row 4\)"):
        assert len(load_graded(config(path))) == 2
    with pytest.raises(BadInput, match="expected grader and options, got 'relative'"):
        load_graded(config(path, grader_options={"relative": 1}))


def test_a_conversation_needs_a_template(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(verl(prompt=[SYSTEM, ASKED])) + "\n")
    with pytest.raises(BadInput, match=r"holds 2 messages; set data.chat_template=true \(1, first row 1\)"):
        load_graded(config(path))
    problem = FileProblems(config(path, chat_template=True), 0, "train").problem(0)
    assert list(problem.messages) == [SYSTEM, ASKED]


@pytest.mark.skipif(probe().plan(()).level < Level.RESTRICTED, reason="no isolation can be had here")
@pytest.mark.parametrize(
    ("text", "reward"), [("four words are here", 1.0), ("two words", 0.5), ("", 0.0)], ids=["all", "half", "none"]
)
def test_verification_functions_of_autoif_run_in_the_sandbox(graders: Graders, text: str, reward: float) -> None:
    functions = ["def evaluate(response):\n    return len(response.split()) == 4", ["import re\ndef evaluate(response):\n    return bool(re.search('wo', response))", 0.9],
                 "def evaluate(response):\n    return 1 / 0"]  # fmt: skip
    row = read({"instruction": "Use four words.", "query": "Speak.", "eval_func": json.dumps(functions), "cases": []})
    assert isinstance(row, Row)
    assert row.prompt == "Speak.\n\nUse four words."
    problem: Any = type("P", (), {"text": row.prompt, "answer": "", "grader": row.grader, "metadata": {}})
    [done] = graders.grade([rollout_of("t", problem, text)])
    assert done.reward == reward, done.detail


RLVR: dict[str, tuple[dict[str, Any], str, str]] = {
    "verify_keywords": ({"keyword_list": ["tin", "ore"]}, "Tin is an ore.", "Tin alone."),
    "verify_keyword_frequency": ({"word": "car", "N": 1}, "A car and two cars.", "A car, a car."),
    "validate_forbidden_words": ({"forbidden_words": ["tin"]}, "Iron only.", "Tin only."),
    "verify_letter_frequency": ({"letter": "z", "N": 2}, "zig zag", "zig"),
    "validate_response_language": ({"language": "de"}, "Das ist ein Satz, der ganz auf Deutsch geschrieben wurde.", "This is a sentence that was written in English."),
    "verify_paragraph_count": ({"N": 2}, "One.\n* * *\nTwo.", "One."),
    "validate_word_constraint": ({"N": 10, "quantifier": "around"}, "a b c d e f g h i", "a b c"),
    "verify_sentence_constraint": ({"N": 2, "quantifier": "at least"}, "It is. So it is.", "It is."),
    "validate_paragraphs": ({"N": 2, "first_word": "then", "i": 2}, "First.\n\nThen second.", "First.\n\nSecond."),
    "verify_postscript": ({"postscript_marker": "P.S."}, "Hi.\nP.S. Bye.", "Hi."),
    "validate_placeholders": ({"N": 2}, "[name] of [town]", "[name]"),
    "verify_bullet_points": ({"N": 2}, "* a\n* b", "* a"),
    "validate_title": ({}, "<<Tin>>\nIs an ore.", "Tin"),
    "validate_choice": ({"options": ["yes", "no"]}, "I say yes.", "I say maybe."),
    "validate_highlighted_sections": ({"N": 1}, "a *b* c", "a b c"),
    "validate_sections": ({"N": 2, "section_splitter": "Part"}, "Part 1\nx\nPart 2\ny", "Part 1"),
    "validate_json_format": ({}, '{"a": 1}', "a"),
    "validate_repeat_prompt": ({"original_prompt": "Say it."}, "Say it. It.", "It."),
    "validate_two_responses": ({}, "a\n******\nb", "a"),
    "validate_uppercase": ({}, "THIS IS WRITTEN IN CAPITAL LETTERS ALONE", "This is not"),
    "validate_lowercase": ({}, "this is written in small letters alone", "This is not"),
    "validate_frequency_capital_words": ({"N": 2, "quantifier": "at most"}, "ALL is well", "ALL IS WELL"),
    "validate_end": ({"end_phrase": "So be it."}, "Fine. So be it.", "Fine."),
    "validate_quotation": ({}, '"quoted"', "not"),
    "validate_no_commas": ({}, "none here", "one, here"),
}  # fmt: skip


def test_every_function_of_rlvr_ifeval_pays_for_what_it_asks(graders: Graders) -> None:
    pytest.importorskip("langdetect")
    assert RLVR.keys() == _RLVR.keys()
    for name, (arguments, right, wrong) in RLVR.items():
        row = read(rlvr(truth(name, **arguments)))
        assert isinstance(row, Row)
        problem: Any = type("P", (), {"text": row.prompt, "answer": "", "grader": row.grader, "metadata": {}})
        done = graders.grade([rollout_of("t", problem, text) for text in (right, wrong)])
        assert [r.reward for r in done] == [1.0, 0.0], (name, [r.detail for r in done])


def test_every_kind_of_file_gives_the_same_row(tmp_path: Path) -> None:
    row = verl()
    (tmp_path / "a.jsonl").write_text("\ufeff" + json.dumps(row) + "\n\n")
    (tmp_path / "a.json").write_text(json.dumps([row]))
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "a.parquet")
    with (tmp_path / "a.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, row)
        writer.writeheader()
        writer.writerow({k: json.dumps(v) if isinstance(v, list | dict) else v for k, v in row.items()})
    made = [
        read(record, number)
        for name in ("jsonl", "json", "parquet", "csv")
        for number, record in records(tmp_path / f"a.{name}")
    ]
    assert made == [read(row, 1)] * 4
    for name, text in (("b.json", "{"), ("b.parquet", "x"), ("b.txt", "x")):
        (tmp_path / name).write_text(text)
        with pytest.raises(BadInput, match=r"cannot be read|a file ending in"):
            list(records(tmp_path / name))


def test_the_command_writes_rows_that_are_read_as_the_same_and_loses_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [*(record for _, record, _ in PROBLEMS), arena("model_a"), issue(), *(bad for bad, _ in BAD)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records) + "{\n")
    code, said, _ = cli(capsys, "data", "convert", tmp_path / "in.jsonl", "--out", tmp_path / "out")
    assert code == 0

    def written(kind: str) -> list[Any]:
        return list(map(json.loads, (tmp_path / "out" / f"{kind}.jsonl").read_text().splitlines()))

    before, after = ([read(record) for record in some] for some in ([r for _, r, _ in PROBLEMS], written("problems")))
    for row, same in zip(before, after, strict=True):
        assert row == same
    assert (len(written("pairs")), len(written("issues"))) == (1, 1)
    assert len(written("refused")) == len(BAD) + 1
    assert [line["row"] for line in written("refused")] == list(range(len(PROBLEMS) + 3, len(records) + 2))
    assert said.count("in.jsonl row ") == len(BAD) + 1
    (tmp_path / "bad.jsonl").write_text("1\n")
    code, _, told = cli(capsys, "data", "convert", tmp_path / "bad.jsonl", "--out", tmp_path / "out")
    assert (code, told.count("\n")) == (2, 1)
    assert "none of 1 rows is of a known form" in told
