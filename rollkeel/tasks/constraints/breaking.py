"""Small ways to spoil a text, from which near misses are picked: those that break one constraint and leave the others."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

ENGLISH = "The river is in the valley of the town and it is not far from the bridge."
_MARKS = ("[", "*", "<", "`", "|", "***", '"', "P.S.", "p.s.", "P.S", ".", "Section ", "{", "\n\n", "-")
_LINES = (["* more"], ["***", "More."], ["", "More."], ["more"])


def changes(text: str, constraint: Mapping[str, Any]) -> Iterator[str]:
    """Candidates, those first that are meant for the kind of `constraint`."""
    yield from _terms(text, constraint)
    yield from _marks(text)
    yield from _lines(text)
    yield from _words(text)
    yield from _case(text)


def _terms(text: str, constraint: Mapping[str, Any]) -> Iterator[str]:
    """Words and letters that must or must not be there, put in or taken out; another language."""
    named = [constraint.get("keyword", ""), *constraint.get("keywords", [])]
    for word in filter(None, named):
        yield re.sub(re.escape(word), "s" * len(word), text, count=1, flags=re.IGNORECASE)
        yield re.sub(re.escape(word), "s" * len(word), text, flags=re.IGNORECASE)
    letter = constraint.get("letter", "")
    if letter:
        yield re.sub(letter, "u", text, count=3, flags=re.IGNORECASE)
    if "language" in constraint:
        yield from (" ".join([ENGLISH] * n) for n in (1, 2, 4))
        yield "\n***\n".join([ENGLISH] * (text.count("***") + 1))
        yield f'"{ENGLISH}"'
    pieces = text.split(" ")
    middle = len(pieces) // 2
    before = pieces[:middle]
    word = pieces[middle]
    after = pieces[middle + 1 :]
    marks = [",", "A", ";", *constraint.get("marks", []), *constraint.get("forbidden_words", []), letter, named[0]]
    for mark in filter(None, marks):
        yield " ".join([*before, word + mark, *after])
        yield " ".join([*before, mark, *after])
        yield " ".join([*before, mark * 4, word, *after])


def _marks(text: str) -> Iterator[str]:
    for mark in _MARKS:
        yield text.replace(mark, "", 1)
        yield text.replace(mark, "")
    yield re.sub(r'"count": (\d+)', r'"count": "\1"', text)
    yield re.sub(r"yes|no|maybe", "mine", text, count=1)
    yield text.replace("python", "rust")
    for mark in ("******", "***"):
        first = text.split(mark)[0]
        yield f"{first}{mark}{first}"


def _lines(text: str) -> Iterator[str]:
    lines = text.split("\n")
    yield from ("\n".join([*lines[:i], *lines[i + 1 :]]) for i in range(len(lines)))
    for i in (0, 1, len(lines) - 1, len(lines)):
        yield from ("\n".join([*lines[:i], *extra, *lines[i:]]) for extra in _LINES)


def _words(text: str) -> Iterator[str]:
    pieces = text.split(" ")
    middle = len(pieces) // 2
    yield text.replace(". ", ".", 1)
    yield from (text.replace(". ", f". {extra} ", 1) for extra in ("So it was.", "So. It. Was. And. So."))
    yield text.replace(". ", " and ", 1).replace(". ", " and ", 1)
    yield from (f"{extra} {text}" for extra in ("Well", "Then", "Yes"))
    yield from (f"{text} {extra}" for extra in ("more", "And more."))
    yield from (" ".join([*pieces[:middle], *["and"] * n, *pieces[middle:]]) for n in (1, 2, 4, 8))
    yield from (" ".join([*pieces[:middle], *pieces[middle + n :]]) for n in (1, 2, 4, 6, 8))


def _case(text: str) -> Iterator[str]:
    pieces = text.split(" ")
    for at in (0, 1, 2, len(pieces) // 2, len(pieces) - 2):
        if 0 <= at < len(pieces):
            yield " ".join([*pieces[:at], pieces[at].swapcase(), *pieces[at + 1 :]])
    yield from (text.upper(), text.lower(), text.swapcase())
    yield from (re.sub(r"[A-Z]{2,}", lambda m: m[0].lower(), text, count=n) for n in (0, 1))
