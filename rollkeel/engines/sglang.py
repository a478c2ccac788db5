"""SGLang behind the engine: its command line, its streams, its weight updates. Written from the source of sglang 0.5.23.

Not yet run against a live server: `tests/engines/fake_sglang.py` lists each fact of the source this relies on, with its file,
and behaves accordingly. What needs care, and is done here:

* Log-probs of sampled tokens are taken after temperature and before truncation. With `top_k` the server can also return them
  after truncation; their ratio is the kept mass. Truncation without a finite `top_k` is refused.
* A stream is incremental or repeats itself from the start; both are read, and an abort may mix the two.
* Aborting goes by prefix of the request's name, so names are sent in a form in which none is a prefix of another.
* Prefixes cached under older weights survive an update that keeps sequences running. The salt of a request goes along as
  `extra_key`, so that older ones are not matched; the cache is dropped as well where the server is able to.
* With `pause(keep_kv=True)` the step under way ends after the update: the server counts that one token of each sequence to the
  new version, though the old weights computed it.
* The server can hash its weights only in its own packed layout, so `load` returns no checksum: probes prove the weights.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import numpy as np

from rollkeel.engines.backend import Chunk, Generation, Refused, ServerSettings
from rollkeel.engines.sglang_stream import RoutedLayers, Transcript, events, logprob_of, one_line, refusal
from rollkeel.errors import BadInput, EngineFailure
from rollkeel.types import SamplingParams

try:
    import httpx2
except ImportError as gone:
    raise BadInput(
        "engine.kind=sglang: expected the Python package httpx2, it is not installed; install rollkeel[sglang]"
    ) from gone

SPARE = 8
"""Context the server needs beyond the longest sequence: it cuts `max_new_tokens` 2 and refuses prompts 6 tokens before the end."""
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
OURS = ("model-path", "host", "port")


@final
@dataclass(kw_only=True)
class SglangBackend:
    """Speaks HTTP with one SGLang server (`python -m sglang.launch_server`)."""

    name: str = "sglang"
    keeps_kv: bool = True
    returns_topk: bool = True
    returns_experts: bool = field(init=False)
    prefix_cache: bool = True
    """Share the KV of equal prefixes, within one version of the weights."""
    deterministic: bool = False
    """Kernels whose results do not depend on the batch, and draws that depend on `Generation.seed` alone. Slower. Without it
    the server ignores seeds."""
    seed: int = 0
    """Of the server's own generator."""
    experts: RoutedLayers | None = None
    """Shape of what the server returns as routed experts; None does not ask for them."""
    max_top_k: int = 4096
    """Largest `top_k` of truncated sampling; the server returns at most this many kept tokens."""
    silence_s: float = 600.0
    """Longest wait for the next piece of a stream, or for the log-probs of one sequence."""
    control_s: float = 60.0
    """Longest wait for readiness, abort, pause, resume."""
    load_s: float = 600.0
    """Longest wait for new weights."""
    _origin: str = field(default_factory=lambda: uuid.uuid4().hex, repr=False)
    """Keeps the cached prefixes of a server that others used before apart from ours."""
    _checked: bool = field(default=False, init=False, repr=False)
    """Whether the present server was asked for log-probs at two temperatures."""

    def __post_init__(self) -> None:
        self.returns_experts = self.experts is not None

    def check(self, dtype: str) -> None:
        """Raises `BadInput` for a dtype the server has no name for."""
        if dtype not in DTYPES:
            raise BadInput(f"engine.dtype: SGLang serves fp32 or bf16, got {dtype}; others are options of the server")

    def command(self, settings: ServerSettings) -> tuple[list[str], dict[str, str]]:
        """Command line and environment. Raises `BadInput` for a dtype the server has no name for, or an option that is ours."""
        self.check(settings.dtype)
        device, _, index = settings.device.partition(":")
        options: dict[str, Any] = {
            "model-path": str(settings.model),
            "host": "127.0.0.1",
            "port": settings.port,
            "device": device,
            "dtype": DTYPES[settings.dtype],
            "context-length": settings.max_length + SPARE,
            "max-running-requests": settings.slots,
            "random-seed": self.seed,
            "sampling-mask-max-tokens": self.max_top_k,
            "skip-tokenizer-init": True,
            "incremental-streaming-output": True,
            "disable-radix-cache": not self.prefix_cache,
            "enable-deterministic-inference": self.deterministic,
            "enable-return-routed-experts": self.experts is not None,
        }
        if index:
            options["base-gpu-id"] = index
        for given, value in settings.extra.items():
            option = given.replace("_", "-").lstrip("-")
            if option in OURS:
                raise BadInput(f"engine.server.options.{given}: rollkeel sets --{option} itself; leave it out")
            options[option] = value
        self._checked = False
        line = [settings.python, "-m", "sglang.launch_server"]
        for option, value in options.items():
            line += _flag(option, value)
        environment = {
            "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",
            "SGLANG_RUST_SERVER": "0",  # another front end, whose streams nobody here has read
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
            "HF_HUB_OFFLINE": "1",
        }
        if device == "cpu":
            environment["OMP_NUM_THREADS"] = str(settings.threads)
        return line, environment

    async def ready(self, http: Any) -> bool:
        """True once requests would be served; False while it starts, is paused, or nobody listens."""
        for path in ("/ready", "/health"):
            try:
                response = await self._send(http, "GET", path, None, self.control_s)
            except EngineFailure as failure:
                if isinstance(failure.__cause__, httpx2.TransportError):
                    return False
                raise
            if response.status_code == 404:
                continue
            if response.status_code == 503:
                return False
            if response.status_code != 200:
                raise _unexpected("GET", path, response)
            return True
        raise EngineFailure(
            "SGLang: expected GET /ready or /health to exist, got 404 for both; is this an SGLang server?"
        )

    def generate(self, http: Any, wanted: Generation) -> AsyncIterator[Chunk]:
        """Stream one continuation; the last chunk has `finish`. With `return_experts` tokens come with the last chunk only,
        and chunks without tokens before it tell that the server is alive.

        Raises `Refused` for an objection or a request that the server will not serve, `EngineFailure` for a stream that breaks
        off, stays silent for `silence_s` or contradicts itself.
        """
        return self._stream(http, wanted)

    def objection(self, sampling: SamplingParams) -> str:
        """Why this server cannot sample that way and tell the truth about it; empty if it can."""
        s = sampling
        if 0 < s.temperature < 1e-6:
            return f"sampling.temperature: SGLang takes {s.temperature} for greedy; say 0, or at least 1e-6"
        if s.truncated and s.temperature and not 2 <= s.top_k <= self.max_top_k:
            return (
                f"sampling: SGLang returns the kept mass of truncated sampling only for top_k from 2 to {self.max_top_k}, "
                f"got top_k={s.top_k}, top_p={s.top_p}, min_p={s.min_p}; set top_k, or sample without truncation"
            )
        if s.min_p and s.temperature and self.deterministic:
            return f"sampling.min_p: SGLang draws wrongly with min_p={s.min_p} in deterministic mode; set it to 0"
        if s.truncated and s.return_topk:
            return (
                f"sampling.return_topk: SGLang returns the most likely tokens before truncation, got return_topk={s.return_topk} "
                "with truncated sampling; set it to 0"
            )
        if s.return_experts and self.experts is None:
            return "sampling.return_experts: this SGLang backend was opened without its layers of experts"
        return ""

    async def abort(self, http: Any, keys: Sequence[str]) -> None:
        """Stop these generations. A name the server does not know (yet) is ignored by it: ask again if a stream goes on."""
        await asyncio.gather(*(self._control(http, "/abort_request", {"rid": _rid(key)}) for key in keys))

    async def score(self, http: Any, token_ids: Sequence[int]) -> np.ndarray:
        """`[n - 1]` float32 log-probs of tokens 1 … n−1 at temperature 1, from one prefill that uses no cached prefix."""
        tokens = [int(t) for t in token_ids]
        if not tokens:
            raise Refused("SGLang: expected a sequence of at least one token to score, got none")
        body = self._scored(tokens, {"max_new_tokens": 0, "temperature": 1.0}) | {"logprob_start_len": 0}
        response = await self._send(http, "POST", "/generate", body, self.silence_s)
        meta = _answer("/generate", response).get("meta_info")
        rows = meta.get("input_token_logprobs") if isinstance(meta, Mapping) else None
        if not isinstance(rows, list) or len(rows) != len(tokens):
            got = f"{len(rows)}" if isinstance(rows, list) else "none"
            raise EngineFailure(f"SGLang: expected {len(tokens)} input_token_logprobs, one per token, got {got}")
        values = [logprob_of(row, "input_token_logprobs", i) for i, row in enumerate(rows) if i > 0]
        # The server writes 0 for the last id of the vocabulary, meant for placeholders of images.
        named = [row[1] if isinstance(row, list) and len(row) > 1 else None for row in rows]
        for i, (name, token) in enumerate(zip(named, tokens, strict=True)):
            if name not in (token, 0):
                raise EngineFailure(
                    f"SGLang: expected the log-prob of token {token} at position {i}, got that of {name}"
                )
        return np.array(values, np.float32)

    async def pause(self, http: Any, keep_kv: bool) -> None:
        """Stop decoding. With `keep_kv` running sequences stay as they are and go on after `resume`; otherwise all streams
        end with `finish="abort"`, and their KV is given up."""
        await self._control(http, "/pause_generation", {"mode": "in_place" if keep_kv else "retract"})
        if not keep_kv:
            # Its own mode `abort` polls once a second; what it retracted sits in the queue and is dropped at once.
            await self._control(http, "/abort_request", {"abort_all": True})

    async def load(self, http: Any, folder: Path, version: int) -> int | None:
        """Take the weights of `folder`. Returns None: the server has no checksum over checkpoint tensors.

        Raises `EngineFailure` if the server refuses or afterwards serves another version or folder.
        """
        body = {
            "model_path": str(folder),
            "load_format": "auto",
            "weight_version": str(version),
            "abort_all_requests": False,
            "flush_cache": False,
        }
        path = "/update_weights_from_disk"
        response = await self._send(http, "POST", path, body, self.load_s)
        answer = _object(path, response)
        if response.status_code != 200 or answer.get("success") is not True:
            raise EngineFailure(
                f"SGLang: expected version {version} to be loaded from {folder}, got HTTP {response.status_code}: "
                f"{one_line(answer.get('message', answer))}"
            )
        flushed = await self._send(http, "POST", "/flush_cache", None, self.control_s)
        if flushed.status_code not in (200, 400):  # 400: sequences are running, salts have to do
            raise _unexpected("POST", "/flush_cache", flushed)
        await self._check_served(http, folder, version)
        return None

    async def resume(self, http: Any) -> None:
        """Decode again. The first time, two requests of one token find out whether log-probs are those of the sampling
        distribution; raises `EngineFailure` if they ignore the temperature."""
        await self._control(http, "/continue_generation", {"torch_empty_cache": False})
        if not self._checked:
            await self._check_temperature(http)
            self._checked = True

    def _request(self, wanted: Generation) -> dict[str, Any]:
        """Body of `POST /generate`."""
        sampling = wanted.sampling
        if objection := self.objection(sampling):
            raise Refused(objection)
        if not len(wanted.token_ids) or wanted.max_new_tokens < 1:
            raise Refused(
                f"SGLang: expected a prompt and max_new_tokens ≥ 1, got {len(wanted.token_ids)} tokens and {wanted.max_new_tokens}"
            )
        greedy = sampling.temperature == 0
        body = self._scored(
            [int(t) for t in wanted.token_ids],
            {
                "max_new_tokens": wanted.max_new_tokens,
                "temperature": sampling.temperature,
                "top_p": 1.0 if greedy else sampling.top_p,
                "top_k": -1 if greedy or not sampling.top_k else sampling.top_k,
                "min_p": 0.0 if greedy else sampling.min_p,
                "frequency_penalty": 0.0,
                "presence_penalty": 0.0,
                "repetition_penalty": 1.0,
                "sampling_seed": wanted.seed & (2**63 - 1),
                "stop_token_ids": list(sampling.stop_token_ids),
                "ignore_eos": not sampling.stop_token_ids,  # it also switches stop_token_ids off
            },
            wanted.salt,
        )
        body |= {"rid": _rid(wanted.key), "stream": True, "top_logprobs_num": sampling.return_topk}
        if sampling.truncated and not greedy:
            body["return_sampling_mask"] = True
        if sampling.return_experts:
            body |= {"return_routed_experts": True, "routed_experts_start_len": len(wanted.token_ids) - 1}
        return body

    def _scored(self, tokens: list[int], sampling: dict[str, Any], salt: str = "score") -> dict[str, Any]:
        """A request for the continuation of `tokens` with log-probs, under a name of its own."""
        body: dict[str, Any] = {
            "rid": _rid(uuid.uuid4().hex),
            "input_ids": tokens,
            "sampling_params": sampling,
            "return_logprob": True,
            "stream": False,
        }
        return body | ({"extra_key": f"{self._origin}/{salt}"} if self.prefix_cache else {})

    async def _stream(self, http: Any, wanted: Generation) -> AsyncIterator[Chunk]:
        body = self._request(wanted)
        transcript = Transcript(wanted, self.experts)
        what = f"the next tokens of {wanted.key}"
        request = http.build_request("POST", "/generate", json=body, timeout=None)
        response = await _within(self.silence_s, what, http.send(request, stream=True))
        try:
            if response.status_code != 200:
                text = (await _within(self.control_s, what, response.aread())).decode(errors="replace")
                raise refusal(response.status_code, text, f"request {wanted.key}")
            found = events(response.aiter_bytes())
            while not transcript.ended:
                event = await _within(self.silence_s, what, anext(found, None))
                if event is None or event == b"[DONE]":
                    raise EngineFailure(
                        f"SGLang: expected a finish reason of {wanted.key}, its stream ended after {transcript.count} tokens without"
                    )
                yield transcript.read(event)
        finally:
            await response.aclose()

    async def _control(self, http: Any, path: str, body: dict[str, Any]) -> None:
        response = await self._send(http, "POST", path, body, self.control_s)
        if response.status_code != 200:
            raise _unexpected("POST", path, response)

    async def _send(self, http: Any, method: str, path: str, body: Any, seconds: float) -> Any:
        sent = http.request(method, path, json=body, timeout=None)
        return await _within(seconds, f"{method} {path}", sent)

    async def _check_served(self, http: Any, folder: Path, version: int) -> None:
        info = _answer("/model_info", await self._send(http, "GET", "/model_info", None, self.control_s))
        served = info.get("weight_version"), info.get("model_path")
        if served != (str(version), str(folder)):
            raise EngineFailure(
                f"SGLang: expected to serve version {version} from {folder} after loading it, got version {served[0]} from {served[1]}"
            )

    async def _check_temperature(self, http: Any) -> None:
        """At temperature 2 log-probs lie half as far apart as at 1, unless they are those of the model itself."""
        gaps = []
        for temperature in (1.0, 2.0):
            body = self._scored([0], {"max_new_tokens": 1, "temperature": temperature, "ignore_eos": True})
            response = await self._send(http, "POST", "/generate", body | {"top_logprobs_num": 4}, self.control_s)
            meta = _answer("/generate", response).get("meta_info")
            top = meta.get("output_top_logprobs") if isinstance(meta, Mapping) else None
            if not isinstance(top, list) or len(top) != 1 or not isinstance(top[0], list) or len(top[0]) < 2:
                raise EngineFailure(f"SGLang: expected the best tokens of one position, got {one_line(top)}")
            values = [logprob_of(row, "output_top_logprobs", i) for i, row in enumerate(top[0])]
            gaps.append(values[0] - values[-1])
        if gaps[0] > 1e-3 and abs(gaps[1] - gaps[0] / 2) > gaps[0] / 8:
            raise EngineFailure(
                f"SGLang: expected log-probs after temperature, {gaps[0] / 2:.4f} apart at temperature 2, got {gaps[1]:.4f}; "
                "start the server without SGLANG_RETURN_ORIGINAL_LOGPROB"
            )


