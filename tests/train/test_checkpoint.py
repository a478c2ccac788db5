"""A checkpoint is what a killed run restarts from: half of one, or one that rotted, must never be loaded in silence.

Crash points are exhaustive over system calls and random over time. Not covered: power cuts, network file systems.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from rollkeel.errors import BadInput, Corrupt
from rollkeel.events import EventLog
from rollkeel.train import checkpoint
from rollkeel.train.checkpoint import check_shapes, load_state, save_state


def fill(value: int) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        (path / "model").mkdir()
        (path / "model" / "weights.bin").write_bytes(bytes([value]) * 5000)
        save_state(path / "state", {"step": value, "t": torch.full((3,), float(value))})

    return write


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_save_keeps_the_last_n_and_latest_returns_the_newest(tmp_path: Path) -> None:
    for step in (4, 8, 12):
        saved = checkpoint.save(tmp_path, step, write=fill(step), info={"version": step}, keep=2)
    assert names(tmp_path) == ["step_000008", "step_000012"]
    found = checkpoint.latest(tmp_path)
    assert found == saved
    assert found.info == {"version": 12}
    assert load_state(found.state)["t"].tolist() == [12.0] * 3
    assert found.versions["torch"] == torch.__version__.split("+")[0] or found.versions["torch"] == torch.__version__


def test_none_when_there_is_nothing(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path) is None
    assert checkpoint.latest(tmp_path / "missing") is None
    assert checkpoint.clean(tmp_path / "missing") == []


def test_saving_the_same_step_again_replaces_it(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 4, write=fill(4), info={})
    checkpoint.save(tmp_path, 4, write=fill(9), info={})
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert load_state(found.state)["step"] == 9
    assert names(tmp_path) == ["step_000004"]


def test_a_new_save_survives_when_a_later_damaged_one_is_still_there(tmp_path: Path) -> None:
    for step in (4, 8):
        checkpoint.save(tmp_path, step, write=fill(step), info={}, keep=2)
    (tmp_path / "step_000008" / "manifest.json").unlink()
    checkpoint.save(tmp_path, 6, write=fill(6), info={}, keep=1)
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert found.step == 6
    assert checkpoint.drop_after(tmp_path, 6) == ["step_000008"]
    assert names(tmp_path) == ["step_000006"]


def damage(path: Path, how: str) -> None:
    target = path / "model" / "weights.bin"
    if how == "flip":
        data = bytearray(target.read_bytes())
        data[2500] ^= 1
        target.write_bytes(data)
    elif how == "truncate":
        os.truncate(target, 4999)
    elif how == "missing":
        target.unlink()
    elif how == "no manifest":
        (path / "manifest.json").unlink()
    elif how == "half manifest":
        os.truncate(path / "manifest.json", 40)
    elif how == "other step":
        text = (path / "manifest.json").read_text()
        (path / "manifest.json").write_text(text.replace('"step": 8', '"step": 9'))


@pytest.mark.parametrize(
    ("how", "named"),
    [
        ("flip", "weights.bin does not match"),
        ("truncate", "weights.bin has 4999 bytes instead of 5000"),
        ("missing", "weights.bin is missing"),
        ("no manifest", "manifest.json is missing"),
        ("half manifest", "manifest.json cannot be read"),
        ("other step", "manifest.json does not match"),
    ],
)
def test_a_damaged_checkpoint_is_refused_by_name_and_the_previous_one_used(
    tmp_path: Path, how: str, named: str
) -> None:
    for step in (4, 8):
        checkpoint.save(tmp_path, step, write=fill(step), info={})
    damage(tmp_path / "step_000008", how)
    messages: list[str] = []
    log = EventLog(None)
    found = checkpoint.latest(tmp_path, on_refused=messages.append, events=log)
    assert found is not None
    assert found.step == 4
    assert len(messages) == 1
    assert "step_000008" in messages[0]
    assert named in messages[0]
    assert "\n" not in messages[0]
    assert [(e["event"], e["path"]) for e in log.seen] == [("checkpoint_refused", "step_000008")]
    with pytest.raises(Corrupt, match="step_000008"):
        checkpoint.verify(tmp_path / "step_000008")
    damage(tmp_path / "step_000004", "flip")
    with pytest.raises(Corrupt, match=r"every checkpoint is damaged \(step_000008, step_000004\)"):
        checkpoint.latest(tmp_path)


def test_every_single_flipped_bit_of_the_manifest_is_noticed(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 4, write=lambda p: (p / "a").write_bytes(b"x") and None, info={"lr": 0.1})
    file = tmp_path / "step_000004" / "manifest.json"
    data = file.read_bytes()
    want = json.loads(data)
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 1
        file.write_bytes(changed)
        try:
            checkpoint.verify(file.parent)
        except Corrupt:
            continue
        assert json.loads(changed) == want, at  # only whitespace may change unnoticed


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 4, write=fill(4), info={})

    def broken(path: Path) -> None:
        fill(8)(path)
        raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        checkpoint.save(tmp_path, 8, write=broken, info={})
    with pytest.raises(TypeError):
        checkpoint.save(tmp_path, 8, write=fill(8), info={"not": object()})
    assert names(tmp_path) == ["step_000004"]


def test_unwritable_and_full_disks_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="cannot write"):
        checkpoint.save(tmp_path / "file" / "checkpoints", 4, write=fill(4), info={})
    pid = os.fork()
    if pid == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
        code = 1
        try:
            checkpoint.save(tmp_path / "c", 4, write=fill(4), info={})
        except BadInput as error:
            code = 0 if "\n" not in str(error) and "too large" in str(error).lower() else 2
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert names(tmp_path / "c") == []


def test_a_full_disk_reported_by_safetensors_is_one_line(tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
        code = 1
        try:
            big = {"t": torch.zeros(5000)}
            checkpoint.save(tmp_path / "c", 4, write=lambda p: save_state(p / "state", big), info={})
        except BadInput as error:
            code = 0 if "\n" not in str(error) else 2
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert names(tmp_path / "c") == []


CRASH = """
import os, shutil, signal, sys
from pathlib import Path
from rollkeel.train import checkpoint
folder, counted = Path(sys.argv[1]), 0

