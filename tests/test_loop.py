"""The loop with real parts: a run is a function of its config and seed, and every arrow does what the config says.

Not covered: whether a run learns (tests/test_learning.py), kills and resumes (tests/test_resume.py).
"""

from __future__ import annotations

import json
import signal
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_run import TINY, events, rows, weights

from rollkeel import rewards
from rollkeel.errors import BadInput, GraderFailure, RunStopped
from rollkeel.loop.job import train
from rollkeel.loop.learn import OldScores, credit_of, update, updates_metrics
from rollkeel.loop.run import Run
from rollkeel.models import jit
from rollkeel.objectives import build
from rollkeel.recipe import load
from rollkeel.record.rollout_store import per_token, read_step, to_rollouts
from rollkeel.train.scores import Scores
from rollkeel.types import Rollout, TokenSpan

SHORT = [*TINY, "run.steps=3", "eval.every=0", "checkpoint.every=0"]


def run(path: Path, *words: str) -> list[dict[str, Any]]:
    train(load(None, [*SHORT, *words, f"run.dir={path}"]))
    return rows(path)


def advantages(path: Path, step: int) -> tuple[dict[int, float], dict[int, float]]:
    """Advantage and reward of each rollout that a step stored."""
    table = read_step(path / "rollouts" / f"step_{step:06d}.parquet")
    credit = {i: float(a[0]) for i, a in per_token(table, "advantages").items()}
    return credit, {r.id: r.reward for r in to_rollouts(table) if r.reward is not None}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plain") / "run"
    run(path)
    return path


@pytest.mark.slow
def test_kl_to_the_start_is_watched_without_a_term_and_changes_nothing(tmp_path: Path) -> None:
    """A term of 1e-12 measures every token and trains the same; the monitor sees the first half of them."""
    off, two = "train.kl_coefficient=0", ("run.steps=4", "rollout.prompts=32", "train.updates_per_step=1")
    plain = run(tmp_path / "plain", off, *two)
    watched = run(tmp_path / "watched", off, "train.kl_every=2", *two)
    term = run(tmp_path / "term", "train.kl_coefficient=1e-12", *two)
    assert [("policy/kl_base" in row) for row in watched] == [False, False, True, False, True]  # the first is step 0
    assert weights(tmp_path / "watched") == weights(tmp_path / "plain")
    for step in (2, 4):
        kl = watched[step].pop("policy/kl_base")
        assert watched[step] == plain[step]
        assert kl > 1e-3
        assert kl == pytest.approx(term[step]["policy/kl_base"], rel=0.5)


def test_same_config_and_seed_give_the_same_bits_and_another_seed_does_not(plain: Path, tmp_path: Path) -> None:
    assert run(tmp_path / "again") == rows(plain)
    assert weights(tmp_path / "again") == weights(plain)
    other = run(tmp_path / "other", "run.seed=1", "sft.steps=0")
    assert [r["policy/entropy"] for r in other[1:]] != [r["policy/entropy"] for r in rows(plain)[1:]]


def test_a_run_logs_which_forward_samples(plain: Path) -> None:
    (said,) = (e for e in events(plain) if e["event"] == "engine")
    assert (said["name"], said["dtype"]) == ("local", "fp32")
    assert said["forward"].split()[0] == ("compiled" if jit.FOUND else "fast")


def test_a_run_logs_how_its_trainer_multiplies(plain: Path) -> None:
    (said,) = (e for e in events(plain) if e["event"] == "precision")
    assert (said["weights"], said["float32_products"], said["autocast"]) == ("float32", "highest", False)


