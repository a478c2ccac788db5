"""Dumps in torch files and pickles: slime's --dump-details and SkyRL's dumped_data.

What is joined, padded or sharded is where a reader puts a number on the wrong token. Files are written here field by field
after the sources named in the readers: THUDM/slime `slime/utils/types.py` (0d234f3e), `slime/utils/train_dump_utils.py`
(429eb3df) and `slime/backends/megatron_utils/actor.py` (028e2909); NovaSky-AI/SkyRL
`skyrl/backends/skyrl_train/training_batch.py` (0446435c), `skyrl/train/dataset/preprocess.py` (07eefd6c) and, for the older
padding, `skyrl-train/skyrl_train/dataset/preprocess.py` (297e4672). Not covered: files that these programs themselves wrote.
"""

from __future__ import annotations

import math
import os
import pickle
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dump_writers import (
    Recorded,
    example,
    skyrl_batch,
    skyrl_tensor,
    slime_sample,
    slime_train,
    write_skyrl,
    write_skyrl_batch,
    write_slime,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from rollkeel_doctor.errors import BadInput, Corrupt
from rollkeel_doctor.traces.read import read_trace


def floats(values: Any) -> list[float | None]:
    return [None if math.isnan(v) else float(v) for v in values]


def two() -> list[Recorded]:
    return [example(), example(index=12, ids=(5,), q=(-0.75,), o=(-1.5,), mask=(True,), advantages=(-0.5,), reward=0.0)]


def save(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(value, path)


# slime


def test_slime_good(tmp_path: Path) -> None:
    trace = read_trace(write_slime(tmp_path, two()))
    assert trace.source == "slime dump"
    assert trace.step.tolist() == [3, 3]
    assert trace.id.tolist() == [11, 12]
    assert trace.prompt_length.tolist() == [3, 3]
    assert trace.token_ids.tolist() == [7, 70_000, 9, 2, 5]
    assert floats(trace.rollout_logprobs) == [-0.5, -1.25, None, -0.125, -0.75]
    assert floats(trace.train_logprobs) == [-0.625, -1.0, -2.5, -0.25, -1.5]
    assert trace.mask is not None
    assert trace.mask.tolist() == [True, True, False, True, True]
    assert floats(trace.advantages) == [0.75, 0.75, 0.75, 0.75, -0.5]
    assert trace.reward.tolist() == [1.0, 0.0]
    assert (trace.status, trace.answer) == (["finished"] * 2, ["42"] * 2)
    assert trace.versions is not None
    assert trace.versions.tolist() == [2] * 5
    assert trace.notes == []


def test_slime_rollouts_alone_and_training_alone(tmp_path: Path) -> None:
    write_slime(tmp_path, two())
    rollouts = read_trace(tmp_path / "rollout_data")
    assert (rollouts.train_logprobs, rollouts.advantages) == (None, None)
    trained = read_trace(tmp_path / "train_data")
    assert trained.token_ids.tolist() == rollouts.token_ids.tolist()
    assert floats(trained.rollout_logprobs) == floats(rollouts.rollout_logprobs)
    assert floats(trained.train_logprobs) == [-0.625, -1.0, -2.5, -0.25, -1.5]
    assert trained.reward.tolist() == [1.0, 0.0]
    assert trained.versions is None


def test_slime_missing_and_odd_fields(tmp_path: Path) -> None:
    """What optional fields leave out is left out of the trace: nothing is guessed."""
    samples = [slime_sample(example(index=i)) for i in range(5)]
    for name in ("rollout_log_probs", "loss_mask", "reward", "index", "group_index"):
        samples[0][name] = None
    samples[1] |= {"weight_versions": ["1", "2"], "status": "truncated", "reward": {"score": 0.5, "acc": 1.0}}
    samples[2] |= {
        "weight_versions": [],
        "status": "aborted",
        "reward": {"score": np.float64(0.5)},
        "remove_sample": True,
    }
    samples[3] |= {"weight_versions": ["default"], "reward": True, "prompt": [{"role": "user", "content": "hi"}]}
    samples[4] |= {"response_length": 99}
    save(tmp_path / "rollout_data/0.pt", {"rollout_id": 0, "samples": samples})
    trace = read_trace(tmp_path)
    assert trace.sequences == 4
    assert floats(trace.reward) == [None, None, 0.5, 1.0]
    assert trace.status == ["finished", "length", "interrupted", "finished"]
    assert floats(trace.rollout_logprobs[:4]) == [None] * 4
    assert trace.mask is not None
    assert trace.mask.tolist() == [True] * 4 + [True, True, False, True] + [False] * 4 + [True, True, False, True]
    assert trace.versions is not None
    assert trace.versions.tolist() == [2] * 4 + [-1] * 12
    assert trace.prompt_text is not None
    assert trace.prompt_text[3] == "hi"
    told = " ".join(trace.notes)
    for problem in (
        "several weight versions",
        "--reward-key",
        "tokens and response_length",
        "rollout_logprobs: not in 1 of 4",
    ):
        assert problem in told


def test_slime_ranks_that_lack_or_repeat_fields(tmp_path: Path) -> None:
    """Pipeline stages before the last have no log-probs, tensor-parallel ranks repeat them, raw_reward is of all ranks."""
    save(tmp_path / "rollout_data/3.pt", {"rollout_id": 3, "samples": [slime_sample(s) for s in two()]})
    first = slime_train(two())
    del first["log_probs"], first["advantages"]
    first["raw_reward"] = [0.0] * 8
    for rank, data in enumerate((first, slime_train(two(), torch.bfloat16), slime_train(two()))):
        save(tmp_path / f"train_data/3_{rank}.pt", {"rollout_id": 3, "rank": rank, "rollout_data": data})
    trace = read_trace(tmp_path)
    assert floats(trace.train_logprobs) == [-0.625, -1.0, -2.5, -0.25, -1.5]
    assert trace.reward.tolist() == [1.0, 0.0]
    assert trace.notes == []


def test_slime_context_parallel_parts_are_left_out(tmp_path: Path) -> None:
    data = slime_train([example()])
    data["log_probs"] = [t[:2] for t in data["log_probs"]]
    data["rollout_log_probs"] = [t[:2] for t in data["rollout_log_probs"]]
    save(tmp_path / "train_data/3_0.pt", {"rollout_id": 3, "rank": 0, "rollout_data": data})
    trace = read_trace(tmp_path)
    assert trace.train_logprobs is None
    assert np.isnan(trace.rollout_logprobs).all()
    assert floats(trace.advantages) == [0.75] * 4
    assert any("as with context parallelism" in note for note in trace.notes)


def test_slime_older_layout(tmp_path: Path) -> None:
    """Before rollout log-probs, group indices and weight versions; train data as plain lists."""
    sample = {
        k: slime_sample(example())[k]
        for k in ("index", "prompt", "tokens", "response", "response_length", "label", "reward", "status")
    }
    data = {
        k: [v.tolist() if hasattr(v, "tolist") else v for v in values] for k, values in slime_train([example()]).items()
    }
    save(tmp_path / "rollout_data/3.pt", {"rollout_id": 3, "samples": [sample]})
    save(tmp_path / "train_data/3_0.pt", {"rollout_id": 3, "rank": 0, "rollout_data": data})
    trace = read_trace(tmp_path)
    assert np.isnan(trace.rollout_logprobs).all()
    assert floats(trace.train_logprobs) == [-0.625, -1.0, -2.5, -0.25]
    assert trace.versions is None


def test_slime_damaged_files_cost_themselves_only(tmp_path: Path) -> None:
    write_slime(tmp_path, [example(step=1), example(step=2), example(step=3)])
    for name in ("rollout_data/1.pt", "train_data/2_0.pt"):
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-100])
    save(tmp_path / "rollout_data/4.pt", [1, 2])
    save(tmp_path / "rollout_data/5.pt", {"samples": 3})
    save(tmp_path / "rollout_data/eval_5.pt", {"samples": []})
    trace = read_trace(tmp_path)
    assert trace.step.tolist() == [1, 2, 3]
    assert floats(trace.train_logprobs)[4:8] == [None] * 4
    told = " ".join(trace.notes)
    for problem in (
        "rollout_data/1.pt: not readable",
        "train_data/2_0.pt: not readable",
        "4.pt: not a dict",
        "no list of samples",
        "1 files of evaluations",
    ):
        assert problem in told
    assert all("\n" not in note for note in trace.notes)


