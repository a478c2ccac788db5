"""Which objective would have dropped what is only worth knowing if it is what that objective does: by hand, and against real runs.

Not covered: the objectives themselves (tests/objectives), reading traces (tests/doctor/traces).
"""

from __future__ import annotations

import io
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from rollkeel import objectives
from rollkeel.diagnose.counterfactual import RECORDED, Counterfactual, counterfactual, missing
from rollkeel.diagnose.counterfactual_options import candidate, candidates, split, steps_of
from rollkeel.diagnose.counterfactual_tally import Tally
from rollkeel.diagnose.counterfactual_view import page, show
from rollkeel.errors import BadInput
from rollkeel_doctor.traces.trace import Facts, Trace


def trace(steps: int = 3, groups: int = 4, samples: int = 4, length: int = 6, seed: int = 0, **changes: Any) -> Trace:
    """Honest-looking tokens: o differs from q, advantages have both signs."""
    rng = np.random.default_rng(seed)
    n = steps * groups * samples
    tokens = n * length
    q = np.log(rng.uniform(0.02, 0.999, tokens)).astype(np.float32)
    o = np.minimum(q + rng.normal(0, 0.3, tokens), -1e-4).astype(np.float32)
    fields: dict[str, Any] = {
        "source": "test",
        "path": "made up",
        "facts": Facts(updates_per_step=2),
        "starts": np.arange(n + 1) * length,
        "step": np.repeat(np.arange(1, steps + 1), groups * samples),
        "id": np.arange(n),
        "group": np.repeat(np.arange(steps * groups), samples),
        "reward": rng.integers(0, 2, n).astype(float),
        "prompt_length": np.full(n, 3),
        "token_ids": rng.integers(0, 12, tokens),
        "rollout_logprobs": q,
        "train_logprobs": o,
        "advantages": np.repeat(rng.normal(0, 1, n), length).astype(np.float32),
        "entropy": rng.uniform(0, 3, tokens).astype(np.float32),
        "pieces": {i: f" w{i}" for i in range(12)},
    }
    return Trace(**(fields | changes))


def summary(found: Counterfactual, label: str) -> dict[str, float]:
    return next(f for f in found.findings if f.label == label).whole.summary()


def by_hand(p: list[float], q: list[float], a: list[float], **changes: Any) -> Trace:
    """One sequence per token, each a group of its own."""
    n = len(p)
    return trace(
        steps=1,
        groups=n,
        samples=1,
        length=1,
        rollout_logprobs=np.log(q).astype(np.float32),
        train_logprobs=np.log(p).astype(np.float32),
        advantages=np.array(a, np.float32),
        entropy=np.array([0.05, 0.5, 1.2, 2.5][:n], np.float32),
        token_ids=np.array([1, 1, 2, 3][:n]),
        facts=Facts(updates_per_step=1),
        **changes,
    )


def test_icepop_by_hand() -> None:
    """Ratios 0.25, 1, 1.5, 6 against the band [0.5, 5]: first and last go, the others are weighted by the ratio."""
    t = by_hand([0.11, 0.55, 0.675, 0.66], [0.44, 0.55, 0.45, 0.11], [1.0, -1.0, 2.0, -0.5])
    found = counterfactual(t, candidates(["icepop"]))
    got = summary(found, "icepop")
    mass = np.array([0.89, 0.45, 0.65, 0.17])
    assert got["dropped"] == 0.5
    assert (got["dropped_positive"], got["dropped_negative"]) == (0.5, 0.5)
    assert got["gradient_mass_dropped"] == pytest.approx((mass[0] + mass[3]) / mass.sum(), rel=1e-6)
    assert got["gradient_mass"] == pytest.approx((mass[1] + 1.5 * mass[2]) / mass.sum(), rel=1e-6)
    assert got["weight_mean"] == pytest.approx(1.25, rel=1e-6)
    assert got["weight_max"] == pytest.approx(1.5, rel=1e-6)
    assert got["ess"] == pytest.approx(2.5**2 / (2 * 3.25), rel=1e-6)
    assert got["dropped_probability"] == pytest.approx(0.275, rel=1e-6)
    assert got["dropped_entropy"] == pytest.approx((0.05 + 2.5) / 2, rel=1e-6)
    bins = found.findings[0].whole.by("probability")
    assert [row["tokens"] for row in bins] == [0, 1, 0, 0, 2, 1, 0, 0, 0, 0]
    assert bins[4]["dropped"] == 0.5
    assert bins[4]["weight_mean"] == pytest.approx(1.5, rel=1e-6)
    entropy = found.findings[0].whole.by("entropy")
    assert [row["tokens"] for row in entropy] == [1, 0, 1, 0, 1, 0, 1, 0]
    words = found.findings[0].words
    assert words.top("positive", 5, t.pieces) == [{"id": 1, "piece": " w1", "dropped": 1, "share": 1.0}]
    assert words.top("negative", 5, {}) == [{"id": 3, "piece": None, "dropped": 1, "share": 1.0}]


