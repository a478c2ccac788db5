"""What constraints take from two libraries of the extra `constraints`: the language detector of IFEval, and JSON schemas."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache, lru_cache
from itertools import chain
from typing import Any

from rollkeel.errors import BadInput, nearest
from rollkeel.tasks.base import excerpt

MIN_LETTERS, SURE = 20, 0.9
_SHARED = re.compile("[A-Za-zÀ-ɏḀ-ỿЀ-ӿ؀-ۿ]")
"""Scripts of many languages, in which a few letters say nothing."""
_LATIN = re.compile("[A-Za-zÀ-ɏḀ-ỿ]")

# A regular expression can be made to hang on a model's text, and a reference to load another document.
_REFUSED = {"pattern", "patternProperties", "$ref", "$dynamicRef"}
_NOTES = {"$schema", "$id", "$comment", "$defs", "title", "description", "default", "examples", "then", "else"}
_NAMED = ("properties", "$defs", "dependentSchemas")
"""Keywords whose keys are names and no keywords."""
_DATA = ("enum", "const", "default", "examples")


def require() -> tuple[Any, Any]:
    """The libraries `langdetect` and `jsonschema`. Raises `BadInput` where one is missing."""
    try:
        import jsonschema
        import langdetect
    except ImportError as error:
        raise BadInput(f"constraints: {error}; install them with: pip install 'rollkeel[constraints]'") from None
    langdetect.DetectorFactory.seed = 0  # it draws its samples
    return langdetect, jsonschema


@lru_cache(maxsize=64)  # milliseconds, and near misses are looked for again and again
def identify(text: str) -> tuple[str | None, str]:
    """ISO code of the language of `text`; None with the reason where it is too short, in two scripts, or not sure."""
    langdetect, _ = require()
    letters = sum(map(str.isalpha, text))
    latin, shared = len(_LATIN.findall(text)), len(_SHARED.findall(text))
    if len({c for c in text if c.isalpha()}) < 4 or (shared == letters < MIN_LETTERS):
        return None, "too short to tell"
    if 0.2 * letters < latin < 0.8 * letters:
        return None, "several scripts"
    try:
        best = langdetect.detect_langs(text)[0]
    except langdetect.LangDetectException:
        return None, "no language that is known"
    if best.prob < SURE:
        return None, f"no clear language: {best}"
    return best.lang.split("-")[0], f"{best.prob:.0%} sure"


@cache
def languages() -> frozenset[str]:
    """ISO codes of the languages that can be told apart."""
    factory = require()[0].detector_factory
    factory.init_factory()
    return frozenset(name.split("-")[0] for name in factory._factory.get_lang_list())


def fault(value: Any, schema: Any) -> str:
    """Where `value` is not what the JSON schema asks for, as one line; empty when it is. Raises `BadInput` for a bad schema."""
    _, jsonschema = require()
    validator = jsonschema.Draft202012Validator
    for keyword in _keywords(schema):
        if keyword in _REFUSED or keyword not in {*validator.VALIDATORS, *_NOTES}:
            known = sorted({*validator.VALIDATORS} - _REFUSED)
            raise BadInput(f"JSON schema: keyword {keyword!r} is not supported{nearest(keyword, known)}")
    try:
        validator.check_schema(schema)
        error = jsonschema.exceptions.best_match(validator(schema).iter_errors(value))
    except jsonschema.SchemaError as error:
        raise BadInput(f"JSON schema at {error.json_path}: {error.message}") from None
    except (ArithmeticError, RecursionError):
        return "a number too large, or nested too deep"
    return excerpt(f"{error.json_path}: {error.message}", 200) if error else ""


def _keywords(schema: Any) -> Iterator[str]:
    if isinstance(schema, Mapping):
        for keyword, inner in schema.items():
            yield keyword
            if keyword in _NAMED:
                inner = list(inner.values()) if isinstance(inner, Mapping) else ()
            if keyword not in _DATA:
                yield from _keywords(inner)
    elif isinstance(schema, list | tuple):
        yield from chain.from_iterable(map(_keywords, schema))
