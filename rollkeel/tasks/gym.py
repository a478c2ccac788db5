"""Every usable generator of the library reasoning-gym as a task: `gym` with `generator` and its own `config`.

Reward is 1 where the generator's scorer says exactly 1, else 0: much of the library pays partial credit, some of it for any
text at all. What its scorer raises is raised, so that it counts as a broken grader; runs grade in killable workers
(`gym_worker.py`), since some scorers call computer algebra without a bound. Generators that could not keep the
promises of a task are refused by name (`REFUSED`); text that a scorer would run as a program is never given to it
(`ACCEPTED`). Install with `pip install 'rollkeel[gym]'`; nothing of it is imported before a `gym` task is made.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import math
import random
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, final

import numpy as np
from pydantic import Field

from rollkeel.errors import BadInput, GraderFailure, nearest
from rollkeel.tasks.base import MAX_RESPONSE_CHARS, Task, TaskItem, TaskOptions, excerpt

_ORDER = "makes other items in another process: it depends on the order of Python's hashes"
_SILENT = "publishes no answer, so that nothing proves its scorer"
REFUSED = {
    "boxnet": _SILENT,
    "codeio": "runs programs of its data set in this process",
    "composite": "mixes other generators; name one of them",
    "game_of_life_halting": "its scorer gives 1 to any text",
    "isomorphic_strings": _ORDER,
    "knight_swap": _ORDER,
    "polynomial_multiplication": _ORDER,
    "puzzle24": "its scorer takes other numbers than those given; use the task game24",
    "ransom_note": _ORDER,
    "rush_hour": _SILENT,
}
"""Generators that are not offered, and why."""

_NAMES = r"(?<![a-zA-Z0-9])(?:[a-zA-Z]|sin|cos|tan|asin|acos|atan|exp|log|sqrt)(?![a-zA-Z0-9])"
_INTEGRAL = re.compile(
    # Neither a power of a power nor many powers of brackets: their numbers would fill the memory.
    r"(?!.*\*\* *\(?-?[0-9]+\)? *\*\*)(?!(?:.*\) *\*\*){3})"
    rf"(?:{_NAMES}|[0-9]{{1,6}}(?![0-9])|\*\*\(?-?[0-9]{{1,2}}(?![0-9])|\*(?!\*)|[-+/() ]){{1,256}}"
)
ACCEPTED = {
    "binary_matrix": re.compile(r"[0-9 \n]*"),
    "countdown": re.compile(r"(?!.*(?:\*\*|//))[-+*/() 0-9]{1,256}"),
    "gsm_symbolic": re.compile(r"[0-9]+(\.[0-9]+)?"),
    "intermediate_integration": _INTEGRAL,
    "n_queens": re.compile(r"[_Q \n]*"),
    "prime_factorization": re.compile(r"[0-9]+( *× *[0-9]+)*"),
    "simple_integration": _INTEGRAL,
    "spiral_matrix": re.compile(r"[0-9 ]*"),
    "string_insertion": re.compile(r"[A-E]*"),
}
"""What a response must be made of to reach a scorer that evaluates it as Python, raises on it, or loses its minus sign."""
_BUILT_ANEW = ("acre", "gsm_symbolic", "list_functions", "word_ladder")
"""Generators that make all items of a seed when they are built; of the others any item of one seed can be had at once."""
_ANSWERS = {
    "graph_color": lambda m: json.dumps(m["possible_answer"]),
    "propositional_logic": lambda m: m["example_answer"],
    "rubiks_cube": lambda m: m["example_correct_answer"],
}
"""Where the answer is when there are many."""
_MANY_RIGHT = ("graph_color", "propositional_logic")
"""Where a changed answer may well be right, so that it is no sure near miss."""
_LOCK = threading.Lock()


class GymOptions(TaskOptions):
    generator: str = Field("chain_sum", description="name of the generator in reasoning-gym")
    config: dict[str, Any] = Field({}, description="its own options; not seed and size, which the task sets")


@final
class Gym(Task[GymOptions]):
    """The prompt is the generator's question; the whole response is handed to its scorer. Items are named by a number."""

    summary = "a generator of reasoning-gym, by name"
    worker = "rollkeel.tasks.gym_worker:grade"
    junk = ()

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        """Raises `BadInput` without the library, and for a generator or config that cannot be used, with the reason."""
        super().__init__(options)
        generator, config = self.options.generator, self.options.config
        if generator in REFUSED:
            raise BadInput(f"task gym: generator {generator!r} {REFUSED[generator]}")
        kinds = _generators()
        if generator not in kinds:
            raise BadInput(f"task gym: generator {generator!r}: unknown{nearest(generator, generators())}")
        known = [f.name for f in dataclasses.fields(kinds[generator][1]) if f.name not in ("seed", "size")]
        for key in config:
            if key not in known:
                raise BadInput(f"task gym: {generator} has no option {key!r}{nearest(key, known)}")
        try:
            self._whole = self._build(0, 1 if generator in _BUILT_ANEW else 2**31)
        except (AssertionError, TypeError, ValueError) as error:
            raise BadInput(f"task gym: {generator} refuses config {config}: {error}") from None
        self._entry = lru_cache(maxsize=64)(self._make)

    def _build(self, seed: int, size: int) -> Any:
        from reasoning_gym.factory import create_dataset  # pyright: ignore[reportMissingImports]

        with _alone(seed):
            made = create_dataset(self.options.generator, seed=seed, size=size, **self.options.config)
        if self.options.generator == "word_ladder":
            # Of several shortest ladders it takes one by the order of a set, which is another one in every process.
            for graph in made.word_graphs.values():
                graph.update({word: sorted(neighbors) for word, neighbors in graph.items()})
        return made

    def _make(self, number: int) -> tuple[Any, dict[str, Any]]:
        """Scorer and entry of item `number`."""
        anew = self.options.generator in _BUILT_ANEW
        source = self._build(number, 1) if anew else self._whole
        with _alone(number):
            return source, source[0 if anew else number]

    def draw(self, rng: random.Random) -> TaskItem:
        number = rng.getrandbits(31)
        _, entry = self._entry(number)
        answer = _ANSWERS.get(self.options.generator, lambda _: entry["answer"])(entry["metadata"])
        return TaskItem(text=entry["question"], answer=answer, metadata={"number": number})

    def _accepts(self, response: str) -> bool:
        form = ACCEPTED.get(self.options.generator)
        return form is None or form.fullmatch(response.strip()) is not None

    def verify(self, item: TaskItem, response: str) -> tuple[float, str]:
        """Raises what the scorer raises, `GraderFailure` for a score that is no number, and `BadInput` when this installation makes
        another question of the number."""
        if not self._accepts(response):
            return 0.0, f"not of the form of an answer: {excerpt(response)}"
        source, entry = self._entry(item.metadata["number"])
        if entry["question"] != item.text:
            raise BadInput(
                f"task gym: {self.options.generator} makes another question of number {item.metadata['number']} than the "
                "prompt holds; use the version of reasoning-gym that made the prompts"
            )
        with _alone(item.metadata["number"]):
            score = source.score_answer(response, entry)
        if not isinstance(score, int | float) or not math.isfinite(score):
            raise GraderFailure(f"task gym: expected a finite score from {self.options.generator}, got {score!r}")
        return float(score == 1), f"scored {score}: {excerpt(response)}"

    def finish(self, item: TaskItem, rng: random.Random) -> TaskItem | None:
        """Draws again what silence solves, answers longer than any response that is read, and integrals whose published answer is
        an integral."""
        readable = len(item.answer) <= MAX_RESPONSE_CHARS and self._accepts(item.answer)
        accepted = readable and self.verify(item, "")[0] == 0
        return item if accepted else None

    def near_misses(self, item: TaskItem) -> Sequence[str]:
        return ("", "?") if self.options.generator in _MANY_RIGHT else (_shifted(item.answer), "", "?")

    def noisy(self, item: TaskItem, rng: random.Random, label_noise: float) -> str:
        """The whole answer is one step: with probability `label_noise` every letter and digit becomes the next one."""
        return _shifted(item.answer) if rng.random() < label_noise else item.answer