def test_directional_masks_see_p_against_q() -> None:
    """DPPO-TV with δ = 0.15: only moves away count; the weight of what is kept is p/q."""
    t = by_hand([0.6, 0.6, 0.2, 0.5], [0.4, 0.4, 0.4, 0.5], [1.0, -1.0, -1.0, 1.0])
    got = summary(counterfactual(t, candidates(["dppo_binary_tv:delta=0.15"])), "dppo_binary_tv:delta=0.15")
    assert got["dropped"] == 0.5  # 0: up and A > 0; 2: down and A < 0
    assert got["weight_max"] == pytest.approx(1.5, rel=1e-6)
    assert got["weight_mean"] == pytest.approx(1.25, rel=1e-6)


def test_clips_against_the_old_policy_cut_nothing_and_say_so() -> None:
    found = counterfactual(trace(), candidates(["grpo,dppo_binary_kl"]))
    assert summary(found, "grpo")["dropped"] == 0
    assert summary(found, "grpo")["weight_mean"] == pytest.approx(1, rel=1e-6)
    assert any(note.startswith("grpo: compare p with o") for note in found.notes)


def test_a_clip_of_the_surrogate_counts_as_dropped() -> None:
    """`ppo_clip` on p/q masks nothing; what it cuts has no gradient."""
    t = by_hand([0.6, 0.6, 0.2, 0.5], [0.4, 0.4, 0.4, 0.5], [1.0, -1.0, -1.0, 1.0])
    label = "composed:anchor=rollout:surrogate={ppo_clip: {clip_low: 0.2, clip_high: 0.28}}"
    assert summary(counterfactual(t, candidates([label])), label)["dropped"] == 0.5


def test_dropped_is_what_the_objective_itself_keeps_not() -> None:
    """Every recipe that can be judged, batch by batch as the run cut them, state carried from one to the next."""
    t = trace(steps=4)
    names = [n for n in objectives.RECIPES if not missing(objectives.build(n), t)]
    found = counterfactual(t, candidates(names))
    assert [f.label for f in found.findings] == names
    assert len(names) > 20
    for f in found.findings:
        for tally in (f.whole, *f.steps.values()):
            got = tally.summary()
            assert 0 <= got["dropped"] <= 1
            assert 0 <= got.get("gradient_mass_dropped", 0) <= 1 + 1e-9
        assert f.whole.numbers["tokens"] == len(t) == sum(x.numbers["tokens"] for x in f.steps.values())


def test_a_controller_goes_through_the_steps_in_order() -> None:
    """Its bound after k updates follows from all before, so a part of the steps begins with the first bound."""
    label = "kpop:phi={drop_rate: 0.2, momentum: 0.5}"
    t = trace(steps=6)
    tried = candidates([label])
    whole = counterfactual(t, tried)
    controller = tried[0].objective.state_dict()["state"]["kpop/phi"]
    assert controller["updates"] == 12
    late = counterfactual(t, candidates([label]), (6, 6))
    assert late.findings[0].steps[6].summary() != whole.findings[0].steps[6].summary()
    assert whole.findings[0].steps[6].summary()["dropped"] == pytest.approx(0.2, abs=0.06)


