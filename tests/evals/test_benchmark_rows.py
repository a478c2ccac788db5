"""Every benchmark's rows, made up in the form in which they are published, become the question and gold answer they should.

No benchmark contents are here. Not covered: that the published files have this form today, and what graders of other folders say.
"""

from __future__ import annotations

import base64
import collections
import csv
import json
import pickle
import sys
import typing
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollkeel import rewards
from rollkeel.errors import BadInput
from rollkeel.evals.benchmarks import BENCHMARKS, Loaded, Options, get
from rollkeel.evals.benchmarks.programs import PRELUDE, _tests
from rollkeel.rewards import graders
from rollkeel.tasks.constraints import check


@pytest.fixture(autouse=True)
def _fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("math", "choice", "code", "constraints"):
        monkeypatch.setitem(graders._GRADERS, name, graders.Entry(lane=graders.Lane.INLINE, run=str))


def jsonl(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def load(name: str, path: Path, **options: Any) -> Loaded:
    return get(name).load(path, Options(**options))


PROBLEM = {"problem": "What is 1 + 1?", "answer": 2, "problem_idx": 1, "problem_type": ["Algebra"]}
MMLU = {
    "question_id": 70, "question": "Which is a bird?", "options": ["cat", "owl", "dog", "N/A"], "answer": "B", "answer_index": 1,
    "cot_content": "", "category": "biology", "src": "made up",
}  # fmt: skip
GPQA = {
    "Record ID": "rec1", "Question": "Which is even?", "Correct Answer": "two", "Incorrect Answer 1": "one", "Incorrect Answer 2": "three",
    "Incorrect Answer 3": "five", "High-level domain": "Mathematics",
}  # fmt: skip
CEVAL = {"id": 0, "question": "哪个是偶数？", "A": "1", "B": "2", "C": "3", "D": "5", "answer": "B", "explanation": ""}
ZEBRA = {
    "id": "lgp-1", "size": "2*2", "puzzle": "Two houses …", "created_at": "2024",
    "solution": {"header": ["House", "Name", "Pet"], "rows": [["1", "Ann", "cat"], ["2", "Bob", "dog"]]},
}  # fmt: skip
ARC = {"train": [{"input": [[1, 0]], "output": [[0, 1]]}], "test": [{"input": [[2, 0]], "output": [[0, 2]]}]}
IFEVAL = {
    "key": 1000, "prompt": "Write two words.", "instruction_id_list": ["length_constraints:number_words", "punctuation:no_comma"],
    "kwargs": [{"relation": "at least", "num_words": 2, "keywords": None}, {}],
}  # fmt: skip


def lcb(**changes: Any) -> dict[str, Any]:
    row = {
        "question_title": "Double", "question_content": "Print twice the number.", "platform": "atcoder", "question_id": "abc1_a",
        "contest_id": "abc1", "contest_date": "2024-09-01T00:00:00", "starter_code": "", "difficulty": "easy",
        "public_test_cases": json.dumps([{"input": "2\n", "output": "4\n", "testtype": "stdin"}]),
        "private_test_cases": packed([{"input": "3\n", "output": "6\n", "testtype": "stdin"}]), "metadata": "{}",
    }  # fmt: skip
    return {**row, **changes}


def packed(tests: list[dict[str, str]]) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(tests)))).decode()


@pytest.mark.parametrize("name", ["aime25", "hmmt25", "aime24", "omni_math"])
def test_mathematics(name: str, tmp_path: Path) -> None:
    found = load(name, jsonl(tmp_path / "test.jsonl", [{**PROBLEM, "difficulty": 4.5}]))
    [item] = found.items
    assert item.text.startswith("What is 1 + 1?\n\n")
    assert item.text.endswith(r"\boxed{}.")
    assert (item.answer, item.key, item.grader.name) == ("2", "1", "math")
    assert f"expected the {get(name).items} items" in found.warning


