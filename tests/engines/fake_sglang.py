"""A server that speaks HTTP as SGLang does, with a toy model whose every log-prob can be computed again.

Written from the source of sglang 0.5.23 (the release on the package index; files below are relative to `sglang/srt/`). It has
not been compared with a running server. Facts, and where they stand:

Streams
 1. `entrypoints/http_server.py` `/generate`: with `stream` every frame is `data: {…}`, then `data: [DONE]`, after errors too.
    A refused streamed request is HTTP 200 with a frame `{"error": {"message", "type", "code": 400, "retryable"}}`; one that is
    not streamed is HTTP 400 `{"error": {"message"}}`. JSON writes NaN as null.
 2. `managers/tokenizer_manager.py` `_handle_batch_output`: `completion_tokens` counts from the start in either kind of stream.
    With `--incremental-streaming-output` ids and lists about output tokens hold the new part; frames that pile up are joined
    (`_coalesce_streaming_chunks`). Without it they are references to growing lists, so that a frame may show more tokens than
    its `completion_tokens`.
 3. same, `detokenize_logprob_tokens`: entries are (log-prob, token id, text), text null.
 4. same, `_handle_abort_req`: a request aborted in the waiting queue gets a last frame with all log-probs from the start, even
    in an incremental stream, there with only the last id; neither masks nor experts. `finish_reason` is
    `{"type": "abort", "message": "Abort in waiting queue"}`. Joined with earlier frames, lists are appended to theirs.
 5. `managers/schedule_batch.py` `FINISH_*`: `{"type": "stop", "matched": id}`, `{"type": "length", "length": n}`,
    `{"type": "abort", "message", "status_code", "err_type"}`. A running request that is aborted takes one more step and ends as
    aborted even if that step drew a stop token. A draw outside the vocabulary becomes a stop token with matched "NaN happened".
 6. same, `_check_token_based_finish`: `ignore_eos` switches `stop_token_ids` off as well; without it the end-of-sequence ids of
    config and generation config stop, too. The stop token is part of the output.
 7. same file, `weight_versions` on the last frame (`utils/weight_versions.py`): spans `{"version", "start", "end"}`; a change
    is booked at the number of tokens put out when it happens.
 8. `managers/scheduler.py` `init_req_max_new_tokens`: cut to context − 2 − prompt, in silence. Refused at once
    (`tokenizer_manager.py` `_validate_one_request`): prompts as long as the context, and prompt + max_new_tokens above it. Refused
    by the scheduler, as an abort with status 400 after one step, without log-probs (`schedule_batch.py` `set_finish_with_abort`):
    prompts of context − 6 tokens and more (`tp_worker.py`, `managers/utils.py`).
Log-probs
 9. `layers/sampler.py`: log of softmax(logits / T), before top-k, top-p and min-p; temperature below 1e-6 becomes 1 with top_k 1
    (`sampling/sampling_params.py`). `SGLANG_RETURN_ORIGINAL_LOGPROB=1` makes it log-softmax of the logits.
10. same, `_build_sampling_mask_output`: `return_sampling_mask` gives log(weight / sum of kept weights) in
    `output_token_sampling_logprobs`; `managers/scheduler.py` refuses it unless top_k is 1 or in 2 … `--sampling-mask-max-tokens`.
11. `sampling/sampling_batch_info.py`: `sampling_seed` is used only with `--enable-deterministic-inference`; draws are a function
    of seed and position. `layers/sampler.py` asserts that min_p is not combined with it.
12. `managers/scheduler_components/logprob_result_processor.py`: input log-probs begin with null, are at temperature 1 whatever
    was asked, and name the last id of the vocabulary 0. `logprob_start_len` 0 keeps the prefix cache out (`schedule_batch.py`).
Control
13. `managers/scheduler.py` `abort_request`: matches every request whose name begins with the given one. The tokenizer ignores a
    name it does not know, and a second abort of one it does.
14. `managers/io_struct.py`, `scheduler.py` `pause_generation`: `in_place` leaves all as it is, `retract` moves running requests to
    the queue and frees their KV, `abort` is done by the tokenizer alone. While paused, new requests wait in the tokenizer.
15. `scheduler.py` `flush_cache`: refused (HTTP 400, text) while requests run or, unless paused, wait.
16. `scheduler_components/weight_updater.py`: `update_weights_from_disk` answers `{"success", "message", "num_paused_requests"}`, HTTP
    400 if it fails; when only the flush fails the weights are new and the version is not. `/model_info` then has `model_path`
    and `weight_version`.
17. `mem_cache/radix_cache.py`: prefixes are matched within one `extra_key` only.
18. `/ready` is 503 while starting or paused; `/health` is 503 while starting and 20 s late while paused.
19. `state_capturer/`: `routed_experts` is base64 of int32 `[tokens − 1 − start, all layers, k]`, on the last frame only.
"""

