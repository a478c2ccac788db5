"""Data files come from strangers: each fault must be one line that names the row, and no row may straddle train and evaluation.

Covers jsonl, parquet and CSV files and the protocol towards the `datasets` library with a stand-in of known behaviour (the library is
optional and not installed here). Does not cover downloads from a hub.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollkeel.config import DataConfig
from rollkeel.errors import BadInput
from rollkeel.models.presets import build_tokenizer
from rollkeel.tasks import data as data_module
from rollkeel.tasks.data import Row, load_rows, side
from rollkeel.tasks.source import PromptSource


def config(path: Path | str, **changes: Any) -> DataConfig:
    return DataConfig(task=None, path=str(path), **changes)


def write(folder: Path, content: str | bytes, name: str = "d.jsonl") -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def refuse(path: Path | str, match: str, **changes: Any) -> None:
    with pytest.raises(BadInput, match=match) as caught:
        load_rows(config(path, **changes))
    assert "\n" not in str(caught.value)


def test_jsonl_rows_in_order(tmp_path: Path) -> None:
    lines = [
        '\ufeff{"prompt": "a", "answer": "1"}',
        "",
        '{"prompt": "é\\n", "answer": 2, "more": []}',
        '{"prompt": 3.5, "answer": "x"}\r',
        "",
    ]
    path = write(tmp_path, "\n".join(lines))
    assert load_rows(config(path)) == [
        Row(number=1, prompt="a", answer="1"),
        Row(number=3, prompt="é\n", answer="2"),
        Row(number=4, prompt="3.5", answer="x"),
    ]


def test_parquet_and_other_columns(tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    pq.write_table(pa.table({"q": ["a", "b"], "gold": [1, 2], "x": [None, None]}), path)
    rows = load_rows(config(path, prompt_column="q", answer_column="gold"))
    assert rows == [Row(number=1, prompt="a", answer="1"), Row(number=2, prompt="b", answer="2")]
    assert [r.prompt for r in load_rows(config(path, prompt_column="q", answer_column="q"))] == ["a", "b"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "expected at least one row, got empty data"),
        ("\n \n", "expected at least one row, got empty data"),
        ('{"prompt": "a", "answer": "1"}\n{"prompt": "b"', "line 2: not valid JSON"),
        ("[1, 2]", "line 1: expected an object, got list"),
        ("null", "line 1: expected an object, got NoneType"),
        (b'{"prompt": "\xff", "answer": "1"}', "line 1: not valid JSON: invalid start byte"),
        ("[" * 100_000, "line 1: not valid JSON"),
        ('{"prompt": 1' + "0" * 5000 + ', "answer": 1}', "line 1: not valid JSON"),
        (
            '{"promt": "a", "answer": "1"}',
            r"line 1: no column 'prompt'; present: 'answer', 'promt'; did you mean promt\?",
        ),
        ('{"prompt": "a", "gold": "1"}', "no column 'answer'; present: 'gold', 'prompt'; set data.answer_column"),
        ("{}", "no column 'prompt'; present: none"),
        ('{"prompt": "a", "answer": "1"}\n{"prompt": "b"}', "line 2: no column 'answer'"),
        ('{"prompt": "a", "answer": null}', "row 1: column 'answer': expected text, got null"),
        ('{"prompt": "a", "answer": true}', "row 1: column 'answer': expected text or a number, got bool"),
        ('{"prompt": ["a"], "answer": "1"}', "row 1: column 'prompt': expected text, a number or a list of messages"),
        ('{"prompt": [], "answer": "1"}', "row 1: column 'prompt': expected text, a number or a list of messages"),
        (
            '{"prompt": [{"role": "user"}], "answer": "1"}',
            "column 'prompt': .* a list of messages with role and content",
        ),
        (
            '{"prompt": [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}], "answer": "1"}',
            "row 1: column 'prompt' holds 2 messages; set data.chat_template=true",
        ),
        ('{"prompt": {"a": 1}, "answer": "1"}', "column 'prompt': expected text or a number, got dict"),
        ('{"prompt": "a", "answer": NaN}', "expected a finite number or text, got nan"),
        ('{"prompt": "a", "answer": 1e999}', "expected a finite number or text, got inf"),
        ('{"prompt": "  ", "answer": "1"}', "column 'prompt': expected text, got an empty string"),
        ('{"prompt": "a", "answer": ""}', "column 'answer': expected text, got an empty string"),
        ('{"prompt": "\\ud800", "answer": "1"}', "row 1: column 'prompt': holds a lone surrogate"),
    ],
)
def test_faults_of_a_jsonl_file(tmp_path: Path, content: str | bytes, message: str) -> None:
    refuse(write(tmp_path, content), message)


def test_missing_and_odd_files(tmp_path: Path) -> None:
    refuse(tmp_path / "no.jsonl", "no such file")
    refuse(tmp_path / "no.parquet", "no such file")
    refuse(tmp_path / "no-folder", "no such file or folder")
    (tmp_path / "folder.jsonl").mkdir()
    refuse(tmp_path / "folder.jsonl", "no such file")
    refuse(write(tmp_path, "a,b", "d.txt"), r"ending in \.jsonl or \.parquet or \.csv, got '\.txt'")
    refuse(write(tmp_path, "not parquet at all", "bad.parquet"), "not readable as parquet")


def test_csv(tmp_path: Path) -> None:
    path = write(tmp_path, '\ufeffprompt,answer,note\r\n"1+1, ""please""",2,\r\né,"a\nb",x\r\n', "d.csv")
    assert load_rows(config(path)) == [
        Row(number=1, prompt='1+1, "please"', answer="2"),
        Row(number=2, prompt="é", answer="a\nb"),
    ]
    for content, message in (
        ("", r"no column 'prompt'; present: none"),
        ("prompt,answer\n", "empty data"),
        ("prompt,answer\na\n", "row 1: column 'answer': expected text, got null"),
        ("prompt,answer\na,1,2\n", "row 1: more fields than the header has columns"),
        ('prompt,answer\n"a,1\n', "not readable as CSV"),
        (b"prompt,answer\n\xff,1\n", "not readable as CSV"),
    ):
        refuse(write(tmp_path, content, "bad.csv"), message)


