"""Dumps in JSON lines: NeMo-RL's train_data, prime-rl's token_exports, verl's generations; and TRL's tables of texts.

What a field means decides what the doctor may conclude: a log-prob of the wrong token is a bug that is not there. Lines are
written here field by field after the sources named in the readers: NVIDIA-NeMo/RL `nemo_rl/algorithms/grpo.py` (002cdc27) and
`nemo_rl/utils/logger.py`; PrimeIntellect-ai/prime-rl `src/prime_rl/trainer/rl/token_export.py` (d2f82fa6 and 004274ec);
volcengine/verl `verl/trainer/ppo/ray_trainer.py` (3d9df733); huggingface/trl `trl/trainer/grpo_trainer.py` (release 1.16.0).
Not covered: files that these programs themselves wrote.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from dump_writers import example, nemo_line, prime_line, write_lines, write_nemo, write_prime, write_trl, write_verl

from rollkeel_doctor.errors import BadInput
from rollkeel_doctor.traces.read import read_trace

NAN = math.nan


def floats(values: Any) -> list[float | None]:
    """NaN as None, to compare."""
    return [None if math.isnan(v) else float(v) for v in values]


# NeMo-RL


def test_nemo_good(tmp_path: Path) -> None:
    """Prompt of 3, response of 4 whose third token is a tool's, 5 of padding."""
    write_lines(tmp_path / "train_data_step7.jsonl", [nemo_line(example(), padding=5)])
    trace = read_trace(tmp_path)
    assert trace.source == "NeMo-RL train_data"
    assert trace.step.tolist() == [7]
    assert trace.prompt_length.tolist() == [3]
    assert trace.token_ids.tolist() == [7, 70_000, 9, 2]
    assert floats(trace.rollout_logprobs) == [-0.5, -1.25, None, -0.125]
    assert floats(trace.train_logprobs) == [-0.625, -1.0, -2.5, -0.25]
    assert trace.mask is not None
    assert trace.mask.tolist() == [True, True, False, True]
    assert floats(trace.advantages) == [0.75, 0.75, None, 0.75]
    assert trace.reward.tolist() == [1.0]
    assert (trace.prompt_text, trace.text) == (["a prompt"], ["a response"])
    assert trace.versions is None
    assert trace.train_version is None
    assert trace.notes == []


def test_nemo_a_zero_inside_the_mask_stays(tmp_path: Path) -> None:
    """A tool token that is wrongly trained on shows as log q = 0: it must not be hidden. Outside the mask it says nothing."""
    line = nemo_line(example())
    line["token_loss_mask"][0][5] = 1
    write_lines(tmp_path / "train_data_step7.jsonl", [line])
    assert floats(read_trace(tmp_path).rollout_logprobs) == [-0.5, -1.25, 0.0, -0.125]


def test_nemo_older_layout(tmp_path: Path) -> None:
    """Before token ids and masks: content, rewards, both log-probs, input_lengths."""
    line = {
        k: v
        for k, v in nemo_line(example(), padding=2).items()
        if "token_" not in k and k not in ("advantages", "sample_loss_mask")
    }
    write_lines(tmp_path / "train_data_step1.jsonl", [line])
    trace = read_trace(tmp_path)
    assert trace.token_ids.tolist() == [-1] * 4
    assert floats(trace.rollout_logprobs) == [-0.5, -1.25, None, -0.125]
    assert floats(trace.train_logprobs) == [-0.625, -1.0, -2.5, -0.25]
    assert (trace.mask, trace.advantages) == (None, None)
    assert any("no token_loss_mask" in note for note in trace.notes)


def test_nemo_fields_that_change_between_steps(tmp_path: Path) -> None:
    old = {k: v for k, v in nemo_line(example()).items() if k not in ("token_ids", "advantages", "prev_logprobs")}
    write_lines(tmp_path / "train_data_step1.jsonl", [old])
    write_lines(tmp_path / "train_data_step2.jsonl", [nemo_line(example())])
    trace = read_trace(tmp_path)
    assert trace.token_ids.tolist() == [-1] * 4 + [7, 70_000, 9, 2]
    assert floats(trace.train_logprobs)[:4] == [None] * 4
    assert [n for n in trace.notes if "not in 1 of 2 sequences" in n] == [
        "token_ids: not in 1 of 2 sequences",
        "train_logprobs: not in 1 of 2 sequences",
        "advantages: not in 1 of 2 sequences",
    ]


def test_nemo_dynamic_sampling_and_masked_samples(tmp_path: Path) -> None:
    """`rewards` are then of all samples in another order; a sample outside the loss has no trained token."""
    line = nemo_line(example()) | {"filtered_rewards": [0.25], "sample_loss_mask": [0.0]}
    write_lines(tmp_path / "train_data_step1.jsonl", [line])
    trace = read_trace(tmp_path)
    assert trace.reward.tolist() == [0.25]
    assert not trace.trained.any()
    assert np.isnan(trace.advantages).all()  # type: ignore[arg-type]


