"""Settings of older versions and what stands in their place.

A recipe or an override that uses one is refused in one line that names the new setting. The `config.yaml` of an older run is
translated, so that the run can be resumed, read and compared.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from rollkeel.errors import BadInput

Translation = Callable[[Any], Any]
"""From the old value to that of the new setting; None where nothing is to be set."""


def _same(value: Any) -> Any:
    return value


RENAMED: dict[str, tuple[str, Translation]] = {
    "run.schedule": ("experiment.schedule", _same),
    "rollout.lag": ("experiment.lag", _same),
    "sft.label_noise": ("experiment.label_noise", _same),
    "train.rounding": ("experiment.rounding", _same),
    "advantages.only": ("experiment.advantages", lambda only: None if only == "all" else only),
    "advantages.shuffle": ("experiment.advantages", lambda on: "shuffled" if on else None),
    "rollout.drop_zero_variance": ("rollout.zero_variance", lambda on: "drop" if on else None),
    "rollout.dynamic_rounds": ("rollout.zero_variance", lambda rounds: "refill" if rounds == 4 else rounds or None),
    "rollout.return_experts": ("rollout.routing", lambda on: None if on else "off"),
    "rollout.replay_routing": ("rollout.routing", lambda on: "replay" if on else None),
    "sft.enabled": ("sft.steps", lambda on: None if on else 0),
    "data.form": ("data.grader", lambda form: "code" if form == "tests" else None),
}
CONSTANTS: dict[str, tuple[Any, str]] = {
    "model.seed": (0, ""),
    "sft.clip_norm": (1.0, ""),
    "sft.weight_decay": (0.0, "train.weight_decay"),
    "sft.micro_batch_tokens": (8192, "train.micro_batch_tokens, and at least 8192"),
    "sft.cache_dir": (None, "ROLLKEEL_CACHE in the environment"),
    "engine.threads": (1, "run.threads, shared by the engine's processes"),
    "engine.block_size": (16, ""),
    "engine.prefill_tokens": (8192, ""),
    "engine.prefix_sharing": (True, ""),
    "engine.server.python": (None, "ROLLKEEL_SERVER_PYTHON in the environment"),
    "engine.server.port": (0, "a free port"),
    "engine.server.start_s": (300.0, "half of engine.deadline_s"),
    "engine.server.silence_s": (120.0, "a fifth of engine.deadline_s"),
    "engine.server.restarts": (3, ""),
    "engine.server.probe_prompts": (8, ""),
    "rollout.environment.threads": (8, ""),
    "rollout.environment.deadline_s": (60.0, "6 times reward.graders.deadline_s"),
    "reward.overlong.penalty": (1.0, ""),
    "reward.graders.memory_mb": (1024, ""),
    "reward.graders.wait_s": (900.0, "90 times reward.graders.deadline_s"),
    "reward.graders.sandbox_token_file": (None, "ROLLKEEL_SANDBOX_TOKEN in the environment"),
    "reward.graders.regrade": (0.02, ""),
    "reward.graders.slow": (0.5, ""),
    "train.eps": (1e-8, ""),
    "train.logprob_chunk": (1024, ""),
    "trace.sequences": (2, ""),
}
"""Default of a setting that can no longer be set, and what it is now where that is not simply the default."""
COUNTS = frozenset(
    {
        "model.seed",
        "sft.clip_norm",
        "sft.weight_decay",
        "sft.micro_batch_tokens",
        "engine.block_size",
        "engine.prefill_tokens",
        "reward.overlong.penalty",
        "train.eps",
        "train.logprob_chunk",
    }
)
"""Those of them that a run's numbers hang on; the rest is where things lie and how long they may take."""


def refusal(key: str, value: Any) -> str:
    """The one line for an old `key` set to `value`; empty if `key` is none."""
    if key in RENAMED:
        new, translate = RENAMED[key]
        now = translate(value)
        return f"{key} is {new} now: {'leave it out' if now is None else f'set {new}={text(now)}'}"
    if key in CONSTANTS:
        default, note = CONSTANTS[key]
        return f"{key} can no longer be set: it is {note or text(default)}; leave it out"
    return ""


def text(value: Any) -> str:
    """A value as it is written on the command line."""
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)


def renewed(key: str, value: Any) -> dict[str, Any]:
    """What to set in the place of an old `key`; `{key: value}` if it is none. Raises `BadInput` for what cannot be set any more."""
    if key in RENAMED:
        new, translate = RENAMED[key]
        now = translate(value)
        return {} if now is None else {new: now}
    if key not in CONSTANTS:
        return {key: value}
    if value != CONSTANTS[key][0]:
        raise BadInput(f"{key}={text(value)}: {refusal(key, value)}")
    return {}


def upgraded(tree: Mapping[str, Any], *, to_go_on: bool = True) -> dict[str, Any]:
    """The config tree of an older run in today's names. Raises `BadInput` for a value that has no place any more and without
    which the run could not go on as it began; `to_go_on=False` leaves such values out."""
    out = copy.deepcopy(dict(tree))
    for key in (*RENAMED, *CONSTANTS):
        *sections, name = key.split(".")
        node: Any = out
        for section in sections:
            node = node.get(section) if isinstance(node, dict) else None
        if not isinstance(node, dict) or name not in node:
            continue
        before = node.pop(name)
        if key in CONSTANTS and not (to_go_on and key in COUNTS):
            continue
        for new, value in renewed(key, before).items():
            section, leaf = new.split(".")
            keys = out.setdefault(section, {})
            if to_go_on and new == "experiment.advantages" and leaf in keys:
                raise BadInput(f"{key}={text(before)}: {new}={keys[leaf]} excludes it now")
            keys[leaf] = value
    return out
