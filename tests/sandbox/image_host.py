"""Container images made here: of a few files, or so that a program runs in them."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import re
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

Member = tuple[str, str, bytes | str]
"""Name, type (`file`, `dir`, `link`, `hard`, `device`), content or target."""
TYPES = {
    "file": tarfile.REGTYPE,
    "dir": tarfile.DIRTYPE,
    "link": tarfile.SYMTYPE,
    "hard": tarfile.LNKTYPE,
    "device": tarfile.CHRTYPE,
}


def layer(members: Sequence[Member], modes: Mapping[str, int] | None = None) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, kind, content in members:
            info = tarfile.TarInfo(name)
            info.type, info.mode = TYPES[kind], (modes or {}).get(name, 0o755)
            if isinstance(content, str):
                info.linkname = content
            else:
                info.size = len(content)
            tar.addfile(info, io.BytesIO(content) if isinstance(content, bytes) else None)
    return out.getvalue()


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def oci(folder: Path, layers: Sequence[bytes], *, zipped: bool = True, diff_ids: Sequence[str] | None = None) -> Path:
    """An OCI layout."""
    blobs = folder / "blobs" / "sha256"
    blobs.mkdir(parents=True)

    def blob(data: bytes) -> dict[str, object]:
        (blobs / digest(data)).write_bytes(data)
        return {"digest": f"sha256:{digest(data)}", "size": len(data)}

    rows = [blob(gzip.compress(data) if zipped else data) for data in layers]
    ids = diff_ids or [f"sha256:{digest(data)}" for data in layers]
    config = blob(json.dumps({"rootfs": {"type": "layers", "diff_ids": ids}}).encode())
    manifest = blob(json.dumps({"schemaVersion": 2, "config": config, "layers": rows}).encode())
    (folder / "index.json").write_text(json.dumps({"manifests": [manifest]}))
    return folder


def docker_save(path: Path, layers: Sequence[bytes]) -> Path:
    config = json.dumps({"rootfs": {"diff_ids": [f"sha256:{digest(data)}" for data in layers]}}).encode()
    files = {f"{i}/layer.tar": data for i, data in enumerate(layers)} | {f"{digest(config)}.json": config}
    rows = [{"Config": f"{digest(config)}.json", "Layers": [f"{i}/layer.tar" for i in range(len(layers))]}]
    files["manifest.json"] = json.dumps(rows).encode()
    path.write_bytes(layer([(name, "file", data) for name, data in files.items()]))
    return path


def with_shell(marker: str) -> bytes:
    """A layer in which `sh` runs, copied from this machine with its libraries, and nothing else but `/marker`."""
    said = subprocess.run(["ldd", "/bin/sh"], capture_output=True, text=True, check=True).stdout
    members: list[Member] = [("bin/sh", "file", Path("/bin/sh").read_bytes()), ("marker", "file", marker.encode())]
    for path in re.findall(r"(/\S+) \(0x", said):
        members.append((path[1:], "file", Path(path).read_bytes()))
    return layer(members)
