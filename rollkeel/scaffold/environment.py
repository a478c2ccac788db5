"""An environment: it shows a text, takes the model's turn, and answers, until the episode is done."""

import random
from collections.abc import Sequence

from rollkeel.tasks import Environment, EnvironmentOptions, Step, TaskItem


class Example(Environment[EnvironmentOptions]):
    """Name the smallest digit that is left, turn by turn."""

    def draw(self, rng: random.Random) -> TaskItem:
        """One episode; all of its randomness comes from `rng`."""
        digits = rng.sample("123456789", 3)
        return TaskItem(text=f"{''.join(digits)}:", answer="".join(sorted(digits)))

    def actions(self, item: TaskItem) -> Sequence[str]:
        """Turns that earn 1."""
        return list(item.answer)

    def reset(self, item: TaskItem) -> str:
        """Begin the episode."""
        self.left = item.answer
        return item.text

    def step(self, action: str) -> Step:
        """Answer one turn of the model, whatever it wrote. The episode must be a function of its item and the turns alone."""
        right, self.left = action.strip() == self.left[0], self.left[1:]
        return Step(text="?", reward=float(right and not self.left), done=not (right and self.left))
