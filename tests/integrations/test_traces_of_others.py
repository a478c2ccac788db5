"""A trace that slips by a position, or takes a prompt for an answer, makes the doctor name a fault that nobody has.

Each writer is given the same tokens in its trainer's layout, through the call that the trainer makes, and what is read must be those tokens.
Then a temperature that the trainer does not know is named, and `replay` and `report` work. Not covered: the trainers' loops.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from doctor.simulated import simulate
from doctor.traces.dump_writers import Recorded, write_nemo, write_prime, write_skyrl, write_slime
from tiny_run import cli

from rollkeel.errors import BadInput
from rollkeel.integrations import areal, nemo_rl, skyrl, slime, verl
from rollkeel.integrations.padded import padded
from rollkeel_doctor.traces.read import read_trace
from rollkeel_doctor.traces.trace import Trace
from rollkeel_doctor.verdict import diagnose

PROMPT = 5
Rows = list[dict[str, Any]]
Writer = Callable[[Path, int, Rows], None]


def truth(trained_at: float = 1.0) -> Trace:
    """Four steps of 64 answers, four to a prompt; every third answer's second token is a tool's."""
    made = simulate(3, steps=4, per_step=64).trace(trained_at=trained_at)
    position, sequence = made.position, made.sequence
    advantages = np.where(sequence % 2, 1.0, -0.5).astype(np.float32)
    return made.with_(mask=~((position == 1) & (sequence % 3 == 0)), advantages=advantages)


def rows_of(trace: Trace, step: int) -> Rows:
    """Answers of a step, a mapping of tensors each; prompts are of different lengths and begin with their group."""
    out = []
    for i in np.flatnonzero(trace.step == step):
        part = slice(trace.starts[i], trace.starts[i + 1])
        fields = {
            "ids": trace.token_ids,
            "mask": trace.mask,
            "q": trace.rollout_logprobs,
            "o": trace.train_logprobs,
            "a": trace.advantages,
        }
        row: dict[str, Any] = {
            name: torch.tensor(values[part]) for name, values in fields.items() if values is not None
        }
        row["group"] = int(trace.group[i])
        row["reward"] = float(trace.reward[i])
        row["prompt"] = torch.tensor([100 + row["group"]] * (2 + row["group"] % (PROMPT - 1)))
        out.append(row)
    return out


def right(rows: Rows, name: str) -> torch.Tensor:
    """`[S, T]` of responses, padded on the right."""
    return padded([row[name] for row in rows])


def whole(rows: Rows, name: str | None, before: float = 0) -> torch.Tensor:
    """`[S, L]`: prompt and response in a row, padded on the right; a prompt's tokens have `before` (None: ids)."""
    return padded(
        [
            torch.cat([row["prompt"], row["ids"]])
            if name is None
            else torch.cat([torch.full((len(row["prompt"]),), before, dtype=row[name].dtype), row[name]])
            for row in rows
        ]
    )


def through_verl(folder: Path, step: int, rows: Rows) -> None:
    """`DataProto`: prompts padded on the left, responses on the right, in columns of their own."""
    prompts = padded([row["prompt"].flip(0) for row in rows]).flip(1)
    response = padded([torch.ones(len(row["ids"]), dtype=torch.long) for row in rows])
    seen = padded([torch.ones(len(row["prompt"]), dtype=torch.long) for row in rows]).flip(1)
    batch = {
        "prompts": prompts,
        "responses": right(rows, "ids"),
        "attention_mask": torch.cat([seen, response], 1),
        "response_mask": right(rows, "mask").long(),
        "rollout_log_probs": right(rows, "q"),
        "old_log_probs": right(rows, "o"),
        "advantages": right(rows, "a"),
        "token_level_scores": padded([torch.tensor([*[0.0] * (len(r["ids"]) - 1), r["reward"]]) for r in rows]),
    }
    uids = np.array([f"uid-{row['group']}" for row in rows], object)
    updated = list[Any]()
    rollout = SimpleNamespace(temperature=1.0, name="vllm")
    trainer = SimpleNamespace(
        config=SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout)),
        global_steps=step,
        _update_actor=updated.append,
    )
    verl.trace(trainer, folder)
    data = SimpleNamespace(batch=batch, non_tensor_batch={"uid": uids})
    trainer._update_actor(data)
    assert updated == [data]
    del batch["rollout_log_probs"]
    with pytest.raises(BadInput, match="calculate_log_probs=True"):
        trainer._update_actor(data)


