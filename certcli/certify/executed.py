"""What certificates of a network as it is executed have in common, whatever method proves them."""

import copy
from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor, nn

from certcli.certify.certificate import Certificate, Certifier, Doubt, PinnedWeights
from certcli.certify.proof_options import REAL
from certcli.engine.table import NoRule, RuleTable
from certcli.engine.trace import Trace
from certcli.rounding import PRECISIONS, NeighbourErrors
from certcli.system.errors import NoBoundError
from certcli.system.memory import out_of_memory

_NOTHING = 2.0**-20
"""A part of a radius that is not worth another look at the image."""


def neighbour_errors(
    model: nn.Module,
    size: tuple[int, ...],
    arithmetic: str | None,
    tables: Sequence[RuleTable] = (),
    traced: Trace | None = None,
) -> NeighbourErrors | None:
    """Return the rounding at neighbours of images of this size (c, h, w); None for real arithmetic.

    None too where nobody named an arithmetic, and float64 has no proof.

    Raises:
        NoBoundError: the rounding of an operation in the arithmetic that was named is not proven.
    """
    if arithmetic == REAL:
        return None
    try:
        return NeighbourErrors(model, size, PRECISIONS[arithmetic or "float64"], tables, traced)
    except NoRule as reason:
        if arithmetic is None:
            return None
        hint = f"--arithmetic {REAL} speaks of real numbers"
        raise NoBoundError(f"no certificate in {arithmetic}: {reason}", hint) from reason


class ProvingCertifier(Certifier):
    """A method that proves, of a network in float64 and eval mode, for images of this size (c, h, w).

    arithmetic: of the network that its certificates speak of, as in `Proof`. tables: of domains that walk its graph. traced:
    as in `NeighbourErrors`.
    """

    def __init__(
        self,
        model: nn.Module,
        size: tuple[int, int, int],
        arithmetic: str | None,
        tables: Sequence[RuleTable] = (),
        traced: Trace | None = None,
    ) -> None:
        self.model = model
        self._device = next(model.parameters()).device
        self._weights = PinnedWeights(model)
        self._neighbours = neighbour_errors(model, size, arithmetic, tables, traced)
        self.arithmetic = REAL if self._neighbours is None else self._neighbours.precision.name

    @property
    def spoken_of(self) -> str:
        """Return in words what the certificates speak of."""
        if self._neighbours is None:
            return "real arithmetic, every rounding of float64 counted"
        return f"the network as executed in {self.arithmetic}, every rounding counted"

    @property
    def attacked(self) -> nn.Module:
        return self.model

    @cached_property
    def _executed(self) -> nn.Module:
        """The network in its arithmetic, where torch runs it on any machine; else the one that is attacked."""
        if self._neighbours is None or self.arithmetic in ("float64", "tf32"):
            return self.model
        return copy.deepcopy(self.model).to(self._neighbours.precision.dtype).eval()

    def representable(self, images: Tensor) -> Tensor:
        weight = next(self._executed.parameters())
        return images.to(weight.dtype).to(images.dtype)

    @torch.no_grad()
    def stands(self, claims: Sequence[Certificate], nearby: Tensor, doubt: Doubt) -> list[bool]:
        """Tell whether the network as it is executed still gives the claimed class, by finite logits."""
        try:
            logits = self._executed(nearby.to(next(self._executed.parameters()).dtype)).double()
        except RuntimeError as failure:  # an operation that this machine has not in half precision
            if out_of_memory(failure):
                raise
            logits = self.model(nearby.double())
        finite, tops = torch.isfinite(logits).all(1).tolist(), logits.argmax(1).tolist()
        found = zip(finite, tops, claims, strict=True)
        return [holds and top == claim.prediction for holds, top, claim in found]


def as_executed(
    neighbours: NeighbourErrors | None,
    images: Tensor,
    tops: Tensor,
    radii: Tensor,
    again: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """Return the radii (b,) that hold as executed, of those in real arithmetic.

    By the rounding on the whole box where that takes next to nothing, as in float64; else by that near the image.

    Args:
        again: (places among the images, bounds on the rounding of z_i - z_j there (n, k)) -> radii that hold nevertheless.
    """
    if neighbours is None:
        return radii
    found = again(torch.arange(len(radii), device=radii.device), neighbours.on_box[tops])
    (far,) = (found < radii * (1 - _NOTHING)).nonzero(as_tuple=True)
    if len(far):
        nearby = neighbours(images[far], radii[far], tops[far])
        found[far] = torch.maximum(found[far], again(far, nearby))
    return found
