"""`rollkeel eval --benchmark`, `benchmarks`, `eval-compare` and `reward-model` as typed: files, tables, refusals in one line.

Not covered: the numbers themselves (tests/evals, tests/train), and inference servers.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_run import cli

from rollkeel.rewards import graders

TINY = ["model.path=preset:tiny-qwen3", "sampling.max_new_tokens=3"]


@pytest.fixture(autouse=True)
def _grader(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = graders.Entry(lane=graders.Lane.INLINE, run=lambda r: float(len(r.text) % 2))
    monkeypatch.setitem(graders._GRADERS, "math", entry)
    monkeypatch.setitem(graders._GRADERS, "choice", entry)


@pytest.fixture
def sums(tmp_path: Path) -> Path:
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps({"problem": f"{i} + 1 =", "answer": str(i + 1)}) + "\n" for i in range(3)))
    return path


def test_two_benchmarks_a_table_json_and_a_comparison(
    sums: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both = ["--benchmark", "aime24,hmmt25", "--path", f"aime24={sums}", "--path", f"hmmt25={sums}", "--samples", "2"]
    code, out, err = cli(capsys, "eval", *TINY, *both, "--greedy", "--out", tmp_path / "a")
    assert code == 0
    assert "warning: aime24: expected the 30 items that are documented, got 3" in err
    lines = out.splitlines()
    assert lines[1].split() == [
        "benchmark",
        "items",
        "k",
        "avg@k",
        "95",
        "%",
        "pass@k",
        "maj@k",
        "greedy",
        "cut",
        "failed",
    ]
    assert [line.split()[:3] for line in lines[2:4]] == [["aime24", "3", "2"], ["hmmt25", "3", "2"]]
    assert all(len(line) <= 80 and "…" not in line for line in lines)
    code, out, _ = cli(capsys, "eval", *TINY, "run.seed=1", *both, "--greedy", "--out", tmp_path / "b", "--json")
    assert code == 0
    assert set(json.loads(out)["benchmarks"]) == {"aime24", "hmmt25"}
    code, out, _ = cli(capsys, "eval-compare", tmp_path / "a", tmp_path / "b", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["aime24"]["greedy"]["difference"] == {"value": 0.0, "se": 0.0, "low": 0.0, "high": 0.0, "items": 3}


def test_benchmarks_are_listed_and_described(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = cli(capsys, "benchmarks")
    assert code == 0
    assert len(out.splitlines()) == 27
    code, out, _ = cli(capsys, "benchmarks", "livecodebench")
    assert code == 0
    assert "test6.jsonl" in out
    assert "avg@4" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--samples", "2"], "--samples: is for --benchmark"),
        (["--benchmark", "aime24"], "expected --out"),
        (["--benchmark", "aime42", "--out", "OUT"], "did you mean"),
        (["--benchmark", "aime24", "--path", "nowhere", "--out", "OUT"], "nowhere: no such file or folder; https://"),
        (["--benchmark", "aime24,aime25", "--path", "x", "--out", "OUT"], "expected NAME=PATH"),
        (["--benchmark", "aime24", "--path", "SUMS", "--since", "August", "--out", "OUT"], "a date like 2024-08"),
        (["--benchmark", "aime24", "--path", "SUMS", "--samples", "0", "--out", "OUT"], "or 0 with --greedy"),
    ],
)
def test_what_is_refused_in_one_line(
    words: list[str], message: str, sums: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"OUT": str(tmp_path / "out"), "SUMS": str(sums)}
    code, out, err = cli(capsys, "eval", *TINY, *(places.get(word, word) for word in words))
    assert (code, out) == (2, "")
    last = err.splitlines()[-1]
    assert message in last
    assert not (tmp_path / "out").exists()


def test_a_reward_model_from_a_file_goes_on_and_refuses_other_pairs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pairs = tmp_path / "pairs.jsonl"
    rows = [{"prompt": f"{i}=", "chosen": "7" * (i % 5 + 1), "rejected": "1" * (i % 5 + 1)} for i in range(40)]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [pairs, *TINY[:1], "sft.steps=3", "sft.batch_size=4", "data.eval_fraction=0.3", "data.chat_template=true"]
    code, out, _ = cli(capsys, "reward-model", *words, "--json", "--out", tmp_path / "rm")
    assert code == 0
    metrics = json.loads(out.splitlines()[-1])
    assert metrics["step"] == 3
    assert 0 <= metrics["eval/accuracy"] <= 1
    code, again, _ = cli(capsys, "reward-model", *words, "--json", "--out", tmp_path / "rm")
    assert json.loads(again.splitlines()[-1]) == metrics
    pairs.write_text(pairs.read_text() + json.dumps({"prompt": "new", "chosen": "a", "rejected": "b"}) + "\n")
    code, _, err = cli(capsys, "reward-model", *words, "--json", "--out", tmp_path / "rm")
    assert code == 2
    assert "was begun with pairs" in err
