"""A stream read wrongly trains on tokens nobody sampled, an update believed too early trains on the wrong policy: both in silence.

Against `fake_sglang`, whose model computes each log-prob again and whose facts are listed there. Not covered: a live SGLang
server (none was at hand), its speed, several GPUs.
"""

from __future__ import annotations

import asyncio
import base64
import json
import math
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from fake_sglang import CUT, FakeSglang
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DeepseekV3Config, Qwen3Config, Qwen3MoeConfig

from rollkeel.engines.backend import Backend, Chunk, Generation, Refused, ServerSettings
from rollkeel.engines.sglang import SPARE, SglangBackend
from rollkeel.engines.sglang_stream import RoutedLayers, Transcript, events, routed_layers
from rollkeel.errors import BadInput, EngineFailure
from rollkeel.types import SamplingParams

PROMPT = (3, 1, 4)
BACKEND = SglangBackend(silence_s=10, control_s=10, load_s=10)


@asynccontextmanager
async def opened(**options: Any) -> AsyncIterator[tuple[FakeSglang, httpx2.AsyncClient]]:
    async with FakeSglang(**options) as fake, httpx2.AsyncClient(base_url=fake.base_url) as http:
        yield fake, http


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 30))


def wanted(
    key: str = "r0", tokens: tuple[int, ...] = PROMPT, n: int = 12, seed: int = 5, salt: str = "v1", **sampling: Any
) -> Generation:
    params = SamplingParams(max_new_tokens=n, **sampling)
    return Generation(key=key, token_ids=tokens, sampling=params, max_new_tokens=n, seed=seed, salt=salt)


def joined(chunks: list[Chunk]) -> Chunk:
    """All of a stream as one chunk; only the last may have a finish."""
    assert [bool(c.finish) for c in chunks] == [False] * (len(chunks) - 1) + [True]
    parts = {
        name: [x for c in chunks for x in getattr(c, name)]
        for name in ("token_ids", "logprobs", "kept_mass", "topk_ids", "topk_logprobs")
    }
    return replace(chunks[-1], **parts)


async def collect(http: Any, generation: Generation, backend: SglangBackend = BACKEND) -> Chunk:
    return joined([chunk async for chunk in backend.generate(http, generation)])


def truth(fake: FakeSglang, tokens: tuple[int, ...], sampled: Any, temperature: float = 1.0) -> list[float]:
    """Log-probs that the model gives to sampled tokens."""
    whole = [*tokens, *sampled]
    return [float(fake.logprobs(whole[:i], temperature)[whole[i]]) for i in range(len(tokens), len(whole))]


# Starting.


def started(backend: SglangBackend = BACKEND, **changed: Any) -> tuple[str, dict[str, str]]:
    at = ServerSettings(
        model=Path("/m"),
        port=7,
        dtype="bf16",
        max_length=100,
        slots=4,
        python="/py",
        device="cuda",
        **{"extra": {}} | changed.pop("more", {}),
    )
    line, environment = backend.command(replace(at, **changed))
    return " ".join(line), environment


