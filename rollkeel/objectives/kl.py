"""Per-token estimators of KL(p‖ref), as terms of a loss (Schulman 2020, "Approximating KL divergence").

Their *values* all estimate KL(p‖ref) for tokens sampled from p; their *gradients*, as a loss averaged over such tokens, differ:

* `k1` = log p − log ref: unbiased value, **zero** expected gradient (E_p[∇log p] = 0). It belongs in the reward.
* `k2` = ½(log p − log ref)²: gradient of the reverse KL, ∇KL(p‖ref).
* `k3` = ref/p − 1 − log(ref/p): unbiased value, but gradient of the **forward** KL, ∇KL(ref‖p).

Multiplied by a ratio that is differentiated, k3 has the gradient of the reverse KL, ∇KL(p‖ref), on tokens from the policy under it:

* `rk3` = r·k3, r = p/o, for tokens from the old policy (TRL's `use_bias_correction_kl`, slime's `--use-unbiased-kl`);
* `uk3` = u·k3, u = p/q, for tokens from the sampler (NeMo-RL with `use_on_policy_kl_approximation`);
* `sk3` = k3·p/stop_grad(p), for tokens from p: the value of k3 and, beside its slope, the score function's (NeMo-RL's default).

For tokens from q, stop_grad(u)·k2 is unbiased for ∇KL(p‖ref) as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from rollkeel.objectives.terms import bounded_exp, bounded_expm1, wide
from rollkeel.types import TokenBatch


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


PLAIN: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {"k1": k1, "k2": k2, "k3": k3}
"""Estimator name → function of (`logprobs`, `ref_logprobs`), both `[T]`."""
RATIO_UNDER = {"rk3": "old_logprobs", "uk3": "rollout_logprobs", "sk3": "logprobs"}
"""Estimators that multiply k3 by p over this field's policy."""
ESTIMATORS = (*PLAIN, *RATIO_UNDER)


def estimated(name: str, logprobs: torch.Tensor, ref_logprobs: torch.Tensor, tokens: TokenBatch) -> torch.Tensor:
    """`[T]`: an estimator of `ESTIMATORS` by name; `tokens` has the log-probs under the ratio."""
    if name in PLAIN:
        return PLAIN[name](logprobs, ref_logprobs)
    base = wide(getattr(tokens, RATIO_UNDER[name]).detach())
    return bounded_exp(logprobs - base) * k3(logprobs, ref_logprobs)
