"""The trainer's side of a probe: log-probs of whole sequences."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from transformers.modeling_utils import PreTrainedModel

from rollkeel.batch.packing import pack
from rollkeel.train.logprobs import PolicyForward
from rollkeel.types import FloatArray, IntArray


class SequenceScorer:
    """Scores sequences with a live model, by the same forward that training uses."""

    def __init__(self, model: PreTrainedModel, *, chunk: int | None = None) -> None:
        self._model, self._chunk = model, chunk
        self._forward: PolicyForward | None = None

    @torch.no_grad()
    def __call__(self, sequences: Sequence[IntArray]) -> list[FloatArray]:
        """Log-probs `[n − 1]` of tokens 1 … n − 1 of each sequence (n ≥ 2), temperature 1."""
        if self._forward is None:
            self._forward = PolicyForward(self._model, chunk=self._chunk)
        ends = np.cumsum([len(ids) - 1 for ids in sequences])
        starts = [0, *ends[:-1].tolist()]
        device = next(self._model.parameters()).device
        micro = pack(range(len(sequences)), sequences, [1] * len(sequences), starts, device)
        logprobs = self._forward.score(micro).logprobs.cpu().numpy()
        return np.split(logprobs, ends[:-1].tolist())
