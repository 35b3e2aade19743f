"""Mutations of one syntax tree: each makes a bound smaller, a check weaker, or a rounding point the wrong way.

A mutated expression still evaluates its parts, so that a closure keeps its variables and a proof its leaves.
"""

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TURNED = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
EXTREMES = {
    "max": "min",
    "min": "max",
    "amax": "amin",
    "amin": "amax",
    "maximum": "minimum",
    "minimum": "maximum",
    "sum": "max",
    "real_sum": "max",
    "any": "all",
    "all": "any",
}
NORMS = ("norm", "sigma", "length", "norm1", "norm2", "fibres", "root_up", "bound", "radius")
LAYOUT = ("dim", "keepdim", "device", "strict", "hint", "path", "name", "why")
"""Keywords without which a call means the same, raises, or words a message otherwise."""
COUNTS = ("len", "count", "tokens", "heads", "size", "shape", "taps", "width", "numel", "classes", "images")
REFUSED = ("None", "False", "INF", "math.inf", "inf", "ZERO")
CHECKS = ("check skipped", "condition dropped", "call skipped", "negation dropped", "end of a range")
"""Mutations that a crash rightly kills: a check is there so that nothing crashes later."""


@dataclass(frozen=True)
class Mutant:
    """One mutation of one file. key: names it while other lines of the file change. lines: its own, its statement's."""

    key: str
    operator: str
    path: Path
    lines: tuple[int, int]
    number: int


def _call(name: str, *args: ast.expr) -> ast.expr:
    return ast.Call(ast.Name(name, ast.Load()), list(args), [])


def _first(kept: ast.expr, dropped: ast.expr) -> ast.expr:
    """(kept, dropped)[0]: the dropped part is still evaluated."""
    return ast.Subscript(ast.Tuple([kept, dropped], ast.Load()), ast.Constant(0), ast.Load())


def _times(x: ast.expr, factor: float) -> ast.expr:
    return ast.BinOp(x, ast.Mult(), ast.Constant(factor))


def _text(node: ast.AST) -> bool:
    return isinstance(node, (ast.JoinedStr, ast.List, ast.Tuple, ast.ListComp)) or (
        isinstance(node, ast.Constant) and not isinstance(node.value, (int, float))
    )


def _binary(node: ast.BinOp) -> Iterator[tuple[str, ast.expr]]:
    if any(_text(part) for part in ast.walk(node)):
        return
    left, right = node.left, node.right
    if isinstance(node.op, ast.Mult):
        yield "factor dropped", _first(left, right)
        yield "factor dropped", _first(right, left)
        if any(word in ast.unparse(right) for word in COUNTS):
            yield "root of a count", ast.BinOp(left, node.op, ast.BinOp(right, ast.Pow(), ast.Constant(0.5)))
    elif isinstance(node.op, ast.Add):
        yield "term dropped", _first(left, right)
        yield "term dropped", _first(right, left)
        yield "sign turned", ast.BinOp(left, ast.Sub(), right)
    elif isinstance(node.op, ast.Sub):
        yield "sign turned", ast.BinOp(left, ast.Add(), right)
        yield "term dropped", _first(left, right)
    elif isinstance(node.op, (ast.Pow, ast.Div)):
        yield "power or divisor dropped", _first(left, right)