def test_slime_nothing_readable_is_one_line(tmp_path: Path) -> None:
    write_slime(tmp_path, [example()])
    for file in tmp_path.rglob("*.pt"):
        file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(BadInput, match="no slime dump sequence can be read") as caught:
        read_trace(tmp_path)
    assert "\n" not in str(caught.value)


def test_slime_a_malicious_sample_does_nothing(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return (os.system, (f"touch '{tmp_path / 'canary'}'",))

    good = slime_sample(example())
    bad = [slime_sample(example(index=i)) | {field: Bomb()} for i, field in enumerate(good)]
    save(tmp_path / "dump/rollout_data/3.pt", {"rollout_id": 3, "samples": [good, Bomb(), *bad]})
    trace = read_trace(tmp_path / "dump")
    assert not (tmp_path / "canary").exists()
    assert trace.sequences >= len(bad) - 2


def test_slime_one_list_named_a_thousand_times(tmp_path: Path) -> None:
    """A small file cannot have the reader copy its lists into gigabytes; nor can lists of lists of lists."""
    sample = slime_sample(example()) | {"tokens": list(range(20_000)), "response_length": 19_000}
    save(tmp_path / "a/rollout_data/3.pt", {"rollout_id": 3, "samples": [sample] * 5000})
    with pytest.raises(Corrupt, match="more tokens than its bytes can hold"):
        read_trace(tmp_path / "a")
    laughs: list[Any] = ["x"]
    for _ in range(50):
        laughs = [laughs] * 10
    odd = {field: laughs for field in sample if field not in ("tokens", "response_length")}
    save(tmp_path / "b/rollout_data/3.pt", {"rollout_id": 3, "samples": [slime_sample(example()) | odd, laughs]})
    assert read_trace(tmp_path / "b").sequences == 1
    around: list[Any] = []
    around.append(around)
    odd = dict.fromkeys(odd, around)
    save(tmp_path / "c/rollout_data/3.pt", {"rollout_id": 3, "samples": [slime_sample(example()) | odd]})
    assert read_trace(tmp_path / "c").sequences == 1


junk = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=3) | st.binary(max_size=3)
    | st.sampled_from([torch.ones(3), torch.ones(2, 2), torch.tensor(1), np.arange(4), np.float64(2), torch.device("cpu")]),
    lambda inner: st.lists(inner, max_size=4) | st.tuples(inner, inner) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=6,
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_slime_junk_costs_one_sample(data: st.DataObject) -> None:
    """Any field replaced by anything a pickle can say: no exception, and the other sample is read as it was."""
    sample, trained = slime_sample(two()[0]), slime_train(two()[:1])
    for held in (sample, trained):
        for key in data.draw(st.lists(st.sampled_from(sorted(held)), max_size=3)):
            held[key] = data.draw(junk)
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder) / "rollout_data/3.pt", {"rollout_id": 3, "samples": [sample, slime_sample(two()[1])]})
        save(Path(folder) / "train_data/3_0.pt", {"rollout_id": 3, "rank": 0, "rollout_data": trained})
        trace = read_trace(folder)
    assert trace.token_ids[-1] == 5
    assert floats(trace.rollout_logprobs[-1:]) == [-0.75]
    assert all("\n" not in note for note in trace.notes)