def test_command_line() -> None:
    line, environment = started()
    assert line.startswith(
        "/py -m sglang.launch_server --model-path /m --host 127.0.0.1 --port 7 --device cuda --dtype bfloat16"
    )
    assert f"--context-length {100 + SPARE} " in line
    assert "--skip-tokenizer-init --incremental-streaming-output" in line
    assert environment["SGLANG_RETURN_ORIGINAL_LOGPROB"] == "0"
    assert environment["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] == "1"


@pytest.mark.parametrize(
    ("backend", "changed", "has", "lacks"),
    [
        (SglangBackend(seed=9), {}, "--random-seed 9", "--disable-radix-cache"),
        (SglangBackend(prefix_cache=False), {}, "--disable-radix-cache", "--enable-"),
        (SglangBackend(deterministic=True), {}, "--enable-deterministic-inference", "routed"),
        (SglangBackend(experts=RoutedLayers(layers=2, chosen=2)), {}, "--enable-return-routed-experts", "determin"),
        (BACKEND, {"device": "cuda:3"}, "--device cuda --dtype bfloat16", "cuda:3"),
        (BACKEND, {"device": "cuda:3"}, "--base-gpu-id 3", "cuda:3"),
        (BACKEND, {"dtype": "fp32"}, "--dtype float32", "bfloat16"),
        (BACKEND, {"extra": {"mem_fraction_static": 0.5}}, "--mem-fraction-static 0.5", "_"),
        (BACKEND, {"extra": {"incremental_streaming_output": False}}, "--port", "--incremental"),
        (BACKEND, {"extra": {"trust_remote_code": True, "tp": None}}, "--trust-remote-code", "--tp"),
        (BACKEND, {"extra": {"json_model_override_args": {"a": 1}}}, '--json-model-override-args {"a": 1}', "'a'"),
    ],
)
def test_command_options(backend: SglangBackend, changed: dict[str, Any], has: str, lacks: str) -> None:
    line = started(backend, **changed)[0].replace("sglang.launch_server", "")
    assert has in line
    assert lacks not in line


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"dtype": "fp8"}, "engine.dtype: SGLang serves fp32"),
        ({"extra": {"model_path": "x"}}, "options.model_path: rollkeel sets"),
    ],
)
def test_command_refuses(changed: dict[str, Any], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        started(**changed)


def test_is_a_backend() -> None:
    backend: Backend = BACKEND
    assert backend.name == "sglang"
    assert backend.keeps_kv


def test_ready() -> None:
    async def work() -> None:
        async with opened() as (fake, http):
            assert await BACKEND.ready(http)
            fake.up = False
            assert not await BACKEND.ready(http)
            fake.up = True
            await BACKEND.pause(http, keep_kv=True)
            assert not await BACKEND.ready(http)
            await BACKEND.resume(http)
            fake.answers["/ready"] = 404, b""
            assert await BACKEND.ready(http)
            fake.answers["/health"] = 404, b""
            with pytest.raises(EngineFailure, match="got 404 for both"):
                await BACKEND.ready(http)
            fake.answers["/ready"] = 401, b'{"error":"Unauthorized"}'
            with pytest.raises(EngineFailure, match="HTTP 401"):
                await BACKEND.ready(http)
            fake._server.close()
        async with httpx2.AsyncClient(base_url=fake.base_url) as http:
            assert not await BACKEND.ready(http)

    run(work())


def test_logprobs_that_ignore_temperature_are_found_before_the_first_request() -> None:
    async def work() -> None:
        backend = replace(BACKEND)
        async with opened(original_logprobs=True) as (_, http):
            with pytest.raises(EngineFailure, match="without SGLANG_RETURN_ORIGINAL_LOGPROB"):
                await backend.resume(http)
        async with opened() as (fake, http):
            await backend.resume(http)
            await backend.resume(http)
            assert [path for path, _ in fake.seen].count("/generate") == 2  # once per server
            started(backend)
            await backend.resume(http)
            assert [path for path, _ in fake.seen].count("/generate") == 4

    run(work())


# Sampling.


@pytest.mark.parametrize("incremental", [True, False])
@pytest.mark.parametrize("join", [1, 3, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_tokens_and_logprobs_are_those_that_were_sampled(incremental: bool, join: int, temperature: float) -> None:
    async def work() -> None:
        async with opened(incremental=incremental) as (fake, http):
            fake.join = join
            got = await collect(http, wanted(temperature=temperature, return_topk=3))
            assert got.finish == "length"
            assert len(got.token_ids) == 12
            np.testing.assert_allclose(got.logprobs, truth(fake, PROMPT, got.token_ids, temperature), atol=1e-6)
            assert list(got.kept_mass) == []
            assert got.version_starts == [(-1, 0)]
            for i, (ids, values) in enumerate(zip(got.topk_ids, got.topk_logprobs, strict=True)):
                all_of_them = fake.logprobs([*PROMPT, *got.token_ids[:i]], temperature)
                assert list(ids) == list(np.argsort(-all_of_them)[:3])
                np.testing.assert_allclose(values, all_of_them[list(ids)])

    run(work())


@pytest.mark.parametrize("incremental", [True, False])
def test_stop_token_is_the_last_token(incremental: bool) -> None:
    async def work() -> None:
        async with opened(incremental=incremental) as (_, http):
            got = await collect(http, wanted(n=100, stop_token_ids=(2, 7)))
            assert got.finish == "stop"
            assert got.token_ids[-1] in (2, 7)
            assert not {2, 7} & set(got.token_ids[:-1])

    run(work())


@pytest.mark.parametrize(
    "sampling", [{"top_k": 4}, {"top_k": 6, "top_p": 0.7}, {"top_k": 8, "min_p": 0.2, "temperature": 0.8}]
)
def test_truncated_sampling_has_the_mass_that_was_kept(sampling: dict[str, Any]) -> None:
    async def work() -> None:
        async with opened() as (fake, http):
            got = await collect(http, wanted(**sampling))
            full = truth(fake, PROMPT, got.token_ids, sampling.get("temperature", 1.0))
            np.testing.assert_allclose(np.array(got.logprobs) + np.log(got.kept_mass), full, atol=1e-6)
            for i, mass in enumerate(got.kept_mass):
                p = np.sort(np.exp(fake.logprobs([*PROMPT, *got.token_ids[:i]], sampling.get("temperature", 1.0))))[
                    ::-1
                ]
                kept = [
                    x
                    for j, x in enumerate(p)
                    if j < sampling["top_k"]
                    and p[:j].sum() <= sampling.get("top_p", 1)
                    and x >= p[0] * sampling.get("min_p", 0)
                ]
                assert mass == pytest.approx(sum(kept))

    run(work())


def test_truncated_sampling_finds_logprobs_of_another_temperature() -> None:
    async def work() -> None:
        async with opened(original_logprobs=True) as (_, http):
            with pytest.raises(EngineFailure, match="kept mass ≤ 1"):
                await collect(http, wanted(n=100, top_k=11, temperature=3.0))

    run(work())


def test_greedy_has_logprob_zero_and_its_probability_as_mass() -> None:
    async def work() -> None:
        async with opened() as (fake, http):
            got = await collect(http, wanted(temperature=0.0, top_p=0.5))
            best = [int(np.argmax(fake.logprobs([*PROMPT, *got.token_ids[:i]]))) for i in range(12)]
            assert list(got.token_ids) == best
            assert list(got.logprobs) == [0.0] * 12
            np.testing.assert_allclose(np.log(got.kept_mass), truth(fake, PROMPT, got.token_ids))

    run(work())


@pytest.mark.parametrize(
    ("backend", "sampling", "says"),
    [
        (BACKEND, {}, ""),
        (BACKEND, {"temperature": 0.0, "top_p": 0.5}, ""),
        (BACKEND, {"top_k": 2}, ""),
        (BACKEND, {"return_topk": 5}, ""),
        (BACKEND, {"temperature": 1e-9}, "takes 1e-09 for greedy"),
        (BACKEND, {"top_p": 0.9}, "got top_k=0, top_p=0.9"),
        (BACKEND, {"min_p": 0.1}, "min_p=0.1; set top_k"),
        (BACKEND, {"top_k": 1}, "top_k from 2 to 4096"),
        (BACKEND, {"top_k": 4097}, "top_k from 2 to 4096"),
        (BACKEND, {"top_k": 8, "return_topk": 2}, "before truncation"),
        (BACKEND, {"temperature": 0.0, "return_topk": 2}, "before truncation"),
        (BACKEND, {"return_experts": True}, "opened without its layers"),
        (SglangBackend(experts=RoutedLayers(layers=1, chosen=1)), {"return_experts": True}, ""),
        (SglangBackend(deterministic=True), {"top_k": 8, "min_p": 0.1}, "draws wrongly with min_p=0.1"),
        (SglangBackend(deterministic=True), {"top_k": 8}, ""),
    ],
)
def test_objections(backend: SglangBackend, sampling: dict[str, Any], says: str) -> None:
    objection = backend.objection(SamplingParams(**sampling))
    assert bool(objection) == bool(says)
    assert says in objection
    if says:
        with pytest.raises(Refused, match="sampling"):
            run(collect(None, wanted(**sampling), backend))


@pytest.mark.parametrize(("deterministic", "same"), [(True, True), (False, False)])
def test_seeds_count_in_deterministic_mode_only(deterministic: bool, same: bool) -> None:
    async def work() -> None:
        async with opened(deterministic=deterministic) as (_, http):
            first, again, other = [
                await collect(http, wanted(key=f"{i}", n=30, seed=seed))
                for i, seed in enumerate((2**62 - 1, 2**62 - 1, 8))
            ]
            assert (list(first.token_ids) == list(again.token_ids)) == same
            assert list(first.token_ids) != list(other.token_ids)

    run(work())


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (Qwen3Config(num_hidden_layers=3), None),
        (Qwen3MoeConfig(num_hidden_layers=4, num_experts_per_tok=2), (4, 2, (0, 1, 2, 3))),
        (Qwen3MoeConfig(num_hidden_layers=4, num_experts_per_tok=2, mlp_only_layers=[1]), (4, 2, (0, 2, 3))),
        (Qwen3MoeConfig(num_hidden_layers=4, num_experts_per_tok=2, decoder_sparse_step=2), (4, 2, (1, 3))),
        (DeepseekV3Config(num_hidden_layers=4, num_experts_per_tok=8, first_k_dense_replace=3), (4, 8, (3,))),
    ],
)
def test_layers_of_experts(config: Any, expected: tuple[int, int, tuple[int, ...]] | None) -> None:
    layers = routed_layers(config)
    assert (layers and (layers.layers, layers.chosen, layers.moe)) == expected
    assert SglangBackend(experts=layers).returns_experts == (expected is not None)


@pytest.mark.parametrize("moe", [(), (1, 2)])
def test_experts_of_each_token(moe: tuple[int, ...]) -> None:
    async def work() -> None:
        backend = replace(BACKEND, experts=RoutedLayers(layers=3, chosen=2, moe=moe))
        async with opened(experts=(3, 2)) as (_, http):
            chunks = [c async for c in backend.generate(http, wanted(n=5, return_experts=True))]
            assert all(c.experts is not None and len(c.experts) == len(c.token_ids) for c in chunks)
            assert [len(c.token_ids) for c in chunks] == [0] * (len(chunks) - 1) + [5]
            experts = chunks[-1].experts
            assert experts is not None
            assert experts.dtype == np.int16
            # The fake's experts tell the position that produced the token.
            whole = np.stack([(np.arange(6).reshape(3, 2) + len(PROMPT) + i) % 7 for i in range(5)])
            np.testing.assert_array_equal(experts, whole[:, list(moe) or slice(None)])

    run(work())


# Stopping.


@pytest.mark.parametrize("incremental", [True, False])
def test_abort_keeps_what_was_streamed(incremental: bool) -> None:
    async def work() -> None:
        async with opened(incremental=incremental) as (fake, http):
            fake.allow(4)
            stream = BACKEND.generate(http, wanted(n=50))
            chunks = [await anext(stream)]
            await fake.until(lambda: fake.budget == 0)
            await BACKEND.abort(http, ["r0"])
            fake.allow(None)
            got = joined([*chunks, *[c async for c in stream]])
            assert got.finish == "abort"
            assert 4 <= len(got.token_ids) <= 5
            np.testing.assert_allclose(got.logprobs, truth(fake, PROMPT, got.token_ids), atol=1e-6)

    run(work())


@pytest.mark.parametrize("incremental", [True, False])
@pytest.mark.parametrize("join", [1, 3, 100])
def test_abort_in_the_queue_neither_loses_nor_doubles_tokens(incremental: bool, join: int) -> None:
    """A paused request sits in the queue, and its last frame repeats everything."""

    async def work() -> None:
        async with opened(incremental=incremental) as (fake, http):
            fake.join = join
            fake.allow(4)
            running = asyncio.create_task(collect(http, wanted(n=50, return_topk=2)))
            masked = asyncio.create_task(collect(http, wanted(key="r1", n=50, top_k=5)))
            await fake.until(lambda: fake.budget == 0)
            await BACKEND.pause(http, keep_kv=False)
            got, cut = await running, await masked
            assert (got.finish, cut.finish) == ("abort", "abort")
            assert len(got.token_ids) == 4
            np.testing.assert_allclose(got.logprobs, truth(fake, PROMPT, got.token_ids), atol=1e-6)
            # Tokens whose kept mass did not arrive are given up.
            assert len(cut.token_ids) == len(cut.kept_mass) <= 4
            fake.allow(None)
            await BACKEND.resume(http)
            assert (await collect(http, wanted(key="r2"))).finish == "length"

    run(work())


def test_abort_stops_its_own_request_alone() -> None:
    """The server matches names by prefix; ids like 1 and 12 are the rule here."""

    async def work() -> None:
        async with opened() as (fake, http):
            fake.allow(3)
            tasks = {
                key: asyncio.create_task(collect(http, wanted(key=key, n=20))) for key in ("1", "12", "1:2", "123")
            }
            await fake.until(lambda: fake.budget == 0 and len(fake.running) == 4)
            await BACKEND.abort(http, ["1", "never heard of"])
            fake.allow(None)
            assert {key: (await task).finish for key, task in tasks.items()} == {
                "1": "abort",
                "12": "length",
                "1:2": "length",
                "123": "length",
            }

    run(work())


# Weights.


def folder_of(where: Path, content: bytes) -> Path:
    where.mkdir()
    (where / "model.safetensors").write_bytes(content)
    return where


def test_update_replaces_weights_and_cached_prefixes(tmp_path: Path) -> None:
    async def work() -> None:
        async with opened() as (fake, http):
            before = await BACKEND.score(http, [*PROMPT, 5, 9])
            await collect(http, wanted())
            fake.allow(2)
            running = asyncio.create_task(collect(http, wanted(key="r1", n=50)))
            await fake.until(lambda: fake.budget == 0)
            await BACKEND.pause(http, keep_kv=False)
            assert (await running).finish == "abort"
            assert await BACKEND.load(http, folder_of(tmp_path / "v2", b"two"), 2) is None
            assert fake.tree == {}
            fake.allow(None)
            await BACKEND.resume(http)
            got = await collect(http, wanted(key="r2", salt="v2"))
            np.testing.assert_allclose(got.logprobs, truth(fake, PROMPT, got.token_ids), atol=1e-6)
            assert got.version_starts == [(2, 0)]
            after = await BACKEND.score(http, [*PROMPT, 5, 9])
            assert np.abs(after - before).max() > 0.1

    run(work())


@pytest.mark.parametrize(("salt", "stale"), [("v2", False), ("v1", True)])
def test_update_that_keeps_kv(tmp_path: Path, salt: str, stale: bool) -> None:
    """The running sequence goes on and tells its versions; a new one must not find prefixes of older weights."""

    async def work() -> None:
        async with opened() as (fake, http):
            await collect(http, wanted())
            fake.allow(4)
            running = asyncio.create_task(collect(http, wanted(key="r1", n=9)))
            await fake.until(lambda: fake.budget == 0)
            await BACKEND.pause(http, keep_kv=True)
            await BACKEND.load(http, folder_of(tmp_path / "v2", b"two"), 2)
            fake.allow(None)
            await BACKEND.resume(http)
            old = await running
            assert old.finish == "length"
            assert len(old.token_ids) == 9
            assert old.version_starts == [(-1, 0), (2, 4)]
            got = await collect(http, wanted(key="r2", salt=salt))
            gap = np.abs(np.array(got.logprobs) - truth(fake, PROMPT, got.token_ids)).max()
            assert (gap > 0.05) == stale

    run(work())


def test_update_that_fails_says_so(tmp_path: Path) -> None:
    async def work() -> None:
        async with opened() as (fake, http):
            with pytest.raises(
                EngineFailure, match=r"version 2 to be loaded from .*nothing, got HTTP 400: Failed to get weights"
            ) as failed:
                await BACKEND.load(http, tmp_path / "nothing", 2)
            assert "\n" not in str(failed.value)
            good = folder_of(tmp_path / "v2", b"two")
            path, info = "/update_weights_from_disk", "/model_info"
            for answers, says in (
                ({path: (200, b'{"success": false, "message": "no"}')}, "got HTTP 200: no"),
                ({path: (200, b"[1]")}, r"expected a JSON object from /update_weights_from_disk, got HTTP 200: \[1\]"),
                ({path: (500, b"Internal Server Error")}, "got HTTP 500: Internal Server Error"),
                (
                    {info: (200, b'{"weight_version": "1", "model_path": "x"}')},
                    "expected to serve version 2 from .*got version 1 from x",
                ),
                ({info: (404, b'{"detail":"Not Found"}')}, "/model_info to be served, got 404: Not Found"),
                ({"/flush_cache": (500, b"boom")}, "POST /flush_cache to work, got HTTP 500: boom"),
            ):
                fake.answers = answers
                with pytest.raises(EngineFailure, match=says):
                    await BACKEND.load(http, good, 2)
            fake.answers = {"/pause_generation": (422, b'{"detail": "no such mode"}')}
            with pytest.raises(EngineFailure, match="POST /pause_generation to work, got HTTP 422"):
                await BACKEND.pause(http, keep_kv=False)

    run(work())


# Scores.


def test_scores_are_those_of_the_model_at_temperature_one() -> None:
    async def work() -> None:
        async with opened() as (fake, http):
            tokens = [11, 3, 11, 0, 7, 11]  # 11 is the last id, which the server calls 0
            await collect(http, wanted(tokens=(11, 3, 11, 0)))
            got = await BACKEND.score(http, tokens)
            assert got.dtype == np.float32
            np.testing.assert_allclose(got, truth(fake, (11,), tokens[1:]), rtol=1e-6)
            assert fake.cached_tokens == 0
            assert (await BACKEND.score(http, [4])).shape == (0,)
            with pytest.raises(Refused, match="at least one token"):
                await BACKEND.score(http, [])
            with pytest.raises(Refused, match=r"got 400: The input \(200 tokens\) is longer"):
                await BACKEND.score(http, [1] * 200)
            with pytest.raises(Refused, match=r"got 400: Input length \(194 tokens\) exceeds"):
                await BACKEND.score(http, [1] * 194)
            # What the command line leaves spare is enough for sequences of full length.
            assert len(await BACKEND.score(http, [1] * (200 - SPARE))) == 200 - SPARE - 1
            full = await collect(http, wanted(tokens=(1,) * (199 - SPARE), n=1))
            assert full.finish == "length"

    run(work())


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (
            {"meta_info": {"input_token_logprobs": [[None, 4, None]]}},
            "expected 2 input_token_logprobs, one per token, got 1",
        ),
        ({"meta_info": {}}, "one per token, got none"),
        ({"output_ids": []}, "one per token, got none"),
        (
            {"meta_info": {"input_token_logprobs": [[None, 4, None], [None, 5, None]]}},
            "finite log-prob ≤ 0 in input_token_logprobs at 1, got null",
        ),
        ({"meta_info": {"input_token_logprobs": [[None, 4, None], [0.5, 5, None]]}}, "at 1, got 0.5"),
        (
            {"meta_info": {"input_token_logprobs": [[None, 4, None], [-1.0, 6, None]]}},
            "log-prob of token 5 at position 1, got that of 6",
        ),
        (
            {"meta_info": {"input_token_logprobs": [[None, 4, None], [-1.0]]}},
            "log-prob of token 5 at position 1, got that of None",
        ),
    ],
)
def test_malformed_scores(answer: dict[str, Any], says: str) -> None:
    async def work() -> None:
        async with opened() as (fake, http):
            fake.answers["/generate"] = 200, json.dumps(answer).encode()
            with pytest.raises(EngineFailure, match=says):
                await BACKEND.score(http, [4, 5])

    run(work())


