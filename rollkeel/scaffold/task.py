"""A task family: it draws items, and says what an answer to one is worth."""

import random

from pydantic import Field

from rollkeel.tasks import Task, TaskItem, TaskOptions


class ExampleOptions(TaskOptions):
    """Difficulty, as `data.options.letters=4`."""

    letters: int = Field(3, ge=1, le=20, description="letters of a word")


class Example(Task[ExampleOptions]):
    """Write a word backwards."""

    def draw(self, rng: random.Random) -> TaskItem:
        """One item; all of its randomness comes from `rng`."""
        word = "".join(rng.choices("abcdefghij", k=self.options.letters))
        return TaskItem(text=f"{word}>", answer=word[::-1])

    def verify(self, item: TaskItem, response: str) -> tuple[float, str]:
        """Reward between 0 and 1, and what was read. The right answer earns 1, and an answer with something glued to it 0."""
        read = response.strip()
        return float(read == item.answer), f"read {read!r:.40}"
