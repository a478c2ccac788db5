"""A reward model in an actor: the loop's process sends texts, batch by batch as it would score them itself, and gets the same bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import RayError, RayTaskError

from rollkeel.cluster import logs
from rollkeel.cluster.grader import about
from rollkeel.cluster.graders import lost
from rollkeel.config import Config
from rollkeel.errors import GraderFailure, RollkeelError
from rollkeel.host import collect_as_usual
from rollkeel.rewards.mix import parts_of
from rollkeel.train.preferences import RewardModel
from rollkeel.types import GraderSpec


def reward_models(config: Config) -> list[str]:
    """Paths of the reward models that `data` names, for an actor each; none without `cluster.graders`. Rows that name their grader
    themselves are not looked at."""
    specs = [GraderSpec(name=part.grader, options=part.grader_options) for part in config.data.parts or [config.data]]
    flat = [one for spec in specs for one in (parts_of(spec) if spec.name == "mix" else [spec])]
    paths = {str(spec.options.get("path", "")) for spec in flat if spec.name == "reward_model"}
    return sorted(paths) if config.cluster.graders else []


class ScorerActor:
    """One reward model, in a process of its own."""

    def __init__(self, threads: int) -> None:
        logs.write_there()
        collect_as_usual()
        torch.set_num_threads(threads)

    def load(self, path: str, device: str) -> dict[str, Any]:
        """Returns where this is."""
        here = Path(path).expanduser()
        self._model = RewardModel.load(str(here.absolute()) if here.exists() else path, device)
        return about()

    def score(self, texts: list[str]) -> list[float]:
        return self._model.score(texts)


class ActorScorer:
    """Implements `rollkeel.rewards.grading.Scorer`. An actor that dies or takes too long is replaced, and scores the batch again."""

    def __init__(
        self,
        name: str,
        start: Callable[[], Any],
        load: tuple[str, str],
        deadline_s: float,
        renewals: int,
        tell: Callable[..., None],
    ) -> None:
        """`start`: makes the actor; `load`: path and device of its model; `tell`: is given name and fields of an event."""
        self.name, self.state = name, "loads"
        self._start = start
        self._load = load
        self._deadline_s = deadline_s
        self._left = renewals
        self._tell = tell
        self._handle, self._about = start(), dict[str, Any]()

    def score(self, texts: list[str]) -> list[float]:
        """Raises what the model raises, and `GraderFailure` if no other actor may take its place."""
        while True:
            try:
                if not self._about:
                    (self._about,) = ray.get([self._handle.load.remote(*self._load)], timeout=self._deadline_s)
                    self._tell("actor", name=self.name, host=self._about["host"], pid=self._about["pid"])
                self.state = f"{len(texts)} texts"
                (scores,) = ray.get([self._handle.score.remote(texts)], timeout=self._deadline_s)
                self.state = "idle"
                return scores
            except RayTaskError as error:
                raise error.cause if isinstance(error.cause, RollkeelError) else error from None
            except RayError as error:
                self._renew(error)

    def close(self) -> None:
        ray.kill(self._handle, no_restart=True)

    def _renew(self, error: RayError) -> None:
        why = lost(error, self._deadline_s, self._about)
        self.close()
        self.state = why
        self._tell("grader_lost", name=self.name, why=why)
        if not self._left:
            raise GraderFailure(f"{self.name} {why}; see actors/ in the run folder, and cluster.restarts")
        self._left, self._handle, self._about = self._left - 1, self._start(), {}
        self._tell("grader_renewed", name=self.name)
