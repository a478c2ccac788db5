"""Training rows that stay in their file must be the rows that were checked: an index one byte off would train on other text.

Compared with all lines in memory, for files with every odd ending, and for files that change underneath. Not covered: what a row must
hold (test_prompt_data.py), files on a network that loses them.
"""

from __future__ import annotations

import gc
import json
import os
import tempfile
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rollkeel.config import DataConfig
from rollkeel.errors import BadInput
from rollkeel.tasks.data import Row, load_rows, side
from rollkeel.tasks.lines import BOM, Lines
from rollkeel.tasks.source import FileProblems

Record = tuple[int, bytes]


def pair(number: int, line: bytes) -> Record:
    return number, line


def in_memory(content: bytes) -> list[Record]:
    lines = content.removeprefix(BOM).split(b"\n")
    return [(number, line) for number, line in enumerate(lines, 1) if line.strip()]


@given(st.lists(st.sampled_from([b"a", b"bc", b" ", b"\n", b"\r", BOM, "é".encode(), b"\x00\xff"]), max_size=12))
@example([BOM, b"\n", b"a"])
@example([b"a", b"\n", b"bc", b"\n"])
@settings(deadline=None, max_examples=150)
def test_the_records_of_any_file_are_those_in_memory(pieces: list[bytes]) -> None:
    content = b"".join(pieces)
    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        found, expected = Lines(Path(file.name), pair), in_memory(content)
        assert (list(found), found.total) == (expected, len(expected))
        assert [found[i] for i in range(-len(found), len(found))] == expected * 2
        assert found[1::2] == expected[1::2]
        odd = Lines(Path(file.name), pair, lambda record: record[0] % 2 == 1)
        assert (list(odd), odd.total) == ([r for r in expected if r[0] % 2 == 1], len(expected))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "d.jsonl"
    made.write_bytes(b"one\n\ntwo\nthree\n")
    return made


def test_it_is_a_sequence(path: Path) -> None:
    found = Lines(path, pair)
    assert found == [(1, b"one"), (3, b"two"), (4, b"three")]
    assert found == Lines(path, pair)
    assert found != [(1, b"one"), (3, b"two")]
    assert found != 3
    assert (3, b"two") in found
    for index in (3, -4):
        with pytest.raises(IndexError):
            found[index]


def test_a_fault_is_found_before_the_first_access(path: Path) -> None:
    def parse(number: int, line: bytes) -> bytes:
        if line == b"three":
            raise ValueError(f"line {number} is bad")
        return line

    with pytest.raises(ValueError, match="line 4 is bad"):
        Lines(path, parse, lambda line: line == b"one")
    with pytest.raises(OSError, match="No such file"):
        Lines(path.with_name("none"), pair)


def test_a_file_that_is_replaced_or_grows_is_read_as_it_was(path: Path) -> None:
    found, before = Lines(path, pair), in_memory(path.read_bytes())
    with path.open("ab") as file:
        file.write(b"four\n")
    assert found == before
    other = path.with_name("other")
    other.write_bytes(b"x\n" * 40)
    other.replace(path)
    assert found == before
    path.unlink()
    assert found == before


@pytest.mark.parametrize("content", [b"one\n\ntwO\nthree\n", b"one\n\ntw", b""], ids=["edited", "cut", "emptied"])
def test_a_file_that_changes_in_place_is_an_error_with_its_line(path: Path, content: bytes) -> None:
    found = Lines(path, pair)
    with path.open("r+b") as file:
        file.write(content)
        file.truncate()
    with pytest.raises(BadInput, match=r"d\.jsonl line 3: changed since it was first read") as caught:
        found[1]
    assert "\n" not in str(caught.value)


def test_nothing_stays_open(path: Path) -> None:
    gc.collect()  # what other tests left
    before = len(os.listdir("/proc/self/fd"))
    found = Lines(path, pair)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    del found
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def rows_of(path: Path, **changes: object) -> DataConfig:
    return DataConfig(**{"task": None, "path": str(path), **changes})  # type: ignore[arg-type]


def test_rows_take_no_memory_for_their_text(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i} " + "x" * 500, "answer": i}) + "\n" for i in range(5000)))
    tracemalloc.start()
    try:
        rows = load_rows(rows_of(path))
        now, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert rows[4321] == Row(number=4322, prompt="4321 " + "x" * 500, answer="4321")
    assert now < 5000 * 100
    assert peak < 5000 * 200


def test_splits_of_a_file_share_its_rows_between_them(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"p{i}", "answer": i}) for i in range(300)))
    config = rows_of(path, eval_fraction=0.2)
    train, held_out = (FileProblems(config, 0, split).rows for split in ("train", "eval"))
    assert sorted([*train, *held_out], key=lambda row: row.number) == list(load_rows(config))
    assert {side(row, 0.2) for row in train} == {"train"}
    assert {side(row, 0.2) for row in held_out} == {"eval"}
    with pytest.raises(BadInput, match="none of 300 rows is in the eval split"):
        FileProblems(rows_of(path, eval_fraction=0.0), 0, "eval")
