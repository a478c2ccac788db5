"""The judge for architectures without definitions here: the checkpoint's own modules in float32, fed what a side recorded.

Attention, feed-forward part and layer are told apart, and nothing inside of them. What the dtype explains is measured by the
same modules in the side's dtype.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rollkeel.analyzer.capture import Capture, Key, Tokens, order_of
from rollkeel.analyzer.reference import FLOOR, LOGPROB_FLOOR, Local, judged, local
from rollkeel.analyzer.watch import decoder_layers, parts_of
from rollkeel.models.names import checkpoint_views
from rollkeel.models.numerics import activation_rounder, compute_dtype, is_quantised, stays_precise, weight_rounder
from rollkeel.models.packed import PackedModel
from rollkeel.train.head import head_of
from rollkeel.train.logprobs import token_logprobs

SLACK = 4
"""Operations whose roundings add up inside of a module: the floor is so many times that of one."""


class ModuleReference:
    """Judges captures of any causal language model of transformers."""

    def __init__(self, model: Any) -> None:
        """`model`: the checkpoint, as published. It is copied, not changed."""
        self.model = model

    @torch.no_grad()
    def judge(self, capture: Capture) -> Iterator[Local]:
        """Every module of `capture` in the order of computing, then its log-probs."""
        working = compute_dtype(capture.mode)
        right, right_logprobs = _forced(_held(self.model, capture.mode, torch.float32), capture)
        rounder, noisy = activation_rounder(capture.mode), _held(self.model, capture.mode, working)
        if rounder is not None:
            _round_inputs(noisy, rounder)
        noise, noise_logprobs = (right, right_logprobs)
        if rounder is not None or working != torch.float32:
            noise, noise_logprobs = _forced(noisy, capture)
        for key in order_of(right):
            wanted = right[key].double()
            yield judged(key, capture, wanted, [noise[key].double() - wanted], SLACK * FLOOR[working])
        places = capture.tokens.predicted & capture.logprobs.isfinite()
        each = (capture.logprobs - right_logprobs)[places].double().abs()
        noise_rms = (noise_logprobs - right_logprobs)[places].double().square().mean().sqrt()
        expected = max(float(noise_rms), SLACK * LOGPROB_FLOOR[working])
        yield local((None, "logprobs"), float(each.square().mean().sqrt()), expected, each)


def _held(model: Any, mode: str, dtype: torch.dtype) -> Any:
    """A copy whose weights are rounded as `mode` rounds them, computing in `dtype`."""
    out = copy.deepcopy(model).cpu().eval()
    rounder = weight_rounder(mode)
    stored = compute_dtype(mode)
    for name, view in checkpoint_views(out).items():
        if rounder is not None and is_quantised(name, view):
            view.copy_(rounder(view))
        view.copy_(view.to(stored))
    for parameter in out.parameters():  # not the buffers: rotary frequencies stay float32
        parameter.data = parameter.data.to(dtype)
    return out


def _round_inputs(model: Any, rounder: Callable[[torch.Tensor], torch.Tensor]) -> None:
    for name, module in model.named_modules():
        projection = isinstance(module, torch.nn.Linear) or type(module).__name__.endswith("Experts")
        if "layers." in name and projection and not stays_precise(name):
            module.register_forward_pre_hook(lambda m, args: (rounder(args[0]), *args[1:]))


def _forced(model: Any, capture: Capture) -> tuple[dict[Key, torch.Tensor], torch.Tensor]:
    """What each module gives when everything before it gave what `capture` recorded, and `[T]` log-probs likewise."""
    packed, tokens = PackedModel(model, fuse=False), capture.tokens
    with _replaced(model, packed, capture) as found:
        found[None, "final_norm"] = packed(tokens.ids, tokens.positions, tokens.starts)
    head, places = head_of(model), tokens.predicted.nonzero()[:, 0]
    states = capture.values[None, "final_norm"][places - 1].to(head.weight.dtype)
    about: dict[str, Any] = {"bias": head.bias, "scale": head.scale, "softcap": head.softcap}
    logprobs = torch.full((len(tokens),), float("nan"))
    logprobs[places] = token_logprobs(states, head.weight, tokens.ids[places], entropy=False, **about)[0]
    return found, logprobs


@contextmanager
def _replaced(model: Any, packed: PackedModel, capture: Capture) -> Iterator[dict[Key, torch.Tensor]]:
    found: dict[Key, torch.Tensor] = {}
    handles = []

    def watch(module: torch.nn.Module, key: Key) -> None:
        def hook(module: torch.nn.Module, args: Any, out: Any) -> Any:
            value = out[0] if isinstance(out, tuple) else out
            inside = None if packed.varlen else _inside(capture.tokens)
            found[key] = (value if inside is None else value[inside]).reshape(len(capture.tokens), -1).clone()
            if (recorded := capture.values.get(key)) is None or recorded.shape != found[key].shape:
                return None
            new = value.clone()
            if inside is None:
                new = recorded.to(value.dtype).view(value.shape)
            else:
                new[inside] = recorded.to(value.dtype)
            return (new, *out[1:]) if isinstance(out, tuple) else new

        handles.append(module.register_forward_hook(hook))

    watch(model.get_input_embeddings(), (None, "embedding"))
    for index, layer in enumerate(decoder_layers(packed.backbone)):
        for name, part in parts_of(layer).items():
            watch(part, (index, name))
        watch(layer, (index, "layer"))
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _inside(tokens: Tokens) -> torch.Tensor:
    """`[S, Lmax]` bool: places of the padded batch that are no padding."""
    lengths = torch.tensor([len(s) for s in tokens.sequences])
    return torch.arange(int(lengths.max())) < lengths[:, None]
