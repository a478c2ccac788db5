"""Policies by preset, folder or id, and back to an ordinary Hugging Face folder."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers.dynamic_module_utils import custom_object_save
from transformers.generation.configuration_utils import GenerationConfig
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as hf_logging

from rollkeel.config import LoraConfig, ModelConfig
from rollkeel.errors import BadInput
from rollkeel.models import adapter_files
from rollkeel.models.adapters import attach, named_adapters
from rollkeel.models.names import checkpoint_views
from rollkeel.models.part_files import entries_of
from rollkeel.models.presets import build_preset, extend
from rollkeel.models.saving import write_weights
from rollkeel.models.sources import Drawn, Source, files_of, refuse_unexpected, without_memory

PRESET_PREFIX = "preset:"


@dataclass(frozen=True)
class Policy:
    """A causal language model with its tokenizer."""

    model: PreTrainedModel
    tokenizer: Any
    lora: LoraConfig | None = None
    """Of the adapters that `model` has."""
    base: dict[str, Any] = field(default_factory=dict)
    """What the adapters stand beside: fields of its `ModelConfig` and its `checksum`, which ranks that hold parts tell when they have them."""
    source: Source | None = None
    """Where the weights come from of a `model` that has none yet: `LocalTrainer` takes its part of them."""

    @property
    def context(self) -> int:
        """Longest sequence the positions were made for, tokens."""
        return int(getattr(self.model.config.get_text_config(), "max_position_embeddings", 2**31))

    @property
    def vocab_size(self) -> int:
        """Number of rows of the embedding table, wherever its parts lie."""
        return int(self.model.config.get_text_config().vocab_size)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """End-of-sequence ids of the generation config, else of the tokenizer."""
        eos = getattr(self.model.generation_config, "eos_token_id", None)
        eos = self.tokenizer.eos_token_id if eos is None else eos
        if eos is None:
            return ()
        return tuple(int(e) for e in eos) if isinstance(eos, (list, tuple)) else (int(eos),)


def resolve_device(name: str) -> torch.device:
    """`auto` takes CUDA when there is one. Raises `BadInput` for `cuda` without a device."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise BadInput("run.device: expected a CUDA device, found none; use run.device=cpu or auto")
    return torch.device(name)


def load_policy(
    config: ModelConfig,
    device: torch.device | str = "cpu",
    seed: int = 0,
    lora: LoraConfig | None = None,
    *,
    whole: bool = True,
) -> Policy:
    """Build a preset, its weights drawn with `seed`, load whatever transformers loads, or merge a folder of adapters into their base.

    With `lora` of a rank, it is frozen and gets new adapters, drawn with `seed`. With `whole=False`, `model` has no weights yet but
    a `source` of them, for the ranks of a trainer that hold a part each. Raises `BadInput` with one line when it cannot.
    """
    if not whole:
        policy = _in_parts(config, seed)
        return policy if lora is None or lora.rank == 0 else _adapted(policy, config, lora, seed, device)
    dtype, path = getattr(torch, config.dtype), Path(config.path).expanduser()
    if config.path.startswith(PRESET_PREFIX):
        model, tokenizer = build_preset(config.path.removeprefix(PRESET_PREFIX), seed, config.overrides, config.context)
        _cast(model, dtype)
    elif (path / adapter_files.CONFIG).is_file() and not (path / "config.json").is_file():
        model, tokenizer = _merged(path, config, dtype)
    else:
        model, tokenizer = _from_pretrained(config, dtype)
    model = model.to(device)  # type: ignore[arg-type]
    policy = Policy(model, tokenizer)
    return policy if lora is None or lora.rank == 0 else _adapted(policy, config, lora, seed, device)


def _adapted(policy: Policy, config: ModelConfig, lora: LoraConfig, seed: int, device: torch.device | str) -> Policy:
    """`policy` with adapters, which lie on `device`."""
    path = Path(config.path).expanduser()
    base = config.model_dump(include={"dtype", "overrides"})
    base["path"] = str(path.resolve()) if path.exists() else config.path
    if policy.source is None:
        base["checksum"] = adapter_files.base_checksum(policy.model)
    attach(policy.model, lora, seed, None if policy.source is None else device)
    return replace(policy, lora=lora, base=base)


def _in_parts(config: ModelConfig, seed: int) -> Policy:
    dtype, source = getattr(torch, config.dtype), None
    if config.path.startswith(PRESET_PREFIX):
        name, source = config.path.removeprefix(PRESET_PREFIX), Drawn()
        with without_memory(), source:
            model, tokenizer = build_preset(name, seed, config.overrides, config.context)
        source.name(model)
        _cast(model, dtype)
        return Policy(model, tokenizer, source=source)
    said = f"model.path {config.path!r}"
    with _refusing(said):
        name, hf_config = _hf_config(config)
        code = {"trust_remote_code": config.trust_remote_code}
        with without_memory():
            model = AutoModelForCausalLM.from_config(hf_config, dtype=dtype, **code)
        tokenizer = AutoTokenizer.from_pretrained(name, **code)
        with suppress(OSError):
            model.generation_config = GenerationConfig.from_pretrained(name)
        patterns = ["*.safetensors", "*.safetensors.index.json"]
        folder = name if Path(name).is_dir() else snapshot_download(name, allow_patterns=patterns)
        return Policy(model.eval(), tokenizer, source=files_of(Path(folder), model, said))


