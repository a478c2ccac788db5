"""Bytes of a run on each of its devices, by component. A function of the config and the model's sizes; nothing is built or measured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from rollkeel.config import Config
from rollkeel.errors import BadInput
from rollkeel.memory.shapes import Shape, shape_from
from rollkeel.sync.shared import KEPT, no_deltas, two_copies

GB = 10**9
DEVICES = {"h100": 84_900_000_000, "a100": 84_900_000_000, "h200": 150_100_000_000}
"""Memory as torch reports it of cards that are sold as 80, 80 and 141 GB; the last was measured."""
RESERVED = 0.06
"""Share of a GPU that its driver, kernels and fragments take."""
CHUNK, KEPT_BYTES, SCALED, BLOCK, KV_GB = 1024, 48 * 2**20, 256, 16, 4.0
WIDE, WIDE_BYTES = 4, 4 * GB
TILE, MOST_TILED, PROMPTS = 32, 2**18, 2**17
"""Of `rollkeel.train.logprobs`, `eight_bit`, `rollkeel.engines.kv` and `prefill`, and `rollkeel.models.tiled_experts`, which tests compare with these."""
SIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "bf16": 2, "fp16": 2}
"""Bytes of a number; quantised engines compute with rounded float32."""
REMAINDERS = {"float32": 0, "bfloat16": 2, "float16": 4}
"""Bytes that restore the exact float32 master of a weight."""
KV = "KV blocks"
OF_ENGINE = ("engine's weights", KV, "engine's buffers")
LONG = 4096
"""Tokens of a prompt that memory is kept for where nobody says how long they are."""
MESSAGE = 4 * 2**24
"""Most bytes of gradients that travel between ranks in one message, see `rollkeel.train.mesh`; the next one is made meanwhile."""


@dataclass(frozen=True)
class Plan:
    """What a run takes."""

    parts: Mapping[str, int]
    """Bytes by component: of the device, or of the fullest rank and of one engine."""
    tokens: int
    """Tokens of the largest micro-batch: `train.micro_batch_tokens`, or the longest sequence, which is never split."""
    apart: bool = False
    """Whether ranks and engines have devices of their own."""

    @property
    def devices(self) -> dict[str, int]:
        """Bytes of each kind of device."""
        engine = sum(self.parts.get(name, 0) for name in OF_ENGINE)
        total = sum(self.parts.values())
        return {"rank": total - engine, "engine": engine} if self.apart else {"device": total}

    @property
    def total(self) -> int:
        """Of the fullest device."""
        return max(self.devices.values())


@dataclass(frozen=True)
class Setting:
    """What a config does not tell."""

    cpu: bool = False
    """rollkeel's compiled passes in float32."""
    prompt: int = 512
    """Tokens of the longest prompt."""


