"""Shared by the tests of dump readers: random recorded sequences, and a writer of each framework's format.

Each writer follows the schema that the reader's docstring cites, field by field, and uses nothing of the reader.
"""

from __future__ import annotations

import io
import json
import pickle
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from hypothesis import strategies as st


@dataclass(frozen=True)
class Recorded:
    """One sequence; response fields are `[n]`, all of them float32-exact."""

    step: int
    index: int
    group: int
    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    q: tuple[float, ...]
    o: tuple[float, ...]
    mask: tuple[bool, ...]
    advantages: tuple[float, ...]
    entropy: tuple[float, ...]
    keep: tuple[bool, ...]
    reward: float
    version: int
    texts: tuple[str, str] = ("a prompt", "a response")

    @property
    def placeholders(self) -> tuple[float, ...]:
        """q with the 0 that every framework writes where nothing was sampled."""
        return tuple(q if m else 0.0 for q, m in zip(self.q, self.mask, strict=True))


@st.composite
def recorded(draw: st.DrawFn) -> list[Recorded]:
    """Up to 3 steps of 2 groups of 2; a masked token first, as every response has one."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    out: list[Recorded] = []
    for step in range(1, draw(st.integers(1, 3)) + 1):
        for group in range(2):
            prompt = (*(int(i) for i in rng.integers(1, 200_000, int(rng.integers(1, 5)))), step * 10 + group)
            out += [_random(rng, step, 2 * step + group, len(out) + i, prompt) for i in range(2)]
    return out


def _random(rng: np.random.Generator, step: int, group: int, index: int, prompt: tuple[int, ...]) -> Recorded:
    n = int(rng.integers(1, 7))

    def floats(low: float, high: float) -> tuple[float, ...]:
        return tuple(float(x) for x in rng.uniform(low, high, n).astype(np.float32))

    return Recorded(
        step=step,
        index=index,
        group=group,
        prompt=prompt,
        ids=tuple(int(i) for i in rng.integers(0, 200_000, n)),
        q=floats(-9, -0.01),
        o=floats(-9, -0.01),
        mask=(True, *(bool(b) for b in rng.integers(0, 2, n - 1))),
        advantages=(float(np.float32(rng.normal())),) * n,
        entropy=floats(0, 5),
        keep=tuple(bool(b) for b in rng.integers(0, 2, n)),
        reward=float(rng.integers(0, 5)) / 4,
        version=step - 1,
    )


def by_step(sequences: Sequence[Recorded]) -> dict[int, list[Recorded]]:
    out: dict[int, list[Recorded]] = {}
    for s in sequences:
        out.setdefault(s.step, []).append(s)
    return out


def nemo_line(s: Recorded, padding: int = 0, idx: int = 0) -> dict[str, Any]:
    """A line of train_data_step*.jsonl: batches of one, whole sequences, padded on the right."""
    before, after = [0.0] * len(s.prompt), [0.0] * padding
    return {
        "content": [[s.texts[0], s.texts[1]]],
        "rewards": [s.reward],
        "input_lengths": [len(s.prompt) + len(s.ids)],
        "token_ids": [[*s.prompt, *s.ids, *([0] * padding)]],
        "token_loss_mask": [[0] * len(s.prompt) + [int(m) for m in s.mask] + [0] * padding],
        "sample_loss_mask": [1.0],
        "advantages": [[s.advantages[0]] * (len(s.prompt) + len(s.ids) + padding)],
        "generation_logprobs": [[*before, *s.placeholders, *after]],
        "prev_logprobs": [[0.0, *[-1.5] * (len(s.prompt) - 1), *s.o, *after]],
        "idx": idx,
    }


def write_nemo(folder: Path, sequences: Sequence[Recorded]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for step, members in by_step(sequences).items():
        width = max(len(s.prompt) + len(s.ids) for s in members)
        lines = [nemo_line(s, width - len(s.prompt) - len(s.ids), i) for i, s in enumerate(members)]
        write_lines(folder / f"train_data_step{step}.jsonl", lines)
    return folder


def prime_line(s: Recorded, rank: int = 0) -> dict[str, Any]:
    """A line of rank_R.jsonl: whole sequences, unpadded."""
    p, n = len(s.prompt), len(s.prompt) + len(s.ids)
    return {
        "schema_version": 1,
        "step": s.step,
        "export_step": s.step,
        "rank": rank,
        "micro_step": 0,
        "micro_sequence_idx": 0,
        "export_sequence_idx": s.index,
        "run_id": None,
        "env_name": "math",
        "token_ids": [*s.prompt, *s.ids],
        "position_ids": list(range(n)),
        "loss_mask": [False] * p + list(s.mask),
        "advantages": [s.advantages[0]] * n,
        "losses": [{"rl": {"advantage": s.advantages[0], "mask": True}}] * n,
        "rewards": [s.reward] * n,
        "inference_logprobs": [0.0] * p + list(s.placeholders),
        "trainer_logprobs": [-12.2] * p + list(s.o),
        "entropy": [0.5] * p + list(s.entropy),
        "mismatch_kl": [0.0] * n,
        "log_importance_ratio": [0.0] * n,
        "importance_ratio": [1.0] * n,
        "prob_delta": [0.0] * n,
        "is_masked": [False] * p + [not k for k in s.keep],
        "is_masked_high": [False] * n,
        "is_masked_low": [False] * n,
    }


def write_prime(folder: Path, sequences: Sequence[Recorded], ranks: int = 2) -> Path:
    for step, members in by_step(sequences).items():
        at = folder / "token_exports" / f"step_{step}"
        at.mkdir(parents=True, exist_ok=True)
        for rank in range(ranks):
            write_lines(at / f"rank_{rank}.jsonl", [prime_line(s, rank) for s in members[rank::ranks]])
        (at / "STABLE").touch()
    return folder


def slime_sample(s: Recorded) -> dict[str, Any]:
    """`Sample.to_dict()`."""
    return {
        "group_index": s.group,
        "index": s.index,
        "prompt": s.texts[0],
        "tokens": [*s.prompt, *s.ids],
        "multimodal_inputs": None,
        "response": s.texts[1],
        "response_length": len(s.ids),
        "label": "42",
        "reward": s.reward,
        "loss_mask": [int(m) for m in s.mask],
        "weight_versions": [str(s.version)],
        "rollout_log_probs": list(s.placeholders),
        "rollout_routed_experts": None,
        "remove_sample": False,
        "status": "completed",
        "metadata": {"source": "gsm8k"},
        "train_metadata": None,
        "non_generation_time": 0.0,
        "spec_info": {"spec_accept_token_num": 0},
    }


def slime_train(members: Sequence[Recorded], dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """`rollout_data` of one rank."""
    return {
        "partition": list(range(len(members))),
        "tokens": [torch.tensor([*s.prompt, *s.ids]) for s in members],
        "total_lengths": [len(s.prompt) + len(s.ids) for s in members],
        "response_lengths": [len(s.ids) for s in members],
        "rewards": [0.0] * len(members),
        "raw_reward": [s.reward for s in members],
        "truncated": [0] * len(members),
        "loss_masks": [torch.tensor(s.mask, dtype=torch.int) for s in members],
        "sample_indices": [s.index for s in members],
        "rollout_log_probs": [torch.tensor(s.placeholders) for s in members],
        "log_probs": [torch.tensor(s.o, dtype=dtype) for s in members],
        "advantages": [torch.tensor(s.advantages) for s in members],
    }


def write_slime(folder: Path, sequences: Sequence[Recorded], ranks: int = 2) -> Path:
    for name in ("rollout_data", "train_data"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for step, members in by_step(sequences).items():
        samples = [slime_sample(s) for s in members]
        torch.save({"rollout_id": step, "samples": samples}, folder / "rollout_data" / f"{step}.pt")
        for rank in range(ranks):
            saved = {"rollout_id": step, "rank": rank, "rollout_data": slime_train(members[rank::ranks])}
            torch.save(saved, folder / "train_data" / f"{step}_{rank}.pt")
    return folder


def skyrl_batch(members: Sequence[Recorded], *, left: bool = True, pad_rows: int = 0) -> dict[str, torch.Tensor]:
    """Tensors of a TrainingInputBatch; `left`: all padding on the left, as today, else right of the response, as before."""
    members = [*members, *list(members[:1]) * pad_rows]
    width = max(len(s.ids) for s in members)
    if left:
        total = max(len(s.prompt) + len(s.ids) for s in members)
    else:
        total = max(len(s.prompt) for s in members) + width
    ids, attention = np.full((len(members), total), 7), np.zeros((len(members), total), np.int64)
    out = {k: np.zeros((len(members), width), np.float32) for k in ("q", "o", "advantages", "loss")}
    response = np.zeros((len(members), width), np.int64)
    for i, s in enumerate(members):
        n = len(s.ids)
        end = total if left else total - width + n
        ids[i, end - n - len(s.prompt) : end] = [*s.prompt, *s.ids]
        attention[i, end - n - len(s.prompt) : end] = 1
        at = slice(width - n, width) if left else slice(0, n)
        response[i, at] = 1
        out["q"][i, at], out["o"][i, at], out["advantages"][i, at] = s.placeholders, s.o, s.advantages
        out["loss"][i, at] = s.mask if i < len(members) - pad_rows else 0
    return {
        "sequences": torch.tensor(ids),
        "attention_mask": torch.tensor(attention),
        "response_mask": torch.tensor(response),
        "loss_mask": torch.tensor(out["loss"]),
        "rollout_logprobs": torch.tensor(out["q"]),
        "action_log_probs": torch.tensor(out["o"]),
        "advantages": torch.tensor(out["advantages"]),
    }


@contextmanager
def skyrl_modules() -> Iterator[type]:
    """A stand-in for SkyRL's class under SkyRL's name, present only while a pickle is written."""
    name = "skyrl.backends.skyrl_train.training_batch"

    def rebuild(cls: type, state: dict[str, Any]) -> Any:
        raise AssertionError("a reader rebuilt an object")

    class TrainingInputBatch(dict):
        state: dict[str, Any]

        def __reduce__(self) -> Any:
            return (rebuild, (type(self), self.state))

    for thing, attribute in ((rebuild, "_rebuild_tensor_batch"), (TrainingInputBatch, "TrainingInputBatch")):
        thing.__module__, thing.__qualname__, thing.__name__ = name, attribute, attribute
    parts = name.split(".")
    made = {".".join(parts[: i + 1]): types.ModuleType(".".join(parts[: i + 1])) for i in range(len(parts))}
    vars(made[name]).update(TrainingInputBatch=TrainingInputBatch, _rebuild_tensor_batch=rebuild)
    sys.modules.update(made)
    try:
        yield TrainingInputBatch
    finally:
        for module in made:
            del sys.modules[module]


def skyrl_tensor(value: torch.Tensor | None) -> Any:
    """As the batch serialises one tensor: numpy bytes, or a torch file inside for what numpy does not have."""
    if value is None:
        return None
    if value.dtype is torch.bfloat16:
        buffer = io.BytesIO()
        torch.save(value, buffer)
        return {"format": "torch", "data": buffer.getvalue()}
    array = value.numpy()
    return {"format": "numpy", "data": array.tobytes(), "shape": array.shape, "dtype": str(array.dtype)}


def write_skyrl_batch(path: Path, batch: dict[str, torch.Tensor | None], metadata: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with skyrl_modules() as cls:
        held = cls()
        held.state = {
            "batch_dict": {k: skyrl_tensor(v) for k, v in batch.items()},
            "batch_size": len(batch["sequences"]) if batch.get("sequences") is not None else None,  # type: ignore[arg-type]
            "device": torch.device("cpu"),
            "metadata": metadata,
        }
        with path.open("wb") as file:
            pickle.dump(held, file)


def write_skyrl(folder: Path, sequences: Sequence[Recorded], *, left: bool = True) -> Path:
    for step, members in by_step(sequences).items():
        path = folder / "dumped_data" / f"global_step_{step}_training_input.pkl"
        batch = skyrl_batch(members, left=left, pad_rows=1)
        write_skyrl_batch(path, dict(batch), {"response_length": batch["response_mask"].shape[1], "pad_size": 1})
    return folder


def write_verl(folder: Path, sequences: Sequence[Recorded]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for step, members in by_step(sequences).items():
        lines = [
            {
                "input": str(s.prompt),
                "output": str(s.ids),
                "gts": "42",
                "score": s.reward,
                "step": step,
                "acc": s.reward,
            }
            for s in members
        ]
        write_lines(folder / f"{step}.jsonl", lines)
    return folder


def write_trl(folder: Path, sequences: Sequence[Recorded]) -> Path:
    at = folder / "completions"
    at.mkdir(parents=True, exist_ok=True)
    for step, members in by_step(sequences).items():
        table = {
            "step": [step] * len(members),
            "prompt": [[{"role": "user", "content": str(s.prompt)}] for s in members],
            "completion": [[{"role": "assistant", "content": str(s.ids)}] for s in members],
            "accuracy_reward": [s.reward for s in members],
            "advantage": [s.advantages[0] for s in members],
        }
        pq.write_table(pa.table(table), at / f"completions_{step:05d}.parquet")
    return folder


def write_lines(path: Path, lines: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def example(**changes: Any) -> Recorded:
    """One small sequence whose third token is a tool's."""
    made = Recorded(
        step=3,
        index=11,
        group=5,
        prompt=(101, 102, 103),
        ids=(7, 70_000, 9, 2),
        q=(-0.5, -1.25, -2.0, -0.125),
        o=(-0.625, -1.0, -2.5, -0.25),
        mask=(True, True, False, True),
        advantages=(0.75,) * 4,
        entropy=(0.5, 1.5, 2.5, 0.25),
        keep=(True, False, True, True),
        reward=1.0,
        version=2,
    )
    return replace(made, **changes)
