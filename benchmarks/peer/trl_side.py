"""One measurement of TRL, in the peer's own interpreter: prints one JSON line.

TRL at its best: fp32, no gradient checkpointing, no reference model, no old-log-prob pass (generation and update are
aligned, so TRL itself skips it), no auxiliary loss, fused AdamW, no logging or saving, end-of-sequence suppressed so
that every rollout is exactly `NEW_TOKENS` long. What can help TRL further is an option here (`--experts`,
`--micro-batch`, `--cache`, `--optim`, `--wait`); the defaults are the fastest found, see `benchmarks/README.md`.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

from benchmarks.peer import workload as w


def main() -> None:
    args = parse()
    if args.processes > 1 and "RANK" not in os.environ:
        sys.exit(launch(args.processes))
    w.set_threads(args.threads)
    measure(args)


def parse() -> argparse.Namespace:
    """The shared command line plus TRL's own knobs."""
    p = w.parser("One measurement of TRL.")
    p.add_argument("--experts", choices=("auto", "eager", "grouped_mm", "batched_mm"), default="auto")
    p.add_argument(
        "--micro-batch", type=int, default=0, help="completions per process and forward; 0 is the fastest found"
    )
    p.add_argument("--cache", choices=("dynamic", "static"), default="dynamic")
    p.add_argument("--optim", default="adamw_torch_fused")
    p.add_argument("--compile", action="store_true", help="torch.compile the training forward")
    args = p.parse_args()
    if args.experts == "auto":
        args.experts = "grouped_mm"
    if args.micro_batch == 0:
        args.micro_batch = 16
    args.micro_batch = min(args.micro_batch, w.ROLLOUTS // args.processes)
    return args


def launch(processes: int) -> int:
    """Start one process per rank and wait for all of them. This parent never imports torch."""
    port = str(w.free_port())
    children = []
    for rank in range(processes):
        env = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
        env.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, ACCELERATE_USE_CPU="true")
        children.append(subprocess.Popen([sys.executable, "-m", "benchmarks.peer.trl_side", *sys.argv[1:]], env=env))
    codes = [child.wait() for child in children]
    return max(abs(code) for code in codes)


def measure(args: argparse.Namespace) -> None:
    """Build the trainer, run the stage, and let rank 0 report."""
    from importlib.metadata import version

    import torch
    import torch.distributed as dist
    import trl

    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        trainer = build_trainer(args, folder)
        loaded = total_memory("VmRSS")
        if args.what == "rollout":
            seconds, tokens = time_rollouts(trainer, args), w.ROLLOUTS * w.NEW_TOKENS
        else:
            seconds = time_training(trainer, args)
            kind = "equal" if args.what == "step" else args.lengths
            tokens = sum(w.completion_lengths(kind))
        peak = total_memory("VmHWM")
    if trainer.accelerator.is_main_process:
        w.report(
            {
                "side": "trl",
                **{k: getattr(args, k) for k in ("what", "lengths", "processes", "threads")},
                "seconds": seconds,
                "tokens": tokens,
                "memory_loaded_mb": loaded,
                "memory_peak_mb": peak,
                "config": {k: getattr(args, k) for k in ("experts", "micro_batch", "cache", "optim", "compile")},
                "versions": {
                    "trl": trl.__version__,
                    "transformers": version("transformers"),
                    "torch": torch.__version__,
                },
            }
        )
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def total_memory(field: str) -> float:
    """Sum over the ranks, MB."""
    import torch
    import torch.distributed as dist

    value = torch.tensor(w.memory_mb(field), dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(value)
    return float(value)


def build_trainer(args: argparse.Namespace, folder: str) -> Any:
    """A `GRPOTrainer`; for `--what train` one whose generation returns the forced completions."""
    from datasets import Dataset
    from transformers.utils import logging as hf_logging
    from trl import GRPOConfig, GRPOTrainer

    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    accumulation = w.ROLLOUTS // (args.micro_batch * args.processes)
    config = GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        fp16=False,
        gradient_checkpointing=False,
        beta=0.0,
        loss_type="grpo",
        num_iterations=1,
        num_generations=w.GROUP_SIZE,
        max_completion_length=w.NEW_TOKENS,
        temperature=1.0,
        per_device_train_batch_size=args.micro_batch,
        gradient_accumulation_steps=accumulation,
        router_aux_loss_coef=0.0,
        disable_dropout=True,
        mask_truncated_completions=False,
        generation_kwargs={"min_new_tokens": w.NEW_TOKENS},
        cache_implementation=None if args.cache == "dynamic" else args.cache,
        learning_rate=w.LEARNING_RATE,
        lr_scheduler_type="constant",
        max_grad_norm=w.CLIP_NORM,
        optim=args.optim,
        max_steps=args.warmup + args.repeats,
        logging_strategy="no",
        save_strategy="no",
        eval_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_nan_inf_filter=False,
        shuffle_dataset=False,
        torch_compile=args.compile,
        ddp_backend="gloo" if args.processes > 1 else None,
        ddp_find_unused_parameters=False,
        ddp_broadcast_buffers=False,
        seed=w.SEED,
        model_init_kwargs={"dtype": "float32", "attn_implementation": "sdpa", "experts_implementation": args.experts},
    )
    kind = forced_trainer(GRPOTrainer, args.lengths) if args.what == "train" else GRPOTrainer
    dataset = Dataset.from_dict({"prompt": w.prompts()})
    return kind(model=args.model, args=config, reward_funcs=reward, train_dataset=dataset)


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The shared reward in TRL's calling convention."""
    return [w.reward(ids) for ids in completion_ids]


