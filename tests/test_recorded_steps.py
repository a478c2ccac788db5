"""A decode step that is recorded once and played again gives the tokens of the step that runs from Python, to the bit. On CUDA a
record is a graph: whatever it took from Python's state would be served for ever, silently.

Records are those of `recorded_graph.py`, on the device of `pretend.py`. Not covered: CUDA's own graphs (`test_cuda.py`, behind
`-m cuda`), which never ran here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from pretend import DEVICE, JOURNAL
from recorded_graph import RecordedGraphs

from rollkeel.config import EngineConfig, LoraConfig, ModelConfig
from rollkeel.engines.decode import CudaGraphs, graphs_for, padded, widened
from rollkeel.engines.kv import Layout
from rollkeel.engines.local import LocalEngine
from rollkeel.models.forward import FastForward
from rollkeel.models.loading import Policy, load_policy
from rollkeel.models.names import checkpoint_views
from rollkeel.sync.publish import DirectPublisher
from rollkeel.types import Request, SamplingParams, Segment, Status

PLAIN = {"seed": 1, "stop_token_ids": tuple(range(8, 14))}
ASKED: dict[str, dict[str, Any]] = {
    "plain": {},
    "tempered": {"temperature": 0.7},
    "truncated": {"top_p": 0.8, "top_k": 40, "min_p": 0.01},
    "greedy": {"temperature": 0.0},
    "best": {"return_topk": 3},
}


def policy(preset: str) -> Policy:
    fields = {"hidden_size": 32, "initializer_range": 0.3, "num_hidden_layers": 2}
    return load_policy(ModelConfig(path=f"preset:{preset}", overrides=fields), DEVICE)


def opened(made: Policy, graphs: RecordedGraphs | None, **options: Any) -> LocalEngine:
    config = EngineConfig(forward="fast", **{"slots": 6, **options})
    return LocalEngine(
        made.model.config, config, device=DEVICE, max_length=96, layout=Layout(block_size=4), graphs=graphs
    )


def rollouts(engine: LocalEngine, made: Policy, **sampling: Any) -> list[Segment]:
    """Requests of many lengths and stops in fewer slots, that join and leave, with new weights twice and interruptions."""
    publisher, rng = DirectPublisher([engine]), np.random.default_rng(0)
    publisher.publish(checkpoint_views(made.model).items(), 0)
    prompts = [rng.integers(8, 264, n) for n in (3, 3, 17, 30, 5, 5, 5, 16, 1, 40, 7, 9)]
    about = [SamplingParams(**{"max_new_tokens": 6 * i + 1, **PLAIN, **sampling}) for i in range(len(prompts))]
    for i, asked in enumerate(about[:9]):
        engine.submit([Request(id=i, prompt_ids=prompts[i], sampling=asked)])
    out = engine.advance(7)
    changed = [(name, view * 1.01) for name, view in checkpoint_views(made.model).items()]
    publisher.publish(changed, 1)
    out += engine.advance(3)
    engine.interrupt([6])
    part = next(s for s in engine.poll(0) if s.request_id == 6)
    engine.submit([Request(id=6, prompt_ids=prompts[6], sampling=about[6], prefix=part.span, kv=part.kv)])
    engine.submit([Request(id=i, prompt_ids=prompts[i], sampling=about[i]) for i in (9, 10, 11)])
    out += engine.advance(20)
    publisher.publish(checkpoint_views(made.model).items(), 2)
    while engine.busy:
        out += engine.poll(9)
    return sorted(out, key=lambda s: s.request_id)


def assert_same(these: list[Segment], those: list[Segment]) -> None:
    assert [(s.request_id, s.status) for s in these] == [(s.request_id, s.status) for s in those]
    for one, other in zip(these, those, strict=True):
        for name in (
            "token_ids",
            "logprobs",
            "kept_mass",
            "versions",
            "kv_versions",
            "experts",
            "topk_ids",
            "topk_logprobs",
        ):
            mine, theirs = getattr(one.span, name), getattr(other.span, name)
            assert (mine is None) == (theirs is None)
            assert mine is None or np.array_equal(mine, theirs), name


CASES = [
    *[("tiny-qwen3", "fp32", "recompute", name) for name in ASKED],
    ("tiny-qwen3", "fp32", "keep", "plain"),
    *[("tiny-qwen3-tied", dtype, "recompute", "tempered") for dtype in ("bf16", "fp8", "int8")],
    *[("tiny-qwen3-moe", dtype, "recompute", "experts") for dtype in ("fp32", "fp8")],
    ("tiny-qwen3-moe", "bf16", "keep", "experts"),
]


@pytest.mark.usually(
    "tiny-qwen3-fp32-recompute-truncated",
    "tiny-qwen3-tied-int8-recompute-tempered",
    "tiny-qwen3-moe-bf16-keep-experts",
)
@pytest.mark.parametrize(("preset", "dtype", "kv", "asked"), CASES)
def test_a_played_step_is_the_step(preset: str, dtype: str, kv: str, asked: str) -> None:
    made, graphs = policy(preset), RecordedGraphs()
    sampling = {"return_experts": True} if asked == "experts" else ASKED[asked]
    eager = rollouts(opened(made, None, dtype=dtype, kv=kv), made, **sampling)
    JOURNAL.clear()
    played = rollouts(opened(made, graphs, dtype=dtype, kv=kv), made, **sampling)
    assert_same(eager, played)
    assert {s.status for s in played} == {Status.FINISHED, Status.LENGTH}
    assert dict(JOURNAL.mixed) == {}
    sizes, widths = {padded(n, 6) for n in range(1, 7)}, {widened(n, 24) for n in range(1, 25)}
    assert (sizes, widths) == ({1, 2, 4, 6}, {8, 16, 24})
    assert 4 <= len(graphs.records) <= 12
    assert sum(record.played for record in graphs.records) > 5 * len(graphs.records)


def test_a_record_is_made_anew_when_its_memory_has_grown() -> None:
    """Longer lists of stops, more of the best tokens and longer answers need larger tensors: what was recorded knows the old ones."""
    made = policy("tiny-qwen3-moe")
    about = [
        {"max_new_tokens": 9, "return_topk": 2, "return_experts": True},
        {"max_new_tokens": 9, "return_topk": 2, "return_experts": True, "stop_token_ids": (8, 9)},
        {"max_new_tokens": 30, "return_topk": 2, "return_experts": True},
        {"max_new_tokens": 30, "return_topk": 4, "return_experts": True, "stop_token_ids": tuple(range(8, 60))},
        {"max_new_tokens": 9, "return_topk": 2, "return_experts": True},
    ]
    out, graphs, counts = list[list[Segment]](), RecordedGraphs(), list[int]()
    for recorder in (None, graphs):
        engine = opened(made, recorder)
        DirectPublisher([engine]).publish(checkpoint_views(made.model).items(), 0)
        out.append([])
        for i, asked in enumerate(about):
            engine.submit([Request(id=i, prompt_ids=np.arange(9, 12 + i), sampling=SamplingParams(**asked))])
            out[-1] += engine.advance(40)
            counts.append(len(graphs.records))
    assert_same(*out)
    first, second, third, fourth, last = counts[len(about) :]
    assert first < second < third < fourth == last - 1


def test_a_long_prompt_takes_no_memory_from_a_record() -> None:
    made, graphs = policy("tiny-qwen3"), RecordedGraphs()
    engine = opened(made, graphs)
    DirectPublisher([engine]).publish(checkpoint_views(made.model).items(), 0)
    out = list[Segment]()
    for size in (5, 80, 5):
        asked = SamplingParams(max_new_tokens=6)
        engine.submit([Request(id=0, prompt_ids=np.arange(9, 9 + size), sampling=asked)])
        out += engine.advance(9)
    assert_same(out[:1], out[2:])
    assert len(graphs.records) == 2


def test_one_alone_and_among_others() -> None:
    made, graphs = policy("tiny-qwen3"), RecordedGraphs()
    engine = opened(made, graphs)
    DirectPublisher([engine]).publish(checkpoint_views(made.model).items(), 0)
    asked = SamplingParams(max_new_tokens=30, seed=3)
    requests = [Request(id=i, prompt_ids=np.arange(9 + i, 14 + 2 * i), sampling=asked) for i in range(6)]
    engine.submit(requests)
    JOURNAL.clear()
    together = engine.advance(40)
    assert sum(JOURNAL.reads.values()) <= 30 / 8
    for request, among in zip(requests, together, strict=True):
        engine.submit([request])
        (alone,) = engine.advance(40)
        assert np.array_equal(alone.span.token_ids, among.span.token_ids)
        np.testing.assert_allclose(alone.span.logprobs, among.span.logprobs, atol=1e-5)
    # Sizes 6 and 1, tables of 8 and of 16 blocks, whoever was in them.
    assert len(graphs.records) == 4


def test_who_looks_on_is_told_every_step() -> None:
    """What watches the operations of a forward runs in Python, so its steps do too."""
    made, graphs, seen = policy("tiny-qwen3"), RecordedGraphs(), list[str]()
    engine = opened(made, graphs)
    DirectPublisher([engine]).publish(checkpoint_views(made.model).items(), 0)
    assert isinstance(engine._forward, FastForward)
    engine._forward.observe = lambda layer, name, value: seen.append(name)
    engine.submit([Request(id=0, prompt_ids=np.arange(9, 14), sampling=SamplingParams(max_new_tokens=7))])
    engine.advance(9)
    assert seen.count("final_norm") == 1 + 7  # the prompt's pass and the steps
    assert graphs.records == []


def test_what_cannot_be_recorded_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    text, cuda, cpu = policy("tiny-qwen3-moe").model.config, torch.device("cuda"), torch.device("cpu")
    dense = policy("tiny-qwen3").model.config
    lora = LoraConfig(rank=2, experts=True)
    assert graphs_for(FastForward(dense, "fp32", cpu), cpu) == (None, "")
    assert isinstance(graphs_for(FastForward(dense, "fp32", cpu, lora), cuda)[0], CudaGraphs)
    mixture = FastForward(text, "bf16", cpu, lora)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert isinstance(
        graphs_for(mixture, cuda)[0], CudaGraphs
    )  # adapters of experts are grouped products like the experts
    cases = (
        (FastForward(text, "fp32", cpu), 9, "not in bfloat16"),
        (mixture, 8, "older than sm90"),
        (object(), 9, "transformers"),
    )
    for forward, capability, why in cases:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, major=capability: (major, 0))
        graphs, words = graphs_for(forward, cuda)
        assert graphs is None
        assert why in words


def test_sizes_and_widths() -> None:
    assert [padded(n, 100) for n in (1, 2, 3, 5, 8, 9, 16, 17, 99)] == [1, 2, 4, 8, 8, 16, 16, 24, 100]
    assert [widened(n, 50) for n in (1, 8, 9, 16, 17, 32, 33, 50)] == [8, 8, 16, 16, 32, 32, 50, 50]


LAUNCHES = {"tiny-qwen3": 174, "tiny-qwen3-moe": 200}
"""Most operations of a decode step of two layers that compute or move something. On the device of `pretend.py` a norm is five
and attention thirteen; on CUDA each is one or two. May fall."""
VIEWS = {"view", "_unsafe_view", "select", "slice", "transpose", "t", "permute", "unsqueeze", "expand", "as_strided", "split", "unbind", "alias"}  # fmt: skip


@pytest.mark.parametrize("preset", LAUNCHES)
def test_operations_of_a_step(preset: str) -> None:
    made = policy(preset)
    engine = opened(made, None)
    DirectPublisher([engine]).publish(checkpoint_views(made.model).items(), 0)
    engine.submit([Request(id=i, prompt_ids=np.arange(9, 14), sampling=SamplingParams()) for i in range(6)])
    engine.advance(2)
    JOURNAL.clear()
    engine.poll(0)
    assert sum(n for name, n in JOURNAL.operations.items() if name not in VIEWS) <= LAUNCHES[preset]
    assert dict(JOURNAL.reads) == {}


def test_blocks_that_begin_together_are_noted_together() -> None:
    """Each alone would be a launch between two steps."""
    made, more = policy("tiny-qwen3"), list[list[int]]()
    for sequences in (1, 6):
        engine = opened(made, None)
        DirectPublisher([engine]).publish(checkpoint_views(made.model).items(), 0)
        engine.submit([Request(id=i, prompt_ids=np.arange(9, 14), sampling=SamplingParams()) for i in range(sequences)])
        engine.advance(1)
        counts = list[int]()
        for _ in range(8):
            JOURNAL.clear()
            engine.poll(0)
            counts.append(sum(n for name, n in JOURNAL.operations.items() if name not in VIEWS))
        more.append([count - min(counts) for count in counts])
    assert more == [[0, 0, 0, 2, 0, 0, 0, 2]] * 2


class TestRecords:
    """The records of these tests go wrong where CUDA's would."""

    state = torch.zeros(4, device=DEVICE)

    def test_numbers_of_python_are_constants(self) -> None:
        position, out = [1], torch.zeros(4, device=DEVICE)
        play = RecordedGraphs().capture(lambda: out.add_(position[0]))
        position[0] = 100
        play()
        assert out.cpu().tolist() == [3.0] * 4  # before it was recorded, while it was, and played

    def test_it_cannot_wait(self) -> None:
        for step in (lambda: self.state[0].item(), lambda: self.state.nonzero(), lambda: self.state[self.state > 0]):
            with pytest.raises(RuntimeError, match="wait"):
                RecordedGraphs().capture(step)
        with pytest.raises(AssertionError, match="waited"):
            RecordedGraphs().capture(self.state.tolist)

    def test_it_cannot_take_what_lies_on_the_host(self) -> None:
        with pytest.raises(RuntimeError, match="host"):
            RecordedGraphs().capture(lambda: torch.tensor([1.0, 2.0]).to(DEVICE))

    def test_memory_that_is_gone(self) -> None:
        held = {"x": torch.zeros(4, device=DEVICE)}
        play = RecordedGraphs().capture(lambda: held["x"] + 1)
        held["x"] = torch.zeros(4, device=DEVICE)
        with pytest.raises(RuntimeError, match="freed"):
            play()

    def test_its_own_memory_is_rubbish_before_it_is_written(self) -> None:
        out = torch.zeros(4, device=DEVICE)

        def step() -> None:
            out.copy_(torch.empty_like(out) + 1)

        RecordedGraphs().capture(step)()
        assert out.cpu().isnan().all()
