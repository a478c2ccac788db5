"""A weight update as a Hugging Face folder that an inference server can load: config and safetensors files."""

from __future__ import annotations

import copy
import json
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rollkeel.errors import BadInput, EngineFailure
from rollkeel.models.checksum import tensor_checksum
from rollkeel.types import WeightSlice, WeightUpdate

FILE_BYTES = 2 * 2**30
LEAST = 2**30
"""Bytes of shared memory with which it is used; many containers have 64 MB."""


def scratch_folder() -> Path:
    """A new folder in shared memory where there is some, else among temporary files."""
    shared = Path("/dev/shm")
    there = shared.is_dir() and os.access(shared, os.W_OK) and shutil.disk_usage(shared).free >= LEAST
    place = shared if there else None
    return Path(tempfile.mkdtemp(prefix="rollkeel-server-", dir=place))


def write_weights(update: WeightUpdate, hf_config: Any, folder: Path) -> None:
    """Write `update` and the architecture to the new `folder`.

    Raises `EngineFailure` for an update that is not full, a slice whose bytes do not match its checksum, or a full disk.
    """
    if update.kind != "full":
        raise EngineFailure(f"weight update {update.version}: a server takes full updates, got {update.kind!r}")
    try:
        folder.mkdir()
        _named(hf_config).save_pretrained(str(folder))
        places: dict[str, str] = {}
        for number, tensors in enumerate(_files(update), 1):
            file = f"model-{number:05d}.safetensors"
            save_file(tensors, folder / file, {"format": "pt"})
            places |= dict.fromkeys(tensors, file)
        if len(set(places.values())) == 1:
            (folder / "model-00001.safetensors").rename(folder / "model.safetensors")
        else:
            index = {"metadata": {}, "weight_map": places}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    except EngineFailure:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise EngineFailure(
            f"weight update {update.version}: cannot write {folder}: {error.strerror or error}; free some space"
        ) from None


def _named(hf_config: Any) -> Any:
    """The config with its architecture's class, which transformers leaves out until a model is saved."""
    config = copy.deepcopy(hf_config)
    if not config.architectures:
        name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
        if name is None:
            raise BadInput(f"model type {config.model_type}: no causal language model of this name is known to servers")
        config.architectures = [name]
    return config


def _files(update: WeightUpdate) -> Iterable[dict[str, torch.Tensor]]:
    tensors: dict[str, torch.Tensor] = {}
    size = 0
    for piece in update.slices:
        if piece.offset or piece.name in tensors:
            raise EngineFailure(
                f"weight update {update.version}: a server takes whole tensors, got a part of {piece.name}"
            )
        tensors[piece.name] = _verified(piece, update.version)
        size += piece.tensor.numel() * piece.tensor.element_size()
        if size >= FILE_BYTES:
            yield tensors
            tensors, size = {}, 0
    if tensors:
        yield tensors


def _verified(piece: WeightSlice, version: int) -> torch.Tensor:
    """The slice's own bytes on the CPU: `save_file` refuses tensors that share memory."""
    tensor = piece.tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    if tensor_checksum(piece.name, tensor) != piece.checksum:
        raise EngineFailure(f"weight update {version}: {piece.name} arrived with a wrong checksum")
    return tensor
