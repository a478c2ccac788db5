"""Triton kernels for tensors of a GPU. Each has a PyTorch path beside it, which everything else takes."""

from __future__ import annotations

import functools
import importlib.util
import os

import torch

SWITCH = "ROLLKEEL_TRITON"
"""0: never. 1: on a CPU too, which takes Triton's interpreter (TRITON_INTERPRET=1 before triton is imported)."""


def taken(tensor: torch.Tensor) -> bool:
    """Whether kernels compute with `tensor`."""
    switch = os.environ.get(SWITCH, "")
    return (tensor.is_cuda or switch == "1") and switch != "0" and _installed()


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None
