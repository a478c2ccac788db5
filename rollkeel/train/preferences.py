"""Reward models: a sequence classifier with one logit, trained on preference pairs with the Bradley–Terry loss.

The text that is scored is the rendered prompt followed by the response, which is what a policy has seen and sampled.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from safetensors import SafetensorError
from torch.nn import functional as F
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rollkeel.config import SftConfig
from rollkeel.errors import BadInput, Interrupted, NonFinite
from rollkeel.models.loading import Policy
from rollkeel.tasks.base import hash_fraction, keyed_rng
from rollkeel.tasks.published import SEVERAL, TIE, Pair, Refused, read_pair
from rollkeel.tasks.rows import SOURCE, find_files, read_files
from rollkeel.train import checkpoint
from rollkeel.train.optimizer import PACK_TOKENS, Stepper, supervised
from rollkeel.train.sft import cuts

METRICS = "metrics.jsonl"


def load_pairs(path: str | Path) -> list[Pair]:
    """Pairs of a file or folder (jsonl, parquet, json, csv): rows with prompt, chosen, rejected and perhaps margin, or battles of
    arena-human-preference, of which those without a winner or of several turns are left out with a warning.

    Raises `BadInput` for missing files, rows that are none (naming row and column), no pairs.
    """
    root = Path(path).expanduser()
    files = find_files(root, ("**/*.jsonl", "**/*.parquet"), "expected rows with prompt, chosen, rejected")
    pairs, left_out = [], 0
    for number, row in enumerate(read_files(files, root), 1):
        try:
            pairs.append(read_pair({k: v for k, v in row.items() if k != SOURCE}))
        except Refused as reason:
            if str(reason) not in (TIE, SEVERAL):
                raise BadInput(f"{path} row {number}: {reason}") from None
            left_out += 1
    if left_out:
        warnings.warn(f"{path}: {left_out} battles without a winner or of several turns left out", stacklevel=2)
    if not pairs:
        raise BadInput(f"{path}: expected at least one preference pair, got none")
    return pairs


def split_pairs(pairs: Sequence[Pair], held_out: float) -> tuple[list[Pair], list[Pair]]:
    """Pairs to train on and pairs held out, by the hash of the prompt, so that no prompt is on both sides.

    Raises `BadInput` when one of the two is empty; `held_out`: share in [0, 1), 0 holds nothing out.
    """
    aside = [hash_fraction("preferences", " ".join(pair.prompt.split())) < held_out for pair in pairs]
    train = [p for p, out in zip(pairs, aside, strict=True) if not out]
    rest = [p for p, out in zip(pairs, aside, strict=True) if out]
    if not train or (held_out and not rest):
        raise BadInput(
            f"preference pairs: {len(train)} to train on and {len(rest)} held out at {held_out:g}; give more"
        )
    return train, rest


def bradley_terry(chosen: torch.Tensor, rejected: torch.Tensor, margin: torch.Tensor | float = 0.0) -> torch.Tensor:
    """−log σ(r_c − r_r − m), `[pairs]`: the negative log-likelihood that `chosen` wins (Bradley & Terry 1952)."""
    return -F.logsigmoid(chosen - rejected - margin)


@final
class RewardModel:
    """Any Hugging Face sequence classifier with one logit, in evaluation mode, with its tokenizer."""

    def __init__(self, model: Any, tokenizer: Any, *, max_tokens: int = 8192) -> None:
        """`max_tokens`: with padding, in one forward pass. Raises `BadInput` for a classifier of several labels."""
        if int(model.config.num_labels) != 1:
            raise BadInput(f"reward model: expected a classifier with one logit, got {model.config.num_labels} labels")
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        if pad is None:
            raise BadInput("reward model: expected a tokenizer with a padding or end token, this one has neither")
        model.config.get_text_config().pad_token_id = model.config.pad_token_id = pad
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.pad = int(pad)
        self.max_tokens = max_tokens
        self.context = int(getattr(model.config.get_text_config(), "max_position_embeddings", 2**31))

    @classmethod
    def load(cls, path: str | Path, device: torch.device | str = "cpu", dtype: str = "float32") -> RewardModel:
        """From a Hugging Face folder or id. Raises `BadInput` (one line) when transformers cannot load it as a classifier."""
        if str(path).startswith((".", "/", "~")) and not (Path(path).expanduser() / "config.json").is_file():
            raise BadInput(f"reward model {str(path)!r}: expected a Hugging Face folder with config.json, found none")
        name = str(Path(path).expanduser())
        try:
            model, info = AutoModelForSequenceClassification.from_pretrained(  # type: ignore[misc]
                name, dtype=getattr(torch, dtype), output_loading_info=True
            )
            tokenizer = AutoTokenizer.from_pretrained(name)
        except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
            raise BadInput(f"reward model {name!r}: cannot be loaded: {' '.join(str(error).split())[:300]}") from None
        if missing := sorted(info.get("missing_keys", ())):
            raise BadInput(f"reward model {name!r}: no trained classifier, it lacks {missing[0]}; train one first")
        return cls(model.to(device), tokenizer)

    @classmethod
    def from_policy(cls, policy: Policy, seed: int = 0) -> RewardModel:
        """A new one with the body of a causal language model; the head is drawn from `seed`."""
        config = type(policy.model.config).from_dict(policy.model.config.to_dict())
        config.num_labels = 1
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = AutoModelForSequenceClassification.from_config(config)
        model.base_model.load_state_dict(policy.model.base_model.state_dict())
        device = next(policy.model.parameters()).device
        return cls(model.to(device), policy.tokenizer)

    def save(self, folder: str | Path) -> None:
        """Write an ordinary Hugging Face folder."""
        self.model.save_pretrained(str(folder))
        self.tokenizer.save_pretrained(str(folder))

    @torch.no_grad()
    def score(self, texts: Sequence[str]) -> list[float]:
        """Reward of each text; the same, up to rounding, whatever it is scored with. Raises `BadInput` for one that is too long."""
        return self.rewards(texts).tolist()

    def rewards(self, texts: Sequence[str]) -> torch.Tensor:
        """`[texts]` float32 on the model's device, with gradients where they are enabled; batched by length, padded on the right."""
        ids = [self.encode(text) for text in texts]
        order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
        parts: list[torch.Tensor] = []
        at = 0
        while at < len(order):
            end = at + 1
            while end < len(order) and (end + 1 - at) * len(ids[order[end]]) <= self.max_tokens:
                end += 1
            parts.append(self._forward([ids[i] for i in order[at:end]]))
            at = end
        if not parts:
            return torch.zeros(0)
        back = torch.empty(len(order), dtype=torch.long)
        back[torch.tensor(order)] = torch.arange(len(order))
        scores = torch.cat(parts)
        return scores[back.to(scores.device)]

    def encode(self, text: str) -> list[int]:
        """Token ids; the end token alone for an empty text."""
        ids = self.tokenizer(text, return_attention_mask=False)["input_ids"] or [
            self.tokenizer.eos_token_id or self.pad
        ]
        if len(ids) > self.context:
            raise BadInput(f"reward model: a text has {len(ids)} tokens, expected at most {self.context}; shorten it")
        return list(ids)

    def _forward(self, batch: Sequence[Sequence[int]]) -> torch.Tensor:
        width = max(map(len, batch))
        tokens = torch.full((len(batch), width), self.pad)
        mask = torch.zeros((len(batch), width), dtype=torch.long)
        for row, ids in enumerate(batch):
            tokens[row, : len(ids)] = torch.tensor(ids)
            mask[row, : len(ids)] = 1
        device = next(self.model.parameters()).device
        return self.model(input_ids=tokens.to(device), attention_mask=mask.to(device)).logits[:, 0].float()


