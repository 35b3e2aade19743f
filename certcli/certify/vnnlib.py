"""VNN-LIB 1.0 and 2.0: a box of inputs, and what outputs would be unsafe.

A file asserts what is UNSAFE: linear constraints on outputs, as a disjunction of conjunctions. A
query holds if no input of the box has such an output. Numbers are exact fractions until they become
float64, and then the box is rounded outward and the constraints towards unsafe.
"""

import gzip
import math
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from certcli.system.errors import DataError, Refused, one_line
from certcli.system.reading import open_bounded

LARGEST = 16 * 2**20
MOST_VARIABLES = 2**20
MOST_CASES = 10_000
MOST_ROWS = 2**20
"""Constraints of all cases together."""
DEEPEST = 64
_MALFORMED = (AttributeError, LookupError, TypeError, ValueError)
"""Errors of Python where a word stands for a list, or a list for a word."""
_TOKEN = re.compile(r"\s*(?:;[^\n]*|([()]|\[[^\]\n]*\]|[^\s()\[\];]+))")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,3})?")

_HINT = "VNN-LIB 1.0 or 2.0: a box of inputs, and linear constraints on outputs"

T = TypeVar("T")
Terms = dict[tuple[str, int], Fraction]
"""Coefficients of variables: ("X" or "Y", place in the flattened tensor); ("", 0) is the constant."""
_ONE = ("", 0)


@dataclass(frozen=True)
class Row:
    """A constraint on outputs: sum of coefficients[i] y[i] + constant >= 0, or > 0 if strict."""

    coefficients: Mapping[int, Fraction]
    constant: Fraction
    strict: bool

    def at(self, outputs: list[float]) -> Fraction:
        """Return the left side for finite numbers, exactly."""
        return self.constant + sum(
            factor * Fraction(outputs[place]) for place, factor in self.coefficients.items()
        )

    def allows(self, outputs: list[float]) -> bool:
        total = self.at(outputs)
        return total > 0 or (total == 0 and not self.strict)


@dataclass(frozen=True)
class Query:
    """The box, and the cases of unsafe outputs: all rows of one case together.

    Attributes:
        low, high: an edge each for every input, in the order of the flattened tensor.
        shape: of the inputs, where the file states it.
    """

    low: list[Fraction]
    high: list[Fraction]
    cases: list[list[Row]]
    outputs: int
    version: str
    shape: tuple[int, ...]

    @property
    def is_empty(self) -> bool:
        return any(low > high for low, high in zip(self.low, self.high, strict=True))

    def is_violated(self, inputs: list[float], outputs: list[float]) -> bool:
        """Tell whether these float32 inputs lie in the box and these outputs are unsafe, exactly."""
        if not all(map(math.isfinite, [*inputs, *outputs])):
            return False
        edges = zip(self.low, inputs, self.high, strict=True)
        inside = all(_is_between(low, value, high) for low, value, high in edges)
        return inside and any(all(row.allows(outputs) for row in case) for case in self.cases)


def _is_between(low: Fraction, value: float, high: Fraction) -> bool:
    """Tell whether low <= value <= high, or the edges, as those of 0.1, have no float32 between them
    and it is a neighbour of theirs.
    """
    if low <= value <= high:
        return True
    other = np.nextafter(np.float32(value), np.float32(-np.inf if value > high else np.inf))
    return bool(np.isfinite(other)) and (
        float(other) < low if value > high else float(other) > high
    )


def read_query(path: Path) -> Query:
    """Read a file, as text or compressed by gzip; DataError names what is no such query."""
    try:
        return _Reader().read(_text(path))
    except (Refused, OSError, EOFError, zlib.error) as failure:
        raise DataError(f"{path}: {one_line(failure)}", _HINT) from failure
    except _MALFORMED as failure:
        raise DataError(f"{path} is no query ({one_line(failure)})", _HINT) from failure


def _text(path: Path) -> str:
    with open_bounded(path, LARGEST) as file:
        packed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        data = (gzip.GzipFile(fileobj=file) if packed else file).read(LARGEST + 1)
    if len(data) > LARGEST:
        raise Refused(f"more than {LARGEST:,} bytes")
    return data.decode("ascii")