from __future__ import annotations

import asyncio
import base64
import json
import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

CUT = b"CUT"
"""As a payload from `mangle`: break the connection."""
LISTS = ("output_token_logprobs", "output_top_logprobs", "output_token_sampling_logprobs")


def softmax_log(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max()
    return shifted - math.log(np.exp(shifted).sum())


@dataclass(eq=False)
class Req:
    rid: str
    body: dict[str, Any]
    ids: list[int]
    limit: int
    out: list[int] = field(default_factory=list)
    rows: list[list[Any]] = field(default_factory=list)
    top: list[list[Any]] = field(default_factory=list)
    masks: list[float] = field(default_factory=list)
    experts: list[np.ndarray] = field(default_factory=list)
    kv: list[int] = field(default_factory=list)
    """Weights that computed the keys and values of each token so far."""
    events: list[tuple[str, int]] = field(default_factory=list)
    to_finish: dict[str, Any] | None = None
    reason: dict[str, Any] | None = None
    input_rows: list[list[Any]] | None = None
    sent: int = 0
    # What the tokenizer keeps of it.
    state: dict[str, list[Any]] = field(default_factory=lambda: {"ids": [], **{name: [] for name in LISTS}})
    queue: list[dict[str, Any]] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    abort_sent: bool = False
    ended: bool = False

    def lists(self) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {"output_token_logprobs": self.rows}
        if self.body.get("top_logprobs_num"):
            found["output_top_logprobs"] = self.top
        if self.body.get("return_sampling_mask"):
            found["output_token_sampling_logprobs"] = self.masks
        return found


class FakeSglang:
    """One server; `base_url` once `async with` has started it. Everything is driven by the requests and by `budget`."""

    def __init__(
        self,
        *,
        vocab: int = 12,
        context: int = 200,
        incremental: bool = True,
        deterministic: bool = False,
        original_logprobs: bool = False,
        eos: Sequence[int] = (),
        experts: tuple[int, int] | None = None,
        seed: int = 0,
    ) -> None:
        self.vocab, self.context, self.eos, self.experts = vocab, context, set(eos), experts
        self.incremental, self.deterministic, self.original = incremental, deterministic, original_logprobs
        self.weights, self.weight_version, self.model_path = 1, "default", "/start"
        self.up, self.paused = True, False
        self.budget: int | None = None
        """Decode steps it may still do; None for any number."""
        self.join = 1
        """Outputs that pile up before a stream is written."""
        self.mangle: Callable[[int, bytes], list[bytes]] = lambda index, payload: [payload]
        self.answers: dict[str, tuple[int, bytes]] = {}
        """Canned answers by path."""
        self.silent: set[str] = set()
        """Paths that never answer."""
        self.nan_at: int | None = None
        self.seen: list[tuple[str, dict[str, Any]]] = []
        self.known: dict[str, Req] = {}
        self.waiting: list[Req] = []
        self.running: list[Req] = []
        self.tree: dict[Any, list[tuple[list[int], list[int]]]] = {}
        self.cached_tokens = 0
        self._rng = np.random.default_rng(seed)
        self._wake, self._unpaused, self._changed = asyncio.Event(), asyncio.Event(), asyncio.Condition()
        self._unpaused.set()

    async def __aenter__(self) -> FakeSglang:
        self._server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self.base_url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        self._tasks = {asyncio.create_task(self._loop())}
        return self

    async def __aexit__(self, *error: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def allow(self, steps: int | None) -> None:
        self.budget = steps
        self._wake.set()

    async def until(self, true: Callable[[], bool]) -> None:
        """Wait until something that the server does has made `true` so."""
        async with asyncio.timeout(10), self._changed:
            await self._changed.wait_for(true)

    # The model.

    def logits(self, tokens: Sequence[int], kv: Sequence[int]) -> np.ndarray:
        """Depends on every token and on the weights that computed each key and value."""
        key = zlib.crc32(repr((list(tokens), list(kv))).encode())
        return np.random.default_rng(key).normal(size=self.vocab) * 1.5

    def logprobs(self, tokens: Sequence[int], temperature: float = 1.0, weights: int | None = None) -> np.ndarray:
        kv = [self.weights if weights is None else weights] * len(tokens)
        return softmax_log(self.logits(tokens, kv) / temperature)

    # The scheduler.

    async def _loop(self) -> None:
        while True:
            while self.paused_scheduler or self.budget == 0 or not (self.waiting or self.running):
                self._wake.clear()
                await self._wake.wait()
            if self.budget is not None:
                self.budget -= 1
            self._step()
            async with self._changed:
                self._changed.notify_all()
            await asyncio.sleep(0)

    paused_scheduler = False

    def _step(self) -> None:
        for req in self.waiting:
            self._prefill(req)
        self.running += self.waiting
        self.waiting = []
        for req in self.running:
            if req.limit:
                self._draw(req)
            self._finish_state(req)
            self._output(req)
        self.running = [req for req in self.running if not req.reason]

    def _prefill(self, req: Req) -> None:
        tokens = req.ids + req.out
        most = len(tokens) - 1
        if req.body.get("logprob_start_len", -1) >= 0:
            most = min(most, req.body["logprob_start_len"])
        best: list[int] = []
        for known, kv in self.tree.get(req.body.get("extra_key"), []):
            n = 0
            while n < min(most, len(kv)) and known[n] == tokens[n]:
                n += 1
            best = max(best, kv[:n], key=len)
        self.cached_tokens += len(best)
        req.kv = best + [self.weights] * (len(tokens) - len(best))
        if req.body.get("logprob_start_len") == 0 and req.input_rows is None:
            values = [softmax_log(self.logits(tokens[:i], req.kv[:i]))[tokens[i]] for i in range(1, len(tokens))]
            names = [t if t < self.vocab - 1 else 0 for t in tokens]
            req.input_rows = [[v, n, None] for v, n in zip([None, *values], names, strict=True)]

    def _draw(self, req: Req) -> None:
        s, tokens = req.body["sampling_params"], req.ids + req.out
        req.kv += [self.weights] * (len(tokens) - len(req.kv))
        logits, temperature, top_k = self.logits(tokens, req.kv), s.get("temperature", 1.0), s.get("top_k", -1)
        if temperature < 1e-6:
            temperature, top_k = 1.0, 1
        full = softmax_log(logits / temperature)
        order = np.argsort(-full, kind="stable")
        p = np.exp(full[order])
        keep = np.arange(self.vocab) < (top_k if top_k > 0 else self.vocab)
        keep &= (np.cumsum(p) - p) <= s.get("top_p", 1.0)
        keep &= p >= p[0] * s.get("min_p", 0.0)
        p = np.where(keep, p, 0)
        if self.deterministic:
            assert not s.get("min_p"), "With sampling seed, multinomial_with_seed will provide wrong results"
            u = np.random.default_rng([s.get("sampling_seed", 42) % 2**63, len(tokens)]).random()
        else:
            u = self._rng.random()
        at = min(int(np.searchsorted(np.cumsum(p) / p.sum(), u, side="right")), int(keep.sum()) - 1)
        token = int(order[at])
        told = softmax_log(logits) if self.original else full
        nan = self.nan_at == len(req.out)
        req.out.append(token)
        req.rows.append([None if nan else float(told[token]), token, None])
        best = np.argsort(-told, kind="stable")[: req.body.get("top_logprobs_num") or 0]
        req.top.append([[float(told[t]), int(t), None] for t in best])
        req.masks.append(float(np.log(p[at] / p.sum())))
        if self.experts:
            layers, k = self.experts
            req.experts.append((np.arange(layers * k).reshape(layers, k) + len(tokens)) % 7)
        if nan:
            req.out[-1] = req.rows[-1][1] = next(iter(s.get("stop_token_ids") or self.eos))
            req.reason = {"type": "stop", "matched": "NaN happened"}

    def _finish_state(self, req: Req) -> None:
        s = req.body["sampling_params"]
        if req.reason is None and req.to_finish:
            req.reason = req.to_finish
        elif (
            req.reason is None
            and req.out
            and not s.get("ignore_eos")
            and req.out[-1] in {*(s.get("stop_token_ids") or ()), *self.eos}
        ):
            req.reason = {"type": "stop", "matched": req.out[-1]}
        elif req.reason is None and len(req.out) >= req.limit:
            req.reason = {"type": "length", "length": req.limit}
        if req.reason:
            self.tree.setdefault(req.body.get("extra_key"), []).append((req.ids + req.out, list(req.kv)))

    def _spans(self, req: Req) -> list[dict[str, Any]]:
        spans: list[dict[str, Any]] = []
        for version, end in [*req.events, (self.weight_version, len(req.out))]:
            if not spans or end > spans[-1]["end"]:
                spans.append({"version": version, "start": spans[-1]["end"] if spans else 0, "end": end})
        return spans

    # The tokenizer.

    def _output(self, req: Req) -> None:
        stream = req.body.get("stream")
        if not (stream or req.reason):
            return
        before, req.sent = len(req.state["ids"]), len(req.out)
        req.state["ids"] += req.out[before:]
        meta: dict[str, Any] = {
            "id": req.rid,
            "finish_reason": req.reason,
            "prompt_tokens": len(req.ids),
            "weight_version": self.weight_version,
            "completion_tokens": len(req.out),
        }
        for name, values in req.lists().items():
            req.state[name] += values[before:]
            meta[name] = req.state[name][before:] if stream and self.incremental else req.state[name]
        if not req.limit:
            meta["output_token_logprobs"] = [[-1.0, 0, None]]  # a prefill alone reports the draw it did not make
        meta["input_token_logprobs"] = req.input_rows or []
        if req.reason and req.reason.get("status_code"):
            meta |= {"output_token_logprobs": [], "input_token_logprobs": []}
        if req.reason:
            meta["weight_versions"] = self._spans(req)
            if req.body.get("return_routed_experts") and self.experts:
                start = req.body.get("routed_experts_start_len", 0)
                skip = start - (len(req.ids) - 1)
                rows = np.array(req.experts[skip:], "<i4")
                meta["routed_experts"] = base64.b64encode(rows.tobytes()).decode()
            self._end(req)
        ids = req.out[before:] if stream and self.incremental else req.state["ids"]
        req.queue.append({"output_ids": ids, "meta_info": meta})
        req.news.set()

    def _end(self, req: Req) -> None:
        req.ended = True
        self.known.pop(req.rid, None)

    def _echo(self, req: Req) -> None:
        """Abort of a request in the queue."""
        meta: dict[str, Any] = {
            "id": req.rid,
            "finish_reason": {"type": "abort", "message": "Abort in waiting queue"},
            "weight_version": self.weight_version,
            "weight_versions": self._spans(req),
            "completion_tokens": len(req.state["ids"]),
            "output_token_logprobs": req.state["output_token_logprobs"],
        }
        if req.body.get("top_logprobs_num"):
            meta["output_top_logprobs"] = req.state["output_top_logprobs"]
        self._end(req)
        ids = req.state["ids"][-1:] if req.body.get("stream") and self.incremental else req.state["ids"]
        req.queue.append({"text": "", "output_ids": ids, "meta_info": meta})
        req.news.set()

    async def _frames(self, req: Req, emit: Callable[[dict[str, Any]], Any]) -> None:
        while True:
            while not req.queue or not (req.ended or len(req.queue) >= self.join):
                req.news.clear()
                await req.news.wait()
            frames, req.queue = req.queue, []
            ended = req.ended
            frame = frames[-1]
            if req.body.get("stream") and self.incremental and len(frames) > 1:
                meta = dict(frame["meta_info"])
                for name in LISTS:
                    if any(name in f["meta_info"] for f in frames):
                        meta[name] = [row for f in frames for row in f["meta_info"].get(name, [])]
                frame = {**frame, "output_ids": [t for f in frames for t in f["output_ids"]], "meta_info": meta}
            if ended or req.body.get("stream"):
                await emit(frame)
            if ended:
                return

    def abort(self, rid: str, everything: bool = False) -> None:
        req = self.known.get(rid)
        if not everything:
            if req is None or req.abort_sent:
                return
            req.abort_sent = True
        hit = [r for r in self.waiting if everything or r.rid.startswith(rid)]
        self.waiting = [r for r in self.waiting if r not in hit]
        for r in hit:
            self._echo(r)
        for r in self.running:
            if everything or r.rid.startswith(rid):
                r.to_finish = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}

    async def pause(self, mode: str) -> None:
        self.paused = True
        self._unpaused.clear()
        if mode == "abort":
            self.abort("", everything=True)
            return
        self.paused_scheduler = True
        if mode == "retract":
            for req in self.running:
                req.kv = []
            self.waiting, self.running = self.waiting + self.running, []

    def resume(self) -> None:
        self.paused = self.paused_scheduler = False
        self._unpaused.set()
        self._wake.set()

    def flush(self) -> bool:
        if self.running or (self.waiting and not self.paused_scheduler):
            return False
        self.tree.clear()
        return True

    def update(self, body: dict[str, Any]) -> tuple[bool, str]:
        file = Path(body["model_path"]) / "model.safetensors"
        if not file.exists():
            return (
                False,
                f"Failed to get weights iterator: Cannot find any model weights with `{body['model_path']}`.\nrolled back",
            )
        for req in [*self.running, *self.waiting]:
            if req.out:
                req.events.append((self.weight_version, len(req.out)))
        self.weights = zlib.crc32(file.read_bytes())
        self.model_path = body["model_path"]
        if body.get("flush_cache", True) and not self.flush():
            return (
                False,
                "Weights were updated, but the cache was not flushed because requests are still running or queued.",
            )
        if body.get("weight_version") is not None:
            self.weight_version = body["weight_version"]
        return True, "Succeeded to update model weights."

    def _admit(self, body: dict[str, Any]) -> Req:
        """Raises ValueError for what the tokenizer refuses."""
        ids, s = body["input_ids"], body["sampling_params"]
        wanted, rid = s.get("max_new_tokens", 128), body["rid"]
        if rid in self.known:
            raise ValueError(f"Duplicate request ID detected: {rid}")
        if len(ids) >= self.context:
            raise ValueError(
                f"The input ({len(ids)} tokens) is longer than the model's context length ({self.context} tokens)."
            )
        if len(ids) + wanted > self.context:
            raise ValueError("Requested token count exceeds the model's maximum context length")
        req = Req(rid=rid, body=body, ids=ids, limit=max(0, min(wanted, self.context - 2 - len(ids))))
        why = ""
        if len(ids) >= self.context - 6:
            why = f"Input length ({len(ids)} tokens) exceeds the maximum allowed length ({self.context - 6} tokens)."
        elif body.get("return_sampling_mask") and not 1 <= s.get("top_k", -1) <= 4096:
            why = "return_sampling_mask requires top_k=1 for greedy sampling or finite 1 < top_k <= 4096"
        if why:
            req.ids, req.limit = [0], 1
            req.to_finish = {"type": "abort", "message": why, "status_code": 400, "err_type": "BadRequestError"}
        self.known[rid] = req
        return req

    # HTTP.

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            _, target, _ = head.split("\r\n")[0].split(" ")
            length = next(
                (int(h.split(":")[1]) for h in head.lower().split("\r\n") if h.startswith("content-length")), 0
            )
            body = json.loads(await reader.readexactly(length)) if length else {}
            await self._route(target.split("?")[0], body, writer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # the client went away, or the test is over
        finally:
            writer.close()
            self._tasks.discard(task)

    async def _route(self, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        self.seen.append((path, body))
        async with self._changed:
            self._changed.notify_all()
        if path in self.silent:
            await asyncio.Event().wait()
        status, answer = 200, b""
        if path in self.answers:
            status, answer = self.answers[path]
        elif path == "/generate":
            await self._generate(body, writer)
            return
        elif path in ("/ready", "/health"):
            status = 200 if self.up and not (path == "/ready" and self.paused) else 503
        elif path == "/abort_request":
            self.abort(body.get("rid") or "", body.get("abort_all", False))
        elif path == "/pause_generation":
            await self.pause(body.get("mode", "abort"))
            answer = b'{"message": "Generation paused successfully.", "status": "ok"}'
        elif path == "/continue_generation":
            self.resume()
            answer = b'{"message": "Generation continued successfully.", "status": "ok"}'
        elif path == "/flush_cache":
            status, answer = (200, b"Cache flushed.\n") if self.flush() else (400, b"Flush cache failed.\n")
        elif path == "/update_weights_from_disk":
            ok, message = self.update(body)
            status, answer = 200 if ok else 400, dump({"success": ok, "message": message, "num_paused_requests": 0})
        elif path == "/model_info":
            answer = dump({"model_path": self.model_path, "weight_version": self.weight_version, "is_generation": True})
        else:
            status, answer = 404, b'{"detail":"Not Found"}'
        await respond(writer, status, answer)

    async def _generate(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        stream, index = bool(body.get("stream")), 0

        async def emit(frame: dict[str, Any]) -> None:
            nonlocal index
            if not stream:
                reason = frame["meta_info"]["finish_reason"]
                refused = reason.get("status_code")
                await respond(
                    writer, refused or 200, dump({"error": {"message": reason["message"]}} if refused else frame)
                )
                return
            for payload in self.mangle(index, dump(frame)):
                if payload == CUT:
                    writer.transport.abort()
                    return
                await piece(writer, b"data: " + payload + b"\n\n")
            index += 1

        if stream:
            writer.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"
            )
            await writer.drain()
        try:
            req = self._admit(body)
        except ValueError as refused:
            error: dict[str, Any] = {"message": str(refused)}
            if stream:
                await emit({"error": {**error, "type": "invalid_request_error", "code": 400, "retryable": False}})
                await piece(writer, b"data: [DONE]\n\n")
                writer.write(b"0\r\n\r\n")
                await writer.drain()
            else:
                await respond(writer, 400, dump({"error": error}))
            return
        await self._unpaused.wait()
        self.waiting.append(req)
        self._wake.set()
        await self._frames(req, emit)
        if stream and not writer.is_closing():
            await piece(writer, b"data: [DONE]\n\n")
            writer.write(b"0\r\n\r\n")
            await writer.drain()


def dump(value: Any) -> bytes:
    return json.dumps(value, allow_nan=False).encode()


async def piece(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
    await writer.drain()


async def respond(writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
    writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
    await writer.drain()
