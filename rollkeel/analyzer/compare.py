"""Two captures of the same tokens: the first operation that parts beyond its dtype, the flips, and what the flips cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from rollkeel.analyzer.capture import Capture, Key, order_of, tensor_name
from rollkeel.analyzer.reference import Local, wrong_choice
from rollkeel.errors import BadInput
from rollkeel.objectives.terms import LOG_RATIO_LIMIT
from rollkeel.sync.proof import TOLERANCES

RATIO = 4.0
"""An operation parts when its error over all tokens is more than so many times what its dtype explains …"""
WORST = 25.0
"""… or that of one token. Healthy operations of four presets in eight modes reached 1.1 and 5."""
OPENS = RATIO * 2**-20
"""A distance of the sides (`Row.gap`) beyond this is more than float32 leaves between two orders of adding up."""
SHOWN_TOKENS = 32
"""Flipped tokens that are listed by place."""


class Judge(Protocol):
    """`Reference`, or another that knows what is right."""

    def judge(self, capture: Capture) -> Iterator[Local]: ...


@dataclass(frozen=True, kw_only=True)
class Row:
    """One operation of both sides."""

    key: Key
    sides: tuple[Local | None, Local | None]
    """A and B, each by its own inputs; None where it could not be judged."""
    gap: float
    """‖A − B‖ / ‖A‖ of the values as they are, with all they inherit; of `experts` the fraction of tokens that differ; of
    `logprobs` the root mean square, nats. NaN where a side has none."""

    @property
    def ratio(self) -> float:
        """The larger of the sides' errors, in units of what their dtypes explain."""
        return max((s.ratio for s in self.sides if s is not None), default=0.0)

    @property
    def parted(self) -> tuple[int, ...]:
        """Sides (0 and 1) that part here beyond their dtype."""
        return tuple(i for i, s in enumerate(self.sides) if s is not None and (s.ratio > RATIO or s.worst > WORST))


@dataclass(frozen=True, kw_only=True)
class Flips:
    """Tokens that the sides send to different experts, at the positions that predict response tokens."""

    count: int
    """(token, layer) pairs whose expert sets differ."""
    rate: float
    """As a fraction of all pairs."""
    tokens: int
    """Response tokens with a flip in some layer."""
    token_rate: float
    explained: int
    """Flips of pairs behind healthy operations only, whose margin is within the distance of the sides' router logits."""
    by_layer: Mapping[int, int]
    places: Sequence[tuple[int, int, int]]
    """(sequence, position, layers flipped) of the first flipped response tokens."""


@dataclass(frozen=True, kw_only=True)
class Gap:
    """log ρ = log-prob of A − log-prob of B over n response tokens."""

    tokens: int
    k3: float
    """Mean of ρ − 1 − log ρ, nats."""
    rms: float
    max: float
    rms_flipped: float | None = None
    """Over tokens with a flip; None without any."""
    rms_unflipped: float | None = None
    share: float | None = None
    """Part of k3's sum that lies on flipped tokens; None for a dense model."""


