"""Mazes with loops: the moves of a shortest path from S to G: `S#G/.#./...:` → `DDRRUU`."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import final

from pydantic import Field

from rollkeel.tasks.base import ASCII_SPACE, Task, TaskItem, TaskOptions, excerpt

MOVES = {"U": (-1, 0), "D": (1, 0), "L": (0, -1), "R": (0, 1)}
BACK = {"U": "D", "D": "U", "L": "R", "R": "L"}
Cell = tuple[int, int]


class MazeOptions(TaskOptions):
    size: int = Field(4, ge=2, le=20, description="rooms per side; the grid has 2·size - 1 rows and columns")
    loops: float = Field(0.2, ge=0.0, le=1.0, description="share of the walls between rooms that a second way breaks")


@final
class Maze(Task[MazeOptions]):
    """`#` wall, `.` way; rows joined by `/`. Moves are `U D L R`. Every shortest path scores 1, a longer one 0."""

    summary = "shortest path through a maze with loops"

    def draw(self, rng: random.Random) -> TaskItem:
        n, side = self.options.size, 2 * self.options.size - 1
        grid = _carve(n, self.options.loops, rng)
        rooms = [(r, c) for r in range(0, side, 2) for c in range(0, side, 2)]
        start = rng.choice(rooms)
        away, _ = distances(grid, start)
        # Some corner is n - 1 rooms or more from anywhere, so there always is a goal this far.
        goal = rng.choice([room for room in rooms if away[room] >= 2 * (n - 1)])
        grid[start[0]][start[1]], grid[goal[0]][goal[1]] = "S", "G"
        return TaskItem(text="/".join(map("".join, grid)) + ":", answer="")

    def finish(self, item: TaskItem, rng: random.Random) -> TaskItem | None:
        """One of the shortest paths, drawn step by step."""
        grid, answer = item.text[:-1].split("/"), ""
        at, goal = _find(grid, "S"), _find(grid, "G")
        left, _ = distances(grid, goal)
        while at != goal:
            answer += rng.choice([m for m in MOVES if left.get(_step(at, m), len(left)) < left[at]])
            at = _step(at, answer[-1])
        return replace(item, answer=answer)

    def verify(self, item: TaskItem, response: str) -> tuple[float, str]:
        read = response.strip(ASCII_SPACE)
        grid = item.text[:-1].split("/")
        at, goal = _find(grid, "S"), _find(grid, "G")
        open_cells, _ = distances(grid, goal)
        shortest = open_cells[at]
        for i, move in enumerate(read):
            if move not in MOVES:
                return 0.0, f"move {i + 1} is {move!r}, not one of U D L R: {excerpt(read)}"
            at = _step(at, move)
            if at not in open_cells:
                return 0.0, f"move {i + 1} runs into a wall: {excerpt(read)}"
        if at != goal:
            return 0.0, f"ends beside the goal: {excerpt(read)}"
        return float(len(read) == shortest), f"{len(read)} moves of {shortest}: {excerpt(read)}"

    def near_misses(self, item: TaskItem) -> Sequence[str]:
        gold = item.answer
        way_back = "".join(BACK[m] for m in reversed(gold))
        changed = gold[:-1] + BACK[gold[-1]]
        return (
            gold[:-1],
            gold + BACK[gold[-1]] + gold[-1],
            changed,
            way_back,
            gold.lower(),
            str(len(gold)),
            " ".join(gold),
        )

    def noisy(self, item: TaskItem, rng: random.Random, label_noise: float) -> str:
        """Each move is replaced by another with probability `label_noise`."""
        return "".join(
            rng.choice([o for o in MOVES if o != m]) if rng.random() < label_noise else m for m in item.answer
        )

    def effort(self, item: TaskItem) -> float:
        """Cells that breadth-first search from S takes up before it reaches G."""
        grid = item.text[:-1].split("/")
        return float(distances(grid, _find(grid, "S"), _find(grid, "G"))[1])


def distances(grid: Sequence[Sequence[str]], start: Cell, goal: Cell | None = None) -> tuple[Mapping[Cell, int], int]:
    """Moves from `start` to every cell that can be reached, and the cells taken up until `goal` (None: all)."""
    away, queue = {start: 0}, [start]
    for taken, at in enumerate(queue):
        if at == goal:
            return away, taken
        for move in MOVES:
            r, c = new = _step(at, move)
            if new not in away and 0 <= r < len(grid) and 0 <= c < len(grid[r]) and grid[r][c] != "#":
                away[new] = away[at] + 1
                queue.append(new)
    return away, len(queue)


def _carve(n: int, loops: float, rng: random.Random) -> list[list[str]]:
    """A random spanning tree over n×n rooms by depth-first search, then each wall left between rooms falls with `loops`."""
    side = 2 * n - 1
    grid = [["#"] * side for _ in range(side)]
    stack = [(2 * rng.randrange(n), 2 * rng.randrange(n))]
    grid[stack[0][0]][stack[0][1]] = "."
    while stack:
        r, c = stack[-1]
        ways = [(dr, dc) for dr, dc in MOVES.values() if 0 <= r + 2 * dr < side and 0 <= c + 2 * dc < side]
        ways = [(dr, dc) for dr, dc in ways if grid[r + 2 * dr][c + 2 * dc] == "#"]
        if not ways:
            stack.pop()
            continue
        dr, dc = rng.choice(ways)
        grid[r + dr][c + dc] = grid[r + 2 * dr][c + 2 * dc] = "."
        stack.append((r + 2 * dr, c + 2 * dc))
    for r in range(side):
        for c in range(1 - r % 2, side, 2):  # between two rooms
            if grid[r][c] == "#" and rng.random() < loops:
                grid[r][c] = "."
    return grid


def _find(grid: Sequence[str], mark: str) -> Cell:
    return next((r, row.index(mark)) for r, row in enumerate(grid) if mark in row)


def _step(at: Cell, move: str) -> Cell:
    return at[0] + MOVES[move][0], at[1] + MOVES[move][1]
