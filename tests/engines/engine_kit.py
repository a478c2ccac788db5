"""Shared by the engine tests: a peaked tiny model, an engine that serves it, and requests for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from rollkeel.config import EngineConfig
from rollkeel.engines.kv import Layout
from rollkeel.engines.local import LocalEngine
from rollkeel.models.checksum import MASK, tensor_checksum
from rollkeel.models.names import checkpoint_views
from rollkeel.models.presets import build_preset
from rollkeel.sync.publish import full_update
from rollkeel.types import Request, SamplingParams, Segment, TokenSpan

PEAKED = {"initializer_range": 0.15}
"""Initial weights twice the preset's: distributions far from uniform and routing that depends on the token."""


def model_of(preset: str = "tiny-qwen3-moe", seed: int = 0, **overrides: Any) -> Any:
    return build_preset(preset, seed, {**PEAKED, **overrides})[0].eval()


def engine_of(model: Any, *, version: int = 0, max_length: int = 96, **config: Any) -> LocalEngine:
    """A `LocalEngine` that serves `model` as `version`."""
    layout = {key: config.pop(key) for key in Layout._fields if key in config}
    engine = LocalEngine(model.config, EngineConfig(**config), max_length=max_length, layout=Layout(**layout))
    engine.update_weights(full_update(checkpoint_views(model).items(), version))
    return engine


def prompts_of(count: int, seed: int = 0, low: int = 3, high: int = 24, vocab: int = 288) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, vocab, int(rng.integers(low, high + 1))) for _ in range(count)]


def requests_of(prompts: Sequence[np.ndarray], first: int = 0, **sampling: Any) -> list[Request]:
    params = SamplingParams(**sampling)
    return [Request(id=first + i, prompt_ids=p, sampling=params) for i, p in enumerate(prompts)]


def drain(engine: Any, rounds: int = 1_000_000, *, silence_s: float = 60.0) -> dict[int, Segment]:
    """Every segment still owed, by request id, as long as one comes within `silence_s`. A request answered twice is an error."""
    out: dict[int, Segment] = {}
    for _ in range(rounds):
        segments = engine.poll(silence_s)
        if not segments:
            return out
        for segment in segments:
            assert segment.request_id not in out
            out[segment.request_id] = segment
    raise AssertionError("the engine never became empty")


def run(engine: Any, requests: Sequence[Request]) -> dict[int, Segment]:
    engine.submit(requests)
    return drain(engine)


def steps(engine: LocalEngine, count: int) -> list[Segment]:
    """Exactly `count` decode steps, then whatever ended."""
    out: list[Segment] = []
    for _ in range(count):
        out += engine.poll(0.0)
    return out


def same(a: TokenSpan, b: TokenSpan, tolerance: float = 1e-4) -> bool:
    return np.array_equal(a.token_ids, b.token_ids) and bool(
        np.allclose(a.logprobs, b.logprobs, atol=tolerance, rtol=0)
    )


def facts_of(segment: Segment) -> tuple[Any, ...]:
    """All of a segment, its arrays as bytes."""
    span = vars(segment.span)
    return (
        segment.request_id,
        segment.status,
        *((k, v.tobytes() if isinstance(v, np.ndarray) else v) for k, v in span.items()),
    )


def resumed(request: Request, part: TokenSpan) -> Request:
    return Request(
        id=request.id, prompt_ids=request.prompt_ids, sampling=request.sampling, prefix=request.prefix.append(part)
    )


@torch.no_grad()
def reference_logprobs(model: Any, prompt: np.ndarray, response: Iterable[int]) -> np.ndarray:
    """`[n]` log-probs of `response` by transformers' own forward of this one sequence."""
    answer = list(response)
    ids = torch.tensor([[*prompt.tolist(), *answer]])
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1)[torch.arange(len(answer)), torch.tensor(answer)].numpy()


def folder_checksum(folder: Path) -> int:
    """Of the weights as they are on disk."""
    total = 0
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(str(file), framework="pt") as weights:
            total += sum(tensor_checksum(name, weights.get_tensor(name)) for name in weights.keys())  # noqa: SIM118
    return total & MASK
