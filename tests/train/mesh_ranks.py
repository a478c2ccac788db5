"""What every rank of tests/train/test_mesh.py runs: trainers on one mesh after the other, over gloo."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rollkeel import objectives
from rollkeel.batch.build import TrainingBatch, build_batch
from rollkeel.batch.packing import SHARED_LEAST
from rollkeel.config import ModelConfig, TrainConfig
from rollkeel.models.loading import load_policy
from rollkeel.train.logprobs import token_logprobs
from rollkeel.train.mesh import SIZES, Mesh, join, local
from rollkeel.train.soundness import Fresh
from rollkeel.train.trainer import LocalTrainer
from rollkeel.train.vocabulary import Vocabulary
from rollkeel.types import GraderSpec, Prompt, Rollout, SamplingParams, Status, TokenSpan

LENGTHS = (3, 17, 9, 30, 4, 12, 25, 1, 8, 8, 20, 5)


@dataclass(frozen=True)
class Case:
    """A mesh, and what is trained on it."""

    replicate: int = 1
    shard: int = 1
    model: str = "tiny-qwen3-moe"
    expert: int = 1
    context: int = 1
    tensor: int = 1
    objective: str = "kpop"
    updates: int = 2
    order: tuple[int, ...] = tuple(range(len(LENGTHS)))
    """Of the sequences in each batch."""
    prompt: int = 5
    """Tokens of each prompt; so long that it is worth it, sequences of a group have the same one."""
    options: dict[str, Any] = field(default_factory=dict)
    replay: bool = False
    again: bool = False
    """The same as without: another run of it."""
    fails: bool = False
    """The objective raises on the micro-batch with token 0 of the batch."""
    judged: bool = False
    """Log-probs of the same weights are compared, which in these batches were drawn."""
    fused: bool = True
    """With norms and attention as single passes; without, as transformers runs them, which is how a GPU does."""
    head: bool = False
    """Nothing is trained: log-probs of a head whose rows lie on the ranks, see `head_in_parts`."""
    parts: bool = False
    """Each rank reads or draws its part of the weights."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Of the model."""
    dtype: str = "float32"

    def run(self, mesh: Mesh, folder: Path) -> dict[str, Any]:
        """What a rank comes to; `folder`: one that all ranks share."""
        _ = folder
        return head_in_parts(mesh) if self.head else trained(self, mesh)

    @property
    def size(self) -> int:
        return math.prod(self.sizes.values())

    @property
    def sizes(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in SIZES}


