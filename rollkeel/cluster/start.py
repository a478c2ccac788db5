"""Ray for the time of a run: started here or joined, places for its actors, and nothing of it left afterwards."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rollkeel.cluster.check import LOOPBACK, address_of, on_loopback
from rollkeel.cluster.scorer import reward_models
from rollkeel.cluster.stream import STORE
from rollkeel.config import Config
from rollkeel.errors import BadInput
from rollkeel.host import within

STORE_BYTES = 512 << 20
"""Object store of a Ray that is started here: a few buckets of weights, and batches."""
JOIN_S = 60.0
"""Longest wait for a cluster whose address answers to take this process in."""


@contextmanager
def _handlers_kept() -> Iterator[None]:
    """Ray puts a handler of its own in the place of ours for SIGTERM."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            try:
                signal.signal(number, handler)
            except (ValueError, TypeError):  # not the main thread, which has no handlers either
                return


def connect(config: Config, cpus: int) -> bool:
    """Join `cluster.address`, or start a Ray of at least `cpus` CPUs on this machine, which ends with this process.

    A process that is in a cluster already stays in that one. Returns whether it has to be left again (`disconnect`). Raises `BadInput`
    for a cluster that does not take this process in."""
    if ray.is_initialized():
        return False
    address = address_of(config)
    about: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False, "namespace": "rollkeel"}
    if address is None:
        cpus = max(cpus, os.cpu_count() or 1)
        about |= {"address": "local", "num_cpus": cpus, "include_dashboard": False}
        about |= {"_node_ip_address": LOOPBACK, "object_store_memory": STORE_BYTES, "_system_config": STORE}
    else:
        about |= {"address": address} | ({"_node_ip_address": LOOPBACK} if on_loopback(address) else {})
    late = BadInput(
        f"cluster.address: {address or 'the Ray started here'} did not take this process in for {JOIN_S:g} s"
    )
    with _handlers_kept():
        try:
            with within(JOIN_S, late):
                ray.init(**about)
        except (RayError, ConnectionError, RuntimeError, ValueError, OSError) as error:
            ray.shutdown()
            where = f"{address} answers, but not as a Ray cluster of this version" if address else "Ray does not start"
            raise BadInput(f"cluster.address: {where} ({' '.join(str(error).split())[:200]})") from None
    return True


def disconnect() -> None:
    """Leave the cluster; one that `connect` started ends."""
    with _handlers_kept():
        ray.shutdown()


def cpus_of(config: Config, engines: int) -> int:
    """CPUs that the actors of a run take, if each has a place of its own."""
    graders = config.cluster.graders * config.reward.graders.workers
    return config.run.threads * (config.train.mesh.size + engines + len(reward_models(config))) + graders


class Places:
    """A bundle of resources for each rank, engine and grader."""

    def __init__(self, config: Config, engines: int, gpus: int) -> None:
        """`gpus`: of each rank and engine, 0 or 1. Raises `BadInput` for more than the cluster has."""
        ranks = config.train.mesh.size
        self._shared = config.cluster.placement == "colocated"
        bundle = {"CPU": float(config.run.threads)} | ({"GPU": 1.0} if gpus else {})
        count = max(ranks, engines) if self._shared else ranks + engines
        self._bundle, self._ranks, self._count = bundle, ranks, count
        self._grader, self._graders = {"CPU": float(config.reward.graders.workers)}, config.cluster.graders
        graders, models = self._graders, len(reward_models(config))
        self._group: PlacementGroup | None = None
        bundles = [bundle] * count + [self._grader] * graders + [bundle] * models
        asked = f"{ranks} ranks and {engines} engines take {count} places of {_said(bundle)}"
        asked += f", {models} reward models {models} more" if models else ""
        asked += f" and {graders} graders {graders} of {_said(self._grader)}" if graders else ""
        _check(bundles, asked, graders > 0)
        self._group = placement_group(bundles, strategy="PACK")
        if not self._group.wait(config.cluster.deadline_s):
            self.remove()
            raise BadInput(
                f"cluster: waited {config.cluster.deadline_s:g} s for {count} places of {_said(bundle)}; the cluster has"
                f" {_said(ray.cluster_resources())}, of which {_said(ray.available_resources())} are free"
            )

    def rank(self, index: int) -> dict[str, Any]:
        """Ray's options for a rank."""
        return self._options(index)

    def engine(self, index: int) -> dict[str, Any]:
        """Ray's options for an engine."""
        return self._options(index if self._shared else self._ranks + index)

    def grader(self, index: int) -> dict[str, Any]:
        """Ray's options for a grader, which has CPUs alone."""
        return {"num_cpus": self._grader["CPU"], "scheduling_strategy": self._strategy(self._count + index)}

    def reward_model(self, index: int) -> dict[str, Any]:
        """Ray's options for a reward model; it has a place of its own, as a rank has."""
        return self._options(self._count + self._graders + index, alone=True)

    def remove(self) -> None:
        """Give them back."""
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None

    def _options(self, bundle: int, alone: bool = False) -> dict[str, Any]:
        share = 0.5 if self._shared and not alone else 1.0  # two actors in one place, of which one computes at a time
        gpus = {"num_gpus": share} if "GPU" in self._bundle else {}
        return {"num_cpus": share * self._bundle["CPU"], "scheduling_strategy": self._strategy(bundle), **gpus}

    def _strategy(self, bundle: int) -> PlacementGroupSchedulingStrategy:
        assert self._group is not None
        return PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)


def _check(bundles: Sequence[Mapping[str, float]], asked: str, graders: bool) -> None:
    """Ray waits for ever for places that no cluster of these nodes could have."""
    nodes = [dict(node["Resources"]) for node in ray.nodes() if node["Alive"]]
    for bundle in bundles:
        node = next((n for n in nodes if all(n.get(k, 0.0) >= v for k, v in bundle.items())), None)
        if node is None:
            there = "; ".join(_said(one["Resources"]) for one in ray.nodes() if one["Alive"])
            raise BadInput(
                f"cluster: {asked}, the cluster has {there}; lower cluster.trainers, train.mesh, cluster.engines,"
                f" {'cluster.graders, reward.graders.workers ' if graders else ''}or run.threads"
            )
        for key, value in bundle.items():
            node[key] -= value


def _said(resources: Mapping[str, float]) -> str:
    named = {"CPU": "CPUs", "GPU": "GPUs"}
    return " and ".join(f"{resources[key]:g} {name}" for key, name in named.items() if resources.get(key)) or "0 CPUs"
