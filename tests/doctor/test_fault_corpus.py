"""The injected faults of `benchmarks/doctor`: each changes the one thing it says and nothing else, or the matrix means nothing.

Not covered: whether a magnitude matters in its run (`python -m benchmarks.doctor measure`), and what the doctor makes of it (`score`).
"""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.doctor import alterations as alter
from benchmarks.doctor import patches as broken
from benchmarks.doctor import sizes
from benchmarks.doctor.cases import fault_cases, healthy_cases
from benchmarks.doctor.faults import BASES, FAULTS
from benchmarks.doctor.healthy import KINDS
from benchmarks.doctor.lookup import Lookup
from benchmarks.doctor.shifting import Shifting
from benchmarks.doctor.sorting import Sorting
from benchmarks.doctor.workloads import OWN_TASKS, SPLITS, today, words_of
from rollkeel.engines import decode, local
from rollkeel.loop import steps as loop
from rollkeel.loop.check import validate
from rollkeel.recipe import load
from rollkeel.tasks import TASKS, check
from rollkeel.types import (
    GraderSpec,
    Prompt,
    Request,
    Rollout,
    SamplingParams,
    Segment,
    Status,
    StepRollouts,
    TokenSpan,
)

IDS = [
    "temperature",
    "truncation",
    "alignment",
    "mask",
    "retokenised",
    "wrong_weights",
    "stale_version",
    "stale_kv",
    "quantisation",
    "routing",
    "policy_lag",
    "entropy_collapse",
    "reward_failures",
    "length_truncation",
    "learning_rate",
]


def span(ids: list[int]) -> TokenSpan:
    n = len(ids)
    return TokenSpan(
        token_ids=np.array(ids),
        logprobs=-np.arange(1, n + 1, dtype=np.float32) / 4,
        kept_mass=np.linspace(0.5, 0.9, n, dtype=np.float32),
        versions=np.arange(n) + 7,
        kv_versions=np.arange(n) + 2,
        experts=np.arange(n * 2, dtype=np.int16).reshape(n, 2, 1),
    )


def rollout(ids: list[int]) -> Rollout:
    prompt = Prompt(
        id="a",
        index=0,
        text="12=",
        token_ids=np.array([31, 32, 33]),
        answer="1",
        grader=GraderSpec(name="exact"),
        task="t",
    )
    return Rollout(
        id=5,
        group=1,
        member=1,
        prompt=prompt,
        span=span(ids),
        status=Status.FINISHED,
        sampling=SamplingParams(),
        engine="local",
        dtype="fp32",
        reward=1.0,
        text="1",
        detail="1",
    )


def changed(one: Any, other: Any) -> set[str]:
    """Names of the fields that differ; those of `span` and `prompt` with a dot."""
    out = set()
    for f in fields(one):
        a, b = getattr(one, f.name), getattr(other, f.name)
        if f.name in ("span", "prompt"):
            out |= {f"{f.name}.{name}" for name in changed(a, b)}
        elif not np.array_equal(a, b):
            out.add(f.name)
    return out


HONEST = rollout([10, 11, 12, 2])


def test_shifted_takes_the_neighbours_logprobs() -> None:
    for by, expected in ((1, [2, 3, 4, 4]), (-1, [1, 1, 2, 3]), (2, [3, 4, 4, 4])):
        new = alter.shifted(HONEST, by)
        assert changed(HONEST, new) == {"span.logprobs"}
        np.testing.assert_allclose(new.span.logprobs * -4, expected)


def test_unnormalised_is_the_full_distribution_without_a_record() -> None:
    new = alter.unnormalised(HONEST)
    assert changed(HONEST, new) == {"span.logprobs", "span.kept_mass"}
    np.testing.assert_allclose(
        np.exp(new.span.logprobs), np.exp(HONEST.span.logprobs) * HONEST.span.kept_mass, rtol=1e-6
    )
    assert (new.span.kept_mass == 1).all()


