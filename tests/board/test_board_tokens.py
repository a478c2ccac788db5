"""A page of tokens must be the tokens that were recorded, each with its own numbers, however the file is cut into row groups.

Truth is by hand (`board_kit.step_file`): token ids count on over a step. Not covered: speed (benchmarks/board.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from board_kit import HOSTILE, run_folder, step_file
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollkeel.board.tokens import MOST_ROLLOUTS, Kept, Place, Tokens
from rollkeel.errors import BadInput, Corrupt
from rollkeel.record.rollout_store import read_step, to_rollouts, write_step
from rollkeel.types import GraderSpec, Prompt, Rollout, SamplingParams, Status, TokenSpan

LENGTHS = (3, 5, 2, 0, 4)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    path = run_folder(tmp_path_factory.mktemp("tokens") / "a")
    for step in (1, 4):
        step_file(path, step, LENGTHS)
    return Tokens(path)


def ids(page: dict[str, Any]) -> list[int]:
    return [token for part in page["parts"] for token in part["token_ids"]]


def place(found: dict[str, Any]) -> Place:
    return Place(found["step"], found["row"], found["token"])


@given(count=st.integers(1, 20))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_pages_forwards_and_backwards_show_every_token_once(tokens: Tokens, count: int) -> None:
    every = [*range(1000, 1014), *range(4000, 4014)]
    at, forwards = Place(1, 0, 0), list[int]()
    while True:
        page = tokens.page(at, count)
        assert len(ids(page)) <= count
        forwards += ids(page)
        if page["next"] is None:
            break
        at = place(page["next"])
    assert forwards == every
    last, backwards = Place(4, len(LENGTHS), 0), list[int]()
    while (before := tokens.before(last, count)) is not None:
        backwards = [token for token in ids(tokens.page(before, count)) if token < (backwards or [9999])[0]] + backwards
        last = before
    assert backwards == every
    assert last == Place(1, 0, 0)


def test_a_page_begins_and_ends_inside_a_rollout(tokens: Tokens) -> None:
    page = tokens.page(Place(1, 0, 1), 5)
    assert [(part["row"], part["start"], part["length"], part["token_ids"]) for part in page["parts"]] == [
        (0, 1, 3, [1001, 1002]),
        (1, 0, 5, [1003, 1004, 1005]),
    ]
    assert page["next"] == {"step": 1, "row": 1, "token": 3}
    assert (page["start"], page["first"]) == ({"step": 1, "row": 0, "token": 1}, False)
    assert page["rows"] == 5
    # Four tokens of rollout 4, none of rollout 3, the last one of rollout 2.
    assert tokens.before(Place(4, 0, 0), 5) == Place(1, 2, 1)
    assert [tokens.page(Place(step, 0, 0), 5)["first"] for step in (1, 4)] == [True, False]


def test_a_token_has_its_own_numbers(tokens: Tokens) -> None:
    whole, untrained = tokens.page(Place(1, 1, 0), 7)["parts"]
    assert whole["prompt_text"] == f"prompt 1 {HOSTILE}"
    assert whole["reward"] is None
    assert whole["texts"] == [f" w{token}" for token in range(1003, 1008)]
    assert whole["keep"] == [False, True, True, True, True]
    assert whole["train_logprobs"] == [-0.9] * 5
    assert whole["logprobs"] == [-1] * 5
    assert (whole["train_version"], whole["versions"]) == (1, [0] * 5)
    assert untrained["train_version"] is None
    assert not {"train_logprobs", "keep", "entropy"} & set(untrained)
    assert "prompt_text" not in tokens.page(Place(1, 1, 1), 1)["parts"][0]


def test_rollouts_are_ranked_by_what_was_asked(tokens: Tokens) -> None:
    found = tokens.rollouts(1, "order", 0, 10)
    assert (found["count"], found["tokens"]) == (5, 14)
    assert [one["id"] for one in found["rollouts"]] == [100, 101, 102, 103, 104]
    assert [one["length"] for one in found["rollouts"]] == list(LENGTHS)
    # log o − log q is 0.1 i; rollout 2 was not trained on, rollout 3 has no tokens.
    assert [one["gap"] for one in found["rollouts"]] == pytest.approx([0, 0.1, None, None, 0.4], abs=1e-6)
    assert [one["dropped"] for one in found["rollouts"]] == pytest.approx([0, 0.2, None, None, 0])
    by = {
        sort: [one["row"] for one in tokens.rollouts(1, sort, 0, 10)["rollouts"]]
        for sort in ("gap", "dropped", "reward", "length")
    }
    assert by == {
        "gap": [4, 1, 0, 2, 3],
        "dropped": [1, 0, 4, 2, 3],
        "reward": [4, 3, 2, 0, 1],
        "length": [1, 4, 0, 2, 3],
    }
    assert [one["row"] for one in tokens.rollouts(1, "length", 2, 2)["rollouts"]] == [0, 2]


def test_a_rollout_is_found_by_its_id(tokens: Tokens) -> None:
    assert tokens.file(4).row_of(403) == 3
    with pytest.raises(BadInput, match="no rollout 7"):
        tokens.file(4).row_of(7)


def test_only_the_row_groups_of_a_page_are_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step_file(run_folder(tmp_path / "a"), 1, LENGTHS)
    read, real = list[int](), pq.ParquetFile.read_row_group

    def counted(file: pq.ParquetFile, i: int, *rest: object) -> object:
        read.append(i)
        return real(file, i, *rest)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", counted)
    found = Tokens(tmp_path / "a")
    found.page(Place(1, 4, 0), 2)
    assert read == [2]
    found.page(Place(1, 4, 2), 2)
    assert read == [2]


def test_what_is_broken_is_one_line(tmp_path: Path) -> None:
    path = run_folder(tmp_path / "a")
    found = Tokens(path)
    assert found.steps() == []
    with pytest.raises(BadInput, match="step 1: no rollouts were recorded"):
        found.page(Place(1, 0, 0), 5)
    step_file(path, 1, LENGTHS).write_bytes(b"PAR1 half of a file")
    with pytest.raises(Corrupt, match=r"step_000001.parquet cannot be read: .*"):
        found.page(Place(1, 0, 0), 5)
    step_file(path, 2, LENGTHS, without=["token_ids"])
    with pytest.raises(Corrupt, match="column token_ids is missing"):
        found.rollouts(2, "order", 0, 5)
    outside = step_file(run_folder(tmp_path / "b"), 1, LENGTHS)
    (path / "rollouts" / "step_000003.parquet").symlink_to(outside)
    with pytest.raises(Corrupt, match="is a link out of the run folder"):
        found.page(Place(3, 0, 0), 5)


def test_an_older_file_shows_what_it_has(tmp_path: Path) -> None:
    path = run_folder(tmp_path / "a")
    step_file(path, 1, LENGTHS, without=["pieces", "keep", "entropy", "train_logprobs", "status", "prompt_text"])
    found = Tokens(path)
    part = found.page(Place(1, 0, 0), 3)["parts"][0]
    assert part["texts"] == ["⟨1000⟩", "⟨1001⟩", "⟨1002⟩"]
    assert "keep" not in part
    assert found.rollouts(1, "gap", 0, 1)["rollouts"][0]["gap"] is None


def test_a_list_of_another_length_than_its_tokens_counts_as_missing(tmp_path: Path) -> None:
    file = step_file(run_folder(tmp_path / "a"), 1, LENGTHS, group_rows=9)
    table = pq.read_table(file)
    columns = table["train_logprobs"].to_pylist()
    columns[0] = [-7.0]
    at = table.column_names.index("train_logprobs")
    pq.write_table(table.set_column(at, "train_logprobs", pa.array(columns, pa.list_(pa.float32()))), file)
    found = Tokens(tmp_path / "a")
    gaps = [one["gap"] for one in found.rollouts(1, "order", 0, 9)["rollouts"]]
    assert gaps == pytest.approx([None, 0.1, None, None, 0.4], abs=1e-6)
    parts = found.page(Place(1, 0, 0), 8)["parts"]
    assert ["train_logprobs" in part for part in parts] == [False, True]


def test_a_file_that_is_written_anew_is_read_anew(tmp_path: Path) -> None:
    path = run_folder(tmp_path / "a")
    step_file(path, 1, (1,))
    found = Tokens(path)
    assert found.page(Place(1, 0, 0), 9)["rows"] == 1
    step_file(path, 1, (1, 2))
    assert found.page(Place(1, 0, 0), 9)["rows"] == 2


def test_many_empty_rollouts_make_a_page_of_their_own(tmp_path: Path) -> None:
    step_file(run_folder(tmp_path / "a"), 1, [0] * (MOST_ROLLOUTS + 3), group_rows=50)
    page = Tokens(tmp_path / "a").page(Place(1, 0, 0), 5)
    assert len(page["parts"]) == MOST_ROLLOUTS
    assert page["next"] == {"step": 1, "row": MOST_ROLLOUTS, "token": 0}


def test_the_values_asked_for_last_are_kept() -> None:
    made, kept = list[int](), Kept(2)

    def get(key: int) -> int:
        return kept.get(key, lambda: made.append(key) or key)  # type: ignore[func-returns-value]

    assert [get(key) for key in (1, 2, 1, 3, 1, 2)] == [1, 2, 1, 3, 1, 2]
    assert made == [1, 2, 3, 2]


def test_a_step_of_many_tokens_is_written_in_several_row_groups(tmp_path: Path) -> None:
    """What makes a page of a large file cheap: `write_step` cuts it so that about 2¹⁷ tokens are decoded together."""
    n = 2**15
    ones, zeros = np.ones(n, np.float32), np.zeros(n, np.float32)
    versions = np.zeros(n, np.int64)
    span = TokenSpan(token_ids=np.arange(n), logprobs=zeros, kept_mass=ones, versions=versions, kv_versions=versions)
    prompt = Prompt(
        id="p", index=0, text="", token_ids=np.arange(2), answer="", grader=GraderSpec(name="exact"), task="t"
    )
    shared: dict[str, Any] = {"prompt": prompt, "span": span, "status": Status.FINISHED, "sampling": SamplingParams()}
    made = [Rollout(id=i, group=i, member=0, engine="local", dtype="fp32", **shared) for i in range(9)]
    write_step(tmp_path / "a.parquet", made, step=1)
    meta = pq.read_metadata(tmp_path / "a.parquet")
    assert [meta.row_group(i).num_rows for i in range(meta.num_row_groups)] == [4, 4, 1]
    assert [rollout.id for rollout in to_rollouts(read_step(tmp_path / "a.parquet"))] == list(range(9))
