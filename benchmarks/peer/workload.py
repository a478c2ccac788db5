"""What both sides are asked to do, so that neither side can differ in it. Imports nothing outside the standard library."""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import socket
from collections.abc import Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Any

ROLLOUTS = 64
GROUP_SIZE = 8
PROMPT_TOKENS = 20
NEW_TOKENS = 128
VOCABULARY = 2048
MEDIAN_LENGTH = 32
LENGTH_SIGMA = 0.8
LEARNING_RATE = 1e-5
CLIP_NORM = 1.0
SEED = 0

WHAT = ("rollout", "train", "step")
LENGTHS = ("equal", "lognormal")


def prompts() -> list[str]:
    """One prompt text per group: `PROMPT_TOKENS` ASCII characters, each one token of the byte-level tokenizer."""
    rng = random.Random(SEED)
    letters = "abcdefghijklmnopqrstuvwxyz0123456789+-="
    return ["".join(rng.choice(letters) for _ in range(PROMPT_TOKENS)) for _ in range(ROLLOUTS // GROUP_SIZE)]


def completion_lengths(kind: str) -> list[int]:
    """`ROLLOUTS` lengths in tokens: all `NEW_TOKENS`, or the quantiles of a lognormal cut off at `NEW_TOKENS`.

    Quantiles instead of draws: the median is `MEDIAN_LENGTH` and the maximum `NEW_TOKENS` exactly.
    """
    if kind == "equal":
        return [NEW_TOKENS] * ROLLOUTS
    normal = NormalDist(math.log(MEDIAN_LENGTH), LENGTH_SIGMA)
    lengths = [round(math.exp(normal.inv_cdf((i + 0.5) / ROLLOUTS))) for i in range(ROLLOUTS)]
    lengths = [min(max(n, 1), NEW_TOKENS) for n in lengths]
    random.Random(SEED).shuffle(lengths)
    return lengths


def completions(kind: str) -> list[list[int]]:
    """Forced answers for the train-only measurement: uniform ids above the special tokens."""
    rng = random.Random(SEED + 1)
    return [[rng.randrange(8, VOCABULARY) for _ in range(n)] for n in completion_lengths(kind)]


def reward(token_ids: Sequence[int]) -> float:
    """Share of even ids: costs nothing, and no group has zero variance."""
    return sum(1 for t in token_ids if t % 2 == 0) / max(len(token_ids), 1)


def group_advantages(rewards: Sequence[float]) -> list[float]:
    """(R − mean) / (unbiased std + 1e-4) inside each group of `GROUP_SIZE`."""
    out: list[float] = []
    for start in range(0, len(rewards), GROUP_SIZE):
        group = rewards[start : start + GROUP_SIZE]
        mean = sum(group) / len(group)
        std = math.sqrt(sum((r - mean) ** 2 for r in group) / (len(group) - 1))
        out.extend((r - mean) / (std + 1e-4) for r in group)
    return out


def parser(description: str) -> argparse.ArgumentParser:
    """The command line both sides share."""
    p = argparse.ArgumentParser(description=description)
    p.add_argument("--what", choices=WHAT, required=True)
    p.add_argument("--lengths", choices=LENGTHS, default="equal")
    p.add_argument("--processes", type=int, default=1)
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--repeats", type=int, default=3)
    p.add_argument("--warmup", type=int, default=1)
    p.add_argument("--model", required=True, help="folder written by benchmarks.peer.model")
    return p


def set_threads(threads: int, spin: int | None = None) -> None:
    """Fix the thread count; must run before torch is imported, which reads the environment once.

    Between parallel regions two threads wait as the OpenMP library does by default: spinning for a while, then asleep.
    Always asleep (`passive`) halves TRL's decoding. `spin` (rounds) shortens it where other processes of the same side
    need the cores.
    """
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        os.environ.pop(name, None)
    if threads == 1:
        os.environ["OMP_WAIT_POLICY"] = "passive"
    elif spin is not None:
        os.environ["GOMP_SPINCOUNT"] = str(spin)
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(threads)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def allocator() -> dict[str, str]:
    """Environment that makes glibc keep freed memory instead of returning it to the kernel after every large tensor.

    Each such tensor otherwise costs a page fault per 4 KB. It helps both sides, TRL's training most (1.2×).
    """
    return {
        "MALLOC_MMAP_THRESHOLD_": str(32 << 20),  # glibc refuses more
        "MALLOC_TRIM_THRESHOLD_": str(4 << 30),
        "MALLOC_TOP_PAD_": str(64 << 20),
    }


def memory_mb(field: str, pid: int | str = "self") -> float:
    """Resident memory of a process in MB: field `VmRSS` now, `VmHWM` at its peak.

    `getrusage` will not do: a child starts with its parent's peak there, and `VmHWM` begins anew at exec.
    """
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith("State:") and line.split()[1] == "Z":
            return 0.0  # ended, and not waited for yet
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/{pid}/status: expected a line {field}, found none; this benchmark needs Linux")


def free_port() -> int:
    """A TCP port of this machine nobody listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def report(result: dict[str, Any]) -> None:
    """Print one JSON line, the only thing on stdout the driver reads."""
    print("RESULT " + json.dumps(result), flush=True)
