"""Broken parts: replacements of rollkeel's own objects while a run goes on. Each is a context manager.

The checks that would refuse a wrong publication are passed by, which is what a run without them is like.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast

from benchmarks.doctor.alterations import Alter, inserted, part, with_output
from rollkeel.engines import decode, local
from rollkeel.engines import weights as engine_weights
from rollkeel.loop import assemble, steps
from rollkeel.models import loading, numerics, presets
from rollkeel.models.forward import FastForward
from rollkeel.objectives import Objective
from rollkeel.tasks.source import PromptSource
from rollkeel.types import Proof, Request, Segment, Status, TokenSpan, WeightUpdate

Weights = Mapping[str, torch.Tensor]


@contextmanager
def altered(alter: Alter, seed: int) -> Iterator[None]:
    """The trainer gets every rollout as `alter` makes it."""
    inner, rng = steps.learn, np.random.default_rng([0xD0C, seed])

    def learning(run: Any, drawn: Any, *rest: Any) -> dict[str, float]:
        new = {r.id: alter(r, rng) for r in drawn.rollouts}
        batch = [new[r.id] for r in drawn.batch]
        return inner(run, replace(drawn, rollouts=list(new.values()), batch=batch), *rest)

    with mock.patch.object(steps, "learn", learning):
        yield


@contextmanager
def raw_logprobs() -> Iterator[None]:
    """The engine logs log-softmax of the logits as they came out of the model, whatever the temperature."""
    honest = decode.Decode.__init__

    def init(self: Any, *args: Any, **options: Any) -> None:
        honest(self, *args, **options)
        draw = self._sample

        def sample(logits: torch.Tensor, rows: Any, uniform: torch.Tensor) -> Any:
            drawn = draw(logits, rows, uniform)
            raw = logits.log_softmax(-1).gather(1, drawn.ids[:, None])[:, 0].clamp_max(0.0)
            return replace(drawn, logprobs=raw)

        self._sample = sample

    with mock.patch.object(decode.Decode, "__init__", init):
        yield


@contextmanager
def weights_changed(change: Callable[[Weights, dict[str, torch.Tensor]], None]) -> Iterator[None]:
    """After every publication `change(weights, memory)` writes to what the engine holds; the proof looks away."""
    honest, memory = engine_weights.apply_update, dict[str, torch.Tensor]()

    def apply(update: WeightUpdate, destinations: Weights, mode: str) -> None:
        honest(update, destinations, mode)
        change(destinations, memory)

    with (
        mock.patch.object(engine_weights, "apply_update", apply),
        mock.patch.object(engine_weights, "prove", lambda update, *_: update.checksum),
    ):
        yield


def keep_first(pattern: str) -> Callable[[Weights, dict[str, torch.Tensor]], None]:
    """Tensors whose name matches keep what the first publication brought: the reload forgets them."""

    def change(weights: Weights, memory: dict[str, torch.Tensor]) -> None:
        for name, tensor in weights.items():
            if re.search(pattern, name):
                tensor.copy_(memory.setdefault(name, tensor.clone()))

    return change


def experts_rolled(layer: int, by: int) -> Callable[[Weights, dict[str, torch.Tensor]], None]:
    """Experts of a layer `by` places further than they belong, as ranks in a wrong order load them."""
    pattern = re.compile(rf"layers\.{layer}\.mlp\.experts\.(\d+)\.(.*)")

    def change(weights: Weights, memory: dict[str, torch.Tensor]) -> None:
        found: dict[str, dict[int, torch.Tensor]] = {}
        for name, tensor in weights.items():
            if match := pattern.search(name):
                found.setdefault(match.group(2), {})[int(match.group(1))] = tensor
        for views in found.values():
            held = {e: view.clone() for e, view in views.items()}
            for e, view in views.items():
                view.copy_(held[(e + by) % len(held)])

    return change


def heads_rolled(layer: int, width: int) -> Callable[[Weights, dict[str, torch.Tensor]], None]:
    """Query heads of a layer in another order, as a wrong shard plan leaves them."""

    def change(weights: Weights, memory: dict[str, torch.Tensor]) -> None:
        view = weights[f"model.layers.{layer}.self_attn.q_proj.weight"]
        view.copy_(view.roll(width, 0).clone())

    return change


def exchanged(one: str, other: str) -> Callable[[Weights, dict[str, torch.Tensor]], None]:
    """Tensors under the name `one` and those under `other` in each other's place, as layers counted from 1 leave them."""

    def change(weights: Weights, memory: dict[str, torch.Tensor]) -> None:
        for name, tensor in weights.items():
            if one in name:
                its, held = weights[name.replace(one, other)], tensor.clone()
                tensor.copy_(its)
                its.copy_(held)

    return change


