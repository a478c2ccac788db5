"""Stage 2: engine and trainer agree, gradients are right, updates arrive, a request does not depend on its neighbours."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from benchmarks.gpu import models, rl
from benchmarks.gpu.bench import Bench
from rollkeel import objectives
from rollkeel.batch.build import TrainingBatch, build_batch
from rollkeel.engines.local import LocalEngine
from rollkeel.models.loading import Policy
from rollkeel.models.packed import PackedModel
from rollkeel.rollout.collect import collect, issue
from rollkeel.train.adamw import AdamW, master
from rollkeel.train.logprobs import token_logprobs
from rollkeel.types import Prompt, SamplingParams

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def run(bench: Bench) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    for dtype in DTYPES:
        for name in ("Qwen3-0.6B", "Qwen3-30B-A3B"):
            bench.attempt(f"engine against trainer, {models.title(name)} {dtype}", agreement, name, dtype)
    bench.attempt("packed against padded", packed)
    bench.attempt("gradients against float64", gradients)
    bench.attempt("masters", masters)
    bench.attempt("the same request alone and among others", neighbours)
    bench.attempt("a graph is the step", recorded)
    bench.attempt("resume", resume)


def small(bench: Bench, name: str, dtype: torch.dtype, **fields: int) -> Policy:
    """Two layers of the real widths, with weights large enough that distributions are not flat."""
    return models.policy(bench, name, dtype, 0.06, num_hidden_layers=2, **fields)


def sampled(bench: Bench, made: Policy, dtype: str, routed: bool = False, forward: str = "auto") -> TrainingBatch:
    """What the engine says about answers it drew, as a batch for the trainer."""
    count, new = (6, 8) if bench.toy else (40, 48)
    engine = models.engine(bench, made, 16, 128, dtype, forward)
    rng = np.random.default_rng(0)
    grader = rl.tasks.get("runsum").grader(rl.tasks.get("runsum").item(0, "train", 0))
    asked = [
        Prompt(id=str(i), index=i, text="", token_ids=rng.integers(8, 264, 10 + i), answer="", grader=grader, task="drawn")
        for i in range(count)
    ]  # fmt: skip
    about = SamplingParams(max_new_tokens=new, return_experts=routed)
    issued = issue(asked, 1, about, 0, engine)
    rollouts = collect(engine, issued, made.tokenizer, deadline_s=120)
    return build_batch([replace(r, reward=0.0) for r in rollouts], [0.0] * count, "token_mean").to(bench.device)


def agreement(bench: Bench, name: str, dtype: str) -> None:
    """In bfloat16 measured by what it costs alone: both sides' errors are independent, so √2 of one side's is expected."""
    made = small(bench, name, DTYPES[dtype])
    routed = "A3B" in name
    batch = sampled(bench, made, dtype, routed)
    kinds = {"": False, ", experts replayed": True} if routed else {"": False}
    for words, replay in kinds.items():
        said, padded = scored(bench, made, batch, replay)
        gap = (said - batch.rollout_logprobs).abs()
        about = {"p99": float(gap.quantile(0.99)), "max": float(gap.max()), "padded": padded}
        row = f"|log p − log q| {models.title(name)}, 2 layers, {dtype}{words}"
        median = float(gap.median())
        if dtype == "fp32":
            # A router's tie that falls the other way moves single tokens of a mixture by any amount.
            loose = routed and not replay
            value = median if loose else about["p99"]
            bench.check(f"{row}, {'median' if loose else 'p99'}", value, 1e-4, median=median, **about)
            continue
        exact = small(bench, name, torch.float32)
        exact.model.load_state_dict({k: v.float() for k, v in made.model.state_dict().items()})
        alone = float((said - scored(bench, exact, batch, replay)[0]).abs().median())
        about |= {"median": median, "of_the_trainer_to_float32": alone}
        bench.check(f"{row}, times the trainer's own error", median / alone, 2.0, **about)


def scored(bench: Bench, made: Policy, batch: TrainingBatch, replay: bool) -> tuple[torch.Tensor, str | None]:
    """The trainer's log-probs, and why it pads if it does."""
    settings = rl.TrainConfig(micro_batch_tokens=4096)
    about = {"temperature": 1.0, "total_updates": 1, "device": bench.device, "replay_routing": replay}
    trainer = rl.LocalTrainer(made, settings, **about)
    return rl.logprobs(trainer, batch), trainer.padded or None


@torch.no_grad()
def packed(bench: Bench) -> None:
    for dtype, bound in ((torch.float32, 1e-4), (torch.bfloat16, 0.05)):
        made = small(bench, "Qwen3-0.6B", dtype, vocab_size=288)
        forward = PackedModel(made.model)
        lengths = [5, 33, 1, 17]
        ids = torch.randint(8, 264, (sum(lengths),), device=bench.device)
        positions = torch.cat([torch.arange(n, device=bench.device) for n in lengths])
        together = forward(ids, positions, [0, *np.cumsum(lengths).tolist()]).float()
        alone = torch.cat(
            [forward.backbone(part[None], use_cache=False).last_hidden_state[0] for part in ids.split(lengths)]
        )
        gap = float((together - alone.float()).norm() / alone.float().norm())
        bench.check(f"packed against alone, {dtype}", gap, bound, padded=forward.padded or None)


