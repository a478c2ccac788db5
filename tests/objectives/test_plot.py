"""A figure that shows another rule than the one that trains is a lie people remember, so regions are drawn by calling the objective.

Each cell against a formula written down here in numpy, the tiling of the plane by rectangles, the files and the command, and
the committed figures against what the command draws today. Not covered: how the pictures look.
"""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_run import cli

from rollkeel.errors import BadInput
from rollkeel.objectives import RECIPES, build
from rollkeel.report import regions
from rollkeel.report.regions import CELLS, NOT_DRAWN

OWN = [name for name, recipe in RECIPES.items() if recipe.__module__.startswith("rollkeel.")]
"""Without what other tests register."""
FIGURES = Path(__file__).resolve().parents[2] / "docs" / "figures"
CENTRES = (np.arange(CELLS) + 0.5) / CELLS
P, Q = np.meshgrid(CENTRES * (1 + 1e-9), CENTRES, indexing="ij")
U = P / Q


def kl(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a * np.log(a / b) + (1 - a) * np.log((1 - a) / (1 - b))


def clipped(sign: int, low: float, high: float) -> np.ndarray:
    return np.where(1 + high < U if sign > 0 else 1 - low > U, 0.0, U)


def away(sign: int) -> np.ndarray:
    return U > 1 if sign > 0 else U < 1


# name, options → what multiplies A·∇log p, given the sign of A; where the masks are decoupled, p stands for o and r = 1.
FORMULAS: dict[str, tuple[dict[str, Any], Callable[[int], np.ndarray]]] = {
    "grpo": ({}, lambda sign: clipped(sign, 0.2, 0.2)),
    "dapo": ({}, lambda sign: clipped(sign, 0.2, 0.28)),
    "tis": ({}, lambda sign: np.minimum(U, 2.0)),
    "icepop": ({}, lambda sign: np.where((U >= 0.5) & (U <= 5.0), U, 0.0)),
    "kpop": ({}, lambda sign: np.where(np.maximum(kl(P, Q), kl(Q, P)) <= 0.1, U, 0.0)),
    "kpop rollout": (
        {"mode": "rollout", "cap": 1.5},
        lambda sign: np.where(np.maximum(kl(P, Q), kl(Q, P)) <= 0.1, np.minimum(U, 1.5), 0.0),
    ),
    "pg_is": ({}, lambda sign: U),
    "pg_tis": ({}, lambda sign: np.minimum(U, 3.0)),
    "grpo_clip_higher": ({}, lambda sign: clipped(sign, 0.2, 0.28)),
    "dppo_binary_tv": ({}, lambda sign: np.where(away(sign) & (np.abs(P - Q) > 0.15), 0.0, U)),
    "dppo_binary_kl": ({}, lambda sign: np.where(away(sign) & (kl(Q, P) > 0.05), 0.0, U)),
    "dppo_topk_tv": ({}, lambda sign: np.where(away(sign) & (np.abs(P - Q) > 0.2), 0.0, np.minimum(U, 5.0))),
    "mask_negative": ({}, lambda sign: np.where((sign < 0) & (Q - P >= 0.5), 0.0, U)),
    "ipo": ({}, lambda sign: np.where(np.abs(P - Q) > 0.3, 0.0, U)),
    "relax_clip": ({}, lambda sign: np.where(Q < 0.1, U, clipped(sign, 0.2, 0.28))),
}


@pytest.mark.parametrize("case", FORMULAS)
def test_every_cell_is_what_the_formula_says(case: str) -> None:
    options, formula = FORMULAS[case]
    drawn = regions.region(build(case.split()[0], options))
    np.testing.assert_allclose(drawn.positive, formula(1), rtol=1e-9)
    np.testing.assert_allclose(drawn.negative, formula(-1), rtol=1e-9)


def test_a_sequence_rule_sees_the_token_inside_a_sequence() -> None:
    drawn = regions.region(build("gspo"))
    ratio = U ** (1 / regions.LENGTH)
    np.testing.assert_allclose(drawn.positive, np.where(ratio > 1 + 4e-4, 0.0, ratio), rtol=1e-9)
    np.testing.assert_allclose(drawn.negative, np.where(ratio < 1 - 3e-4, 0.0, ratio), rtol=1e-9)
    assert "63 tokens" in drawn.note
    assert "sequence" not in regions.region(build("kpop")).note


def test_the_third_policy_is_named() -> None:
    found = {name: regions.region(build(name)) for name in ("grpo", "kpop", "pg_is", "minirl")}
    assert {n: (r.axis, r.note) for n, r in found.items()} == {
        "grpo": ("o", "q = o"),
        "kpop": ("q", "o = p"),
        "pg_is": ("q", "o = q"),
        "minirl": ("q", "o = q"),
    }


def test_plane_holds_every_pair_once() -> None:
    tokens = regions.plane(-1.0, decoupled=False, length=3)
    first = torch.stack([tokens.logprobs.detach().exp(), tokens.rollout_logprobs.exp()], 1)[::3]
    assert len({tuple(pair.tolist()) for pair in first.round(decimals=6)}) == CELLS * CELLS
    assert torch.equal(tokens.sequence_ids.bincount(), torch.full((CELLS * CELLS,), 3))
    assert tokens.topk_logprobs is not None
    mass = tokens.topk_logprobs.detach()[:, 0].exp() + tokens.logprobs.detach().exp()
    torch.testing.assert_close(mass, torch.ones_like(mass))


@pytest.mark.parametrize("seed", range(5))
def test_rectangles_tile_the_plane(seed: int) -> None:
    generator = np.random.default_rng(seed)
    kinds = generator.integers(0, 3, (9, 7)) if seed else np.zeros((9, 7), int)
    seen = np.full(kinds.shape, -1)
    for kind, path in regions.rectangles(kinds).items():
        for x, y, width, height in re.findall(r"M(\d+) (\d+)h(\d+)v(\d+)h-\d+z", path):
            block = np.s_[int(y) : int(y) + int(height), int(x) : int(x) + int(width)]
            assert (seen[block] == -1).all()
            seen[block] = kind
    np.testing.assert_array_equal(seen, kinds)
    assert seed or regions.rectangles(kinds) == {0: "M0 0h7v9h-7z"}


def test_bands_of_the_legend() -> None:
    values = np.array([0.0, 0.1, 0.5, 0.79, 0.8, 1.0, 1.25, 1.9, 2.0, 4.9, 5.0, 400.0])
    assert regions.classes(values).tolist() == [0, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]


def test_files_are_valid_and_refer_to_each_other(tmp_path: Path) -> None:
    names = ("grpo", "kpop", "random_rejection")
    files = regions.write({name: build(name) for name in names}, tmp_path / "a" / "b")
    assert [f.name for f in files] == ["grpo.svg", "kpop.svg", "index.html"]
    for file in files[:-1]:
        root = ElementTree.fromstring(file.read_text())
        assert root.tag.endswith("svg")
        assert file.stem in "".join(root.itertext())
        assert len(file.read_bytes()) < 40_000
    page = files[-1].read_text()
    assert re.findall(r'src="([^"]+)"', page) == ["grpo.svg", "kpop.svg"]
    assert "random_rejection has no region" in page


def test_nothing_to_draw_and_an_unwritable_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="nothing to draw: random_rejection rejects trajectories at random"):
        regions.write({"random_rejection": build("grpo")}, tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="choose another --out"):
        regions.write({"grpo": build("grpo")}, tmp_path / "file")


