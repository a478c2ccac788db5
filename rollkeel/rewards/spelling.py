"""Ways to write one answer, as tables: `normalised` takes off what changes the looks alone; number words; what is no unit."""

from __future__ import annotations

import re
import unicodedata

_FRACTIONS = {mark: rf"\frac{{{unicodedata.normalize('NFKC', mark).replace('⁄', '}{')}}}" for mark in "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"}
_UNICODE = str.maketrans(
    {"−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "÷": "/", "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ",
     "≠": r"\ne ", "±": r"\pm ", "∪": r"\cup ", "∈": r"\in ", "∅": r"\emptyset ", "²": "^{2}", "³": "^{3}", "º": "°", "（": "(",
     "）": ")", "，": ",", "…": r"\ldots ", "\u00a0": " ", "\u2009": " ", "\u202f": " ", "\u3000": " ", **_FRACTIONS}
)  # fmt: skip
_TEXT = r"\\(?:text|mathrm|mathbf|mathit|textbf|textit|textrm|mbox|operatorname)"
_FUNCTIONS = "sin|cos|tan|cot|sec|csc|log|ln|exp|sqrt|pi|infty"
_REWRITES = [(re.compile(pattern), to) for pattern, to in [
    # spacing and size
    (r"\\(?:left|right|[bB]igg?[lrm]?)(?![A-Za-z])\s*", ""),
    (r"(?<!\\)\\!", ""),
    (r"(?<!\\)\\(?:[,;: ]|(?:quad|qquad|thinspace|displaystyle|textstyle|limits)(?![A-Za-z]))|~", " "),
    # names of one thing
    (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
    (rf"{_TEXT}\s*\{{\s*(and|or)\b([^{{}}]*)\}}", r" \1 \2 "),
    (rf"^\s*{_TEXT}\s*\{{\s*([A-Za-z])\s*\}}\s*$", r"\1"),
    (r"\\(?:mathrm|operatorname)\s*\{\s*([ei])\s*\}", r"\1"),
    (rf"{_TEXT}(?=\s*\{{)", r"\\text"),
    (r"\^\s*\{?\s*\\circ\s*\}?|\\degree(?![A-Za-z])", "°"),
    (r"\\(?:leqslant|leq|le)(?![A-Za-z])|<=", r"\\le "),
    (r"\\(?:geqslant|geq|ge)(?![A-Za-z])|>=", r"\\ge "),
    (r"\\(?:neq|ne)(?![A-Za-z])|!=", r"\\ne "),
    (r"\\lt(?![A-Za-z])", "<"), (r"\\gt(?![A-Za-z])", ">"),
    (r"\\(?:lbrace)(?![A-Za-z])", r"\\{"), (r"\\(?:rbrace)(?![A-Za-z])", r"\\}"),
    (r"\\varnothing(?![A-Za-z])", r"\\emptyset"),
    (r"\{,\}", ","),
    (r"\\%", "%"), (r"\\\$", "$"),
    # plain text for LaTeX
    (r"\*\*", "^"), (r"\*", r"\\cdot "),
    (r"√\s*(\d+(?:\.\d+)?|[A-Za-z]|\([^()]*\))", r"\\sqrt{\1}"),
    (r"(?<![\\A-Za-z])sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
    (rf"(?<![\\A-Za-z])({_FUNCTIONS})(?![A-Za-z])", r"\\\1 "),
    (r"\^\s*\(([^()]*)\)", r"^{\1}"), (r"\^\s*(-?\d{2,}|-\d)", r"^{\1}"),
    (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
    # repeating decimals: three equal digits or two equal groups are the period
    (r"\.{3,}|\\(?:ldots|cdots|dots)(?![A-Za-z])", r"\\ldots "),
    (r"(\.\d*?)(\d)\2{2,}\s*\\ldots(?!\s*[\d.])", r"\1\\overline{\2}"),
    (r"(\.\d*?)(\d{2,}?)\2+\s*\\ldots(?!\s*[\d.])", r"\1\\overline{\2}"),
    (r"\s+", " "),
]]  # fmt: skip

_NUMBERS = {word: value for value, word in enumerate(
    ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"]
)}  # fmt: skip
_TENS = {
    word: 20 + 10 * i
    for i, word in enumerate(["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"])
}
_NUMBERS |= {f"{ten} {one}": a + b for ten, a in _TENS.items() for one, b in _NUMBERS.items() if 0 < b < 10} | _TENS
SCALES = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_NO_UNIT = re.compile(
    r"\?|(?<![A-Za-z^])\d|(?i:\b(?:or|and|is|are|was|be|not|no|if|else|maybe|perhaps|possibly|probably|about|approximately|around|roughly|almost"
    r"|nearly|more|less|fewer|least|most|over|under|than|to|from|between|wrong|incorrect|false|right|true|correct|rejected|extraneous|invalid"
    r"|except|when|where|thirds|fifths|tenths|hundredths|thousandths)\b)"
)


def normalised(text: str) -> str:
    """Without what changes the looks alone: spacing, `\\left`, kinds of fraction, ways to write a sign."""
    text = text.translate(_UNICODE)
    for pattern, to in _REWRITES:
        text = pattern.sub(to, text)
    return text.strip().rstrip(".,;").strip()


def worded(text: str) -> int | None:
    """Value of a number in words below a hundred, perhaps of dozens, hundreds, … millions: `seven`, `twenty-one thousand`."""
    words = text.casefold().replace("-", " ").split()
    scale = SCALES[words.pop()] if words[1:] and words[-1] in SCALES else 1
    value = _NUMBERS.get(" ".join(words))
    return None if value is None else value * scale


def unit(text: str) -> tuple[int, str] | None:
    """Scale and unit of the words behind a number (`million dollars`: 10^6, `dollar`); None where they say something else."""
    if _NO_UNIT.search(text):
        return None
    words = text.casefold().replace(".", "").split()
    scale = SCALES[words.pop(0)] if words and words[0] in SCALES else 1
    name = " ".join(words).removesuffix("s")
    return scale, "dollar" if name in ("usd", "buck") else name