def generators() -> list[str]:
    """Names of the generators that the task offers. Raises `BadInput` without the library."""
    return sorted(set(_generators()) - set(REFUSED))


def _generators() -> dict[str, tuple[Any, Any]]:
    try:
        from reasoning_gym.factory import DATASETS  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise BadInput(f"task gym: {error}; install it with: pip install 'rollkeel[gym]'") from None
    return DATASETS


@contextlib.contextmanager
def _alone(seed: int) -> Iterator[None]:
    """Global random states set to `seed` and then put back, and no output: some generators draw from them, some print."""
    with _LOCK, contextlib.redirect_stdout(io.StringIO()):
        plain, array = random.getstate(), np.random.get_state()
        random.seed(seed)
        np.random.seed(seed)
        try:
            yield
        finally:
            random.setstate(plain)
            np.random.set_state(array)


def _shifted(text: str) -> str:
    """Every ASCII letter and digit becomes the next one, z, Z and 9 the first; text without any loses its end."""
    rows = ("0123456789", "abcdefghijklmnopqrstuvwxyz", "ABCDEFGHIJKLMNOPQRSTUVWXYZ")
    out = text.translate({ord(a): b for row in rows for a, b in zip(row, row[1:] + row[0], strict=True)})
    return out if out != text else text[: len(text) // 2]
