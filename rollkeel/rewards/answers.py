"""Which part of a response is its final answer: one explicit rule, and the text that it read goes into the detail.

| rule | what is read |
|---|---|
| `boxed` | inside of the last `\\boxed{…}` or `\\fbox{…}`, whatever earlier boxes say; none if it is not closed or empty |
| `marker` | the line behind the last `answer:`, `answer is`, `answer =` or `####`, or the next line that is not empty |
| `last_number` | the last number, with thousands commas, decimals, `a/b` and `%` |
| `whole` | all of it |
| `stated` | what its one sentence states: behind `is`, `are`, `=` or `I choose`, before `is the answer`, in a fence; else `whole` |
| `auto` | `boxed` if there is any box, else `marker` if there is any, else `stated` |

Characters that cannot be seen are left out. A thought, up to the last `</think>`, is not read; one that was begun and not closed leaves no answer.
"""

from __future__ import annotations

import re
from typing import Literal, get_args

from rollkeel.tasks.looks import visible

Rule = Literal["boxed", "marker", "last_number", "whole", "stated", "auto"]
RULES: tuple[str, ...] = get_args(Rule)
MAX_CHARS, MAX_SENTENCE = 10_000, 200

_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
_MARKER = re.compile(r"(?i)\banswers?\b(?:\*\*)?\s*(?:is\b|are\b|:|=)\s*:?(?:(?<=:)\*\*)?|####")
_NUMBER = re.compile(r"(?<![\w.])[-+−]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?:\.\d+|(?<=\d))(?:\s*/\s*\d+)?(?:\s*\\?%)?")
_WORDS = r"(?:[A-Za-z]{2,},? )*[A-Za-z]{2,}"
_STATED = [re.compile(pattern, re.IGNORECASE | re.DOTALL) for pattern in (
    r"(?:```|~~~)[^\n`]*\n(.+?)\n\s*(?:```|~~~)",
    r"(?:.*[,.;] )?(?:so|thus|hence|therefore),? (.+)",
    r"=\s*(.+)",
    r"(.+?) is (?:the|my) (?:final |correct |right |best )?(?:answer|choice|option)",
    rf"(?:{_WORDS},? )?(?:I|we) (?:choose|pick|select|get|got|find|go with|would go with) (.+)",
    rf"{_WORDS}(?:'s| is| are| equals| must be) (.+)",
)]  # fmt: skip
_DOUBT = re.compile(
    r"(?i)\b(?:not|no|never|n?or|n?either|maybe|perhaps|possibly|if|unless|could|might|guess|wrong|incorrect)\b|n't\b"
)
_WRAPPERS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("**", "**"), ("`", "`"))


class NoAnswer(Exception):
    """The response has no answer by the rule, with the reason: it scores 0."""


def spoken(text: str) -> str | None:
    """What stands behind the thought, which the last `</think>` ends; None where one was begun and not closed."""
    rest = text.rpartition("</think>")[2]
    return None if "<think>" in rest else rest


def final_answer(text: str, rule: str) -> str:
    """What `rule`, one of `RULES`, reads, without mathematics delimiters, emphasis and full stop. Raises `NoAnswer`."""
    if rule not in RULES:
        raise ValueError(f"extract: expected one of {', '.join(RULES)}, got {rule!r}")
    rest = spoken(text)
    if rest is None:
        raise NoAnswer("no answer: the thought is not closed")
    rest = visible(rest)
    if rule == "auto":
        rule = "boxed" if _BOX.search(rest) else "marker" if _MARKER.search(rest) else "stated"
    readers = {"boxed": _boxed, "marker": _marked, "last_number": _last_number, "whole": str, "stated": _stated}
    read = readers[rule](rest).strip()
    if len(read) > MAX_CHARS:
        raise NoAnswer(f"no answer: longer than {MAX_CHARS} characters ({rule})")
    if not (read := tidy(read)):
        raise NoAnswer(f"no answer: nothing there ({rule})")
    return read


def tidy(text: str) -> str:
    """Without the delimiters around all of it, and without the full stop of a sentence."""
    before = None
    while before != text:
        before, text = text, text.strip()
        text = text if text.endswith("..") else text.removesuffix(".").rstrip()
        for left, right in _WRAPPERS:
            inner = text[len(left) : len(text) - len(right)]
            if (
                text.startswith(left)
                and text.endswith(right)
                and len(text) > len(left + right)
                and left not in inner.replace("\\$", "")
            ):
                text = inner
                break
    return text


def closing(text: str, start: int) -> int:
    """Position of the brace that closes the one at `start`; -1 if none does. `\\{` and `\\}` are no braces."""
    depth, i = 0, start
    while i < len(text):
        if text[i] == "\\":
            i += 1
        elif text[i] == "{":
            depth += 1
        elif text[i] == "}":
            depth -= 1
            if depth == 0:
                return i
        i += 1
    return -1


def _boxed(text: str) -> str:
    boxes = list(_BOX.finditer(text))
    if not boxes:
        raise NoAnswer("no answer: no box")
    start = boxes[-1].end()
    if text[start : start + 1] != "{" or (end := closing(text, start)) < 0:
        raise NoAnswer("no answer: the last box is not closed")
    return text[start + 1 : end]


def _marked(text: str) -> str:
    marks = list(_MARKER.finditer(text))
    if not marks:
        raise NoAnswer("no answer: no marker")
    line = text[marks[-1].end() :].strip().split("\n")[0]
    return line.removesuffix("**") if line.count("**") == 1 else line  # of a sentence in bold


def _stated(text: str) -> str:
    """One sentence after another, from the outside in; a sentence of doubt stays as it is."""
    text = tidy(text)
    for pattern in _STATED if len(text) <= MAX_SENTENCE and not _DOUBT.search(text) else ():
        if found := pattern.fullmatch(text):
            text = tidy(found[1])
    return text


def _last_number(text: str) -> str:
    numbers = [m.group() for m in _NUMBER.finditer(text) if any(c.isdigit() for c in m.group())]
    if not numbers:
        raise NoAnswer("no answer: no number")
    return numbers[-1]
