"""Acceptance regions: what an objective does to one token, over the plane of its two probabilities, as SVG.

Every cell of the plane is a token that the objective itself is called on; no formula is written a second time here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from rollkeel.errors import BadInput
from rollkeel.objectives import Objective
from rollkeel.types import TokenBatch

CELLS = 100
"""Cells along each side of the plane."""
LENGTH = 64
"""Tokens of the sequence around the cell's token, for rules that judge whole sequences."""
NOT_DRAWN = {"random_rejection": "rejects trajectories at random, wherever their tokens lie"}
_EDGES = (0.5, 0.8, 1.25, 2.0, 5.0)
_CLASSES = (
    ("dropped", "#6b7280", 0.28),
    ("below 0.5", "#2b6cb0", 0.9),
    ("0.5 to 0.8", "#63a4dd", 0.9),
    ("0.8 to 1.25", "#58b368", 0.9),
    ("1.25 to 2", "#e6c34a", 0.9),
    ("2 to 5", "#e8883a", 0.9),
    ("above 5", "#d1495b", 0.9),
)
_INK = "#80848b"
_SIDE, _LEFT, _TOP, _GAP = 220, 52, 64, 70


@dataclass(frozen=True, kw_only=True)
class Region:
    """What multiplies A·∇log p in every cell: row = p, column = the other probability, both from 0 to 1.

    Of the policy term alone: penalties have no A.
    """

    name: str
    axis: str
    """What the horizontal axis is: `q`, or `o` when the objective compares p with o alone."""
    note: str
    """Where the third policy stands, and what surrounds the token."""
    positive: np.ndarray
    """`[CELLS, CELLS]` float, for A = +1; 0 where the token is dropped."""
    negative: np.ndarray
    """The same for A = −1."""


def region(objective: Objective) -> Region:
    """Call `objective` on every cell, for A = +1 and A = −1. Batch-level rules see each panel as one batch.

    Decoupled masks judge o against q, so there o = p; elsewhere p moves away from o = q.
    """
    anchor = objective.anchor
    decoupled = anchor.target == "old_logprobs"
    length = LENGTH if judges_sequences(objective) else 1
    if decoupled:
        axis, note = "q", "o = p"
    else:
        axis, note = ("q", "o = q") if "rollout_logprobs" in anchor.fields else ("o", "q = o")
    if length > 1:
        note += f"; the token stands in a sequence whose other {length - 1} tokens have p = o = q"
    return Region(
        name=objective.name,
        axis=axis,
        note=note,
        positive=_coefficients(objective, 1.0, decoupled, length),
        negative=_coefficients(objective, -1.0, decoupled, length),
    )


def judges_sequences(objective: Objective) -> bool:
    """True if a token's fate hangs on the rest of its sequence."""
    whole = objective.surrogate.name.startswith(("sequence", "geometric"))
    return whole or any(mask.level == "sequence" for mask in objective.masks)


def _coefficients(objective: Objective, advantage: float, decoupled: bool, length: int) -> np.ndarray:
    tokens = plane(advantage, decoupled, length)
    policy = replace(objective, gap_penalty=0.0, kl_coefficient=0.0, entropy_coefficient=0.0)
    (gradient,) = torch.autograd.grad(policy.loss(tokens), tokens.logprobs)
    found = (-gradient / advantage).reshape(CELLS, CELLS, length)[:, :, 0]
    return found.numpy()


