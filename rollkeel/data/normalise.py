"""Text without what nobody can see: NFC, and no control codes, stray format characters, private use or broken bytes.

Every letter, mark, number, sign and space of every script stays. Format characters that a script needs stay where it needs
them: joiners behind Arabic and Indic letters and inside emoji, zero-width spaces between letters of scripts without spaces.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter

ALWAYS = {
    "control code": "\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f",
    "bidirectional override": "\u202a-\u202e\u2066-\u2069",
    "invisible": "\xad\u2060-\u2064\u206a-\u206f\ufeff\ufff9-\ufffb\U000e0001",
    "replacement character": "\ufffc\ufffd",
    "private use": "\ue000-\uf8ff\U000f0000-\U000ffffd\U00100000-\U0010fffd",
    "noncharacter": "\ufdd0-\ufdef"
    + "".join(f"{chr(p * 0x10000 + 0xFFFE)}{chr(p * 0x10000 + 0xFFFF)}" for p in range(17)),
}
"""Kinds of characters that never survive, as the inside of a regular expression's set."""
LINE_BREAK = "line break"
DEPENDS = "out of place"
"""Joiners, zero-width spaces, direction marks, variation selectors and tags where no script or emoji needs them."""

_JOINED = "\u0590-\u08ff\u0900-\u109f\u1700-\u1aff\u1b00-\u1c4f\ua800-\ua97f\ua980-\uabff\ufb1d-\ufdcf\ufdf0-\ufdff\ufe70-\ufefe"
_JOINED += "\U00010840-\U00011fff\U0001e800-\U0001eeff"
"""Scripts from Hebrew and Arabic over those of India to Mongolian, in which a joiner can change the word."""
_UNSPACED = "\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u1950-\u19df\u1a20-\u1aaf\u1b00-\u1b7f\ua980-\ua9df\uaa60-\uaadf"
_RIGHT_TO_LEFT = "\u0590-\u061b\u061d-\u08ff\ufb1d-\ufdff\ufe70-\ufefe\U00010800-\U00010fff\U0001e800-\U0001efff"
_PICTURE = "\xa9\xae\u2190-\u2bff\u3030\u303d\u3297\u3299\U0001f000-\U0001faff"
_SELECTOR = "\ufe00-\ufe0f\U000e0100-\U000e01ef"
_SKIN = "\U0001f3fb-\U0001f3ff"
_FLAG = "\U0001f3f4[\U000e0030-\U000e0039\U000e0061-\U000e007a]{1,8}\U000e007f"

_REMOVED = re.compile("[" + "".join(ALWAYS.values()) + "]")
_KINDS = {kind: re.compile(f"[{members}]") for kind, members in ALWAYS.items()}
_ODD_ASCII = re.compile("[\x00-\x08\x0b-\x1f\x7f]")
_BREAKS = re.compile("\r\n|[\r\x0b\x0c\x85\u2028\u2029]")
_CONDITIONAL = re.compile("[\u200b-\u200f\u061c\u180b-\u180f" + _SELECTOR + "\U000e0020-\U000e007f]")
_CONTEXTS = (
    f"{_FLAG}"
    f"|(?<=[{_JOINED}])[\u200c\u200d]"
    f"|(?<=[{_PICTURE}{_SKIN}\ufe0f\U000e007f])\u200d(?=[{_PICTURE}])"
    f"|(?<=[{_UNSPACED}])\u200b(?=[{_UNSPACED}])"
    f"|(?<=[\u1800-\u18af])[\u180b-\u180f]"
    f"|(?<![\\s{_SELECTOR}\u200b-\u200f\u061c])(?<!^)[{_SELECTOR}]"
)
_NEEDED = re.compile(f"({_CONTEXTS})|{_CONDITIONAL.pattern}")
_NEEDED_DIRECTED = re.compile(f"({_CONTEXTS}|[\u200e\u200f\u061c])|{_CONDITIONAL.pattern}")
"""Group 1 is what stays; the second where the text has letters that run from right to left, whose marks then stay too."""
_HAS_RIGHT_TO_LEFT = re.compile(f"[{_RIGHT_TO_LEFT}]")


def clean(text: str, removed: Counter[str] | None = None) -> str:
    """`text` in NFC without stray characters; line breaks of all kinds become `\\n`. Cleaning twice changes nothing.

    `removed` gets the number of characters taken out, by kind. `text` holds no surrogates.
    """
    if text.isascii() and (text.isprintable() or not _ODD_ASCII.search(text)):
        return text
    if removed is None:
        removed = Counter()
    text, breaks = _BREAKS.subn("\n", text)
    removed[LINE_BREAK] += breaks
    if characters := "".join(_REMOVED.findall(text)):
        for kind, pattern in _KINDS.items():
            removed[kind] += len(pattern.findall(characters))
        text = _REMOVED.sub("", text)
    while not text.isascii():
        before = text
        if _CONDITIONAL.search(text):
            text = (_NEEDED_DIRECTED if _HAS_RIGHT_TO_LEFT.search(text) else _NEEDED).sub(r"\1", text)
            removed[DEPENDS] += len(before) - len(text)
        text = unicodedata.normalize("NFC", text)
        if text == before:  # what was taken out may have been what its neighbour needed
            break
    return text