def test_math500_and_cnmo_columns(tmp_path: Path) -> None:
    row = {
        "problem": "p",
        "solution": "s",
        "answer": r"\frac{1}{2}",
        "subject": "Algebra",
        "level": 3,
        "unique_id": "test/a/1.json",
    }
    [item] = load("math500", jsonl(tmp_path / "test.jsonl", [row])).items
    assert (item.key, item.group, item.answer) == ("test/a/1.json", "Algebra", r"\frac{1}{2}")
    [item] = load("cnmo24", jsonl(tmp_path / "c.jsonl", [{"question": "q", "answer": "3", "question_type": "x"}])).items
    assert item.text.startswith("q\n")


def test_the_documented_number_of_items_needs_no_warning(tmp_path: Path) -> None:
    rows = [{**PROBLEM, "problem": f"What is {i} + 1?", "answer": i + 1} for i in range(30)]
    assert load("aime25", jsonl(tmp_path / "train.jsonl", rows)).warning == ""
    assert load("aime25", tmp_path / "train.jsonl", limit=3).warning == ""
    assert len(load("aime25", tmp_path / "train.jsonl", limit=3).items) == 3


def test_mmlu_pro_leaves_out_what_is_no_choice(tmp_path: Path) -> None:
    [item] = load("mmlu_pro", jsonl(tmp_path / "test.jsonl", [MMLU])).items
    assert "A. cat\nB. owl\nC. dog\n\n" in item.text
    assert (item.answer, item.key, item.group, item.order) == ("B", "70", "biology", ())
    assert item.grader.options == {"letters": "ABC"}


def test_shuffled_choices_are_a_function_of_the_seed_and_keep_the_answer(tmp_path: Path) -> None:
    rows = [{**MMLU, "question_id": i, "options": ["cat", "owl", "dog", "fox"]} for i in range(40)]
    path = jsonl(tmp_path / "test.jsonl", rows)
    one, again, other = (load("mmlu_pro", path, shuffle=seed).items for seed in (1, 1, 2))
    assert one == again
    assert [i.order for i in one] != [i.order for i in other]
    assert {i.answer for i in one} == set("ABCD")
    for item in one:
        assert f"{item.answer}. owl" in item.text
        assert [rows[0]["options"][place] for place in item.order]["ABCD".index(item.answer)] == "owl"
    assert load("mmlu_pro", path, shuffle=1).options.shuffle == 1


def test_gpqa_never_shows_the_right_answer_first_by_habit(tmp_path: Path) -> None:
    path = tmp_path / "gpqa_diamond.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*GPQA, "Explanation"])
        writer.writeheader()
        writer.writerows({**GPQA, "Record ID": f"rec{i}", "Explanation": 'a, "b"\nc'} for i in range(40))
    items = load("gpqa_diamond", tmp_path).items
    assert {i.answer for i in items} == set("ABCD")
    assert all(f"{i.answer}. two" in i.text for i in items)
    assert all(sorted(i.order) == [0, 1, 2, 3] for i in items)


def test_ceval_takes_subjects_from_files_and_leaves_hidden_answers_out(tmp_path: Path) -> None:
    for subject in ("law", "logic"):
        path = tmp_path / "val" / f"{subject}_val.csv"
        path.parent.mkdir(exist_ok=True)
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(CEVAL))
            writer.writeheader()
            writer.writerow(CEVAL)
    items = load("ceval", tmp_path).items
    assert [(i.key, i.group, i.answer) for i in items] == [("law/0", "law", "B"), ("logic/0", "logic", "B")]
    hidden = jsonl(tmp_path / "hidden.jsonl", [{**CEVAL, "answer": ""}])
    with pytest.raises(BadInput, match="no items"):
        load("ceval", hidden)


