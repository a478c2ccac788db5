"""Reward models: a sequence classifier with one logit, and the preference pairs and the Bradley–Terry loss that train one.

The text that is scored is the rendered prompt followed by the response, which is what a policy has seen and sampled.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, final

import torch
from safetensors import SafetensorError
from torch.nn import functional as F
from transformers.models.auto import AutoModelForSequenceClassification, AutoTokenizer

from rollkeel.errors import BadInput
from rollkeel.models.loading import Policy
from rollkeel.models.sources import Boxes, Drawn, Source, without_memory
from rollkeel.tasks.base import hash_fraction
from rollkeel.tasks.published import SEVERAL, TIE, Pair, Refused, read_pair
from rollkeel.tasks.rows import SOURCE, find_files, read_files


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


def by_width(widths: Sequence[int], tokens: int) -> list[list[int]]:
    """Rows of each pass: by width, so many as have at most `tokens` with padding, but one at least."""
    out: list[list[int]] = []
    for i in sorted(range(len(widths)), key=widths.__getitem__):
        if out and (len(out[-1]) + 1) * widths[i] <= tokens:
            out[-1].append(i)
        else:
            out.append([i])
    return out


@final
class RewardModel:
    """Any Hugging Face sequence classifier with one logit, in evaluation mode, with its tokenizer."""

    through: Callable[..., Any] = staticmethod(lambda call, *args: call(*args))
    """Makes the calls of the model; ranks that hold a part each bring in the weights around them."""
    source: Source | None = None
    """Where the weights come from of a `model` that has none yet: ranks take their parts of them."""

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
        """A new one with the body of a causal language model; the head is drawn from `seed`. If `policy` has no weights, it has
        none either."""
        config = type(policy.model.config).from_dict(policy.model.config.to_dict())
        config.num_labels = 1
        drawn = Drawn()
        with torch.random.fork_rng(devices=[]), ExitStack() as inside:
            torch.manual_seed(seed)
            if policy.source is not None:
                inside.enter_context(without_memory())
                inside.enter_context(drawn)
            model = AutoModelForSequenceClassification.from_config(config)
        if policy.source is not None:
            drawn.name(model)
            made = cls(model, policy.tokenizer)
            made.source = _Headed(f"{model.base_model_prefix}.", policy, drawn)
            return made
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
        passes = by_width(list(map(len, ids)), self.max_tokens)
        if not passes:
            return torch.zeros(0)
        scores = torch.cat([self.forward([ids[i] for i in some]) for some in passes])
        back = torch.empty(len(ids), dtype=torch.long)
        back[torch.tensor([i for some in passes for i in some])] = torch.arange(len(ids))
        return scores[back.to(scores.device)]

    def forward(self, batch: Sequence[Sequence[int]]) -> torch.Tensor:
        """The same of texts' token ids, in one pass."""
        width = max(map(len, batch))
        tokens = torch.full((len(batch), width), self.pad)
        mask = torch.zeros((len(batch), width), dtype=torch.long)
        for row, ids in enumerate(batch):
            tokens[row, : len(ids)] = torch.tensor(ids)
            mask[row, : len(ids)] = 1
        device = next(self.model.parameters()).device
        return self.through(self._logits, tokens.to(device), mask.to(device))[:, 0].float()

    def _logits(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=tokens, attention_mask=mask).logits

    def encode(self, text: str) -> list[int]:
        """Token ids; the end token alone for an empty text."""
        ids = self.tokenizer(text, return_attention_mask=False)["input_ids"] or [
            self.tokenizer.eos_token_id or self.pad
        ]
        if len(ids) > self.context:
            raise BadInput(f"reward model: a text has {len(ids)} tokens, expected at most {self.context}; shorten it")
        return list(ids)


class _Headed:
    """Implements `Source`: what `body` names, a policy has, rounded to its dtype; the rest is drawn."""

    def __init__(self, body: str, policy: Policy, drawn: Drawn) -> None:
        self._body = body
        self._policy = policy
        self._drawn = drawn

    def fill(self, name: str, boxes: Boxes, part: torch.Tensor) -> None:
        if not name.startswith(self._body):
            self._drawn.fill(name, boxes, part)
            return
        assert self._policy.source is not None
        held = part.to(self._policy.model.dtype)
        self._policy.source.fill(name, boxes, held)
        part.copy_(held)
