"""Which weights, in which dtype, give the very log-probs that a run recorded: tried with one of its checkpoints.

Signs in tokens tell that an engine computed something else. Of a small gap of both signs over all tokens they cannot tell
whether a norm was never loaded, a reload forgot a tensor or came late, or the engine has fewer bits than it states. Rounding
and loading are no chance, though: what the engine did can be done again, and then the gap is gone.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from rollkeel.analyzer.capture import Tokens
from rollkeel.analyzer.sides import engine_forward, prefill_logprobs
from rollkeel.config import Config
from rollkeel.errors import RollkeelError
from rollkeel.models.loading import Policy, load_policy, quiet_transformers
from rollkeel.models.names import checkpoint_views
from rollkeel.models.numerics import MODES, is_quantised, round_integers
from rollkeel.record.rollout_store import read_step, to_rollouts
from rollkeel.record.runfolder import CONFIG, RunFolder, rollout_files
from rollkeel.train import checkpoint
from rollkeel.types import FloatArray, Rollout, TokenSpan
from rollkeel_doctor import thresholds as limits
from rollkeel_doctor.causes_weights import PROBES
from rollkeel_doctor.diagnosis import Cause, Diagnosis
from rollkeel_doctor.verdict import RECORD

MAX_PARAMETERS = 50_000_000
"""Larger models are left to `rollkeel analyze`: some hundred forward passes are a minute's work up to here."""
MAX_TOKENS = 2048
MOST = 3
"""Earlier checkpoints that are tried beside the first, and checkpoints that are computed where nothing is in doubt."""
LATEST = 32
"""Steps behind a checkpoint in which its rollouts are looked for."""
_GROUPS = (0, *range(8, 132, 4))
"""Inputs that share a scale; 0 for a row."""
_BITS = (4, 8, 6, 5, 3)
_ADVICE = {
    "wrong_weights": "Load every tensor and compare what the engine holds with what it was sent.",
    "stale_version": PROBES,
    "quantisation": "Serve the dtype that is stated, or state the one that is served.",
}
_LAYER = re.compile(r"\.\d+\.")
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")

Weights = Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """Sequences that one version sampled from beginning to end, and that version's weights."""

    policy: Policy
    step: int
    """Of the checkpoint."""
    earlier: Mapping[int, Weights]
    """Step → weights of older checkpoints, the first of them first."""
    began_clean: bool
    """The first checkpoint's weights, as stated, gave the log-probs recorded of it: whatever is wrong came later."""
    mode: str
    """Numeric mode that the engine stated."""
    tokens: Tokens
    logprobs: torch.Tensor
    """`[T]` what the engine said of its tokens, before it cut the distribution; NaN for prompts."""
    temperature: float

    @functools.cached_property
    def views(self) -> Weights:
        return checkpoint_views(self.policy.model)

    @functools.cached_property
    def stated(self) -> float:
        """Mean distance of the record from what the stated weights in the stated dtype give."""
        return _apart(self, self.views, self.mode)

    @property
    def strays(self) -> bool:
        """Whether that is more than two ways of computing the same differ."""
        return self.stated > _rounding(self.mode)


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


def refine(found: Diagnosis, folder: Path) -> Diagnosis:
    """The diagnosis of a run folder, with what its checkpoints can decide.

    The same diagnosis where the record itself is at fault, where no checkpoint fits the rollouts, or where what was recorded is what
    the stated weights and dtype give.
    """
    if not (folder / CONFIG).is_file() or ({c.id for c in found.causes} & set(RECORD) and not found.in_doubt):
        return found
    try:
        if not found.in_doubt:
            steps = list[int]()
            for sampled in itertools.islice(_samples(folder), MOST):
                if sampled.strays:
                    return found.settled(explain(sampled) or _unknown(sampled))
                steps.append(sampled.step)
            same = f"checkpoints (step {', '.join(map(str, steps))}), computed as stated, give the log-probs that the engine recorded"
            return replace(found, observed=[*found.observed, same]) if steps else found
        sampled = next(_samples(folder), None)
    except RollkeelError as error:
        return replace(found, notes=(*found.notes, f"not recomputed: {error}"))
    return found if sampled is None else decided(found, sampled)


def _unknown(sampled: Sampled) -> Cause:
    """Weights that no guess comes near: the engine computed with others than it states, whatever they are."""
    return Cause(
        id="wrong_weights",
        score=0.7,
        evidence=f"The checkpoint of step {sampled.step}, computed in {sampled.mode} as stated, gives log-probs {sampled.stated:.2g} away from those "
        "that the engine recorded of it, and no weights or dtype that were tried come near.",
        advice=_ADVICE["wrong_weights"],
    )


