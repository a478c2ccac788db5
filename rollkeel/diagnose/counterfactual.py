"""What other objectives would have made of recorded tokens: dropped, weighted, and where they disagree. No model is needed.

A trace holds log q and the trainer's log o, at the weights that began the step (or, where the run made no such pass, at those
of each update). p stands there too: this is the first update of every step. Masks on o against q (IcePop, KPop), and on p
against q (DPPO), judge the very numbers the run had; clips on p against o see p = o and cut nothing, which is said.

Every objective is called, not rewritten: a token is dropped if a mask drops it or its gradient is 0, and its weight is what
multiplies A·∇log p. Objectives whose thresholds follow the batches see the steps in order, cut into updates as the run cut them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from rollkeel import advantages
from rollkeel.batch.coefficients import coefficients
from rollkeel.diagnose.counterfactual_options import Candidate
from rollkeel.diagnose.counterfactual_tally import SIGNS, Judged, Tally, Words
from rollkeel.errors import BadInput, RollkeelError
from rollkeel.objectives import Objective
from rollkeel.types import TokenBatch
from rollkeel_doctor.traces.trace import Trace

RECORDED = "recorded"
"""Label of what the run's own masks did, where the trace says so."""
TOP = 50
_FIELDS = {"entropy": np.float32, "kept_mass": np.float32, "versions": np.int64, "kv_versions": np.int64}
"""Optional fields that `TokenBatch` and `Trace` share."""
_ALWAYS = {"prepare", "old_logprobs", "rollout_ids", "token_index", "token_ids"}


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What became of one objective."""

    label: str
    about: dict[str, Any]
    """Its resolved parameters; empty for `RECORDED`."""
    whole: Tally
    steps: dict[int, Tally]
    words: Words


@dataclass(frozen=True, kw_only=True)
class Counterfactual:
    """All objectives on one trace."""

    source: str
    path: str
    tokens: int
    steps: list[int]
    findings: list[Findings]
    differ: np.ndarray
    """`[n, n]`: share of tokens that one of two objectives drops and the other keeps."""
    refused: dict[str, str]
    """Label → what is missing, one line."""
    notes: list[str]
    pieces: dict[int, str]

    def to_json(self) -> dict[str, Any]:
        """JSON values; an infinite bin edge is null."""
        return {
            "source": self.source,
            "path": self.path,
            "tokens": self.tokens,
            "steps": self.steps,
            "notes": self.notes,
            "refused": self.refused,
            "differ": {"labels": [f.label for f in self.findings], "share": self.differ.tolist()},
            "objectives": [self._finding(f) for f in self.findings],
        }

    def _finding(self, found: Findings) -> dict[str, Any]:
        def bins(what: str) -> list[dict[str, Any]]:
            return [{k: v if np.isfinite(v) else None for k, v in row.items()} for row in found.whole.by(what)]

        return {
            "label": found.label,
            "about": found.about,
            "overall": found.whole.summary(),
            "by_probability": bins("probability"),
            "by_entropy": bins("entropy"),
            "by_step": [{"step": step, **tally.summary()} for step, tally in found.steps.items()],
            "dropped_tokens": {sign: found.words.top(sign, TOP, self.pieces) for sign in SIGNS},
        }


def counterfactual(trace: Trace, tried: Sequence[Candidate], steps: tuple[int, int] | None = None) -> Counterfactual:
    """Call every objective on the tokens of `trace`, of steps first … last if given.

    Raises `BadInput` when no objective can be judged: no log-probs of a trainer, no such steps, or all of them refused.
    """
    trace, notes = _credited(trace)
    used = trace.trained & np.isfinite(_known(trace.advantages))
    chosen = np.unique(trace.step[np.unique(trace.sequence[used])])
    if steps is not None:
        chosen = chosen[(chosen >= steps[0]) & (chosen <= steps[1])]
    if not len(chosen):
        held = f"{int(trace.step.min())} to {int(trace.step.max())}" if trace.sequences else "none"
        raise BadInput(
            f"{trace.path}: expected trained tokens with log-probs of engine and trainer, found none in the steps asked for"
            f" (it has steps {held})"
        )
    refused = {c.label: why for c in tried if (why := missing(c.objective, trace))}
    live = [c for c in tried if c.label not in refused]
    state = _State([c.label for c in live], trace.keep is not None)
    for step in chosen.tolist():
        for batch, places in _batches(trace, used, step, trace.facts.updates_per_step or 1):
            state.judge(trace, step, batch, places, live, refused)
            live = [c for c in live if c.label not in refused]
    if not live:
        raise BadInput("; ".join(f"{label}: {why}" for label, why in refused.items()))
    abouts = {c.label: c.objective.describe() for c in live}
    return state.result(trace, chosen.tolist(), abouts, refused, [*trace.notes, *notes, *_notes(trace, live)])


def missing(objective: Objective, trace: Trace) -> str:
    """What an objective needs that the trace does not hold, in one line; empty if nothing."""
    needs = objective.fields - _ALWAYS - {name for name in _FIELDS if getattr(trace, name) is not None}
    if objective.topk:
        return "needs the trainer's log-probs of the most likely tokens (top-k), which a trace does not hold"
    if "ref_logprobs" in needs:
        return "needs log-probs of the reference model, which a trace does not hold"
    return f"needs {', '.join(sorted(needs))}, which this trace does not hold" if needs else ""


def _known(values: np.ndarray | None) -> np.ndarray:
    assert values is not None  # `_credited` saw to it
    return values


def _credited(trace: Trace) -> tuple[Trace, list[str]]:
    """The trace with advantages: its own, or GRPO's of the rewards."""
    if trace.train_logprobs is None:
        raise BadInput(f"{trace.path}: holds no log-probs of the trainer; objectives compare them with the engine's")
    if trace.advantages is not None:
        return trace, []
    credit = np.full(trace.sequences, np.nan)
    for step in np.unique(trace.step):
        rows = np.flatnonzero((trace.step == step) & np.isfinite(trace.reward))
        if len(rows):
            credit[rows] = advantages.compute("grpo", trace.reward[rows], trace.group[rows])
    if not np.isfinite(credit).any():
        raise BadInput(f"{trace.path}: holds neither advantages nor rewards; objectives need one of them")
    note = "advantages are not recorded: GRPO's of the recorded rewards stand in"
    return trace.with_(advantages=np.repeat(credit, trace.lengths).astype(np.float32)), [note]


