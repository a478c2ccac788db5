"""What a real TRL does with the plug-in, in TRL's own interpreter: `python trl_side.py WHAT MODEL OUT [OBJECTIVE]` prints
one JSON line.

Not a test: test_trl_plugin.py starts it.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import json
import os
import random
import sys
import warnings
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
warnings.filterwarnings("ignore")

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import TrainerCallback  # noqa: E402
from transformers.utils import logging  # noqa: E402
from trl import GRPOConfig  # noqa: E402

from rollkeel.integrations.trl import RollkeelGRPOTrainer, _mask  # noqa: E402

logging.set_verbosity_error()
logging.disable_progress_bar()
torch.set_num_threads(1)
SAMPLES, MICRO, STEPS = 4, 8, 2
"""Answers to a prompt; answers in a micro-batch; micro-batches in an optimizer batch."""


def problem(rng: random.Random) -> str:
    return "".join(str(rng.randrange(10)) for _ in range(2)) + ":"


def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """1 for the running sums of the prompt's digits, modulo 10: `38:` → `31`."""

    def right(prompt: str) -> str:
        digits = [int(c) for c in prompt if c.isdigit()]
        return "".join(str(sum(digits[: i + 1]) % 10) for i in range(len(digits)))

    return [float(c.strip() == right(p)) for p, c in zip(prompts, completions, strict=True)]


def trainer(model: str, out: Path, kind: type = RollkeelGRPOTrainer, **changes: Any) -> Any:
    rng = random.Random(0)
    own = {name: changes.pop(name) for name in ("objective", "aggregate", "trace") if name in changes}
    settings = {
        "learning_rate": 1e-3,
        "max_steps": 1,
        "gradient_accumulation_steps": STEPS,
        "per_device_train_batch_size": MICRO,
        "num_generations": SAMPLES,
        "max_completion_length": 4,
        "temperature": 1.0,
        "beta": 0.0,
        "max_grad_norm": 1.0,
        "lr_scheduler_type": "constant",
        "adam_beta2": 0.95,
        "router_aux_loss_coef": 0.0,
        **changes,
    }
    config = GRPOConfig(
        output_dir=str(out), use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none", disable_tqdm=True,
        logging_steps=1, save_strategy="no", disable_dropout=True, seed=0, model_init_kwargs={"dtype": "float32"}, **settings,
    )  # fmt: skip
    prompts = Dataset.from_dict({"prompt": [problem(rng) for _ in range(512)]})
    return kind(model=model, args=config, reward_funcs=reward, train_dataset=prompts, **own)


def learn(model: str, out: Path, objective: str) -> dict[str, Any]:
    """Thirty steps, their rewards and some metrics; with a trace."""
    torch.manual_seed(0)
    made = trainer(model, out, objective=objective, trace=out / "trace", max_steps=30, **LEARNING)
    made.train()
    log = [row for row in made.state.log_history if "reward" in row]
    return {"reward": [row["reward"] for row in log], "last": log[-1]}


LEARNING = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 4, "learning_rate": 2e-3}


def plain(model: str, out: Path, _: str) -> dict[str, Any]:
    """The same thirty steps of TRL as it comes."""
    from trl import GRPOTrainer

    torch.manual_seed(0)
    made = trainer(model, out, GRPOTrainer, max_steps=30, **LEARNING)
    made.train()
    return {"reward": [row["reward"] for row in made.state.log_history if "reward" in row]}


def fault(model: str, out: Path, objective: str) -> dict[str, Any]:
    """A run whose generation is hotter than its trainer believes."""
    torch.manual_seed(0)
    made = trainer(model, out, objective=objective, trace=out / "trace", max_steps=10, **LEARNING)
    made.generation_config.temperature = 1.5
    made.train()
    return {"last": [row for row in made.state.log_history if "reward" in row][-1]}


class Disagreeing(RollkeelGRPOTrainer):
    """An engine and an old policy that are not the trainer's: masks drop tokens, clips cut some. Keeps what the update saw."""

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        out = super()._generate_and_score_completions(inputs)
        g = torch.Generator().manual_seed(1)
        shape, far = out["completion_ids"].shape, 0.01 if self.objective.name == "ac_mis_po" else 0.5
        out["old_per_token_logps"] = (out["old_per_token_logps"] + far * torch.randn(shape, generator=g)).clamp(
            max=-1e-4
        )
        noise = far * torch.randn(shape, generator=g)
        out["sampling_per_token_logps"] = (out["old_per_token_logps"] + noise).clamp(max=-1e-4)
        out["advantages"] = torch.randn(len(out["advantages"]), generator=g)
        return out


