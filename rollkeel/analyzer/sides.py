"""The ways of computing tokens that can be compared: the trainer, the engine as it serves, the engine in one prefill.

Each is captured by plain PyTorch, operation by operation. Where compiled kernels or fused passes do the real work, they run
too, over the same tokens, and their log-probs stand beside the captured ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from rollkeel.analyzer.capture import Capture, Recorder, Tokens, spread
from rollkeel.analyzer.watch import modules_watched, operations_watched
from rollkeel.engines.kv import PagedCache, Step
from rollkeel.engines.prefill import prefill_step
from rollkeel.engines.weights import apply_update
from rollkeel.models.compiled import CompiledDecode, compiled_decode, suits
from rollkeel.models.forward import FastForward, supports
from rollkeel.models.forward_transformers import TransformersForward
from rollkeel.models.numerics import mode_of
from rollkeel.models.packed import PackedModel
from rollkeel.sync.publish import full_update
from rollkeel.train.head import head_of
from rollkeel.train.logprobs import token_logprobs
from rollkeel.train.probe import SequenceScorer

BLOCK = 16
"""Tokens per KV block."""
PREFILL_TOKENS = 4096
CHUNK = 512
"""Tokens whose logits exist together."""
Progress = Callable[[str], None]


class Side(Protocol):
    """A way of computing tokens."""

    name: str

    def capture(self, tokens: Tokens, layers: Sequence[int] = (), progress: Progress | None = None) -> Capture:
        """What it has after every operation; `layers`: of these only."""
        ...


class TrainerSide:
    """The trainer's packed forward."""

    def __init__(self, model: Any, name: str | None = None, *, parity: bool = False) -> None:
        """`parity`: in the arithmetic of `run.parity`, which needs no second look by another path."""
        self.model = model
        self.mode = mode_of(model.dtype)
        self.parity = parity
        self.name = name or f"trainer {self.mode}"

    @torch.no_grad()
    def capture(self, tokens: Tokens, layers: Sequence[int] = (), progress: Progress | None = None) -> Capture:
        """See `Side.capture`."""
        tell(progress, f"{self.name}: one packed pass")
        device = self.model.get_input_embeddings().weight.device
        ids, positions = tokens.ids.to(device), tokens.positions.to(device)
        recorder = Recorder(len(tokens), layers)
        hidden = self._hidden(ids, positions, tokens, recorder)
        head, places = head_of(self.model), tokens.predicted.nonzero()[:, 0].to(device)
        if (None, "final_norm") not in recorder.values:
            recorder(None, "final_norm", hidden)
        found, _, _ = token_logprobs(
            hidden.index_select(0, places - 1),
            head.weight,
            ids[places],
            chunk=CHUNK,
            entropy=False,
            bias=head.bias,
            scale=head.scale,
            softcap=head.softcap,
            parity=self.parity,
        )
        logprobs = torch.full((len(tokens),), float("nan"))
        logprobs[tokens.predicted] = found.cpu()
        return Capture(
            name=self.name,
            mode=self.mode,
            model_type=self.model.config.get_text_config().model_type,
            tokens=tokens,
            values=recorder.values,
            logprobs=logprobs,
            path_logprobs=None
            if self.parity
            else spread(tokens, SequenceScorer(self.model, chunk=CHUNK)(tokens.sequences)),
        )

    def _hidden(self, ids: torch.Tensor, positions: torch.Tensor, tokens: Tokens, recorder: Recorder) -> torch.Tensor:
        if self.parity:
            from rollkeel.models.parity_packed import ParityModel

            return ParityModel(self.model)(ids, positions, tokens.starts, see=recorder)
        packed = PackedModel(self.model, fuse=False)
        if supports(self.model.config.get_text_config()) and packed.varlen:
            watched = operations_watched(self.model, packed.backbone, recorder)
        else:
            see = recorder if packed.varlen else _unpadded(recorder, tokens)
            watched = modules_watched(self.model, packed.backbone, see)
        with watched:
            return packed(ids, positions, tokens.starts)


def _unpadded(recorder: Recorder, tokens: Tokens) -> Callable[[int | None, str, torch.Tensor], None]:
    """Takes `[S, Lmax, D]` of the padded batch."""
    lengths = torch.tensor([len(s) for s in tokens.sequences])
    inside = torch.arange(int(lengths.max())) < lengths[:, None]

    def see(layer: int | None, name: str, value: torch.Tensor) -> None:
        recorder(layer, name, value[inside.to(value.device)])

    return see


