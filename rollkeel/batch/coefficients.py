"""c_t of the objective's one form: the aggregation, fixed for the whole optimizer batch before any forward pass.

Nothing else divides by a number of tokens or sequences, so micro-batching, packing and data parallelism cannot change a
gradient.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import torch

from rollkeel.errors import BadInput

_CONSTANT = re.compile(r"constant_length\((\d+)\)")
KNOWN = ("token_mean", "sequence_mean", "prompt_mean", "sequence_sum", "token_sum", "constant_length(n)")


def coefficients(aggregate: str, lengths: Sequence[int], groups: Sequence[int] | None = None) -> torch.Tensor:
    """Coefficient of every response token, `[T]` float32 with T = Σ lengths, tokens of a sequence contiguous.

    `groups`: the prompt group of each sequence, for `prompt_mean`; None for one group. `aggregate`, with N sequences of |y_i|
    response tokens (before any mask):

    * `token_mean`: 1/T (DAPO, Yu et al. 2025);
    * `sequence_mean`: 1/(N·|y_i|) (GRPO, Shao et al. 2024);
    * `prompt_mean`: 1/(P·T_g), P groups, T_g the tokens of the sequence's group (ScaleRL, Khatri et al. 2025);
    * `sequence_sum`: 1/N;
    * `token_sum`: 1 (Tinker's losses);
    * `constant_length(n)`: 1/(N·n) (Dr. GRPO, Liu et al. 2025).

    Raises `BadInput` for another name, no sequences, or a sequence without tokens.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    if sizes.size == 0 or sizes.min() < 1:
        raise BadInput(
            f"coefficients: expected sequences of at least one response token, got lengths {list(lengths)[:8]}"
        )
    constant = _CONSTANT.fullmatch(aggregate)
    if aggregate == "token_mean":
        per_sequence = np.full(sizes.size, 1.0 / sizes.sum())
    elif aggregate == "sequence_mean":
        per_sequence = 1.0 / (sizes.size * sizes)
    elif aggregate == "prompt_mean":
        index = np.unique(np.zeros(sizes.size) if groups is None else np.asarray(groups), return_inverse=True)[1]
        totals = np.bincount(index, sizes)
        per_sequence = 1.0 / (totals.size * totals[index])
    elif aggregate == "token_sum":
        per_sequence = np.ones(sizes.size)
    elif aggregate == "sequence_sum":
        per_sequence = np.full(sizes.size, 1.0 / sizes.size)
    elif constant and int(constant[1]) > 0:
        per_sequence = np.full(sizes.size, 1.0 / (sizes.size * int(constant[1])))
    else:
        raise BadInput(f"aggregate {aggregate!r}: expected one of {', '.join(KNOWN)} with n ≥ 1")
    return torch.from_numpy(np.repeat(per_sequence, sizes).astype(np.float32))
