"""The process of an engine actor: a thread that lives in the engine, and methods that pass it messages and weights."""

from __future__ import annotations

import os
import pickle
import threading
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from typing import Any, NamedTuple

import ray
import torch

from rollkeel.cluster import logs
from rollkeel.cluster.arriving import Bucket, Channel, Said, Weights
from rollkeel.cluster.line import Lines
from rollkeel.cluster.stream import Bytes, Layout
from rollkeel.config import EngineConfig
from rollkeel.engines.mirrored import Mirrored
from rollkeel.engines.open import open_engine
from rollkeel.engines.open_memory import OpenMemory
from rollkeel.engines.part import serve
from rollkeel.engines.shared_memory import AVAILABLE, OpenedFiles, Slot, opened, read
from rollkeel.errors import BadInput, RollkeelError
from rollkeel.host import collect_as_usual, keep_freed_memory
from rollkeel.models.forward import Zeros
from rollkeel.protocols import BoxedEngine, SteppedEngine

BEAT_S = 1.0
"""Longest silence of an actor that decodes on its own; a fifth of its deadline where that is shorter."""


class Beside(NamedTuple):
    """Of the model and the run, for an engine that takes whole updates."""

    shapes: Mapping[str, Sequence[int]]
    """Of all weights, by checkpoint name."""
    buffer_mb: float
    """`sync.buffer_mb`."""


class EngineActor:
    """One engine in a process of its own, in a thread that the methods pass messages to."""

    def __init__(
        self, hf_config: Any, config: EngineConfig, options: Mapping[str, Any], beside: Beside | None = None
    ) -> None:
        """`options`: of `open_engine`; `beside`: what an engine that is no embedded one needs more."""
        logs.write_there()
        self._channel = Channel(min(BEAT_S, config.deadline_s / 5))
        self._held, self._rings = dict[int, Any](), OpenedFiles[torch.Tensor]()
        self._lines: Lines | None = None
        self._next, self._order = 0, threading.Lock()
        arguments = (self._channel, hf_config, config, dict(options), beside)
        threading.Thread(target=_live, args=arguments, daemon=True, name="engine").start()

    def send(self, number: int, message: bytes) -> Said:
        """Message `number`, counted from 0; one that overtook another waits for it. Returns what was said up to its answer."""
        with self._order:
            self._held[number] = pickle.loads(message)
            while self._next in self._held:
                self._channel.inbox.put(self._held.pop(self._next))
                self._next += 1
        return self._channel.said(number)

    def take(self) -> Said:
        """Waits for something to be said. Nothing: the engine decodes, and lives."""
        return self._channel.said(None)

    def lives(self) -> None:
        """Answers at once, whatever the engine does."""

    def attach(self, path: str) -> tuple[str, str]:
        """Map a ring of a sender on this host; returns why it cannot be, or nothing, and where to tell of buckets by a `Line`."""
        try:
            self._rings.get_or(path, lambda: opened(path))
            with self._order:
                self._lines = self._lines or Lines(self._take)
        except OSError as error:
            return f"cannot open the memory of another process: {error.strerror or error}", ""
        return "", self._lines.address

    def bucket(self, attempt: int, layout: Layout, data: Bytes) -> str:
        """Write a bucket of publication `attempt`; returns why it was refused, or nothing."""
        return self._take(attempt, layout, data).result()

    def _take(self, attempt: int, layout: Layout, data: Bytes) -> Future[str]:
        if not isinstance(data, Slot):
            return self._channel.put(Bucket(attempt, layout, data))
        try:
            came = read(data, [(entry.dtype, entry.shape) for entry in layout], self._rings)
        except KeyError:
            unknown = Future[str]()
            unknown.set_result(f"weights: nothing is mapped from {data.path}")
            return unknown
        return self._channel.put(Bucket(attempt, layout, came))


def _live(
    channel: Channel, hf_config: Any, config: EngineConfig, options: dict[str, Any], beside: Beside | None
) -> None:
    """The thread of an actor's engine. Whatever ends it is the last thing that it says."""
    end = "was closed"
    try:
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # weights are only read from there
        keep_freed_memory()
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        node = ray.get_runtime_context().get_node_id() if ray.is_initialized() else ""
        channel.send(("here", (node, os.getpid()), 0))
        alone = options.get("offload", "none") != "none"
        memory = None if alone or not AVAILABLE else OpenMemory()
        zeros = memory.zeros if memory else torch.zeros
        with closing(_opened(hf_config, config, options, beside, zeros)) as engine:
            channel.weights = Weights(engine, memory)
            collect_as_usual()
            serve(engine, channel, channel.weights.act)
    except RollkeelError as error:
        channel.send(("error", error, 0))
        end = "ended with that error"
    except BaseException as error:
        logs.write_error()
        end = f"died of {type(error).__name__}: {error}".splitlines()[0]
    channel.send(("gone", end, 0))


def _opened(
    hf_config: Any, config: EngineConfig, options: Mapping[str, Any], beside: Beside | None, zeros: Zeros
) -> Any:
    """The engine, as one that takes weights in parts."""
    if config.kind == "local":
        return open_engine(hf_config, config, **options, zeros=zeros)
    assert beside is not None
    engine = open_engine(hf_config, config, **options, log_path=logs.beside("server"))
    if isinstance(engine, BoxedEngine):
        from rollkeel.sync.sending import WholeFeed

        engine.boxes.feed = WholeFeed(beside.buffer_mb)
    if not isinstance(engine, SteppedEngine):
        raise BadInput(
            f"engine.kind={config.kind}: over a cluster an engine needs advance and progress, see SteppedEngine"
        )
    return Mirrored(engine, beside.shapes, zeros)