def test_prompt_in_mask_moves_the_border_and_samples_nothing() -> None:
    new = alter.prompt_in_mask(HONEST, 2)
    whole = [np.concatenate([r.prompt.token_ids, r.span.token_ids]).tolist() for r in (HONEST, new)]
    assert whole[0] == whole[1]
    assert len(new.prompt.token_ids) == 1
    assert new.span.logprobs[:2].tolist() == [0, 0]
    np.testing.assert_array_equal(new.span.logprobs[2:], HONEST.span.logprobs)
    assert new.text == "2=1"
    assert changed(HONEST, new) - {"prompt.token_ids", "text"} == {
        f"span.{name}" for name in ("token_ids", "logprobs", "kept_mass", "versions", "kv_versions", "experts")
    }


def test_prompt_in_mask_leaves_a_token_of_prompt() -> None:
    assert len(alter.prompt_in_mask(HONEST, 9).prompt.token_ids) == 1


def test_inserted_keeps_everything_around_it() -> None:
    new = alter.inserted(HONEST.span, 4, np.array([90, 91]))
    assert new.token_ids.tolist() == [10, 11, 12, 2, 90, 91]
    assert new.versions.tolist() == [7, 8, 9, 10, 10, 10]
    assert new.experts is not None
    assert len(new.experts) == 6
    assert alter.inserted(HONEST.span, 1, np.array([90])).token_ids.tolist() == [10, 90, 11, 12, 2]


def test_text_with_tool_output_is_that_of_the_tokens() -> None:
    assert alter.with_output(replace(HONEST, text="abc"), "<r>", 2).text == "ab<r>c"
    assert alter.with_output(HONEST, "<r>", 4) is HONEST


def test_kv_denied_states_young_kv() -> None:
    new = alter.kv_denied(HONEST)
    assert changed(HONEST, new) == {"span.kv_versions"}
    np.testing.assert_array_equal(new.span.kv_versions, HONEST.span.versions)


def test_reward_lost_hits_its_share() -> None:
    rng = np.random.default_rng(0)
    new = [alter.reward_lost(HONEST, rng, 0.2, "") for _ in range(2000)]
    lost = [r for r in new if r.reward == 0]
    assert 0.17 < len(lost) / 2000 < 0.23
    assert changed(HONEST, lost[0]) == {"reward", "detail"}
    assert all(r is HONEST for r in new if r.reward == 1)
    told = alter.reward_lost(replace(HONEST, detail="read 1"), np.random.default_rng(0), 1.0, None)
    assert (told.reward, told.detail) == (0.0, "read 1")


def test_a_shift_in_a_part_of_the_rollouts() -> None:
    (patch,) = sizes.alignment(1, 0.3).patches(3)
    got: list[StepRollouts] = []
    honest = loop.learn
    loop.learn = lambda run, drawn, *rest: got.append(drawn) or {}
    try:
        with patch():
            many = [replace(HONEST, id=i) for i in range(1000)]
            loop.learn(None, StepRollouts(rollouts=many, batch=many), None)  # type: ignore[arg-type]
    finally:
        loop.learn = honest
    moved = sum(not np.array_equal(r.span.logprobs, HONEST.span.logprobs) for r in got[0].rollouts)
    assert 250 < moved < 350


def test_the_corpus_own_tasks_are_sound() -> None:
    assert check(Sorting(), 50).passed
    assert Sorting().item(0, "train", 0).answer == "".join(sorted(Sorting().item(0, "train", 0).text[:-1]))
    assert check(Lookup(), 50).passed
    assert check(Shifting(), 50).passed
    items = [Lookup().item(0, "train", i) for i in range(200)]
    assert all(item.answer == Lookup().entry(item.text[0]) + Lookup().entry(item.text[1]) for item in items)
    assert len({len(item.answer) for item in items}) > 4


def test_retokenised_is_the_same_text_in_fewer_tokens() -> None:
    pairs = {(10, 11): 99}
    new = alter.retokenised(HONEST, lambda ids: broken.merged(ids, pairs))
    assert new.span.token_ids.tolist() == [99, 12, 2]
    np.testing.assert_array_equal(new.span.logprobs, HONEST.span.logprobs[:3])
    assert alter.retokenised(new, lambda ids: broken.merged(ids, pairs)) is new


def test_merged_goes_from_the_left() -> None:
    pairs = {(1, 2): 12, (2, 3): 23, (1, 1): 11}
    assert broken.merged([1, 2, 3], pairs) == [12, 3]
    assert broken.merged([1, 1, 1], pairs) == [11, 1]
    assert broken.merged([], pairs) == []


