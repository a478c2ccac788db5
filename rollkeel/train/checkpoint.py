"""Checkpoints that are whole or absent, and that are checked before anything is loaded from them.

A save goes to `.tmp-…`, is fsynced, gets a `manifest.json` with size and SHA-256 of every file, and is renamed to
`step_000012`. A process killed at any moment leaves either the old set of checkpoints or the new one.
"""

from __future__ import annotations

import filecmp
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollkeel.errors import BadInput, Corrupt
from rollkeel.events import EventLog
from rollkeel.host import versions
from rollkeel.train.state import check_shapes, load_state, save_state

__all__ = [
    "Checkpoint",
    "Written",
    "beneath",
    "check_shapes",
    "clean",
    "drop_after",
    "latest",
    "listing",
    "load_state",
    "replace_folder",
    "same_files",
    "save",
    "save_state",
    "save_state_of",
    "step_name",
    "verify",
    "versions",
]

Written = Mapping[str, Mapping[str, Any]] | None
"""Size and SHA-256 of files by their path in the folder, as far as the writer knows them."""
MANIFEST = "manifest.json"
CARD = "README.md"
"""Of a final model: what people read of it, no part of what was trained."""
TRAINER = "trainer"
FORMAT = 1
_NAME = re.compile(r"step_(\d{6,})")
_ASIDE = re.compile(r"\.old-(step_\d{6,})")
_BLOCK = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint whose every byte agreed with its manifest when it was opened."""

    path: Path
    step: int
    info: Mapping[str, Any]
    """What the saver had to say, JSON values only."""
    versions: Mapping[str, str]
    """Package versions at the time of saving."""

    @property
    def model(self) -> Path:
        """Folder in Hugging Face format."""
        return self.path / "model"

    @property
    def state(self) -> Path:
        """Folder written by `save_state`."""
        return self.path / "state"

    @property
    def trainer(self) -> Path:
        """Folder of a trainer's parts, if several ranks wrote it."""
        return self.path / TRAINER


def step_name(step: int) -> str:
    """`step_000012`."""
    return f"step_{step:06d}"


