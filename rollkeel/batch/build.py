"""From graded rollouts to an optimizer batch: sequences to run, and a flat tensor per fact about each response token."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch

from rollkeel.batch.coefficients import coefficients
from rollkeel.batch.packing import Family, MicroBatch, families, pack, plan
from rollkeel.errors import BadInput
from rollkeel.types import Rollout, TokenBatch


@dataclass(frozen=True, kw_only=True)
class TrainingBatch:
    """One optimizer batch: N sequences with T sampled tokens in all, sequence after sequence. Tensors are `[T]`.

    What environments wrote stands in `sequences`, where the model reads it, and nowhere else: this is the one place that
    leaves it out, so that nothing behind it can count or train on it.

    It becomes a `TokenBatch` once log-probs are known.
    """

    sequences: tuple[np.ndarray, ...]
    """N arrays of int64 ids: prompt, then response."""
    prompt_lengths: tuple[int, ...]
    """N, each ≥ 1."""
    positions: tuple[np.ndarray, ...]
    """N arrays of int64: where in its sequence each sampled token stands."""
    rollout_logprobs: torch.Tensor
    advantages: torch.Tensor
    coefficients: torch.Tensor
    sequence_ids: torch.Tensor
    """int64, index into `sequences`."""
    group_ids: torch.Tensor
    """int64, 0-based in order of first appearance."""
    kept_mass: torch.Tensor
    versions: torch.Tensor
    kv_versions: torch.Tensor
    rollout_ids: torch.Tensor
    token_index: torch.Tensor
    token_ids: torch.Tensor
    """int64, the sampled tokens."""
    topk_ids: torch.Tensor | None = None
    """`[T, K]` int64: the K tokens that the sampling distribution held most likely."""
    rollout_topk_logprobs: torch.Tensor | None = None
    """`[T, K]` float32, log q at `topk_ids`; −inf for a token that truncation left out."""
    experts: torch.Tensor | None = None
    """`[T, layers, k]` int16: experts the engine chose at the position that produced the token."""
    read_experts: tuple[np.ndarray, ...] | None = None
    """N arrays `[length, layers, k]` int16: those of tokens that were only read; −1 where the engine told none, and at the
    positions that produced a token."""

    def __len__(self) -> int:
        return self.rollout_logprobs.numel()

    @property
    def response_lengths(self) -> tuple[int, ...]:
        """N, each ≥ 1: sampled tokens."""
        return tuple(map(len, self.positions))

    def _tensors(self) -> dict[str, torch.Tensor]:
        held = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in held.items() if isinstance(value, torch.Tensor)}

    def to(self, device: torch.device | str) -> TrainingBatch:
        """The same batch with its tensors on `device`."""
        return replace(self, **{name: value.to(device) for name, value in self._tensors().items()})

    def parts(self, advantages: Sequence[Sequence[float]], aggregate: str) -> list[TrainingBatch]:
        """Optimizer batches of consecutive sequences, as many in each as it has advantages. Their tensors are views of these.

        Coefficients are those of each batch, and sequences and groups count from 0 in it. Raises `BadInput` for advantages
        that are not finite, or not one for each sequence.
        """
        if sum(map(len, advantages)) != len(self.sequences):
            raise BadInput(
                f"training batch: expected an advantage for each of {len(self.sequences)} sequences, got {sum(map(len, advantages))}"
            )
        out, row = list[TrainingBatch](), 0
        for credit in advantages:
            part = self.cut(slice(row, row + len(credit)))
            row, sizes = row + len(credit), part.response_lengths
            groups = part.group_ids.unique(return_inverse=True)[1]
            about = {
                "advantages": _per_token(credit, sizes).to(groups.device),
                "coefficients": coefficients(aggregate, sizes, groups[_firsts(sizes)].tolist()).to(groups.device),
                "group_ids": groups,
            }
            out.append(replace(part, **about))
        return out

    def cut(self, rows: slice) -> TrainingBatch:
        """These sequences alone, counted from 0; the rest is as it was, and its tensors are views."""
        first = sum(self.response_lengths[: rows.start])
        tokens = slice(first, first + sum(self.response_lengths[rows]))
        held = {name: value[tokens] for name, value in self._tensors().items()}
        held["sequence_ids"] = held["sequence_ids"] - rows.start
        names = ("sequences", "prompt_lengths", "positions", *(("read_experts",) if self.read_experts else ()))
        return replace(self, **held, **{name: getattr(self, name)[rows] for name in names})

    def micro_batches(
        self, max_tokens: int, *, replay: bool = False, share: bool = False, processes: int = 1
    ) -> Iterator[MicroBatch]:
        """Whole sequences packed to at most `max_tokens` tokens each (see `packing.plan`), on the batch's device.

        `replay`: with the experts that the engine chose, so that a pass takes them instead of its own choice. `share`: answers to
        one prompt share it, for passes that are not padded. `processes`: with more than one, pieces small enough to balance over so many.
        """
        starts = np.concatenate([[0], np.cumsum(self.response_lengths)]).tolist()
        made = families(self.sequences, self.prompt_lengths, max_tokens, share=share)
        if processes > 1:
            max_tokens = min(
                max_tokens, max(max(map(len, self.sequences)), -(-sum(f.tokens for f in made) // (2 * processes)))
            )
            made = families(self.sequences, self.prompt_lengths, max_tokens, share=share)
        for members in plan([f.tokens for f in made], max_tokens, padded=not share):
            together = [made[i] for i in members]
            micro = pack(together, self.sequences, self.prompt_lengths, starts, self.advantages.device, self.positions)
            if self.topk_ids is not None:
                micro = replace(micro, topk_ids=self.topk_ids.index_select(0, micro.indices))
            if replay and self.experts is not None:
                micro = self._routed(micro, together, self.experts)
            yield micro

    def _routed(self, micro: MicroBatch, together: Sequence[Family], experts: torch.Tensor) -> MicroBatch:
        """With the engine's experts; a prompt that answers share goes to those of the first of them."""
        experts, routed = experts.index_select(0, micro.indices), micro.predict_index
        if self.read_experts is not None:
            parts = []
            for family in together:
                parts.append(self.read_experts[family.members[0]][: family.shared])
                parts += [self.read_experts[i][family.shared :] for i in family.members]
            read = np.concatenate(parts)
            at = np.flatnonzero(read[:, 0, 0] >= 0)
            experts = torch.cat((experts, torch.from_numpy(read[at]).to(experts.device)))
            routed = torch.cat((routed, torch.from_numpy(at).to(routed.device)))
        return replace(micro, experts=experts, routed=routed)

    def tokens(
        self,
        logprobs: torch.Tensor,
        *,
        entropy: torch.Tensor | None = None,
        topk_logprobs: torch.Tensor | None = None,
        old_logprobs: torch.Tensor | None = None,
        old_topk_logprobs: torch.Tensor | None = None,
        ref_logprobs: torch.Tensor | None = None,
        indices: torch.Tensor | None = None,
        sequences: Sequence[int] | None = None,
    ) -> TokenBatch:
        """What an objective sees: the whole batch, or the tokens `indices [t]` of its `sequences` in a micro-batch.

        `logprobs`, `entropy` and `topk_logprobs` are given for the selected tokens (`[T]` or `[t]`), what is old or of the
        reference for the whole batch. `sequence_ids` and `group_ids` of a micro-batch stay those of the optimizer batch.
        """

        def pick(tensor: torch.Tensor | None) -> Any:
            return tensor if tensor is None or indices is None else tensor.index_select(0, indices)

        if indices is None:
            sequences = range(len(self.sequences))
        return TokenBatch(
            lengths=None if sequences is None else tuple(len(self.positions[i]) for i in sequences),
            logprobs=logprobs,
            entropy=entropy,
            rollout_logprobs=pick(self.rollout_logprobs),
            advantages=pick(self.advantages),
            coefficients=pick(self.coefficients),
            sequence_ids=pick(self.sequence_ids),
            group_ids=pick(self.group_ids),
            old_logprobs=pick(old_logprobs),
            ref_logprobs=pick(ref_logprobs),
            kept_mass=pick(self.kept_mass),
            versions=pick(self.versions),
            kv_versions=pick(self.kv_versions),
            rollout_ids=pick(self.rollout_ids),
            token_index=pick(self.token_index),
            token_ids=pick(self.token_ids),
            topk_ids=pick(self.topk_ids),
            topk_logprobs=topk_logprobs,
            rollout_topk_logprobs=pick(self.rollout_topk_logprobs),
            old_topk_logprobs=pick(old_topk_logprobs),
        )


