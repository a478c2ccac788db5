"""From the config's `engine` section to an engine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

import rollkeel
from rollkeel import plugins
from rollkeel.config import EngineConfig, LoraConfig
from rollkeel.engines.kv import KV_GB, KV_SHARE
from rollkeel.engines.local import LocalEngine
from rollkeel.errors import BadInput
from rollkeel.models.forward import Zeros
from rollkeel.protocols import Engine
from rollkeel.types import SamplingParams

LEFT, CONTEXTS = 0.8, 0.06
"""Share of what a run leaves of a GPU that KV takes; and what contexts and fragments take of it."""
_FOUND = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"
_LOOK_S = 60.0
CONNECT_S = 5.0
OWN = "hf_config, engine config, device, max_length"
"""What an engine of one's own is made of; `max_length` may be None."""
NO_ADAPTERS = (
    "engine.kind={kind}: adapters are served by the embedded engine alone; set engine.kind=local or train.lora.rank=0"
)


def open_engine(
    hf_config: Any,
    config: EngineConfig,
    device: torch.device | str,
    max_length: int | None = None,
    log_path: Path | None = None,
    lora: LoraConfig | None = None,
    planned: int | None = None,
    others: bool = False,
    pauses: bool = False,
    offload: str = "none",
    zeros: Zeros = torch.zeros,
) -> Engine:
    """An engine for the architecture `hf_config`; it serves nothing until weights are published.

    `planned`: bytes of `device` that a trainer holds while a server samples there, or a run beside the KV of an embedded engine; `others`:
    other processes hold some of that; `pauses`: whether it trains only while nothing is sampled. `offload`: what the embedded engine drops meanwhile, nothing, its KV (`optimizer`), or its weights too (`all`).
    `lora`: of the adapters it is to serve, which the embedded engine alone does. `zeros`: makes the weights of an embedded engine that
    drops nothing. `log_path`: where an inference server's output goes. Raises `BadInput` for a server that is not installed.
    """
    if lora is not None and config.kind != "local":
        raise BadInput(NO_ADAPTERS.format(kind=config.kind))
    if plugins.is_own(config.kind):
        return plugins.made(config.kind, "engine.kind", OWN, Engine, hf_config, config, device, max_length)
    if config.kind == "vllm":
        from rollkeel.engines.same_device import can_sleep
        from rollkeel.engines.served import ServedEngine
        from rollkeel.engines.vllm import VllmBackend

        python = sys.executable if config.server.url else server_python(config)
        return ServedEngine(
            hf_config,
            config,
            VllmBackend(),
            device=str(device),
            max_length=max_length,
            python=python,
            log_path=log_path,
            planned=planned or 0,
            sleeps=pauses and can_sleep(config, str(device)),
        )
    if planned is not None and config.kv_memory_gb is None and torch.device(device).type == "cuda":
        room = left_gb(torch.device(device), planned, others) / max(1, config.processes)
        config = config.model_copy(update={"kv_memory_gb": room})
    if config.processes > 0:
        from rollkeel.engines.workers import WorkerEngine

        return WorkerEngine(hf_config, config, device=device, max_length=max_length, lora=lora)
    if offload != "none":
        from rollkeel.engines.resting import RestingLocal

        weights = offload == "all"
        return RestingLocal(hf_config, config, device=device, max_length=max_length, lora=lora, weights=weights)
    return LocalEngine(hf_config, config, device=device, max_length=max_length, lora=lora, zeros=zeros)


def left_gb(device: torch.device, planned: int, others: bool = False) -> float:
    """GiB for KV on a GPU of which a run takes `planned` bytes beside it, with what this process holds already. `others`: the run's
    other processes hold some of those, now or soon, and nobody else uses the GPU."""
    free, total = torch.cuda.mem_get_info(device)
    if others:
        free = total
    else:
        free += torch.cuda.memory_reserved(device)  # a warm start leaves much that is reserved and not in use
    left = free - max(planned, torch.cuda.memory_allocated(device)) - CONTEXTS * total
    return max(LEFT * left, min(KV_GB * 2**30, KV_SHARE * free)) / 2**30


def check_engine(config: EngineConfig, sampling: SamplingParams) -> None:
    """Refuse early what an inference server cannot do. Raises `BadInput`; the embedded engine is not checked."""
    if plugins.is_own(config.kind):
        plugins.maker(config.kind, "engine.kind", OWN)
    if config.kind != "vllm":
        return
    from rollkeel.engines.vllm import VllmBackend

    backend = VllmBackend()
    backend.check(config.dtype)
    if complaint := backend.objection(sampling):
        raise BadInput(complaint)
    if config.server.url is None:
        server_python(config)
    else:
        _reach(config.server.url)


def _reach(url: str) -> None:
    """Raises `BadInput` unless something listens at `url`: what is wrong with an address is known in seconds."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or {"http": 80, "https": 443}[parts.scheme]
        if not host:
            raise ValueError
    except (ValueError, KeyError):
        raise BadInput(f"engine.server.url: expected http://host:port, got {url!r}") from None
    try:
        socket.create_connection((host, port), CONNECT_S).close()
    except OSError as error:
        raise BadInput(
            f"engine.server.url: nothing listens at {url} ({error.strerror or error}); start the server first, or set it to"
            " null and one is started"
        ) from None


def server_python(config: EngineConfig) -> str:
    """Interpreter that has the server of `engine.kind` installed. Raises `BadInput` if none has."""
    kind = config.kind
    python = os.environ.get("ROLLKEEL_SERVER_PYTHON")
    if python is None:
        places = (Path.cwd(), Path(rollkeel.__file__).resolve().parent.parent)
        own = [place / f".venv-{kind}" / "bin" / "python" for place in places]
        python = next((str(path) for path in own if path.is_file()), sys.executable)
    try:
        installed = (
            subprocess.run([python, "-I", "-c", _FOUND, kind], timeout=_LOOK_S, capture_output=True).returncode == 0
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BadInput(f"engine.kind={kind}: cannot run {python}: {error}") from None
    if not installed:
        raise BadInput(
            f"engine.kind={kind}: {python} has no package {kind}; install it into .venv-{kind} (for vllm on a CPU:"
            " `make .venv-vllm/.done`), or name an interpreter that has it in ROLLKEEL_SERVER_PYTHON, or set engine.server.url"
        )
    return python
