"""The family `constraints`: write about something under one to four instructions that a program can check."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from pydantic import Field

from rollkeel.tasks.base import Task, TaskItem, TaskOptions
from rollkeel.tasks.constraints import check, describe
from rollkeel.tasks.constraints.breaking import changes
from rollkeel.tasks.constraints.extras import require
from rollkeel.tasks.constraints.kinds import ANSWERS, KINDS, paragraphs, sentences, words

TOPICS = (
    "an old river", "a small garden", "the night train", "a stone bridge", "the first snow", "a market town",
    "an empty house", "the long road",
)  # fmt: skip
_SUBJECTS = ("The old river", "Every small garden", "A patient gardener", "Some quiet streets", "The night train", "One stone bridge",
             "Our first winter", "That empty house", "A careful painter", "The market square")  # fmt: skip
_VERBS = ("crossed", "followed", "remembered", "changed", "reached", "surrounded", "carried", "left behind")
_OBJECTS = (
    "the silent valley", "a narrow path", "the colour of the hills", "a line of trees", "the sound of bells",
    "an older story",
)  # fmt: skip
_PLACES = (
    "near the harbour", "in the early morning", "after a long summer", "with a lantern", "before the storm",
    "at the edge of the forest",
)  # fmt: skip
FOREIGN = {
    "de": ("Der Fluss ist nicht weit von dem Dorf und die Wiese.", "Die Kinder sind mit dem Hund auf der Brücke.", "Das Haus ist ein altes Haus und es hat auch einen Garten.", "Der Winter ist lang und die Nacht ist kalt."),
    "fr": ("Le village est dans la vallée et les maisons sont sur la colline.", "Il ne pleut pas dans le jardin avec les fleurs.", "Une femme marche sur le pont avec un chien.", "La nuit est longue et le train est en retard."),
    "es": ("El pueblo está en el valle y las casas son muy viejas.", "La mujer con el perro es de una ciudad en el norte.", "El tren de la noche no es para los niños.", "Los campos y el camino son de un hombre muy viejo."),
}  # fmt: skip
_COUNTS = ("length_constraints:number_words", "length_constraints:number_characters")
_TERMS = ("keywords:existence", "keywords:frequency", "keywords:forbidden_words", "keywords:letter_frequency")
EXCLUSIVE = (
    {"length_constraints:number_paragraphs", "length_constraints:nth_paragraph_first_word", "detectable_format:multiple_sections", "combination:two_responses"},
    {"change_case:english_capital", "change_case:english_lowercase", "change_case:capital_word_frequency", "detectable_format:constrained_response"},
    {"detectable_format:title", "startend:start_checker", "startend:quotation", "combination:repeat_prompt", "length_constraints:nth_paragraph_first_word"},
    {"change_case:english_lowercase", "detectable_content:postscript"}, {"change_case:english_lowercase", "detectable_format:multiple_sections"},
    {"change_case:english_lowercase", "combination:repeat_prompt"}, {"change_case:english_capital", "combination:repeat_prompt"},
    {"change_case:english_capital", "detectable_format:code_block"}, {"startend:quotation", "startend:end_checker"},
    {"punctuation:no_comma", "punctuation:forbidden"},
)  # fmt: skip
"""Of each set at most one kind: together they would ask for what cannot be, or for what no reader could tell apart."""
ONLY_WITH = {
    "detectable_format:json_format": {*_COUNTS, *_TERMS},
    "detectable_format:json_schema": {*_COUNTS, *_TERMS},
    "language:response_language": {*_COUNTS, *_TERMS, "length_constraints:number_sentences", "length_constraints:number_paragraphs", "punctuation:no_comma", "startend:quotation"},
}  # fmt: skip


def compatible(one: str, other: str) -> bool:
    """Whether one text can be asked to hold both kinds."""
    if any(a in ONLY_WITH and b not in ONLY_WITH[a] for a, b in ((one, other), (other, one))):
        return False
    return one != other and not any({one, other} <= group for group in EXCLUSIVE)


class ConstraintsOptions(TaskOptions):
    constraints: int = Field(2, ge=1, le=4, description="instructions that must hold at once")


@final
class Constraints(Task[ConstraintsOptions]):
    """The whole response is judged, strictly: it scores 1 when it holds every instruction, whatever it says. What cannot be
    decided (a language) scores 0 and says so. The gold response was built to hold them all, each near miss breaks exactly one."""

    summary = "verifiable instructions: length, format, keywords, case, language, JSON"
    junk = ()  # most instructions allow more text

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        """Raises `BadInput` without the extra `constraints`."""
        super().__init__(options)
        require()

    def draw(self, rng: random.Random) -> TaskItem:
        kinds = _kinds(rng, self.options.constraints)
        topic = rng.choice(TOPICS)
        draft = _Draft.write(rng, topic, kinds)
        text = draft.render()
        asked = [{"kind": kind, **(_ARGUMENTS[kind](text, draft, rng) if kind in _ARGUMENTS else {})} for kind in kinds]
        request = " ".join([f"Write about {topic}.", *map(describe, asked)])
        return TaskItem(text=request, answer=text, metadata={"constraints": asked})

    def finish(self, item: TaskItem, rng: random.Random) -> TaskItem | None:
        """Only items whose text holds every instruction, and in which each can be broken alone."""
        asked = item.metadata["constraints"]
        sound = all(ok for ok, _ in check(item.answer, asked)) and len(self.near_misses(item)) == len(asked)
        return item if sound else None

    def verify(self, item: TaskItem, response: str) -> tuple[float, str]:
        for (ok, detail), constraint in zip(
            check(response, item.metadata["constraints"]), item.metadata["constraints"], strict=True
        ):
            if not ok:
                return 0.0, f"{constraint['kind']}: {'undecided: ' if ok is None else ''}{detail}"
        return 1.0, f"all {len(item.metadata['constraints'])} hold"

    def near_misses(self, item: TaskItem) -> Sequence[str]:
        """For each instruction, the first of its smallest changes to the answer that breaks it alone; none where all break others too."""
        asked, out = item.metadata["constraints"], []
        for i, constraint in enumerate(asked):
            others = [*asked[:i], *asked[i + 1 :]]
            for text in changes(item.answer, constraint):
                if check(text, [constraint])[0][0] is False and all(ok for ok, _ in check(text, others)):
                    out.append(text)
                    break
        return out

    def noisy(self, item: TaskItem, rng: random.Random, label_noise: float) -> str:
        """Each instruction is broken with probability `label_noise`, though never two at once."""
        broken = [text for text in self.near_misses(item) if rng.random() < label_noise]
        return rng.choice(broken) if broken else item.answer

    def effort(self, item: TaskItem) -> float:
        """Instructions to hold."""
        return float(len(item.metadata["constraints"]))


def _kinds(rng: random.Random, count: int) -> list[str]:
    """Draw until `count` kinds go together."""
    while True:
        kinds = rng.sample(list(KINDS), count)
        if all(compatible(a, b) for i, a in enumerate(kinds) for b in kinds[:i]):
            return kinds


@dataclass
class _Draft:
    """A response in the making."""

    kinds: Sequence[str]
    topic: str
    sentences: list[str]
    parts: int
    """Into which the sentences are laid out."""
    head: list[str] = field(default_factory=list)
    tail: list[str] = field(default_factory=list)
    language: str = "en"

    @staticmethod
    def write(rng: random.Random, topic: str, kinds: Sequence[str]) -> _Draft:
        draft = _Draft(kinds, topic, [_sentence(rng) for _ in range(rng.randint(4, 7))], rng.randint(2, 4))
        n = rng.randint(2, 4)
        for kind in [k for k in _ADD if k in kinds]:
            _ADD[kind](draft, rng, n)
        return draft

    def render(self) -> str:
        if "detectable_format:json_format" in self.kinds or "detectable_format:json_schema" in self.kinds:
            return json.dumps({"title": self.topic, "notes": self.sentences, "count": len(self.sentences)}, indent=1)
        size = -(-len(self.sentences) // self.parts)
        blocks = [" ".join(self.sentences[i : i + size]) for i in range(0, len(self.sentences), size)]
        body = " ".join(blocks)
        if "length_constraints:number_paragraphs" in self.kinds:
            body = "\n***\n".join(blocks)
        elif "length_constraints:nth_paragraph_first_word" in self.kinds:
            body = "\n\n".join(blocks)
        elif "detectable_format:multiple_sections" in self.kinds:
            body = "\n".join(f"Section {i}\n{block}" for i, block in enumerate(blocks, 1))
        elif "combination:two_responses" in self.kinds:
            body = f"{' '.join(blocks[:-1])}\n******\n{blocks[-1]}"
        text = "\n".join([*self.head, body, *self.tail])
        text = text.upper() if "change_case:english_capital" in self.kinds else text
        text = text.lower() if "change_case:english_lowercase" in self.kinds else text
        return f'"{text}"' if "startend:quotation" in self.kinds else text


def _sentence(rng: random.Random) -> str:
    return " ".join(map(rng.choice, (_SUBJECTS, _VERBS, _OBJECTS, _PLACES))) + "."


def _foreign(draft: _Draft, rng: random.Random, _: int) -> None:
    draft.language = rng.choice(list(FOREIGN))
    draft.sentences = list(FOREIGN[draft.language])
    rng.shuffle(draft.sentences)


def _capitals(draft: _Draft, rng: random.Random, n: int) -> None:
    for i in range(n):
        subject, _, rest = draft.sentences[i].partition(" ")
        draft.sentences[i] = f"{subject} {rest.split()[0].upper()} {' '.join(rest.split()[1:])}"


_ADD: dict[str, Any] = {
    "language:response_language": _foreign,
    "detectable_format:constrained_response": lambda d, rng, n: d.sentences.insert(0, rng.choice(ANSWERS)),
    "change_case:capital_word_frequency": _capitals,
    "detectable_format:number_highlighted_sections": lambda d, rng, n: d.sentences.extend(
        f"We thought of *{rng.choice(_OBJECTS)}* again." for _ in range(n)
    ),
    "detectable_content:number_placeholders": lambda d, rng, n: d.sentences.append(
        "Send a letter to " + " and ".join(rng.sample(["[name]", "[street]", "[town]", "[country]"], n)) + "."
    ),
    "detectable_format:title": lambda d, rng, n: d.head.append(f"<<{d.topic.capitalize()}>>"),
    "combination:repeat_prompt": lambda d, rng, n: d.head.append(f"Write about {d.topic}."),
    "detectable_format:markdown_table": lambda d, rng, n: d.tail.extend(
        ["| place | time |", "|---|---|", *(f"| {rng.choice(_OBJECTS)} | {i} |" for i in range(n))]
    ),
    "detectable_format:code_block": lambda d, rng, n: d.tail.extend(["```python", f"print({n})", "```"]),
    "detectable_format:number_bullet_lists": lambda d, rng, n: d.tail.extend(
        f"* {rng.choice(_OBJECTS)}" for _ in range(n)
    ),
    "detectable_content:postscript": lambda d, rng, n: d.tail.append(f"P.S. {_sentence(rng)}"),
    "startend:end_checker": lambda d, rng, n: d.tail.append(
        rng.choice(("That is all for now.", "Come and see it some day."))
    ),
}
"""What a kind adds to a draft, in the order in which it is added."""


def _bound(rng: random.Random, count: int, key: str, relation: str, slack: int = 0) -> dict[str, Any]:
    """A bound that `count` holds, within `slack` of it."""
    if rng.random() < 0.5 and count > slack:
        return {key: count - rng.randint(0, slack), relation: "at least"}
    return {key: count + 1 + rng.randint(0, slack), relation: "less than"}


def _long(text: str) -> list[str]:
    return sorted({w for w in words(text) if len(w) > 4 and w.isalpha()})


def _frequency(text: str, draft: _Draft, rng: random.Random) -> dict[str, Any]:
    word = rng.choice(_long(text.lower()))
    return {"keyword": word, **_bound(rng, text.lower().count(word), "frequency", "relation")}


def _forbidden(text: str, draft: _Draft, rng: random.Random) -> dict[str, Any]:
    others = [w for w in _long(" ".join(("window island silver", *_OBJECTS, *_PLACES))) if w not in text.lower()]
    return {"forbidden_words": sorted(rng.sample(others, 2))}


def _letters(text: str, draft: _Draft, rng: random.Random) -> dict[str, Any]:
    letter = rng.choice("aeinorst")
    return {"letter": letter, **_bound(rng, text.lower().count(letter), "let_frequency", "let_relation", 2)}


def _first_word(text: str, draft: _Draft, rng: random.Random) -> dict[str, Any]:
    parts = text.split("\n\n")
    nth = rng.randint(1, len(parts))
    return {"num_paragraphs": len(parts), "nth_paragraph": nth, "first_word": words(parts[nth - 1])[0].lower()}


def _schema(text: str, draft: _Draft, rng: random.Random) -> dict[str, Any]:
    notes = {"type": "array", "minItems": len(draft.sentences), "items": {"type": "string"}}
    properties = {
        "title": {"type": "string", "maxLength": 40},
        "notes": notes,
        "count": {"type": "integer", "minimum": 1},
    }
    return {"schema": {"type": "object", "properties": properties, "required": ["title", "notes", "count"]}}


def _capital(text: str, draft: _Draft, rng: random.Random) -> dict[str, Any]:
    count = sum(w.isupper() for w in re.findall(r"\w+(?:['’-]\w+)*", text))
    return _bound(rng, count, "capital_frequency", "capital_relation")


_ARGUMENTS: dict[str, Callable[[str, _Draft, random.Random], dict[str, Any]]] = {
    "keywords:existence": lambda t, d, rng: {"keywords": rng.sample(_long(t.lower()), 2)},
    "keywords:frequency": _frequency,
    "keywords:forbidden_words": _forbidden,
    "keywords:letter_frequency": _letters,
    "language:response_language": lambda t, d, rng: {"language": d.language},
    "length_constraints:number_sentences": lambda t, d, rng: _bound(rng, sentences(t), "num_sentences", "relation"),
    "length_constraints:number_words": lambda t, d, rng: _bound(rng, len(words(t)), "num_words", "relation", 3),
    "length_constraints:number_characters": lambda t, d, rng: _bound(rng, len(t), "num_characters", "relation", 10),
    "length_constraints:number_paragraphs": lambda t, d, rng: {"num_paragraphs": len(paragraphs(t) or [])},
    "length_constraints:nth_paragraph_first_word": _first_word,
    "detectable_content:number_placeholders": lambda t, d, rng: {"num_placeholders": t.count("[")},
    "detectable_content:postscript": lambda t, d, rng: {"postscript_marker": "P.S."},
    "detectable_format:number_bullet_lists": lambda t, d, rng: {"num_bullets": t.count("\n* ")},
    "detectable_format:number_highlighted_sections": lambda t, d, rng: {"num_highlights": len(re.findall(r"\*[^\n*]+\*", t))},
    "detectable_format:multiple_sections": lambda t, d, rng: {"section_spliter": "Section", "num_sections": t.count("Section ")},
    "detectable_format:markdown_table": lambda t, d, rng: {"num_rows": t.count("\n| ") - 1, "num_columns": 2},
    "detectable_format:code_block": lambda t, d, rng: {"language": "python"},
    "detectable_format:json_schema": _schema,
    "combination:repeat_prompt": lambda t, d, rng: {"prompt_to_repeat": f"Write about {d.topic}."},
    "startend:start_checker": lambda t, d, rng: {"start_phrase": " ".join(t.split()[:3])},
    "startend:end_checker": lambda t, d, rng: {"end_phrase": d.tail[-1] if t.endswith(d.tail[-1]) else t.split("\n")[-1]},
    "change_case:capital_word_frequency": _capital,
    "punctuation:forbidden": lambda t, d, rng: {"marks": [mark for mark in ";?!:" if mark not in t][:2]},
}  # fmt: skip
"""Arguments that a text holds, by kind: measured on it. Other kinds need none."""
