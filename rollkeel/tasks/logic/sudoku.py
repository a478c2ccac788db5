"""Sudoku, 4×4 and 9×9: `1.34/3412/2.43/432.:` → `1234/3412/2143/4321`. One solution, proven by exhaustive search."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, final

from pydantic import Field, model_validator

from rollkeel.tasks.base import ASCII_SPACE, Task, TaskItem, TaskOptions, excerpt

MOST_HOLES = {4: 11, 9: 54}
"""Digging in random order gets this far in a fair share of grids."""


class SudokuOptions(TaskOptions):
    side: Literal[4, 9] = Field(4, description="rows, columns and digits")
    holes: int = Field(4, ge=1, le=MOST_HOLES[9], description="empty cells; at most 11 of 16, 54 of 81")

    @model_validator(mode="after")
    def _solvable(self) -> SudokuOptions:
        if self.holes > MOST_HOLES[self.side]:
            raise ValueError(f"expected holes ≤ {MOST_HOLES[self.side]} at side {self.side}, got {self.holes}")
        return self


@final
class Sudoku(Task[SudokuOptions]):
    """The answer is the full grid, rows joined by `/`. It is checked against the rules and the clues, not a stored grid."""

    summary = "Sudoku of 4×4 or 9×9 with one solution"

    def draw(self, rng: random.Random) -> TaskItem:
        side = self.options.side
        while True:
            full = search([0] * side**2, side, rng=rng)[0]
            item = TaskItem(text="", answer=_write(full, side))
            if side == 9:
                return item
            if dug := self._dig(item, rng):
                return dug

    def finish(self, item: TaskItem, rng: random.Random) -> TaskItem | None:
        return item if item.text else self._dig(item, rng)

    def identity(self, item: TaskItem) -> str:
        """Digits are names. Of 9×9 the solution counts, of 4×4 (where there are only 12) the puzzle."""
        names = str.maketrans(item.answer[: self.options.side], "123456789"[: self.options.side])
        return (item.answer if self.options.side == 9 else item.text).translate(names)

    def _dig(self, item: TaskItem, rng: random.Random) -> TaskItem | None:
        """Empty cells in random order as long as the solution stays the only one; None when that leaves too few holes."""
        side, left = self.options.side, self.options.holes
        grid = _read(item.answer)
        order = list(range(side**2))
        rng.shuffle(order)
        for cell in order:
            digit, grid[cell] = grid[cell], 0
            # It stays the only one unless the grid has a solution with another digit here.
            if any(search(_with(grid, cell, other), side)[0] for other in _open(grid, cell, side) if other != digit):
                grid[cell] = digit
                continue
            left -= 1
            if not left:
                return replace(item, text=_write(grid, side) + ":")
        return None

    def verify(self, item: TaskItem, response: str) -> tuple[float, str]:
        read, side = response.strip(ASCII_SPACE), self.options.side
        rows, clues = read.split("/"), item.text[:-1].split("/")
        digits = set("123456789"[:side])
        if len(rows) != side or any(len(row) != side or set(row) != digits for row in rows):
            return 0.0, f"not {side} rows of the digits 1 to {side}: {excerpt(read)}"
        if any(
            c not in (".", r) for row, given in zip(rows, clues, strict=True) for r, c in zip(row, given, strict=True)
        ):
            return 0.0, f"changes a clue: {excerpt(read)}"
        box = 2 if side == 4 else 3
        boxes = [
            {c for row in rows[i : i + box] for c in row[j : j + box]}
            for i in range(0, side, box)
            for j in range(0, side, box)
        ]
        right = all(part == digits for part in [*map(set, zip(*rows, strict=True)), *boxes])
        return float(right), excerpt(read) if right else f"a digit twice in a column or box: {excerpt(read)}"

    def near_misses(self, item: TaskItem) -> Sequence[str]:
        side, gold = self.options.side, item.answer
        at = item.text.index(".")
        other = "1" if gold[at] != "1" else "2"
        relabelled = gold.translate(str.maketrans("123456789"[:side], "234567891"[: side - 1] + "1"))
        rows = gold.split("/")
        swapped = "/".join([rows[1], rows[0], *rows[2:]])  # rows, columns and boxes hold, the clues do not
        return (
            gold[:at] + other + gold[at + 1 :],
            relabelled,
            swapped,
            item.text[:-1],
            gold[: -side - 1],
            gold.replace("/", ""),
        )

    def noisy(self, item: TaskItem, rng: random.Random, label_noise: float) -> str:
        """Each hole is filled with another digit with probability `label_noise`."""
        out = []
        for clue, digit in zip(item.text, item.answer, strict=False):
            wrong = clue == "." and rng.random() < label_noise
            out.append(rng.choice([d for d in "123456789"[: self.options.side] if d != digit]) if wrong else digit)
        return "".join(out)

    def effort(self, item: TaskItem) -> float:
        """Digits that depth-first search tries, fewest candidates first, to find the solution and that there is no other."""
        return float(search(_read(item.text[:-1]), self.options.side, whole=True)[1])


def search(
    grid: Sequence[int], side: int, *, rng: random.Random | None = None, whole: bool = False
) -> tuple[list[int], int]:
    """A solution of `grid` (`[side²]`, 0 empty; `[]` when there is none) and the digits tried.

    The cell with the fewest candidates is filled first, candidates in ascending order or shuffled by `rng`. `whole` looks
    on for all solutions, so that the digits tried cover the proof that there is one.
    """
    cells = list(grid)
    found = list[int]()
    tried = 0

    def fill() -> bool:
        nonlocal found, tried
        best, choices = -1, [0] * (side + 1)
        for cell, digit in enumerate(cells):
            if not digit and len(here := _open(cells, cell, side)) < len(choices):
                best, choices = cell, here
                if len(here) < 2:
                    break
        if best < 0:
            found = found or list(cells)
            return not whole
        if rng:
            rng.shuffle(choices)
        for digit in choices:
            tried += 1
            cells[best] = digit
            if fill():
                return True
        cells[best] = 0
        return False

    fill()
    return found, tried


def _peers(side: int) -> list[list[int]]:
    box = 2 if side == 4 else 3
    where = [(c // side, c % side, c // side // box * side + c % side // box) for c in range(side**2)]
    return [
        [d for d in range(side**2) if d != c and any(a == b for a, b in zip(where[c], where[d], strict=True))]
        for c in range(side**2)
    ]


_PEERS = {side: _peers(side) for side in (4, 9)}


def _open(grid: Sequence[int], cell: int, side: int) -> list[int]:
    """Digits that no peer of `cell` holds, ascending."""
    taken = {grid[peer] for peer in _PEERS[side][cell]}
    return [digit for digit in range(1, side + 1) if digit not in taken]


def _with(grid: list[int], cell: int, digit: int) -> list[int]:
    return [*grid[:cell], digit, *grid[cell + 1 :]]


def _write(grid: Sequence[int], side: int) -> str:
    text = "".join(str(d or ".") for d in grid)
    return "/".join(text[i : i + side] for i in range(0, side**2, side))


def _read(text: str) -> list[int]:
    return [0 if c == "." else int(c) for c in text if c != "/"]
