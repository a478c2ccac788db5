"""The output head of a model, as log-probs need it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.modeling_utils import PreTrainedModel

from rollkeel.errors import BadInput
from rollkeel.models.numerics import logits_of


@dataclass(frozen=True)
class Head:
    """How a model turns hidden states into logits: `softcap · tanh(scale · (h Wᵀ + b) / softcap)`."""

    weight: torch.Tensor
    """`[V, D]`."""
    bias: torch.Tensor | None = None
    """`[V]`."""
    scale: float = 1.0
    softcap: float | None = None


def head_of(model: PreTrainedModel) -> Head:
    """The output head of a transformers causal language model.

    Raises `BadInput` if its logits are not those of a linear head with the scale and soft cap its config names.
    """
    head: Any = model.get_output_embeddings()
    if head is None or not isinstance(getattr(head, "weight", None), torch.Tensor):
        raise BadInput(
            f"model {type(model).__name__}: expected a linear language-model head, found {type(head).__name__}"
        )
    config = model.config.get_text_config()
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    cap = getattr(config, "final_logit_softcapping", None)
    output_head = Head(head.weight, getattr(head, "bias", None), scale, float(cap) if cap else None)
    _check_head(model, output_head)
    return output_head


@torch.no_grad()
def _check_head(model: PreTrainedModel, head: Head) -> None:
    """Scales hide under many config names; a wrong one would train on log-probs nobody sampled from."""
    ids = (torch.arange(4, device=head.weight.device) * 13 + 3).remainder(head.weight.shape[0])[None]
    backbone: Any = getattr(model, model.base_model_prefix)
    hidden = backbone(input_ids=ids, use_cache=False).last_hidden_state
    expected = model(input_ids=ids, use_cache=False).logits[0].float()
    got = logits_of(hidden[0], head.weight, head.bias) * head.scale
    if head.softcap is not None:
        got = torch.tanh(got / head.softcap) * head.softcap
    tolerance = 1e-3 if head.weight.dtype == torch.float32 else 0.05
    if (got - expected).norm() > tolerance * expected.norm():
        raise BadInput(
            f"model {type(model).__name__}: its logits are not head(hidden states); this head is not supported yet"
        )
