"""One measurement of rollkeel: the same command line and the same JSON line as `trl_side`.

`rollout` is `Engine.submit` and `poll` until 64 rollouts are back (with their log-probs, which TRL does not return).
`train` is `LocalTrainer.update` on forced completions. `step` is everything a training loop does for one step: requests,
rollouts, decoding to text, reward, advantages, batch, update, publication of the weights with its proof.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.peer import workload as w

if TYPE_CHECKING:
    import torch

    from rollkeel.batch.build import TrainingBatch
    from rollkeel.models.loading import Policy
    from rollkeel.train.trainer import LocalTrainer
    from rollkeel.types import Engine, Prompt, Rollout, TokenBatch

GRADER = "benchmark-even-share"


def main() -> None:
    args = w.parser("One measurement of rollkeel.").parse_args()
    if args.what == "train" and args.processes > 1:
        raise SystemExit("rollkeel trains in one process; use --threads")
    # Sampling workers leave both cores to the trainer and get them back; a spinning trainer thread would take one away.
    w.set_threads(args.threads, "passive" if args.processes > 1 else None)
    measure(args)


def measure(args: argparse.Namespace) -> None:
    """Build what the stage needs, time it, report."""
    import torch
    import transformers

    torch.set_num_threads(args.threads)
    bench = Bench(args)
    loaded = total_memory("VmRSS")
    seconds = []
    for _ in range(args.warmup + args.repeats):
        start = time.perf_counter()
        bench.run()
        seconds.append(time.perf_counter() - start)
    kind = args.lengths if args.what == "train" else "equal"
    result = {
        "side": "rollkeel",
        **{k: getattr(args, k) for k in ("what", "lengths", "processes", "threads")},
        "seconds": seconds[args.warmup :],
        "tokens": sum(w.completion_lengths(kind)),
        "memory_loaded_mb": loaded,
        "memory_peak_mb": total_memory("VmHWM"),
        "config": bench.config,
        "versions": {"transformers": transformers.__version__, "torch": torch.__version__},
    }
    bench.close()
    w.report(result)


class Bench:
    """The stage under test, built once; `run` is what is timed."""

    def __init__(self, args: argparse.Namespace) -> None:
        from rollkeel.config import ModelConfig, TrainConfig
        from rollkeel.models.loading import load_policy, quiet_transformers
        from rollkeel.objectives import grpo
        from rollkeel.rewards.graders import register
        from rollkeel.train.trainer import LocalTrainer

        quiet_transformers()
        register(GRADER, lambda rollout: w.reward(rollout.span.token_ids.tolist()))
        self.policy = load_policy(ModelConfig(path=args.model))
        self.prompts = make_prompts(self.policy)
        self.engine: Engine | None = None
        self.trainer: LocalTrainer | None = None
        self.config: dict[str, Any] = {}
        self.round = 0
        if args.what != "rollout":
            train = TrainConfig(lr=w.LEARNING_RATE, warmup_steps=0, clip_norm=w.CLIP_NORM)
            self.trainer = LocalTrainer(self.policy, train, temperature=1.0, total_updates=args.warmup + args.repeats)
            self.objective = OnPolicy(grpo())
            self.config["train"] = train.model_dump(mode="json")
        if args.what != "train":
            self._make_engine(args)
        self.batch = forced_batch(self.prompts, args.lengths) if args.what == "train" else None
        self.run: Callable[[], Any] = {"rollout": self.rollout, "train": self.update, "step": self.step}[args.what]

    def _make_engine(self, args: argparse.Namespace) -> None:
        from rollkeel.config import EngineConfig
        from rollkeel.sync.publish import DirectPublisher

        parallel = args.processes > 1
        config = EngineConfig(
            processes=args.processes if parallel else 0,
            threads=args.threads,
            slots=w.ROLLOUTS // args.processes,
            max_length=w.PROMPT_TOKENS + w.NEW_TOKENS,
        )
        self.config["engine"] = config.model_dump(mode="json")
        self.engine = make_engine(self.policy, config)
        self.publisher = DirectPublisher([self.engine])
        self.publisher.publish(self._weights(), 0)

    def _weights(self) -> Any:
        from rollkeel.models.names import checkpoint_views

        return checkpoint_views(self.policy.model).items()

    def rollout(self) -> list[Rollout]:
        """64 complete rollouts of exactly `NEW_TOKENS` tokens, in order."""
        from rollkeel.types import Request, Rollout, SamplingParams

        assert self.engine is not None
        sampling = SamplingParams(max_new_tokens=w.NEW_TOKENS, seed=w.SEED)
        first = self.round * w.ROLLOUTS
        self.round += 1
        requests = [
            Request(id=first + i, prompt_ids=self.prompts[i // w.GROUP_SIZE].token_ids, sampling=sampling)
            for i in range(w.ROLLOUTS)
        ]
        self.engine.submit(requests)
        segments = {}
        while len(segments) < len(requests):
            segments |= {s.request_id: s for s in self.engine.poll(60.0)}
        if any(len(s.span) != w.NEW_TOKENS for s in segments.values()):
            raise RuntimeError(f"expected {w.NEW_TOKENS} tokens each, got {[len(s.span) for s in segments.values()]}")
        return [
            Rollout(
                id=r.id,
                group=r.id // w.GROUP_SIZE,
                member=r.id % w.GROUP_SIZE,
                prompt=self.prompts[i // w.GROUP_SIZE],
                span=segments[r.id].span,
                status=segments[r.id].status,
                sampling=sampling,
                engine=self.engine.capabilities.name,
                dtype=self.engine.capabilities.dtype,
            )
            for i, r in enumerate(requests)
        ]

    def update(self) -> dict[str, float]:
        """One optimizer step on the forced batch."""
        assert self.trainer is not None and self.batch is not None
        return self.trainer.update(self.batch, self.objective)

    def step(self) -> None:
        """One whole RL step, ending with the new weights proven in the engine."""
        from rollkeel.advantages.estimators import compute
        from rollkeel.batch.build import build_batch
        from rollkeel.rewards.graders import Graders

        assert self.trainer is not None
        rollouts = self.rollout()
        texts = self.policy.tokenizer.batch_decode([r.span.token_ids for r in rollouts], skip_special_tokens=True)
        rollouts = Graders().grade([replace(r, text=t) for r, t in zip(rollouts, texts, strict=True)])
        advantages = compute("grpo", [r.reward for r in rollouts], [r.group for r in rollouts])
        self.trainer.update(build_batch(rollouts, advantages, "sequence_mean"), self.objective)
        self.publisher.publish(self.trainer.named_weights(), self.trainer.version)

    def close(self) -> None:
        """Stop the engine's workers, if any."""
        if self.engine is not None:
            self.engine.close()


