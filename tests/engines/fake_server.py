"""An inference server with known behaviour, standard library and numpy only: `python fake_server.py PORT FOLDER FAULTS`.

The next token is a hash of every token before it and of the weights, so that a token lost, doubled, or sampled under other
weights than its stamp says changes all that follow. `FAULTS` is a folder: a file in it is a fault, its content an argument;
most faults remove their file when they strike, so that they strike once, whatever restarts in between.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

VOCABULARY = 50
STOP = 7
DECODE_S = 0.002
"""Of one token, so that tests can act while a stream runs."""


def next_token(ids: list[int], policy: float) -> int:
    """What weights of value `policy` sample behind `ids`."""
    digest = hashlib.sha256(f"{policy}:{ids}".encode()).digest()
    return int.from_bytes(digest[:4], "big") % VOCABULARY


def logprob_of(token: int) -> float:
    return -(token + 1) / 16


def score_of(ids: list[int], policy: float) -> list[float]:
    return [-(1 + (a * 31 + b) % 7) / 4 - policy / 64 for a, b in itertools.pairwise(ids)]


def experts_of(ids: list[int]) -> list[list[int]]:
    """Two of each of three layers at the position behind `ids`."""
    return [[(len(ids) + layer) % 8, (ids[-1] + layer) % 8] for layer in range(3)]


def read_weights(folder: Path) -> tuple[float, int]:
    """Value of the weight `policy`, and the checksum of all weights."""
    import zlib

    import numpy as np
    from safetensors.numpy import load_file

    total, policy = 0, 0.0
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            base = zlib.crc32(f"{name}:4".encode())
            for i, bits in enumerate(tensor.reshape(-1).view(np.uint32).tolist()):
                x = (base + i * 0x9E3779B1) % 2**32
                total += (bits ^ 0x5BD1E995) * ((x * x >> 16) % 2**32 | 1)
            policy = float(tensor.reshape(-1)[0]) if name == "policy" else policy
    return policy, total % 2**64


def by_handles() -> Any:
    """vLLM's worker with our extension and no model: what it takes lies in `loaded`."""
    import importlib.util
    from types import SimpleNamespace

    file = Path(__file__).parents[2] / "rollkeel" / "engines" / "vllm_worker.py"
    spec = importlib.util.spec_from_file_location("rollkeel_vllm_worker", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    vars(module)["_on_cpu"] = lambda: False
    worker = module.Publication()

    def reload(weights_iterator: Any, is_checkpoint_format: bool) -> None:
        worker.loaded = {name: tensor.clone() for name, tensor in weights_iterator}

    config = SimpleNamespace(hf_config=SimpleNamespace())
    worker.model_runner, worker.reload_weights = SimpleNamespace(get_model=lambda: None, model_config=config), reload
    return worker


def in_memory(folder: Path) -> Any:
    """The same worker with weights in memory, those of a folder, that are written to by boxes."""
    import torch
    from safetensors.torch import load_file

    worker, model = by_handles(), torch.nn.Module()
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            model.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
    worker.model_runner.get_model = lambda: model
    worker.rank, worker.live = 0, model
    return worker


class State:
    def __init__(self, folder: Path, faults: Path) -> None:
        self.faults, self.folder = faults, folder
        self.asleep: set[str] = set()
        self.calls: list[str] = []
        """Of sleep, wake and load, in order."""
        self.worker: Any = None
        self.policy, self.checksum = read_weights(folder)
        self.label = -1
        self.aborted: set[str] = set()
        self.running: set[str] = set()
        self.most = 0
        """Streams that ran at once, at most."""
        self.paused = threading.Event()
        self.sent = 0
        self.lock = threading.Lock()
        self.stopped = False

    def fault(self, name: str, keep: bool = False) -> str | None:
        """Argument of a fault that is set, else None. Taking it ends it."""
        file = self.faults / name
        try:
            text = file.read_text()
            if not keep:
                file.unlink()
            return text
        except FileNotFoundError:
            return None

    def held(self) -> bool:
        """No token follows the `hold_at`-th while that fault's file is there."""
        at = self.fault("hold_at", keep=True)
        return at is not None and self.sent >= int(at)

    def ends(self, key: str) -> bool:
        """Whether a request was aborted, and that is heard."""
        return key in self.aborted and self.fault("ignore_abort", keep=True) is None

    def due(self, name: str) -> bool:
        """True once the number of tokens sent by this server reaches the fault's argument."""
        with self.lock:
            wanted = self.fault(name, keep=True)
            return wanted is not None and self.sent >= int(wanted) and self.fault(name) is not None


def stream(state: State, asked: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Events of one generation; a final one has `finish`."""
    ids, key, starts = list(asked["token_ids"]), asked["key"], []
    experts: list[Any] | None = None
    if asked.get("experts") and state.fault("no_experts", keep=True) is None:
        experts = [experts_of(ids[: i + 1]) for i in range(asked["experts_from"], len(ids) - 1)]
    with state.lock:
        mute = int(state.fault("mute") or 0)
        if mute > 1:
            (state.faults / "mute").write_text(str(mute - 1))
    if mute:
        return
    for made in range(asked["max_new_tokens"]):
        while state.stopped or state.paused.is_set() or state.held():
            if state.ends(key):
                break
            time.sleep(DECODE_S)
        time.sleep(DECODE_S)
        if state.ends(key):
            yield {"token_ids": [], "logprobs": [], "finish": "abort", "starts": starts, "experts": experts}
            return
        if state.due("crash_after"):
            os.kill(os.getpid(), signal.SIGKILL)
        if state.due("hang_after"):
            state.stopped = True
            continue
        if state.due("cut_after"):
            return
        if state.due("error_after"):
            yield {"error": "the fake broke"}
            return
        if state.due("finish_after"):
            yield {"token_ids": [], "logprobs": [], "finish": "stop", "starts": starts}
            return
        with state.lock:  # no weights come in the middle of a decode step
            token, label = next_token(ids, state.policy), state.label
            state.sent += 1
        if experts is not None:
            experts.append(experts_of(ids))
        ids.append(token)
        if not starts or starts[-1][0] != label:
            starts.append((label, made))
        stopped = token in asked["stop"]
        last = stopped or made + 1 == asked["max_new_tokens"]
        finish = ("stop" if stopped else "length") if last else ""
        logprob = float("nan") if state.due("nan_after") else logprob_of(token)
        event = {"token_ids": [token], "logprobs": [logprob], "finish": finish, "starts": starts if last else []}
        yield event | ({"experts": experts} if last else {})
        if last:
            return


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: State

    def log_message(self, format: str, *args: Any) -> None:
        """No access log."""

    def _say(self, code: int, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        state = self.state
        if state.stopped:
            time.sleep(3600)
        running = sorted(state.running)
        self._say(
            200,
            {
                "pid": os.getpid(),
                "sent": state.sent,
                "running": running,
                "most": state.most,
                "label": state.label,
                "calls": state.calls,
            },
        )

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        state = self.state
        if state.asleep and self.path in ("/generate", "/score", "/resume"):
            return self._say(400, {"error": f"asleep: {self.path}"})
        if self.path in ("/sleep", "/wake", "/load"):
            state.calls.append(asked.get("what") or self.path[1:])
        if self.path == "/generate":
            self._generate(asked)
        elif self.path == "/sleep":
            if state.running or state.fault("cannot_sleep") is not None:
                return self._say(500, {"error": f"{len(state.running)} requests are running"})
            state.asleep, state.policy = {"weights", "kv_cache"}, float("nan")
            self._say(200, {})
        elif self.path == "/wake":
            if state.fault("cannot_wake") is not None:
                return self._say(500, {"error": "no memory"})
            state.asleep.remove(asked["what"])
            self._say(200, {})
        elif self.path == "/place":
            self._say(200, {"place": state.fault("place", keep=True) or ""})
        elif self.path == "/abort":
            state.aborted |= set(asked["keys"])
            self._say(200, {})
        elif self.path == "/score":
            self._say(200, {"logprobs": score_of(asked["token_ids"], state.policy)})
        elif self.path == "/pause":
            state.paused.set()
            self._say(200, {})
        elif self.path == "/resume":
            state.paused.clear()
            self._say(200, {})
        elif self.path == "/label":
            state.label = asked["version"]
            self._say(200, {})
        elif self.path == "/workers":
            self._say(200, {"workers": [self._worker(asked["what"], asked["message"])]})
        elif self.path == "/load":
            if state.fault("crash_in_load") is not None:
                os.kill(os.getpid(), signal.SIGKILL)
            if "weights" in state.asleep:
                return self._say(500, {"error": "its weights sleep"})
            if asked["source"].startswith("{"):
                state.worker = state.worker or by_handles()
                answer = state.worker.rollkeel_take(asked["source"])
                if "error" in answer:
                    return self._say(500, answer)
                policy, checksum = float(state.worker.loaded["policy"][0]), int(answer["checksum"])
            else:
                policy, checksum = read_weights(Path(asked["source"]))
                self.state.folder = Path(asked["source"])
            lost, wrong = state.fault("lose_load") is not None, state.fault("wrong_checksum") is not None
            with state.lock:
                state.policy, state.label = state.policy if lost else policy, asked["version"]
            checksum ^= wrong
            self._say(200, {"checksum": str(checksum)})

    def _worker(self, what: str, message: str) -> dict[str, str]:
        state = self.state
        step = json.loads(message)[0] if what == "rollkeel_boxes" else what
        if step == "rollkeel_rooms":
            state.worker = in_memory(state.folder)
            if state.fault("other_memory") is not None:
                state.worker.live.policy += 1
        if step == "take" and state.fault("crash_in_take") is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        if step == "take" and state.fault("lose_take") is not None:
            return {}
        answer = {} if step == "rollkeel_stay_plain" else getattr(state.worker, what)(message)
        if step == "begin":
            state.policy = float("nan")
        if step == "finish" and "error" not in answer:
            state.policy = float(state.worker.live.policy[0])
        state.calls.append(step)
        return answer

    def _generate(self, asked: dict[str, Any]) -> None:
        state = self.state
        refused = state.fault("refuse", keep=True)
        if refused is not None and int(refused) in asked["token_ids"]:
            return self._say(400, {"error": f"token {refused} is not welcome"})
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        state.running.add(asked["key"])
        state.most = max(state.most, len(state.running))
        try:
            for event in stream(state, asked):
                if event.get("finish"):
                    state.running.discard(asked["key"])  # before the client can know, and begin another
                line = json.dumps(event).encode() + b"\n"
                self.wfile.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
                self.wfile.flush()
            self.wfile.write(b"0\r\n\r\n")
        except OSError:
            self.close_connection = True  # the client is gone
        finally:
            state.running.discard(asked["key"])


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256


def main(port: int, folder: Path, faults: Path) -> None:
    state = State(folder, faults)
    if state.fault("die_at_start") is not None:
        raise RuntimeError("RuntimeError: the fake will not start")
    if state.fault("slow_start") is not None:
        time.sleep(3600)
    with (faults / "starts").open("a") as file:
        file.write(f"{os.getpid()}\n")
    handler = type("Bound", (Handler,), {"state": state})
    Server(("127.0.0.1", port), handler).serve_forever()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
