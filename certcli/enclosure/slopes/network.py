"""The gradients of one network near many images, as forms. Proofs: docs/local.md, 13."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from certcli.enclosure.slopes.attention import placed
from certcli.enclosure.slopes.layers import constant, norm, through
from certcli.enclosure.slopes.table import PullContext
from certcli.enclosure.slopes.tape import Tape, linear_before, require_pulls
from certcli.enclosure.zonotopes.domain import LocalNetwork
from certcli.enclosure.zonotopes.form import Form
from certcli.enclosure.zonotopes.normalisation import layer_norm
from certcli.engine.table import NoRule
from certcli.engine.walk import walk
from certcli.nn.norms import spread_of

_ROUNDING = 2.0**-26
"""Relative to the length of a gradient: far above rounding differences, far below a wrong one."""


class SlopeNetwork(LocalNetwork):
    """A network traced once. NoRule, Untraceable: what has no relaxation, or no derivative."""

    def __init__(self, model: nn.Module, size: tuple[int, int, int]) -> None:
        super().__init__(model, size)
        self.model = model
        require_pulls(self.ending.trace)
        if self.narrow is not None and not linear_before(self.ending.trace, self.narrow):
            self.narrow = None  # gradients there are products with values in other coordinates

    @torch.no_grad()
    def near(self, start: Form) -> "Neighbourhood":
        """Return the walk over a neighbourhood. Unbounded where it is too large."""
        witnesses = self.witnesses(start)
        tape = Tape(
            self.ending, self.needed, start, None, witnesses, not self._seen, None, self.change
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
        with torch.no_grad():
            gradient = self.tape.gradient(self._at_last(weights))
        self.require_holds(weights, gradient)
        return gradient

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
