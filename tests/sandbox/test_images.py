"""An image comes from a registry: what it holds may want to be written elsewhere, to fill the disk, or to be another than it says.

Images are made here (image_host.py). Not covered: zstd layers, which are refused; what a foreign libc does to this Python's own modules.
"""

from __future__ import annotations

import gzip
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from image_host import Member, digest, docker_save, layer, oci, with_shell

from rollkeel_sandbox import Job, Level, MissingTool, Sandbox, Status, Terminal, probe
from rollkeel_sandbox.errors import BadInput
from rollkeel_sandbox.images import unpack

CONFINED = pytest.mark.skipif(probe().plan().level < Level.NAMESPACES, reason="namespaces do not hold here")


def tree(root: Path) -> dict[str, str]:
    out = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        out[name] = f"-> {os.readlink(path)}" if path.is_symlink() else "/" if path.is_dir() else path.read_text()
    return out


LOWER = layer(
    [
        ("./etc/", "dir", b""), ("etc/a", "file", b"a"), ("etc/b", "file", b"b"), ("lib", "link", "usr/lib"),
        ("usr/lib/x", "file", b"x"), ("old/1", "file", b"1"), ("old/deep/2", "file", b"2"), ("hard", "hard", "etc/a"),
        ("dev/null0", "device", ""), ("secret", "file", b"s"),
    ],
    {"secret": 0o6711},
)  # fmt: skip
UPPER = layer(
    [
        ("etc/.wh.b", "file", b""), ("lib/y", "file", b"y"), ("old/3", "file", b"3"), ("old/.wh..wh..opq", "file", b""),
        ("etc/a", "file", b"new"), ("/usr/bin/z", "link", "/etc/a"),
    ]
)  # fmt: skip


@pytest.mark.parametrize("form", ["oci", "oci, not zipped", "docker"])
def test_layers_lie_over_each_other(form: str, tmp_path: Path) -> None:
    if form == "docker":
        source = docker_save(tmp_path / "image.tar", [LOWER, UPPER])
    else:
        source = oci(tmp_path / "image", [LOWER, UPPER], zipped=form == "oci")
    mask = os.umask(0o077)
    try:
        root = unpack(source, tmp_path / "cache")
    finally:
        os.umask(mask)
    assert tree(root) == {
        "dev": "/", "etc": "/", "etc/a": "new", "hard": "a", "lib": "-> usr/lib", "usr": "/", "usr/lib": "/",
        "usr/lib/x": "x", "usr/lib/y": "y", "old": "/", "old/3": "3", "secret": "s", "usr/bin": "/", "usr/bin/z": "-> /etc/a",
    }  # fmt: skip
    modes = {name: stat.S_IMODE((root / name).stat().st_mode) for name in ("secret", "usr", "usr/lib")}
    assert modes == {"secret": 0o711, "usr": 0o755, "usr/lib": 0o755}
    before = root.stat().st_mtime_ns
    assert unpack(source, tmp_path / "cache") == root
    assert root.stat().st_mtime_ns == before
    assert os.listdir(tmp_path / "cache") == [root.name]


OUT: list[list[Member]] = [
    [("../out", "file", b"x")],
    [("a/../../out", "file", b"x")],
    [("a/..", "link", "b")],
    [("up", "link", "../.."), ("up/out", "file", b"x")],
    [("up", "link", "{outside}"), ("up/out", "file", b"x")],
    [("up", "link", "{outside}"), ("up/", "dir", b""), ("up/out", "file", b"x")],
    [("up", "link", "{outside}/out"), ("up", "file", b"x")],
    [("h", "hard", "../../../etc/passwd")],
    [("h", "hard", "{outside}/kept")],
    [("up", "link", "{outside}"), ("h", "hard", "up/kept")],
    [("l", "link", "{outside}/kept"), ("h", "hard", "l")],
    [("up", "link", "{outside}"), ("up/.wh.kept", "file", b"")],
    [("up", "link", "{outside}"), ("up/.wh..wh..opq", "file", b"")],
    [(".wh..", "file", b"")],
    [(".wh...", "file", b"")],
    [(".wh.", "file", b"")],
    [("a", "link", "b"), ("b", "link", "a"), ("a/x", "file", b"x")],
    [("a", "file", b"x"), ("a/b", "file", b"x")],
]


