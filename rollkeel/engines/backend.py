"""What differs between inference servers: how one is started, asked for tokens, interrupted and given weights.

`ServedEngine` (served.py) is the engine; a `Backend` speaks one server's HTTP. Backends are stateless but for their settings, so
that a server can be restarted under them. Every method that waits raises `EngineFailure` naming what it waited for.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from rollkeel.config import EngineConfig
from rollkeel.errors import EngineFailure
from rollkeel.types import SamplingParams


class Refused(EngineFailure):
    """The server understood a request and will not serve it (HTTP 4xx): asking again is of no use."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One continuation asked of a server."""

    key: str
    """Name of the request at the server, unique over restarts and re-issues; `abort` uses it."""
    token_ids: Sequence[int]
    """Prompt and everything sampled so far."""
    sampling: SamplingParams
    max_new_tokens: int
    """Tokens still to sample; ≤ `sampling.max_new_tokens`."""
    seed: int
    """For the server's own generator: a function of run seed, rollout and tokens already sampled; 62 bits."""
    experts_from: int = 0
    """First place of `token_ids` whose experts are asked for, where any are; the last place samples the first token."""
    salt: str = ""
    """Cached prefixes may only be shared with generations of the same salt: it names the weights that compute them."""


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """New tokens of a generation, in order."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    """Under the distribution that sampled them (after temperature)."""
    topk_ids: Sequence[Sequence[int]] = ()
    topk_logprobs: Sequence[Sequence[float]] = ()
    experts: np.ndarray | None = None
    """On the last chunk, where they were asked for: `[n, layers, k]` of every token of this stream, behind those from
    `Generation.experts_from` on."""
    finish: str = ""
    """`stop`, `length`, `abort`; empty while more is to come."""
    version_starts: Sequence[tuple[int, int]] = ()
    """On the last chunk, from servers that keep count: (version, index of the first token of this stream it sampled)."""


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """How a server is started."""

    model: Path = Path()
    """Hugging Face folder with config, tokenizer and the weights to begin with."""
    port: int = 0
    dtype: str
    max_length: int
    slots: int
    """Most sequences decoded together."""
    python: str
    """Interpreter that has the server installed."""
    device: str
    threads: int = 1
    """CPU threads of the server, where it computes on a CPU."""
    kv_memory_gb: float | None = None
    """Most memory for the KV cache; None leaves it to the server."""
    share: float | None = None
    """Of the device's memory, the server's; None leaves it to the server."""
    sleeps: bool = False
    """Whether it gives the device away between rollouts and new weights."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further command line options, `name: value`; a value of True stands for a bare switch."""

    @classmethod
    def of(cls, config: EngineConfig, **others: Any) -> ServerSettings:
        """What `config` says, and `others`. Model, port and share are those of one life of the server."""
        same = {"dtype": config.dtype, "slots": config.slots, "kv_memory_gb": config.kv_memory_gb}
        return cls(**same, extra=config.server.options, **others)


class Backend(Protocol):
    """One kind of inference server. `http` is an asynchronous client bound to the server's address."""

    name: str
    returns_topk: bool
    """Whether `Chunk.topk_ids` and `topk_logprobs` are filled on request."""

    def returns_experts(self, config: EngineConfig, hf_config: Any) -> bool:
        """Whether `Chunk.experts` is filled on request, for this model by a server started so."""
        ...

    def check(self, dtype: str) -> None:
        """Raises `BadInput` for a numeric mode (`engine.dtype`) that the server cannot be started in."""
        ...

    def objection(self, sampling: SamplingParams) -> str:
        """Empty, or in one line why rollouts sampled so could not be told truthfully."""
        ...

    def command(self, settings: ServerSettings) -> tuple[list[str], dict[str, str]]:
        """Command line and additional environment that start the server."""
        ...

    async def ready(self, http: Any) -> bool:
        """True once requests would be served."""
        ...

    def generate(self, http: Any, wanted: Generation) -> AsyncIterator[Chunk]:
        """Stream one continuation; the last chunk has `finish`."""
        ...

    async def abort(self, http: Any, keys: Sequence[str]) -> None:
        """Stop these generations; their streams end with `finish="abort"`."""
        ...

    async def score(self, http: Any, token_ids: Sequence[int]) -> np.ndarray:
        """`[n - 1]` float32 log-probs of tokens 1 … n−1 under the served weights at temperature 1."""
        ...

    async def pause(self, http: Any, keep_kv: bool) -> None:
        """Stop decoding so that weights can change; `keep_kv` leaves running sequences and their KV in the server."""
        ...

    async def load(self, http: Any, source: Path | str, version: int) -> int:
        """Take the weights of a Hugging Face folder (safetensors) that this machine and the server both see, or those of a
        message of `same_device.lent`, drop every cached prefix. Returns the checksum of what the server received."""
        ...

    async def fill(self, http: Any, version: int, write: Callable[[], Awaitable[None]]) -> None:
        """Serve the weights that `write` brings into the server's memory, see `boxes.Boxes.fill`; drop every cached prefix."""
        ...

    async def workers(self, http: Any, what: str, message: str) -> list[dict[str, str]]:
        """What each process of the server answers to a method of `vllm_worker.Publication`; `error` is why it could not."""
        ...

    async def place(self, http: Any) -> str:
        """The one device of the server's weights as `same_device.place` names it; empty where they cannot be lent."""
        ...

    async def sleep(self, http: Any) -> None:
        """Give the device's memory away, weights and KV with it. Nothing is in flight."""
        ...

    async def wake(self, http: Any, what: Literal["weights", "kv_cache"]) -> None:
        """Take memory again, without what was in it: first of the weights, behind `load` of the KV cache."""
        ...

    async def resume(self, http: Any) -> None:
        """Decode again."""
        ...
