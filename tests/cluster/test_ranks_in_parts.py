"""Ranks load, warm-start, publish, save and record a model that none of them ever holds whole.

Matters because a model that needs many ranks fits none of them. Real process groups over gloo and the calls of the controller, without Ray.
Not covered: GPUs, several hosts, memory that a watcher of tensors does not see (tests/train/mesh_io_ranks.py).
"""

from __future__ import annotations

import json
import multiprocessing
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollkeel.analyzer.capture import load_capture
from rollkeel.analyzer.record import record_tensors
from rollkeel.config import ModelConfig
from rollkeel.models.loading import load_policy
from rollkeel.types import GraderSpec, Prompt, Rollout, SamplingParams, Status, TokenSpan
from tests.cluster.parts_ranks import serve
from tests.train.mesh_io_ranks import BUFFER

DEEP = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 24}
WORDS = ["data.options.digits=2", "sft.steps=3", "sft.batch_size=4", "sft.lr=1e-3", "train.lr=1e-3", "run.device=cpu"]
WORDS += ["train.freeze_router=router"]
MESHES = {"shard": "tiny-qwen3", "expert": "tiny-qwen3-moe", "tensor": "tiny-qwen3"}


def rollout() -> Rollout:
    ids, stamp = np.array([7, 3, 9, 1]), np.zeros(4, np.int64)
    span = TokenSpan(
        token_ids=ids,
        logprobs=np.full(4, -1.0, np.float32),
        kept_mass=np.ones(4, np.float32),
        versions=stamp,
        kv_versions=stamp,
    )
    about: dict[str, Any] = {"text": "", "answer": "", "grader": GraderSpec(name="x"), "task": "t"}
    prompt = Prompt(id="0", index=0, token_ids=np.array([5, 6, 7]), **about)
    made: dict[str, Any] = {"sampling": SamplingParams(), "engine": "local", "dtype": "fp32", "reward": 0.0}
    return Rollout(id=0, group=0, member=0, prompt=prompt, span=span, status=Status.FINISHED, **made)


def ranks(folder: Path, *words: str) -> list[dict[str, Any]]:
    """What two ranks come to."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.cluster.parts_ranks"])
    about = (2, str(folder), port, [*WORDS, *words], [rollout()])
    processes = [context.Process(target=serve, args=(rank, *about)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(240)
    assert [process.exitcode for process in processes] == [0, 0]
    return [torch.load(folder / f"rank-{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("size", MESHES)
def test_no_rank_ever_holds_the_whole_model(size: str, tmp_path: Path) -> None:
    model = ModelConfig(path=f"preset:{MESHES[size]}", overrides=DEEP)
    first, second = ranks(
        tmp_path, f"train.mesh.{size}=2", f"model.path={model.path}", f"model.overrides={json.dumps(DEEP)}"
    )
    assert first["findings"] == []
    for seen in (first, second):
        assert seen["stopped"] == "stopped during the warm start; it goes on at step 1 of 3 on resume"
        assert_in_parts(seen["peaks"], model, size)
    assert [args for method, args in first["said"] if method == "note"] == [("warm start goes on at step 1 of 3",)]
    assert [args[0] for method, args in first["said"] if method == "step"] == [2, 3]
    assert second["said"] == second["cached"] == []  # one rank speaks for all
    assert [args for method, args in first["cached"] if method == "emit"] == [("sft_cached",)]
    assert_recorded(tmp_path, first["weights"], model)
    for name, weight in load_policy(ModelConfig(path=str(tmp_path / "model"))).model.state_dict().items():
        if name in first["weights"]:
            assert torch.equal(weight, first["weights"][name]), name  # what was trained is what was kept


def assert_in_parts(peaks: dict[str, int], config: ModelConfig, size: str) -> None:
    model: Any = load_policy(config, whole=False).model
    named = {name: 4 * p.numel() for name, p in model.named_parameters()}
    total, largest = sum(named.values()), max(named.values())
    ends = named["lm_head.weight"] + named["model.embed_tokens.weight"]
    share = {
        "shard": total / 2,
        "expert": total - sum(n for name, n in named.items() if ".experts." in name) / 2,
        "tensor": total / 2 + sum(n for name, n in named.items() if "norm" in name),
    }[size]
    layer = sum(4 * p.numel() for p in model.model.layers[0].parameters())
    passes = 2**20 + (
        2 * (ends + 2 * layer) if size == "shard" else 0
    )  # FSDP brings in embeddings, head and two layers
    activations = 2**22
    assert share + passes + 2 * largest < 0.8 * total
    assert peaks["load"] <= share + passes + 2 * largest
    assert peaks["warm_start"] <= 4 * share + passes + activations  # weights, gradients, two moments
    for name in ("begin", "publish", "save", "save_model"):
        assert peaks[name] <= share + 2 * largest + BUFFER + 2**14, name  # and a few scalars
    if size != "tensor":  # where the first rank holds it whole
        assert peaks["record"] <= share + passes + activations


def assert_recorded(folder: Path, weights: dict[str, torch.Tensor], config: ModelConfig) -> None:
    """The tensors that ranks write are those of a whole model."""
    policy = load_policy(ModelConfig(path=str(folder / "model")))
    record_tensors(folder / "alone", policy.model, [rollout()], step=1, version=0)
    ours, alone = load_capture(folder / "tensors"), load_capture(folder / "alone")
    assert ours.values.keys() == alone.values.keys()
    for key, value in alone.values.items():
        assert torch.allclose(ours.values[key].float(), value.float(), atol=1e-5), key
    assert torch.allclose(ours.logprobs, alone.logprobs, atol=1e-5, equal_nan=True)
