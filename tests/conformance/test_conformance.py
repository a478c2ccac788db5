"""A runner that calls a wrong loss right is worse than none, and one that says only "differs" helps nobody: so planted mistakes
must be called by their name, and every recipe of this package must pass.

Not covered: whether the stored answers are right (tests/objectives/test_golden.py), other libraries (test_published_libraries.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rollkeel.cli import main
from rollkeel.conformance import Batch, check, golden
from rollkeel.conformance.batch import load, wider
from rollkeel.conformance.table import as_json, lines
from rollkeel.errors import BadInput, OwnCodeBroke
from rollkeel.objectives import RECIPES
from rollkeel.objectives.kl import ESTIMATORS

Loss = Callable[[Batch], torch.Tensor]


def ours(recipe: str, options: dict[str, Any]) -> Loss:
    def loss(batch: Batch) -> torch.Tensor:
        objective = golden.objective(recipe, options)
        tokens = batch.token_batch(objective.aggregate)
        objective.prepare(tokens)
        return objective.loss(tokens)

    return loss


def kinds(verdict: Any) -> list[str]:
    return [finding.kind for finding in verdict.findings]


OWN = [(r, o) for r in (*RECIPES, *(f"kl:{e}" for e in ESTIMATORS)) if r not in golden.LEFT_OUT
       for o in ({}, *golden.VARIANTS.get(r, ()))]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_recipe_of_this_package_passes(dtype: torch.dtype) -> None:
    """In float32 too: no stored token stands so near to an edge that rounding decides about it."""
    for recipe, options in OWN:
        verdict = check(ours(recipe, options), recipe, options, dtype=dtype)
        assert verdict.passed, (recipe, options, lines(verdict))
        assert set(verdict.invariances) >= {"padding", "order"}


# -- planted mistakes ----------------------------------------------------------------------------------------------------


def icepop(
    batch: Batch, sign: float = 1.0, inverted: bool = False, count: str = "sequence_mean", **plant: Any
) -> torch.Tensor:
    """IcePop by hand, with room for mistakes."""
    r, rho = (batch.logprobs - batch.old_logprobs).exp(), (batch.old_logprobs - batch.rollout_logprobs).exp()
    a, mask = batch.advantages, batch.mask
    keep = (rho >= plant.get("low", 0.5)) & (rho <= 5.0)
    keep = ~keep if inverted else keep
    s = torch.minimum(r * a, r.clamp(0.8, 1.2) * a)
    s = torch.where(a < 0, torch.maximum(s, 3.0 * a), s) if plant.get("dual") else s
    loss = -sign * torch.where(keep, plant.get("weight", lambda x: x)(rho) * s, 0.0)
    inside = torch.where(mask, loss, 0.0)
    return {
        "sequence_mean": lambda: (inside.sum(1) / batch.lengths).sum() / batch.sequences,
        "token_mean": lambda: inside.sum() / batch.tokens,
        "kept": lambda: inside.sum() / (mask & keep).sum(),
        "sequence kept": lambda: (inside.sum(1) / (mask & keep).sum(1).clamp(min=1)).mean(),
        "half": lambda: 0.5 * (inside.sum(1) / batch.lengths).sum() / batch.sequences,
        "padded": lambda: loss.mean(),
        "none": lambda: loss,
    }[count]()


PLANTED: list[tuple[dict[str, Any], list[str], str]] = [
    ({}, [], ""),
    ({"count": "none"}, [], ""),
    ({"sign": -1.0}, ["sign"], "opposite sign"),
    ({"inverted": True}, ["mask_direction"], "keeps what the rule drops"),
    ({"count": "token_mean"}, ["denominator"], "that of token_mean; the recipe's is sequence_mean"),
    ({"count": "kept"}, ["denominator"], "token_mean over the kept tokens"),
    ({"count": "sequence kept"}, ["denominator"], "sequence_mean over the kept tokens"),
    ({"count": "half"}, ["denominator"], "0.5 times"),
    ({"count": "padded"}, ["padding", "padding", "denominator"], "outside of the mask have a gradient"),
    ({"weight": torch.ones_like}, ["weight"], "weight o/q is missing"),
    ({"weight": torch.reciprocal}, ["weight"], "inverse of o/q"),
    ({"weight": lambda x: x.clamp(max=2.0)}, ["weight"], "min(o/q, 2)"),
    ({"dual": True, "count": "token_mean"}, ["clip", "denominator"], "dual clip"),
    ({"sign": -1.0, "count": "kept"}, ["sign", "denominator"], "opposite sign"),
    ({"low": 0.4}, ["unknown"], "nearest is the recipe itself"),
]


@pytest.mark.parametrize(
    ("plant", "named", "says"),
    PLANTED,
    ids=["-".join(map(str, (number, *plant))) for number, (plant, _, _) in enumerate(PLANTED)],
)
def test_planted_mistakes_are_called_by_their_name(plant: dict[str, Any], named: list[str], says: str) -> None:
    verdict = check(lambda batch: icepop(batch, **plant), "icepop")
    assert kinds(verdict) == named
    assert any(says in finding.says for finding in verdict.findings) or not says
    assert verdict.passed == (not named)


def test_the_table_names_the_token_the_numbers_and_the_equation() -> None:
    verdict = check(lambda batch: icepop(batch, dual=True), "icepop")
    (difference,) = verdict.differences
    assert (difference.words, difference.expected, difference.came) == ("r 3.5, where a dual clip of 3 cuts", -3.5, 0)
    text = "\n".join(lines(verdict))
    assert "Ring-1T report, eqs. 1–2" in text
    assert "60 of 61 tokens" in text
    wrong = check(lambda batch: icepop(batch, low=0.4), "icepop")
    assert [(d.words, d.because) for d in wrong.differences] == [("r 0.75 and rho 0.42", "mask icepop")]


def test_a_denominator_alone_leaves_no_token_in_the_table() -> None:
    verdict = check(lambda batch: icepop(batch, count="kept"), "icepop")
    assert verdict.differences == ()
    assert not verdict.passed


def dppo(batch: Batch, away: float = 1.0, judged: str = "rollout_logprobs") -> torch.Tensor:
    u = (batch.logprobs - batch.rollout_logprobs).exp()
    moved = (batch.logprobs.exp() - getattr(batch, judged).exp()).detach()
    drop = (batch.advantages * away * moved > 0) & (moved.abs() > 0.15)
    return -torch.where(batch.mask & ~drop, u * batch.advantages, 0.0).sum() / batch.sequences


def test_a_directional_mask_turned_round_and_one_that_judges_another_policy() -> None:
    assert check(dppo, "dppo_binary_tv").passed
    turned = check(lambda b: dppo(b, away=-1.0), "dppo_binary_tv")
    assert kinds(turned) == ["mask_direction"]
    assert "as the rule judges A < 0" in turned.findings[0].says
    other = check(lambda b: dppo(b, judged="old_logprobs"), "dppo_binary_tv")
    assert [f.says for f in other.findings] == ["the mask judges p against o"]


def test_a_recipe_under_another_name_is_recognised() -> None:
    verdict = check(ours("kpop", {}), "icepop")
    assert [f.says for f in verdict.findings] == ["it does what kpop says"]


def test_a_kl_term_and_credit_are_recognised() -> None:
    def score_function(batch: Batch) -> torch.Tensor:
        x = batch.ref_logprobs - batch.logprobs
        k3 = (x.exp() - x - 1) * (batch.logprobs - batch.logprobs.detach()).exp()
        return (torch.where(batch.mask, k3, 0.0).sum(1) / batch.lengths).mean()

    assert "score function" in check(score_function, "kl:k3").findings[0].says
    assert check(score_function, "kl:sk3").passed

    def whitened(batch: Batch) -> torch.Tensor:
        values = batch.flat(batch.rewards)
        return (batch.rewards - values.mean()) / values.std()

    verdict = check(whitened, "advantages:reinforce_plus_plus")
    assert [f.says for f in verdict.findings] == ["it does what reinforce_plus_plus_no_baseline says"]
    assert check(lambda b: b.rewards * 7.0, "advantages:grpo").findings[0].kind == "unknown"


def test_gradients_given_as_numbers_are_judged_too() -> None:
    def gradient(batch: Batch) -> Any:
        (slope,) = torch.autograd.grad(icepop(batch), batch.logprobs)
        return slope.numpy()

    assert check(gradient, "icepop").passed


# -- what must not matter, and what it is given ------------------------------------------------------------------------


def test_invariances_catch_what_the_tables_cannot() -> None:
    def by_place(batch: Batch) -> torch.Tensor:
        right = icepop(batch)
        return right if batch.groups[0] == 0 else right * 1.5

    def squared(batch: Batch) -> torch.Tensor:
        extreme = (batch.advantages.abs().max() > 3).double()
        return icepop(batch) * (1 + extreme)

    assert check(by_place, "icepop").invariances["order"]
    assert check(squared, "icepop").invariances["scale"]
    halves = check(lambda b: icepop(b) * b.sequences / len(b.groups), "icepop")
    assert halves.passed
    assert "two micro-batches do not add up" in halves.notes[0]


def test_the_batch_hides_what_must_not_be_read() -> None:
    batch, grown = load("branches"), wider(load("branches"))
    assert not batch.mask[1, 2]  # text of an environment inside an answer
    assert batch.mask[1, 3]
    assert torch.equal(batch.flat(batch.logprobs), grown.flat(grown.logprobs))
    assert grown.logprobs.shape[1] == batch.logprobs.shape[1] + 2
    assert (grown.logprobs[~grown.mask] != 0).all()
    half = batch.rows(slice(0, 3))
    assert (half.sequences, half.tokens, len(half.groups)) == (7, 34, 3)
    whole = batch.coefficients("token_mean").sum()
    assert whole == pytest.approx(1.0)


def test_a_result_that_is_none_is_refused_in_one_line() -> None:
    with pytest.raises(BadInput, match=r"expected a 0-d loss with a gradient.*got shape \[3\]"):
        check(lambda b: b.logprobs.flatten()[:3], "grpo")
    with pytest.raises(BadInput, match="without gradient"):
        check(lambda b: b.logprobs.detach().sum(), "grpo")
    with pytest.raises(OwnCodeBroke, match="ZeroDivisionError"):
        check(lambda b: 1 / 0, "grpo")
    with pytest.raises(BadInput, match="did you mean icepop"):
        check(icepop, "icpop")
    with pytest.raises(BadInput, match="its answer is a draw"):
        check(icepop, "random_rejection")


def test_numbers_that_are_not_finite_are_named_and_make_valid_json() -> None:
    verdict = check(lambda b: b.logprobs.sum() * 0 / 0, "grpo")
    assert kinds(verdict)[0] == "not_finite"
    assert json.loads(json.dumps(as_json(verdict), allow_nan=False))["passed"] is False


# -- the command -------------------------------------------------------------------------------------------------------

MINE = """
def icepop(b, sign=1):
    r, rho = (b.logprobs - b.old_logprobs).exp(), (b.old_logprobs - b.rollout_logprobs).exp()
    s = (r * b.advantages).minimum(r.clamp(0.8, 1.2) * b.advantages)
    keep = b.mask & (rho >= 0.5) & (rho <= 5)
    return -sign * ((rho * s * keep).sum(1) / b.lengths).sum() / b.sequences

