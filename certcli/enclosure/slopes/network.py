"""The gradients of one network near many images, as forms. Proofs: docs/local.md, 13."""

import math
import operator
from collections import defaultdict
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from certcli.enclosure.slopes import layers
from certcli.enclosure.slopes.layers import constant, norm, placed, through
from certcli.enclosure.slopes.pulls import (
    PullContext,
    moved,
    nothing,
    pixels,
    pulls,
    same,
    summed,
    transposed,
)
from certcli.enclosure.zonotopes.columns import gamma
from certcli.enclosure.zonotopes.domain import Enclosure
from certcli.enclosure.zonotopes.ellipsoids import reduced
from certcli.enclosure.zonotopes.form import Form
from certcli.enclosure.zonotopes.needed_tokens import reads
from certcli.enclosure.zonotopes.network import LocalNetwork
from certcli.enclosure.zonotopes.normalisation import layer_norm
from certcli.enclosure.zonotopes.rules.layers import TOKENWISE
from certcli.enclosure.zonotopes.space import Execution, ZonotopeContext
from certcli.engine.table import NoRule
from certcli.engine.trace import Trace
from certcli.engine.walk import Call, called, walk, walk_back
from certcli.nn.blocks import spread_of
from certcli.system.memory import out_of_memory

LINEAR = (
    summed, moved, nothing, pixels, same,
    layers.plus, layers.minus, *layers.AFFINE_PULLS,
)  # fmt: skip
"""Pulls that read no value."""


