"""A judge out of a folder must be the judge behind an address: same questions, same verdicts kept, and what is no verdict no reward.

A tiny model that has learnt to end every judgement alike, asked by many threads at once. Not covered: GPUs, whether a judge is any good.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_graders import rollout

from rollkeel.config import GradersConfig
from rollkeel.rewards import Graders, judge_model
from rollkeel.rewards.judge_model import JudgeModelOptions
from rollkeel.types import GraderSpec, Rollout, Status

WORDS = ["model.path=preset:tiny-qwen3", "model.overrides={max_position_embeddings: 1024}"]


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder of a model that gives 7 to what it sees and holds A for the winner."""
    folder, rows = tmp_path_factory.mktemp("judge"), []
    for i in range(40):
        said, gold = ("response", f"Ho {i}."), ("right answer", "Ha.")
        pair = [("response A", said[1]), ("response B", gold[1])]
        turned = [("response A", gold[1]), ("response B", said[1])]
        for kind, parts in (("rubric", [said]), ("reference", [gold, said]), ("pairwise", pair), ("pairwise", turned)):
            options = JudgeModelOptions(path="x", kind=kind)  # type: ignore[arg-type]
            body = judge_model._request(options, "q", parts)
            verdict = "Winner: A" if kind == "pairwise" else "Score: 7"
            rows.append({"prompt": body["messages"][0]["content"], "answer": "-", "solution": verdict})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    from rollkeel.cli import main

    words = ["sft", *WORDS, "--out", str(folder / "model"), "data.task=null", f"data.path={folder / 'rows.jsonl'}"]
    with pytest.raises(SystemExit) as done:
        main(
            [
                *words,
                "data.solution_column=solution",
                "data.chat_template=true",
                "data.eval_fraction=0",
                "sft.steps=50",
                "sft.batch_size=6",
                "sft.lr=1e-2",
            ]
        )
    assert not done.value.code
    return str(folder / "model")


def graded(texts: list[str], answer: str = "Ha.", **options: Any) -> list[Rollout]:
    spec = GraderSpec(name="judge_model", options={"max_tokens": 12, **options})
    with Graders(GradersConfig(workers=4), regrade=0.0) as graders:
        return graders.grade([rollout(text, answer, spec, id=i) for i, text in enumerate(texts)])


@pytest.mark.parametrize(("kind", "reward"), [("rubric", 6 / 9), ("reference", 6 / 9), ("pairwise", 0.5)])
def test_every_kind_is_judged_and_kept(judge: str, kind: str, reward: float, tmp_path: Path) -> None:
    texts = [f"Ho {i}." for i in range(9)]
    judge_model._calls.clear()
    for _ in range(2):
        done = graded(texts, path=judge, kind=kind, cache=str(tmp_path))
        assert [r.reward for r in done] == [pytest.approx(reward)] * 9, [r.detail for r in done]
        assert judge_model._calls.total() == len(list(tmp_path.iterdir())) == 9 * (1 + (kind == "pairwise"))


def test_what_is_no_verdict_is_a_failure_and_never_a_reward(judge: str, tmp_path: Path) -> None:
    about: dict[str, Any] = {"path": judge, "cache": str(tmp_path), "tries": 2}
    judge_model._calls.clear()
    cases = {
        "expected Score": {"max_tokens": 3},
        "in 2 tries: no whole reply in": {"timeout_s": 1e-9},
        "leaves no room in a context": {"rubric": "long " * 400},
        "none": {"path": str(tmp_path / "none")},
        "expected url and model, or path": {"url": "http://127.0.0.1:9/v1", "model": "m"},
    }
    for why, options in cases.items():
        [done] = graded(["Ho."], **{**about, **options})
        assert (done.reward, done.status) == (None, Status.GRADER_FAILURE), why
        assert why in done.detail
        assert "\n" not in done.detail
    assert not list(tmp_path.iterdir())
    [done] = graded(["Ho."], **about, calls=judge_model._calls.total())
    assert "budget" in done.detail
    [done] = graded(["Ho."], **about)  # the engine has let go of what was given up
    assert done.reward == pytest.approx(6 / 9)