def forced_trainer(base: type, lengths: str) -> type:
    """`base` with generation and scoring replaced by a batch prepared once; the training path stays TRL's own.

    The batch is what `_generate_and_score_completions` returns for these completions when generation and update are
    aligned: no `old_per_token_logps`, padding to the longest completion of the process.
    """

    class Forced(base):  # type: ignore[misc, valid-type]
        forced: dict[str, Any] | None = None

        def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
            if self.forced is None:
                ids = self.processing_class(text=[x["prompt"] for x in inputs])["input_ids"]
                rank, world = self.accelerator.process_index, self.accelerator.num_processes
                self.forced = forced_batch(ids, lengths, rank, world)
            return dict(self.forced)

    return Forced


def forced_batch(prompt_ids: list[list[int]], lengths: str, rank: int, world: int) -> dict[str, Any]:
    """This rank's share of the forced completions as TRL's padded tensors."""
    import torch

    answers = w.completions(lengths)
    advantages = w.group_advantages([w.reward(a) for a in answers])
    total = sum(len(a) for a in answers)
    share = slice(rank * len(answers) // world, (rank + 1) * len(answers) // world)
    answers, advantages = answers[share], advantages[share]
    if any(len(p) != w.PROMPT_TOKENS for p in prompt_ids) or len(prompt_ids) != len(answers):
        raise RuntimeError(
            f"expected {len(answers)} prompts of {w.PROMPT_TOKENS} tokens, got {[len(p) for p in prompt_ids]}"
        )
    width = max(len(a) for a in answers)
    prompts = torch.tensor(prompt_ids)
    return {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": torch.tensor([a + [0] * (width - len(a)) for a in answers]),
        "completion_mask": torch.tensor([[1] * len(a) + [0] * (width - len(a)) for a in answers]),
        "advantages": torch.tensor(advantages),
        "num_items_in_batch": torch.tensor(total),
    }


def time_rollouts(trainer: Any, args: argparse.Namespace) -> list[float]:
    """Seconds of TRL's own generation call on this rank's prompts, from all ranks ready to all ranks done."""
    texts = [text for text in w.prompts() for _ in range(w.GROUP_SIZE)]
    rank, world = trainer.accelerator.process_index, trainer.accelerator.num_processes
    texts = texts[rank * len(texts) // world : (rank + 1) * len(texts) // world]
    trainer.model.train()
    trainer.model_wrapped = trainer.accelerator.prepare_model(trainer.model)
    prompt_ids, images, fields = trainer._tokenize_prompts(texts)
    seconds = []
    for _ in range(args.warmup + args.repeats):
        trainer.accelerator.wait_for_everyone()
        start = time.perf_counter()
        ids, _ = trainer._generate_single_turn(prompt_ids, images, fields, w.GROUP_SIZE)
        trainer.accelerator.wait_for_everyone()
        seconds.append(time.perf_counter() - start)
        if [len(i) for i in ids] != [w.NEW_TOKENS] * len(texts):
            raise RuntimeError(f"expected {w.NEW_TOKENS} new tokens each, got {[len(i) for i in ids]}")
    return seconds[args.warmup :]


def time_training(trainer: Any, args: argparse.Namespace) -> list[float]:
    """Seconds per optimizer step of `trainer.train()`.

    `train`: from the first micro-batch's start to the optimizer step's end. `step`: from one optimizer step's end to
    the next, so that data loading, generation, reward and everything else between is inside.
    """
    from transformers.trainer_callback import TrainerCallback

    begins: list[float] = []
    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            begins.append(time.perf_counter())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    trainer.add_callback(Clock())
    trainer.train()
    starts = begins if args.what == "train" else ends[:-1]
    seconds = [end - start for start, end in zip(starts, ends[1:], strict=True)]
    if len(seconds) != args.warmup + args.repeats:
        raise RuntimeError(f"expected {args.warmup + args.repeats} optimizer steps, TRL made {len(seconds)}")
    return seconds[args.warmup :]


if __name__ == "__main__":
    main()
