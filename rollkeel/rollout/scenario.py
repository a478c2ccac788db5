"""What a simulation assumes: lengths, engines, training, and the knobs of each policy. A YAML file plus `a.b=c` overrides."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import yaml
from pydantic import Field, ValidationError

from rollkeel.config import Node, parse_yaml
from rollkeel.errors import BadInput, fault
from rollkeel.recipe import RECIPES, _check_keys, find_recipe, merge

POLICIES = ("sync", "oversample", "april", "c3po", "async")
_BLOCK = 4096
T = TypeVar("T", bound=Node)


class LengthConfig(Node):
    """Response lengths in tokens: lognormal and cut off at `max`, or those of real rollouts."""

    median: float = Field(default=64.0, gt=0)
    sigma: float = Field(default=1.0, ge=0)
    """Standard deviation of the log-length."""
    max: int = Field(default=1024, ge=1)
    """Longest response; longer ones end here, as at a length limit."""
    correlation: float = Field(default=0.0, ge=0, le=1)
    """Share of the log-length's variance that the members of a group have in common: hard prompts are long for all."""
    rollouts: str | None = None
    """A rollouts parquet file, a folder of them or a run folder: its lengths are drawn instead of the lognormal's."""
    prompt_tokens: int = Field(default=0, ge=0)
    """Prefilled once per group, and again where KV is recomputed."""


class FleetConfig(Node):
    """What generates. Speeds are of one engine."""

    engines: int = Field(default=1, ge=1)
    groups: int = Field(default=1, ge=1)
    """Engines are simulated in so many groups; a sequence stays in its group, inside a group the load is even."""
    curve: list[list[float]] = Field(default=[[1, 100.0]], min_length=1)
    """`[sequences decoded together, tokens per second]`, ascending."""
    prefill_tokens_s: float = Field(default=0.0, ge=0)
    """Speed of prefill and of recomputing KV; 0 means free."""
    prefill_s: float = Field(default=0.0, ge=0)
    """Seconds of each prefill besides its tokens' time: of every group's prompt, and of every rollout whose KV is computed again."""
    resume_s: float = Field(default=0.0, ge=0)
    """Seconds to take an unfinished rollout out of the engine and in again with its KV."""
    changes: list[list[int]] = Field(default=[])
    """`[iteration, engines]`: from the beginning of that iteration on, counted from 0, so many engines are there. Those that go hand over
    what they have in flight; `rollout` work and the pool's capacity stay what they were."""
    slots: int | None = Field(default=None, ge=1)
    """Sequences that one engine decodes together; None takes where the curve peaks. The barrier looks for its own."""


class WorkConfig(Node):
    """What one step is for."""

    prompts: int = Field(default=16, ge=1)
    samples: int = Field(default=8, ge=1)


class CostConfig(Node):
    """What happens between rollout phases."""

    tokens_s: float = Field(default=10_000.0, gt=0)
    """Response tokens trained per second, forward, backward and step."""
    fixed_s: float = Field(default=0.0, ge=0)
    """Seconds per step whatever its size."""
    publish_s: float = Field(default=0.0, ge=0)
    """Seconds without generation while new weights arrive."""


class ExtraConfig(Node):
    """Over-provision: share of prompts started beyond those a step needs."""

    extra: float = Field(default=0.5, ge=0)


class C3poConfig(Node):
    """Rules of the pool, see `rollkeel.rollout.pool.PoolRules`."""

    budget: int | None = Field(default=None, ge=1)
    """Φ; None takes the mean tokens of a synchronous step, prompts × samples × mean length."""
    retention: int = Field(default=5, ge=0)
    train_capacity: int = Field(default=0, ge=0)
    count: Literal["finished", "generated"] = "finished"
    group: Literal["wait", "partial"] = "wait"


class AsyncConfig(Node):
    """Rollouts and training side by side on the same machines; grouping and budget are those of `c3po`."""

    share: float = Field(default=0.5, gt=0, lt=1)
    """Share of the machines that generates; the rest trains, at its share of `train.tokens_s`."""
    staleness: int = Field(default=4, ge=1)
    """Largest number of versions between the sampling of a token and the training on it."""


class MeasureConfig(Node):
    """`--measure`: a speed curve of the embedded engine."""

    recipe: str = "default"
    """Training recipe whose model and engine are measured."""
    sequences: list[int] = Field(default=[1, 2, 4, 8, 16, 32, 64, 128], min_length=1)
    tokens: int = Field(default=32, ge=1)
    """Tokens that each sequence decodes."""