def wrong(b):
    return icepop(b, -1)
"""


def test_the_command_says_it_in_words_json_and_exit_codes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["conformance", *words])
        return int(ended.value.code or 0), *capsys.readouterr()

    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    code, out, _ = command("mine.py:icepop")
    assert (code, "agrees with icepop" in out) == (0, True)
    code, out, _ = command("mine.py:wrong", "icepop", "low=0.5", "--json")
    told = json.loads(out)
    assert (code, [f["kind"] for f in told["findings"]]) == (1, ["sign"])
    assert len(told["differences"]) > 20
    code, out, error = command("verl", "--checkout", "nowhere")
    assert (code, out) == (2, "")
    assert "no such folder" in error


def test_the_pages_example_says_what_the_page_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "conformance.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.S | re.M)
    (printed,) = re.findall(r"^```text\n(.*?)^```", page, re.S | re.M)
    (tmp_path / "mine.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["conformance", "mine.py:icepop"])
    assert ended.value.code == 1
    assert capsys.readouterr().out.replace(f"{tmp_path}/", "").startswith(printed)


def test_options_that_are_not_in_the_file_are_judged_by_the_objective() -> None:
    assert check(ours("icepop", {"low": 0.7}), "icepop", {"low": 0.7}).passed
    assert not check(ours("icepop", {}), "icepop", {"low": 0.7}).passed
    kept = {"denominator": "kept", "aggregate": "token_mean"}
    assert check(lambda b: icepop(b, count="kept"), "icepop", kept).passed
    assert replace(load("answers"), options=kept).options == kept
