"""One implementation against one recipe: which tokens differ, by how much, and what it does in their place."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from rollkeel import advantages as credit
from rollkeel import plugins
from rollkeel.conformance import golden
from rollkeel.conformance.batch import Batch, labels, load, stored, wider
from rollkeel.conformance.readings import Computed, candidates, compute, denominators
from rollkeel.errors import BadInput, nearest
from rollkeel.objectives import RECIPES, Objective
from rollkeel.objectives.kl import ESTIMATORS as KL_ESTIMATORS

Implementation = Callable[[Batch], Any]
"""Batch → the 0-d loss; or the `[S, L]` loss of each token before any mean, with a gradient; or `[S, L]` numbers without
one: the gradient of the loss with respect to `logprobs`. For a recipe `advantages:NAME`: `[S]` or `[S, L]` advantages."""
Units = Mapping[str, torch.Tensor]
"""`[T]` coefficients c by the name of a batch."""
RELATIVE, ABSOLUTE = 1e-5, 1e-6
"""How far a coefficient may be from the right one: float32 sums, not another rule."""


@dataclass(frozen=True)
class Difference:
    """A token whose coefficient of ∇log p is not the recipe's."""

    batch: str
    answer: int
    position: int
    words: str
    probabilities: tuple[float, ...]
    """p, o, q."""
    advantage: float
    expected: float
    came: float
    because: str
    """Which part of the recipe decides about the token."""


@dataclass(frozen=True)
class Finding:
    """What the implementation does where it does not follow the recipe."""

    kind: str
    """See `readings.Change.kind`; also `padding`, `not_finite`, `advantages` and `unknown`."""
    says: str


@dataclass(frozen=True)
class Verdict:
    """An implementation compared with a recipe."""

    name: str
    recipe: str
    options: Mapping[str, Any]
    source: str
    tokens: int
    aggregated: bool
    """False if it gave losses of tokens, so that its denominator was not judged."""
    differences: tuple[Difference, ...] = ()
    findings: tuple[Finding, ...] = ()
    invariances: Mapping[str, str] = field(default_factory=dict)
    """What must not matter → empty, or what it changed."""
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return not self.differences and not self.findings and not any(self.invariances.values())


def check(
    implementation: Implementation,
    recipe: str,
    options: Mapping[str, Any] | None = None,
    *,
    name: str = "",
    dtype: torch.dtype = torch.float32,
) -> Verdict:
    """Judge `implementation` on every stored batch.

    `recipe`: a name of `rollkeel objectives list`, `kl:NAME` for the KL term alone or `advantages:NAME` for credit.
    `options`: the recipe's, `aggregate` among them. `dtype`: of the tensors it is given; trainers have log-probs in float32.
    Raises `BadInput` for an unknown recipe or a result of another shape, `OwnCodeBroke` with file and line if it raises.
    """
    options, name = dict(options or {}), name or getattr(implementation, "__name__", "implementation")
    kind, _, which = recipe.partition(":")
    known = {"kl": KL_ESTIMATORS, "advantages": tuple(credit.ESTIMATORS)}.get(kind, tuple(RECIPES))
    if (which if kind in ("kl", "advantages") else recipe) not in known and not plugins.is_own(recipe):
        raise BadInput(f"conformance {recipe!r}: unknown recipe{nearest(which or recipe, known)}")
    if kind == "advantages":
        return _credit(implementation, which, options, name, dtype)
    return _Run(implementation, recipe, options, name, dtype).verdict()


def answer(implementation: Implementation, batch: Batch, name: str) -> tuple[torch.Tensor, bool]:
    """`[S, L]` float64, the gradient of its loss with respect to `logprobs`; and whether it has a denominator."""
    came = plugins.tried(lambda: implementation(batch), f"conformance {name}")
    came = torch.as_tensor(came)
    if came.dim() == 0 and came.requires_grad:
        return _slope(came, batch), True
    if came.shape == batch.mask.shape:
        if came.requires_grad:
            return _slope(torch.where(batch.mask, came, 0.0).sum(), batch), False
        return came.double(), True
    raise BadInput(
        f"conformance {name}: expected a 0-d loss with a gradient, losses of tokens {list(batch.mask.shape)} or the gradient"
        f" itself, got shape {list(came.shape)}{'' if came.requires_grad else ' without gradient'};"
        " compute it from batch.logprobs"
    )


