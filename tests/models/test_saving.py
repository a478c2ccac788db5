"""A checkpoint that lays a second copy of the model beside the first ends a run that fitted, hours behind its start.

What `save_policy` and `save_state` write is read by safetensors and transformers and compared with what transformers writes itself, and
torch's allocator is watched meanwhile. Not covered: a GPU's allocator, disks that fail (test_checkpoint.py), ranks (test_mesh_io.py).
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM

from rollkeel.config import EngineConfig, ModelConfig
from rollkeel.engines.local import LocalEngine
from rollkeel.models import part_files, saving
from rollkeel.models.loading import load_policy, save_policy
from rollkeel.models.names import checkpoint_views, move_into
from rollkeel.train import checkpoint
from rollkeel.train.state import TENSORS, load_state, save_state

NAMES = ("tiny-qwen3", "tiny-qwen3-tied", "tiny-qwen3-moe")


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def taken(call: Callable[[], Any]) -> int:
    """Most bytes that torch's allocator held during `call` beside what it held before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        call()
    found: Any = seen.profiler
    events = sorted((e for e in found.kineto_results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns())
    return max(itertools.accumulate((event.nbytes() for event in events), initial=0))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [5 * 10**9, 100_000])
def test_the_folder_is_transformers_own(
    name: str, dtype: Any, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "FILE_BYTES", size)
    policy = load_policy(ModelConfig(path=f"preset:{name}", dtype=dtype), seed=3)
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    told = save_policy(policy, ours)
    policy.model.save_pretrained(str(theirs), max_shard_size=size)
    policy.tokenizer.save_pretrained(str(theirs))
    found, expected = tensors(ours), tensors(theirs)
    assert found.keys() == expected.keys()
    assert all(t.dtype == expected[n].dtype and torch.equal(t, expected[n]) for n, t in found.items())
    others = [{p.name for p in folder.iterdir() if "safetensors" not in p.name} for folder in (ours, theirs)]
    assert others[0] == others[1]
    for file in others[0]:
        assert (ours / file).read_bytes() == (theirs / file).read_bytes()
    assert told.keys() == {file.name for file in ours.glob("*.safetensors")}
    for file, about in told.items():
        content = (ours / file).read_bytes()
        assert about == {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    assert (len(told) > 1) == (size == 100_000)
    indexes = [folder / "model.safetensors.index.json" for folder in (ours, theirs)]
    if len(told) > 1:
        sizes = [json.loads(index.read_text())["metadata"] for index in indexes]
        assert sizes[0] == sizes[1]
    again = AutoModelForCausalLM.from_pretrained(ours, dtype="auto")
    assert again.dtype == policy.model.dtype
    live = dict(policy.model.named_parameters())
    assert all(torch.equal(p, live[n]) for n, p in again.named_parameters())


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_copied_but_a_part(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that the engine shares, of which several lie in one memory; transformers copies those."""
    monkeypatch.setattr(part_files, "CHUNK", 2**14)
    policy = load_policy(ModelConfig(path=f"preset:{name}", overrides={"hidden_size": 192}))
    engine = LocalEngine(policy.model.config, EngineConfig(slots=2), max_length=32)
    assert move_into(policy.model, engine.weights) == ""
    size = sum(view.nbytes for view in checkpoint_views(policy.model).values())
    assert taken(lambda: save_policy(policy, tmp_path / "ours")) < 2**14 + 2**15 < size / 8
    assert taken(lambda: policy.model.save_pretrained(str(tmp_path / "theirs"))) > size / 3


def test_a_state_is_written_from_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_files, "CHUNK", 2**14)
    base = torch.randn(256, 256)
    tree = {
        "odd": torch.arange(7, dtype=torch.uint8),
        "moments": [base, base[:128], torch.randn(300, 100).to(torch.bfloat16)],
        "wide": torch.randn(5, dtype=torch.float64),
        "turned": torch.arange(12).view(3, 4).t(),
        "one": torch.tensor(3.5),
        "none": torch.empty(0, 4),
        "true": torch.tensor([True, False]),
        "counts": np.array([1, 2**40], np.uint64),
        "small": np.array([1, 65_535], np.uint16),
    }
    assert taken(lambda: save_state(tmp_path / "state", tree)) < 2**14 + 2**12
    found = load_state(tmp_path / "state")
    for name in ("odd", "wide", "turned", "one", "none", "true"):
        assert found[name].dtype == tree[name].dtype
        assert torch.equal(found[name], tree[name])
    assert all(map(torch.equal, found["moments"], tree["moments"]))
    for name in ("counts", "small"):
        assert found[name].dtype == tree[name].dtype
        assert found[name].tolist() == tree[name].tolist()


def test_files_that_were_told_are_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = load_policy(ModelConfig(path="preset:tiny-qwen3"))
    read = list[str]()
    own = checkpoint._sha256
    monkeypatch.setattr(checkpoint, "_sha256", lambda file: read.append(file.name) or own(file))

    def write(path: Path) -> checkpoint.Written:
        written = checkpoint.save_state_of(path, {"weights": dict(policy.model.state_dict())})
        return written | checkpoint.beneath("model", save_policy(policy, path / "model"))

    made = checkpoint.save(tmp_path, 3, write=write, info={})
    assert {"config.json", "tree.json"} <= set(read)
    assert not {TENSORS, "model.safetensors"} & set(read)
    monkeypatch.setattr(checkpoint, "_sha256", own)
    assert checkpoint.verify(made.path).step == 3
