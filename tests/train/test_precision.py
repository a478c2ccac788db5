"""A low-precision weight that forgets what an update is too small to show learns nothing: masters must be those of float32.

Real optimizers, real trainers, on the CPU. Not covered: CUDA kernels, whether a float16 run learns as well as a float32 one.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_trainer import make_batch

from rollkeel import objectives
from rollkeel.config import ModelConfig, TrainConfig
from rollkeel.errors import BadInput, NonFinite
from rollkeel.loop.assemble import policy_of
from rollkeel.loop.check import validate
from rollkeel.models.loading import load_policy
from rollkeel.models.numerics import OVERRIDE, precision
from rollkeel.models.packed import _all_heads
from rollkeel.recipe import load
from rollkeel.train import adamw, optimizer
from rollkeel.train.adamw import AdamW, master, put_back
from rollkeel.train.optimizer import Schedule, Stepper
from rollkeel.train.state import load_state, save_state
from rollkeel.train.trainer import LocalTrainer

LOW = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
SHAPES = ((33, 17), (64, 64), (7,), (16, 4, 5))


def drawn(dtype: torch.dtype) -> list[torch.nn.Parameter]:
    g = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter((torch.randn(shape, generator=g) * 0.02).to(dtype)) for shape in SHAPES]


def masters_of(made: AdamW) -> list[torch.Tensor]:
    return [master(p.detach().flatten(), getattr(made.rest(p), "flatten", lambda: None)()) for p in made.parameters]


@LOW
def test_masters_are_bit_for_bit_those_of_float32_adamw(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adamw, "CHUNK", 128)  # parameters in several parts, and several parameters in one call
    low, plain = drawn(dtype), drawn(dtype)
    full = [torch.nn.Parameter(p.detach().float()) for p in low]
    begun = torch.cat([p.detach().flatten() for p in full])
    made = AdamW(low, betas=(0.9, 0.95), weight_decay=0.1)
    groups = [{"params": [p for p in full if p.dim() > 1]}, {"params": [full[2]], "weight_decay": 0.0}]
    torchs = torch.optim.AdamW(groups, lr=1e-6, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    lossy = torch.optim.AdamW(plain, lr=1e-6, betas=(0.9, 0.95), fused=True)
    g = torch.Generator().manual_seed(1)
    before = after = begun
    for _ in range(200):
        for p, q, r in zip(low, full, plain, strict=True):
            p.grad, q.grad = (given := torch.randn(p.shape, generator=g)), given.clone()
            r.grad = given.to(dtype)
        made.step(1e-6)
        torchs.step()
        lossy.step()
        after = torch.cat(masters_of(made))
        assert torch.equal(after, torch.cat([p.detach().flatten() for p in full]))
        assert (after != before).float().mean() > 0.99  # a moment that passes 0 may leave a weight alone once
        before = after
    assert (after != begun).all()
    for p, rounded in zip(low, masters_of(made), strict=True):
        distance = (p.detach().flatten().double() - rounded.double()).abs()
        assert torch.equal(distance, (rounded.to(dtype).double() - rounded.double()).abs()), "not the nearest"
    still = torch.cat([r.detach().float().flatten() for r in plain]) == begun
    assert still.float().mean() > (0.5 if dtype == torch.bfloat16 else 0.1), "without masters nothing would be lost"


def test_every_float32_has_a_bfloat16_and_a_rest() -> None:
    highs = torch.tensor([0x0000, 0x0001, 0x3F80, 0x3F81, 0x7F7E, 0x8000, 0xBD23, 0xBD24, 0xFF7E], dtype=torch.int64)
    patterns = (highs[:, None] * 65536 + torch.arange(65536)).flatten()
    values = torch.where(patterns >= 2**31, patterns - 2**32, patterns).to(torch.int32).view(torch.float32)
    weight, rest = torch.empty(len(values), dtype=torch.bfloat16), torch.empty(len(values), dtype=torch.int16)
    put_back(values, weight, rest)
    assert torch.equal(master(weight, rest).view(torch.int32), values.view(torch.int32))
    other = weight.view(torch.int16) != values.bfloat16().view(torch.int16)
    assert torch.equal(other, (patterns % 131072) == 0x8000), "ties alone round otherwise than to even"


@pytest.mark.parametrize(("dtype", "total"), [(torch.float32, 16), (torch.bfloat16, 16), (torch.float16, 18)])
def test_bytes_of_a_parameter(dtype: torch.dtype, total: int) -> None:
    p = torch.nn.Parameter(torch.randn(64, 64).to(dtype))
    stepper = Stepper([("w", p)], Schedule(lr=1e-3))
    (p * stepper.scale / 64).sum().backward()
    stepper.step()  # makes the moments
    (p * stepper.scale / 64).sum().backward()
    held = [p, p.grad, *stepper.adamw.state[p].values()]
    assert sum(t.nbytes for t in held if t is not None and t.dim()) == total * p.numel()


def test_micro_batches_add_up_in_float32() -> None:
    sums = []
    for exact in (True, False):
        p = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        if exact:
            adamw.sum_in_float32([p])
        for _ in range(300):
            p.sum().backward()
        assert p.grad is not None
        sums.append(p.grad.tolist())
    assert sums == [[300.0] * 3, [256.0] * 3]


def trainer(dtype: str, processes: int = 1, **options: Any) -> LocalTrainer:
    config = TrainConfig.model_validate({"warmup_steps": 0, "lr": 1e-3, "processes": processes, **options})
    return LocalTrainer(
        load_policy(ModelConfig.model_validate({"dtype": dtype})), config, temperature=1.0, total_updates=10
    )


def updated(t: LocalTrainer, times: int, seed: int = 0) -> list[dict[str, float]]:
    objective = objectives.kpop(phi=0.1)
    return [t.update(make_batch(seed=seed + i), objective, old_is_current=True).metrics for i in range(times)]


def exact(t: LocalTrainer) -> torch.Tensor:
    return torch.cat(masters_of(t._stepper.adamw)).clone()


def flat(t: LocalTrainer) -> torch.Tensor:
    return torch.cat([p.detach().float().flatten() for p in t.model.parameters()])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_an_update_at_1e_6_is_applied(dtype: str) -> None:
    t = trainer(dtype, lr=1e-6)
    weights, masters = flat(t), exact(t)
    (metrics,) = updated(t, 1)
    moved = float((exact(t) != masters).float().mean())
    assert metrics["optimizer/changed_share"] == pytest.approx(moved, abs=0.03)
    assert moved > 0.8  # all but experts that no token went to
    assert (flat(t) != weights).float().mean() < 0.5 * moved


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gradients_are_near_those_of_float32_and_the_scale_keeps_small_ones(dtype: str) -> None:
    norms = [updated(trainer(d), 1)[0]["optimizer/grad_norm"] for d in ("float32", dtype)]
    assert norms[1] == pytest.approx(norms[0], rel=0.03)
    lost = []
    for scale in (1.0, optimizer.FIRST_SCALE):
        p = torch.nn.Parameter(torch.ones(8, dtype=torch.float16))
        adamw.sum_in_float32([p])
        ((p.float() * 3e-8).sum() * scale).backward()
        assert p.grad is not None
        lost.append(bool((p.grad / scale - 3e-8).abs().max() > 1e-9))
    assert lost == [True, False]


def test_an_overflow_of_float16_skips_the_update_and_the_scale_recovers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer, "GROWTH", 2)
    t = trainer("float16")
    updated(t, 1)
    t._stepper.scale = high = 2.0**30
    before, state = (
        exact(t),
        {n: {k: v.clone() for k, v in s.items()} for n, s in t._stepper.state_dict()["moments"].items()},
    )
    (metrics,) = updated(t, 1)
    assert (metrics["optimizer/skipped"], metrics["optimizer/loss_scale"], t.version) == (1.0, high, 2)
    assert "optimizer/grad_norm" not in metrics
    assert metrics["optimizer/changed_share"] == 0
    assert torch.equal(exact(t), before)
    now = t._stepper.state_dict()["moments"]
    assert all(torch.equal(now[n][k], v) for n, s in state.items() for k, v in s.items())
    told = updated(t, 30)
    scales = [m["optimizer/loss_scale"] for m in told]
    assert scales[0] == high / 2
    halved = [b == a / 2 for a, b in itertools.pairwise(scales)]
    assert halved == [bool(m["optimizer/skipped"]) for m in told[:-1]]
    assert any(b == 2 * a for a, b in itertools.pairwise(scales)), "the scale does not double again"
    assert sum(m["optimizer/skipped"] for m in told) < 30
    assert not torch.equal(exact(t), before)


def test_what_no_scale_makes_finite_is_refused() -> None:
    p = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    stepper = Stepper([("w", p)], Schedule(lr=1e-3))
    for left in range(15, -1, -1):
        assert stepper.scale == 2.0**left
        p.grad = torch.tensor([1.0, float("inf")])
        if left:
            assert stepper.step()["optimizer/skipped"] == 1
    with pytest.raises(NonFinite, match="gradient of w is not finite"):
        stepper.step()
    assert p.tolist() == [1, 1]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_resumed_trainer_goes_on_bit_for_bit(dtype: str, tmp_path: Path) -> None:
    whole = trainer(dtype)
    updated(whole, 2)
    whole._stepper.scale *= 1 if dtype == "bfloat16" else 4
    save_state(tmp_path, whole.state_dict())
    resumed = trainer(dtype)
    assert resumed.load_state_dict(load_state(tmp_path)) == []
    assert updated(resumed, 2, seed=2) == updated(whole, 2, seed=2)
    save_state(tmp_path / "a", whole.state_dict())
    save_state(tmp_path / "b", resumed.state_dict())
    for name in ("tensors.safetensors", "tree.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_a_checkpoint_without_masters_resumes_from_its_weights_and_says_so() -> None:
    old = trainer("bfloat16")
    updated(old, 2)
    state = old.state_dict()
    moments = state["optimizer"]["moments"]
    state["optimizer"] = {
        "updates": 2,
        "moments": {
            n: {k: v.bfloat16() if k != "step" else v for k, v in s.items() if k != "rest"} for n, s in moments.items()
        },
    }
    new = trainer("bfloat16")
    (line,) = new.load_state_dict(state)
    assert f"no float32 masters of {len(moments)} weights" in line
    assert torch.equal(exact(new), flat(old))
    assert all(s["exp_avg"].dtype == torch.float32 for s in new._stepper.state_dict()["moments"].values())
    updated(new, 1)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_helper_processes_add_up_to_one(dtype: str) -> None:
    one, two = trainer(dtype), trainer(dtype, processes=2)
    try:
        for a, b in zip(updated(one, 3), updated(two, 3), strict=True):
            assert a["optimizer/grad_norm"] == pytest.approx(b["optimizer/grad_norm"], rel=1e-2)
    finally:
        two.close()
    differ = (exact(one) - exact(two)).abs() > 5e-4  # half a step: Adam makes one of a gradient near 0, of either sign
    assert differ.float().mean() < 0.02


def test_keys_for_all_heads_attend_as_shared_ones() -> None:
    q, k, v = torch.randn(9, 6, 8), torch.randn(9, 2, 8), torch.randn(9, 2, 8)
    q_, k_, v_, all_k, all_v = (t.transpose(0, 1) for t in (q, k, v, _all_heads(k, q), _all_heads(v, q)))
    attend = torch.nn.functional.scaled_dot_product_attention
    assert torch.equal(attend(q_, all_k, all_v, is_causal=True), attend(q_, k_, v_, is_causal=True, enable_gqa=True))


def test_tf32_is_what_the_config_says_and_its_children_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU alone can show it; here what torch was told, in this process and in one that it starts."""
    monkeypatch.setenv(OVERRIDE, "1")  # of somebody's shell
    look = "import torch; print(torch.backends.cuda.matmul.allow_tf32)"
    try:
        for on, said in ((False, "highest"), (True, "high"), (False, "highest")):
            policy = policy_of(load(None, ["model.path=preset:tiny-qwen3", f"run.tf32={on}"]))
            assert precision(policy.model)["float32_products"] == said
            child = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
            assert child.stdout.strip() == str(on)
    finally:
        torch.set_float32_matmul_precision("highest")
    with pytest.raises(BadInput, match=r"run\.parity=true: expected run\.tf32=False"):
        validate(load(None, ["run.parity=true", "run.tf32=true"]))
