"""A judged benchmark's number is its judge's: rows made up in each form must put to the judge what its authors put to theirs, carry its
verdict through, and say in every table that a model graded. A server of our own judges by rule.

Not covered: real judges, and how their numbers compare with published ones.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from test_graded_rows import response, write
from tiny_run import cli

from rollkeel import recipe
from rollkeel.errors import BadInput
from rollkeel.evals.benchmarks import BENCHMARKS, Loaded, Options, get
from rollkeel.loop.eval_sets import problems_in
from rollkeel.rewards import Graders


class Judge:
    """Answers by `reply`, a function of what it is asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.reply: Callable[[str], str] = lambda asked: "Score: 1"
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                asked = body["messages"][0]["content"]
                outer.asked.append(asked)
                data = json.dumps({"choices": [{"message": {"content": outer.reply(asked)}}]}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"


@pytest.fixture
def judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Judge]:
    monkeypatch.setenv("ROLLKEEL_CACHE", str(tmp_path / "cache"))
    made = Judge()
    thread = threading.Thread(target=made.http.serve_forever, args=(0.01,))
    thread.start()
    yield made
    made.http.shutdown()
    made.http.server_close()
    thread.join()


def load(name: str, path: Path, judge: Judge) -> Loaded:
    return get(name).load(path, Options(judge={"url": judge.url, "model": "m", "tries": 1}))


def graded(loaded: Loaded, place: int, text: str) -> float | None:
    with Graders(regrade=0.0) as graders:
        return graders.grade([response(loaded.items[place], text)])[0].reward


TALK = [
    {"role": "user", "content": "Be brief."},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "Why rain?"},
]
HLE = {
    "id": "h1",
    "question": "1 + 1?",
    "image": "",
    "answer": "2",
    "answer_type": "exactMatch",
    "category": "Math",
    "rationale": "",
}
MULTI = {
    "QUESTION_ID": "m1",
    "AXIS": "SELF_COHERENCE",
    "CONVERSATION": TALK,
    "TARGET_QUESTION": "Is it brief?",
    "PASS_CRITERIA": "YES",
}
HEALTH = {"prompt_id": "p1", "prompt": TALK[:1], "example_tags": [], "rubrics": [
    {"criterion": "Names water", "points": 6, "tags": []}, {"criterion": "Is polite", "points": 2, "tags": []},
    {"criterion": "Gives a wrong dose", "points": -4, "tags": []}]}  # fmt: skip


def test_hle_asks_for_the_right_answer_and_leaves_pictures_out(judge: Judge, tmp_path: Path) -> None:
    rows = [HLE, {**HLE, "id": "h2", "image": "data:image/png;base64,AA"}]
    loaded = load("hle", write(tmp_path / "test.jsonl", rows), judge)
    judge.reply = lambda asked: f"Score: {int('It is 2' in asked)}"
    assert [(i.key, i.text, i.answer) for i in loaded.items] == [("h1", "1 + 1?", "2")]
    assert (graded(loaded, 0, "It is 2"), graded(loaded, 0, "It is 3")) == (1.0, 0.0)
    assert all("right answer\n2\n" in asked for asked in judge.asked)


def arena(tmp_path: Path, models: list[str]) -> Path:
    write(
        tmp_path / "a" / "question.jsonl",
        [{"uid": "u1", "category": "hard_prompt", "subcategory": "coding", "prompt": "Sort."}],
    )
    for model in models:
        messages = [{"role": "user", "content": "Sort."}, {"role": "assistant", "content": {"answer": f"By {model}"}}]
        write(tmp_path / "a" / "model_answer" / f"{model}.jsonl", [{"uid": "u1", "model": model, "messages": messages}])
    return tmp_path / "a"


def test_arena_hard_compares_with_the_baseline_of_the_category_in_both_orders(judge: Judge, tmp_path: Path) -> None:
    loaded = load("arena_hard_v2", arena(tmp_path, ["o3-mini-2025-01-31", "gemini-2.0-flash-001"]), judge)
    judge.reply = lambda asked: "Winner: A" if asked.index("Sorted") < asked.index("By o3-mini") else "Winner: B"
    assert graded(loaded, 0, "Sorted") == 1.0
    judge.reply = lambda asked: "Winner: A"
    assert graded(loaded, 0, "Sorted well") == 0.5
    with pytest.raises(BadInput, match=r"expected one baseline's answer to u1.*got none"):
        load("arena_hard_v2", arena(tmp_path, []) / "question.jsonl", judge)


def test_creative_writing_has_an_item_for_every_seed(judge: Judge, tmp_path: Path) -> None:
    prompts = {"1": {"category": "a", "writing_prompt": "A tale of <SEED>.", "seed_modifiers": ["rain", "snow"]}}
    loaded = load("creative_writing_v3", write(tmp_path / "p.json", prompts), judge)
    assert [(i.key, i.unit, i.text) for i in loaded.items] == [
        ("1/1", "1", "A tale of rain."),
        ("1/2", "1", "A tale of snow."),
    ]
    judge.reply = lambda asked: "Score: 15"
    assert graded(loaded, 0, "Once.") == 0.75


