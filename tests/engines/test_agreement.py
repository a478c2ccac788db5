"""Engine and trainer must mean the same policy: every mismatch correction assumes that in fp32 the gap is rounding alone.

Per token, log-probs of the engine against those of `LocalTrainer` on the same weights, and experts against experts. A gap
above 1e-4 must be a routing flip: at that token or an earlier one (its KV carries the flip on) the two chose different
experts; for the prompt, whose experts an engine does not return, that the trainer's choice there was a near tie. Not
covered: CUDA, architectures beyond the presets (see `tests/models/test_forward.py`), weights trained for long.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from engine_kit import drain, engine_of, model_of, prompts_of, reference_logprobs, resumed, run, same, steps

from rollkeel.batch.build import build_batch
from rollkeel.config import TrainConfig
from rollkeel.engines.rng import request_keys, uniforms
from rollkeel.models.loading import Policy
from rollkeel.models.names import checkpoint_views
from rollkeel.models.presets import PRESETS, build_tokenizer
from rollkeel.sync.publish import full_update
from rollkeel.train.trainer import LocalTrainer
from rollkeel.types import GraderSpec, Prompt, Request, Rollout, SamplingParams, Segment, Status, TokenSpan

LIMIT = 1e-4
NEAR_TIE = 1e-5
SCALE = {"small-qwen3-moe": 0.15}
"""Initial spread of the weights, 0.25 elsewhere: peaked distributions, decisive routing."""


def policy_of(preset: str) -> Policy:
    return Policy(model_of(preset, initializer_range=SCALE.get(preset, 0.25)), build_tokenizer())


@dataclass
class Routing:
    """Experts and margins the trainer's routers chose, per packed forward: `[layers][N, k]` and `[layers][N]`."""

    chosen: list[list[torch.Tensor]] = field(default_factory=list)
    margins: list[list[torch.Tensor]] = field(default_factory=list)


@contextmanager
def record_routing(model: Any, layers: int) -> Iterator[Routing]:
    routing, handles = Routing(), []

    def hook(module: torch.nn.Module, args: Any, output: Any) -> None:
        _ = module, args
        if not routing.chosen or len(routing.chosen[-1]) == layers:
            routing.chosen.append([])
            routing.margins.append([])
        logits, _, indices = output
        probs = logits.float().softmax(-1).sort(-1, descending=True).values
        k = indices.shape[-1]
        routing.chosen[-1].append(indices)
        routing.margins[-1].append(probs[:, k - 1] - probs[:, k])

    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            handles.append(module.register_forward_hook(hook))
    try:
        yield routing
    finally:
        for handle in handles:
            handle.remove()


@dataclass
class Tally:
    """What was compared: tokens, tokens apart by more than `LIMIT`, those of them not explained by a flip."""

    tokens: int = 0
    apart: int = 0
    unexplained: int = 0
    flipped: int = 0
    largest: float = 0.0
    largest_unflipped: float = 0.0

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.tokens + other.tokens,
            self.apart + other.apart,
            self.unexplained + other.unexplained,
            self.flipped + other.flipped,
            max(self.largest, other.largest),
            max(self.largest_unflipped, other.largest_unflipped),
        )