def _notes(trace: Trace, live: Sequence[Candidate]) -> list[str]:
    notes = []
    blind = [c.label for c in live if _judges_update(c.objective)]
    if blind:
        notes.append(
            f"{', '.join(blind)}: compare p with o; recorded tokens have p = o, so nothing is cut before a step's second update"
        )
    waits = [c.label for c in live if any(rule.threshold.adaptive for _, rule in c.objective.rules())]
    if waits and trace.facts.updates_per_step is None:
        notes.append(f"{', '.join(waits)}: updates per step are not recorded; a step counts as one")
    if trace.train_version is not None and trace.sequences:
        seen = np.unique(np.stack([trace.step, trace.train_version])[:, trace.train_version >= 0], axis=1)
        if len(np.unique(seen[0])) < seen.shape[1]:
            notes.append("this run made no pass before a step's first update: log o, and p, are those of each update")
    return notes


def _judges_update(objective: Objective) -> bool:
    """True if its masks, or its clip where it has none, compare p with o."""
    anchor = objective.anchor
    if objective.masks:
        return {anchor.target, anchor.reference} == {"logprobs", "old_logprobs"}
    return anchor.base == "old_logprobs"


def _batches(trace: Trace, used: np.ndarray, step: int, updates: int) -> Iterator[tuple[TokenBatch, np.ndarray]]:
    """The step's optimizer batches, whole groups in order of appearance, with the places of their tokens in the trace."""
    rows = np.flatnonzero(trace.step == step)
    starts, ends = trace.starts[rows], trace.starts[rows + 1]
    rows = rows[[bool(used[a:b].any()) for a, b in zip(starts, ends, strict=True)]]
    _, first, inverse = np.unique(trace.group[rows], return_index=True, return_inverse=True)
    rank = np.argsort(np.argsort(first))[inverse]  # order of first appearance
    groups = len(first)
    parts = min(updates, groups)
    bounds = [groups * i // parts for i in range(parts + 1)]
    for low, high in pairwise(bounds):
        inside = np.flatnonzero((rank >= low) & (rank < high))
        members = inside[np.argsort(rank[inside], kind="stable")]
        yield _batch(trace, used, rows[members], rank[members] - low)


def _batch(trace: Trace, used: np.ndarray, rows: np.ndarray, groups: np.ndarray) -> tuple[TokenBatch, np.ndarray]:
    lengths = trace.lengths[rows]
    within = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    places = np.repeat(trace.starts[rows], lengths) + within
    owner = np.repeat(np.arange(len(rows)), lengths)
    kept = used[places]
    places = places[kept]
    owner = owner[kept]
    within = within[kept]

    def at(values: np.ndarray, dtype: Any = np.float32) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values[places], dtype=dtype))

    log_o = at(_known(trace.train_logprobs))
    optional: dict[str, Any] = {
        name: at(value, dtype) for name, dtype in _FIELDS.items() if (value := getattr(trace, name)) is not None
    }
    batch = TokenBatch(
        logprobs=log_o,
        old_logprobs=log_o,
        rollout_logprobs=at(trace.rollout_logprobs),
        advantages=at(_known(trace.advantages)),
        coefficients=torch.ones(len(places)),
        sequence_ids=torch.from_numpy(owner),
        group_ids=torch.from_numpy(groups[owner]),
        rollout_ids=torch.from_numpy(trace.id[rows][owner]),
        token_index=torch.from_numpy(within),
        token_ids=at(trace.token_ids, np.int64),
        **optional,
    )
    return batch, places


