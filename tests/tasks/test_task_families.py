"""Every reward of a run rests on these scorers and splits: one leaked item or one point of undeserved credit spoils every claim.

Covers generation, splits, scoring and label noise of the generated tasks, against hand-computed values. Does not cover whether a
model can learn them, nor responses in other forms than the bare answer, which no task accepts.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import threading
from typing import Any, ClassVar

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rollkeel import tasks
from rollkeel.errors import BadInput
from rollkeel.tasks.base import MAX_RESPONSE_CHARS, SPLITS, TaskItem, excerpt, hash_fraction, keyed_rng

NAMES = [name for name in tasks.names() if name not in ("gym", "gymnasium", "verifiers")]
"""Families that need no other library."""
KNOBS: list[tuple[str, dict[str, Any]]] = [
    ("runsum", {}),
    ("runsum", {"digits": 3}),
    ("runsum", {"digits": 200}),
    ("addition", {}),
    ("addition", {"digits": 2, "terms": 2}),
    ("addition", {"digits": 60, "terms": 5}),
    ("countdown", {}),
    ("countdown", {"numbers": 6, "max_number": 1000, "target_max": 1000}),
    ("countdown", {"numbers": 4, "use_all": False}),
]


def test_every_name_is_that_of_its_family() -> None:
    assert [tasks.TASKS[name].name for name in tasks.names()] == tasks.names()


@pytest.mark.parametrize(("name", "options"), KNOBS, ids=lambda v: str(v))
def test_check_proves_every_family_at_several_difficulties(name: str, options: dict[str, Any]) -> None:
    report = tasks.check(tasks.get(name, options), 60)
    assert report.failures == ()
    assert report.passed
    assert report.items == 180
    assert min(report.distinct.values()) > 30


@pytest.mark.parametrize("name", NAMES)
def test_items_are_a_pure_function_of_their_key(name: str) -> None:
    a, b = tasks.get(name), tasks.get(name)
    forward = [a.item(3, "train", i) for i in range(20)]
    backward = [b.item(3, "train", i) for i in reversed(range(20))][::-1]
    assert forward == backward
    assert forward != [a.item(4, "train", i) for i in range(20)]
    assert forward != [a.item(3, "sft", i) for i in range(20)]
    explicit = tasks.get(name, a.options.model_dump())
    assert explicit.item(3, "train", 0) == forward[0]


def test_items_do_not_depend_on_the_process() -> None:
    code = f"from rollkeel import tasks; print([tasks.get(n).item(1, 'eval', 2).text for n in {NAMES}])"
    outputs = set()
    for hash_seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": hash_seed}, capture_output=True, text=True, check=True
        )
        outputs.add(done.stdout)
    assert outputs == {f"{[tasks.get(n).item(1, 'eval', 2).text for n in NAMES]}\n"}


def test_listing_tasks_imports_neither_torch_nor_transformers() -> None:
    code = "import sys, rollkeel.tasks as t; t.names(); print({'torch', 'transformers', 'pyarrow', 'reasoning_gym'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.usually("addition", "countdown", "maze", "repo", "runsum")
@pytest.mark.parametrize("name", NAMES)
def test_splits_are_disjoint_across_seeds_too(name: str) -> None:
    task = tasks.get(name)
    seen = {s: {task.identity(task.item(seed, s, i)) for seed in range(3) for i in range(60)} for s in SPLITS}
    assert not seen["eval"] & (seen["sft"] | seen["train"])
    assert not seen["sft"] & seen["train"]
    assert all(task.split_of(task.item(9, s, 0)) == s for s in SPLITS)


def test_splits_stay_disjoint_when_problems_are_few() -> None:
    task = tasks.get("runsum", {"digits": 2})  # 100 problems, drawn far more often than there are
    seen = {s: {task.item(0, s, i).text for i in range(400)} for s in SPLITS}
    assert sum(len(v) for v in seen.values()) == len(set.union(*seen.values())) == 100


def _refusal(task: tasks.Task[Any], split: str) -> str:
    try:
        task.item(0, split, 0)
    except BadInput as error:
        return str(error)
    return ""


def test_too_few_problems_is_refused_with_advice() -> None:
    task = tasks.get("countdown", {"numbers": 2, "max_number": 2, "target_min": 1, "target_max": 1})
    empty = [split for split in SPLITS if _refusal(task, split)]
    assert 0 < len(empty) < 3  # 2-1, 2/2, 1*1 …: a handful of problems cannot fill three splits
    assert re.search(
        r"1000 draws gave \d different problems, none in split '\w+'.*raise the difficulty", _refusal(task, empty[0])
    )
    impossible = tasks.get("countdown", {"numbers": 2, "max_number": 2, "target_min": 900, "target_max": 900})
    with pytest.raises(BadInput, match="widen target_min and target_max"):
        impossible.item(0, "train", 0)


def test_reordered_operands_are_the_same_problem() -> None:
    addition, countdown = tasks.get("addition"), tasks.get("countdown")
    assert addition.identity(TaskItem(text="12+34=", answer="46")) == addition.identity(
        TaskItem(text="34+12=", answer="46")
    )
    one = TaskItem(text="3,5->8:", answer="3+5", metadata={"numbers": [3, 5], "target": 8})
    two = TaskItem(text="5,3->8:", answer="5+3", metadata={"numbers": [5, 3], "target": 8})
    assert countdown.split_of(one) == countdown.split_of(two)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("runsum", {"digit": 3}, r"unknown option 'digit'; did you mean digits\?"),
        ("runsum", {"zzz": 3}, r"unknown option 'zzz'; known: digits"),
        ("runsum", {"digits": 0}, r"option digits: expected ≥ 1, got 0"),
        ("runsum", {"digits": 201}, r"option digits: .*200, got 201"),
        ("runsum", {"digits": "12"}, r"option digits: expected an integer, got '12'"),
        ("runsum", {"digits": 12.0}, r"option digits: expected an integer, got 12.0"),
        ("runsum", {"digits": True}, r"option digits: expected an integer, got True"),
        ("countdown", {"target_min": 9, "target_max": 3}, r"options: expected target_min ≤ target_max, got 9 > 3$"),
        ("countdown", {"use_all": 1}, r"option use_all: .*boolean, got 1"),
        ("runsumm", {}, r"task 'runsumm': unknown; did you mean runsum\?"),
    ],
)
def test_bad_names_and_knobs_are_one_line(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message) as caught:
        tasks.get(name, options)
    assert "\n" not in str(caught.value)


def test_bad_split_and_index() -> None:
    task = tasks.get("runsum")
    with pytest.raises(BadInput, match="did you mean train"):
        task.item(0, "trian", 0)
    with pytest.raises(BadInput, match="index ≥ 0"):
        task.item(0, "train", -1)
    with pytest.raises(BadInput, match="at least 1 item"):
        tasks.check(task, 0)


def test_check_can_fail() -> None:
    class Lenient(tasks.TASKS["runsum"]):  # type: ignore[misc,name-defined]
        name: ClassVar[str] = "lenient"

        def verify(self, item: TaskItem, response: str) -> tuple[float, str]:
            return float(item.answer in response), ""

    report = tasks.check(Lenient(), 3)
    assert not report.passed
    assert any("scores 1.0, expected 0" in failure for failure in report.failures)


def test_check_takes_another_score_and_names_one_that_breaks() -> None:
    task = tasks.get("addition", {"digits": 2})

    def broken(item: TaskItem, response: str) -> tuple[float, str]:
        if response == item.answer:
            raise OSError("no sandbox")
        return task.score(item, response)

    assert tasks.check(task, 2, score=task.score).passed
    failures = tasks.check(task, 2, score=broken).failures
    assert len(failures) == 12  # the gold answer of six items, before and after JSON
    assert all("scores None, expected 1 (OSError: no sandbox)" in failure for failure in failures)


def test_items_checked_at_once_make_the_same_report() -> None:
    task = tasks.get("addition", {"digits": 2})
    meet = threading.Barrier(3)

    def picky(item: TaskItem, response: str) -> tuple[float, str]:
        if response == "":  # once per item: three items are under way together, or this fails
            meet.wait(timeout=30)
        return 0.0, item.answer

    report = tasks.check(task, 6, score=picky, threads=3)
    assert report == tasks.check(task, 6, score=lambda item, _: (0.0, item.answer))
    assert report.scored > 18 * 3
    assert len(report.failures) == 18 * 2  # the gold answer of each, before and after JSON


@pytest.mark.parametrize("threads", [1, 2])
def test_a_check_tells_how_far_it_is_and_stops_where_it_is_stopped(threads: int) -> None:
    task, seen, told = tasks.get("addition", {"digits": 2}), set[str](), list[tuple[str, int, int]]()

    def score(item: TaskItem, response: str) -> tuple[float, str]:
        seen.add(item.text)
        return task.score(item, response)

    def progress(split: str, done: int, total: int) -> None:
        told.append((split, done, total))
        if (split, done) == (SPLITS[1], 2):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tasks.check(task, 50, score=score, threads=threads, progress=progress)
    assert told == [(SPLITS[0], i, 50) for i in range(1, 51)] + [(SPLITS[1], 1, 50), (SPLITS[1], 2, 50)]
    seen.clear()
    with pytest.raises(ZeroDivisionError):
        tasks.check(task, 50, score=score, threads=threads, progress=lambda split, done, total: done // 0)
    assert len(seen) <= 1 + threads  # nothing goes on behind the one that looks


def test_a_family_names_what_spoils_its_answers() -> None:
    class Prose(tasks.TASKS["runsum"]):  # type: ignore[misc,name-defined]
        junk: ClassVar[tuple[str, ...]] = ("0", "\n1")

        def verify(self, item: TaskItem, response: str) -> tuple[float, str]:
            return float(response.split(" ")[-1] == item.answer), ""

    report = tasks.check(Prose(), 3)
    assert report.failures == ()
    assert report.scored == 9 * (2 + 1 + 5 + 2)  # gold twice, nothing, near misses, junk
    assert not tasks.check(type("Bare", (Prose,), {"junk": tasks.Task.junk})(), 3).passed


def test_the_grader_of_a_generated_item_is_its_own_task() -> None:
    task = tasks.get("addition", {"digits": 2})
    item = TaskItem(text="12+34=", answer="46")
    spec = task.grader(item)
    assert (spec.name, spec.options["task"], spec.options["options"]) == ("task", "addition", {"digits": 2, "terms": 2})
    assert TaskItem.from_json(spec.options["item"]) == item


def test_an_item_is_finished_in_its_split_or_drawn_again() -> None:
    finished = []

    class Picky(tasks.TASKS["runsum"]):  # type: ignore[misc,name-defined]
        def finish(self, item: TaskItem, rng: random.Random) -> TaskItem | None:
            finished.append(self.split_of(item))
            return TaskItem(text=item.text, answer=item.answer, metadata={"seen": 1}) if item.text[0] in "12" else None

    items = [Picky().item(0, "eval", i) for i in range(20)]
    assert {item.text[0] for item in items} == {"1", "2"}
    assert all(item.metadata == {"seen": 1} for item in items)
    assert set(finished) == {"eval"}
    assert len(finished) > 20


class TestRunsum:
    task = tasks.get("runsum", {"digits": 4})
    item = TaskItem(text="4819=", answer="4232")  # 4, 12, 13, 22

    def test_item_by_hand(self) -> None:
        drawn = self.task.item(0, "train", 0)
        digits = [int(d) for d in drawn.text[:-1]]
        assert drawn.text.endswith("=")
        assert drawn.answer == "".join(str(sum(digits[: i + 1]) % 10) for i in range(4))

    @pytest.mark.parametrize(
        ("response", "reward"),
        [
            ("4232", 1.0),
            (" 4232\n", 1.0),
            ("", 0.0),
            ("4233", 0.0),
            ("423", 0.0),
            ("42322", 0.0),
            ("4232 4232", 0.0),
            ("4 2 3 2", 0.0),
            ("4232.", 0.0),
            ("=4232", 0.0),
            ("٤٢٣٢", 0.0),  # Arabic-Indic digits
            ("４２３２", 0.0),  # full-width digits
            ("4232\u2003", 0.0),  # str.strip() would take this off
            ("4232\x1f", 0.0),  # and this
            ("4232\ud800", 0.0),
            ("4232" * 2000, 0.0),
            (" " * MAX_RESPONSE_CHARS + "4232", 0.0),
        ],
    )
    def test_scores(self, response: str, reward: float) -> None:
        score, detail = self.task.score(self.item, response)
        assert score == reward
        assert "\n" not in detail
        detail.encode()

    def test_label_noise_of_zero_and_one(self) -> None:
        assert self.task.demonstration(self.item, random.Random(0), 0.0) == "4232"
        for seed in range(50):
            noisy = [int(d) for d in self.task.demonstration(self.item, random.Random(seed), 1.0)]
            # At noise 1 each step is wrong against the previous *written* sum: the error is inherited, not forgotten.
            previous = 0
            for digit, written in zip((4, 8, 1, 9), noisy, strict=True):
                assert written != (previous + digit) % 10
                previous = written

    def test_label_noise_is_per_step_and_propagates(self) -> None:
        task = tasks.get("runsum")
        wrong_steps = first_then_right = whole = 0
        n = 2000
        for i in range(n):
            item = task.item(0, "sft", i)
            out = task.demonstration(item, keyed_rng("noise", i), 0.05)
            digits, written = [int(d) for d in item.text[:-1]], [int(d) for d in out]
            steps = [(written[j] - (written[j - 1] if j else 0) - digits[j]) % 10 != 0 for j in range(12)]
            wrong_steps += sum(steps)
            whole += out == item.answer
            if sum(steps) == 1 and steps[0]:
                first_then_right += all(a != b for a, b in zip(out, item.answer, strict=True))
        assert abs(wrong_steps / (12 * n) - 0.05) < 0.006  # four standard deviations
        assert abs(whole / n - 0.95**12) < 0.045
        assert first_then_right > 10


class TestAddition:
    task = tasks.get("addition", {"digits": 2})
    item = TaskItem(text="37+85=", answer="122")

    @pytest.mark.parametrize(
        ("response", "reward"),
        [
            ("122", 1.0),
            ("122\n", 1.0),
            ("0122", 0.0),
            ("122.0", 0.0),
            ("+122", 0.0),
            ("1 22", 0.0),
            ("1_22", 0.0),
            ("37+85", 0.0),
            ("112", 0.0),
            ("122 = 122", 0.0),
            ("１２２", 0.0),
            ("12²", 0.0),
        ],
    )
    def test_scores(self, response: str, reward: float) -> None:
        assert self.task.score(self.item, response)[0] == reward

    def test_terms_have_the_digits_asked_for(self) -> None:
        item = tasks.get("addition", {"digits": 5, "terms": 3}).item(0, "train", 0)
        terms = item.text[:-1].split("+")
        assert [len(t) for t in terms] == [5, 5, 5]
        assert int(item.answer) == sum(map(int, terms))

    def test_noise_can_break_the_carry(self) -> None:
        outputs = {self.task.demonstration(self.item, random.Random(s), 1.0) for s in range(300)}
        assert "122" not in {o for o in outputs if o[-1] == "2"}  # the unit column is always wrong at noise 1
        assert self.task.demonstration(self.item, random.Random(0), 0.0) == "122"
        clean = sum(self.task.demonstration(self.item, random.Random(s), 0.1) == "122" for s in range(2000)) / 2000
        assert abs(clean - 0.9**3) < 0.05


ITEMS = [(t, t.item(0, "eval", 0)) for t in map(tasks.get, NAMES) if not getattr(t, "uses_tool", False)]
IN_PROCESS = [(t, item) for t, item in ITEMS if t.grader(item).name == "task"]
"""Not those that refuse to judge without their tool: see tests/sandbox/test_environment_terminal.py."""


@given(st.text(max_size=300))
@example("5")
@settings(max_examples=300, deadline=None)
def test_no_text_breaks_a_scorer(response: str) -> None:
    for task, item in IN_PROCESS:
        reward, detail = task.score(item, response)
        assert reward == float(response.strip() == task.gold(item))  # one digit is the answer of some
        assert "\n" not in detail


def test_item_json_round_trip() -> None:
    item = tasks.get("countdown").item(0, "train", 0)
    assert TaskItem.from_json(json.loads(json.dumps(item.to_json()))) == item
    with pytest.raises(BadInput, match="keys text and answer"):
        TaskItem.from_json({"text": "x"})


def test_hash_fraction_is_uniform_and_unambiguous() -> None:
    values = [hash_fraction("t", str(i)) for i in range(4000)]
    assert all(0 <= v < 1 for v in values)
    assert abs(sum(v < 0.125 for v in values) / 4000 - 0.125) < 0.021
    assert hash_fraction("ab", "c") != hash_fraction("a", "bc")


def test_excerpt_is_one_printable_line() -> None:
    assert excerpt("a\nb\x00\ud800") == r"a\nb\x00\ud800"
    assert excerpt("x" * 100) == "x" * 79 + "…"
