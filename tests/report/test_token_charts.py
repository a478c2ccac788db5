"""A figure that shows other tokens than the run's is worse than none: these look at what is painted, not at the markup.

Not covered: how it looks; that was judged by eye in a browser.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from rollkeel.report import token_charts as charts
from rollkeel_doctor.traces.trace import Trace


def trace(q: list[float], o: list[float], steps: list[int], **changes: Any) -> Trace:
    """One token per sequence."""
    n = len(q)
    fields: dict[str, Any] = {
        "source": "test",
        "path": "",
        "starts": np.arange(n + 1),
        "step": np.array(steps),
        "id": np.arange(n),
        "group": np.arange(n),
        "reward": np.zeros(n),
        "prompt_length": np.ones(n, int),
        "token_ids": np.arange(n),
        "rollout_logprobs": np.log(np.array(q, np.float32)),
        "train_logprobs": np.log(np.array(o, np.float32)),
    }
    return Trace(**fields | changes)


def test_charts_appear_with_the_fields_they_need() -> None:
    q, o, steps = [0.5, 0.25, 0.9, 0.8], [0.5, 0.5, 0.9, 0.1], [1, 1, 7, 7]
    plain = trace(q, o, steps)
    titles = [c.title for c in charts.token_charts(plain)]
    assert titles == [
        "Probabilities under both engines, step 1",
        "Probabilities under both engines, step 7",
        "Log-probability gap of each token",
        "Probabilities near 1",
        "Ratio by probability",
        "Ratio and total variation by probability",
    ]
    assert charts.token_charts(plain.with_(train_logprobs=None)) == []
    assert charts.token_charts(plain.with_(train_logprobs=np.full(4, np.nan, np.float32))) == []
    dropped = plain.with_(keep=np.array([True, True, True, False]), entropy=np.ones(4, np.float32))
    assert [c.title for c in charts.token_charts(dropped)][6:] == [
        "Dropped tokens in the plane",
        "Probability of dropped tokens",
        "Entropy at dropped tokens",
    ]


@pytest.mark.parametrize("kept", [True, False])
def test_a_plane_without_a_kept_or_a_dropped_token_is_drawn(kept: bool) -> None:
    """A run whose masks drop everything needs its report most."""
    axes = Figure().add_subplot()
    charts._dropped_plane(axes, np.array([0.5, 0.9]), np.array([0.5, 0.1]), np.full(2, kept))
    assert sorted(len(dots.get_offsets()) for dots in axes.collections) == [0, 2]


def test_bins_hold_their_own_tokens() -> None:
    q = np.repeat([0.05, 0.55, 1.0], [charts.MIN_TOKENS, charts.MIN_TOKENS - 1, charts.MIN_TOKENS])
    assert [(centre, len(at)) for centre, at in charts._bins(q)] == [(0.05, 20), (0.95, 20)]


def test_spread_is_the_99th_percentile_of_each_bin() -> None:
    rng = np.random.default_rng(0)
    q, o = np.full(1000, 0.1), rng.uniform(0.05, 0.2, 1000)
    axes = Figure().add_subplot()
    charts._spreads(axes, q, o, o / q)
    ratio, tv = axes.get_lines()
    assert ratio.get_ydata() == pytest.approx([np.quantile(np.abs(o / q - 1), 0.99)])
    assert tv.get_ydata() == pytest.approx([np.quantile(np.abs(o - q), 0.99)])


def test_means_over_steps_are_of_dropped_and_kept_tokens_apart() -> None:
    axes = Figure().add_subplot()
    step, keep = np.array([3, 3, 3, 5]), np.array([True, False, False, True])
    charts._over_steps(axes, step, keep, np.array([1.0, 2.0, 4.0, 8.0]), "x")
    kept, dropped = (
        [np.asarray(line.get_xdata()).tolist(), np.asarray(line.get_ydata()).tolist()] for line in axes.get_lines()
    )
    assert kept == [[3, 5], [1.0, 8.0]]
    assert dropped == [[3], [3.0]]


def test_probabilities_rounded_to_bfloat16_stand_in_spikes() -> None:
    """64 numbers of bfloat16 per quarter: what is rounded fills one bar in eight, in its middle; what is not fills all."""
    rng = np.random.default_rng(1)
    exact = rng.uniform(0.88, 1.0, 20_000)
    rounded = torch.tensor(exact).bfloat16().double().numpy()
    axes = Figure().add_subplot()
    charts._spikes(axes, {"q": rounded, "o": exact})
    (q, edges, _), (o, _, _) = (patch.get_data() for patch in axes.patches)
    assert ((q > 0.5) == ((edges[:-1] + edges[1:]) / 2 * 256 % 1 < 1e-9))[16:].all()
    assert (o > 0.5)[16:-1].all()
    assert q[q > 0.5].mean() == pytest.approx(8 * o[16:].mean(), rel=0.1)


def test_gaps_are_means_of_their_own_step() -> None:
    axes = Figure().add_subplot()
    charts._gaps(axes, np.array([2, 2, 9]), np.array([0.5, -1.5, 0.25]))
    (line,) = axes.get_lines()
    assert [np.asarray(line.get_xdata()).tolist(), np.asarray(line.get_ydata()).tolist()] == [[2, 9], [1.0, 0.25]]
