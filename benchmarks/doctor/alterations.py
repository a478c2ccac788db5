"""What a pipeline does to the record of a rollout between engine and trainer: pure functions, one fault each.

They act after grading and before the trainer sees the batch, so that all that follows (log-probs, masks, weights, metrics) is
what such a run would have done.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np

from rollkeel.types import FloatArray, IntArray, Rollout, Status, TokenSpan

Alter = Callable[[Rollout, np.random.Generator], Rollout]


def shifted(rollout: Rollout, by: int) -> Rollout:
    """Log-probs of the token `by` positions later, as an off-by-one in slicing gives; at the open end the last one stays."""
    at = np.clip(np.arange(len(rollout.span)) + by, 0, len(rollout.span) - 1)
    return replace(rollout, span=replace(rollout.span, logprobs=rollout.span.logprobs[at]))


def unnormalised(rollout: Rollout) -> Rollout:
    """Log-probs before truncation renormalised them, and no record of the kept mass."""
    span = rollout.span
    raw = np.minimum(span.logprobs + np.log(span.kept_mass), 0).astype(np.float32)
    return replace(rollout, span=replace(span, logprobs=raw, kept_mass=np.ones_like(span.kept_mass)))


def prompt_in_mask(rollout: Rollout, tokens: int) -> Rollout:
    """The prompt's last `tokens` count as response, with log-prob 0: nobody sampled them. At least one stays prompt.

    The text is that of the tokens, one character each, as where it is decoded from what the mask leaves.
    """
    ids = rollout.prompt.token_ids
    count = min(tokens, len(ids) - 1)
    if count <= 0:
        return rollout
    prompt = replace(rollout.prompt, token_ids=ids[:-count])
    text = rollout.prompt.text[-count:] + rollout.text
    return replace(rollout, prompt=prompt, span=inserted(rollout.span, 0, ids[-count:]), text=text)


def inserted(span: TokenSpan, at: int, token_ids: IntArray, logprobs: FloatArray | None = None) -> TokenSpan:
    """`token_ids` from elsewhere before position `at`, with log-probs 0 unless given."""
    count = len(token_ids)
    near = min(at, len(span) - 1)

    def grown(values: Any, new: Any) -> Any:
        return None if values is None else np.concatenate([values[:at], new, values[at:]])

    def repeated(values: Any) -> Any:
        return None if values is None else grown(values, np.repeat(values[near : near + 1], count, 0))

    return TokenSpan(
        token_ids=grown(span.token_ids, np.asarray(token_ids, np.int64)),
        logprobs=grown(span.logprobs, np.zeros(count, np.float32) if logprobs is None else logprobs),
        kept_mass=grown(span.kept_mass, np.ones(count, np.float32)),
        versions=repeated(span.versions),
        kv_versions=repeated(span.kv_versions),
        experts=repeated(span.experts),
        topk_ids=repeated(span.topk_ids),
        topk_logprobs=repeated(span.topk_logprobs),
    )


def part(span: TokenSpan, where: slice) -> TokenSpan:
    """Some of its tokens."""
    held: dict[str, Any] = {f.name: getattr(span, f.name) for f in fields(span)}
    cut: dict[str, Any] = {name: None if values is None else values[where] for name, values in held.items()}
    return TokenSpan(**cut)


def with_output(rollout: Rollout, output: str, after: int) -> Rollout:
    """The text with a tool's output, as its tokens have it; graders got it without."""
    if len(rollout.span) <= after:
        return rollout
    return replace(rollout, text=rollout.text[:after] + output + rollout.text[after:])


def kv_denied(rollout: Rollout) -> Rollout:
    """KV stated to be as young as the weights that sampled."""
    return replace(rollout, span=replace(rollout.span, kv_versions=rollout.span.versions))


def reward_lost(rollout: Rollout, rng: np.random.Generator, share: float, detail: str | None) -> Rollout:
    """With probability `share` the grader failed and somebody made that a 0; `detail` is all that is left of it, None for
    what an honest grader would have said."""
    if rollout.reward is None or rng.random() >= share:
        return rollout
    return replace(rollout, reward=0.0, detail=rollout.detail if detail is None else detail)


def unfinished_is_wrong(rollout: Rollout) -> Rollout:
    """A grader that gives nothing to an answer without its end."""
    return replace(rollout, reward=0.0) if rollout.status == Status.LENGTH and rollout.reward is not None else rollout


def retokenised(rollout: Rollout, merge: Callable[[list[int]], list[int]]) -> Rollout:
    """The response's text encoded anew: `merge` gives the canonical ids. What else the engine said of each token stays at its
    position and is cut to the new length."""
    ids = merge(rollout.span.token_ids.tolist())
    if ids == rollout.span.token_ids.tolist():
        return rollout
    return replace(rollout, span=replace(part(rollout.span, slice(len(ids))), token_ids=np.array(ids, np.int64)))
