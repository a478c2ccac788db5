"""Models of real shapes with weights drawn on the device, engines that serve them, and what their passes cost at least."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers.models.qwen3 import Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM

from benchmarks.gpu.bench import Bench
from rollkeel.config import EngineConfig
from rollkeel.engines.local import LocalEngine
from rollkeel.memory.shapes import PUBLIC, Shape, shape_of
from rollkeel.models import names
from rollkeel.models.loading import Policy
from rollkeel.models.names import checkpoint_views
from rollkeel.models.presets import build_tokenizer
from rollkeel.sync.publish import DirectPublisher
from rollkeel.types import Request, SamplingParams

KINDS: dict[str, tuple[Any, Any]] = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
}
TOY: dict[str, int] = {
    "vocab_size": 288,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 128,
}
TOY_MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
CUT = {"Qwen3-30B-A3B": {"num_hidden_layers": 4}}
"""Of a model that does not fit whole: its rows say so."""
MODELS = ("Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-4B", "Qwen3-30B-A3B")


def changes(name: str, toy: bool, **fields: Any) -> dict[str, Any]:
    """Fields that differ from the public config."""
    sparse = "num_experts" in PUBLIC[f"Qwen/{name}"]
    return {**CUT.get(name, {}), **({**TOY, **(TOY_MOE if sparse else {})} if toy else {}), **fields}


def title(name: str) -> str:
    return f"{name} ({CUT[name]['num_hidden_layers']} layers)" if name in CUT else name


def shape(bench: Bench, name: str, **fields: Any) -> Shape:
    return shape_of(f"Qwen/{name}", changes(name, bench.toy, **fields))


def policy(
    bench: Bench, name: str, dtype: torch.dtype = torch.bfloat16, std: float = 0.02, seed: int = 0, **fields: Any
) -> Policy:
    """The architecture `name` with weights drawn on the device."""
    about = {**PUBLIC[f"Qwen/{name}"], **changes(name, bench.toy, **fields)}
    config_type, model_type = KINDS[about.pop("model_type")]
    config = config_type(
        **about,
        initializer_range=std,
        norm_topk_prob=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(seed)
    with torch.device(bench.device):
        model = model_type._from_config(config, dtype=dtype)
    return Policy(model.eval(), build_tokenizer())


class Eager:
    """Runs a decode step from Python each time, in the place of a CUDA graph."""

    def capture(self, step: Callable[[], object]) -> Callable[[], object]:
        return step


def has(thing: Any, argument: str) -> bool:
    """Whether this version of a function or class takes `argument`."""
    return argument in inspect.signature(thing).parameters


def engine(
    bench: Bench, made: Policy, slots: int, length: int, dtype: str = "bf16", forward: str = "auto", **more: Any
) -> LocalEngine:
    """Serves `made`, with room for `slots` sequences of `length` tokens."""
    config = made.model.config
    numbers = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    size = {"fp32": 4}.get(dtype, 2)
    room = slots * (length + 64) * numbers * size / 2**30 + 0.05
    settings = EngineConfig(slots=slots, dtype=dtype, max_length=length, kv_memory_gb=room, forward=forward)  # type: ignore[arg-type]
    built = LocalEngine(config, settings, device=bench.device, max_length=length, **more)
    DirectPublisher([built]).publish(checkpoint_views(made.model).items(), 0)
    return built


def publisher(engine: LocalEngine, made: Policy) -> tuple[DirectPublisher, bool]:
    """Publishes `made` to `engine`; from memory that both compute with, where this version can."""
    move_into = getattr(names, "move_into", None)
    if move_into is None or not has(DirectPublisher.__init__, "shared") or move_into(made.model, engine.weights):  # type: ignore[attr-defined]
        return DirectPublisher([engine]), False
    return DirectPublisher([engine], shared=True), True  # pyright: ignore[reportCallIssue]


def requests(count: int, prompt: int, new: int, vocab: int, first: int = 0, **sampling: Any) -> list[Request]:
    """Prompts that differ, and answers of forced length."""
    rng = np.random.default_rng(first)
    return [
        Request(
            id=first + i,
            prompt_ids=rng.integers(8, min(vocab, 264), prompt),
            sampling=SamplingParams(max_new_tokens=new, **sampling),
        )
        for i in range(count)
    ]


def decode_bytes(about: Shape, lengths: list[int], size: int) -> float:
    """What a decode step must read: weights once, of a mixture the experts that its tokens are expected to choose, and all KV."""
    read = about.parameters - (0 if about.tied else about.vocab * about.width)
    if about.experts:
        missed = (1 - about.chosen / about.experts) ** len(lengths)
        read -= int(about.layers * about.experts * 3 * about.width * about.mlp * missed)
    return size * (read + 2.0 * about.layers * about.keys * sum(lengths))


def training_flops(about: Shape, lengths: list[int], learnt: int) -> float:
    """6 N per token with the experts it goes to, the head at the tokens that are learnt, and causal attention; recomputing is not counted."""
    active = about.width * (2 * about.queries + 2 * about.keys)
    active += 3 * about.width * about.mlp * (about.chosen if about.experts else 1) + about.experts * about.width
    attention = 6.0 * about.layers * about.queries * sum(n * n for n in lengths)
    return 6.0 * about.layers * active * sum(lengths) + 6.0 * about.vocab * about.width * learnt + attention
