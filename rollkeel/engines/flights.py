"""What a request has while a server samples it: tokens with their provenance, over as many stays at the server as it takes.

A stay is one stream. It begins from the prompt and every token so far, and ends by the server's word (`stop`, `length`,
`abort`) or without it (crash, cut connection). What a stream delivered is the truth; what it did not deliver never happened.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rollkeel.engines.backend import Chunk, Generation
from rollkeel.engines.server import RESTARTS
from rollkeel.errors import EngineFailure
from rollkeel.types import Request, Status, TokenSpan

ROUNDING = 1e-3
"""A log-prob this far above 0 is rounding of a probability of 1."""
NO_LOGPROB = -9000.0
"""Servers send a number like -9999 where a log-prob is NaN, minus infinity or missing."""


@dataclass(eq=False)
class Flight:
    """One request. `tokens` and the other lists hold what was sampled here, without the request's prefix."""

    request: Request
    room: int
    """Tokens it may have, by its own limit and the context; prefix not counted."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    kept_mass: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    kv_versions: list[int] = field(default_factory=list)
    topk_ids: list[Sequence[int]] = field(default_factory=list)
    topk_logprobs: list[Sequence[float]] = field(default_factory=list)
    experts: list[np.ndarray] = field(default_factory=list)
    prompt_experts: np.ndarray | None = None
    interrupted: bool = False
    fruitless: int = 0
    """Stays in a row that ended without the server's word and without a token, and when the first of them did."""
    fruitless_since: float = 0.0
    key: str = ""
    """Of the present stay."""
    begun: int = 0
    """Tokens at its begin."""
    read: int | None = None
    """Tokens in front of its first position whose experts it is to tell too; None where nobody asks."""
    began_at: int = -1
    """Version that its begin computed KV with."""
    certain: int | None = None
    """Tokens whose version is beyond doubt: set when weights change under the stay. Later ones need the server's word."""

    def given_up(self, silence_s: float) -> bool:
        """True when it got no token in more than `RESTARTS` stays and for `silence_s`: a server that comes up slowly cuts many
        streams within moments."""
        return self.fruitless > RESTARTS and time.monotonic() - self.fruitless_since > silence_s

    def wanted(self, key: str, version: int) -> Generation:
        """Begin a stay under `version`: what to ask for."""
        self.key, self.begun, self.began_at, self.certain = key, len(self.tokens), version, None
        request = self.request
        ids = [*request.prompt_ids.tolist(), *request.prefix.token_ids.tolist(), *self.tokens]
        known = request.prefix.prompt_experts is not None and request.prefix.sampled is None
        asks = request.sampling.return_prompt_experts and not self.tokens and not known
        self.read = len(ids) - 1 if asks else None
        return Generation(
            key=key,
            experts_from=len(ids) - 1 - (self.read or 0),
            token_ids=ids,
            sampling=request.sampling,
            max_new_tokens=self.room - len(self.tokens),
            seed=seed_of(request, len(request.prefix) + len(self.tokens)),
            salt=f"v{version}",
        )

    def take(self, chunk: Chunk, version: int, vocab_size: int) -> None:
        """Append what a stream delivered. Raises `EngineFailure`, and takes nothing, where it cannot be the truth."""
        count, sampling = len(chunk.token_ids), self.request.sampling
        if len(self.tokens) + count > self.room:
            raise EngineFailure(
                f"request {self.request.id}: the server sent more than the {self.room} tokens asked for"
            )
        if len(chunk.logprobs) != count:
            raise EngineFailure(
                f"request {self.request.id}: the server sent {count} tokens with another number of log-probs"
            )
        if count and any(t in sampling.stop_token_ids for t in [*self.tokens[-1:], *chunk.token_ids][:-1]):
            raise EngineFailure(f"request {self.request.id}: the server went on behind a stop token")
        for token, logprob in zip(chunk.token_ids, chunk.logprobs, strict=True):
            if not 0 <= token < vocab_size:
                raise EngineFailure(
                    f"request {self.request.id}: the server sampled {token}, outside of {vocab_size} tokens"
                )
            if not math.isfinite(logprob) or not NO_LOGPROB < logprob < ROUNDING:
                raise EngineFailure(
                    f"request {self.request.id}: the server sent {logprob} for a log-prob under version {version}; its"
                    " weights have diverged, or it returns none"
                )
        if sampling.return_topk:
            rows = [*chunk.topk_ids, *chunk.topk_logprobs]
            if len(rows) != 2 * count or any(len(row) != sampling.return_topk for row in rows):
                raise EngineFailure(
                    f"request {self.request.id}: expected {sampling.return_topk} likely tokens for each"
                )
        if chunk.experts is not None and sampling.return_experts:
            read = self.read or 0
            stay = read + len(self.tokens) + count - self.begun
            if chunk.experts.ndim != 3 or len(chunk.experts) != stay:
                raise EngineFailure(
                    f"request {self.request.id}: expected experts of {stay} tokens by layer, got {chunk.experts.shape}"
                )
            experts = chunk.experts.astype(np.int16)
            if self.read is not None:
                self.prompt_experts = experts[:read]
            self.experts += list(experts[read:])
        logprobs = [min(value, 0.0) for value in chunk.logprobs]
        greedy = sampling.temperature == 0
        self.tokens += chunk.token_ids
        self.logprobs += [0.0] * count if greedy else logprobs
        mass = math.nan if sampling.truncated else 1.0  # of an evaluation alone: nobody trains on what is not known
        self.kept_mass += [math.exp(x) for x in logprobs] if greedy else [mass] * count
        self.versions += [version] * count
        self.kv_versions += [self.began_at] * count
        if sampling.return_topk:
            self.topk_ids += chunk.topk_ids
            self.topk_logprobs += chunk.topk_logprobs

    def settle(self, starts: Sequence[tuple[int, int]], version: int) -> str:
        """Compare the stamps of the stay with the server's own count, at its end. Empty, or what is wrong with them.

        Tokens of a stay that weights changed under take the server's count. Where it contradicts, they are dropped.
        """
        if self.request.sampling.return_experts and len(self.experts) < len(self.tokens):
            self.cut(self.begun)  # they come at a stream's end, and this one had none
            return "it did not tell which experts its tokens were routed to"
        first = version if self.certain is None else self.began_at
        wrong = sorted({told for told, _ in starts if not first <= told <= version})
        if self.certain is None and (not wrong or len(self.tokens) == self.begun):
            return ""
        if wrong or not starts:
            self.cut(self.begun if self.certain is None else self.certain)
            if wrong:
                return f"its weights are labelled {wrong}, expected {first} … {version}"
            return "it did not tell which weights sampled which token"
        edges = [*(start for _, start in starts), len(self.tokens) - self.begun]
        for (told, start), end in zip(starts, edges[1:], strict=True):
            self.versions[self.begun + start : self.begun + end] = [told] * (end - start)
        return ""

    def cut(self, length: int) -> None:
        """Forget tokens from `length` on; they are sampled again."""
        names = ("tokens", "logprobs", "kept_mass", "versions", "kv_versions", "topk_ids", "topk_logprobs", "experts")
        for name in names:
            del getattr(self, name)[length:]

    def status(self, finish: str) -> Status | None:
        """How the request ended, by the server's `finish` and by its own tokens; None if these contradict each other."""
        stopped = bool(self.tokens) and self.tokens[-1] in self.request.sampling.stop_token_ids
        if finish == "stop" and stopped:
            return Status.FINISHED
        if finish == "length" and len(self.tokens) == self.room:
            return Status.FINISHED if stopped else Status.LENGTH
        return None

    def ended(self) -> str:
        """`stop` or `length` if its tokens show that it is complete, whatever the server reports; else empty."""
        if self.tokens and self.tokens[-1] in self.request.sampling.stop_token_ids:
            return "stop"
        return "length" if len(self.tokens) >= self.room else ""

    def span(self) -> TokenSpan:
        """The tokens sampled here."""
        sampling, count = self.request.sampling, len(self.tokens)
        if not count:
            return TokenSpan.empty()
        return TokenSpan(
            token_ids=np.array(self.tokens, np.int64),
            logprobs=np.array(self.logprobs, np.float32),
            kept_mass=np.clip(np.array(self.kept_mass, np.float32), np.finfo(np.float32).tiny, 1.0),
            versions=np.array(self.versions, np.int64),
            kv_versions=np.array(self.kv_versions, np.int64),
            topk_ids=np.array(self.topk_ids, np.int64) if sampling.return_topk else None,
            topk_logprobs=np.minimum(np.array(self.topk_logprobs, np.float32), 0) if sampling.return_topk else None,
            experts=np.stack(self.experts) if sampling.return_experts else None,
            prompt_experts=self.prompt_experts,
        )


def seed_of(request: Request, drawn: int) -> int:
    """62 bits from the run's seed, the rollout and the number of tokens already sampled: a resumed request draws anew."""
    text = f"{request.sampling.seed}/{request.id}/{drawn}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 2
