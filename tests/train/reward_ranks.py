"""What every rank of tests/train/test_reward_ranks.py runs: reward models on one mesh after the other."""

from __future__ import annotations

import itertools
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rollkeel.config import ModelConfig, SftConfig
from rollkeel.errors import Interrupted, NonFinite
from rollkeel.models.loading import load_policy
from rollkeel.tasks.published import Pair
from rollkeel.train import reward_training
from rollkeel.train.mesh import Mesh, local
from rollkeel.train.preferences import RewardModel
from rollkeel.train.reward_training import Training, train_reward_model
from tests.train.mesh_ranks import Case

STEPS = SftConfig(epochs=1, batch_size=4, lr=1e-3, warmup_steps=2)
TRAINING = Training(sft=STEPS, pack_tokens=96, every=2, weight_decay=0.1)
"""Of 9 pairs: the last step has one, which is fewer than there are ranks."""


@dataclass(frozen=True)
class Rewarded(Case):
    """A mesh, and the mistake that is made on it."""

    fault: str = ""

    @property
    def name(self) -> str:
        return f"{self.replicate}-{self.shard}-{self.model}-{self.fault}"

    def run(self, mesh: Mesh, folder: Path) -> dict[str, Any]:
        """Whole in `folder`/NAME, stopped and gone on with in NAME-cut; NAME-one is left as it was stopped."""
        out, kept = folder / self.name, list[RewardModel]()

        def train(to: Path, rank: int = -1) -> dict[str, float]:
            """`rank`: the one that says to stop behind step 2."""
            calls = itertools.count()
            kept.append(start(self.model, self.parts))
            about: dict[str, Any] = {"should_stop": lambda: next(calls) == 2 and rank == mesh.rank}
            data = self.broken() if self.fault == "margin" else drawn(9)
            return train_reward_model(lambda: kept[-1], data, drawn(4, 1), TRAINING, to, mesh=mesh, **about)

        with made(self.fault):
            try:
                metrics = train(out)
            except NonFinite as error:
                return {"error": str(error)}
            found: dict[str, Any] = {"metrics": metrics}
            if not self.fault:
                try:
                    train(Path(f"{out}-cut"), mesh.size - 1)
                except Interrupted as stopped:
                    found["stopped"] = str(stopped)
                    if mesh.rank == 0:
                        shutil.copytree(f"{out}-cut", f"{out}-one")
                found["again"] = train(Path(f"{out}-cut"))
                found["bytes"] = sum(local(p).nbytes for p in kept[0].model.parameters())
        return found

    def broken(self) -> list[Pair]:
        """One of the pairs has a margin that no reward meets."""
        pairs = drawn(9)
        return [*pairs[:6], replace(pairs[6], margin=float("inf")), *pairs[7:]]


def start(model: str, parts: bool = False) -> RewardModel:
    """`parts`: without weights, which each rank reads or draws for itself."""
    return RewardModel.from_policy(load_policy(ModelConfig(path=f"preset:{model}"), whole=not parts), 0)


def drawn(count: int, seed: int = 0) -> list[Pair]:
    """Pairs of many widths, some with margins, one wider than a pass."""
    rng = random.Random(seed)

    def text(most: int) -> str:
        return "".join(rng.choice("0123456789") for _ in range(rng.randrange(1, most)))

    pairs = [Pair(prompt=text(9), chosen=text(40), rejected=text(40), margin=i % 3 / 2) for i in range(count)]
    return [*pairs[:-1], replace(pairs[-1], chosen="7" * 70)]


@contextmanager
def made(fault: str) -> Iterator[None]:
    """A mistake inside."""
    rounds, add = reward_training._Work._rounds, reward_training.add_gradients
    if fault == "others count":
        rounds = lambda self, widths: ((some, True) for some, _ in reward_training_rounds(self, widths))  # noqa: E731
    if fault == "own alone":
        add = lambda *_: None  # noqa: E731
    with (
        patch.object(reward_training._Work, "_rounds", rounds),
        patch.object(reward_training, "add_gradients", add),
    ):
        yield


reward_training_rounds = reward_training._Work._rounds
