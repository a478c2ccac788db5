"""Kernels compile for cards that are not here: the interpreter accepts types, shapes and loops that the compiler refuses.

Not covered: whether what was compiled is right, and how fast it is.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from typing import Any

import pytest

from rollkeel.models import checksum
from rollkeel.models.gpu.attention import EXACT, MERGED, NO_WINDOW, SPLIT, STAGES, TILE_BYTES, WARPS, _blocks
from rollkeel.models.gpu.sizes import power

SHARED = 99 * 1024
"""Bytes of shared memory that a program has on the smallest of the cards."""
TORCH = {"bf16": 2, "fp16": 2, "fp32": 4}
SCRIPT = """
from importlib import import_module
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

for place, name, types, constants in {kernels!r}:
    kernel = getattr(import_module("rollkeel.models.gpu." + place), name)
    options = {{each: constants.pop(each) for each in ("num_warps", "num_stages") if each in constants}}
    signature = {{each: "constexpr" if each in constants else types[each] for each in kernel.arg_names}}
    aligned = {{(i,): [["tt.divisibility", 16]] for i, each in enumerate(signature.values()) if each[0] == "*"}}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    try:
        made = compile(source, target=GPUTarget("cuda", {capability}, 32), options=options)
        print("compiled", made.metadata.shared, len(made.asm["cubin"]))
    except Exception as error:
        print(" ".join(str(error).split()))
"""


def attention(dtype: str, width: int, single: bool, size: int = 16) -> tuple[str, str, dict[str, str], dict[str, Any]]:
    types = dict.fromkeys(("query", "keys", "values", "sinks", "out"), "*" + dtype)
    types |= {"table": "*i64", "positions": "*i64", "parts": "*fp32", "sums": "*fp32", "scale": "fp32"}
    types |= dict.fromkeys(("table_row", "splits", "query_row", "query_head"), "i32")
    constants: dict[str, Any] = dict.fromkeys(("WIDTH", "VALUES", "WIDTH_2", "VALUES_2"), width)
    constants |= {
        "KV": 8,
        "GROUP": 4,
        "SIZE": size,
        "WINDOW": NO_WINDOW,
        "SINKS": single,
        "SINGLE": single,
        "WIDEN": False,
    }
    most, warps, stages = EXACT if dtype == "fp32" else (TILE_BYTES, WARPS, STAGES)
    tile = max(16, min(64, most // (width * TORCH[dtype])))
    constants |= {
        "SPLIT": SPLIT,
        "TILE": tile,
        "BLOCKS": _blocks(tile, size),
        "COUNT": power(SPLIT // size),
        "ROWS": 16,
    }
    constants |= {"num_warps": warps * max(1, width // 128), "num_stages": stages}
    return "attention", "_attend", types, constants


def merge(dtype: str) -> tuple[str, str, dict[str, str], dict[str, Any]]:
    types = {"positions": "*i64", "out": "*" + dtype, "parts": "*fp32", "sums": "*fp32", "splits": "i32"}
    return (
        "attention",
        "_merge",
        types,
        {"HEADS": 32, "VALUES": 96, "WINDOW": 128, "SPLIT": SPLIT, "MERGED": MERGED, "VALUES_2": 128},
    )


def rotate(dtype: str, width: int, norm: bool) -> tuple[str, str, dict[str, str], dict[str, Any]]:
    types = dict.fromkeys(("qkv", "norms", "cos", "sin", "query", "keys", "values"), "*" + dtype)
    constants = {"Q": 14, "KV": 2, "SIZE": 16, "WIDTH": width, "NORM": norm, "HEADS": 8, "WIDTH_2": 128}
    return "decode", "_rotate", {**types, "slots": "*i64", "eps": "fp32"}, constants


def add_norm(dtype: str, width: int) -> tuple[str, str, dict[str, str], dict[str, Any]]:
    types = dict.fromkeys(("x", "y", "weight", "total", "normed"), "*" + dtype)
    constants = {"WIDTH": width, "WIDTH_2": power(width)}
    return "decode", "_add_norm", {**types, "eps": "fp32"}, constants


def statistics(vocabulary: int, cap: float) -> tuple[str, str, dict[str, str], dict[str, Any]]:
    types = dict.fromkeys(("logits", "normaliser", "logprobs", "entropies", "topk"), "*fp32")
    types |= {"targets": "*i64", "ids": "*i64", "scale": "fp32", "cap": "fp32"}
    constants = {"V": vocabulary, "K": 20, "K_2": 32, "CAPPED": cap > 0, "ENTROPY": True, "BLOCK": 4096}
    return "logprobs", "_statistics", types, constants


def gradient(vocabulary: int, cap: float, out: str) -> tuple[str, str, dict[str, str], dict[str, Any]]:
    types = dict.fromkeys(("logits", "normaliser", "entropies", "d_logprobs", "d_entropies"), "*fp32")
    types |= {"out": "*" + out, "targets": "*i64", "scale": "fp32", "cap": "fp32"}
    constants = {"V": vocabulary, "CAPPED": cap > 0, "OF_LOGPROBS": True, "OF_ENTROPIES": True, "BLOCK": 4096}
    return "logprobs", "_gradient", types, constants


def sums(bits: str) -> tuple[str, str, dict[str, str], dict[str, Any]]:
    types = {"elements": "*" + bits, "sums": "*i64", "count": "i32", "offset": "i64", "base": "i64"}
    numbers = {"STEP": checksum._STEP, "HIGH": checksum._HIGH, "FLIP": checksum._FLIP}
    return "checksum", "_sum", types, {**numbers, "MASK": 2 ** int(bits[1:]) - 1, "BLOCK": 4096}


def layer(name: str, **constants: int | bool) -> tuple[str, str, dict[str, str], dict[str, Any]]:
    """Of the trainer's layers, in bfloat16."""
    types = dict.fromkeys(("x", "weight", "out", "grad", "dx", "cos", "sin", "gate", "up", "d_gate", "d_up"), "*bf16")
    types |= {"parts": "*fp32", "eps": "fp32", "rows": "i32", "count": "i32", "angle_row": "i32"}
    return "layers", name, types, constants


