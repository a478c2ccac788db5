"""How far the engine that samples and the engine that trains disagree, from three log-probs per token.

The metrics are those of `glossary.py` under `mismatch/`, `staleness/` and `policy/`, and `mask/bad_updates`. Names are stable; ρ = o/q,
all means run over the batch's response tokens. Where the batch has no recomputed o, p of the first pass at the old weights
stands in its place.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from rollkeel.errors import BadInput
from rollkeel.objectives.terms import LOG_RATIO_LIMIT
from rollkeel.types import TokenBatch

BINS = 10
MIN_VARIANCE = 1e-12
"""Below it a correlation in float64 sums is rounding."""
BAD_UPDATE_GAP = 0.5
_BASE = ("one", "excess", "o", "q")
"""Rows whose products with each other are summed too; the objective's weight comes behind them when there is one."""
_LINEAR = ("prob_abs_diff", "logprob_abs_diff", "log_ratio", "clamped", "inverse_ratio_mean", "js")
_LENGTHS = ("rollout_logprobs", "old_logprobs", "ref_logprobs", "advantages", "sequence_ids", "entropy", "kept_mass")


@dataclass(frozen=True)
class _Gap:
    """Per-token float64; tokens that are not finite hold harmless values and `valid` 0."""

    valid: torch.Tensor
    """`[T]` 0 or 1."""
    rows: torch.Tensor
    """`[R, T]`: `_BASE`, the weight if there is one, `_LINEAR`. `excess` is ρ − 1, exact near 0."""
    base: int
    """Rows before `_LINEAR`."""


def mismatch_metrics(
    tokens: TokenBatch, trainer_version: int, *, weight: torch.Tensor | None = None
) -> dict[str, float]:
    """Every mismatch, staleness and policy metric that a token batch holds; finite floats.

    Args: `tokens`: `[T]` tensors of the global batch, T ≥ 1, gradients ignored; `trainer_version`: version of the weights
    that o was computed with; `weight`: `[T]` ≥ 0, the objective's correction weight if it has one. A metric whose fields
    are None, or that is a mean over no tokens, is left out.
    A few passes over `[T]` in float64 and one device synchronisation. Raises `BadInput` for lengths that differ.
    """
    _check_lengths(tokens, weight)
    if tokens.logprobs.numel() == 0:
        return {"mismatch/tokens": 0.0}
    with torch.no_grad():
        gap = _measure(tokens, weight)
        selected = [gap.valid]
        if tokens.versions is not None:
            selected.append(gap.valid * (tokens.versions == trainer_version))
        # All sums of rows and of products of base rows in one product, for every selection of tokens.
        weighted = torch.cat([gap.rows[: gap.base] * s for s in selected])
        sums = gap.rows @ weighted.T
        maxima = torch.stack(
            [torch.stack([((1 + gap.rows[1]) * s).max(), (gap.rows[gap.base] * s).max()]) for s in selected]
        )
        bins = _bins(gap, weighted[1] * gap.rows[1])
        means = _means(tokens, trainer_version, gap)
        # The one synchronisation.
        flat = torch.cat([sums.flatten(), maxima.flatten(), bins.flatten(), torch.stack([*means.values()]).flatten()])
        numbers = iter(flat.tolist())
    metrics: dict[str, float] = {"mismatch/source": float(tokens.old_logprobs is not None)}
    table = _take(numbers, len(sums), len(selected) * gap.base)
    for i, prefix in enumerate(("mismatch", "mismatch/equal_version")[: len(selected)]):
        part = [row[i * gap.base : (i + 1) * gap.base] for row in table]
        metrics |= _moments(prefix, part, gap.base)
    for prefix, (ratio, difference) in zip(
        ("mismatch", "mismatch/equal_version"), _take(numbers, len(selected), 2), strict=False
    ):
        if metrics[f"{prefix}/tokens"]:
            metrics |= {f"{prefix}/ratio_max": ratio, f"{prefix}/prob_abs_diff_max": difference}
    for name, rows in (("o", _take(numbers, BINS, 3)), ("q", _take(numbers, BINS, 3))):
        metrics |= _bin_metrics(f"mismatch/by_probability/{name}", rows)
    metrics |= {
        name: total / over for name, (total, over) in zip(means, _take(numbers, len(means), 2), strict=True) if over
    }
    if len(selected) > 1 and metrics["mismatch/tokens"]:
        metrics["mismatch/equal_version/share"] = metrics["mismatch/equal_version/tokens"] / metrics["mismatch/tokens"]
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def _take(numbers: Iterator[float], rows: int, columns: int) -> list[list[float]]:
    return [[next(numbers) for _ in range(columns)] for _ in range(rows)]


