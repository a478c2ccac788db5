"""What a reader of a text sees: no characters without looks, no difference between look-alikes, blocks between fences."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

_INVISIBLE = dict.fromkeys(
    [0xAD, 0x34F, 0x61C, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x3164, 0xFEFF, 0xFFA0, *range(0x180B, 0x180F), *range(0x200B, 0x2010),
     *range(0x202A, 0x202F), *range(0x2060, 0x2070), *range(0xFE00, 0xFE10), *range(0xE0000, 0xE0080), *range(0xE0100, 0xE01F0)]
)  # fmt: skip
_WIDE = {0xFF01 + i: 0x21 + i for i in range(0x5E)}
_COMMAS = dict.fromkeys(map(ord, "،、٬⹁⸲꓾︐︑﹑､"), ",")
_ALIKE = str.maketrans(
    "АВЕЅІЈКМНОРСТУХЬаеѕіјорсухԁԛԝһΑΒΕΖΗΙΚΜΝΟΡΤΥΧαινορυ",
    "ABESIJKMHOPCTYXbaesijopcyxdqwhABEZHIKMNOPTYXaivopu",
)
# Possessive, since a line of a million characters must not be tried from each of them.
_FENCE = re.compile(r"(?P<indent>[ \t]*)(?P<fence>`{3,}+|~{3,}+)[ \t]*+(?P<mark>[^\s`]*+)[^`]*+")
_WORD = re.compile(r"\w+")


def visible(text: str) -> str:
    """Without invisible characters, and with full-width letters, digits and marks as ordinary ones."""
    return text if text.isascii() else text.translate(_INVISIBLE).translate(_WIDE)


def as_read(text: str) -> str:
    """`visible`, in compatible form, with one comma for all, and with Latin letters for their Cyrillic and Greek look-alikes in words that
    have Latin ones too. A word wholly in another script stays: it may be a word of that language."""
    if text.isascii():
        return text
    text = unicodedata.normalize("NFKC", visible(text).translate(_COMMAS))
    return _WORD.sub(lambda m: m[0].translate(_ALIKE) if re.search("[A-Za-z]", m[0]) else m[0], text)


@dataclass(frozen=True, kw_only=True)
class Block:
    """What stands between two fences, without the indentation of the first; `mark` is the first word behind it, in lower case."""

    mark: str
    text: str
    closed: bool


def blocks(text: str) -> list[Block]:
    """Fenced blocks as Markdown reads them: ``` or ~~~, closed by a line of at least as many of the same alone; indented ones too."""
    out: list[Block] = []
    opening, lines = None, []
    for line in text.split("\n"):
        if opening is None:
            opening, lines = _FENCE.fullmatch(line), []
            continue
        bare = line.strip()
        if set(bare) == {opening["fence"][0]} and len(bare) >= len(opening["fence"]):
            out.append(Block(mark=opening["mark"].lower(), text="".join(lines), closed=True))
            opening = None
        else:
            lines.append(line.removeprefix(opening["indent"]) + "\n")
    if opening is not None:
        out.append(Block(mark=opening["mark"].lower(), text="".join(lines), closed=False))
    return out
