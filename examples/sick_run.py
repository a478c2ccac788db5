"""Draws the picture of docs/guide/sick-run.md from two run folders: python examples/sick_run.py HEALTHY SICK OUT.svg"""

from __future__ import annotations

import sys

import matplotlib

import rollkeel
from rollkeel.report.charts import series, smooth


def main(healthy: str, sick: str, out: str) -> None:
    """Reward and entropy over steps, both runs in both panels."""
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "rollkeel"
    figure = Figure(figsize=(7.2, 2.6), layout="constrained")
    for number, (metric, title) in enumerate((("reward/mean", "reward"), ("policy/entropy", "entropy, nats")), 1):
        axes = figure.add_subplot(1, 2, number, title=title, xlabel="step")
        for name, folder in (("healthy", healthy), ("sick", sick)):
            rows = rollkeel.Run(folder).metrics().select(["step", metric]).to_pylist()
            steps, values = series(rows, metric)
            axes.plot(steps, smooth(values), label=name)
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False)
    figure.savefig(out, metadata={"Date": None})


if __name__ == "__main__":
    main(*sys.argv[1:])
