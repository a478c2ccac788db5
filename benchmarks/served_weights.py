"""A publication to a real vLLM server on this host: by folder and by the plan, in bytes and seconds, and what decoding then costs.

    python -m benchmarks.served_weights                                    # 66 M parameters: three minutes, of which the most is vLLM's start
    python -m benchmarks.served_weights --width 64 --layers 2 --rounds 3   # the size of a preset

`bytes`: written to a folder in shared memory, or to the two slots of a ring; `at most`: of either at one time. `seconds`: of `publish`
without probes, by the clock, median; both servers run at the same time and take turns. `tokens/s`: of 16 sequences together, by the clock.
The server that takes boxes computes with plain weights where vLLM else packs copies of them.
"""

from __future__ import annotations

import argparse
import os
import time
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from rollkeel.config import EngineConfig
from rollkeel.engines.open import server_python
from rollkeel.engines.served import ServedEngine
from rollkeel.engines.vllm import VllmBackend
from rollkeel.models.names import checkpoint_views
from rollkeel.models.presets import build_preset
from rollkeel.sync.publish import DirectPublisher
from rollkeel.types import Request, SamplingParams


class Way:
    """One server, and how it gets weights."""

    def __init__(self, model: torch.nn.Module, dtype: str, buffer_mb: float) -> None:
        config = EngineConfig.model_validate({"kind": "vllm", "slots": 16, "kv_memory_gb": 1.0, "dtype": dtype})
        python = server_python(config)
        self.engine = ServedEngine(model.config, config, VllmBackend(), max_length=1024, python=python)
        self.publisher = DirectPublisher([self.engine], buffer_mb=buffer_mb)
        self.buffer_bytes = buffer_mb * 2**20
        self.seconds, self.speeds = list[float](), list[float]()

    def publish(self, model: torch.nn.Module, version: int) -> None:
        weights = checkpoint_views(model).items()  # type: ignore[arg-type]
        self.seconds.append(self.publisher.publish(weights, version)["time/sync_s"])

    def moved(self, model: torch.nn.Module) -> tuple[float, float]:
        """Bytes of a publication, and the most of them at one time."""
        if self.buffer_bytes:
            feed = self.engine.boxes.feed
            assert not self.engine.boxes.objection, self.engine.boxes.objection
            return feed.made.nbytes, min(feed.made.nbytes, 2 * feed.bucket_bytes)  # type: ignore[union-attr]
        whole = sum(t.nbytes for t in checkpoint_views(model).values())  # type: ignore[arg-type]
        return whole, 2 * whole  # the folder before stays until the new one is served

    def sample(self, tokens: int, first: int) -> None:
        draw, sampling = np.random.default_rng(first), SamplingParams(max_new_tokens=tokens)
        prompts = [draw.integers(3, 288, 16) for _ in range(16)]
        asked = [Request(id=first + i, prompt_ids=ids, sampling=sampling) for i, ids in enumerate(prompts)]
        start, done = time.perf_counter(), 0
        self.engine.submit(asked)
        while done < len(asked):
            done += len(self.engine.poll(60.0))
        self.speeds.append(16 * tokens / (time.perf_counter() - start))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--preset", default="tiny-qwen3-moe")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--buffer-mb", type=float, default=64.0)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(1)
    size = {"num_hidden_layers": options.layers, "hidden_size": options.width}
    size["moe_intermediate_size" if "moe" in options.preset else "intermediate_size"] = options.width
    model, _ = build_preset(options.preset, 0, size)
    ways = {"folder": Way(model, options.dtype, 0.0), "plan": Way(model, options.dtype, options.buffer_mb)}
    try:
        for version in range(options.rounds + 1):
            with torch.no_grad():
                for weight in model.parameters():
                    weight.mul_(1 + 1e-3)
            for way in ways.values():
                way.publish(model, version + 1)
                way.sample(options.tokens, version * 16)
        count = sum(t.numel() for t in checkpoint_views(model).values())
        print(f"{options.preset}, {count:,} parameters, {options.dtype}, load {os.getloadavg()[0]:.1f}")
        print("way        MB  at most  seconds     GB/s  tokens/s")
        for name, way in ways.items():
            moved, most = way.moved(model)
            took = median(way.seconds[1:])  # the first is a server's start
            print(
                f"{name:7} {moved / 1e6:6.1f} {most / 1e6:8.1f} {took:8.3f} {moved / took / 1e9:8.2f}"
                f" {median(way.speeds[1:]):9.0f}"
            )
    finally:
        for way in ways.values():
            way.engine.close()


if __name__ == "__main__":
    main()
