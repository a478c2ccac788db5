"""Each row that goes must go for the reason that is said, and none that is sound may: rows come from strangers.

Whole runs over small files: formats, malformed rows, benchmarks, harmful content, pass rates, mixture, page. Duplicates and
interruptions have files of their own. Does not cover hooks that never return.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_rows_kit import removed, rows_file, written

from rollkeel.cli import main
from rollkeel.data import clean, read_options, reading
from rollkeel.errors import BadInput, RunStopped
from rollkeel.record import rollout_store
from rollkeel.report import data_view

STORY = "the quick brown fox jumps over the lazy dog again and again and again while {} small green birds sing in {} tall old trees near the river"


def run(folder: Path, inputs: list[Path] | Path, *words: str) -> dict[str, Any]:
    return clean(
        [str(p) for p in ([inputs] if isinstance(inputs, Path) else inputs)], folder / "out", read_options(None, words)
    )


def stages(report: dict[str, Any]) -> dict[tuple[str, str], int]:
    return {(entry["stage"], entry["reason"]): entry["rows"] for entry in report["removed"]}


# -- formats and malformed rows ----------------------------------------------------------------------------------------


def test_all_formats_and_patterns(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    rows_file(tmp_path / "in", [("a b c", "1"), ("d e f", "2")], "a.jsonl")
    with gzip.open(tmp_path / "in" / "b.jsonl.gz", "wt") as file:
        file.write('\n{"prompt": "g h i", "answer": 3}\n')
    pq.write_table(pa.table({"prompt": ["j k l", "a b c"], "answer": [4.5, 1]}), tmp_path / "in" / "c.parquet")
    report = run(tmp_path, tmp_path / "in", "chunk_rows=1")
    assert written(tmp_path / "out") == ["a b c", "d e f", "g h i", "j k l"]
    assert written(tmp_path / "out", "answer") == ["1", "2", "3", "4.5"]
    assert [entry["rows"] for entry in report["inputs"]] == [2, 1, 2]
    assert written(tmp_path / "out", "row") == [1, 2, 2, 1]
    assert removed(tmp_path / "out") == {2: "exact duplicate"}


def test_columns_have_other_names_and_more_are_carried(tmp_path: Path) -> None:
    record = {"q": "why?", "gold": 7, "cot": "since 7", "field": "math", "tests": [{"in": 1}], "note": "\ud800"}
    (tmp_path / "d.jsonl").write_text(json.dumps(record))
    columns = "columns={prompt: q, answer: gold, solution: cot, domain: field, keep: [tests, note, none]}"
    run(tmp_path, tmp_path / "d.jsonl", columns)
    (row,) = pq.read_table(tmp_path / "out" / "part-00000.parquet").to_pylist()
    source = str(tmp_path / "d.jsonl")
    assert row == {
        "prompt": "why?", "answer": "7", "solution": "since 7", "domain": "math", "tests": '[{"in": 1}]', "note": "?",
        "none": None, "source": source, "row": 1,
    }  # fmt: skip


MALFORMED = [
    (b'{"prompt": "a", "answer": ', "not JSON"),
    (b'["prompt"]', "not an object"),
    (b'{"prompt": "\xff", "answer": "1"}', "not UTF-8"),
    (b'{"answer": "1"}', "prompt: missing"),
    (b'{"prompt": "a", "answer": null}', "answer: null"),
    (b'{"prompt": true, "answer": "1"}', "prompt: not text"),
    (b'{"prompt": "a", "answer": NaN}', "answer: not text"),
    (b'{"prompt": ["a"], "answer": "1"}', "prompt: not text"),
    (b'{"prompt": "\\udc00", "answer": "1"}', "prompt: lone surrogate"),
    (b'{"prompt": " \\u200b\\n", "answer": "1"}', "prompt: empty"),
    (b'{"prompt": "abcdefghijk", "answer": "1"}', "prompt: over 10 characters"),
    (b'{"prompt": "a", "answer": "1"}', "prompt: under 2 characters"),
]


def test_every_malformed_row_says_why_and_stops_nothing(tmp_path: Path) -> None:
    lines = [line for line, _ in MALFORMED]
    (tmp_path / "d.jsonl").write_bytes(
        b"\xef\xbb\xbf" + b"\n".join([*lines, b'{"prompt": "good", "answer": "1"}', b"", b""])
    )
    words = ["malformed={share: 1, max_characters: 10, min_characters: 2}", "examples=1"]
    report = run(tmp_path, tmp_path / "d.jsonl", *words)
    assert written(tmp_path / "out") == ["good"]
    table = pq.read_table(tmp_path / "out" / "removed.parquet").to_pydict()
    assert dict(zip(table["row"], table["reason"], strict=True)) == {i: r for i, (_, r) in enumerate(MALFORMED, 1)}
    assert report["rows"] == {"read": 13, "changed": 0, "removed": 12, "written": 1, "parts": 1}
    page = data_view.page(report)
    assert "\\ufffd" not in page
    assert "not JSON" in page


def test_too_many_malformed_rows_write_nothing(tmp_path: Path) -> None:
    file = rows_file(tmp_path, [(f"p {i}", "1") for i in range(8)])
    file.write_text(file.read_text() + "{\n{\n")
    assert run(tmp_path, file, "malformed.share=0.2", "near.enabled=false")["rows"]["written"] == 8
    with pytest.raises(RunStopped, match=r"2 of 10 rows are malformed, most \(2\) of them 'not JSON'"):
        clean([str(file)], tmp_path / "two", read_options(None, ["malformed.share=0.19"]))
    assert not list((tmp_path / "two").glob("part*"))


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_long_rows_are_worked_on_few_at_a_time(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_CHUNK_BYTES", 5000)
    monkeypatch.setattr(reading, "_PARQUET_ROWS", 2)
    rows = [(f"number {i} " + "long " * 200, "1") for i in range(23)]
    file = rows_file(tmp_path, rows)
    if kind == "parquet":
        file = tmp_path / "d.parquet"
        pq.write_table(pa.table({"prompt": [p for p, _ in rows], "answer": [a for _, a in rows]}), file)
    sizes = [len(chunk.lines) for chunk in reading.chunks([file], 1000, ["prompt", "answer"])]
    assert sizes == [5, 5, 5, 5, 3]
    firsts = [chunk.first for chunk in reading.chunks([file], 4, ["prompt", "answer"])]
    assert firsts == [1, 5, 9, 13, 17, 21]


# -- benchmarks --------------------------------------------------------------------------------------------------------

BENCHMARK = [STORY.format(7, 12), "What is the capital of France?", "x + 2 = 3", "Solve 3 + 4 - 5 now"]
CONTAMINATED = [
    (STORY.format(7, 12), "hash"),
    (STORY.format(7, 12).upper() + " .", "hash"),
    ("Prove this. " + STORY.format(7, 12) + " Then stop.", "13 tokens"),
    ("12 or so: " + " ".join(STORY.format(7, 0).split()[:16]), "13 tokens"),  # a part of it, with its numbers
    (STORY.format(8, 12), None),  # other numbers
    (STORY.format(12, 7), "13 tokens"),
    ("the quick brown fox jumps over the lazy dog, 7 or 12 times over", None),  # nine tokens in common
    ("Tell me: what is the capital of France, please", "6 tokens"),
    ("What is the capital of Spain?", None),
    ("X+2 = 3", "hash"),
    ("x - 2 = 3", None),
    ("Now x + 2 = 3 and so on", "5 tokens"),
    ("solve 3 - 4 + 5 now", None),  # signs are tokens
]


@pytest.mark.parametrize(("prompt", "how"), CONTAMINATED)
def test_what_counts_as_in_a_benchmark(prompt: str, how: str | None, tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text(
        "".join(json.dumps({"problem": t, "id": i}) + "\n" for i, t in enumerate(BENCHMARK))
    )
    file = rows_file(tmp_path, [("an innocent row", "0"), (prompt, "1")])
    report = run(tmp_path, file, f"decontaminate.benchmarks=[{tmp_path / 'b.jsonl'}]")
    assert removed(tmp_path / "out") == ({} if how is None else {2: "contaminated"})
    if how is not None:
        assert report["examples"][0]["detail"].startswith(f"{how} of {tmp_path / 'b.jsonl'} row ")
        assert report["examples"][0]["other"] in BENCHMARK


def test_same_words_with_other_numbers_are_counted_and_can_be_removed(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text(f"{STORY.format(7, 12)}\n\nsecond item\nof two lines that is here\n")
    file = rows_file(
        tmp_path, [(STORY.format(8, 12), "1"), ("say second item of two lines that is here", "2"), ("free", "3")]
    )
    report = run(tmp_path, file, f"decontaminate={{benchmarks: ['{tmp_path / 'b.txt'}']}}")
    assert removed(tmp_path / "out") == {2: "contaminated"}
    assert report["notes"] == {"contaminated: same words, other numbers (kept)": 1}
    options = read_options(None, [f"decontaminate={{benchmarks: ['{tmp_path / 'b.txt'}'], numbers: false}}"])
    clean([str(file)], tmp_path / "strict", options)
    assert removed(tmp_path / "strict") == {1: "contaminated", 2: "contaminated"}


def test_words_of_many_items_tell_nothing(tmp_path: Path) -> None:
    form = "give your final answer as one integer between zero and a thousand inside of a box please"
    items = [f"alpha {i} beta{chr(97 + i)} gamma. {form}" for i in range(12)]
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"question": t}) + "\n" for t in items))
    file = rows_file(tmp_path, [("count 0 to 11: " + form, "1"), ("so " + items[3], "2"), ("free", "3")])
    run(tmp_path, file, f"decontaminate.benchmarks=[{tmp_path / 'b.jsonl'}:question]", "near.enabled=false")
    assert removed(tmp_path / "out") == {2: "contaminated"}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nowhere.jsonl", "no such file"),
        ("b.jsonl", "expected column one of prompt, .* got 'id', 'q'; name it as file:column"),
        ("b.jsonl:qq", "expected column 'qq', got 'id', 'q'"),
        ("b.jsonl:id", "row 1: id: null"),
    ],
)
def test_benchmarks_that_cannot_be_read(
    spec: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "b.jsonl").write_text('{"id": null, "q": "what"}\n')
    with pytest.raises(BadInput, match=message):
        run(tmp_path, rows_file(tmp_path, [("a", "1")]), f"decontaminate.benchmarks=['{spec}']")
    assert not (tmp_path / "out").exists()


# -- harmful content ---------------------------------------------------------------------------------------------------


def test_keywords_are_whole_words_in_any_case(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("bad  thing\nÜbel\n\n")
    rows = [("a Bad\nThing here", "1"), ("badthing", "1"), ("fine", "übel"), ("übelst", "2")]
    run(tmp_path, rows_file(tmp_path, rows), f"harmful.keywords={tmp_path / 'words.txt'}")
    assert removed(tmp_path / "out") == {1: "harmful", 3: "harmful"}


HOOK = """
def judge(row):
    if "crash" in row["prompt"]:
        raise ValueError("no verdict")
    return "too long an answer" if len(row["answer"]) > 3 else None
