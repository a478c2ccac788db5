"""A model trained on several ranks is the model that one process trains.

Matters because a rank that holds a stale part, counts a micro-batch twice or scales a gradient by the number of ranks would train on,
silently wrong. Does not cover GPUs (NCCL has not run), several machines, and a whole run.
"""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import pytest
import torch

from rollkeel.config import ModelConfig
from rollkeel.errors import BadInput
from rollkeel.models.loading import load_policy
from rollkeel.train.mesh import SIZES, Mesh
from rollkeel.train.tensor_parallel import check_tensor
from rollkeel.train.tree import Tree, pairwise
from tests.train.mesh_ranks import Case, other_order, serve, trained, trainer, weights_of

MESHES = ((2, 1), (1, 2), (1, 4), (2, 2))
MOE = ModelConfig(path="preset:tiny-qwen3-moe")
MODELS = ("tiny-qwen3", "tiny-qwen3-tied", "tiny-qwen3-moe")
OBJECTIVES = ("kpop", "icepop", "dppo_binary_tv", "ac_mis_po", "m2po")
PLAIN = [Case(*mesh) for mesh in MESHES]
EVERY = [Case(*mesh, model, objective=name) for mesh in MESHES for model in MODELS for name in OBJECTIVES]
EVERY += [Case(shard=s, expert=2, objective=name) for s in (1, 2) for name in OBJECTIVES]
WITHIN: tuple[dict[str, Any], ...] = (
    {"tensor": 2},
    {"context": 2},
    {"shard": 2, "tensor": 2},
    {"replicate": 2, "tensor": 2},
    {"shard": 2, "context": 2},
    {"context": 2, "tensor": 2},
)
EVERY += [Case(**mesh, model=m, objective=name) for mesh in WITHIN for m in MODELS for name in OBJECTIVES]
EVERY += [Case(expert=2, context=c, tensor=3 - c, objective=name) for c in (1, 2) for name in OBJECTIVES]
OPTIONS: dict[str, dict[str, Any]] = {
    "checkpointing": {"checkpointing": "layer"},
    "selective": {"checkpointing": "selective"},
    "entropy": {"entropy_coefficient": 0.1},
    "router": {"freeze_router": "router"},
    "reference": {"kl_coefficient": 0.1},
}
MORE = [Case(1, 2, options=OPTIONS["checkpointing"])]
MORE += [Case(2, 1, order=(1,))]  # one micro-batch for two ranks
MORE += [Case(2, 2, replay=True)]
EXPERTS = [Case(expert=2), Case(shard=2, expert=2), Case(replicate=2, expert=2, replay=True)]
TENSOR = [
    Case(tensor=2),
    Case(shard=2, tensor=2, objective="ac_mis_po", replay=True),
    Case(expert=2, tensor=2, objective="m2po", options=OPTIONS["selective"]),
]
LONG = {"micro_batch_tokens": 150}
CONTEXT = [
    Case(context=2, options=OPTIONS["entropy"]),
    Case(context=2, prompt=40, replay=True, options=LONG | OPTIONS["checkpointing"]),
    Case(shard=2, context=2, objective="dppo_binary_tv"),
    Case(context=2, tensor=2, prompt=40, options=LONG, fused=False),
    Case(context=4, prompt=2, order=(7,)),  # with one key alone, queries and keys have gradients of rounding only
]
"""A row of two tokens on four ranks."""
LORA = {"lora": {"rank": 4, "experts": True}}
ADAPTERS = [Case(1, 2, options=LORA, parts=True)]
EVERY += [Case(1, 2, options=OPTIONS[name]) for name in ("selective", "router", "entropy", "reference")]
EVERY += [
    *[Case(expert=2, options=OPTIONS[name]) for name in ("selective", "reference")],
    Case(tensor=2, model="tiny-qwen3-tied", objective="dppo_binary_tv", options=OPTIONS["reference"]),
    Case(replicate=2, tensor=2, replay=True, options=OPTIONS["checkpointing"]),
    Case(context=2, model="tiny-qwen3-tied", objective="icepop", options=OPTIONS["reference"]),
    Case(context=4, model="tiny-qwen3"),  # two heads of keys on four ranks
    Case(context=2, options=LORA),
    Case(tensor=2, model="tiny-qwen3", objective="icepop", options=OPTIONS["entropy"]),
    Case(context=2, objective="ac_mis_po", replay=True, options=OPTIONS["selective"]),
    Case(2, 2, options=LORA | OPTIONS["reference"], parts=True),
    Case(1, 4, model="tiny-qwen3-tied", options={"lora": {"rank": 3}} | OPTIONS["selective"]),
]
HEAD = Case(tensor=2, head=True)
TREE = [Case(*mesh, options={"reduce": "tree"}, updates=4) for mesh in ((2, 1), (1, 4), (2, 2))]
LONG_TREE = [replace(TREE[0], replicate=r, shard=s, updates=20) for r, s in ((2, 1), (1, 2), (1, 4), (2, 2), (4, 1))]
TREE_OF_FEW = [replace(case, updates=2, options={"reduce": "tree", "micro_batch_tokens": 120}) for case in TREE[1:]]
ORDERED = Case(2, 2)
FAILING = Case(1, 4, fails=True)
JUDGED = [Case(1, 2, judged=True), Case(2, 1, judged=True)]
AGAIN = [replace(case, again=True) for case in (EXPERTS[1], TENSOR[0], CONTEXT[1])]
ALL = [
    *PLAIN,
    *MORE,
    *EXPERTS,
    *TENSOR,
    *CONTEXT,
    *ADAPTERS,
    HEAD,
    *AGAIN,
    *TREE,
    *TREE_OF_FEW,
    ORDERED,
    other_order(ORDERED),
    FAILING,
    *JUDGED,
]