class Gradients(TrainerCallback):
    def __init__(self) -> None:
        self.kept: dict[str, torch.Tensor] = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.kept = {n: p.grad.clone() for n, p in kwargs["model"].named_parameters() if p.grad is not None}


def gradients(model: str, out: Path, objective: str) -> dict[str, Any]:
    """The gradient of an optimizer batch by TRL with the plug-in, and by rollkeel's trainer on the same rollouts."""
    torch.manual_seed(0)
    made, seen = trainer(model, out, Disagreeing, objective=objective, max_grad_norm=1e9), Gradients()
    made.add_callback(seen)
    made.train()
    parts = made._buffered_inputs
    assert len(parts) == STEPS
    ours, keep, tokens = rollkeels(made, model, parts, objective)
    gap, size = ((sum(x.square().sum().item() for x in xs)) ** 0.5 for xs in (
        [seen.kept[name] - ours[name] for name in ours], list(ours.values())))  # fmt: skip
    same = seen.kept.keys() == ours.keys()
    return {
        "same": same,
        "size": size,
        "gap": gap / size,
        "tokens": tokens,
        "kept": keep,
        "steps": made.state.global_step,
    }


def rollkeels(
    made: Any, model: str, parts: list[dict[str, Any]], name: str
) -> tuple[dict[str, torch.Tensor], float, float]:
    """Gradients by parameter, the share of kept tokens, and how far the loss's gradient by a token's log-prob is from TRL's."""
    import numpy as np

    from rollkeel.batch.build import build_batch
    from rollkeel.config import ModelConfig, TrainConfig
    from rollkeel.models.loading import load_policy
    from rollkeel.objectives import build
    from rollkeel.train.trainer import LocalTrainer
    from rollkeel.types import GraderSpec, Prompt, Rollout, SamplingParams, Status, TokenSpan

    rollouts, credit, old = [], [], []
    for part in parts:
        for i, inside in enumerate(_mask(part)):
            n = int(inside.sum())
            ids = part["prompt_ids"][i][part["prompt_mask"][i].bool()].numpy()
            zeros = np.zeros(n, np.int64)
            span = TokenSpan(
                token_ids=part["completion_ids"][i][:n].numpy(), logprobs=part["sampling_per_token_logps"][i][:n].numpy(),
                kept_mass=np.ones(n, np.float32), versions=zeros, kv_versions=zeros,
            )  # fmt: skip
            prompt = Prompt(
                id=str(i), index=i, text="", token_ids=ids, answer="", grader=GraderSpec(name="exact"), task=""
            )
            group, number = int(part["groups"][i]), int(part["rows"][i])
            about = {"status": Status.FINISHED, "sampling": SamplingParams(), "engine": "trl", "dtype": "fp32"}
            rollouts.append(Rollout(id=number, group=group, member=0, prompt=prompt, span=span, reward=0.0, **about))
            credit.append(float(part["advantages"][i]))
            old.append(part["old_per_token_logps"][i][:n])
    objective = build(name)
    batch = build_batch(rollouts, credit, objective.aggregate)
    policy = load_policy(ModelConfig(path=model), "cpu")
    side = LocalTrainer(policy, TrainConfig(warmup_steps=0), temperature=1.0, total_updates=1)
    kept: dict[str, torch.Tensor] = {}
    step = side._stepper.step

    def looked(*sound: Any) -> dict[str, float]:
        kept.update(
            {n: p.grad.clone() / side._stepper.scale for n, p in side.model.named_parameters() if p.grad is not None}
        )
        return step(*sound)

    side._stepper.step = looked
    done = side.update(batch, objective, old_logprobs=torch.cat(old))
    ps = [(part["old_per_token_logps"] + 0.01).clamp(max=-1e-4).requires_grad_() for part in parts]
    made.objective.load_state_dict(objective.state_dict())  # a bound found with the old policy that was made up
    theirs = torch.autograd.grad(
        sum(made.objective.loss(made._tokens(part, p, part["entropy"])) for part, p in zip(parts, ps, strict=True)), ps
    )
    theirs = torch.cat([g[_mask(part)] for part, g in zip(parts, theirs, strict=True)])
    p = torch.cat([p.detach()[_mask(part)] for part, p in zip(parts, ps, strict=True)]).requires_grad_()
    (mine,) = torch.autograd.grad(objective.loss(batch.tokens(p, old_logprobs=torch.cat(old))), p)
    return kept, done.keep.float().mean().item(), (mine - theirs).abs().max().item()


if __name__ == "__main__":
    what, model, out, *rest = sys.argv[1:]
    result = {"learn": learn, "plain": plain, "fault": fault, "gradients": gradients}[what](
        model, Path(out), *(rest or [""])
    )
    print(json.dumps(result))