def write(path):
    (path / "model").mkdir()
    for i in range(2):
        (path / "model" / f"part{i}").write_bytes(os.urandom(4000))

def crash_at(k):
    def guard(call):
        def wrapped(*args, **kwargs):
            global counted
            counted += 1
            if counted == k:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)
        return wrapped
    for name in ("fsync", "rename", "mkdir", "unlink", "rmdir", "open"):
        setattr(os, name, guard(getattr(os, name)))

steps_before, step, k = [4, 8], int(sys.argv[2]), 0
while True:
    k += 1
    shutil.rmtree(folder, ignore_errors=True)
    for s in steps_before:
        checkpoint.save(folder, s, write=write, info={})
    pid = os.fork()
    if pid == 0:
        crash_at(k)
        checkpoint.save(folder, step, write=write, info={})
        os._exit(0)
    finished = os.waitpid(pid, 0)[1] == 0
    checkpoint.clean(folder)
    found = checkpoint.latest(folder)
    assert found is not None and found.step in (8, step), (k, found)
    for _, path in checkpoint.listing(folder):
        checkpoint.verify(path)
    rest = [p.name for p in folder.iterdir() if not p.name.startswith("step_")]
    assert not rest, (k, rest)
    if finished:
        assert found.step == step
        break
print("crash points", k - 1)
"""


@pytest.mark.parametrize("step", [12, 8])
def test_a_kill_at_every_system_call_of_a_save_leaves_only_whole_checkpoints(tmp_path: Path, step: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CRASH, str(tmp_path / "c"), str(step)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) >= 10


ENDLESS = """
import os, sys
from pathlib import Path
from rollkeel.train import checkpoint

def write(path):
    for name in ("model", "state"):
        (path / name).mkdir()
        for i in range(3):
            (path / name / str(i)).write_bytes(os.urandom(300_000))

step = int(sys.argv[2])
while True:
    step += 1
    checkpoint.save(sys.argv[1], step, write=write, info={"step": step})
    print(step, flush=True)