def test_a_run_works_in_a_thread(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A notebook, a server or a Ray actor calls from one, where Python refuses signal handlers."""
    before = signal.getsignal(signal.SIGINT)
    with ThreadPoolExecutor(1) as threads:
        assert len(threads.submit(run, tmp_path / "run", "run.steps=1", "sft.steps=0", "eval.items=1").result()) == 2
    assert "did not learn: runsum avg@k" in (out := capsys.readouterr().out), "one item shows nothing"
    assert "95 % interval -1." in out
    assert signal.getsignal(signal.SIGINT) is before


def test_what_does_not_change_the_arithmetic_does_not_change_the_run(plain: Path, tmp_path: Path) -> None:
    """Evaluation, checkpoints, records and the engine's batch size only look; block size moves memory around."""
    found = run(
        tmp_path / "run",
        "eval.every=1",
        "eval.items=3",
        "checkpoint.every=2",
        "report.rollouts=false",
        "engine.slots=5",
    )
    names = [k for k in rows(plain)[1] if k.split("/")[0] in ("reward", "rollout", "optimizer", "policy", "loss")]
    for mine, theirs in zip(found[1:], rows(plain)[1:], strict=True):
        assert [mine[k] for k in names] == pytest.approx([theirs[k] for k in names], rel=1e-4, abs=1e-7)


def test_metrics_rows_hold_the_promised_names(plain: Path) -> None:
    found = rows(plain, volatile=True)
    assert [(r["step"], r["version"]) for r in found] == [(0, 0), (1, 2), (2, 4), (3, 6)]
    first, middle, last = found[0], found[1], found[-1]
    evaluated = {f"eval/runsum/{k}" for k in ("avg@k", "avg@k_se", "greedy", "failed", "k")}
    assert evaluated <= set(first)
    assert evaluated <= set(last)
    assert not evaluated & set(middle)
    promised = {
        *(f"mismatch/{k}" for k in ("ratio_std", "ratio_max", "ratio_mean", "prob_abs_diff", "prob_abs_diff_max")),
        *(f"mismatch/{k}" for k in ("logprob_abs_diff", "pearson", "kl", "kl_k3", "inverse_ratio_mean", "ess")),
        *(f"mismatch/{k}" for k in ("second_moment", "source", "equal_version/share", "equal_version/ratio_std")),
        "mask/kpop/dropped",
        "mask/kpop/phi",
        "mask/bad_updates",
        "clip/high",
        "clip/low",
        "staleness/mean",
        "staleness/max",
        "staleness/span",
        "routing/flip_rate",
        "policy/entropy",
        "policy/prob_mean",
        "policy/kl_base",
        "optimizer/grad_norm",
        "optimizer/lr",
        "optimizer/updates",
        "loss/total",
        "loss/kl",
        "reward/mean",
        "reward/std",
        "groups/zero_variance",
        "groups/count",
        "failures/grader",
        "failures/engine",
        "rollout/length_mean",
        "rollout/length_max",
        "rollout/length_min",
        "rollout/truncated",
        "rollout/count",
        *(f"time/{k}_s" for k in ("rollout", "reward", "logprob", "update", "sync", "record", "step")),
        "throughput/rollout_tokens_s",
        "throughput/update_tokens_s",
        "memory/rss_mb",
    }
    assert any("mask/kpop/dropped_gradient_mass" in row for row in found[1:])  # left out where all advantages are 0
    for row in found[1:]:
        assert promised <= set(row), promised - set(row)
        assert any(k.startswith("mismatch/by_probability/") for k in row)
        assert all(isinstance(v, int | float) for v in row.values())
        assert row["rollout/count"] == 32
        assert row["mask/kpop/phi"] == 0.1
        assert row["staleness/max"] == 0
        assert row["mismatch/equal_version/share"] == 1


def test_one_update_per_step_needs_no_old_pass_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only update of a step sees exactly the weights that `old` names, so its own pass serves as the old one."""
    words = ["train.updates_per_step=1", "train.micro_batch_tokens=4096"]
    without = run(tmp_path / "without", *words)
    assert all("time/logprob_s" in r for r in rows(tmp_path / "without", volatile=True)[1:])  # the reference's pass
    passes = Counter[str]()

    from rollkeel.train.trainer import LocalTrainer

    update, score = LocalTrainer.update, LocalTrainer.score

    def explicit(self: LocalTrainer, batch: Any, objective: Any, **more: Any) -> Any:
        assert more["old_is_current"]
        assert more["old_logprobs"] is None
        passes["update"] += 1
        more |= {"old_is_current": False, "old_logprobs": self.logprobs(batch.to(self.device))[0]}
        return update(self, batch, objective, **more)

    def counted(self: LocalTrainer, batch: Any) -> Any:
        passes["score"] += 1
        return score(self, batch)

    monkeypatch.setattr(LocalTrainer, "update", explicit)
    monkeypatch.setattr(LocalTrainer, "score", counted)
    explicitly = run(tmp_path / "with", *words)
    assert passes == {"update": 3, "score": 3}  # the loop itself asked for none
    assert weights(tmp_path / "with") == weights(tmp_path / "without")
    assert explicitly == without


def test_groups_without_variance_are_dropped_or_kept_as_asked(tmp_path: Path) -> None:
    kept, dropped = run(tmp_path / "kept"), run(tmp_path / "dropped", "rollout.zero_variance=drop")
    assert kept[1]["groups/zero_variance"] == dropped[1]["groups/zero_variance"] > 0
    # Step 1 samples from the same weights: the batch alone differs.
    tokens = [found[1]["mismatch/tokens"] for found in (kept, dropped)]
    table = read_step(tmp_path / "dropped" / "rollouts" / "step_000001.parquet")
    groups: dict[int, list[Rollout]] = {}
    for r in to_rollouts(table):
        groups.setdefault(r.group, []).append(r)
    varied = [g for g in groups.values() if len({r.reward for r in g}) > 1]
    assert 0 < len(varied) == 8 - kept[1]["groups/zero_variance"]
    assert tokens == [
        sum(len(r.span) for g in groups.values() for r in g),
        sum(len(r.span) for g in varied for r in g),
    ]
    assert set(per_token(table, "train_logprobs")) == {r.id for g in varied for r in g}


def test_shuffle_deals_the_same_advantages_to_other_rollouts(plain: Path, tmp_path: Path) -> None:
    run(tmp_path / "run", "run.steps=1", "experiment.advantages=shuffled")
    (mine, reward), (theirs, same_reward) = advantages(tmp_path / "run", 1), advantages(plain, 1)
    assert reward == same_reward
    assert sorted(mine.values()) == sorted(theirs.values())
    assert mine != theirs
    assert any(mine[i] < 0 < r for i, r in reward.items())  # a right answer is punished: nothing can be learnt


def test_credit_reaches_every_token_of_its_rollout(plain: Path) -> None:
    table = read_step(plain / "rollouts" / "step_000002.parquet")
    credit, keep, trained = (per_token(table, name) for name in ("advantages", "keep", "train_logprobs"))
    for r in to_rollouts(table):
        assert len(r.span) == len(credit[r.id]) == len(keep[r.id]) == len(trained[r.id])
        assert np.ptp(credit[r.id]) == 0
        assert np.abs(trained[r.id] - r.span.logprobs).max() < 1e-4
        assert (r.span.versions == 2).all()  # two updates were made in step 1
        group = [o.reward for o in to_rollouts(table) if o.group == r.group]
        expected = 0 if len(set(group)) == 1 else (r.reward - np.mean(group)) / (np.std(group, ddof=1) + 1e-6)
        assert credit[r.id][0] == pytest.approx(expected, abs=1e-6)


def file_data(tmp_path: Path, answer: str | None = None) -> list[str]:
    path = tmp_path / "data.jsonl"
    lines = [{"q": f"{i:02d}", "a": answer or str(i % 2)} for i in range(80)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return ["data.task=null", "data.options={}", f"data.path={path}", "data.prompt_column=q", "data.answer_column=a"]


def test_a_file_of_prompts_trains(tmp_path: Path) -> None:
    found = run(tmp_path / "run", *file_data(tmp_path), "eval.items=1000")
    assert 0 < found[0]["eval/data/avg@k"] < 1
    assert any(r["optimizer/grad_norm"] > 0 and r["reward/std"] > 0 for r in found[1:])
    held = {r.prompt.text for r in to_rollouts(read_step(tmp_path / "run" / "rollouts" / "step_000001.parquet"))}
    assert len(held) == 8


def test_a_run_in_which_no_group_has_variance_still_records_its_steps(tmp_path: Path) -> None:
    words = [*file_data(tmp_path, answer="no such answer is ever sampled"), "sft.steps=0", "eval.every=0"]
    with pytest.raises(RunStopped, match="none of 3 steps made an update"):
        run(tmp_path / "dropped", *words, "rollout.zero_variance=drop")
    found = rows(tmp_path / "dropped")
    assert [r["step"] for r in found] == [0, 1, 2, 3]
    assert [r["version"] for r in found] == [0, 0, 0, 0]
    assert all(r["reward/mean"] == 0 and r["optimizer/updates"] == 0 for r in found[1:])
    assert len(list((tmp_path / "dropped" / "rollouts").iterdir())) == 3
    found = run(tmp_path / "kept", *words, "train.kl_coefficient=0")
    assert [r["version"] for r in found] == [0, 2, 4, 6]
    assert all(r["optimizer/grad_norm"] == 0 for r in found[1:])


def test_a_run_with_nothing_to_learn_from_stops_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollkeel.loop.steps.BARREN_STEPS", 2)
    words = [*file_data(tmp_path, answer="never"), "sft.steps=0", "rollout.zero_variance=drop"]
    with pytest.raises(RunStopped, match="2 steps in a row had no group with differing rewards") as stopped:
        run(tmp_path / "run", *words)
    assert stopped.value.exit_code == 3
    assert [r["step"] for r in rows(tmp_path / "run")] == [0, 1, 2]
    # A resume from step 0 counts the barren steps it repeats, and stops at the same place.
    with pytest.raises(RunStopped, match="2 steps in a row"):
        train(load(tmp_path / "run" / "config.yaml"), resume=tmp_path / "run")
    assert [r["step"] for r in rows(tmp_path / "run")] == [0, 1, 2]


@pytest.fixture
def broken_grader() -> str:
    """A grader that breaks in the third step: eight groups of four a step, and the evaluations before."""

    def grade(rollout: Rollout) -> float:
        if rollout.prompt.metadata["split"] == "train" and rollout.id >= 2 * 32:
            raise ValueError("the judge is gone")
        return float(rollout.id % 2)

    rewards.register("breaks", grade)
    return "breaks"


def test_broken_graders_stop_the_run_and_never_score_zero(tmp_path: Path, broken_grader: str) -> None:
    words = [*file_data(tmp_path), f"data.grader={broken_grader}", "sft.steps=0"]
    with pytest.raises(GraderFailure, match=r"32 of 32 rollouts failed.*ValueError: the judge is gone") as stopped:
        run(tmp_path / "run", *words)
    assert stopped.value.exit_code == 3
    found = rows(tmp_path / "run")
    assert [r["step"] for r in found] == [0, 1, 2]
    assert found[-1]["reward/mean"] == 0.5
    assert "judge is gone" in (tmp_path / "run" / "report.html").read_text()


def test_failures_within_the_budget_are_counted_and_left_out(tmp_path: Path, broken_grader: str) -> None:
    words = [*file_data(tmp_path), f"data.grader={broken_grader}", "sft.steps=0", "rollout.failure_budget=1"]
    last = run(tmp_path / "run", *words)[-1]
    assert (last["failures/grader"], last["groups/count"], last["optimizer/updates"]) == (32, 0, 0)
    assert "reward/mean" not in last


def test_fp8_sampling_is_a_real_mismatch_and_fp32_is_none(plain: Path, tmp_path: Path) -> None:
    low = run(tmp_path / "run", "run.steps=2", "engine.dtype=fp8")
    assert max(r["mismatch/ratio_std"] for r in rows(plain)[1:]) < 1e-3
    assert min(r["mismatch/ratio_std"] for r in low[1:]) > 1e-2
    assert min(r["mismatch/pearson"] for r in low[1:]) < 0.9999 < min(r["mismatch/pearson"] for r in rows(plain)[1:])
    # Routers stay exact in fp8; what they see does not.
    assert max(r["routing/flip_rate"] for r in rows(plain)[1:]) == 0
    assert min(r["routing/flip_rate"] for r in low[1:]) > 0


def test_experts_are_recorded_where_there_are_any_and_wanted(plain: Path, tmp_path: Path) -> None:
    def spans(path: Path) -> list[Any]:
        return [r.span.experts for r in to_rollouts(read_step(path / "rollouts" / "step_000001.parquet"))]

    assert all(e.shape[1:] == (2, 2) for e in spans(plain))
    without = run(tmp_path / "without", "rollout.routing=off")
    assert spans(tmp_path / "without") == [None] * 32
    routed = {"routing/flip_rate", "routing/flipped_tokens"}
    assert without == [{k: v for k, v in row.items() if k not in routed} for row in rows(plain)]
    # An engine that runs any architecture through transformers sees its routers too.
    general = run(tmp_path / "general", "engine.forward=transformers", "run.steps=1")
    assert general[1]["routing/flip_rate"] == 0
    dense = run(tmp_path / "dense", "model.path=preset:tiny-qwen3", "run.steps=1", "sft.steps=0")
    assert not routed & set(dense[1])
    assert spans(tmp_path / "dense") == [None] * 32


@pytest.mark.parametrize("mode", ["rollout", "mask_only"])
def test_mismatch_is_measured_at_the_weights_that_sampled(mode: str, tmp_path: Path) -> None:
    """An objective without an old pass still moves its weights between updates; that drift is no mismatch."""
    found = run(tmp_path / "run", f"objective.mode={mode}", "train.lr=1e-2", "train.warmup_steps=0")
    assert all(r["mismatch/source"] == (mode == "mask_only") for r in found[1:])
    assert max(r["mismatch/ratio_std"] for r in found[1:]) < 1e-3


def test_what_p_alone_says_is_about_every_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The updates that go wrong are the later ones, so a metric of the first alone would never show them."""
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    from rollkeel.train.trainer import LocalTrainer

    plainly = LocalTrainer.update

    def watched(self: LocalTrainer, batch: Any, *args: Any, **more: Any) -> Any:
        out = plainly(self, batch, *args, **more)
        gap = batch.rollout_logprobs.exp() - out.logprobs.exp()
        seen.append((out.logprobs.exp(), (batch.advantages < 0) & (gap > 0.5)))
        return out

    monkeypatch.setattr(LocalTrainer, "update", watched)
    found = run(tmp_path / "run", "objective.mode=rollout", "train.lr=1e-1", "train.warmup_steps=0", "run.steps=1")
    probability, bad = (torch.cat(parts).double().mean().item() for parts in zip(*seen, strict=True))
    assert len(seen) == 2
    assert found[1]["policy/prob_mean"] == pytest.approx(probability, rel=1e-6)
    assert found[1]["mask/bad_updates"] == pytest.approx(bad)
    assert bad > 0


def test_means_over_updates_count_what_they_are_means_of() -> None:
    """One token dropped by the first update and three by the second: the mean entropy of dropped tokens is theirs."""
    numbers = [
        {"mask/m/dropped": 0.1, "mask/m/dropped_entropy": 1.0, "objective/kept": 0.9, "weight/mean": 1.0},
        {"mask/m/dropped": 0.3, "mask/m/dropped_entropy": 2.0, "objective/kept": 0.7, "weight/mean": 2.0},
        {"mask/m/dropped": 0.0, "objective/kept": 1.0, "weight/mean": 3.0},
        {"mask/m/dropped": 1.0, "mask/m/dropped_entropy": 2.0, "objective/kept": 0.0, "weight/mean": 0.0},
    ]
    for i, row in enumerate(numbers):
        row |= {"controller/bound": 4.0 - i, "mask/trajectory/bound": 4.0 - i}
    outputs = iter(SimpleNamespace(metrics=row) for row in numbers)
    trainer: Any = SimpleNamespace(update=lambda *args, **more: next(outputs))
    objective = build("ac_mis_po")
    parts: Any = [range(10), range(10), range(10), range(10)]
    metrics = updates_metrics(objective, parts, update(trainer, objective, parts, OldScores()))
    assert metrics["mask/m/dropped"] == pytest.approx(0.35)
    assert metrics["mask/m/dropped_entropy"] == pytest.approx((1 + 3 * 2 + 10 * 2) / 14)
    assert metrics["controller/bound"] == metrics["mask/trajectory/bound"] == 1  # what the next update begins with
    assert metrics["weight/mean"] == pytest.approx((9 * 1 + 7 * 2 + 10 * 3) / 26)


def test_a_run_is_made_of_the_pieces_of_its_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Run] = []
    monkeypatch.setattr("rollkeel.loop.job.train_steps", lambda made, first: seen.append(made))
    monkeypatch.setattr("rollkeel.loop.job._last_word", lambda made: None)
    words = ["sft.steps=0", "engine.dtype=int8", "objective.name=icepop", "sampling.top_k=5", "run.seed=3"]
    train(load(None, [*SHORT, *words, f"run.dir={tmp_path / 'run'}"]))
    (made,) = seen
    assert (made.engine.capabilities.dtype, made.objective.name, made.sampling.top_k) == ("int8", "icepop", 5)
    assert made.sampling.seed != made.eval_sampling.seed
    assert len(made.eval_prompts) == 8
    assert {p.id for p in made.eval_prompts}.isdisjoint(p.id for p in made.source.prompts(range(50)))