def constant(pattern: str, value: float) -> Callable[[Weights, dict[str, torch.Tensor]], None]:
    """Tensors whose name matches hold their initial constant: they were never loaded."""

    def change(weights: Weights, memory: dict[str, torch.Tensor]) -> None:
        for name, tensor in weights.items():
            if re.search(pattern, name):
                tensor.fill_(value)

    return change


@contextmanager
def updates_dropped(arrives: Callable[[int], bool]) -> Iterator[None]:
    """The engine takes the version number of every update and its weights only if `arrives(count)`, counted from 0."""
    honest, count = local.LocalEngine.update_weights, [0]

    def update_weights(self: Any, update: WeightUpdate) -> Proof:
        number, count[0] = count[0], count[0] + 1
        if number == 0 or arrives(number):
            return honest(self, update)
        self._version = update.version
        return Proof(version=update.version, checksum=update.checksum)

    with mock.patch.object(local.LocalEngine, "update_weights", update_weights):
        yield


@contextmanager
def kv_kept() -> Iterator[None]:
    """Sequences keep their KV over new weights in an engine that was told to recompute it."""
    honest = local.LocalEngine.__init__

    def init(self: Any, *args: Any, **options: Any) -> None:
        honest(self, *args, **options)
        self._keep = True

    with mock.patch.object(local.LocalEngine, "__init__", init):
        yield


@contextmanager
def secretly(dtype: str, *, int4_group: int = numerics.INT4_GROUP) -> Iterator[None]:
    """The engine computes in `dtype` and says what the config asked for."""
    honest = local.LocalEngine.__init__

    def init(self: Any, hf_config: Any, config: Any, **options: Any) -> None:
        honest(self, hf_config, config.model_copy(update={"dtype": dtype}), **options)
        self._capabilities = replace(self._capabilities, dtype=config.dtype)

    with (
        mock.patch.object(local.LocalEngine, "__init__", init),
        mock.patch.object(numerics, "INT4_GROUP", int4_group),
    ):
        yield


