"""Which weights, in which dtype, give the very log-probs that a run recorded: tried with one of its checkpoints.

Signs in tokens tell that an engine computed something else. Of a small gap of both signs over all tokens they cannot tell
whether a norm was never loaded, a reload forgot a tensor or came late, or the engine has fewer bits than it states. Rounding
and loading are no chance, though: what the engine did can be done again, and then the gap is gone.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from rollkeel.analyzer.capture import Tokens
from rollkeel.analyzer.sides import engine_forward, prefill_logprobs
from rollkeel.config import Config
from rollkeel.diagnose.guesses import Guess, Weights, at_start, later
from rollkeel.errors import RollkeelError
from rollkeel.models.loading import Policy, load_policy, quiet_transformers
from rollkeel.models.names import checkpoint_views
from rollkeel.models.numerics import MODES
from rollkeel.record.rollout_store import read_step, to_rollouts
from rollkeel.record.runfolder import CONFIG, RunFolder, rollout_files
from rollkeel.train import checkpoint
from rollkeel.types import FloatArray, Rollout
from rollkeel_doctor import thresholds as limits
from rollkeel_doctor.causes_weights import PROBES
from rollkeel_doctor.diagnosis import Cause, Diagnosis
from rollkeel_doctor.tokens import Mean, clustered
from rollkeel_doctor.verdict import RECORD

MAX_PARAMETERS = 50_000_000
"""Larger models are left to `rollkeel analyze`: some hundred forward passes are a minute's work up to here."""
MAX_TOKENS = 2048
MOST = 3
"""Earlier checkpoints that are tried beside the first, and checkpoints that are computed where nothing is in doubt."""
FURTHER, FURTHER_Z = 1.5, 3.0
"""Times as far as the trainer at the same version from which an engine is said to be at another, by so many standard errors."""
LATEST = 32
"""Steps behind a checkpoint in which its rollouts are looked for."""
Said = tuple[Rollout, FloatArray]
"""A rollout and `[n]` log-probs recorded of its tokens, NaN for those that are not asked about."""
_ADVICE = {
    "wrong_weights": "Load every tensor and compare what the engine holds with what it was sent.",
    "stale_version": PROBES,
    "quantisation": "Serve the dtype that is stated, or state the one that is served.",
}


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """Sequences that one version sampled, all or some of their tokens, and that version's weights."""

    policy: Policy
    step: int
    """Of the checkpoint."""
    earlier: Mapping[int, Weights]
    """Step → weights of older checkpoints, the first of them first."""
    began_clean: bool
    """The first checkpoint's weights, as stated, gave the log-probs recorded of it: whatever is wrong came later."""
    mode: str
    """Numeric mode that the engine stated."""
    whole: bool
    """Every sequence was sampled by these weights from its beginning to its end, so that no older KV is behind any token."""
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


def refine(found: Diagnosis, folder: Path) -> Diagnosis:
    """The diagnosis of a run folder, with what its checkpoints can decide.

    The same diagnosis where the record itself is at fault, where no checkpoint fits the rollouts, or where what was recorded is what
    the stated weights and dtype give.
    """
    if not (folder / CONFIG).is_file() or ({c.id for c in found.causes} & set(RECORD) and not found.in_doubt):
        return found
    try:
        if not found.in_doubt:
            fit = list[int]()
            tried = list[int]()
            for sampled in itertools.islice(_samples(folder), MOST):
                if sampled.strays and (cause := explain(sampled) or _unknown(sampled)):
                    return found.settled(cause)
                tried.append(sampled.step)
                fit += [] if sampled.strays else tried[-1:]
            if not any(tried) and (cause := stood_still(folder)):
                return found.settled(cause)
            same = f"checkpoints (step {', '.join(map(str, fit))}), computed as stated, give the log-probs that the engine recorded"
            return replace(found, observed=[*found.observed, same]) if fit else found
        sampled = next(_samples(folder), None)
    except RollkeelError as error:
        return replace(found, notes=(*found.notes, f"not recomputed: {error}"))
    return found if sampled is None else decided(found, sampled)


