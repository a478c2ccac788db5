"""The fallback inference forward: any architecture transformers can build whose attention goes through its interface.

The model runs on flat tokens as one long row; its attention calls arrive here and are answered from the engine's paged
cache, so prefill, decode, sharing and resuming work as for the built-in families.
"""

from __future__ import annotations

import copy
import threading
from typing import Any

import torch
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface
from transformers.models.auto import AutoModelForCausalLM

from rollkeel.config import LoraConfig
from rollkeel.errors import BadInput
from rollkeel.models.adapters import attach, named_adapters
from rollkeel.models.forward import Attend
from rollkeel.models.names import checkpoint_views
from rollkeel.models.numerics import activation_rounder, compute_dtype, logits_of, stays_precise
from rollkeel.models.routers import expert_layers, record_experts

_NAME = "rollkeel_paged"
_current = threading.local()


def _attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **options: Any
) -> tuple[torch.Tensor, None]:
    """Attention call of a transformers layer: `[1, heads, N, d]` in, `[1, N, heads, d]` out."""
    _ = mask
    if options.get("softcap"):
        raise BadInput("engine: attention soft-capping is not supported by the embedded engine")
    window = options.get("sliding_window") or getattr(module, "sliding_window", None)
    scale = options.get("scaling")
    out = _current.attend(
        int(module.layer_idx),  # type: ignore[arg-type]
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
        window=int(window) if window else None,
        sinks=options.get("s_aux"),
    )
    _current.calls += 1
    return out.view(1, query.shape[2], query.shape[1], -1), None


AttentionInterface.register(_NAME, _attention)
AttentionMaskInterface.register(_NAME, lambda *args, **kwargs: None)


class TransformersForward:
    """Same surface as `FastForward`, over a transformers model with empty weights."""

    def __init__(self, config: Any, mode: str, device: torch.device, lora: LoraConfig | None = None) -> None:
        self.dtype = compute_dtype(mode)
        # from_config writes the attention choice into the config, which the trainer's model may share.
        config = copy.deepcopy(config)
        try:
            with torch.random.fork_rng(devices=[]):
                model = AutoModelForCausalLM.from_config(config, attn_implementation=_NAME, dtype=self.dtype)
        except (ValueError, KeyError) as error:
            raise BadInput(
                f"engine: transformers cannot run {config.model_type}: {' '.join(str(error).split())[:200]}"
            ) from None
        self._model = model.to(device).eval()
        self._base = self._model.get_decoder() if hasattr(self._model, "get_decoder") else self._model.model
        self._head = self._model.get_output_embeddings()
        self._softcap = getattr(config, "final_logit_softcapping", None)
        self._logit_scale = getattr(config, "logit_scale", None)
        if self._logit_scale is not None or getattr(config, "logits_scaling", None) is not None:
            raise BadInput(f"engine: {config.model_type} scales its logits, which the embedded engine does not support")
        self.vocab_size = int(config.vocab_size)
        self.num_layers, self.heads = int(config.num_hidden_layers), int(getattr(config, "num_attention_heads", 0))
        self._expert_layers = expert_layers(self._model)
        self.num_moe_layers = len(self._expert_layers)
        self.destinations = checkpoint_views(self._model)
        rounder = activation_rounder(mode)
        if rounder is not None:
            self._round_inputs(rounder)
        if lora is not None and lora.rank:
            attach(self._model, lora)
        self.adapters = named_adapters(self._model)

    def _round_inputs(self, rounder: Any) -> None:
        def hook(module: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            _ = module
            return (rounder(args[0]), *args[1:])

        for name, module in self._model.named_modules():
            projection = isinstance(module, torch.nn.Linear) or type(module).__name__.endswith("Experts")
            if "layers." in name and projection and not stays_precise(name):
                module.register_forward_pre_hook(hook)

    def hidden(
        self, ids: torch.Tensor, positions: torch.Tensor, attend: Attend, experts: list[torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Final-norm hidden states `[N, D]`; `experts` as in `FastForward.hidden`.

        Raises `BadInput` if a layer's attention went elsewhere.
        """
        _current.attend, _current.calls = attend, 0
        try:
            with record_experts(self._expert_layers if experts is not None else ()) as chosen:
                out = self._base(
                    input_ids=ids[None], position_ids=positions[None], attention_mask=None, use_cache=False
                )
        finally:
            _current.attend = None
        if _current.calls != self.num_layers:
            raise BadInput(
                f"engine: {_current.calls} of {self.num_layers} layers of {self._model.config.model_type} use standard attention; "
                "the embedded engine cannot serve this architecture"
            )
        if experts is not None:
            experts += chosen
        return out.last_hidden_state[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[N, V]` float32 logits."""
        logits = logits_of(hidden, self._head.weight, getattr(self._head, "bias", None))
        return torch.tanh(logits / self._softcap) * self._softcap if self._softcap else logits
