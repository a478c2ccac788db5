"""Where the weights of a model come from that is built without any: read from files, or drawn, box by box of a parameter.

A rank that holds a part of the model asks for that part alone. At no time is there more than one parameter whole.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_utils import PreTrainedModel

from rollkeel.errors import BadInput
from rollkeel.models.names import checkpoint_pieces

Box = tuple[slice, ...]
"""Rows, columns, … of a tensor, one slice with a start and a stop for each dimension."""
Boxes = Sequence[tuple[Box, Box]]
"""Boxes of a whole parameter, and where each lies in the part of it that is held."""


class Source(Protocol):
    """Weights of one model by parameter name."""

    def fill(self, name: str, boxes: Boxes, part: torch.Tensor) -> None:
        """Write these boxes of a parameter or buffer into `part`, in its dtype."""
        ...


@contextmanager
def without_memory() -> Iterator[None]:
    """Inside, parameters of a module lose their values as soon as they are registered. Buffers stay."""
    own = torch.nn.Module.register_parameter

    def register(module: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> None:
        own(module, name, param)
        if param is not None and not param.is_meta:
            module._parameters[name] = torch.nn.Parameter(param.detach().to("meta"), param.requires_grad)

    torch.nn.Module.register_parameter = register  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = own  # type: ignore[method-assign]


class Drawn(TorchDispatchMode):
    """Inside, what would be drawn into parameters without memory is noted; afterwards it is drawn again for each of them."""

    def __init__(self) -> None:
        super().__init__()
        self._notes: dict[int, list[tuple[Any, ...]]] = {}
        """By storage: operation, its view of the parameter, its arguments, and the generator's state before it if it draws."""
        self._named: dict[str, tuple[torch.Size, list[tuple[Any, ...]]]] = {}
        self._alive: list[torch.Tensor] = []  # or another tensor could get a storage of the same name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        writes = func._schema.is_mutable and args and isinstance(args[0], torch.Tensor) and args[0].is_meta
        if writes:
            tensor, state = args[0], None
            if torch.Tag.nondeterministic_seeded in func.tags:
                state = torch.get_rng_state()
                func(torch.empty(tensor.shape, dtype=tensor.dtype), *args[1:], **kwargs)  # the generator goes on
            view = tensor.shape, tensor.stride(), tensor.storage_offset()
            self._notes.setdefault(tensor.untyped_storage()._cdata, []).append((func, view, args[1:], kwargs, state))
            self._alive.append(tensor)
        return func(*args, **kwargs)

    def name(self, model: torch.nn.Module) -> None:
        """Keep what is noted by the names of `model`. Raises `BadInput` for a parameter that was never written as a whole."""
        for name, p in model.named_parameters():
            notes = self._notes.get(p.untyped_storage()._cdata, [])
            whole = [i for i, (func, view, *_) in enumerate(notes) if _fills(func) and view[0].numel() == p.numel()]
            if not whole:
                raise BadInput(f"weight {name}: nothing draws it as a whole, so that it cannot be drawn in parts")
            self._named[name] = p.shape, notes[whole[-1] :]
        self._notes.clear()
        self._alive.clear()

    @torch.no_grad()
    def fill(self, name: str, boxes: Boxes, part: torch.Tensor) -> None:
        if name not in self._named:
            return  # a buffer, which has its values
        shape, notes = self._named[name]
        whole = torch.empty(shape)
        with torch.random.fork_rng(devices=[]):
            for func, view, args, kwargs, state in notes:
                if state is not None:
                    torch.set_rng_state(state)
                func(whole.as_strided(*view), *args, **kwargs)
        for box, there in boxes:
            part[there] = whole[box].to(part.dtype)


def _fills(func: Any) -> bool:
    """True if the operation does not read what it writes to."""
    return func.name().partition(".")[0] in {f"aten::{name}_" for name in ("normal", "uniform", "zero", "fill", "copy")}


class _Piece(NamedTuple):
    """A checkpoint tensor inside of a parameter: `start[d] + i · step[d]` is where its element i along `dims[d]` lies in dimension d.

    `dims[d]`: the tensor's dimension that runs along the parameter's dimension d, None where it has one place there."""

    name: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    step: tuple[int, ...]
    dims: tuple[int | None, ...]