def _slope(loss: torch.Tensor, batch: Batch) -> torch.Tensor:
    (gradient,) = torch.autograd.grad(loss, batch.logprobs, allow_unused=True)
    return torch.zeros_like(batch.logprobs).double() if gradient is None else gradient.double()


def close(came: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """bool: equal up to `RELATIVE` and `ABSOLUTE`; never where a number is not finite."""
    return (came - expected).abs() <= ABSOLUTE + RELATIVE * expected.abs()


@dataclass
class _Run:
    implementation: Implementation
    recipe: str
    options: dict[str, Any]
    name: str
    dtype: torch.dtype

    def __post_init__(self) -> None:
        self.objective = golden.objective(self.recipe, self.options)
        self.batches = {b: golden.load(b, self.recipe, options=self.options, dtype=self.dtype) for b in stored()}
        self.answers = {b: answer(self.implementation, batch, self.name) for b, batch in self.batches.items()}
        self.aggregated = all(whole for _, whole in self.answers.values())

    def verdict(self) -> Verdict:
        invariances, notes = self.invariances()
        findings = self.outside()
        units = {name: self.unit(batch) for name, batch in self.batches.items()}
        if not all(close(self.came(b, units[b]), self.expected(b)).all() for b in self.batches):
            named, units = self.named(units)
            findings += named
        return Verdict(
            name=self.name,
            recipe=self.recipe,
            options=self.options,
            source=golden.source(self.recipe),
            tokens=sum(b.tokens for b in self.batches.values()),
            aggregated=self.aggregated,
            differences=tuple(d for name in self.batches for d in self.differences(name, units[name])),
            findings=tuple(findings),
            invariances=invariances,
            notes=tuple(notes),
        )

    def unit(self, batch: Batch) -> torch.Tensor:
        """`[T]`: the recipe's c."""
        if not self.aggregated:
            return torch.ones(batch.tokens, dtype=torch.float64)
        aggregate = self.objective.aggregate
        if self.objective.denominator == "kept":
            keep = compute(self.objective, batch.fresh()).keep
            return dict(denominators(batch, keep))[f"{aggregate} over the kept tokens"]
        return batch.coefficients(aggregate)

    def came(self, name: str, unit: torch.Tensor) -> torch.Tensor:
        """`[T]`: what multiplies c·∇log p at each token, by the implementation, where c is `unit`."""
        return -self.batches[name].flat(self.answers[name][0]) / unit

    def expected(self, name: str) -> torch.Tensor:
        """`[T]`: the same by `golden.json`, or by the objective for options that stand not there."""
        entry = golden.stored()["recipes"].get(golden.key(self.recipe, self.options))
        if entry is None:
            return compute(self.objective, golden.load(name, self.recipe)).coefficient
        return torch.tensor(entry[name], dtype=torch.float64)

    def differences(self, name: str, unit: torch.Tensor) -> list[Difference]:
        batch = self.batches[name]
        came = self.came(name, unit)
        expected = self.expected(name)
        reasons, places = self.reasons(name), labels(name)
        advantages = batch.flat(batch.advantages)
        policies = torch.stack([batch.flat(x) for x in (batch.logprobs, batch.old_logprobs, batch.rollout_logprobs)], 1)
        out = []
        for t in (~close(came, expected)).nonzero().flatten().tolist():
            row, position, words = places[t]
            p, o, q = (round(x, 9) for x in policies[t].detach().double().exp().tolist())
            a = advantages[t].item()
            out.append(
                Difference(name, row, position, words, (p, o, q), a, expected[t].item(), came[t].item(), reasons[t])
            )
        return out

    def reasons(self, name: str) -> list[str]:
        """For each token which part of the recipe decides about it."""
        tokens = golden.load(name, self.recipe).token_batch("token_sum")
        objective = golden.objective(self.recipe, self.options)
        objective.prepare(tokens)
        out = objective(tokens)
        masks = "mask " + ", ".join(m.name for m in objective.masks)
        cut = torch.zeros_like(out.keep) if out.cut is None else out.cut
        weighed = "kept, weight " + objective.weight.name if objective.weight else "kept"
        return [
            masks if not k else "clip" if c else weighed for k, c in zip(out.keep.tolist(), cut.tolist(), strict=True)
        ]

    def outside(self) -> list[Finding]:
        """Numbers that are not finite, and gradients where no token of the policy stands."""
        found = []
        for name, batch in self.batches.items():
            gradient = self.answers[name][0]
            if bad := int((~torch.isfinite(gradient)).sum()):
                found.append(Finding("not_finite", f"the gradient of {bad} places of batch {name} is NaN or infinite"))
            elif wrong := int(((gradient != 0) & ~batch.mask).sum()):
                found.append(Finding("padding", f"{wrong} places of batch {name} outside of the mask have a gradient"))
        return found

    def named(self, units: Units) -> tuple[list[Finding], Units]:
        """The reading, and the denominator, that give what came at every token of all batches; and that denominator's c."""
        first, *others = self.batches
        zeros = self.came(first, units[first]).abs() <= ABSOLUTE
        for changes, objective in candidates(self.objective):
            try:
                read = self.read(objective, [first])
                alike = read[first].coefficient.abs() <= ABSOLUTE
                if not torch.equal(alike, zeros):  # no denominator makes up for that
                    continue
                read |= self.read(objective, others)
            except BadInput:
                continue
            for words, found in self.denominators(units, read):
                if all(close(self.came(n, found[n]), read[n].coefficient).all() for n in self.batches):
                    says = [Finding(c.kind, c.says) for c in changes]
                    return says + ([Finding("denominator", words)] if words else []), found
        own = self.read(self.objective, self.batches)

        def wrong(found: Units) -> int:
            return sum(int((~close(self.came(n, found[n]), own[n].coefficient)).sum()) for n in self.batches)

        words, found = min(self.denominators(units, own), key=lambda each: wrong(each[1]))
        says = [Finding("unknown", "no reading that is known gives these gradients; the nearest is the recipe itself")]
        return says + ([Finding("denominator", words)] if words else []), found

    def read(self, objective: Objective, names: Iterable[str]) -> dict[str, Computed]:
        """What an objective gives on batches as they are stored, whatever the implementation did to those it was given."""
        return {name: compute(objective, golden.load(name, self.recipe, dtype=self.dtype)) for name in names}

    def denominators(self, units: Units, read: Mapping[str, Computed]) -> Iterator[tuple[str, Units]]:
        """The recipe's, without words; then all that are known, and the recipe's times one factor."""
        yield "", units
        if not self.aggregated:
            return
        tables = {n: dict(denominators(batch, read[n].keep)) for n, batch in self.batches.items()}
        for words in next(iter(tables.values())):
            found = {n: table[words] for n, table in tables.items() if words in table and (table[words] > 0).all()}
            if len(found) == len(tables):
                yield f"that of {words}; the recipe's is {self.words}", found
        came = torch.cat([self.came(n, units[n]) for n in self.batches])
        expected = torch.cat([read[n].coefficient for n in self.batches])
        factor = came[(most := expected.abs().argmax())] / expected[most]
        if torch.isfinite(factor) and factor > 0:
            yield (
                f"every gradient is {factor.item():.6g} times that of {self.words}",
                {n: u * factor for n, u in units.items()},
            )

    @property
    def words(self) -> str:
        return self.objective.aggregate + (" over the kept tokens" if self.objective.denominator == "kept" else "")

    def invariances(self) -> tuple[dict[str, str], list[str]]:
        """What must not matter, tried on the batch of branches."""
        batch, before = self.batches["branches"], self.answers["branches"][0]

        def again(changed: Batch) -> torch.Tensor:
            return answer(self.implementation, changed, self.name)[0]

        def compared(after: torch.Tensor, expected: torch.Tensor, words: str) -> str:
            scale = 1.0 / self.unit(batch).max()
            worst = (after - expected).abs() * scale
            same = torch.isclose(after, expected, rtol=RELATIVE, atol=float(ABSOLUTE / scale)) | ~torch.isfinite(
                expected
            )
            return "" if same.all() else f"{words}: by {worst[~same].max().item():.3g} at the worst token"

        order = torch.arange(len(batch.groups)).roll(3)
        grown = again(wider(batch))
        out = {
            "padding": compared(
                grown[:, : before.shape[1]], before, "wider padding with other numbers changes gradients"
            ),
            "order": compared(again(batch.rows(order)), before[order], "the order of the answers changes gradients"),
        }
        if not self.recipe.startswith("kl:") and not self.objective.gap_penalty:
            doubled = replace(batch, advantages=batch.advantages * 2).fresh()
            out["scale"] = compared(again(doubled), before * 2, "advantages twice as large do not double the gradient")
        notes = []
        half = len(batch.groups) // 2
        whole = not any(rule.threshold.adaptive for _, rule in self.objective.rules()) and not self._shared()
        if self.aggregated and whole:
            split = torch.cat([again(batch.rows(slice(0, half))), again(batch.rows(slice(half, None)))])
            if words := compared(split, before, "two micro-batches do not add up to the batch"):
                notes.append(
                    f"{words}; a trainer has to rescale, or to count over the whole batch (batch.sequences, batch.tokens)"
                )
        return out, notes

    def _shared(self) -> bool:
        return self.objective.denominator == "kept" or (
            self.objective.weight is not None and self.objective.weight.normalise
        )


def _credit(
    implementation: Implementation, which: str, options: dict[str, Any], name: str, dtype: torch.dtype
) -> Verdict:
    """Advantages compared with an estimator, token by token."""
    batches = {b: load(b, options, dtype) for b in stored()}
    came: dict[str, torch.Tensor] = {}
    for b, batch in batches.items():
        given = torch.as_tensor(plugins.tried(functools.partial(implementation, batch), f"conformance {name}")).double()
        if given.shape not in (batch.mask.shape, batch.groups.shape):
            raise BadInput(f"conformance {name}: expected advantages [S] or [S, L], got shape {list(given.shape)}")
        came[b] = batch.flat(given)

    def right(estimator: str, b: str) -> torch.Tensor:
        values = golden.stored()["advantages"][estimator][b]
        return batches[b].flat(torch.tensor(values, dtype=torch.float64))

    expected = {b: right(which, b) for b in batches}
    differences = [
        Difference(b, row, position, words, (np.nan,) * 3, batches[b].rewards[row].item(), expected[b][t].item(),
                   came[b][t].item(), "the reward stands in the place of A")
        for b in batches
        for t, (row, position, words) in enumerate(labels(b))
        if not close(came[b][t], expected[b][t])
    ]  # fmt: skip
    same = [e for e in credit.ESTIMATORS if all(close(came[b], right(e, b)).all() for b in batches)]
    says = [Finding("advantages", f"it does what {' and '.join(same)} says")] if same else [_unknown()]
    tokens = sum(b.tokens for b in batches.values())
    return Verdict(name, f"advantages:{which}", options, golden.source(f"advantages:{which}"), tokens, True,
                   tuple(differences), tuple(says) if differences else ())  # fmt: skip


def _unknown() -> Finding:
    return Finding("unknown", "no estimator that is known gives these advantages")