def test_arc_asks_each_test_input_and_keeps_those_of_a_task_together(tmp_path: Path) -> None:
    for name, tests in (("aa11", 1), ("bb22", 2)):
        path = tmp_path / "data" / "evaluation" / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**ARC, "test": ARC["test"] * tests}))
    (tmp_path / "data" / "training").mkdir()
    (tmp_path / "data" / "training" / "cc33.json").write_text(json.dumps(ARC))
    items = load("arc_agi_1", tmp_path).items
    assert [(i.key, i.unit) for i in items] == [("aa11/0", "aa11"), ("bb22/0", "bb22"), ("bb22/1", "bb22")]
    assert "Input:\n[[1,0]]\nOutput:\n[[0,1]]" in items[0].text
    assert items[0].answer == "[[0,2]]"
    assert "[[0,2]]" not in items[0].text


def test_bbeh_from_the_repository_and_from_the_hub(tmp_path: Path) -> None:
    task = tmp_path / "benchmark_tasks" / "bbeh_word_sorting" / "task.json"
    task.parent.mkdir(parents=True)
    task.write_text(json.dumps({"canary": "…", "examples": [{"input": "Sort b a", "target": "a b"}]}))
    [item] = load("bbeh", tmp_path).items
    assert (item.group, item.answer) == ("word sorting", "a b")
    [item] = load(
        "bbeh", jsonl(tmp_path / "t.jsonl", [{"input": "i", "target": 5, "task": "word sorting", "mini": 1}])
    ).items
    assert (item.group, item.answer) == ("word sorting", "5")


def test_zebra_logic_from_parquet(tmp_path: Path) -> None:
    path = tmp_path / "grid_mode" / "test-0.parquet"
    path.parent.mkdir()
    pq.write_table(pa.Table.from_pylist([ZEBRA]), path)
    [item] = load("zebra_logic", tmp_path).items
    assert json.loads(item.answer) == {
        "House 1": {"Name": "Ann", "Pet": "cat"},
        "House 2": {"Name": "Bob", "Pet": "dog"},
    }
    assert '"House 2": {"Name": "…", "Pet": "…"}' in item.text
    assert "Ann" not in item.text
    hidden = {**ZEBRA, "solution": {"header": ["House", "Name"], "rows": [["1", "___"]]}}
    with pytest.raises(BadInput, match="hidden"):
        load("zebra_logic", jsonl(tmp_path / "z.jsonl", [hidden]))


def test_ifeval_keeps_each_instructions_own_arguments(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.Table.from_pylist([IFEVAL]), path)
    [item] = load("ifeval", path).items
    assert item.text == "Write two words."
    assert item.grader.options["constraints"] == IFEVAL_CONSTRAINTS
    assert item.key == "1000"


def test_ifeval_numbers_of_tables_with_gaps_are_whole_again(tmp_path: Path) -> None:
    """Where one row has no number, pandas stores those of all others as floats, which the grader refuses."""
    given = [{"relation": "at least", "num_words": 2.0, "keywords": None}, None]
    path = jsonl(tmp_path / "x.jsonl", [{**IFEVAL, "kwargs": given}])
    [item] = load("ifeval", path).items
    assert item.grader.options["constraints"] == IFEVAL_CONSTRAINTS
    assert [ok for ok, _ in check("Two words", item.grader.options["constraints"])] == [True, True]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kwargs": [{}]}, "ifeval row 1: expected as many kwargs as instructions, got 1 and 2"),
        ({"instruction_id_list": [], "kwargs": []}, "ifeval row 1: expected as many kwargs as instructions, got 0 and 0"),
        ({"instruction_id_list": ["punctuation:no_coma", "x"]}, "ifeval row 1: .*did you mean punctuation:no_comma"),
        ({"kwargs": [{"relation": "at least"}, {}]}, "ifeval row 1: .*number_words: .* num_words missing"),
    ],
)  # fmt: skip
def test_ifeval_rows_that_no_grader_could_check_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(BadInput, match=message):
        load("ifeval", jsonl(tmp_path / "x.jsonl", [{**IFEVAL, **changes}]))


