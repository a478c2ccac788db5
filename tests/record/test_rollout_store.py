"""Analyzers and replays trust this file instead of the process that wrote it, so it must return every bit.

Not covered: files written by other versions.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollkeel.errors import BadInput, Corrupt
from rollkeel.record.rollout_store import per_token, read_step, to_rollouts, write_step
from rollkeel.types import GraderSpec, Prompt, Rollout, SamplingParams, Status, TokenSpan


def make_rollout(i: int, n: int, *, text: str = "", extras: bool = False, reward: float | None = 0.5) -> Rollout:
    rng = np.random.default_rng(i)
    span = TokenSpan(
        token_ids=rng.integers(0, 1 << 40, n),
        logprobs=-rng.random(n, np.float32),
        kept_mass=1 - rng.random(n, np.float32),
        versions=rng.integers(0, 9, n),
        kv_versions=rng.integers(0, 9, n),
        experts=rng.integers(0, 8, (n, 2, 3)).astype(np.int16) if extras else None,
        prompt_experts=rng.integers(0, 8, (2, 2, 3)).astype(np.int16) if extras else None,
        topk_ids=rng.integers(0, 99, (n, 5)) if extras else None,
        topk_logprobs=-rng.random((n, 5), np.float32) if extras else None,
    )
    prompt = Prompt(
        id=f"p{i}",
        index=i,
        text="1 + 1 = \x00\n<b>",
        token_ids=np.arange(3) + i,
        answer="2",
        grader=GraderSpec(name="task", options={"a": [1, 2.5]}),
        task="addition",
        metadata={"digits": 2, "nested": {"x": None}},
    )
    return Rollout(
        id=i,
        group=i // 2,
        member=i % 2,
        prompt=prompt,
        span=span,
        status=Status.FINISHED if reward is not None else Status.GRADER_FAILURE,
        sampling=SamplingParams(temperature=0.7, top_p=0.9, stop_token_ids=(1, 2), seed=2**63 + 5),
        engine="local",
        dtype="fp8",
        reward=reward,
        text=text,
        detail="said 2",
    )


def assert_same(a: Rollout, b: Rollout) -> None:
    for name in Rollout.__dataclass_fields__:
        if name not in ("span", "prompt"):
            assert getattr(a, name) == getattr(b, name), name
    for name in Prompt.__dataclass_fields__:
        if name != "token_ids":
            assert getattr(a.prompt, name) == getattr(b.prompt, name), name
    pairs = [(getattr(a.span, n), getattr(b.span, n)) for n in TokenSpan.__dataclass_fields__]
    for x, y in [*pairs, (a.prompt.token_ids, b.prompt.token_ids)]:
        assert (x is None) == (y is None)
        if x is not None:
            assert (x.dtype, x.shape, x.tobytes()) == (y.dtype, y.shape, y.tobytes())


@pytest.mark.parametrize("extras", [False, True])
def test_round_trip_is_exact(tmp_path: Path, extras: bool) -> None:
    rollouts = [make_rollout(i, n, extras=extras, text="é<script>") for i, n in enumerate([5, 0, 1, 130])]
    rollouts.append(make_rollout(9, 4, reward=None))
    write_step(tmp_path / "s.parquet", rollouts, step=12)
    back = to_rollouts(read_step(tmp_path / "s.parquet"))
    assert len(back) == len(rollouts)
    for a, b in zip(rollouts, back, strict=True):
        assert_same(a, b)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.text(), st.floats(allow_nan=False)), max_size=5))
def test_round_trip_of_anything(tmp_path_factory: pytest.TempPathFactory, items: list[tuple[int, str, float]]) -> None:
    path = tmp_path_factory.mktemp("r") / "s.parquet"
    rollouts = [make_rollout(i, n, text=text, reward=reward) for i, (n, text, reward) in enumerate(items)]
    write_step(path, rollouts, step=1)
    for a, b in zip(rollouts, to_rollouts(read_step(path)), strict=True):
        assert_same(a, b)


def test_denormal_and_extreme_float32_bits_survive(tmp_path: Path) -> None:
    values = np.array([-0.0, -1e-45, -3.4028235e38, -1.1754942e-38, -np.float32(1) / 3], np.float32)
    rollout = make_rollout(0, 5)
    span = TokenSpan(**{**vars(rollout.span), "logprobs": values})
    rollout = Rollout(**{**vars(rollout), "span": span})
    write_step(tmp_path / "s.parquet", [rollout], step=1, train_logprobs={0: values})
    table = read_step(tmp_path / "s.parquet")
    assert to_rollouts(table)[0].span.logprobs.tobytes() == values.tobytes()
    assert per_token(table, "train_logprobs")[0].tobytes() == values.tobytes()


def test_trainer_columns_are_null_for_rollouts_that_were_not_trained_on(tmp_path: Path) -> None:
    rollouts = [make_rollout(0, 3), make_rollout(1, 2)]
    write_step(
        tmp_path / "s.parquet",
        rollouts,
        step=1,
        train_logprobs={1: np.array([-1, -2], np.float32)},
        keep={1: np.array([True, False])},
        piece=lambda i: f"<{i % 3}>",
    )
    table = read_step(tmp_path / "s.parquet")
    assert list(per_token(table, "train_logprobs")) == [1]
    assert per_token(table, "keep")[1].tolist() == [True, False]
    assert per_token(table, "advantages") == {}
    assert table["pieces"].to_pylist() == [[f"<{i % 3}>" for i in r.span.token_ids] for r in rollouts]


def test_an_array_of_the_wrong_length_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep of rollout 0: expected 3 entries, got 2"):
        write_step(tmp_path / "s.parquet", [make_rollout(0, 3)], step=1, keep={0: np.ones(2, bool)})
    assert list(tmp_path.iterdir()) == []


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "s.parquet"
    with pytest.raises(BadInput, match=r"s\.parquet"):
        read_step(path)
    write_step(path, [make_rollout(i, 50) for i in range(20)], step=1)
    data = path.read_bytes()
    for cut in (0, 3, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:cut])
        with pytest.raises(Corrupt, match=r"s\.parquet"):
            read_step(path)
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"x": [1]}), path)
    with pytest.raises(Corrupt, match="column id is missing"):
        read_step(path)


def test_values_that_no_engine_wrote_are_one_line(tmp_path: Path) -> None:
    import pyarrow as pa

    path = tmp_path / "s.parquet"
    write_step(path, [make_rollout(i, 3) for i in range(2)], step=1)
    table = read_step(path)
    at = table.column_names.index("logprobs")
    for damaged, words in (
        (table.set_column(at, "logprobs", pa.array([[float("nan")] * 3] * 2, pa.list_(pa.float32()))), "finite"),
        (table.drop_columns(["member"]), "column 'member' is missing"),
        (
            table.set_column(table.column_names.index("sampling"), "sampling", pa.array(["{"] * 2)),
            "values that no engine wrote",
        ),
    ):
        with pytest.raises(Corrupt, match=words) as caught:
            to_rollouts(damaged)
        assert "\n" not in str(caught.value)
