"""TRL: `_compute_loss` of its `GRPOTrainer`, and the lines of it that make vLLM's correction, on a stand-in for the trainer."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from rollkeel.conformance.adapters import Claim
from rollkeel.conformance.adapters.published import Trainer, modules
from rollkeel.conformance.batch import Batch

ABSENT = (
    "trl.chat_template_utils",
    "trl.generation.vllm_generation",
    "trl.import_utils",
    "trl.trainer.grpo_config",
    "transformers",
    "accelerate",
    "datasets",
)
ARGS: dict[str, Any] = {
    "steps_per_generation": 1,
    "delta": None,
    "use_bias_correction_kl": True,
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05,
    "vespo_k_pos": 2.0,
    "vespo_lambda_pos": 3.0,
    "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0,
}
DEFAULTS: dict[str, Any] = {
    "loss_type": "grpo",
    "importance_sampling_level": "token",
    "epsilon_low": 0.2,
    "epsilon_high": 0.2,
    "beta": 0.0,
    "off_policy_mask_threshold": None,
    "top_entropy_quantile": 1.0,
    "use_vllm": False,
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_clip_max": 3.0,
    "vllm_importance_sampling_clip_min": None,
    "current_gradient_accumulation_steps": 1,
    "max_completion_length": 1024,
    "aux_loss_enabled": False,
    "_entropy_bonus_enabled": False,
}


def claims(checkout: Path | None) -> list[Claim]:
    (trainer,) = modules(("trl.trainer.grpo_trainer",), checkout, absent=ABSENT)
    ratio = _correction(trainer)

    def loss(args: Any = None, **config: Any) -> Any:
        def call(b: Batch) -> torch.Tensor:
            mask = b.mask.to(b.logprobs.dtype)
            every = SimpleNamespace(num_processes=1, reduce=lambda x, **_: x, gather=lambda x: x)
            about = Trainer(
                of=trainer.GRPOTrainer,
                model=SimpleNamespace(training=True),
                args=SimpleNamespace(**{**ARGS, **(args or {})}),
                accelerator=every,
                _metrics={"train": defaultdict(list)},
                _get_per_token_logps_and_entropies=lambda *_, **__: (b.logprobs, torch.zeros_like(mask), None),
                **{**DEFAULTS, **config},
            )
            inputs = {
                "prompt_ids": b.groups[:, None],
                "prompt_mask": torch.ones_like(b.groups[:, None]),
                "completion_ids": b.mask.long(),
                "completion_mask": mask,
                "advantages": b.advantages[:, 0],
                "old_per_token_logps": b.old_logprobs,
                "sampling_per_token_logps": b.rollout_logprobs,
                "ref_per_token_logps": b.ref_logprobs,
                "num_items_in_batch": torch.tensor(b.tokens),
            }
            if about.use_vllm:
                inputs["importance_sampling_ratio"] = ratio(about, b.old_logprobs, b.rollout_logprobs, mask)
            return about._compute_loss(about.model, inputs)

        return call

    def vllm(mode: str, **bounds: float) -> Any:
        own = {f"vllm_importance_sampling_clip_{k}": v for k, v in bounds.items()}
        return loss(use_vllm=True, vllm_importance_sampling_mode=mode, **own)

    whole = {"level": "sequence", "weight": "sequence", "cap": 3.0}
    gspo = {"importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4}
    luspo = {"importance_sampling_level": "sequence", "epsilon_low": 2e-3, "epsilon_high": 2.5e-3}
    return [
        Claim("loss_type=grpo", "grpo", loss()),
        Claim("loss_type=grpo, delta 3", "grpo", loss({"delta": 3.0})),
        Claim("loss_type=dapo, the default", "dapo", loss(loss_type="dapo"), {"clip_high": 0.2}),
        Claim("token_truncate, clip_max 3", "tis", vllm("token_truncate"), {"cap": 3.0}),
        Claim("token_mask, 0.5 to 5", "icepop", vllm("token_mask", min=0.5, max=5.0)),
        Claim("sequence_mask, the default with vLLM", "mis", vllm("sequence_mask"), whole),
        Claim("importance_sampling_level=sequence", "gspo", loss(**gspo)),
        Claim("loss_type=luspo", "luspo", loss(loss_type="luspo", **luspo)),
        Claim("loss_type=sapo", "sapo", loss(loss_type="sapo")),
        Claim("loss_type=cispo, epsilon_high 5", "cispo", loss(loss_type="cispo", epsilon_high=5.0)),
        Claim("loss_type=cispo, epsilon_high not set", "cispo", loss(loss_type="cispo")),
        Claim("loss_type=vespo, without vLLM", "vespo", loss(loss_type="vespo")),
        Claim("off_policy_mask_threshold", "opsm", loss(off_policy_mask_threshold=1e-4)),
    ]


def _correction(trainer: Any) -> Any:
    """The block of `_generate_and_score_completions` that makes `vllm_importance_sampling_ratio`, as a function."""
    method = trainer.GRPOTrainer._generate_and_score_completions
    tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
    made = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If)
        and "vllm_importance_sampling_ratio = torch.exp" in "\n".join(map(ast.unparse, node.body))
    ]
    code = compile(ast.Module(min(made, key=lambda n: len(ast.unparse(n))).body, []), "grpo_trainer.py", "exec")

    def ratio(about: Any, old: torch.Tensor, sampled: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        names = {"self": about, "old_per_token_logps": old, "sampling_per_token_logps": sampled, "mask": mask}
        names |= {"completion_mask": mask, "tool_mask": None}
        exec(code, vars(trainer), names)
        return names["vllm_importance_sampling_ratio"]

    return ratio