def _piece(name: str, owner: torch.Tensor, piece: torch.Tensor) -> _Piece:
    """Raises `BadInput` for a tensor that is no box of its parameter."""
    strides = owner.stride()
    left = int(piece.storage_offset())
    start = list[int]()
    for stride in strides:
        start.append(left // max(stride, 1))
        left %= max(stride, 1)
    step: list[int] = [1] * owner.dim()
    dims: list[int | None] = [None] * owner.dim()
    for at, (count, stride) in enumerate(zip(piece.shape, piece.stride(), strict=True)):
        if count == 1:
            continue
        fits = [d for d in range(owner.dim()) if stride % strides[d] == 0 and owner.shape[d] > 1 and dims[d] is None]
        along = next((d for d in fits if start[d] + (count - 1) * (stride // strides[d]) < owner.shape[d]), None)
        if along is None:
            raise BadInput(f"weight {name}: no box of its parameter {list(owner.shape)}; load this model on one rank")
        step[along], dims[along] = stride // strides[along], at
    return _Piece(name, tuple(piece.shape), tuple(start), tuple(step), tuple(dims))


def _overlap(piece: _Piece, box: Box) -> tuple[Box, Box] | None:
    """Which slices of a checkpoint tensor lie in a box of its parameter, and where they lie inside of the box; None for none of it."""
    taken, there = [slice(0, n) for n in piece.shape], list[slice]()
    for d, here in enumerate(box):
        start = piece.start[d]
        step = piece.step[d]
        along = piece.dims[d]
        count = 1 if along is None else piece.shape[along]
        first, last = max(0, -(-(here.start - start) // step)), min(count, -(-(here.stop - start) // step))
        if first >= last:
            return None
        if along is not None:
            taken[along] = slice(first, last)
        at = start + first * step - here.start
        there.append(slice(at, at + (last - first - 1) * step + 1, step))
    return tuple(taken), tuple(there)


@dataclass(frozen=True, kw_only=True)
class Files:
    """Weights of a Hugging Face folder, read from its safetensors files where they are needed."""

    places: Mapping[str, Path]
    """Checkpoint name → the file that has it."""
    pieces: Mapping[str, Sequence[_Piece]]
    """Parameter → the checkpoint tensors in it."""

    @torch.no_grad()
    def fill(self, name: str, boxes: Boxes, part: torch.Tensor) -> None:
        with ExitStack() as opened:
            files: dict[Path, Any] = {}
            for piece, (box, here) in itertools.product(self.pieces[name], boxes):
                overlap = _overlap(piece, box)
                if overlap is None:
                    continue
                path = self.places[piece.name]
                if path not in files:
                    files[path] = opened.enter_context(safe_open(path, framework="pt"))
                self._copy(files[path], piece, overlap, part[here] if here else part)

    def _copy(self, file: Any, piece: _Piece, overlap: tuple[Box, Box], part: torch.Tensor) -> None:
        taken, there = overlap
        values = file.get_slice(piece.name)[taken] if taken else file.get_tensor(piece.name)
        order = [along for along in piece.dims if along is not None]
        values = values.permute(*order, *(i for i in range(values.dim()) if i not in order))
        into = part[there] if there else part
        into.copy_(values.reshape(into.shape))


def files_of(folder: Path, model: PreTrainedModel, said: str) -> Files:
    """Weights of `folder` for the parameters of `model`, which may be without memory.

    Raises `BadInput`, beginning with `said`, naming the first weight that is missing, of another shape, or that the model lacks.
    """
    places, shapes = _listed(folder, said)
    names = {id(t): name for name, t in (*model.named_parameters(), *model.named_buffers())}
    tied = _aliases(model)
    pieces, known = dict[str, list[_Piece]](), set[str]()
    for name, owner, piece in checkpoint_pieces(model):
        known |= {name, *tied.get(name, ())}
        there = next((n for n in (name, *tied.get(name, ())) if n in places), None)
        if there is None:
            raise BadInput(f"{said}: the checkpoint lacks weight {name}; get all files of the model")
        if shapes[there] != tuple(piece.shape):
            expected, got = list(piece.shape), list(shapes[there])
            raise BadInput(f"{said}: weight {there} has shape {got}, config.json asks for {expected}")
        pieces.setdefault(names[id(owner)], []).append(_piece(there, owner, piece))
    refuse_unexpected(model, [name for name in places if name not in known], said)
    return Files(places=places, pieces=pieces)


def refuse_unexpected(model: PreTrainedModel, names: Iterable[str], said: str) -> None:
    """Raises `BadInput` for the first of `names` of a checkpoint that is no weight of `model` and not known to be harmless: buffers
    that are computed, weights that its architecture says it leaves out, copies of tied ones."""
    harmless = {rf"{re.escape(name)}$" for name, _ in model.named_buffers()} | {r"rotary_emb\.inv_freq$"}
    harmless |= set(model._keys_to_ignore_on_load_unexpected or ())
    harmless |= {rf"^{re.escape(name)}$" for name in getattr(model, "all_tied_weights_keys", None) or ()}
    pattern = re.compile("|".join(f"(?:{p})" for p in harmless))
    odd = sorted(name for name in names if pattern.search(name) is None)
    if odd:
        raise BadInput(
            f"{said}: {type(model).__name__} has no place for {len(odd)} of its weights, first {odd[0]}; is config.json another"
            " model's?"
        )


def _aliases(model: PreTrainedModel) -> dict[str, list[str]]:
    """First name of tied weights → their other names."""
    first, out = dict[int, str](), dict[str, list[str]]()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if (known := first.setdefault(id(tensor), name)) != name:
            out.setdefault(known, []).append(name)
    return out


def _listed(folder: Path, said: str) -> tuple[dict[str, Path], dict[str, tuple[int, ...]]]:
    """Checkpoint name → its file, and its shape, of the files that the folder's index names, or of its only one."""
    index = folder / "model.safetensors.index.json"
    try:
        named = json.loads(index.read_text())["weight_map"] if index.is_file() else {"": "model.safetensors"}
        places, shapes = dict[str, Path](), dict[str, tuple[int, ...]]()
        for file in dict.fromkeys(named.values()):
            if not (folder / file).is_file():
                raise BadInput(f"{said}: expected {file}, found none; loading in parts needs safetensors files")
            with safe_open(folder / file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 (no mapping)
                    places[name] = folder / file
                    shapes[name] = tuple(opened.get_slice(name).get_shape())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise BadInput(f"{said}: cannot be read: {' '.join(str(error).split())[:200]}") from None
    return places, shapes
