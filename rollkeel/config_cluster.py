"""Settings of runs on several ranks and machines: the mesh that trains, the Ray cluster that carries it, and how weights travel."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field

from rollkeel.config_data import Node


class MeshConfig(Node):
    """Ranks that train one model together, see docs/cluster.md; a run has the product of the sizes."""

    replicate: int = Field(default=1, ge=1)
    """Copies of the model; each trains on its share of the micro-batches."""
    shard: int = Field(default=1, ge=1)
    """Parts of each copy: a rank holds one part of parameters, gradients and moments (FSDP2)."""
    expert: int = Field(default=1, ge=1)
    """Ranks that hold the experts of every layer together."""
    context: int = Field(default=1, ge=1)
    """Ranks that share the tokens of every micro-batch, for sequences too long for one (Ulysses)."""
    tensor: int = Field(default=1, ge=1)
    """Ranks that share heads, widths and vocabulary of every layer."""

    @property
    def size(self) -> int:
        """Ranks in all."""
        return math.prod(self.model_dump().values())


class ClusterConfig(Node):
    """Trainer and engines as actors of a Ray cluster (extra `cluster`). Without `address`, `trainers`, `engines`, `graders` and a mesh
    a run is one process."""

    address: str | None = None
    """`HOST:PORT` of a running Ray cluster to join, `auto` for that of the Ray job that runs this; None starts Ray on this machine for
    the time of the run."""
    trainers: int | None = Field(default=None, ge=1)
    """Ranks that train; without a `train.mesh` they shard the model. None takes what the mesh says."""
    engines: int | None = Field(default=None, ge=1)
    """Engine actors; None is one. `rollkeel scale RUN N` asks a run that goes on for another number."""
    graders: int = Field(default=0, ge=0)
    """Actors that grade and hold the environments of episodes, with `reward.graders.workers` CPUs each; 0 leaves that to the process that
    runs the loop. Rewards do not depend on it."""
    engines_min: int | None = Field(default=None, ge=1)
    """Fewest engines with which a run begins and goes on; up to `engines` join when there are places for them. None: all of them to
    begin, one to go on."""
    placement: Literal["colocated", "disaggregated"] = "disaggregated"
    """`disaggregated` gives ranks and engines places of their own; `colocated` puts engines in the places of ranks, and they take turns
    (not with `run.loop=async`)."""
    restarts: int = Field(default=3, ge=0)
    """How many lost engines a run replaces, how many lost graders, and how often it goes on after a rank was lost, from memory or from a
    checkpoint."""
    peer_copies: bool = True
    """Every rank leaves its state in the object store of its node after a publication, with a copy on another rank's node: ranks that are
    lost begin again from there and not from a checkpoint. Not with `memory.offload`, and not where the store has no room."""
    deadline_s: float = Field(default=600.0, gt=0)
    """Longest wait of ranks for each other, and of a run for places, actors and weights."""

    @property
    def asked(self) -> bool:
        """Whether anything here asks for a cluster."""
        return self.graders > 0 or any(value is not None for value in (self.address, self.trainers, self.engines))


class SyncConfig(Node):
    """How weights come to an engine that has a copy of its own, see docs/engines.md."""

    kind: Literal["full", "delta", "auto"] = "full"
    """What is sent: all weights, the elements that changed since the last publication (which costs a copy of the served weights), or with
    `auto` that where few did. For the embedded engine without adapters, and over a cluster for servers too."""
    transport: Literal["auto", "shm", "ray"] = "auto"
    """How weights travel over a cluster: memory that rank and engine share (`shm`), Ray's object store, or the first on one host."""
    buffer_mb: float = Field(default=64.0, gt=0)
    """Most memory for weights on their way, MB: of a rank of a cluster, and of a run with a vLLM server on its own host."""


class MemoryConfig(Node):
    """What leaves the device of trainer and engine while the other one computes, see docs/memory.md."""

    offload: Literal["none", "optimizer", "all", "auto"] = "none"
    """What waits in host memory, or of a CPU in a file, while nobody needs it: nothing, moments and float32 masters (`optimizer`), or the
    weights of who does not compute and the reference model too (`all`); both also drop KV between rollouts. `auto` takes the least of
    them with which the run fits its device. Bits of a run do not change."""
