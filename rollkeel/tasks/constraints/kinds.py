"""Every kind of constraint: what it needs to know, how a text is checked, and the sentence that asks for it.

Kinds and their arguments carry the names of IFEval's registry (Zhou et al. 2023, arXiv 2311.07911), so that its public rows can be
graded; those marked `own` are not in it. All checks take time linear in the text, whatever the text is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rollkeel.errors import BadInput
from rollkeel.tasks.base import excerpt
from rollkeel.tasks.constraints.extras import fault, identify, languages
from rollkeel.tasks.looks import blocks

Found = tuple[bool | None, str]
"""Holds or not (None: cannot be decided), and one line of detail."""
Arguments = Mapping[str, Any]

RELATIONS: dict[str, Callable[[int, int], bool]] = {
    "at least": lambda count, n: count >= n,
    "less than": lambda count, n: count < n,
    "at most": lambda count, n: count <= n,
    "exactly": lambda count, n: count == n,
    "around": lambda count, n: abs(count - n) <= max(round(n / 10), 1),  # of RLVR-IFEval
}
ANSWERS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_ABBREVIATIONS = re.compile(r"\b(?:mr|mrs|ms|dr|prof|st|vs|etc|e\.g|i\.e|no|fig|approx|[a-z])\.$", re.IGNORECASE)
_SENTENCE_END = re.compile(r"[.!?]+[\"'”’)\]]*(?=\s|$)|[。！？]+")


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of constraint."""

    needs: tuple[str, ...]
    check: Callable[[str, Arguments], Found]
    asks: str
    """The sentence, with its arguments in braces."""
    read: bool = False
    """Must hold of the text as it is read too (`looks.as_read`): what cannot be seen or told apart hides no word and makes none."""


def words(text: str) -> list[str]:
    """Runs of letters, digits and underscores, as IFEval counts words."""
    return re.findall(r"\w+", text)


def sentences(text: str) -> int:
    """Stretches that end with `.`, `!`, `?` (or the East Asian marks) before a space; abbreviations and single letters end none."""
    count = end = 0
    for match in _SENTENCE_END.finditer(text):
        if match[0] == "." and _ABBREVIATIONS.search(text[max(0, match.start() - 8) : match.end()]):
            continue
        count += bool(text[end : match.start()].strip())
        end = match.end()
    return count + bool(words(text[end:]))


def counted(count: int, n: Any, relation: str, what: str) -> Found:
    """Raises `BadInput` for an unknown relation."""
    if relation not in RELATIONS or not isinstance(n, int):
        raise BadInput(
            f"constraint on {what}: expected a whole number and one of {', '.join(RELATIONS)}, got {n!r}, {relation!r}"
        )
    return RELATIONS[relation](count, n), f"{count} {what}, {relation} {n} asked for"


def paragraphs(text: str, divider: str = "***") -> list[str] | None:
    """Between the dividers; None where one in the middle is empty."""
    return _parts(text, divider)


def _parts(text: str, mark: str) -> list[str] | None:
    parts = [part.strip() for part in text.split(mark)]
    return None if not all(parts[1:-1]) else [part for part in parts if part]


def _keywords(text: str, a: Arguments) -> Found:
    missing = [w for w in a["keywords"] if w.lower() not in text.lower()]
    return not missing, f"missing: {', '.join(missing)}" if missing else "all there"


def _frequency(text: str, a: Arguments) -> Found:
    text, word = text.lower(), a["keyword"].lower()
    count = words(text).count(word) if a.get("whole_word") else text.count(word)
    return counted(count, a["frequency"], a["relation"], f"times {a['keyword']!r}")


def _forbidden(text: str, a: Arguments) -> Found:
    there = [w for w in a["forbidden_words"] if re.search(rf"\b{re.escape(w)}\b", text, re.IGNORECASE)]
    return not there, f"forbidden: {', '.join(there)}" if there else "none of them"