class Tape(Enclosure):
    """An enclosure that remembers its walk. Gradients may be pulled back through it any number of times."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.values: dict[fx.Node, Any] = {}
        self.readings: dict[tuple[fx.Node, fx.Node], Any] = {}
        self.inner: dict[fx.Node, dict[str, Any]] = defaultdict(dict)
        self.rounding: dict[fx.Node, list[float]] = {}
        self._passed = 0.0

    def context(self, call: Call) -> ZonotopeContext:
        context: ZonotopeContext = super().context(call)
        return replace(context, inner=self.inner[context.node])

    def read(self, node: fx.Node, argument: fx.Node, value: Any) -> Any:
        if (node, argument) not in self.readings:
            self.readings[node, argument] = super().read(node, argument, value)
        return self.readings[node, argument]

    def observe(self, node: fx.Node, value: Any) -> None:
        super().observe(node, value)
        self.values[node] = value
        computed = isinstance(value, (Form, list, tuple)) and node.op != "placeholder"
        if self.executed_as is not None and computed:
            parts = [value] if isinstance(value, Form) else value
            self.rounding[node] = self.executed_as.lost(node.name, parts)

    def gradient(self, seed: Form) -> tuple[Form, float]:
        """Return the form of the gradient at the image for that at the walk's result.

        And how far execution moves what the gradient is of: the sum over nodes of what rounding adds
        there, times the longest gradient. By the mean value theorem, node after node: runs that are
        executed up to a node and exact behind it are enclosed, too.
        """
        self._passed = 0.0
        back: Form | None = walk_back(self.ending.trace, seed, self._pulled, _meet)
        if back is None:
            back = seed.linear(lambda t: t.new_zeros(len(t), *self.start.shape))
        return back, self._passed * (1 + gamma(2 * len(self.rounding)))

    def _pulled(self, node: fx.Node, gradient: Any) -> list[tuple[fx.Node, Any]]:
        """Return each argument of a node with its part of the gradient."""
        parts = {0: gradient} if isinstance(gradient, Form) else gradient
        losses = self.rounding.get(node, [])
        self._passed += sum(
            losses[i] * float(part.bounds().total) for i, part in parts.items() if losses
        )
        first: Any = node.args[0] if node.args else None
        if node.target is operator.getitem and isinstance(self.values[first], (list, tuple)):
            place: Any = node.args[1]
            places = range(len(self.values[first]))[place]
            if isinstance(places, range):
                return [(first, {places[i]: part for i, part in gradient.items()})]
            return [(first, {places: gradient})]
        # a tensor that is passed on has one value under two names: each of its readings counts once
        arguments: dict[int, list[tuple[fx.Node, int | None]]] = defaultdict(list)

        def value_of(argument: fx.Node) -> Any:
            value = self.read(node, argument, self.values[argument])
            if isinstance(value, (list, tuple)):
                for place, each in enumerate(value):
                    arguments[id(each)].append((argument, place))
            else:
                arguments[id(value)].append((argument, None))
            return value

        rule, kind, args, kwargs = called(self.ending.trace, node, pulls, value_of)
        assert rule is not None, kind  # `require_pulls` has looked
        context = PullContext(node, gradient, self.inner[node], self.needed.get(node))
        try:
            parts = rule(context, *args, **kwargs)
            return [self._at(node, *arguments[id(form)].pop(), part) for form, part in parts]
        except (TypeError, AttributeError, LookupError, ValueError, RuntimeError) as failure:
            if out_of_memory(failure):
                raise
            where = node.meta.get("path") or "the network"
            raise NoRule(
                f"{where} ({kind}): called with arguments its derivative does not know ({failure})"
            ) from failure

    def _at(self, node: fx.Node, argument: fx.Node, place: int | None, gradient: Form) -> Any:
        """Return an argument, of which the node read one token or which it repeated, with its part of
        the gradient; of one of its tensors by their place.
        """
        if place is not None:
            return argument, {place: gradient}
        value = self.values[argument]
        if gradient.shape == value.shape:
            return argument, gradient
        token = reads(
            self.ending.trace, node, self.needed.get(node), lambda m: type(m) in TOKENWISE
        )
        if token is None:
            (summed_up,) = transposed(gradient.worked(), lambda t: t.expand(gradient.shape), value)
            return argument, summed_up
        return argument, placed(gradient, token, value.shape[1])


def _meet(first: Any, second: Any) -> Any:
    """Return the sum of two gradients, of one tensor or of several."""
    if isinstance(first, Form):
        return reduced(first + second)
    common = {place: _meet(first[place], second[place]) for place in first if place in second}
    return {**first, **second, **common}


def require_pulls(traced: Trace) -> None:
    """Raise NoRule that names the first operation without a derivative, before any image is read."""
    for node in traced.graph.nodes:
        if node.op not in ("call_module", "call_function", "call_method"):
            continue
        rule, kind, _, _ = called(traced, node, pulls, lambda argument: None)
        if rule is None:
            where = node.meta.get("path") or "the network"
            raise NoRule(f"{where}: no rule for the derivative of {kind}")


def linear_before(traced: Trace, last: fx.Node) -> bool:
    """Tell whether no pull up to this node reads a value: all of them are linear."""
    for node in traced.graph.nodes:
        if node.op in ("call_module", "call_function", "call_method"):
            rule, _, _, _ = called(traced, node, pulls, lambda argument: None)
            if rule not in LINEAR:
                return False
        if node is last:
            break
    return True


_COPIES = 8
"""Arrays of the largest kind alive at once on the way back."""
_ROUNDING = 2.0**-26
"""Relative to the length of a gradient: far above rounding differences, far below a wrong one."""


class SlopeNetwork(LocalNetwork):
    """A network traced once. NoRule, Untraceable: what has no relaxation, or no derivative."""

    def __init__(
        self, model: nn.Module, size: tuple[int, int, int], execution: Execution | None = None
    ) -> None:
        super().__init__(model, size, execution)
        self.model = model
        require_pulls(self.ending.trace)
        if self.narrow is not None and not linear_before(self.ending.trace, self.narrow):
            self.narrow = None  # gradients there are products with values in other coordinates

    def tape_bytes(self, squares_up_to: int, symbols: int) -> float:
        """Return about the bytes of one walk that keeps its tensors, and of a way back."""
        _, stream, largest, fresh = self.sizes()
        numbers = self.numbers
        squares = numbers * (numbers + 1) // 2 if numbers <= squares_up_to else 0
        columns = numbers + squares + max(symbols, stream) + fresh
        shapes = (node.meta.get("shape") for node in self.ending.trace.graph.nodes)
        entries = sum(math.prod(shape) for shape in shapes if isinstance(shape, tuple))
        return 8.0 * columns * (2 * entries + _COPIES * largest)

    @torch.no_grad()
    def near(self, start: Form) -> "Neighbourhood":
        """Return the walk over a neighbourhood. Unbounded where it is too large."""
        witnesses = self.witnesses(start)
        executed_as = None if self.execution is None else self.execution()
        tape = Tape(
            self.ending,
            self.needed,
            start,
            None,
            witnesses,
            not self._seen,
            executed_as,
            self.change,
        )
        last: Form = walk(self.ending.trace, tape)
        near = Neighbourhood(self, tape, last, witnesses)
        self._seen = True
        return near


class Neighbourhood:
    """One walk, and any number of ways back through it."""

    def __init__(
        self, network: SlopeNetwork, tape: Tape, last: Form, witnesses: list[tuple[Tensor, Tensor]]
    ) -> None:
        self.network = network
        self.tape = tape
        self.shape = last.shape
        self.witnesses = witnesses
        self.row = network.one_row(last)
        self.inner: dict[str, Form] = {}
        if network.ending.norm is not None:
            layer_norm(self.row, spread_of(network.ending.norm), None, None, inner=self.inner)

    def gradient(self, weights: Tensor) -> Form:
        """Return the gradient of weights . logits, weights (k,): a form of (1, c, h, w).

        Raises:
            NoRule: it excludes the network's gradient at a witness.
        """
        return self.gradient_and_rounding(weights)[0]

    def gradient_and_rounding(self, weights: Tensor) -> tuple[Form, float]:
        """Return the gradient, and how far execution up to the last norm moves weights . logits."""
        with torch.no_grad():
            gradient, rounding = self.tape.gradient(self._at_last(weights))
        self.require_holds(weights, gradient)
        return gradient, rounding

    def behind(self, label: int) -> Tensor:
        """Return how far execution from the last norm on moves z_label - z_j: (k,), or inf."""
        executed_as = self.tape.executed_as
        if executed_as is None:
            return torch.full((1,), torch.inf, dtype=torch.float64)
        return executed_as.pairs()[label].to(self.row.centre)

    def require_holds(self, weights: Tensor, gradient: Form) -> None:
        """Raise NoRule where a form excludes the network's gradient at a witness."""
        for place, image in self.witnesses:
            truth = self.measured(weights, image)
            if bool((gradient.farthest(place, truth) > _ROUNDING * truth.norm()).any()):
                raise NoRule("the derivative of an operation excludes what the network does there")

    def measured(self, weights: Tensor, image: Tensor) -> Tensor:
        """Return the gradient at one image, by autograd."""
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
            start = image.detach().clone().requires_grad_(True)
            margin = (self.network.model(start)[0] * weights).sum()
            (gradient,) = torch.autograd.grad(margin, start)
        return gradient

    def _at_last(self, weights: Tensor) -> Form:
        """Return the gradient at the walk's result, before the last norm and layer."""
        ending: Any = self.network.ending
        gradient = constant(weights.view(1, -1), self.row)
        if ending.head is not None:
            gradient = through(ending.head.weight, gradient)
        if ending.norm is not None:
            context = PullContext(None, gradient, self.inner)
            gradient = norm(context, self.row, spread_of(ending.norm), ending.norm.weight)
        if ending.token is None or self.shape[1] == 1:
            return gradient.linear(lambda t: t.reshape(len(t), *self.shape))
        return placed(gradient.linear(lambda t: t[:, None]), ending.token, self.shape[1])
