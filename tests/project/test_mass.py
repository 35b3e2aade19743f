"""How much there is to read: statements without docstrings, under ceilings that only fall."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CEILINGS = {"certcli": 40_570, "tests": 31_640}
"""Two in a hundred above what was reached. Lower a ceiling when the count falls; never raise one."""


def statements(tree: ast.AST) -> int:
    """Return the number of statements, docstrings aside."""
    counted = 0
    for node in ast.walk(tree):
        words = (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        )
        counted += isinstance(node, ast.stmt) and not words
    return counted


def test_a_docstring_and_the_layout_count_for_nothing() -> None:
    assert statements(ast.parse('"""What it is."""\nx = [\n    1,\n]\n')) == 1
    assert statements(ast.parse("def f():\n    if x:\n        return 1\n")) == 3


@pytest.mark.parametrize("folder", CEILINGS)
def test_there_is_no_more_to_read_than_before(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    counted = sum(statements(ast.parse(path.read_text(encoding="utf-8"))) for path in files)
    assert counted <= CEILINGS[folder], "delete before you add"
