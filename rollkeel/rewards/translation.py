"""`translation`: how near a response is to reference translations, by sacrebleu (Post 2018), from 0 to 1."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from rollkeel.rewards.answers import spoken

_DEFAULTS: dict[str, Any] = {"metric": "chrf", "references": [], "tokenize": "13a"}
METRICS = ("chrf", "chrf++", "bleu")


def grade(text: str, answer: str, options: Mapping[str, Any]) -> tuple[float, str]:
    """Options `{metric: chrf | chrf++ | bleu, references: [], tokenize: 13a}`: sentence score of the response, thought aside, against the
    answer and further `references`; `tokenize` is BLEU's, `zh` or `char` where words have no spaces between them."""
    sacrebleu = importlib.import_module("sacrebleu")
    if unknown := sorted(set(options) - set(_DEFAULTS)):
        raise ValueError(f"unknown option {unknown[0]!r}; known: {', '.join(_DEFAULTS)}")
    chosen = _DEFAULTS | dict(options)
    references = [answer, *chosen["references"]]
    if chosen["metric"] not in METRICS or not all(isinstance(r, str) and r.strip() for r in references):
        raise ValueError(f"expected references that are not empty and one of {', '.join(METRICS)} as metric")
    said = (spoken(text) or "").strip()
    if not said:
        return 0.0, "no answer"
    if chosen["metric"] == "bleu":
        score = sacrebleu.sentence_bleu(said, references, tokenize=chosen["tokenize"]).score
    else:
        score = sacrebleu.sentence_chrf(said, references, word_order=2 * (chosen["metric"] == "chrf++")).score
    return min(max(score / 100, 0.0), 1.0), f"{chosen['metric']} {score:.1f}"