def test_steps_are_cut_into_updates_by_whole_groups() -> None:
    """M2PO's cutoff is solved per optimizer batch: another cut finds another one."""
    t = trace(steps=1, groups=4)
    q, o = np.asarray(t.rollout_logprobs), np.asarray(t.train_logprobs)
    t = t.with_(train_logprobs=np.where(np.repeat(t.group < 2, t.lengths), o, q + (o - q) / 30))
    halves = [t.with_(step=np.where(t.group < 2, 1, 2), facts=Facts(updates_per_step=1)), t]
    totals = [counterfactual(x, candidates(["m2po:tau=0.001"])).findings[0].whole.summary() for x in halves]
    assert totals[0] == pytest.approx(totals[1], rel=1e-12)
    one = counterfactual(t.with_(facts=Facts(updates_per_step=1)), candidates(["m2po:tau=0.001"]))
    assert one.findings[0].whole.summary() != pytest.approx(totals[0], rel=1e-6)


def test_the_order_of_rollouts_does_not_matter_to_token_rules() -> None:
    t = trace(steps=1)
    order = np.random.default_rng(1).permutation(t.sequences)
    places = np.concatenate([np.arange(int(t.starts[i]), int(t.starts[i + 1])) for i in order])
    per_token = ("token_ids", "rollout_logprobs", "train_logprobs", "advantages", "entropy")
    mixed = t.with_(
        **{n: getattr(t, n)[places] for n in per_token},
        **{n: getattr(t, n)[order] for n in ("step", "id", "group", "reward", "prompt_length")},
    )
    one, two = (counterfactual(x, candidates(["kpop"])).findings[0].whole for x in (t, mixed))
    assert one.summary() == pytest.approx(two.summary(), rel=1e-9)


def test_agreement_and_the_recorded_masks() -> None:
    keep = np.ones(288, bool)
    keep[::4] = False
    found = counterfactual(trace(keep=keep), candidates(["icepop,kpop"]))
    assert [f.label for f in found.findings] == [RECORDED, "icepop", "kpop"]
    assert summary(found, RECORDED)["dropped"] == 0.25
    assert "weight_mean" not in summary(found, RECORDED)
    assert (found.differ == found.differ.T).all()
    assert np.diag(found.differ).tolist() == [0, 0, 0]
    gap = abs(summary(found, "icepop")["dropped"] - summary(found, "kpop")["dropped"])
    assert gap <= found.differ[1, 2] <= 1


def test_tokens_outside_the_mask_and_holes_are_left_out() -> None:
    t = trace(steps=1)
    mask = np.ones(len(t), bool)
    mask[[0, 5, 6]] = False
    o = np.asarray(t.train_logprobs).copy()
    o[12:18] = np.nan
    found = counterfactual(t.with_(mask=mask, train_logprobs=o), candidates(["kpop"]))
    assert found.tokens == len(t) - 9


def test_missing_fields_refuse_one_objective_and_not_the_others() -> None:
    found = counterfactual(trace(), candidates(["kpop,dppo_topk_tv"]))
    assert [f.label for f in found.findings] == ["kpop"]
    assert "top-k" in found.refused["dppo_topk_tv"]
    bare = trace(entropy=None)
    assert summary(counterfactual(bare, candidates(["kpop"])), "kpop")["dropped"] > 0
    with pytest.raises(BadInput, match="dppo_topk_kl"):
        counterfactual(trace(), candidates(["dppo_topk_kl"]))
    with pytest.raises(BadInput, match="no log-probs of the trainer"):
        counterfactual(trace(train_logprobs=None), candidates(["kpop"]))
    with pytest.raises(BadInput, match=r"it has steps 1 to 3"):
        counterfactual(trace(), candidates(["kpop"]), (7, 9))


def test_rewards_stand_in_for_advantages_that_were_not_recorded() -> None:
    found = counterfactual(trace(advantages=None), candidates(["dppo_binary_tv"]))
    assert any("GRPO's of the recorded rewards" in note for note in found.notes)
    with pytest.raises(BadInput, match="neither advantages nor rewards"):
        counterfactual(trace(advantages=None, reward=np.full(48, np.nan)), candidates(["kpop"]))