def decided(found: Diagnosis, sampled: Sampled) -> Diagnosis:
    """With what explains the record in the place of what looked alike; without a gap that is what was stated."""
    stated = sampled.stated
    if stated < limits.RECOMPUTED_LEAST:
        why = (
            f"the checkpoint of step {sampled.step}, computed in {sampled.mode} as stated, gives the log-probs that the engine recorded "
            f"({stated:.2g} away on average): the gap is what that dtype makes of this model"
        )
        return found if found.lost else found.cleared(why)
    cause = explain(sampled)
    return found if cause is None else found.settled(cause)


def explain(sampled: Sampled) -> Cause | None:
    """What takes the gap away. None if the weights and dtype that were stated fit as well as that dtype lets them, or if
    nothing does.

    A guess has to leave nothing but what the dtype explains. Weights of an earlier step need not be the very ones that an engine
    held, which had no checkpoint: it is enough that they are nearer than the stated ones and than those of any other guess.
    """
    views, stated = sampled.views, sampled.stated
    if stated < limits.RECOMPUTED_LEAST:
        return None
    tried: list[tuple[float, Guess]] = []
    for guess in guesses(views, sampled):
        tried.append((_apart(sampled, {**views, **guess.weights}, guess.mode), guess))
        if tried[-1][0] < limits.RECOMPUTED_EXACT * stated:
            break
    best = _best([(left, guess) for left, guess in tried if _fits(left, guess, stated)])
    if best is None:
        return None
    rest, best = best
    return Cause(
        id=best.cause,
        score=1 - rest / stated,
        evidence=f"With {best.words} the checkpoint of step {sampled.step} {'comes nearest to' if best.nearest else 'gives'} the "
        "log-probs that the engine recorded: "
        f"{rest:.2g} away on average, {stated:.2g} with what it was said to compute ({len(tried)} guess{'' if len(tried) == 1 else 'es'} "
        "tried).",
        advice=_ADVICE[best.cause],
    )


def _fits(left: float, guess: Guess, stated: float) -> bool:
    if guess.nearest:
        return left <= limits.RECOMPUTED_NEARER * stated
    return left <= limits.RECOMPUTED * stated or left < _rounding(guess.mode) < 0.5 * stated


def _best(fitting: Sequence[tuple[float, Guess]]) -> tuple[float, Guess] | None:
    """What leaves least. A part of older weights has to leave clearly less than all of them: some part always fits a little better."""
    whole = min((left for left, guess in fitting if guess.cause == "stale_version"), default=np.inf)
    clear = [
        (left, guess)
        for left, guess in fitting
        if guess.cause == "stale_version" or not guess.nearest or left < limits.RECOMPUTED_NEARER * whole
    ]
    return min(clear, key=lambda pair: pair[0], default=None)


def _rounding(mode: str) -> float:
    """Mean distance that two ways of computing the same in `mode` have."""
    return limits.RECOMPUTED_LEAST if mode == "fp32" else limits.RECOMPUTED_ROUNDED


def guesses(views: Weights, sampled: Sampled) -> Iterator[Guess]:
    """What can have gone wrong from the start: other dtypes; norms that were never loaded; experts in another order. What
    only later weights show: those of an earlier checkpoint; tensors that kept their first value, one, all of a kind, or all
    of a layer."""
    if not sampled.began_clean:
        yield from _at_start(views, sampled)
    oldest, first = next(iter(sampled.earlier.items()), (0, {}))
    stuck = {n: t for n, t in first.items() if n in views and not torch.equal(t, views[n])}
    for step, weights in sampled.earlier.items():
        words = f"the weights of step {step} in the place of its own"
        yield Guess(cause="stale_version", words=words, weights=weights, mode=sampled.mode, nearest=True)
    for words, names in sets(list(stuck)):
        if len(names) < len(stuck):
            weights = {name: stuck[name] for name in names}
            words = f"{words} as {f'at step {oldest}' if oldest else 'first published'}"
            yield Guess(cause="wrong_weights", words=words, weights=weights, mode=sampled.mode, nearest=oldest > 0)


