"""Hugging Face checkpoint names as views into a live model.

In memory transformers fuses experts into 3-D parameters; in checkpoints they are per-expert tensors. Converting values at
every publication costs more than a training step of a small model and copies everything, so the conversion is run once on
tensors without values: the strides of what comes out tell which piece of which parameter each checkpoint tensor is.
"""

from __future__ import annotations

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
    live = _untied(model)
    pieces = {name: torch.empty(t.shape, device="meta").as_subclass(_Piece) for name, t in live.items()}
    owners = {_storage(piece): live[name] for name, piece in pieces.items()}
    views = {}
    for name, piece in revert_weight_conversion(model, dict(pieces)).items():
        owner = owners.get(_storage(piece))
        if owner is None or not owner.is_contiguous():
            raise BadInput(
                f"weight {name}: not a strided piece of one parameter; this architecture cannot be published yet"
            )
        start = owner.storage_offset() + piece.storage_offset()
        views[name] = owner.detach().as_strided(piece.shape, piece.stride(), start)
    return views


def _untied(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    seen = set[tuple[int, int, torch.Size]]()
    out = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        key = (_storage(tensor), tensor.storage_offset(), tensor.shape)
        if key not in seen and ADAPTER not in name:
            seen.add(key)
            out[name] = tensor
    return out


def _storage(tensor: torch.Tensor) -> int:
    """Names the storage, with or without values in it."""
    return tensor.untyped_storage()._cdata