def test_nemo_bare_values_and_nulls(tmp_path: Path) -> None:
    """A writer without the batch of one; null and NaN log-probs."""
    line = {k: v[0] if isinstance(v, list) else v for k, v in nemo_line(example()).items()}
    line["generation_logprobs"][4] = None
    line["prev_logprobs"][6] = NAN
    write_lines(tmp_path / "train_data_step1.jsonl", [line])
    trace = read_trace(tmp_path)
    assert floats(trace.rollout_logprobs) == [-0.5, None, None, -0.125]
    assert floats(trace.train_logprobs) == [-0.625, -1.0, -2.5, None]
    assert trace.trained.tolist() == [True, False, False, False]


def test_nemo_runs_side_by_side(tmp_path: Path) -> None:
    write_nemo(tmp_path / "exp_001", [example()])
    assert read_trace(tmp_path).sequences == 1
    write_nemo(tmp_path / "exp_002", [example()])
    with pytest.raises(BadInput, match=r"several runs \(exp_001, exp_002\)"):
        read_trace(tmp_path)


# what happens to files of lines


def test_the_last_line_cut(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "train_data_step1.jsonl", [nemo_line(example()), nemo_line(example())])
    whole = file.read_bytes()
    file.write_bytes(whole[:-40])
    trace = read_trace(tmp_path)
    assert trace.sequences == 1
    assert trace.notes == ["train_data_step1.jsonl:2: the last line is cut short; left out"]


def test_nothing_readable_is_one_line(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "train_data_step1.jsonl", [nemo_line(example())])
    file.write_bytes(file.read_bytes()[:60])
    with pytest.raises(BadInput, match=r"no NeMo-RL train_data sequence can be read.*cut short") as caught:
        read_trace(tmp_path)
    assert "\n" not in str(caught.value)


def test_bad_lines_among_good_ones(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "train_data_step1.jsonl", [nemo_line(example())])
    good = file.read_bytes()
    wild = good.replace(b"a response", b"\xff\xfe\x00")
    bad = [b"{]\n", b"[1, 2]\n", b"\n", b"{}\n", b"[" * 100_000 + b"\n", b'{"rewards": 1' + b"0" * 5000 + b"}\n"]
    file.write_bytes(b"".join([good, wild.replace(b"\x00", b""), *bad, good]))
    trace = read_trace(tmp_path)
    assert trace.sequences == 3
    assert trace.token_ids.tolist() == [7, 70_000, 9, 2] * 3
    told = " ".join(trace.notes)
    for problem in (
        "not UTF-8",
        "not JSON; left out (and 1 more like it)",
        "not a JSON object",
        "nested too deeply",
        "neither token_ids",
    ):
        assert problem in told


@pytest.mark.parametrize(
    "field", ["token_ids", "generation_logprobs", "prev_logprobs", "token_loss_mask", "advantages"]
)
def test_a_field_of_another_length_or_kind_is_left_out(field: str, tmp_path: Path) -> None:
    for step, value in enumerate(([[1.0, 2.0]], [["a"] * 7], {"a": 1}, [[[1]] * 7], [[2**70] * 7], "text", 5), start=1):
        line = nemo_line(example()) | {field: value}
        write_lines(tmp_path / f"train_data_step{step}.jsonl", [line])
    trace = read_trace(tmp_path)
    assert trace.sequences >= 6
    assert all("\n" not in note for note in trace.notes)


# prime-rl


def test_prime_good(tmp_path: Path) -> None:
    write_prime(tmp_path, [example(), example(index=12, reward=0.0)])
    trace = read_trace(tmp_path)
    assert trace.source == "prime-rl token_exports"
    assert trace.step.tolist() == [3, 3]
    assert trace.prompt_length.tolist() == [3, 3]
    assert len(set(trace.group.tolist())) == 1
    assert trace.token_ids[:4].tolist() == [7, 70_000, 9, 2]
    assert floats(trace.rollout_logprobs)[:4] == [-0.5, -1.25, None, -0.125]
    assert floats(trace.train_logprobs)[:4] == [-0.625, -1.0, -2.5, -0.25]
    assert floats(trace.entropy)[:4] == [0.5, 1.5, 2.5, 0.25]
    assert trace.keep is not None
    assert trace.keep[:4].tolist() == [True, False, True, True]
    assert trace.reward.tolist() == [1.0, 0.0]
    assert trace.notes == []


def test_prime_older_layout_and_other_losses(tmp_path: Path) -> None:
    """Without export_step and losses; nulls where no RL loss, or another one, was taken; a null log-prob was not finite."""
    line = {k: v for k, v in prime_line(example()).items() if k not in ("export_step", "run_id", "losses")}
    line["training_mode"] = "sft"
    for name in ("is_masked", "advantages", "rewards"):
        line[name] = [None] * 7
    line["trainer_logprobs"][4] = None
    at = tmp_path / "token_exports/step_3"
    at.mkdir(parents=True)
    write_lines(at / "rank_0.jsonl", [line])
    trace = read_trace(tmp_path)
    assert trace.step.tolist() == [3]
    assert (trace.keep, trace.advantages) == (None, None)
    assert np.isnan(trace.reward).all()
    assert floats(trace.train_logprobs) == [-0.625, None, -2.5, -0.25]
    assert trace.notes == []


