"""A model's weights as the files of a Hugging Face folder, written one tensor at a time: `save_pretrained` first lays copies of all that share
memory beside the model, where it is, and its files are read once more for their checksums."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from rollkeel.models.part_files import Entry, write

FILE_BYTES = 5 * 10**9
"""Most bytes of a file, as long as no tensor has more."""


def write_weights(
    folder: Path, entries: Sequence[Entry], weights: Iterable[torch.Tensor], parameters: int
) -> dict[str, dict[str, Any]]:
    """Write `weights`, which come one by one as `entries` say, in as many files as it takes, with an index if those are several.

    `parameters`: of the whole model, for the index. Returns size and SHA-256 of the files by name.
    """
    files, places, written = list(_files(entries)), dict[str, str](), dict[str, dict[str, Any]]()
    coming = iter(weights)
    for number, some in enumerate(files, 1):
        file = "model.safetensors" if len(files) == 1 else f"model-{number:05}-of-{len(files):05}.safetensors"
        written[file] = write(folder / file, some, coming, {"format": "pt"})
        places |= {entry.name: file for entry in some}
    if len(files) > 1:
        sizes = {"total_parameters": parameters, "total_size": sum(e.bytes for e in entries)}
        index = json.dumps({"metadata": sizes, "weight_map": places}, indent=2, sort_keys=True) + "\n"
        (folder / "model.safetensors.index.json").write_text(index, encoding="utf-8")
    return written


def _files(entries: Sequence[Entry]) -> Iterator[list[Entry]]:
    some, size = list[Entry](), 0
    for entry in entries:
        if some and size + entry.bytes > FILE_BYTES:
            yield some
            some, size = [], 0
        some.append(entry)
        size += entry.bytes
    yield some