def _at_start(views: Weights, sampled: Sampled) -> Iterator[Guess]:
    for mode in MODES:
        if mode != sampled.mode:
            words = f"{mode} in the place of the stated {sampled.mode}"
            yield Guess(cause="quantisation", words=words, weights={}, mode=mode)
    for words, weights in coarser(views):
        yield Guess(cause="quantisation", words=words, weights=weights, mode="fp32")
    initial = 0.0 if "gemma" in sampled.policy.model.config.get_text_config().model_type else 1.0
    norms = {name: torch.full_like(t, initial) for name, t in views.items() if t.ndim == 1 and "norm" in name}
    for words, names in sets(list(norms)):
        weights = {name: norms[name] for name in names}
        yield Guess(cause="wrong_weights", words=f"{words} still {initial:g}", weights=weights, mode=sampled.mode)
    for words, weights in rolled_experts(views):
        yield Guess(cause="wrong_weights", words=words, weights=weights, mode=sampled.mode)


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


def _apart(sampled: Sampled, weights: Weights, mode: str) -> float:
    """Mean distance of the recorded log-probs from those of these weights."""
    forward = engine_forward(sampled.policy.model.config, weights.items(), mode)
    known = ~sampled.logprobs.isnan()
    found = prefill_logprobs(forward, sampled.tokens, sampled.temperature)[known]
    return float((found - sampled.logprobs[known]).abs().mean())


def _samples(folder: Path) -> Iterator[Sampled]:
    """Checkpoints whose weights sampled whole sequences that are recorded, newest first, with some of these."""
    config = RunFolder.open(folder, lock=False).config
    saved = checkpoint.listing(folder / "checkpoints")
    for at in reversed(range(len(saved))):
        rollouts = _of_weights(folder, saved[at][0])
        if not rollouts or rollouts[0].dtype not in MODES or rollouts[0].sampling.temperature <= 0:
            continue
        found = _taken(_policy(config, saved[at][1]), saved[at][0], rollouts)
        if found is None:
            return
        if at == 0 or not found.strays:
            yield found
            continue
        earlier = {step: _policy(config, path) for step, path in (saved[0], *saved[1:at][-MOST:])}
        first, begin = saved[0][0], _of_weights(folder, saved[0][0])
        clean = begin and _clean(_taken(earlier[first], first, begin))
        weights = {step: checkpoint_views(policy.model) for step, policy in earlier.items()}
        yield replace(found, earlier=weights, began_clean=bool(clean))


def _of_weights(folder: Path, step: int) -> list[Rollout]:
    """Rollouts that the weights behind update `step` sampled alone. Where batches are older than the trainer, they come later."""
    files = {s: path for s, path in rollout_files(folder) if s > step}
    version = None
    for path in [files[s] for s in sorted(files)[:LATEST]]:
        table = read_step(path)
        if "train_version" not in table.column_names:
            return []
        if version is None:  # step + 1 is where these weights are the trainer's
            known = [v for v in table["train_version"].to_pylist() if v is not None]
            if step + 1 not in files or not known:
                return []
            version = known[0]
        if whole := [r for r in to_rollouts(table) if len(r.span) and (r.span.versions == version).all()]:
            return whole
    return []


def _taken(policy: Policy, step: int, rollouts: Sequence[Rollout]) -> Sampled | None:
    """Some of the rollouts; None for a model that is too large."""
    if sum(p.numel() for p in policy.model.parameters()) > MAX_PARAMETERS:
        return None
    taken: list[Rollout] = []
    for rollout in rollouts:
        taken.append(rollout)
        if sum(len(r.prompt.token_ids) + len(r.span) for r in taken) > MAX_TOKENS:
            break
    pairs = [(r.prompt.token_ids, r.span) for r in taken]
    recorded = [np.concatenate([np.full(len(prompt), np.nan), _sampled_logprobs(span)]) for prompt, span in pairs]
    return Sampled(
        policy=policy,
        step=step,
        earlier={},
        began_clean=False,
        mode=rollouts[0].dtype,
        tokens=Tokens(
            sequences=tuple(np.concatenate([prompt, span.token_ids]) for prompt, span in pairs),
            prompt_lengths=tuple(len(prompt) for prompt, _ in pairs),
        ),
        logprobs=torch.from_numpy(np.concatenate(recorded)).float(),
        temperature=rollouts[0].sampling.temperature,
    )


def _sampled_logprobs(span: TokenSpan) -> FloatArray:
    """Before the distribution was cut; NaN for what an environment wrote, which nobody sampled."""
    whole = span.logprobs + np.log(span.kept_mass)
    return whole if span.sampled is None else np.where(span.sampled, whole, np.nan)


def _clean(sampled: Sampled | None) -> bool:
    if sampled is None:
        return False
    return sampled.stated < _rounding(sampled.mode)


def _policy(config: Config, path: Path) -> Policy:
    quiet_transformers()
    section = config.model.model_copy(update={"path": str(checkpoint.verify(path).model), "overrides": {}})
    policy = load_policy(section, "cpu")
    policy.model.eval()
    return policy
