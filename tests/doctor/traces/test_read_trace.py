"""Every format read back: random sequences, written in it by a writer of the test's own, come back as they were.

A reader that shifts by one token, reads padding as tokens or mixes sequences up would have the doctor name a fault that is not
there. Also which format a path is taken for, and what one line says where it is none. Not covered: whether the frameworks
themselves still write what their cited sources said.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from dump_writers import (
    Recorded,
    example,
    recorded,
    write_lines,
    write_nemo,
    write_prime,
    write_skyrl,
    write_slime,
    write_trl,
    write_verl,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from rollkeel_doctor.errors import BadInput
from rollkeel_doctor.traces.read import FORMATS, read_trace
from rollkeel_doctor.traces.trace import Trace

Writer = Callable[[Path, Sequence[Recorded]], Path]
WRITERS: dict[str, Writer] = {
    "nemo-rl": write_nemo,
    "prime-rl": write_prime,
    "slime": write_slime,
    "skyrl": write_skyrl,
    "verl": write_verl,
    "trl": write_trl,
}
TOKENS = ("nemo-rl", "prime-rl", "slime", "skyrl")


def flat(sequences: Sequence[Recorded], field: str) -> np.ndarray:
    return np.array([x for s in sequences for x in getattr(s, field)])


def in_file_order(name: str, sequences: list[Recorded]) -> list[Recorded]:
    """prime-rl's ranks hold every second sequence of a step each."""
    if name != "prime-rl":
        return sequences
    steps = sorted({s.step for s in sequences})
    per_step = [[s for s in sequences if s.step == step] for step in steps]
    return [s for members in per_step for rank in range(2) for s in members[rank::2]]


def same_groups(a: np.ndarray, b: Sequence[int]) -> bool:
    return len(set(zip(a.tolist(), b, strict=True))) == len(set(a.tolist())) == len(set(b))


