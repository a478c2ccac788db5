"""slime: `compute_policy_loss` of `slime.utils.ppo_utils` under the corrections of `slime.backends.megatron_utils.loss`.

Its losses of tokens are judged; its means over rollouts belong to Megatron's loop.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from rollkeel.conformance.adapters import Claim
from rollkeel.conformance.adapters.published import modules
from rollkeel.conformance.batch import Batch


def claims(checkout: Path | None) -> list[Claim]:
    ppo, megatron = modules(("slime.utils.ppo_utils", "slime.backends.megatron_utils.loss"), checkout)

    def loss(
        correct: str = "", low: float = 0.0, high: float = 2.0, clip: Any = (0.2, 0.2), opsm: float | None = None
    ) -> Any:
        def call(b: Batch) -> torch.Tensor:
            with torch.compiler.set_stance("force_eager"):
                return _tokens(
                    ppo, megatron, b, correct, SimpleNamespace(tis_clip_low=low, tis_clip=high, opsm_delta=opsm), clip
                )

        return call

    def kl(b: Batch, ratio: bool) -> torch.Tensor:
        over = (b.logprobs - b.old_logprobs).exp() if ratio else None
        with torch.compiler.set_stance("force_eager"):
            return ppo.compute_approx_kl(b.logprobs, b.ref_logprobs, "k3", over)

    return [
        Claim("compute_policy_loss", "grpo", loss()),
        Claim("--use-tis", "tis", loss("vanilla_tis_function")),
        Claim("icepop_function, 0.5 to 5", "icepop", loss("icepop_function", 0.5, 5.0)),
        Claim("icepop_function with the defaults of --tis-clip", "icepop", loss("icepop_function")),
        Claim("--use-opsm", "opsm", loss(opsm=1e-4), {"anchor": "old"}),
        Claim("--kl-loss-type k3", "kl:k3", lambda b: kl(b, False)),
        Claim("--use-unbiased-kl", "kl:rk3", lambda b: kl(b, True)),
    ]


def _tokens(ppo: Any, megatron: Any, b: Batch, correct: str, args: Any, clip: Any) -> torch.Tensor:
    """`[S, L]`: what `policy_loss_function` hands to its reducer."""
    lengths = [int(row.nonzero().max()) + 1 for row in b.mask]

    def rows(values: torch.Tensor) -> list[torch.Tensor]:
        return [row[:n] for row, n in zip(values, lengths, strict=True)]

    p, o, q, a, masks = (
        rows(x) for x in (b.logprobs, b.old_logprobs, b.rollout_logprobs, b.advantages, b.mask.float())
    )
    loss = ppo.compute_policy_loss(torch.cat(o) - torch.cat(p), torch.cat(a), *clip)[0]
    if args.opsm_delta is not None:
        loss = loss * ppo.compute_opsm_mask(args, p, o, a, masks)[0]
    if correct:
        loss = getattr(megatron, correct)(args, pg_loss=loss, train_log_probs=o, rollout_log_probs=q, loss_masks=masks)[
            0
        ]
    width = b.mask.shape[1]
    return torch.stack([torch.nn.functional.pad(x, (0, width - len(x))) for x in loss.split(lengths)])