def _check_lengths(tokens: TokenBatch, weight: torch.Tensor | None) -> None:
    given = {name: getattr(tokens, name) for name in (*_LENGTHS, "versions")} | {"weight": weight}
    for name, value in given.items():
        if value is not None and value.shape != tokens.logprobs.shape:
            raise BadInput(
                f"mismatch metrics: expected {name} of shape {list(tokens.logprobs.shape)} like logprobs,"
                f" got {list(value.shape)}; flatten the batch to response tokens"
            )


def _measure(tokens: TokenBatch, weight: torch.Tensor | None) -> _Gap:
    old = tokens.old_logprobs if tokens.old_logprobs is not None else tokens.logprobs
    log_o, log_q = old.detach(), tokens.rollout_logprobs.detach()
    finite = torch.isfinite(log_o) & torch.isfinite(log_q)
    log_o, log_q = torch.where(finite, log_o, 0.0).double(), torch.where(finite, log_q, 0.0).double()
    base = len(_BASE) + (weight is not None)
    # Written row by row into one block: stacking would copy every row once more.
    rows = torch.empty(base + len(_LINEAR), log_o.numel(), dtype=torch.float64, device=log_o.device)
    _, excess, o, q = rows[:4].unbind()
    difference, magnitude, log_ratio, clamped, inverse, js = rows[base:].unbind()
    rows[0] = 1.0
    torch.exp(log_o, out=o)
    torch.exp(log_q, out=q)
    torch.sub(log_o, log_q, out=log_ratio)
    torch.clamp(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT, out=clamped)
    torch.expm1(clamped, out=excess)
    torch.sub(o, q, out=difference).abs_()
    torch.abs(log_ratio, out=magnitude)
    torch.add(excess, 1.0, out=inverse)
    torch.mul(inverse, clamped, out=js).addcmul_(inverse + 1, torch.log1p(excess / 2), value=-1).mul_(0.5).clamp_(min=0)
    inverse.reciprocal_()
    if weight is not None:
        rows[4] = weight.detach()
    return _Gap(finite.double(), rows, base)


def _moments(prefix: str, sums: Sequence[Sequence[float]], base: int) -> dict[str, float]:
    """Metrics from `sums [R][base]`: of rows times base rows over a selection of n tokens."""
    n = sums[0][0]
    metrics = {f"{prefix}/tokens": n}
    if not n:
        return metrics
    linear = {name: row[0] / n for name, row in zip(_LINEAR, sums[base:], strict=True)}
    for name in ("prob_abs_diff", "logprob_abs_diff", "inverse_ratio_mean", "js"):
        metrics[f"{prefix}/{name}"] = linear[name]
    metrics[f"{prefix}/kl"] = -linear["log_ratio"]
    one, excess, o, q = ([value / n for value in row] for row in sums[:4])
    mean, square = excess[0], excess[1]
    second = 1 + 2 * mean + square
    metrics[f"{prefix}/kl_k3"] = mean - linear["clamped"]
    metrics[f"{prefix}/ratio_mean"] = 1 + mean
    metrics[f"{prefix}/ratio_std"] = max(square - mean * mean, 0.0) ** 0.5
    metrics[f"{prefix}/second_moment"] = second
    first, of_square = (1 + mean, second) if base == len(_BASE) else (one[4], sums[4][4] / n)
    if of_square > 0:
        metrics[f"{prefix}/ess"] = min(first**2 / of_square, 1.0)
    var_o, var_q = o[2] - o[0] ** 2, q[3] - q[0] ** 2
    if min(var_o, var_q) > MIN_VARIANCE:
        metrics[f"{prefix}/pearson"] = max(-1.0, min(1.0, (o[3] - o[0] * q[0]) / (var_o * var_q) ** 0.5))
    return metrics


def _bins(gap: _Gap, square: torch.Tensor) -> torch.Tensor:
    """`[2·BINS, 3]`: tokens, Σ excess and Σ excess² in each bin of o, then of q; `square [T]`: valid · excess²."""
    index = (gap.rows[2:4] * BINS).to(torch.uint8).clamp_(max=BINS - 1)
    # A product with the one-hot matrix adds in a fixed order on every device; scattered adds do not on CUDA.
    member = index[:, None] == torch.arange(BINS, dtype=torch.uint8, device=index.device)[:, None]
    values = torch.stack([gap.valid, gap.valid * gap.rows[1], square])
    return member.flatten(0, 1).double() @ values.T