def _called(node: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    method = isinstance(node.func, ast.Attribute)
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    library = method and ast.unparse(node.func).rsplit(".", 1)[0] in ("math", "torch", "torch.linalg", "arith")
    argument = node.func.value if isinstance(node.func, ast.Attribute) and not library else next(iter(node.args), None)
    if argument is None:
        return
    if name in ("sqrt", "abs", "ceil") or name.startswith("clamp"):
        yield "root, abs or clamp dropped", _first(argument, node)
    if name in ("up", "_up") and not method:
        yield "rounding dropped", _first(argument, node)
        yield "rounding turned", ast.BinOp(_times(argument, 2.0), ast.Sub(), node)
    if name == "nextafter" and len(node.args) > 1:
        turned = ast.UnaryOp(ast.USub(), node.args[1])
        yield "rounding turned", ast.Call(node.func, [node.args[0], turned], node.keywords)
    if name == "gamma":
        yield "rounding dropped", _times(node, 0.0)
    if name in EXTREMES:
        other = EXTREMES[name]
        if isinstance(node.func, ast.Attribute):
            other = "amax" if name == "sum" else other
            yield (
                "max, min or sum",
                ast.Call(ast.Attribute(node.func.value, other, ast.Load()), node.args, node.keywords),
            )
        else:
            yield "max, min or sum", ast.Call(ast.Name(other, ast.Load()), node.args, node.keywords)
    if name.endswith(NORMS):
        yield "underestimated by 2^-20", _times(node, 1 - 2**-20)
    for keyword in node.keywords:
        if keyword.arg is not None and keyword.arg not in LAYOUT:
            yield "option ignored", ast.Call(node.func, node.args, [k for k in node.keywords if k is not keyword])


def _variants(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yield what this node becomes, with the name of the mutation."""
    if isinstance(node, ast.BinOp):
        yield from _binary(node)
    elif isinstance(node, ast.Call):
        yield from _called(node)
    elif isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in TURNED:
        yield "end of a range", ast.Compare(node.left, [TURNED[type(node.ops[0])]()], node.comparators)
    elif isinstance(node, ast.BoolOp):
        for gone in node.values:
            kept = [value for value in node.values if value is not gone]
            yield "condition dropped", kept[0] if len(kept) == 1 else ast.BoolOp(node.op, kept)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "negation dropped", _call("bool", node.operand)
    elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
        index = ast.unparse(node.slice)
        if index != "0" and (index.lstrip("-").isdigit() or len(index) == 1 or index in ("index", "row", "head")):
            yield "index lost", ast.Subscript(node.value, ast.Constant(0), node.ctx)
    elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Load):
        if (node.id if isinstance(node, ast.Name) else node.attr) == "alpha":
            yield "alpha doubled", _times(node, 2.0)
    elif isinstance(node, ast.If):
        last = node.body[-1]
        returned = ast.unparse(last.value) if isinstance(last, ast.Return) and last.value is not None else ""
        if isinstance(last, ast.Raise) or returned in REFUSED:
            never = _first(ast.Constant(False), node.test)
            yield "check skipped", ast.If(never, node.body, node.orelse)
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and "super()" not in ast.unparse(node):
        nothing = ast.arguments([], [], None, [], [], None, [])
        yield "call skipped", ast.Expr(ast.Lambda(nothing, node.value))


class _Visitor(ast.NodeTransformer):
    """Walk over the bodies of functions; note each variant, or put one in its place."""

    def __init__(self, chosen: int | None) -> None:
        self.chosen, self.count, self.names = chosen, 0, list[str]()
        self.inside, self.statement = 0, 0
        self.found: list[tuple[str, str, str, tuple[int, int]]] = []

    def _body(self, node: ast.FunctionDef) -> ast.AST:
        self.names.append(node.name)
        self.inside += 1
        node.body = [self.visit(part) for part in node.body]
        self.inside -= 1
        self.names.pop()
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._body(node)

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        self.inside += 1
        node.body = self.visit(node.body)
        self.inside -= 1
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        self.names.append(node.name)
        self.generic_visit(node)
        self.names.pop()
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.value = None if node.value is None else self.visit(node.value)
        return node

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        return node  # the words of a message are no law

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        return node

    def visit(self, node: ast.AST) -> ast.AST:
        placed: ast.AST | None = None
        if isinstance(node, ast.stmt):
            self.statement = node.lineno
        if self.inside:
            for operator, variant in _variants(node):
                if self.chosen is None:
                    short = lambda part: " ".join(ast.unparse(ast.fix_missing_locations(part)).split())[:90]  # noqa: E731
                    after = short(copy.deepcopy(variant))
                    self.found.append(
                        (operator, ".".join(self.names), f"{short(node)} => {after}", (node.lineno, self.statement))
                    )
                elif self.count == self.chosen:
                    placed = copy.deepcopy(variant)
                self.count += 1
        result = super().visit(node)
        if placed is None:
            return result
        for part in ast.walk(placed):
            if not hasattr(part, "lineno"):
                ast.copy_location(part, node)
        return ast.copy_location(placed, node)


def mutants(path: Path, root: Path) -> list[Mutant]:
    """Return all mutants of a file."""
    visitor = _Visitor(None)
    visitor.visit(ast.parse(path.read_text()))
    seen: dict[str, int] = {}
    found = []
    for number, (operator, function, change, lines) in enumerate(visitor.found):
        key = f"{path.relative_to(root)} {function}: {change}"
        seen[key] = seen.get(key, 0) + 1
        key += f" #{seen[key]}" if seen[key] > 1 else ""
        found.append(Mutant(key, operator, path, lines, number))
    return found


def mutated(mutant: Mutant) -> ast.Module:
    """Return the tree of the file with this mutation in it."""
    tree = _Visitor(mutant.number).visit(ast.parse(mutant.path.read_text()))
    return ast.fix_missing_locations(tree)
