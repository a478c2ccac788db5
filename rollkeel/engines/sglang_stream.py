"""What an SGLang server streams, read token by token and checked against itself. No HTTP and no clock here."""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import AsyncIterable, AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from rollkeel.engines.backend import Chunk, Generation, Refused
from rollkeel.errors import EngineFailure

ROUNDING = 1e-3
"""How far above 0 a log-prob may lie, or above 1 a kept mass, and still be rounding."""


@final
@dataclass(frozen=True, kw_only=True)
class RoutedLayers:
    """Routed experts as the server returns them: for every layer of the model, dense ones included."""

    layers: int
    """`num_hidden_layers` of the model."""
    chosen: int
    """Experts per token."""
    moe: tuple[int, ...] = ()
    """Layers that have experts, ascending; empty means all."""

    def none(self) -> np.ndarray:
        """Those of no tokens."""
        return np.zeros((0, len(self.moe) or self.layers, self.chosen), np.int16)

    def decode(self, text: Any, rows: int) -> np.ndarray:
        """`[rows, moe layers, chosen]` int16 from base64 of int32. Raises `EngineFailure` if the size is another."""
        try:
            raw = base64.b64decode(text, validate=True)
        except (TypeError, ValueError, binascii.Error):
            raise EngineFailure(f"SGLang: expected routed_experts in base64, got {one_line(text)}") from None
        expected = 4 * rows * self.layers * self.chosen
        if len(raw) != expected:
            raise EngineFailure(
                f"SGLang: expected routed_experts of {rows} tokens × {self.layers} layers × {self.chosen}, {expected} bytes, got {len(raw)}"
            )
        found = np.frombuffer(raw, "<i4").reshape(rows, self.layers, self.chosen)
        return found[:, list(self.moe) or slice(None)].astype(np.int16)


def routed_layers(hf_config: Any) -> RoutedLayers | None:
    """What the server will return for a model, from its (text) config; None for a dense one.

    Dense layers are told apart by `mlp_only_layers` and `decoder_sparse_step` (Qwen) or `first_k_dense_replace` (DeepSeek).
    """
    config = hf_config.get_text_config()
    chosen = getattr(config, "num_experts_per_tok", None)
    if not chosen:
        return None
    layers, every = int(config.num_hidden_layers), int(getattr(config, "decoder_sparse_step", None) or 1)
    dense = set(getattr(config, "mlp_only_layers", None) or ())
    dense |= set(range(int(getattr(config, "first_k_dense_replace", None) or 0)))
    moe = tuple(i for i in range(layers) if i not in dense and (i + 1) % every == 0)
    return RoutedLayers(layers=layers, chosen=int(chosen), moe=moe)


@dataclass
class _Tokens:
    """Tokens read and not yet handed on, field by field."""

    ids: list[int]
    logprobs: list[float]
    kept_mass: list[float]
    topk_ids: list[list[int]]
    topk_logprobs: list[list[float]]

    @staticmethod
    def none() -> _Tokens:
        return _Tokens([], [], [], [], [])


