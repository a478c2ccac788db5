"""Multiple choice questions as open ones, so that a right letter is no longer worth a guess.

Strict on purpose: a question is kept only where it stands without its choices and its answer can be graded as a quantity, a few
exact words or a list of them. Everything else is refused with a reason, and the reasons are counted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rollkeel.tasks.base import excerpt
from rollkeel.tasks.members import key, members
from rollkeel.tasks.quantity import NotQuantity, compare, readings

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
MAX_WORDS, MAX_ANSWER_CHARS, MAX_QUESTION_CHARS = 4, 40, 8000

_LABEL = re.compile(r"^\s*(?:\(([A-Za-z])\)|([A-Za-z])[.):])\s+")
_LETTER = re.compile(r"^\s*\(?([A-Za-z])[.)]?\s*$")
_INLINE = re.compile(r"(?:^|\s)\(?([A-J])[.)]\s+(?=\S)")
_REFERS = (
    ("refers to the choices", re.compile(
        r"\b(?:which|what) (?:one )?of (?:the )?(?:following|these|those|above|below|listed)|\bof the (?:following|below|choices|options)\b"
        r"|\b(?:the )?following (?:statement|option|choice|answer|item|term|is|are|would|could|can|does|do)s?\b"
        r"|\b(?:options?|choices?|answers?|alternatives?) (?:above|below|given|listed|provided|is|are|[A-E])\b|\bchoose\b|\bselect\b|\bpick\b|\bmatch\b"
        r"|\b(?:these|listed|given) (?:options|choices|answers|alternatives|statements)\b|\bcorrect (?:option|choice|statement|answer)\b"
        r"|\bwhich (?:statement|option|choice|answer|sentence|pair|list|set|sequence|order|row|graph|equation|expression|description|phrase|example)s?\b"
        r"|\bas follows\b", re.I)),
    ("asks for an exception", re.compile(
        r"\bexcept\b|\b(?-i:NOT)\b|\bnot (?:true|correct|an? example|one of)\b|\b(?:false|incorrect|untrue)\b|(?<!at )\bleast\b", re.I)),
    ("compares the choices", re.compile(
        r"(?<!at )\bmost\b|\b(?:best|worst|better|closest|nearest|likely|could|might|primarily|mainly)\b"
        r"|\bwhich\b[^?.]{0,200}\b(?:\w{3,12}est|highest|lowest)\b", re.I)),
    ("needs a figure", re.compile(r"\b(?:figure|diagram|graph|chart|picture|image|map|table|passage|shown|illustrated)\b", re.I)),
)  # fmt: skip
_COMBINES = re.compile(
    r"\b(?:all|none|both|neither|any|some|each|either|two|three) (?:of )?(?:the |these|those|them|above|answers|choices|options|correct)"
    r"|\b(?:above|cannot be determined|not enough information|insufficient|same as|depends)\b"
    r"|^\(?[A-E]\)?(?:(?: and | & |, ?|/| or )\(?[A-E]\)?)+$|^(?:I|II|III|IV|V)(?:,? (?:and )?(?:I|II|III|IV|V))*(?: only)?$|\bonly\b",
    re.IGNORECASE,
)
_MANY_ENDS = re.compile(r":$|\b(?:because|since|that|to|when|if)[ .:?]*$")
_ONE_END = re.compile(r"_{2,}|\b(?:is|are|was|were|by|of|called|the|a|an|as):?$")
_TWO_WAY = re.compile(r"true|false|yes|no|(?:in|de)creases?|positive|negative|left|right|up|down", re.IGNORECASE)


class Refused(ValueError):
    """A row that is not converted; the message is the reason, one of a few."""


@dataclass(frozen=True, kw_only=True)
class OpenForm:
    """A question without its choices."""

    question: str
    answer: str
    """Text of the right choice without its label; members of a set are joined by `, ` in alphabetical order."""
    kind: Literal["quantity", "exact", "set"]

    @property
    def grader(self) -> str:
        """Who grades answers to it: words are a list of one, so that the final answer is read out of a response."""
        return "quantity" if self.kind == "quantity" else "set"


def convert(
    rows: Iterable[Mapping[str, Any]], *, question: str = "question", choices: str = "choices", answer: str = "answer"
) -> tuple[list[OpenForm], dict[str, list[str]]]:
    """Open forms of all rows that have one, in order, and by reason the questions that have none. The names are columns."""
    kept: list[OpenForm] = []
    refused: dict[str, list[str]] = {}
    for row in rows:
        try:
            kept.append(open_form(row.get(question), row.get(choices), row.get(answer)))
        except Refused as reason:
            refused.setdefault(str(reason), []).append(excerpt(str(row.get(question))))
    return kept, refused


def open_form(question: Any, choices: Any, answer: Any) -> OpenForm:
    """One question. `choices` is a list, a mapping from letters (or the `{label, text}` lists of ARC), or None where they stand
    at the end of the question; `answer` a letter, an index from 0, or the text of a choice. Raises `Refused` with the reason."""
    if not isinstance(question, str) or not question.strip() or len(question) > MAX_QUESTION_CHARS:
        raise Refused("malformed: no question")
    if choices is None:
        question, choices = _inline(question)
    labels, texts = _choices(choices)
    index = _index(answer, labels, texts)
    right, others = texts[index], texts[:index] + texts[index + 1 :]
    question = " ".join(question.split())
    for reason, pattern in _REFERS:
        if pattern.search(question):
            raise Refused(reason)
    if any(_COMBINES.search(text) for text in texts):
        raise Refused("a choice combines or denies others")
    text, kind = _gradable(right)
    if any(_equivalent(right, other, kind) for other in others):
        raise Refused("two choices are the same answer")
    if _MANY_ENDS.search(question) or not (question.endswith("?") or kind == "quantity" or _ONE_END.search(question)):
        raise Refused("an unfinished sentence with many ends")
    return OpenForm(question=question, answer=text, kind=kind)


def _inline(question: str) -> tuple[str, list[str]]:
    """Question and choices `A) … B) …` at its end, which must run from A without a gap."""
    found = list(_INLINE.finditer(question))
    for start in range(len(found)):
        labels = "".join(m[1] for m in found[start:])
        if len(labels) >= 2 and LETTERS.startswith(labels):
            ends = [m.start() for m in found[start + 1 :]] + [len(question)]
            texts = [question[m.end() : end].strip() for m, end in zip(found[start:], ends, strict=True)]
            return question[: found[start].start()].strip(), texts
    raise Refused("malformed: no choices")


def _choices(choices: Any) -> tuple[list[str], list[str]]:
    """Labels (letters by default) and texts without their lettering."""
    if isinstance(choices, Mapping) and {"label", "text"} <= set(choices):
        labels, texts = list(map(str, choices["label"])), list(choices["text"])
    elif isinstance(choices, Mapping):
        labels, texts = list(map(str, choices)), list(choices.values())
    elif isinstance(choices, Sequence) and not isinstance(choices, str):
        labels, texts = list(LETTERS[: len(choices)]), list(choices)
    else:
        raise Refused("malformed: no choices")
    if not 2 <= len(texts) <= len(LETTERS) or len(labels) != len(texts):
        raise Refused("malformed: no choices")
    plain = [str(t) if isinstance(t, int | float) and not isinstance(t, bool) else t for t in texts]
    words = [" ".join(t.split()) for t in plain if isinstance(t, str) and t.strip()]
    if len(words) != len(plain):
        raise Refused("malformed: a choice is empty or no text")
    marks = [_LABEL.match(t) for t in words]
    if all(m and (m[1] or m[2]).upper() == LETTERS[i] for i, m in enumerate(marks)):
        words = [_LABEL.sub("", t) for t in words]
    return labels, words


def _index(answer: Any, labels: list[str], texts: list[str]) -> int:
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(texts):
        return answer
    if isinstance(answer, str):
        letter = _LETTER.match(answer)
        for name in (answer.strip(), letter[1].upper() if letter else None):
            if name in labels:
                return labels.index(name)
        plain = " ".join(_LABEL.sub("", answer).split())
        if plain in texts:
            return texts.index(plain)
    raise Refused("malformed: the answer is no letter, index or text of a choice")


def _gradable(text: str) -> tuple[str, Literal["quantity", "exact", "set"]]:
    """Answer text and kind. Raises `Refused` for what neither rule nor reader could settle."""
    bare = text.rstrip(".").strip()
    try:
        found = readings(bare)
        if len(found) == 1 and all(q.unit.known for q in found[0]):
            return bare, "quantity"
    except NotQuantity:
        pass
    if _TWO_WAY.fullmatch(bare):
        raise Refused("the answer is one of two")
    parts = members(bare)
    if not 0 < len(parts) <= 6 or any(len(p.split()) > MAX_WORDS or len(p) > MAX_ANSWER_CHARS for p in parts):
        raise Refused("the answer is too long to be graded")
    if any(c.isdigit() for c in bare):
        raise Refused("the answer mixes numbers and words")
    if len({key(part) for part in parts}) < len(parts):
        raise Refused("the answer names one thing twice")
    if len(parts) > 1:
        return ", ".join(sorted(parts, key=str.lower)), "set"
    return bare, "exact"


def _equivalent(right: str, other: str, kind: str) -> bool:
    if kind == "quantity":
        return any(c.isdigit() for c in other) and compare(right, other).right is not False
    if kind == "set":
        return {key(part) for part in members(right)} == {key(part) for part in members(other)}
    return right.rstrip(".").lower() == other.rstrip(".").lower()