def _letters(text: str, a: Arguments) -> Found:
    return counted(
        text.lower().count(a["letter"].lower()),
        a["let_frequency"],
        a["let_relation"],
        f"times the letter {a['letter']}",
    )


def _language(text: str, a: Arguments) -> Found:
    expected = a["language"].split("-")[0].lower()
    if expected not in languages():
        return None, f"language {expected!r} cannot be told apart here"
    language, why = identify(text)
    return (None if language is None else language == expected), f"{language or 'no language'}: {why}"


def _paragraph_count(text: str, a: Arguments) -> Found:
    parts = paragraphs(text, a.get("divider", "***"))
    return (
        (False, "an empty paragraph")
        if parts is None
        else counted(len(parts), a["num_paragraphs"], "exactly", "paragraphs")
    )


def _first_word(text: str, a: Arguments) -> Found:
    parts = [part.strip() for part in text.split("\n\n") if part.strip()]
    if len(parts) != a["num_paragraphs"] or not 0 < a["nth_paragraph"] <= len(parts):
        return False, f"{len(parts)} paragraphs, exactly {a['num_paragraphs']} asked for"
    first = re.split(r"[.,?!'\"]", parts[a["nth_paragraph"] - 1].split()[0].lstrip("'\""), maxsplit=1)[0].lower()
    return first == a["first_word"].lower(), f"paragraph {a['nth_paragraph']} starts with {first!r}"


def _placeholders(text: str, a: Arguments) -> Found:
    count = 0
    for line in text.split("\n"):
        start = line.find("[")
        while start >= 0 and (end := line.find("]", start)) >= 0:
            count, start = count + 1, line.find("[", end)
    return counted(count, a["num_placeholders"], "at least", "placeholders")


def _postscript(text: str, a: Arguments) -> Found:
    marker = a["postscript_marker"].strip()
    known = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
    pattern = known[marker] if marker in known else re.escape(marker.lower())
    return bool(re.search(pattern, text.lower())), f"postscript {marker}"


def _bullets(text: str, a: Arguments) -> Found:
    lines = [line.strip() for line in text.split("\n")]
    count = sum(line.startswith("-") or (line.startswith("*") and line[1:2] not in ("*", "")) for line in lines)
    return counted(count, a["num_bullets"], "exactly", "bullet points")


def _constrained(text: str, a: Arguments) -> Found:
    return any(answer in text for answer in a.get("options", ANSWERS)), "one of the given answers"


def _highlights(text: str, a: Arguments) -> Found:
    single = sum(bool(s.strip("*").strip()) for s in re.findall(r"\*[^\n*]*\*", text))
    double = sum(bool(s.strip("*").strip()) for s in re.findall(r"\*\*[^\n*]*\*\*", text))
    return counted(single + double, a["num_highlights"], "at least", "highlighted sections")


def _sections(text: str, a: Arguments) -> Found:
    count = len(re.findall(rf"{re.escape(a['section_spliter'])}\s?[0-9]+", text))
    return counted(count, a["num_sections"], "at least", "sections")


