"""Weight sync at a scale that nobody here has: the plan itself, for any two meshes, and the time that it takes on given links.

Times are arithmetic over the plan's bytes. They leave out what only machines show: congestion, stragglers, memory bandwidth.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from pydantic import Field

from rollkeel.config import Node
from rollkeel.errors import BadInput
from rollkeel.sync.plan import Family, Layout, Plan, dealt, plan
from rollkeel.types import IntArray

APART = 10**9
"""Added to the hosts of engines that share none with trainers."""


class ModelConfig(Node):
    """Sizes of a mixture with attention in every layer; `experts: 0` is a dense model."""

    width: int = Field(default=8192, ge=1)
    layers: int = Field(default=80, ge=1)
    heads: int = Field(default=64, ge=1)
    kv_heads: int = Field(default=8, ge=1)
    head: int = Field(default=128, ge=1, description="Width of a head.")
    mlp: int = Field(default=18432, ge=1, description="Width inside the MLP of a dense layer.")
    dense_layers: int = Field(default=4, ge=0, description="First layers, which have an MLP in place of experts.")
    experts: int = Field(default=256, ge=0, description="Of each other layer.")
    expert_mlp: int = Field(default=2048, ge=1, description="Width inside an expert.")
    shared: int = Field(default=1, ge=0, description="Experts of a layer that every token goes to.")
    vocab: int = Field(default=157184, ge=1)
    tied: bool = False
    """Whether the head is the embedding."""


class TrainerConfig(Node):
    """The trainer's mesh, as `train.mesh`."""

    replicate: int = Field(default=1, ge=1)
    shard: int = Field(default=64, ge=1)
    expert: int = Field(default=64, ge=1)
    tensor: int = Field(default=1, ge=1)
    bytes: int = Field(default=2, ge=1, description="Of a weight as the trainer has it.")


class EnginesConfig(Node):
    """Engines of `data` × `tensor` ranks each. Experts are dealt over `expert` of these; the others cut each expert."""

    count: int = Field(default=64, ge=1)
    data: int = Field(default=4, ge=1)
    tensor: int = Field(default=8, ge=1)
    expert: int = Field(default=32, ge=1)
    bytes: int = Field(default=2, ge=1, description="Of a weight as an engine has it.")


class LinksConfig(Node):
    """What moves bytes. A rank sends and receives at the same time."""

    host_ranks: int = Field(default=8, ge=1, description="Ranks of a host.")
    network_gb_s: float = Field(default=40.0, gt=0, description="Of a rank to other hosts, GB/s.")
    local_gb_s: float = Field(default=200.0, gt=0, description="Of a rank to its own host, GB/s.")
    message_us: float = Field(default=20.0, ge=0, description="Of a message, whatever its size.")
    buffer_mb: float = Field(default=64.0, gt=0, description="Largest message: copies to one rank travel together.")


class SyncScenario(Node):
    """A publication: of which model, from which mesh to which engines, over which links."""

    model: ModelConfig = ModelConfig()
    trainer: TrainerConfig = TrainerConfig()
    engines: EnginesConfig = EnginesConfig()
    links: LinksConfig = LinksConfig()
    colocated: bool = False
    """Whether trainer and engine ranks with the same number share a host."""
    delta_share: float = Field(default=0.0, ge=0, le=1)
    """Bytes of an encoded delta over those of full weights; 0 sends full weights."""


