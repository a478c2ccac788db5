"""`expression_distance`: how near a formula is to the right one, as PHYBench scores it (Qiu et al., arXiv:2504.16074).

With r the edit distance of both expression trees over the size of the right one, the reward is 1 for equal expressions, 0.6 − r for
0 < r < 0.6, and 0 beyond. An edit inserts, removes or relabels a node; a whole subtree of x > 5 nodes is inserted or removed for
0.6 (x − 5) + 5. Runs in a worker: computer algebra hangs on what models write.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

MAX_NODES = 200
"""Of a tree: distances take time by the fourth power."""
Tree = tuple[str, tuple[Any, ...]]
"""Label and children."""


def grade(text: str, answer: str, options: Mapping[str, Any]) -> tuple[float | None, str]:
    """Reward and what was read. Raises `ValueError` for a gold answer that is no expression."""
    import sympy

    from rollkeel.rewards.answers import NoAnswer, final_answer
    from rollkeel.rewards.symbolic import Undecided, expression

    gold = expression(answer)
    if not isinstance(gold, sympy.Expr):
        raise ValueError(f"the gold answer {answer[:80]!r} is not an expression")
    try:
        read = final_answer(text, "auto") if text != answer else answer
        given = expression(read.rpartition("=")[2])
    except (NoAnswer, Undecided) as none:
        return 0.0, str(none)
    if not isinstance(given, sympy.Expr):
        return 0.0, f"no expression: {read[:80]}"
    gold, given = sympy.simplify(gold), sympy.simplify(given)
    if gold == given or sympy.simplify(gold - given) == 0:
        return 1.0, read[:80]
    right = tree_of(gold)
    r = distance(right, tree_of(given)) / size(right)
    return max(0.0, 0.6 - r), f"{read[:80]} (distance {r:.2f})"


def tree_of(expression: Any) -> Tree:
    """Of a sympy expression; the arguments of sums and products in sympy's own order. Raises `ValueError` for one too large."""
    from sympy import default_sort_key, preorder_traversal

    if sum(1 for _ in preorder_traversal(expression)) > MAX_NODES:
        raise ValueError(f"more than {MAX_NODES} nodes")

    def grown(e: Any) -> Tree:
        if not e.args:
            return str(e), ()
        parts = sorted(e.args, key=default_sort_key) if e.is_Add or e.is_Mul else e.args
        return type(e).__name__, tuple(map(grown, parts))

    return grown(expression)


@cache
def size(tree: Tree) -> int:
    return 1 + sum(map(size, tree[1]))


def whole(nodes: int) -> float:
    """Cost of inserting or removing a subtree at once."""
    return float(nodes) if nodes <= 5 else 0.6 * (nodes - 5) + 5


def distance(one: Tree, other: Tree) -> float:
    """Least cost of edits from one ordered tree to another (Zhang & Shasha 1989, with edits of whole subtrees)."""
    a, b = numbered(one), numbered(other)
    trees = dict[tuple[int, int], float]()
    for i in _roots(a):
        for j in _roots(b):
            _forests(a, b, i, j, trees)
    return trees[len(a) - 1, len(b) - 1]


Nodes = list[tuple[str, int]]
"""Label and first leaf below, of every node, children before their parent."""


def numbered(tree: Tree) -> Nodes:
    nodes: Nodes = []

    def visit(node: Tree) -> None:
        first = len(nodes)
        for child in node[1]:
            visit(child)
        nodes.append((node[0], first))

    visit(tree)
    return nodes


def _roots(nodes: Nodes) -> list[int]:
    """The last node of those that share a first leaf."""
    return sorted({first: i for i, (_, first) in enumerate(nodes)}.values())


def _forests(a: Nodes, b: Nodes, i: int, j: int, trees: dict[tuple[int, int], float]) -> None:
    """Distances of all subtrees below `i` and `j` that begin at their first leaves, into `trees`."""
    begin, start = a[i][1], b[j][1]
    costs = dict[tuple[int, int], float]()
    for x in range(begin - 1, i + 1):
        for y in range(start - 1, j + 1):
            ways = []
            if x >= begin:
                leaf = a[x][1]
                ways += [costs[x - 1, y] + 1, costs[leaf - 1, y] + whole(x - leaf + 1)]
            if y >= start:
                leaf = b[y][1]
                ways += [costs[x, y - 1] + 1, costs[x, leaf - 1] + whole(y - leaf + 1)]
            if x >= begin and y >= start:
                if (a[x][1], b[y][1]) == (begin, start):
                    trees[x, y] = min(*ways, costs[x - 1, y - 1] + (a[x][0] != b[y][0]))
                ways.append(costs[a[x][1] - 1, b[y][1] - 1] + trees[x, y])
            costs[x, y] = min(ways, default=0.0)
