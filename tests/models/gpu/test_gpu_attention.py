"""Decode attention where the keys lie: a wrong key, a block of somebody else or a sum whose order depends on the batch shows in
no error, only in log-probs that are not the trainer's.

Not covered: speed; prompts, which PyTorch computes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from rollkeel.config import EngineConfig
from rollkeel.engines.kv import PagedCache, Step
from rollkeel.engines.local import LocalEngine
from rollkeel.models import gpu
from rollkeel.models.gpu import attention
from rollkeel.models.gpu.attention import decode_attention
from rollkeel.models.names import checkpoint_views
from rollkeel.models.presets import build_preset
from rollkeel.sync.publish import full_update
from rollkeel.types import Request, SamplingParams

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
"""Of the largest value: half a unit in the last place, and weights of that dtype."""
LENGTHS = [1, 37, 16, 64, 65, 150]
"""One key, an odd number, a block, a split, one more, the longest."""


class Case(NamedTuple):
    """A cache in which only what the sequences wrote is a number."""

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    table: torch.Tensor
    positions: torch.Tensor
    options: dict[str, Any]

    def run(self, rows: slice = slice(None), width: int | None = None) -> torch.Tensor:
        table = self.table[rows, :width]
        return decode_attention(self.query[rows], self.keys, self.values, table, self.positions[rows], **self.options)

    def expected(self) -> torch.Tensor:
        """In float64, one head of one sequence after another."""
        kv, size, heads = self.options["kv_heads"], self.keys.shape[1], self.query.shape[1]
        rows = []
        for query, table, position in zip(self.query.double(), self.table, self.positions.tolist(), strict=True):
            first = max(0, position + 1 - (self.options.get("window") or position + 1))
            blocks = table[: position // size + 1]
            for head in range(heads):
                k, v = (
                    t[blocks * kv + head // (heads // kv)].double().flatten(0, 1)[first : position + 1]
                    for t in (self.keys, self.values)
                )
                scores = k @ query[head] * self.options["scale"]
                if self.options.get("sinks") is not None:
                    scores = torch.cat([scores, self.options["sinks"][head : head + 1].double()])
                rows.append(scores.softmax(0)[: len(v)] @ v)
        return torch.stack(rows).view(len(self.query), -1)


def case(
    device: str,
    dtype: torch.dtype,
    group: int,
    width: int,
    *,
    kv: int = 2,
    values: int | None = None,
    size: int = 16,
    **options: Any,
) -> Case:
    generator = torch.Generator().manual_seed(0)
    most = -(-max(LENGTHS) // size)
    blocks = 3 + torch.randperm(len(LENGTHS) * most, generator=generator).view(-1, most)  # nobody has the first
    stores = list[Any]()
    for wide in (width, values or width):
        store = torch.full((len(LENGTHS) * most + 3, kv, size, wide), float("nan"))
        for row, length in zip(blocks, LENGTHS, strict=True):
            at = torch.arange(length)
            store[row[at // size], :, at % size] = torch.randn(length, kv, wide, generator=generator)
        stores.append(store.flatten(0, 1).to(device, dtype))
    # A slice of a wider product, as the queries of a fused projection are.
    query = torch.randn(len(LENGTHS), kv * group + 3, width, generator=generator).to(device, dtype)[:, : kv * group]
    positions = torch.tensor(LENGTHS, device=device) - 1
    options = {"kv_heads": kv, "scale": width**-0.5, **options}
    return Case(query, stores[0], stores[1], blocks.to(device), positions, options)


def check(given: Case) -> None:
    torch.testing.assert_close(given.run().double(), given.expected(), rtol=0, atol=4 * TOLERANCE[given.query.dtype])


@pytest.fixture(autouse=True)
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "SPLIT", 64)


@pytest.mark.usually("*-1-16-dtype0", "*-4-64-dtype2", "*-7-128-dtype1", "*-2-24-dtype1")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("group", "width"), [(1, 16), (2, 32), (4, 64), (7, 128), (2, 24)])
def test_values(device: str, dtype: torch.dtype, group: int, width: int) -> None:
    check(case(device, dtype, group, width))


@pytest.mark.usually("*-None-dtype0", "*-1-dtype1", "*-40-dtype1")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 1, 40, 64])
def test_windows_sinks_and_narrow_values(device: str, dtype: torch.dtype, window: int | None) -> None:
    sinks = torch.randn(4, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    check(case(device, dtype, 2, 32, values=16, window=window, sinks=sinks))
    check(case(device, dtype, 2, 32, window=window))


@pytest.mark.usually("*-options0-dtype2", "*-options1-dtype1")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("options", [{}, {"window": 40}])
def test_a_row_is_the_same_alone_and_in_any_table(device: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    given = case(device, dtype, 2, 32, **options)
    whole = given.run()
    for row, length in enumerate(LENGTHS):
        blocks = -(-length // 16)
        for width in (blocks, blocks + 1, 10):
            assert torch.equal(given.run(slice(row, row + 1), width), whole[row : row + 1])
    assert torch.equal(given.run(slice(2, 5)), whole[2:5])


@pytest.mark.usually("*-12", "*-128")
@pytest.mark.parametrize("size", [4, 12, 32, 64, 128])
def test_blocks_of_any_size(device: str, size: int) -> None:
    """Many to a tile, halfway over its end, two to it, one to a split, and larger than a split."""
    check(case(device, torch.float32, 2, 32, size=size))
    check(case(device, torch.bfloat16, 2, 32, size=size, window=40))


def test_many_splits(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "SPLIT", 16)
    monkeypatch.setattr(attention, "EXACT", (2**11, 4, 2))
    check(case(device, torch.float32, 2, 32))
    check(case(device, torch.float32, 2, 32, window=70))


def test_a_row_that_only_pads_is_finite(device: str) -> None:
    given = case(device, torch.float32, 2, 32)
    given.positions[3:] = -1
    assert given.run().isfinite().all()
    given.positions[3:] = 0
    check(given)


def test_a_diverged_query_shows(device: str) -> None:
    given = case(device, torch.float32, 2, 32)
    given.query[4, 1, 5] = float("nan")
    wrong = given.run().view(len(LENGTHS), 4, 32).isnan().all(-1)
    assert wrong.nonzero().tolist() == [[4, 1]]


def test_the_split_that_runs_by_default(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    check(case(device, torch.float32, 2, 32))


def test_a_cache_decodes_with_it(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written keys included; where the kernel is not taken, or a step has several queries, nothing of it is called."""
    given, calls = case(device, torch.float32, 2, 32), list[Any]()
    step = Step(given.positions, given.table, given.positions[:, None], None)
    step.slots = given.table.gather(1, (given.positions // 16)[:, None])[:, 0] * 16 + given.positions % 16
    new = torch.randn(2, len(LENGTHS), 2, 32, generator=torch.Generator().manual_seed(2)).to(device)
    outs = []
    monkeypatch.setattr(attention, "decode_attention", lambda *a, **b: calls.append(a) or decode_attention(*a, **b))
    for switch, stores in (("1", given[1:3]), ("0", [store.nan_to_num() for store in given[1:3]])):
        monkeypatch.setenv(gpu.SWITCH, switch)
        cache = PagedCache(len(given.keys) // 2, 16, torch.float32, device)
        cache._keys[0], cache._values[0] = (store.clone() for store in stores)
        outs.append(cache.attend(step, 0, given.query, new[0], new[1], given.options["scale"]))
    assert len(calls) == 1
    torch.testing.assert_close(*outs, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["tiny-qwen3", "tiny-qwen3-moe"])
def test_rollouts_have_the_log_probs_of_the_other_path(
    device: str, preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    net: Any = build_preset(preset, 0, {"initializer_range": 0.15})[0]
    model, rng = net.eval().to(device), np.random.default_rng(0)
    prompts = [rng.integers(3, 288, length) for length in (3, 16, 17, 40, 40)]
    prompts[-1] = prompts[-2]
    sampling, ended = SamplingParams(max_new_tokens=12, temperature=0.9, return_topk=3), []
    for switch in ("1", "0"):
        monkeypatch.setenv(gpu.SWITCH, switch)
        engine = LocalEngine(model.config, EngineConfig(slots=4, forward="fast"), device=device, max_length=96)
        engine.update_weights(full_update(checkpoint_views(model).items(), 0))
        engine.submit([Request(id=i, prompt_ids=prompt, sampling=sampling) for i, prompt in enumerate(prompts)])
        spans = dict[int, Any]()
        while engine.busy:
            spans |= {segment.request_id: segment.span for segment in engine.poll(60)}
        ended.append(spans)
    assert ended[0].keys() == ended[1].keys() == set(range(len(prompts)))
    for number, span in ended[0].items():
        assert span.token_ids.tolist() == ended[1][number].token_ids.tolist()
        np.testing.assert_allclose(span.logprobs, ended[1][number].logprobs, rtol=0, atol=1e-5)
