"""A guide whose links lead nowhere, or that leaves out a function, sends people away. `make docs` asks the same of the built site.

Not covered: whether what the pages say is true; their code blocks, which `.ci/readme_blocks.py --guide` runs; the site, which needs
mkdocs.
"""

from __future__ import annotations

import inspect
import re
from functools import cache
from pathlib import Path

import pytest

from rollkeel import api

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
NAV = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]


@cache
def anchors(path: Path) -> frozenset[str]:
    """Of the headings of a page, as GitHub and the site name them."""
    headings = re.findall(r"^#+ +(.*)$", FENCE.sub("", path.read_text(encoding="utf-8")), re.MULTILINE)
    return frozenset(re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings)


def broken(text: str, page: Path) -> list[str]:
    """Links of `text`, which stands in `page`, to a file or heading that is not there."""
    found: list[str] = []
    for link in LINK.findall(re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if ":" not in path and not (target.exists() and (not anchor or anchor in anchors(target))):
            found.append(link)
    return found


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES], ids=lambda p: p.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    assert broken(page.read_text(encoding="utf-8"), page) == []


def test_a_broken_link_is_found() -> None:
    text = "[a](guide/nowhere.md) [b](doctor.md#causes) [c](doctor.md#cures) [d](#here) `[e](f.md)`\n```text\n[g](h.md)\n```\n"
    assert broken(text, DOCS / "index.md") == ["guide/nowhere.md", "doctor.md#cures", "#here"]


def test_every_page_is_in_the_navigation_once() -> None:
    listed = re.findall(r": ([\w/-]+\.md)$", NAV, re.MULTILINE)
    there = [str(page.relative_to(DOCS)) for page in PAGES]
    assert sorted(listed) == sorted([*there, "project.md", "contributing.md"])


def test_every_public_name_is_on_the_python_page() -> None:
    page = (DOCS / "guide" / "python.md").read_text(encoding="utf-8")
    functions = [
        n for n, f in inspect.getmembers(api, inspect.isfunction) if f.__module__ == api.__name__ and n[0] != "_"
    ]
    names = [*(f"rollkeel.{name}(" for name in functions if name != "config"), "rollkeel.api.config(", "rollkeel.Run("]
    names += [f"`Run.{name}" for name in vars(api.Run) if name[0] != "_"]
    assert len(names) > 10
    assert [name for name in names if name not in page and name.replace("`Run", ", `Run") not in page] == []


def test_the_guide_has_blocks_that_run() -> None:
    pages = re.findall(r"guide/[\w-]+\.md", NAV)
    blocks = [kind for page in pages for kind in re.findall(r"^```(\w+)$", (DOCS / page).read_text(), re.MULTILINE)]
    assert sum(kind in ("sh", "python") for kind in blocks) > 8
    assert set(blocks) <= {"sh", "python", "text", "console", "yaml"}
