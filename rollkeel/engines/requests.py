"""A request on its way through an engine, and what is refused before it is queued, here or in front of worker processes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rollkeel.config import EngineConfig
from rollkeel.errors import BadInput
from rollkeel.types import Capabilities, KeptKV, Request, TokenSpan


@dataclass
class Running:
    """A request with what was sampled for it so far, in the queue or in a slot."""

    request: Request
    span: TokenSpan
    """Tokens sampled in this engine under earlier stays in a slot."""
    blocks: list[int] = field(default_factory=list)
    kv: KeptKV | None = None
    """KV it brought along, until it has a slot."""
    kv_version: int = -1
    """Oldest version that computed any of its KV; of no meaning in the queue."""
    first: int = 0
    """Position it came into its slot at, of its last token."""
    since: int = 0
    """The engine's decode steps by then."""
    last: int = 0
    """Position at which it has no room left."""

    def enter(self, steps: int, max_length: int) -> int:
        """It comes into a slot after so many decode steps of the engine; how many tokens it may be given there."""
        limit = room(self.request, len(self.span), max_length)
        self.first, self.since = len(self.tokens()) - 1, steps
        self.last = self.first + limit
        return limit

    def position(self, steps: int) -> int:
        """Position after so many decode steps of the engine, if nothing but its length has ended it."""
        return min(self.first + steps - self.since, self.last)

    def tokens(self) -> np.ndarray:
        """Prompt and all that was sampled, before it came and here."""
        return np.concatenate([self.request.prompt_ids, self.request.prefix.token_ids, self.span.token_ids])


def longest(hf_config: Any, config: EngineConfig, asked: int | None) -> int:
    """Longest prompt + response, tokens: `engine.max_length`, else `asked`, at most the model's context."""
    context = int(getattr(hf_config.get_text_config(), "max_position_embeddings", 2**20))
    return min(context, config.max_length or asked or context)


def room(request: Request, made: int, max_length: int) -> int:
    """Tokens a request may still be given, `made` behind its prefix already; none left if not positive."""
    used = len(request.prefix) + made
    return min(request.sampling.max_new_tokens - used, max_length - len(request.prompt_ids) - used)


def check_requests(requests: Sequence[Request], flying: Iterable[int], about: Capabilities, vocab_size: int) -> None:
    """Raises `BadInput`, naming the request, for one the engine could not sample or could not tell from those in flight."""
    seen = set(flying)
    for request in requests:
        if request.id in seen:
            raise BadInput(f"request {request.id}: expected ids unique among those in flight, got this one again")
        seen.add(request.id)
        _check(request, about, vocab_size)


def _check(request: Request, about: Capabilities, vocab_size: int) -> None:
    ids = request.prompt_ids
    if len(ids) == 0:
        raise BadInput(f"request {request.id}: expected a prompt of at least one token, got none")
    if len(ids) >= about.max_length:
        raise BadInput(
            f"request {request.id}: the prompt has {len(ids)} tokens and leaves no room in a context of {about.max_length}"
        )
    for part in (ids, request.prefix.token_ids):
        if len(part) and (int(part.min()) < 0 or int(part.max()) >= vocab_size):
            bad = int(part.min()) if int(part.min()) < 0 else int(part.max())
            raise BadInput(f"request {request.id}: token id {bad} is outside the vocabulary of {vocab_size}")
    if request.kv is not None and request.kv.keys.shape[2] != len(ids) + len(request.prefix) - 1:
        raise BadInput(
            f"request {request.id}: expected KV of all but the last of {len(ids) + len(request.prefix)} tokens, got"
            f" {request.kv.keys.shape[2]}; hand back prefix and KV of the same segment"
        )
    if request.sampling.return_topk > vocab_size:
        raise BadInput(
            f"request {request.id}: return_topk={request.sampling.return_topk} is more than the vocabulary of {vocab_size}"
        )
    if request.sampling.return_topk and not about.returns_topk:
        raise BadInput(f"request {request.id}: this engine cannot return the most likely tokens")
    if request.sampling.return_prompt_experts and not request.sampling.return_experts:
        raise BadInput(f"request {request.id}: return_prompt_experts goes with return_experts; set both")
    if request.sampling.return_experts and not about.returns_experts:
        raise BadInput(f"request {request.id}: this engine cannot return experts for this model")
