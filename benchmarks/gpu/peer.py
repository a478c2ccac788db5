"""Stage 13: the same GRPO step by TRL, where it can be imported: random 0.6B, 32 prompts × 8 answers of 128 tokens, bfloat16.

TRL generates by transformers, as it does without a server, recomputes activations as our side does, and keeps bfloat16 weights
without masters; we keep masters.
"""

from __future__ import annotations

import importlib.util
import tempfile
import time
from typing import Any

from benchmarks.gpu import models, step
from benchmarks.gpu.bench import Bench

GROUPS, SAMPLES, NEW, STEPS = 32, 8, 128, 3


def run(bench: Bench) -> None:
    bench.attempt("GRPO step of the same size, rollkeel", ours, least=10.0)
    if importlib.util.find_spec("trl") is None or importlib.util.find_spec("datasets") is None:
        bench.absent("TRL GRPOTrainer", "trl or datasets cannot be imported")
        return
    bench.attempt("GRPO step of the same size, TRL", theirs, least=20.0)


def sizes(bench: Bench) -> tuple[int, int, int]:
    return (2, 2, 8) if bench.toy else (GROUPS, SAMPLES, NEW)


def ours(bench: Bench) -> None:
    groups, samples, new = sizes(bench)
    about: Any = {"lr": 1e-6, "checkpointing": "layer"}
    made = step.loop(bench, models.policy(bench, "Qwen3-0.6B"), groups, samples, new, False, **about)
    for _ in range(2 if bench.toy else STEPS):  # graphs are recorded in the first
        made.step()
    tell(bench, "rollkeel", sum(made.times.values()), rollout_s=made.times["rollout"], update_s=made.times["update"])


def tell(bench: Bench, who: str, seconds: float, **more: Any) -> None:
    groups, samples, new = sizes(bench)
    title = f"GRPO step, Qwen3-0.6B, {groups} × {samples} × {new}, {who}"
    bench.row(title, seconds, "s", tokens_s=groups * samples * new / seconds, peak_gb=bench.peak_gb, **more)


def theirs(bench: Bench) -> None:
    import trl  # pyright: ignore[reportMissingImports]
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from transformers.trainer_callback import TrainerCallback

    class Clock(TrainerCallback):
        """Seconds of every step."""

        def __init__(self) -> None:
            self.seconds: list[float] = []

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            bench.sync()
            self.begun = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            bench.sync()
            self.seconds.append(time.perf_counter() - self.begun)
            if bench.left < 1.5 * self.seconds[-1] + 3:
                control.should_training_stop = True

    groups, samples, new = sizes(bench)
    made, clock = models.policy(bench, "Qwen3-0.6B"), Clock()
    made.model.generation_config.eos_token_id = None
    micro = min(32, groups * samples)
    prompts = [f"{i:04d} plus {7 * i % 1000:04d} is " for i in range(groups * 8)]
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {
            "output_dir": folder, "bf16": bench.cuda, "use_cpu": not bench.cuda, "gradient_checkpointing": True, "beta": 0.0,
            "loss_type": "grpo", "num_generations": samples, "max_completion_length": new, "per_device_train_batch_size": micro,
            "gradient_accumulation_steps": groups * samples // micro, "generation_kwargs": {"min_new_tokens": new},
            "learning_rate": 1e-6, "max_steps": 2, "logging_strategy": "no", "save_strategy": "no", "report_to": "none",
            "disable_tqdm": True, "optim": "adamw_torch_fused",
        }  # fmt: skip
        trainer = trl.GRPOTrainer(
            model=made.model,
            processing_class=made.tokenizer,
            args=trl.GRPOConfig(**settings),
            reward_funcs=lambda completion_ids, **_: [float(sum(ids) % 7) for ids in completion_ids],
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            callbacks=[clock],
        )
        trainer.train()
    tell(
        bench,
        f"TRL {trl.__version__}",
        clock.seconds[-1],
        note=f"step {len(clock.seconds)}, generation by transformers",
    )