class Scenario(Node):
    """A whole simulation."""

    seed: int = Field(default=0, ge=0)
    iterations: int = Field(default=30, ge=1)
    warmup: int = Field(default=10, ge=0)
    """First iterations that the figures leave out: an empty pool fills with short rollouts first."""
    policies: list[Literal["sync", "oversample", "april", "c3po", "async"]] = Field(default=list(POLICIES))
    lengths: LengthConfig = LengthConfig()
    engine: FleetConfig = FleetConfig()
    rollout: WorkConfig = WorkConfig()
    train: CostConfig = CostConfig()
    kv: Literal["recompute", "keep"] = "recompute"
    """Whether unfinished rollouts have their KV computed again under new weights."""
    oversample: ExtraConfig = ExtraConfig()
    april: ExtraConfig = ExtraConfig(extra=1.0)
    c3po: C3poConfig = C3poConfig()
    asynchronous: AsyncConfig = AsyncConfig()
    measure: MeasureConfig = MeasureConfig()


def load_scenario(file: str | Path | None = None, overrides: Sequence[str] = ()) -> Scenario:
    """Read a scenario (path, or name under `recipes/simulate/`; None is all defaults) and apply overrides.

    Raises `BadInput` for a missing file, broken YAML, an unknown key (naming the nearest) or a wrong value.
    """
    scenario = read_scenario(Scenario, file, overrides)
    if scenario.warmup >= scenario.iterations:
        raise BadInput(
            f"config warmup: expected fewer than iterations={scenario.iterations}, got {scenario.warmup}; nothing would "
            "be left to measure"
        )
    for change in scenario.engine.changes:
        if len(change) != 2 or change[0] < 0 or change[1] < 1:
            raise BadInput(f"config engine.changes: expected pairs [iteration, engines], got {change}")
    return scenario


def read_scenario(kind: type[T], file: str | Path | None = None, overrides: Sequence[str] = ()) -> T:
    """The same for any tree of settings."""
    tree: Any = {}
    if file is not None:
        inside = RECIPES / "simulate" / f"{file}.yaml"
        path = inside if inside.is_file() else find_recipe(file)
        try:
            tree = parse_yaml(path.read_text(encoding="utf-8")) or {}
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise BadInput(f"scenario {path}: not valid YAML: {' '.join(str(error).split())}") from None
        if not isinstance(tree, dict):
            raise BadInput(f"scenario {path}: expected a mapping of sections, got {type(tree).__name__}")
    tree = merge(tree, overrides)
    _check_keys(tree, kind, "")
    try:
        return kind.model_validate({k: v for k, v in tree.items() if v is not None})
    except ValidationError as error:
        where, reason = fault(error)
        raise BadInput(f"config {'.'.join(where)}: {reason}") from None


class Lengths:
    """True length of every rollout, fixed by seed, prompt and rollout id alone, so that policies meet the same work."""

    def __init__(self, config: LengthConfig, seed: int, observed: np.ndarray | None = None) -> None:
        """`observed` (`[n]` tokens ≥ 1) replaces the lognormal. Raises `BadInput` if it is empty."""
        if observed is not None and (observed.size == 0 or observed.min() < 1):
            raise BadInput("lengths.rollouts: no complete rollout has a token")
        self._config, self._seed = config, seed
        self._observed = None if observed is None else np.sort(observed)
        self._blocks: dict[tuple[int, int], np.ndarray] = {}

    def of(self, prompt: int, id: int) -> int:
        """Tokens of rollout `id`."""
        shared = self._config.correlation
        z = self._normal(1, id)
        if shared:
            z = math.sqrt(shared) * self._normal(0, prompt) + math.sqrt(1 - shared) * z
        if self._observed is not None:
            rank = 0.5 * (1 + math.erf(z / math.sqrt(2)))
            return int(self._observed[min(int(rank * len(self._observed)), len(self._observed) - 1)])
        # The logarithm is bounded first: a wild sigma must not overflow.
        log = min(math.log(self._config.median) + self._config.sigma * z, math.log(self._config.max))
        return max(1, round(math.exp(log)))

    def mean(self) -> float:
        """Mean length over the first rollouts, tokens."""
        return float(np.mean([self.of(i // 8, i) for i in range(_BLOCK)]))

    def _normal(self, kind: int, index: int) -> float:
        block, place = divmod(index, _BLOCK)
        if (kind, block) not in self._blocks:
            self._blocks[kind, block] = np.random.default_rng([self._seed, kind, block]).standard_normal(_BLOCK)
        return float(self._blocks[kind, block][place])