# SkyRL


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_skyrl_junk_costs_one_step(data: st.DataObject) -> None:
    batch: dict[str, Any] = {name: skyrl_tensor(tensor) for name, tensor in skyrl_batch(two()).items()}
    for name in data.draw(st.lists(st.sampled_from(sorted(batch)), min_size=1, max_size=3, unique=True)):
        if data.draw(st.booleans()):
            batch[name] = data.draw(junk)
        else:
            batch[name][data.draw(st.sampled_from(["data", "shape", "dtype", "format"]))] = data.draw(junk)
    state = {"batch_dict": batch, "metadata": data.draw(junk | st.fixed_dictionaries({"pad_size": junk, "uids": junk}))}
    with tempfile.TemporaryDirectory() as folder:
        write_skyrl(Path(folder), [example(step=1)])
        file = Path(folder) / "dumped_data/global_step_2_training_input.pkl"
        file.write_bytes(pickle.dumps(state))
        trace = read_trace(folder)
    assert trace.token_ids[:4].tolist() == [7, 70_000, 9, 2]
    assert all("\n" not in note for note in trace.notes)


@pytest.mark.parametrize("left", [True, False], ids=["padding left", "padding of older versions"])
def test_skyrl_good(left: bool, tmp_path: Path) -> None:
    trace = read_trace(write_skyrl(tmp_path, two(), left=left))
    assert trace.source == "SkyRL dumped_data"
    assert trace.step.tolist() == [3, 3]
    assert trace.prompt_length.tolist() == [3, 3]
    assert trace.token_ids.tolist() == [7, 70_000, 9, 2, 5]
    assert floats(trace.rollout_logprobs) == [-0.5, -1.25, None, -0.125, -0.75]
    assert floats(trace.train_logprobs) == [-0.625, -1.0, -2.5, -0.25, -1.5]
    assert floats(trace.advantages) == [0.75, 0.75, None, 0.75, -0.5]
    assert trace.group[0] == trace.group[1]
    assert np.isnan(trace.reward).all()
    told = " ".join(trace.notes)
    assert "no rewards" in told
    assert "no uids" in told


