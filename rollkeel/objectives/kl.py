"""Per-token estimators of KL(p‖ref), as terms of a loss (Schulman 2020, "Approximating KL divergence").

Their *values* all estimate KL(p‖ref) for tokens sampled from p; their *gradients*, as a loss averaged over such tokens, differ:

* `k1` = log p − log ref: unbiased value, **zero** expected gradient (E_p[∇log p] = 0). It belongs in the reward.
* `k2` = ½(log p − log ref)²: gradient of the reverse KL, ∇KL(p‖ref).
* `k3` = ref/p − 1 − log(ref/p): unbiased value, but gradient of the **forward** KL, ∇KL(ref‖p).

For tokens sampled from another policy q, with u = p/q, two forms are unbiased for ∇KL(p‖ref): u·k3 with u differentiated,
and stop_grad(u)·k2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from rollkeel.objectives.terms import bounded_expm1


def k1(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """log p − log ref, `[T]` nats, any sign. On-policy loss gradient: zero in expectation."""
    return logprobs - ref_logprobs


def k2(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """½(log p − log ref)², `[T]` ≥ 0. On-policy loss gradient: ∇KL(p‖ref), the reverse KL."""
    return 0.5 * (logprobs - ref_logprobs).square()


def k3(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """ref/p − 1 − log(ref/p), `[T]` ≥ 0. On-policy loss gradient: ∇KL(ref‖p), the forward KL.

    The ratio ref/p is bounded as every other, see `bounded_expm1`.
    """
    log_ratio = ref_logprobs - logprobs
    return bounded_expm1(log_ratio) - log_ratio


ESTIMATORS: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
"""Estimator name → function of (`logprobs`, `ref_logprobs`), both `[T]`."""
