"""A preset is a model without a download: the same seed must give the same weights everywhere, and a bad override one clear line.

Also the tokenizer's round trip and loading a saved folder back. Not covered: downloads from a hub.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollkeel.config import ModelConfig
from rollkeel.errors import BadInput
from rollkeel.models.loading import load_policy, resolve_device, save_policy
from rollkeel.models.presets import EOS, PRESETS, SPECIAL_TOKENS, build_preset, build_tokenizer


@pytest.mark.parametrize("name", PRESETS)
def test_weights_are_a_function_of_the_seed_alone(name: str) -> None:
    torch.manual_seed(123)
    state = torch.get_rng_state()
    a, _ = build_preset(name, 5)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(77)
    b, _ = build_preset(name, 5)
    c, _ = build_preset(name, 6)
    assert all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))
    assert not torch.equal(a.get_input_embeddings().weight, c.get_input_embeddings().weight)  # type: ignore[union-attr]


def test_the_default_stays_small_and_all_keep_the_widths_other_engines_need() -> None:
    model, _ = build_preset("tiny-qwen3-moe")
    assert sum(p.numel() for p in model.parameters()) == 185_792
    for config_type, _, fields in PRESETS.values():
        config = config_type(**fields)
        assert config.head_dim >= 32
        assert config.hidden_size % 32 == config.vocab_size % 32 == 0


@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-qwen3-moe"])
@pytest.mark.parametrize("overrides", [{"num_hidden_layers": 4}, {"num_hidden_layers": 1}, {"hidden_size": 96}])
def test_overrides_change_the_architecture(name: str, overrides: dict[str, Any]) -> None:
    model, _ = build_preset(name, 0, overrides)
    assert all(getattr(model.config, k) == v for k, v in overrides.items())
    assert model(torch.arange(9)[None]).logits.shape == (1, 9, 288)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"layers": 4}, "Qwen3MoeConfig has no such field"),
        ({"hidden_size": "wide"}, "expected int, got str"),
        ({"head_dim": 33}, "even rotary dimension"),
        ({"num_attention_heads": 3}, "multiple of num_key_value_heads=2, got 3"),
        ({"num_experts_per_tok": 9}, "at most num_experts=8, got 9"),
        ({"vocab_size": 200}, "at least the tokenizer's 264, got 200"),
    ],
)
def test_bad_overrides_get_one_line(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message) as refused:
        build_preset("tiny-qwen3-moe", 0, overrides)
    assert "\n" not in str(refused.value)
    assert next(iter(overrides)) in str(refused.value)


def test_an_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(BadInput, match="did you mean preset:tiny-qwen3-moe"):
        load_policy(ModelConfig(path="preset:tiny-qwen-moe"))


@pytest.mark.parametrize(
    "text", ["", "1+2=3\n", " déjà vu  ☃ 漢字\t", "<|user|>not a role<|end|>", "".join(map(chr, range(256)))]
)
def test_any_text_survives_the_tokenizer(text: str) -> None:
    tokenizer = build_tokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert all(0 <= i < len(SPECIAL_TOKENS) + 256 for i in ids)
    assert tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False) == text


def test_a_saved_policy_is_an_ordinary_folder_and_loads_back(tmp_path: Path) -> None:
    policy = load_policy(ModelConfig(path="preset:tiny-qwen3-moe"), seed=3)
    save_policy(policy, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.arange(8, 40)[None]
    assert torch.equal(loaded(ids).logits, policy.model(ids).logits)
    assert AutoTokenizer.from_pretrained(tmp_path).encode("12+7") == policy.tokenizer.encode("12+7")
    again = load_policy(ModelConfig(path=str(tmp_path)))
    assert (again.context, again.vocab_size, again.stop_token_ids) == (4096, 288, (EOS,))


def test_damaged_or_unfit_folders_get_one_line(tmp_path: Path) -> None:
    save_policy(load_policy(ModelConfig()), tmp_path)
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    whole, text = weights.read_bytes(), config.read_text()

    def refused(message: str, **options: Any) -> None:
        with pytest.raises(BadInput, match=message) as caught:
            load_policy(ModelConfig(path=str(tmp_path), **options))
        assert "\n" not in str(caught.value)

    weights.write_bytes(whole[: len(whole) // 2])
    refused("cannot load it")
    weights.write_bytes(b"no weights")
    refused("cannot load it")
    weights.write_bytes(whole)
    refused("lacks 22 weights", overrides={"num_hidden_layers": 4})
    refused("cannot load it", overrides={"hidden_size": "wide"})
    refused("cannot load it", overrides={"hidden_size": 128})
    refused("no such field", overrides={"widht": 1})
    config.write_text("{")
    refused("not a valid JSON")
    config.write_text(json.dumps({"model_type": "no-such-model"}))
    refused("cannot load it")
    config.unlink()
    refused(r"expected a Hugging Face folder with config\.json")
    config.write_text(text)
    weights.unlink()
    refused("cannot load it")


def test_a_missing_folder_and_a_missing_device_get_one_line(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"expected a Hugging Face folder with config\.json, found none"):
        load_policy(ModelConfig(path=str(tmp_path / "nothing")))
    if not torch.cuda.is_available():
        assert resolve_device("auto").type == "cpu"
        with pytest.raises(BadInput, match="found none"):
            resolve_device("cuda")
