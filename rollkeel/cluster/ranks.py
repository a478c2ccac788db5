"""One rank of the trainer, in a process of its own: what the controller calls runs on all ranks with the same arguments.

Calls run one at a time in one thread. A second thread answers `status`, so that a rank that is stopped can be told from one
that is busy.
"""

from __future__ import annotations

import os
import pickle
import socket
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rollkeel import plugins
from rollkeel.analyzer.record import record_tensors
from rollkeel.batch.build import TrainingBatch
from rollkeel.cluster import logs, wire
from rollkeel.config import Config
from rollkeel.errors import BadInput, EngineFailure, RunStopped
from rollkeel.host import collect_as_usual, keep_freed_memory
from rollkeel.loop.assemble import build_objective, device_of
from rollkeel.loop.machines import trainer_options
from rollkeel.loop.reward_model import reward_model
from rollkeel.loop.warm_start import sft, warm_start, warm_start_key
from rollkeel.models.loading import Policy, load_policy, quiet_transformers
from rollkeel.models.names import checkpoint_views
from rollkeel.models.numerics import multiply_in_tf32, precision
from rollkeel.record.checks import too_small
from rollkeel.sync.shared import no_deltas
from rollkeel.train.checkpoint import TRAINER, Written, beneath, versions
from rollkeel.train.mesh import Mesh, join, local
from rollkeel.train.probe import SequenceScorer
from rollkeel.train.sharded import check_ranks
from rollkeel.train.soundness import Fresh
from rollkeel.train.together import UnfinishedTogether
from rollkeel.train.trainer import LocalTrainer
from rollkeel.train.unfinished import Unfinished
from rollkeel.types import FloatArray, IntArray, Rollout

FIXED = ("reference", "base")
"""Of a trainer's state: what no step changes."""


class Answer(NamedTuple):
    """What a call came to."""

    value: Any = None
    error: Exception | None = None