def predict(scenario: SyncScenario) -> dict[str, Any]:
    """Figures of the publication: copies, bytes, and seconds on its links.

    Raises `BadInput` for a mesh that does not divide the model's heads or experts.
    """
    started = time.perf_counter()
    source, target = trainer_layout(scenario), engine_layout(scenario)
    made = plan(source, target)
    took = time.perf_counter() - started
    sent, received = made.sent(), made.received()
    whole = sum(len(f.names) * int(np.prod(f.shape)) for f in target.families)
    share = scenario.delta_share or 1.0
    busiest = {"sender": _end(made, "senders", sent, scenario), "receiver": _end(made, "receivers", received, scenario)}
    links = scenario.links
    gathered = whole * scenario.engines.bytes * share
    return {
        "parameters": whole,
        "trainer_ranks": len(sent),
        "engine_ranks": len(received),
        "plan_s": took,
        "copies": made.count,
        "bytes": int(made.nbytes * share),
        "bytes_between_hosts": int(made.between_hosts() * share),
        "sender_load": float(sent.max() / sent.mean()),
        **{f"{name}_{key}": value for name, end in busiest.items() for key, value in end.items()},
        "seconds": max(end["s"] for end in busiest.values()),
        "gathered_bytes": int(gathered * len(received)),
        "gathered_s": gathered / links.network_gb_s / 1e9,
    }


