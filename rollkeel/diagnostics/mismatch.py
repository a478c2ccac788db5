"""How far the engine that samples and the engine that trains disagree, from three log-probs per token.

Names are stable; ρ = o/q, all means run over the batch's response tokens. Where the batch has no recomputed o, p of the
first pass at the old weights stands in its place.

| metric | meaning |
|---|---|
| `mismatch/source` | 1: o is `old_logprobs`; 0: o is `logprobs` |
| `mismatch/tokens`, `/non_finite`, `/clamped_log_ratios` | tokens measured; left out as NaN or infinite; log ρ beyond ±20 |
| `mismatch/ratio_mean`, `/ratio_std`, `/ratio_max` | of ρ (population std). E_q[ρ] = the mass o puts on q's support |
| `mismatch/expected_ratio` | mean kept mass, what `ratio_mean` should be near under truncated sampling |
| `mismatch/prob_abs_diff`, `/prob_abs_diff_max`, `/logprob_abs_diff` | mean and max abs(o−q); mean abs(log o − log q) |
| `mismatch/pearson` | correlation of (o, q); left out when either has a variance under 1e-12 |
| `mismatch/kl`, `/kl_k3` | mean(log q − log o); mean(ρ − 1 − log ρ) |
| `mismatch/inverse_ratio_mean`, `/second_moment` | mean 1/ρ; mean ρ² |
| `mismatch/ess` | (Σρ)² / (n Σρ²), effective sample size as a fraction |
| `mismatch/equal_version/*` | the same over tokens sampled by the trainer's version; `/share` is their fraction |
| `mismatch/by_probability/{o,q}_<low>/{share,mean,std}` | ρ in ten bins [low, low+0.1) of o and of q; empty bins left out |
| `mask/bad_updates` | fraction with A < 0 and q − p > 0.5 |
| `staleness/mean`, `/max` | trainer version − version that sampled the token |
| `staleness/span`, `/span_mean` | newest − oldest version inside one rollout: largest, and mean over rollouts |
| `policy/prob_mean`, `policy/entropy` | mean p of the sampled tokens; mean entropy, nats |
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rollkeel.errors import BadInput
from rollkeel.objectives.reductions import Reductions
from rollkeel.objectives.terms import LOG_RATIO_LIMIT
from rollkeel.types import TokenBatch

BINS = 10
MIN_VARIANCE = 1e-12
"""Below it a correlation in float64 sums is rounding."""
BAD_UPDATE_GAP = 0.5


@dataclass(frozen=True)
class _Gap:
    """Per-token `[T]` float64; tokens that are not finite hold harmless values and `valid` 0."""

    valid: torch.Tensor
    o: torch.Tensor
    q: torch.Tensor
    log_ratio: torch.Tensor
    clamped: torch.Tensor
    excess: torch.Tensor
    """ρ − 1, exact near 0."""


def mismatch_metrics(tokens: TokenBatch, trainer_version: int) -> dict[str, float]:
    """Every mismatch, staleness and policy metric that a token batch holds; finite floats, see the module's table.

    Args: `tokens`: `[T]` tensors of the global batch, T ≥ 1, gradients ignored; `trainer_version`: version of the weights
    that o was computed with. A metric whose fields are None, or that is a mean over no tokens, is left out.
    A few passes over `[T]` in float64 and one device synchronisation. Raises `BadInput` for lengths that differ.
    """
    _check_lengths(tokens)
    if tokens.logprobs.numel() == 0:
        return {"mismatch/tokens": 0.0}
    with torch.no_grad():
        gap = _measure(tokens)
        scalars = Reductions()
        recomputed = float(tokens.old_logprobs is not None)
        scalars.add("mismatch/source", gap.valid.new_tensor(recomputed))
        scalars.add("mismatch/non_finite", (1 - gap.valid).sum())
        scalars.add("mismatch/clamped_log_ratios", (gap.valid * (gap.log_ratio != gap.clamped)).sum())
        _add_gap(scalars, "mismatch", gap, gap.valid)
        if tokens.kept_mass is not None:
            scalars.add("mismatch/expected_ratio", (gap.valid * tokens.kept_mass).sum(), gap.valid.sum())
        if tokens.versions is not None:
            equal = gap.valid * (tokens.versions == trainer_version)
            scalars.add("mismatch/equal_version/share", equal.sum(), gap.valid.sum())
            _add_gap(scalars, "mismatch/equal_version", gap, equal)
            _add_staleness(scalars, tokens, tokens.versions, trainer_version)
        _add_bins(scalars, "mismatch/by_probability/o", gap.o, gap)
        _add_bins(scalars, "mismatch/by_probability/q", gap.q, gap)
        _add_policy(scalars, tokens, gap)
    found = scalars.read()
    for prefix in ("mismatch", "mismatch/equal_version"):
        _finish(found, prefix)
    return found


def _check_lengths(tokens: TokenBatch) -> None:
    for name in ("rollout_logprobs", "old_logprobs", "advantages", "sequence_ids", "entropy", "kept_mass", "versions"):
        value = getattr(tokens, name)
        if value is not None and value.shape != tokens.logprobs.shape:
            raise BadInput(
                f"mismatch metrics: expected {name} of shape {list(tokens.logprobs.shape)} like logprobs,"
                f" got {list(value.shape)}; flatten the batch to response tokens"
            )


def _measure(tokens: TokenBatch) -> _Gap:
    old = tokens.old_logprobs if tokens.old_logprobs is not None else tokens.logprobs
    log_o, log_q = old.detach().double(), tokens.rollout_logprobs.detach().double()
    finite = torch.isfinite(log_o) & torch.isfinite(log_q)
    log_o, log_q = torch.where(finite, log_o, 0.0), torch.where(finite, log_q, 0.0)
    log_ratio = log_o - log_q
    clamped = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return _Gap(finite.double(), log_o.exp(), log_q.exp(), log_ratio, clamped, clamped.expm1())


def _add_gap(scalars: Reductions, prefix: str, gap: _Gap, selected: torch.Tensor) -> None:
    """Moments over the tokens where `selected` is 1. `_finish` turns the private sums into the remaining metrics."""
    n = selected.sum()
    difference = (gap.o - gap.q).abs()
    features = {
        "_excess": gap.excess,
        "_excess2": gap.excess.square(),
        "prob_abs_diff": difference,
        "logprob_abs_diff": gap.log_ratio.abs(),
        "kl": -gap.log_ratio,
        "kl_k3": gap.excess - gap.clamped,
        "inverse_ratio_mean": torch.exp(-gap.clamped),
        "_o": gap.o,
        "_q": gap.q,
        "_oo": gap.o.square(),
        "_qq": gap.q.square(),
        "_oq": gap.o * gap.q,
    }
    sums = torch.stack(list(features.values())) @ selected
    scalars.add(f"{prefix}/tokens", n)
    for name, total in zip(features, sums.unbind(), strict=True):
        scalars.add(f"{prefix}/{name}", total, n)
    some = selected.max()
    scalars.add(f"{prefix}/ratio_max", (selected * (gap.excess + 1)).max() * some, some)
    scalars.add(f"{prefix}/prob_abs_diff_max", (selected * difference).max() * some, some)


def _finish(found: dict[str, float], prefix: str) -> None:
    """Metrics that are functions of moments; replaces the private ones."""
    private = ("_excess", "_excess2", "_o", "_q", "_oo", "_qq", "_oq")
    moments = {name: found.pop(f"{prefix}/{name}") for name in private if f"{prefix}/{name}" in found}
    if len(moments) < len(private):
        return
    mean, square = moments["_excess"], moments["_excess2"]
    second = 1 + 2 * mean + square
    found[f"{prefix}/ratio_mean"] = 1 + mean
    found[f"{prefix}/ratio_std"] = max(square - mean * mean, 0.0) ** 0.5
    found[f"{prefix}/second_moment"] = second
    found[f"{prefix}/ess"] = min((1 + mean) ** 2 / second, 1.0)
    var_o, var_q = moments["_oo"] - moments["_o"] ** 2, moments["_qq"] - moments["_q"] ** 2
    if min(var_o, var_q) > MIN_VARIANCE:
        covariance = moments["_oq"] - moments["_o"] * moments["_q"]
        found[f"{prefix}/pearson"] = max(-1.0, min(1.0, covariance / (var_o * var_q) ** 0.5))


def _add_bins(scalars: Reductions, prefix: str, probability: torch.Tensor, gap: _Gap) -> None:
    index = (probability * BINS).long().clamp(0, BINS - 1)
    # A product with the one-hot matrix adds in a fixed order on every device; scattered adds do not on CUDA.
    member = torch.nn.functional.one_hot(index, BINS).double() * gap.valid[:, None]
    sums = member.T @ torch.stack([gap.valid, gap.excess, gap.excess.square()], dim=1)
    total = gap.valid.sum()
    for k in range(BINS):
        name, (n, first, second) = f"{prefix}_{k / BINS:.1f}", sums[k].unbind()
        scalars.add(f"{name}/share", torch.where(n > 0, n / total, torch.nan))
        scalars.add(f"{name}/mean", first + n, n)
        scalars.add(f"{name}/std", (second * n - first * first).clamp(min=0.0).sqrt(), n)


def _add_staleness(scalars: Reductions, tokens: TokenBatch, versions: torch.Tensor, trainer_version: int) -> None:
    lag = (trainer_version - versions).double()
    scalars.add("staleness/mean", lag.mean())
    scalars.add("staleness/max", lag.max())
    ids = tokens.sequence_ids
    # Runs numbered here rather than by `ids`, which may be larger than T in a part of a batch.
    run = torch.cat([ids.new_zeros(1), (ids[1:] != ids[:-1]).long().cumsum(0)])
    low = torch.full_like(lag, torch.inf).scatter_reduce(0, run, lag, "amin")
    high = torch.full_like(lag, -torch.inf).scatter_reduce(0, run, lag, "amax")
    span = (high - low).clamp(min=0.0)  # places without a sequence are −∞ − ∞
    scalars.add("staleness/span", span.max())
    scalars.add("staleness/span_mean", span.sum(), (run[-1] + 1))


def _add_policy(scalars: Reductions, tokens: TokenBatch, gap: _Gap) -> None:
    p = tokens.logprobs.detach().double().exp()
    bad = (tokens.advantages < 0) & (gap.q - p > BAD_UPDATE_GAP)
    scalars.add("mask/bad_updates", (gap.valid * bad).sum(), gap.valid.sum())
    scalars.add("policy/prob_mean", p.mean())
    if tokens.entropy is not None:
        scalars.add("policy/entropy", tokens.entropy.detach().double().mean())