def engine_forward(
    hf_config: Any,
    weights: Iterable[tuple[str, torch.Tensor]],
    mode: str,
    device: torch.device | str = "cpu",
    *,
    parity: bool = False,
) -> FastForward | TransformersForward:
    """The embedded engine's forward holding published `weights` (checkpoint name, tensor), rounded as `mode` rounds."""
    text = hf_config.get_text_config()
    kind = FastForward if supports(text) else TransformersForward
    if parity:
        from rollkeel.models.parity import ParityForward as kind
    forward = kind(text, mode, torch.device(device))
    apply_update(full_update(weights, 0), forward.destinations, mode)
    return forward


@torch.no_grad()
def prefill_logprobs(
    forward: FastForward | TransformersForward, tokens: Tokens, temperature: float = 1.0
) -> torch.Tensor:
    """`[T]` log-probs of given tokens by the engine's forward in one prefill; NaN for the first of each sequence."""
    return _Pass(forward, tokens, None, None, temperature).run(True, lambda _: None)


class EngineSide:
    """The embedded engine: prompts by prefill and responses by decoding, as it serves; or everything in one prefill."""

    def __init__(
        self, forward: Any, hf_config: Any, mode: str, *, prefill: bool = False, name: str | None = None
    ) -> None:
        self.forward = forward
        self.mode = mode
        self.prefill = prefill
        self.model_type = hf_config.get_text_config().model_type
        self.name = name or f"{'prefill' if prefill else 'engine'} {mode}"

    @torch.no_grad()
    def capture(self, tokens: Tokens, layers: Sequence[int] = (), progress: Progress | None = None) -> Capture:
        """See `Side.capture`."""
        recorder = Recorder(len(tokens), layers)
        with _watched(self.forward, recorder):
            logprobs = _Pass(self.forward, tokens, recorder, None).run(self.prefill, self._progress(progress, "plain"))
        path = None
        if not self.prefill and suits(self.forward):
            served = _Pass(self.forward, tokens, None, compiled_decode)
            path = served.run(False, self._progress(progress, "compiled"))
        return Capture(
            name=self.name,
            mode=self.mode,
            model_type=self.model_type,
            tokens=tokens,
            values=recorder.values,
            logprobs=logprobs,
            path_logprobs=path,
        )

    def _progress(self, progress: Progress | None, kind: str) -> Progress:
        return lambda text: tell(progress, f"{self.name} ({kind}): {text}")


@contextmanager
def _watched(forward: Any, recorder: Recorder) -> Iterator[None]:
    if isinstance(forward, FastForward):
        forward.observe = recorder
        try:
            yield
        finally:
            forward.observe = None
    else:
        with modules_watched(forward._model, forward._base, recorder):
            yield


