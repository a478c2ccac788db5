"""vLLM's server: what it is started with, and its HTTP as `ServedEngine` needs it. Written against vLLM 0.32.

Token ids in and out through `/inference/v1/generate` (streamed, a few tokens per event), log-probs of the sampling distribution
(`--logprobs-mode processed_logprobs`), the control routes of `VLLM_SERVER_DEV_MODE`, and weights through our worker extension.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import shutil
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

import rollkeel
import rollkeel_sandbox
from rollkeel.config import EngineConfig
from rollkeel.engines import vllm_worker
from rollkeel.engines.backend import Chunk, Generation, Refused, ServerSettings
from rollkeel.engines.kv import KV_GB
from rollkeel.engines.same_device import options_of
from rollkeel.errors import BadInput, EngineFailure
from rollkeel.types import SamplingParams

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
WORKER = "rollkeel_vllm_worker"
MAX_LOGPROBS = 128
"""Most likely tokens that a request may ask for, less one."""
STREAM_INTERVAL = 8
"""Tokens per event of a stream; an abort brings what is left. Reading one event per token would halve the speed of small
models; a crash costs up to this many tokens of each stream, which are sampled again."""
_PREFIX = "generate-tokens-"
"""vLLM puts this before the request ids of `/inference/v1/generate`; aborting needs the whole name."""
_UNKNOWN = -1


class VllmBackend:
    """Implements `rollkeel.engines.backend.Backend`."""

    name = "vllm"
    returns_topk = True

    def returns_experts(self, config: EngineConfig, hf_config: Any) -> bool:
        text = hf_config.get_text_config()
        experts = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None)
        return bool(experts) and options_of(config).get("enable_return_routed_experts") is True

    def check(self, dtype: str) -> None:
        vllm_dtype(dtype)

    def objection(self, sampling: SamplingParams) -> str:
        if sampling.truncated and sampling.temperature > 0 and not sampling.evaluation:
            return (
                "sampling: vllm does not tell the mass that top_p, top_k or min_p keep; set top_p=1 top_k=0 min_p=0, or use"
                " engine.kind=local"
            )
        if sampling.return_topk >= MAX_LOGPROBS:
            return f"sampling.return_topk: vllm was started for at most {MAX_LOGPROBS - 1}, got {sampling.return_topk}"
        return ""

    def command(self, settings: ServerSettings) -> tuple[list[str], dict[str, str]]:
        beside = settings.model.parent / "server"
        beside.mkdir(exist_ok=True)
        shutil.copyfile(vllm_worker.__file__, beside / f"{WORKER}.py")
        for package in (rollkeel, rollkeel_sandbox):  # these alone: what else is installed here is not the server's
            with contextlib.suppress(FileExistsError):
                (beside / package.__name__).symlink_to(Path(str(package.__file__)).parent)
        cpu = settings.device == "cpu"
        options: dict[str, Any] = {
            "model": str(settings.model),
            "host": "127.0.0.1",
            "port": settings.port,
            "dtype": vllm_dtype(settings.dtype),
            "max-model-len": settings.max_length,
            "max-num-seqs": settings.slots,
            "max-logprobs": MAX_LOGPROBS,
            "stream-interval": STREAM_INTERVAL,
            "logprobs-mode": "processed_logprobs",
            "generation-config": "vllm",
            "worker-extension-cls": f"{WORKER}.Publication",
            # Logits rounded to 16 bits move a likely token's log-prob by more than most of what is measured here.
            "hf-overrides": None if settings.dtype == "fp32" else {"head_dtype": "float32"},
            "skip-tokenizer-init": True,
            "enable-scale-out": True,
            "disable-uvicorn-access-log": True,
            "enforce-eager": cpu,
            "enable-sleep-mode": settings.sleeps,
            "gpu-memory-utilization": settings.share,
            "kv-cache-memory-bytes": None if cpu or not settings.kv_memory_gb else int(settings.kv_memory_gb * 2**30),
            # On a CPU 0.32.0 hangs, without a word, on a prompt that is prefilled in more than one step.
            "max-num-batched-tokens": max(settings.max_length, 2048) if cpu else None,
            "no-enable-chunked-prefill": cpu,
            **{name.replace("_", "-"): value for name, value in settings.extra.items()},
        }
        environment = {
            "PYTHONPATH": str(beside),
            "NUMBA_CACHE_DIR": str(beside / "kernels"),  # its numba may be another one
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        if cpu:
            environment |= {
                "VLLM_CPU_KVCACHE_SPACE": str(max(1, round(settings.kv_memory_gb or KV_GB))),
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "OMP_NUM_THREADS": str(settings.threads),
            }
        return [settings.python, "-m", "vllm.entrypoints.openai.api_server", *_words(options)], environment

    async def ready(self, http: Any) -> bool:
        return (await http.get("/health")).status_code == 200

    async def generate(self, http: Any, wanted: Generation) -> AsyncIterator[Chunk]:
        sampling = wanted.sampling
        body = {
            "request_id": wanted.key,
            "token_ids": list(wanted.token_ids),
            "stream": True,
            "cache_salt": wanted.salt or None,
            "sampling_params": {
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "min_p": sampling.min_p,
                "max_tokens": wanted.max_new_tokens,
                "stop_token_ids": list(sampling.stop_token_ids),
                "ignore_eos": True,
                "seed": wanted.seed,
                "logprobs": sampling.return_topk + 1 if sampling.return_topk else 0,
                "detokenize": False,
                **({"routed_experts_prompt_start": wanted.experts_from} if sampling.return_experts else {}),
            },
        }
        async with http.stream("POST", "/inference/v1/generate", json=body) as answer:
            if answer.status_code != 200:
                await answer.aread()
                _check(answer, "generate")
            async for line in answer.aiter_lines():
                if not line.startswith("data:") or line == "data: [DONE]":
                    continue
                chunk = _chunk(_json(line[5:], "generate"), sampling.return_topk)
                yield chunk
                if chunk.finish:
                    return

    async def abort(self, http: Any, keys: Sequence[str]) -> None:
        # An empty list would abort everything.
        if keys:
            _check(await http.post("/abort_requests", json={"request_ids": [_PREFIX + k for k in keys]}), "abort")

    async def score(self, http: Any, token_ids: Sequence[int]) -> np.ndarray:
        body = {
            "token_ids": list(token_ids),
            "cache_salt": uuid.uuid4().hex,
            "sampling_params": {"temperature": 0.0, "max_tokens": 1, "prompt_logprobs": 0, "detokenize": False},
        }
        answer = _check(await http.post("/inference/v1/generate", json=body), "score")
        try:
            rows = answer["prompt_logprobs"][1:]
            logprobs = [row[str(token)]["logprob"] for token, row in zip(token_ids[1:], rows, strict=True)]
        except (KeyError, TypeError, ValueError) as error:
            raise EngineFailure(f"engine vllm: expected log-probs of {len(token_ids)} tokens, got {error!r}") from None
        return np.array(logprobs, np.float32)

    async def pause(self, http: Any, keep_kv: bool) -> None:
        mode = "keep" if keep_kv else "abort"
        _check(await http.post("/pause", params={"mode": mode, "clear_cache": str(not keep_kv).lower()}), "pause")

    async def load(self, http: Any, source: Path | str, version: int) -> int:
        await self._label(http, _UNKNOWN)
        lent = isinstance(source, str)
        where = "by handles" if lent else f"in {source}"
        workers = await self.workers(http, "rollkeel_take" if lent else "rollkeel_load", str(source))
        errors = [str(w.get("error")) for w in workers if "checksum" not in w]
        if errors or not workers:
            raise EngineFailure(
                f"engine vllm: a worker could not load weights {where}: {'; '.join(errors) or 'no answer'}"
            )
        sums = {int(w["checksum"]) for w in workers}
        if len(sums) != 1:
            raise EngineFailure(f"engine vllm: workers disagree about the weights {where}: {sorted(sums)}")
        await self._label(http, version)
        return sums.pop()

    async def fill(self, http: Any, version: int, write: Callable[[], Awaitable[None]]) -> None:
        await self._label(http, _UNKNOWN)
        await write()
        await self._label(http, version)

    async def _label(self, http: Any, version: int) -> None:
        """Name the weights: none while they are half there."""
        if version != _UNKNOWN:
            # Frees cached prefixes. Sequences that are kept hold theirs; nobody else finds them, because salts name versions.
            _check(await http.post("/reset_prefix_cache"), "reset the prefix cache")
        _check(await http.post("/update_weight_version", json={"new_version": str(version)}), "label weights")

    async def place(self, http: Any) -> str:
        places = [worker.get("place", "") for worker in await self.workers(http, "rollkeel_place", "")]
        return places[0] if len(places) == 1 else ""

    async def sleep(self, http: Any) -> None:
        _check(await http.post("/sleep", params={"level": "2"}), "sleep")

    async def wake(self, http: Any, what: Literal["weights", "kv_cache"]) -> None:
        _check(await http.post("/wake_up", params={"tags": what}), f"wake its {what}")

    async def resume(self, http: Any) -> None:
        _check(await http.post("/resume"), "resume")

    async def workers(self, http: Any, what: str, message: str) -> list[dict[str, str]]:
        body = {"method": what, "args": [message]}
        answer = _check(await http.post("/collective_rpc", json=body), f"call {what}")
        return [w if isinstance(w, dict) else {"error": str(w)} for w in answer.get("results") or []]


def vllm_dtype(mode: str) -> str:
    """vLLM's name of a numeric mode. Raises `BadInput` for those it reaches by options of its own."""
    if mode not in DTYPES:
        raise BadInput(
            f"engine.dtype: vllm serves {' or '.join(DTYPES)}, got {mode}; for more set engine.server.options, for example"
            " {quantization: fp8}"
        )
    return DTYPES[mode]


