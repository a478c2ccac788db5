"""Hooks of mkdocs: README.md and CONTRIBUTING.md become pages, and links that leave docs/ lead to them or become plain text.

A link to a file that is not there, and a built page that loads something from another host, are errors.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
ADDED = {"README.md": "project.md", "CONTRIBUTING.md": "contributing.md"}
LINK = re.compile(r"(?<!!)\[([^\]\n]*)\]\(([^)\s]+)\)")
LOADS = re.compile(
    r"<(?:script|img|iframe|source|audio|video)\b[^>]*\bsrc=[\"']?(?:https?:)?//[^\"'> ]+"
    r"|<link\b[^>]*\bhref=[\"']?(?:https?:)?//[^\"'> ]+"
    r"|(?:@import\s|url\()\s*[\"']?(?:https?:)?//[^\"') ]+",
    re.IGNORECASE,
)
log = logging.getLogger("mkdocs.hooks.site")


def on_files(files: Any, config: Any, **_: Any) -> Any:
    for source, page in ADDED.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    uri = page.file.src_uri
    source = next((source for source, added in ADDED.items() if added == uri), f"docs/{uri}")

    def moved(match: re.Match[str]) -> str:
        text, (path, hash_, anchor) = match[1], match[2].partition("#")
        if not path or ":" in path:
            return match[0]
        target = os.path.normpath(os.path.join(os.path.dirname(source), path))
        if not (ROOT / target).exists():
            log.warning("%s: %s is not there", source, target)
        there = ADDED.get(target) or (target.removeprefix("docs/") if target.startswith("docs/") else None)
        if there is None:
            return text if target.split("/")[-1] in text else f"{text} (`{target}`)"
        return f"[{text}]({os.path.relpath(there, os.path.dirname(uri) or '.')}{hash_}{anchor})"

    return LINK.sub(moved, markdown)


def on_post_build(config: Any, **_: Any) -> None:
    """Pages and style sheets load nothing from elsewhere. Links that a reader clicks may lead there."""
    files = [file for kind in ("*.html", "*.css") for file in Path(config.site_dir).rglob(kind)]
    found = [f"{file.name}: {hit[0]}" for file in files for hit in LOADS.finditer(file.read_text(encoding="utf-8"))]
    if found:
        raise PluginError(f"{len(found)} pages ask another host, first {found[0]}")
