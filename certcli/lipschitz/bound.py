"""Bounds and estimates, two types on purpose: a bound is a proof, an estimate is an observation."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from certcli.lipschitz.numerics.real import INF, ONE, ZERO, Real

FEATURES = "features"
LOGITS = "logits"
"""The outputs that a bound speaks of; a proof's root has the kind `FEATURES` where the network has
no classifier."""


@dataclass(frozen=True, eq=False)
class Bound:
    """|f(x) - f(y)|_2 <= value * |x - y|_2 for all x, y in the domain; value may be inf.

    Attributes:
        path: The module or operation.
        kind: Its type.
        law: A composition law of `LAWS`, or "theorem" for a leaf that follows from the weights.
        why: The reason in words.
        parts: The bounds to which the law was applied.
    """

    path: str
    kind: str
    value: Real
    law: str
    why: str
    parts: tuple["Bound", ...] = ()

    def nodes(self) -> list["Bound"]:
        """Return every node once, parts first; a residual uses its input twice (a graph)."""
        nodes: list[Bound] = []
        visited: set[int] = set()
        stack: list[tuple[Bound, bool]] = [(self, False)]
        while stack:
            node, expanded = stack.pop()
            if expanded:
                nodes.append(node)
            elif id(node) not in visited:
                visited.add(id(node))
                stack.append((node, True))
                stack.extend((part, False) for part in reversed(node.parts))
        return nodes

    def to_json(self) -> list[dict[str, Any]]:
        """Return the proof as a list in which each node refers to earlier ones by position."""
        position: dict[int, int] = {}
        rows: list[dict[str, Any]] = []
        for node in self.nodes():
            position[id(node)] = len(rows)
            rows.append(
                {
                    "path": node.path,
                    "kind": node.kind,
                    "value": node.value.to_json(),
                    "log10_upper": log10_or_none(node.value),
                    "law": node.law,
                    "why": node.why,
                    "parts": [position[id(part)] for part in node.parts],
                }
            )
        return rows


def log10_or_none(value: Real) -> float | None:
    """Return log10 of a number, rounded up; None for 0 and inf: JSON has neither -inf nor inf."""
    if not (value.finite and value > ZERO):
        return None
    log10 = value.log10()
    # 4 roundings, each of at most 2^-53 of |log10| + 1; the logarithm of 1 is exact
    return log10 if value == ONE else log10 + (abs(log10) + 1) * 2.0**-50


def bound_document(value: Real, name: str = "upper") -> dict[str, Any]:
    """Return a proven number as all JSON documents write it, under four keys made of `name`.

    `<name>` is "inf" both where there is no bound and where float64 is too small for it;
    `<name>_finite` tells these two apart, and `log10_<name>` and `<name>_text` then hold the size.
    """
    shown = float(value)
    return {
        name: shown if shown < math.inf else "inf",
        f"log10_{name}": log10_or_none(value),
        f"{name}_finite": value.finite,
        f"{name}_text": str(value),
    }


LAWS: Mapping[str, Callable[[Sequence[Real]], Real]] = {
    # f after g: Lip <= Lip(f) Lip(g)
    "composition": lambda parts: math.prod(parts, start=ONE),
    # f + g: Lip <= Lip(f) + Lip(g)
    "sum": lambda parts: sum(parts, ZERO),
    # (f, g) side by side: |.|^2 adds, so Lip <= sqrt(Lip(f)^2 + Lip(g)^2)
    "concatenation": lambda parts: sum([part * part for part in parts], ZERO).sqrt(),
    # a part of one tensor, or the tensor rearranged
    "same": lambda parts: max(ZERO, *parts),
    # the input itself
    "identity": lambda parts: ONE,
    # no proof
    "unbounded": lambda parts: INF,
}


def check_proof_laws(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each node of a JSON proof that fails; empty: all laws hold. No torch."""
    values: list[Real] = []
    problems: list[str] = []
    for number, row in enumerate(rows):
        where = f"node {number} ({row.get('path')})"
        try:
            value, parts, law = (
                Real.from_json(row["value"]),
                [int(part) for part in row["parts"]],
                row["law"],
            )
        except (KeyError, TypeError, ValueError) as failure:
            problems.append(f"{where}: cannot be read ({failure})")
            values.append(INF)
            continue
        if any(not 0 <= part < number for part in parts):
            problems.append(f"{where}: refers to a node that does not come before it")
        elif law != "theorem":
            if law not in LAWS:
                problems.append(f"{where}: unknown law '{law}'")
            elif value < LAWS[law]([values[part] for part in parts]):
                problems.append(f"{where}: value {value} is below its law '{law}'")
        values.append(value)
    return problems


@dataclass(frozen=True)
class Estimate:
    """A LOWER bound from a search: some pair of images has at least this slope."""

    value: float
    method: str
    details: Mapping[str, Any] = field(default_factory=dict)