# What goes wrong.


def frame(ids: Any, rows: Any, total: Any, finish: Any = None, **meta: Any) -> bytes:
    found = {"output_token_logprobs": rows, "completion_tokens": total, "finish_reason": finish, **meta}
    return json.dumps({"output_ids": ids, "meta_info": found}).encode()


def rows_of(*ids: int) -> list[list[Any]]:
    return [[-1.0, t, None] for t in ids]


LENGTH = {"type": "length", "length": 2}
ABORT = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
MALFORMED: dict[str, tuple[list[bytes], str]] = {
    "no JSON": ([b"{"], "expected a JSON object, got {"),
    "a list": ([b"[1]"], r"expected a JSON object, got \[1\]"),
    "no meta_info": ([b'{"output_ids": []}'], "expected output_ids and meta_info"),
    "no ids": ([b'{"text": "a", "meta_info": {}}'], "expected output_ids and meta_info"),
    "no log-probs": ([frame([1], None, 1)], "expected output_token_logprobs and completion_tokens"),
    "fewer log-probs": ([frame([1, 2], rows_of(1), 2)], "log-probs of 2 new tokens or of all 2, got 1"),
    "more log-probs": ([frame([1], rows_of(1, 2), 1)], "one log-prob for each of 1 output_ids, got those of 2"),
    "log-probs of others": (
        [frame([1], rows_of(2), 1)],
        "one log-prob for each of 1 output_ids, got those of 1 tokens, or of others",
    ),
    "no token ids": ([frame([1], [[-1.0]], 1)], "log-probs with the ids of their tokens"),
    "a gap": ([frame([1], rows_of(1), 1), frame([3], rows_of(3), 3)], "log-probs of 2 new tokens or of all 3, got 1"),
    "a rewritten start": (
        [frame([1], rows_of(1), 1), frame([9, 2], rows_of(9, 2), 2)],
        "the 1 tokens already sent to be repeated",
    ),
    "NaN": ([frame([1], [[None, 1, None]], 1)], "finite log-prob ≤ 0 in output_token_logprobs at 0, got null"),
    "a positive log-prob": ([frame([1], [[0.1, 1, None]], 1)], "output_token_logprobs at 0, got 0.1"),
    "a log-prob as text": ([frame([1], [["-1", 1, None]], 1)], "output_token_logprobs at 0, got -1"),
    "too many": ([frame([1, 2, 3], rows_of(1, 2, 3), 3)], "expected at most 2 tokens, got 3"),
    "too short": (
        [frame([1], rows_of(1), 1, {"type": "length", "length": 1})],
        "expected 2 tokens before finish_reason length, got 1; the server has too little",
    ),
    "stop at another token": (
        [frame([1], rows_of(1), 1, {"type": "stop", "matched": 7})],
        "finish_reason stop at the last token 1",
    ),
    "NaN in the model": (
        [frame([7], rows_of(7), 1, {"type": "stop", "matched": "NaN happened"})],
        "last token 7, got .*NaN happened",
    ),
    "a stop we did not ask for": (
        [frame([5], rows_of(5), 1, {"type": "stop", "matched": 5})],
        r"stops at \[7\] only, it also stops at token 5",
    ),
    "on past a stop": (
        [frame([7], rows_of(7), 1), frame([2], rows_of(2), 2)],
        "nothing after stop token 7, got token 2 at 1",
    ),
    "an unknown reason": ([frame([1], rows_of(1), 1, {"type": "tired"})], "finish_reason stop, length or abort, got"),
    "a reason as text": ([frame([1], rows_of(1), 1, "length")], "finish_reason stop, length or abort, got length"),
    "a refusal": (
        [b'{"error": {"message": "too\\nlong", "code": 400}}'],
        "expected request r0 to be served, got 400: too long",
    ),
    "an error": ([b'{"error": {"message": "boom", "code": 500}}'], "got 500: boom"),
    "a late refusal": ([frame([], [], 0, ABORT | {"status_code": 503, "message": "full"})], "got 503: full"),
    "no finish": (
        [frame([1], rows_of(1), 1), b"[DONE]"],
        "a finish reason of r0, its stream ended after 1 tokens without",
    ),
    "nothing": ([b"[DONE]"], "its stream ended after 0 tokens without"),
    "cut off": ([frame([1], rows_of(1), 1), CUT], "the next tokens of r0, the connection failed with"),
    "spans without a start": (
        [frame([1, 2], rows_of(1, 2), 2, LENGTH, weight_versions=[{"version": "1"}])],
        "weight_versions with a start",
    ),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_streams_give_one_clear_error(name: str) -> None:
    payloads, says = MALFORMED[name]

    async def work() -> None:
        async with opened() as (fake, http):
            fake.mangle = lambda index, payload: [] if index else payloads
            with pytest.raises(EngineFailure, match=says) as failed:
                await collect(http, wanted(n=2, stop_token_ids=(7,)))
            assert "\n" not in str(failed.value)
            assert isinstance(failed.value, Refused) == (name in ("a refusal", "a stop we did not ask for"))

    run(work())


@pytest.mark.parametrize(
    ("sampling", "change", "says"),
    [
        ({"top_k": 5}, {"output_token_sampling_logprobs": None}, "expected 1 output_token_sampling_logprobs.*got null"),
        (
            {"top_k": 5},
            {"output_token_sampling_logprobs": [-1.0, -1.0]},
            "expected 1 output_token_sampling_logprobs.*got 2",
        ),
        ({"top_k": 5}, {"output_token_sampling_logprobs": [-3.0]}, "kept mass ≤ 1 at token 0, got 7.3891"),
        ({"return_topk": 2}, {"output_top_logprobs": []}, "expected 1 output_top_logprobs"),
        ({"return_topk": 2}, {"output_top_logprobs": [[[-1.0, 2, None]]]}, "expected the 2 best tokens at 0"),
        ({"return_experts": True}, {"routed_experts": None}, "expected routed_experts in base64, got null"),
        ({"return_experts": True}, {"routed_experts": "@"}, "expected routed_experts in base64, got @"),
        (
            {"return_experts": True},
            {"routed_experts": base64.b64encode(bytes(4)).decode()},
            "1 tokens × 3 layers × 2, 24 bytes, got 4",
        ),
    ],
)
def test_malformed_extras(sampling: dict[str, Any], change: dict[str, Any], says: str) -> None:
    transcript = Transcript(wanted(n=1, **sampling), RoutedLayers(layers=3, chosen=2))
    with pytest.raises(EngineFailure, match=says):
        transcript.read(frame([1], rows_of(1), 1, {"type": "length", "length": 1}, **change))


@pytest.mark.parametrize(
    ("last", "total", "finish"), [(3, 2, "abort"), (7, 2, "stop"), (3, 4, "length"), (7, 4, "stop")]
)
def test_abort_that_came_with_the_end_is_the_end(last: int, total: int, finish: str) -> None:
    """Asked to go on behind its stop token, the server would sample what no policy ever does."""
    transcript = Transcript(wanted(n=4, stop_token_ids=(7,)), None)
    ids = [1] * (total - 1) + [last]
    assert transcript.read(frame(ids, rows_of(*ids), total, ABORT)).finish == finish


def test_requests_the_server_refuses() -> None:
    async def work() -> None:
        async with opened(context=20) as (fake, http):
            with pytest.raises(Refused, match="got 400: The input"):
                await collect(http, wanted(tokens=(1,) * 20))
            with pytest.raises(Refused, match=r"r0 to be served, got 400: Input length \(15 tokens\) exceeds"):
                await collect(http, wanted(tokens=(1,) * 15, n=2))
            with pytest.raises(Refused, match="max_new_tokens ≥ 1, got 0 tokens"):
                await collect(http, wanted(tokens=()))
            token = (await collect(http, wanted(key="best", n=1, temperature=0.0))).token_ids[0]
            fake.eos = {token}
            with pytest.raises(Refused, match=f"also stops at token {token}"):
                await collect(http, wanted(key="eos", n=1, temperature=0.0, stop_token_ids=(11,)))
            with pytest.raises(
                EngineFailure, match="expected 17 tokens before finish_reason length, got 15; the server has too little"
            ):
                await collect(http, wanted(key="cut", n=17))
            fake.allow(0)
            waiting = asyncio.create_task(collect(http, wanted(n=5)))
            await fake.until(
                lambda: any(body.get("rid") == "2:r0" and body.get("stream") for _, body in fake.seen[-1:])
            )
            with pytest.raises(Refused, match="Duplicate request ID"):
                await collect(http, wanted(n=5))
            fake.allow(None)
            assert (await waiting).finish == "length"
            fake.nan_at = 0
            with pytest.raises(EngineFailure, match="got null"):
                await collect(http, wanted(n=5, stop_token_ids=(5,)))
            fake.answers["/generate"] = 500, b"<html>boom</html>"
            with pytest.raises(EngineFailure, match="got 500: <html>boom</html>") as failed:
                await collect(http, wanted())
            assert not isinstance(failed.value, Refused)

    run(work())


def test_every_wait_has_a_deadline(tmp_path: Path) -> None:
    hasty = SglangBackend(silence_s=0.05, control_s=0.05, load_s=0.05)
    waits: list[tuple[str, str, Callable[[Any], Any]]] = [
        ("/generate", "the next tokens of r0", lambda http: collect(http, wanted(), hasty)),
        ("/generate", "POST /generate", lambda http: hasty.score(http, [1, 2])),
        ("/ready", "GET /ready", hasty.ready),
        ("/abort_request", "POST /abort_request", lambda http: hasty.abort(http, ["a"])),
        ("/pause_generation", "POST /pause_generation", lambda http: hasty.pause(http, True)),
        ("/continue_generation", "POST /continue_generation", hasty.resume),
        ("/update_weights_from_disk", "POST /update_weights", lambda http: hasty.load(http, tmp_path, 1)),
    ]

    async def work() -> None:
        async with opened() as (fake, http):
            for path, what, wait in waits:
                fake.silent = {path}
                with pytest.raises(EngineFailure, match=f"waited 0.05 s for {what}"):
                    await wait(http)
            fake.silent = set()
            fake.allow(2)  # a stream that falls silent midway
            with pytest.raises(EngineFailure, match=r"waited 0\.05 s for the next tokens of r0"):
                await collect(http, wanted(), hasty)
        with pytest.raises(EngineFailure, match="the connection failed with ConnectError"):
            async with httpx2.AsyncClient(base_url=fake.base_url) as http:
                await BACKEND.resume(http)

    run(work())


# Any way of cutting a stream.


def cut(data: bytes, at: list[int]) -> list[bytes]:
    edges = [0, *sorted(a % (len(data) + 1) for a in at), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


@settings(max_examples=150, deadline=None)
@given(
    ids=st.lists(st.integers(0, 10_000), min_size=1, max_size=12),
    groups=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), min_size=1, max_size=12),
    incremental=st.booleans(),
    echo=st.booleans(),
    at=st.lists(st.integers(0, 100_000), max_size=40),
    noise=st.sampled_from(["", "\u2028", "ü"]),
)
def test_any_cutting_of_a_stream_gives_the_same_tokens(
    ids: list[int], groups: list[tuple[int, int]], incremental: bool, echo: bool, at: list[int], noise: str
) -> None:
    """Frames of any size, of both kinds, running ahead of their count, ended by any of the ways; bytes cut anywhere."""
    rows = [[-0.1 * (i + 1), t, None] for i, t in enumerate(ids)]
    frames, done, most = [], 0, 0
    for size, ahead in groups:
        total = min(done + size, len(ids))
        if total == len(ids):
            break
        most = max(most, min(total + ahead, len(ids)))  # lists never shrink
        shown = slice(done, total) if incremental else slice(0, most)
        frames.append(frame(ids[shown], rows[shown], total, text=noise))
        done = total
    if echo:  # aborted in the queue, joined with what was not yet sent
        tail = [*ids[done:], ids[-1]] if incremental else ids
        last = frame(
            tail, [*(rows[done:] if incremental else []), *rows], len(ids), {"type": "abort", "message": "queue"}
        )
    else:
        shown = slice(done, None) if incremental else slice(None)
        last = frame(ids[shown], rows[shown], len(ids), {"type": "length", "length": len(ids)}, text=noise)
    data = b"".join(b"data: " + f + b"\n\n" for f in [*frames, last, b"[DONE]"])

    async def pieces() -> AsyncIterator[bytes]:
        for part in cut(data, at):
            yield part

    async def read() -> list[Chunk]:
        transcript = Transcript(wanted(n=len(ids)), None)
        found = []
        async for event in events(pieces()):
            if not transcript.ended:
                found.append(transcript.read(event))
        return found

    got = joined(asyncio.run(read()))
    assert list(got.token_ids) == ids
    assert list(got.logprobs) == [r[0] for r in rows]
    assert got.finish == "length"
    assert math.isclose(sum(got.logprobs), sum(r[0] for r in rows))