def test_pair_tokenizer_reads_both_spellings_and_writes_one() -> None:
    pairs = broken.pairs_of("0123456789", "+-*/")
    tokenizer = broken._tokenizer(pairs)
    (one, other), token = next(iter(pairs.items()))
    assert tokenizer.decode([one, other]) == tokenizer.decode([token])
    assert tokenizer(tokenizer.decode([token]), add_special_tokens=False)["input_ids"] == [one, other]


def test_altered_hands_the_same_rollouts_on() -> None:
    other = replace(HONEST, id=6)
    drawn, got = StepRollouts(rollouts=[HONEST, other], batch=[other]), []
    honest = loop.learn
    loop.learn = lambda run, drawn, *rest: got.append(drawn) or {}
    try:
        with broken.altered(lambda r, rng: alter.shifted(r, 1), 0):
            loop.learn(None, drawn, None)  # type: ignore[arg-type]
    finally:
        loop.learn = honest
    assert [r.id for r in got[0].rollouts] == [5, 6]
    assert [r.id for r in got[0].batch] == [6]
    assert changed(HONEST, got[0].rollouts[0]) == {"span.logprobs"}


def test_raw_logprobs_draw_as_before_and_log_the_model() -> None:
    logits = torch.tensor([[2.0, 0.0, -1.0]])
    one = torch.ones(1)
    rows = decode.SamplingRows(
        temperature=one * 0.5,
        top_p=one,
        top_k=torch.zeros(1, dtype=torch.int64),
        min_p=one * 0,
        truncated=False,
        tempered=True,
    )
    uniform = torch.tensor([0.99], dtype=torch.float64)
    nothing: Any = None
    honest = decode.Decode(nothing, nothing, nothing)._sample(logits, rows, uniform)
    with broken.raw_logprobs():
        raw = decode.Decode(nothing, nothing, nothing)._sample(logits, rows, uniform)
    assert raw.ids.tolist() == honest.ids.tolist()
    torch.testing.assert_close(raw.logprobs, logits.log_softmax(-1)[:, raw.ids[0]])
    torch.testing.assert_close(honest.logprobs, (logits / 0.5).log_softmax(-1)[:, honest.ids[0]])


def weights() -> dict[str, torch.Tensor]:
    names = ["lm_head.weight", "model.norm.weight", "model.layers.1.self_attn.q_proj.weight"]
    names += [f"model.layers.1.mlp.experts.{e}.up_proj.weight" for e in (0, 1, 2)]
    return {name: torch.full((4, 2), float(i)) + torch.arange(4.0)[:, None] / 10 for i, name in enumerate(names)}


@pytest.mark.parametrize(
    ("change", "touched"),
    [
        (broken.experts_rolled(1, 1), {"experts."}),
        (broken.heads_rolled(1, 2), {"q_proj"}),
        (broken.constant(r"^model\.norm\.weight", 1.0), {"model.norm"}),
    ],
)
def test_weight_changes_touch_what_they_name(change: Any, touched: set[str]) -> None:
    before, after = weights(), weights()
    change(after, {})
    differ = {name for name in before if not torch.equal(before[name], after[name])}
    assert differ == {name for name in before if any(part in name for part in touched)}


def test_rolled_experts_move_by_one() -> None:
    before, after = weights(), weights()
    broken.experts_rolled(1, 1)(after, {})
    stem = "model.layers.1.mlp.experts.{}.up_proj.weight"
    for e in range(3):
        assert torch.equal(after[stem.format(e)], before[stem.format((e + 1) % 3)])


def test_exchanged_layers_hold_each_others_tensors() -> None:
    before = weights() | {"model.layers.0.mlp.experts.2.up_proj.weight": torch.full((4, 2), 9.0)}
    after = {name: tensor.clone() for name, tensor in before.items()}
    broken.exchanged("layers.0.mlp.experts.2", "layers.1.mlp.experts.2")(after, {})
    stem = "model.layers.{}.mlp.experts.2.up_proj.weight"
    assert torch.equal(after[stem.format(0)], before[stem.format(1)])
    assert torch.equal(after[stem.format(1)], before[stem.format(0)])
    assert all(torch.equal(after[n], before[n]) for n in before if "experts.2" not in n)