@pytest.mark.parametrize("words", [[], ["objective.anchor=old"], ["objective.anchor=old", "train.updates_per_step=1"]])
def test_the_best_tokens_travel_from_the_engine_to_the_objective(words: list[str], tmp_path: Path) -> None:
    found = run(tmp_path / "run", "objective.name=dppo_topk_tv", "objective.k=5", "engine.dtype=fp8", *words)
    for row in found[1:]:
        assert row["optimizer/grad_norm"] > 0
        assert 0 <= row["mask/dppo_topk_tv/dropped"] < 1
    for r in to_rollouts(read_step(tmp_path / "run" / "rollouts" / "step_000002.parquet")):
        assert r.span.topk_ids is not None
        assert r.span.topk_logprobs is not None
        assert r.span.topk_ids.shape == r.span.topk_logprobs.shape == (len(r.span), 5)
        assert (np.diff(r.span.topk_logprobs) <= 0).all()
        listed = r.span.topk_ids == r.span.token_ids[:, None]
        mine = np.broadcast_to(r.span.logprobs[:, None], listed.shape)[listed]
        assert np.allclose(r.span.topk_logprobs[listed], mine, atol=1e-5)


def test_more_best_tokens_than_there_are_is_refused_before_anything_is_sampled(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="needs the 300 most likely tokens, the vocabulary has 288"):
        run(tmp_path / "run", "objective.name=dppo_topk_tv", "objective.k=300", "sft.steps=0")


