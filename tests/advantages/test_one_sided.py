"""Training on one sign only is how the lab isolates what negative advantages do: the others must weigh nothing and still count.

Not covered: what such training does; that is the lab's.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tiny_run import TINY, cli

from rollkeel import advantages
from rollkeel.record.rollout_store import read_step


def test_each_sign() -> None:
    values = [0.5, -0.25, 0.0, -3.0]
    assert advantages.one_sided(values, "all").tolist() == values
    assert advantages.one_sided(values, "negative").tolist() == [0.0, -0.25, 0.0, -3.0]
    assert advantages.one_sided(values, "positive").tolist() == [0.5, 0.0, 0.0, 0.0]


@pytest.mark.slow
def test_in_a_run_the_others_become_0_and_stay_in_the_batch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {}
    for only in ("all", "negative", "positive"):
        run = tmp_path / only
        words = (*TINY, "run.steps=1", "eval.every=0", f"experiment.advantages={only}", f"run.dir={run}")
        assert cli(capsys, "train", *words)[0] == 0
        table = read_step(run / "rollouts" / "step_000001.parquet")
        found[only] = [np.array(row) for row in table["advantages"].to_pylist()]
        kept = [row is not None for row in table["keep"].to_pylist()]
        assert all(kept), "every rollout was in an update"
    for both, negative, positive in zip(*found.values(), strict=True):
        assert negative.tolist() == np.minimum(both, 0).tolist()
        assert positive.tolist() == np.maximum(both, 0).tolist()
    assert np.concatenate(found["negative"]).min() < 0 < np.concatenate(found["positive"]).max()