IFEVAL_CONSTRAINTS = [
    {"kind": "length_constraints:number_words", "relation": "at least", "num_words": 2},
    {"kind": "punctuation:no_comma"},
]


def lcb_rules(seconds: float) -> dict[str, Any]:
    limits = {"wall_s": seconds, "cpu_s": seconds, "memory_mb": 1024}
    return {"prelude": PRELUDE, "tolerance": 0.0, "limits": limits}


def test_the_names_that_livecodebench_gives() -> None:
    names: dict[str, Any] = {}
    limit = sys.getrecursionlimit()
    try:
        exec(PRELUDE, names)
    finally:
        sys.setrecursionlimit(limit)
    assert names["List"] is getattr(typing, "List")  # noqa: B009
    assert names["pow"] is pow
    assert names["sys"] is sys
    assert names["deque"] is collections.deque
    assert {"gcd", "heappush", "bisect_left", "lru_cache", "accumulate", "Counter", "ascii_lowercase"} <= set(names)


def test_livecodebench_by_standard_input(tmp_path: Path) -> None:
    [item] = load("livecodebench", jsonl(tmp_path / "test6.jsonl", [lcb()])).items
    assert item.grader.options == {
        "mode": "stdin",
        "tests": [{"input": "2\n", "output": "4\n"}, {"input": "3\n", "output": "6\n"}],
        **lcb_rules(10.0),
    }
    assert "standard input" in item.text
    assert "6" not in item.text.removeprefix("Print twice the number.")


def test_livecodebench_by_method(tmp_path: Path) -> None:
    row = lcb(
        starter_code="class Solution:\n    def double(self, xs: List[int], n: int) -> int:\n        ",
        metadata=json.dumps({"func_name": "double"}),
        public_test_cases=json.dumps([{"input": "[1, 2]\n3", "output": "9", "testtype": "functional"}]),
        private_test_cases="[]",
    )
    [item] = load("livecodebench", jsonl(tmp_path / "test.jsonl", [row])).items
    assert item.grader.options == {
        "mode": "function",
        "function": "Solution.double",
        "tests": [{"input": [[1, 2], 3], "output": 9}],
        **lcb_rules(60.0),
    }
    assert "class Solution" in item.text


@pytest.mark.parametrize(
    ("date", "options", "kept"),
    [
        ("2024-07-31", {}, False),
        ("2024-08-01", {}, True),
        ("2025-05-31T23:00:00", {}, True),
        ("2025-06-01", {}, False),
        ("2024-08-15", {"since": "2024-08-16"}, False),
        ("2024-08-15", {"until": "2024-08-15"}, True),
        ("2023-01-01", {"since": "2023-01"}, True),
    ],
)
def test_livecodebench_window(date: str, options: dict[str, Any], kept: bool, tmp_path: Path) -> None:
    path = jsonl(tmp_path / "test.jsonl", [lcb(contest_date=date), lcb(question_id="other")])
    wanted = Options(**options)
    found = [i.key for i in get("livecodebench").load(path, wanted).items] if kept or not options else []
    assert ("abc1_a" in found) == kept


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("executed",))