def test_effective_sample_size_is_that_of_the_weight_that_is_used(tmp_path: Path) -> None:
    """Under fp8 ρ varies; a weight cut off at 0.5 hardly does."""
    words = ["engine.dtype=fp8", "run.steps=1", "objective.name=tis"]
    loose, tight = (run(tmp_path / cap, *words, f"objective.cap={cap}")[1] for cap in ("100", "0.5"))
    assert loose["mismatch/second_moment"] == tight["mismatch/second_moment"]
    rho = loose["mismatch/ratio_mean"] ** 2 / loose["mismatch/second_moment"]
    assert loose["mismatch/ess"] == pytest.approx(rho, rel=1e-5)
    assert rho + 1e-6 < tight["mismatch/ess"] <= 1


def credited(words: list[str], rollouts: list[Rollout], known: OldScores) -> tuple[dict[int, float], dict[str, float]]:
    objective: Any = SimpleNamespace(advantage="dr_grpo")
    return credit_of(load(None, [*SHORT, *words]), objective, 1, rollouts, known)


def test_kl_and_length_enter_the_reward_by_hand(plain: Path) -> None:
    """R − mean over one group of three, of rewards that lose γ·Σ(log o − log ref) and the overlong penalty."""
    some = to_rollouts(read_step(plain / "rollouts" / "step_000001.parquet"))[:3]
    span = next(r.span for r in some if len(r.span) >= 3)
    cut = {n: getattr(span, n) for n in ("token_ids", "logprobs", "kept_mass", "versions", "kv_versions")}
    rollouts = [
        replace(r, group=0, reward=reward, span=TokenSpan(**{k: v[:n] for k, v in cut.items()}))
        for r, reward, n in zip(some, (1.0, 0.0, 0.0), (1, 2, 3), strict=True)
    ]
    old, ref = torch.tensor([-1.0, -1, -2, -3, -1, -1]), torch.tensor([-1.5, -1, -1, -3, -1, -3])
    known = OldScores(old=Scores(old, old), ref=ref)  # Σ(log o − log ref): 0.5; −1; 2
    ids = [r.id for r in rollouts]
    credit, metrics = credited([], rollouts, known)
    assert [credit[i] for i in ids] == pytest.approx([2 / 3, -1 / 3, -1 / 3])
    assert metrics == {}
    words = ["train.kl_in=reward", "train.kl_estimator=k1", "train.kl_coefficient=0.1"]
    credit, metrics = credited(words, rollouts, known)
    shaped = np.array([0.95, 0.1, -0.2])
    assert [credit[i] for i in ids] == pytest.approx(shaped - shaped.mean(), abs=1e-6)
    assert metrics == pytest.approx({"reward/kl_penalty": 0.05, "reward/shaped_mean": shaped.mean()})
    # k2 is ½(log o − log ref)²: 0.125, 0.5, 2. max_new_tokens is 4: lengths 1, 2, 3 lose 0, 0, 0.5 with a buffer of 2.
    words = ["train.kl_in=reward", "train.kl_estimator=k2", "train.kl_coefficient=0.1", "reward.overlong.buffer=2"]
    credit, metrics = credited(words, rollouts, known)
    shaped = np.array([1 - 0.0125, -0.05, -0.2 - 0.5])
    assert [credit[i] for i in ids] == pytest.approx(shaped - shaped.mean(), abs=1e-6)
    assert metrics["reward/overlong_penalty"] == pytest.approx(0.5 / 3)
    assert metrics["reward/overlong_share"] == pytest.approx(1 / 3)


