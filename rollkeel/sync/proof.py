"""Does an engine in another program serve the weights it was given? Its log-probs of a few sequences say so.

Checksums prove what a server read. They do not prove what it computes with: vLLM packs weights for its kernels, and a reload
that forgets a packed copy serves a mixture of two versions without any error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollkeel.errors import EngineFailure
from rollkeel.types import FloatArray, IntArray


@dataclass(frozen=True)
class Tolerance:
    """Largest |engine − trainer| log-prob that is still the same weights."""

    median: float
    mean: float


TOLERANCES: Mapping[str, Tolerance] = {
    "fp32": Tolerance(1e-4, 1e-2),
    "bf16": Tolerance(3e-2, 6e-2),
    "fp16": Tolerance(4e-3, 1e-2),
    "fp8_weights": Tolerance(6e-2, 1.2e-1),
    "int8": Tolerance(3e-2, 6e-2),
    "int4": Tolerance(1.5e-1, 3e-1),
    "fp8": Tolerance(6e-2, 1.2e-1),
}
"""By the coarser of the engine's and the trainer's numbers. Measured on tiny Qwen3 models: see `compare`."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the probes say. All gaps are |engine − trainer| in nats, over all tokens of all probes."""

    agrees: bool
    median: float
    mean: float
    max: float
    tolerance: Tolerance

    def metrics(self) -> dict[str, float]:
        """`sync/probe_gap_median`, `sync/probe_gap_mean` and `sync/probe_gap_max`."""
        return {
            "sync/probe_gap_median": self.median,
            "sync/probe_gap_mean": self.mean,
            "sync/probe_gap_max": self.max,
        }


def compare(
    engine: Sequence[FloatArray], trainer: Sequence[FloatArray], dtype: str, tolerance: float | None = None
) -> Verdict:
    """Judge log-probs of the same sequences, `[n − 1]` each, by median and mean of their distance.

    Both are needed: a router's near-tie that falls the other way moves a few tokens by up to 1 nat, which leaves the median
    alone; stale weights of a few experts move a minority of tokens by much, which leaves the median alone, too, but not the
    mean. In float32 vLLM is 2e-6 off at most where no routing flips, and 2 tokens of 2 million were more than 1e-4 off (8e-3);
    in bfloat16 the standard deviation of a log-prob is 0.011 (largest 0.3). Reloads gone wrong were 0.3 (stale experts) to
    0.7 (stale head) off after a large change of the weights. After the small change of one update a coarse dtype's rounding
    can hide them for some updates, float32 cannot. `tolerance`: the median allowed, in the place of the table's; the mean
    may then be as many times as large as in the table.

    Raises `EngineFailure` if a sequence has another number of log-probs on one side.
    """
    limit = TOLERANCES[dtype]
    if tolerance is not None:
        limit = Tolerance(tolerance, tolerance * limit.mean / limit.median)
    shapes = [(len(a), len(b)) for a, b in zip(engine, trainer, strict=True)]
    if any(a != b for a, b in shapes):
        raise EngineFailure(f"probes: expected as many log-probs from the engine as from the trainer, got {shapes}")
    both = (np.concatenate(side).astype(np.float64) for side in (engine, trainer))
    gaps = np.abs(np.subtract(*both))
    gaps[~np.isfinite(gaps)] = np.inf
    median = float(np.median(gaps))
    mean = float(gaps.mean())
    largest = float(gaps.max())
    agrees = median <= limit.median and mean <= limit.mean
    return Verdict(agrees=agrees, median=median, mean=mean, max=largest, tolerance=limit)


@dataclass(frozen=True, kw_only=True)
class Probes:
    """What is asked of an engine after a publication, and who knows the answer."""

    sequences: Sequence[IntArray]
    """`[n]` token ids each, n ≥ 2."""
    trainer: Callable[[Sequence[IntArray]], Sequence[FloatArray]]
    """Log-probs `[n − 1]` under the published weights, temperature 1."""
    dtype: str
    """Key of `TOLERANCES`."""
    tolerance: float | None = None

    def judge(self, *engines: Sequence[FloatArray]) -> Verdict:
        """Of what engines answer to the sequences, the one that is furthest from the trainer's."""
        own = self.trainer(self.sequences)
        verdicts = [compare(one, own, self.dtype, self.tolerance) for one in engines]
        return max(verdicts, key=lambda verdict: (not verdict.agrees, verdict.mean))

    def proven(
        self,
        scores: Callable[[Sequence[IntArray]], Sequence[Sequence[FloatArray]]],
        again: Callable[[], Any],
        name: str,
        version: int,
    ) -> dict[str, float]:
        """Ask the engines of a publication, and once more after the same update was published `again`. Nothing where none answers.

        `scores`: what each of them says of the sequences. Raises `EngineFailure` if they still disagree."""
        if not (said := scores(self.sequences)):
            return {}
        verdict = self.judge(*said)
        retried = not verdict.agrees
        if retried:
            again()
            verdict = self.judge(*scores(self.sequences))
        if not verdict.agrees:
            raise EngineFailure(
                f"engine {name}: its log-probs under version {version} are not the trainer's:"
                f" |gap| median {verdict.median:.3g}, mean {verdict.mean:.3g}, expected at most"
                f" {verdict.tolerance.median:.3g} and {verdict.tolerance.mean:.3g}; it does not serve the weights it was given"
            )
        return {**verdict.metrics(), "sync/probe_retries": float(retried)}


def probe_sequences(prompts: Sequence[IntArray], vocab_size: int, max_length: int, tail: int = 16) -> list[IntArray]:
    """Each prompt's last tokens and `tail` tokens drawn from the whole vocabulary, which sends them to every expert; at most
    256 tokens, and one less than `max_length`."""
    limit = max(2, min(256, max_length - 1))
    rng = np.random.default_rng(0x9806)
    drawn = rng.integers(0, vocab_size, (len(prompts), tail), dtype=np.int64)
    whole = [np.concatenate([np.asarray(p, np.int64), d]) for p, d in zip(prompts, drawn, strict=True)]
    return [ids[-limit:] for ids in whole]
