"""What rounding does at equal weights: measured on sampled tokens, and on a softmax alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from rollkeel import objectives
from rollkeel.objectives.kl import k3
from rollkeel.record.mismatch import mismatch_metrics
from rollkeel.record.routing import flipped_layers, routing_metrics

TOKENS, VOCABULARY, SPREAD, FIRST_SEED, PIECE = 50_000, 2048, 1.5, 1234, 1000


def softmax_ratio(seed: int, *, drawn: bool = False) -> Mapping[str, float]:
    """Mean, std, largest and smallest ratio of a token's probability in fp32 to that of a softmax in bf16, logits drawn from
    N(0, 1.5²) anew for each token (stability study, Appendix C.1 and Table 2), and how many different probabilities the
    tokens have (Fig. 13). `drawn`: tokens are drawn from the rounded softmax, as in the study, else from the exact one.

    `kl`: divergence of the rounded softmax from the exact one, mean over positions, nats."""
    g = torch.Generator().manual_seed(FIRST_SEED + seed)
    found, divergence = [], 0.0
    levels: dict[str, list[torch.Tensor]] = {"bf16": [], "fp32": []}
    for _ in range(TOKENS // PIECE):
        logits = torch.randn(PIECE, VOCABULARY, generator=g) * SPREAD
        exact, rounded = torch.softmax(logits, -1), torch.softmax(logits.bfloat16(), -1)
        token = torch.multinomial(rounded.float() if drawn else exact, 1, generator=g)
        levels["bf16"].append(rounded.float().gather(1, token))
        levels["fp32"].append(exact.gather(1, token))
        found.append((levels["fp32"][-1] / levels["bf16"][-1]).double())
        whole = rounded.double() / rounded.double().sum(-1, keepdim=True)
        divergence += (whole * (whole / exact.double()).log()).sum().item() / TOKENS
    ratio = torch.cat(found)
    return {
        "mean": ratio.mean().item(),
        "std": ratio.std().item(),
        "max": ratio.max().item(),
        "min": ratio.min().item(),
        "kl": divergence,
        **{f"levels, {name}": float(len(torch.cat(values).unique())) for name, values in levels.items()},
    }


def engine_gap(words: Sequence[str], seed: int) -> Mapping[str, float]:
    """What an engine's rounding does to tokens it sampled from the trainer's own weights, and what masks would drop."""
    # It brings models and engines, which take longer to import than the softmax above to measure.
    from rollkeel.lab.sampled import sample

    sampled = sample(words, seed)
    batch = sampled.batch
    scores = sampled.trainer().score(batch, experts=batch.experts is not None)
    tokens = batch.tokens(scores.logprobs, old_logprobs=scores.logprobs, indices=torch.arange(len(batch)))
    row = {k: v for k, v in mismatch_metrics(tokens, 0).items() if "equal_version" not in k}
    row |= routing_metrics(batch.experts, scores.experts)
    for name in ("icepop", "kpop"):
        dropped = ~objectives.build(name, {})(tokens).keep
        row[f"{name} drops"] = float(dropped.double().mean())
        if dropped.any():
            row[f"{name} drops, mean q"] = float(batch.rollout_logprobs[dropped].exp().mean())
            row[f"{name} drops, mean entropy"] = float(scores.entropy[dropped].mean())
    row["mean entropy"] = float(scores.entropy.mean())
    if batch.experts is not None and scores.experts is not None:
        replayed = sampled.trainer(replay_routing=True).score(batch).logprobs
        row["kl_k3, replayed"] = float(k3(batch.rollout_logprobs.double(), replayed.double()).mean())
        flipped = flipped_layers(batch.experts, scores.experts) > 0
        gap = scores.logprobs - batch.rollout_logprobs
        for name, which in (("flipped", flipped), ("elsewhere", ~flipped)):
            if which.any():
                row[f"rms log ratio, {name}"] = float(gap[which].double().pow(2).mean().sqrt())
    return row
