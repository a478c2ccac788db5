"""Files of `torch.save` and `pickle.dump`, read without torch, and without running anything they name.

A torch file is a zip archive: `NAME/data.pkl`, a pickle in which tensors refer to storages by persistent ids, and one
entry `NAME/data/KEY` per storage, uncompressed. Tensors are rebuilt here with numpy from the bytes of their storages.
Format read from pytorch/pytorch `torch/serialization.py`, `torch/_utils.py` (v2.13) and files that it wrote.
"""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, Final, final

import numpy as np

from rollkeel_doctor.errors import Corrupt
from rollkeel_doctor.traces.unpickle import Name, Record, Refused, loads

MAX_BYTES: Final = 8 << 30
MAX_DIMENSIONS: Final = 16
SPARE_ELEMENTS: Final = 1 << 24
"""Elements that tensors of a file may have beyond its bytes: views that repeat a storage, expanded tensors."""

SHORT_BYTES: Final = 64
"""Text of so many characters is made bytes at once; a file can name longer ones again and again."""
_ENCODE: Final = "_codecs.encode"

_DTYPES: Final = {f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)} | {
    "float64", "float32", "float16", "bfloat16", "bool",
}  # fmt: skip
_STORAGES: Final = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8", "ByteStorage": "uint8",
    "BoolStorage": "bool", "UntypedStorage": "uint8",
}  # fmt: skip
_NUMPY_SCALARS: Final = {"f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1", "b1"}
_OLD_MAGIC: Final = 0x1950A86A20F9469CFC6C  # First value of a file that torch wrote before it wrote zip archives (1.6).


@dataclass(frozen=True, slots=True, eq=False)
class _Storage:
    data: bytes
    dtype: str | None  # One of `_DTYPES`; None for one that is not read (8-bit floats, say).


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """A tensor as the file has it."""

    array: np.ndarray  # Its values; bfloat16 as float32. Read-only, and perhaps a view of the file's bytes.


def load(path: str | Path) -> Any:
    """The value of a torch file or a pickle: plain values, `Tensor`s, and `Record`s for everything else.

    Raises `Corrupt`, in one line, for a file that is damaged, too large or not of a kind that is read.
    """
    path = Path(path)
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise Refused(f"{size} bytes; more than {MAX_BYTES} are not read")
        with path.open("rb") as file:
            return _load(file, size)
    except Refused as error:
        raise Corrupt(f"{path}: not readable as a torch file or pickle: {error}") from error
    except OSError as error:
        raise Corrupt(f"{path}: cannot be read: {error.strerror or error}") from error


def load_bytes(data: bytes) -> Any:
    """The same for bytes inside another file. Raises `Refused`."""
    return _load(io.BytesIO(data), len(data))


def _load(file: IO[bytes], size: int) -> Any:
    start = file.read(2)
    file.seek(0)
    if start == b"PK":
        return _Archive(file, size).load()
    value = loads(file.read(), _BUILDERS)
    if value == _OLD_MAGIC and isinstance(value, int):
        raise Refused("torch's format before 1.6; save it again with a newer torch")
    return value


@final
class _Archive:
    """A torch zip file: its storages, and the budget that its tensors share."""

    def __init__(self, file: IO[bytes], size: int) -> None:
        try:
            self.zip = zipfile.ZipFile(file)
        except Exception as error:  # zipfile promises BadZipFile alone, and raises whatever damage leads to
            raise Refused("cut short or damaged (no zip directory)") from error
        self.entries = {info.filename: info for info in self.zip.infolist()}
        if sum(info.file_size for info in self.zip.infolist()) > size:
            raise Refused("entries larger than the file")
        roots = [name.removesuffix("/data.pkl") for name in self.entries if name.endswith("/data.pkl")]
        if len(roots) != 1:
            raise Refused("not a torch file (one data.pkl expected)")
        self.root = roots[0]
        self.elements = size + SPARE_ELEMENTS
        self.storages: dict[str, _Storage] = {}

    def load(self) -> Any:
        order = f"{self.root}/byteorder"
        if order in self.entries and self.read(order) != b"little":
            raise Refused("big-endian tensors")
        rebuild = {
            "torch._utils._rebuild_tensor": partial(_rebuild, budget=self.spend),
            "torch._utils._rebuild_tensor_v2": partial(_rebuild, budget=self.spend),
            "torch._utils._rebuild_tensor_v3": partial(_rebuild, budget=self.spend, typed=True),
            "torch._utils._rebuild_parameter": _first,
        }
        return loads(self.read(f"{self.root}/data.pkl"), _BUILDERS | rebuild, self.storage)

    def read(self, name: str) -> bytes:
        info = self.entries.get(name)
        if info is None:
            raise Refused(f"no entry {name[-60:]!r}")
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            raise Refused("compressed or encrypted entries, which torch does not write")
        try:
            with self.zip.open(info) as entry:
                return entry.read(info.file_size)
        except Exception as error:
            raise Refused("damaged (an entry does not match its checksum or header)") from error

    def spend(self, elements: int) -> None:
        self.elements -= elements
        if self.elements < 0:
            raise Refused("tensors larger than the file")

    def storage(self, key: Any) -> _Storage:
        """What a persistent id stands for: ("storage", type, key, device, elements)."""
        if not (isinstance(key, tuple) and len(key) == 5 and key[0] == "storage" and isinstance(key[2], str)):
            raise Refused("damaged (persistent id)")
        kind, name = key[1], key[2]
        if not isinstance(kind, Name):
            raise Refused("damaged (storage type)")
        if name not in self.storages:
            dtype = _STORAGES.get(kind.name) if kind.module in ("torch", "torch.storage") else None
            self.storages[name] = _Storage(self.read(f"{self.root}/data/{name}"), dtype)
        return self.storages[name]