def _per_token(advantages: Sequence[float] | np.ndarray, sizes: Sequence[int]) -> torch.Tensor:
    """`[T]` float32: one finite advantage per sequence, given to each of its `sizes` tokens."""
    credit = np.asarray(advantages, dtype=np.float32)
    if credit.shape != (len(sizes),) or not np.isfinite(credit).all():
        raise BadInput(
            f"training batch: expected one finite advantage for each of {len(sizes)} rollouts, got shape {credit.shape}"
        )
    return torch.from_numpy(np.repeat(credit, sizes))


def _firsts(sizes: Sequence[int]) -> list[int]:
    """Place of the first token of each sequence."""
    return list(itertools.accumulate(sizes[:-1], initial=0))


def build_batch(
    rollouts: Sequence[Rollout], advantages_per_rollout: Sequence[float] | np.ndarray | None, aggregate: str
) -> TrainingBatch:
    """Lay graded rollouts out as an optimizer batch on the CPU.

    `advantages_per_rollout`: one finite number per rollout, given to each of its tokens; None where they come later, with
    `TrainingBatch.parts`: they are NaN until then. `aggregate`: see `coefficients`.
    Raises `BadInput`, naming the rollout, for one that has no reward, is not complete, or has an empty prompt or response.
    """
    if not rollouts:
        raise BadInput("training batch: expected at least one rollout, got none; did every group fail or get filtered?")
    for rollout in rollouts:
        _refuse(rollout)
    own = [r.span.own for r in rollouts]
    sizes = [len(places) for places in own]
    later = torch.full((sum(sizes),), torch.nan)
    groups = {g: i for i, g in enumerate(dict.fromkeys(r.group for r in rollouts))}

    def cat(name: str, dtype: Any) -> torch.Tensor:
        parts = [getattr(r.span, name)[places] for r, places in zip(rollouts, own, strict=True)]
        return torch.from_numpy(np.concatenate(parts).astype(dtype))

    def each(values: Sequence[Any] | np.ndarray, dtype: Any) -> torch.Tensor:
        return torch.from_numpy(np.repeat(np.asarray(values, dtype=dtype), sizes))

    return TrainingBatch(
        sequences=tuple(np.concatenate([r.prompt.token_ids, r.span.token_ids]).astype(np.int64) for r in rollouts),
        prompt_lengths=tuple(len(r.prompt.token_ids) for r in rollouts),
        positions=tuple(places + len(r.prompt.token_ids) for r, places in zip(rollouts, own, strict=True)),
        rollout_logprobs=cat("logprobs", np.float32),
        advantages=later if advantages_per_rollout is None else _per_token(advantages_per_rollout, sizes),
        coefficients=coefficients(aggregate, sizes, [r.group for r in rollouts]),
        sequence_ids=each(range(len(rollouts)), np.int64),
        group_ids=each([groups[r.group] for r in rollouts], np.int64),
        kept_mass=cat("kept_mass", np.float32),
        versions=cat("versions", np.int64),
        kv_versions=cat("kv_versions", np.int64),
        rollout_ids=each([r.id for r in rollouts], np.int64),
        token_index=torch.from_numpy(np.concatenate(own).astype(np.int64)),
        token_ids=cat("token_ids", np.int64),
        topk_ids=_optional(rollouts, "topk_ids", np.int64),
        rollout_topk_logprobs=_optional(rollouts, "topk_logprobs", np.float32),
        experts=_optional(rollouts, "experts", np.int16),
        read_experts=_read_experts(rollouts),
    )


