"""The plain house in numbers: dialect words, long lines and tuple assignments only become fewer."""

import ast
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DIALECT = frozenset(
    [
        "found",
        "kept",
        "sent",
        "begun",
        "tops",
        "told",
        "held",
        "way",
        "least",
        "spoken",
        "again",
        "own",
        "beside",
        "apart",
        "fell",
        "left",
        "moved",
        "known",
        "seen",
        "given",
        "most",
        "stated",
        "lost",
        "made",
        "wanted",
    ]
)
FOUND = "found"
WORDS = "dialect words"
LONG_LINES = "lines over 100 columns, per 10,000"
TUPLES = "tuple assignments, per 10,000 lines"
CEILINGS = {
    "certcli": {FOUND: 0, WORDS: 43, LONG_LINES: 110, TUPLES: 20},
    "check": {FOUND: 0, WORDS: 1, LONG_LINES: 60, TUPLES: 120},
}
"""Lower a ceiling when the count falls; never raise one."""


def bound_names(tree: ast.AST) -> list[str]:
    """Return every name that the code assigns, unpacks, loops over or takes as a parameter."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.append(node.id)
        elif isinstance(node, ast.arg):
            names.append(node.arg)
    return names


def tuple_assignments(tree: ast.AST) -> int:
    """Count statements `a, b = x, y`."""
    return sum(
        isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Tuple)
        and isinstance(node.targets[0], ast.Tuple)
        for node in ast.walk(tree)
    )


def measured(folder: str) -> dict[str, float]:
    """Count the words, long lines and tuple assignments of a folder."""
    names: Counter[str] = Counter()
    lines = 0
    long_lines = 0
    tuples = 0
    for path in (ROOT / folder).rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        names.update(name for name in bound_names(tree) if name in DIALECT)
        tuples += tuple_assignments(tree)
        rows = text.splitlines()
        lines += len(rows)
        long_lines += sum(len(row) > 100 for row in rows)
    return {
        FOUND: names[FOUND],
        WORDS: names.total(),
        LONG_LINES: 10_000 * long_lines / lines,
        TUPLES: 10_000 * tuples / lines,
    }


@pytest.mark.parametrize("folder", CEILINGS)
def test_no_count_rises(folder: str) -> None:
    counts = measured(folder)
    above = {
        what: counts[what] for what, ceiling in CEILINGS[folder].items() if counts[what] > ceiling
    }
    assert not above, f"{folder}: {above}; the ceilings are {CEILINGS[folder]}"


def test_the_counter_sees_each_kind_of_binding() -> None:
    tree = ast.parse("def f(found):\n    for kept in found:\n        held, own = kept, 1\n")
    assert sorted(bound_names(tree)) == ["found", "held", "kept", "own"]
    assert tuple_assignments(tree) == 1