def test_kl_in_the_reward_leaves_the_loss_and_pulls_to_the_start(tmp_path: Path) -> None:
    words = ["train.kl_in=reward", "train.kl_estimator=k1", "run.steps=16", "advantages.name=dr_grpo"]
    free, held = (run(tmp_path / c, *words, f"train.kl_coefficient={c}") for c in ("1e-9", "0.3"))
    for row in held[1:]:
        assert {"reward/kl_penalty", "policy/kl_base", "reward/mean"} <= set(row)
        assert "loss/kl" not in row
    assert held[1]["reward/kl_penalty"] == 0  # the start model against itself
    far, near = (np.mean([row["policy/kl_base"] for row in found[9:]]) for found in (free, held))
    assert near < 0.6 * far


def test_the_length_penalty_changes_credit_and_not_the_reported_reward(plain: Path, tmp_path: Path) -> None:
    found = run(tmp_path / "run", "reward.overlong.buffer=3", "run.steps=1")
    credit, reward = advantages(tmp_path / "run", 1)
    assert found[1]["reward/mean"] == rows(plain)[1]["reward/mean"]
    drawn = to_rollouts(read_step(tmp_path / "run" / "rollouts" / "step_000001.parquet"))
    lost = {r.id: max(len(r.span) - 1, 0) / 3 for r in drawn}
    assert found[1]["reward/overlong_penalty"] == pytest.approx(np.mean(list(lost.values())))
    assert found[1]["reward/overlong_share"] == pytest.approx(np.mean([v > 0 for v in lost.values()]))
    for r in drawn:
        group = np.array([reward[o.id] - lost[o.id] for o in drawn if o.group == r.group])
        spread = group.std(ddof=1)
        expected = 0 if np.ptp(group) == 0 else (reward[r.id] - lost[r.id] - group.mean()) / (spread + 1e-6)
        assert credit[r.id] == pytest.approx(expected, abs=1e-5)
    with pytest.raises(BadInput, match=r"reward\.overlong\.buffer: expected at most sampling\.max_new_tokens=4, got 5"):
        run(tmp_path / "long", "reward.overlong.buffer=5")


