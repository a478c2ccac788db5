"""What a publication costs requests that are being decoded: in decode steps, beyond the copy of the weights.

    python -m benchmarks.in_flight                     # 19 M parameters, an engine in a worker process and one in a Ray actor: a minute
    python -m benchmarks.in_flight --layers 1 --width 64 --rounds 1 --slots 2

A round is so many decode steps without a publication and as many with one in the middle, between two steps; requests keep their KV.
`cost`: the difference. `copy`: of the same bytes from warm to warm memory. `beyond`: (cost − copy) / step, at most 2 is asked. The first
three by the clock, medians of rounds that take turns; `least` takes the least of each in place of medians, for machines that others use.
`engine` and `caller`: processor time of the engine's and of this process for the publication, less that of the copy, in steps of the engine's
processor time: what neither a busy machine nor waiting for each other changes.
`flight`: the same as `beyond` of an engine that decodes on its own while this process publishes, as in `run.loop=async`: decode steps that
it did not make in the time that they and the publication took, less the copy. What is done before the engine is told costs them little.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import numpy as np
import torch

from rollkeel.config import EngineConfig, SyncConfig
from rollkeel.engines.workers import WorkerEngine
from rollkeel.host import keep_freed_memory
from rollkeel.models.names import checkpoint_views
from rollkeel.models.presets import build_preset
from rollkeel.sync.publish import full_update
from rollkeel.types import Request, SamplingParams

CONTEXT = 1024


def processor(pid: int) -> float:
    """Processor seconds of a process of this host, all of its threads."""
    spent = [task.read_text().split()[0] for task in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    return sum(map(int, spent)) / 1e9


def measured(engine: Any, pid: int, publish: Callable[[int], Any], model: Any, options: argparse.Namespace) -> str:
    """A row of the table."""
    publish(1)
    sampling, draw = SamplingParams(max_new_tokens=CONTEXT - 20), np.random.default_rng(0)
    engine.submit([Request(id=i, prompt_ids=draw.integers(3, 288, 8), sampling=sampling) for i in range(options.slots)])
    engine.advance(options.steps)
    tensors = [t.detach() for t in checkpoint_views(model).values()]
    other = [t.clone() for t in tensors]
    found: dict[str, list[float]] = {key: [] for key in ("step", "cost", "copy", "engine", "caller")}
    for version in range(2, options.rounds + 3):
        seconds, spent, ours = [], [], 0.0
        for publishes in (False, True):
            start, before = time.perf_counter(), processor(pid)
            engine.advance(options.steps)
            if publishes:
                ours = time.process_time()
                publish(version)
                ours = time.process_time() - ours
            engine.advance(options.steps)
            seconds.append(time.perf_counter() - start)
            spent.append(processor(pid) - before)
        start, copied = time.perf_counter(), time.process_time()
        for a, b in zip(other, tensors, strict=True):
            a.copy_(b)
        found["copy"].append(time.perf_counter() - start)
        copied, step = time.process_time() - copied, spent[0] / 2 / options.steps
        found["engine"].append((spent[1] - spent[0] - copied) / step)
        found["caller"].append((ours - copied) / step)
        found["step"].append(seconds[0] / 2 / options.steps)
        found["cost"].append(seconds[1] - seconds[0])
    rows = {key: values[1:] for key, values in found.items()}  # the first round touches fresh memory
    flight = lost(engine, publish, options, median(rows["step"])) - median(rows["copy"]) / median(rows["step"])
    step, cost, copy = (median(rows[key]) for key in ("step", "cost", "copy"))
    whole = [c + 2 * options.steps * s for c, s in zip(rows["cost"], rows["step"], strict=True)]
    least = min(rows["step"])
    beyond = (min(whole) - 2 * options.steps * least - min(rows["copy"])) / least
    return (
        f"{step * 1e3:8.2f} {cost * 1e3:8.2f} {copy * 1e3:8.2f} {(cost - copy) / step:8.2f} {beyond:8.2f} |"
        f" {median(rows['engine']):8.2f} {median(rows['caller']):8.2f} | {flight:8.2f}"
    )


def lost(engine: Any, publish: Callable[[int], Any], options: argparse.Namespace, step: float) -> float:
    """Decode steps that an engine which decodes on its own does not make because of a publication, on average."""
    found = []
    for version in range(1000, 1000 + options.rounds):
        rates = []
        for publishes in (False, True):
            engine.poll(0)  # from here on it decodes on its own
            begun, before = _made(engine)
            time.sleep(options.steps * step)
            if publishes:
                publish(version)
            time.sleep(options.steps * step)
            ended, behind = _made(engine)
            rates.append((behind - before, ended - begun))
        (alone, took), (made, lasted) = rates
        found.append(lasted * alone / took - made)
    return float(np.mean(found[1:] or found))


def _made(engine: Any) -> tuple[float, int]:
    """When it has made how many decode steps."""
    engine.progress()
    return time.perf_counter(), engine.steps[0]


def in_worker(model: Any, config: EngineConfig, options: argparse.Namespace) -> str:
    engine = WorkerEngine(model.config, config.model_copy(update={"processes": 1}), device="cpu", max_length=CONTEXT)
    try:
        _ = engine.capabilities
        views = checkpoint_views(model)  # once, as a trainer does

        def publish(version: int) -> None:
            engine.update_weights(full_update(views.items(), version, config.dtype))

        return measured(engine, engine.parts[0].process.pid or 0, publish, model, options)
    finally:
        engine.close()


def in_actor(model: Any, config: EngineConfig, options: argparse.Namespace) -> str:
    from rollkeel.cluster.engines import ActorEngine
    from rollkeel.cluster.publish import StreamPublisher
    from rollkeel.cluster.sender import Sender
    from rollkeel.cluster.start import connect, disconnect
    from rollkeel.config import Config
    from rollkeel.sync.last_sent import Traffic
    from rollkeel.train.mesh import Mesh
    from rollkeel.train.sharded import Layout, pieces_of

    connect(Config(), 2)
    engine = ActorEngine(model.config, config, [{}], device="cpu", max_length=CONTEXT)
    try:
        _ = engine.capabilities
        parts = Layout(model, Mesh()), pieces_of(model)
        trainer: Any = SimpleNamespace(model=model, parts=parts, named_adapters=dict, version=0)
        sender = Sender(trainer, Mesh(), SyncConfig(), 60.0)

        class Source:
            traffic = Traffic()

            def prepare(self, head: Any) -> None:
                sender.prepare(head)

            def stream(self, head: Any, sinks: Any) -> list[int]:
                return sender.send(head, sinks)[0]

        told = StreamPublisher(engine, Source())
        return measured(engine, engine.parts[0].place[1], lambda version: told.publish(None, version), model, options)
    finally:
        engine.close()
        disconnect()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    size = {"num_hidden_layers": options.layers, "hidden_size": options.width, "moe_intermediate_size": options.width}
    model, _ = build_preset("tiny-qwen3-moe", 0, size)
    weights = checkpoint_views(model).values()
    count, mb = sum(t.numel() for t in weights), sum(t.nbytes for t in weights) / 1e6
    print(f"{count:,} parameters, {mb:.0f} MB, {options.dtype}, load {os.getloadavg()[0]:.1f}")
    print("engine    step ms     cost     copy   beyond    least |  engine   caller |  flight")
    config = EngineConfig.model_validate({"slots": options.slots, "kv": "keep", "dtype": options.dtype})
    for name, way in {"worker": in_worker, "actor": in_actor}.items():
        print(f"{name:8}{way(model, config, options)}", flush=True)


if __name__ == "__main__":
    main()