def _words(options: dict[str, Any]) -> list[str]:
    """`--name value` of each option, `--name` alone for True, nothing for False and None; mappings and lists as JSON."""
    words: list[str] = []
    for name, value in options.items():
        if value is False or value is None:
            continue
        words.append(f"--{name}")
        if value is not True:
            words.append(json.dumps(value) if isinstance(value, dict | list) else str(value))
    return words


def _check(answer: Any, what: str) -> Any:
    """JSON of a good answer. Raises `Refused` for a request at fault and `EngineFailure` for a server at fault."""
    if answer.status_code == 200:
        return _json(answer.text, what) if answer.text else {}
    reason = " ".join(answer.text.split())[:300]
    with contextlib.suppress(ValueError, KeyError, TypeError):
        reason = " ".join(str(json.loads(answer.text)["error"]["message"]).split())[:300]
    at_fault = Refused if 400 <= answer.status_code < 500 else EngineFailure
    hint = ""
    if answer.status_code in (403, 404) and what != "score":
        hint = "; it must run with VLLM_SERVER_DEV_MODE=1 and --enable-scale-out"
    raise at_fault(f"engine vllm: cannot {what}: HTTP {answer.status_code}: {reason}{hint}")


def _json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise EngineFailure(f"engine vllm: {what}: expected JSON, got {text[:80]!r}") from None