def plane(advantage: float, decoupled: bool, length: int) -> TokenBatch:
    """One sequence of `length` tokens per cell, float64; the first is the cell's, the others have probability ½ throughout.

    All mass beside the sampled token sits on one other token, so that top-K divergences equal binary ones.
    """
    centres = (torch.arange(CELLS, dtype=torch.float64) + 0.5) / CELLS
    # A hair above the centre: no cell lies on a round threshold, where the last bit of a logarithm would decide.
    p = (centres * (1 + 1e-9))[:, None].expand(CELLS, CELLS)
    q = centres[None, :].expand(CELLS, CELLS)

    def filled(values: torch.Tensor) -> torch.Tensor:
        rest = torch.full((CELLS, CELLS, length - 1), 0.5, dtype=torch.float64)
        return torch.cat([values[:, :, None], rest], dim=2).reshape(-1)

    p, q = filled(p), filled(q)
    o = p if decoupled else q
    count = CELLS * CELLS * length
    batch = TokenBatch(
        logprobs=p.log().requires_grad_(),
        old_logprobs=o.log(),
        rollout_logprobs=q.log(),
        advantages=torch.full((count,), advantage, dtype=torch.float64),
        coefficients=torch.ones(count, dtype=torch.float64),
        sequence_ids=torch.arange(CELLS * CELLS).repeat_interleave(length),
        group_ids=torch.zeros(count, dtype=torch.long),
    )
    return replace(
        batch,
        token_ids=torch.zeros(count, dtype=torch.long),
        topk_ids=torch.ones(count, 1, dtype=torch.long),
        topk_logprobs=torch.log1p(-p)[:, None],
        old_topk_logprobs=torch.log1p(-o)[:, None],
        rollout_topk_logprobs=torch.log1p(-q)[:, None],
    )


def svg(drawn: Region) -> str:
    """A self-contained SVG, legible on light and dark pages."""
    width = _LEFT + 2 * _SIDE + _GAP + 20
    height = _TOP + _SIDE + 92
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        f' font-family="system-ui, sans-serif" font-size="11" fill="{_INK}" role="img" aria-label="{escape(drawn.name)}">',
        f'<text x="{_LEFT}" y="20" font-size="15" font-weight="600">{escape(drawn.name)}</text>',
        f'<text x="{_LEFT}" y="36">{escape(drawn.note)}</text>',
    ]
    for number, (title, values) in enumerate((("A &gt; 0", drawn.positive), ("A &lt; 0", drawn.negative))):
        parts.append(_panel(_LEFT + number * (_SIDE + _GAP), title, drawn.axis, values))
    parts.append(_legend(height - 34))
    return "\n".join([*parts, "</svg>\n"])


def classes(values: np.ndarray) -> np.ndarray:
    """Index into the legend of every cell: 0 dropped, then bands of what multiplies A·∇log p."""
    return np.where(values == 0, 0, 1 + np.searchsorted(_EDGES, values, side="right"))


def _panel(left: float, title: str, axis: str, values: np.ndarray) -> str:
    scale = _SIDE / CELLS
    lines = [f'<text x="{left + _SIDE / 2:g}" y="{_TOP - 8}" text-anchor="middle">{title}</text>']
    lines.append(f'<g transform="translate({left:g} {_TOP}) scale({scale:g})" shape-rendering="crispEdges">')
    for kind, path in rectangles(classes(values[::-1])).items():
        _, color, opacity = _CLASSES[kind]
        lines.append(f'<path fill="{color}" fill-opacity="{opacity:g}" d="{path}"/>')
    lines.append("</g>")
    bottom = _TOP + _SIDE
    lines.append(
        f'<path d="M{left:g} {bottom}L{left + _SIDE:g} {_TOP}" stroke="{_INK}" stroke-dasharray="4 4" fill="none"/>'
        f'<rect x="{left:g}" y="{_TOP}" width="{_SIDE}" height="{_SIDE}" fill="none" stroke="{_INK}"/>'
    )
    for tick in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0):
        x, y = left + tick * _SIDE, bottom - tick * _SIDE
        lines.append(f'<text x="{x:g}" y="{bottom + 15}" text-anchor="middle">{tick:g}</text>')
        lines.append(f'<text x="{left - 6:g}" y="{y + 4:g}" text-anchor="end">{tick:g}</text>')
    lines.append(f'<text x="{left + _SIDE / 2:g}" y="{bottom + 31}" text-anchor="middle">{axis}</text>')
    lines.append(f'<text x="{left - 34:g}" y="{_TOP + _SIDE / 2:g}">p</text>')
    return "\n".join(lines)