def _softmax(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return logits.log_softmax(-1).gather(1, ids)


@dataclass
class _Given:
    """What a compiled step reads of the engine's slots."""

    token: torch.Tensor
    position: torch.Tensor
    table: torch.Tensor


class _Pass:
    """One computation of all tokens through a paged cache, whose tokens are given instead of sampled."""

    def __init__(
        self, forward: Any, tokens: Tokens, recorder: Recorder | None, compiled: Any, temperature: float = 1.0
    ) -> None:
        self.forward = forward
        self.tokens = tokens
        self.recorder = recorder
        self.temperature = temperature
        self.device = next(iter(forward.destinations.values())).device
        counts = [-(-len(s) // BLOCK) for s in tokens.sequences]
        ends = np.cumsum([1, *counts]).tolist()  # block 0 stands where a sequence has none
        self.blocks = [list(range(a, b)) for a, b in itertools.pairwise(ends)]
        cache, self.logprobs_of = PagedCache, _softmax
        if getattr(forward, "fixed_order", False):
            from rollkeel.engines.parity import ParityCache as cache
            from rollkeel.models.parity import logprobs

            self.logprobs_of = logprobs
        self.cache = cache(ends[-1], BLOCK, forward.dtype, self.device)
        longest = max(map(len, tokens.sequences))
        self.compiled: CompiledDecode | None = compiled(forward, self.cache, longest) if compiled else None
        self.hidden: torch.Tensor | None = None
        self.logprobs = torch.full((len(tokens),), float("nan"))

    def run(self, prefill: bool, progress: Progress) -> torch.Tensor:
        """`[T]` log-probs, NaN for the first token of each sequence."""
        lengths = [len(s) if prefill else p - 1 for s, p in self._pairs()]
        progress("prefill")
        self._prefill(lengths)
        if not prefill:
            self._decode(progress)
        return self.logprobs

    def _pairs(self) -> Iterator[tuple[np.ndarray, int]]:
        return zip(self.tokens.sequences, self.tokens.prompt_lengths, strict=True)

    def _prefill(self, lengths: Sequence[int]) -> None:
        """The first `lengths` tokens of each sequence."""
        waiting = [i for i in range(len(lengths)) if lengths[i]]
        while waiting:
            count = 1
            while (
                count < len(waiting) and (count + 1) * max(lengths[i] for i in waiting[: count + 1]) <= PREFILL_TOKENS
            ):
                count += 1
            group, waiting = waiting[:count], waiting[count:]
            jobs = [(self.blocks[i], self.tokens.sequences[i][: lengths[i]], 0) for i in group]
            rows = torch.cat([torch.arange(lengths[i]) + self.tokens.starts[i] for i in group])
            if (
                self.compiled is not None
            ):  # it stores keys and values alone: nobody asks for log-probs inside of prompts
                self.compiled.prefill(jobs)
                continue
            ids, positions, step = prefill_step(jobs, BLOCK, 0, self.device)
            self._done(rows, self._hidden(ids, positions, step, rows))

    def _decode(self, progress: Progress) -> None:
        """The last token of each prompt and all behind it, one per step, all sequences side by side."""
        width = max(map(len, self.blocks))
        table = torch.tensor([[*b, *[0] * (width - len(b))] for b in self.blocks], device=self.device)
        lengths = torch.tensor([len(s) for s in self.tokens.sequences])
        first, starts = torch.tensor(self.tokens.prompt_lengths) - 1, torch.tensor(self.tokens.starts[:-1])
        ids, steps = self.tokens.ids, int((lengths - first).max())
        for at in range(steps):
            if at % 64 == 0:
                progress(f"decode step {at} of {steps}")
            active = (first + at < lengths).nonzero()[:, 0]
            positions = (first + at)[active]
            rows = starts[active] + positions
            token, here = ids[rows].to(self.device), positions.to(self.device)
            if self.compiled is not None:
                given: Any = _Given(token, here, table[active])
                hidden = torch.from_numpy(self.compiled.hidden(np.arange(len(active)), given))
            else:
                part = table[active][:, : int(positions.max()) // BLOCK + 1]
                written = part.gather(1, (here // BLOCK)[:, None])[:, 0] * BLOCK + here % BLOCK
                step = Step(slots=written, table=part, query_positions=here[:, None], scatter=None)
                hidden = self._hidden(token, here, step, rows)
            self._done(rows, hidden)

    def _hidden(self, ids: torch.Tensor, positions: torch.Tensor, step: Step, rows: torch.Tensor) -> torch.Tensor:
        cache, scale = self.cache, getattr(self.forward, "scale", 1.0)
        if self.recorder is not None:
            self.recorder.rows = rows

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
            return cache.attend(step, layer, q, k, v, **{"scale": scale, **options})

        return self.forward.hidden(ids, positions, attend)

    def _done(self, rows: torch.Tensor, hidden: torch.Tensor) -> None:
        """Log-probs of the tokens behind `rows` that a sequence still has."""
        if self.recorder is not None and not isinstance(self.forward, FastForward):
            self.recorder(None, "final_norm", hidden)
        ends = torch.tensor(self.tokens.starts[1:]) - 1
        inner = (~torch.isin(rows, ends)).nonzero()[:, 0]
        targets = self.tokens.ids[rows[inner] + 1]
        for part in inner.split(CHUNK):
            logits = self.forward.logits(hidden[part.to(self.device)]) / self.temperature
            wanted = targets[: len(part)].to(self.device)
            targets = targets[len(part) :]
            self.logprobs[rows[part] + 1] = self.logprobs_of(logits, wanted[:, None])[:, 0].cpu()


def tell(progress: Progress | None, text: str) -> None:
    """`progress` may be nobody."""
    if progress is not None:
        progress(text)
