"""One measurement of rollkeel: the same command line and the same JSON line as `trl_side`.

`rollout` is the loop's own `collect`: requests in, 64 rollouts out, with log-probs (which TRL does not return) and text.
`train` is `LocalTrainer.update` on forced completions. `step` is everything the loop does for one step: requests, rollouts,
reward, advantages, batch, update, publication of the weights with its proof; metrics and files are left out on both sides.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.peer import workload as w
from rollkeel.host import keep_freed_memory

if TYPE_CHECKING:
    from rollkeel.batch.build import TrainingBatch
    from rollkeel.config import EngineConfig
    from rollkeel.models.loading import Policy
    from rollkeel.protocols import Engine
    from rollkeel.train.trainer import LocalTrainer
    from rollkeel.types import Prompt, Rollout

GRADER = "benchmark-even-share"


def main() -> None:
    p = w.parser("One measurement of rollkeel.")
    p.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="config overrides to try")
    args = p.parse_args()
    w.set_threads(args.threads)
    keep_freed_memory()  # as the command line and every worker do
    measure(args)


def measure(args: argparse.Namespace) -> None:
    """Build what the stage needs, time it, report."""
    from importlib.metadata import version

    import torch

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
        "versions": {"transformers": version("transformers"), "torch": torch.__version__},
    }
    bench.close()
    w.report(result)


class Bench:
    """The stage under test, built once; `run` is what is timed."""

    def __init__(self, args: argparse.Namespace) -> None:
        import torch

        from rollkeel.models.loading import load_policy, quiet_transformers
        from rollkeel.objectives import grpo
        from rollkeel.recipe import load
        from rollkeel.rewards import Graders, register
        from rollkeel.train.trainer import LocalTrainer

        quiet_transformers()
        register(GRADER, lambda rollout: w.reward(rollout.span.token_ids.tolist()))
        settings = load(overrides=overrides(args))
        self.policy = load_policy(settings.model)
        self.prompts = make_prompts(self.policy)
        self.graders = Graders()
        self.engine: Engine | None = None
        self.trainer: LocalTrainer | None = None
        self.config: dict[str, Any] = {}
        self.round = 0
        if args.what != "rollout":
            updates = args.warmup + args.repeats
            self.trainer = LocalTrainer(self.policy, settings.train, temperature=1.0, total_updates=updates)
            self.objective = grpo()
            self.config["train"] = settings.train.model_dump(mode="json")
        if args.what != "train":
            torch.set_num_threads(args.threads * args.processes)  # which the engine's processes share
            self._open_engine(settings.engine)
            torch.set_num_threads(args.threads)
        self.batch = forced_batch(self.prompts, args.lengths) if args.what == "train" else None
        self.run: Callable[[], Any] = {"rollout": self.rollout, "train": self.update, "step": self.step}[args.what]

    def _open_engine(self, config: EngineConfig) -> None:
        from rollkeel.engines.open import open_engine
        from rollkeel.sync.publish import DirectPublisher

        self.config["engine"] = config.model_dump(mode="json")
        self.engine = open_engine(self.policy.model.config, config, "cpu")
        self.publisher = DirectPublisher([self.engine])
        self.publisher.publish(self._weights(), 0)

    def _weights(self) -> Any:
        from rollkeel.models.names import checkpoint_views

        return checkpoint_views(self.policy.model).items()

    def rollout(self) -> list[Rollout]:
        """64 complete rollouts of exactly `NEW_TOKENS` tokens, decoded, in order."""
        from rollkeel.rollout.collect import collect, issue
        from rollkeel.types import SamplingParams

        assert self.engine is not None
        sampling = SamplingParams(max_new_tokens=w.NEW_TOKENS, seed=w.SEED)
        issued = issue(self.prompts, w.GROUP_SIZE, sampling, self.round * len(self.prompts), self.engine)
        self.round += 1
        rollouts = collect(self.engine, issued, self.policy.tokenizer, deadline_s=60.0)
        if any(len(r.span) != w.NEW_TOKENS for r in rollouts):
            raise RuntimeError(f"expected {w.NEW_TOKENS} tokens each, got {[len(r.span) for r in rollouts]}")
        return rollouts

    def update(self) -> None:
        """One optimizer step on the forced batch."""
        assert self.batch is not None
        self._update(self.batch)

    def step(self) -> None:
        """One whole RL step, ending with the new weights proven in the engine."""
        from rollkeel.advantages.estimators import compute
        from rollkeel.batch.build import build_batch

        assert self.trainer is not None
        rollouts = self.graders.grade(self.rollout())
        advantages = compute("grpo", [r.reward for r in rollouts], [r.group for r in rollouts])
        self._update(build_batch(rollouts, advantages, self.objective.aggregate))
        self.publisher.publish(self.trainer.named_weights(), self.trainer.version)

    def _update(self, batch: TrainingBatch) -> None:
        assert self.trainer is not None
        # One update per batch: the pass's own log-probs are the old ones, as in TRL.
        self.trainer.update(batch, self.objective, old_is_current=True)

    def close(self) -> None:
        """Stop the workers, if any."""
        self.graders.close()
        if self.trainer is not None:
            self.trainer.close()
        if self.engine is not None:
            self.engine.close()


def overrides(args: argparse.Namespace) -> list[str]:
    """The run as config overrides; everything else is rollkeel's default."""
    return [
        f"model.path={args.model}",
        f"train.lr={w.LEARNING_RATE}",
        "train.warmup_steps=0",
        f"train.clip_norm={w.CLIP_NORM}",
        # 16 whole sequences per forward, as on TRL's side; larger ones are slower on a CPU's caches.
        f"train.micro_batch_tokens={16 * (w.PROMPT_TOKENS + w.NEW_TOKENS)}",
        f"train.processes={args.processes}",
        f"engine.processes={args.processes if args.processes > 1 else 0}",
        f"engine.slots={w.ROLLOUTS // args.processes}",
        f"engine.max_length={w.PROMPT_TOKENS + w.NEW_TOKENS}",
        *args.set,
    ]


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