def save(
    folder: str | Path, step: int, *, write: Callable[[Path], Written], info: Mapping[str, Any], keep: int = 2
) -> Checkpoint:
    """Write `folder/step_…` through `write(empty folder)`, atomically, then drop all but the last `keep` up to `step`.

    `folder` is the run's `checkpoints/`. An existing checkpoint of the same step is replaced. `info` must be JSON values.
    What `write` returns of files, it has read already: they are not read again for the manifest.
    Raises `BadInput` (one line) when the disk is full or the folder cannot be written; the old checkpoints stay and
    nothing half-written is left.
    """
    if keep < 1:
        raise BadInput(f"checkpoint.keep: expected at least 1, got {keep}")
    target = Path(folder) / step_name(step)
    manifest: dict[str, Any] = {}

    def fill(path: Path) -> None:
        known = write(path) or {}
        manifest.update(format=FORMAT, step=step, info=dict(info), versions=versions(), files=_describe(path, known))
        manifest["digest"] = digest_of(manifest)
        (path / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")

    replace_folder(target, fill)
    for _, old in [entry for entry in listing(folder) if entry[0] <= step][:-keep]:
        _discard(old)
    return Checkpoint(path=target, step=step, info=dict(info), versions=manifest["versions"])


def beneath(folder: str, written: Written) -> dict[str, Mapping[str, Any]]:
    """What is known of files in the `folder` of a checkpoint, by their path in the checkpoint."""
    return {f"{folder}/{name}": about for name, about in (written or {}).items()}


def save_state_of(path: Path, tree: Any) -> dict[str, Mapping[str, Any]]:
    """`save_state` into the `state` folder of the checkpoint `path`. Returns what is known of its files."""
    return beneath("state", save_state(path / "state", tree))


def replace_folder(target: str | Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill an empty folder, make it durable, and put it at `target` in one step.

    A reader sees the old folder or the new one; after a crash between the two renames `clean` puts the old one back.
    Raises `BadInput` when it cannot be written; nothing half-written is left behind.
    """
    target = Path(target)
    temporary = target.with_name(f".tmp-{target.name}-{os.getpid()}")
    aside = target.with_name(f".old-{target.name}")
    try:
        temporary.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        write(temporary)
        _share_as(temporary)
        _fsync_tree(temporary)
        if target.exists():
            shutil.rmtree(aside, ignore_errors=True)
            os.rename(target, aside)
        os.rename(temporary, target)
        _fsync(target.parent)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if aside.exists() and not target.exists():
            os.rename(aside, target)
        if _is_disk_error(error):
            reason = getattr(error, "strerror", None) or " ".join(str(error).split())
            raise BadInput(f"cannot write {target}: {reason}; free space or choose another folder") from None
        raise
    shutil.rmtree(aside, ignore_errors=True)


def same_files(one: Path, other: Path) -> bool:
    """True if two flat folders have the same files, byte for byte, but for the card of `other`."""
    names = sorted(path.name for path in one.iterdir())
    if not other.is_dir() or sorted(path.name for path in other.iterdir() if path.name != CARD) != names:
        return False
    return filecmp.cmpfiles(one, other, names, shallow=False)[0] == names


def listing(folder: str | Path) -> list[tuple[int, Path]]:
    """`(step, path)` of every folder with a checkpoint's name, by step; unchecked. Empty if `folder` is missing."""
    folder = Path(folder)
    if not folder.is_dir():
        return []
    matches = ((_NAME.fullmatch(path.name), path) for path in folder.iterdir() if path.is_dir())
    return sorted((int(match[1]), path) for match, path in matches if match)


def clean(folder: str | Path) -> list[str]:
    """Remove what killed saves left in `folder` and return its names. Only the process that owns the run may call it."""
    folder = Path(folder)
    removed = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        aside = _ASIDE.fullmatch(path.name)
        if aside and not (folder / aside[1]).exists():
            os.rename(path, folder / aside[1])
        elif aside or path.name.startswith((".tmp-", ".drop-")):
            shutil.rmtree(path)
            removed.append(path.name)
    return removed


def drop_after(folder: str | Path, step: int) -> list[str]:
    """Remove checkpoints later than `step` and return their names.

    Call it when a run goes on from `step`: otherwise a later checkpoint, of a history that no longer exists,
    would be taken by the next resume.
    """
    later = [path for at, path in listing(folder) if at > step]
    for path in later:
        _discard(path)
    return [path.name for path in later]


def latest(
    folder: str | Path, *, on_refused: Callable[[str], None] | None = None, events: EventLog | None = None
) -> Checkpoint | None:
    """The newest checkpoint that is whole; None if there is none.

    Each damaged one on the way is refused by name: `on_refused(message)` and an event `checkpoint_refused`.
    Raises `Corrupt` if there are checkpoints and all of them are damaged.
    """
    refused: list[str] = []
    for step, path in reversed(listing(folder)):
        try:
            return verify(path)
        except Corrupt as error:
            refused.append(path.name)
            if events is not None:
                events.emit("checkpoint_refused", step=step, path=path.name, reason=str(error))
            if on_refused is not None:
                on_refused(str(error))
    if refused:
        raise Corrupt(f"{folder}: every checkpoint is damaged ({', '.join(refused)}); delete them to start over")
    return None


def verify(path: str | Path) -> Checkpoint:
    """Check every file of a checkpoint against its manifest.

    Raises `BadInput` if there is no such folder, `Corrupt` naming the first file that is missing, short or changed.
    """
    path = Path(path)
    if not path.is_dir():
        raise BadInput(f"checkpoint {path}: no such folder")
    manifest = read_manifest(path)
    for name, entry in manifest["files"].items():
        check_file(path, name, entry)
    return Checkpoint(path=path, step=manifest["step"], info=manifest["info"], versions=manifest["versions"])


def check_file(path: Path, name: str, entry: Mapping[str, Any]) -> None:
    """Raises `Corrupt` unless the file `name` of the checkpoint `path` has the size and SHA-256 of `entry`."""
    file = path / name
    if not file.is_file():
        raise Corrupt(f"checkpoint {path}: {name} is missing; use another checkpoint")
    size = file.stat().st_size
    if size != entry["size"]:
        raise Corrupt(f"checkpoint {path}: {name} has {size} bytes instead of {entry['size']}; use another")
    if _sha256(file) != entry["sha256"]:
        raise Corrupt(f"checkpoint {path}: {name} does not match its checksum; use another checkpoint")


def read_manifest(path: Path, name: str = MANIFEST, form: int = FORMAT) -> dict[str, Any]:
    """The JSON file `name` of a checkpoint, which has the digest of itself. Raises `Corrupt` for damage, `BadInput` for another format."""
    try:
        manifest = json.loads((path / name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise Corrupt(f"checkpoint {path}: {name} is missing; use another checkpoint") from None
    except (ValueError, OSError) as error:
        raise Corrupt(f"checkpoint {path}: {name} cannot be read ({type(error).__name__}); use another") from None
    if not isinstance(manifest, dict) or manifest.get("digest") != digest_of(manifest):
        raise Corrupt(f"checkpoint {path}: {name} does not match its checksum; use another checkpoint")
    if manifest.get("format") != form:
        raise BadInput(f"checkpoint {path}: expected format {form}, got {manifest.get('format')}; upgrade rollkeel")
    return manifest


def digest_of(manifest: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in manifest.items() if key != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _describe(folder: Path, known: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    out = {}
    for file in _files(folder):
        name, size = file.relative_to(folder).as_posix(), file.stat().st_size
        told = known.get(name)
        if told is not None and told["size"] != size:
            raise BadInput(
                f"cannot write {file}: it has {size} bytes instead of {told['size']}; is the storage shared?"
            )
        out[name] = {"size": size, "sha256": _sha256(file) if told is None else told["sha256"]}
    return out


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _discard(path: Path) -> None:
    """Delete a checkpoint; renamed first, so that a kill in between does not leave half of one under its name."""
    dropped = path.with_name(f".drop-{path.name}-{os.getpid()}")
    os.rename(path, dropped)
    shutil.rmtree(dropped, ignore_errors=True)


def _share_as(folder: Path) -> None:
    """Give every file the readers that the new `folder` has by umask: safetensors writes for its owner alone."""
    for path in _files(folder):
        path.chmod(folder.stat().st_mode & 0o666)


def _fsync_tree(folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        _fsync(path)
    _fsync(folder)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_disk_error(error: BaseException) -> bool:
    # safetensors reports a full disk as its own error class, not as an OSError.
    return isinstance(error, OSError) or type(error).__name__ == "SafetensorError"
