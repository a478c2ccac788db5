"""Hugging Face checkpoint names as views into a live model.

In memory transformers fuses experts into 3-D parameters; in checkpoints they are per-expert tensors. Converting values at
every publication costs more than a training step of a small model and copies everything, so the conversion is run once on
element *indices*: what comes out tells which strided piece of which parameter each checkpoint tensor is.
"""

from __future__ import annotations

import torch
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import PreTrainedModel

from rollkeel.errors import BadInput
from rollkeel.models.lora import ADAPTER


def checkpoint_views(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Checkpoint name → view sharing storage with `model`'s parameters and persistent buffers, in checkpoint order.

    Adapters are left out. Tied tensors appear once, under their first name. Writing to a view changes the model. The result stays valid as long
    as parameters keep their storage. Raises `BadInput` if a checkpoint tensor is not a strided piece of one parameter.
    """
    live = _untied(model)
    starts, total = {}, 0
    indices = {}
    for name, tensor in live.items():
        starts[name] = total
        indices[name] = torch.arange(total, total + tensor.numel()).reshape(tensor.shape)
        total += tensor.numel()
    order = sorted(starts, key=starts.__getitem__)
    bounds = torch.tensor([starts[name] for name in order])
    views = {}
    for name, index in revert_weight_conversion(model, indices).items():
        owner = order[int(torch.searchsorted(bounds, index.flatten()[:1], right=True)) - 1]
        if int(index.max()) >= starts[owner] + live[owner].numel():
            raise BadInput(f"weight {name}: made of several parameters; this architecture cannot be published yet")
        views[name] = _as_view(name, live[owner].detach(), index - starts[owner])
    return views


def _untied(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    seen: set[tuple[int, torch.Size]] = set()
    out = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        key = (tensor.data_ptr(), tensor.shape)
        if key not in seen and ADAPTER not in name:
            seen.add(key)
            out[name] = tensor
    return out


def _as_view(name: str, tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """View of contiguous `tensor` that holds the elements `index` (flat positions, any shape)."""
    offset = int(index.flatten()[0])
    strides = []
    expected = torch.full(index.shape, offset, dtype=torch.int64)
    for axis, size in enumerate(index.shape):
        step = int(index.select(axis, 1).flatten()[0]) - offset if size > 1 else 1
        strides.append(step)
        shape = [1] * index.dim()
        shape[axis] = size
        expected = expected + (torch.arange(size) * step).reshape(shape)
    if not torch.equal(expected, index) or not tensor.is_contiguous():
        raise BadInput(
            f"weight {name}: not a strided piece of one parameter; this architecture cannot be published yet"
        )
    return tensor.as_strided(index.shape, strides, tensor.storage_offset() + offset)