def test_dynamic_sampling_fills_the_batch_with_groups_that_differ(plain: Path, tmp_path: Path) -> None:
    found = run(tmp_path / "run", "rollout.zero_variance=4")
    at = 0
    for step, row in enumerate(found[1:], 1):
        table = read_step(tmp_path / "run" / "rollouts" / f"step_{step:06d}.parquet")
        groups: dict[int, list[Rollout]] = {}
        for r in to_rollouts(table):
            groups.setdefault(r.group, []).append(r)
        assert list(groups) == list(range(at, at + len(groups)))  # every prompt once, none skipped
        assert [g[0].prompt.index for g in groups.values()] == list(groups)
        at += len(groups)
        varied = [i for i, g in groups.items() if len({r.reward for r in g}) > 1]
        trained = {r.group for r in to_rollouts(table) if r.id in per_token(table, "advantages")}
        assert trained == set(varied[:8])
        assert row["rollout/dynamic_discarded"] == len(groups) - len(trained)
        assert row["groups/count"] == len(groups)
        assert row["groups/zero_variance"] == len(groups) - len(varied)
        assert 1 <= row["rollout/dynamic_rounds"] <= 4
    # The first round is what a run without it samples.
    assert max(row["rollout/dynamic_rounds"] for row in found[1:]) > 1
    one = run(tmp_path / "one", "rollout.zero_variance=1", "run.steps=1")
    dropped = run(tmp_path / "dropped", "rollout.zero_variance=drop", "run.steps=1")
    extra = {"rollout/dynamic_rounds", "rollout/dynamic_discarded"}
    assert [{k: v for k, v in row.items() if k not in extra} for row in one] == dropped