@final
class Transcript:
    """Follows one stream.

    A frame brings only new tokens, or all of them from the start, whichever the server was started for; it is told apart by
    `completion_tokens`, which counts from the start. In a stream of the second kind the lists may already be longer than
    that count, because they grow until they are sent. A request that is aborted while it waits in the queue repeats all its
    log-probs in either kind, behind those not yet sent, and brings neither masses nor experts: such tokens are given up.
    """

    def __init__(self, wanted: Generation, experts: RoutedLayers | None) -> None:
        self._wanted, self._layers = wanted, experts or RoutedLayers(layers=0, chosen=0)
        sampling = wanted.sampling
        self._greedy = sampling.temperature == 0
        self._masked = sampling.truncated and not self._greedy
        self._stops = frozenset(sampling.stop_token_ids)
        self._read: list[int] = []
        self._pending = _Tokens.none()
        self.ended = False

    @property
    def count(self) -> int:
        """Tokens read so far."""
        return len(self._read)

    def read(self, event: bytes) -> Chunk:
        """Next chunk from one event. Raises `EngineFailure` where it contradicts itself, `Refused` where the server refuses."""
        frame = self._frame(event)
        meta, ids = frame.get("meta_info"), frame.get("output_ids")
        if not isinstance(meta, Mapping) or not isinstance(ids, list):
            raise self._failure("output_ids and meta_info", one_line(frame))
        finish = self._finish(meta)
        rows, first = self._rows(meta, ids, finish == "abort")
        extras = self._extras(meta, len(rows), len(rows) - first, finish == "abort")
        if extras is not None:
            self._take(rows[first:], *extras)
        if finish:
            finish = self._check_end(meta, finish)
        return self._hand_on(meta, finish)

    def _frame(self, event: bytes) -> Mapping[str, Any]:
        try:
            frame = json.loads(event)
        except ValueError:
            frame = None
        if not isinstance(frame, Mapping):
            raise self._failure("a JSON object", one_line(event.decode(errors="replace")))
        if "error" in frame:
            error = frame["error"]
            code = error.get("code") if isinstance(error, Mapping) else None
            raise refusal(code if isinstance(code, int) else 500, json.dumps(frame), f"request {self._wanted.key}")
        return frame

    def _finish(self, meta: Mapping[str, Any]) -> str:
        reason = meta.get("finish_reason")
        if reason is None:
            return ""
        kind = reason.get("type") if isinstance(reason, Mapping) else None
        if kind not in ("stop", "length", "abort"):
            raise self._failure("finish_reason stop, length or abort", one_line(reason))
        if kind == "abort" and isinstance(reason.get("status_code"), int):
            raise refusal(reason["status_code"], str(reason.get("message")), f"request {self._wanted.key}")
        return kind

    def _rows(self, meta: Mapping[str, Any], ids: list[Any], aborted: bool) -> tuple[list[Any], int]:
        """`[log-prob, token id, …]` of each token the frame speaks of, and which of them is the first new one."""
        rows, total = meta.get("output_token_logprobs"), meta.get("completion_tokens")
        if not isinstance(rows, list) or not isinstance(total, int):
            raise self._failure("output_token_logprobs and completion_tokens", one_line(meta))
        had = self.count
        if aborted and len(rows) >= total:
            rows, first = rows[len(rows) - total :], had
        elif len(rows) == total - had:
            first = 0
        elif len(rows) >= total:
            first = had
        else:
            raise self._failure(f"log-probs of {total - had} new tokens or of all {total}", f"{len(rows)}")
        tokens = [row[1] if isinstance(row, list) and len(row) > 1 else None for row in rows]
        if not all(isinstance(t, int) and t >= 0 for t in tokens):
            raise self._failure("log-probs with the ids of their tokens", one_line(rows))
        if tokens[:first] != self._read[:first] or len(tokens) < first:
            raise self._failure(
                f"the {first} tokens already sent to be repeated", f"other ones, {tokens[:first]}"[:200]
            )
        if ids != tokens if not aborted else ids and tokens and ids[-1] != tokens[-1]:
            raise self._failure(
                f"one log-prob for each of {len(ids)} output_ids", f"those of {len(tokens)} tokens, or of others"
            )
        return rows, first

    def _extras(
        self, meta: Mapping[str, Any], known: int, new: int, aborted: bool
    ) -> tuple[list[Any] | None, list[Any] | None] | None:
        """Log-probs after truncation and best tokens of the `new` last tokens; None if an aborted request lacks them."""
        found: list[list[Any] | None] = []
        for name, needed in (
            ("output_token_sampling_logprobs", self._masked),
            ("output_top_logprobs", self._wanted.sampling.return_topk > 0),
        ):
            values = meta.get(name)
            if not needed or new == 0:
                values = []
            elif not isinstance(values, list) or (len(values) < new if aborted else len(values) != known):
                if aborted:
                    return None
                got = str(len(values)) if isinstance(values, list) else one_line(values)
                raise self._failure(f"{known} {name}, as many as output_token_logprobs", got)
            found.append(values[len(values) - new :] if needed else None)
        return found[0], found[1]

    def _take(self, rows: list[Any], sampled: list[Any] | None, best: list[Any] | None) -> None:
        """Append new tokens."""
        pending, start = self._pending, self.count
        for i, row in enumerate(rows):
            at, token = start + i, row[1]
            if self._read and self._read[-1] in self._stops:
                raise self._failure(f"nothing after stop token {self._read[-1]}", f"token {token} at {at}")
            raw = logprob_of(row, "output_token_logprobs", at)
            value, mass = (0.0, math.exp(raw)) if self._greedy else (raw, 1.0)
            if sampled is not None:
                value = logprob_of([sampled[i], token], "output_token_sampling_logprobs", at)
                mass = math.exp(raw - value)
                if mass > 1 + ROUNDING:
                    raise self._failure(
                        f"log-probs after temperature and a kept mass ≤ 1 at token {at}",
                        f"{mass:.4f}; start it without SGLANG_RETURN_ORIGINAL_LOGPROB",
                    )
            if best is not None:
                wanted = self._wanted.sampling.return_topk
                if not isinstance(best[i], list) or len(best[i]) != wanted:
                    raise self._failure(f"the {wanted} best tokens at {at}", one_line(best[i]))
                pending.topk_logprobs.append([logprob_of(b, "output_top_logprobs", at) for b in best[i]])
                pending.topk_ids.append([int(b[1]) for b in best[i]])
            pending.ids.append(token)
            pending.logprobs.append(value)
            if self._greedy or self._masked:
                pending.kept_mass.append(min(mass, 1.0))
            self._read.append(token)
        if self.count > self._wanted.max_new_tokens:
            raise self._failure(f"at most {self._wanted.max_new_tokens} tokens", f"{self.count}")

    def _check_end(self, meta: Mapping[str, Any], finish: str) -> str:
        """The finish reason, once it fits the tokens."""
        reason, last = meta["finish_reason"], self._read[-1] if self._read else None
        full = self.count == self._wanted.max_new_tokens
        if finish == "abort":  # it wins over the end that the last token may have been
            return "stop" if last in self._stops else "length" if full else "abort"
        if self.count != meta["completion_tokens"]:
            raise self._failure(f"{meta['completion_tokens']} tokens at the end", f"{self.count}")
        if finish == "length":
            if not full:
                raise self._failure(
                    f"{self._wanted.max_new_tokens} tokens before finish_reason length",
                    f"{self.count}; the server has too little context or KV memory for one sequence",
                )
            return finish
        matched = reason.get("matched")
        if not isinstance(matched, int) or matched != last:
            raise self._failure(f"finish_reason stop at the last token {last}", f"{one_line(reason)}")
        if matched not in self._stops:
            raise Refused(
                f"SGLang: expected stops at {sorted(self._stops)} only, it also stops at token {matched}, which the model's config "
                "names as an end of sequence; add it to stop_token_ids"
            )
        return finish

    def _hand_on(self, meta: Mapping[str, Any], finish: str) -> Chunk:
        self.ended = bool(finish)
        pending, experts = self._pending, None
        if self._wanted.sampling.return_experts:
            text = meta.get("routed_experts")
            if not finish or (text is None and meta["finish_reason"]["type"] == "abort"):
                # They come with the end of a request only, and an abort in the queue has none.
                self._pending = _Tokens.none() if finish else pending
                return Chunk(token_ids=(), logprobs=(), experts=self._layers.none(), finish="abort" if finish else "")
            experts = self._layers.decode(text, len(pending.ids))
        self._pending = _Tokens.none()
        return Chunk(
            token_ids=pending.ids,
            logprobs=pending.logprobs,
            kept_mass=pending.kept_mass,
            topk_ids=pending.topk_ids,
            topk_logprobs=pending.topk_logprobs,
            experts=experts,
            finish=finish,
            version_starts=self._version_starts(meta) if finish else (),
        )

    def _version_starts(self, meta: Mapping[str, Any]) -> list[tuple[int, int]]:
        """(version, first token it sampled); -1 for a version that is no number. Empty where the server does not tell."""
        spans = meta.get("weight_versions")
        if not isinstance(spans, list):
            return []
        starts = []
        for span in spans:
            start, label = (span.get("start"), span.get("version")) if isinstance(span, Mapping) else (None, None)
            if not isinstance(start, int):
                raise self._failure("weight_versions with a start each", one_line(spans))
            if start < self.count or not starts:
                starts.append((int(label) if isinstance(label, str) and label.isdigit() else -1, start))
        return starts

    def _failure(self, expected: str, got: str) -> EngineFailure:
        return EngineFailure(f"SGLang, request {self._wanted.key}: expected {expected}, got {got}")


async def events(pieces: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    """Data of server-sent events, one line each, however the bytes were cut."""
    rest = b""
    async for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


def logprob_of(row: Any, name: str, at: int) -> float:
    """The log-prob that begins `row`. Raises `EngineFailure` if it is none: JSON has null where the server had NaN."""
    value = row[0] if isinstance(row, list) and row else row
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value > ROUNDING:
        raise EngineFailure(f"SGLang: expected a finite log-prob ≤ 0 in {name} at {at}, got {one_line(value)}")
    return min(float(value), 0.0)


def refusal(status: int, text: str, what: str) -> EngineFailure:
    """What to raise for an error answer: `Refused` if the request was at fault (4xx), else a plain `EngineFailure`."""
    message: Any = text
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    for key in ("error", "message", "detail"):
        if isinstance(found, Mapping) and key in found:
            message = found = found[key]
    kind = Refused if 400 <= status < 500 else EngineFailure
    return kind(f"SGLang: expected {what} to be served, got {status}: {one_line(message)}")


def one_line(value: Any) -> str:
    """`value` for an error message, at most 300 characters."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    line = " ".join(text.split())
    return line if len(line) <= 300 else f"{line[:297]}..."
