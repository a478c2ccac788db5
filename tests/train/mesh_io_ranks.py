"""What every rank of tests/train/test_mesh_io.py runs: loading, publishing, saving and resuming on one mesh after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rollkeel import objectives
from rollkeel.config import SftConfig
from rollkeel.models import part_files, saving
from rollkeel.train.mesh import Mesh, local
from rollkeel.train.sft import Example, run_sft
from rollkeel.train.together import UnfinishedTogether
from rollkeel.train.trainer import LocalTrainer
from tests.train.mesh_ranks import Case, batch, trainer, weights_of

BUFFER = 2**17
"""Bytes that a file is written through here."""


@dataclass(frozen=True)
class Job(Case):
    """A case and what is done with its trainer."""

    what: str = ""
    """A function of this module."""
    source: str = ""
    """What another job has written."""

    def run(self, mesh: Mesh, folder: Path) -> dict[str, Any]:
        small = patch.object(part_files, "CHUNK", BUFFER), patch.object(saving, "FILE_BYTES", 100_000)
        try:
            with small[0], small[1]:
                return globals()[self.what](self, mesh, folder)
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}


class Watcher(TorchDispatchMode):
    """Counts the bytes of all tensors with memory that operations have made since, and that are alive: `most` of them at one time.

    It looks when an operation returns memory that is new to it, and when FSDP gathers. It sees what FSDP brings in, gradients and what
    autograd keeps. It does not see memory inside of one operation, numpy arrays, bytes, gloo's buffers, and files that are mapped.
    """

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, StorageWeakRef] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        fresh = func.namespace in ("fsdp", "c10d")
        for tensor in tree_leaves((args, out) if fresh else out):
            held = local(tensor) if isinstance(tensor, torch.Tensor) else None
            if (
                held is not None
                and held.device.type == "cpu"
                and (key := held.untyped_storage()._cdata) not in self._alive
            ):
                self._alive[key] = StorageWeakRef(held.untyped_storage())
                fresh = True
        if fresh:
            self.most = max(self.most, self.now())
        return out

    def now(self) -> int:
        """Bytes alive."""
        total = 0
        for key, reference in list(self._alive.items()):
            if reference.expired():
                del self._alive[key]
            else:
                total += torch.UntypedStorage._new_with_weak_ptr(reference.cdata).nbytes()
        return total

    @contextmanager
    def phase(self, into: dict[str, int], name: str) -> Iterator[None]:
        """Most bytes alive inside."""
        self.most = self.now()
        yield
        into[name] = self.most


def update(t: LocalTrainer, number: int) -> dict[str, float]:
    return t.update(batch(number, Case()), objectives.build("kpop"), old_is_current=True).metrics


def any_order(job: Job, mesh: Mesh, folder: Path) -> dict[str, Any]:
    """Passes without gradients in front of everything that looks at the weights."""
    t, data = trainer(job, mesh), batch(0, job)
    out: dict[str, Any] = {"first": weights_of(t)}
    update(t, 0)
    t.score(data)
    out["updated"] = weights_of(t)
    state = copied(t.state_dict())
    update(t, 1)
    out["metrics"] = update(t, 2)
    t.score(data)
    t.load_state_dict(state)
    out["loaded"] = weights_of(t)
    update(t, 1)
    out["again"] = update(t, 2)
    return out


def copied(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return state.clone()
    return {k: copied(v) for k, v in state.items()} if isinstance(state, dict) else state


def loaded(job: Job, mesh: Mesh, folder: Path) -> dict[str, Any]:
    """The model as it is loaded; `source`: a folder of it."""
    t = trainer(job, mesh)
    return {"weights": weights_of(t), "buffers": {n: b.clone() for n, b in t.model.named_buffers()}}


def saved(job: Job, mesh: Mesh, folder: Path) -> dict[str, Any]:
    """Two updates, saved, and two more."""
    t = trainer(job, mesh)
    for number in range(2):
        update(t, number)
    files = t.save(folder / job.source)
    model = t.save_model(folder / f"{job.source}-model")
    out = {"files": files, "model": model, "weights": weights_of(t), "state": copied(t.state_dict())}
    return out | {"metrics": [update(t, number) for number in (2, 3)], "last": weights_of(t)}


def resumed(job: Job, mesh: Mesh, folder: Path) -> dict[str, Any]:
    """What `saved` does behind its saving, in a trainer that reads it and saves it again."""
    t = trainer(job, mesh)
    update(t, 5)  # it has to forget
    lacking = t.load(folder / job.source)
    name = f"{job.source}-by-{'-'.join(map(str, job.sizes.values()))}"
    t.save(folder / name)
    out: dict[str, Any] = {"lacking": lacking, "weights": weights_of(t), "state": copied(t.state_dict()), "again": name}
    return out | {"metrics": [update(t, number) for number in (2, 3)], "last": weights_of(t)}


def once(job: Job, mesh: Mesh, folder: Path) -> dict[str, Any]:
    """One update, saved."""
    t = trainer(job, mesh)
    metrics = update(t, 0)
    t.save(folder / job.source)
    return metrics


def overflows(job: Job, mesh: Mesh, folder: Path) -> dict[str, Any]:
    """Updates from a loss scale on that is too large for all of the first ones."""
    t = trainer(job, mesh)
    t._stepper.scale = 2.0**30
    return {"metrics": [update(t, number) for number in range(12)], "weights": weights_of(t)}


def watched(job: Job, mesh: Mesh, folder: Path) -> dict[str, Any]:
    """Most bytes alive in each phase of a trainer's life; `source`: it is saved there too."""
    peaks, held = dict[str, int](), dict[str, int]()
    with Watcher() as watcher:
        with watcher.phase(peaks, "load"):
            t = trainer(job, mesh)
        own = t._stepper.adamw.step

        def step(lr: float, seed: int = 0) -> None:
            own(lr, seed)
            held.update(held_by(t))

        with patch.object(t._stepper.adamw, "step", step), watcher.phase(peaks, "step"):
            update(t, 0)
        with watcher.phase(peaks, "again"):
            update(t, 0)
        acts: dict[str, Callable[[], object]] = {"named_weights": lambda: [None for _ in t.named_weights()]}
        if job.source:
            acts["save"] = lambda: t.save(folder / job.source)
            acts["save_model"] = lambda: t.save_model(folder / f"{job.source}-model")
            acts["resume"] = lambda: t.load(folder / job.source)
        for name, act in acts.items():
            with watcher.phase(peaks, name):
                act()
    return {"peaks": peaks, **held}


