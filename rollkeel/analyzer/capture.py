"""What one way of computing some tokens had after every operation of every layer, in memory and as a safetensors file.

The names are the same for all sources: rollkeel's engine forward, the trainer's packed forward, a file from elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch
from safetensors.torch import save as to_bytes

from rollkeel.errors import BadInput, Corrupt
from rollkeel.events import write_atomic
from rollkeel.types import FloatArray, IntArray

Key = tuple[int | None, str]
"""Layer (None outside of the layers) and operation."""

OPERATIONS = (
    "input_norm",
    "q_proj",
    "k_proj",
    "v_proj",
    "q_norm",
    "k_norm",
    "q_rope",
    "k_rope",
    "attention",
    "o_proj",
    "attention_residual",
    "post_norm",
    "router",
    "experts",
    "mlp",
    "mlp_residual",
)
"""Of a layer, in the order of computing. `router` are logits, `experts` the ids chosen."""
MODULES = ("self_attention", "feed_forward", "layer")
"""Of a layer of an architecture that rollkeel's own forward does not compute: outputs of transformers' modules."""
FIRST, LAST = ("embedding",), ("final_norm", "logprobs")
SCHEMA = 1
_METADATA = "rollkeel_capture"
_FACTS = ("name", "mode", "model_type")


@dataclass(frozen=True)
class Tokens:
    """S sequences, T tokens in all, flat and in order."""

    sequences: tuple[IntArray, ...]
    """`[n]` int64 each, n ≥ 2: prompt, then response."""
    prompt_lengths: tuple[int, ...]
    """S, each in [1, n)."""

    def __post_init__(self) -> None:
        if not self.sequences or len(self.sequences) != len(self.prompt_lengths):
            raise BadInput(
                f"analyzer: expected sequences with their prompt lengths, got {len(self.sequences)} and"
                f" {len(self.prompt_lengths)}"
            )
        for ids, prompt in zip(self.sequences, self.prompt_lengths, strict=True):
            if not 1 <= prompt < len(ids):
                raise BadInput(
                    f"analyzer: expected a prompt and a response, got {len(ids)} tokens with a prompt of {prompt}"
                )

    def __len__(self) -> int:
        return sum(map(len, self.sequences))

    @property
    def starts(self) -> list[int]:
        """`[S + 1]`: first token of each sequence, then T."""
        return [0, *np.cumsum([len(s) for s in self.sequences]).tolist()]

    @property
    def ids(self) -> torch.Tensor:
        """`[T]` int64."""
        return torch.from_numpy(np.concatenate(self.sequences).astype(np.int64))

    @property
    def positions(self) -> torch.Tensor:
        """`[T]` int64, from 0 in each sequence."""
        return torch.cat([torch.arange(len(s)) for s in self.sequences])

    @property
    def response(self) -> torch.Tensor:
        """`[T]` bool: tokens behind the prompts."""
        pairs = zip(self.sequences, self.prompt_lengths, strict=True)
        return torch.cat([torch.arange(len(s)) >= p for s, p in pairs])

    @property
    def predicted(self) -> torch.Tensor:
        """`[T]` bool: tokens that have a log-prob, all but the first of each sequence."""
        return self.positions > 0


@dataclass(frozen=True, kw_only=True)
class Capture:
    """Values of one side. Bits are exact: a tensor has the dtype it was computed in."""

    name: str
    """For people: `trainer fp32`, `engine bf16`, …"""
    mode: str
    """Numeric mode, one of `rollkeel.models.numerics.MODES`."""
    model_type: str
    tokens: Tokens
    values: Mapping[Key, torch.Tensor]
    """`[T, width]` after each operation."""
    logprobs: torch.Tensor
    """`[T]` float32: log-prob of each token behind those before it, temperature 1; NaN for the first of a sequence."""
    path_logprobs: torch.Tensor | None = None
    """The same by the path that really serves or trains, where compiled kernels take the place of what was captured."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """Anything else a file says: `step`, `version`, …"""

    @property
    def layers(self) -> list[int]:
        """Layers with any value, in order."""
        return sorted({layer for layer, _ in self.values if layer is not None})

    @property
    def served_logprobs(self) -> torch.Tensor:
        """`[T]` of the real path."""
        return self.logprobs if self.path_logprobs is None else self.path_logprobs


class Recorder:
    """Collects values of passes over parts of the tokens. Called as `models.forward.Observe`."""

    def __init__(self, tokens: int, layers: Sequence[int] = ()) -> None:
        """`layers`: keep only these (all when empty), with what enters them."""
        self._tokens = tokens
        self._layers = set(layers)
        self.rows = torch.arange(tokens)
        """`[N]` int64: which tokens the values of the pass now under way belong to."""
        self.values: dict[Key, torch.Tensor] = {}

    def __call__(self, layer: int | None, name: str, value: torch.Tensor) -> None:
        if not self._wanted(layer, name):
            return
        flat = value.detach().reshape(len(self.rows), -1).cpu()
        if (layer, name) not in self.values:
            self.values[layer, name] = torch.zeros(self._tokens, flat.shape[1], dtype=flat.dtype)
        self.values[layer, name].index_copy_(0, self.rows, flat)

    def _wanted(self, layer: int | None, name: str) -> bool:
        if not self._layers or layer is None or layer in self._layers:
            return True
        return layer + 1 in self._layers and name in ("mlp_residual", "layer")


def order_of(keys: Iterable[Key]) -> list[Key]:
    """Keys in the order of computing."""
    names = {name: at for at, name in enumerate((*OPERATIONS, *MODULES))}

    def place(key: Key) -> tuple[int, int, int]:
        layer, name = key
        if layer is None:
            return (0, 0, 0) if name in FIRST else (2, 0, LAST.index(name) if name in LAST else 0)
        return 1, layer, names.get(name, len(names))

    return sorted(keys, key=place)


def save_capture(path: str | Path, capture: Capture) -> None:
    """Write a capture, atomically; `docs/trace.md` is the schema. Raises `BadInput` if the disk is full."""
    tokens = capture.tokens
    tensors = {tensor_name(key): value.contiguous() for key, value in capture.values.items()}
    tensors["token_ids"] = tokens.ids
    tensors["lengths"] = torch.tensor([len(s) for s in tokens.sequences])
    tensors["prompt_lengths"] = torch.tensor(tokens.prompt_lengths)
    tensors["logprobs"] = capture.logprobs.contiguous()
    if capture.path_logprobs is not None:
        tensors["path_logprobs"] = capture.path_logprobs.contiguous()
    facts = {name: getattr(capture, name) for name in _FACTS}
    # One entry: safetensors writes several in no fixed order, and the same run must write the same bytes.
    metadata = {_METADATA: json.dumps({"schema": SCHEMA, **facts, "facts": dict(capture.facts)})}
    write_atomic(path, to_bytes(tensors, metadata), sync=False)


def load_capture(path: str | Path) -> Capture:
    """Read what `save_capture` wrote. Raises `BadInput` for a file of something else, `Corrupt` for a damaged one."""
    path = Path(path)
    if not path.is_file():
        raise BadInput(f"{path}: no such file; expected recorded tensors (tensors/step_….safetensors)")
    try:
        with safetensors.safe_open(path, "pt") as file:
            metadata = json.loads((file.metadata() or {}).get(_METADATA, "{}"))
            if metadata.get("schema") != SCHEMA:
                raise BadInput(
                    f"{path}: expected tensors recorded by rollkeel (schema {SCHEMA}), got other safetensors"
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except safetensors.SafetensorError as error:
        raise Corrupt(f"{path}: not whole ({' '.join(str(error).split())[:120]}); record it again") from None
    try:
        return _capture(metadata, tensors)
    except (KeyError, ValueError, RuntimeError) as error:
        raise Corrupt(f"{path}: {' '.join(str(error).split())[:160]} is missing or wrong; record it again") from None


def _capture(metadata: Mapping[str, Any], tensors: dict[str, torch.Tensor]) -> Capture:
    lengths = tensors.pop("lengths").tolist()
    ids = tensors.pop("token_ids").numpy()
    sequences = np.split(ids, np.cumsum(lengths)[:-1])
    tokens = Tokens(tuple(sequences), tuple(tensors.pop("prompt_lengths").tolist()))
    logprobs, path_logprobs = tensors.pop("logprobs"), tensors.pop("path_logprobs", None)
    return Capture(
        **{name: metadata[name] for name in _FACTS},
        tokens=tokens,
        values={key_of(name): value for name, value in tensors.items()},
        logprobs=logprobs,
        path_logprobs=path_logprobs,
        facts=metadata["facts"],
    )


def tensor_name(key: Key) -> str:
    """`embedding`, `layers.3.q_rope`."""
    layer, name = key
    return name if layer is None else f"layers.{layer}.{name}"


def key_of(name: str) -> Key:
    """What `tensor_name` was made of."""
    if not name.startswith("layers."):
        return None, name
    _, layer, operation = name.split(".")
    return int(layer), operation


def trim(tokens: Tokens, *, sequences: int, limit: int) -> Tokens:
    """The first `sequences` sequences, fewer if they hold more than `limit` tokens, at least one (cut to `limit`)."""
    kept: list[IntArray] = []
    prompts: list[int] = []
    for ids, prompt in zip(tokens.sequences[:sequences], tokens.prompt_lengths, strict=False):
        if kept and sum(map(len, kept)) + len(ids) > limit:
            break
        kept.append(ids[: max(limit, prompt + 1)])
        prompts.append(prompt)
    return Tokens(tuple(kept), tuple(prompts))


def spread(tokens: Tokens, found: Sequence[FloatArray]) -> torch.Tensor:
    """`[T]` log-probs from `[n − 1]` per sequence, NaN for the first token of each."""
    out = torch.full((len(tokens),), float("nan"))
    out[tokens.predicted] = torch.from_numpy(np.concatenate(list(found)).astype(np.float32))
    return out


def renamed(capture: Capture, name: str) -> Capture:
    """The same values under another name."""
    return replace(capture, name=name)