Render = Callable[[str], str]
"""From a prompt of the data to what a policy sees, for example by a chat template."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """What decides the weights that come out, beside the model and the pairs."""

    sft: SftConfig
    """Steps, pairs per step, learning rate."""
    weight_decay: float = 0.0
    pack_tokens: int = PACK_TOKENS
    seed: int = 0
    every: int = 0
    """Steps between evaluations and checkpoints; 0 has them at the end alone."""
    render: Render = str


def train_reward_model(
    start: Callable[[], RewardModel],
    train: Sequence[Pair],
    held_out: Sequence[Pair],
    training: Training,
    out: Path,
    *,
    progress: Callable[[int, Mapping[str, float]], None] = lambda step, metrics: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> dict[str, float]:
    """Train to `out/model`, with `out/metrics.jsonl` and `out/checkpoints`; goes on from the newest checkpoint, bit for bit.

    Step s takes pairs s · batch … of an endless sequence of shuffles keyed by the seed. Returns the last metrics: `loss`,
    `accuracy` with `accuracy_se`, `margin` (mean r_c − r_r) of the held-out pairs under `eval/`, of the last step's under
    `train/`. Raises `Interrupted` after a checkpoint, `NonFinite` with the last good checkpoint kept.
    """
    config = training.sft
    checkpoint.clean(out / "checkpoints")
    saved = checkpoint.latest(out / "checkpoints")
    model = start()
    if saved is not None:  # into the same memory: tensors that a file is mapped to can round differently
        model.model.load_state_dict(RewardModel.load(saved.model).model.state_dict())
    model.max_tokens = training.pack_tokens
    batches = cuts(config, len(train))
    steps = len(batches) - 1
    stepper = supervised(model.model, config, steps, training.weight_decay)
    rows: list[dict[str, float]] = []
    if saved is not None:
        state = checkpoint.load_state(saved.state)
        stepper.load_state_dict(state["optimizer"])
        rows = state["rows"]
    for step in range(stepper.updates + 1, steps + 1):
        if should_stop():
            _save(out, model, stepper, rows)
            raise Interrupted(f"stopped after {stepper.updates} of {steps} steps; the same command goes on")
        metrics = {
            "step": step,
            **_step(
                model, stepper, _batch(train, range(*batches[step - 1 : step + 1]), training.seed), training.render
            ),
        }
        due = step == steps or (training.every and step % training.every == 0)
        if due:
            metrics |= {f"eval/{k}": v for k, v in measure(model, held_out, training.render).items()}
        rows.append(metrics)
        progress(step, metrics)
        if due:
            _save(out, model, stepper, rows)
    checkpoint.replace_folder(out / "model", model.save)
    return rows[-1] if rows else {}


def measure(model: RewardModel, pairs: Sequence[Pair], render: Render = str) -> dict[str, float]:
    """`loss`, `accuracy` (a tie counts half) with `accuracy_se` over pairs, `margin`; empty for no pairs."""
    if not pairs:
        return {}
    with torch.no_grad():
        chosen, rejected = _rewards(model, pairs, render)
        return _metrics(chosen, rejected, bradley_terry(chosen, rejected, _margins(pairs, chosen)))


def _metrics(chosen: torch.Tensor, rejected: torch.Tensor, losses: torch.Tensor) -> dict[str, float]:
    gap = (chosen - rejected).detach().double().cpu().numpy()
    right = np.where(gap == 0, 0.5, gap > 0)
    se = float(right.std(ddof=1) / math.sqrt(len(right))) if len(right) > 1 else 0.0
    loss = float(losses.detach().double().mean())
    return {"loss": loss, "accuracy": float(right.mean()), "accuracy_se": se, "margin": float(gap.mean())}


def _margins(pairs: Sequence[Pair], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor([p.margin for p in pairs], device=like.device)


def _rewards(model: RewardModel, pairs: Sequence[Pair], render: Render) -> tuple[torch.Tensor, torch.Tensor]:
    texts = [render(p.prompt) + side for p in pairs for side in (p.chosen, p.rejected)]
    scores = model.rewards(texts)
    return scores[::2], scores[1::2]


def _batch(pairs: Sequence[Pair], indices: Sequence[int], seed: int) -> list[Pair]:
    """Pairs of one step; every pair is seen once before any is seen again."""
    orders: dict[int, list[int]] = {}
    out = []
    for index in indices:
        epoch, place = divmod(index, len(pairs))
        if epoch not in orders:
            orders[epoch] = list(range(len(pairs)))
            keyed_rng("preferences", seed, epoch).shuffle(orders[epoch])
        out.append(pairs[orders[epoch][place]])
    return out


def _step(model: RewardModel, stepper: Stepper, pairs: Sequence[Pair], render: Render) -> dict[str, float]:
    """One update; both sides of a pair share a forward pass, so that only one such pass is held for backward at a time."""
    widths = [max(len(model.encode(render(p.prompt) + side)) for side in (p.chosen, p.rejected)) for p in pairs]
    stepper.zero_grad()
    parts: list[tuple[torch.Tensor, ...]] = []
    order = sorted(range(len(pairs)), key=widths.__getitem__)
    while order:
        count = 1
        while count < len(order) and 2 * (count + 1) * widths[order[count]] <= model.max_tokens:
            count += 1
        members, order = [pairs[i] for i in order[:count]], order[count:]
        chosen, rejected = _rewards(model, members, render)
        losses = bradley_terry(chosen, rejected, _margins(members, chosen))
        if not bool(torch.isfinite(losses).all()):
            raise NonFinite(f"reward model update {stepper.updates}: the loss is not finite; weights left untouched")
        (losses.sum() / len(pairs) * stepper.scale).backward()
        parts.append((chosen.detach(), rejected.detach(), losses.detach()))
    metrics = _metrics(*(torch.cat(side) for side in zip(*parts, strict=True)))
    return {**{f"train/{k}": v for k, v in metrics.items()}, **stepper.step()}


def _save(out: Path, model: RewardModel, stepper: Stepper, rows: Sequence[Mapping[str, float]]) -> None:
    def write(path: Path) -> None:
        model.save(path / "model")
        checkpoint.save_state(path / "state", {"optimizer": stepper.state_dict(), "rows": list(rows)})

    checkpoint.save(out / "checkpoints", stepper.updates, write=write, info={})
    (out / METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
