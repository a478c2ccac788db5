"""A plan that lets a component leave in a phase that reads it ends a run; one that lets it stay takes the memory that was to be saved.

Truth tables by hand, and sums. Not covered: whether memory follows the plan (test_moves.py, test_offloaded_runs.py).
"""

from __future__ import annotations

import pytest

from rollkeel.config import Config
from rollkeel.errors import BadInput
from rollkeel.loop.check import validate
from rollkeel.memory.plan import beside, needed, plan
from rollkeel.memory.residency import LEVELS, PHASES, RULES, Residency, chosen, place, residency, stays
from rollkeel.memory.shapes import PUBLIC, shape_of
from rollkeel.recipe import load

TABLE = {
    #                    rollout score update publish evaluate checkpoint
    "weights":           "h d d d h d",
    "reference model":   "h d h h h h",
    "master remainder":  "h h d h h h",
    "moments":           "h h d h h h",
    "gradients":         "x x d x x x",
    "activations":       "x x d x x x",
    "backward":          "x d d x x x",
    "of other ranks":    "x d d x x x",
    "engine's weights":  "d x x d d d",
    "KV blocks":         "d x x x d d",
    "engine's buffers":  "d d d d d d",
    "communicators":     "x d d d x d",
}  # fmt: skip
"""Of `all`. d: device, h: host, x: dropped."""
LEAVES = {"none": {"gradients", "activations", "backward", "of other ranks"}}
LEAVES["optimizer"] = LEAVES["none"] | {"master remainder", "moments", "KV blocks"}
LEAVES["all"] = LEAVES["optimizer"] | {"weights", "reference model", "engine's weights", "communicators"}


@pytest.mark.parametrize("level", LEVELS)
def test_places(level: str) -> None:
    assert set(RULES) <= set(TABLE)
    for name, row in TABLE.items():
        expected = row.split() if name in LEAVES[level] else ["d"] * len(PHASES)
        assert [{"device": "d", "host": "h", "dropped": "x"}[place(name, p, level)] for p in PHASES] == expected, name


def recipe(*words: str) -> Config:
    return load(None, ["model.path=Qwen/Qwen3-0.6B", *words])


COLOCATED = ("cluster.trainers=1", "cluster.engines=1", "cluster.placement=colocated")


def test_what_is_shared_stays() -> None:
    both = {"weights", "engine's weights"}
    assert stays(recipe()) == both
    assert stays(recipe("engine.dtype=bf16")) == set()
    assert stays(recipe(*COLOCATED)) == set()
    assert stays(recipe(*COLOCATED, "train.lora.rank=2")) == {"engine's weights"}
    assert stays(recipe("engine.dtype=bf16", "sync.kind=delta")) == {"engine's weights"}
    assert stays(recipe(*COLOCATED, "sync.kind=delta")) == {"engine's weights"}  # the changes are added to them
    assert stays(recipe("engine.processes=1")) == {"engine's weights", "KV blocks"}


def made(*words: str, level: str = "all") -> Residency:
    config = recipe(*words)
    return residency(config, shape_of(config.model.path, {}), level)


def test_the_peak_is_the_largest_phase_and_not_the_sum() -> None:
    found = {level: made(*COLOCATED, "train.kl_coefficient=0.1", level=level) for level in LEVELS}
    sizes, n = found["all"].sizes, 596_049_920
    assert [sizes[k] for k in ("weights", "gradients", "moments", "reference model")] == [4 * n, 4 * n, 8 * n, 4 * n]
    assert sizes["engine's weights"] == 4 * n
    assert sizes["master remainder"] == 0
    work = sizes["activations"] + sizes["backward"]
    assert found["all"].held("update") == 16 * n + work + sizes["engine's buffers"] + sizes["messages"]
    assert found["none"].held("update") == sum(sizes.values())
    engine = sizes["KV blocks"] + sizes["engine's buffers"]
    assert found["optimizer"].held("rollout") == 12 * n + engine + sizes["messages"]
    assert found["all"].held("rollout") == found["optimizer"].held("rollout") - 8 * n
    assert found["all"].held("rollout", "host") == 16 * n
    assert found["all"].peak == max(map(found["all"].held, PHASES)) < found["optimizer"].peak < found["none"].peak
    assert found["none"].peak == sum(sizes.values())


def test_ranks_hold_parts() -> None:
    alone, parts = made(*COLOCATED), made("train.mesh={shard: 2, replicate: 3}", *COLOCATED[1:])
    for name in ("weights", "gradients", "moments"):
        assert parts.sizes[name] == alone.sizes[name] // 2
    assert parts.sizes["engine's weights"] == alone.sizes["engine's weights"]


def test_auto_moves_as_little_as_fits() -> None:
    config = recipe(*COLOCATED, "memory.offload=auto")
    shape = shape_of(config.model.path, {})
    peaks = [residency(config, shape, level).peak for level in LEVELS]
    for level, space in zip(LEVELS, peaks, strict=True):
        assert chosen(config, shape, space) == level
    assert chosen(config, shape, peaks[0] - 1) == "optimizer"
    assert chosen(config, shape, 1) == "all"
    assert chosen(recipe("memory.offload=none"), shape, 1) == "none"


def test_what_a_server_finds_free_and_what_the_command_counts() -> None:
    n, fields = 596_049_920, PUBLIC["Qwen/Qwen3-0.6B"]
    for level, times in (("none", 16), ("optimizer", 8), ("all", 4)):
        server = recipe("engine.kind=vllm", "train.kl_coefficient=0.1", f"memory.offload={level}")
        assert beside(server, fields) == times * n
        config = recipe(*COLOCATED, f"memory.offload={level}")
        shape = shape_of(config.model.path, {})
        expected = plan(config, shape).total if level == "none" else residency(config, shape, level).peak
        assert needed(config, shape) == expected
    assert needed(recipe(*COLOCATED, "memory.offload=auto"), shape) == expected


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["run.loop=async", "engine.processes=1"], "run.loop=async"),
        (["train.processes=2"], "train.processes=2"),
        (["cluster.trainers=1", "cluster.engines=1"], "cluster.placement=disaggregated"),
    ],
)
def test_what_shares_no_device_in_turns_is_refused(words: list[str], named: str) -> None:
    with pytest.raises(BadInput, match=f"memory.offload=all: nothing can leave with {named}"):
        validate(load(None, [*words, "memory.offload=all"]))
    validate(load(None, [*words, "memory.offload=auto"]))