def test_skyrl_uids_rewards_bfloat16_and_absent_tensors(tmp_path: Path) -> None:
    batch: dict[str, Any] = dict(skyrl_batch(two()))
    batch["action_log_probs"] = batch["action_log_probs"].bfloat16()
    batch |= {"rollout_logprobs": None, "values": None, "rewards": torch.tensor([[0.0, 0, 0, 1.0], [0, 0, 0, 0.5]])}
    del batch["advantages"]
    write_skyrl_batch(tmp_path / "global_step_8_training_input.pkl", batch, {"uids": ["a", "b"], "pad_size": 0})
    trace = read_trace(tmp_path)
    assert trace.step.tolist() == [8] * 2
    assert trace.reward.tolist() == [1.0, 0.5]
    assert trace.group[0] != trace.group[1]
    assert floats(trace.train_logprobs) == [-0.625, -1.0, -2.5, -0.25, -1.5]
    assert np.isnan(trace.rollout_logprobs).all()
    assert trace.advantages is None
    assert trace.notes == []


def test_skyrl_tensors_that_do_not_fit_are_left_out(tmp_path: Path) -> None:
    batch: dict[str, Any] = dict(skyrl_batch(two()))
    batch["advantages"] = batch["advantages"][:, :2]
    batch["loss_mask"] = batch["loss_mask"][0]
    write_skyrl_batch(tmp_path / "global_step_1_training_input.pkl", batch, {})
    batch["sequences"] = batch["sequences"][:1]
    write_skyrl_batch(tmp_path / "global_step_2_training_input.pkl", batch, {})
    trace = read_trace(tmp_path)
    assert trace.step.tolist() == [1, 1]
    assert (trace.advantages, trace.mask) == (None, None)
    told = " ".join(trace.notes)
    for problem in ("advantages has another shape", "loss_mask cannot be read", "that fit each other"):
        assert problem in told


def test_skyrl_damaged_and_foreign_files(tmp_path: Path) -> None:
    write_skyrl(tmp_path, [example(step=1), example(step=2)])
    at = tmp_path / "dumped_data"
    data = (at / "global_step_1_training_input.pkl").read_bytes()
    (at / "global_step_3_training_input.pkl").write_bytes(pickle.dumps({"a": 1}))
    for n in range(0, len(data), 53):
        (at / "global_step_1_training_input.pkl").write_bytes(data[:n])
        trace = read_trace(tmp_path)
        assert trace.step.tolist() == [2]
        assert "not readable" in trace.notes[0]
        assert any("no batch_dict" in note for note in trace.notes)
    with pytest.raises(BadInput, match="no SkyRL dumped_data sequence can be read"):
        read_trace(at / "global_step_3_training_input.pkl")
