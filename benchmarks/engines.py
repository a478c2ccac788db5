"""Tokens per second of a vLLM server beside the embedded engine: same model, same requests, same process asking for them.

    make .venv-vllm/.done && python -m benchmarks.engines
    python -m benchmarks.engines --model tiny-qwen3 --concurrent 1 64 --rounds 3

For each number of concurrent requests: forced lengths (no stop tokens), 20-token prompts, wall time from `submit` to the last
segment, tokens over it; engines take turns and the median over rounds is printed. The server runs on one thread of its own
beside the process that asks, which decodes the streams of events; the embedded engine uses one thread in all.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import torch

from rollkeel.config import EngineConfig
from rollkeel.engines.open import open_engine
from rollkeel.models.names import checkpoint_views
from rollkeel.models.presets import build_preset
from rollkeel.sync.publish import DirectPublisher
from rollkeel.types import Request, SamplingParams

PROMPT, POLL_S = 20, 120.0


def seconds(engine: Any, first: int, count: int, tokens: int) -> float:
    """From `submit` of `count` requests to the end of the last one."""
    rng = np.random.default_rng(first)
    requests = [
        Request(id=first + i, prompt_ids=rng.integers(8, 250, PROMPT), sampling=SamplingParams(max_new_tokens=tokens))
        for i in range(count)
    ]
    start = time.perf_counter()
    engine.submit(requests)
    left = count
    while left:
        ended = engine.poll(POLL_S)
        if not ended:
            raise SystemExit(f"nothing for {POLL_S:.0f} s")
        left -= len(ended)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-qwen3-moe", help="preset")
    parser.add_argument("--concurrent", type=int, nargs="+", default=[1, 8, 32, 64, 128])
    parser.add_argument("--tokens", type=int, default=64, help="of each request")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model, _ = build_preset(args.model)
    slots = max(args.concurrent)
    engines: dict[str, Any] = {}
    try:
        for kind in ("local", "vllm"):
            config = EngineConfig.model_validate({"kind": kind, "slots": slots})
            engines[kind] = open_engine(model.config, config, "cpu", max_length=512)
            publish = DirectPublisher([engines[kind]]).publish
            start = time.perf_counter()
            publish(checkpoint_views(model).items(), 0)
            first = time.perf_counter() - start
            times = [publish(checkpoint_views(model).items(), v)["time/sync_s"] for v in range(1, 12)]
            print(
                f"{kind}: first weights {first:.1f} s, each further publication {statistics.median(times) * 1e3:.0f} ms"
            )
        print(f"| concurrent | {' | '.join(f'{kind} tokens/s' for kind in engines)} | ratio |\n|---|---|---|---|")
        number = 0
        for count in args.concurrent:
            found: dict[str, list[float]] = {kind: [] for kind in engines}
            for turn in range(args.rounds + 1):
                for kind, engine in engines.items():
                    taken = seconds(engine, number, count, args.tokens)
                    number += count
                    if turn:  # the first warms up
                        found[kind].append(count * args.tokens / taken)
            local, vllm = (statistics.median(rates) for rates in found.values())
            print(f"| {count} | {local:.0f} | {vllm:.0f} | {vllm / local:.2f} |", flush=True)
    finally:
        for engine in engines.values():
            engine.close()


if __name__ == "__main__":
    main()