def test_keep_first_returns_to_the_first_publication() -> None:
    change, memory, first = broken.keep_first("lm_head"), {}, weights()
    change(first, memory)
    later = {name: tensor + 5 for name, tensor in weights().items()}
    change(later, memory)
    assert torch.equal(later["lm_head.weight"], weights()["lm_head.weight"])
    assert torch.equal(later["model.norm.weight"], weights()["model.norm.weight"] + 5)


class Echo:
    """Samples 40, 41, … behind what it has, until the limit; ends with 2 at `stop` tokens."""

    def __init__(self, stop: int) -> None:
        self.stop, self.queue = stop, []

    def submit(self, requests: list[Request]) -> None:
        self.queue += requests

    def poll(self, timeout_s: float) -> list[Segment]:
        done, self.queue = self.queue, []
        return [self._one(r) for r in done]

    def _one(self, r: Request) -> Segment:
        have, limit = len(r.prefix), r.sampling.max_new_tokens
        ids = [2 if n == self.stop else 40 + n for n in range(have, min(limit, self.stop + 1))]
        status = Status.FINISHED if ids[-1] == 2 else Status.LENGTH
        return Segment(request_id=r.id, span=replace(span(ids), experts=None), status=status)


def tool(stop: int, limit: int) -> Segment:
    engine = broken.ToolEngine(Echo(stop), [90, 91], 2)
    engine.submit([Request(id=3, prompt_ids=np.array([1]), sampling=SamplingParams(max_new_tokens=limit))])
    ended: list[Segment] = []
    for _ in range(3):
        ended += engine.poll(0)
    (segment,) = ended
    return segment


def test_tool_output_stands_inside_the_answer() -> None:
    segment = tool(stop=6, limit=9)
    assert segment.span.token_ids.tolist() == [40, 41, 90, 91, 44, 45, 2]
    assert segment.span.logprobs[2:4].tolist() == [0, 0]
    assert segment.status is Status.FINISHED


def test_an_answer_that_ends_before_has_no_tool_output() -> None:
    assert tool(stop=1, limit=9).span.token_ids.tolist() == [40, 2]


def test_no_more_comes_back_than_was_asked_for() -> None:
    """The collector refuses a longer answer: the run would end."""
    segment = tool(stop=20, limit=5)
    assert (len(segment.span), segment.status) == (5, Status.LENGTH)


def test_dropped_updates_keep_the_old_weights_and_state_the_new() -> None:
    served: list[int] = []

    class Engine:
        _version = -1

        def update_weights(self, update: Any) -> Any:
            served.append(update.version)
            self._version = update.version

    honest, local.LocalEngine = local.LocalEngine, Engine  # type: ignore[misc]
    try:
        with broken.updates_dropped(lambda n: n % 2 == 0):
            engine = Engine()
            for version in range(4):
                engine.update_weights(SimpleNamespace(version=version, checksum=1))
                assert engine._version == version
    finally:
        local.LocalEngine = honest
    assert served == [0, 2]


def test_every_fault_is_there_with_sizes_of_its_own_in_every_split() -> None:
    assert list(FAULTS) == IDS
    for fault in FAULTS.values():
        for model in fault.models:
            seen: set[str] = set()
            if fault.id == "length_truncation":
                continue  # so many tokens are another size where answers are of other lengths
            for split in SPLITS:
                names = {m.name for m in fault.magnitudes(split, model)}
                assert names - seen, (fault.id, split)
                seen |= names


@pytest.mark.usually("dev5", "test")
@pytest.mark.parametrize("split", SPLITS)
def test_every_config_of_the_corpus_is_valid(split: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, task in OWN_TASKS.items():
        monkeypatch.setitem(TASKS, name, task)
    cases = [*fault_cases(split, 10), *healthy_cases(split, 2)]
    assert len({case.path(Path()) for case in cases}) == len(cases)
    for case in cases:
        if case.seed % 10 > 5:
            continue  # sizes and bases have taken their turns
        if case.fault == "healthy":
            words = KINDS[case.kind].words
        else:
            size = FAULTS[case.fault].magnitudes(split, case.model)[case.index]
            words = [*BASES[case.base][split], *size.words]
        validate(load(None, today(words_of(split, case.model, case.seed, words))))


def test_enough_cases() -> None:
    assert len([*fault_cases("test", 10)]) == 15 * 10 * 2
    assert len([*healthy_cases("test", 2)]) >= 60
