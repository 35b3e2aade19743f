"""Mutations of a syntax tree: each makes a bound smaller, a check weaker, or a rounding point the
wrong way.
"""

import ast
import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

BINARY = {
    ast.Mult: (("factor dropped", "(A, B)[0]"), ("factor dropped", "(B, A)[0]")),
    ast.Add: (
        ("term dropped", "(A, B)[0]"),
        ("term dropped", "(B, A)[0]"),
        ("sign turned", "A - B"),
    ),
    ast.Sub: (("sign turned", "A + B"), ("term dropped", "(A, B)[0]")),
    ast.Pow: (("power or divisor dropped", "(A, B)[0]"),),
    ast.Div: (("power or divisor dropped", "(A, B)[0]"),),
}
"""(A, B)[0] still evaluates B, so that a closure keeps its variables and a proof its leaves."""
SMALLER = {
    ast.Add: ("term scaled", ("A * 2.0 ** -10 + B", "A + B * 2.0 ** -10")),
    ast.Mult: ("constant scaled", ("A * 2.0 ** -10 * B",)),
    ast.Div: ("constant scaled", ("A * 2.0 ** -10 / B",)),
}
"""A term or a constant factor a thousandth as large: what another term hides at the sizes of a test."""
TURNED = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
EXTREMES = {
    "max": "min", "min": "max", "amax": "amin", "amin": "amax", "maximum": "minimum", "minimum": "maximum",
    "sum": "max", "any": "all", "all": "any",
}  # fmt: skip
NORMS = ("norm", "sigma", "length", "norm1", "norm2", "fibres", "root_up", "bound", "radius")
LAYOUT = ("dim", "keepdim", "device", "strict", "hint", "path", "name", "why")
"""Keywords without which a call means the same, raises, or words a message otherwise."""
COUNTS = (
    "len",
    "count",
    "tokens",
    "heads",
    "size",
    "shape",
    "taps",
    "width",
    "numel",
    "classes",
    "images",
)
MEMORY = ("at_once", "_batches", "itemsize", "element_size", "nbytes")
"""Functions and attributes that say how much fits into memory: on their numbers no certificate rests."""
REFUSED = ("None", "False", "INF", "math.inf", "inf", "ZERO")
CHECKS = (
    "check skipped",
    "condition dropped",
    "call skipped",
    "negation dropped",
    "end of a range",
)
"""Mutations that a crash rightly kills: a check is there so that nothing crashes later."""


@dataclass(frozen=True)
class Mutant:
    """One mutation of one file. key: names it while other lines of the file change. lines: its own,
    its statement's.
    """

    key: str
    operator: str
    path: Path
    lines: tuple[int, int]
    number: int


class _Filled(ast.NodeTransformer):
    def __init__(self, parts: dict[str, ast.expr]) -> None:
        self.parts = parts

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self.parts.get(node.id, node)


def _mutant_of(template: str, **parts: ast.expr) -> ast.expr:
    """Return the expression of the template with these parts for its names."""
    return _Filled(parts).visit(ast.parse(template, mode="eval").body)


def _binary(node: ast.BinOp) -> Iterator[tuple[str, ast.AST]]:
    words = (ast.JoinedStr, ast.List, ast.Tuple, ast.ListComp)
    constants = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
    if any(isinstance(part, words) for part in ast.walk(node)) or not all(
        isinstance(value, (int, float)) for value in constants
    ):
        return
    for name, template in BINARY.get(type(node.op), ()):
        yield name, _mutant_of(template, A=node.left, B=node.right)
    if type(node.op) in SMALLER and (isinstance(node.op, ast.Add) or constants):
        name, templates = SMALLER[type(node.op)]
        for template in templates:
            yield name, _mutant_of(template, A=node.left, B=node.right)
    if isinstance(node.op, ast.Mult) and any(word in ast.unparse(node.right) for word in COUNTS):
        yield "root of a count", _mutant_of("A * B ** 0.5", A=node.left, B=node.right)


def _called(node: ast.Call) -> Iterator[tuple[str, ast.AST]]:
    owner = node.func.value if isinstance(node.func, ast.Attribute) else None
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    library = owner is not None and ast.unparse(owner) in ("math", "torch", "torch.linalg", "arith")
    argument = owner if owner is not None and not library else next(iter(node.args), None)
    if argument is None:
        return
    if name in ("sqrt", "abs", "ceil") or name.startswith("clamp"):
        yield "root, abs or clamp dropped", _mutant_of("(A, B)[0]", A=argument, B=node)
    if name in ("up", "_up") and owner is None:
        yield "rounding dropped", _mutant_of("(A, B)[0]", A=argument, B=node)
        yield "rounding turned", _mutant_of("A * 2.0 - B", A=argument, B=node)
    if name == "nextafter" and len(node.args) > 1:
        yield "rounding turned", _mutant_of("F(A, -B)", F=node.func, A=node.args[0], B=node.args[1])
    if name == "gamma":
        yield "rounding dropped", _mutant_of("A * 0.0", A=node)
    if name in EXTREMES:
        other = EXTREMES[name] if owner is None or name != "sum" else "amax"
        function = _mutant_of(other) if owner is None else _mutant_of(f"A.{other}", A=owner)
        yield "max, min or sum", ast.Call(function, node.args, node.keywords)
    if name in ("max", "maximum") and len(node.args) == 2:
        for part in node.args:
            yield "one of two, not the larger", _mutant_of("(A, B)[0]", A=part, B=node)
    if name.endswith(NORMS):
        yield "underestimated by 2^-20", _mutant_of(f"A * {1 - 2**-20!r}", A=node)
    for keyword in node.keywords:
        if keyword.arg is not None and keyword.arg not in LAYOUT:
            yield (
                "option ignored",
                ast.Call(node.func, node.args, [k for k in node.keywords if k is not keyword]),
            )


