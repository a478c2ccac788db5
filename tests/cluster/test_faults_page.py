"""A table of faults that nobody injects is a wish. Every row names the test that does, and docs/faults.md is what the table prints.

Not covered: whether that test proves all that its row says.
"""

from __future__ import annotations

import ast
from pathlib import Path

from rollkeel.cluster.faults import FAULTS, PARTS, TABLE, markdown

ROOT = Path(__file__).parents[2]


def test_every_row_names_a_fault_a_part_and_a_test_that_is_there() -> None:
    for row in TABLE:
        assert row.fault in FAULTS
        assert row.part in PARTS
        file, _, name = row.test.partition("::")
        tree = ast.parse((ROOT / file).read_text())
        assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, row.test
        assert all(text and "|" not in text for text in row)
    pairs = [(row.fault, row.part) for row in TABLE]
    assert len(set(pairs)) == len(pairs)
    assert {row.part for row in TABLE} == set(PARTS)
    assert {row.fault for row in TABLE} == set(FAULTS)


def test_the_page_is_the_table() -> None:
    assert (ROOT / "docs" / "faults.md").read_text() == markdown(), (
        "write it again: python -c 'from rollkeel.cluster.faults import markdown; print(markdown(), end=str())' > docs/faults.md"
    )
