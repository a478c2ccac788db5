"""What every rank of tests/sync/test_publications_of_meshes.py runs: an update, and a publication into files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

import rollkeel.sync.group
from rollkeel import objectives
from rollkeel.config import EngineConfig
from rollkeel.engines.intake import Intake, Room
from rollkeel.engines.local import LocalEngine
from rollkeel.errors import EngineFailure
from rollkeel.models.numerics import compute_dtype
from rollkeel.models.presets import build_preset
from rollkeel.sync.files import FileCarrier
from rollkeel.sync.group import GroupCarrier, Received
from rollkeel.sync.sending import Outgoing, Weights, send_part
from rollkeel.train.mesh import Mesh, join
from rollkeel.train.trainer import LocalTrainer
from rollkeel.types import WeightSlice, WeightUpdate
from tests.train.mesh_io_ranks import Watcher
from tests.train.mesh_ranks import Case, batch, trainer, weights_of

BUCKET = 20_000
MODEL = {"hidden_size": 128, "num_hidden_layers": 2, "initializer_range": 0.1}
COLLECTIVES = [
    name for name in dir(dist) if name.startswith(("all_", "gather", "broadcast", "reduce", "scatter", "send"))
]


@dataclass(frozen=True)
class Publication(Case):
    mode: str = "int8"

    def run(self, mesh: Mesh, folder: Path) -> dict[str, Any]:
        out, folder = dict[str, Any](), self.files(folder)
        folder.mkdir(exist_ok=True)
        with Watcher() as watcher:
            t = trainer(self, mesh)
            t.update(batch(0, Case()), objectives.build("kpop"), old_is_current=True)
            t.score(batch(1, Case()))  # behind it FSDP leaves some parameters whole
            begun, rooms = watcher.now(), rooms_of(t, self.mode)
            with collectives_counted() as calls, watcher.phase(out, "most"):
                weights = Weights.of(t.model, *t.parts)
                made = weights.plan([rooms], self.mode, (range(mesh.size), [99]))
                carrier = FileCarrier(folder, mesh.rank)
                sums = send_part(made, mesh.rank, weights.held, Outgoing(rooms, self.mode, BUCKET), carrier)
            with collectives_counted() as gathering, watcher.phase(out, "gathered"):
                out["weights"] = weights_of(t)
        carrier.finish(sums)
        about = {"calls": calls, "gathering": gathering, "planned": made.sent().tolist(), "weights": out["weights"]}
        return {**about, "most": out["most"] - begun, "gathered": out["gathered"] - begun}

    def files(self, folder: Path) -> Path:
        sizes = "-".join(map(str, self.sizes.values()))
        return folder / f"{self.model}-{sizes}-{self.mode}"


def in_a_group(rank: int, folder: str, case: Publication, stops: int) -> None:
    """Ranks 0 … of the mesh send to rank 2, an engine. `stops`: buckets after which rank 1 ends without a word."""
    torch.set_num_threads(1)
    rollkeel.sync.group.ALONE = (
        2_000  # so that these small weights have parts that come straight into the engine's memory
    )
    about: dict[str, Any] = {"rank": rank, "world_size": 3, "timeout": timedelta(seconds=60)}
    dist.init_process_group("gloo", init_method=f"file://{folder}/start", **about)
    mesh, out = join(**case.sizes, ranks=range(2)), dict[str, Any]()
    if rank == 2:
        engine = LocalEngine(
            build_preset(case.model, 7, case.overrides)[0].config, EngineConfig(dtype=case.mode), max_length=32
        )
        head = WeightUpdate(kind="full", base_version=None, version=3, slices=(), checksum=0, mode=case.mode)
        intake = Intake(head, engine.memory, case.mode, engine.retire())

        def live(piece: WeightSlice) -> torch.Tensor | None:
            room = intake.live(piece)
            out["live"] = out.get("live", 0) + (room is not None)
            return room

        came = Received([0, 1], 20.0, into=live)
        try:
            for bucket in came:
                intake.take(bucket)
            engine.serve(3, *intake.finish(came.checksum))
        except EngineFailure as error:
            out["error"] = str(error)
        out |= {"version": engine.version, "memory": engine.weights}
    else:
        t = trainer(case, mesh)
        t.update(batch(0, Case()), objectives.build("kpop"), old_is_current=True)
        out["weights"] = weights_of(t)
        weights = Weights.of(t.model, *t.parts)
        made = weights.plan([rooms_of(t, case.mode)], case.mode, (range(2), [99]))
        carrier = GroupCarrier([2], 20.0)
        if rank == 1 and stops:
            carrier.put = lambda bucket, to, own=carrier.put, left=iter(range(stops)): (  # type: ignore[method-assign]
                own(bucket, to) if next(left, None) is not None else os._exit(3)
            )
        carrier.finish(
            send_part(made, rank, weights.held, Outgoing(rooms_of(t, case.mode), case.mode, BUCKET), carrier)
        )
    torch.save(out, Path(folder) / f"{rank}.pt")
    if not stops:
        dist.barrier()
    os._exit(0)


def rooms_of(t: LocalTrainer, mode: str) -> dict[str, Room]:
    """Of an engine that no rank sees, which holds every weight whole."""
    shapes = {name: tuple(piece.shape) for name, _, piece in t.parts[1]}
    return {n: Room(compute_dtype(mode), shape, (0,) * len(shape), shape) for n, shape in shapes.items()}


@contextmanager
def collectives_counted() -> Iterator[list[str]]:
    """Names of the calls of `torch.distributed` that are made inside."""
    calls = list[str]()

    def counted(name: str) -> Any:
        own = getattr(dist, name)
        return lambda *args, **named: (calls.append(name), own(*args, **named))[1]

    with ExitStack() as patched:
        for name in filter(lambda n: callable(getattr(dist, n)), COLLECTIVES):
            patched.enter_context(patch.object(dist, name, counted(name)))
        yield calls


def shape_of(tensors: dict[str, torch.Tensor]) -> int:
    """Bytes."""
    return sum(t.nbytes for t in tensors.values())