def plan(config: Config, shape: Shape, setting: Setting = Setting()) -> Plan:
    """What the run of `config` takes with a model of `shape`: the trainer's peak beside a full engine."""
    rank = _Rank(config, shape)
    train, size = config.train, SIZES[config.model.dtype]
    own = max(shape.context, config.model.context or 0)
    context = min(own, config.engine.max_length or own)
    longest = min(context, setting.prompt + config.sampling.max_new_tokens)
    tokens = max(train.micro_batch_tokens, longest)
    adapters, lora = -(-shape.adapters(train.lora) // rank.mesh.shard), train.lora.rank > 0
    trained = adapters if lora else rank.parameters
    reference = 4 * adapters if lora else rank.parameters * size
    parts = {
        "weights": rank.parameters * size + 4 * adapters,
        "master remainder": 0 if lora else trained * REMAINDERS[config.model.dtype],
        "gradients": trained * 4 * (1 + _levels(config, setting, tokens)),
        "moments": trained * 8 if train.moments == "float32" else trained * 2 + trained // SCALED * 8,
        "reference model": reference if train.keeps_reference else 0,
        "rounded weights": rank.parameters * size if config.experiment.rounding != "none" else 0,
        **activations(config, rank.shape, setting, -(-tokens // rank.mesh.context)),
        **rank.travelling(adapters),
        **(engine(config, shape, context, longest, setting) if config.engine.kind == "local" else {}),
        "last publication": published(config, shape) if setting.cpu else 0,
    }
    return Plan(parts, tokens, config.clustered and config.cluster.placement == "disaggregated")


def _levels(config: Config, setting: Setting, tokens: int) -> int:
    """How many gradients wait in `train.reduce=tree` for others to be added to, with micro-batches of so many tokens."""
    if config.train.reduce != "tree":
        return 0
    size, mesh = config.rollout, config.mesh
    each = -(-size.prompts // config.train.updates_per_step) * size.samples
    rounds = -(-each * (setting.prompt + config.sampling.max_new_tokens) // (tokens * mesh.replicate * mesh.shard))
    return rounds.bit_length()


class _Rank:
    """What the fullest rank of a mesh has of a model."""

    def __init__(self, config: Config, shape: Shape) -> None:
        self.mesh, self._config = config.mesh, config
        self.shape, self.parameters = shape, shape.parameters
        self._gathered, self._added = 0, 0
        if (mesh := self.mesh).size > 1:
            from rollkeel.train.mesh import Mesh
            from rollkeel.train.parts import part_shape

            sizes = mesh.model_dump()
            first, unsharded = Mesh(**sizes), Mesh(**{**sizes, "shard": 1})
            own = [(name, n, math.prod(part_shape(first, name, whole))) for name, whole, n in shape.tensors()]
            self.parameters = sum(n * part for _, n, part in own)
            if mesh.replicate * mesh.context > 1:
                self._added = self.parameters
            elif mesh.expert > 1:
                self._added = sum(n * part for name, n, part in own if ".experts." not in name)
            if mesh.shard > 1:  # a pass brings in embeddings, head and two layers, and has whole gradients of one
                for name, whole, n in shape.tensors():
                    layers, count = max(1, n // shape.layers), math.prod(part_shape(unsharded, name, whole))
                    self._gathered += layers * count * ((1 + (n > 1)) * SIZES[config.model.dtype] + 4)
            self.shape = replace(
                shape,
                heads=shape.heads // mesh.tensor,
                kv_heads=max(1, shape.kv_heads // mesh.tensor),
                mlp=shape.mlp // mesh.tensor,
                vocab=shape.vocab // (mesh.tensor if shape.vocab % mesh.tensor == 0 else 1),
                experts=shape.experts // mesh.expert,
            )

    def travelling(self, adapters: int) -> dict[str, int]:
        """What comes from other ranks for a pass, and what is on its way; `adapters`: parameters that are trained alone, if any are."""
        if not self._config.clustered:
            return {}
        added = min(self._added, adapters or self._added)
        return {
            "of other ranks": self._gathered,
            "messages": min(2 * MESSAGE, 4 * added) + int(self._config.sync.buffer_mb * 1e6),
        }


def beside(config: Config, fields: Mapping[str, Any]) -> int:
    """Bytes that training holds while a server samples on its device, with a model whose config has these `fields`.

    Where the server sleeps while weights are trained, that is what stays between two steps, and does not leave by `memory.offload`. Raises `BadInput` for an architecture whose sizes are not known here.
    """
    try:
        parts = plan(config, shape_from(fields, config.model.path)).parts
    except BadInput as error:
        raise BadInput(f"{error}; set gpu_memory_utilization in engine.server.options") from None
    if config.run.loop == "async":
        return sum(parts.values())
    from rollkeel.memory.residency import ENGINE, place

    def held(phase: str) -> int:
        kept = ("weights", "master remainder", "moments", "reference model")
        return sum(parts[name] for name in kept if place(name, phase, config.memory.offload) == "device")

    return max(map(held, ENGINE))


def beside_cache(config: Config, fields: Mapping[str, Any]) -> int | None:
    """Bytes that the run holds of the embedded engine's device beside KV, in the fullest of the phases in which KV lies there.

    `config`: `settled`. With prompts as long as `engine.max_length` allows, or of `LONG` tokens. None for an architecture whose sizes are
    not known here.
    """
    try:
        shape = shape_from(fields, config.model.path)
    except BadInput:
        return None
    from rollkeel.memory.residency import PHASES, residency

    longest = config.engine.max_length or min(shape.context, LONG + config.sampling.max_new_tokens)
    setting = Setting(prompt=max(1, longest - config.sampling.max_new_tokens))
    found = residency(config, shape, config.memory.offload, setting)
    if config.clustered and config.cluster.placement == "disaggregated":
        return sum(found.sizes[name] for name in OF_ENGINE if name != KV)
    return max(found.held(phase) - found.sizes[KV] for phase in PHASES if found.places[phase][KV] == "device")


def phases(config: Config, shape: Shape, setting: Setting = Setting()) -> dict[str, int]:
    """Bytes of the device in each phase with `memory.offload`, for `auto` the fewest that there can be; empty without."""
    if (level := config.memory.offload) == "none":
        return {}
    from rollkeel.memory.residency import PHASES, residency

    found = residency(config, shape, "all" if level == "auto" else level, setting)
    return {phase: found.held(phase) for phase in PHASES}


def needed(config: Config, shape: Shape, setting: Setting = Setting()) -> int:
    """Bytes of the device: of the largest phase, or of everything where nothing leaves it."""
    held = phases(config, shape, setting)
    return max(held.values()) if held else plan(config, shape, setting).total


def activations(config: Config, shape: Shape, setting: Setting, tokens: int) -> dict[str, int]:
    """What a pass keeps for its backward, and what the backward adds: the logits of a chunk, or one layer later on."""
    size, recompute = SIZES[config.model.dtype], config.train.recompute
    again = recompute.of(shape.layers)
    kernels = not setting.cpu and config.mesh.tensor == 1
    plain = setting.cpu and size == 4
    lora = config.train.lora
    tiled = plain and _tiled(shape) and not (lora.rank and lora.experts)
    layer = layer_bytes(shape, size, "gpu" if kernels else "tiles" if tiled else "cpu" if plain else "")
    inputs = (shape.width + (shape.queries if recompute.mode == "selective" else 0)) * size
    experts = max(1, shape.experts)
    pair = 3 * shape.width + 3 * shape.mlp
    between = shape.chosen * pair if shape.experts else 2 * max(shape.mlp, shape.queries)
    between = shape.width if tiled else between
    working = 4 * shape.width + size * between
    matrix = 0 if config.train.lora.rank else 4 * shape.width * shape.mlp * (1 if experts == 1 else 3 * experts)
    low = kernels and size == 2
    wide = CHUNK * max(1, min(WIDE, WIDE_BYTES // (6 * shape.vocab * CHUNK))) if low else CHUNK
    each = 6 if low else 4 if setting.cpu else 8
    logits = each * min(wide, tokens) * shape.vocab + min(KEPT_BYTES, tokens * shape.vocab * 4)
    head = 0 if config.train.lora.rank else 4 * shape.vocab * shape.width * (2 if shape.tied else 1)
    ends = shape.width * (4 + 2 * size) + 2 * size * shape.head
    whole = (shape.layers - again) * layer  # which is gone when the first layer is computed again
    most = max(tokens * ends + logits + head, tokens * working + matrix if whole else 0)
    if again:
        most = max(most, tokens * (layer + working - whole) + matrix)
    # Adapters are kept as the numbers that they were multiplied in, too.
    copies = size * shape.adapters(lora) * (shape.layers - again) // shape.layers if low else 0
    return {"activations": tokens * (again * inputs + whole) + copies, "backward": most}


def layer_bytes(shape: Shape, size: int, passes: Literal["", "cpu", "tiles", "gpu"]) -> int:
    """Bytes per token that a decoder layer keeps for its backward.

    `passes`: norms and rotary embeddings are single ones, by numba in float32, with `tiles` experts too, or by kernels, and of kernels
    SwiGLU too; else transformers' modules.
    """
    tiled = passes == "tiles"
    passes = "cpu" if tiled else passes
    # Input of a norm, its normalised form, and what goes into the products behind it.
    norm = 2 * size if passes else 4 + 2 * size
    before = size if passes == "cpu" else 0
    if shape.head_norms:
        before = size if passes else norm - size
    attention = (shape.queries + shape.keys) * (before + 2 * size) + 4 * shape.heads
    attention += size * shape.queries if passes == "cpu" else 0  # without the padding of sequences of other lengths
    kept = 2 * norm * shape.width + attention
    if not shape.experts:
        return kept + (3 if passes == "gpu" else 4) * size * shape.mlp
    pair = size * (2 * shape.width + (3 if passes == "cpu" else 4) * shape.mlp) + 24
    pair = size * 2 * shape.mlp + 16 if tiled else pair
    return kept + shape.chosen * pair + 8 * shape.experts


def _tiled(shape: Shape) -> bool:
    """Whether experts are computed a block of tokens at a time, where that is to be had."""
    if not shape.experts:
        return False
    whole = shape.width % TILE == shape.mlp % TILE == 0
    return whole and shape.width * shape.mlp <= MOST_TILED


def engine(config: Config, shape: Shape, context: int, longest: int, setting: Setting = Setting()) -> dict[str, int]:
    """Parts of the embedded engine, all slots full; weights that it shares with the trainer are the trainer's.

    Without `engine.kv_memory_gb` a GPU's cache takes more than this, of what the run leaves (`beside_cache`).
    """
    slots, size = config.engine.slots, SIZES.get(config.engine.dtype, 4)
    copies = max(1, config.engine.processes)
    block = 2 * shape.layers * shape.keys * BLOCK * (4 if config.run.parity else size)
    blocks = min(slots * (-(-context // BLOCK) + 1) + 1, int((config.engine.kv_memory_gb or KV_GB) * 2**30) // block)
    table = 8 * -(-context // BLOCK)
    slot = context * (16 + (2 * shape.layers * shape.chosen if config.rollout.routing != "off" else 0)) + table
    keys = slots * longest
    # A GPU's kernels gather keys and values for prompts alone, in a pass of so many; elsewhere two buffers are twice as long as needed.
    gathered = 2 * min(keys, PROMPTS) if size == 2 and not setting.cpu else 4 * keys
    weights = size * shape.parameters if two_copies(config) or config.clustered else 0
    return {
        "engine's weights": copies * (weights + 4 * shape.adapters(config.train.lora)),
        KV: copies * blocks * block,
        "engine's buffers": copies * (slots * slot + gathered * shape.keys * size),
    }


def published(config: Config, shape: Shape) -> int:
    """What `sync.kind` keeps in the host's memory: the weights as they were served last, and the newest deltas."""
    if config.sync.kind == "full" or no_deltas(config, "actors" if config.clustered else two_copies(config)):
        return 0
    kept = 0 if config.clustered else KEPT  # ranks keep no deltas
    return int((1 + kept) * SIZES.get(config.engine.dtype, 4) * shape.parameters)


def with_values(config: Config, section: str, **values: Any) -> Config:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})
