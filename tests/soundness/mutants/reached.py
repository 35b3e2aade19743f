"""Which statements and lambdas of a file a test runs: each is compiled with a mark before it."""

import ast
from pathlib import Path
from types import CodeType


def _mark(path: Path, place: ast.stmt | ast.expr) -> ast.Expr:
    mark = ast.parse(f"__reached__.add({f'{path}:{place.lineno}'!r})").body[0]
    assert isinstance(mark, ast.Expr)
    for node in ast.walk(mark):
        ast.copy_location(node, place)
    return mark


def _marked(body: list[ast.stmt], path: Path) -> list[ast.stmt]:
    found: list[ast.stmt] = []
    for statement in body:
        mark = _mark(path, statement)
        for part in ast.iter_child_nodes(statement):
            if isinstance(part, (ast.ExceptHandler, ast.match_case)):
                part.body = _marked(part.body, path)
        for name in ("body", "orelse", "finalbody"):
            if getattr(statement, name, None):
                setattr(statement, name, _marked(getattr(statement, name), path))
        found += [mark, statement]
    return found


class _Lambdas(ast.NodeTransformer):
    def __init__(self, path: Path) -> None:
        self.path = path

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        self.generic_visit(node)
        marked = ast.BoolOp(
            ast.Or(), [_mark(self.path, node.body).value, node.body]
        )  # add returns None
        node.body = ast.copy_location(marked, node.body)
        return node


class _Functions(ast.NodeTransformer):
    def __init__(self, path: Path) -> None:
        self.path = path

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.body = _marked(node.body, self.path)
        return node


def marked(path: Path) -> CodeType:
    """Return the code of the file, whose functions add `file:line` of each statement and lambda to
    the set `__reached__`.
    """
    tree = _Lambdas(path).visit(ast.parse(path.read_text()))
    return compile(_Functions(path).visit(tree), str(path), "exec")
