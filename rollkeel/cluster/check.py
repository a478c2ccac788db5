"""What a config cannot ask of a cluster, refused before Ray is started. Imports no Ray."""

from __future__ import annotations

import importlib.util
import os
import socket
from collections.abc import Mapping

from rollkeel import plugins
from rollkeel.config import Config
from rollkeel.errors import BadInput

LOOPBACK = "127.0.0.1"
CONNECT_S = 5.0
"""Longest wait for a cluster's address to answer."""


def ranked(config: Config) -> Config:
    """The config with a mesh that says what `cluster.trainers` means, and the other way round. Raises `BadInput` if they differ."""
    mesh, asked = config.mesh, config.cluster.trainers
    if asked is not None and mesh.size != asked:
        sizes = " × ".join(f"{name}={size}" for name, size in mesh.model_dump().items() if size > 1)
        raise BadInput(
            f"cluster.trainers: expected {mesh.size}, the ranks of train.mesh {sizes}, got {asked}; set one to match, or leave"
            " cluster.trainers out"
        )
    train = config.train.model_copy(update={"mesh": mesh})
    cluster = config.cluster.model_copy(update={"trainers": mesh.size, "engines": config.cluster.engines or 1})
    return config.model_copy(update={"train": train, "cluster": cluster})


def check_cluster(config: Config) -> None:
    """Raises `BadInput` for what does not run over a cluster."""
    if importlib.util.find_spec("ray") is None:
        raise BadInput(
            "cluster: expected Ray, which is not installed; pip install rollkeel[cluster], or leave cluster.* and train.mesh out"
        )
    _tell_ray(config)
    config = ranked(config)
    mesh, what = config.train.mesh, "a cluster"
    ranks = mesh.size
    refused = {
        f"engine.server.url={config.engine.server.url}": config.engine.server.url is not None,
        f"engine.processes={config.engine.processes}": config.engine.processes > 0,
        f"train.processes={config.train.processes}": config.train.processes > 1,
    }
    if ranks > 1:
        what, plain = f"{ranks} ranks", ranks == mesh.replicate * mesh.shard
        known = ("float32", "bfloat16", "float16") if plain else ("float32", "bfloat16")
        refused |= {
            "train.compile=true": config.train.compile,
            f"train.lora.rank={config.train.lora.rank}": config.train.lora.rank > 0 and mesh.expert * mesh.tensor > 1,
            "run.parity=true": config.run.parity,
            f"experiment.rounding={config.experiment.rounding}": config.experiment.rounding != "none",
            f"model.dtype={config.model.dtype}": config.model.dtype not in known,
            "train.reduce=tree": config.train.reduce == "tree" and not plain,
            f"train.moments={config.train.moments}": config.train.moments == "int8",
        }
    for setting in (setting for setting, there in refused.items() if there):
        raise BadInput(f"{setting}: does not run on {what} yet; leave it out, or run in one process")
    if (least := config.cluster.engines_min) is not None:
        if least > (config.cluster.engines or 1):
            raise BadInput(
                f"cluster.engines_min: expected at most cluster.engines={config.cluster.engines or 1}, got {least}"
            )
        if config.cluster.placement == "colocated":
            raise BadInput(
                "cluster.engines_min: engines of cluster.placement=colocated have the places of ranks, and cannot leave; set"
                " disaggregated"
            )
    if config.cluster.placement == "colocated" and config.run.loop == "async":
        raise BadInput(
            "cluster.placement=colocated: engines and ranks take turns, with run.loop=async they would not; set disaggregated"
        )
    if config.engine.kind != "local" and config.cluster.placement == "colocated":
        raise BadInput(
            f"engine.kind={plugins.short(config.engine.kind)}: keeps its memory while ranks train; set"
            " cluster.placement=disaggregated, or engine.kind=local"
        )
    if config.engine.kind != "local" and config.experiment.schedule is not None:
        raise BadInput(
            f"experiment.schedule={config.experiment.schedule}: this engine does not count decode steps; use engine.kind=local"
        )
    if (address := address_of(config)) is not None:
        reach(address)


def address_of(config: Config) -> str | None:
    """`cluster.address`; `auto` is the cluster of the Ray job that this process is. Raises `BadInput` where it is none."""
    address = config.cluster.address
    if address != "auto":
        return address
    if not (found := os.environ.get("RAY_ADDRESS")):
        raise BadInput("cluster.address=auto: expected RAY_ADDRESS, which Ray sets for a job; give HOST:PORT")
    return found


def on_loopback(address: str | None) -> bool:
    """True if a cluster at `address` is on this machine alone; None is one that is started here."""
    return address is None or address.startswith("127.")


def _tell_ray(config: Config) -> None:
    """What Ray reads when it is imported."""
    if on_loopback(address := address_of(config)):
        # Or it looks for an address that other machines know, and waits for ever where there is none.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        if address is None:  # nobody else is on the loopback of a run
            os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")  # what died is told in one line, by the call to it


def reach(address: str) -> None:
    """Raises `BadInput` unless something listens at `HOST:PORT`: Ray itself would ask for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise BadInput(f"cluster.address: expected HOST:PORT of a Ray cluster's head, got {address!r}")
    try:
        socket.create_connection((host, int(port)), CONNECT_S).close()
    except OSError as error:
        raise BadInput(
            f"cluster.address: nothing listens at {address} ({error.strerror or error}); start one with ray start --head, or set"
            " it to null and one is started on this machine"
        ) from None


def refuse_others(name: str, there: Mapping[str, str], own: Mapping[str, str]) -> None:
    """Raises `BadInput` where the actor `name` has other versions of what decides a run's bits than this process."""
    for package, version in own.items():
        if there.get(package) != version:
            raise BadInput(
                f"cluster: {name} has {package} {there.get(package)}, this process has {version}; install the same on all nodes"
            )
