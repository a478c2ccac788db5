"""Which component of a run lies where in which phase, and what that takes of a device. Nothing is moved here: `memory.moves` does.

                     rollout  score  update  publish  evaluate  checkpoint
    weights             ·       D      D        D        ·          D         the trainer's; · leaves with `all`
    reference model     ·       D      ·        ·        ·          ·         leaves with `all`
    moments, masters    ·       ·      D        ·        ·          ·         leave with `optimizer`
    gradients           –       –      D        –        –          –
    activations         –       –      D        –        –          –         a score keeps none for a backward
    engine's weights    D       –      –        D        D          D         dropped with `all`
    KV blocks           D       –      –        –        D          D         dropped with `optimizer`

D is the device, · the host (for a CPU a file), – is dropped: it is computed again, or comes with the next publication. Weights that
trainer and engine share never leave, see `stays`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rollkeel.config import Config
from rollkeel.memory.plan import Setting, plan
from rollkeel.memory.shapes import Shape
from rollkeel.sync.shared import engine_drops, two_copies

PHASES = ("rollout", "score", "update", "publish", "evaluate", "checkpoint")
LEVELS = ("none", "optimizer", "all")
"""Of `memory.offload`, from the one that moves least."""
Place = Literal["device", "host", "dropped"]

TRAINER = ("score", "update", "publish", "checkpoint")
ENGINE = ("rollout", "publish", "evaluate", "checkpoint")
"""Phases in which the trainer's weights are read, and those in which the engine has weights or is given them."""


@dataclass(frozen=True)
class Rule:
    """When a component need not lie on the device."""

    level: str
    """The least level with which it leaves."""
    needed: tuple[str, ...]
    """Phases in which it lies there all the same."""
    otherwise: Place


RULES: Mapping[str, Rule] = {
    "weights": Rule("all", TRAINER, "host"),
    "reference model": Rule("all", ("score",), "host"),
    "master remainder": Rule("optimizer", ("update",), "host"),
    "moments": Rule("optimizer", ("update",), "host"),
    "gradients": Rule("none", ("update",), "dropped"),
    "activations": Rule("none", ("update",), "dropped"),
    "backward": Rule("none", ("score", "update"), "dropped"),
    "of other ranks": Rule("none", ("score", "update"), "dropped"),
    "engine's weights": Rule("all", ENGINE, "dropped"),
    "KV blocks": Rule("optimizer", ("rollout", "evaluate", "checkpoint"), "dropped"),
    "communicators": Rule("all", TRAINER, "dropped"),
}
"""By component, as `memory.plan` names them; others always stay."""


def place(component: str, phase: str, level: str) -> Place:
    """Where `component` lies in `phase` under `memory.offload=level`, if it may leave at all."""
    rule = RULES.get(component)
    if rule is None or phase in rule.needed or LEVELS.index(level) < LEVELS.index(rule.level):
        return "device"
    return rule.otherwise


def stays(config: Config) -> set[str]:
    """Components that no level moves: weights that trainer and engine share, those of an engine that `engine_drops` keeps, and what
    engines in worker processes hold, which do not rest."""
    out = set() if config.clustered or two_copies(config) else {"weights"}
    memory = config.memory.model_copy(update={"offload": "all"})
    if engine_drops(config.model_copy(update={"memory": memory})) != "all":
        out.add("engine's weights")
    return out | ({"engine's weights", "KV blocks"} if config.engine.processes else set())


@dataclass(frozen=True)
class Residency:
    """Where everything lies, and how large it is."""

    level: str
    places: Mapping[str, Mapping[str, Place]]
    """By phase and component."""
    sizes: Mapping[str, int]
    """Bytes of each component."""

    def held(self, phase: str, where: Place = "device") -> int:
        """Bytes there in `phase`."""
        return sum(self.sizes[name] for name, at in self.places[phase].items() if at == where)

    @property
    def peak(self) -> int:
        """Most bytes on the device."""
        return max(self.held(phase) for phase in PHASES)

    def table(self) -> dict[str, Any]:
        """For `events.jsonl`: megabytes by phase, place and component."""
        return {
            phase: {
                where: {name: round(self.sizes[name] / 1e6, 3) for name, at in places.items() if at == where}
                for where in ("device", "host", "dropped")
            }
            for phase, places in self.places.items()
        }


def residency(config: Config, shape: Shape, level: str, setting: Setting = Setting()) -> Residency:
    """The plan for one rank and its engine."""
    sizes = dict(plan(config, shape, setting).parts)
    fixed = stays(config)
    places: dict[str, dict[str, Place]] = {
        phase: {name: "device" if name in fixed else place(name, phase, level) for name in sizes} for phase in PHASES
    }
    return Residency(level, places, sizes)


def chosen(config: Config, shape: Shape, space: int, setting: Setting = Setting()) -> str:
    """The level that `memory.offload` means on a device with `space` bytes: `auto` is the least that fits there, or `all`."""
    if config.memory.offload != "auto":
        return config.memory.offload
    plans = [residency(config, shape, level, setting) for level in LEVELS]
    return next((one.level for one in plans if one.peak <= space), "all")
