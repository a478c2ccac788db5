"""Loss and gradient belong to the optimizer batch: not to its micro-batches, its packing order or the number of ranks.

Four gloo processes train the same three batches as one rank, as two and as four, through `prepare(batch, gather=...)`, and
must agree with this process, which sees each batch whole. Real processes, real collectives; a model is not involved (the
coefficients and the ids are what travels), and the trainer's own helpers have their test beside the trainer.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pickle
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from reference_tokens import Tokens, random_tokens

from rollkeel.objectives import RECIPES, compose
from rollkeel.objectives.compose import MASKS
from rollkeel.objectives.kl import ESTIMATORS
from rollkeel.objectives.objective import Objective
from rollkeel.objectives.perturbations import PERTURBATIONS
from rollkeel.objectives.surrogates import SURROGATES
from rollkeel.objectives.weights import WEIGHTS
from rollkeel.types import TokenBatch

COUNT, STEPS, RANKS = 300, 3, (1, 2, 4)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    # Whatever is registered, as it comes; below, what options make of it.
    **{name: (name, {}) for name, recipe in RECIPES.items() if recipe.__module__.startswith("rollkeel.")},
    **{f"mask {name}": ("composed", {"masks": [name]}) for name in MASKS},
    **{f"surrogate {name}": ("composed", {"surrogate": name}) for name in SURROGATES},
    **{f"weight {name}": ("composed", {"weight": name}) for name in WEIGHTS},
    **{f"perturb {name}": ("gspo", {"perturb": [name]}) for name in PERTURBATIONS},
    **{f"kl {name}": ("composed", {"kl_coefficient": 0.1, "kl_estimator": name}) for name in ESTIMATORS},
    "segments": (
        "composed",
        {"masks": [{"ratio_band": {"level": "segment"}}], "weight": {"mismatch": {"level": "segment"}}},
    ),
    "normalised": ("composed", {"weight": {"mismatch": {"normalise": True, "cap": 2.0}}}),
    "normalised_sequences": ("composed", {"weight": {"mismatch": {"normalise": True, "level": "geometric"}}}),
    "positive_nll": ("composed", {"positive_nll": 0.1}),
    "clip_cov_more": ("composed", {"masks": [{"clip_cov": {"share": 0.05, "low": 0.5, "high": 50.0}}]}),
    "kl_cov_more": ("composed", {"surrogate": {"kl_cov": {"share": 0.05}}}),
    "kpop_drop_rate": ("kpop", {"phi": {"drop_rate": 0.05}}),
    "icepop_drop_rate": ("icepop", {"high": {"drop_rate": [0.2, 0.05], "steps": 2}}),
    "mis_sequence": ("mis", {"cap": 2.0, "level": "sequence"}),
    "random_share": ("random_rejection", {"acceptance": 0.4}),
    "kept_tokens": ("kpop", {"denominator": "kept", "aggregate": "token_mean"}),
    "kept_sequences": ("kpop", {"denominator": "kept", "aggregate": "sequence_mean"}),
}
STATEFUL = ("kpop_drop_rate", "icepop_drop_rate", "ac_mis_po", "random_share", "perturb weight_noise", "mask clip_cov")


def build(case: str) -> Objective:
    name, options = CASES[case]
    return (compose if name == "composed" else RECIPES[name])(**options)


def tensors(t: Tokens) -> TokenBatch:
    """The whole batch in float64; `rollout_ids` and `token_index` are what a token keeps wherever it goes.

    An environment wrote two tokens after each sequence's third. Reference and entropy are any numbers of the token's own.
    """

    def f(x: np.ndarray) -> torch.Tensor:
        return torch.tensor(x, dtype=torch.float64)

    index = np.arange(len(t.p)) - np.searchsorted(t.ids, t.ids)
    index += 2 * (index > 2)
    return TokenBatch(
        logprobs=f(t.p),
        old_logprobs=f(t.o),
        rollout_logprobs=f(t.q),
        ref_logprobs=f(0.8 * t.o),
        entropy=f(1 + np.sin(1e3 * t.o)),
        advantages=f(t.a),
        coefficients=f(t.c),
        sequence_ids=torch.tensor(t.ids),
        group_ids=torch.tensor(t.ids // 4),
        rollout_ids=torch.tensor(1000 + 7 * t.ids),
        token_index=torch.tensor(index),
        token_ids=torch.tensor(np.where(t.top_has_sampled.any(1), t.top_has_sampled.argmax(1), 99)),
        topk_ids=torch.arange(t.top_p.shape[1]).expand(t.top_p.shape),
        topk_logprobs=f(t.top_p),
        old_topk_logprobs=f(t.top_o),
        rollout_topk_logprobs=f(t.top_q),
    )


def pick(tokens: TokenBatch, index: torch.Tensor, renumber: bool = False) -> TokenBatch:
    out = dataclasses.replace(tokens, **{n: v[index] for n, v in vars(tokens).items() if v is not None})
    if renumber:  # a rank numbers its own sequences from 0
        out = dataclasses.replace(out, sequence_ids=torch.unique_consecutive(out.sequence_ids, return_inverse=True)[1])
    return out


def places(sequence_ids: torch.Tensor, sequences: np.ndarray) -> torch.Tensor:
    """Token indices of these sequences, in this order."""
    return torch.cat([(sequence_ids == int(s)).nonzero()[:, 0] for s in sequences])


def step(
    objective: Objective, batch: TokenBatch, micros: list[torch.Tensor], gather: Callable | None
) -> tuple[float, torch.Tensor]:
    """Loss and gradient `[t]` of an optimizer step over micro-batches of `batch`."""
    objective.prepare(batch, gather=gather)
    logprobs = batch.logprobs.clone().requires_grad_()
    live = dataclasses.replace(batch, logprobs=logprobs)
    total = 0.0
    for micro in micros:
        loss = objective.loss(pick(live, micro))
        loss.backward()
        total += loss.item()
    assert logprobs.grad is not None
    return total, logprobs.grad


Steps = list[tuple[float, np.ndarray]]


@functools.cache
def whole(case: str) -> tuple[Steps, dict[str, Any]]:
    """Every step in one piece, in this process: (loss, gradient) of each, and the state at the end."""
    objective, out = build(case), []
    for k in range(STEPS):
        batch = tensors(random_tokens(COUNT, seed=40 + k))
        loss, gradient = step(objective, batch, [torch.arange(COUNT)], None)
        out.append((loss, gradient.numpy()))
    return out, objective.state_dict()


def split(case: str, rank: int, world: int, gather: Callable | None) -> tuple[Steps, dict[str, Any]]:
    """One rank's part: every world-th sequence in shuffled order, in micro-batches of five sequences."""
    objective, out = build(case), []
    for k in range(STEPS):
        everything = tensors(random_tokens(COUNT, seed=40 + k))
        order = np.random.default_rng([k, world]).permutation(int(everything.sequence_ids[-1]) + 1)[rank::world]
        index = places(everything.sequence_ids, order)
        mine = pick(everything, index, renumber=True)
        ours = np.arange(len(order))
        micros = [places(mine.sequence_ids, ours[i : i + 5]) for i in range(0, len(ours), 5)]
        loss, gradient = step(objective, mine, micros, gather)
        full = torch.zeros(COUNT, dtype=torch.float64)
        full[index] = gradient
        out.append((loss, full.numpy()))
    return out, objective.state_dict()