class OnPolicy:
    """`objective` where old log-probs are those of the pass itself: exact for one update per batch, as TRL does it too."""

    def __init__(self, objective: Any) -> None:
        self._objective = objective

    @property
    def needs(self) -> frozenset[str]:
        return self._objective.needs - {"old_logprobs"}

    def prepare(self, batch: TokenBatch) -> None:
        self._objective.prepare(_with_old(batch))

    def loss(self, tokens: TokenBatch) -> torch.Tensor:
        return self._objective.loss(_with_old(tokens))

    def __call__(self, tokens: TokenBatch) -> Any:
        return self._objective(_with_old(tokens))


def _with_old(tokens: TokenBatch) -> TokenBatch:
    return replace(tokens, old_logprobs=tokens.logprobs.detach())


def make_engine(policy: Policy, config: Any) -> Engine:
    """The embedded engine, in this process or in `config.processes` workers."""
    from rollkeel.engines.local import LocalEngine

    if config.processes:
        from rollkeel.engines.workers import WorkerEngine  # type: ignore[import-not-found]

        return WorkerEngine(policy.model.config, config)
    return LocalEngine(policy.model.config, config)


def make_prompts(policy: Policy) -> list[Prompt]:
    """The groups' prompts as rollkeel's type."""
    import numpy as np

    from rollkeel.types import GraderSpec, Prompt

    out = []
    for i, text in enumerate(w.prompts()):
        ids = np.asarray(policy.tokenizer(text)["input_ids"], dtype=np.int64)
        if len(ids) != w.PROMPT_TOKENS:
            raise RuntimeError(f"expected a prompt of {w.PROMPT_TOKENS} tokens, got {len(ids)}")
        grader = GraderSpec(name=GRADER)
        out.append(Prompt(id=str(i), index=i, text=text, token_ids=ids, answer="", grader=grader, task="benchmark"))
    return out


def forced_batch(prompts: list[Prompt], lengths: str) -> TrainingBatch:
    """The forced completions as an optimizer batch; log-probs of the sampler are made up, GRPO does not read them."""
    import numpy as np

    from rollkeel.batch.build import build_batch
    from rollkeel.types import Rollout, SamplingParams, Status, TokenSpan

    rollouts = []
    for i, ids in enumerate(w.completions(lengths)):
        n = len(ids)
        span = TokenSpan(
            token_ids=np.asarray(ids, dtype=np.int64),
            logprobs=np.full(n, -7.6, np.float32),
            kept_mass=np.ones(n, np.float32),
            versions=np.zeros(n, np.int64),
            kv_versions=np.zeros(n, np.int64),
        )
        group = i // w.GROUP_SIZE
        rollouts.append(
            Rollout(
                id=i,
                group=group,
                member=i % w.GROUP_SIZE,
                prompt=prompts[group],
                span=span,
                status=Status.LENGTH,
                sampling=SamplingParams(max_new_tokens=w.NEW_TOKENS),
                engine="forced",
                dtype="fp32",
                reward=w.reward(ids),
            )
        )
    advantages = w.group_advantages([r.reward or 0.0 for r in rollouts])
    return build_batch(rollouts, advantages, "sequence_mean")


def total_memory(field: str) -> float:
    """Sum over this process and its children, MB."""
    pids: list[int] = [os.getpid()]
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            pids.extend(int(child) for child in (task / "children").read_text(encoding="ascii").split())
    return sum(w.memory_mb(field, pid) for pid in pids)


if __name__ == "__main__":
    main()
