"""A judge that is a model folder: the embedded engine in this process, which the threads of graders ask at once."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np

from rollkeel.config import EngineConfig, ModelConfig
from rollkeel.engines.local import LocalEngine
from rollkeel.models.checksum import MASK, tensor_checksum
from rollkeel.models.loading import load_policy
from rollkeel.models.names import checkpoint_views
from rollkeel.types import Request, SamplingParams, Segment, WeightSlice, WeightUpdate

POLL_S = 0.05
_lock, _open = threading.Lock(), dict[tuple[str, str], "OwnJudge"]()


def own_judge(path: str, device: str) -> OwnJudge:
    """The one of this process, loaded when it is first asked for. Raises `BadInput` for what is no model."""
    with _lock:
        if (path, device) not in _open:
            _open[path, device] = OwnJudge(path, device)
        return _open[path, device]


class OwnJudge:
    """Weights in float32 on a CPU, in bfloat16 on a GPU."""

    def __init__(self, path: str, device: str) -> None:
        cpu = device == "cpu"
        policy = load_policy(ModelConfig(path=path, dtype="float32" if cpu else "bfloat16"), device)
        self._tokenizer = policy.tokenizer
        self._stops = tuple(policy.stop_token_ids)
        config = EngineConfig(dtype="fp32" if cpu else "bf16")
        self._engine = LocalEngine(policy.model.config, config, device=device, name="judge")
        slices = [
            WeightSlice(name=name, tensor=weight, checksum=tensor_checksum(name, weight))
            for name, weight in checkpoint_views(policy.model).items()
        ]
        update = WeightUpdate(
            kind="full",
            base_version=None,
            version=0,
            slices=slices,
            checksum=sum(part.checksum for part in slices) & MASK,
        )
        self.checksum = self._engine.update_weights(update).checksum
        self._turn = threading.Lock()
        self._asked = 0
        self._done: dict[int, Segment] = {}

    def reply(self, messages: list[dict[str, str]], timeout_s: float, **sampling: Any) -> str:
        """Raises `TimeoutError`, and `BadInput` for a conversation that does not fit into the model's context."""
        ends = time.monotonic() + timeout_s
        ids = self._ids(messages)
        wanted = SamplingParams(stop_token_ids=self._stops, **sampling)
        with self._turn:
            self._asked += 1
            own = self._asked
            self._engine.submit([Request(id=own, prompt_ids=ids, sampling=wanted)])
        while True:
            with self._turn:
                if own not in self._done:
                    self._poll(min(POLL_S, max(ends - time.monotonic(), 0.0)))
                late = own not in self._done and time.monotonic() > ends
                if late:
                    self._engine.interrupt([own])
                    self._poll(0.0)
                segment = self._done.pop(own, None)
            if late:
                raise TimeoutError(f"no whole reply in {timeout_s:g} s")
            if segment is not None:
                ids = segment.span.token_ids.tolist()
                return self._tokenizer.decode(ids, skip_special_tokens=True)
            time.sleep(0)  # others may ask between two polls

    def _poll(self, seconds: float) -> None:
        for segment in self._engine.poll(seconds):
            self._done[segment.request_id] = segment

    def _ids(self, messages: list[dict[str, str]]) -> np.ndarray:
        text = messages[-1]["content"]
        if getattr(self._tokenizer, "chat_template", None):
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return np.asarray(ids, np.int64)
