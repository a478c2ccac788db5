"""The `Backend` of `fake_server.py`, and an engine on top of it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import numpy as np
import torch
from fake_server import STOP, VOCABULARY, next_token

from rollkeel.config import EngineConfig
from rollkeel.engines.backend import Chunk, Generation, Refused, ServerSettings
from rollkeel.engines.served import ServedEngine
from rollkeel.errors import EngineFailure
from rollkeel.sync.publish import full_update
from rollkeel.types import Request, SamplingParams, Segment, TokenSpan, WeightUpdate

SERVER = Path(__file__).with_name("fake_server.py")
CONTEXT = 400


class FakeBackend:
    """Also remembers the port, so that a test can ask the server how far it is."""

    name = "fake"
    returns_topk = False

    def __init__(self, faults: Path) -> None:
        self.faults, self.port = faults, 0

    def set(self, fault: str, argument: object = "") -> None:
        whole = self.faults / f".{fault}"
        whole.write_text(str(argument))
        whole.replace(self.faults / fault)  # the server may be reading it

    def starts(self) -> int:
        """How often a server came up."""
        file = self.faults / "starts"
        return len(file.read_text().splitlines()) if file.exists() else 0

    def state(self) -> dict[str, Any]:
        return httpx2.get(f"http://127.0.0.1:{self.port}/", timeout=10, trust_env=False).json()

    def until_sent(self, count: int) -> None:
        """Until the server, which may only just have started, has sent `count` tokens."""
        end, sent = time.monotonic() + 30.0, 0
        while sent < count:
            with suppress(httpx2.TransportError):
                sent = self.state()["sent"]
            assert time.monotonic() < end, f"the server never sent {count} tokens"

    def returns_experts(self, config: EngineConfig, hf_config: Any) -> bool:
        return True

    def check(self, dtype: str) -> None:
        """Everything is welcome."""

    def objection(self, sampling: SamplingParams) -> str:
        told = sampling.evaluation or not sampling.truncated or sampling.temperature == 0
        return "" if told else "the fake does not tell the mass"

    def command(self, settings: ServerSettings) -> tuple[list[str], dict[str, str]]:
        self.port = settings.port
        return [settings.python, str(SERVER), str(settings.port), str(settings.model), str(self.faults)], {}

    async def ready(self, http: Any) -> bool:
        return (await http.get("/")).status_code == 200

    async def generate(self, http: Any, wanted: Generation) -> AsyncIterator[Chunk]:
        body = {"key": wanted.key, "token_ids": list(wanted.token_ids), "max_new_tokens": wanted.max_new_tokens}
        body |= {"experts": wanted.sampling.return_experts, "experts_from": wanted.experts_from}
        body["stop"] = list(wanted.sampling.stop_token_ids)
        async with http.stream("POST", "/generate", json=body) as answer:
            if answer.status_code >= 400:
                raise Refused(f"engine fake: {json.loads(await answer.aread())['error']}")
            async for line in answer.aiter_lines():
                event = json.loads(line)
                if "error" in event:
                    raise EngineFailure(f"engine fake: {event['error']}")
                yield Chunk(
                    token_ids=event["token_ids"],
                    logprobs=event["logprobs"],
                    experts=np.array(event["experts"]).reshape(-1, 3, 2) if event.get("experts") else None,
                    finish=event["finish"],
                    version_starts=[(a, b) for a, b in event["starts"]],
                )

    async def abort(self, http: Any, keys: Sequence[str]) -> None:
        await http.post("/abort", json={"keys": list(keys)})

    async def score(self, http: Any, token_ids: Sequence[int]) -> np.ndarray:
        answer = await self.ask(http, "/score", token_ids=list(token_ids))
        return np.array(answer["logprobs"], np.float32)

    async def pause(self, http: Any, keep_kv: bool) -> None:
        await http.post("/pause", json={})

    async def load(self, http: Any, source: Path | str, version: int) -> int:
        return int((await self.ask(http, "/load", source=str(source), version=version))["checksum"])

    async def fill(self, http: Any, version: int, write: Callable[[], Awaitable[None]]) -> None:
        await self.ask(http, "/label", version=-1)
        await write()
        await self.ask(http, "/label", version=version)

    async def workers(self, http: Any, what: str, message: str) -> list[dict[str, str]]:
        return (await self.ask(http, "/workers", what=what, message=message))["workers"]

    async def place(self, http: Any) -> str:
        return (await self.ask(http, "/place"))["place"]

    async def sleep(self, http: Any) -> None:
        await self.ask(http, "/sleep")

    async def wake(self, http: Any, what: str) -> None:
        await self.ask(http, "/wake", what=what)

    async def ask(self, http: Any, path: str, **body: Any) -> dict[str, Any]:
        answer = await http.post(path, json=body)
        if answer.status_code != 200:
            raise EngineFailure(f"engine fake: {answer.json()['error']}")
        return answer.json()

    async def resume(self, http: Any) -> None:
        await self.ask(http, "/resume")


class FakeConfig:
    """As much of a model's config as the engine asks for."""

    vocab_size = VOCABULARY
    max_position_embeddings = CONTEXT
    architectures = ("Fake",)
    model_type = "fake"

    def get_text_config(self) -> SimpleNamespace:
        return SimpleNamespace(vocab_size=self.vocab_size, max_position_embeddings=self.max_position_embeddings)

    def save_pretrained(self, folder: str) -> None:
        (Path(folder) / "config.json").write_text("{}")


def weights(policy: float, version: int) -> WeightUpdate:
    return full_update([("policy", torch.tensor([policy])), ("rest", torch.arange(12.0).view(3, 4).t())], version)


def fake_engine(
    faults: Path, policy: float = 1.0, *, publish: bool = True, sleeps: bool = False, **config: Any
) -> tuple[Any, FakeBackend]:
    """An engine that serves `policy` as version 1."""
    backend = FakeBackend(faults)
    settings = EngineConfig.model_validate({"slots": 16, "deadline_s": 20.0, **config})
    engine = ServedEngine(
        FakeConfig(), settings, backend, python=sys.executable, log_path=faults / "log", sleeps=sleeps
    )
    if publish:
        update = weights(policy, 1)
        assert engine.update_weights(update).checksum == update.checksum
    return engine, backend


def request(id: int, length: int = 60, prefix: TokenSpan | None = None, **sampling: Any) -> Request:
    params = SamplingParams(**{"max_new_tokens": length, "stop_token_ids": (STOP,), **sampling})
    return Request(
        id=id, prompt_ids=np.array([id % VOCABULARY, 3]), sampling=params, prefix=prefix or TokenSpan.empty()
    )


def requests(count: int, first: int = 0, length: int = 60) -> list[Request]:
    return [request(first + i, length) for i in range(count)]


def assert_true(asked: Request, span: TokenSpan, policies: dict[int, float]) -> None:
    """Every token is what the weights of its stamp sample behind exactly the tokens before it."""
    ids = [*asked.prompt_ids.tolist(), *asked.prefix.token_ids.tolist()]
    for token, version in zip(span.token_ids.tolist(), span.versions.tolist(), strict=True):
        assert token == next_token(ids, policies[version]), f"request {asked.id}, token {len(ids)}, version {version}"
        ids.append(token)


def ends_well(asked: Request, segment: Segment) -> bool:
    whole = len(asked.prefix) + len(segment.span)
    stopped = len(segment.span) > 0 and segment.span.token_ids[-1] == STOP
    return (segment.status == "finished" and bool(stopped)) or (
        segment.status == "length" and whole == asked.sampling.max_new_tokens
    )