@contextmanager
def routing_changed(change: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """The engine's routers choose by `change(logits)`; the experts it reports are those it used."""
    honest = FastForward._experts

    def experts(self: Any, h: torch.Tensor, layer: Any, *rest: Any) -> torch.Tensor:
        router = layer.router
        linear = torch.nn.functional.linear

        def of(x: torch.Tensor, weight: torch.Tensor, *bias: Any) -> torch.Tensor:
            out = linear(x, weight, *bias)
            return change(out) if weight is router else out

        with mock.patch("rollkeel.models.forward.F.linear", of):
            return honest(self, h, layer, *rest)

    with mock.patch.object(FastForward, "_experts", experts):
        yield


def coarse(step: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Router logits rounded to multiples of `step`, as a low-precision router has them."""
    return lambda logits: (logits / step).round() * step


def noisy(size: float, seed: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Normal noise of standard deviation `size` on router logits, as jitter left on from training."""
    generator = torch.Generator().manual_seed(seed)
    return lambda logits: logits + size * torch.randn(logits.shape, generator=generator)


@contextmanager
def entropy_sign() -> Iterator[None]:
    """`train.entropy_coefficient` with the wrong sign: entropy is punished."""
    honest = Objective.loss

    def loss(self: Objective, tokens: Any) -> torch.Tensor:
        bonus = (tokens.coefficients.detach() * tokens.entropy).sum()
        return honest(self, tokens) + 2 * self.entropy_coefficient * bonus

    with mock.patch.object(Objective, "loss", loss):
        yield


class ToolEngine:
    """An engine whose sequences get a tool's output after `after` tokens, which stays in the response.

    The rest of the answer is sampled behind it. The output's log-probs are 0, for nobody sampled it.
    """

    def __init__(self, engine: Any, output: Sequence[int], after: int) -> None:
        self._engine, self._output, self._after = engine, np.array(output, np.int64), after
        self._asked: dict[int, Request] = {}
        self._first: dict[int, TokenSpan] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, requests: Sequence[Request]) -> None:
        self._asked |= {r.id: r for r in requests}
        short = [replace(r, sampling=replace(r.sampling, max_new_tokens=self._after)) for r in requests]
        self._engine.submit(short)

    def poll(self, timeout_s: float) -> list[Segment]:
        ended, again = [], []
        for segment in self._engine.poll(timeout_s):
            request = self._asked[segment.request_id]
            if segment.request_id in self._first:
                whole, most = self._first.pop(segment.request_id).append(segment.span), request.sampling.max_new_tokens
                if len(whole) > most:  # nobody takes more than was asked for
                    segment, whole = replace(segment, status=Status.LENGTH), part(whole, slice(most))
                ended.append(replace(segment, span=whole))
            elif segment.status is Status.LENGTH and len(segment.span) == self._after:
                first = inserted(segment.span, len(segment.span), self._output)
                self._first[request.id] = first
                limit = request.sampling.max_new_tokens + len(self._output)
                again.append(replace(request, prefix=first, sampling=replace(request.sampling, max_new_tokens=limit)))
            else:
                ended.append(segment)
        if again:
            self._engine.submit(again)
        return ended


@contextmanager
def tool_calls(output: str, after: int, seed: int) -> Iterator[None]:
    """Rollouts of training go through a `ToolEngine`; graders see what the policy wrote. One token per character."""
    honest, n = assemble.gathered, len(output)
    ids = presets.build_tokenizer()(output, add_special_tokens=False)["input_ids"]

    def gather(*about: Any) -> Any:
        inner = honest(*about)

        def collect(engine: Any, *args: Any, **options: Any) -> Any:
            wrapped: Any = ToolEngine(engine, ids, after)
            found = inner(wrapped, *args, **options)
            return [replace(r, text=r.text[:after] + r.text[after + n :]) if len(r.span) > after else r for r in found]

        return collect

    with (
        mock.patch.object(assemble, "gathered", gather),
        altered(lambda rollout, rng: with_output(rollout, output, after), seed),
    ):
        yield


# -- a vocabulary with two ways to write the same text -----------------------------------------------------------------

FIRST_PAIR = 8 + 256
PAIRS = presets.VOCAB_SIZE - FIRST_PAIR


def pairs_of(first: str, second: str, count: int = PAIRS) -> dict[tuple[int, int], int]:
    """`count` pairs of a character of `first` and one of `second` get a token of their own: (id, id) → id."""
    ids = presets.build_tokenizer().get_vocab()
    every = [(ids[a], ids[b]) for a in first for b in second]
    chosen = np.random.default_rng(0xBFE).permutation(len(every))[:count]
    return {every[at]: FIRST_PAIR + n for n, at in enumerate(chosen.tolist())}


def merged(ids: Sequence[int], pairs: Mapping[tuple[int, int], int]) -> list[int]:
    """Canonical ids: from the left, every pair that has a token becomes that token."""
    out: list[int] = []
    at = 0
    while at < len(ids):
        pair = pairs.get((ids[at], ids[at + 1])) if at + 1 < len(ids) else None
        out.append(ids[at] if pair is None else pair)
        at += 1 if pair is None else 2
    return out


@contextmanager
def two_spellings(pairs: Mapping[tuple[int, int], int], plain: float) -> Iterator[None]:
    """The tokenizer knows pair tokens. Demonstrations use them, but for a share `plain` of them, so that the policy has
    learnt to write both ways; prompts stay as they are."""
    demonstrations, build = PromptSource.demonstrations, presets.build_preset

    def shown(self: PromptSource, indices: Sequence[int], label_noise: float = 0.0) -> Any:
        found = demonstrations(self, indices, label_noise)
        return [(p, _spelled(r.tolist(), pairs, plain, i)) for (p, r), i in zip(found, indices, strict=True)]

    def built(*args: Any, **options: Any) -> Any:
        return build(*args, **options)[0], _tokenizer(pairs)

    with (
        mock.patch.object(PromptSource, "demonstrations", shown),
        mock.patch.object(loading, "build_preset", built),
    ):
        yield


def _spelled(ids: list[int], pairs: Mapping[tuple[int, int], int], plain: float, index: int) -> np.ndarray:
    rng = np.random.default_rng([0x5BE, index])
    apart = {token: pair for pair, token in pairs.items()}
    out: list[int] = []
    for token in merged(ids, pairs):
        out += apart[token] if token in apart and rng.random() < plain else [token]
    return np.array(out, np.int64)


def _tokenizer(pairs: Mapping[tuple[int, int], int]) -> PreTrainedTokenizerFast:
    vocabulary = presets.build_tokenizer().get_vocab()
    letter = {i: text for text, i in vocabulary.items()}
    vocabulary |= {letter[a] + letter[b]: token for (a, b), token in pairs.items()}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        additional_special_tokens=list(presets.SPECIAL_TOKENS[3:]),
        clean_up_tokenization_spaces=False,
    )