def test_rounds_of_failures_stop_the_run_in_the_first_one(tmp_path: Path, broken_grader: str) -> None:
    words = [*file_data(tmp_path), f"data.grader={broken_grader}", "sft.steps=0", "rollout.zero_variance=9"]
    with pytest.raises(GraderFailure, match=r"32 of 32 rollouts failed"):
        run(tmp_path / "run", *words, "run.steps=5")


def test_a_controller_sees_the_mismatch_even_where_one_update_is_the_old_pass(tmp_path: Path) -> None:
    """With ρ = o/q taken for 1 everywhere, the bound would be 1 and drop what it should keep."""
    words = ["objective={name: icepop, high: {drop_rate: 0.05}}", "engine.dtype=fp8"]
    found = run(tmp_path / "run", *words, "train.updates_per_step=1")
    bounds = [row[k] for row in found[1:] for k in row if k.startswith("controller/") and k.endswith("bound")]
    assert bounds
    assert all(bound > 1.001 for bound in bounds)


def test_the_dapo_recipe_uses_what_dapo_needs(tmp_path: Path) -> None:
    config = load("dapo", [*SHORT, f"run.dir={tmp_path / 'run'}"])
    assert config.objective.name == "dapo"
    assert config.rollout.zero_variance == "refill"
    train(load("dapo", [*SHORT, "reward.overlong.buffer=2", f"run.dir={tmp_path / 'run'}"]))
    for row in rows(tmp_path / "run")[1:]:
        assert {"rollout/dynamic_rounds", "reward/overlong_penalty", "clip/high", "clip/low"} <= set(row)


def test_an_advantage_that_there_is_not_is_refused_before_anything_is_sampled(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"advantages.name 'grop': unknown; did you mean grpo\?"):
        run(tmp_path / "run", "objective={name: composed, advantage: grop}")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