def through_slime(folder: Path, step: int, rows: Rows) -> None:
    """`rollout_data` of a rank: lists of whole sequences and of responses."""
    data: dict[str, Any] = {
        "tokens": [torch.cat([row["prompt"], row["ids"]]) for row in rows],
        "total_lengths": [len(row["prompt"]) + len(row["ids"]) for row in rows],
        "response_lengths": [len(row["ids"]) for row in rows],
        "loss_masks": [row["mask"].int() for row in rows],
        "rollout_log_probs": [row["q"] for row in rows],
        "log_probs": [row["o"] for row in rows],
        "advantages": [row["a"] for row in rows],
        "raw_reward": [0.5] * 2 * len(rows),  # of all ranks
        "local_raw_reward": [row["reward"] for row in rows],
        "truncated": [i % 2 for i in range(len(rows))],
    }
    args = SimpleNamespace(rollout_temperature=1.0, context_parallel_size=1)
    slime.tracer(folder)(args, step - 1, data)
    with pytest.raises(BadInput, match="--get-mismatch-metrics"):
        slime.tracer(folder)(args, step - 1, {**data, "log_probs": None})


def through_skyrl(folder: Path, step: int, rows: Rows) -> None:
    """`TrainingInputBatch`: all padding on the left, one row of padding."""
    rows = [*rows, rows[0]]
    width = max(len(row["ids"]) for row in rows)

    def left(values: list[torch.Tensor]) -> torch.Tensor:
        return padded([value.flip(0) for value in values]).flip(1)

    batch = {
        "sequences": left([torch.cat([row["prompt"], row["ids"]]) for row in rows]),
        "attention_mask": left([torch.ones(len(row["prompt"]) + len(row["ids"])) for row in rows]).long(),
        "response_mask": left([torch.ones(len(row["ids"])) for row in rows]).long(),
        "loss_mask": left([row["mask"].long() for row in rows]),
        "rollout_logprobs": left([row["q"] for row in rows]),
        "action_log_probs": left([row["o"] for row in rows]),
        "advantages": left([row["a"] for row in rows]),
    }
    assert batch["response_mask"].shape[1] == width
    groups = [row["group"] for row in rows[:-1]]
    bounds = [(i, i + 4) for i in range(0, len(groups), 4)]

    class Batch(dict[str, Any]):
        metadata: Mapping[str, Any] = {"pad_size": 1, "policy_prompt_boundaries": bounds}

    trainer = SimpleNamespace(
        cfg=SimpleNamespace(generator=SimpleNamespace(sampling_params=SimpleNamespace(temperature=1.0)))
    )
    skyrl.trace(folder).on_step_end(trainer, SimpleNamespace(global_step=step, batch=Batch(batch)), None)


def through_nemo_rl(folder: Path, step: int, rows: Rows) -> None:
    """`BatchedDataDict`: whole sequences, padded on the right; one answer is masked as a whole."""
    data = {
        "input_ids": whole(rows, None),
        "token_mask": whole(rows, "mask").long(),
        "sample_mask": torch.ones(len(rows)),
        "generation_logprobs": whole(rows, "q"),
        "prev_logprobs": whole(rows, "o"),
        "advantages": whole(rows, "a"),
    }
    trained = list[Any]()
    policy = SimpleNamespace(train=lambda batch, loss, timer: trained.append((batch, loss, timer)) or "result")
    nemo_rl.trace(policy, folder)
    assert policy.train(data, "loss", timer=7) == "result"
    assert trained == [(data, "loss", 7)]


def through_areal(folder: Path, step: int, rows: Rows) -> None:
    """Trajectories behind `compute_advantages`: what is about a token stands one place before it."""

    def back(values: torch.Tensor) -> torch.Tensor:
        return values.roll(-1, 1)

    groups = dict.fromkeys(row["group"] for row in rows)
    data = []
    for group in groups:
        mine = [row for row in rows if row["group"] == group]
        data.append(
            {
                "input_ids": whole(mine, None),
                "attention_mask": whole(mine, None) > 0,
                "loss_mask": back(whole(mine, "mask").float()),
                "logprobs": back(whole(mine, "q")),
                "prox_logp": back(whole(mine, "o")),
                "advantages": back(whole(mine, "a")),
                "versions": torch.full_like(whole(mine, None), step - 1),
                "rewards": torch.tensor([row["reward"] for row in mine]),
                "group": group,
            }
        )
    actor = SimpleNamespace(ppo_update=lambda batch: None)
    areal.trace(actor, folder)
    actor.ppo_update(data)
    for part in data:
        del part["prox_logp"]
    with pytest.raises(BadInput, match="recompute_logprob"):
        actor.ppo_update(data)


WRITERS: dict[str, Writer] = {
    "verl": through_verl,
    "slime": through_slime,
    "skyrl": through_skyrl,
    "nemo_rl": through_nemo_rl,
    "areal": through_areal,
}


@pytest.fixture(autouse=True)
def skyrls_base(monkeypatch: pytest.MonkeyPatch) -> None:
    """SkyRL's base class of callbacks, by its name."""
    parts = ["skyrl", "skyrl.train", "skyrl.train.utils", "skyrl.train.utils.callbacks"]
    for name in parts:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules[parts[-1]].TrainingCallback = type("TrainingCallback", (), {})  # type: ignore[attr-defined]