"""


def test_kill_9_at_random_moments_loses_no_announced_checkpoint(tmp_path: Path) -> None:
    rng = random.Random(0)
    last = leftovers = 0
    for _ in range(10):
        child = subprocess.Popen(
            [sys.executable, "-c", ENDLESS, str(tmp_path), str(last)], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(rng.random() * 0.08)
        child.send_signal(signal.SIGKILL)
        announced = child.stdout.read().split()
        child.wait()
        leftovers += bool(checkpoint.clean(tmp_path))
        found = checkpoint.latest(tmp_path)
        assert found is not None
        assert found.info == {"step": found.step}
        assert found.step >= int(announced[-1] if announced else last + 1)
        last = found.step
    assert leftovers, "no kill hit a save: the test did not test"


def test_state_round_trip_keeps_every_bit_and_type(tmp_path: Path) -> None:
    base = torch.arange(6.0)
    parameter = torch.nn.Parameter(torch.randn(2, 3, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW([parameter], lr=1e-3)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    tree = {
        "optimizer": optimizer.state_dict(),
        "rng": torch.get_rng_state(),
        "python": random.Random(3).getstate(),
        "numpy": np.random.default_rng(5).bit_generator.state,
        "array": np.arange(6, dtype=np.int16).reshape(2, 3).T,
        "shared": [base, base[2:4], base.view(2, 3).t()],
        "collide": {1: torch.tensor(1), "1": torch.tensor(2), "a/b": torch.tensor(3), "a": {"b": torch.tensor(4)}},
        "scalars": [0.1, 5e-324, float("inf"), 2**100, True, None, "é\n"],
        "empty": {"d": {}, "l": [], "t": (), "tensor": torch.zeros(0, 3), "scalar": torch.tensor(2.5)},
    }
    save_state(tmp_path / "state", tree)
    back = load_state(tmp_path / "state")

    def same(a: object, b: object, where: str) -> None:
        assert type(a) is type(b) or isinstance(a, torch.Tensor), where
        if isinstance(a, torch.Tensor):
            assert isinstance(b, torch.Tensor)
            assert (a.dtype, a.shape) == (b.dtype, b.shape), where
            assert torch.equal(a, b), where
        elif isinstance(a, np.ndarray):
            assert isinstance(b, np.ndarray)
            assert a.dtype == b.dtype
            assert np.array_equal(a, b), where
        elif isinstance(a, dict):
            assert isinstance(b, dict)
            assert list(a) == list(b), where
            for key in a:
                same(a[key], b[key], f"{where}/{key}")
        elif isinstance(a, list | tuple):
            assert isinstance(b, list | tuple)
            assert len(a) == len(b), where
            for i, (x, y) in enumerate(zip(a, b, strict=True)):
                same(x, y, f"{where}/{i}")
        else:
            assert a == b, where

    same(tree, back, "")


def test_state_refuses_what_it_cannot_return_exactly(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"state/a/0.*set"):
        save_state(tmp_path / "s", {"a": [{1, 2}]})
    with pytest.raises(TypeError, match="key"):
        save_state(tmp_path / "s", {(1, 2): 1})
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("name", ["tree.json", "tensors.safetensors"])
def test_damaged_state_is_corrupt(tmp_path: Path, name: str) -> None:
    save_state(tmp_path / "s", {"a": torch.ones(100)})
    os.truncate(tmp_path / "s" / name, (tmp_path / "s" / name).stat().st_size - 2)
    with pytest.raises(Corrupt, match="state"):
        load_state(tmp_path / "s")
    (tmp_path / "s" / name).unlink()
    with pytest.raises(Corrupt, match="state"):
        load_state(tmp_path / "s")


def test_check_shapes_names_the_first_tensor_that_differs() -> None:
    model = {"embed": (8, 4), "head": (8, 4)}
    check_shapes(model, {"head": torch.Size([8, 4]), "embed": [8, 4]})
    with pytest.raises(BadInput, match=r"head.*\[8, 4\].*\[9, 4\]"):
        check_shapes(model, {"embed": (8, 4), "head": (9, 4)})
    with pytest.raises(BadInput, match="lacks tensor embed"):
        check_shapes(model, {"head": (8, 4)})
    with pytest.raises(BadInput, match="has tensor bias"):
        check_shapes(model, {**model, "bias": (4,)})