"""


def test_a_hook_gives_reasons_and_its_failure_is_counted_and_removes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_harm_filter.py").write_text(HOOK)
    file = rows_file(tmp_path, [("one", "1"), ("two", "12345"), ("crash", "2"), ("four", "4")])
    report = run(tmp_path, file, "harmful={hook: 'my_harm_filter:judge', failures: 0.25}")
    assert stages(report) == {("harmful", "too long an answer"): 1}
    assert written(tmp_path / "out") == ["one", "crash", "four"]
    assert report["notes"] == {"harmful: the hook failed": 1}
    with pytest.raises(RunStopped, match=r"hook failed on 1 of 4 rows, first with ValueError\('no verdict'\)"):
        clean([str(file)], tmp_path / "two", read_options(None, ["harmful.hook='my_harm_filter:judge'"]))
    with pytest.raises(BadInput, match=r"no 'judg' in .*did you mean judge"):
        clean([str(file)], tmp_path / "three", read_options(None, ["harmful.hook='my_harm_filter:judg'"]))


# -- pass rates --------------------------------------------------------------------------------------------------------


def test_pass_rates_annotate_and_filter(tmp_path: Path) -> None:
    assert {"prompt_text"} <= set(rollout_store._STRINGS)  # the columns that are read here
    assert {"reward"} <= rollout_store._NUMBERS
    (tmp_path / "run" / "rollouts").mkdir(parents=True)
    graded = {
        "none": [0, 0],
        "some": [1, 0, 0, 0, None],
        "half": [1, 0.5],
        "most": [1, 1, 1, 0, 1],
        "all": [1.0, 1],
        "one": [1],
    }
    rows = [(f"<u>{prompt}</u>", reward) for prompt, rewards in graded.items() for reward in rewards]
    for step, part in enumerate((rows[:7], rows[7:])):
        table = pa.table({"prompt_text": [p for p, _ in part], "reward": pa.array([r for _, r in part], pa.float64())})
        pq.write_table(table, tmp_path / "run" / "rollouts" / f"step_{step:06d}.parquet")
    file = rows_file(tmp_path, [(prompt, "1") for prompt in (*graded, "never")])
    rates = f"rollouts: ['{tmp_path / 'run'}'], prefix: <u>, suffix: </u>, attempts: 2"
    run(tmp_path, file, f"pass_rate={{{rates}}}")
    table = pq.read_table(tmp_path / "out" / "part-00000.parquet").to_pydict()
    assert table["pass_rate"] == [0.0, 0.25, 0.5, 0.8, 1.0, None, None]
    assert table["attempts"] == [2, 4, 2, 5, 2, 1, 0]
    assert table["difficulty"] == ["unsolved", "hard", "medium", "easy", "solved", None, None]
    options = read_options(None, [f"pass_rate={{{rates}, low: 0.25, high: 0.8, unknown: drop}}"])
    report = clean([str(file)], tmp_path / "band", options)
    assert written(tmp_path / "band") == ["some", "half", "most"]
    expected = {"unknown": 2, "above the band": 1, "below the band": 1}
    assert {reason: n for (stage, reason), n in stages(report).items() if stage == "pass rate"} == expected


# -- mixture, options, page --------------------------------------------------------------------------------------------


def test_a_mixture_is_exact_and_says_what_limits_it(tmp_path: Path) -> None:
    files = []
    for name, count in (("math", 60), ("stem", 26), ("code", 40), ("art", 5)):
        rows = [(f"{name} question number {i}", "1") for i in range(count)]
        files.append(rows_file(tmp_path, rows, f"{name}.jsonl", field=name))
    words = ["columns.domain=field", "near.enabled=false", "mix.proportions={math: 46, stem: 26, code: 20, none: 0}"]
    report = run(tmp_path, files, *words)
    domains = written(tmp_path / "out", "domain")
    assert {d: domains.count(d) for d in set(domains)} == {
        "math": 47,
        "stem": 26,
        "code": 20,
    }  # of 93: 46.5, 26.28, 20.22
    assert report["mixture"]["limiting"] == ["stem"]
    assert stages(report) == {("mix", "over the domain's share"): 38}
    more = read_options(None, [*words, "mix.rows=184", "mix.upsample=true"])
    clean([str(f) for f in files], tmp_path / "more", more)
    prompts = written(tmp_path / "more")
    assert len(prompts) == 184
    assert {prompts.count(p) for p in prompts if p.startswith("stem")} == {2}
    assert {prompts.count(p) for p in prompts if p.startswith("math")} == {1, 2}
    with pytest.raises(BadInput, match="domain 'math' has 60 of the 92 rows"):
        clean([str(f) for f in files], tmp_path / "less", read_options(None, [*words, "mix.rows=184"]))


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("neer.threshold=0.5", "data option neer: unknown key; did you mean near"),
        ("near.treshold=0.5", "data option near.treshold: unknown key; did you mean near.threshold"),
        ("near.threshold=2", "data option near.threshold"),
        ("pass_rate={low: 0.5, high: 0.4}", "expected low ≤ high"),
        ("mix.proportions={math: 1}", "columns.domain to be set"),
        ("columns.keep=[prompt]", "'prompt' is a name of the output's own"),
        ("near=2026-01-01", "expected text, numbers, lists and mappings"),
    ],
)
def test_options_are_refused_in_one_line(word: str, message: str) -> None:
    with pytest.raises(BadInput, match=message) as caught:
        read_options(None, [word])
    assert "\n" not in str(caught.value)


def test_the_command_prints_and_writes_a_page_that_escapes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = "<script>alert(1)</script> \x1b]0;x\x07"
    file = rows_file(tmp_path, [(evil, "1"), (evil, "2"), ("sound", "3")])
    file.write_text(file.read_text() + '{"prompt": "\\u202e<b>"}\n')
    with pytest.raises(SystemExit) as ended:
        main(["data", "clean", str(file), "--out", str(tmp_path / "out"), "malformed.share=0.5"])
    out = capsys.readouterr().out
    assert ended.value.code in (0, None), out
    assert "4 rows read, 2 removed, 2 written in 1 files" in out
    assert "same prompt, other answer" in out
    assert "\x1b" not in out
    page = (tmp_path / "out" / "report.html").read_text()
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "\u202e" not in page
    (tmp_path / "out" / "report.html").unlink()
    with pytest.raises(SystemExit) as ended:
        main(["data", "report", str(tmp_path / "out")])
    assert ended.value.code in (0, None)
    assert (tmp_path / "out" / "report.html").read_text() == page