def _is_limit(node: ast.expr) -> bool:
    """Tell whether a number is a limit that somebody chose: whether the limit itself is beyond it,
    makes no difference.
    """
    name = (
        node.id
        if isinstance(node, ast.Name)
        else node.attr
        if isinstance(node, ast.Attribute)
        else ""
    )
    return name.isupper() or (
        isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and node.value >= 16
    )


def _variants_of(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yield what this node becomes, with the name of the mutation."""
    if any(getattr(part, "attr", "") in MEMORY for part in ast.walk(node)):
        return
    if isinstance(node, ast.BinOp):
        yield from _binary(node)
    elif isinstance(node, ast.Call):
        yield from _called(node)
    elif isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in TURNED:
        if any(_is_limit(part) for part in (node.left, *node.comparators)):
            return
        yield (
            "end of a range",
            ast.Compare(node.left, [TURNED[type(node.ops[0])]()], node.comparators),
        )
    elif isinstance(node, ast.BoolOp):
        for gone in node.values:
            kept = [value for value in node.values if value is not gone]
            yield "condition dropped", kept[0] if len(kept) == 1 else ast.BoolOp(node.op, kept)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "negation dropped", _mutant_of("bool(A)", A=node.operand)
    elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
        index = ast.unparse(node.slice)
        if index != "0" and (
            index.lstrip("-").isdigit() or len(index) == 1 or index in ("index", "row", "head")
        ):
            yield "index lost", _mutant_of("A[0]", A=node.value)
    elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Load):
        if (node.id if isinstance(node, ast.Name) else node.attr) == "alpha":
            yield "alpha doubled", _mutant_of("A * 2.0", A=node)
    elif isinstance(node, ast.If):
        last = node.body[-1]
        returned = (
            ast.unparse(last.value)
            if isinstance(last, ast.Return) and last.value is not None
            else ""
        )
        if isinstance(last, ast.Raise) or returned in REFUSED:
            yield (
                "check skipped",
                ast.If(_mutant_of("(False, A)[0]", A=node.test), node.body, node.orelse),
            )
    elif (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and "super()" not in ast.unparse(node)
    ):
        yield "call skipped", ast.Expr(_mutant_of("lambda: A", A=node.value))


class _Visitor(ast.NodeTransformer):
    """Walk over the bodies of functions; list each variant, or put the chosen one in its place."""

    def __init__(self, chosen: int | None = None) -> None:
        self.chosen = chosen
        self.count = 0
        self.inside = 0
        self.statement = 0
        self.names: list[str] = []
        self.found: list[tuple[str, str, str, tuple[int, int]]] = []

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.names.append(node.name)
        self.inside += 1
        node.body = [
            self.visit(part) for part in node.body
        ]  # not its decorators and defaults, which run at import
        self.inside -= 1
        self.names.pop()
        return node

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

    def visit_Raise(self, node: ast.AST) -> ast.AST:
        return node  # the words of a message are no law

    visit_JoinedStr = visit_Raise

    def visit(self, node: ast.AST) -> ast.AST:
        placed: ast.AST | None = None
        self.statement = node.lineno if isinstance(node, ast.stmt) else self.statement
        rests = self.inside and not any(name in MEMORY for name in self.names)
        for operator, variant in _variants_of(node) if rests else ():
            if self.chosen is None:
                change = [
                    " ".join(ast.unparse(copy.deepcopy(part)).split())[:90]
                    for part in (node, variant)
                ]
                place = ".".join(self.names)
                self.found.append(
                    (operator, place, " => ".join(change), (node.lineno, self.statement))
                )  # type: ignore[attr-defined]
            elif self.count == self.chosen:
                placed = copy.deepcopy(variant)
            self.count += 1
        result = super().visit(node)
        return result if placed is None else ast.copy_location(placed, node)


def mutants(path: Path, root: Path) -> list[Mutant]:
    """Return all mutants of a file."""
    visitor = _Visitor()
    visitor.visit(ast.parse(path.read_text()))
    seen: Counter[str] = Counter()
    found = []
    for number, (operator, function, change, lines) in enumerate(visitor.found):
        key = f"{path.relative_to(root)} {function}: {change}"
        seen[key] += 1
        found.append(
            Mutant(key + (f" #{seen[key]}" if seen[key] > 1 else ""), operator, path, lines, number)
        )
    return found


def mutated(mutant: Mutant) -> ast.Module:
    """Return the tree of the file with this mutation in it."""
    return ast.fix_missing_locations(
        _Visitor(mutant.number).visit(ast.parse(mutant.path.read_text()))
    )