def test_healthbench_adds_the_points_of_criteria_that_are_met(judge: Judge, tmp_path: Path) -> None:
    loaded = load("healthbench", write(tmp_path / "oss_eval.jsonl", [HEALTH]), judge)
    met = {"Names water"}
    judge.reply = lambda asked: f"Score: {int(any(each in asked for each in met))}"
    assert graded(loaded, 0, "Drink.") == 6 / 8
    assert len(judge.asked) == 3
    met |= {"Gives a wrong dose"}
    assert graded(loaded, 0, "Drink ten litres.") == 2 / 8
    judge.reply = lambda asked: "Perhaps."
    assert graded(loaded, 0, "Eat.") is None  # a failure, and no 0


def test_multichallenge_asks_the_target_question_about_the_last_turn(judge: Judge, tmp_path: Path) -> None:
    rows = [MULTI, {**{k.lower(): v for k, v in MULTI.items()}, "question_id": "m2", "pass_criteria": "NO"}]
    loaded = load("multichallenge", write(tmp_path / "x.jsonl", rows), judge)
    assert list(loaded.problems().problem(0).messages) == TALK
    assert loaded.items[0].text == "user: Be brief.\n\nassistant: Yes.\n\nuser: Why rain?\n\nassistant:"
    judge.reply = lambda asked: f"Score: {int('if the answer is YES' in asked)}"
    assert (graded(loaded, 0, "Clouds."), graded(loaded, 1, "Clouds.")) == (1.0, 0.0)
    assert "Is it brief?" in judge.asked[0]


@pytest.mark.parametrize(
    ("name", "row", "said"),
    [
        ("hle", {"id": "1", "question": "q"}, "hle row 1: no column 'image'"),
        ("multichallenge", {**MULTI, "PASS_CRITERIA": "maybe"}, "multichallenge row 1: column 'pass_criteria': expected YES or NO"),
        ("multichallenge", {**MULTI, "CONVERSATION": [{"role": "user"}]}, "multichallenge row 1: column 'conversation': expected messages"),
        ("healthbench", {**HEALTH, "rubrics": []}, "healthbench row 1: column 'rubrics': expected a criterion with positive"),
        ("creative_writing_v3", {"writing_prompt": "w", "seed_modifiers": []}, "creative_writing_v3 row 1: column 'seed_modifiers'"),
        ("arena_hard_v2", {"uid": "u", "category": "x", "prompt": "p"}, "arena_hard_v2: expected one baseline's answer to u"),
    ],
)  # fmt: skip
def test_malformed_rows_are_refused_in_one_line(name: str, row: Any, said: str, judge: Judge, tmp_path: Path) -> None:
    with pytest.raises(BadInput) as refused:
        load(name, write(tmp_path / "x.jsonl", [row]), judge)
    assert str(refused.value).startswith(said)
    assert "\n" not in str(refused.value)


def test_without_a_judge_one_line_says_what_to_set(tmp_path: Path) -> None:
    with pytest.raises(
        BadInput, match=r"^hle: a model judges it, set data.grader_options=.*expected url and model, or path"
    ):
        get("hle").load(write(tmp_path / "x.jsonl", [HLE]))


def test_tables_and_results_say_that_it_was_judged_and_by_whom(
    judge: Judge, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    judge.reply = lambda asked: "Score: 0.5"
    file = write(tmp_path / "x.jsonl", [HLE])
    words = [
        "model.path=preset:tiny-qwen3",
        "sampling.max_new_tokens=4",
        f"data.grader_options={{url: '{judge.url}', model: wise}}",
    ]
    code, out, err = cli(capsys, "eval", *words, "--benchmark", "hle", "--path", file, "--out", tmp_path / "out")
    assert (code, "hle (judged)" in out, "hle: judged by wise" in out) == (0, True, True), err
    results = json.loads((tmp_path / "out" / "results.json").read_text())["benchmarks"]["hle"]
    assert (results["judged"], results["source"]["options"]["judge"]["model"]) == ("wise", "wise")
    code, out, _ = cli(capsys, "benchmarks")
    judged = [line.split()[0] for line in out.splitlines() if line.endswith(", judged")]
    assert judged == [b.name for b in BENCHMARKS.values() if b.judged] == ["hle", "arena_hard_v2", "creative_writing_v3", "healthbench", "multichallenge"]  # fmt: skip


def test_a_run_s_metrics_say_it_too(judge: Judge, tmp_path: Path) -> None:
    file = write(tmp_path / "x.jsonl", [HLE])
    options = f"{{url: '{judge.url}', model: wise}}"
    config = recipe.load(None, [f"eval.sets=[{{benchmark: hle, path: '{file}', grader_options: {options}}}]"])
    problems = problems_in(config, config.eval.sets[0])
    assert (problems.name, problems.problem(0).grader.options["model"]) == ("hle_judged", "wise")
