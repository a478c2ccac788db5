"""Safetensors files written and read piece by piece, so that no process holds more than it computes with.

The layout is the one of the safetensors documentation: eight bytes with the length of a JSON header, the header with dtype, shape and place
of every tensor, then their bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from rollkeel.errors import BadInput

CHUNK = 2**24
"""Bytes that are copied at one time."""
NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
}
"""What the format calls the dtypes that a model or its moments may have."""
DTYPES = {said: dtype for dtype, said in NAMES.items()}


class Entry(NamedTuple):
    """A tensor that a file is to hold."""

    name: str
    dtype: torch.dtype
    shape: Sequence[int]

    @property
    def bytes(self) -> int:
        return self.dtype.itemsize * int(np.prod(self.shape, dtype=np.int64))


def entries_of(tensors: Mapping[str, torch.Tensor]) -> list[Entry]:
    """All of them, wide numbers first, which keeps each where a reader can look at it in place."""
    entries = [Entry(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()]
    return sorted(entries, key=lambda entry: -entry.dtype.itemsize)


def write(
    path: Path, entries: Sequence[Entry], tensors: Iterable[torch.Tensor], about: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Write one file with `tensors`, which come one by one and are as `entries` say, durably. Returns its size and SHA-256.

    `about`: goes into the header. Extra memory: `CHUNK` bytes.
    """
    header: dict[str, Any] = {"__metadata__": dict(about)} if about else {}
    begin = 0
    for entry in entries:
        if entry.dtype not in NAMES:
            raise BadInput(
                f"tensor {entry.name}: {entry.dtype} has no name in the format of checkpoints; keep it as another"
            )
        end = begin + entry.bytes
        header[entry.name] = {
            "dtype": NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    most = max((entry.bytes for entry in entries), default=0)
    digest, buffer = hashlib.sha256(), torch.empty(min(CHUNK, most), dtype=torch.uint8)
    with path.open("wb") as stream:

        def put(data: Any) -> None:
            stream.write(data)
            digest.update(data)

        def put_tensor(tensor: torch.Tensor, entry: Entry) -> None:
            if (tensor.dtype, tuple(tensor.shape)) != (entry.dtype, tuple(entry.shape)):
                raise AssertionError(f"{entry.name}: announced as {entry}, came as {tensor.dtype} {list(tensor.shape)}")
            flat = tensor.detach().reshape(-1)
            for some in flat.split(CHUNK // entry.dtype.itemsize):
                # By way of a buffer: after `.numpy()` FSDP could no longer give a weight's memory back.
                data = buffer[: some.numel() * some.element_size()]
                data.view(entry.dtype).copy_(some)
                put(data.numpy().data)

        put(len(text).to_bytes(8, "little"))
        put(text)
        coming = iter(tensors)
        for entry in entries:
            put_tensor(next(coming), entry)  # nothing here holds a tensor while the next one is brought together
        stream.flush()
        os.fsync(stream.fileno())
        size = stream.tell()
    return {"size": size, "sha256": digest.hexdigest()}


def sha256(path: Path) -> str:
    """Of a file's bytes."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