def gather_in(group: Any, world: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """1-D tensors of any length, concatenated over the group's ranks."""

    def gather(values: torch.Tensor) -> torch.Tensor:
        size = torch.tensor([len(values)])
        sizes = [torch.zeros_like(size) for _ in range(world)]
        dist.all_gather(sizes, size, group=group)
        longest = max(int(s) for s in sizes)
        padded = torch.cat([values, values.new_zeros(longest - len(values))])
        parts = [torch.empty_like(padded) for _ in range(world)]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[: int(s)] for part, s in zip(parts, sizes, strict=True)])

    return gather


def work(rank: int, port: int, folder: str) -> None:
    """Entry of one process: its part in the groups of 1, 2 and 4 ranks."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=max(RANKS))
    groups = {n: dist.new_group(list(range(n))) for n in RANKS}  # collective: everybody makes every group
    found = {}
    for n, group in groups.items():
        if rank < n:
            found[n] = {case: split(case, rank, n, gather_in(group, n)) for case in CASES}
    Path(folder, f"{rank}.pickle").write_bytes(pickle.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict[int, dict[str, tuple[Steps, dict[str, Any]]]]]:
    """What each of the four processes found."""
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    torch.multiprocessing.start_processes(work, args=(port, str(folder)), nprocs=max(RANKS), start_method="forkserver")
    return [pickle.loads(Path(folder, f"{rank}.pickle").read_bytes()) for rank in range(max(RANKS))]


def same(found: Steps, expected: Steps) -> None:
    for (loss, gradient), (true_loss, true_gradient) in zip(found, expected, strict=True):
        np.testing.assert_allclose(gradient, true_gradient, rtol=1e-10, atol=1e-18)
        assert loss == pytest.approx(true_loss, rel=1e-9)


@pytest.mark.parametrize("world", RANKS)
@pytest.mark.parametrize("case", CASES)
def test_ranks_micro_batches_and_order_change_nothing(ranks, case, world):
    expected, state = whole(case)
    parts = [ranks[rank][world][case] for rank in range(world)]
    steps = [[part[k] for part, _ in parts] for k in range(STEPS)]
    same([(sum((loss for loss, _ in s), 0.0), np.sum([g for _, g in s], axis=0)) for s in steps], expected)
    # Every rank ends with the state of the run that saw whole batches, so that any of them can write the checkpoint.
    for _, found in parts:
        assert found.keys() == state.keys()
        assert flat(found) == pytest.approx(flat(state), rel=1e-12)


def flat(state: Any, prefix: str = "") -> dict[str, float]:
    """The numbers of a JSON state by path."""
    if isinstance(state, dict):
        return {k: v for key, value in state.items() for k, v in flat(value, f"{prefix}/{key}").items()}
    if isinstance(state, list):
        return {k: v for i, value in enumerate(state) for k, v in flat(value, f"{prefix}/{i}").items()}
    return {prefix: state} if isinstance(state, (int, float)) else {}


@pytest.mark.parametrize("case", STATEFUL)
def test_state_really_moves(case):
    """Otherwise agreement of the states would say nothing."""
    objective = build(case)
    before = flat(objective.state_dict())
    objective.prepare(tensors(random_tokens(COUNT, seed=40)))
    assert flat(objective.state_dict()) != before


@pytest.mark.parametrize("case", ["ac_mis_po", "m2po", "kpop_drop_rate"])
def test_without_the_gather_ranks_would_disagree(case):
    """The batch-level rules do look at all ranks: left alone, a rank finds another threshold."""
    expected, state = whole(case)
    found, alone = split(case, 0, 4, None)
    rest, _ = split(case, 1, 4, None)
    live = [np.concatenate([np.abs(gradient) > 0 for _, gradient in part]) for part in (found, rest, expected)]
    assert flat(alone) != flat(state) or ((live[0] | live[1]) & ~live[2]).any()
