"""A run over a Ray cluster, as the loop sees it: implements `rollkeel.loop.machines.Machines`.

controller: the loop, prompts ── calls, numbers per token ──▶ ranks: the trainer
     │ │                                                        │ weights, in buckets
     │ └───────── requests, tokens ─────────▶ engines ◀─────────┘
     └─ texts, actions ─▶ graders
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from rollkeel.cluster import logs, start
from rollkeel.cluster.check import ranked, refuse_others
from rollkeel.cluster.elastic import ElasticEngine, Seats
from rollkeel.cluster.engine_actor import Beside
from rollkeel.cluster.grader import GraderActor
from rollkeel.cluster.graders import GraderActors
from rollkeel.cluster.kept import KeptRanks
from rollkeel.cluster.publish import StreamPublisher
from rollkeel.cluster.pulse import CONTROL
from rollkeel.cluster.ranks import Rank
from rollkeel.cluster.scorer import ActorScorer, ScorerActor, reward_models
from rollkeel.cluster.skeleton import skeleton
from rollkeel.cluster.trainer import RemoteTrainer
from rollkeel.cluster.wanted import asked
from rollkeel.config import Config
from rollkeel.errors import BadInput
from rollkeel.events import EventLog
from rollkeel.host import versions
from rollkeel.loop.assemble import device_of
from rollkeel.loop.machines import Publish, Restarts
from rollkeel.loop.room import beside_engine
from rollkeel.models.names import checkpoint_views
from rollkeel.models.numerics import OVERRIDE
from rollkeel.protocols import Engine
from rollkeel.record.checks import Finding, unreached
from rollkeel.record.live import LiveView
from rollkeel.record.runfolder import RunFolder
from rollkeel.record.stopping import StopFlag
from rollkeel.sync.proof import Probes
from rollkeel.sync.shared import engine_drops, no_deltas
from rollkeel.train.checkpoint import Written
from rollkeel.train.unfinished import Unfinished
from rollkeel.types import Rollout

HANDED = (
    "PYTHONPATH",
    "ROLLKEEL_CACHE",
    "ROLLKEEL_SANDBOX_TOKEN",
    "ROLLKEEL_SERVER_PYTHON",
    "HF_HOME",
    "HF_HUB_OFFLINE",
    "HF_TOKEN",
    "TOKENIZERS_PARALLELISM",
)
"""Variables that actors get from this process."""


class RayMachines:
    """Ranks and engines as actors. Weights never come to this process."""

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        view: LiveView,
        *,
        sampling: bool = True,
        loading: bool = True,
        restarts: Restarts | None = None,
    ) -> None:
        """Start everything and, if there is `loading`, load the start model on the ranks. `sampling`: without, there are no
        engines. `restarts`: of ranks, shared with who begins again from a checkpoint; by default `cluster.restarts` of its own."""
        self._config = config = ranked(config)
        self._folder, self._view = folder, view
        self._count = self._wanted() if sampling else 0
        self._gpus = int(device_of(config).type == "cuda")
        self._trainer: RemoteTrainer | None = None
        self._told: dict[str, Any] = {}
        self._phase, self._lost = "", -1
        with ExitStack() as made:
            lora = config.train.lora if config.train.lora.rank else None
            self.policy = replace(skeleton(config.model), lora=lora)
            if config.memory.offload != "none":
                from rollkeel.loop.resident import settled, tell

                self._config = config = settled(config, self.policy.model.config, device_of(config))
                tell(config, self.policy.model.config, folder.events)
            if start.connect(config, start.cpus_of(config, self._count)):
                made.callback(start.disconnect)
            made.enter_context(start.watched())
            self._places = start.Places(config, min(self._count, self._needed()), self._gpus)
            made.callback(self._places.remove)
            self._ranks = KeptRanks(self._actors, self._meet, self._say, restarts or Restarts(config.cluster.restarts))
            made.callback(self._ranks.close)
            self._engine = self._engines()
            made.callback(self._engine.end)
            self._graders = self._helpers()
            if self._graders is not None:
                made.callback(self._graders.close)
            self._meet()
            graders = ""
            if self._graders is not None:
                own = versions()
                self._graders.begin(lambda name, there: refuse_others(name, there, own))
                graders = f", {len(self._graders.parts)} graders"
            placement = config.cluster.placement
            view.note(f"cluster: {len(self._ranks.actors)} trainer ranks, {self._count} engines{graders}, {placement}")
            self._findings = self._ranks.call("load") if loading else []
            view.actors = self.states
            self._ended = made.pop_all()

    @property
    def checksum(self) -> int:
        """Of what the engines serve."""
        return self._engine.checksum

    def findings(self) -> list[Finding]:
        return [*self._findings, *unreached(self.policy.model)]

    def warm_start(self, view: LiveView, stop: StopFlag, events: EventLog, kept: Unfinished) -> None:
        """On the ranks; one alone has the bits of one process."""
        _ = self._engine.capabilities  # a model that engines refuse is refused now, and not behind it
        self._ranks.call("warm_start", stop=stop)

    def sft(self, stop: StopFlag) -> dict[str, float]:
        """Supervised training alone, without a cache; see `rollkeel.loop.warm_start.sft`."""
        metrics = self._ranks.call("sft", stop=stop)
        self._ranks.call("begin")
        return metrics

    def reward_model(self, pairs: Any, out: Path, stop: StopFlag) -> dict[str, float]:
        """Train one on ranks that have loaded nothing; see `rollkeel.loop.reward_model`."""
        return self._ranks.call("reward_model", ray.put(pairs), str(out.resolve()), stop=stop)

    def trainer(self) -> RemoteTrainer:
        self._told = self._ranks.call("begin")
        about = {"replays": self._config.rollout.routing == "replay"}
        self._trainer = RemoteTrainer(self._ranks, self._told["padded"], self._config.cluster.deadline_s, **about)
        return self._trainer

    def engine(self, folder: RunFolder) -> tuple[Engine, str]:
        _ = self._engine.capabilities  # which waits for them to start
        for part in (p for p in self._engine.parts if not p.dead):
            host, pid = part.place
            folder.events.emit("actor", name=f"engine-{part.index}", host=host, pid=pid)
        return self._engine, "engines are actors with memory of their own"

    def graders(self) -> GraderActors | None:
        return self._graders

    def publisher(self, engine: Engine, probes: Probes | None, *, shared: bool) -> Publish:
        assert self._trainer is not None
        assert engine is self._engine
        kind = "full" if no_deltas(self._config, "actors") else self._config.sync.kind
        stream, trainer = StreamPublisher(self._engine, self._trainer, kind), self._trainer
        ask = None
        if (
            probes is not None and self._config.train.mesh.tensor == 1
        ):  # else one rank would hold the whole model for it
            ask = replace(probes, trainer=lambda sequences: self._ranks.call("probe", sequences))
        adapters = self._config.train.lora.rank > 0
        if self._config.run.loop != "async":  # there the trainer's weights may have changed since
            self._engine.again = lambda to: self._again(stream, to)
        keeps = self._keeps()

        def publish() -> Mapping[str, float]:
            told = stream.publish(None, trainer.version, adapters, ask)
            if keeps:
                self._ranks.keep()
            return told

        return publish

    def _keeps(self) -> bool:
        """Whether ranks leave their states in memory."""
        if not self._config.cluster.peer_copies or self._config.memory.offload != "none":
            return False
        if not (room := self._ranks.room(self._told["state_bytes"])):
            mb = self._told["state_bytes"] / 2**20
            self._view.note(
                f"cluster.peer_copies: off, Ray's object store has no room for states of {mb:,.0f} MB a rank; a lost rank costs the"
                " steps since the newest checkpoint"
            )
        return room

    def precision(self) -> dict[str, Any]:
        return self._told["precision"]

    def enter(self, phase: str) -> dict[str, float]:
        if self._config.memory.offload == "none":
            return {}
        self._phase = phase
        return self._ranks.call("enter", phase, [part.place for part in self._engine.parts])

    def record(self, path: Path, rollouts: Sequence[Rollout], about: Mapping[str, Any]) -> None:
        self._ranks.call("record", str(path), ray.put(list(rollouts)), about)

    def save_model(self, folder: Path) -> Written:
        return self._ranks.call("save_model", str(folder))

    def save(self, folder: Path) -> Written:
        return self._ranks.call("save", str(folder))

    def load(self, state: Mapping[str, Any] | None, folder: Path | None = None) -> list[str]:
        assert self._trainer is not None
        assert folder is not None  # the state itself says next to nothing
        return self._trainer.load(str(folder))

    def begin_again(self) -> None:
        self._engine.empty()
        self._trainer, self._phase = None, ""
        self._ranks.begin_from_nothing()
        self._findings = self._ranks.call("load")

    def close(self) -> None:
        """End every actor; a Ray that was started for this run ends too."""
        self._view.actors = dict
        self._ended.close()

    def states(self) -> dict[str, str]:
        """What every actor does now."""
        found = {f"trainer-{i}": self._ranks.doing or "idle" for i in range(len(self._ranks.actors))}
        for part in self._engine.parts:
            found[f"engine-{part.index}"] = part.dead or (f"{len(part.flying)} requests" if part.flying else "idle")
        return found | (self._graders.states() if self._graders is not None else {})

    # -- start ---------------------------------------------------------------------------------------------------------

    def _actors(self) -> list[Any]:
        config, folder = self._config, str(self._folder.path.resolve())
        fixed: dict[str, Any] = {"max_restarts": 0, "max_task_retries": 0, "concurrency_groups": {CONTROL: 1}}
        world = config.train.mesh.size

        def made(rank: int) -> Any:
            options = {**fixed, **self._surroundings(f"trainer-{rank}"), **self._places.rank(rank)}
            return ray.remote(**options)(Rank).remote(config, rank, world, folder)

        return [made(rank) for rank in range(world)]

    def _engines(self) -> ElasticEngine:
        config, hf_config = self._config, self.policy.model.config
        device = "cuda" if self._gpus else "cpu"
        about = {"device": device, "max_length": None, "lora": self.policy.lora, "offload": engine_drops(config)}
        about |= {"renewals": config.cluster.restarts, "wanted": self._wanted, "threads": config.run.threads}

        def take(index: int) -> dict[str, Any]:
            return {**self._places.engine(index), **self._surroundings(f"engine-{index}")}

        seats = Seats(take, self._places.there, self._places.leave)
        count = min(self._count, self._needed())
        if config.engine.kind != "local":
            shapes = {name: tuple(view.shape) for name, view in checkpoint_views(self.policy.model).items()}
            about |= {"beside": Beside(shapes, config.sync.buffer_mb)}
        elif self._gpus:
            about |= {"planned": beside_engine(config, self.policy), "others": True}
        engine = ElasticEngine(hf_config, config.engine, seats, count, least=config.cluster.engines_min or 1, **about)
        engine.tell = self._of_engine
        return engine

    def _helpers(self) -> GraderActors | None:
        config = self._config
        if not (config.cluster.graders and self._count):
            return None

        def start(index: int) -> Any:
            fixed: dict[str, Any] = {"max_restarts": 0, "max_task_retries": 0, **self._places.grader(index)}
            return ray.remote(**fixed, **self._surroundings(f"grader-{index}"))(GraderActor).remote(config)

        def tell(what: str, **about: Any) -> None:
            self._folder.events.emit(what, **about)
            if what == "grader_lost":
                self._view.note(f"{about['name']} {about['why']}; others do what it did")

        made = GraderActors(start, config.cluster.graders, config.reward.graders, config.cluster.restarts, tell)
        made.scorers = {path: self._scorer(i, path, tell) for i, path in enumerate(reward_models(config))}
        return made

    def _scorer(self, index: int, path: str, tell: Callable[..., None]) -> ActorScorer:
        config, name = self._config, f"reward-model-{index}"
        options = {"max_restarts": 0, "max_task_retries": 0, **self._places.reward_model(index)}
        options |= self._surroundings(name)
        about = (path, str(device_of(config))), config.cluster.deadline_s, config.cluster.restarts, tell
        return ActorScorer(name, lambda: ray.remote(**options)(ScorerActor).remote(config.run.threads), *about)

    def _wanted(self) -> int:
        """Engines that the run is to have now."""
        return asked(self._folder.path, self._config)

    def _needed(self) -> int:
        """Engines with which the run begins; others join."""
        return self._config.cluster.engines_min or self._count

    def _again(self, stream: StreamPublisher, to: Sequence[Any]) -> None:
        """Bring weights, which may be away, to engines in the middle of a phase."""
        phase = self._phase
        self.enter("publish")
        stream.again(to)
        self.enter(phase)

    def _of_engine(self, what: str, part: Any) -> None:
        """Note what became of an engine, in the log and for people."""
        name, known = f"engine-{part.index}", self._lost == part.index
        self._lost = part.index if what == "lost" else -1
        if what == "lost" and known:
            return  # he who was to take its place was lost, too
        if what == "lost":
            self._folder.events.emit("engine_lost", name=name, why=part.dead)
            self._view.note(f"{part.dead}{'; another one takes its place' * part.renewing}")
        elif what == "left":
            self._folder.events.emit("engine_left", name=name, why=part.dead)
        else:
            host, pid = part.place
            self._folder.events.emit("actor", name=name, host=host, pid=pid)
            self._folder.events.emit(f"engine_{what}", name=name)

    def _surroundings(self, name: str) -> dict[str, Any]:
        """Ray's option with what the actor `name` needs of this process's environment, wherever it is."""
        threads = {"OMP_NUM_THREADS": str(self._config.run.threads), "OMP_WAIT_POLICY": "passive"}
        threads[OVERRIDE] = str(int(self._config.run.tf32))
        handed = {key: os.environ[key] for key in HANDED if key in os.environ}
        return {"runtime_env": {"env_vars": threads | handed | logs.variables(self._folder.path, name)}}

    def _meet(self) -> None:
        """Look at what the ranks are and let them meet. Raises `BadInput` for one that is not as this process."""
        ranks, own = self._ranks, versions()
        for i, about in enumerate(ranks.gather("about", patience_s=self._config.cluster.deadline_s)):
            ranks.pids.append(about["pid"])
            ranks.nodes.append(about["node"])
            ranks.names[i] = f"trainer rank {i} (node {about['host']}, process {about['pid']})"
            self._folder.events.emit("actor", name=f"trainer-{i}", host=about["host"], pid=about["pid"])
            refuse_others(ranks.names[i], about["versions"], own)
            if not about["folder"]:
                raise BadInput(
                    f"run.dir: {ranks.names[i]} does not see {self._folder.path.resolve()}; choose a folder on storage that"
                    " all nodes share"
                )
        host, port = ranks.first("address")
        ranks.call("join", host, port, self._config.cluster.deadline_s)

    def _say(self, said: tuple[Any, ...]) -> None:
        """What a rank says to the view or the log of the run."""
        whom, method, args, named = said
        getattr(self._view if whom == "view" else self._folder.events, method)(*args, **named)