class Rank:
    """An actor. `run` is the one method that computes; its first argument names what."""

    def __init__(self, config: Config, rank: int, world: int, folder: str) -> None:
        """`folder`: of the run."""
        logs.write_there()
        keep_freed_memory()
        self._config = config
        self._rank = rank
        self._world = world
        self._folder = Path(folder)
        self._told: deque[tuple[Any, ...]] = deque()
        self._stop = False
        self._mesh = Mesh()
        self._objective = build_objective(config)
        self._policy: Policy | None = None
        self._trainer: LocalTrainer | None = None
        self._sender: Any = None
        self._whole: TrainingBatch | None = None
        """The batch that came last, and in `_scored` what passes said about it."""
        self._scored: dict[str, Any] = {}
        self._resident: Any = None
        self._copies: dict[int, Any] = {}

    # -- the second thread ---------------------------------------------------------------------------------------------

    def status(self, stop: bool = False) -> list[tuple[Any, ...]]:
        """What this rank has to say since the last call: method and arguments of a view or an event log. `stop`: end the warm
        start at the next safe point."""
        self._stop = self._stop or stop
        return [self._told.popleft() for _ in range(len(self._told))]

    def hold(self, rank: int, kept: Any, fixed: Any) -> None:
        """Hold a copy of what another rank kept, in this node's store."""
        self._copies[rank] = kept, fixed or self._copies.get(rank, (None, None))[1]

    # -- the first -----------------------------------------------------------------------------------------------------

    def run(self, what: str, *args: Any) -> Answer:
        """Do it. Of most only the first rank has something to say; every rank says what went wrong."""
        try:
            value = getattr(self, f"_{what}")(*args)
            return Answer(value if self._rank == 0 or what in ("about", "stream") else None)
        except Exception as error:
            logs.write_error()
            return Answer(error=error)

    def keep(self, whole: bool) -> tuple[bool, Any, Any]:
        """True; what lies here of the trainer's state; and if `whole`, what of it no step changes."""
        state = self._made.state_dict()
        fixed = {key: state.pop(key) for key in FIXED if key in state}
        return True, wire.state_out(state), wire.state_out(fixed) if whole else None

    def _take(self, fixed: Sequence[Any], kept: Sequence[Any]) -> None:
        """Go on from what a rank of this number kept, which may be in the store of another node."""
        import ray
        from ray.exceptions import RayError

        try:
            always, rest = ray.get([fixed[self._rank], kept[self._rank]])
        except RayError as error:
            raise RunStopped(f"trainer rank {self._rank}: its state is lost ({type(error).__name__})") from None
        self._made.load_state_dict(wire.state_in(always | rest))

    def _about(self) -> dict[str, Any]:
        """Where this is, and with what."""
        import ray

        there, node = (self._folder / "config.yaml").is_file(), ray.get_runtime_context().get_node_id()
        return {"host": socket.gethostname(), "pid": os.getpid(), "node": node, "versions": versions(), "folder": there}

    def _address(self) -> tuple[str, int]:
        """A free port of this node for the ranks to meet at."""
        import ray

        node = ray.util.get_node_ip_address()
        with socket.socket() as found:
            found.bind((node, 0))
            return node, found.getsockname()[1]

    def _join(self, host: str, port: int, deadline_s: float) -> None:
        """Meet the other ranks and take a place in the mesh."""
        if self._world == 1:
            return
        import torch.distributed as dist

        if host.startswith("127."):  # the host's own name may lead to an address that is not there
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        # Objects travel by the CPU there too, and wait for no GPU.
        backend = "cpu:gloo,cuda:nccl" if device_of(self._config).type == "cuda" else "gloo"
        about = {"rank": self._rank, "world_size": self._world, "timeout": timedelta(seconds=deadline_s)}
        try:
            dist.init_process_group(backend, init_method=f"tcp://{host}:{port}", **about)
        except (RuntimeError, ValueError) as error:
            raise BadInput(
                f"trainer rank {self._rank}: waited {deadline_s:g} s for {self._world} ranks to meet at {host}:{port}"
                f" ({str(error).splitlines()[0][:120]})"
            ) from None
        self._mesh = join(**self._config.train.mesh.model_dump(), device=device_of(self._config).type)

    def _load(self) -> list[Any]:
        """The start model. Returns what is wrong with its weights; raises `BadInput` for what does not run on several ranks."""
        config = self._config
        self._policy = self._loaded()
        check_ranks(self._mesh, config.train, self._policy, config.experiment.rounding, config.run.parity)
        if self._world > 1:  # only a trainer gives ranks their parts
            self._make()
        weights = [local(p) for p in self._policy.model.parameters() if p.requires_grad]
        return too_small(weights, config.train.lr, self._mesh.everyone)

    def _loaded(self) -> Policy:
        """With its weights if this rank is alone."""
        torch.set_num_threads(self._config.run.threads)
        multiply_in_tf32(self._config.run.tf32)
        quiet_transformers()
        about = {"lora": self._config.train.lora, "whole": self._world == 1}
        return load_policy(self._config.model, device_of(self._config), **about)

    def _warm_start(self) -> bool:
        """See `rollkeel.loop.warm_start`: of one rank as one process does it, of several together."""
        view, stop, events, kept = self._surroundings()
        assert self._policy is not None
        return warm_start(self._policy, self._config, view, stop, events, kept, self._trainer)

    def _sft(self) -> dict[str, float]:
        """The same without a cache; what it came to."""
        view, stop, _, kept = self._surroundings()
        assert self._policy is not None
        return sft(self._policy, self._config, view, stop, kept, self._trainer)

    def _reward_model(self, pairs: Any, out: str) -> dict[str, float]:
        """Train one; this rank has loaded nothing."""
        view, stop, *_ = self._surroundings()
        return reward_model(self._loaded(), self._config, pairs, Path(out), view, stop, self._mesh)

    def _surroundings(self) -> tuple[Any, ...]:
        """What stands in for the view, the stop flag and the event log of the controller, and where a warm start is kept."""
        at, told = (self._folder / "warm_start", warm_start_key(self._config)), self._told
        kept = Unfinished(*at) if self._trainer is None else UnfinishedTogether(*at, self._mesh)
        if self._rank > 0:  # the first one speaks for all
            told = deque[Any](maxlen=0)
        view: Any = _Teller(told, "view", ("phase", "step", "note", "error"))
        events: Any = _Teller(told, "events", ("emit",))
        return view, lambda: self._stop, events, kept

    def _begin(self) -> dict[str, Any]:
        """The start weights are there. Returns what does not change in a run."""
        if self._trainer is None:
            self._make()
        held = [t for some in self._made.held().values() for named in some for t in named.values()]
        weights = sum(local(p).nbytes for p in self._made.model.parameters())
        own = sum(local(t).nbytes for t in held if isinstance(t, torch.Tensor))
        about = {"padded": self._made.padded, "precision": precision(self._made.model)}
        return about | {"state_bytes": own + 2 * weights}  # moments come with the first update

    def _make(self) -> None:
        """The trainer, whose ranks hold their parts of the model."""
        assert self._policy is not None
        options = {"device": device_of(self._config), "mesh": self._mesh, **trainer_options(self._config)}
        self._trainer = LocalTrainer(self._policy, self._config.train, **options)
        self._trainer.fresh = Fresh.of(self._config)
        collect_as_usual()

    def _batch(self, whole: bytes | None, told: bytes) -> tuple[TrainingBatch, dict[str, Any]]:
        """The batch that a call is about, of the one that is here or of another `whole` one, and what else was told."""
        if whole is not None:
            self._whole, self._scored = wire.batch_in(pickle.loads(whole)), {}
        assert self._whole is not None  # the first call brings one
        about = pickle.loads(told)
        return wire.part_in(self._whole, about.pop("part")), about

    def _score(self, *told: Any) -> bytes:
        batch, about = self._batch(*told)
        scores = self._made.score(batch, experts=about["experts"])
        if batch is self._whole:
            self._scored |= {"old_logprobs": scores.logprobs, "old_topk_logprobs": scores.topk_logprobs}
        return pickle.dumps(wire.scores_out(scores))

    def _ref_logprobs(self, *told: Any) -> bytes:
        batch, _ = self._batch(*told)
        found = self._made.ref_logprobs(batch)
        if batch is self._whole:
            self._scored["ref_logprobs"] = found
        return pickle.dumps(wire.tensors_out({"ref_logprobs": found}))

    def _update(self, *told: Any) -> bytes:
        """An update, with the objective in the state that was told; what it came to, the objective's state behind it, and the version."""
        batch, said = self._batch(*told)
        self._objective.load_state_dict(said["state"])
        name, about = self._config.objective.name, wire.tensors_in(said["tensors"]) | said["flags"]
        about |= {key: self._scored[key][slice(*rows)] for key, rows in said["known"].items()}

        def updated() -> Any:
            return self._made.update(batch, self._objective, **about)

        own = plugins.is_own(name)
        output = plugins.tried(updated, f"objective.name {name!r}", between=True) if own else updated()
        state, version = self._objective.state_dict(), self._made.version
        return pickle.dumps({"output": wire.output_out(output), "objective": state, "version": version})

    def _prepare(self, head: Any) -> None:
        """What can be done of a `stream` before engines are told of it."""
        if self._sender is not None:
            self._sender.prepare(head)

    def _stream(self, head: Any, sinks: Sequence[Any], deadline_s: float) -> Any:
        """Send what the plan gives this rank of the weights, or of what is trained beside them. Returns a checksum for each engine and
        the traffic, or which of them failed: no rank waits for another one here, so that all can go on."""
        from rollkeel.cluster.sender import Sender

        config = self._config
        remembers = config.sync.kind != "full" and not no_deltas(config, "actors")
        self._sender = self._sender or Sender(self._made, self._mesh, config.sync, deadline_s, remembers=remembers)
        try:
            return self._sender.send(head, sinks)
        except EngineFailure as error:
            return error

    def _probe(self, sequences: Sequence[IntArray]) -> list[FloatArray]:
        """Log-probs of whole sequences under the newest weights; of a mesh without tensor parallel."""
        if not self._mesh.in_step and self._rank > 0:
            return []
        return self._made.look(lambda: SequenceScorer(self._made.model)(sequences))

    def _enter(self, phase: str, engines: Sequence[tuple[str, int]]) -> dict[str, float]:
        """See `Resident.enter`. `engines`: host and process of each; the one of this rank's number shares its device."""
        from rollkeel.loop.resident import Resident

        self._resident = self._resident or Resident(self._config, self._made, self._folder)
        return self._resident.enter(phase, [pid for _, pid in engines[self._rank : self._rank + 1] if pid])

    def _record(self, path: str, rollouts: Sequence[Rollout], about: Mapping[str, Any]) -> None:
        """Write the trainer's tensors of a few rollouts, which all ranks compute; operations that lie in parts (`tensor`), the first
        rank with the whole model."""
        to = Path(path) if self._rank == 0 else None
        if self._mesh.tensor > 1:
            whole = self._gathered()
            if whole is not None:
                record_tensors(to, whole.model, rollouts, **about)
        elif self._mesh.in_step or to is not None:
            self._made.look(lambda: record_tensors(to, self._made.model, rollouts, **about))

    def _save_model(self, folder: str) -> Written:
        return self._made.save_model(folder)

    def _save(self, folder: str) -> Written:
        files = self._made.save(Path(folder) / TRAINER)
        return beneath(TRAINER, files)

    def _restore(self, folder: str) -> tuple[int, list[str]]:
        """Version, and lines for people."""
        parts = Path(folder) / TRAINER
        lacking = self._made.load(parts if parts.is_dir() else Path(folder) / "state")
        return self._made.version, lacking

    @property
    def _made(self) -> LocalTrainer:
        assert self._trainer is not None  # begun before anything is asked of it
        return self._trainer

    def _gathered(self) -> Policy | None:
        """The policy with all its weights, on the first rank; elsewhere None. Collective."""
        whole = load_policy(self._config.model) if self._rank == 0 else None
        views = checkpoint_views(whole.model) if whole is not None else {}
        for name, weight in self._made.named_weights():
            if whole is not None:
                views[name].copy_(weight)
        return whole


class _Teller:
    """Stands in for a view or an event log that is in the controller."""

    def __init__(self, told: deque[tuple[Any, ...]], whom: str, methods: Sequence[str]) -> None:
        for method in methods:
            setattr(self, method, lambda *a, _m=method, **k: told.append((whom, _m, a, k)))
