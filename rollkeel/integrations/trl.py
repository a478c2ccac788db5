"""TRL: a `GRPOTrainer` whose loss is any rollkeel objective, that logs the mismatch, and that writes a trace for `rollkeel
doctor`.

    from rollkeel.integrations.trl import RollkeelGRPOTrainer

    trainer = RollkeelGRPOTrainer(objective={"name": "kpop", "phi": 0.1}, trace="mytrace", model=…, args=…, reward_funcs=…, …)
    trainer.train()

Generation, rewards, advantages and the optimizer stay TRL's. Its `loss_type`, `epsilon`, `delta`,
`importance_sampling_level` and the correction of vLLM's log-probs are not used: the objective has its own. Tested with TRL
1.16.0.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from rollkeel.errors import BadInput
from rollkeel.integrations.padded import flat, objective_of, shares
from rollkeel.objectives import Objective
from rollkeel.record.mismatch import mismatch_metrics
from rollkeel.types import TokenBatch
from rollkeel_doctor.traces.own import save_batch

try:
    from accelerate.utils import gather_object  # pyright: ignore[reportMissingImports]
    from trl import GRPOTrainer  # pyright: ignore[reportMissingImports]
except ImportError as error:
    MISSING: ImportError | None = error
    GRPOTrainer: Any = object
    gather_object: Any = None
else:
    MISSING = None

AGGREGATES = {
    "grpo": "sequence_mean",
    "sapo": "sequence_mean",
    "luspo": "sequence_sum",
    "bnpo": "token_mean",
    "dapo": "token_mean",
    "cispo": "token_mean",
    "vespo": "token_mean",
}
"""TRL's `loss_type` → the denominator that it stands for, here taken over the optimizer batch."""
DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
MANY = "mismatch/by_probability/"
"""Metrics that are not logged: forty numbers for a histogram."""


