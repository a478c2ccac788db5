"""Sequences end to end: which go into one forward pass, where their response tokens are predicted, and what they share.

Answers to one prompt share it: it lies in the row once, followed by the members, each from the last prompt token on. That token
stays with each member because it predicts the member's first own token, so that every predicted place belongs to one sequence.
"""

from __future__ import annotations

from bisect import bisect, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rollkeel.errors import BadInput


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Whole sequences of an optimizer batch, packed for one forward pass. All tensors on one device.

    N tokens in S parts, t of them response tokens. A part is a sequence, a prompt that sequences share, or what is left of one.
    """

    sequences: tuple[int, ...]
    """Indices of the sequences in the optimizer batch, in packed order."""
    input_ids: torch.Tensor
    """`[N]` int64, the parts one after the other."""
    position_ids: torch.Tensor
    """`[N]` int64: places in the sequence, so that a part that continues another begins where that ends."""
    cu_seqlens: torch.Tensor
    """`[S + 1]` int32 on the CPU: first token of each part, then N."""
    predict_index: torch.Tensor
    """`[t]` int64: position in the packed row whose hidden state predicts the response token."""
    targets: torch.Tensor
    """`[t]` int64: the response tokens."""
    indices: torch.Tensor
    """`[t]` int64: place of each response token in the flat tensors of the optimizer batch."""
    topk_ids: torch.Tensor | None = None
    """`[t, K]` int64: further tokens whose log-probs are wanted at each of these positions."""
    experts: torch.Tensor | None = None
    """`[r, layers, k]`: experts that the positions `routed` are sent to; None leaves all to the model's routers."""
    routed: torch.Tensor | None = None
    """`[r]` int64: positions in the packed row; those of `predict_index` first."""
    parents: torch.Tensor | None = None
    """`[S]` int64 on the CPU: the part that a part continues, −1 for none; None where no part does."""


SHARED_LEAST = 32
"""Tokens that sequences must have in common in front of the last prompt token: fewer cost more bookkeeping than they save."""


@dataclass(frozen=True)
class Family:
    """Sequences that lie together in a row. All but a lone one share their first `shared` tokens."""

    members: tuple[int, ...]
    shared: int
    tokens: int
    """In the row."""


def families(
    sequences: Sequence[np.ndarray], prompt_lengths: Sequence[int], max_tokens: int, *, share: bool = True
) -> list[Family]:
    """Every sequence in one family; members of one family together have at most `max_tokens` tokens, or are one sequence.

    `share=False`: each alone. From short to long (by the longest member, ties by index).
    """
    by_prompt: dict[bytes, list[int]] = {}
    for i, (sequence, prompt) in enumerate(zip(sequences, prompt_lengths, strict=True)):
        shares = share and prompt > SHARED_LEAST
        by_prompt.setdefault(np.asarray(sequence[:prompt]).tobytes() if shares else i.to_bytes(8), []).append(i)
    out: list[Family] = []
    for alike in by_prompt.values():
        shared = prompt_lengths[alike[0]] - 1
        open_ = list[int]()
        tokens = 0
        for i in sorted(alike, key=lambda i: (len(sequences[i]), i)):
            rest = len(sequences[i]) - shared
            if open_ and tokens + rest > max_tokens:
                out.append(_family(open_, shared, tokens))
                open_ = []
            tokens = (tokens if open_ else shared) + rest
            open_.append(i)
        out.append(_family(open_, shared, tokens))
    return sorted(out, key=lambda f: (len(sequences[f.members[-1]]), f.members[0]))


def _family(members: Sequence[int], shared: int, tokens: int) -> Family:
    return Family(tuple(members), shared if len(members) > 1 else 0, tokens)


def plan(lengths: Sequence[int], max_tokens: int, *, padded: bool = False) -> list[list[int]]:
    """Micro-batches of at most `max_tokens` tokens, as lists of sequence indices; a function of the arguments alone.

    Best fit, decreasing: the longest sequence first, each where it leaves the least room. `padded`: similar lengths share a
    pass instead, which pads all to the longest. Inside a micro-batch sequences run from short to long (ties by index), and so
    do micro-batches by their longest. A sequence is never split; one longer than `max_tokens` is alone. Raises `BadInput`
    for `max_tokens` < 1 or an empty sequence.
    """
    if max_tokens < 1 or (len(lengths) and min(lengths) < 1):
        raise BadInput(f"packing: expected max_tokens ≥ 1 and lengths ≥ 1, got {max_tokens} and {list(lengths)[:8]}")
    out: list[list[int]] = []
    rooms: list[tuple[int, int]] = []
    """(Tokens left, place in `out`), ascending."""
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i], i), reverse=not padded)
    for i in order:
        at = bisect(rooms, (lengths[i], -1))
        room, place = rooms.pop(at) if at < len(rooms) else (max_tokens, len(out))
        if place == len(out):
            out.append([])
            if padded:
                rooms.clear()
        out[place].append(i)
        insort(rooms, (room - lengths[i], place))
    return out if padded else [members[::-1] for members in reversed(out)]


def pack(
    members: Sequence[Family | int],
    sequences: Sequence[np.ndarray],
    prompt_lengths: Sequence[int],
    response_starts: Sequence[int],
    device: torch.device | str = "cpu",
    places: Sequence[np.ndarray] | None = None,
) -> MicroBatch:
    """Lay families, or sequences each on its own, end to end.

    `sequences[i]`: prompt and response ids of sequence i; `prompt_lengths[i]` ≥ 1; `response_starts[i]`: place of its
    first response token in the flat tensors of the optimizer batch. `places[i]`: where in sequence i the tokens stand that
    are predicted, ascending from 1; None predicts all behind the prompt. Others are read and never predicted.
    """
    ids = []
    positions = []
    predict = []
    targets = []
    indices = []
    starts = [0]
    parents = []

    def add(sequence: np.ndarray, start: int, end: int, parent: int) -> None:
        ids.append(sequence[start:end])
        positions.append(np.arange(start, end))
        starts.append(starts[-1] + end - start)
        parents.append(parent)

    order: list[int] = []
    for member in members:
        family = member if isinstance(member, Family) else Family((member,), 0, len(sequences[member]))
        parent = len(parents) if family.shared else -1
        if family.shared:
            add(np.asarray(sequences[family.members[0]], dtype=np.int64), 0, family.shared, -1)
        for i in family.members:
            sequence = np.asarray(sequences[i], dtype=np.int64)
            at = np.arange(prompt_lengths[i], len(sequence)) if places is None else places[i]
            order.append(i)
            predict.append(at - family.shared + starts[-1] - 1)
            targets.append(sequence[at])
            indices.append(np.arange(len(at)) + response_starts[i])
            add(sequence, family.shared, len(sequence), parent)

    def tensor(parts: list[np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(parts).astype(np.int64)).to(device)

    return MicroBatch(
        sequences=tuple(order),
        input_ids=tensor(ids),
        position_ids=tensor(positions),
        cu_seqlens=torch.tensor(starts, dtype=torch.int32),
        predict_index=tensor(predict),
        targets=tensor(targets),
        indices=tensor(indices),
        parents=torch.tensor(parents) if max(parents) >= 0 else None,
    )
