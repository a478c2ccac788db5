"""rollkeel's idea at its smallest: one model samples in bf16, another learns in fp32, and KPop leaves out tokens they disagree on.

    prompt ─▶ rollout ─▶ reward ─▶ advantages ─▶ objective ─▶ update ─▶ weight sync ─▶ …

    python examples/tiny_loop.py [STEPS]

What `rollkeel train default` adds: packing, a fast engine with a proof of what it serves, failures that are no zeros, schedules
other than this one, checkpoints, metrics, a report. The loss is the same: `tests/test_tiny_loop.py` compares them.
"""

import copy
import random
import sys
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

VOCABULARY = "$0123456789:"
STOP, DIGITS, PROMPTS, SAMPLES, UPDATES = 0, 6, 16, 8, 4


@dataclass
class Rollout:
    prompt: list[int]
    response: list[int]
    rollout_logprobs: list[float]
    """log q of each response token, as the engine sampled it."""


def build_model() -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    config = Qwen3MoeConfig(vocab_size=len(VOCABULARY), hidden_size=64, num_hidden_layers=2, **heads, **experts)
    return Qwen3MoeForCausalLM(config).eval()


def problem(rng: random.Random) -> tuple[list[int], list[int]]:
    """Digits, and their running sums modulo 10: `314:` → `348$`."""
    digits = [rng.randrange(10) for _ in range(DIGITS)]
    sums = [sum(digits[: i + 1]) % 10 for i in range(DIGITS)]
    return [VOCABULARY.index(c) for c in "".join(map(str, digits)) + ":"], [1 + s for s in sums] + [STOP]


@torch.no_grad()
def sample(engine: torch.nn.Module, prompts: list[list[int]]) -> list[Rollout]:
    """One response to each prompt; all prompts have one length."""
    ids = torch.tensor(prompts)
    rollouts = [Rollout(list(prompt), [], []) for prompt in prompts]
    for _ in range(DIGITS + 1):
        logprobs = engine(input_ids=ids).logits[:, -1].float().log_softmax(-1)
        drawn = torch.multinomial(logprobs.exp(), 1)
        pairs = zip(drawn[:, 0].tolist(), logprobs.gather(1, drawn)[:, 0].tolist(), strict=True)
        for rollout, (token, logprob) in zip(rollouts, pairs, strict=True):
            if STOP not in rollout.response:
                rollout.response.append(token)
                rollout.rollout_logprobs.append(min(logprob, 0.0))
        ids = torch.cat([ids, drawn], 1)
    return rollouts


def padded(rows: list[list[float]], dtype: torch.dtype = torch.float32) -> Tensor:
    return pad_sequence([torch.tensor(row, dtype=dtype) for row in rows], batch_first=True)


def logprobs_of(model: torch.nn.Module, rollouts: list[Rollout]) -> Tensor:
    """`[R, T]` log-probs of the response tokens. Padding stands on the right, where a causal model does not look."""
    ids = padded([r.prompt + r.response for r in rollouts], torch.int64)
    each = model(input_ids=ids).logits[:, :-1].float().log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    rows = [row[len(r.prompt) - 1 :][: len(r.response)] for row, r in zip(each, rollouts, strict=True)]
    return pad_sequence(rows, batch_first=True)


def advantages_of(rewards: Tensor) -> Tensor:
    """GRPO: `[groups, samples]` rewards → how much better each is than its group. Equal rewards teach nothing."""
    return (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)


def binary_kl(a: Tensor, b: Tensor) -> Tensor:
    """KL between "this token" and "any other" under log-probs a and b. fp32 cannot tell 1 - p from 0 below 2⁻²⁴."""
    rest_a, rest_b = ((-torch.expm1(x)).clamp_min(2.0**-24) for x in (a, b))
    return a.exp() * (a - b) + rest_a * (rest_a.log() - rest_b.log())


def kpop_loss(logprobs: Tensor, old: Tensor, rollout: Tensor, advantages: Tensor, lengths: Tensor, phi: float = 0.1):
    """Loss, and the tokens it kept. Log-probs `[R, T]`, `advantages` and `lengths` `[R]`.

    Keep a token if engine (`rollout`) and trainer (`old`) agree on it to φ nats; weigh it by old/rollout; clip new/old as PPO.
    """
    keep = torch.maximum(binary_kl(old, rollout), binary_kl(rollout, old)) <= phi
    weight = (old - rollout).clamp(-20, 20).exp()
    a, ratio = advantages[:, None], (logprobs - old).clamp(-20, 20).exp()
    surrogate = torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)
    inside = torch.arange(logprobs.shape[1]) < lengths[:, None]
    mean = inside / lengths[:, None] / len(lengths)  # of each response, then of all
    return -(mean * keep * weight * surrogate).sum(), keep & inside


def learn(model: torch.nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def sync(trainer: torch.nn.Module, engine: torch.nn.Module) -> None:
    """Copy the weights, and prove it before a token is sampled under their name."""
    engine.load_state_dict(trainer.state_dict())
    served = engine.state_dict()
    for name, mine in trainer.state_dict().items():
        if not torch.equal(mine.to(served[name].dtype), served[name]):
            raise RuntimeError(f"{name} did not arrive")


def warm_start(model: torch.nn.Module, rng: random.Random, steps: int = 250) -> None:
    """Imitate answers, some digits of which are wrong: what is learnt is unsure, and has something to gain."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0)
    for _ in range(steps):
        shown = [problem(rng) for _ in range(64)]
        noisy = [(p, [t if t == STOP or rng.random() > 0.1 else rng.randint(1, 10) for t in a]) for p, a in shown]
        learn(model, optimizer, -logprobs_of(model, [Rollout(p, a, []) for p, a in noisy]).mean())


def main(steps: int) -> None:
    rng, model = random.Random(0), build_model()
    warm_start(model, rng)
    engine = copy.deepcopy(model).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.0)
    for step in range(1, steps + 1):
        sync(model, engine)
        asked = [problem(rng) for _ in range(PROMPTS)]
        rollouts = sample(engine, [prompt for prompt, _ in asked for _ in range(SAMPLES)])
        rewards = torch.tensor([float(r.response == asked[i // SAMPLES][1]) for i, r in enumerate(rollouts)])
        advantages = advantages_of(rewards.view(PROMPTS, SAMPLES)).flatten()
        old = logprobs_of(model, rollouts).detach()
        logged = padded([r.rollout_logprobs for r in rollouts])
        lengths = torch.tensor([len(r.response) for r in rollouts])
        for part in torch.arange(len(rollouts)).chunk(UPDATES):
            new = logprobs_of(model, [rollouts[i] for i in part])
            seen = old[part, : new.shape[1]], logged[part, : new.shape[1]]
            loss, keep = kpop_loss(new, *seen, advantages[part], lengths[part])
            learn(model, optimizer, loss)
        print(f"step {step}  reward {rewards.mean():.3f}  kept {int(keep.sum())}/{int(lengths[part].sum())}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 40)