def compare(policy: Policy, requests: Sequence[Request], spans: Sequence[TokenSpan]) -> Tally:
    """Score `spans` with the trainer and count where it disagrees with the engine."""
    spec = GraderSpec(name="exact")
    rollouts = [
        Rollout(
            id=r.id, group=i, member=0, span=s, status=Status.LENGTH, sampling=r.sampling, engine="local", dtype="fp32",
            prompt=Prompt(id=str(i), index=i, text="", token_ids=r.prompt_ids, answer="", grader=spec, task="none"),
            reward=0.0,
        )
        for i, (r, s) in enumerate(zip(requests, spans, strict=True))
    ]  # fmt: skip
    trainer = LocalTrainer(policy, TrainConfig(), temperature=1.0, total_updates=1)
    batch = build_batch(rollouts, np.zeros(len(rollouts)), "token_mean")
    with record_routing(policy.model, policy.model.config.num_hidden_layers) as routing:
        logprobs, _ = trainer.logprobs(batch)
    gap = (logprobs - batch.rollout_logprobs).abs().numpy()
    apart = gap > LIMIT
    explained = np.zeros(len(gap), bool)
    flipped = np.zeros(len(gap), bool)
    if spans[0].experts is not None:
        flipped, tied_prompt = _flips(batch, routing, spans, trainer.config.micro_batch_tokens)
        ids, at = batch.sequence_ids.numpy(), 0
        for i, span in enumerate(spans):
            rows = slice(at, at + len(span))
            assert (ids[rows] == i).all()
            explained[rows] = np.logical_or.accumulate(flipped[rows]) | tied_prompt[i]
            at += len(span)
    return Tally(
        tokens=len(gap),
        apart=int(apart.sum()),
        unexplained=int((apart & ~explained).sum()),
        flipped=int(flipped.sum()),
        largest=float(gap.max()),
        largest_unflipped=float(gap[~explained].max()),
    )


def _flips(batch: Any, routing: Routing, spans: Sequence[TokenSpan], budget: int) -> tuple[np.ndarray, np.ndarray]:
    """`[T]` whether the experts of a token differ as sets in any layer; `[N]` whether a prompt holds a near tie."""
    experts = torch.from_numpy(np.concatenate([s.experts for s in spans]).astype(np.int64)).sort(-1).values
    flipped = torch.zeros(len(batch), dtype=torch.bool)
    tied = np.zeros(len(batch.sequences), bool)
    micros = list(batch.micro_batches(budget, share=True))  # as the trainer packs them
    for micro, chosen, margins in zip(micros, routing.chosen, routing.margins, strict=True):
        mine = torch.stack(chosen, 1)[micro.predict_index].sort(-1).values
        flipped[micro.indices] = (mine != experts[micro.indices]).flatten(1).any(-1)
        near = (torch.stack(margins, 1) < NEAR_TIE).any(-1)
        near[micro.predict_index] = False
        cu = micro.cu_seqlens.tolist()
        owners = torch.bucketize(micro.predict_index, torch.tensor(cu), right=True) - 1
        for row, (a, b) in enumerate(itertools.pairwise(cu)):
            first = micro.indices[owners == row][0]
            tied[int(batch.sequence_ids[first])] = bool(near[a:b].any())
    return flipped.numpy(), tied


def requests_for(preset: str, count: int, new: int, seed: int = 0) -> list[Request]:
    fields = PRESETS[preset][2]
    params = SamplingParams(max_new_tokens=new, seed=seed, return_experts="num_experts" in fields)
    prompts = prompts_of(count, seed, vocab=fields["vocab_size"])
    return [Request(id=i, prompt_ids=p, sampling=params) for i, p in enumerate(prompts)]


def spans_of(segments: dict[int, Segment], requests: Sequence[Request]) -> list[TokenSpan]:
    return [segments[r.id].span for r in requests]


def batched(policy: Policy, requests: Sequence[Request]) -> list[TokenSpan]:
    return spans_of(run(engine_of(policy.model, slots=64, max_length=160), requests), requests)


def alone(policy: Policy, requests: Sequence[Request]) -> list[TokenSpan]:
    return spans_of(run(engine_of(policy.model, slots=1, max_length=160), requests), requests)


