"""Sudoku one cell at a time: `1.34/3412/2.43/4321:` → `122` → `ok`, the grid again → `324` → …"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, final

from pydantic import Field

from rollkeel.tasks.base import ASCII_SPACE, TaskItem, excerpt
from rollkeel.tasks.environment import Environment, EnvironmentOptions, Step
from rollkeel.tasks.logic.sudoku import Sudoku


class SudokuTurnsOptions(EnvironmentOptions):
    side: Literal[4, 9] = Field(4, description="rows, columns and digits")
    holes: int = Field(3, ge=1, description="empty cells, as of the task sudoku")


@final
class SudokuTurns(Environment[SudokuTurnsOptions]):
    """An action is row, column and digit. A wrong digit leaves the cell empty and costs its turn; the reward is 1 for a full
    grid within the turns, by default as many as there are holes."""

    name = "sudoku_turns"
    summary = "Sudoku one cell per turn"

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        super().__init__(options)
        self._grids = Sudoku({"side": self.options.side, "holes": self.options.holes})
        self._turns = self.options.turns or self.options.holes

    def draw(self, rng: random.Random) -> TaskItem:
        return self._grids.draw(rng)

    def finish(self, item: TaskItem, rng: random.Random) -> TaskItem | None:
        return self._grids.finish(item, rng)

    def identity(self, item: TaskItem) -> str:
        return self._grids.identity(item)

    def effort(self, item: TaskItem) -> float:
        return self._grids.effort(item)

    def reset(self, item: TaskItem) -> str:
        self._grid = item.text[:-1]
        self._full = item.answer
        self._left = self._turns
        return item.text

    def step(self, action: str) -> Step:
        self._left -= 1
        word = self._fill(action.strip(ASCII_SPACE))
        solved = "." not in self._grid
        return Step(
            text=f"\n{word}\n{self._grid}:",
            reward=float(solved),
            done=solved or self._left <= 0,
            detail=f"{word}: {excerpt(action, 20)}, {self._grid.count('.')} cells empty",
        )

    def _fill(self, action: str) -> str:
        """Fill a cell if that is right; what to say of it."""
        side = self.options.side
        if not re.fullmatch(f"[1-{side}]{{3}}", action):
            return "unreadable"
        row, column, _ = map(int, action)
        at = (row - 1) * (side + 1) + column - 1
        if self._grid[at] != ".":
            return "filled"
        if self._full[at] != action[2]:
            return "wrong"
        self._grid = self._grid[:at] + action[2] + self._grid[at + 1 :]
        return "ok"

    def actions(self, item: TaskItem) -> Sequence[str]:
        side = self.options.side
        places = (divmod(at, side + 1) for at, c in enumerate(item.text) if c == ".")
        return [f"{row + 1}{column + 1}{item.answer[row * (side + 1) + column]}" for row, column in places]

    def mistakes(self, item: TaskItem) -> Sequence[Sequence[str]]:
        gold = list(self.actions(item))
        wrong = [a[:2] + str(int(a[2]) % self.options.side + 1) for a in gold]
        return [
            gold[:-1] or wrong,
            [*gold[:-1], wrong[-1]],
            [wrong[0], *gold[1:]],
            [*gold[:-1], f"{gold[-1]}."],
            wrong,
        ]

    def slip(self, item: TaskItem, action: str, rng: random.Random) -> str:
        digits = "123456789"[: self.options.side].replace(action[2], "")
        return action[:2] + rng.choice(digits)
