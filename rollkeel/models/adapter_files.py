"""Folders of adapters, as PEFT writes and reads them, and which base they belong to."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from rollkeel.config import LoraConfig, ModelConfig
from rollkeel.errors import BadInput
from rollkeel.models.checksum import MASK, tensor_checksum
from rollkeel.models.lora import PREFIX, STACKS
from rollkeel.models.names import checkpoint_views

CONFIG, TENSORS, BASE = "adapter_config.json", "adapter_model.safetensors", "rollkeel.json"
_BEYOND = ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "fan_in_fan_out", "lora_bias")
"""Of PEFT's options, those that change what adapters compute."""


def base_checksum(model: Any) -> str:
    """Checksum of what the adapters stand beside, hexadecimal."""
    return checksum_of(checkpoint_views(model).items())


def checksum_of(weights: Iterable[tuple[str, torch.Tensor]]) -> str:
    """The same of (checkpoint name, tensor) pairs."""
    return f"{sum(tensor_checksum(name, weight) for name, weight in weights) & MASK:016x}"


def save_adapters(
    adapters: Mapping[str, torch.Tensor], lora: LoraConfig, base: Mapping[str, Any], folder: Path
) -> None:
    """Write PEFT's folder of `named_adapters`. `base`: fields of the `ModelConfig` the adapters belong to, and its `checksum`."""
    tensors = {}
    for name, tensor in adapters.items():
        if tensor.dim() == 3:  # PEFT: A [experts · rank, in], B [out, rank · experts]
            tensor = tensor.flatten(0, 1) if "lora_A" in name else tensor.permute(1, 2, 0).flatten(1)
        tensors[name] = tensor.cpu().contiguous()
    stems = [name.removesuffix(".lora_A.weight") for name in tensors if name.endswith(".lora_A.weight")]
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base["path"],
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted({stem.rpartition(".")[2] for stem in stems} - {"experts", "base_layer"}),
        "target_parameters": [f"mlp.experts.{name}" for name in STACKS] if lora.experts else None,
        "inference_mode": True,
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / TENSORS, metadata={"format": "pt"})
    for name, content in ((CONFIG, config), (BASE, {"base": base})):
        (folder / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def base_of(folder: Path, config: ModelConfig) -> tuple[ModelConfig, str]:
    """The base that the adapters in `folder` belong to, and its checksum: empty if the folder is not rollkeel's."""
    told = _json(folder / BASE)["base"] if (folder / BASE).is_file() else {}
    checksum = told.pop("checksum", "")
    path = told.pop("path", None) or _json(folder / CONFIG).get("base_model_name_or_path")
    if not path:
        raise BadInput(f"model.path {str(folder)!r}: {CONFIG} names no base model; merge the adapters with peft")
    return config.model_copy(update={**told, "path": path}), checksum


@torch.no_grad()
def merge(model: torch.nn.Module, folder: Path) -> None:
    """Add the adapters in `folder`, rollkeel's or PEFT's, to the weights of `model`, in place."""
    where, config = f"model.path {str(folder)!r}", _json(folder / CONFIG)
    beyond = [name for name in _BEYOND if config.get(name)]
    if config.get("peft_type") != "LORA" or beyond or config.get("bias", "none") != "none":
        raise BadInput(
            f"{where}: expected plain LoRA adapters, got {', '.join(beyond) or 'others'}; merge them with peft"
        )
    try:
        tensors = load_file(folder / TENSORS)
        weights = dict(model.named_parameters())
        for name, a in tensors.items():
            if name.endswith("lora_A.weight"):
                _add(weights, name, a, tensors[name.replace("lora_A", "lora_B")], config["lora_alpha"] / config["r"])
    except (OSError, SafetensorError, KeyError, RuntimeError) as error:
        raise BadInput(f"{where}: the adapters do not fit their base: {' '.join(str(error).split())[:200]}") from None


def _add(weights: Mapping[str, torch.Tensor], name: str, a: torch.Tensor, b: torch.Tensor, scale: float) -> None:
    module = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
    if module.endswith((".experts", ".experts.base_layer")):
        inner = module.endswith(".base_layer")
        weight = weights[f"{module.removesuffix('.base_layer')}.{'gate_up_proj' if inner else 'down_proj'}"]
        experts = len(weight)
        a, b = a.view(experts, -1, a.shape[1]), b.view(len(b), -1, experts).permute(2, 0, 1)
    else:
        weight = weights[f"{module}.weight"]
    delta = scale * (b.float() @ a.float())
    weight.copy_(weight.float() + delta.to(weight.device))


def _json(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"model.path: cannot read {file}: {' '.join(str(error).split())}") from None