def gradients(bench: Bench) -> None:
    """Of a sum of log-probs and entropies through two layers and a whole vocabulary, against float64 on the CPU."""
    for dtype, bound in ((torch.float32, 1e-4), (torch.bfloat16, 0.05)):
        made = small(bench, "Qwen3-0.6B", dtype, hidden_size=64 if bench.toy else 256)
        ids = torch.randint(8, 264, (1, 48), device=bench.device)
        exact = small(Bench(bench.stage, bench.out, "cpu", bench.toy, 1e9), "Qwen3-0.6B", torch.float64, hidden_size=64 if bench.toy else 256)  # fmt: skip
        exact.model.load_state_dict({k: v.detach().double().cpu() for k, v in made.model.state_dict().items()})
        logp = exact.model(ids.cpu()).logits[0, :-1].log_softmax(-1)
        (logp.gather(1, ids.cpu()[0, 1:, None]).sum() - 0.1 * (logp.exp() * logp).sum()).backward()
        forward = PackedModel(made.model)
        hidden = forward(ids[0], torch.arange(48, device=bench.device), [0, 48])
        head = made.model.get_output_embeddings().weight  # type: ignore[union-attr]
        scores, entropy, _ = token_logprobs(hidden[:-1], head, ids[0, 1:])  # type: ignore[arg-type]
        assert entropy is not None
        (scores.sum() + 0.1 * entropy.sum()).backward()
        pairs = zip(made.model.parameters(), exact.model.parameters(), strict=True)
        gaps = [float((p.grad.double().cpu() - q.grad).norm() / q.grad.norm()) for p, q in pairs if p.grad is not None and q.grad is not None]  # fmt: skip
        bench.check(f"gradients {dtype} against float64, worst tensor of {len(gaps)}, relative", max(gaps), bound)


def masters(bench: Bench) -> None:
    """Steps of 1e-6 arrive in bfloat16 weights' masters, as torch's AdamW makes them on float32."""
    weights = (torch.randn(997, 131, device=bench.device) * 0.02).to(torch.bfloat16)
    low, full = torch.nn.Parameter(weights.clone()), torch.nn.Parameter(weights.float())
    made = AdamW([low], betas=(0.9, 0.999), weight_decay=0.0)
    other = torch.optim.AdamW([full], 1e-6, weight_decay=0.0)
    for _ in range(20):
        low.grad = torch.randn(weights.shape, device=bench.device)
        full.grad = low.grad.clone()
        made.step(1e-6)
        other.step()
    rest = made.rest(low)
    assert rest is not None
    held = master(low.detach().flatten(), rest.flatten())
    moved = (held != weights.float().flatten()).double().mean()
    bench.check("masters that 20 steps of 1e-6 moved", float(moved), 0.99, least=True)
    gap = ((held - full.detach().flatten()).abs() / 2e-5).max()
    bench.check("masters against torch's AdamW, of the way they went", float(gap), 1e-3)


def neighbours(bench: Bench) -> None:
    """Bit for bit: tokens and log-probs of one request, alone and among 63 others (A15: not yet promised on a card)."""
    made = small(bench, "Qwen3-0.6B", torch.bfloat16)
    count, spans = 4 if bench.toy else 64, []
    for others in (1, count):
        engine = models.engine(bench, made, count, 96)
        engine.submit(models.requests(others, 24, 8 if bench.toy else 48, made.vocab_size))
        ended = []
        while engine.busy:
            ended += engine.poll(60)
        spans.append(next(s.span for s in ended if s.request_id == 0))
    same = float(np.mean(spans[0].token_ids == spans[1].token_ids))
    n = int(np.argmin([*(spans[0].token_ids == spans[1].token_ids), False]))
    gap = float(np.abs(spans[0].logprobs[:n] - spans[1].logprobs[:n]).max()) if n else 0.0
    bench.row(
        f"the same request alone and among {count - 1}: same tokens",
        same,
        logprob_gap=gap,
        bits=bool(same == 1 and gap == 0),
    )


def recorded(bench: Bench) -> None:
    """Bit for bit: decode steps played from a CUDA graph and run from Python."""
    if not bench.cuda or not models.has(LocalEngine, "graphs"):
        bench.absent("a graph is the step", "this engine records no graphs" if bench.cuda else "no card")
        return
    for name in ("Qwen3-0.6B", "Qwen3-30B-A3B"):
        made, runs, kinds = (
            small(bench, name, torch.bfloat16),
            [],
            list[dict[str, Any]](({}, {"graphs": models.Eager()})),
        )
        for more in kinds:
            engine = models.engine(bench, made, 16, 160, **more)
            engine.submit([r for i in range(40) for r in models.requests(1, 1 + i, 3 * i + 1, made.vocab_size, i)])
            ended = []
            while engine.busy:
                ended += engine.advance(16)
            runs.append(sorted(ended, key=lambda s: s.request_id))
        other = sum(
            not (
                np.array_equal(a.span.token_ids, b.span.token_ids) and np.array_equal(a.span.logprobs, b.span.logprobs)
            )
            for a, b in zip(*runs, strict=True)
        )
        bench.check(f"requests of 40 that a graph answers with other bits, {models.title(name)}", float(other), 0)


def resume(bench: Bench) -> None:
    """An update behind a state that was saved and loaded is that of the trainer that went on."""
    made, lengths = small(bench, "Qwen3-0.6B", torch.bfloat16, vocab_size=288), [(8, 16)] * 4
    batch, objective = rl.synthetic(lengths, 288).to(bench.device), objectives.build("grpo", {})
    trainer = rl.trainer(bench, made, lr=1e-4)
    trainer.update(batch, objective, old_is_current=True)
    state = rl.detached(trainer.state_dict())
    trainer.update(batch, objective, old_is_current=True)
    one = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.load_state_dict(state)
    trainer.update(batch, objective, old_is_current=True)
    same = [torch.equal(p, q) for p, q in zip(trainer.model.parameters(), one, strict=True)]
    gap = max(float((p.detach().float() - q.float()).abs().max()) for p, q in zip(trainer.model.parameters(), one, strict=True))  # fmt: skip
    bench.check("resume: largest difference of a weight after the next update", gap, 1e-5, bits=all(same))
