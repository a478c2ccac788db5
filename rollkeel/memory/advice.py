"""What a plan means for somebody: does it fit, what would make it fit or quicker, and what it takes of a disk."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from rollkeel.config import Config, LoraConfig
from rollkeel.config_cluster import ClusterConfig, MeshConfig
from rollkeel.memory.plan import DEVICES, GB, RESERVED, Setting, needed, phases, plan, with_values
from rollkeel.memory.shapes import Shape, shape_of

SHARDS = tuple(2**n for n in range(1, 11))
"""Numbers of shards that `advice` tries."""


def most_tokens(config: Config, shape: Shape, space: int, setting: Setting = Setting()) -> int:
    """The largest `train.micro_batch_tokens` with which the run fits into `space` bytes; 0 if not even one sequence does."""

    def fits(tokens: int) -> bool:
        return needed(with_values(config, "train", micro_batch_tokens=tokens), shape, setting) <= space

    if not fits(1):
        return 0
    low, high = 1, 2
    while fits(high) and high < 2**40:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def fewest_layers(config: Config, shape: Shape, space: int, setting: Setting = Setting()) -> str:
    """The smallest `train.checkpointed_layers` with which the run still fits into `space` bytes, as a setting; empty if that is today's.

    Where the cache takes what the run leaves of a GPU, at least half of that is left to it.
    """
    total = needed(config, shape, setting)
    if config.engine.kind == "local" and config.engine.kv_memory_gb is None and not setting.cpu:
        space -= max(0, space - total) // 2

    def fits(layers: int) -> bool:
        return needed(with_values(config, "train", checkpointed_layers=layers), shape, setting) <= space

    layers = next(filter(fits, range(config.train.recompute.of(shape.layers))), None)
    return "" if layers is None else f"train.checkpointed_layers={layers}"


def advice(config: Config, shape: Shape, space: int, setting: Setting = Setting()) -> str:
    """One line for a run that does not fit: the smallest change that makes it fit."""
    for changed in _changes(config):
        if most := most_tokens(changed, shape, space, setting):
            tokens = min(most, config.train.micro_batch_tokens)
            changed = with_values(changed, "train", micro_batch_tokens=tokens)
            said = _differences(config, changed)
            layers = fewest_layers(changed, shape, space, setting)
            if not layers and changed.train.checkpointed_layers != config.train.checkpointed_layers:
                layers = "train.checkpointed_layers=null"
            return f"set {' '.join([*said, layers]).strip()}"
    lora = LoraConfig(rank=32, experts=True)
    adapted = with_values(_low(config), "train", checkpointing="layer", checkpointed_layers=None, lora=lora)
    more = _more_shards(config, shape, space, setting)
    if not config.train.lora.rank and most_tokens(adapted, shape, space, setting):
        said = "no setting trains every weight there; adapters of rank 32 (LoRA) on a frozen bfloat16 model would fit"
        return said + (f", and so would {more}" if more else "")
    if more:
        return f"set {more}: ranks that hold a part of the model each"
    return "lower sampling.max_new_tokens, engine.slots and engine.kv_memory_gb, or take a smaller model"


def _changes(config: Config) -> Iterator[Config]:
    """From the one that changes least: layers that are computed again, numbers of 16 bits, moments of 8."""

    def with_again(changed: Config) -> Iterator[Config]:
        yield changed
        yield with_values(changed, "train", checkpointing="layer", checkpointed_layers=None)

    yield from with_again(config)
    yield from with_again(_low(config))
    yield from with_again(with_values(_low(config), "train", moments="int8"))


def _low(config: Config) -> Config:
    """With numbers of 16 bits."""
    config = with_values(config, "model", dtype="bfloat16")
    return with_values(config, "engine", dtype="bf16")


def _differences(config: Config, changed: Config) -> list[str]:
    """Settings of `changed` that are others in `config`, as words for a command."""
    old, new = _settings(config), _settings(changed)
    return [f"{key}={value}" for key, value in new.items() if value != old[key]]


def _settings(config: Config) -> dict[str, Any]:
    return {
        "model.dtype": config.model.dtype,
        "engine.dtype": config.engine.dtype,
        "train.moments": config.train.moments,
        "train.checkpointing": config.train.checkpointing,
        "train.micro_batch_tokens": config.train.micro_batch_tokens,
    }


def on_disk(config: Config, shape: Shape) -> int:
    """Bytes of a checkpoint: what training goes on from, and the model in a folder of its own."""
    if config.clustered:  # whole, with moments in float32 whatever ranks hold
        config = with_values(config, "train", mesh=MeshConfig(), moments="float32")
        config = config.model_copy(update={"cluster": ClusterConfig()})
    parts = plan(config, shape).parts
    kept = sum(parts[name] for name in ("master remainder", "moments", "reference model"))
    trained = 4 * shape.adapters(config.train.lora) if config.train.lora.rank else parts["weights"]
    return kept + trained * (2 if config.checkpoint.every else 1)


def _more_shards(config: Config, shape: Shape, space: int, setting: Setting) -> str:
    """The fewest shards, beside what the mesh has else, with which the run fits; empty if none do."""
    for count in (n for n in SHARDS if n > config.mesh.shard):
        wider = with_values(config, "train", mesh=config.mesh.model_copy(update={"shard": count}))
        if most_tokens(with_values(wider, "cluster", trainers=None), shape, space, setting):
            return f"train.mesh.shard={count}"
    return ""


def answer(config: Config, device: str, setting: Setting = Setting()) -> dict[str, Any]:
    """Everything `rollkeel plan` says."""
    shape = shape_of(config.model.path, config.model.overrides)
    space = int(DEVICES[device] * (1 - RESERVED)) if device in DEVICES else _host()
    made = plan(config, shape, setting)
    total = needed(config, shape, setting)
    fits = total <= space
    return {
        "device": device,
        "bytes": {name: count for name, count in made.parts.items() if count},
        "devices": made.devices,
        "phases": phases(config, shape, setting),
        "total": total,
        "available": space,
        "fits": fits,
        "micro_batch_tokens": made.tokens,
        "most_micro_batch_tokens": most_tokens(config, shape, space, setting),
        "checkpoint": on_disk(config, shape),
        "quicker": fewest_layers(config, shape, space, setting) if fits else "",
        "advice": "" if fits else advice(config, shape, space, setting),
    }


def lines(found: Mapping[str, Any]) -> list[str]:
    """An `answer` for people."""
    out = [f"{name:18} {count / GB:10.2f} GB" for name, count in found["bytes"].items()]
    out += [f"in {phase:15} {count / GB:10.2f} GB" for phase, count in found["phases"].items()]
    if len(found["devices"]) > 1:
        out += [f"each {name:13} {count / GB:10.2f} GB" for name, count in found["devices"].items()]
    out.append(
        f"{'at most' if found['phases'] or len(found['devices']) > 1 else 'together':18} {found['total'] / GB:10.2f} GB of {found['available'] / GB:.0f} on {found['device']}"
    )
    out.append(f"{'a checkpoint':18} {found['checkpoint'] / GB:10.2f} GB of disk")
    if found["fits"]:
        out.append(f"fits; train.micro_batch_tokens may be {found['most_micro_batch_tokens']:,}")
        return [*out, f"quicker with {found['quicker']}, which fits too"] if found["quicker"] else out
    return [*out, f"does not fit: {found['advice']}"]


def _host() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
