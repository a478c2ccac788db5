"""A verdict must not hang on the order of files, and must not be given where there is no evidence.

The command is run in this process on folders made here. Not covered: traces of other trainers, and how fast large ones are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import VOCABULARY, simulate
from tiny_run import cli

from rollkeel.record.rollout_store import write_step
from rollkeel.types import GraderSpec, Prompt, Rollout, SamplingParams, Status, TokenSpan
from rollkeel_doctor import CAUSES, Diagnosis, diagnose
from rollkeel_doctor.evidence import measure
from rollkeel_doctor.tokens import clustered, taken
from rollkeel_doctor.traces.read import read_trace
from rollkeel_doctor.traces.trace import Facts, Trace
from rollkeel_doctor.verdict import OF_RUN, OF_TOKENS
from rollkeel_doctor.view import show

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


def test_rows_of_the_tables_can_be_read_and_name_known_causes() -> None:
    for rule in (*OF_TOKENS, *OF_RUN):
        assert rule.why.endswith(".")
        assert len(rule.why) > 15
        assert set(rule.unless) <= set(CAUSES)


def test_a_row_that_ends_its_table_hides_the_rows_below_it() -> None:
    """A temperature that the record lacks makes a gap of its own; what is left of it is not asked for other weights."""
    trace = simulate().trace(sampled_at=0.7, trained_at=0.7, facts=Facts(temperature=0.7))
    e = measure(trace)
    asked = [rule.judge for rule in OF_TOKENS if rule.where(e) and rule.judge(e) is not None]
    assert len(asked) > 1  # more than one row would have spoken
    assert [c.id for c in diagnose(trace).causes] == ["temperature"]


def test_errors_know_that_tokens_of_a_sequence_depend() -> None:
    """Every value twice in its cluster: the same mean, and the error of the halved number of values."""
    values = np.random.default_rng(0).normal(size=1000)
    once = clustered(values, np.arange(1000))
    twice = clustered(np.repeat(values, 2), np.repeat(np.arange(1000), 2))
    assert once.error == pytest.approx(values.std(ddof=1) / np.sqrt(1000))
    assert (twice.value, twice.error) == (pytest.approx(once.value), pytest.approx(once.error))


def test_without_the_trainers_log_probs_nothing_is_guessed() -> None:
    found = diagnose(TRACES["wrong_weights"].with_(train_logprobs=None, entropy=None))
    assert found.healthy
    assert "the trace has no log-probs of the trainer" in found.not_examined["wrong_weights"]


def test_few_tokens_are_not_examined() -> None:
    found = diagnose(taken(TRACES["wrong_weights"], np.arange(5)))
    assert found.healthy is None
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
    assert diagnose(trace).healthy is None


def test_bare_traces_of_other_trainers() -> None:
    """q, o and mask alone: no versions, entropy, facts or metrics."""
    bare = {"entropy": None, "kept_mass": None, "versions": None, "train_version": None, "facts": Facts()}
    assert diagnose(TRACES["healthy"].with_(**bare)).healthy
    assert names(diagnose(TRACES["temperature"].with_(**bare)))[0] in ("temperature", "unexplained", "wrong_weights")
    assert names(diagnose(TRACES["wrong_weights"].with_(**bare))) == ["wrong_weights"]


@pytest.mark.parametrize("value", [np.nan, 0.0])
def test_an_engine_that_reported_no_log_probs_is_not_a_wrong_mask(value: float) -> None:
    """Zeros are what programs write where nothing was asked for; without kept mass they are no greedy sampling either."""
    trace = TRACES["healthy"]
    q = np.full_like(trace.rollout_logprobs, value)
    found = diagnose(trace.with_(rollout_logprobs=q, kept_mass=None))
    assert names(found) == []
    assert "no log-probs of the engine" in found.not_examined["mask"]


def test_sequences_without_any_log_prob_are_told_and_not_blamed_on_the_mask() -> None:
    trace = TRACES["healthy"]
    q = trace.rollout_logprobs.copy()
    q[: trace.starts[20]] = np.nan
    found = diagnose(trace.with_(rollout_logprobs=q))
    assert names(found) == []
    assert f"20 of {trace.sequences} sequences have no log-probs of the engine at all" in found.observed


@pytest.mark.parametrize("side", ["rollout_logprobs", "train_logprobs"])
def test_values_above_zero_are_no_log_probs(side: str) -> None:
    """Probabilities or −log p in place of log p: no statistic of ρ means anything. Rounding near 0 is no fault."""
    trace = TRACES["healthy"]
    values = getattr(trace, side)
    found = diagnose(trace.with_(**{side: -values}))
    assert names(found)[0] == "unexplained"
    assert "are not log-probabilities" in found.causes[0].evidence
    assert "hidden behind" in found.not_examined["temperature"]
    assert values[trace.starts[found.causes[0].positions[0]["id"]]] < 0
    assert diagnose(trace.with_(**{side: values + np.float32(1e-6)})).healthy


def test_rewards_that_are_all_equal_are_told() -> None:
    found = diagnose(TRACES["healthy"].with_(reward=np.zeros(TRACES["healthy"].sequences)))
    assert names(found) == ["no_reward_signal"]
    found = diagnose(TRACES["healthy"].with_(reward=np.ones(TRACES["healthy"].sequences)))
    assert found.healthy
    assert "every reward is 1: no group has anything to learn from" in found.observed


def test_a_temperature_that_nobody_stated_is_not_said_to_be_stated() -> None:
    trace = simulate().trace(sampled_at=0.7).with_(facts=Facts())
    found = diagnose(trace)
    assert names(found)[0] == "temperature"
    assert not re.search(r"\d is stated", found.causes[0].evidence)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("field", ["entropy", "kept_mass", "reward", "train_logprobs"])
@pytest.mark.parametrize("value", [np.nan, 0.0])
def test_a_column_of_one_value_is_no_warning(field: str, value: float) -> None:
    trace = TRACES["healthy"]
    diagnose(trace.with_(**{field: np.full(len(trace) if field != "reward" else trace.sequences, value)})).to_json()


@pytest.mark.filterwarnings("error")
def test_groups_of_one_are_no_warning() -> None:
    trace = TRACES["healthy"]
    diagnose(trace.with_(group=np.arange(trace.sequences)))


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
            token_ids=np.append(trace.token_ids[part][:-1], VOCABULARY),
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


def edited(folder: Path, column: str, values: Callable[[int], pa.Array] | None) -> Path:
    """One column of every file replaced, or left out."""
    for file in (folder / "rollouts").iterdir():
        table = pq.read_table(file)
        at = table.column_names.index(column)
        table = table.remove_column(at) if values is None else table.set_column(at, column, values(table.num_rows))
        pq.write_table(table, file)
    return folder


@pytest.mark.parametrize(
    ("column", "values", "expected"),
    [
        ("step", None, "column step is missing"),
        ("reward", None, "column reward is missing"),
        ("token_ids", lambda n: pa.array([1] * n), "column token_ids: expected lists of numbers, got int64"),
        ("logprobs", lambda n: pa.array([["a"]] * n), "column logprobs: expected lists of numbers"),
        ("id", lambda n: pa.array(["a"] * n), "column id: expected numbers, got string"),
        ("status", lambda n: pa.array([1] * n), "column status: expected text, got int64"),
    ],
)
def test_columns_of_another_kind_are_one_line(
    column: str,
    values: Callable[[int], pa.Array] | None,
    expected: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = edited(written(tmp_path / "run", TRACES["healthy"]), column, values)
    code, _, err = cli(capsys, "doctor", run)
    assert (code, err.count("\n")) == (4, 1), err
    assert expected in err


@pytest.mark.parametrize("text", ['{"temper', "[1]", '{"temperature": "x", "top_p": true}', None])
def test_sampling_that_states_nothing(text: str | None, tmp_path: Path) -> None:
    run = edited(
        written(tmp_path / "run", TRACES["healthy"]), "sampling", lambda n: pa.array([text] * n, type=pa.string())
    )
    facts = read_trace(run).facts
    assert (facts.temperature, facts.top_p, facts.max_new_tokens) == (None, None, None)


@pytest.mark.filterwarnings("error")
def test_nulls_stand_for_what_is_not_known(tmp_path: Path) -> None:
    run = written(tmp_path / "run", TRACES["healthy"])
    edited(run, "text", lambda n: pa.nulls(n, pa.string()))
    lengths = TRACES["healthy"].lengths
    for file in (run / "rollouts").iterdir():
        table = pq.read_table(file)
        holes = pa.array([[None] * len(x) for x in table["versions"].to_pylist()], pa.list_(pa.int64()))
        pq.write_table(table.set_column(table.column_names.index("versions"), "versions", holes), file)
    trace = read_trace(run)
    assert trace.versions is not None
    assert (len(trace), set(trace.versions.tolist()), set(trace.text or ())) == (int(lengths.sum()), {-1}, {""})
    assert diagnose(trace).healthy


def test_the_format_can_be_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = written(tmp_path / "run", TRACES["healthy"])
    assert cli(capsys, "doctor", run, "--format", "rollkeel")[0] == 0
    for words in (("doctor", run), ("replay", run, "--objective", "kpop")):
        code, _, err = cli(capsys, *words, "--format", "slim")
        assert (code, err) == (2, "rollkeel: unknown trace format 'slim'; did you mean slime?\n")


def test_nothing_examined_is_not_called_healthy(capsys: pytest.CaptureFixture[str]) -> None:
    found = diagnose(TRACES["healthy"])
    show(replace(found, not_examined=dict.fromkeys(CAUSES, "nothing to read")))
    out = capsys.readouterr().out
    assert f"not examined: {len(CAUSES)} of {len(CAUSES)} causes could not be tested" in out
    assert "healthy" not in out
    assert replace(found, not_examined=dict.fromkeys(CAUSES, "nothing to read")).to_json()["healthy"] is None


def test_a_file_with_nothing_to_examine_is_neither_healthy_nor_ill(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four texts and their scores: JSON says null, and the exit code is that of bad input."""
    rows = [json.dumps({"input": "1+1=", "output": str(n), "score": 0.0, "step": 1}) for n in range(4)]
    (tmp_path / "1.jsonl").write_text("\n".join(rows))
    code, out, _ = cli(capsys, "doctor", tmp_path, "--format", "verl", "--json")
    assert (code, json.loads(out)["healthy"]) == (2, None)
    assert cli(capsys, "doctor", tmp_path, "--format", "verl")[0] == 2


def test_the_view_names_everything(capsys: pytest.CaptureFixture[str]) -> None:
    found = diagnose(TRACES["wrong_weights"])
    show(replace(found, notes=("step 3 is damaged",), not_examined={"routing": "no experts"}))
    out = capsys.readouterr().out
    for words in ("1. wrong_weights", "Do: ", "See: step ", "routing: no experts", "step 3 is damaged"):
        assert words in out
    assert all(cause.kind == CAUSES[cause.id] for cause in found.causes)
