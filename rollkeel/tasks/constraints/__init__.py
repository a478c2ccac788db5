"""Instructions that a program can check: length, format, keywords, case, language, JSON. In the manner of IFEval and by its names.

A constraint is `{"kind": "length_constraints:number_words", "num_words": 50, "relation": "at least"}`, its keys those of
`kinds.KINDS`. `check` judges a text, `describe` says it as a sentence, `from_ifeval` and `from_rlvr` read
published rows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rollkeel.errors import BadInput, nearest
from rollkeel.tasks.constraints.kinds import KINDS, RELATIONS, Found
from rollkeel.tasks.looks import as_read

__all__ = ["KINDS", "check", "describe", "from_ifeval", "from_rlvr", "validate"]

Constraint = Mapping[str, Any]


def validate(constraint: Constraint) -> None:
    """Raises `BadInput` for an unknown kind, naming the nearest, and for an argument that is missing or of the wrong type."""
    kind = constraint.get("kind")
    if kind not in KINDS:
        raise BadInput(f"constraint kind {kind!r}: unknown{nearest(str(kind), list(KINDS))}")
    missing = [key for key in KINDS[kind].needs if constraint.get(key) is None]
    if missing:
        raise BadInput(f"constraint {kind}: expected {', '.join(KINDS[kind].needs)}, {', '.join(missing)} missing")
    for key in KINDS[kind].needs:
        value, lists = constraint[key], key in ("keywords", "forbidden_words", "marks")
        number = key.startswith(("num_", "nth_")) or key.endswith("frequency")
        good = isinstance(value, int) and not isinstance(value, bool) if number else isinstance(value, str)
        if lists:
            good = isinstance(value, list | tuple) and all(isinstance(v, str) for v in value)
        if not good and key != "schema":
            raise BadInput(
                f"constraint {kind}: {key}: expected {'texts' if lists else 'a number' if number else 'a text'}, got {value!r}"
            )
        if key.endswith("relation") and value not in RELATIONS:
            raise BadInput(f"constraint {kind}: {key}: expected one of {', '.join(RELATIONS)}, got {value!r}")
    options = constraint.get("options", [""])
    if not isinstance(options, list | tuple) or not options or not all(isinstance(o, str) for o in options):
        raise BadInput(f"constraint {kind}: options: expected texts, got {options!r}")


def check(text: str, constraints: Sequence[Constraint], *, loose: bool = False) -> list[tuple[bool | None, str]]:
    """For each constraint: does `text` hold it (None: cannot be decided), and one line of detail.

    `loose` is IFEval's: a constraint holds if it does for the text without asterisks, without its first line, its last line, or
    several of these. An empty text holds nothing. Raises `BadInput` for a constraint that is not one (see `validate`).
    """
    texts = _variants(text) if loose else [text]
    out = []
    for constraint in constraints:
        validate(constraint)
        found = [_found(t, constraint) for t in texts if t.strip()]
        best = next((f for f in found if f[0]), next((f for f in found if f[0] is None), None))
        out.append(best or (found[0] if found else (False, "the response is empty")))
    return out


def _found(text: str, constraint: Constraint) -> Found:
    kind = KINDS[constraint["kind"]]
    found = kind.check(text, constraint)
    if kind.read and found[0] is not False and (read := as_read(text)) != text:
        return kind.check(read, constraint)
    return found


def describe(constraint: Constraint) -> str:
    """One sentence that asks for it. Raises `BadInput` like `validate`."""
    validate(constraint)
    said = {"marked": f", marked as {constraint['language']}" if "language" in constraint else "", **constraint}
    for key, value in constraint.items():
        if key == "schema":
            said[key] = json.dumps(value)
        elif isinstance(value, list | tuple):
            said[key] = " ".join(value) if key == "marks" else ", ".join(f'"{item}"' for item in value)
    return KINDS[constraint["kind"]].asks.format(**said)


def from_ifeval(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Constraints of one of IFEval's rows, of its columns `instruction_id_list` and `kwargs`. Raises `BadInput`."""
    kinds, arguments = row.get("instruction_id_list"), row.get("kwargs")
    if not isinstance(kinds, Sequence) or not isinstance(arguments, Sequence) or len(kinds) != len(arguments):
        raise BadInput("IFEval row: expected instruction_id_list and kwargs of one length")
    return [_whole({"kind": kind, **(a or {})}) for kind, a in zip(kinds, arguments, strict=True)]