def _end(made: Plan, side: str, total: IntArray, scenario: SyncScenario) -> dict[str, float]:
    """Bytes, messages and seconds of the rank that has most to do on one side."""
    rank = int(total.argmax())
    links = scenario.links
    share = scenario.delta_share or 1.0
    peers = made.peers(side, rank)
    mine, theirs = made.hosts if side == "senders" else made.hosts[::-1]
    near = sum(nbytes for peer, nbytes in peers.items() if theirs[peer] == mine[rank])
    far = int(total[rank]) - near
    messages = sum(-(-int(nbytes * share) // int(links.buffer_mb * 2**20)) for nbytes in peers.values())
    seconds = far * share / links.network_gb_s / 1e9 + near * share / links.local_gb_s / 1e9
    return {
        "bytes": int(total[rank] * share),
        "peers": len(peers),
        "messages": messages,
        "s": seconds + messages * links.message_us / 1e6,
    }


def lines(scenario: SyncScenario, found: Mapping[str, Any]) -> list[str]:
    """The figures for people, with every assumption."""
    links = scenario.links
    what = f"a delta of {scenario.delta_share:.1%}" if scenario.delta_share else "full weights"
    out = [
        f"{found['parameters'] / 1e9:,.1f}e9 parameters, {what}: {found['trainer_ranks']} trainer ranks to"
        f" {found['engine_ranks']} engine ranks",
        f"plan: {found['copies']:,} copies, {found['bytes'] / 1e12:.3f} TB, none twice, made in {found['plan_s']:.1f} s;"
        f" busiest sender {found['sender_load']:.2f} times the mean",
    ]
    for name in ("sender", "receiver"):
        out.append(
            f"busiest {name}: {found[f'{name}_bytes'] / 1e9:.2f} GB, {found[f'{name}_peers']} peers,"
            f" {found[f'{name}_messages']} messages, {found[f'{name}_s']:.2f} s"
        )
    out += [
        f"predicted: {found['seconds']:.2f} s",
        f"if each engine rank got the whole model: {found['gathered_bytes'] / 1e12:,.1f} TB, {found['gathered_s']:.1f} s",
        f"assumed: {links.network_gb_s:g} GB/s a rank between hosts, {links.local_gb_s:g} GB/s within one of"
        f" {links.host_ranks} ranks, {links.message_us:g} µs a message of at most {links.buffer_mb:g} MB, both directions at"
        " once; no congestion, no stragglers, rounding and checksums for free",
    ]
    return out


def trainer_layout(scenario: SyncScenario) -> Layout:
    """Parameters cut by rows over `tensor` (columns of what comes second in a layer), then over `shard`; experts dealt first."""
    mesh, model = scenario.trainer, scenario.model
    _divides("trainer.expert", mesh.expert, "model.experts", model.experts)
    _divides("trainer.tensor", mesh.tensor, "model.heads", model.heads)
    grid = np.arange(mesh.replicate * mesh.shard * mesh.expert * mesh.tensor)
    axes = ("replicate", "shard", "expert", "tensor")
    grid_of = grid.reshape([getattr(mesh, axis) for axis in axes])
    families = []
    for names, shape, cut, expert in _tensors(model):
        cuts = [*([("tensor", cut)] if cut is not None else []), ("shard", 0)]
        members = None if expert is None else ("expert", expert // max(1, model.experts // mesh.expert))
        families.append(dealt(names, shape, mesh.bytes, grid_of, axes, cuts, members))
    return Layout(families, grid // scenario.links.host_ranks)


def engine_layout(scenario: SyncScenario) -> Layout:
    """Heads and widths cut over `tensor`, the same on every `data` rank; experts dealt over all of them."""
    own, model = scenario.engines, scenario.model
    ranks = own.data * own.tensor
    _divides("engines.expert", own.expert, "engines.data × engines.tensor", ranks)
    _divides("engines.expert", own.expert, "model.experts", model.experts)
    _divides("engines.tensor", own.tensor, "model.heads", model.heads)
    grid = np.arange(own.count * ranks)
    attention = grid.reshape(own.count, own.data, own.tensor)
    mixture = grid.reshape(own.count, own.expert, ranks // own.expert)
    families = list[Family]()
    for names, shape, cut, expert in _tensors(model):
        if expert is None:
            cuts = [] if cut is None else [("tensor", cut)]
            families.append(dealt(names, shape, own.bytes, attention, ("engine", "data", "tensor"), cuts))
        else:
            assert cut is not None
            place = "expert", expert // max(1, model.experts // own.expert)
            families.append(dealt(names, shape, own.bytes, mixture, ("engine", "expert", "cut"), [("cut", cut)], place))
    return Layout(families, grid // scenario.links.host_ranks + (0 if scenario.colocated else APART))


def _tensors(model: ModelConfig) -> list[tuple[list[str], tuple[int, ...], int | None, IntArray | None]]:
    """Names, shape, the dimension that tensor ranks cut, and of experts the number of each."""
    m = model
    every = range(model.layers)
    sparse = range(model.dense_layers if model.experts else 0, model.layers)
    plain = range(model.dense_layers) if model.experts else every
    out: list[tuple[list[str], tuple[int, ...], int | None, IntArray | None]] = []

    def add(end: str, shape: tuple[int, ...], cut: int | None, layers: range = every) -> None:
        if len(layers):
            out.append(([f"model.layers.{i}.{end}.weight" for i in layers], shape, cut, None))

    def mlp(at: str, inner: int, layers: range) -> None:
        for name, shape, cut in _gated(m.width, inner):
            add(f"{at}.{name}", shape, cut, layers)

    add("self_attn.q_proj", (m.heads * m.head, m.width), 0)
    for name in ("k_proj", "v_proj"):
        add(f"self_attn.{name}", (m.kv_heads * m.head, m.width), 0)
    add("self_attn.o_proj", (m.width, m.heads * m.head), 1)
    for name in ("self_attn.q_norm", "self_attn.k_norm"):
        add(name, (m.head,), None)
    for name in ("input_layernorm", "post_attention_layernorm"):
        add(name, (m.width,), None)
    mlp("mlp", m.mlp, plain)
    if m.experts:
        add("mlp.gate", (m.experts, m.width), None, sparse)
        if m.shared:
            mlp("mlp.shared_experts", m.expert_mlp * m.shared, sparse)
        numbers = np.tile(np.arange(m.experts), len(sparse))
        for name, shape, cut in _gated(m.width, m.expert_mlp):
            names = [f"model.layers.{i}.mlp.experts.{e}.{name}.weight" for i in sparse for e in range(m.experts)]
            out.append((names, shape, cut, numbers))
    out.append((["model.norm.weight"], (m.width,), None, None))
    ends = ["model.embed_tokens.weight"] if m.tied else ["model.embed_tokens.weight", "lm_head.weight"]
    out.append((ends, (m.vocab, m.width), 0, None))
    return out


def _gated(width: int, inner: int) -> list[tuple[str, tuple[int, int], int]]:
    return [("gate_proj", (inner, width), 0), ("up_proj", (inner, width), 0), ("down_proj", (width, inner), 1)]


def _divides(key: str, parts: int, of: str, whole: int) -> None:
    if whole % parts:
        raise BadInput(f"{key}={parts}: expected a divisor of {of}={whole}; set another number")
