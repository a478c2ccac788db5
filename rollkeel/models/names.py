"""Hugging Face checkpoint names as views into a live model.

In memory transformers fuses experts into 3-D parameters; in checkpoints they are per-expert tensors. Converting values at
every publication costs more than a training step of a small model and copies everything, so the conversion is run once on
tensors without values: the strides of what comes out tell which piece of which parameter each checkpoint tensor is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import PreTrainedModel

from rollkeel.errors import BadInput
from rollkeel.models.lora import ADAPTER


class _Piece(torch.Tensor):
    """A tensor without values, which is never copied for the sake of its layout."""

    def contiguous(self, *_: Any, **__: Any) -> _Piece:
        return self


def checkpoint_views(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Checkpoint name → view sharing storage with `model`'s parameters and persistent buffers, in checkpoint order.

    Adapters are left out. Tied tensors appear once, under their first name. Writing to a view changes the model. The result stays valid as long
    as parameters keep their storage. Raises `BadInput` if a checkpoint tensor is not a strided piece of one parameter.
    """
    return {name: piece_of(owner, piece) for name, owner, piece in checkpoint_pieces(model)}


def piece_of(owner: torch.Tensor, piece: torch.Tensor) -> torch.Tensor:
    """The view of `owner` that `piece` describes."""
    return owner.detach().as_strided(piece.shape, piece.stride(), owner.storage_offset() + piece.storage_offset())


@torch.no_grad()
def move_into(model: PreTrainedModel, places: Mapping[str, torch.Tensor]) -> str:
    """Make the parameters and persistent buffers of `model` views of the memory of `places`: views of as many weights, by checkpoint name.

    Values stay as they are. Returns the name of a weight that is laid out otherwise there; then nothing has changed.
    """
    left, sizes = dict(places), Counter[torch.Tensor]()
    homes: dict[torch.Tensor, tuple[torch.Tensor, int]] = {}
    for name, owner, piece in checkpoint_pieces(model):
        place = left.pop(name, None)
        if place is None or (place.shape, place.stride(), place.dtype) != (piece.shape, piece.stride(), owner.dtype):
            return name
        if {type(place), type(owner.detach())} != {torch.Tensor}:  # of a subclass, whose memory is its own business
            return name
        start = int(place.storage_offset()) - int(piece.storage_offset())
        first, its = homes.setdefault(owner, (place, start))
        if (_storage(first), its) != (_storage(place), start):
            return name
        sizes[owner] += piece.numel()
    if left or any(size != owner.numel() for owner, size in sizes.items()):
        return next(iter(left), "a part of a parameter")
    live = [(_place(tensor), tensor) for tensor in model.state_dict(keep_vars=True).values()]
    for owner, (place, start) in homes.items():
        home, here = place.as_strided(owner.shape, owner.stride(), start), _place(owner)
        home.copy_(owner)
        for there, tensor in live:
            if there == here:  # the owner, and what is tied to it
                tensor.data = home
    return ""


def checkpoint_pieces(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Checkpoint name, the parameter or buffer, and which piece of it: a tensor without values, at its offset in there."""
    live = _untied(model)
    pieces = {name: torch.empty(t.shape, device="meta").as_subclass(_Piece) for name, t in live.items()}
    owners = {_storage(piece): live[name] for name, piece in pieces.items()}
    for name, piece in revert_weight_conversion(model, dict(pieces)).items():
        owner = owners.get(_storage(piece))
        if owner is None or not owner.is_contiguous():
            raise BadInput(
                f"weight {name}: not a strided piece of one parameter; this architecture cannot be published yet"
            )
        yield name, owner, piece


def _untied(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    seen = set[tuple[int, int, torch.Size]]()
    out = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if _place(tensor) not in seen and ADAPTER not in name:
            seen.add(_place(tensor))
            out[name] = tensor
    return out


def _place(tensor: torch.Tensor) -> tuple[int, int, torch.Size]:
    return _storage(tensor), int(tensor.storage_offset()), tensor.shape


def _storage(tensor: torch.Tensor) -> int:
    """Names the storage, with or without values in it."""
    return tensor.untyped_storage()._cdata