def _unknown(sampled: Sampled) -> Cause | None:
    """Weights that no guess comes near: the engine computed with others than it states, whatever they are. Where older weights began
    the sequences, old KV may be all there is to it."""
    if not sampled.whole:
        return None
    return Cause(
        id="wrong_weights",
        score=0.7,
        evidence=f"The checkpoint of step {sampled.step}, computed in {sampled.mode} as stated, gives log-probs {sampled.stated:.2g} away from those "
        "that the engine recorded of it, and no weights or dtype that were tried come near.",
        advice=_ADVICE["wrong_weights"],
    )


def stood_still(folder: Path) -> Cause | None:
    """Where no weights were kept that sampled what is recorded: whether the youngest tokens are of the version that they state.

    The trainer's log-probs of that version are recorded as well, of other tokens. Both are as far from a later checkpoint as training
    went since; an engine whose weights did not arrive is further.
    """
    files, saved = dict(rollout_files(folder)), dict(entry for entry in _saved(folder) if entry[0] > 0)
    step = next((s for s in reversed(saved) if s + 1 in files), max(saved, default=0))
    tables = {s: read_step(path) for s, path in files.items() if step and abs(s - step) <= LATEST}
    trained = {s: _trained(table) for s, table in tables.items()}
    now = max((version for version, _ in trained.get(step + 1, [])), default=None)
    every = [rollout for table in tables.values() for rollout in to_rollouts(table)]
    known = {v for pairs in trained.values() for v, _ in pairs if now is None or v <= now}
    version = max(known & {int(v) for r in every for v in np.unique(r.span.versions)}, default=-1)
    said = [pair for pair in _said(every, version) if (pair[0].span.versions == version).all()]
    if not said:
        return None
    policy = _policy(RunFolder.open(folder, lock=False).config, saved[step])
    own = [pair for pairs in trained.values() for v, pair in pairs if v == version]
    engine, trainer = (_taken(policy, step, pairs, 4 * MAX_TOKENS) for pairs in (said, own))
    if engine is None or trainer is None:
        return None
    far, near = _distance(engine, engine.views, engine.mode), _distance(trainer, engine.views, "fp32")
    error = float(np.hypot(far.error, FURTHER * near.error))
    if far.value - FURTHER * near.value - _rounding(engine.mode) < FURTHER_Z * error:
        return None
    at_first = 2 * _first_gap(files) > far.value
    return Cause(
        id="wrong_weights" if at_first else "stale_version",
        score=0.8,
        evidence=f"The checkpoint of step {step} gives log-probs {far.value:.2g} ± {far.error:.2g} away from what the engine recorded of version "
        f"{version}, and {near.value:.2g} ± {near.error:.2g} from what the trainer did: the engine served other weights than it states, "
        f"{'from the first step on' if at_first else 'which the first step does not show, so that older ones stayed'}.",
        advice=_ADVICE["wrong_weights" if at_first else "stale_version"],
    )


def _first_gap(files: Mapping[int, Path]) -> float:
    """Mean |log ρ| of the first tokens that are of the trainer's own version; 0 where there are none."""
    for step in sorted(files)[:LATEST]:
        pairs = [(o, _said([r], v)) for v, (r, o) in _trained(read_step(files[step]))]
        if gaps := [np.abs(o - said[0][1]) for o, said in pairs if said]:
            return float(np.nanmean(np.concatenate(gaps)))
    return 0.0


def _trained(table: pa.Table) -> list[tuple[int, Said]]:
    """Version and log-probs of the trainer, of the rollouts that have them."""
    if not {"train_version", "train_logprobs"} <= set(table.column_names):
        return []
    columns = (table[name].to_pylist() for name in ("train_version", "train_logprobs"))
    rows = zip(to_rollouts(table), *columns, strict=True)
    return [(v, (r, np.array(o, np.float64))) for r, v, o in rows if v is not None and o and len(r.span)]


def decided(found: Diagnosis, sampled: Sampled) -> Diagnosis:
    """With what explains the record in the place of what looked alike; without a gap that is what was stated."""
    stated = sampled.stated
    if stated < min(limits.RECOMPUTED_LEAST, _rounding(sampled.mode)):
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
    if stated < min(limits.RECOMPUTED_LEAST, _rounding(sampled.mode)):
        return None
    tried: list[tuple[float, Guess]] = []
    for guess in _guesses(sampled):
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