def _trees(text: str) -> list[Any]:
    """Return nested lists of words; an index in brackets is a word of its own."""
    stack: list[list[Any]] = [[]]
    place = 0
    for match in _TOKEN.finditer(text):
        if match.start() != place:
            raise Refused(f"'{one_line(text[place : match.start()])[:40]}' is no word")
        place, word = match.end(), match[1]
        if word == "(":
            stack.append([])
            if len(stack) > DEEPEST:
                raise Refused(f"brackets nested deeper than {DEEPEST}")
        elif word == ")":
            inner = stack.pop()
            if not stack:
                raise Refused("a bracket too many")
            stack[-1].append(inner)
        elif word is not None:
            stack[-1].append(word)
    if len(stack) != 1 or text[place:].strip():
        raise Refused("a bracket too few, or one that is never closed")
    return stack[0]


@dataclass
class _Reader:
    """What the file has said so far.

    Attributes:
        names: of declared tensors -> X or Y. sizes: X or Y -> its shape.
        edges: place of an input -> the largest low and the smallest high edge.
    """

    version: str = "1.0"
    names: dict[str, str] = field(default_factory=dict)
    sizes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    edges: dict[int, list[Fraction | None]] = field(default_factory=dict)
    cases: list[list[Row]] = field(default_factory=lambda: [[]])

    def read(self, text: str) -> Query:
        for tree in _trees(text):
            word = tree[0] if isinstance(tree, list) and tree else None
            if word == "vnnlib-version" and len(tree) == 2:
                self.version = str(tree[1]).strip("<>")
            elif word == "declare-const" and len(tree) == 3:
                kind, place = self._variable(tree[1:2], declared=True)
                self.sizes[kind] = (max(place + 1, *self.sizes.get(kind, (0,))),)
            elif word == "declare-network" and not self.names:
                self._declare(tree[2:])
            elif word == "assert" and len(tree) == 2:
                self._assert(tree[1])
            else:
                raise Refused(f"'{one_line(word or tree)[:40]}' is not read")
        return self._query()

    def _query(self) -> Query:
        if set(self.sizes) != {"X", "Y"}:
            raise Refused("inputs or outputs are not declared")
        count, outputs = (math.prod(self.sizes[kind]) for kind in "XY")
        edges = [self.edges.get(place, [None, None]) for place in range(count)]
        low = [edge[0] for edge in edges if edge[0] is not None]
        high = [edge[1] for edge in edges if edge[1] is not None]
        if not len(low) == len(high) == count or self.cases == [[]]:
            raise Refused("an input has no bound, or outputs have no constraint")
        shape = self.sizes["X"] if self.names else ()
        return Query(low, high, self.cases, outputs, self.version, shape)

    def _declare(self, parts: list[Any]) -> None:
        for part in parts:
            kind = {"declare-input": "X", "declare-output": "Y"}.get(part[0])
            if kind is None or kind in self.sizes or len(part) != 4:
                raise Refused("a network has one input and one output")
            self.names[part[1]] = kind
            self.sizes[kind] = tuple(int(size) for size in part[3].strip("[]").split(","))
            if not 0 < math.prod(self.sizes[kind]) <= MOST_VARIABLES:
                raise Refused(f"{part[1]} has the shape {self.sizes[kind]}")

    def _variable(self, words: list[Any], *, declared: bool = False) -> tuple[str, int]:
        """Return kind and place of X_3, or of X [0,3] of a declared shape."""
        match = re.fullmatch(r"([XY])_(\d{1,7})", str(words[0]))
        if match and not self.names and int(match[2]) < MOST_VARIABLES:
            kind, place = match[1], int(match[2])
            if declared or place < self.sizes.get(kind, (0,))[0]:
                return kind, place
        kind = self.names.get(str(words[0]), "")
        if kind and len(words) == 2:
            index = [int(number) for number in words[1].strip("[]").split(",")]
            shape = self.sizes[kind]
            within = len(index) == len(shape) and all(0 <= i < n for i, n in zip(index, shape))
            if within:
                strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
                return kind, sum(i * step for i, step in zip(index, strides, strict=True))
        raise Refused(f"'{one_line(' '.join(map(str, words)))[:40]}' is no declared variable")

    def _operands(self, words: list[Any]) -> Iterator[Terms]:
        """Yield the terms of each operand; a variable of 2.0 is a name and an index."""
        place = 0
        while place < len(words):
            following = words[place + 1] if place + 1 < len(words) else None
            count = 2 if isinstance(following, str) and following[0] == "[" else 1
            yield self._terms(words[place : place + count])
            place += count

    def _terms(self, words: list[Any]) -> Terms:
        if isinstance(words[0], str):
            if _NUMBER.fullmatch(words[0]):
                return {_ONE: Fraction(words[0])}
            return {self._variable(words): Fraction(1)}
        operator, *rest = words[0] or [""]
        first, *others = self._operands(rest) if rest else ({},)
        if operator == "-" and not others:
            return _sum_of_terms({}, first, -1)
        for other in others:
            if operator in ("+", "-"):
                first = _sum_of_terms(first, other, 1 if operator == "+" else -1)
            elif operator == "*" and (set(first) <= {_ONE} or set(other) <= {_ONE}):
                number, terms = (first, other) if set(first) <= {_ONE} else (other, first)
                first = _sum_of_terms({}, terms, number.get(_ONE, Fraction(0)))
            else:
                raise Refused(f"'{one_line(operator)[:20]}' of these is not linear")
        if operator not in ("+", "-", "*"):
            raise Refused(f"'{one_line(operator)[:20]}' is no operation of sums")
        return first

    def _cases(self, tree: Any) -> list[list[tuple[Terms, bool]]]:
        """Return a constraint as cases of terms >= 0 (or > 0: strict)."""
        operator, *rest = tree if isinstance(tree, list) and tree else [tree]
        if operator == "or":
            return [case for each in rest for case in self._cases(each)]
        if operator == "and":
            cases: list[list[tuple[Terms, bool]]] = [[]]
            for each in rest:
                cases = _cases_of_both(cases, self._cases(each))
            return cases
        if operator not in ("<=", ">=", "<", ">", "=="):
            raise Refused(f"'{one_line(operator)[:40]}' is no constraint that is read")
        sides = list(self._operands(rest))
        if len(sides) != 2:
            raise Refused(f"{operator} of {len(sides)} terms")
        strict = operator in ("<", ">")
        rising, falling = (
            _sum_of_terms(sides[0], sides[1], -1),
            _sum_of_terms(sides[1], sides[0], -1),
        )
        if operator == "==":
            return [[(rising, False), (falling, False)]]
        return [[(rising if operator[0] == ">" else falling, strict)]]

    def _assert(self, tree: Any) -> None:
        cases = self._cases(tree)
        kinds = {kind for case in cases for terms, _ in case for kind, _ in terms} - {""}
        if kinds == {"X"} and len(cases) == 1:
            for terms, strict in cases[0]:
                if strict:
                    raise Refused("a box without its edge: < or > of an input")
                self._narrow(terms)
        elif kinds == {"Y"}:
            self.cases = _cases_of_both(
                self.cases, [[_row_of_terms(*each) for each in case] for case in cases]
            )
        elif kinds == {"X"}:
            raise Refused("several boxes of inputs")
        else:
            raise Refused("a constraint between inputs and outputs, or of none")

    def _narrow(self, terms: Terms) -> None:
        """Take an edge of the box: w x + c >= 0."""
        places = [place for kind, place in terms if kind]
        if len(places) != 1 or not terms["X", places[0]]:
            raise Refused("a constraint between inputs")
        slope = terms["X", places[0]]
        edge = -terms.get(_ONE, Fraction(0)) / slope
        edges = self.edges.setdefault(places[0], [None, None])
        side, nearer = (0, max) if slope > 0 else (1, min)
        earlier = edges[side]
        edges[side] = edge if earlier is None else nearer(earlier, edge)


