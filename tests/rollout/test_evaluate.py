"""The number a run is judged by: avg@k, its standard error and greedy accuracy, by hand on scripted answers.

Not covered: graders and tasks (their own tests), sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from test_collect import ScriptedEngine, prompts_of

from rollkeel.models.presets import EOS, build_tokenizer
from rollkeel.rollout.evaluate import evaluate
from rollkeel.types import Prompt, Request, Rollout, SamplingParams, Segment, Status

TOKENIZER = build_tokenizer()
SAMPLED = SamplingParams(max_new_tokens=4, stop_token_ids=(EOS,), temperature=0.9, top_p=0.8, seed=5)


class TableGrader:
    """Rewards by rollout id, one table for sampled answers and one for greedy; None breaks."""

    def __init__(self, sampled: Sequence[float | None], greedy: Sequence[float | None] = ()) -> None:
        self.tables = {False: sampled, True: greedy}
        self.seen: list[Rollout] = []

    def grade(self, rollouts: Sequence[Rollout]) -> list[Rollout]:
        self.seen += rollouts
        out = []
        for r in rollouts:
            value = self.tables[r.sampling.temperature == 0][r.id]
            failed = {"status": Status.GRADER_FAILURE} if value is None else {}
            out.append(replace(r, reward=value, **failed))
        return out


class Backwards(ScriptedEngine):
    """Answers everything at the first poll after a submit, last first."""

    def __init__(self) -> None:
        super().__init__([], lambda r: r[::-1])
        self.rounds: list[list[Request]] = []

    def submit(self, requests: Sequence[Request]) -> None:
        super().submit(requests)
        self.rounds.append(list(requests))
        self.script = [len(requests)]


def run(
    grader: TableGrader, prompts: list[Prompt], samples: int, greedy: bool, sampling: SamplingParams = SAMPLED, engine: Backwards | None = None
) -> tuple[dict[str, float], list[Rollout]]:  # fmt: skip
    return evaluate(
        engine or Backwards(), grader, TOKENIZER, prompts, sampling, samples=samples, greedy=greedy, deadline_s=5.0
    )


def test_avg_at_k_and_its_standard_error_by_hand() -> None:
    # Items: (1, 0), (1, 1), (0, 0) → means 0.5, 1, 0: average 0.5; sample std 0.5; error 0.5 / √3.
    metrics, rollouts = run(TableGrader([1, 0, 1, 1, 0, 0]), prompts_of(3), 2, False)
    assert metrics["eval/toy/avg@k"] == pytest.approx(0.5)
    assert metrics["eval/toy/avg@k_se"] == pytest.approx(0.5 / 3**0.5)
    assert metrics["eval/toy/k"] == 2
    assert metrics["eval/toy/failed"] == 0
    assert "eval/toy/greedy" not in metrics
    assert len(rollouts) == 6


def test_greedy_is_one_untempered_answer_per_item() -> None:
    engine = Backwards()
    metrics, rollouts = run(TableGrader([1, 0], [1, 0, 1, 1]), prompts_of(4), 0, True, engine=engine)
    assert metrics["eval/toy/greedy"] == pytest.approx(0.75)
    assert "eval/toy/avg@k" not in metrics
    [requests] = engine.rounds
    assert {(r.sampling.temperature, r.sampling.top_p, r.sampling.top_k, r.sampling.min_p) for r in requests} == {(0.0, 1.0, 0, 0.0)}  # fmt: skip
    assert len(rollouts) == 4


def test_both_even_when_the_sampling_itself_is_greedy() -> None:
    greedy = replace(SAMPLED, temperature=0.0, top_p=1.0)
    metrics, _ = run(TableGrader([], [1, 0]), prompts_of(2), 1, True, greedy)
    assert metrics["eval/toy/avg@k"] == metrics["eval/toy/greedy"] == pytest.approx(0.5)


def test_broken_graders_are_counted_and_left_out_not_scored_zero() -> None:
    # Items: (1, broken), (1, 1), (broken, broken) → means 1 and 1 of the two items that have any.
    metrics, _ = run(TableGrader([1, None, 1, 1, None, None]), prompts_of(3), 2, False)
    assert metrics["eval/toy/avg@k"] == 1.0
    assert metrics["eval/toy/avg@k_se"] == 0.0
    assert metrics["eval/toy/failed"] == 3


def test_failed_engines_are_counted_and_not_graded() -> None:
    class Half(Backwards):
        def poll(self, timeout_s: float) -> list[Segment]:
            out = super().poll(timeout_s)
            return [replace(s, status=Status.ENGINE_FAILURE, detail="gone") if s.request_id < 2 else s for s in out]

    grader = TableGrader([0, 0, 1, 0])
    metrics, rollouts = run(grader, prompts_of(2), 2, False, engine=Half())
    assert [r.id for r in grader.seen] == [2, 3]
    assert metrics["eval/toy/avg@k"] == pytest.approx(0.5)
    assert metrics["eval/toy/failed"] == 2
    assert "eval/toy/avg@k_se" not in metrics  # one item has no spread
    assert len(rollouts) == 2


def test_everything_failed_reports_no_accuracy_at_all() -> None:
    metrics, _ = run(TableGrader([None, None], [None, None]), prompts_of(2), 1, True)
    assert metrics == {"eval/toy/failed": 4.0}


def test_tasks_are_kept_apart() -> None:
    prompts = prompts_of(2) + prompts_of(2, "other")
    metrics, _ = run(TableGrader([1, 1, 0, 1]), prompts, 1, False)
    assert metrics["eval/toy/avg@k"] == 1.0
    assert metrics["eval/other/avg@k"] == pytest.approx(0.5)
    assert metrics["eval/other/avg@k_se"] == pytest.approx(0.5)  # std of (0, 1) is 0.7071; / √2


def test_the_same_items_draw_the_same_numbers_at_every_evaluation() -> None:
    engine = Backwards()
    for _ in range(2):
        run(TableGrader([1, 1, 1, 1]), prompts_of(2), 2, False, engine=engine)
    first, second = ([(r.id, r.sampling.seed) for r in requests] for requests in engine.rounds)
    assert first == second
