"""Ray for the time of a run: started here or joined, places for its actors, and nothing of it left afterwards."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rollkeel.cluster.check import LOOPBACK, address_of, on_loopback
from rollkeel.cluster.scorer import reward_models
from rollkeel.cluster.stream import STORE
from rollkeel.config import Config
from rollkeel.engines.same_device import devices_of
from rollkeel.errors import BadInput, RunStopped
from rollkeel.host import within

STORE_BYTES = 512 << 20
"""Object store of a Ray that is started here: a few buckets of weights, and batches."""
GONE_S, LOOK_S = 10.0, 2.0
"""How long Ray's head may not answer, and how often it is asked."""
_GONE = threading.Event()
"""Set once Ray's head is gone."""
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


@contextmanager
def watched() -> Iterator[None]:
    """Inside, `RunStopped` is raised in the main thread once Ray's head has not answered for `GONE_S`: Ray itself ends this process
    without a word, after half a minute to a minute. Nothing is watched outside of the main thread, which alone can be interrupted."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _GONE.clear()
    address, over = ray.get_runtime_context().gcs_address, threading.Event()
    host, _, port = address.rpartition(":")

    def look() -> None:
        heard = time.monotonic()
        while not over.wait(LOOK_S):
            try:
                socket.create_connection((host, int(port)), LOOK_S).close()
                heard = time.monotonic()
            except OSError:
                if time.monotonic() - heard > GONE_S:
                    _GONE.set()
                    return os.kill(os.getpid(), signal.SIGUSR2)

    def gone(*_: Any) -> None:
        if not over.is_set():
            raise RunStopped(
                f"Ray's head at {address} has not answered for {GONE_S:g} s; start the cluster again and resume the run with"
                " rollkeel train --resume"
            )

    before = signal.signal(signal.SIGUSR2, gone)
    thread = threading.Thread(target=look, daemon=True, name="rollkeel-head")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        signal.signal(signal.SIGUSR2, before)


class Places:
    """A bundle of resources for each rank, engine and grader. An engine beside the ranks has one of its own, that can come and go."""

    def __init__(self, config: Config, engines: int, gpus: int) -> None:
        """`engines`: needed to begin; `gpus`: of each rank and engine, 0 or 1. Raises `BadInput` for more than the cluster has."""
        ranks = config.train.mesh.size
        self._shared = config.cluster.placement == "colocated"
        self._bundle = {"CPU": float(config.run.threads)} | ({"GPU": 1.0} if gpus else {})
        self._engine = self._bundle | ({"GPU": float(devices_of(config.engine))} if gpus else {})
        self._grader = {"CPU": float(config.reward.graders.workers)}
        self._graders = graders = config.cluster.graders
        models = len(reward_models(config))
        self._count = count = max(ranks, engines) if self._shared else ranks
        self._engines = dict[int, PlacementGroup]()
        everything = count if self._shared else ranks + engines
        beside = [self._grader] * graders + [self._bundle] * models
        asked = f"{ranks} ranks and {engines} engines take {everything} places of {_said(self._bundle)}"
        if self._engine != self._bundle:
            asked = f"{ranks} ranks take {_said(self._bundle)} each, {engines} engines {_said(self._engine)} each"
        asked += f", {models} reward models {models} more" if models else ""
        asked += f" and {graders} graders {graders} of {_said(self._grader)}" if graders else ""
        _check([self._bundle] * count + [self._engine] * (everything - count) + beside, asked, graders > 0)
        self._group = placement_group([self._bundle] * count + beside, strategy="PACK")
        for index in range(0 if self._shared else engines):
            self._engines[index] = self._asked()
        end = time.monotonic() + config.cluster.deadline_s
        for group in [self._group, *self._engines.values()]:
            if not group.wait(max(0.0, end - time.monotonic())):
                self.remove()
                raise BadInput(
                    f"cluster: waited {config.cluster.deadline_s:g} s for {everything} places of {_said(self._bundle)}; the cluster"
                    f" has {_said(ray.cluster_resources())}, of which {_said(ray.available_resources())} are free"
                )

    def rank(self, index: int) -> dict[str, Any]:
        """Ray's options for a rank."""
        return self._options(self._group, index)

    def engine(self, index: int) -> dict[str, Any]:
        """Ray's options for an engine, whose place is asked for if it has none."""
        if self._shared:
            return self._options(self._group, index)
        if index not in self._engines:
            self._engines[index] = self._asked()
        return self._options(self._engines[index], 0, like=self._engine)

    def there(self, index: int) -> bool:
        """Whether an engine's place has come, and its node is not known to be lost."""
        group = self._group if self._shared else self._engines.get(index)
        return group is not None and placement_group_table(group).get("state") == "CREATED"

    def leave(self, index: int) -> None:
        """Give an engine's place back."""
        if index in self._engines:
            remove_placement_group(self._engines.pop(index))

    def grader(self, index: int) -> dict[str, Any]:
        """Ray's options for a grader, which has CPUs alone."""
        return {"num_cpus": self._grader["CPU"], "scheduling_strategy": _at(self._group, self._count + index)}

    def reward_model(self, index: int) -> dict[str, Any]:
        """Ray's options for a reward model; it has a place of its own, as a rank has."""
        return self._options(self._group, self._count + self._graders + index, alone=True)

    def remove(self) -> None:
        """Give all back; to a head that is gone this would be a call without an end."""
        if _GONE.is_set():
            return
        for index in list(self._engines):
            self.leave(index)
        remove_placement_group(self._group)

    def _asked(self) -> PlacementGroup:
        return placement_group([self._engine], strategy="PACK")

    def _options(
        self, group: PlacementGroup, bundle: int, alone: bool = False, like: Mapping[str, float] | None = None
    ) -> dict[str, Any]:
        share = 0.5 if self._shared and not alone else 1.0  # two actors in one place, of which one computes at a time
        like = like or self._bundle
        gpus = {"num_gpus": share * like["GPU"]} if "GPU" in like else {}
        return {"num_cpus": share * like["CPU"], "scheduling_strategy": _at(group, bundle), **gpus}


def _at(group: PlacementGroup, bundle: int) -> PlacementGroupSchedulingStrategy:
    return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)


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