def _rid(key: str) -> str:
    """The server's name of a request: its length first, so that no name is a prefix of another."""
    return f"{len(key)}:{key}"


def _flag(option: str, value: Any) -> list[str]:
    if value is True:
        return [f"--{option}"]
    if value is False or value is None:
        return []
    if isinstance(value, Mapping):
        return [f"--{option}", json.dumps(dict(value))]
    if isinstance(value, (list, tuple)):
        return [f"--{option}", *map(str, value)]
    return [f"--{option}", str(value)]


async def _within(seconds: float, what: str, awaited: Awaitable[Any]) -> Any:
    """The result of `awaited`; raises `EngineFailure` when it takes too long or the connection fails."""
    try:
        async with asyncio.timeout(seconds):
            return await awaited
    except TimeoutError as late:
        raise EngineFailure(f"SGLang: waited {seconds:g} s for {what}, nothing came; is the server hung?") from late
    except httpx2.TransportError as broken:
        raise EngineFailure(
            f"SGLang: expected {what}, the connection failed with {type(broken).__name__}: {one_line(str(broken))}"
        ) from broken


def _unexpected(method: str, path: str, response: Any) -> EngineFailure:
    return EngineFailure(
        f"SGLang: expected {method} {path} to work, got HTTP {response.status_code}: {one_line(response.text)}"
    )


def _object(path: str, response: Any) -> Mapping[str, Any]:
    try:
        answer = response.json()
    except ValueError:
        answer = None
    if not isinstance(answer, Mapping):
        raise EngineFailure(
            f"SGLang: expected a JSON object from {path}, got HTTP {response.status_code}: {one_line(response.text)}"
        )
    return answer


def _answer(path: str, response: Any) -> Mapping[str, Any]:
    """The JSON object of a successful answer; raises `Refused` for a request at fault (4xx), else `EngineFailure`."""
    if response.status_code != 200:
        raise refusal(response.status_code, response.text, path)
    return _object(path, response)