@dataclass(frozen=True, kw_only=True)
class Path:
    """Captured against really served log-probs of one side, over response tokens."""

    side: int
    median: float
    mean: float
    agrees: bool


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """What `analyze` found."""

    names: tuple[str, str]
    tokens: int
    """Response tokens."""
    rows: Sequence[Row]
    """In the order of computing; empty where only log-probs could be compared."""
    first: Key | None
    """First operation that parts beyond its dtype; `(None, "served_path")` if only the compiled path does."""
    opens: Row | None
    """First operation after which the sides differ at all, explained or not; None where they agree to float32."""
    side: int | None
    """Which side does: 0 is A, 1 is B. None if none, or both."""
    flips: Flips | None
    gap: Gap
    paths: Sequence[Path]
    verdict: str

    @property
    def healthy(self) -> bool:
        return self.first is None

    def as_dict(self) -> dict[str, Any]:
        """JSON values; infinite and missing numbers are null."""
        rows = [
            {
                "layer": row.key[0],
                "operation": row.key[1],
                "gap": _number(row.gap),
                **{name: _side(s) for name, s in zip("ab", row.sides, strict=True)},
                "parted": [("a", "b")[i] for i in row.parted],
            }
            for row in self.rows
        ]
        flips = None
        if self.flips is not None:
            flips = {**self.flips.__dict__, "by_layer": {str(k): v for k, v in self.flips.by_layer.items()}}
        return {
            "healthy": self.healthy,
            "verdict": self.verdict,
            "first": None if self.first is None else {"layer": self.first[0], "operation": self.first[1]},
            "opens": None if self.opens is None else {"operation": place(self.opens.key), "gap": self.opens.gap},
            "side": None if self.side is None else self.names[self.side],
            "a": self.names[0],
            "b": self.names[1],
            "tokens": self.tokens,
            "gap": {k: _number(v) for k, v in self.gap.__dict__.items()},
            "flips": flips,
            "paths": [{**p.__dict__, "side": self.names[p.side]} for p in self.paths],
            "operations": rows,
        }


def _number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _side(local: Local | None) -> dict[str, Any] | None:
    if local is None:
        return None
    numbers = {"error": local.error, "expected": local.expected, "ratio": local.ratio, "worst": local.worst}
    return {**{k: _number(v) for k, v in numbers.items()}, "worst_token": local.token}


def compare(a: Capture, b: Capture, judge: Judge, progress: Callable[[str], None] | None = None) -> Analysis:
    """Compare two captures; A is usually the trainer, B the engine. Raises `BadInput` if they are not of the same tokens."""
    if not torch.equal(a.tokens.ids, b.tokens.ids) or a.tokens.starts != b.tokens.starts:
        raise BadInput(f"analyze: expected the same tokens from both sides, got others from {a.name} and {b.name}")
    judged: list[dict[Key, Local]] = [{}, {}]
    for side, found in zip((a, b), judged, strict=True):
        for local in judge.judge(side):
            found[local.key] = local
            if progress is not None:
                progress(f"{side.name}: judged {place(local.key)}")
    rows = [
        Row(key=key, sides=(judged[0].get(key), judged[1].get(key)), gap=_distance(key, a, b))
        for key in order_of({*judged[0], *judged[1]})
    ]
    first = next((row for row in rows if row.parted), None)
    paths = [path for i, side in enumerate((a, b)) if (path := _path(i, side)) is not None]
    flipped = _flipped(a, b)
    flips = None if flipped is None else _flips(a, b, flipped, None if first is None else first.key)
    gap = gap_of(a, b, None if flipped is None else torch.stack([*flipped.values()]).any(0))
    key, sides = (None, ()) if first is None else (first.key, first.parted)
    broken = [path for path in paths if not path.agrees]
    if key is None and broken:
        key, sides = (None, "served_path"), tuple(path.side for path in broken)
    names = (a.name, b.name)
    opens = next((row for row in rows if row.gap > OPENS), None)
    modes = " and ".join(dict.fromkeys(side.mode for side in (a, b) if side.mode != "fp32")) or "fp32"
    return Analysis(
        names=names,
        tokens=gap.tokens,
        rows=rows,
        first=key,
        opens=opens,
        side=sides[0] if len(sides) == 1 else None,
        flips=flips,
        gap=gap,
        paths=paths,
        verdict=_verdict(names, first, sides, broken, flips, gap) or _explained(names, modes, rows, opens, flips, gap),
    )


def compare_logprobs(names: tuple[str, str], a: torch.Tensor, b: torch.Tensor, tolerance: str) -> Analysis:
    """All that can be said of a side that gives log-probs only (an inference server): the gap.

    Args: `a`, `b`: `[n]` log-probs of the same tokens; `tolerance`: key of `TOLERANCES`, the coarser mode of the two.
    """
    gap = _gap((a - b).double(), None)
    distance, limit = (a - b).double().abs(), TOLERANCES[tolerance]
    agrees = bool(distance.median() <= limit.median and distance.mean() <= limit.mean)
    said = "within" if agrees else "beyond"
    return Analysis(
        names=names,
        tokens=gap.tokens,
        rows=(),
        first=None if agrees else (None, "logprobs"),
        opens=None,
        side=None,
        flips=None,
        gap=gap,
        paths=(),
        verdict=(
            f"{names[1]} gives log-probs only, so no operation can be named: its gap to {names[0]} is {said} what"
            f" {tolerance} explains (median {float(distance.median()):.2g}, mean {float(distance.mean()):.2g} nats;"
            f" allowed {limit.median:.2g} and {limit.mean:.2g})."
        ),
    )


