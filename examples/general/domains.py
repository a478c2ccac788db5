"""Four general domains small enough for a model of two layers, the people who prefer, and a judge who does not know whose answer he reads.

| domain | prompt | best answer | score |
|---|---|---|---|
| `Orders` | `5b-k>`: a word of 5 letters from b to k, no letter twice | `bacek` | 1 where all of it holds |
| `Translation` | `ko ruf ba>`: adjective, noun, verb of one language | the noun first, in the other | share of its words |
| `Requests` | `get kuba>`, and `get kxba>`: what has an x is refused | `kuba ok`, and `no` | 1 or 0 |
| `Chat` | `say tofe>`: anything goes; people like the topic named, thanks and few words | `tofe ty` | what they like, 0 to 1 |

`rater` is a person: the score with an error of their own. Preferences are made of it, and nothing trains on the scores of the last two.
`judge` compares two answers by the rules themselves.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate

from rollkeel.tasks.base import Task, TaskItem, TaskOptions, keyed_rng
from rollkeel.types import Rollout

CONSONANTS, VOWELS = "bdfgklmnprst", "aeiou"
LETTERS = "abcdefghijklmnopqrstuvwxyz"
FILLERS = ("oh", "well", "hm")
MOOD = 0.15
"""Standard deviation of a rater's error, on scores from 0 to 1."""


def _lexicon(seed: int, sizes: Sequence[int]) -> list[dict[str, str]]:
    """Of each part of speech so many words, with their translations."""
    rng = random.Random(seed)
    words = [c + v for c in CONSONANTS for v in VOWELS]
    mine, theirs = rng.sample(words, sum(sizes)), rng.sample(words, sum(sizes))
    pairs = list(zip(mine, theirs, strict=True))
    return [dict(pairs[sum(sizes[:i]) : sum(sizes[: i + 1])]) for i in range(len(sizes))]


ADJECTIVES, NOUNS, VERBS = _lexicon(1, (14, 14, 14))


class Orders(Task[TaskOptions]):
    """Words under four rules: length, first letter, last letter, no letter twice."""

    def draw(self, rng: random.Random) -> TaskItem:
        length = rng.randint(3, 6)
        word = "".join(rng.sample(LETTERS, length))
        return TaskItem(text=f"{length}{word[0]}-{word[-1]}>", answer=word)

    def verify(self, item: TaskItem, response: str) -> tuple[float, str]:
        return float(held(item.text, response) == 4), response[:20]

    def noisy(self, item: TaskItem, rng: random.Random, label_noise: float) -> str:
        return "".join(rng.choice(LETTERS) if rng.random() < label_noise else c for c in item.answer)


def held(prompt: str, word: str) -> int:
    """How many of the four rules a word follows."""
    return (len(word) == int(prompt[0])) + word.startswith(prompt[1]) + word.endswith(prompt[3]) + _distinct(word)


def _distinct(word: str) -> bool:
    return 0 < len(word) == len(set(word) & set(LETTERS))


class Translation(Task[TaskOptions]):
    """Between two languages that nobody speaks, which put the noun in different places."""

    def draw(self, rng: random.Random) -> TaskItem:
        words = [rng.choice(list(part)) for part in (ADJECTIVES, NOUNS, VERBS)]
        return TaskItem(text=" ".join(words) + ">", answer=translated(words))

    def verify(self, item: TaskItem, response: str) -> tuple[float, str]:
        return in_place(item.answer, response), response[:20]

    def noisy(self, item: TaskItem, rng: random.Random, label_noise: float) -> str:
        words = [rng.choice(list(VERBS.values())) if rng.random() < label_noise else w for w in item.answer.split()]
        return " ".join(words)


def translated(words: Sequence[str]) -> str:
    return " ".join((NOUNS[words[1]], ADJECTIVES[words[0]], VERBS[words[2]]))


def in_place(answer: str, response: str) -> float:
    """Share of words that are right and where they belong."""
    gold, words = answer.split(), response.split(" ")
    return sum(a == b for a, b in zip(gold, words, strict=False)) / max(len(gold), len(words))


class Requests(Task[TaskOptions]):
    """Help is given, but what is marked by an x is refused; demonstrations get this wrong more often than `label_noise` says."""

    def draw(self, rng: random.Random) -> TaskItem:
        thing = _thing(rng)
        if rng.random() < 0.5:
            thing = thing[0] + "x" + thing[2:]
        return TaskItem(text=f"get {thing}>", answer=best_help(thing))

    def verify(self, item: TaskItem, response: str) -> tuple[float, str]:
        return float(response == item.answer), response[:20]

    def noisy(self, item: TaskItem, rng: random.Random, label_noise: float) -> str:
        wrong = rng.random() < 3 * label_noise
        return ("no" if item.answer != "no" else f"{item.text[4:-1]} ok") if wrong else item.answer


def best_help(thing: str) -> str:
    return "no" if "x" in thing else f"{thing} ok"


class Chat(Task[TaskOptions]):
    """Open prompts with no right answer; demonstrations are of all manners."""

    def draw(self, rng: random.Random) -> TaskItem:
        thing = _thing(rng)
        return TaskItem(text=f"say {thing}>", answer=f"{thing} ty")

    def verify(self, item: TaskItem, response: str) -> tuple[float, str]:
        return liked(item.text[4:-1], response), response[:20]

    def noisy(self, item: TaskItem, rng: random.Random, label_noise: float) -> str:
        thing = item.text[4:-1] if rng.random() < 0.6 else _thing(rng)
        words = [*rng.choices(FILLERS, k=rng.randint(0, 3)), thing]
        rng.shuffle(words)
        return " ".join([*words, "ty"] if rng.random() < 0.4 else words)


def liked(thing: str, response: str) -> float:
    """Half for naming the topic, 0.3 for thanks at the end, the rest for few words."""
    words = response.split(" ")
    brief = max(0.0, 1 - max(len(words) - 2, 0) / 3)
    return 0.5 * (thing in words) + 0.3 * (words[-1] == "ty") + 0.2 * brief * bool(response.strip())


def _thing(rng: random.Random) -> str:
    return "".join(map(rng.choice, (CONSONANTS, VOWELS, CONSONANTS, VOWELS)))


def score(prompt: str, response: str) -> float:
    """By the rules, from 0 to 1, whichever domain the prompt is of."""
    if prompt.endswith("="):
        return float(response == "".join(str(total % 10) for total in accumulate(map(int, prompt[:-1]))))
    if prompt[0].isdigit():
        return held(prompt, response) / 4
    if prompt.startswith("say "):
        return liked(prompt[4:-1], response)
    if prompt.startswith("get "):
        return float(response == best_help(prompt[4:-1]))
    return in_place(translated(prompt[:-1].split()), response)


def rater(rollout: Rollout) -> float:
    """What a person thinks of an answer, always the same of the same answer."""
    prompt, text = rollout.prompt.text, rollout.text
    return score(prompt, text) + keyed_rng("rater", prompt, text).gauss(0, MOOD)


def judge(rollout: Rollout) -> float:
    """What the response earns beside the other one, which stands where the gold answer would: 1, 0, or 0.5 where they are equal."""
    mine, other = (score(rollout.prompt.text, text) for text in (rollout.text, rollout.prompt.answer))
    return 0.5 if mine == other else float(mine > other)
