"""A verdict must not hang on the order of files, and must not be given where there is no evidence.

The command is run in this process on folders made here. Not covered: traces of other trainers, and how fast large ones are.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import simulate
from tiny_run import cli

from rollkeel.diagnostics.doctor import CAUSES, Diagnosis, diagnose
from rollkeel.diagnostics.doctor.tokens import clustered, taken
from rollkeel.diagnostics.doctor.view import show
from rollkeel.diagnostics.rollout_store import write_step
from rollkeel.diagnostics.traces.trace import Facts, Trace
from rollkeel.types import GraderSpec, Prompt, Rollout, SamplingParams, Status, TokenSpan

TRACES = {
    "healthy": simulate().trace(),
    "quantisation": simulate(noise=0.1).trace(),
    "temperature": simulate().trace(sampled_at=0.7, trained_at=0.7),
    "wrong_weights": simulate(noise=1.5).trace(),
}


def names(diagnosis: Diagnosis) -> list[str]:
    return [cause.id for cause in diagnosis.causes]


@pytest.mark.parametrize("name", TRACES)
@given(seed=st.integers(0, 2**31))
@settings(max_examples=5, deadline=None)
def test_the_order_of_sequences_changes_nothing(name: str, seed: int) -> None:
    trace = TRACES[name]
    order = np.random.default_rng(seed).permutation(trace.sequences)
    assert diagnose(taken(trace, order)).to_json() == diagnose(trace).to_json()


def test_errors_know_that_tokens_of_a_sequence_depend() -> None:
    """Every value twice in its cluster: the same mean, and the error of the halved number of values."""
    values = np.random.default_rng(0).normal(size=1000)
    once = clustered(values, np.arange(1000))
    twice = clustered(np.repeat(values, 2), np.repeat(np.arange(1000), 2))
    assert once.error == pytest.approx(values.std() / np.sqrt(1000))
    assert (twice.value, twice.error) == (pytest.approx(once.value), pytest.approx(once.error))


def test_without_the_trainers_log_probs_nothing_is_guessed() -> None:
    found = diagnose(TRACES["wrong_weights"].with_(train_logprobs=None, entropy=None))
    assert found.healthy
    assert "the trace has no log-probs of the trainer" in found.not_examined["wrong_weights"]


def test_few_tokens_are_not_examined() -> None:
    found = diagnose(taken(TRACES["wrong_weights"], np.arange(5)))
    assert found.healthy
    assert "are needed" in found.not_examined["alignment"]


def test_an_empty_trace() -> None:
    nothing = np.zeros(0)
    ids = np.zeros(0, np.int64)
    trace = Trace(
        source="test",
        path="x",
        starts=np.zeros(1, np.int64),
        step=ids,
        id=ids,
        group=ids,
        reward=nothing,
        prompt_length=ids,
        token_ids=ids,
        rollout_logprobs=nothing.astype(np.float32),
    )
    assert diagnose(trace).healthy


def test_bare_traces_of_other_trainers() -> None:
    """q, o and mask alone: no versions, entropy, facts or metrics."""
    bare = {"entropy": None, "kept_mass": None, "versions": None, "train_version": None, "facts": Facts()}
    assert diagnose(TRACES["healthy"].with_(**bare)).healthy
    assert names(diagnose(TRACES["temperature"].with_(**bare)))[0] in ("temperature", "unexplained", "wrong_weights")
    assert names(diagnose(TRACES["wrong_weights"].with_(**bare))) == ["wrong_weights"]


# -- the command -------------------------------------------------------------------------------------------------------


def written(folder: Path, trace: Trace) -> Path:
    """The trace as rollkeel's own files, one per step."""
    (folder / "rollouts").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("")
    for step in np.unique(trace.step).tolist():
        chosen: list[int] = np.flatnonzero(trace.step == step).tolist()
        parts = {i: slice(int(trace.starts[i]), int(trace.starts[i + 1])) for i in chosen}
        assert trace.train_logprobs is not None
        assert trace.entropy is not None
        write_step(
            folder / "rollouts" / f"step_{step:06d}.parquet",
            [_rollout(trace, i, parts[i], step) for i in chosen],
            step=step,
            train_version=dict.fromkeys(chosen, int(step) - 1),
            train_logprobs={i: trace.train_logprobs[part] for i, part in parts.items()},
            entropy={i: trace.entropy[part] for i, part in parts.items()},
        )
    return folder


def _rollout(trace: Trace, i: int, part: slice, step: int) -> Rollout:
    q = trace.rollout_logprobs[part]
    version = np.full(len(q), step - 1)
    return Rollout(
        id=i,
        group=int(trace.group[i]),
        member=i % 4,
        prompt=Prompt(
            id=str(i),
            index=i,
            text="",
            token_ids=np.zeros(1, np.int64),
            answer="",
            grader=GraderSpec(name="task"),
            task="",
        ),
        span=TokenSpan(
            token_ids=trace.token_ids[part],
            logprobs=q,
            kept_mass=np.ones_like(q),
            versions=version,
            kv_versions=version,
        ),
        status=Status.FINISHED,
        sampling=SamplingParams(),
        engine="local",
        dtype="fp32",
        reward=float(trace.reward[i]),
    )


def test_the_command_says_healthy_or_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = written(tmp_path / "good", TRACES["healthy"]), written(tmp_path / "bad", TRACES["wrong_weights"])
    code, out, err = cli(capsys, "doctor", good)
    assert (code, err) == (0, "")
    assert "\nhealthy" in out
    code, out, _ = cli(capsys, "doctor", bad, "--json")
    told = json.loads(out)
    assert (code, told["healthy"]) == (1, False)
    first = told["causes"][0]
    assert first["id"] == "wrong_weights"
    assert {"id", "kind", "score", "evidence", "advice", "positions"} == set(first)
    assert set(first["positions"][0]) == {"step", "id", "token"}
    code, out, _ = cli(capsys, "doctor", bad, "--last", "3", "--json")
    assert json.loads(out)["steps"] == 3


def test_bad_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = written(tmp_path / "run", TRACES["healthy"])
    files = sorted((run / "rollouts").iterdir())
    files[0].write_bytes(files[0].read_bytes()[:100])
    code, out, _ = cli(capsys, "doctor", run)
    assert code == 0, "the other files are enough"
    assert "not a whole parquet file" in out
    for file in files[1:]:
        file.unlink()
    for path, expected in ((run, 4), (files[0], 4), (tmp_path / "none", 2), (tmp_path, 2)):
        code, _, err = cli(capsys, "doctor", path)
        assert (code, err.count("\n")) == (expected, 1), err


def test_the_view_names_everything(capsys: pytest.CaptureFixture[str]) -> None:
    found = diagnose(TRACES["wrong_weights"])
    show(replace(found, notes=("step 3 is damaged",), not_examined={"routing": "no experts"}))
    out = capsys.readouterr().out
    for words in ("1. wrong_weights", "Do: ", "See: step ", "routing: no experts", "step 3 is damaged"):
        assert words in out
    assert all(cause.kind == CAUSES[cause.id] for cause in found.causes)
