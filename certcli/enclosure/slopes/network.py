"""The gradients of one network near many images, as forms. Proofs: docs/local.md, 13."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from certcli.enclosure.slopes.attention import placed
from certcli.enclosure.slopes.layers import constant, norm, through
from certcli.enclosure.slopes.pulls import PullContext
from certcli.enclosure.slopes.tape import Tape, linear_before, require_pulls
from certcli.enclosure.zonotopes.form import Form
from certcli.enclosure.zonotopes.network import LocalNetwork
from certcli.enclosure.zonotopes.normalisation import layer_norm
from certcli.enclosure.zonotopes.space import Execution
from certcli.engine.table import NoRule
from certcli.engine.walk import walk
from certcli.nn.norms import spread_of

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
        executed_as = None if self.execution is None else self.execution.walk(1)
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
        return executed_as.pairs()[0, label].to(self.row.centre)

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