def _chunk(event: Any, topk: int) -> Chunk:
    """One event of a stream. Raises `EngineFailure` for an error that arrives inside of it."""
    if "error" in event:
        error = event["error"] if isinstance(event["error"], dict) else {"message": event["error"]}
        at_fault = Refused if 400 <= int(error.get("code") or 500) < 500 else EngineFailure
        raise at_fault(f"engine vllm: {' '.join(str(error.get('message')).split())[:300]}")
    try:
        choice = event["choices"][0]
        rows = (choice["logprobs"] or {}).get("content") or []
        tokens = list(choice["token_ids"])
        if [row["token_id"] for row in rows] != tokens:
            raise EngineFailure(f"engine vllm: tokens {tokens[:8]} came with log-probs of others")
        likely = [_likely(row["top_logprobs"], topk) for row in rows] if topk else []
        spans = choice.get("weight_versions") or []
        return Chunk(
            token_ids=tokens,
            logprobs=[row["logprob"] for row in rows],
            topk_ids=[[t for t, _ in pairs] for pairs in likely],
            topk_logprobs=[[p for _, p in pairs] for pairs in likely],
            experts=_array(choice["routed_experts"]) if choice.get("routed_experts") else None,
            finish=choice.get("finish_reason") or "",
            version_starts=[(_label(span["version"]), span["start"]) for span in spans],
        )
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise EngineFailure(f"engine vllm: cannot read an event of a stream: {error!r}") from None


def _array(text: str) -> np.ndarray:
    """An array sent as the bytes of its file. Raises `EngineFailure` for another text."""
    try:
        return np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise EngineFailure(f"engine vllm: cannot read the experts of a stream: {error}") from None


def _likely(entries: Sequence[dict[str, Any]], topk: int) -> list[tuple[int, float]]:
    """The `topk` most likely of the entries; the sampled token stands first among them, wherever it ranks."""
    ordered = sorted(((e["token_id"], e["logprob"]) for e in entries), key=lambda pair: -pair[1])
    return ordered[:topk]


def _label(text: str) -> int:
    """The version that a label names; -1 for a label that is not ours."""
    return int(text) if text.isdigit() else _UNKNOWN
