"""What the corpus's own tasks share."""

from __future__ import annotations

import random

DIGITS = "0123456789"
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def misspelled(answer: str, alphabet: str, rng: random.Random, share: float) -> str:
    """A `share` of the letters drawn anew from `alphabet`."""
    return "".join(rng.choice(alphabet) if rng.random() < share else letter for letter in answer)
