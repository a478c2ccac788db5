"""Other objectives in wide use. Where a source leaves a number open, the docstring says whose number the default is.

Common options as in `recipes`.
"""

from __future__ import annotations

from typing import Any

from rollkeel.objectives import masks, surrogates
from rollkeel.objectives.assembly import assemble
from rollkeel.objectives.objective import Objective
from rollkeel.objectives.options import choice, flag, optional_number, starting_at
from rollkeel.objectives.registry import register
from rollkeel.objectives.terms import OLD, ROLLOUT


@register("cispo")
def cispo(*, low: float = 0.0, high: float | None = 5.0, aggregate: str = "token_mean", **common: Any) -> Objective:
    """CISPO: stop_grad(clip(r, low, high))·log p·A with r = p/o (MiniMax-M1 report, eqs. 4–5); no token loses its gradient.

    MiniMax-M1 writes the bounds as 1 − ε_low, 1 + ε_high, sets no lower one and leaves ε_high open; 5 is the upper bound that
    ScaleRL and TRL's documentation recommend. Gradient coefficient of A·∇log p: the clipped r. Drops nothing.
    """
    return assemble(
        "cispo",
        OLD,
        surrogates.weighted_logprob(low, high),
        aggregate=aggregate,
        options={"low": low, "high": high},
        common=common,
    )


@register("sapo")
def sapo(
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
    aggregate: str = "sequence_mean",
    **common: Any,
) -> Objective:
    """SAPO: (4/τ)·σ(τ(r−1))·A, a sigmoid gate in the place of PPO's clip (Gao et al. 2025, "Soft adaptive policy
    optimization"), τ = `tau_positive` where A > 0, else `tau_negative`; 1 and 1.05 are the paper's.

    Gradient coefficient of A·∇log p: 4σ(1−σ)·r with σ = σ(τ(r−1)): r near 1, falling towards 0 on both sides. Drops nothing.
    """
    return assemble(
        "sapo",
        OLD,
        surrogates.soft_gate(tau_positive, tau_negative),
        aggregate=aggregate,
        options={"tau_positive": tau_positive, "tau_negative": tau_negative},
        common=common,
    )


@register("ipo")
def ipo(
    *,
    delta: Any = 0.3,
    gap_penalty: float = 0.0,
    directional: bool = False,
    cap: float | None = None,
    aggregate: str = "token_mean",
    **common: Any,
) -> Objective:
    """IPO, prime-rl's loss `ipo` (INTELLECT policy optimization): drop |p − q| > δ, whatever A's sign; S = u·A.

    All tokens, dropped ones too, carry `gap_penalty`·(log u)². δ 0.3 without a penalty is that of pull request 3586, which no
    release has up to 0.8.0: there δ is 0.1 with a penalty of 1e-3. The default of 0.8.0 drops only updates that move away:
    `directional=True, delta=0.2, gap_penalty=1e-3`.
    Gradient coefficient of A·∇log p: u where kept, else 0; plus −2·gap_penalty·log u on ∇log p. A = R − mean.
    """
    directional = flag("ipo.directional", directional)
    return assemble(
        "ipo",
        ROLLOUT,
        surrogates.ratio(optional_number("ipo.cap", cap, above=0)),
        masks.divergence("ipo", "binary_tv", starting_at(0.3, delta), directional),
        aggregate=aggregate,
        advantage="dr_grpo",
        gap_penalty=gap_penalty,
        options={"delta": delta, "directional": directional, "cap": cap},
        common=common,
    )


@register("opsm")
def opsm(
    *,
    delta: Any = 1e-4,
    anchor: str = "rollout",
    clip_low: Any = 0.2,
    clip_high: Any = 0.2,
    aggregate: str = "sequence_mean",
    **common: Any,
) -> Objective:
    """Off-policy sequence masking: drop A < 0 where the sequence's mean of log q − log p is > δ (DeepSeek-V3.2 report §3.1).

    PPO-clip on the same ratio. `anchor="rollout"`: q is the sampler, as in the report, so the test sees staleness and engine
    gap together; `anchor="old"`: o in its place, slime's default. δ 1e-4 is slime's; the report gives none. A = R − mean.
    Gradient coefficient of A·∇log p: u (or r) where kept and inside the PPO clip, else 0.
    """
    chosen = {"rollout": ROLLOUT, "old": OLD}[choice("opsm.anchor", anchor, ("rollout", "old"))]
    return assemble(
        "opsm",
        chosen,
        surrogates.ppo_clip(clip_low, clip_high),
        masks.sequence_kl("opsm", starting_at(1e-4, delta), reduce="mean", estimator="k1", negative_only=True),
        aggregate=aggregate,
        advantage="dr_grpo",
        options={"delta": delta, "clip_low": clip_low, "clip_high": clip_high},
        common=common,
    )