def judged(objective: Objective, batch: TokenBatch) -> tuple[np.ndarray, np.ndarray]:
    """`[T]` bool and float64: what the objective drops of the batch, and the weight of A·∇log p (NaN where A = 0).

    Its thresholds see the batch first. Penalties have no part in it.
    """
    policy = replace(objective, gap_penalty=0.0, positive_nll=0.0, kl_coefficient=0.0, entropy_coefficient=0.0)
    sizes = torch.bincount(batch.sequence_ids).tolist()
    groups = batch.group_ids[torch.tensor(sizes).cumsum(0) - 1].tolist()
    batch = replace(batch, coefficients=coefficients(objective.aggregate, sizes, groups))
    policy.prepare(batch)
    leaf = batch.logprobs.clone().requires_grad_()
    with torch.enable_grad():
        out = policy(replace(batch, logprobs=leaf))
        (gradient,) = torch.autograd.grad(out.loss, leaf)
    scale = batch.coefficients.double() * batch.advantages.double()
    pushed = scale != 0
    dropped = ~out.keep | (pushed & (gradient == 0))
    weight = torch.where(pushed, -gradient.double() / torch.where(pushed, scale, 1.0), torch.nan)
    return dropped.numpy(), weight.numpy()


class _State:
    """Sums so far."""

    def __init__(self, labels: Sequence[str], recorded: bool) -> None:
        self.labels = [RECORDED] * recorded + list(labels)
        self.tallies: dict[str, dict[int, Tally]] = {label: {} for label in self.labels}
        self.words = {label: Words() for label in self.labels}
        self.differ = np.zeros((len(self.labels), len(self.labels)))
        self.tokens = 0

    def judge(
        self,
        trace: Trace,
        step: int,
        batch: TokenBatch,
        places: np.ndarray,
        live: Sequence[Candidate],
        refused: dict[str, str],
    ) -> None:
        """Call the objectives on one optimizer batch; one that cannot go on is refused with its reason."""
        drops: dict[str, np.ndarray] = {}
        about: dict[str, Any] = {
            "rollout_logprobs": batch.rollout_logprobs.numpy(),
            "advantages": batch.advantages.numpy(),
            "probability": batch.logprobs.double().exp().clamp(max=1.0).numpy(),
            "token_ids": trace.token_ids[places],
            "entropy": None if trace.entropy is None else trace.entropy[places],
        }
        found: dict[str, tuple[np.ndarray, np.ndarray | None]] = {}
        if trace.keep is not None:
            found[RECORDED] = ~trace.keep[places], None
        for c in live:
            try:
                found[c.label] = judged(c.objective, batch)
            except RollkeelError as error:
                refused[c.label] = f"step {step}: {error}"
        for label, (dropped, weight) in found.items():
            tokens = Judged(dropped=dropped, weight=weight, **about)
            self.tallies[label].setdefault(step, Tally()).add(tokens)
            self.words[label].add(tokens)
            drops[label] = dropped
        self.tokens += len(places)
        for i, one in enumerate(self.labels):
            for j, two in enumerate(self.labels[:i]):
                if one in drops and two in drops:
                    self.differ[i, j] += np.count_nonzero(drops[one] != drops[two])

    def result(
        self,
        trace: Trace,
        steps: list[int],
        abouts: dict[str, dict[str, Any]],
        refused: dict[str, str],
        notes: list[str],
    ) -> Counterfactual:
        """Everything, without the objectives that were refused on the way."""
        findings, rows = [], []
        for i, label in enumerate(self.labels):
            if label in refused:
                continue
            whole = Tally()
            for tally in self.tallies[label].values():
                whole.merge(tally)
            about = abouts.get(label, {})
            findings.append(
                Findings(label=label, about=about, whole=whole, steps=self.tallies[label], words=self.words[label])
            )
            rows.append(i)
        both = (self.differ + self.differ.T)[np.ix_(rows, rows)] / max(self.tokens, 1)
        return Counterfactual(
            source=trace.source,
            path=trace.path,
            tokens=self.tokens,
            steps=steps,
            findings=findings,
            differ=both,
            refused=refused,
            notes=notes,
            pieces=dict(trace.pieces),
        )