def _guesses(sampled: Sampled) -> Iterator[Guess]:
    if not sampled.began_clean:
        yield from at_start(sampled.views, sampled.mode, sampled.policy.model.config.get_text_config())
    yield from later(sampled.views, sampled.mode, sampled.earlier)


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
    return limits.RECOMPUTED_FP32 if mode == "fp32" else limits.RECOMPUTED_ROUNDED


def _apart(sampled: Sampled, weights: Weights, mode: str) -> float:
    """Mean distance of the recorded log-probs from those of these weights."""
    return _distance(sampled, weights, mode).value


def _distance(sampled: Sampled, weights: Weights, mode: str) -> Mean:
    """The same with its error, the tokens of a sequence taken for dependent."""
    forward = engine_forward(sampled.policy.model.config, weights.items(), mode)
    off = (prefill_logprobs(forward, sampled.tokens, sampled.temperature) - sampled.logprobs).abs().numpy()
    lengths = [len(ids) for ids in sampled.tokens.sequences]
    known = ~np.isnan(off)
    return clustered(off[known], np.repeat(np.arange(len(lengths)), lengths)[known])


def _samples(folder: Path) -> Iterator[Sampled]:
    """Checkpoints whose weights sampled whole sequences that are recorded, newest first, with some of these."""
    config = RunFolder.open(folder, lock=False).config
    saved = _saved(folder)
    for at in reversed(range(len(saved))):
        said = _of_weights(folder, saved[at][0])
        if not said:
            continue
        found = _taken(_policy(config, saved[at][1]), saved[at][0], said)
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


def _saved(folder: Path) -> list[tuple[int, Path]]:
    return [entry for entry in checkpoint.listing(folder / "checkpoints") if (entry[1] / "model").is_dir()]


def _of_weights(folder: Path, step: int) -> list[Said]:
    """Rollouts that the weights behind update `step` sampled alone, or a part of. Where batches are older than the trainer, they come
    later."""
    files = {s: path for s, path in rollout_files(folder) if s > step}
    version, parts = None, list[Said]()
    for path in [files[s] for s in sorted(files)[:LATEST]]:
        table = read_step(path)
        if "train_version" not in table.column_names:
            return []
        if version is None:  # step + 1 is where these weights are the trainer's
            known = [v for v in table["train_version"].to_pylist() if v is not None]
            if step + 1 not in files or not known:
                return []
            version = known[0]
        said = _said(to_rollouts(table), version)
        if whole := [pair for pair in said if (pair[0].span.versions == version).all()]:
            return whole
        parts = parts or said
    return parts


def _said(rollouts: Sequence[Rollout], version: int) -> list[Said]:
    """What the engine said of the tokens that `version` sampled behind KV of its own, before the distribution was cut."""
    out = list[Said]()
    for r in rollouts:
        span = r.span
        its = (span.versions == version) & (span.kv_versions == version)
        its &= True if span.sampled is None else span.sampled
        if its.any() and r.dtype in MODES and r.sampling.temperature > 0:
            out.append((r, np.where(its, span.logprobs + np.log(span.kept_mass), np.nan)))
    return out


def _taken(policy: Policy, step: int, said: Sequence[Said], most: int = MAX_TOKENS) -> Sampled | None:
    """Some of the rollouts; None for a model that is too large."""
    if sum(p.numel() for p in policy.model.parameters()) > MAX_PARAMETERS:
        return None
    ends = np.cumsum([len(r.prompt.token_ids) + len(r.span) for r, _ in said])
    taken = said[: int(np.searchsorted(ends, most, side="right")) + 1]
    first = taken[0][0]
    return Sampled(
        policy=policy,
        step=step,
        earlier={},
        began_clean=False,
        whole=all((r.span.versions == first.span.versions[0]).all() for r, _ in taken),
        mode=first.dtype,
        tokens=Tokens(
            sequences=tuple(np.concatenate([r.prompt.token_ids, r.span.token_ids]) for r, _ in taken),
            prompt_lengths=tuple(len(r.prompt.token_ids) for r, _ in taken),
        ),
        logprobs=torch.from_numpy(
            np.concatenate([part for r, values in taken for part in (np.full(len(r.prompt.token_ids), np.nan), values)])
        ).float(),
        temperature=first.sampling.temperature,
    )


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
