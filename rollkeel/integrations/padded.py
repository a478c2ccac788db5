"""From a trainer's padded tensors to what an objective sees, with the denominator of the whole optimizer batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from rollkeel.batch.coefficients import coefficients
from rollkeel.errors import BadInput
from rollkeel.objectives import Objective, build
from rollkeel.types import TokenBatch


def objective_of(given: Any, who: str, *, kl_coefficient: float = 0.0, kl_estimator: str = "k3") -> Objective:
    """An objective as a trainer is given it: an `Objective`, a recipe's name, or a mapping of `name` and options.

    `kl_coefficient`, `kl_estimator`: the trainer's own KL term. Raises `BadInput` for what a padded batch cannot carry:
    top-K log-probs, and entropies with a gradient.
    """
    if isinstance(given, Objective):
        made = replace(given, kl_coefficient=kl_coefficient, kl_estimator=kl_estimator) if kl_coefficient else given
    else:
        options = {"name": given} if isinstance(given, str) else dict(given)
        name = options.pop("name", None)
        if not isinstance(name, str):
            raise BadInput(f"{who}: objective expected a name, {{name: …, options}} or an Objective, got {given!r:.80}")
        made = build(name, options, kl_coefficient=kl_coefficient, kl_estimator=kl_estimator)
    if made.topk:
        raise BadInput(
            f"{who}: {made.name} needs log-probs of {made.topk} tokens per position, which {who} does not return"
        )
    if made.entropy_coefficient:
        raise BadInput(
            f"{who}: entropy_coefficient={made.entropy_coefficient} is not taken here; use the trainer's own"
        )
    return made


def alone(given: Any, who: str) -> Objective:
    """An objective for a trainer that hands over micro-batches only. Raises `BadInput` where the whole optimizer batch
    decides."""
    made = objective_of(given, who)
    if made.looks_ahead:
        raise BadInput(
            f"{who}: {made.name} decides over the whole optimizer batch, and {who} gives micro-batches; choose another"
        )
    return made


@contextlib.contextmanager
def needing(file: str, trainer: str, todo: str) -> Iterator[None]:
    """Around imports of a trainer: `BadInput` where it is missing, which says what to do."""
    try:
        yield
    except ImportError as error:
        raise BadInput(f"rollkeel.integrations.{file} needs {trainer} ({error}); {todo}") from None


def padded(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """`[S, L]`: a row each, filled up with 0 (False) on the right."""
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


def coefficients_of(reduce: Callable[[torch.Tensor], torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """The coefficients by which a trainer's own `reduce` sums losses of tokens: its gradient. Same shape as `like`."""
    losses = torch.zeros_like(like, requires_grad=True)
    (slope,) = torch.autograd.grad(reduce(losses), losses)
    return slope


def shares(aggregate: str, mask: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """`[S, L]` float32: c of every token of an optimizer batch, 0 outside of `mask`. Answers without a token count nowhere.

    `mask`: `[S, L]`, true where the policy sampled; `groups`: `[S]`, equal for answers to one prompt.
    """
    mask, out = mask.bool(), torch.zeros(mask.shape, device=mask.device)
    lengths = mask.sum(1).tolist()
    kept = [i for i, n in enumerate(lengths) if n]
    if kept:
        ids = groups.tolist()
        out[mask] = coefficients(aggregate, [lengths[i] for i in kept], [ids[i] for i in kept]).to(mask.device)
    return out


def flat(
    logprobs: torch.Tensor,
    mask: torch.Tensor,
    *,
    rollout_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    coefficients: torch.Tensor,
    groups: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
    **more: torch.Tensor | None,
) -> TokenBatch:
    """The tokens of a padded batch where `mask` is true, answer after answer.

    All `[S, L]`, but `advantages` (`[S]` or `[S, L]`), `groups` and `rows`, `[S]` ids of the prompt and of the answer (each
    its own where None). `more`: `old_logprobs`, `ref_logprobs`, `versions` and other fields of `TokenBatch`. Rounding above
    0 is taken off log-probs.
    """
    mask = mask.bool()
    each = torch.arange(len(mask), device=mask.device)

    def tokens(values: torch.Tensor) -> torch.Tensor:
        return (values[:, None].expand_as(mask) if values.dim() == 1 else values)[mask]

    held: Mapping[str, Any] = {name: tokens(value) for name, value in more.items() if value is not None}
    policies = {
        name: value.detach().clamp(max=0) if name.endswith("logprobs") else value for name, value in held.items()
    }
    p = tokens(logprobs)
    return TokenBatch(
        logprobs=torch.where(p > 0, p - p.detach(), p),
        rollout_logprobs=tokens(rollout_logprobs).detach().clamp(max=0),
        advantages=tokens(advantages).detach(),
        coefficients=tokens(coefficients),
        sequence_ids=tokens(each),
        group_ids=tokens(each if groups is None else groups.unique(return_inverse=True)[1]),
        rollout_ids=tokens(each if rows is None else rows),
        token_index=torch.arange(mask.shape[1], device=mask.device).expand_as(mask)[mask],
        **policies,
    )
