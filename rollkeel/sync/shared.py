"""When trainer and engine compute with one copy of the weights, and when with two; and when changes alone can be sent between two."""

from __future__ import annotations

from rollkeel.config import Config

EXACT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""By `model.dtype`, the `engine.dtype` that holds the same numbers."""
KEPT = 0.25
"""Most bytes of kept deltas (`sync.history`), over those of the served weights."""


def two_copies(config: Config) -> str:
    """Why the engine of this run needs weights of its own; empty where its memory can be the trainer's.

    With one copy an optimizer step changes what the engine holds, before anything is published. That is right where the engine rests
    from a step's first update to the publication behind its last, and so it is in every loop of one process: the loops `sync` and
    `budgeted` ask it while they draw a step's rollouts and while they evaluate, which is behind a publication. What outlives its
    weights is stored, and no engine computes it again: log-probs and versions of sampled tokens (`experiment.lag`, several updates
    per step), KV that unfinished rollouts take along (`engine.kv=keep`; with `recompute` it is made by the new weights). Old
    log-probs are the trainer's own, of before the first update; the reference model of the KL is a copy of its own; checkpoints are
    loaded in place and published before they serve; evaluations, analyses and replays of others load models of their own.
    """
    engine, train = config.engine, config.train
    if engine.kind != "local":
        return f"engine.kind={engine.kind} has memory of its own"
    if engine.processes:
        return "engine.processes have memory of their own, and may sample while the weights are trained"
    if engine.dtype != EXACT[config.model.dtype]:
        return f"engine.dtype={engine.dtype} rounds what model.dtype={config.model.dtype} holds"
    if train.processes > 1:
        return f"train.processes={train.processes} has helpers, which hold the trainer's memory"
    if config.experiment.rounding != "none":
        return "experiment.rounding writes over the trainer's weights for the time of a pass"
    return ""


def engine_drops(config: Config) -> str:
    """`memory.offload` as the embedded engine of this run follows it: its weights stay where it shares them, and where adapters or
    deltas are published, which come on top of them."""
    apart = "actors" if config.clustered else two_copies(config)
    deltas = config.sync.kind != "full" and not no_deltas(config, apart)
    alone = apart and not config.train.lora.rank and not deltas
    return "optimizer" if config.memory.offload == "all" and not alone else config.memory.offload


def no_deltas(config: Config, apart: str) -> str:
    """Why `sync.kind` changes nothing in this run; empty where it does. `apart`: why the engine has weights of its own, if it has."""
    if not apart:
        return "trainer and engine compute with one copy, so that nothing is sent"
    if config.engine.kind == "vllm" and not config.clustered:  # an actor keeps what changes are added to
        return "engine.kind=vllm takes all weights"
    if config.train.lora.rank:
        return "adapters alone are sent, as they are"
    return ""