@pytest.mark.parametrize("name", sorted(set(OWN) - set(NOT_DRAWN)))
def test_committed_figure_is_what_is_drawn_today(name: str) -> None:
    """If this fails after a change that was meant: `rollkeel objectives plot --out docs/figures`."""
    assert (FIGURES / f"{name}.svg").read_text(encoding="utf-8") == regions.svg(regions.region(build(name)))


def test_committed_page_shows_every_recipe() -> None:
    drawn = [name for name in OWN if name not in NOT_DRAWN]
    assert (FIGURES / "index.html").read_text(encoding="utf-8") == regions.page(drawn, sorted(NOT_DRAWN))
    assert {f.stem for f in FIGURES.glob("*.svg")} == set(drawn)


def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = cli(capsys, "objectives", "list")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines() if line[0] != " "] == list(RECIPES)
    code, out, _ = cli(capsys, "objectives", "show", "kpop", "phi=0.5")
    assert code == 0
    assert "phi=0.1" in out
    assert "phi: 0.5" in out
    code, out, _ = cli(capsys, "objectives", "plot", "kpop", "phi=0.5", "--out", tmp_path / "figures")
    assert (code, out.strip()) == (0, str(tmp_path / "figures" / "index.html"))
    assert (tmp_path / "figures" / "kpop.svg").read_text() == regions.svg(regions.region(build("kpop", {"phi": 0.5})))


def test_commands_take_compositions_and_a_user_s_own_function(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, _ = cli(capsys, "objectives", "show", "composed", "masks=[ratio_band]")
    assert code == 0
    assert 'masks: ["ratio_band"]' in out
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "plotted_own.py").write_text(
        "from rollkeel.objectives import kpop\n\n\ndef strict(*, phi=0.01):\n    return kpop(phi=phi)\n"
    )
    (tmp_path / "plotted_bad.py").write_text("def f(:\n")
    code, out, _ = cli(capsys, "objectives", "show", "plotted_own:strict", "phi=0.02")
    assert code == 0
    assert "Defaults: phi=0.01" in out
    assert "phi: 0.02" in out
    assert cli(capsys, "objectives", "plot", "plotted_own:strict", "--out", "figures")[0] == 0
    assert (tmp_path / "figures" / "plotted_own.strict.svg").is_file()  # a colon would be read as a scheme
    assert 'src="plotted_own.strict.svg"' in (tmp_path / "figures" / "index.html").read_text()
    code, _, err = cli(capsys, "objectives", "show", "plotted_bad:f")
    assert (code, err.count("\n")) == (2, 1)
    assert "SyntaxError" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["show", "kpopp"], "did you mean kpop?"),
        (["show", "kpop", "mode=rolout"], "got 'rolout'; did you mean rollout?"),
        (["show", "icepop", "phi=0.1"], "not an option of icepop; known: low, high"),
        (["show", "composed", "masks=[ratio_bnd]"], "did you mean ratio_band?"),
        (["show", "nowhere/mine.py:half"], "no such file"),
        (["show", "kpop", "phii=1"], "objective.phii: not an option of kpop; did you mean phi?"),
        (["plot", "grpo", "kpopp"], "did you mean kpop?"),
        (["plot", "kpop", "phi=-1"], "kpop.phi"),
    ],
)
def test_a_mistake_is_one_line(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = cli(capsys, "objectives", *words, *(["--out", str(tmp_path / "x")] if words[0] == "plot" else []))
    assert code == 2
    assert message in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