def _legend(y: float) -> str:
    lines, x = [f'<text x="{_LEFT}" y="{y:g}">what multiplies A·∇log p:</text>'], float(_LEFT)
    for label, color, opacity in _CLASSES:
        lines.append(
            f'<rect x="{x:g}" y="{y + 10:g}" width="10" height="10" fill="{color}" fill-opacity="{opacity:g}"/>'
        )
        lines.append(f'<text x="{x + 14:g}" y="{y + 19:g}">{label}</text>')
        x += 26 + 6 * len(label)
    return "\n".join(lines)


def rectangles(kinds: np.ndarray) -> dict[int, str]:
    """Class → SVG path of rectangles that tile its cells: runs along a row, grown over rows where they repeat."""
    paths: dict[int, list[str]] = {}
    open_runs: dict[tuple[int, int, int], int] = {}

    def close(run: tuple[int, int, int], end: int) -> None:
        first, last, kind = run
        start = open_runs.pop(run)
        paths.setdefault(kind, []).append(f"M{first} {start}h{last - first}v{end - start}h{first - last}z")

    for row, line in enumerate(kinds):
        cuts = [0, *(np.flatnonzero(np.diff(line)) + 1).tolist(), len(line)]
        runs = {(a, b, int(line[a])) for a, b in pairwise(cuts)}
        for run in sorted(open_runs.keys() - runs):
            close(run, row)
        for run in sorted(runs - open_runs.keys()):
            open_runs[run] = row
    for run in sorted(open_runs):
        close(run, len(kinds))
    return {kind: "".join(found) for kind, found in sorted(paths.items())}


def write(objectives: Mapping[str, Objective], out: Path) -> list[Path]:
    """Draw each objective into `out/<name>.svg` and a page of them all; returns the files, the page last.

    Raises `BadInput` if `out` cannot be written or nothing is left to draw.
    """
    drawable = {name: objective for name, objective in objectives.items() if name not in NOT_DRAWN}
    if not drawable:
        raise BadInput(f"nothing to draw: {'; '.join(f'{n} {NOT_DRAWN[n]}' for n in objectives)}")
    try:
        out.mkdir(parents=True, exist_ok=True)
        files = []
        for name, objective in drawable.items():
            files.append(out / f"{stem(name)}.svg")
            files[-1].write_text(svg(region(objective)), encoding="utf-8")
        files.append(out / "index.html")
        files[-1].write_text(page(list(drawable), [n for n in objectives if n in NOT_DRAWN]), encoding="utf-8")
    except OSError as error:
        raise BadInput(f"cannot write {out}: {error.strerror or error}; choose another --out") from None
    return files


def stem(name: str) -> str:
    """File name of an objective's figure: a colon would make the link to `module:function` another scheme."""
    return name.replace(":", ".")


def page(drawn: Sequence[str], left_out: Sequence[str] = ()) -> str:
    """HTML that shows the drawn files of its own folder."""
    figures = "\n".join(
        f'<figure id="{escape(name)}"><img src="{escape(stem(name))}.svg" alt="acceptance region of {escape(name)}"></figure>'
        for name in drawn
    )
    missing = "".join(f"<p>{escape(name)} has no region: it {escape(NOT_DRAWN[name])}.</p>\n" for name in left_out)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>Acceptance regions · rollkeel</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 1200px; margin: 0 auto; padding: 24px; }}
main {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(480px, 1fr)); gap: 16px; }}
figure {{ margin: 0; }} img {{ max-width: 100%; }}
</style>
</head>
<body>
<h1>Acceptance regions</h1>
<p>Each cell is a token with training probability p (up) and q (right, the policy that sampled it), handed to the objective
itself; the colour is what then multiplies A·∇log p. Grey is dropped. The dashed line is p = q.</p>
{missing}<main>
{figures}
</main>
</body>
</html>
"""