def _cast(model: torch.nn.Module, dtype: torch.dtype) -> None:
    # Not `model.to(dtype)`: rotary frequencies are float32 buffers, and rounded they turn far positions by radians.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def _merged(folder: Path, config: ModelConfig, dtype: torch.dtype) -> tuple[PreTrainedModel, Any]:
    section, checksum = adapter_files.base_of(folder, config)
    base = load_policy(section)
    if checksum and (got := adapter_files.base_checksum(base.model)) != checksum:
        raise BadInput(
            f"model.path {str(folder)!r}: its adapters belong to a {section.path} with checksum {checksum}, this one has {got};"
            " put the base back"
        )
    _cast(base.model, dtype)
    adapter_files.merge(base.model, folder)
    try:
        return base.model, AutoTokenizer.from_pretrained(str(folder), trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError):
        return base.model, base.tokenizer  # a folder of peft's own need not have one


def _from_pretrained(config: ModelConfig, dtype: torch.dtype) -> tuple[PreTrainedModel, Any]:
    said = f"model.path {config.path!r}"
    with _refusing(said):
        name, hf_config = _hf_config(config)
        model, info = AutoModelForCausalLM.from_pretrained(  # type: ignore[misc]
            name, config=hf_config, dtype=dtype, trust_remote_code=config.trust_remote_code, output_loading_info=True
        )
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=config.trust_remote_code)
    missing = sorted(info.get("missing_keys", ()))
    if missing:
        # Randomly initialised leftovers are the classic silent failure of weight loading.
        raise BadInput(f"{said}: the checkpoint lacks {len(missing)} weights, first {missing[0]}")
    refuse_unexpected(model, info.get("unexpected_keys", ()), said)
    return model, tokenizer


def _hf_config(config: ModelConfig) -> tuple[str, Any]:
    """Folder or id, and its config with the overrides."""
    path = config.path
    looks_local = path.startswith((".", "/", "~")) or Path(path).expanduser().exists()
    if looks_local and not (Path(path).expanduser() / "config.json").is_file():
        raise BadInput(f"model.path {path!r}: expected a Hugging Face folder with config.json, found none")
    name = str(Path(path).expanduser()) if looks_local else path
    hf_config = AutoConfig.from_pretrained(name, trust_remote_code=config.trust_remote_code)
    for key, value in config.overrides.items():
        if not hasattr(hf_config, key):
            raise BadInput(f"model.overrides.{key}: {type(hf_config).__name__} has no such field")
        setattr(hf_config, key, value)
    extend(hf_config, config.context)
    return name, hf_config


@contextmanager
def _refusing(said: str) -> Iterator[None]:
    """Inside, what transformers raises becomes one line."""
    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError, StrictDataclassError) as error:
        raise BadInput(f"{said}: transformers cannot load it: {' '.join(str(error).split())[:300]}") from None


def save_policy(
    policy: Policy, folder: str | Path, adapters: Mapping[str, torch.Tensor] | None = None
) -> dict[str, dict[str, Any]]:
    """Write an ordinary Hugging Face folder (config, safetensors, tokenizer), or of adapters PEFT's. `adapters`: where those of the
    model lie in parts, all of them. Returns size and SHA-256 of the files with weights, by name.

    Beside the model no more than a part of a tensor lies in memory. Raises `BadInput` for weights that are no pieces of parameters.
    """
    folder = Path(folder)
    if policy.lora is not None:
        adapters = adapters or named_adapters(policy.model)
        adapter_files.save_adapters(adapters, policy.lora, policy.base, folder)
        policy.tokenizer.save_pretrained(str(folder))
        return {}
    folder.mkdir(parents=True, exist_ok=True)
    save_about(policy, folder)
    views = checkpoint_views(policy.model)
    entries = entries_of(views)
    weights = (views[entry.name] for entry in entries)
    return write_weights(folder, entries, weights, sum(view.numel() for view in views.values()))


def save_about(policy: Policy, folder: Path) -> None:
    """What `save_policy` writes beside the weights: config and tokenizer."""
    model = policy.model
    model.config.dtype = str(model.dtype).removeprefix("torch.")
    model.config.architectures = [type(model).__name__.removeprefix("FSDP")]
    if model.is_remote_code():
        custom_object_save(model, folder, config=model.config)  # type: ignore[arg-type]
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    policy.tokenizer.save_pretrained(str(folder))


def quiet_transformers() -> None:
    """Keep transformers' notices out of progress output; errors still surface as exceptions."""
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)