def _bin_metrics(prefix: str, rows: Sequence[Sequence[float]]) -> dict[str, float]:
    total, found = sum(row[0] for row in rows), {}
    for k, (n, first, second) in enumerate(rows):
        if n:
            name = f"{prefix}_{k / BINS:.1f}"
            spread = max(second / n - (first / n) ** 2, 0.0) ** 0.5
            found |= {f"{name}/share": n / total, f"{name}/mean": 1 + first / n, f"{name}/std": spread}
    return found


def _means(tokens: TokenBatch, trainer_version: int, gap: _Gap) -> dict[str, torch.Tensor]:
    """Name → `[2]` float64: a total and what it is divided by."""
    valid = gap.valid
    one = valid.new_ones(())
    count = valid.sum()
    ratio = tokens.logprobs if tokens.old_logprobs is None else tokens.old_logprobs
    beyond = (ratio.detach() - tokens.rollout_logprobs.detach()).abs() > LOG_RATIO_LIMIT
    p = tokens.logprobs.detach().double().exp()
    bad = (tokens.advantages < 0) & (tokens.rollout_logprobs.detach().double().exp() - p > BAD_UPDATE_GAP)
    pairs = {
        "mismatch/non_finite": ((1 - valid).sum(), one),
        "mismatch/clamped_log_ratios": ((valid * beyond).sum(), one),
        "mask/bad_updates": ((valid * bad).sum(), count),
        "policy/prob_mean": (p.mean(), one),
    }
    pairs |= _perplexities(tokens.sequence_ids, gap, one)
    if tokens.kept_mass is not None:
        pairs["mismatch/expected_ratio"] = (valid @ tokens.kept_mass.double(), count)
    if tokens.entropy is not None:
        pairs["policy/entropy"] = (tokens.entropy.detach().double().mean(), one)
    if tokens.ref_logprobs is not None:
        log_ratio = (tokens.ref_logprobs.detach() - tokens.logprobs.detach()).double()
        log_ratio.clamp_(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        pairs["policy/kl_base"] = ((log_ratio.expm1() - log_ratio).mean(), one)
    if tokens.versions is not None:
        pairs |= _staleness(tokens.sequence_ids, trainer_version - tokens.versions, one)
    return {name: torch.stack([total.double(), over]) for name, (total, over) in pairs.items()}


def _runs(ids: torch.Tensor) -> torch.Tensor:
    """`[T]`: number of the run of equal ids; `ids` themselves may be larger than T in a part of a batch."""
    return torch.cat([ids.new_zeros(1), (ids[1:] != ids[:-1]).cumsum(0)])


def _perplexities(ids: torch.Tensor, gap: _Gap, one: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    log_q = gap.rows[3].log()
    log_ratio = gap.rows[gap.base + _LINEAR.index("log_ratio")]
    # Places without a sequence, or with one that has no finite token, have size 0.
    table = torch.zeros(3, len(ids), dtype=torch.float64, device=ids.device)
    table.index_add_(1, _runs(ids), torch.stack([gap.valid, gap.valid * log_q, gap.valid * log_ratio]))
    size, sum_q, sum_ratio = table
    there = (size > 0).double()
    mean_q, mean_gap = sum_q / size.clamp(min=1), -sum_ratio / size.clamp(min=1)
    product = sum_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    means = {
        "perplexity": (mean_gap - mean_q).exp(),
        "rollout_perplexity": (-mean_q).exp(),
        "log_perplexity_gap": mean_gap,
        "log_perplexity_gap_abs": mean_gap.abs(),
        "perplexity_ratio": mean_gap.exp(),
        "chi2_sequence": (2 * product).expm1(),
    }
    pairs = {f"mismatch/{name}": ((there * value).sum(), there.sum()) for name, value in means.items()}
    return pairs | {"mismatch/log_perplexity_gap_abs_max": ((there * mean_gap.abs()).max(), one)}


def _staleness(ids: torch.Tensor, lag: torch.Tensor, one: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    run = _runs(ids)
    low = torch.zeros_like(lag).scatter_reduce(0, run, lag, "amin", include_self=False)
    high = torch.zeros_like(lag).scatter_reduce(0, run, lag, "amax", include_self=False)
    span = high - low  # 0 in places without a sequence
    return {
        "staleness/mean": (lag.double().mean(), one),
        "staleness/max": (lag.max(), one),
        "staleness/span": (span.max(), one),
        "staleness/span_mean": (span.sum(), (run[-1] + 1).double()),
    }