def test_a_positive_logprob_is_a_reason_and_not_a_traceback() -> None:
    q = np.asarray(trace().rollout_logprobs).copy()
    q[7] = 0.5
    with pytest.raises(BadInput, match=r"kpop: step 1: .*log-probs ≤ 0"):
        counterfactual(trace(rollout_logprobs=q), candidates(["kpop"]))


@pytest.mark.parametrize(
    ("text", "name", "options"),
    [
        ("kpop", "kpop", {}),
        ("kpop:phi=0.05", "kpop", {"phi": 0.05}),
        ("icepop:low=0.8:high=1e1", "icepop", {"low": 0.8, "high": 10.0}),
    ],
)
def test_options_on_the_command_line(text: str, name: str, options: dict[str, float]) -> None:
    found = candidate(text)
    assert found.objective.name == name
    assert {k: found.objective.describe()[k] for k in options} == options


def test_brackets_protect_commas_and_colons() -> None:
    assert split("kpop:phi={drop_rate: [0, 0.1], steps: 5},icepop", ",") == [
        "kpop:phi={drop_rate: [0, 0.1], steps: 5}",
        "icepop",
    ]
    assert candidate("kpop:phi={drop_rate: [0, 0.1], steps: 5}").objective.state_dict()["state"]["kpop/phi"]


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["kpo"], "did you mean kpop"),
        (["kpop:ph=1"], "did you mean phi"),
        (["kpop:phi"], "expected option=value, got 'phi'"),
        (["nowhere:phi"], "nowhere:phi': no module nowhere in "),
        (["kpop:phi=0.1:x"], "expected option=value"),
        (["kpop:phi={a"], "brackets do not match"),
        (["kpop,,icepop"], "is missing"),
        (["kpop", "kpop"], "named twice"),
        (["kpop:phi=-1"], "expected a number"),
    ],
)
def test_bad_objectives_are_one_line(texts: list[str], said: str) -> None:
    with pytest.raises(BadInput, match=said) as caught:
        candidates(texts)
    assert "\n" not in str(caught.value)


def test_ranges_of_steps() -> None:
    assert steps_of("12") == (12, 12)
    assert steps_of("10:20") == (10, 20)
    assert steps_of(":20") == (0, 20)
    assert steps_of("10:")[0] == 10
    for bad in ("", ":", "20:10", "a:b", "1:2:3"):
        with pytest.raises(BadInput, match="--steps"):
            steps_of(bad)


def test_tallies_of_steps_add_up() -> None:
    found = counterfactual(trace(), candidates(["kpop"])).findings[0]
    total = Tally()
    for tally in found.steps.values():
        total.merge(tally)
    assert total.summary() == found.whole.summary()


def test_json_and_page_hold_everything_and_nothing_from_outside(tmp_path: Path) -> None:
    evil = trace(pieces={1: "<script>alert(1)</script>", 2: "\x1b[31m"}, notes=["<b>&"])
    found = counterfactual(evil, candidates(["kpop:phi=0.001,icepop"]))
    tree = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert [o["label"] for o in tree["objectives"]] == ["kpop:phi=0.001", "icepop"]
    assert len(tree["objectives"][0]["by_step"]) == 3
    html = page(found)
    assert "<script" not in html
    assert "\x1b" not in html
    assert "http" not in html.replace("http-equiv", "")
    assert html.count("<svg") == 5


def test_the_tables_fit_eighty_columns() -> None:
    keep = np.random.default_rng(0).uniform(size=288) > 0.3
    names = "icepop,kpop,dppo_binary_tv,dppo_topk_tv,grpo,kpop:phi={drop_rate: [0.01, 0.2], steps: 100},minirl_tis"
    out = io.StringIO()
    show(counterfactual(trace(keep=keep), candidates([names])), Console(file=out, width=80, highlight=False))
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    for word in ("dppo_binary_tv", "ESS", "A < 0", "not judged", "w1"):
        assert word in text


@pytest.mark.slow
def test_ten_million_tokens_take_seconds() -> None:
    t = trace(steps=10, groups=64, samples=16, length=1000)
    began = time.monotonic()
    found = counterfactual(t, candidates(["icepop,kpop,dppo_binary_tv"]))
    assert found.tokens == 10_240_000
    assert time.monotonic() - began < 60
