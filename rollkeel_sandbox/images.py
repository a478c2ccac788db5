"""Container images as roots for jobs: an OCI layout or what `docker save` writes, unpacked once into a cache under its digest.

Everything in an image is somebody else's: digests are checked, no path or link leads out of the root, no device and no set-uid bit is made,
and its size is bounded before anything is written.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from platform import machine
from typing import IO, Any

from rollkeel_sandbox.errors import BadInput
from rollkeel_sandbox.kinds import KINDS, STANDARD_PATH, MissingTool

MAX_BYTES, MAX_FILES, MAX_LINKS = 8 << 30, 1_000_000, 40
MAX_JSON = 8 << 20
MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
WHITEOUT, OPAQUE = ".wh.", ".wh..wh..opq"


class Damaged(BadInput):
    """The image is not what it says, or would reach beyond its root."""


class _Blobs:
    """Files of a layout: a folder or a tar."""

    def __init__(self, source: Path) -> None:
        if not source.exists():
            raise BadInput(f"{source}: no such image; expected an OCI layout or a tar that `docker save` wrote")
        self._source = source
        self._tar = None if source.is_dir() else tarfile.open(source)  # noqa: SIM115

    def open(self, name: str) -> IO[bytes]:
        if name.startswith("/") or ".." in name.split("/"):
            raise Damaged(f"{self._source}: {name[:80]!r} is outside of it")
        try:
            if self._tar is None:
                return open(self._source / name, "rb")
            file = self._tar.extractfile(name)
        except (KeyError, OSError):
            file = None
        if file is None:
            raise Damaged(f"{self._source}: has no {name[:120]}")
        return file

    def json(self, name: str, digest: str = "") -> Any:
        """`digest`: what its content must have."""
        with self.open(name) as file:
            text = file.read(MAX_JSON)
        if digest and f"sha256:{hashlib.sha256(text).hexdigest()}" != digest:
            raise Damaged(f"{self._source}: {name} is not what its digest says")
        return json.loads(text)

    def has(self, name: str) -> bool:
        try:
            self.open(name).close()
        except Damaged:
            return False
        return True


def unpack(source: Path, cache: Path | None = None, *, max_bytes: int = MAX_BYTES) -> Path:
    """The root of an image, from the cache if it is there. Raises `BadInput`."""
    try:
        blobs = _Blobs(source)
        digest, config, layers = _about(blobs)
        wanted = config["rootfs"]["diff_ids"]
        if len(wanted) != len(layers):
            raise Damaged(f"{source}: {len(layers)} layers, and digests of {len(wanted)}")
        home = cache or Path(os.environ.get("ROLLKEEL_CACHE") or Path.home() / ".cache" / "rollkeel") / "images"
        root = home / digest.replace(":", "-")
        if root.is_dir():
            return root
        home.mkdir(parents=True, exist_ok=True, mode=0o755)
        made = Path(tempfile.mkdtemp(prefix="unpacking-", dir=home))
        try:
            made.chmod(0o755)
            left = max_bytes
            for name, diff in zip(layers, wanted, strict=True):
                with blobs.open(name) as file:
                    left -= _Layer(made, diff, left).take(file)
            made.rename(root)
        except OSError:
            if not root.is_dir():  # else somebody else was faster
                raise
        finally:
            shutil.rmtree(made, ignore_errors=True)
        return root
    except (
        OSError,
        EOFError,
        zlib.error,
        tarfile.TarError,
        ValueError,
        KeyError,
        TypeError,
        IndexError,
        AttributeError,
        RecursionError,
    ) as error:
        raise Damaged(f"{source}: no image that can be read ({type(error).__name__}: {error})") from None


def _about(blobs: _Blobs) -> tuple[str, Mapping[str, Any], list[str]]:
    """Digest of the configuration, which names those of the layers; the configuration; files of the layers."""
    if blobs.has("index.json"):
        manifest = blobs.json("index.json")
        while "layers" not in manifest:  # it is a list, of machines perhaps
            ours = [
                m for m in manifest["manifests"] if m.get("platform", {}).get("architecture") == MACHINES.get(machine())
            ]
            digest = (ours or manifest["manifests"])[0]["digest"]
            manifest = blobs.json(_blob(digest), digest)
        digest = manifest["config"]["digest"]
        return digest, blobs.json(_blob(digest), digest), [_blob(layer["digest"]) for layer in manifest["layers"]]
    (manifest,) = blobs.json("manifest.json")
    digest = "sha256:" + manifest["Config"].rsplit("/", 1)[-1].removesuffix(".json")
    return digest, blobs.json(manifest["Config"], digest), manifest["Layers"]


def _blob(digest: str) -> str:
    kind, _, name = digest.partition(":")
    if kind != "sha256" or len(name) != 64 or not name.isalnum():
        raise Damaged(f"image: digest {digest[:80]!r}: expected sha256")
    return f"blobs/sha256/{name}"


class _Counted(io.RawIOBase):
    """What is read is hashed and counted."""

    def __init__(self, file: Any, most: int) -> None:
        self._file = file
        self._left = most
        self.hash = hashlib.sha256()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(len(buffer))
        self._left -= len(data)
        if self._left < 0:
            raise Damaged("image: it is over the largest size")
        self.hash.update(data)
        buffer[: len(data)] = data
        return len(data)


class _Layer:
    """One layer, put over what is in `root`."""

    def __init__(self, root: Path, diff: str, most: int) -> None:
        self._root = str(root)
        self._diff = diff
        self._most = most
        self._mine: set[str] = set()
        """Made by this layer: what hides everything below it spares them."""

    def take(self, file: IO[bytes]) -> int:
        """Bytes of it, unpacked."""
        magic = file.read(4)
        file.seek(0)
        if magic == b"\x28\xb5\x2f\xfd":
            raise Damaged("image: a layer is compressed with zstd; save it with gzip")
        # A tar has more in it than its files: a block for each, and padding.
        stream = _Counted(
            gzip.GzipFile(fileobj=file) if magic[:2] == b"\x1f\x8b" else file,
            self._most + (self._most >> 3) + (1 << 20),
        )
        size = count = 0
        with tarfile.open(fileobj=stream, mode="r|", bufsize=1 << 16) as tar:  # type: ignore[call-overload]
            for member in tar:
                size, count = size + member.size, count + 1
                if size > self._most or count > MAX_FILES:
                    raise Damaged("image: it is over the largest size")
                self._put(tar, member)
        while stream.read(1 << 20):
            pass
        if f"sha256:{stream.hash.hexdigest()}" != self._diff:
            raise Damaged("image: a layer is not what its digest says")
        return size

    def _put(self, tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        parts = _parts(member.name)
        if not parts:
            return
        folder, name = self._inside(parts[:-1], make=True), parts[-1]
        path = os.path.join(folder, name)
        if name == OPAQUE:
            for entry in os.listdir(folder):
                self._remove(os.path.join(folder, entry))
            return
        if name.startswith(WHITEOUT):
            hidden = name.removeprefix(WHITEOUT)
            if hidden in ("", ".", ".."):
                raise Damaged(f"image: {member.name[:120]!r} hides nothing that can be")
            self._remove(os.path.join(folder, hidden))
            return
        if not (member.isdir() and os.path.isdir(path) and not os.path.islink(path)):
            self._clear(path)
        if member.isdir():
            os.makedirs(path, exist_ok=True)
            os.chmod(path, member.mode & 0o777 | 0o700)
        elif member.issym():
            os.symlink(member.linkname, path)
        elif member.islnk():
            *above, last = _parts(member.linkname) or [""]
            source = os.path.join(self._inside(above), last)
            if not os.path.isfile(source) or os.path.islink(source):
                raise Damaged(f"image: {member.name[:120]!r} is a link to no file of it")
            os.link(source, path)
        elif member.isfile():
            content = tar.extractfile(member)
            assert content is not None
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb") as out:
                shutil.copyfileobj(content, out, 1 << 20)
                os.fchmod(out.fileno(), member.mode & 0o777)
        else:
            return  # devices and pipes
        while len(path) > len(self._root) and path not in self._mine:
            self._mine.add(path)
            path = os.path.dirname(path)

    def _inside(self, parts: list[str], *, make: bool = False) -> str:
        """A folder of the image, its links followed as from inside of it. Nobody else writes there meanwhile."""
        at = [self._root]
        ahead = list(reversed(parts))
        links = 0
        while ahead:
            part = ahead.pop()
            if part == "..":
                at = at[:-1] or at
                continue
            path = os.path.join(*at, part)
            if os.path.islink(path):
                links += 1
                if links > MAX_LINKS:
                    raise Damaged(f"image: too many links at {'/'.join(parts)[:120]!r}")
                target = os.readlink(path)
                at = at[:1] if target.startswith("/") else at
                ahead += [p for p in reversed(target.split("/")) if p not in ("", ".")]
                continue
            if not os.path.isdir(path):
                if os.path.lexists(path) or not make:
                    raise Damaged(f"image: {'/'.join(parts)[:120]!r} is no folder of it")
                os.mkdir(path)
                os.chmod(path, 0o755)  # whatever the caller's umask
                self._mine.add(path)
            at.append(part)
        return os.path.join(*at)

    def _remove(self, path: str) -> None:
        """Of a layer below."""
        if path not in self._mine:
            self._clear(path)
        elif os.path.isdir(path) and not os.path.islink(path):
            for entry in os.listdir(path):
                self._remove(os.path.join(path, entry))

    def _clear(self, path: str) -> None:
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        elif os.path.lexists(path):
            os.unlink(path)


def _parts(name: str) -> list[str]:
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts or "\0" in name:
        raise Damaged(f"image: {name[:120]!r} leads out of it")
    return parts


def require(root: Path, kind: str) -> None:
    """Raise `MissingTool` when the image has not what programs of this kind need."""
    for tool in KINDS[kind].tools:
        if not any(os.path.lexists(f"{root}{folder}/{tool}") for folder in STANDARD_PATH.split(":")):
            raise MissingTool(f"sandbox: {kind} programs need {tool}, which the image {root.name[:19]} has not")
