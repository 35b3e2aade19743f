"""Every sentence that the program can print, formatted with sample values, reads as one."""

import ast
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "certcli"
FAULTS = {
    "a doubled word": r"(?<![-\w])([A-Za-z]+) \1(?![.\w])",
    "a value that is none": r"\bNone\b",
    "quotes around nothing": r"''|\"\"",
    "a line end that is spelled out": r"\\[nt]",
    "two blanks": r"[a-z,.)]  +[a-z(]",
    "a blank before a sign": r"[a-z0-9)] [,;:](?![:a-z])",
}
CODE = re.compile(r"\(\?|\\[bdsw]|\]\*|\| None$|^\s*\{%")
"""Patterns, types of variables and templates of pages."""


def printed_text(node: ast.expr, second: bool, numbers: Iterator[int]) -> str:
    """Return what an expression prints: of two branches the first or the second, of anything that
    is not spelled out a word of its own.
    """
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(printed_text(part, second, numbers) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return printed_text(node.value, second, numbers)
    if isinstance(node, ast.IfExp):
        return printed_text(node.orelse if second else node.body, second, numbers)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return printed_text(node.left, second, numbers) + printed_text(node.right, second, numbers)
    return f"v{next(numbers)}"


def program_texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the texts of a file that are no docstrings, by line; a part of a text not alone."""
    tree = ast.parse(path.read_text())
    apart = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.JoinedStr) or (
            isinstance(node, ast.Constant) and isinstance(node.value, str)
        )
        if isinstance(node, ast.expr) and is_text and id(node) not in apart:
            apart |= {id(inner) for inner in ast.walk(node)}
            for second in (False, True):
                text = printed_text(node, second, itertools.count())
                if re.search(r"[a-z] [a-z]", text) and not CODE.search(text):
                    yield node.lineno, text


def text_faults(text: str) -> list[str]:
    wrong = [name for name, pattern in FAULTS.items() if re.search(pattern, text)]
    braces = text.count("{") != text.count("}")
    return [*wrong, *(["a brace without its other"] if braces else [])]


def test_every_sentence_reads_as_one() -> None:
    """A hint had one brace too many, and another spelled out a line end."""
    texts = [(path, *found) for path in PACKAGE.rglob("*.py") for found in program_texts(path)]
    assert len(texts) > 2000
    wrong = [
        f"{path.relative_to(PACKAGE)}:{line}: {', '.join(bad)}: {text[:120]}"
        for path, line, text in texts
        if (bad := text_faults(text))
    ]
    assert not wrong, "\n".join(wrong)


def test_each_fault_is_seen() -> None:
    sample = {
        "a doubled word": "the the file",
        "a value that is none": "it has None",
        "quotes around nothing": "the file '' is",
        "a line end that is spelled out": r"one\n two",
        "two blanks": "one  two",
        "a blank before a sign": "one , two",
        "a brace without its other": "pass {a: b}}",
    }
    assert [text_faults(text) for text in sample.values()] == [[name] for name in sample]
