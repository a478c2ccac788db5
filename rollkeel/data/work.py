"""The folder in which unfinished work lies: whose it is, what is done, and what it came to."""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import rollkeel
from rollkeel.data.contamination import benchmark_files
from rollkeel.data.difficulty import rollout_files
from rollkeel.data.options import CleanOptions
from rollkeel.errors import BadInput
from rollkeel.events import write_atomic
from rollkeel.tasks.data import REPORT

MANIFEST = "manifest.json"
LATER: Any = {
    "malformed": {"share"}, "harmful": {"failures"}, "near": {"threshold"}, "exact": True, "mix": True, "part_rows": True,
}  # fmt: skip
"""Options that are looked at when all chunks are done: they may change between two attempts."""


@contextmanager
def opened(out: Path, manifest: dict[str, Any]) -> Iterator[Path]:
    """The work folder of `out`, new or one that was left by a run of the same manifest; nobody else has it meanwhile.

    Raises `BadInput` for a finished or foreign folder, for another manifest, naming what differs, and for one in use.
    """
    work = out / "work"
    if (out / REPORT).exists():
        shutil.rmtree(work, ignore_errors=True)  # of a run that was ended between its last two steps
        raise BadInput(f"{out}: already finished; choose another --out or remove it")
    if out.exists() and not (work / MANIFEST).exists() and any(p != work for p in out.iterdir()):
        raise BadInput(f"{out}: holds other files; choose a new or unfinished folder as --out")
    try:
        work.mkdir(parents=True, exist_ok=True)
        lock = (work / "lock").open("w")
    except OSError as error:
        raise BadInput(f"cannot write {work}: {error.strerror or error}; choose another --out") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BadInput(f"{out}: another process works on it; wait for it or choose another --out") from None
        _same(work, manifest)
        for left in [*work.glob("*.tmp"), *out.glob("*.tmp")]:
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        yield work


def _same(work: Path, manifest: dict[str, Any]) -> None:
    path = work / MANIFEST
    if path.exists():
        before = json.loads(path.read_text(encoding="utf-8"))
        if differ := [key for key in manifest if before.get(key) != manifest[key]]:
            raise BadInput(
                f"{work.parent}: unfinished work of other {', '.join(differ)}; run it as it was, choose another --out or remove it"
            )
    else:
        write_atomic(path, json.dumps(manifest, indent=1))


def manifest_of(files: Sequence[Path], options: CleanOptions) -> tuple[dict[str, Any], int | None]:
    """Everything that the work on chunks depends on, and the number of input lines and rows if it is known without unpacking."""
    digests, rows = {}, 0
    for file in files:
        digests[str(file)], lines = _digest(file)
        rows = None if rows is None or lines is None else rows + lines
    named = [file for file, _ in benchmark_files(options.decontaminate.benchmarks)] + rollout_files(options.pass_rate)
    if options.harmful.keywords is not None and Path(options.harmful.keywords).is_file():
        named.append(Path(options.harmful.keywords))
    return {
        "inputs": digests,
        "options": options.model_dump(mode="json", exclude=LATER),
        "files named in options": {str(file): _digest(file)[0] for file in named},
        "versions": [rollkeel.__version__, np.__version__, pa.__version__, unicodedata.unidata_version],
    }, rows


def _digest(file: Path) -> tuple[str, int | None]:
    """Hash of a file's bytes, and its lines or rows."""
    try:
        hasher, lines = hashlib.blake2b(digest_size=16), 0
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                hasher.update(block)
                lines += block.count(b"\n")
        if file.name.endswith(".parquet"):
            lines = pq.read_metadata(file).num_rows
    except (OSError, pa.ArrowException) as error:
        raise BadInput(f"{file}: cannot be read: {' '.join(str(error).split())[:200]}") from None
    return hasher.hexdigest(), None if file.name.endswith(".gz") else lines
