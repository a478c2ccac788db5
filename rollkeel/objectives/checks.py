"""Refusing a token batch that has a hole in it, by name of sequence and position, before anything learns from it."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from rollkeel.errors import BadInput, NoLogProb, NonFinite
from rollkeel.objectives.segments import lengths
from rollkeel.types import TokenBatch

REQUIRED = ("logprobs", "rollout_logprobs", "advantages", "coefficients", "sequence_ids", "group_ids")
OPTIONAL = (
    "old_logprobs",
    "ref_logprobs",
    "entropy",
    "kept_mass",
    "versions",
    "kv_versions",
    "rollout_ids",
    "token_index",
    "token_ids",
)
TOPK = ("topk_ids", "topk_logprobs", "rollout_topk_logprobs", "old_topk_logprobs")
LOGPROBS = frozenset({"logprobs", "rollout_logprobs", "old_logprobs", "ref_logprobs", *TOPK[1:]})
ROUNDING = 1e-4
"""A log-prob up to this far above 0 is a float32 rounding of log-softmax; beyond, it is not a log-prob."""


def check_tokens(tokens: TokenBatch, needs: Iterable[str], who: str) -> None:
    """Raise unless `tokens` is whole: fields present, `[T]` on one device, finite, log-probs ≤ 0, coefficients ≥ 0.

    One pass per float tensor and one device synchronisation. Raises `BadInput` for a missing field, a wrong length or
    dtype, a positive log-prob, a negative coefficient; `NonFinite` for NaN or infinity.
    """
    needs = tuple(needs)
    _check_layout(tokens, needs, who)
    if tokens.logprobs.numel() == 0:
        return
    names = [n for n in (*REQUIRED, *OPTIONAL, *TOPK[1:]) if n in (*REQUIRED[:4], *needs)]
    # NaN propagates through both ends, so two numbers per tensor decide; which token it is, only a failure asks.
    ends = [torch.stack(torch.aminmax(getattr(tokens, n).detach())).double() for n in names]
    for name, (low, high) in zip(names, torch.stack(ends).tolist(), strict=True):
        if name in TOPK:  # a token that truncation left out has log q = −∞
            if math.isnan(high):
                _refuse(tokens, name, getattr(tokens, name).isnan(), "no NaN in", NonFinite, who)
        elif not (math.isfinite(low) and math.isfinite(high)):
            _refuse(tokens, name, ~torch.isfinite(getattr(tokens, name)), "finite", NonFinite, who)
        if name in LOGPROBS and high > ROUNDING:
            _refuse(tokens, name, getattr(tokens, name) > ROUNDING, "log-probs ≤ 0 in", NoLogProb, who)
        if name == "coefficients" and low < 0:
            _refuse(tokens, name, tokens.coefficients < 0, "non-negative", BadInput, who)


def check_whole(tokens: TokenBatch, who: str) -> None:
    """Raise `BadInput` unless each sequence is one run of equal `sequence_ids`."""
    try:
        lengths(tokens.sequence_ids)
    except BadInput as error:
        raise BadInput(f"objective {who}: {error}") from None


def check_part(value: object, like: torch.Tensor, part: str, who: str, *, truth: bool = False) -> None:
    """Raise `BadInput` unless a part of an objective returned `[T]` numbers (`truth`: bools), `like` the log-probs."""
    is_tensor = isinstance(value, torch.Tensor)
    if is_tensor and value.shape == like.shape and (value.dtype == torch.bool) == truth:
        return
    kind = "bools" if truth else "a SurrogateValue of floats" if part.startswith("surrogate") else "floats"
    got = f"{value.dtype} {list(value.shape)}" if is_tensor else "none" if value is None else type(value).__name__
    raise BadInput(f"objective {who}: expected {part} to return {kind} {list(like.shape)}, got {got}")


def _tensors(tokens: TokenBatch, who: str) -> dict[str, torch.Tensor]:
    """The fields that are given. Raises `BadInput` for one that is no tensor, such as a list or a NumPy array."""
    given: dict[str, torch.Tensor] = {}
    for name in (*REQUIRED, *OPTIONAL, *TOPK):
        value = getattr(tokens, name)
        if isinstance(value, torch.Tensor):
            given[name] = value
        elif value is not None or name in REQUIRED:
            raise BadInput(
                f"objective {who}: expected {name} as a torch.Tensor, got {type(value).__name__}; use torch.as_tensor"
            )
    return given


def _check_layout(tokens: TokenBatch, needs: tuple[str, ...], who: str) -> None:
    for name in needs:
        if getattr(tokens, name) is None:
            raise BadInput(f"objective {who}: expected a batch with {name}, got None; compute it before the loss")
    given = _tensors(tokens, who)
    length, device = tuple(tokens.logprobs.shape), tokens.logprobs.device
    if len(length) != 1:
        raise BadInput(
            f"objective {who}: expected logprobs of shape [T], got {list(length)}; flatten the batch to response tokens"
        )
    for name, value in given.items():
        shape = tuple(value.shape[:1]) if name in TOPK else tuple(value.shape)
        if shape != length:
            raise BadInput(
                f"objective {who}: expected {name} to have one entry per token like logprobs {list(tokens.logprobs.shape)},"
                f" got shape {list(value.shape)}; flatten the batch to response tokens"
            )
        if name in TOPK and (
            value.dim() != 2 or value.shape != (value if tokens.topk_ids is None else tokens.topk_ids).shape
        ):
            raise BadInput(
                f"objective {who}: expected {name} of shape [T, K] like topk_ids, got {list(value.shape)}; give the log-probs"
                " at the ids of every position"
            )
        if value.device != device:
            raise BadInput(
                f"objective {who}: expected {name} on {device} like logprobs, got {value.device}; move the batch"
            )
    for name in (*REQUIRED[:4], *(n for n in needs if n in OPTIONAL[:3])):
        value = getattr(tokens, name)
        if not value.is_floating_point():
            raise BadInput(f"objective {who}: expected {name} as floats, got {value.dtype}; convert it")


def _refuse(
    tokens: TokenBatch, name: str, bad: torch.Tensor, what: str, error: type[BadInput | NonFinite], who: str
) -> None:
    first = tuple(bad.nonzero()[0].tolist())
    where = first[0]
    sequence = int(tokens.sequence_ids[where])
    if tokens.token_index is not None:
        position = int(tokens.token_index[where])
    else:
        position = where - int((tokens.sequence_ids == sequence).nonzero()[0, 0])
    rollout = f" (rollout {int(tokens.rollout_ids[where])})" if tokens.rollout_ids is not None else ""
    raise error(
        f"objective {who}: expected {what} {name}, got {float(getattr(tokens, name).detach()[first])} in sequence {sequence}{rollout}"
        f" at position {position} and {int(bad.sum()) - 1} more; look at that rollout in the engine or the trainer"
    )