def test_packed_tests_run_nothing_and_stay_small(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    evil = base64.b64encode(zlib.compress(pickle.dumps(Evil()))).decode()
    with pytest.raises(ValueError, match="a list of tests cannot be unpacked"):
        _tests(evil)
    assert capsys.readouterr().out == ""
    for broken in ("###", base64.b64encode(b"x").decode(), base64.b64encode(zlib.compress(b"\x80")).decode()):
        with pytest.raises(ValueError, match=r"packed|damaged|cut short|not a pickle"):
            _tests(broken)
    monkeypatch.setattr("rollkeel.tasks.tests_form.MAX_UNPACKED", 1 << 16)
    bomb = base64.b64encode(zlib.compress(b"\0" * (1 << 20))).decode()
    with pytest.raises(ValueError, match="packed beyond"):
        _tests(bomb)


def test_missing_columns_name_those_that_are_there(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "train.jsonl", [{"Problem": "x", "Answer": "1"}])
    with pytest.raises(BadInput) as refused:
        load("aime24", path)
    assert (
        str(refused.value)
        == "aime24 row 1: no column 'problem' (expected problem, answer); present: 'Problem', 'Answer'"
    )


def test_what_is_not_there_is_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases: list[tuple[Any, str]] = [
        (tmp_path / "none", "no such file or folder; https://huggingface.co/datasets/HuggingFaceH4/aime_2024"),
        (tmp_path, "holds no file like"),
    ]
    for path, message in cases:
        with pytest.raises(BadInput) as refused:
            get("aime24").load(path)
        assert message in str(refused.value)
        assert "\n" not in str(refused.value)
    (tmp_path / "x.txt").write_text("x")
    with pytest.raises(BadInput, match="expected a file ending in"):
        get("aime24").load(tmp_path / "x.txt")
    broken = tmp_path / "b.jsonl"
    broken.write_text('{"problem": "p", "answer": 1}\n{"problem"')
    with pytest.raises(BadInput, match="line 2: not valid JSON"):
        get("aime24").load(broken)


class NoHub:
    """`datasets` as it behaves without a network."""

    class exceptions:
        class DatasetsError(Exception):
            pass

    @staticmethod
    def load_dataset(*_: Any, **__: Any) -> Iterator[Any]:
        raise ConnectionError("offline")


def test_the_hub_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", NoHub)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match=r"not there or not reachable \(offline\); download it and give --path: https"):
        get("aime24").load(None)
    monkeypatch.setitem(sys.modules, "datasets", None)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="optional `datasets` library"):
        get("aime24").load(None)


def test_an_unknown_grader_refuses_before_anything_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(graders._GRADERS, "math")
    with pytest.raises(BadInput, match="grader 'math'"):
        get("aime24").load(tmp_path / "not there")


def test_twice_the_same_item_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="appears twice"):
        load("mmlu_pro", jsonl(tmp_path / "test.jsonl", [MMLU, MMLU]))


def test_the_digest_sees_questions_gold_answers_and_order(tmp_path: Path) -> None:
    def digest(rows: list[dict[str, Any]]) -> str:
        return load("aime25", jsonl(tmp_path / "t.jsonl", rows)).digest

    base = digest([PROBLEM, {**PROBLEM, "answer": 3}])
    assert digest([PROBLEM, {**PROBLEM, "answer": 3}]) == base
    assert digest([PROBLEM, {**PROBLEM, "answer": 4}]) != base
    assert digest([{**PROBLEM, "answer": 3}, PROBLEM]) != base


def test_every_entry_says_where_it_is_from_and_how_it_is_graded() -> None:
    assert list(BENCHMARKS) == [
        "aime24", "aime25", "hmmt25", "cnmo24", "math500", "omni_math", "ugmathbench", "finance_reasoning", "gpqa_diamond", "mmlu_pro",
        "ceval", "cmmlu", "agieval", "arc_agi_1", "bbeh", "zebra_logic", "trivia_qa", "phybench", "livecodebench", "ifeval", "bfcl_v3",
        "bfcl_v3_multi_turn",
        "hle", "arena_hard_v2", "creative_writing_v3", "healthbench", "multichallenge",
    ]  # fmt: skip
    for benchmark in BENCHMARKS.values():
        assert rewards.get(benchmark.grader)
        assert "https://" in benchmark.where
        assert any(paper in benchmark.reported for paper in ("Ring-1T", "DPPO", "AC-MIS-PO"))
        assert benchmark.k >= 1
        assert benchmark.license
    with pytest.raises(BadInput, match="did you mean aime24"):
        get("aime_24")