@register("trm")
def trm(
    *,
    delta: Any = 0.05,
    reduce: str = "max",
    estimator: str = "k3",
    cap: float | None = None,
    aggregate: str = "sequence_sum",
    **common: Any,
) -> Objective:
    """Trust region masking: drop whole sequences whose max (or mean) token KL(q‖p) is > δ (Li et al. 2025); S = u·A.

    The paper bounds the exact KL of every position. From the sampled token alone it is estimated: `estimator` k3 =
    u − 1 − log u (default), k2 = (log u)²/2, or `binary` = D_B(q‖p), a lower bound of the exact one. δ depends on the
    engines' gap and has no default in the paper; 0.05 is the DPPO paper's bound on the binary KL.
    Gradient coefficient of A·∇log p: u where the sequence is kept, else 0.
    """
    return assemble(
        "trm",
        ROLLOUT,
        surrogates.ratio(optional_number("trm.cap", cap, above=0)),
        masks.sequence_kl("trm", delta, reduce, estimator),
        aggregate=aggregate,
        options={"delta": delta, "reduce": reduce, "estimator": estimator, "cap": cap},
        common=common,
    )


@register("luspo")
def luspo(
    *, clip_low: Any = 2e-3, clip_high: Any = 2.5e-3, aggregate: str = "sequence_sum", **common: Any
) -> Objective:
    """LUSPO: GSPO with each sequence's loss times its length (Liu et al. 2026, "Length-unbiased sequence policy
    optimization", §5.1 for ε), so that a token of a long answer weighs as much as one of a short answer.

    Gradient coefficient of A·∇log p: s = exp(mean log r) where GSPO keeps the sequence, else 0.
    """
    return assemble(
        "luspo",
        OLD,
        surrogates.sequence_ppo_clip(starting_at(2e-3, clip_low), starting_at(2.5e-3, clip_high)),
        aggregate=aggregate,
        options={"clip_low": clip_low, "clip_high": clip_high},
        common=common,
    )


@register("vespo")
def vespo(
    *,
    k_positive: float = 2.0,
    lambda_positive: float = 3.0,
    k_negative: float = 3.0,
    lambda_negative: float = 2.0,
    aggregate: str = "token_mean",
    **common: Any,
) -> Objective:
    """VESPO: log p·A weighted by φ(W) = W^k·e^(λ(1−W)), W = Π p/q over the sequence (2026, "Variational sequence-level soft
    policy optimization", §3.4; TRL's defaults for k and λ, by the sign of A).

    Gradient coefficient of A·∇log p: φ(W) for every token of the sequence; 1 at W = 1, 0 far from it. Drops nothing.
    """
    options = {
        "k_positive": k_positive,
        "lambda_positive": lambda_positive,
        "k_negative": k_negative,
        "lambda_negative": lambda_negative,
    }
    surrogate = surrogates.gamma_weight(**options)
    return assemble("vespo", ROLLOUT, surrogate, aggregate=aggregate, options=options, common=common)


@register("topr")
def topr(
    *,
    low: float = 0.0,
    high: float = 1.0,
    level: str = "sequence",
    aggregate: str = "sequence_sum",
    **common: Any,
) -> Objective:
    """TOPR, tapered off-policy REINFORCE: log p·A as it is for A > 0, times clip(W, low, high) for A < 0 (Le Roux et al. 2025).

    W = Π p/q over the sequence, or at `level` token the token's own p/q. The paper's rewards are ±1 without a baseline;
    here A = R − mean, whose sign is what counts. Gradient coefficient of A·∇log p: 1, or the clipped W. Drops nothing.
    """
    return assemble(
        "topr",
        ROLLOUT,
        surrogates.tapered(low, high, level),
        aggregate=aggregate,
        advantage="dr_grpo",
        options={"low": low, "high": high, "level": level},
        common=common,
    )


@register("gpg")
def gpg(*, aggregate: str = "token_mean", **common: Any) -> Objective:
    """GPG, group policy gradient: log p·A without ratio, clip or reference (Chu et al. 2025); its A are `advantages.name=gpg`.

    Gradient coefficient of A·∇log p: 1. Drops nothing, corrects nothing.
    """
    surrogate = surrogates.logprob()
    return assemble("gpg", ROLLOUT, surrogate, aggregate=aggregate, advantage="gpg", options={}, common=common)