DAPO = {
    "data_source": "math_dapo",
    "prompt": [{"content": "Solve it.\n\nWhat is 6·7?", "role": "user"}],
    "ability": "MATH",
    "reward_model": {"ground_truth": "42", "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": "9a9b6eb4"},
}
"""A row of DAPO-Math-17k with the columns and types it is published with."""


@pytest.mark.parametrize("name", ["d.jsonl", "d.parquet"])
def test_conversations_and_nested_columns(name: str, tmp_path: Path) -> None:
    second = DAPO | {"prompt": [{"content": "Be brief.", "role": "system"}, {"content": "2?", "role": "user"}]}
    path = tmp_path / name
    if name.endswith("jsonl"):
        path.write_text("".join(json.dumps(row) + "\n" for row in (DAPO, second)))
    else:
        pq.write_table(pa.Table.from_pylist([DAPO, second]), path)
    refuse(path, "no column 'answer'; present: .*'reward_model'; set data.answer_column")
    refuse(path, "column 'reward_model.truth' has no 'truth'", answer_column="reward_model.truth")
    refuse(
        path,
        "row 2: column 'prompt' holds 2 messages; set data.chat_template=true",
        answer_column="reward_model.ground_truth",
    )
    chat = config(path, answer_column="reward_model.ground_truth", chat_template=True)
    first, other = load_rows(chat)
    assert (first.prompt, first.answer, len(first.messages)) == (DAPO["prompt"][0]["content"], "42", 1)
    assert [m["role"] for m in other.messages] == ["system", "user"]


def test_one_message_needs_no_chat_template_and_answers_may_be_messages(tmp_path: Path) -> None:
    answer = [{"role": "assistant", "content": "42"}]
    path = write(tmp_path, json.dumps(DAPO | {"answer": answer}) + "\n")
    assert load_rows(config(path)) == [Row(number=1, prompt=DAPO["prompt"][0]["content"], answer="42")]
    (row,) = load_rows(config(path, answer_column="reward_model.ground_truth"))
    assert side(row, 0.5) == side(Row(number=2, prompt=row.prompt, answer=""), 0.5), "as the same text without messages"


def test_a_conversation_goes_through_the_chat_template_whole(tmp_path: Path) -> None:
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2?"}]
    rows = [{"prompt": talk, "answer": "2"}, {"prompt": "3?", "answer": "3"}]
    path = write(tmp_path, "".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = build_tokenizer()
    options = config(path, chat_template=True, eval_fraction=0.0)
    source = PromptSource(options, tokenizer, seed=0, split="train", vocab_size=288, max_prompt=200)
    texts = {source.prompt(i).text for i in range(2)}
    expected = (talk, [{"role": "user", "content": "3?"}])
    assert texts == {
        tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) for messages in expected
    }
    assert {source.demonstration(i)[0].tobytes() for i in range(2)} == {
        source.prompt(i).token_ids.tobytes() for i in range(2)
    }


def test_sft_and_rl_see_rows_of_their_own(tmp_path: Path) -> None:
    path = write(tmp_path, "".join(json.dumps({"prompt": str(i), "answer": "x"}) + "\n" for i in range(600)))
    tokenizer = build_tokenizer()

    def prompts(split: str, share: float) -> set[str]:
        options = config(path, eval_fraction=0.2, sft_fraction=share)
        source = PromptSource(options, tokenizer, seed=0, split=split, vocab_size=288, max_prompt=64)
        return {source.prompt(i).text for i in range(source.size or 0)}

    parts = [prompts(split, 0.25) for split in ("sft", "train", "eval")]
    assert sum(map(len, parts)) == len(set().union(*parts)) == 600
    assert 80 <= len(parts[0]) <= 160
    assert prompts("sft", 0.0) == prompts("train", 0.0) == parts[0] | parts[1]
    assert prompts("eval", 0.0) == parts[2]
    with pytest.raises(BadInput, match=r"in the sft split at data.sft_fraction=1e-09; raise it or add rows"):
        prompts("sft", 1e-9)