def _rebuild(args: tuple[Any, ...], *, budget: Callable[[int], None], typed: bool = False) -> Any:
    """A tensor of (storage, offset, size, stride, …); v3 has (…, requires_grad, hooks, dtype)."""
    if len(args) < 4 or not isinstance(args[0], _Storage):
        raise Refused("damaged (tensor)")
    storage, offset, size, stride = args[:4]
    dtype = storage.dtype
    if typed:
        named = args[6] if len(args) > 6 else None
        dtype = named.name if isinstance(named, Name) and named.module == "torch" else None
    if dtype not in _DTYPES:
        return Record(f"tensor of {dtype or 'an unknown dtype'}")
    numbers = (offset, *size, *stride) if isinstance(size, tuple) and isinstance(stride, tuple) else ()
    if not numbers or not all(type(n) is int and 0 <= n < 1 << 40 for n in numbers):
        raise Refused("damaged (shape)")
    if len(size) != len(stride) or len(size) > MAX_DIMENSIONS:
        raise Refused("damaged (shape)")
    budget(math.prod(size))
    if 0 in size:
        return Tensor(np.zeros(size, np.float32 if dtype == "bfloat16" else dtype))
    code = np.dtype("<u2" if dtype == "bfloat16" else dtype)
    flat = np.frombuffer(storage.data, code, len(storage.data) // code.itemsize)
    if offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) >= len(flat):
        raise Refused("damaged (a tensor reaches beyond its storage)")
    steps = tuple(s * code.itemsize for s in stride)
    array = np.lib.stride_tricks.as_strided(flat[offset:], size, steps, writeable=False)
    return Tensor((array.astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else array)


def _first(args: tuple[Any, ...]) -> Any:
    if not args:
        raise Refused("damaged (parameter)")
    return args[0]


def _ordered(args: tuple[Any, ...]) -> Any:
    if args not in ((), ([],)):
        raise Refused("an OrderedDict made from arguments")
    return {}


def _numpy_scalar(args: tuple[Any, ...]) -> Any:
    """`numpy.float64(0.5)` and the like, which graders return; other scalars stay records."""
    if len(args) == 2 and isinstance(args[0], Record) and args[0].kind == "numpy.dtype" and isinstance(args[1], bytes):
        code = args[0].args[0] if args[0].args else None
        if isinstance(code, str) and code in _NUMPY_SCALARS and len(args[1]) == np.dtype(code).itemsize:
            return np.frombuffer(args[1], "<" + code)[0].item()
    return Record("numpy scalar")


def _encode(args: tuple[Any, ...]) -> Any:
    """Bytes, which protocol 2 writes as text, and empty ones as `bytes()`. Long ones stay as they are until they are used."""
    if args == ():
        return b""
    if len(args) == 2 and isinstance(args[0], str) and len(args[0]) <= SHORT_BYTES:
        return _bytes(args[0])
    return Record(_ENCODE, args)


def _bytes(value: Any) -> bytes | None:
    """The bytes that a string, a record of `_encode` or bytes stand for."""
    if isinstance(value, Record) and value.kind == _ENCODE and value.args:
        value = value.args[0]
    if isinstance(value, str):
        try:
            return value.encode("latin-1")
        except UnicodeEncodeError:
            return None
    return value if isinstance(value, bytes) else None


def plain(value: Any) -> Any:
    """The numpy array of a `Tensor` or of a pickled numpy array; any other value as it is."""
    if isinstance(value, Tensor):
        return value.array
    if isinstance(value, Record):
        array = _numpy_array(value)
        return value if array is None else array
    return value


def _numpy_array(record: Record) -> np.ndarray | None:
    """An array as numpy pickles it: an empty one, and a state of (1, shape, dtype, column-major, bytes)."""
    state = record.state
    if not record.kind.endswith("core.multiarray._reconstruct") or not isinstance(state, tuple) or len(state) != 5:
        return None
    shape, dtype, column_major, data = state[1:]
    code = dtype.args[0] if isinstance(dtype, Record) and dtype.kind == "numpy.dtype" and dtype.args else None
    if not isinstance(code, str) or code not in _NUMPY_SCALARS or column_major or (data := _bytes(data)) is None:
        return None
    if not isinstance(shape, tuple) or not all(type(n) is int and 0 <= n < 1 << 40 for n in shape):
        return None
    if len(shape) > MAX_DIMENSIONS or math.prod(shape) * np.dtype(code).itemsize != len(data):
        return None
    return np.frombuffer(data, "<" + code).reshape(shape)


_BUILDERS: Final = {
    "collections.OrderedDict": _ordered,
    "numpy._core.multiarray.scalar": _numpy_scalar,
    "numpy.core.multiarray.scalar": _numpy_scalar,
    _ENCODE: _encode,
    "__builtin__.bytes": _encode,
}
"""The only names whose calls make something; all of them are functions above."""
