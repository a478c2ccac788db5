"""Programs that are probably wrong, out of one that is right: each with one change, as people make them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

_OTHER = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mod,
    ast.Mod: ast.FloorDiv,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


def mutants(program: str, count: int) -> list[str]:
    """At most `count` different ones, from all over `program`; none of what is no Python."""
    try:
        tree = ast.parse(program)
    except (SyntaxError, ValueError, RecursionError):
        return []
    made = dict.fromkeys(_changed(tree))
    made.pop(ast.unparse(tree), None)
    every = max(1, -(-len(made) // count))
    return list(made)[::every]


def _changed(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and type(node.ops[0]) in _OTHER:
            yield _with(tree, node, "ops", [_OTHER[type(node.ops[0])](), *node.ops[1:]])
        elif isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in _OTHER:
            yield _with(tree, node, "op", _OTHER[type(node.op)]())
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            yield _with(tree, node, "value", node.value + 1)
        elif isinstance(node, ast.Return) and node.value is not None:
            yield _with(tree, node, "value", ast.Constant(None))


def _with(tree: ast.Module, node: ast.AST, name: str, value: object) -> str:
    """The program with another attribute of a node, which is put back."""
    before = getattr(node, name)
    setattr(node, name, value)
    text = ast.unparse(tree)
    setattr(node, name, before)
    return text