def test_faults_of_a_parquet_file(tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    pq.write_table(pa.table({"prompt": ["a", None], "answer": ["1", "2"]}), path)
    refuse(path, "row 2: column 'prompt': expected text, got null")
    refuse(path, r"no column 'answers'; present: 'answer', 'prompt'; did you mean answer\?", answer_column="answers")
    pq.write_table(pa.table({"prompt": pa.array([], pa.string()), "answer": pa.array([], pa.string())}), path)
    refuse(path, "empty data")
    path.write_bytes(path.read_bytes()[:-20])
    refuse(path, "not readable as parquet")


def test_the_optional_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(data_module.importlib, "import_module", absent)
    refuse("some/dataset", r"pip install 'rollkeel\[datasets\]'")
    refuse(tmp_path, r"pip install 'rollkeel\[datasets\]'")


def fake_library(loaded: Any) -> Any:
    class DatasetsError(Exception):
        pass

    def load(*args: Any, **kwargs: Any) -> Any:
        if isinstance(loaded, Exception):
            raise loaded
        return loaded

    errors = SimpleNamespace(DatasetsError=DatasetsError)
    return SimpleNamespace(load_dataset=load, load_from_disk=load, exceptions=errors)


class Plain:
    """A `datasets.Dataset` as far as the loader knows one."""

    def __init__(self, **columns: list[Any]) -> None:
        self.columns = columns

    @property
    def column_names(self) -> list[str]:
        return list(self.columns)

    def __getitem__(self, name: str) -> list[Any]:
        return self.columns[name]


@pytest.mark.parametrize("wrap", [False, True])
def test_hugging_face_data(monkeypatch: pytest.MonkeyPatch, wrap: bool) -> None:
    table = Plain(prompt=["a", "b"], answer=[1, "2"])
    loaded = {"train": table, "test": Plain()} if wrap else table
    monkeypatch.setattr(data_module.importlib, "import_module", lambda name: fake_library(loaded))
    assert load_rows(config("some/set")) == [
        Row(number=1, prompt="a", answer="1"),
        Row(number=2, prompt="b", answer="2"),
    ]
    refuse("some/set", "no column 'question'; present: 'answer', 'prompt'", prompt_column="question")
    if wrap:
        refuse("some/set", r"data.split 'tets': not in 'some/set'; did you mean test\?", split="tets")
    monkeypatch.setattr(data_module.importlib, "import_module", lambda name: fake_library(ValueError("Unknown\nsplit")))
    refuse("some/set", "datasets cannot load it: Unknown split")


def test_hugging_face_folder_with_the_real_library(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    folder = tmp_path / "saved"
    made = datasets.Dataset.from_dict({"prompt": ["a", "b"], "answer": ["1", "2"]})
    made.save_to_disk(str(folder))
    assert [r.answer for r in load_rows(config(folder))] == ["1", "2"]
    datasets.DatasetDict({"train": made}).save_to_disk(str(tmp_path / "both"))
    assert [r.prompt for r in load_rows(config(tmp_path / "both"))] == ["a", "b"]
    refuse(tmp_path / "both", "data.split 'test': not in", split="test")
    plain = tmp_path / "plain"
    plain.mkdir()
    write(plain, '{"prompt": "a", "answer": "1"}\n', "train.jsonl")
    assert [r.prompt for r in load_rows(config(plain))] == ["a"]
    refuse(plain, "datasets cannot load it", split="test")
    empty = tmp_path / "empty"
    empty.mkdir()
    refuse(empty, "datasets cannot load it")


def test_duplicates_never_straddle_and_the_share_is_right(tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": f"what is {i % 1000}", "answer": str(i)}) for i in range(3000)]
    rows = load_rows(config(write(tmp_path, "\n".join(lines))))
    sides: dict[str, set[str]] = {}
    for row in rows:
        sides.setdefault(row.prompt, set()).add(side(row, 0.1))
    assert all(len(s) == 1 for s in sides.values())
    held_out = sum("eval" in s for s in sides.values())
    assert 65 <= held_out <= 135
    # Raising the share only ever moves rows from train to eval.
    assert all(side(r, 0.2) == "eval" for r in rows if side(r, 0.1) == "eval")
    spaced = Row(number=1, prompt=" what  is\n5 ", answer="")
    assert side(spaced, 0.5) == side(Row(number=9, prompt="what is 5", answer="z"), 0.5)
    assert {side(r, 0.0) for r in rows} == {"train"}
