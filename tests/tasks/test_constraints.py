"""Instruction following is rewarded by these checks alone: one that is too lax is farmed, one that is too strict teaches the wrong habit.

Each kind is tried on texts judged by hand. Does not cover agreement with IFEval's own sentence splitter, which is statistical, nor what
JSON schemas mean: that is the library's.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollkeel import tasks
from rollkeel.errors import BadInput
from rollkeel.tasks.constraints import KINDS, check, describe, from_ifeval
from rollkeel.tasks.constraints.extras import fault, identify
from rollkeel.tasks.constraints.family import EXCLUSIVE, ONLY_WITH, compatible
from rollkeel.tasks.constraints.kinds import sentences

THREE = {"num_words": 3, "relation": "at least"}
CASES: list[tuple[str, dict[str, Any], str, bool | None]] = [
    ("keywords:existence", {"keywords": ["River", "town"]}, "A RIVER and two towns", True),
    ("keywords:existence", {"keywords": ["river", "town"]}, "A river", False),
    ("keywords:frequency", {"keyword": "go", "frequency": 2, "relation": "at least"}, "Go, going", True),
    ("keywords:frequency", {"keyword": "go", "frequency": 2, "relation": "less than"}, "Go, going", False),
    ("keywords:frequency", {"keyword": "a.b", "frequency": 1, "relation": "at least"}, "axb", False),
    ("keywords:forbidden_words", {"forbidden_words": ["go"]}, "She is going", True),
    ("keywords:forbidden_words", {"forbidden_words": ["go"]}, "Go!", False),
    ("keywords:letter_frequency", {"letter": "E", "let_frequency": 3, "let_relation": "at least"}, "Eel, elk", True),
    ("keywords:letter_frequency", {"letter": "e", "let_frequency": 3, "let_relation": "less than"}, "Eel, elk", False),
    ("language:response_language", {"language": "de"}, "Der Hund ist nicht auf der Straße und die Katze auch nicht.", True),
    ("language:response_language", {"language": "fr"}, "Der Hund ist nicht auf der Straße und die Katze auch nicht.", False),
    ("language:response_language", {"language": "de"}, "Hund", None),
    ("language:response_language", {"language": "tlh"}, "Der Hund ist nicht auf der Straße", None),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "at least"}, "One. Two", True),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "less than"}, "One. Two", False),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a\n***\nb", True),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a ***b\n***", True),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a\n***\n\n***\nb", False),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "a\n\nb", False),
    ("length_constraints:number_words", THREE, "one two-three", True),
    ("length_constraints:number_words", THREE, "one two", False),
    ("length_constraints:number_characters", {"num_characters": 5, "relation": "at most"}, " abcde\n", True),
    ("length_constraints:number_characters", {"num_characters": 5, "relation": "exactly"}, "abcdef", False),
    ("length_constraints:nth_paragraph_first_word", {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Well"}, 'a b\n\n\n"Well, c', True),
    ("length_constraints:nth_paragraph_first_word", {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "well"}, "well\n\nb", False),
    ("length_constraints:nth_paragraph_first_word", {"num_paragraphs": 1, "nth_paragraph": 2, "first_word": "well"}, "well", False),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[a] [b c]", True),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[a\nb] [c", False),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Bye.\np. s. more", True),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "Bye.\nP.S. more", False),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "Bye.\nP.P.S more", True),
    ("detectable_format:number_bullet_lists", {"num_bullets": 3}, "* a\n  - b\n-c\ntext * d", True),
    ("detectable_format:number_bullet_lists", {"num_bullets": 3}, "* a\n* b\n* c\n* d", False),
    ("detectable_format:number_bullet_lists", {"num_bullets": 1}, "**bold**\n* a", True),
    ("detectable_format:constrained_response", {}, "My answer is maybe.", True),
    ("detectable_format:constrained_response", {}, "my answer is yes", False),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a b* and **c**", True),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 1}, "* * and ***", False),
    ("detectable_format:multiple_sections", {"section_spliter": "PART", "num_sections": 2}, "PART 1\na\nPART 2\nb", True),
    ("detectable_format:multiple_sections", {"section_spliter": "PART", "num_sections": 2}, "Part 1\na\nPart 2\nb", False),
    ("detectable_format:json_format", {}, '```json\n{"a": [1, null]}\n```', True),
    ("detectable_format:json_format", {}, "{'a': 1}", False),
    ("detectable_format:json_format", {}, "[" * 100000, False),
    ("detectable_format:json_schema", {"schema": {"type": "array", "items": {"type": "integer"}}}, "[1, 2]", True),
    ("detectable_format:json_schema", {"schema": {"type": "array", "items": {"type": "integer"}}}, "[1, true]", False),
    ("detectable_format:title", {}, "text\n<<A title>>", True),
    ("detectable_format:title", {}, "<< >> <A title>", False),
    ("detectable_format:markdown_table", {"num_rows": 1, "num_columns": 2}, "x\n|a|b|\n|:-|--:|\n|1|2|\ny", True),
    ("detectable_format:markdown_table", {"num_rows": 1, "num_columns": 2}, "|a|b|\n|1|2|", False),
    ("detectable_format:markdown_table", {"num_rows": 1, "num_columns": 2}, "|a|b|\n|-|-|\n|1|2|\n|3|4|", False),
    ("detectable_format:code_block", {}, "x\n```\ny = 1\n```", True),
    ("detectable_format:code_block", {"language": "python"}, "```Python\ny = 1\n```", True),
    ("detectable_format:code_block", {"language": "python"}, "```rust\ny\n```", False),
    ("detectable_format:code_block", {}, "```\ny = 1", False),
    ("detectable_format:code_block", {}, "```\n\n```", False),
    ("combination:two_responses", {}, "a\n******\nb", True),
    ("combination:two_responses", {}, "a\n******\na", False),
    ("combination:two_responses", {}, "a ****** b ****** c", False),
    ("combination:two_responses", {}, "a *** b", False),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say it. "}, "  say IT. Yes", True),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Say it."}, "Yes. Say it.", False),
    ("startend:start_checker", {"start_phrase": "Dear all"}, '"dear ALL, hello', True),
    ("startend:start_checker", {"start_phrase": "Dear all"}, "Hello, dear all", False),
    ("startend:end_checker", {"end_phrase": "The end."}, 'It was. "the END."\n', True),
    ("startend:end_checker", {"end_phrase": "The end."}, "The end. Or not", False),
    ("startend:quotation", {}, ' "a" ', True),
    ("startend:quotation", {}, '"', False),
    ("startend:quotation", {}, '"a" b', False),
    ("change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": "at least"}, "A RED-HOT Thing", True),
    ("change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": "less than"}, "A RED Thing", False),
    ("change_case:english_capital", {}, "THE RIVER IS IN THE VALLEY, 3 KM.", True),
    ("change_case:english_capital", {}, "THE RIVER IS IN THE VALLEy", False),
    ("change_case:english_capital", {}, "DER HUND IST NICHT AUF DER STRASSE UND DIE KATZE AUCH NICHT", False),
    ("change_case:english_lowercase", {}, "the river is in the valley", True),
    ("change_case:english_lowercase", {}, "The river is in the valley", False),
    ("change_case:english_lowercase", {}, "123", False),
    ("punctuation:no_comma", {}, "a; b", True),
    ("punctuation:no_comma", {}, "a, b", False),
    ("punctuation:forbidden", {"marks": ["!", "?"]}, "a, b.", True),
    ("punctuation:forbidden", {"marks": ["!", "?"]}, "a?", False),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "arguments", "text", "expected"), CASES)
def test_each_kind_by_hand(kind: str, arguments: dict[str, Any], text: str, expected: bool | None) -> None:
    constraint = {"kind": kind, **arguments}
    [(ok, detail)] = check(text, [constraint])
    assert ok is expected, detail
    assert detail.isprintable()
    assert detail
    assert describe(constraint).count("\n") == 0


def test_every_kind_is_tried_both_ways() -> None:
    tried = {(kind, expected) for kind, _, _, expected in CASES}
    assert {(kind, ok) for kind in KINDS for ok in (True, False)} <= tried


def test_an_empty_text_holds_nothing() -> None:
    for text in ("", " \n"):
        assert check(text, [{"kind": "punctuation:no_comma"}, {"kind": "length_constraints:number_words", "num_words": 9, "relation": "less than"}]) == [(False, "the response is empty")] * 2  # fmt: skip


@pytest.mark.parametrize(
    ("text", "count"),
    [("One. Two! Three?", 3), ("Dr. No met Mr. X at 3.14 p.m. sharp.", 1), ("What?! Yes...", 2), ("No end", 1), ("他来了。她走了！", 2), ('He said "go." Then left.', 2), ("...", 0)],
)  # fmt: skip
def test_sentences(text: str, count: int) -> None:
    assert sentences(text) == count


def test_loose_forgives_a_frame_and_asterisks() -> None:
    quote, case = {"kind": "startend:quotation"}, {"kind": "change_case:english_lowercase"}
    text = 'Sure, here it is:\n**"the river is in the valley"**'
    assert [ok for ok, _ in check(text, [quote, case])] == [False, False]
    assert [ok for ok, _ in check(text, [quote, case], loose=True)] == [True, True]
    assert not check("A\nB\nC", [case], loose=True)[0][0]


def test_rows_of_ifeval() -> None:
    row = {
        "key": 1,
        "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
        "kwargs": [
            {"num_words": None, "relation": None},
            {"num_words": 300.0, "relation": "at least", "keywords": None},
        ],
    }
    found = from_ifeval(row)
    assert found == [
        {"kind": "punctuation:no_comma"},
        {"kind": "length_constraints:number_words", "num_words": 300, "relation": "at least"},
    ]
    with pytest.raises(BadInput, match="of one length"):
        from_ifeval({**row, "kwargs": []})
    with pytest.raises(BadInput, match="did you mean punctuation:no_comma"):
        from_ifeval({**row, "instruction_id_list": ["punctuation:no_comas", "punctuation:no_comma"]})


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        ({}, "kind None: unknown"),
        ({"kind": "length_constraints:number_word"}, "did you mean length_constraints:number_words"),
        ({"kind": "length_constraints:number_words", "num_words": 3}, "relation missing"),
        ({"kind": "length_constraints:number_words", "num_words": 3, "relation": "about"}, "one of at least"),
        ({"kind": "length_constraints:number_words", "num_words": "3", "relation": "at least"}, "expected a number, got '3'"),
        ({"kind": "keywords:existence", "keywords": "river"}, "expected texts, got 'river'"),
        ({"kind": "startend:end_checker", "end_phrase": 3}, "expected a text, got 3"),
        ({"kind": "detectable_format:json_schema", "schema": {"$ref": "#"}}, r"keyword '\$ref' is not supported"),
        ({"kind": "detectable_format:json_schema", "schema": {"type": "strin"}}, "JSON schema at \\$.type: 'strin' is not valid"),
    ],
)  # fmt: skip
def test_a_constraint_that_is_none_is_an_error_and_no_zero(constraint: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message) as caught:
        check("1", [constraint])
    assert "\n" not in str(caught.value)


SAMPLES = {
    "en": "The garden was not far from the town, and they had been there for the whole of the summer.",
    "de": "Der Garten war nicht weit von der Stadt, und sie sind den ganzen Sommer dort mit den Kindern gewesen.",
    "fr": "Le jardin est dans la ville et les enfants ne sont pas avec nous pour le moment.",
    "es": "El jardín no está en la ciudad, pero los niños van con su madre por el camino muy temprano.",
    "pt": "O jardim não fica na cidade, mas as crianças vão com a sua mãe para uma casa muito longe.",
    "it": "Il giardino non è nella città, ma i bambini sono con la madre in una casa che è più lontana.",
    "nl": "De tuin is niet ver van het dorp en zij zijn er de hele zomer met een hond geweest.",
    "pl": "Ogród nie jest daleko od miasta, ale dzieci są z matką w domu, który jest na wsi.",
    "vi": "Khu vườn không ở trong thành phố và những đứa trẻ đã đi với mẹ cho đến khi trời tối.",
    "sw": "Bustani hii ya mji ni nzuri na watoto wa shule wako katika nyumba ya mama kwa muda.",
    "fi": "Puutarha ei ole kaupungissa, mutta lapset ovat äidin kanssa ja he sanovat että se on kaunis.",
    "sv": "Trädgården är inte långt från staden och barnen var där med sin mor för att det är vackert.",
    "ru": "Сад не в городе, но дети были там с мамой, и они сказали, что это было очень хорошо для них.",
    "uk": "Сад не в місті, але діти були там з мамою, і вони сказали, що це було дуже добре для них та й усе.",
    "bg": "Градината не е в града, но децата са там с майка си и казаха, че това е много добре за тях.",
    "ar": "الحديقة ليست في المدينة ولكن الأطفال كانوا هناك مع الأم من الصباح إلى المساء على الطريق",
    "fa": "باغ در شهر نیست اما بچه ها با مادر خود به خانه ای که از این راه است می روند",
    "ur": "باغ شہر میں نہیں ہے لیکن بچے ماں کے ساتھ ہیں اور وہ اس گھر کو بھی دیکھ کر خوش ہو گئے",
    "hi": "बगीचा शहर में नहीं है लेकिन बच्चे माँ के साथ हैं और वह इस घर को भी देख कर खुश हो गए",
    "mr": "बाग शहरात नाही पण मुले आईच्या सोबत आहेत आणि ते घर सुंदर आहे असे ते म्हणाले तर ही",
    "ne": "बगैंचा सहरमा छैन तर केटाकेटी आमा संग छन् र यो घर राम्रो छ भने पनि त्यहाँ एक रुख हो",
    "zh": "花园不在城里，孩子们和母亲在一起。", "ja": "庭は町の中にありません。子供たちは母と一緒です。", "ko": "정원은 도시에 없지만 아이들은 어머니와 함께 있습니다.",
    "el": "Ο κήπος δεν είναι στην πόλη", "he": "הגן אינו בעיר והילדים שם", "th": "สวนไม่ได้อยู่ในเมือง", "bn": "বাগানটি শহরে নয় কিন্তু",
    "pa": "ਬਾਗ ਸ਼ਹਿਰ ਵਿੱਚ ਨਹੀਂ ਹੈ", "gu": "બગીચો શહેરમાં નથી પણ", "ta": "தோட்டம் நகரத்தில் இல்லை", "te": "తోట నగరంలో లేదు కానీ", "kn": "ತೋಟ ನಗರದಲ್ಲಿ ಇಲ್ಲ ಆದರೆ", "ml": "പൂന്തോട്ടം നഗരത്തിലല്ല",
}  # fmt: skip


@pytest.mark.parametrize("language", SAMPLES)
def test_languages_are_told_apart(language: str) -> None:
    found, why = identify(SAMPLES[language])
    assert found == language, why


@pytest.mark.parametrize(
    "text",
    [
        "",
        "123 !?",
        "Paris",
        "the river и это не на хорошо для них",
        "la la la la la la la la",
    ],
)
def test_what_is_not_sure_is_undecided(text: str) -> None:
    assert identify(text)[0] is None


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "array", "item": {}}, "keyword 'item' is not supported; did you mean items"),
        ({"pattern": "(a+)+$"}, "keyword 'pattern' is not supported"),
        ({"additionalProperties": False, "patternProperties": {"(a+)+$": {}}}, "'patternProperties' is not supported"),
        ({"anyOf": [{"properties": {"a": {"$ref": "http://127.0.0.1:1/x"}}}]}, r"'\$ref' is not supported"),
        ({"items": {"minLength": "3"}}, r"JSON schema at \$.items.minLength"),
        (7, "is not of type"),
    ],
)
def test_a_schema_that_could_hang_or_load_something_is_refused(schema: Any, message: str) -> None:
    with pytest.raises(BadInput, match=message) as caught:
        fault("a" * 50, schema)
    assert "\n" not in str(caught.value)


def test_schemas_of_any_names_on_any_value_end() -> None:
    named = {"properties": {"pattern": {"enum": [{"$ref": 1}]}}, "required": ["pattern"]}
    assert fault({"pattern": {"$ref": 1}}, named) == ""
    assert fault({"pattern": 2}, named).startswith("$.pattern: ")
    assert fault(int("9" * 4000), {"multipleOf": 0.1}) == "a number too large, or nested too deep"


@given(st.one_of(st.text(max_size=120), st.text(alphabet='[]*<>"|`-.,P S\n{}:1a', max_size=120)))
@settings(max_examples=150, deadline=None)
def test_no_text_breaks_a_check(text: str) -> None:
    for kind, arguments, _, _ in CASES:
        for loose in (False, True):
            assert check(text, [{"kind": kind, **arguments}], loose=loose)[0][0] in (True, False, None)


@pytest.mark.parametrize(
    "piece",
    [
        "[",
        "*",
        "<<",
        "**",
        "\n",
        " ",
        ".",
        '"',
        "|",
        "|-",
        "```\n",
        "p.",
        "Section ",
        "a ",
        "-",
        "******",
        "[" + " " * 50,
        "<<a",
        "।",
        "é",
    ],
)
def test_long_texts_stay_cheap(piece: str) -> None:
    text = piece * (200_000 // len(piece))
    for constraint in {kind: {"kind": kind, **arguments} for kind, arguments, _, _ in CASES}.values():
        check(text, [constraint])


def test_without_its_libraries_the_family_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "langdetect", None)  # as Python marks a module that cannot be imported
    with pytest.raises(BadInput, match=r"pip install 'rollkeel\[constraints\]'"):
        tasks.get("constraints")


class TestFamily:
    @pytest.mark.parametrize("count", [1, 2, 3, 4])
    def test_check_proves_the_family(self, count: int) -> None:
        report = tasks.check(tasks.get("constraints", {"constraints": count}), 20)
        assert report.failures == ()
        assert report.scored == 60 * (2 + 1 + count)  # every instruction has a near miss of its own

    @pytest.mark.slow
    @pytest.mark.parametrize("count", [1, 2, 3, 4])
    def test_check_proves_a_thousand_items(self, count: int) -> None:
        assert tasks.check(tasks.get("constraints", {"constraints": count}), 334).failures == ()

    def test_near_misses_break_exactly_one_instruction(self) -> None:
        task = tasks.get("constraints", {"constraints": 3})
        for i in range(30):
            item = task.item(0, "train", i)
            broken = [[ok for ok, _ in check(text, item.metadata["constraints"])] for text in task.near_misses(item)]
            assert broken == [[j != k for j in range(3)] for k in range(3)]

    def test_every_kind_is_drawn(self) -> None:
        task = tasks.get("constraints", {"constraints": 1})
        drawn = {task.item(0, "train", i).metadata["constraints"][0]["kind"] for i in range(400)}
        assert drawn == set(KINDS)

    def test_kinds_that_cannot_go_together_never_do(self) -> None:
        assert not compatible("change_case:english_capital", "change_case:english_lowercase")
        assert not compatible("detectable_format:json_format", "detectable_format:title")
        assert compatible("detectable_format:json_format", "length_constraints:number_words")
        assert {kind for group in (*EXCLUSIVE, *ONLY_WITH.values()) for kind in group} | set(ONLY_WITH) <= set(KINDS)
        task = tasks.get("constraints", {"constraints": 4})
        for i in range(30):
            kinds = [c["kind"] for c in task.item(0, "train", i).metadata["constraints"]]
            assert all(compatible(a, b) for j, a in enumerate(kinds) for b in kinds[:j])

    def test_effort_rises_with_the_knob(self) -> None:
        medians = []
        for count in (1, 2, 4):
            task = tasks.get("constraints", {"constraints": count})
            medians.append(statistics.median(task.effort(task.draw(random.Random(i))) for i in range(200)))
        assert medians == [1, 2, 4]

    def test_items_travel_as_json(self) -> None:
        task = tasks.get("constraints", {"constraints": 4})
        item = task.item(1, "train", 0)
        assert json.loads(json.dumps(item.to_json())) == item.to_json()
        assert all(describe(c) in item.text for c in item.metadata["constraints"])
