"""Tensors on disk in the parts that ranks hold, to be read on any other mesh.

    index.json               shape and dtype of every tensor, which box of it lies in which file, size and SHA-256 of the files, a digest
    part-00000.safetensors   what the first rank wrote
    part-00001.safetensors   …

Of ranks that hold the same, one writes it. A reader takes the boxes that it needs and no others.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open

from rollkeel.errors import Corrupt
from rollkeel.models.part_files import DTYPES, NAMES, Entry, write
from rollkeel.train.checkpoint import check_file, digest_of, read_manifest
from rollkeel.train.mesh import Mesh
from rollkeel.train.parts import Box

INDEX = "index.json"
FORMAT = 1


class Held(NamedTuple):
    """A tensor of which a part lies here."""

    part: torch.Tensor
    boxes: Sequence[Box]
    shape: tuple[int, ...]
    """Of the whole."""


class Saved(Protocol):
    """What a checkpoint has of a trainer."""

    about: dict[str, Any]
    """JSON values."""
    shapes: dict[str, tuple[int, ...]]
    """Of whole tensors, by name."""
    dtypes: dict[str, torch.dtype]

    def fill(self, name: str, boxes: Sequence[Box], part: torch.Tensor) -> None:
        """Write these boxes of a tensor into `part`."""
        ...


def save(folder: Path, mesh: Mesh, held: Mapping[str, Held], about: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Write what all ranks hold into the empty `folder`, each its own file. Collective.

    Returns size and SHA-256 of every file by name. Not atomic by itself: call it inside `checkpoint.save`. Raises `BadInput` on all
    ranks if one cannot write.
    """
    everyone = mesh.everyone({name: (_places(h), h.shape, NAMES[h.part.dtype]) for name, h in held.items()})
    file = f"part-{mesh.rank:05}.safetensors"
    entries = list[Entry]()
    tensors = list[torch.Tensor]()
    told: dict[str, dict[str, Any]] = {}
    for number, (name, h) in enumerate(held.items()):
        same = [
            rank for rank, theirs in enumerate(everyone) if name in theirs and theirs[name] == everyone[mesh.rank][name]
        ]
        if not h.boxes or same[number % len(same)] != mesh.rank:
            continue
        places = []
        for at, box in enumerate(h.boxes):
            entries.append(Entry(f"{name}#{at}", h.part.dtype, box.size))
            tensors.append(h.part[box.of_part] if box.size else h.part)
            places.append([file, f"{name}#{at}", list(box.start), list(box.size)])
        told[name] = {"shape": list(h.shape), "dtype": NAMES[h.part.dtype], "boxes": places}

    def own() -> tuple[dict[str, Any], dict[str, Any]]:
        folder.mkdir(parents=True, exist_ok=True)
        return {file: write(folder / file, entries, tensors)} if entries else {}, told

    files, index = dict[str, dict[str, Any]](), dict[str, dict[str, Any]]()
    for described, theirs in mesh.everyone(mesh.attempt(own, f"cannot write {folder}")):
        files |= described
        for name, entry in theirs.items():
            index.setdefault(name, {**entry, "boxes": []})["boxes"] += entry["boxes"]

    def finish() -> dict[str, Any]:
        return _write_index(folder, {"format": FORMAT, "about": dict(about), "files": files, "tensors": index})

    described = mesh.attempt(finish if mesh.rank == 0 else dict, f"cannot write {folder}")
    return files | mesh.everyone(described)[0]


def _places(held: Held) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(box.start, box.size) for box in held.boxes]


def _write_index(folder: Path, index: dict[str, Any]) -> dict[str, Any]:
    text = json.dumps({**index, "digest": digest_of(index)}).encode()
    with (folder / INDEX).open("wb") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    return {INDEX: {"size": len(text), "sha256": hashlib.sha256(text).hexdigest()}}


class Parts:
    """Implements `Saved` over a folder that `save` wrote."""

    def __init__(self, folder: Path, mesh: Mesh) -> None:
        """Collective: each rank checks some of the files. Raises `Corrupt` on all, naming the file that is missing or damaged."""
        self._folder, self._files = folder, dict[str, Any]()
        index: dict[str, Any] = mesh.attempt(lambda: _index(folder))
        self.about: dict[str, Any] = index["about"]
        self._tensors: dict[str, Any] = index["tensors"]
        self.shapes = {name: tuple[int, ...](entry["shape"]) for name, entry in self._tensors.items()}
        self.dtypes = {name: DTYPES[entry["dtype"]] for name, entry in self._tensors.items()}
        share = list(index["files"].items())[mesh.rank :: mesh.size]
        mesh.attempt(lambda: [check_file(folder, name, entry) for name, entry in share])

    def fill(self, name: str, boxes: Sequence[Box], part: torch.Tensor) -> None:
        stored_boxes: list[Any] = self._tensors[name]["boxes"]
        for box, (file, entry, start, size) in ((box, place) for box in boxes for place in stored_boxes):
            common = list(_common(box, start, size))
            if len(common) < len(size):
                continue
            try:
                if file not in self._files:
                    self._files[file] = safe_open(self._folder / file, framework="pt")
                stored = self._files[file]
                if not size:
                    part.copy_(stored.get_tensor(entry))
                    continue
                values = stored.get_slice(entry)[
                    tuple(slice(a - s, b - s) for (a, b), s in zip(common, start, strict=True))
                ]
            except (OSError, SafetensorError) as error:
                raise Corrupt(
                    f"checkpoint {self._folder}: {file} cannot be read: {' '.join(str(error).split())}"
                ) from None
            moved = zip(common, box.start, box.here, strict=True)
            part[tuple(slice(a - s + h, b - s + h) for (a, b), s, h in moved)] = values.to(part.dtype)


def _common(box: Box, start: Sequence[int], size: Sequence[int]) -> Iterator[tuple[int, int]]:
    """By dimension, what a box and one that was saved have in common; shorter if that is nothing."""
    for a, m, b, n in zip(box.start, box.size, start, size, strict=True):
        if max(a, b) >= min(a + m, b + n):
            return
        yield max(a, b), min(a + m, b + n)


def _index(folder: Path) -> dict[str, Any]:
    index = read_manifest(folder, INDEX, FORMAT)
    for name, entry in index["tensors"].items():
        if sum(math.prod(size) for *_, size in entry["boxes"]) != math.prod(entry["shape"]):
            raise Corrupt(f"checkpoint {folder}: {INDEX} has no files for all of {name}; use another checkpoint")
    return index