def _read_experts(rollouts: Sequence[Rollout]) -> tuple[np.ndarray, ...] | None:
    """See `TrainingBatch.read_experts`; None unless every rollout tells those of its prompt."""
    out = []
    for r in rollouts:
        if r.span.prompt_experts is None or r.span.experts is None:
            return None
        places = np.concatenate([r.span.prompt_experts, r.span.experts, r.span.experts[:1]])
        places[r.span.own + len(r.span.prompt_experts)] = -1
        places[-1] = -1
        out.append(places)
    return tuple(out)


def _optional(rollouts: Sequence[Rollout], name: str, dtype: Any) -> torch.Tensor | None:
    """What every rollout carries, or none; `BadInput` where some do and others do not, or not as many of it."""
    values = [getattr(r.span, name) for r in rollouts]
    shapes = [None if v is None else v.shape[1:] for v in values]
    for rollout, shape in zip(rollouts, shapes, strict=True):
        if shape != shapes[0]:
            raise BadInput(
                f"rollout {rollout.id}: expected {name} of shape {shapes[0]} per token like rollout {rollouts[0].id}, got"
                f" {shape}; sample a batch with one set of parameters"
            )
    return (
        None
        if shapes[0] is None
        else torch.from_numpy(
            np.concatenate([v[r.span.own] for r, v in zip(rollouts, values, strict=True)]).astype(dtype)
        )
    )


def _refuse(rollout: Rollout) -> None:
    name = f"rollout {rollout.id}"
    if not rollout.status.complete:
        raise BadInput(
            f"{name}: expected a complete rollout, got status {rollout.status.value}; leave it out of the batch"
        )
    if rollout.reward is None:
        raise BadInput(f"{name}: expected a reward, got none; grade it or leave it out of the batch")
    if rollout.span.own_count == 0 or len(rollout.prompt.token_ids) == 0:
        raise BadInput(
            f"{name}: expected at least one prompt and one response token that was sampled, got {len(rollout.prompt.token_ids)} and {rollout.span.own_count}"
        )


def split_by_groups(rollouts: Sequence[Rollout], n: int) -> list[list[Rollout]]:
    """Split into `n` optimizer batches of whole groups, in order of first appearance; sizes differ by at most one group.

    Fewer than `n` groups give as many batches as there are groups. Raises `BadInput` for `n` < 1.
    """
    if n < 1:
        raise BadInput(f"split_by_groups: expected n ≥ 1, got {n}")
    groups: dict[int, list[Rollout]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.group, []).append(rollout)
    keys = list(groups)
    count = min(n, len(keys))
    bounds = [len(keys) * i // count for i in range(count + 1)] if count else []
    return [[r for key in keys[a:b] for r in groups[key]] for a, b in itertools.pairwise(bounds)]
