"""Numbers that no sound pass has, told between the pass and the optimizer's step, while the weights are untouched.

pass ─▶ log-probs ─▶ `finite`, `Fresh` ─▶ gradient ─▶ `still` ─▶ AdamW
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from rollkeel.batch.build import TrainingBatch
from rollkeel.config import Config
from rollkeel.errors import Impossible, NonFinite
from rollkeel.train.mesh import Mesh

NOISE = {"fp32": 0.003, "bf16": 0.055, "fp16": 0.03, "int8": 0.04, "fp8_weights": 0.11, "fp8": 0.20, "int4": 0.45}
K3 = {"fp32": 1e-4, "bf16": 3e-3, "fp16": 1e-3, "int8": 2e-3, "fp8_weights": 6e-3, "fp8": 1.5e-2, "int4": 6e-2}
"""Largest honest noise in logits and largest honest mean(ρ − 1 − log ρ): the doctor's, whose thresholds say what was measured."""
ABOVE = 3.0
"""Times as much that a step must have: honest steps have 0.92 at most, a mixture of 32 experts a little over 1."""
LEAST = 40
"""Tokens that say something, from which it is judged."""
ERRORS = 3.0
"""Standard errors that are taken off k3, the tokens of a sequence for dependent."""


class Apart(NamedTuple):
    """How far engine and trainer are apart on tokens that the trainer's own weights sampled."""

    tokens: int
    noise: float
    """1.4826 × median |logit o − logit q| over tokens whose log-probs tell a logit."""
    k3: float
    """mean(ρ − 1 − log ρ) of the tokens, each counted as 1 at most, less `ERRORS` standard errors."""
    times: float
    """The larger of both over what the dtypes explain."""


@dataclass(frozen=True, kw_only=True)
class Fresh:
    """What the numbers of engine and trainer explain of ρ ≠ 1 where both have the same weights; 0 and 0 for equal bits."""

    noise: float
    k3: float
    words: str = ""
    stops: bool = True
    """Whether more than that stops the update."""

    @classmethod
    def of(cls, config: Config) -> Fresh:
        trainer = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}[config.model.dtype]
        cool = 1 / min(config.sampling.temperature or 1.0, 1.0)  # divided by it, logits are so much further apart
        sides = (config.engine.dtype, trainer)
        parity = config.run.parity
        return cls(
            noise=0.0 if parity else ABOVE * cool * sum(NOISE[side] for side in sides),
            k3=0.0 if parity else ABOVE * cool**2 * sum(K3[side] for side in sides),
            words=f"engine {sides[0]} and trainer {sides[1]}",
            stops=config.alarms.on_impossible == "stop",
        )

    def apart(self, batch: TrainingBatch, logprobs: torch.Tensor, version: int) -> Apart:
        """`logprobs` `[T]`: of the batch's tokens under the weights `version`."""
        fresh = (batch.versions == version) & (batch.kv_versions == version)
        asked = (logprobs.detach(), batch.rollout_logprobs, batch.kept_mass, batch.sequence_ids)
        o, q, kept, sequence = (t[fresh].cpu().numpy() for t in asked)
        if not len(o):
            return Apart(0, 0.0, 0.0, 0.0)
        if not self.k3:
            odd = float(np.abs(o - q).max())
            return Apart(len(o), odd, odd, float("inf") if odd else 0.0)
        q = np.minimum(q + np.log(np.clip(kept, 1e-6, 1.0)), 0.0)
        log_ratio = np.clip(o.astype(np.float64) - q, -20.0, 20.0)
        k3 = _least(np.minimum(np.expm1(log_ratio) - log_ratio, 1.0), sequence) if len(o) >= LEAST else 0.0
        tells = (q > np.log(0.02)) & (q < -1e-4) & (o < -1e-6)
        gap = np.abs(_logit(o[tells]) - _logit(q[tells]))
        noise = 1.4826 * float(np.median(gap)) if len(gap) >= LEAST else 0.0
        return Apart(len(o), noise, k3, max(noise / self.noise, k3 / self.k3))

    def judge(self, batch: TrainingBatch, logprobs: torch.Tensor, version: int) -> dict[str, float]:
        """`mismatch/beyond_dtypes_max`, empty without fresh tokens. Raises `Impossible` above 1."""
        found = self.apart(batch, logprobs, version)
        if found.times > 1 and self.stops:
            seen = (batch.rollout_ids.cpu().numpy(), logprobs.detach().float().cpu().numpy())
            if not self.k3:
                raise Impossible(
                    f"log-probs of fresh tokens differ by up to {found.noise:.3g} nats", check="parity", seen=seen
                )
            raise Impossible(
                f"{found.tokens} tokens that weights {version} sampled have other log-probs under weights {version}: noise in"
                f" logits {found.noise:.3g}, k3 {found.k3:.2g}, which {self.words} explain up to {self.noise:.3g} and"
                f" {self.k3:.2g}",
                check="fresh_ratio",
                seen=seen,
            )
        return {"mismatch/beyond_dtypes_max": min(found.times, 1e9)} if found.tokens else {}


def judged(
    fresh: Fresh | None, batch: TrainingBatch, logprobs: torch.Tensor, version: int, mesh: Mesh
) -> dict[str, float]:
    """`Fresh.judge`, which raises on all ranks if on one."""
    if fresh is None:
        return {}
    told, error = dict[str, float](), None
    try:
        told = fresh.judge(batch, logprobs, version)
    except Impossible as found:
        error = found
    mesh.agree(error)
    return told


def _least(values: np.ndarray, sequence: np.ndarray) -> float:
    """A lower bound of the mean of `values`."""
    first, mean = sequence - sequence.min(), float(values.mean())
    counts = np.bincount(first)
    clusters = int((counts > 0).sum())
    if clusters < 2:
        return 0.0
    sums = np.bincount(first, values) - mean * counts
    return mean - ERRORS * float(np.sqrt(np.square(sums).sum() * clusters / (clusters - 1))) / len(values)


def _logit(logprob: np.ndarray) -> np.ndarray:
    wide = logprob.astype(np.float64)
    return wide - np.log(-np.expm1(wide))


def finite(batch: TrainingBatch, logprobs: torch.Tensor, version: int) -> None:
    """Raise `NonFinite` naming the first token whose log-prob is NaN or infinite."""
    bad = ~torch.isfinite(logprobs.detach())
    if bool(bad.any()):
        at = int(bad.nonzero()[0])
        raise NonFinite(
            f"update {version}: log-prob of rollout {int(batch.rollout_ids[at])}, response token"
            f" {int(batch.token_index[at])} is {logprobs[at].item()}; weights left untouched"
        )


def still(
    fresh: Fresh | None, batch: TrainingBatch, objective: object, losses: Sequence[float]
) -> Callable[[float], None]:
    """Judges the gradient's norm: where no token has an advantage and nothing else has a loss, it must be 0."""
    asked = fresh is not None and fresh.stops and getattr(objective, "pays_credit_alone", False)
    nothing = asked and not any(losses) and not bool(batch.advantages.any())

    def judge(norm: float) -> None:
        if nothing and norm > 0:
            raise Impossible(
                f"no token has an advantage and the gradient's norm is {norm:.3g}, which must be 0",
                check="stray_gradient",
            )

    return judge
