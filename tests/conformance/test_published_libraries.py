"""What docs/conformance.md says of other libraries is what they do: every row of it is made anew from their sources.

Their sources are not part of this repository: `ROLLKEEL_CHECKOUTS` names a folder with a checkout of each, at the commits of
that page. Without it only the loader is tested. Not covered: their trainers around the loss.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from checkouts import checkout

from rollkeel.conformance import check
from rollkeel.conformance.adapters import LIBRARIES, claims
from rollkeel.conformance.adapters.published import modules
from rollkeel.errors import BadInput

PAGE = (Path(__file__).parents[2] / "docs" / "conformance.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (\w+) \| `(.+?)` \| `(\S+?)`(.*?) \| (.+?) \| (\d*) ?\|$", PAGE, re.M)
FOUND_BY_ITSELF = {
    ("verl", "vanilla"): "dual clip",
    ("areal", "rejection_sampling binary_kl, upper 0.1"): "clamped to 1 - 1e-8",
    ("areal", "m2_threshold 0.04, eps_clip off"): "over the kept tokens",
    ("ms_swift", "rollout_importance_sampling_mode=sequence_mask"): "geometric mean",
    ("stable_rl", "dppo_topk_tv"): "no bin of its own",
    ("verl", "reinforce_plus_plus_baseline"): "reinforce_plus_plus_tokens",
    ("nemo_rl", "reference_policy_kl_type=k3"): "score function",
}


@pytest.mark.checkout
@pytest.mark.parametrize("library", LIBRARIES)
def test_the_page_says_what_the_library_does(library: str) -> None:
    made = []
    for claim in claims(library, checkout(library)):
        verdict = check(claim.function, claim.recipe, claim.options, name=claim.name)
        words = [("denominator " if f.kind == "denominator" else "") + f.says for f in verdict.findings]
        options = "".join(f", {k} {v}" for k, v in claim.options.items())
        wrong = str(len(verdict.differences) or "")
        made.append((library, claim.name, claim.recipe, options, "; ".join(words) or "agrees", wrong))
    assert made == [row for row in ROWS if row[0] == library]


def test_the_page_has_every_library_and_the_known_differences() -> None:
    assert {row[0] for row in ROWS} == set(LIBRARIES)
    told = {(row[0], row[1]): row[4] for row in ROWS}
    for place, words in FOUND_BY_ITSELF.items():
        assert words in told[place]


def library(folder: Path) -> None:
    """A package whose loss stands among imports of what is not installed."""
    (folder / "fakelib" / "core").mkdir(parents=True)
    (folder / "fakelib" / "__init__.py").write_text("raise RuntimeError('an engine would start here')")
    (folder / "fakelib" / "core" / "numbers.py").write_text("def total(x, mask):\n    return (x * mask).sum()\n")
    (folder / "fakelib" / "core" / "loss.py").write_text(
        "import enginexyz\nfrom enginexyz.kernels import fused, Config\nfrom fakelib.workers import Actor\n"
        "from fakelib.core.numbers import total\n\n"
        "@enginexyz.remote\nclass Base(Actor, Config['x']):\n    version = enginexyz.__version__\n\n"
        "@fused(block=2)\ndef loss(p, a, mask):\n    return -total(p * a, mask)\n"
    )


def test_a_loss_is_taken_out_of_a_library_that_cannot_be_installed(tmp_path: Path) -> None:
    library(tmp_path)
    (loss,) = modules(("fakelib.core.loss",), tmp_path)
    p = torch.ones(2, requires_grad=True)
    assert loss.loss(p, torch.tensor([1.0, 2.0]), torch.tensor([1.0, 0.0])).item() == -1.0
    assert not [name for name in sys.modules if name.split(".")[0] in ("fakelib", "enginexyz")]
    with pytest.raises(ImportError):
        import enginexyz  # type: ignore[import-not-found]  # noqa: F401


def test_what_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"no verl/trainer/ppo/core_algos\.py in it; is it verl's repository"):
        claims("verl", tmp_path)
    with pytest.raises(BadInput, match="did you mean slime"):
        claims("slim")
    with pytest.raises(BadInput, match="prime_rl does not import"):
        claims("prime_rl")