@pytest.mark.parametrize("members", OUT, ids=range(len(OUT)))
def test_nothing_leads_out_of_the_root(members: list[Member], tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    put = [(n, k, c.format(outside=outside) if isinstance(c, str) else c) for n, k, c in members]
    cache = tmp_path / "cache"
    source, root, said = oci(tmp_path / "image", [layer(put)]), None, ""
    try:
        root = unpack(source, cache)
    except BadInput as error:
        said = str(error)
    assert root or (said and "\n" not in said and os.listdir(cache) == [])
    for path in root.rglob("out") if root else ():
        assert path.resolve().is_relative_to(root)
    assert not root or not (root / "h").exists()
    assert os.listdir(outside) == ["kept"]
    assert (outside / "kept").read_text() == "kept"
    assert (outside / "kept").stat().st_nlink == 1
    assert sorted(os.listdir(tmp_path)) == ["cache", "image", "outside"]


def test_what_is_not_what_it_says_is_refused(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    wrong = oci(tmp_path / "a", [LOWER], diff_ids=[f"sha256:{digest(b'other')}"])
    with pytest.raises(BadInput, match="a layer is not what its digest says"):
        unpack(wrong, cache)
    other = oci(tmp_path / "b", [LOWER])
    for file in (other / "blobs" / "sha256").iterdir():
        if file.read_bytes().startswith(b'{"rootfs"'):
            file.write_bytes(file.read_bytes() + b" ")
    with pytest.raises(BadInput, match="is not what its digest says"):
        unpack(other, cache)
    with pytest.raises(BadInput, match="2 layers, and digests of 1"):
        unpack(oci(tmp_path / "c", [LOWER, UPPER], diff_ids=[f"sha256:{digest(LOWER)}"]), cache)
    for name, text in (("d", "{}"), ("e", "["), ("f", '{"manifests": [{"digest": "sha256:../../x"}]}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "index.json").write_text(text)
        with pytest.raises(BadInput):
            unpack(tmp_path / name, cache)
    (tmp_path / "file").write_bytes(b"no tar")
    for source, said in ((tmp_path / "file", "no image that can be read"), (tmp_path / "none", "no such image")):
        with pytest.raises(BadInput, match=said):
            unpack(source, cache)
    assert not cache.exists() or os.listdir(cache) == []


def test_it_may_not_be_larger_than_allowed(tmp_path: Path) -> None:
    big = layer([("zeros", "file", bytes(40 << 20))])
    assert len(gzip.compress(big)) < 1 << 20
    with pytest.raises(BadInput, match="largest size"):
        unpack(oci(tmp_path / "a", [big]), tmp_path / "cache", max_bytes=32 << 20)
    two = [layer([("a", "file", bytes(20 << 20))]), layer([("b", "file", bytes(20 << 20))])]
    with pytest.raises(BadInput, match="largest size"):
        unpack(oci(tmp_path / "b", two), tmp_path / "cache", max_bytes=32 << 20)
    behind = layer([("a", "file", b"")]) + bytes(64 << 20)
    with pytest.raises(BadInput, match="largest size"):
        unpack(oci(tmp_path / "c", [behind]), tmp_path / "cache", max_bytes=32 << 20)
    assert os.listdir(tmp_path / "cache") == []


@CONFINED
@pytest.mark.skipif(sys.base_prefix == "/usr", reason="this Python is installed where images have their own")
def test_jobs_see_the_image_and_not_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLKEEL_CACHE", str(tmp_path / "cache"))
    source = oci(tmp_path / "image", [with_shell("of the image\n")])
    look = b"read -r x </marker; echo $x; for f in /etc/* /usr/share /usr/bin/*; do [ -e $f ] && echo $f; done; echo w >/marker || echo ro"
    with Sandbox(workers=1, image=source) as sandbox:
        assert sandbox.level == probe().plan().level
        result = sandbox.run(Job(source=look, kind="shell"))
        assert (result.status, result.stdout) == (Status.OK, b"of the image\nro\n")
        result = sandbox.run(Job(source=b"import os, json; print(open('/marker').read(), sorted(os.listdir('/')))"))
        assert result.stdout.startswith(b"of the image\n")
        assert b"'srv'" not in result.stdout
        assert b"'marker'" in result.stdout
        with pytest.raises(MissingTool, match="c programs need gcc, which the image sha256-"):
            sandbox.run(Job(source=b"", kind="c"))
        with Terminal(sandbox) as terminal:
            assert terminal.run("read -r x </marker; echo $x").stdout == b"of the image\n"


@CONFINED
def test_a_shell_that_cannot_be_run_says_why(tmp_path: Path) -> None:
    source = oci(tmp_path / "image", [layer([("bin/sh", "file", b"no program")], {"bin/sh": 0o755})])
    with Sandbox(workers=1, image=source) as sandbox:
        result = sandbox.run(Job(source=b"echo", kind="shell"))
    assert (result.status, result.exit_code) == (Status.ERROR, 127)
    assert result.stderr.startswith(b"OSError: [Errno 8] Exec format error")


@CONFINED
@pytest.mark.skipif(sys.base_prefix == "/usr", reason="this Python is installed where images have their own")
def test_the_command_takes_an_image(tmp_path: Path) -> None:
    source = docker_save(tmp_path / "image.tar", [with_shell("of the tar\n")])
    (tmp_path / "look.sh").write_text("read -r x </marker; echo $x")
    command = [sys.executable, "-m", "rollkeel_sandbox", "run", str(tmp_path / "look.sh"), "--image"]
    environment = os.environ | {"ROLLKEEL_CACHE": str(tmp_path / "cache")}
    done = subprocess.run([*command, str(source)], capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stdout) == (0, "of the tar\n")
    done = subprocess.run([*command, "nowhere"], capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
