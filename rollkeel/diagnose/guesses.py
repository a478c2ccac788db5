"""What can have gone wrong between the weights that were sent and those an engine computes with, as weights to try."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rollkeel.models.numerics import MODES, is_quantised, round_integers

APART = 3
"""Layers that may stand in each other's place are at most so far apart."""
_GROUPS = (0, *range(8, 132, 4))
"""Inputs that share a scale; 0 for a row."""
_BITS = (4, 8, 6, 5, 3)
_LAYER = re.compile(r"\.\d+\.")
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")

Weights = Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Guess:
    """Something the engine may have done."""

    cause: str
    words: str
    weights: Weights
    """In the place of those it was given."""
    mode: str
    nearest: bool = False
    """The weights need not be the very ones the engine held: they are of the step next to it that was kept."""


def at_start(views: Weights, mode: str, config: Any) -> Iterator[Guess]:
    """Other dtypes; norms that were never loaded; experts, heads or layers in another's place; other integers."""
    for other in MODES:
        if other != mode:
            yield Guess(
                cause="quantisation",
                words=f"{other} in the place of the stated {mode}",
                weights={},
                mode=other,
            )
    initial = 0.0 if "gemma" in config.model_type else 1.0
    norms = {name: torch.full_like(t, initial) for name, t in views.items() if t.ndim == 1 and "norm" in name}
    for words, names in sets(list(norms)):
        weights = {name: norms[name] for name in names}
        yield Guess(
            cause="wrong_weights",
            words=f"{words} still {initial:g}",
            weights=weights,
            mode=mode,
        )
    for words, weights in itertools.chain(rolled_experts(views), rolled_heads(views, config), exchanged(views)):
        yield Guess(
            cause="wrong_weights",
            words=words,
            weights=weights,
            mode=mode,
        )
    for words, weights in coarser(views):
        yield Guess(
            cause="quantisation",
            words=words,
            weights=weights,
            mode="fp32",
        )


def later(views: Weights, mode: str, earlier: Mapping[int, Weights]) -> Iterator[Guess]:
    """What only weights behind the first show: those of an earlier checkpoint; tensors that kept their first value, one, all of
    a kind, or all of a layer."""
    oldest, first = next(iter(earlier.items()), (0, {}))
    stuck = {n: t for n, t in first.items() if n in views and not torch.equal(t, views[n])}
    for step, weights in earlier.items():
        words = f"the weights of step {step} in the place of its own"
        yield Guess(
            cause="stale_version",
            words=words,
            weights=weights,
            mode=mode,
            nearest=True,
        )
    for words, names in sets(list(stuck)):
        if len(names) < len(stuck):
            weights = {name: stuck[name] for name in names}
            words = f"{words} as {f'at step {oldest}' if oldest else 'first published'}"
            yield Guess(
                cause="wrong_weights",
                words=words,
                weights=weights,
                mode=mode,
                nearest=oldest > 0,
            )


def coarser(views: Weights) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Weights in integers of other bits or groups than the numeric modes have; four bits first."""
    held = {name: tensor for name, tensor in views.items() if is_quantised(name, tensor)}
    widths = {tensor.shape[-1] for tensor in held.values()}
    sizes = [size for size in _GROUPS if size == 0 or any(width % size == 0 for width in widths)]
    for bits in _BITS:
        for size in sizes:
            words = f"int{bits} {f'in groups of {size}' if size else 'and a scale for each row'}"
            yield words, {n: round_integers(t, size or t.shape[-1], bits) for n, t in held.items()}


def rolled_experts(views: Weights) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """A layer's experts each in the place of a later one, as ranks load them that begin to count elsewhere."""
    layers: dict[str, dict[int, dict[str, torch.Tensor]]] = {}
    for name, tensor in views.items():
        if match := _EXPERT.fullmatch(name):
            layers.setdefault(match[1], {}).setdefault(int(match[2]), {})[match[3]] = tensor
    for layer, experts in layers.items():
        count = len(experts)
        for by in range(1, count):
            moved = {
                f"{layer}.{e}.{rest}": tensor for e in experts for rest, tensor in experts[(e + by) % count].items()
            }
            yield f"{layer} {by} places further than they belong", moved


def rolled_heads(views: Weights, config: Any) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """A layer's query heads each in the place of a later one, as a wrong plan of shards leaves them."""
    heads = config.num_attention_heads
    for name, tensor in views.items():
        if name.endswith("q_proj.weight"):
            for by in range(1, heads):
                moved = tensor.roll(by * len(tensor) // heads, 0)
                yield f"{name} {by} heads further than it belongs", {name: moved}


def exchanged(views: Weights) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Two layers, or their MLPs or attentions, in each other's place, as layers counted from elsewhere leave them."""
    layers: dict[tuple[str, int], dict[str, torch.Tensor]] = {}
    for name, tensor in views.items():
        if match := _LAYER.search(name):
            layers.setdefault((name[: match.start()], int(match[0][1:-1])), {})[name[match.end() :]] = tensor
    for (stack, one), other in itertools.product(layers, range(1, APART + 1)):
        there = layers.get((stack, one + other), {})
        for part in ("", "mlp.", "self_attn."):
            alike = [(n, t) for n, t in layers[stack, one].items() if n.startswith(part) and n in there]
            if all(t.shape == there[n].shape for n, t in alike) and alike:
                moved = {f"{stack}.{one}.{n}": there[n] for n, _ in alike}
                moved |= {f"{stack}.{one + other}.{n}": t for n, t in alike}
                first, second = f"{stack}.{one}.{part}*", f"{stack}.{one + other}.{part}*"
                yield f"{first} and {second} in each other's place", moved


def sets(names: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """All names; those alike but for numbers (layer, expert); those of a layer; those alike within a layer."""
    found: dict[tuple[str, ...], str] = {}
    for key in (_kind, _layer, _kind_of_layer):
        members: dict[str, list[str]] = {}
        for name in names:
            if word := key(name):
                members.setdefault(word, []).append(name)
        for word, group in members.items():
            found.setdefault(tuple(group), word)
    if names:
        found.setdefault(tuple(names), "all of them")
    yield from ((word, list(group)) for group, word in found.items())


def _kind(name: str) -> str:
    return _LAYER.sub(".*.", name)


def _layer(name: str) -> str:
    match = _LAYER.search(name)
    return name[: match.end()] + "*" if match else ""


def _kind_of_layer(name: str) -> str:
    match = _LAYER.search(name)
    return name[: match.end()] + _LAYER.sub(".*.", name[match.end() - 1 :])[1:] if match else name
