"""Which statements of a file a test runs: each statement is compiled with a mark before it."""

import ast
from pathlib import Path
from types import CodeType


def _marked(body: list[ast.stmt], path: Path) -> list[ast.stmt]:
    found: list[ast.stmt] = []
    for statement in body:
        mark = ast.parse(f"__reached__.add({f'{path}:{statement.lineno}'!r})").body[0]
        for node in ast.walk(mark):
            ast.copy_location(node, statement)
        for part in ast.iter_child_nodes(statement):
            if isinstance(part, (ast.ExceptHandler, ast.match_case)):
                part.body = _marked(part.body, path)
        for name in ("body", "orelse", "finalbody"):
            if getattr(statement, name, None):
                setattr(statement, name, _marked(getattr(statement, name), path))
        found += [mark, statement]
    return found


class _Functions(ast.NodeTransformer):
    def __init__(self, path: Path) -> None:
        self.path = path

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.body = _marked(node.body, self.path)
        return node


def marked(path: Path) -> CodeType:
    """Return the code of the file, in whose functions each statement adds `file:line` to the builtin set `__reached__`."""
    return compile(_Functions(path).visit(ast.parse(path.read_text())), str(path), "exec")
