"""Rollouts as a tree that `train.state` writes exactly: JSON facts, and one array per fact about tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

import numpy as np

from rollkeel.errors import BadInput, Corrupt
from rollkeel.types import KeptKV, Prompt, Rollout, SamplingParams, Status, TokenSpan

_NAMES = tuple(f.name for f in fields(TokenSpan))
_PLAIN = ("id", "group", "member", "engine", "dtype", "reward", "text", "detail")


def pack_rollouts(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """`{"facts": [one dict of JSON values per rollout], "tokens": {name: array}}`; arrays run rollout after rollout.

    Prompts are kept as an index of the data source with their content hash, sampling parameters with every rollout.
    """
    facts, parts = [], {name: [] for name in _NAMES}
    for r in rollouts:
        held = [n for n in _NAMES if getattr(r.span, n) is not None]
        for name in held if len(r.span) else ():
            parts[name].append(getattr(r.span, name))
        fact = {name: getattr(r, name) for name in _PLAIN} | {"status": r.status.value, "length": len(r.span)}
        fact["read"] = 0 if r.span.prompt_experts is None else len(r.span.prompt_experts)
        fact |= {"prompt": r.prompt.index, "prompt_id": r.prompt.id, "held": held, "sampling": asdict(r.sampling)}
        facts.append(fact)
    return {"facts": facts, "tokens": {name: np.concatenate(found) for name, found in parts.items() if found}}


def unpack_rollouts(state: Mapping[str, Any], prompt: Callable[[int], Prompt]) -> list[Rollout]:
    """What `pack_rollouts` packed. `prompt(index)` looks a prompt up in the data source.

    Raises `BadInput` when the data source has another prompt at that index, `Corrupt` when lengths do not add up.
    """
    used, out = dict.fromkeys(_NAMES, 0), []
    for fact in state["facts"]:
        found = prompt(fact["prompt"])
        if found.id != fact["prompt_id"]:
            raise BadInput(
                f"rollout {fact['id']}: the data source has another prompt at index {fact['prompt']} than when it was"
                " sampled; resume with the same data"
            )
        span, n = {}, fact["length"]
        for name in fact["held"] if n else ():
            start, count = used[name], fact["read"] if name == "prompt_experts" else n
            used[name] = start + count
            span[name] = state["tokens"][name][start : start + count]
            if len(span[name]) != count:
                raise Corrupt(f"rollout {fact['id']}: {name} ends after {len(span[name])} of {count} tokens")
        sampling = {**fact["sampling"], "stop_token_ids": tuple(fact["sampling"]["stop_token_ids"])}
        out.append(
            Rollout(
                **{name: fact[name] for name in _PLAIN},
                status=Status(fact["status"]),
                prompt=found,
                sampling=SamplingParams(**sampling),
                span=TokenSpan(**span) if n else TokenSpan.empty(),
            )
        )
    return out


def pack_kv(held: Mapping[int, KeptKV]) -> dict[int, Any]:
    """Kept KV by rollout id, for `train.state.save_state`."""
    return {i: {"keys": kept.keys, "values": kept.values, "version": kept.version} for i, kept in held.items()}


def unpack_kv(state: Mapping[int, Any]) -> dict[int, KeptKV]:
    """What `pack_kv` packed."""
    return {i: KeptKV(**kept) for i, kept in state.items()}