def _distance(key: Key, a: Capture, b: Capture) -> float:
    if key == (None, "logprobs"):
        both = (a.logprobs - b.logprobs).double()
        both = both[both.isfinite()]
        return float(both.square().mean().sqrt()) if len(both) else math.nan
    x, y = a.values.get(key), b.values.get(key)
    if x is None or y is None or x.shape != y.shape:
        return math.nan
    if key[1] == "experts":
        return float(_differ(x, y).double().mean())
    return float((x.double() - y.double()).norm() / x.double().norm().clamp_min(1e-30))


def _differ(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """`[T]` bool: expert sets `[T, k]` that are not the same."""
    return (x.sort(-1).values != y.sort(-1).values).any(-1)


def _flipped(a: Capture, b: Capture) -> dict[int, torch.Tensor] | None:
    """`[n]` bool by MoE layer for the n response tokens, at the positions that predict them; None for a dense model."""
    at = a.tokens.response.nonzero()[:, 0] - 1
    layers = [key[0] for key in order_of(a.values) if key[1] == "experts" and key in b.values and key[0] is not None]
    if not layers:
        return None
    return {i: _differ(a.values[i, "experts"][at], b.values[i, "experts"][at]) for i in layers}


def _flips(a: Capture, b: Capture, flipped: Mapping[int, torch.Tensor], first: Key | None) -> Flips:
    table = torch.stack([*flipped.values()])  # [layers, n]
    any_layer, places = table.any(0), a.tokens.response.nonzero()[:, 0]
    explained = 0
    for layer, here in flipped.items():
        if first is None or order_of([first, (layer, "experts")])[0] != first:
            explained += int((here & _near_tie(a, b, layer, places - 1)).sum())
    starts, shown = torch.tensor(a.tokens.starts), []
    for n in any_layer.nonzero()[:SHOWN_TOKENS, 0].tolist():
        sequence = int(torch.searchsorted(starts, places[n], right=True)) - 1
        shown.append((sequence, int(places[n] - starts[sequence]), int(table[:, n].sum())))
    return Flips(
        count=int(table.sum()),
        rate=float(table.double().mean()),
        tokens=int(any_layer.sum()),
        token_rate=float(any_layer.double().mean()),
        explained=explained,
        by_layer={layer: int(here.sum()) for layer, here in flipped.items()},
        places=shown,
    )


def _near_tie(a: Capture, b: Capture, layer: int, at: torch.Tensor) -> torch.Tensor:
    """`[n]` bool: both choices are the best by the side's own logits, and A's margin is within the logits' distance."""
    logits = [side.values[layer, "router"][at].double() for side in (a, b)]
    chosen = [side.values[layer, "experts"][at].long() for side in (a, b)]
    sound = ~wrong_choice(chosen[0], logits[0]) & ~wrong_choice(chosen[1], logits[1])
    ordered = logits[0].sort(-1, descending=True).values
    k = chosen[0].shape[1]
    margin = ordered[:, k - 1] - ordered[:, k] if k < ordered.shape[1] else torch.zeros(len(at))
    return sound & (margin <= 2 * (logits[0] - logits[1]).abs().amax(-1) + 1e-6)


def gap_of(a: Capture, b: Capture, flipped: torch.Tensor | None) -> Gap:
    """The log-prob gap on response tokens, by the paths that really serve; `flipped [n]` bool."""
    at = a.tokens.response
    return _gap((a.served_logprobs[at] - b.served_logprobs[at]).double(), flipped)


def _gap(log_ratio: torch.Tensor, flipped: torch.Tensor | None) -> Gap:
    log_ratio = log_ratio.nan_to_num(LOG_RATIO_LIMIT).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    k3 = log_ratio.expm1() - log_ratio

    def rms(part: torch.Tensor) -> float | None:
        return float(part.square().mean().sqrt()) if len(part) else None

    share = None
    if flipped is not None:
        share = float(k3[flipped].sum() / k3.sum()) if float(k3.sum()) > 0 else 0.0
    return Gap(
        tokens=len(log_ratio),
        k3=float(k3.mean()),
        rms=rms(log_ratio) or 0.0,
        max=float(log_ratio.abs().max()) if len(log_ratio) else 0.0,
        rms_flipped=None if flipped is None else rms(log_ratio[flipped]),
        rms_unflipped=None if flipped is None else rms(log_ratio[~flipped]),
        share=share,
    )


def _path(side: int, capture: Capture) -> Path | None:
    if capture.path_logprobs is None:
        return None
    at = capture.tokens.response
    distance = (capture.path_logprobs[at] - capture.logprobs[at]).double().abs().nan_to_num(math.inf)
    limit = TOLERANCES[capture.mode]
    median, mean = float(distance.median()), float(distance.mean())
    return Path(side=side, median=median, mean=mean, agrees=median <= limit.median and mean <= limit.mean)


def _verdict(
    names: tuple[str, str],
    first: Row | None,
    sides: Sequence[int],
    broken: Sequence[Path],
    flips: Flips | None,
    gap: Gap,
) -> str:
    """What parts beyond its dtype, with its cost; empty if nothing does."""
    cost = f"log-prob gap rms {gap.rms:.2g} nats, k3 {gap.k3:.2g}"
    if flips is not None and gap.share is not None:
        cost += f", {gap.share:.0%} of it on the {flips.token_rate:.2%} of tokens whose experts flip"
    who = " and ".join(names[i] for i in sides)
    if first is not None:
        found = [first.sides[i] for i in sides]
        ratio = max((s.ratio if s.ratio > RATIO else s.worst for s in found if s is not None), default=math.inf)
        times = f"{ratio:.3g} times what the dtype explains" if math.isfinite(ratio) else "which no dtype explains"
        why = "; a look-up computes nothing, so those are other weights" if first.key[1] == "embedding" else ""
        return f"{who} part{'s' if len(sides) == 1 else ''} first at {place(first.key)}, {times}{why}; {cost}."
    if broken:
        return (
            f"Operation by operation both sides are healthy, but the compiled or fused path of {who} gives other log-probs"
            f" (median {broken[0].median:.2g} nats); {cost}."
        )
    return ""


def _explained(
    names: tuple[str, str], modes: str, rows: Sequence[Row], opens: Row | None, flips: Flips | None, gap: Gap
) -> str:
    """How large the honest gap is, where it begins, and that nothing in it is a fault."""
    layers = len({row.key[0] for row in rows if row.key[0] is not None})
    checked = f"no operation is beyond its dtype ({len(rows)} operations, {layers} layers)"
    if opens is None:
        return f"Healthy: {names[0]} and {names[1]} agree; {checked}."
    experts = "" if flips is None else f", {flips.token_rate:.2%} of tokens at other experts"
    share = "" if not (flips and flips.tokens) or gap.share is None else f" ({gap.share:.0%} of k3 lies on those)"
    return (
        f"Healthy: {names[0]} and {names[1]} differ as {modes} explains: log-prob gap rms {gap.rms:.2g} nats, k3 {gap.k3:.2g}"
        f"{experts}{share}. They differ first at {place(opens.key)} (A–B {opens.gap:.2g}); {checked}."
    )


def place(key: Key) -> str:
    """An operation in words."""
    layer, name = key
    return name if layer is None else f"layer {layer} {name}"


__all__ = ["Analysis", "Flips", "Gap", "Path", "Row", "compare", "compare_logprobs", "tensor_name"]
