"""Prompts without padding: a key of another sequence, or one that is too many or too few, shows in no error, only in log-probs.

torch's flash attention needs CUDA, so one function is replaced by its sums in float64. Not covered: that kernel (`test_cuda.py`, behind
`-m cuda`), and speed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from engine_kit import drain, engine_of, model_of, prompts_of, requests_of, resumed, run, same, steps
from pretend import DEVICE, JOURNAL

from rollkeel.engines.kv import PagedCache, Step
from rollkeel.engines.prefill import Prefill, prefill_passes, prefill_step
from rollkeel.models import varlen
from rollkeel.models.forward import FastForward

HEADS, KV, WIDTH, SIZE = 6, 2, 16, 4
CPU = torch.device("cpu")
Call = tuple[torch.Tensor, torch.Tensor, varlen.Spans]


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spans: varlen.Spans, scale: float) -> torch.Tensor:
    """What `varlen.attend` is to compute, one query after another."""
    assert spans.queries.dtype == spans.keys.dtype == torch.int32
    assert spans.most_queries == spans.queries.diff().max()
    assert spans.most_keys == spans.keys.diff().max()
    assert (int(spans.queries[-1]), int(spans.keys[-1])) == (len(q), len(k))
    out, group = torch.zeros_like(q), q.shape[1] // k.shape[1]
    for (a, b), (c, d) in zip(*(each.unfold(0, 2, 1).tolist() for each in spans[:2]), strict=True):
        for query in range(a, b):
            keys = slice(c, d - (b - 1 - query))
            mine, seen = q[query].double().unflatten(0, (-1, group)), k[keys].double()
            weights = (torch.einsum("hgd,nhd->hgn", mine, seen) * scale).softmax(-1)
            out[query] = torch.einsum("hgn,nhd->hgd", weights, v[keys].double()).flatten(0, 1)
    return out


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """As on CUDA in half precision; what the kernel was given."""
    seen = list[Call]()

    def kernel(q: Any, k: Any, v: Any, spans: Any, scale: Any) -> torch.Tensor:
        seen.append((q, k, spans))
        return exact(q, k, v, spans, scale)

    monkeypatch.setattr(varlen, "suits", lambda *_: True)
    monkeypatch.setattr(varlen, "attend", kernel)
    return seen


class Sequences:
    """Their queries, keys and values at every position, and a cache in which only what was written is a number."""

    def __init__(self, lengths: list[int], dtype: torch.dtype = torch.float32) -> None:
        rng = torch.Generator().manual_seed(0)
        order = torch.randperm(99, generator=rng).tolist()
        self.blocks = [[order.pop() for _ in range(-(-n // SIZE))] for n in lengths]
        self.qkv = [torch.randn(n, HEADS + 2 * KV, WIDTH, generator=rng).to(dtype) for n in lengths]
        self.cache = PagedCache(99, SIZE, dtype)
        for store in (self.cache._keys, self.cache._values):
            store[0] = torch.full((99 * KV, SIZE, WIDTH), torch.nan, dtype=dtype)

    def attend(self, parts: list[tuple[int, int, int]], **options: Any) -> torch.Tensor:
        """Of the tokens `[first, end)` of each sequence in one pass."""
        jobs: list[Prefill] = [(self.blocks[i], np.arange(a, b), a) for i, a, b in parts]
        new = torch.cat([self.qkv[i][a:b] for i, a, b in parts])
        _, _, step = prefill_step(jobs, SIZE, 0, CPU)
        q, k, v = new.split((HEADS, KV, KV), 1)
        return self.cache.attend(step, 0, q, k, v, 0.3, **options)

    def decode(self) -> torch.Tensor:
        """Of the first token of the first sequence."""
        q, k, v = self.qkv[0][:1].split((HEADS, KV, KV), 1)
        step = Step(torch.tensor([4]), torch.tensor([[1]]), torch.tensor([[0]]), None)
        return self.cache.attend(step, 0, q, k, v, 0.3)

    def whole(self, parts: list[tuple[int, int, int]]) -> torch.Tensor:
        """The same out of each sequence alone, in float64 and by the definition."""
        rows = []
        for i, first, end in parts:
            q, k, v = self.qkv[i].double().split((HEADS, KV, KV), 1)
            for at in range(first, end):
                for head in range(HEADS):
                    own = head // (HEADS // KV)
                    weights = (k[: at + 1, own] @ q[at, head] * 0.3).softmax(0)
                    rows.append(weights @ v[: at + 1, own])
        return torch.stack(rows).view(-1, HEADS * WIDTH).float()


PASSES = {
    "prompts from 0": [[(0, 0, 9), (1, 0, 4), (2, 0, 1), (3, 0, 17)]],
    "tails": [[(0, 0, 8), (3, 0, 5)], [(0, 8, 9), (3, 5, 17)]],
    "pieces": [[(3, 0, 6)], [(3, 6, 12)], [(3, 12, 17)]],
    "mixed": [[(3, 0, 7), (1, 0, 3)], [(0, 0, 9), (3, 7, 17), (2, 0, 1), (1, 3, 4)]],
    "one token each": [[(0, 0, 8)], [(0, 8, 9), (2, 0, 1)]],
}


@pytest.mark.parametrize("passes", PASSES.values(), ids=PASSES)
def test_a_pass_without_padding_is_the_padded_one(
    passes: list[list[tuple[int, int, int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    held, padded = Sequences([9, 4, 1, 17]), Sequences([9, 4, 1, 17])
    for store in (padded.cache._keys, padded.cache._values):
        store[0].zero_()  # there padding is multiplied by 0
    for parts in passes:
        expected = held.whole(parts)
        torch.testing.assert_close(padded.attend(parts), expected, atol=1e-5, rtol=0)
        with monkeypatch.context() as patch:
            patch.setattr(varlen, "suits", lambda *_: True)
            patch.setattr(varlen, "attend", exact)
            torch.testing.assert_close(held.attend(parts), expected, atol=1e-5, rtol=0)


def test_keys_that_a_kernel_wrote_are_read_back(calls: list[Call]) -> None:
    held = Sequences([9, 4])
    wanted = held.attend([(0, 0, 9), (1, 0, 4)])
    jobs: list[Prefill] = [(held.blocks[i], np.arange(n), 0) for i, n in enumerate((9, 4))]
    _, _, step = prefill_step(jobs, SIZE, 0, CPU)
    query = torch.cat(held.qkv)[:, :HEADS]
    assert torch.equal(held.cache.look_up(step, 0, query, 0.3), wanted)
    assert torch.equal(calls[0][1], calls[1][1])


def test_earlier_keys_are_read_only_where_there_are_some(calls: list[Call]) -> None:
    held = Sequences([9, 4])
    held.attend([(0, 0, 5), (1, 0, 4)])
    (_, keys, spans), *_ = calls
    assert keys.untyped_storage().nbytes() == 9 * (HEADS + 2 * KV) * WIDTH * 4  # those of the pass, as they lie
    assert spans.queries is spans.keys
    assert spans.queries.tolist() == [0, 5, 9]
    held.attend([(0, 5, 9)])
    _, keys, spans = calls[1]
    assert torch.equal(keys, held.qkv[0][:, HEADS : HEADS + KV])
    assert (spans.queries.tolist(), spans.keys.tolist(), *spans[2:]) == ([0, 4], [0, 9], 4, 9)


def test_a_key_of_somebody_else_shows(calls: list[Call]) -> None:
    held = Sequences([9, 9])
    held.attend([(0, 0, 8), (1, 0, 8)])
    held.blocks[0][1] = held.blocks[1][1]
    parts = [(0, 8, 9)]
    assert (held.attend(parts) - held.whole(parts)).abs().max() > 0.05
    assert len(calls) == 2


OTHERS: dict[str, Callable[[Sequences], object]] = {
    "window": lambda s: s.attend([(0, 0, 9)], window=4),
    "sinks": lambda s: s.attend([(0, 0, 9)], sinks=torch.zeros(HEADS)),
    "wider keys": lambda s: PagedCache(99, SIZE).attend(
        prefill_step([([1, 2], np.arange(5), 0)], SIZE, 0, CPU)[2],
        0,
        torch.ones(5, HEADS, 24),
        torch.ones(5, KV, 24),
        torch.ones(5, KV, 16),
        0.3,
    ),
    "decode": Sequences.decode,
}


@pytest.mark.parametrize("what", OTHERS)
def test_all_else_is_padded(what: str, calls: list[Call]) -> None:
    OTHERS[what](Sequences([9]))
    assert calls == []


def test_the_kernel_is_for_cuda_in_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    card = [9, 0]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: tuple(card))
    cuda, half = torch.device("cuda"), torch.bfloat16
    for width in (16, 64, 72, 128, 256):
        assert varlen.suits(cuda, half, width)
    assert varlen.suits(cuda, torch.float16, 128)
    assert not varlen.suits(CPU, half, 128)
    assert not varlen.suits(cuda, torch.float32, 128)
    assert not varlen.suits(cuda, half, 264)
    assert not varlen.suits(cuda, half, 60)
    card[:] = [7, 5]
    assert not varlen.suits(cuda, torch.float16, 128)


def of(lengths: list[tuple[int, int]], tokens: int) -> list[list[tuple[int, int]]]:
    """Passes over sequences of (first position, tokens), as (sequence, tokens) of each."""
    forward = FastForward.__new__(FastForward)
    forward.device, forward.dtype, forward.head_dim, forward.heads = CPU, torch.float32, 16, 1
    jobs: list[Prefill] = [([i], np.arange(n), start) for i, (start, n) in enumerate(lengths)]
    at, passes = [start for start, _ in lengths], []
    for part in prefill_passes(jobs, forward, tokens // 2, 2**28):
        passes.append([(blocks[0], len(ids)) for blocks, ids, _ in part])
        for blocks, ids, start in part:
            assert start == at[blocks[0]]
            at[blocks[0]] += len(ids)
    assert at == [start + n for start, n in lengths]
    return passes


@pytest.mark.usefixtures("calls")
def test_passes_hold_twice_the_tokens_without_padding() -> None:
    assert of([(0, 1), (0, 1), (0, 14)], 16) == [[(0, 1), (1, 1), (2, 14)]]
    assert of([(0, 1), (0, 1), (0, 15)], 16) == [[(0, 1), (1, 1)], [(2, 15)]]
    assert of([(0, 3), (0, 37)], 16) == [[(0, 3)], [(1, 16)], [(1, 16)], [(1, 5)]]
    assert of([(0, 20), (0, 21)], 16) == [[(0, 16)], [(0, 4)], [(1, 16)], [(1, 5)]]
    # Keys that are read again are bounded too: eight times 16, as if all had those of the longest.
    assert of([(63, 1), (0, 1), (0, 1)], 16) == [[(0, 1), (1, 1)], [(2, 1)]]
    assert of([(500, 1), (0, 1), (0, 1)], 16) == [[(0, 1)], [(1, 1), (2, 1)]]
    assert of([], 16) == []


def test_padded_passes_are_as_they_were() -> None:
    assert of([(0, 1), (0, 1), (0, 14)], 32) == [[(0, 1), (1, 1)], [(2, 14)]]


@pytest.mark.parametrize("preset", ["tiny-qwen3", "tiny-qwen3-moe"])
def test_rollouts_have_the_log_probs_of_padded_prompts(
    preset: str, calls: list[Call], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups with shared prompts, resumed answers, and prompts in pieces."""
    model, options = model_of(preset), {"forward": "fast", "slots": 9, "prefill_tokens": 10}
    prompts = prompts_of(3, high=50, low=20)
    prompts = [*(prompts[i // 3] for i in range(9)), *prompts_of(4, high=6)]
    requests = requests_of(prompts, max_new_tokens=6, temperature=0.9)
    first = engine_of(model, **options)
    first.submit(requests[:4])
    done = {s.request_id: s for s in steps(first, 4)}
    first.interrupt()
    done |= drain(first)
    again = [resumed(r, done[r.id].span) if r.id < 4 else r for r in requests]
    found, spans = run(engine_of(model, **options), again), [spans for *_, spans in calls]
    assert any(s.keys is s.queries and len(s.queries) > 2 for s in spans)
    assert any(s.keys is not s.queries and len(s.queries) > 2 for s in spans)
    assert max(int(s.queries[-1]) for s in spans) <= 20
    monkeypatch.undo()
    expected = run(engine_of(model, **options), requests)
    for i, segment in expected.items():
        mine = done[i].span.append(found[i].span) if i < 4 else found[i].span
        assert same(mine, segment.span)


@pytest.mark.usefixtures("calls")
def test_a_pass_waits_for_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "attend", lambda q, *_: torch.zeros_like(q))
    cache, jobs = PagedCache(9, SIZE, device=DEVICE), [([3, 1], np.arange(5), 0), ([5, 2], np.arange(4), 4)]
    _, _, step = prefill_step(jobs, SIZE, 0, torch.device(DEVICE))
    JOURNAL.clear()
    q, k, v = (torch.zeros(9, n, WIDTH, device=DEVICE) for n in (HEADS, KV, KV))
    for layer in range(3):
        cache.attend(step, layer, q, k, v, 0.3)
    assert JOURNAL.operations["repeat_interleave"] == 1  # for all layers
    assert JOURNAL.operations["_to_copy"] + JOURNAL.operations["_copy_from"] <= 4
    assert dict(JOURNAL.reads) == dict(JOURNAL.mixed) == {}


def test_blocks_are_copied_together_as_one_by_one() -> None:
    caches, copies = [], [(3, 1), (3, 7), (5, 0)]
    for _ in range(2):
        rng = torch.Generator().manual_seed(1)
        cache = PagedCache(8, SIZE, torch.bfloat16)
        for layer, heads in enumerate((KV, 1)):  # layers may differ
            for store in (cache._keys, cache._values):
                store[layer] = torch.randn(8 * heads, SIZE, WIDTH, generator=rng).bfloat16()
        cache._experts = torch.randint(9, (8 * SIZE, 2, 3), generator=rng).short()
        caches.append(cache)
    one, other = caches
    one.copy_blocks(copies)
    one.copy_blocks([])
    for source, target in copies:
        for held in [*other.tensors(), other._experts]:
            assert held is not None
            size = len(held) // 8
            held[target * size : (target + 1) * size] = held[source * size : (source + 1) * size]
    for mine, theirs in zip([*one.tensors(), one._experts], [*other.tensors(), other._experts], strict=True):
        assert mine is not None
        assert theirs is not None
        assert torch.equal(mine, theirs)
