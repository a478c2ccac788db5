"""Evaluations of their own inside a run: at another temperature than training's, at their own interval, and never in its way.

Tiny runs and a fake benchmark file. Not covered: a real vLLM server (tests/engines/test_vllm.py), benchmarks as downloaded.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_run import cli, rows

from rollkeel.engines.open import check_engine
from rollkeel.errors import BadInput
from rollkeel.loop.eval_sets import evaluation_params
from rollkeel.loop.job import train
from rollkeel.recipe import load

WORDS = [
    "run.steps=4", "data.options.digits=2", "sft.steps=60", "sft.lr=1e-2", "rollout.prompts=8", "rollout.samples=4",
    "sampling.max_new_tokens=4", "eval.every=2", "eval.items=8", "eval.samples=2",
]  # fmt: skip
COLD = {"temperature": 0.05, "top_p": 0.9}


def sets(*entries: dict[str, Any]) -> str:
    return f"eval.sets={json.dumps(entries)}"


def evaluations(run: Path, name: str) -> dict[int, dict[str, float]]:
    head = f"eval/{name}/"
    told = {row["step"]: {k.removeprefix(head): v for k, v in row.items() if k.startswith(head)} for row in rows(run)}
    return {step: metrics for step, metrics in told.items() if metrics}


def test_sets_have_their_own_prompts_sampling_interval_and_samples(tmp_path: Path) -> None:
    aime = tmp_path / "aime.jsonl"
    aime.write_text("".join(json.dumps({"problem": f"{i}+1=", "answer": i + 1}) + "\n" for i in range(30)))
    file = tmp_path / "held.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{i}:", "answer": str(i)}) + "\n" for i in range(7)))
    entries = [
        {"task": "runsum", "options": {"digits": 2}, "name": "cold", "every": 3, "samples": 3, "sampling": COLD},
        {"benchmark": "aime25", "path": str(aime), "every": 0, "samples": 1, "items": 6},
        {"path": str(file), "name": "held", "samples": 1},
    ]
    plain, run = tmp_path / "plain", tmp_path / "run"
    train(load(None, [*WORDS, f"run.dir={plain}"]))
    train(load(None, [*WORDS, sets(*entries), f"run.dir={run}"]))
    assert sorted(evaluations(run, "runsum")) == [0, 2, 4]
    cold = evaluations(run, "cold")
    assert sorted(cold) == [0, 3, 4]
    assert all(metrics["k"] == 3 and "greedy" not in metrics and "avg@k_se" in metrics for metrics in cold.values())
    # almost greedy answers to the same items: what greedy scores, and not what sampling scores
    main = evaluations(run, "runsum")
    assert abs(cold[4]["avg@k"] - main[4]["greedy"]) < 0.15
    assert sorted(evaluations(run, "aime25")) == [0, 4]
    assert sorted(evaluations(run, "held")) == [0, 2, 4]
    learnt = [[{k: v for k, v in row.items() if not k.startswith("eval/")} for row in rows(r)] for r in (plain, run)]
    assert learnt[0] == learnt[1]


def test_a_server_that_does_not_tell_kept_mass_may_evaluate_with_top_p_and_not_train() -> None:
    config = load(
        None, ["engine.kind=vllm", "engine.server.url=http://127.0.0.1:9", sets({"task": "knights", "sampling": COLD})]
    )
    sampling = evaluation_params(config, config.eval.sets[0], ())
    assert (sampling.temperature, sampling.top_p, sampling.max_new_tokens) == (0.05, 0.9, 16)
    with pytest.raises(BadInput) as refused:  # of the address alone
        check_engine(config.engine, sampling)
    assert "top_p" not in str(refused.value)
    with pytest.raises(BadInput, match="top_p"):
        check_engine(config.engine, replace(sampling, evaluation=False))


@pytest.mark.parametrize(
    ("entry", "line"),
    [
        ({"name": "x"}, "exactly one of benchmark, source, task and path"),
        ({"task": "runsum"}, "set a name of its own"),
        ({"source": "maths"}, "no data.sources is called 'maths'"),
        ({"benchmark": "aime26"}, "did you mean"),
        ({"task": "knights", "sampling": {"top": 1}}, "unknown key"),
        ({"task": "knights", "sampling": {"top_p": 2}}, "eval.sets.0.sampling.top_p"),
        ({"path": "no.jsonl", "name": "x"}, "no such file"),
        ({"task": "knights", "sampling": {"max_new_tokens": 100000}}, "max_new_tokens"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_in_one_line(
    entry: dict[str, Any], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = cli(capsys, "train", *WORDS, sets(entry), f"run.dir={tmp_path / 'run'}")
    assert (code, err.count("\n"), line in err) == (2, 1, True), err