def test_prime_every_folder_on_the_way_and_steps_still_being_written(tmp_path: Path) -> None:
    write_prime(tmp_path, [example(), example(step=4)])
    (tmp_path / "token_exports/step_4/STABLE").unlink()
    for path in (tmp_path, tmp_path / "token_exports"):
        trace = read_trace(path)
        assert trace.step.tolist() == [3, 4]
        assert trace.notes == ["step_4: no STABLE mark, as steps that are still being written have none"]
    assert read_trace(tmp_path / "token_exports/step_3").step.tolist() == [3]


def test_prime_a_newer_schema_and_a_missing_mask_are_said(tmp_path: Path) -> None:
    line = prime_line(example()) | {"schema_version": 2}
    del line["loss_mask"]
    at = tmp_path / "token_exports/step_3"
    at.mkdir(parents=True)
    write_lines(at / "rank_0.jsonl", [line])
    trace = read_trace(tmp_path)
    assert trace.prompt_length.tolist() == [3]
    assert trace.mask is None
    assert "schema_version is not 1" in trace.notes[0]
    assert "no loss_mask" in trace.notes[1]


def test_prime_rewards_that_differ_within_a_sequence(tmp_path: Path) -> None:
    line = prime_line(example()) | {"rewards": [0.0, None, 0.5, 0.5, 0.5, 0.5, 1.0]}
    at = tmp_path / "token_exports/step_3"
    at.mkdir(parents=True)
    write_lines(at / "rank_0.jsonl", [line])
    trace = read_trace(tmp_path)
    assert trace.reward.tolist() == [1.0]
    assert "rewards differ" in trace.notes[0]


# texts


def test_verl(tmp_path: Path) -> None:
    """Older files have no gts; a step stands in the line or else in the name. A NaN score stays NaN, never 0."""
    write_verl(tmp_path, [example(), example(step=4)])
    write_lines(
        tmp_path / "5.jsonl",
        [{"input": "q", "output": "r", "score": NAN}, {"input": "q", "output": "s", "score": None}],
    )
    trace = read_trace(tmp_path)
    assert trace.source == "verl generations"
    assert trace.step.tolist() == [3, 4, 5, 5]
    assert floats(trace.reward) == [1.0, 1.0, None, None]
    assert trace.answer == ["42", "42", "", ""]
    assert len(trace) == 0
    assert trace.group[2] == trace.group[3]
    assert trace.notes == ["verl dumps texts and scores only: nothing about tokens can be examined"]


def test_texts_can_always_be_written_on(tmp_path: Path) -> None:
    """JSON can hold half a character, which no terminal takes."""
    (tmp_path / "5.jsonl").write_text('{"input": "q\\ud800", "output": "r\\udc00", "gts": "\\ud801", "score": 1.0}\n')
    trace = read_trace(tmp_path)
    assert (trace.prompt_text, trace.text, trace.answer) == (["q?"], ["r?"], ["?"])


def table(path: Path, **columns: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)


def test_trl(tmp_path: Path) -> None:
    """Several reward functions, one of which did not apply; own columns; the same batch logged twice; a damaged file."""
    columns = {
        "step": [1, 1],
        "prompt": ["q", "q"],
        "completion": ["a", "b"],
        "r1": [1.0, NAN],
        "r2": [0.5, NAN],
        "advantage": [1.0, -1.0],
    }
    table(tmp_path / "completions/completions_00001.parquet", **columns, said=["x", "y"])
    table(tmp_path / "completions/completions_00002.parquet", **(columns | {"step": [2, 2]}), said=["x", "y"])
    (tmp_path / "completions/completions_00003.parquet").write_bytes(b"PAR1 cut")
    trace = read_trace(tmp_path)
    assert trace.source == "TRL completions"
    assert trace.step.tolist() == [1, 1]
    assert floats(trace.reward) == [1.5, None]
    assert trace.group[0] == trace.group[1]
    told = " ".join(trace.notes)
    for problem in (
        "plain sum of r1, r2",
        "00002.parquet: the same batch",
        "00003.parquet: cannot be read",
        "texts, rewards and advantages only",
    ):
        assert problem in told


def test_trl_one_reward_column_and_cut_files(tmp_path: Path) -> None:
    table(tmp_path / "completions_4.parquet", step=[4], prompt=["q"], completion=["a"], reward=[0.25])
    assert floats(read_trace(tmp_path).reward) == [0.25]
    whole = write_trl(tmp_path / "w", [example()]) / "completions/completions_00003.parquet"
    data = whole.read_bytes()
    for n in range(0, len(data), 97):
        whole.write_bytes(data[:n])
        with pytest.raises(BadInput, match="no TRL completions sequence can be read") as caught:
            read_trace(tmp_path / "w")
        assert "\n" not in str(caught.value)


def test_a_folder_of_lines_that_are_something_else(tmp_path: Path) -> None:
    (tmp_path / "1.jsonl").write_text(json.dumps({"prompt": "q", "response": "a"}) + "\n")
    with pytest.raises(BadInput, match="no known trace"):
        read_trace(tmp_path)