def _cases_of_both(cases: list[list[T]], further: list[list[T]]) -> list[list[T]]:
    """Return the cases in which one of each holds; the first may change. Refused: too many."""
    if len(further) == 1:
        for case in cases:
            case.extend(further[0])
    elif len(cases) * len(further) <= MOST_CASES:
        cases = [case + other for case in cases for other in further]
    else:
        raise Refused(f"more than {MOST_CASES:,} cases")
    if sum(map(len, cases)) > MOST_ROWS:
        raise Refused(f"more than {MOST_ROWS:,} constraints")
    return cases


def _sum_of_terms(first: Terms, second: Terms, factor: Fraction | int) -> Terms:
    total = dict(first)
    for name, number in second.items():
        total[name] = total.get(name, Fraction(0)) + factor * number
    return total


def _row_of_terms(terms: Terms, strict: bool) -> Row:
    factors = {place: number for (kind, place), number in terms.items() if kind}
    return Row(factors, terms.get(_ONE, Fraction(0)), strict)


def float64_above(number: Fraction) -> float:
    """Return the smallest float64 that is not below; Refused: it has none."""
    try:
        nearest = float(number)
    except OverflowError as failure:
        raise Refused("a number beyond float64") from failure
    return nearest if Fraction(nearest) >= number else math.nextafter(nearest, math.inf)