class Found(Protocol):
    """What a rank of a case came to."""

    def __call__(self, case: Case, rank: int = 0) -> dict[str, Any]: ...


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What a rank of a case came to."""
    return run(ALL, tmp_path_factory.mktemp("ranks"))


def run(cases: Sequence[Case], folder: Path) -> Found:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.train.mesh_ranks"])  # imported once for all ranks
    ranks = [context.Process(target=serve, args=(rank, 4, str(folder), cases)) for rank in range(4)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(300)
    assert [rank.exitcode for rank in ranks] == [0] * 4

    def of(case: Case, rank: int = 0) -> dict[str, Any]:
        return torch.load(Path(folder) / f"{cases.index(case)}-{rank}.pt", weights_only=False)

    return of


def alone(case: Case) -> dict[str, Any]:
    """What one process comes to; computed once for all meshes."""
    one = replace(case, **dict.fromkeys(SIZES, 1))
    if repr(one) not in _ALONE:
        _ALONE[repr(one)] = trained(one, Mesh())
    return _ALONE[repr(one)]


_ALONE: dict[str, dict[str, Any]] = {}


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """2-norm of the difference of all weights, relative."""
    assert list(a) == list(b)
    one, two = (torch.cat([w.flatten().double() for w in x.values()]) for x in (a, b))
    return float((one - two).norm() / two.norm())


@pytest.mark.slow
def test_every_mesh_model_and_objective_over_five_updates(tmp_path: Path) -> None:
    cases = [replace(case, updates=5) for case in EVERY]
    found = run(cases, tmp_path)
    for case in cases:
        assert_alike(case, found)


@pytest.mark.parametrize("case", [*PLAIN, *MORE, *EXPERTS, *TENSOR, *CONTEXT, *ADAPTERS], ids=str)
def test_weights_and_norms_are_those_of_one_process(case: Case, found: Found) -> None:
    assert_alike(case, found)


def assert_alike(case: Case, found: Found) -> None:
    ours, theirs = found(case, 0), alone(case)
    assert "error" not in theirs
    assert distance(ours["weights"], theirs["weights"]) < 1e-5
    for a, b in zip(ours["metrics"], theirs["metrics"], strict=True):
        assert a.keys() == b.keys()
        assert b["optimizer/grad_norm"] > 0
        assert a["optimizer/grad_norm"] == pytest.approx(b["optimizer/grad_norm"], rel=1e-5)
    assert torch.allclose(ours["logprobs"], theirs["logprobs"], atol=1e-4)


@pytest.mark.parametrize("case", TREE, ids=str)
def test_a_tree_gives_the_same_bits_on_any_number_of_ranks(case: Case, found: Found) -> None:
    assert_same_bits(case, found)


@pytest.mark.slow
def test_a_tree_gives_the_same_bits_over_twenty_updates(tmp_path: Path) -> None:
    found = run(LONG_TREE, tmp_path)
    for case in LONG_TREE:
        assert_same_bits(case, found)


def assert_same_bits(case: Case, found: Found) -> None:
    one, ours = alone(case), found(case)
    assert {n: w.tolist() for n, w in ours["weights"].items()} == {n: w.tolist() for n, w in one["weights"].items()}
    assert [m["optimizer/grad_norm"] for m in ours["metrics"]] == [m["optimizer/grad_norm"] for m in one["metrics"]]


@pytest.mark.parametrize("case", TREE_OF_FEW, ids=str)
def test_fewer_micro_batches_than_ranks(case: Case, found: Found) -> None:
    one, ours = alone(case), found(case)
    assert {n: w.tolist() for n, w in ours["weights"].items()} == {n: w.tolist() for n, w in one["weights"].items()}


@pytest.mark.parametrize("case", [MORE[-1], TENSOR[1], CONTEXT[1]], ids=str)
def test_every_rank_ends_with_the_same(case: Case, found: Found) -> None:
    first, *others = [found(case, rank) for rank in range(case.size)]
    for other in others:
        assert other["metrics"] == first["metrics"]
        assert torch.equal(other["logprobs"], first["logprobs"])
        assert torch.equal(other["experts"], first["experts"])
        assert distance(other["weights"], first["weights"]) == 0


def test_ranks_hold_their_part_of_the_model(found: Found) -> None:
    whole = alone(PLAIN[0])["bytes"]
    for case in PLAIN[: len(MESHES)]:
        held = [found(case, rank)["bytes"] for rank in range(case.size)]
        assert sum(held) == whole * case.replicate
        assert max(held) <= whole / case.shard * 1.1


@pytest.mark.parametrize("case", AGAIN, ids=str)
def test_the_same_mesh_gives_the_same_bits(case: Case, found: Found) -> None:
    for rank in range(case.size):
        one, two = found(replace(case, again=False), rank), found(case, rank)
        assert distance(one["weights"], two["weights"]) == 0
        assert one["metrics"] == two["metrics"] == found(case)["metrics"]


def test_ranks_hold_their_experts_and_no_others(found: Found) -> None:
    whole = alone(PLAIN[0])["bytes"]
    experts = 3 * sum(p.numel() * 4 for n, p in load_policy(MOE).model.named_parameters() if ".experts." in n)
    for rank in range(2):
        assert found(EXPERTS[0], rank)["bytes"] == whole - experts // 2
    assert sum(found(EXPERTS[1], rank)["bytes"] for rank in range(4)) == 2 * whole - experts


def test_ranks_hold_their_heads_widths_and_vocabulary(found: Found) -> None:
    sizes = {n: p.numel() for n, p in load_policy(MOE).model.named_parameters()}
    whole = sum(n for name, n in sizes.items() if "norm" in name or name.endswith("mlp.gate.weight"))
    each = 3 * 4 * (whole + (sum(sizes.values()) - whole) // 2)  # with two moments, in bytes
    assert [found(TENSOR[0], rank)["bytes"] for rank in range(2)] == [each, each]
    assert sum(found(TENSOR[1], rank)["bytes"] for rank in range(4)) == 2 * each
    assert each < 0.51 * alone(TENSOR[0])["bytes"]


def test_a_head_in_parts_is_the_head(found: Found) -> None:
    for rank in range(HEAD.size):
        for what, (whole, parts) in found(HEAD, rank).items():
            for a, b in zip(whole, parts, strict=True):
                assert torch.allclose(a, b, atol=1e-5), what


def test_the_order_of_sequences_changes_rounding_alone(found: Found) -> None:
    a, b = found(ORDERED), found(other_order(ORDERED))
    assert distance(a["weights"], b["weights"]) < 1e-6


def test_an_error_on_one_rank_is_raised_on_all(found: Found) -> None:
    for rank in range(FAILING.size):
        assert found(FAILING, rank)["error"] == "ValueError: sequence 0 cannot be"


def test_what_a_mesh_cannot_do_is_refused() -> None:
    def refused(model: str = "tiny-qwen3-moe", mesh: Any = MappingProxyType({"replicate": 2}), **options: Any) -> str:
        with pytest.raises(BadInput) as error:
            trainer(Case(model=model, options=options), Mesh(**mesh))
        return str(error.value)

    assert refused(processes=2) == "train.processes: cannot be on 2 ranks yet; set its default or train.mesh to 1"
    assert refused(compile=True).startswith("train.compile: ")
    assert refused(moments="int8").startswith("train.moments: ")
    assert refused(mesh={"expert": 2}, reduce="tree").startswith("train.reduce: ")
    said = "train.mesh: expert=3, but Qwen3MoeForCausalLM has 8 experts, which it does not divide; set another expert, or 1"
    assert refused(mesh={"expert": 3}) == said
    for mesh in ({"tensor": 2}, {"context": 2}):
        assert refused(mesh=mesh, reduce="tree").startswith("train.reduce: ")
    said = "train.mesh: tensor={}, but Qwen3MoeForCausalLM has {}, which it does not divide; set another tensor, or 1"
    assert refused(mesh={"tensor": 3}) == said.format(3, "num_attention_heads=4")
    assert refused(mesh={"tensor": 4}) == said.format(4, "num_key_value_heads=2")
    context = (
        "train.mesh: context={}, but Qwen3MoeForCausalLM has {}, which it does not divide; set another context, or 1"
    )
    assert refused(mesh={"context": 3}) == context.format(3, "4 attention heads on a rank")
    assert refused(mesh={"context": 4, "tensor": 2}) == context.format(4, "2 attention heads on a rank")
    dense = refused("tiny-qwen3", {"expert": 2})
    assert dense == "train.mesh: expert=2, but Qwen3ForCausalLM has no experts; set another expert, or 1"
    with pytest.raises(BadInput, match=r"train\.mesh\.shard=3 is no power of two; set one, or reduce=sum"):
        Tree(Mesh(shard=3))


@pytest.mark.parametrize("case", JUDGED, ids=str)
def test_a_step_that_must_not_be_is_refused_by_all_ranks(case: Case, found: Found) -> None:
    begun = weights_of(trainer(case, Mesh()))
    for rank in range(case.size):
        seen = found(case, rank)
        assert "tokens that weights 0 sampled have other log-probs" in seen["error"]
        assert seen["metrics"] == []
        assert all(torch.equal(tensor, begun[name]) for name, tensor in seen["weights"].items())


def test_places_of_ranks_are_all_places() -> None:
    sizes: dict[str, Any] = {"replicate": 2, "shard": 3, "expert": 2, "context": 2, "tensor": 3}
    meshes = [Mesh(**sizes, rank=rank) for rank in range(72)]
    assert [tuple(m.place.values())[::-1] for m in meshes] == list(itertools.product(*map(range, sizes.values())))
    assert [m.worker for m in meshes] == [number for number in range(12) for _ in range(6)]
    assert list(meshes[0].places("tensor", "expert")) == [meshes[n].place for n in (0, 1, 2, 6, 7, 8)]


def test_widths_that_tensor_ranks_do_not_divide_are_refused() -> None:
    policy = load_policy(ModelConfig(path="preset:tiny-qwen3", overrides={"intermediate_size": 191}))
    said = "has model.layers.0.mlp.gate_proj.weight of width 191, which it does not divide; set another tensor, or 1"
    with pytest.raises(BadInput, match=said):
        check_tensor(policy.model, Mesh(tensor=2))


def test_pairs_are_neighbours() -> None:
    big, small = torch.tensor(2.0**24), torch.tensor(1.0)
    assert pairwise([big, small, small]).item() == 2.0**24 + 1 - 1  # (big + 1) + 1, each rounded to even
    assert pairwise([small, small, big]).item() == 2.0**24 + 2


def test_rows_of_all_parts_are_all_rows() -> None:
    for rows in (0, 1, 5, 8):
        parts = [Mesh(shard=4, rank=r).rows(rows) for r in range(4)]
        assert [i for part in parts for i in range(rows)[part]] == list(range(rows))
        sizes = [len(chunk) for chunk in torch.arange(rows).chunk(4)]  # as FSDP deals them
        assert [p.stop - p.start for p in parts] == [*sizes, 0, 0, 0, 0][:4]