class RollkeelGRPOTrainer(GRPOTrainer):
    """`GRPOTrainer` with `objective` as its loss.

    Args, beside TRL's: `objective`: a recipe's name, `{"name": …, options}` or an `Objective`; `aggregate`: its denominator,
    None for the recipe's own, `trl` for that of `loss_type`; `trace`: a folder that gets every generated batch, for
    `rollkeel doctor` (a folder `rank_N` for each of several processes).
    TRL's `beta` becomes the objective's KL term, k3, or r·k3 with `use_bias_correction_kl`.
    Denominators, thresholds and controllers see the whole optimizer batch, over all its micro-batches and processes.
    """

    def __init__(
        self,
        *args: Any,
        objective: str | Mapping[str, Any] | Objective = "kpop",
        aggregate: str | None = None,
        trace: str | Path | None = None,
        **kwargs: Any,
    ) -> None:
        if MISSING is not None:
            raise BadInput(
                f"rollkeel.integrations.trl needs TRL ({MISSING}); install it with: pip install 'rollkeel[trl]'"
            )
        super().__init__(*args, **kwargs)
        kl = "rk3" if getattr(self.args, "use_bias_correction_kl", False) else "k3"
        self.objective = objective_of(objective, "TRL", kl_coefficient=self.beta, kl_estimator=kl)
        self.trace = None if trace is None else Path(trace)
        if self.trace is not None and self.accelerator.num_processes > 1:
            self.trace = self.trace / f"rank_{self.accelerator.process_index}"
        by_loss = {**AGGREGATES, "dr_grpo": f"constant_length({self.max_completion_length})"}
        self.aggregate = by_loss[self.loss_type] if aggregate == "trl" else aggregate or self.objective.aggregate
        self._left = 0
        self._answers: tuple[list[Any], list[Any], torch.Tensor] = ([], [], torch.zeros(0))
        self._refuse()

    def _refuse(self) -> None:
        args = self.args
        reasons = {
            "use_liger_kernel=True has a loss of its own": args.use_liger_kernel,
            "use_transformers_continuous_batching=True returns no log-probs": self.use_transformers_continuous_batching,
            "entropy_coef and adaptive entropy belong to TRL's loss": self._entropy_bonus_enabled,
            f"gradient_accumulation_steps={args.gradient_accumulation_steps} has to divide"
            f" steps_per_generation={args.steps_per_generation}, so that an optimizer batch is of one generation": (
                args.steps_per_generation % args.gradient_accumulation_steps
            ),
        }
        for reason, holds in reasons.items():
            if holds:
                raise BadInput(f"RollkeelGRPOTrainer: {reason}; change it in GRPOConfig")

    # ---- generation: what sampled the tokens ---------------------------------------------------------------------------

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> tuple[list[list[int]], Any]:
        """TRL's, with the log-probs under the distribution that sampled where its engine returns none."""
        model = self.accelerator.unwrap_model(self.model)
        with recording(getattr(model, "get_base_model", lambda: model)()) as recorded:
            ids, logprobs = super()._generate_single_turn(*args, **kwargs)
        return ids, recorded(ids) if logprobs is None else logprobs

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> torch.Tensor:
        each = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        total = (each * self.reward_weights.to(each.device)).nansum(1)
        total[torch.isnan(each).all(1)] = torch.nan
        first = self.accelerator.process_index * len(prompts)
        self._answers = (prompts, completions, total[first : first + len(prompts)])
        return each

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        """TRL's, with what the objective needs of every answer, its metrics, and its trace."""
        out = super()._generate_and_score_completions(inputs)
        if out.get("sampling_per_token_logps") is None:
            raise BadInput(
                "RollkeelGRPOTrainer: expected log-probs of the sampled tokens, got none; return them from rollout_func"
            )
        scored, entropy = self._scored(out)
        if out.get("old_per_token_logps") is None:
            out["old_per_token_logps"] = scored
        count = len(out["completion_ids"])
        rows = torch.arange(count, device=self.accelerator.device) + self.accelerator.process_index * count
        train = self.model.training
        out |= {
            "entropy": entropy,
            "rows": rows,
            "groups": rows // (self.num_generations if train else self.num_generations_eval),
        }
        out["coefficients"] = shares(self.aggregate, _mask(out), out["groups"])
        if train:
            self._record(out)
        return out

    @torch.no_grad()
    def _scored(self, inputs: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """`[S, L]` each: log-probs and entropies of a batch under the current weights."""
        return self._policy(self.model, inputs, self.args.per_device_train_batch_size)[:2]

    def _policy(self, model: Any, inputs: Mapping[str, Any], size: int | None = None, aux: bool = False) -> Any:
        if "pixel_values" in inputs:
            raise BadInput("RollkeelGRPOTrainer: images are not taken; train on text")
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        seen = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        length = inputs["completion_ids"].shape[1]
        about = {"batch_size": size, "compute_entropy": True, "compute_aux_loss": aux}
        p, entropy, aux_loss = self._get_per_token_logps_and_entropies(model, ids, seen, length, **about)
        return p, entropy.detach(), aux_loss

    # ---- the optimizer batch ---------------------------------------------------------------------------------------------

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        """TRL's micro-batch; before the first of an optimizer batch the objective sees all of them."""
        inputs = super()._prepare_inputs(generation_batch)
        if self.model.training:
            if self._left == 0:
                first = self._step % self.args.steps_per_generation
                self._left = self.current_gradient_accumulation_steps
                self._begin(self._buffered_inputs[first : first + self._left], first == 0)
            self._left -= 1
        return inputs

    def _begin(self, parts: list[dict[str, Any]], fresh: bool) -> None:
        """Give all micro-batches of an optimizer batch their denominators, and let the objective see them together."""
        masks, groups = torch.cat([_mask(p) for p in parts]), torch.cat([p["groups"] for p in parts])
        every, prompts = self.accelerator.gather(masks.sum(1)), self.accelerator.gather(groups)
        width = masks.shape[1]
        whole = shares(
            self.aggregate, torch.arange(width, device=every.device) < every[:, None].clamp(max=width), prompts
        )
        first = self.accelerator.process_index * len(masks)
        each = whole[first : first + len(masks)].max(1).values  # every token of an answer has the same
        for part, share in zip(parts, each.split([len(p["groups"]) for p in parts]), strict=True):
            part["coefficients"] = share[:, None] * _mask(part)
        stale = "prepare" in self.objective.needs and not (fresh and self._aligned())
        known = [self._scored(p) if stale else (p["old_per_token_logps"], p["entropy"]) for p in parts]
        batch = [self._tokens(p, *seen) for p, seen in zip(parts, known, strict=True)]
        self.objective.prepare(joined(batch), self._gather)

    def _aligned(self) -> bool:
        return self._step % (self.args.steps_per_generation * self.num_iterations) < self.args.steps_per_generation

    @property
    def _gather(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        if self.accelerator.num_processes == 1:
            return None
        return lambda values: torch.cat([v.to(values.device) for v in gather_object([values.cpu()])])

    def _tokens(self, inputs: Mapping[str, Any], logprobs: torch.Tensor, entropy: torch.Tensor) -> TokenBatch:
        return flat(
            logprobs,
            _mask(inputs),
            rollout_logprobs=inputs["sampling_per_token_logps"],
            advantages=inputs["advantages"],
            coefficients=inputs["coefficients"],
            groups=inputs["groups"],
            rows=inputs["rows"],
            old_logprobs=inputs["old_per_token_logps"],
            ref_logprobs=inputs.get("ref_per_token_logps"),
            entropy=entropy,
        )

    def _compute_loss(self, model: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
        """The objective's loss: a sum over the micro-batches of an optimizer batch, so that TRL rescales nothing."""
        mode = "train" if self.model.training else "eval"
        p, entropy, aux = self._policy(model, inputs, aux=self.aux_loss_enabled)
        if not _mask(inputs).any():
            return p.sum() * 0.0
        out = self.objective(self._tokens(inputs, p, entropy))
        for name, value in out.metrics.items():
            self._metrics[mode][name].append(value)
        loss = out.loss * (self.accelerator.num_processes if mode == "train" else 1)  # whose gradients are averaged
        if self.aux_loss_enabled:
            loss = loss + self.router_aux_loss_coef * aux / (
                self.current_gradient_accumulation_steps if mode == "train" else 1
            )
        return loss

    # ---- what is written -------------------------------------------------------------------------------------------------

    def _record(self, out: Mapping[str, Any]) -> None:
        """Mismatch metrics of a generated batch into TRL's log, and the batch into the trace."""
        if not _mask(out).any():
            return
        version = self.state.global_step
        tokens = self._tokens(out, out["old_per_token_logps"], out["entropy"])
        for name, value in mismatch_metrics(tokens, version).items():
            if not name.startswith(MANY):
                self._metrics["train"][name].append(value)
        if self.trace is None:
            return
        mask, ids = _mask(out), out["completion_ids"]
        prompts, completions, rewards = self._answers
        ends = torch.tensor(list(self.eos_token_ids), device=ids.device)
        ended = (torch.isin(ids, ends) & out["completion_mask"].bool()).any(1).tolist()
        hot = self.temperature if self.use_vllm else self.generation_config.temperature  # what the sampler really has
        sampling = {"temperature": hot, "top_p": self.top_p, "top_k": self.top_k, "min_p": self.min_p}
        save_batch(
            self.trace,
            version + 1,
            token_ids=ids,
            mask=mask,
            rollout_logprobs=out["sampling_per_token_logps"],
            train_logprobs=out["old_per_token_logps"],
            advantages=out["advantages"],
            entropy=out["entropy"],
            versions=torch.full_like(ids, version),
            train_version=[version] * len(ids),
            rewards=rewards,
            groups=out["groups"],
            prompt_ids=[row[seen.bool()] for row, seen in zip(out["prompt_ids"], out["prompt_mask"], strict=True)],
            prompt_text=[_text(prompt) for prompt in prompts],
            text=[_text(completion) for completion in completions],
            status=["finished" if end else "length" for end in ended],
            sampling={name: value for name, value in sampling.items() if value is not None}
            | {"max_new_tokens": self.max_completion_length},
            engine="vllm" if self.use_vllm else "transformers",
            dtype=DTYPES.get(str(self.model.dtype).removeprefix("torch."), ""),
        )


def _mask(inputs: Mapping[str, Any]) -> torch.Tensor:
    """`[S, L]` bool: tokens that the policy sampled."""
    tools = inputs.get("tool_mask")
    return (inputs["completion_mask"] if tools is None else inputs["completion_mask"] * tools).bool()


def _text(message: Any) -> str:
    """Of a prompt or completion: itself, or the contents of its messages."""
    return message if isinstance(message, str) else "\n".join(str(m.get("content", "")) for m in message)


def joined(batches: list[TokenBatch]) -> TokenBatch:
    """Token batches one after the other, each with answers of its own."""
    held: dict[str, list[torch.Tensor]] = {}
    first = 0
    for batch in batches:
        for name, value in vars(batch).items():
            if isinstance(value, torch.Tensor):
                held.setdefault(name, []).append(value.detach() + first if name == "sequence_ids" else value.detach())
        first += int(batch.sequence_ids.max()) + 1 if len(batch.sequence_ids) else 0
    whole: dict[str, Any] = {name: torch.cat(values) for name, values in held.items()}
    return TokenBatch(**whole)


@contextlib.contextmanager
def recording(model: Any) -> Iterator[Callable[[list[list[int]]], list[list[float]]]]:
    """While a transformers model generates, remember under which probability each token was drawn: after temperature and
    truncation.

    Gives a function from the generated ids, without padding, to their log-probs.
    """
    made = model._get_logits_processor if hasattr(model, "_get_logits_processor") else None
    recorder = _Recorder()
    if made is None:
        yield recorder.logprobs
        return

    def with_recorder(*args: Any, **kwargs: Any) -> Any:
        processors = made(*args, **kwargs)
        processors.append(recorder)
        return processors

    model._get_logits_processor = with_recorder
    try:
        yield recorder.logprobs
    finally:
        del model._get_logits_processor


class _Recorder:
    """The last logits processor: sees the scores that a token is drawn from, and one step later which token it was."""

    def __init__(self) -> None:
        self.drawn: list[torch.Tensor] = []
        self.scores: torch.Tensor | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.scores is not None:
            self.drawn.append(self.scores.gather(1, input_ids[:, -1:])[:, 0])
        self.scores = scores.float().log_softmax(-1)
        return scores

    def logprobs(self, ids: list[list[int]]) -> list[list[float]]:
        assert self.scores is not None
        longest = len(self.drawn) + 1
        last = torch.tensor([row[-1] if len(row) == longest else 0 for row in ids], device=self.scores.device)
        rows = torch.stack([*self.drawn, self.scores.gather(1, last[:, None])[:, 0]], 1).tolist()
        return [row[: len(tokens)] for row, tokens in zip(rows, ids, strict=True)]
