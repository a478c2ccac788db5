"""Training of a reward model from a config, in one process or on every rank."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rollkeel.config import Config
from rollkeel.loop.assemble import device_of
from rollkeel.models.loading import Policy
from rollkeel.record.live import LiveView
from rollkeel.tasks.published import Pair
from rollkeel.tasks.turns import as_chat
from rollkeel.train.mesh import Mesh
from rollkeel.train.optimizer import PACK_TOKENS
from rollkeel.train.preferences import RewardModel
from rollkeel.train.reward_training import Training, train_reward_model
from rollkeel.train.sft import cuts


def reward_model(
    policy: Policy,
    config: Config,
    pairs: tuple[Sequence[Pair], Sequence[Pair]],
    out: Path,
    view: LiveView,
    stop: Callable[[], bool],
    mesh: Mesh = Mesh(),
) -> dict[str, float]:
    """A reward model with the body of `policy` in the folder `out`. `pairs`: to train on, and held out."""
    chosen: dict[str, Any] = (
        {"render": functools.partial(as_chat, policy.tokenizer)} if config.data.chat_template else {}
    )
    training = Training(
        sft=config.sft,
        weight_decay=config.train.weight_decay,
        pack_tokens=max(PACK_TOKENS, config.train.micro_batch_tokens),
        seed=config.run.seed,
        every=config.checkpoint.every,
        **chosen,
    )
    view.phase("reward model", len(cuts(config.sft, len(pairs[0]))) - 1)
    return train_reward_model(
        lambda: RewardModel.from_policy(policy, config.run.seed),
        *pairs,
        training,
        out,
        mesh=mesh,
        device=device_of(config),
        progress=lambda step, metrics: view.step(step, {"sft/loss": metrics["train/loss"], **metrics}),
        should_stop=stop,
    )