def _whole(given: Constraint) -> dict[str, Any]:
    """Without arguments that are null, and with whole numbers, which tables with gaps store as floats. Raises `BadInput`."""
    whole = {k: int(v) if isinstance(v, float) and v.is_integer() else v for k, v in given.items() if v is not None}
    validate(whole)
    return whole


_RLVR: dict[str, tuple[str, dict[str, str], dict[str, Any]]] = {
    "verify_keywords": ("keywords:existence", {"keywords": "keyword_list"}, {}),
    "verify_keyword_frequency": (
        "keywords:frequency",
        {"keyword": "word", "frequency": "N"},
        {"relation": "exactly", "whole_word": True},
    ),
    "validate_forbidden_words": ("keywords:forbidden_words", {"forbidden_words": "forbidden_words"}, {}),
    "verify_letter_frequency": (
        "keywords:letter_frequency",
        {"letter": "letter", "let_frequency": "N"},
        {"let_relation": "exactly"},
    ),
    "validate_response_language": ("language:response_language", {"language": "language"}, {}),
    "verify_paragraph_count": ("length_constraints:number_paragraphs", {"num_paragraphs": "N"}, {"divider": "* * *"}),
    "validate_word_constraint": ("length_constraints:number_words", {"num_words": "N", "relation": "quantifier"}, {}),
    "verify_sentence_constraint": (
        "length_constraints:number_sentences",
        {"num_sentences": "N", "relation": "quantifier"},
        {},
    ),
    "validate_paragraphs": (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": "N", "nth_paragraph": "i", "first_word": "first_word"},
        {},
    ),
    "verify_postscript": ("detectable_content:postscript", {"postscript_marker": "postscript_marker"}, {}),
    "validate_placeholders": ("detectable_content:number_placeholders", {"num_placeholders": "N"}, {}),
    "verify_bullet_points": ("detectable_format:number_bullet_lists", {"num_bullets": "N"}, {}),
    "validate_title": ("detectable_format:title", {}, {}),
    "validate_choice": ("detectable_format:constrained_response", {"options": "options"}, {}),
    "validate_highlighted_sections": ("detectable_format:number_highlighted_sections", {"num_highlights": "N"}, {}),
    "validate_sections": (
        "detectable_format:multiple_sections",
        {"num_sections": "N", "section_spliter": "section_splitter"},
        {},
    ),
    "validate_json_format": ("detectable_format:json_format", {}, {}),
    "validate_repeat_prompt": ("combination:repeat_prompt", {"prompt_to_repeat": "original_prompt"}, {}),
    "validate_two_responses": ("combination:two_responses", {}, {}),
    "validate_uppercase": ("change_case:english_capital", {}, {}),
    "validate_lowercase": ("change_case:english_lowercase", {}, {}),
    "validate_frequency_capital_words": (
        "change_case:capital_word_frequency",
        {"capital_frequency": "N", "capital_relation": "quantifier"},
        {},
    ),
    "validate_end": ("startend:end_checker", {"end_phrase": "end_phrase"}, {}),
    "validate_quotation": ("startend:quotation", {}, {}),
    "validate_no_commas": ("punctuation:no_comma", {}, {}),
}
"""Function that RLVR-IFEval names → kind, our argument → theirs, and what else the kind is told."""


def from_rlvr(truth: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The constraint of a `ground_truth` of RLVR-IFEval: `func_name` and its arguments, the others null. Raises `BadInput`."""
    name = truth.get("func_name")
    if name not in _RLVR:
        raise BadInput(f"ground_truth: func_name {name!r}: unknown{nearest(str(name), list(_RLVR))}")
    kind, arguments, more = _RLVR[name]
    if absent := [theirs for theirs in arguments.values() if truth.get(theirs) is None]:
        raise BadInput(f"ground_truth: {name}: expected {', '.join(arguments.values())}, {absent[0]} missing")
    return [_whole({"kind": kind, **{ours: truth[theirs] for ours, theirs in arguments.items()}, **more})]


def _variants(text: str) -> list[str]:
    lines = text.split("\n")
    cut = ["\n".join(part).strip() for part in (lines, lines[1:], lines[:-1], lines[1:-1])]
    return [text, *cut[1:], *(t.replace("*", "") for t in cut)]