def held_by(t: LocalTrainer) -> dict[str, int]:
    """Bytes on this rank when gradients and moments are there."""
    live = list(t.model.parameters())
    moments = [m for s in t._stepper.adamw.state.values() for m in (s["exp_avg"], s["exp_avg_sq"])]
    gradients = [local(p.grad) for p in live if p.grad is not None]
    return {"weights": size([local(p) for p in live]), "gradients": size(gradients), "moments": size(moments)}


def size(tensors: list[torch.Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


SFT = SftConfig(steps=4, batch_size=7, warmup_steps=1, lr=1e-3)


def examples(indices: Sequence[int]) -> list[Example]:
    def one(index: int) -> Example:
        r = np.random.default_rng(index)
        return r.integers(100, 110, 2 + index % 3), r.integers(100, 110, 1 + index % 7)

    return [one(i) for i in indices]


def supervised(job: Job, mesh: Mesh, folder: Path) -> dict[str, Any]:
    """Four steps; `source`: stopped before the third, and gone on with in another trainer."""
    seen: list[dict[str, float]] = []

    def train(t: LocalTrainer, kept: Any, stop: int) -> None:
        if mesh.size == 1 and not t.policy.lora:  # where routers are frozen behind it
            t.model.requires_grad_(True)
        alone: dict[str, Any] = {"weight_decay": t.config.weight_decay}
        about: dict[str, Any] = alone if mesh.size == 1 else {"trainer": t}
        progress = lambda _, metrics: seen.append(metrics)  # noqa: E731
        run_sft(t.policy, examples, SFT, kept=kept, should_stop=lambda: len(seen) == stop, progress=progress, **about)

    t = trainer(job, mesh)
    if job.source:
        train(t, UnfinishedTogether(folder / job.source, "key", mesh), 2)
        seen_before = list(seen)
        t = trainer(job, mesh)
        train(t, UnfinishedTogether(folder / job.source, "key", mesh), 99)
        assert seen[:2] == seen_before
    else:
        train(t, None, 99)
    out: dict[str, Any] = {"metrics": seen, "weights": weights_of(t)}
    if "kl_coefficient" in job.options and mesh.size > 1:
        data = batch(0, job)
        out["start"] = [t.ref_logprobs(data), t.logprobs(data)[0]]
    return out