def _json(text: str, a: Arguments) -> Found:
    bare = text.strip()
    fence = re.match(r"```(?:json)?", bare, re.IGNORECASE)
    bare = bare[fence.end() :].removesuffix("```") if fence else bare
    try:
        value = json.loads(bare, parse_constant=_refused, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        return False, f"not JSON: {excerpt(str(error))}"
    wrong = fault(value, a["schema"]) if "schema" in a else ""
    return not wrong, wrong or "valid JSON"


def _refused(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a key that stands twice")
    return dict(pairs)


def _title(text: str, _: Arguments) -> Found:
    spans = ((line, line.find("<<"), line.rfind(">>")) for line in text.split("\n"))
    titled = any(start >= 0 and line[start:end].strip("<> \t") for line, start, end in spans if end > start)
    return titled, "a title in << >>" if titled else "no title in << >>"


def _two(text: str, _: Arguments) -> Found:
    parts = _parts(text, "******")
    if parts is None or len(parts) != 2:
        return False, f"{len(parts or [])} responses around ******, 2 asked for"
    return parts[0] != parts[1], "two responses" if parts[0] != parts[1] else "twice the same response"


def _capital_words(text: str, a: Arguments) -> Found:
    count = sum(w.isupper() for w in re.findall(r"\w+(?:['’-]\w+)*", text))
    return counted(count, a["capital_frequency"], a["capital_relation"], "words in capitals")


def _case(text: str, upper: bool) -> Found:
    if not (text.isupper() if upper else text.islower()):
        return False, f"letters that are not {'capital' if upper else 'lower case'}"
    language, _ = identify(text)
    return language in ("en", None), f"language {language or 'undecided'}"


def _table(text: str, a: Arguments) -> Found:
    lines = [line.strip() for line in text.split("\n")]
    cells = [
        line.strip("|").split("|") if line.startswith("|") and line.endswith("|") and len(line) > 1 else []
        for line in lines
    ]
    for i in range(1, len(cells)):
        rule = bool(cells[i]) and all(re.fullmatch(r"\s*:?-+:?\s*", c) for c in cells[i])
        if rule and len(cells[i - 1]) == len(cells[i]):
            rows = 0
            while i + rows + 1 < len(cells) and len(cells[i + rows + 1]) == len(cells[i]):
                rows += 1
            if rows == a["num_rows"] and len(cells[i]) == a["num_columns"]:
                return True, "the table is there"
    return False, f"no table of {a['num_rows']} rows and {a['num_columns']} columns"


def _code(text: str, a: Arguments) -> Found:
    wanted = a.get("language", "").lower()
    there = any(block.closed and wanted in ("", block.mark) and block.text.strip() for block in blocks(text))
    return there, "a code block" if there else "no such code block"


def _holds(ok: bool, detail: str) -> Found:
    return ok, detail if ok else f"not so: {detail}"


KINDS: dict[str, Kind] = {
    "keywords:existence": Kind(needs=("keywords",), check=_keywords, asks="Include the keywords {keywords}."),
    "keywords:frequency": Kind(read=True, needs=("keyword", "frequency", "relation"), check=_frequency,
        asks='Use the word "{keyword}" {relation} {frequency} times.'),
    "keywords:forbidden_words": Kind(read=True, needs=("forbidden_words",), check=_forbidden, asks="Do not use the words {forbidden_words}."),
    "keywords:letter_frequency": Kind(read=True, needs=("letter", "let_frequency", "let_relation"), check=_letters,
        asks='The letter "{letter}" appears {let_relation} {let_frequency} times.'),
    "language:response_language": Kind(needs=("language",), check=_language,
        asks="Write all of it in the language with the code {language}, and in no other."),
    "length_constraints:number_sentences": Kind(
        read=True, needs=("num_sentences", "relation"), check=lambda t, a: counted(sentences(t), a["num_sentences"], a["relation"], "sentences"),
        asks="Write {relation} {num_sentences} sentences."),
    "length_constraints:number_paragraphs": Kind(needs=("num_paragraphs",), check=_paragraph_count,
        asks="Write exactly {num_paragraphs} paragraphs with a line of three asterisks, ***, between them."),
    "length_constraints:number_words": Kind(
        read=True, needs=("num_words", "relation"), check=lambda t, a: counted(len(words(t)), a["num_words"], a["relation"], "words"),
        asks="Write {relation} {num_words} words."),
    "length_constraints:number_characters": Kind(  # own
        read=True, needs=("num_characters", "relation"), check=lambda t, a: counted(len(t.strip()), a["num_characters"], a["relation"], "characters"),
        asks="Write {relation} {num_characters} characters, spaces included."),
    "length_constraints:nth_paragraph_first_word": Kind(needs=("num_paragraphs", "nth_paragraph", "first_word"), check=_first_word,
        asks="Write exactly {num_paragraphs} paragraphs with an empty line between them; paragraph {nth_paragraph} starts with the word \"{first_word}\"."),
    "detectable_content:number_placeholders": Kind(needs=("num_placeholders",), check=_placeholders,
        asks="Use at least {num_placeholders} placeholders in square brackets, such as [name]."),
    "detectable_content:postscript": Kind(needs=("postscript_marker",), check=_postscript,
        asks="Add a postscript that starts with {postscript_marker}"),
    "detectable_format:number_bullet_lists": Kind(needs=("num_bullets",), check=_bullets,
        asks='Use exactly {num_bullets} bullet points, lines that start with "* ".'),
    "detectable_format:constrained_response": Kind(needs=(), check=_constrained, asks=f"Answer with one of: {' / '.join(ANSWERS)}"),
    "detectable_format:number_highlighted_sections": Kind(needs=("num_highlights",), check=_highlights,
        asks="Highlight at least {num_highlights} parts with asterisks, *like this*."),
    "detectable_format:multiple_sections": Kind(needs=("section_spliter", "num_sections"), check=_sections,
        asks="Write at least {num_sections} sections, headed {section_spliter} 1, {section_spliter} 2 and so on."),
    "detectable_format:json_format": Kind(needs=(), check=_json, asks="Write the whole answer as JSON."),
    "detectable_format:json_schema": Kind(needs=("schema",), check=_json,  # own
        asks="Write the whole answer as JSON that is valid by this JSON schema: {schema}"),
    "detectable_format:title": Kind(read=True, needs=(), check=_title, asks="Give it a title in double angle brackets, <<like this>>."),
    "detectable_format:markdown_table": Kind(needs=("num_rows", "num_columns"), check=_table,  # own
        asks="Include a Markdown table of {num_columns} columns, with a header and {num_rows} rows below it."),
    "detectable_format:code_block": Kind(needs=(), check=_code, asks="Include a code block between lines of ```{marked}."),  # own
    "combination:two_responses": Kind(needs=(), check=_two,
        asks="Give two different responses with six asterisks, ******, between them and nowhere else."),
    "combination:repeat_prompt": Kind(
        needs=("prompt_to_repeat",), check=lambda t, a: _holds(t.strip().lower().startswith(a["prompt_to_repeat"].strip().lower()), "starts with the request"),
        asks="First repeat this request word for word, then answer it: {prompt_to_repeat}"),
    "startend:start_checker": Kind(  # own
        needs=("start_phrase",), check=lambda t, a: _holds(t.strip().strip('"').lower().startswith(a["start_phrase"].strip().lower()), "starts with the phrase"),
        asks='Start with exactly this: "{start_phrase}"'),
    "startend:end_checker": Kind(
        needs=("end_phrase",), check=lambda t, a: _holds(t.strip().strip('"').lower().endswith(a["end_phrase"].strip().lower()), "ends with the phrase"),
        asks='End with exactly this and nothing after it: "{end_phrase}"'),
    "startend:quotation": Kind(
        needs=(), check=lambda t, _: _holds(len(t.strip()) > 1 and t.strip()[0] == t.strip()[-1] == '"', "within double quotation marks"),
        asks="Put the whole answer within double quotation marks."),
    "change_case:capital_word_frequency": Kind(read=True, needs=("capital_frequency", "capital_relation"), check=_capital_words,
        asks="Words all in capital letters appear {capital_relation} {capital_frequency} times."),
    "change_case:english_capital": Kind(read=True, needs=(), check=lambda t, _: _case(t, True), asks="Write in English, all in capital letters."),
    "change_case:english_lowercase": Kind(read=True, needs=(), check=lambda t, _: _case(t, False),
        asks="Write in English, all in lower case, without a capital letter."),
    "punctuation:no_comma": Kind(read=True, needs=(), check=lambda t, _: _holds("," not in t, "no comma"), asks="Use no commas."),
    "punctuation:forbidden": Kind(  # own
        read=True, needs=("marks",), check=lambda t, a: _holds(not any(mark in t for mark in a["marks"]), f"none of {' '.join(a['marks'])}"),
        asks="Do not use these marks: {marks}"),
}  # fmt: skip
