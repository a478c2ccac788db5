"""What an update costs with prompts that the answers of a group share, against the same update without, in one run.

    python -m benchmarks.shared_prompts [--prompt 512] [--answer 128] [--members 8] [--groups 4] [--preset tiny-qwen3]

Passes alternate; medians. The gradients of both are compared: whole, and of the tensor that differs most.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch

from rollkeel import objectives
from rollkeel.batch import packing
from rollkeel.batch.build import TrainingBatch
from rollkeel.config import ModelConfig, TrainConfig
from rollkeel.models.loading import load_policy
from rollkeel.train.trainer import LocalTrainer


def batch_of(prompt: int, answer: int, members: int, groups: int) -> TrainingBatch:
    """Random tokens; every answer is as long as the others."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(8, 200, prompt) for _ in range(groups)]
    count = members * groups
    total = count * answer
    sequences = tuple(np.concatenate([prompts[i // members], rng.integers(8, 200, answer)]) for i in range(count))
    row = torch.arange(count).repeat_interleave(answer)
    return TrainingBatch(
        sequences=sequences,
        prompt_lengths=(prompt,) * count,
        positions=(np.arange(prompt, prompt + answer),) * count,
        rollout_logprobs=torch.full((total,), -5.0),
        advantages=torch.randn(count, generator=torch.Generator().manual_seed(0)).repeat_interleave(answer),
        coefficients=torch.full((total,), 1 / total),
        sequence_ids=row,
        group_ids=row // members,
        kept_mass=torch.ones(total),
        versions=torch.zeros(total, dtype=torch.int64),
        kv_versions=torch.zeros(total, dtype=torch.int64),
        rollout_ids=row,
        token_index=torch.arange(answer).repeat(count),
        token_ids=torch.from_numpy(np.concatenate([s[prompt:] for s in sequences])),
    )


@contextmanager
def shared(on: bool) -> Iterator[None]:
    with mock.patch.object(packing, "SHARED_LEAST", 1 if on else 10**9):
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (
        ("prompt", 512),
        ("answer", 128),
        ("members", 8),
        ("groups", 4),
        ("repeats", 7),
        ("threads", 1),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--preset", default="tiny-qwen3")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    policy = load_policy(ModelConfig(path=f"preset:{args.preset}"), "cpu")
    config = TrainConfig(micro_batch_tokens=16_384, lr=1e-12, warmup_steps=0, clip_norm=1e9)
    trainer = LocalTrainer(policy, config, temperature=1.0, total_updates=10**6)
    batch, objective = batch_of(args.prompt, args.answer, args.members, args.groups), objectives.grpo()
    grads: dict[bool, dict[str, torch.Tensor]] = {}
    stepper, step = trainer._stepper, trainer._stepper.step
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for repeat in range(args.repeats + 1):
        for on in (False, True):

            def kept(*judge: Any, on: bool = on) -> dict[str, float]:
                grads[on] = {n: p.grad.clone() for n, p in stepper.named if p.grad is not None}
                return step(*judge)

            stepper.step = kept  # type: ignore[method-assign]
            with shared(on):
                start = time.perf_counter()
                trainer.update(batch, objective, old_is_current=True)
                if repeat:
                    seconds[on].append(time.perf_counter() - start)
    plain, one = (statistics.median(seconds[on]) for on in (False, True))
    apart = {n: float((g - grads[True][n]).norm()) for n, g in grads[False].items()}
    norms = {n: float(g.norm()) for n, g in grads[False].items()}
    whole = float(np.hypot.reduce([*apart.values()]) / np.hypot.reduce([*norms.values()]))
    worst = max(apart[n] / max(norms[n], 1e-30) for n in apart)
    print(
        f"prompt {args.prompt}, {args.groups} groups of {args.members} answers of {args.answer} tokens, {args.preset}"
    )
    print(f"update: {plain:.3f} s without, {one:.3f} s with shared prompts: {plain / one:.2f} times")
    print(f"gradients differ by {whole:.1e} of their norm, those of one tensor by {worst:.1e} at most")


if __name__ == "__main__":
    main()
