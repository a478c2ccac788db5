"""What recording tokens costs a step, and what diagnosing ten million of them costs.

    python -m benchmarks.trace                          # a few minutes
    python -m benchmarks.trace --tokens 1000000

Recording: the share of `time/record_s` in `time/step_s` over runs of the default recipe and of one with longer answers. Diagnosis: a made-up
run folder of so many tokens whose engine is in bf16, read and judged by `rollkeel doctor` in a process of its own; wall and
processor seconds and the largest memory of that process. Targets: under 3 %; under 60 s and 4 GiB.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np

from rollkeel.config import Config
from rollkeel.loop.job import train
from rollkeel.recipe import load
from rollkeel.record.rollout_store import write_step
from rollkeel.record.runfolder import METRICS, RunFolder, read_rows
from rollkeel.types import GraderSpec, Prompt, Rollout, SamplingParams, Status, TokenSpan

SHARE, SECONDS, GIB = 0.03, 60.0, 4.0
PER_ROLLOUT, PER_STEP, GROUP = 500, 200_000, 8
CHOICES = 8
"""Tokens that the made-up policy chooses from."""


def recording(words: list[str]) -> float:
    """Share of a step that writing its rollouts takes."""
    with tempfile.TemporaryDirectory() as path:
        folder = train(load(None, [*words, "eval.every=0", "checkpoint.every=0", f"run.dir={path}/run"]))
        rows = read_rows(folder / METRICS)[0][5:-1]
    return sum(r["time/record_s"] for r in rows) / sum(r["time/step_s"] for r in rows)


def made_up(path: Path, tokens: int) -> None:
    """A run folder of `tokens` tokens: logits N(0, 2²) anew at every token, an engine whose logits are off by N(0, 0.02²)."""
    rng = np.random.default_rng(0)
    with RunFolder.create(path, Config.model_validate({"engine": {"dtype": "bf16"}})) as folder:
        for step in range(1, -(-tokens // PER_STEP) + 1):
            rollouts, train_logprobs, entropy, advantages = [], {}, {}, {}
            for i in range(PER_STEP // PER_ROLLOUT):
                number = step * PER_STEP + i
                logits = rng.normal(0, 2, (PER_ROLLOUT, CHOICES))
                o = logits - np.logaddexp.reduce(logits, 1, keepdims=True)
                q = logits + rng.normal(0, 0.02, logits.shape)
                q -= np.logaddexp.reduce(q, 1, keepdims=True)
                chosen = (q + rng.gumbel(size=q.shape)).argmax(1)
                at = np.arange(PER_ROLLOUT)
                rollouts.append(_rollout(number, chosen, q[at, chosen], 4 * (step - 1), float(rng.integers(2))))
                train_logprobs[number] = o[at, chosen].astype(np.float32)
                entropy[number] = -(np.exp(o) * o).sum(1).astype(np.float32)
                advantages[number] = np.ones(PER_ROLLOUT, np.float32)
            write_step(
                folder.rollouts(step),
                rollouts,
                step=step,
                train_version=dict.fromkeys(train_logprobs, 4 * (step - 1)),
                train_logprobs=train_logprobs,
                entropy=entropy,
                advantages=advantages,
                piece=str,
            )


def _rollout(number: int, chosen: np.ndarray, logprobs: np.ndarray, version: int, reward: float) -> Rollout:
    n = len(chosen)
    stamp = np.full(n, version)
    span = TokenSpan(
        token_ids=chosen,
        logprobs=np.minimum(logprobs, 0).astype(np.float32),
        kept_mass=np.ones(n, np.float32),
        versions=stamp,
        kv_versions=stamp,
    )
    group = number // GROUP
    prompt = Prompt(
        id=str(group), index=group, text=str(group), token_ids=np.arange(8), answer="", grader=GraderSpec(name="x"), task="x"
    )  # fmt: skip
    return Rollout(
        id=number, group=group, member=number % GROUP, prompt=prompt, span=span, status=Status.FINISHED,
        sampling=SamplingParams(max_new_tokens=4 * PER_ROLLOUT), engine="local", dtype="bf16", reward=reward, text=str(number),
    )  # fmt: skip


def diagnosis(path: Path) -> tuple[float, float, float, str]:
    """Wall seconds, processor seconds, GiB, and the first line that the doctor says."""
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "rollkeel", "doctor", str(path)], capture_output=True, text=True, check=False
    )
    wall = time.perf_counter() - start
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    said = (done.stdout or done.stderr).strip().splitlines()
    return (
        wall,
        used.ru_utime + used.ru_stime,
        used.ru_maxrss / 2**20,
        said[0] if said else f"exit code {done.returncode}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--tokens", type=int, default=10_000_000)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="config overrides to try")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as path:
        made_up(Path(path) / "run", args.tokens)
        wall, cpu, memory, said = diagnosis(Path(path) / "run")
    lines = [
        f"| diagnosis of {args.tokens:,} tokens | {wall:.1f} s wall, {cpu:.1f} s processor, {memory:.2f} GiB | {SECONDS:.0f} s, {GIB:.0f} GiB | {said} |"
    ]
    short = [f"run.steps={args.steps}"]
    for name, words in {
        "answers of 13 tokens": short,
        "addition, 24 digits": [*short, "data.task=addition", "data.options.digits=24", "sampling.max_new_tokens=64"],
    }.items():
        lines.append(f"| recording, {name} | {recording([*words, *args.set]):.1%} of a step | {SHARE:.0%} | |")
    print("| what | measured | target | |\n|---|---|---|---|\n" + "\n".join(lines))


if __name__ == "__main__":
    main()
