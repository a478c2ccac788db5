"""The plan of a publication is exact: applied to shards of numbers it gives the whole, each element once, by as few bytes as there can be.

Matters because a slice that is planned wrongly is a weight that silently did not arrive. Does not cover how copies travel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rollkeel.errors import BadInput
from rollkeel.sync.plan import NOBODY, Copy, Family, Layout, Plan, dealt, plan

Shards = list[dict[str, list[tuple[Any, np.ndarray]]]]
"""By rank and name: first index of each part, and the part."""


def shards(layout: Layout, whole: Mapping[str, np.ndarray] | None) -> Shards:
    """What each rank holds of `whole`; zeros without."""
    out: Shards = [{} for _ in layout.hosts]
    for family in layout.families:
        for i, p, r in np.argwhere(family.holders != NOBODY).tolist():
            box = tuple(slice(a, b) for a, b in zip(family.starts[p], family.stops[p], strict=True))
            shape = tuple(family.stops[p] - family.starts[p])
            part = np.zeros(shape, np.int64) if whole is None else whole[family.names[i]][box].copy()
            out[family.holders[i, p, r]].setdefault(family.names[i], []).append((family.starts[p], part))
    return out


def piece(held: Mapping[str, list[tuple[Any, np.ndarray]]], name: str, copy: Copy) -> np.ndarray:
    """The one view of what is held that `copy` is about."""
    fits = []
    for starts, part in held[name]:
        box = copy.within(starts)
        if all(s.start >= 0 and s.stop <= n for s, n in zip(box, part.shape, strict=True)):
            fits.append(part[box])
    assert len(fits) == 1
    return fits[0]


def applied(made: Plan, source: Shards, target: Layout, tied: Mapping[str, str]) -> tuple[Shards, Shards]:
    """What receivers hold behind all copies, and how often each element was written."""
    held, written = shards(target, None), shards(target, None)
    for rank in range(len(source)):
        for copy in made.sends(rank):
            assert copy.sender == rank
            piece(held[copy.receiver], copy.name, copy)[...] = piece(source[rank], tied.get(copy.name, copy.name), copy)
            piece(written[copy.receiver], copy.name, copy)[...] += 1
    return held, written


def numbers(families: Sequence[Family]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.integers(1, 2**40, f.shape) for f in families for name in f.names}


AXES = ("replicate", "shard", "expert", "tensor")


def factors(rng: np.random.Generator, most: int) -> tuple[int, ...]:
    """Sizes of a mesh of at most so many ranks."""
    sizes = [int(rng.choice([1, 1, 2, 3, 4, 8])) for _ in AXES]
    while np.prod(sizes) > most:
        sizes[int(np.argmax(sizes))] = 1
    return tuple(sizes)


def random_layout(rng: np.random.Generator, experts: int, tied: bool, most: int) -> Layout:
    """A model of two layers over a random mesh: each kind of tensor cut along random dimensions by random axes."""
    sizes = factors(rng, most)
    ranks = rng.permutation(int(np.prod(sizes))).reshape(sizes)
    width, inner = 12, 20
    kinds = {
        "q_proj.weight": (16, width),
        "k_proj.weight": (6, width),
        "norm.weight": (width,),
        "down_proj.weight": (width, inner),
    }
    families = []

    def family(names: list[str], shape: tuple[int, ...], **more: Any) -> None:
        axes = [a for a in AXES if a not in (more.get("members") or ("",))[0]]
        chosen = rng.permutation(axes)[: rng.integers(0, 3)]
        cuts = [(str(axis), int(rng.integers(len(shape)))) for axis in chosen if axis != "replicate"]
        families.append(dealt(names, shape, int(rng.choice([1, 2, 4])), ranks, AXES, cuts, **more))

    for end, shape in kinds.items():
        family([f"{layer}.{end}" for layer in range(2)], shape)
    family(["embed.weight"], (33, width))
    if not tied:
        family(["head.weight"], (33, width))
    if experts:
        each = -(-experts // sizes[2])
        places = np.tile(np.arange(experts) // each, 2)
        names = [f"{layer}.experts.{e}.up_proj.weight" for layer in range(2) for e in range(experts)]
        family(names, (inner, width), members=("expert", places))
    hosts = rng.integers(0, 1 + ranks.size // int(rng.choice([1, 4, 8])), ranks.size)
    return Layout(families, hosts + int(rng.choice([0, 1000])))


def random_case(seed: int, most: int = 16) -> tuple[Layout, Layout, dict[str, str]]:
    rng = np.random.default_rng(seed)
    experts, tied = int(rng.choice([0, 5, 8])), bool(rng.integers(2))
    source, target = random_layout(rng, experts, tied, most), random_layout(rng, experts, False, most)
    return source, target, {"head.weight": "embed.weight"} if tied else {}


def assert_exact(source: Layout, target: Layout, tied: Mapping[str, str]) -> Plan:
    made = plan(source, target, tied)
    whole = numbers(source.families)
    held, written = applied(made, shards(source, whole), target, tied)
    for rank, parts in enumerate(held):
        for name, pieces in parts.items():
            for (starts, part), (_, times) in zip(pieces, written[rank][name], strict=True):
                box = tuple(slice(a, a + n) for a, n in zip(starts, part.shape, strict=True))
                assert (times == 1).all()
                assert (part == whole[tied.get(name, name)][box]).all()
    least = sum(int((f.holders != NOBODY).sum(axis=(0, 2)) @ f.sizes) * f.itemsize for f in target.families)
    assert made.nbytes == least == made.sent().sum() == made.received().sum()
    return made


@pytest.mark.parametrize("seed", range(60))
def test_random_layouts_get_every_element_once(seed: int) -> None:
    assert_exact(*random_case(seed))


@pytest.mark.slow
def test_ten_thousand_random_pairs() -> None:
    for seed in range(100, 10_100):
        assert_exact(*random_case(seed, most=16 if seed % 50 else 64))


def test_both_ends_list_the_same_copies_in_the_same_order() -> None:
    made = plan(*random_case(3))
    senders, receivers = (len(hosts) for hosts in made.hosts)
    sent = [copy for rank in range(senders) for copy in made.sends(rank)]
    got = [copy for rank in range(receivers) for copy in made.receives(rank)]
    assert len(sent) == len(got) == made.count > 0
    for sender in range(senders):
        for receiver in range(receivers):
            ours = [c for c in sent if (c.sender, c.receiver) == (sender, receiver)]
            assert ours == [c for c in got if (c.sender, c.receiver) == (sender, receiver)]


def test_every_process_makes_the_same_plan() -> None:
    one, two = plan(*random_case(5)), plan(*random_case(5))
    for a, b in zip(one.sections, two.sections, strict=True):
        assert a.names == b.names
        assert (a.senders == b.senders).all()


def simple(holders: Sequence[Sequence[int]], names: int = 8, rows: int = 4) -> Family:
    """Tensors of 8 columns, cut into as many parts of rows as there are lists of holders."""
    each = rows // len(holders)
    starts = np.array([[p * each, 0] for p in range(len(holders))])
    stops = np.array([[(p + 1) * each, 8] for p in range(len(holders))])
    return Family([str(i) for i in range(names)], (rows, 8), 2, starts, stops, np.array([holders] * names), ())


def test_ranks_that_hold_the_same_send_equally_much() -> None:
    source = Layout([simple([[0, 1, 2]], names=9)], np.zeros(3, int))
    target = Layout([simple([[0], [1]], names=9)], np.array([7, 8]))
    assert plan(source, target).sent().tolist() == [9 * 64 // 3] * 3


def test_meshes_with_replicas_share_the_sending_within_a_tenth() -> None:
    for replicas, shard, engines, tensor in ((2, 4, 3, 2), (4, 2, 2, 8), (8, 1, 5, 4), (3, 4, 4, 4), (4, 4, 1, 2)):
        ranks = np.arange(replicas * shard).reshape(replicas, shard)
        theirs = np.arange(engines * tensor).reshape(engines, tensor)
        names = [str(i) for i in range(40)]
        source = dealt(names, (64, 32), 2, ranks, ("replicate", "shard"), [("shard", 0)])
        target = dealt(names, (64, 32), 2, theirs, ("engine", "tensor"), [("tensor", 1)])
        sent = plan(Layout([source], np.arange(ranks.size)), Layout([target], 100 + np.arange(theirs.size))).sent()
        assert sent.max() <= 1.1 * sent.mean()


def test_a_holder_on_the_same_host_sends() -> None:
    source = Layout([simple([[0, 1]])], np.array([0, 1]))
    target = Layout([simple([[0, 1, 2]])], np.array([1, 0, 5]))
    made = plan(source, target)
    for rank, peer in ((0, 1), (1, 0)):
        assert {copy.sender for copy in made.receives(rank)} == {peer}
    assert made.between_hosts() == made.nbytes // 3
    assert made.sent().tolist() == [made.nbytes // 2] * 2  # the third receiver's are shared


def test_who_rounds() -> None:
    source = Layout([simple([[0], [1]])], np.zeros(2, int))
    whole = simple([[0]])
    rows = replace(whole, itemsize=1, grain=(1, 8))
    assert all(copy.rounds for copy in plan(source, Layout([rows], np.zeros(1, int))).receives(0))
    tensors = replace(whole, itemsize=1, grain=(4, 8))  # one scale a tensor, which no rank has whole
    made = plan(source, Layout([tensors], np.zeros(1, int)))
    assert not any(copy.rounds for copy in made.receives(0))
    assert made.nbytes == 8 * 64  # 2 bytes an element, as the trainer has them


def test_a_fused_tensor_is_filled_by_the_names_of_its_rows() -> None:
    rng = np.random.default_rng(0)
    whole = {"q": rng.integers(0, 99, (8, 6)), "k": rng.integers(0, 99, (4, 6)), "v": rng.integers(0, 99, (4, 6))}
    ranks = np.arange(2)
    source, target = (
        Layout([dealt([n], w.shape, 4, ranks, ("a",), [("a", d)]) for n, w in whole.items()], ranks) for d in (1, 0)
    )
    fused = [np.zeros((8, 6), int) for _ in ranks]  # q, k and v of half of the heads
    views: list[Any] = [{"q": f[:4], "k": f[4:6], "v": f[6:]} for f in fused]
    held = shards(source, whole)
    for rank in range(2):
        for copy in plan(source, target).receives(rank):
            first = copy.starts[0] - rank * len(views[rank][copy.name])
            rows = slice(first, first + copy.stops[0] - copy.starts[0])
            views[rank][copy.name][rows, copy.starts[1] : copy.stops[1]] = piece(held[copy.sender], copy.name, copy)
    for rank in ranks:
        halves = [np.split(whole[name], 2)[rank] for name in "qkv"]
        assert (fused[rank] == np.concatenate(halves)).all()


def refusals() -> Iterator[tuple[Family, Family, str]]:
    good = simple([[0]], names=1)
    yield (
        good,
        simple([[0]], names=2),
        "weight 1: an engine holds it, no trainer rank does; publish from the same model",
    )
    shapes = "weight 0: shape [8, 8] in the engine, [4, 8] in the trainer; publish from the same model"
    yield good, simple([[0]], names=1, rows=8), shapes
    half = replace(good, stops=np.array([[2, 8]]))
    yield half, good, "weight 0: the trainer's ranks do not hold all of [(0, 4), (0, 8)]; check its layout"
    twice = Family(["0"], (4, 8), 2, np.array([[0, 0], [1, 0]]), np.array([[2, 8], [4, 8]]), np.array([[[0], [0]]]))
    overlap = "weight 0: its parts 0 and 1 overlap; deal each element once"
    yield twice, good, overlap
    yield good, twice, overlap
    yield replace(twice, holders=np.array([[[0], [1]]])), good, overlap


@pytest.mark.parametrize(("source", "target", "told"), list(refusals()))
def test_what_cannot_be_planned_is_told(source: Family, target: Family, told: str) -> None:
    with pytest.raises(BadInput) as error:
        plan(Layout([source], np.zeros(2, int)), Layout([target], np.zeros(2, int)))
    assert str(error.value) == told


def test_parts_of_engines_may_overlap_on_different_ranks() -> None:
    source = Layout([simple([[0]], names=1)], np.zeros(1, int))
    starts, stops = np.array([[0, 0], [1, 0]]), np.array([[3, 8], [4, 8]])
    target = Layout([Family(["0"], (4, 8), 2, starts, stops, np.array([[[0], [1]]]))], np.zeros(2, int))
    assert_exact(source, target, {})