def written(name: str, folder: Path, trace: Trace) -> Trace:
    for step in (1, 2, 3, 4):
        WRITERS[name](folder, step, rows_of(trace, step))
    return read_trace(folder)


@pytest.mark.parametrize("name", list(WRITERS))
def test_what_is_read_is_what_was_trained_on(name: str, tmp_path: Path) -> None:
    trace = truth()
    found = written(name, tmp_path / "t", trace)
    assert found.mask is not None
    assert found.train_logprobs is not None
    assert found.advantages is not None
    assert found.step.tolist() == trace.step.tolist()
    assert found.token_ids.tolist() == trace.token_ids.tolist()
    assert found.mask.tolist() == trace.mask.tolist()  # type: ignore[union-attr]
    own = found.mask
    for mine, theirs in (
        (found.rollout_logprobs, trace.rollout_logprobs),
        (found.train_logprobs, trace.train_logprobs),
        (found.advantages, trace.advantages),
    ):
        assert theirs is not None
        assert np.array_equal(mine[own], theirs[own])
    assert np.unique(found.group, return_inverse=True)[1].tolist() == trace.group.tolist()
    assert found.prompt_length.tolist() == [2 + g % (PROMPT - 1) for g in trace.group.tolist()]
    assert found.facts.temperature == 1.0
    if name == "slime":
        assert found.status is not None
        assert found.status[:2] == ["finished", "length"]
    if name in ("verl", "slime", "areal"):
        assert found.reward.tolist() == trace.reward.tolist()
    assert not {c.id for c in diagnose(found).causes} & {"temperature", "alignment", "truncation"}


@pytest.mark.parametrize("name", list(WRITERS))
def test_a_temperature_the_trainer_does_not_know_is_named(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "mytrace"
    written(name, run, truth(trained_at=0.6))
    code, out, err = cli(capsys, "doctor", run)
    assert (code, err) == (1, "")
    assert "temperature" in out.splitlines()[0] + out.splitlines()[1]
    code, out, err = cli(capsys, "replay", run, "--objective", "icepop,kpop")
    assert (code, err) == (0, "")
    assert "icepop" in out
    code, _, err = cli(capsys, "report", run)
    assert (code, err) == (0, "")
    assert "temperature" in (run / "report.html").read_text()


def test_a_masked_answer_and_a_second_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NeMo-RL masks whole answers; ranks write beside each other."""
    rows = rows_of(truth(), 1)
    rows[0]["mask"] = torch.zeros_like(rows[0]["mask"])
    through_nemo_rl(tmp_path / "t", 1, rows)
    assert read_trace(tmp_path / "t").lengths.tolist()[:2] == [0, len(rows[1]["ids"])]
    group = torch.distributed
    for name, value in (("is_initialized", True), ("get_world_size", 2), ("get_rank", 1)):
        monkeypatch.setattr(group, name, lambda value=value: value)
    through_slime(tmp_path / "s", 1, rows_of(truth(), 1))
    assert [p.name for p in (tmp_path / "s").iterdir()] == ["rank_1"]


def as_recorded(step: int, index: int, row: dict[str, Any]) -> Recorded:
    values = {
        name: tuple(row[key].tolist()) for name, key in (("ids", "ids"), ("mask", "mask"), ("q", "q"), ("o", "o"))
    }
    count = len(row["ids"])
    return Recorded(
        step=step,
        index=index,
        group=row["group"],
        prompt=tuple(row["prompt"].tolist()),
        advantages=tuple(row["a"].tolist()),
        entropy=(1.0,) * count,
        keep=(True,) * count,
        reward=row["reward"],
        version=step - 1,
        **values,
    )


@pytest.mark.parametrize("write", [write_nemo, write_prime, write_skyrl, write_slime])
def test_a_report_of_another_trainers_own_dump(
    write: Callable[[Path, list[Recorded]], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    trace, recorded = truth(trained_at=0.6), list[Recorded]()
    for step in (1, 2, 3, 4):
        for index, row in enumerate(rows_of(trace, step)):
            recorded.append(as_recorded(step, index, row))
    write(tmp_path / "dump", recorded)
    monkeypatch.chdir(tmp_path)
    code, out, err = cli(capsys, "report", tmp_path / "dump")
    assert (code, err, out.strip()) == (0, "", "report.html")
    page = (tmp_path / "report.html").read_text()
    found = diagnose(read_trace(tmp_path / "dump"))
    assert found.causes
    assert [cause.id for cause in found.causes if f"{cause.id}: " not in page] == []
    code, _, err = cli(capsys, "report", tmp_path)
    assert (code, "no known trace" in err) == (2, True)
