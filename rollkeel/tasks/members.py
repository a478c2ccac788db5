"""What a list in words names, whatever its order and separators: `red, green and blue` is `{blue, Green, red}`."""

from __future__ import annotations

import re
import unicodedata

MAX_CHARS, MAX_MEMBERS = 2000, 64

_SPACING = re.compile(r"\\(?:[,;:! ]|quad(?![A-Za-z])|qquad(?![A-Za-z]))")
_WRAPPED = re.compile(r"\\(?:text|mathrm|textbf|mathbf|textit)\s*\{([^{}]*)\}")
_BRACKETS = ((r"\{", r"\}"), ("{", "}"), ("[", "]"), ("(", ")"))
_BETWEEN = re.compile(r"[,;，；、\n]|(?<!\S)(?:and|&)(?!\S)")
_BULLET = re.compile(r"(?:[-*•–]|\d{1,2}[.)])\s+")
_OPEN = re.compile(r"\.\.\.|…|\\[lc]?dots(?![A-Za-z])")
_ARTICLE = re.compile(r"(?:the|an?) (?=\S)")


def members(text: str) -> list[str]:
    """Members as they are written, in order, repeated ones as often as they stand there.

    They stand between commas, semicolons, line ends (with or without bullets), `and` or `&`, perhaps in brackets all together.
    Empty for a text without any, for one that leaves the list open (`...`), and for one longer than `MAX_CHARS` or with more than `MAX_MEMBERS`.
    """
    if len(text) > MAX_CHARS or _OPEN.search(text):
        return []
    text = _WRAPPED.sub(r"\1", _SPACING.sub(" ", text)).strip().strip("$").strip()
    while (inner := _unbracketed(text)) != text:
        text = inner
    text = re.sub(r"(?i)^both (?=.* and )", "", text)
    found = [_BULLET.sub("", part.strip(), count=1).strip() for part in _BETWEEN.split(text)]
    found = [part for part in found if key(part)]
    return found if len(found) <= MAX_MEMBERS else []


def key(member: str) -> str:
    """What two spellings of one member share: no regard to capitals, white space, marks around it and a leading article."""
    text = unicodedata.normalize("NFC", member).casefold().strip(" \t.:*`'\"“”‘’$")
    return _ARTICLE.sub("", " ".join(text.split()), count=1)


def _unbracketed(text: str) -> str:
    """Without one pair of brackets around all of it."""
    for left, right in _BRACKETS:
        inner = text[len(left) : len(text) - len(right)]
        if text.startswith(left) and text.endswith(right) and left not in inner and right not in inner:
            return inner.strip()
    return text
