"""From the config's `engine` section to an engine."""

from __future__ import annotations

from typing import Any

import torch

from rollkeel.config import EngineConfig
from rollkeel.engines.local import LocalEngine
from rollkeel.engines.workers import WorkerEngine
from rollkeel.protocols import Engine


def open_engine(
    hf_config: Any, config: EngineConfig, device: torch.device | str, max_length: int | None = None
) -> Engine:
    """An engine for the architecture `hf_config`; it serves nothing until weights are published."""
    if config.processes > 0:
        return WorkerEngine(hf_config, config, device=device, max_length=max_length)
    return LocalEngine(hf_config, config, device=device, max_length=max_length)
