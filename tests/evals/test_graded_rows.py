"""A benchmark whose reader or grader misreads its published form reports numbers of nothing: rows made up in each form, through the
benchmark's own grader, with worked answers that are right and some that are not.

Not covered: that the published files have this form today; what the judges of judged benchmarks are worth.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollkeel.errors import BadInput
from rollkeel.evals.benchmarks import Item, get
from rollkeel.evals.expressions import distance
from rollkeel.evals.summary import summarize
from rollkeel.rewards import Graders
from rollkeel.types import Prompt, Rollout, SamplingParams, Status, TokenSpan

pytest.importorskip("math_verify")
CMMLU = {"": 0, "Question": "哪个是偶数？", "A": "1", "B": "2", "C": "3", "D": "5", "Answer": "B"}
SAT = {"passage": "It rains.", "question": "What falls?", "options": ["(A)snow", "(B)rain", "(C)hail", "(D)sun"], "label": "B", "answer": None, "other": None}  # fmt: skip
LAW = {
    "passage": None,
    "question": "谁？",
    "options": ["(A)甲", "(B)乙", "(C)丙", "(D)丁"],
    "label": ["A", "C"],
    "answer": None,
}
CLOZE = {"passage": None, "question": "1/2 + 1/4?", "options": None, "label": None, "answer": "\\frac{3}{4}"}
TRIVIA = {"question": "Who painted the Mona Lisa?", "question_id": "tc_1", "answer": {"value": "Leonardo da Vinci", "aliases": ["Da Vinci", "The Master (painter)"], "normalized_aliases": ["da vinci"]}}  # fmt: skip
UGMATH = {"idx": 3, "subject": "Algebra", **{f"problem_v{v}": f"Solve x - {v} = 0." for v in (1, 2, 3)}, **{f"answer_v{v}": str(v) for v in (1, 2, 3)}}  # fmt: skip
FINANCE = {"question_id": "test-1", "question": "What is the yield in percent?", "context": "| a | b |", "ground_truth": 1250.5, "python_solution": "…"}  # fmt: skip
PHYSICS = {
    "id": 7,
    "tag": "MECHANICS",
    "content": "Find the tension.",
    "solution": "…",
    "answer": "$$T = 2 m g + 4\\frac{m v_0^2}{l}$$",
}


def write(path: Path, rows: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row, ensure_ascii=False) for row in rows] if isinstance(rows, list) else [json.dumps(rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def response(item: Item, text: str) -> Rollout:
    prompt = Prompt(id="0", index=0, text=item.text, token_ids=np.array([1]), answer=item.answer, grader=item.grader, task="t")  # fmt: skip
    return Rollout(
        id=0, group=0, member=0, prompt=prompt, span=TokenSpan.empty(), sampling=SamplingParams(), engine="e", dtype="bf16",
        status=Status.FINISHED, text=text,
    )  # fmt: skip


@pytest.fixture(scope="module")
def graders() -> Iterator[Graders]:
    with Graders() as made:
        yield made


# benchmark, file, row, right answers, wrong answers
FORMS: list[tuple[str, str, Any, list[str], list[str]]] = [
    ("cmmlu", "test/logic.csv.jsonl", CMMLU, ["2是偶数。\\boxed{B}", "Answer: B"], ["\\boxed{A}", "\\boxed{AB}", "B? 不知道"]),
    ("agieval", "v1_1/sat-en.jsonl", SAT, ["So it rains.\n\nAnswer: B"], ["Answer: A", "Answer: A or B"]),
    ("agieval", "v1_1/jec-qa-kd.jsonl", LAW, ["甲和丙。\\boxed{A, C}", "\\boxed{C, A}"], ["\\boxed{A}", "\\boxed{A, B, C}", "A, C?"]),
    ("agieval", "v1_1/math.jsonl", CLOZE, ["It is $\\boxed{\\frac{3}{4}}$.", "\\boxed{0.75}"], ["\\boxed{\\frac{1}{4}}", ""]),
    ("trivia_qa", "validation.jsonl", TRIVIA, ["The answer is: Leonardo da Vinci", "The answer is: Master painter.", "The answer is: Da-Vinci"], ["The answer is: Michelangelo", "Leonardo da Vinci", "The answer is: da Vinci or Raphael"]),
    ("finance_reasoning", "data/hard.json", FINANCE, ["\\boxed{\\$1,250.50}", "\\boxed{y = 1252.9\\%}", "\\boxed{1250.5\\text{ USD}}"], ["\\boxed{1254}", "1250.5", "\\boxed{1250.5 or 3}", "\\boxed{nan}"]),
    ("phybench", "PHYBench-fullques_v1.json", PHYSICS, ["$\\boxed{2mg + \\frac{4 m v_0^2}{l}}$", "\\boxed{T = 2m(g + 2 v_0^2/l)}"], ["\\boxed{7}", "I do not know.", "\\boxed{\\text{none}}"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "file", "row", "right", "wrong"), FORMS, ids=[f"{f[0]}-{f[1]}" for f in FORMS])
def test_a_right_worked_answer_gets_1_and_wrong_ones_0(
    name: str, file: str, row: Any, right: list[str], wrong: list[str], graders: Graders, tmp_path: Path
) -> None:
    [item] = get(name).load(write(tmp_path / file, [row])).items
    assert item.text.count("boxed") + item.text.count("Answer:") + item.text.count("answer is:") >= 1
    for text in [*right, *(f"<think>\\boxed{{9}} Answer: D. The answer is: x</think>{text}" for text in right)]:
        graded = graders.grade([response(item, text)])[0]
        assert graded.reward == 1.0, (text, graded.detail)
    for text in wrong:
        graded = graders.grade([response(item, text)])[0]
        assert graded.reward == 0.0, (text, graded.detail)


# benchmark, row changed, what is said
BAD: list[tuple[str, dict[str, Any], str]] = [
    ("cmmlu", {**CMMLU, "Answer": "E"}, "cmmlu row 1: column 'Answer': expected A, B, C or D, got 'E'"),
    ("cmmlu", {"question": "q"}, "cmmlu row 1: no column 'Answer'"),
    ("agieval", {**SAT, "label": "E"}, "agieval row 1: column 'label': expected letters of 4 choices, got 'E'"),
    ("agieval", {**CLOZE, "answer": None}, "agieval row 1: column 'answer': expected text or a number"),
    ("trivia_qa", {**TRIVIA, "answer": "Leonardo"}, "trivia_qa row 1: column 'answer': expected an object with value"),
    ("ugmathbench", {**UGMATH, "answer_v3": None}, "ugmathbench row 1: column 'answer_v3': expected text or a number"),
    ("finance_reasoning", {**FINANCE, "ground_truth": "a lot"}, "finance_reasoning row 1: could not convert"),
    ("phybench", {"id": 1, "answer": "x"}, "phybench row 1: no column 'content'"),
    ("bfcl_v3", {"id": "simple_0", "question": [[]], "function": []}, "bfcl_v3 row 1: column 'function': expected a list of"),
    ("bfcl_v3", {"id": "simple_0", "question": [[]], "function": [{"name": "f"}]}, "bfcl_v3 row 1: no column 'ground_truth'"),
    ("bfcl_v3", {"id": "simple_0"}, "bfcl_v3: expected rows with question and function, or with ground_truth"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "row", "said"), BAD, ids=[f"{b[0]}-{b[2][-20:]}" for b in BAD])
def test_malformed_rows_are_refused_in_one_line(name: str, row: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput) as refused:
        get(name).load(write(tmp_path / "x.jsonl", [row]))
    assert str(refused.value).startswith(said)
    assert "\n" not in str(refused.value)


def test_what_is_not_on_the_hub_asks_for_files() -> None:
    with pytest.raises(BadInput, match=r"^agieval: is read from files alone; give --path: https"):
        get("agieval").load(None)


def test_agieval_groups_by_exam_and_shows_the_passage(tmp_path: Path) -> None:
    write(tmp_path / "v1_1" / "sat-en.jsonl", [SAT, SAT])
    write(tmp_path / "v1_1" / "jec-qa-kd.jsonl", [LAW])
    items = get("agieval").load(tmp_path).items
    assert [(i.key, i.group) for i in items] == [("jec-qa-kd/1", "jec-qa-kd"), ("sat-en/2", "sat-en"), ("sat-en/3", "sat-en")]  # fmt: skip
    assert items[1].text.startswith("It rains.\n\nWhat falls?\n\nA. snow\nB. rain")


def test_ugmathbench_reports_problems_that_are_right_in_all_versions(tmp_path: Path, graders: Graders) -> None:
    loaded = get("ugmathbench").load(write(tmp_path / "Algebra.json", [UGMATH, {**UGMATH, "idx": 4}]))
    assert [i.key for i in loaded.items[:3]] == ["Algebra/3/v1", "Algebra/3/v2", "Algebra/3/v3"]
    said = ["1", "2", "3", "1", "8", "3"]
    rollouts = [response(item, f"\\boxed{{{x}}}") for item, x in zip(loaded.items, said, strict=True)]
    rewards = [graders.grade([r])[0].reward for r in rollouts]
    records = [
        {"key": i.key, "unit": i.unit, "group": i.group, "greedy": None, "samples": [{"reward": r, "vote": x, "status": "finished", "tokens": 1}]}
        for i, r, x in zip(loaded.items, rewards, said, strict=True)
    ]  # fmt: skip
    metrics = summarize(loaded, records, 1)["metrics"]
    assert metrics["avg@k"]["value"] == pytest.approx(5 / 6)
    assert metrics["effective mean"]["value"] == 0.5


@pytest.mark.parametrize(
    ("given", "score"),
    [
        ("2 m g + 2\\frac{m v_0^2}{l}", 0.6 - 2 / 15),  # two of 15 nodes
        ("2 m g + 4\\frac{m v_1^2}{l}", 0.6 - 1 / 15),
        ("2 m g", None),
    ],
)
def test_near_expressions_earn_what_their_distance_leaves(given: str, score: float | None, graders: Graders, tmp_path: Path) -> None:  # fmt: skip
    [item] = get("phybench").load(write(tmp_path / "x.json", [PHYSICS])).items
    assert item.answer == "2 m g + 4\\frac{m v_0^2}{l}"
    reward = graders.grade([response(item, f"\\boxed{{{given}}}")])[0].reward
    assert reward is not None
    assert reward == pytest.approx(score) if score is not None else 0.0 <= reward < 0.6


def leaf(label: str) -> Any:
    return label, ()


def test_distances_by_hand() -> None:
    a, b, c = map(leaf, "abc")
    wide = ("+", tuple(leaf(str(i)) for i in range(9)))
    assert distance(a, a) == 0.0
    assert distance(a, b) == 1.0
    assert distance(("+", (a, b)), ("+", (a, c))) == 1.0
    assert distance(("+", (a, b)), ("+", (a, b, c))) == 1.0
    assert distance(("+", (a, ("*", (b, c)))), ("+", (a, b, c))) == 1.0
    assert distance(("+", (a, ("*", (b, c)))), ("*", (b, c))) == 2.0
    assert distance(("-", (a, wide)), ("-", (a,))) == pytest.approx(0.6 * 5 + 5)  # ten nodes at once
    assert distance(("-", (a,)), ("-", (a, wide))) == pytest.approx(0.6 * 5 + 5)


# -- function calls ----------------------------------------------------------------------------------------------------

AREA = {"name": "math.area", "description": "Area.", "parameters": {"type": "dict", "required": ["base", "height"], "properties": {
    "base": {"type": "integer"}, "height": {"type": "float"}, "unit": {"type": "string"}, "about": {"type": "dict"}}}}  # fmt: skip
GOLD = {
    "math.area": {
        "base": [10],
        "height": [5, 5.0],
        "unit": ["cm", ""],
        "about": [{"tags": [["a", "b"]], "deep": [True, ""]}, ""],
    }
}


def question(key: str, **changes: Any) -> dict[str, Any]:
    return {"id": key, "question": [[{"role": "user", "content": "Area?"}]], "function": [AREA], **changes}


def call(name: str = "math.area", **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


RIGHT = call(base=10, height=5)
CALLS: list[tuple[str, Any, str, float]] = [
    ("simple_0", [GOLD], f"I call it.\n{RIGHT}", 1.0),
    ("simple_0", [GOLD], call(base=10, height=5.0, unit="C M."), 1.0),
    ("simple_0", [GOLD], call(base=10, height=5, about={"tags": ["a", "B"]}), 1.0),
    ("simple_0", [GOLD], call(base=10, height=5, about={"tags": ["b", "a"]}), 0.0),
    ("simple_0", [GOLD], call(base=10, height=5, about={"tags": ["a", "b"], "deep": 1}), 0.0),
    ("simple_0", [GOLD], call(base=10), 0.0),
    ("simple_0", [GOLD], call(base=10.0, height=5), 0.0),
    ("simple_0", [GOLD], call(base=True, height=5), 0.0),
    ("simple_0", [GOLD], call(base=10, height=5, colour="red"), 0.0),
    ("simple_0", [GOLD], call("area", base=10, height=5), 0.0),
    ("simple_0", [GOLD], RIGHT + RIGHT, 0.0),
    ("simple_0", [GOLD], "math.area(10, 5)", 0.0),
    ("simple_0", [GOLD], '<tool_call>{"name": "math.area"}</tool_call>', 0.0),
    ("simple_0", [GOLD], f"<think>{RIGHT}</think>none", 0.0),
    ("live_parallel_3-1-0", [GOLD, {"math.area": {"base": [2], "height": [1]}}], call(base=2, height=1) + "\n" + RIGHT, 1.0),
    ("parallel_3", [GOLD, {"math.area": {"base": [2], "height": [1]}}], RIGHT + RIGHT, 0.0),
    ("irrelevance_1", None, "No function fits.", 1.0),
    ("irrelevance_1", None, RIGHT, 0.0),
    ("live_relevance_0-0-0", None, call(base=1, height=2), 1.0),
    ("live_relevance_0-0-0", None, "No.", 0.0),
]  # fmt: skip


@pytest.mark.parametrize(("key", "gold", "text", "reward"), CALLS)
def test_bfcl_calls(key: str, gold: Any, text: str, reward: float, graders: Graders, tmp_path: Path) -> None:
    write(tmp_path / "BFCL_v3_x.json", [question(key), question("java_0"), question("multi_turn_base_0")])
    if gold is not None:
        write(tmp_path / "possible_answer" / "BFCL_v3_x.json", [{"id": key, "ground_truth": gold}, {"id": "java_0", "ground_truth": []}])  # fmt: skip
    [item] = get("bfcl_v3").load(tmp_path).items
    assert item.group == key.rstrip("0123456789-").rstrip("_")
    assert '"math.area"' in item.text
    assert graders.grade([response(item, text)])[0].reward == reward
