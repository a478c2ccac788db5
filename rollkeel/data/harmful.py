"""The place for a filter of harmful content: a list of words, or a function of the user's own."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from rollkeel import plugins
from rollkeel.data.options import HarmfulOptions
from rollkeel.errors import BadInput

Filter = Callable[[Mapping[str, str]], object]
"""A row's texts by column → the reason to remove it, or something falsy."""


def filters(options: HarmfulOptions) -> list[Filter]:
    """What the options ask for, ready to be called. Raises `BadInput` for a hook or file that is not there."""
    keywords = [] if options.keywords is None else [_keywords(Path(options.keywords))]
    return keywords + ([] if options.hook is None else [plugins.load(options.hook, "harmful.hook")])


def _keywords(file: Path) -> Filter:
    try:
        words = sorted(
            {" ".join(line.casefold().split()) for line in file.read_text(encoding="utf-8-sig").splitlines()} - {""}
        )
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"harmful.keywords {file}: cannot be read: {error}") from None
    if not words:
        raise BadInput(f"harmful.keywords {file}: holds no words; write a word or phrase per line")
    alternatives = "|".join(r"\s+".join(map(re.escape, word.split())) for word in words)
    pattern = re.compile(rf"(?<!\w)(?:{alternatives})(?!\w)")

    def find(row: Mapping[str, str]) -> str | None:
        for text in row.values():
            if match := pattern.search(text.casefold()):
                return f"keyword {' '.join(match[0].split())!r}"
        return None

    return find
