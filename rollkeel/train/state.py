"""Training state on disk without pickle: tensors in safetensors, everything else in JSON, both exact."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rollkeel.errors import BadInput, Corrupt

if TYPE_CHECKING:
    import torch

TENSORS = "tensors.safetensors"
TREE = "tree.json"


def save_state(path: str | Path, tree: Any) -> dict[str, dict[str, Any]]:
    """Write a nest of dicts, lists and tuples of tensors, numpy arrays and JSON scalars into the folder `path`.

    Returns size and SHA-256 of the file of tensors by its name. Tensors are written from where they are, a part at a time.

    Dict keys may be strings, ints or bools; floats keep every bit, ints every digit. Tensors come back on the CPU,
    without autograd history; tensors that share storage come back apart. Raises `TypeError` naming the place of any
    other value. Not atomic by itself: call it inside `checkpoint.save`.
    """
    from rollkeel.models.part_files import entries_of, write

    path = Path(path)
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(_encode(tree, "", tensors))
    path.mkdir(parents=True, exist_ok=True)
    entries = entries_of(tensors)
    written = write(path / TENSORS, entries, (tensors[entry.name] for entry in entries))
    (path / TREE).write_text(text, encoding="utf-8")
    return {TENSORS: written}


def load_state(path: str | Path) -> Any:
    """Read what `save_state` wrote. Raises `Corrupt` naming the file that is missing or damaged."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = Path(path)
    try:
        tree = json.loads((path / TREE).read_text(encoding="utf-8"))
        tensors = load_file(path / TENSORS)
        return decoded(tree, tensors)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise Corrupt(
            f"state {path}: cannot be read ({type(error).__name__}: {' '.join(str(error).split())})"
        ) from None


def check_shapes(expected: Mapping[str, Sequence[int]], got: Mapping[str, Sequence[int]]) -> None:
    """Compare tensor shapes by name: the model that is to be loaded into against the checkpoint's.

    Raises `BadInput` naming the first tensor, in `expected`'s order, that is missing or differs, with both shapes;
    then the first that is not expected.
    """
    advice = "resume with the model the run was started with"
    for name, shape in expected.items():
        if name not in got:
            raise BadInput(f"checkpoint lacks tensor {name} {list(shape)}; {advice}")
        if tuple(shape) != tuple(got[name]):
            raise BadInput(
                f"tensor {name}: the model has shape {list(shape)}, the checkpoint {list(got[name])}; {advice}"
            )
    for name, shape in got.items():
        if name not in expected:
            raise BadInput(f"checkpoint has tensor {name} {list(shape)} which the model lacks; {advice}")


def _encode(value: Any, where: str, tensors: dict[str, torch.Tensor]) -> Any:
    import torch

    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.Tensor):
        return {"tensor": _add(tensors, where, value.detach())}
    if isinstance(value, np.ndarray):
        return {"array": _add(tensors, where, torch.from_numpy(np.array(value, order="C")))}
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str | int):
                raise TypeError(f"state{where}: expected a str or int key, got {key!r}")
        # Pairs, because JSON would turn the integer keys of an optimizer's state into strings.
        return {"dict": [[key, _encode(child, f"{where}/{key}", tensors)] for key, child in value.items()]}
    if isinstance(value, tuple | list):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [_encode(child, f"{where}/{i}", tensors) for i, child in enumerate(value)]}
    raise TypeError(
        f"state{where}: expected a tensor, array, JSON scalar, dict, list or tuple, got {type(value).__name__}"
    )


def _add(tensors: dict[str, torch.Tensor], where: str, tensor: torch.Tensor) -> str:
    name = f"{len(tensors)}:{where}"  # The number keeps {1: …} and {"1": …} apart.
    tensors[name] = tensor
    return name


def decoded(node: Any, tensors: Mapping[str, Any]) -> Any:
    """The nest that `tree.json` describes, of `tensors` by their names."""
    if not isinstance(node, dict):
        return node
    ((kind, value),) = node.items()
    if kind == "tensor":
        return tensors[value]
    if kind == "array":
        return tensors[value].numpy()
    if kind == "dict":
        return {key: decoded(child, tensors) for key, child in value}
    items = [decoded(child, tensors) for child in value]
    return tuple(items) if kind == "tuple" else items