def exact(name: str, dtype: str, **constants: int | bool) -> tuple[str, str, dict[str, str], dict[str, Any]]:
    """Of the arithmetic of `run.parity`."""
    types = dict.fromkeys(("x", "weight", "query", "wide"), "*" + dtype) | dict.fromkeys(("keys", "values"), "*fp32")
    types |= dict.fromkeys(("starts", "table", "sequence", "seen", "chosen"), "*i64")
    types |= {
        "logits": "*fp32",
        "weights": "*fp32",
        "tops": "*fp32",
        "totals": "*fp64",
        "scale": "fp32",
        "table_row": "i32",
    }
    types["out"] = "*fp32" if name == "_matmul" else "*" + dtype
    return "parity", name, types, constants


def update(decays: bool) -> tuple[str, str, dict[str, str], dict[str, Any]]:
    types = {"table": "*i64", "owners": "*i64", "corrections": "*fp32"}
    types |= dict.fromkeys(("lr", "weight_decay", "beta1", "beta2", "eps"), "fp32")
    return "adamw", "_update", types, {"DECAYS": decays, "BLOCK": 1024}


ROWS = {"logits": "*fp32", "tops": "*fp32", "totals": "*fp32", "uniform": "*fp64", "ids": "*i64", "logprobs": "*fp32"}

KERNELS = {
    "attention bf16": attention("bf16", 128, False),
    "attention fp16, one split": attention("fp16", 64, True),
    "attention fp32, wide": attention("fp32", 256, False),
    "attention bf16, widest": attention("bf16", 512, False),
    "attention bf16, odd blocks": attention("bf16", 128, False, 12),
    "merge": merge("bf16"),
    "rotation bf16": rotate("bf16", 128, True),
    "rotation fp32, no power of two": rotate("fp32", 96, False),
    "gate": (
        "decode",
        "_gate",
        {"wide": "*bf16", "out": "*bf16", "stride": "i32"},
        {"WIDTH": 3072, "ONCE": False, "BLOCK": 1024},
    ),
    "sum and norm bf16": add_norm("bf16", 1024),
    "sum and norm fp32, wide": add_norm("fp32", 5120),
    "log-probs": statistics(151_936, 0.0),
    "log-probs, capped": statistics(1001, 30.0),
    "their gradient": gradient(151_936, 30.0, "fp32"),
    "their gradient in bf16": gradient(151_936, 0.0, "bf16"),
    "their gradient in fp16": gradient(1001, 0.0, "fp16"),
    "AdamW": update(True),
    "AdamW of vectors": update(False),
    "checksum of 16 bits": sums("i16"),
    "checksum of 64 bits": sums("i64"),
    "sums of a draw": ("sampling", "_sums", {**ROWS, "blocks": "i32"}, {"V": 151_936, "BLOCK": 2048}),
    "norm": layer("_norm", D=4096, D_2=4096),
    "its gradient": layer("_norm_gradient", D=4096, D_2=4096, ROWS=16),
    "rotary": layer("_rotary", COUNT=16, D=128, HALF_2=64, NORM=True, ROWS=32),
    "the gradient of rotary": layer("_rotary_gradient", COUNT=16, D=128, HALF_2=64, NORM=True, ROWS=32),
    "SwiGLU": layer("_swiglu", BLOCK=2048),
    "the gradient of SwiGLU": layer("_swiglu_gradient", BLOCK=2048),
    "product of parity": exact("_matmul", "bf16", N=1024, K=3072, ROWS=64, COLUMNS=64, DEEP=64, WIDEN=False),
    "product of parity in float32": exact("_matmul", "fp32", N=1024, K=3072, ROWS=64, COLUMNS=64, DEEP=64, WIDEN=False),
    "attention of parity": exact("_attend", "bf16", KV=8, GROUP=2, SIZE=16, D=128, D_2=128, ROWS=16, TILE=64),
    "routing of parity": exact("_route", "fp32", E=128, E_2=128, K=8, K_2=8, GIVEN=False, NORMALISE=True),
    "normaliser of parity": exact("_normaliser", "fp32", V=151_936, BLOCK=1024),
    "gate of parity": (
        "decode",
        "_gate",
        {"wide": "*bf16", "out": "*bf16", "stride": "i32"},
        {"WIDTH": 3072, "ONCE": True, "BLOCK": 1024},
    ),
    "draw": ("sampling", "_draw", {**ROWS, "blocks": "i32"}, {"V": 151_936, "BLOCK": 2048, "BLOCKS_2": 128}),
}


@pytest.fixture(scope="module", params=[90, pytest.param(80, marks=pytest.mark.slow)])
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the compiler says of each kernel for a capability. In a process of its own: in this one Triton interprets."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    script = SCRIPT.format(kernels=list(KERNELS.values()), capability=request.param)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=600,
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(zip(KERNELS, done.stdout.splitlines(), strict=True))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="Triton's assembler for another machine")
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_compiles_for_cards(name: str, compiled: dict[str, str]) -> None:
    assert compiled[name].startswith("compiled "), compiled[name]
    _, shared, length = compiled[name].split()
    assert int(shared) < SHARED
    assert int(length) > 0