def batch(seed: int, case: Case) -> TrainingBatch:
    rng = np.random.default_rng(seed)
    rollouts, advantages = [], rng.normal(size=len(LENGTHS))
    for i, n in enumerate(LENGTHS):
        stamp = np.zeros(n, np.int64)
        routed = np.argsort(rng.random((n, 2, 8)))[:, :, :2].astype(np.int16)
        span = TokenSpan(
            token_ids=rng.integers(0, 264, n),
            logprobs=rng.normal(-5.6, 0.1, n).astype(np.float32),
            kept_mass=np.ones(n, np.float32),
            versions=stamp,
            kv_versions=stamp,
            experts=routed if case.replay else None,
        )
        ids = rng.integers(0, 264, case.prompt)
        if case.prompt > SHARED_LEAST and i % 2:
            ids = rollouts[-1].prompt.token_ids
        about: dict[str, Any] = {"text": "", "answer": "", "grader": GraderSpec(name="x"), "task": "t"}
        prompt = Prompt(id=str(i), index=i, token_ids=ids, **about)
        made: dict[str, Any] = {"sampling": SamplingParams(), "engine": "fake", "dtype": "fp32", "reward": 0.0}
        rollouts.append(
            Rollout(id=i, group=i // 2, member=i % 2, prompt=prompt, span=span, status=Status.FINISHED, **made)
        )
    return build_batch([rollouts[i] for i in case.order], advantages[list(case.order)], "token_mean")


def trainer(case: Case, mesh: Mesh) -> LocalTrainer:
    options: dict[str, Any] = {"lr": 1e-3, "warmup_steps": 0, "clip_norm": 0.5, "micro_batch_tokens": 48}
    config = TrainConfig(**(options | case.options))
    path = case.model if "/" in case.model else f"preset:{case.model}"
    model = ModelConfig(path=path, overrides=case.overrides, dtype=case.dtype)  # type: ignore[arg-type]
    policy = load_policy(model, lora=config.lora, whole=not case.parts)
    about: dict[str, Any] = {"temperature": 1.0, "total_updates": 10, "replay_routing": case.replay}
    made = LocalTrainer(policy, config, mesh=mesh, **about)
    made.fresh = Fresh(noise=0.01, k3=1e-5) if case.judged else None
    packed: Any = made._forward.packed
    packed._fused &= case.fused
    return made


def weights_of(t: LocalTrainer) -> dict[str, torch.Tensor]:
    """By checkpoint name; adapters alone, if there are any."""
    return {name: w.clone() for name, w in t.named_adapters().items() or t.named_weights()}


class Failing:
    """kpop, but for one micro-batch."""

    def __init__(self) -> None:
        self._inner = objectives.build("kpop")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __call__(self, tokens: Any) -> Any:
        return self._inner(tokens)

    def loss(self, tokens: Any) -> torch.Tensor:
        if 0 in tokens.sequence_ids.tolist():
            raise ValueError("sequence 0 cannot be")
        return self._inner.loss(tokens)


def trained(case: Case, mesh: Mesh) -> dict[str, Any]:
    """Weights and all that updates measured, whole on every rank."""
    t = trainer(case, mesh)
    out: dict[str, Any] = {"metrics": []}
    terms = {key: value for key, value in case.options.items() if key.endswith("_coefficient")}
    objective: Any = Failing() if case.fails else objectives.build(case.objective, **terms)
    about: dict[str, Any] = {"old_is_current": True}
    for number in range(case.updates):
        data = batch(number, case)
        if case.objective == "ac_mis_po":  # it drops every trajectory whose log-probs are drawn far from the policy
            noise = torch.from_numpy(np.random.default_rng(number).normal(0, 0.02, len(data))).float()
            data = replace(data, rollout_logprobs=t.logprobs(data)[0] + noise)
        if "ref_logprobs" in objective.needs:
            about["ref_logprobs"] = t.ref_logprobs(data)
        try:
            seen = t.update(data, objective, experts=case.replay, **about)
        except Exception as error:
            out["error"] = f"{type(error).__name__}: {error}"
            break
        out["metrics"].append(seen.metrics)
        out |= {"logprobs": seen.logprobs, "experts": seen.experts}
    out["weights"] = weights_of(t)
    moments = [s[key] for s in t._stepper.adamw.state.values() for key in ("exp_avg", "exp_avg_sq")]
    parameters = [local(p) for p in t.model.parameters()]
    out["bytes"] = sum(x.numel() * x.element_size() for x in (*moments, *parameters))
    return out


def head_in_parts(mesh: Mesh) -> dict[str, Any]:
    """Scores and gradients of a head, by name: (all rows here, some of them here), of this rank's rows of its gradient."""
    out, group, rank = dict[str, Any](), mesh.group("tensor"), mesh.place["tensor"]
    generator = torch.Generator().manual_seed(0)
    for chunk, softcap in itertools.product((5, 64), (None, 2.0)):
        hidden, weight = (torch.randn(n, 8, generator=generator) for n in (13, 24))
        targets, topk = (torch.randint(0, 24, shape, generator=generator) for shape in ((13,), (13, 3)))
        by = [torch.randn(13, generator=generator) for _ in range(2)]
        rows = slice(rank * 24 // mesh.tensor, (rank + 1) * 24 // mesh.tensor)
        for part, through_entropy in itertools.product((False, True), (False, True)):
            h, w = hidden.clone().requires_grad_(), (weight[rows] if part else weight).clone().requires_grad_()
            about: dict[str, Any] = {"vocabulary": Vocabulary(rows.start, len(w), group) if part else None}
            about |= {"temperature": 0.7, "chunk": chunk, "softcap": softcap, "scale": 1.5, "topk_ids": topk}
            scores = token_logprobs(h, w, targets, **about)
            asked = [s for s in scores[: 1 + through_entropy] if s is not None]
            torch.autograd.backward(asked, by[: len(asked)])
            assert w.grad is not None
            values = [s.detach() for s in scores if s is not None]
            got = (*values, h.grad, w.grad if part else w.grad[rows])
            out.setdefault(f"{chunk} {softcap} {through_entropy}", []).append(got)
    return out


def serve(rank: int, world: int, folder: str, cases: Sequence[Case]) -> None:
    torch.set_num_threads(1)
    start = f"file://{folder}/start"
    dist.init_process_group("gloo", init_method=start, rank=rank, world_size=world, timeout=timedelta(seconds=120))
    meshes: dict[tuple[int, ...], Mesh] = {}
    for number, case in enumerate(cases):
        key = tuple(case.sizes.values())
        if key not in meshes:
            meshes[key] = join(**case.sizes, ranks=range(case.size))
        if rank < case.size:
            result = case.run(meshes[key], Path(folder))
            torch.save(result, Path(folder) / f"{number}-{rank}.pt")
    with contextlib.suppress(RuntimeError):
        dist.barrier()
    dist.destroy_process_group()


def other_order(case: Case) -> Case:
    """The same groups in another order."""
    pairs = [tuple(case.order[i : i + 2]) for i in range(0, len(case.order), 2)]
    return replace(case, order=tuple(itertools.chain(*reversed(pairs))))