@pytest.mark.parametrize("name", WRITERS)
@settings(max_examples=12, deadline=None)
@given(sequences=recorded())
def test_what_is_written_is_read_back(name: str, sequences: list[Recorded]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        trace = read_trace(WRITERS[name](Path(folder) / "dump", sequences))
    want = in_file_order(name, sequences)
    assert trace.sequences == len(want)
    assert trace.step.tolist() == [s.step for s in want]
    assert same_groups(trace.group, [s.group for s in want])
    if name == "skyrl":
        assert np.isnan(trace.reward).all()
    else:
        assert trace.reward.tolist() == [s.reward for s in want]
    if name in TOKENS:
        check_tokens(name, trace, want)
    else:
        assert len(trace) == 0
        assert list(trace.text or ()) == [str(s.ids) for s in want]
        assert list(trace.prompt_text or ()) == [str(s.prompt) for s in want]


def check_tokens(name: str, trace: Trace, want: list[Recorded]) -> None:
    mask = flat(want, "mask")
    assert trace.lengths.tolist() == [len(s.ids) for s in want]
    assert trace.prompt_length.tolist() == [len(s.prompt) for s in want]
    assert trace.token_ids.tolist() == flat(want, "ids").tolist()
    assert trace.mask is not None
    assert trace.mask.tolist() == mask.tolist()
    np.testing.assert_array_equal(trace.rollout_logprobs, np.where(mask, flat(want, "q"), np.nan).astype(np.float32))
    assert trace.train_logprobs is not None
    np.testing.assert_array_equal(trace.train_logprobs, flat(want, "o").astype(np.float32))
    assert trace.advantages is not None
    np.testing.assert_array_equal(trace.advantages[mask], flat(want, "advantages")[mask].astype(np.float32))
    if name == "prime-rl":
        assert trace.entropy is not None
        np.testing.assert_array_equal(trace.entropy, flat(want, "entropy").astype(np.float32))
        assert trace.keep is not None
        assert trace.keep.tolist() == flat(want, "keep").tolist()
    if name == "slime":
        assert trace.versions is not None
        assert trace.versions.tolist() == [s.version for s in want for _ in s.ids]
        assert trace.id.tolist() == [s.index for s in want]


@pytest.mark.parametrize("name", WRITERS)
def test_last_steps_only(name: str, tmp_path: Path) -> None:
    made = [example(step=step, index=step, group=step, prompt=(step,)) for step in (2, 9, 10, 30)]
    path = WRITERS[name](tmp_path / "dump", made)
    assert read_trace(path, last=2).step.tolist() == [10, 30]
    assert read_trace(path, last=2, format=name).step.tolist() == [10, 30]
    with pytest.raises(BadInput, match="at least 1 step"):
        read_trace(path, last=0)


def test_a_single_file_of_each_format_is_recognised(tmp_path: Path) -> None:
    made = [example()]
    files = {
        "NeMo-RL": write_nemo(tmp_path / "n", made) / "train_data_step3.jsonl",
        "prime-rl": write_prime(tmp_path / "p", made) / "token_exports/step_3/rank_0.jsonl",
        "slime": write_slime(tmp_path / "s", made) / "rollout_data/3.pt",
        "SkyRL": write_skyrl(tmp_path / "k", made) / "dumped_data/global_step_3_training_input.pkl",
        "verl": write_verl(tmp_path / "v", made) / "3.jsonl",
        "TRL": write_trl(tmp_path / "t", made) / "completions/completions_00003.parquet",
    }
    for source, file in files.items():
        trace = read_trace(file)
        assert trace.source.startswith(source)
        assert trace.step.tolist() == [3]
    trace = read_trace(tmp_path / "s/train_data/3_0.pt")
    assert trace.token_ids.tolist() == [7, 70_000, 9, 2]


def test_an_unknown_path_names_the_formats(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    for path in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(BadInput) as caught:
            read_trace(path)
        assert "\n" not in str(caught.value)
        assert all(name in str(caught.value) for name in FORMATS)
    with pytest.raises(BadInput, match="did you mean slime"):
        read_trace(tmp_path, format="slim")
    with pytest.raises(BadInput, match="no such file"):
        read_trace(tmp_path / "absent")


def test_an_ambiguous_path_asks_for_the_format(tmp_path: Path) -> None:
    write_trl(tmp_path, [example()])
    write_prime(tmp_path, [example()])
    with pytest.raises(BadInput, match="prime-rl or trl; say which with --format"):
        read_trace(tmp_path)
    assert read_trace(tmp_path, format="trl").source == "TRL completions"


@pytest.mark.parametrize("name", FORMATS)
def test_a_forced_format_that_does_not_fit_is_one_line(name: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "words.jsonl").write_text("hello\n")
    for path in (tmp_path / "empty", tmp_path / "words.jsonl"):
        with pytest.raises(BadInput) as caught:
            read_trace(path, format=name)
        assert "\n" not in str(caught.value)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_spoiled_line_costs_itself_only(data: st.DataObject) -> None:
    """Any field of any line replaced by anything JSON can say: no exception but the one line, and other lines are read."""
    junk = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
        max_leaves=6,
    )
    name = data.draw(st.sampled_from(["nemo-rl", "prime-rl", "verl"]))
    with tempfile.TemporaryDirectory() as folder:
        path = WRITERS[name](
            Path(folder) / "d", [example(index=0), example(index=1), example(index=2), example(index=3)]
        )
        file = max(path.rglob("*.jsonl"), key=lambda p: p.stat().st_size)
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        for key in data.draw(st.lists(st.sampled_from(sorted(lines[0])), min_size=1, max_size=3)):
            lines[0][key] = data.draw(junk)
        write_lines(file, lines)
        trace = read_trace(path, format=name)
    assert trace.sequences >= 3
    assert all("\n" not in note for note in trace.notes)


def test_a_hundred_megabytes_of_json_in_seconds(tmp_path: Path) -> None:
    """A tenth of it here, with ten times the room a busy machine may need."""
    rng = np.random.default_rng(0)
    n = 3000
    line = {
        "rewards": [1.0],
        "input_lengths": [n],
        "token_ids": [rng.integers(0, 150_000, n).tolist()],
        "token_loss_mask": [[0] * 100 + [1] * (n - 100)],
        "sample_loss_mask": [1.0],
        "advantages": [[0.5] * n],
        "generation_logprobs": [[0.0] * 100 + rng.normal(size=n - 100).tolist()],
        "prev_logprobs": [rng.normal(size=n).tolist()],
    }
    text = json.dumps(line) + "\n"
    times = 10_000_000 // len(text)
    (tmp_path / "train_data_step1.jsonl").write_text(text * times)
    start = time.perf_counter()
    trace = read_trace(tmp_path)
    assert time.perf_counter() - start < 10
    assert len(trace) == times * (n - 100)