def interrupted(policy: Policy, requests: Sequence[Request]) -> list[TokenSpan]:
    """Stopped after some steps and resumed from the prefix by another engine, twice."""
    parts = {r.id: TokenSpan.empty() for r in requests}
    todo = list(requests)
    for after in (len(requests) // 64 * 9 + 9, len(requests) // 64 * 14 + 14, None):
        engine = engine_of(policy.model, slots=64, max_length=160)
        engine.submit(todo)
        done = [] if after is None else steps(engine, after)
        if after is not None:
            engine.interrupt()
        ended = {**{s.request_id: s for s in done}, **drain(engine)}
        for request in todo:
            parts[request.id] = parts[request.id].append(ended[request.id].span)
        todo = [resumed(r, ended[r.id].span) for r in todo if ended[r.id].status is Status.INTERRUPTED]
    assert not todo
    return [parts[r.id] for r in requests]


def updated(policy: Policy, requests: Sequence[Request]) -> list[TokenSpan]:
    """The same weights published again while sequences are on their way: all KV is recomputed in the engine."""
    engine = engine_of(policy.model, slots=64, max_length=160)
    engine.submit(requests)
    done = {}
    for version in (1, 2, 3):
        done |= {s.request_id: s for s in steps(engine, 7)}
        engine.update_weights(full_update(checkpoint_views(policy.model).items(), version))
    return spans_of({**done, **drain(engine)}, requests)


PATHS: dict[str, Callable[[Policy, Sequence[Request]], list[TokenSpan]]] = {
    "batched": batched,
    "alone": alone,
    "interrupted": interrupted,
    "updated": updated,
}


@pytest.mark.parametrize("preset", PRESETS)
def test_engine_and_trainer_agree_on_a_few_thousand_tokens(preset: str) -> None:
    policy = policy_of(preset)
    sizes = {"batched": (64, 32), "alone": (6, 32), "interrupted": (64, 32), "updated": (64, 32)}
    made = {}
    for workload, (count, new) in sizes.items():
        requests = requests_for(preset, count, new)
        made[workload] = PATHS[workload](policy, requests)
        assert all(len(s) == new for s in made[workload])
        tally = compare(policy, requests, made[workload])
        assert tally.tokens == count * new
        assert tally.unexplained == 0, tally
        assert tally.apart <= 1, tally
        assert tally.largest_unflipped < LIMIT
    for workload in sizes:
        pairs = zip(made["batched"], made[workload], strict=False)
        assert all(same(a, b) for a, b in pairs), f"{workload} sampled other tokens than batched"


def test_tally_finds_a_wrong_token_and_does_not_excuse_it() -> None:
    """The comparison itself can fail: one shifted log-prob is counted, and without a flip it is not explained."""
    policy = policy_of("tiny-qwen3-moe")
    requests = requests_for("tiny-qwen3-moe", 4, 8)
    spans = batched(policy, requests)
    wrong = spans[2].logprobs.copy()
    wrong[3] -= 2e-4
    tally = compare(policy, requests, [*spans[:2], replace(spans[2], logprobs=wrong), spans[3]])
    assert (tally.tokens, tally.apart, tally.unexplained) == (32, 1, 1)
    experts = spans[2].experts
    assert experts is not None
    other = experts.copy()
    other[1, 0, 0] = next(e for e in range(8) if e not in experts[1, 0])
    excused = replace(spans[2], logprobs=wrong, experts=other)
    tally = compare(policy, requests, [*spans[:2], excused, spans[3]])
    assert (tally.apart, tally.unexplained, tally.flipped) == (1, 0, 1)


@pytest.mark.slow
def test_engine_and_trainer_agree_on_a_million_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    """Within 1e-4 wherever both choose the same experts, over at least 1e6 tokens; at most 1 token in 1e5 is routed otherwise.

    A token behind a flip attends to it, so a flip takes the rest of its sequence along: those are counted and printed too
    (in 4e6 tokens 7 flips took 112 tokens along, 2.7 in 1e5), and none may be apart without a flip before it.
    """
    wanted = int(float(os.environ.get("ROLLKEEL_AGREEMENT_TOKENS", "1.0e6")))
    share = {"tiny-qwen3-moe": 0.42, "tiny-qwen3": 0.16, "tiny-qwen3-tied": 0.16, "small-qwen3-moe": 0.26}
    parts = {"batched": 0.6, "interrupted": 0.2, "updated": 0.18, "alone": 0.04}
    total = Tally()
    for preset in PRESETS:
        policy, tally, start = policy_of(preset), Tally(), time.perf_counter()
        for workload, part in parts.items():
            left, seed = int(wanted * share[preset] * part) + 1, 1
            while left > 0:
                count = 512 if workload != "alone" else 16
                requests = requests_for(preset, min(count, -(-left // 128)), 128, seed)
                piece = compare(policy, requests, PATHS[workload](policy, requests))
                tally, left, seed = tally + piece, left - piece.tokens, seed + 1
        total = total + tally
        with capsys.disabled():
            print(f"\n{preset}: {tally} in {time.perf_counter() - start:.0f} s", end="")
    with capsys.disabled():
        print(f"\ntotal: {total}, {total.apart / total.tokens * 1e5:.2f} in 1e5 tokens apart")
    assert total.tokens >= wanted
    assert total.flipped <= total.tokens / 1e5
    assert total.unexplained == 0


def differing(policy: Policy, dtype: str, count: int, new: int = 16) -> list[tuple[Request, TokenSpan, TokenSpan]]:
    """Requests that give other tokens alone than in a batch of up to 64, with both answers."""
    requests = requests_for("tiny-qwen3-moe", count, new, seed=3)
    many = run(engine_of(policy.model, slots=64, max_length=64, dtype=dtype), requests)
    one = run(engine_of(policy.model, slots=1, max_length=64, dtype=dtype), requests)
    pairs = ((r, many[r.id].span, one[r.id].span) for r in requests)
    return [(r, a, b) for r, a, b in pairs if not np.array_equal(a.token_ids, b.token_ids)]


@torch.no_grad()
def edge_distance(policy: Policy, request: Request, a: TokenSpan, b: TokenSpan) -> float:
    """How far the uniform number of the first differing token lies from the border between the two tokens' intervals."""
    t = int(np.flatnonzero(a.token_ids != b.token_ids)[0])
    keys = request_keys(torch.tensor([request.sampling.seed]), torch.tensor([request.id]))
    u = float(uniforms(keys, torch.tensor([t])))
    ids = torch.from_numpy(np.concatenate([request.prompt_ids, a.token_ids[:t]]))[None]
    cdf = policy.model(input_ids=ids, use_cache=False).logits[0, -1].double().softmax(-1).cumsum(0)
    return abs(u - float(cdf[min(int(a.token_ids[t]), int(b.token_ids[t]))]))


def test_tokens_do_not_depend_on_what_runs_beside_them() -> None:
    """At most 1 of 200, and only because its number fell on the border of two tokens: within 1e-5 of it."""
    policy = policy_of("tiny-qwen3-moe")
    found = differing(policy, "fp32", 200)
    assert len(found) <= 1
    assert all(edge_distance(policy, *case) < 1e-5 for case in found)


@pytest.mark.slow
def test_ten_thousand_requests_alone_and_in_a_batch(capsys: pytest.CaptureFixture[str]) -> None:
    """Issue: in fp32 at least 9,990 of 10,000 requests give identical tokens; the other modes print their rate."""
    policy = Policy(model_of(), build_tokenizer())
    found = differing(policy, "fp32", 10_000)
    with capsys.disabled():
        print(f"\nfp32: {10_000 - len(found)} of 10000 requests identical alone and in a batch", end="")
        for dtype in ("bf16", "fp8", "fp8_weights", "int8", "int4"):
            print(f"\n{dtype}: {500 - len(differing(policy, dtype, 500))} of 500", end="")
        print()
    assert len(found) <= 10
    assert all(edge_distance(policy, *case) < 1e-5 for case in found)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp8", "fp8_weights", "int8", "int4"])
def test_other_numeric_modes_really_differ_from_the_trainer(dtype: str) -> None:
    """Mismatch must be real: the ratio's spread is far above rounding (1e-5), and not so large that it is a bug."""
    model = model_of(initializer_range=0.08)  # as the preset has it
    requests = requests_for("tiny-qwen3-moe", 64, 16)
    spans = spans_of(run(engine_of(model, slots=64, dtype=dtype), requests), requests)
    tally = compare(Policy(model, build_tokenizer()), requests, spans)
    pairs = zip(requests, spans, strict=True)
    gaps = [reference_logprobs(model, r.prompt_ids, s.token_ids.tolist()) - s.logprobs for r, s in pairs]
    assert (0.001 if dtype == "fp16" else 0.01) < np.exp(np.concatenate(gaps)).std() < 0.4
    assert tally.apart > tally.tokens // 2
    assert tally.flipped > 0
