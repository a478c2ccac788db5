"""The policy as a controller has it: everything but the weights."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers.generation.configuration_utils import GenerationConfig
from transformers.models.auto import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from rollkeel.config import ModelConfig
from rollkeel.errors import BadInput
from rollkeel.models import adapter_files
from rollkeel.models.loading import PRESET_PREFIX, Policy
from rollkeel.models.presets import build_preset, extend


def skeleton(config: ModelConfig) -> Policy:
    """The policy of `config` whose model lies on the meta device. Raises `BadInput` in one line when it cannot.

    What is wrong with the weights, ranks find when they load them.
    """
    if config.path.startswith(PRESET_PREFIX):
        with torch.device("meta"):
            return Policy(*build_preset(config.path.removeprefix(PRESET_PREFIX), 0, config.overrides, config.context))
    path = Path(config.path).expanduser()
    if (path / adapter_files.CONFIG).is_file() and not (path / "config.json").is_file():
        raise BadInput(
            f"model.path {config.path!r}: adapters cannot be merged over a cluster; rollkeel merge writes a whole model"
        )
    looks_local = config.path.startswith((".", "/", "~")) or path.exists()
    if looks_local and not (path / "config.json").is_file():
        raise BadInput(f"model.path {config.path!r}: expected a Hugging Face folder with config.json, found none")
    name = str(path) if looks_local else config.path
    own = {"trust_remote_code": config.trust_remote_code}
    try:
        hf_config = AutoConfig.from_pretrained(name, **own)
        for key, value in config.overrides.items():
            if not hasattr(hf_config, key):
                raise BadInput(f"model.overrides.{key}: {type(hf_config).__name__} has no such field")
            setattr(hf_config, key, value)
        extend(hf_config, config.context)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(hf_config, **own)
        tokenizer = AutoTokenizer.from_pretrained(name, **own)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, StrictDataclassError) as error:
        raise BadInput(
            f"model.path {config.path!r}: transformers cannot load it: {' '.join(str(error).split())[:300]}"
        ) from None
    with suppress(OSError):  # it need not have one of its own
        model.generation_config = GenerationConfig.from_pretrained(name)
    return Policy(model, tokenizer)
