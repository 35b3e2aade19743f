"""The global domain: a walk gives each node of the graph its Lipschitz constant from the pixels."""

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import fx, nn

import certcli.lipschitz.rules  # noqa: F401 (registers every rule)
from certcli.engine.table import NoRule
from certcli.engine.trace import Trace, example_of, trace_model
from certcli.engine.tracer import ModuleScope
from certcli.engine.walk import Call, Domain, walk
from certcli.lipschitz.bound import Bound
from certcli.lipschitz.context import Charge, Context, Walk
from certcli.lipschitz.numerics.arithmetic import Arithmetic, Scalar
from certcli.lipschitz.numerics.real import ONE
from certcli.lipschitz.size import Size
from certcli.lipschitz.table import rules
from certcli.lipschitz.value import Value


@dataclass(frozen=True)
class Propagation:
    """The result of a walk.

    Attributes:
        logits: The last value, its final linear map still pending.
        scopes: (call of a module, constant of its input, constant of its output).
        context: The last call's; settling in it adds charges to those of the walk.
    """

    logits: Value
    scopes: tuple[tuple[ModuleScope, Scalar, Scalar], ...]
    context: Context

    @property
    def charges(self) -> tuple[Charge, ...]:
        """One for each theorem that was applied, in the order of execution."""
        return tuple(self.context.walk.charges)


class GlobalDomain(Domain):
    """Lipschitz constants on the box [0, 1]^pixels, in one arithmetic."""

    rules = rules

    def __init__(self, arith: Arithmetic) -> None:
        self.walk = Walk(arith)
        self.bases: dict[fx.Node, Scalar] = {}
        self.last: Context | None = None

    def image(self, shape: tuple[int, ...]) -> Value:
        arith = self.walk.arith
        proof = (
            Bound("pixels", "input", ONE, "identity", "the image itself")
            if arith.rigorous
            else None
        )
        # every pixel lies in [0, 1]
        box = Size(arith, shape, peak=lambda: arith.const(1.0), pixels=True)
        return Value(arith.const(1.0), box, None, proof, shape)

    def context(self, call: Call) -> Context:
        self.last = Context(self.walk, call)
        return self.last

    def shape(self, value: Any) -> tuple[int, ...]:
        return tuple(value.shape)

    def result(self, value: Any, call: Call) -> Any:
        return _in_call_shape(value, call.shape)

    def observe(self, node: fx.Node, value: Any) -> None:
        if isinstance(value, Value):
            self.bases[node] = value.base

    def forget(self, node: fx.Node, value: Any) -> None:
        settled = self.walk.settled.pop(id(value), None)
        if settled is not None:
            self.bases[node] = settled[1].base

    def scopes(self, traced: Trace) -> Iterator[tuple[ModuleScope, Scalar, Scalar]]:
        """Yield each call of a module with the constants of its input and output."""
        for scope in traced.scopes:
            if scope.entry is not None and scope.exit is not None:
                before = self.bases.get(scope.entry)
                after = self.bases.get(scope.exit)
                if before is not None and after is not None:
                    yield scope, before, after


def _in_call_shape(result: Any, shape: Any) -> Any:
    """A rule's result in the call's shape, if of as many entries and nothing waits: norms agree."""
    if isinstance(result, (list, tuple)) and isinstance(shape, list) and len(result) == len(shape):
        return [_in_call_shape(item, part) for item, part in zip(result, shape, strict=True)]
    if (
        not isinstance(result, Value)
        or not isinstance(shape, tuple)
        or tuple(result.shape) == shape
    ):
        return result
    if math.prod(result.shape) != math.prod(shape) or result.waiting is not None:
        return result
    return replace(result, shape=shape, size=result.size.arranged(shape, None))


def trace_network(model: nn.Module, size: tuple[int, ...]) -> Trace:
    """Return the graph on an image (c, h, w); modules with a rule of this domain are leaves."""
    return trace_model(model, example_of(model, size), rules)


@contextmanager
def deep_recursion() -> Iterator[None]:
    """Raise the recursion limit: size bounds go back to the pixels, some calls a layer."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, 50_000))
    try:
        yield
    finally:
        sys.setrecursionlimit(limit)


def propagate(traced: Trace, arith: Arithmetic) -> Propagation:
    """Apply the rules node by node; NoRule, with the path, where there is no theorem."""
    with deep_recursion():
        arith.begin()
        domain = GlobalDomain(arith)
        logits = walk(traced, domain)
        if not isinstance(logits, Value) or domain.last is None:
            raise NoRule("the logits do not depend on the image")
        return Propagation(logits, tuple(domain.scopes(traced)), domain.last)
