"""What the global bound claims about every tensor of a network, and runs of its graph that measure
it.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from certcli.engine.replay import replayed
from certcli.engine.table import NoRule
from certcli.engine.trace import executed
from certcli.engine.walk import walk
from certcli.lipschitz.network import GlobalDomain, deep_recursion
from certcli.lipschitz.numerics.arithmetic import Arithmetic
from certcli.lipschitz.value import Affine, Size, Value
from tests.helpers.lipschitz_cases import build_row
from tests.helpers.reached import recorded
from tests.helpers.slopes import IMAGE
from tests.helpers.spellings import SINGLE

ROUNDED = 1e-12
"""Rounding of a measured norm, in float64."""
ROUNDED_SINGLE = 2.0**-20
"""The same in float32."""
LOST = 1e-9
"""Singular values below this share of the largest are left out where the input of a map is computed from its result."""
SOLVED = 1e-6
"""Rounding there: 1e-15 of the result over the smallest singular value that is left."""


class _Noted(GlobalDomain):
    """Keeps the value of every node."""

    def __init__(self) -> None:
        super().__init__(Arithmetic())
        self.values: dict[fx.Node, Any] = {}

    def observe(self, node: fx.Node, value: Any) -> None:
        super().observe(node, value)
        self.values[node] = value


class Claims:
    """The values of all nodes of a network's graph.

    Attributes:
        logits: The value of the output, settled.
        reached: The entries of the rule table that made these values.
    """

    def __init__(
        self, net: nn.Module, shape: tuple[int, ...] = IMAGE, rounding: float = ROUNDED
    ) -> None:
        """Walk the network's graph; rounding: of its results, relative to their norms."""
        self.rounding = rounding
        self.shape, domain = shape, _Noted()
        with (
            replayed(net, shape, domain.rules) as self.traced,
            deep_recursion(),
            recorded(domain.rules) as self.reached,
        ):
            domain.walk.arith.begin()
            logits = walk(self.traced, domain)
            assert domain.last is not None
            self.context = domain.last
            self.values = domain.values
            self.logits: Value = self.context.settle(logits)

    def images(self, seed: int = 0) -> Tensor:
        """Return noise, corners of the box, and the one towards which an entry of the output grows."""
        noise = torch.rand(
            4, *self.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        )
        start = noise[:1].clone().requires_grad_(True)
        *_, (_, result) = executed(self.traced, start)
        (upwards,) = torch.autograd.grad(result.abs().max(), start)
        corners = [
            noise.round(),
            torch.zeros_like(start),
            torch.ones_like(start),
            (upwards > 0).double(),
        ]
        return torch.cat([noise, *corners])

    @torch.no_grad()
    def faults(self, images: Tensor) -> Iterator[str]:
        """Run the graph on these images, side by side, and yield each claim that does not hold."""
        apart = (images[1:] - images[:-1]).flatten(1).norm(dim=1)
        with deep_recursion():
            for steps in zip(
                *(executed(self.traced, image[None].clone()) for image in images), strict=True
            ):
                node = steps[0][0]
                for fault in self._refuted(
                    self.values.get(node), [result for _, result in steps], apart
                ):
                    yield f"{node.meta['path']} {node.name}: {fault}"

    def _refuted(self, value: Any, results: Sequence[Any], apart: Tensor) -> Iterator[str]:
        if isinstance(value, (list, tuple)):
            for number, part in enumerate(value):
                yield from self._refuted(part, [result[number] for result in results], apart)
        if not isinstance(value, Value):
            return
        found = torch.stack(list(results)).double()
        if tuple(value.shape) != tuple(found.shape[1:]):
            yield f"the shape {value.shape} of {tuple(found.shape[1:])}"
        pixels = value.waiting is None and value.size.pixels
        if pixels and not (found.min() >= 0 and found.max() <= 1):
            yield "no pixels"
        if value.pending is not None:
            yield from _before(value, value.pending, found, apart, max(LOST, self.rounding))
        try:
            settled = self.context.settle(value)
        except NoRule:  # scores of unbounded tokens have a theorem only together with their softmax
            return
        yield from above_sizes(settled.size, found, 1 + self.rounding)
        yield from _faster(float(settled.base) * (1 + self.rounding), found, apart)


def above_sizes(size: Size, found: Tensor, rounded: float) -> Iterator[str]:
    shape = tuple(found.shape[1:])
    if tuple(size.shape) != shape:
        yield f"a size of {size.shape} for {shape}"
    measured = {
        "norm": (found.flatten(1).norm(dim=1), size.total),
        "entry": (found.abs(), size.peak),
    }
    for axis in range(-len(shape), 0):
        measured[f"fibre along {axis}"] = found.norm(dim=axis), size.fibre_along(axis)
    for name, (numbers, claimed) in measured.items():
        if not (largest := float(numbers.max())) <= float(claimed) * rounded:
            yield f"{name} of {largest:.6g} above {float(claimed):.6g}"


def _faster(base: float, found: Tensor, apart: Tensor, lost: float = 0.0) -> Iterator[str]:
    moved = torch.where(found[1:] == found[:-1], 0.0, found[1:] - found[:-1]).flatten(1).norm(dim=1)
    if not bool((moved <= base * apart + lost).all()):
        yield f"slope of {float((moved / apart).max()):.6g} above {base:.6g}"


def _before(
    value: Value, pending: Affine, found: Tensor, apart: Tensor, lost_share: float
) -> Iterator[str]:
    """Claims about the input of a map that waits: the shortest input with this result is no longer,
    and no faster.
    """
    width = pending.width
    index = pending.index
    effective = pending.effective(value.size.arith)
    matrix = (
        torch.eye(width, dtype=torch.float64) if effective is None else effective.tensor.double()
    )
    if effective is None and pending.centered:
        matrix = matrix - 1 / width
    shift = torch.zeros(len(matrix), 1) if pending.bias is None else pending.bias.tensor
    if index is None:
        rows = found.movedim(pending.axis, -1)
    else:
        matrix = matrix[index.flatten()]
        shift = shift[index.flatten()]
        wide = [axis - 1 for axis in range(-index.dim(), 0) if index.shape[axis] > 1]
        rows = (
            found.unsqueeze(-1)
            .movedim(wide, list(range(-1 - len(wide), -1)))
            .flatten(-1 - len(wide))
        )
    if not rows.shape[-1] == len(matrix) == len(shift):
        yield f"a map to {len(matrix)} features, shifted by {len(shift)}, of {rows.shape[-1]}"
        return
    rows = rows.reshape(len(found), -1, len(matrix)) - shift.flatten()
    inverse = torch.linalg.pinv(matrix, rtol=LOST)
    inputs = rows @ inverse.T
    steepest = float(matrix.norm())
    error = 0.0 if pending.bias is None else pending.bias.error
    lost = SOLVED * float(rows.norm(dim=-1).max() + shift.norm()) / steepest if steepest else 0.0
    radius = float(inverse.norm()) * error  # of the inputs, where the shift is known up to a ball
    fibre = float(value.size.fibre)
    total = float(value.size.total)
    count = rows.shape[1] ** 0.5
    rest = float((rows - inputs @ matrix.T).norm(dim=-1).max())
    if not rest <= error + lost_share * (steepest * fibre + float(found.abs().max())):
        yield f"a result {rest:.6g} beside the map's range"
    measured = {
        "fibre": (inputs.norm(dim=-1), fibre + radius + lost),
        "norm": (inputs.flatten(1).norm(dim=1), total + (radius + lost) * count),
    }
    if pending.matrix is None and not pending.centered:
        measured["entry"] = inputs.abs(), float(value.size.peak) + radius + lost
    for name, (numbers, claimed) in measured.items():
        if not (largest := float(numbers.max())) <= claimed * (1 + SOLVED):
            yield f"{name} before the map of {largest:.6g} above {claimed:.6g}"
    yield from _faster(float(value.base) * (1 + SOLVED), inputs, apart, lost * count)


@functools.cache
def claims_of_row(name: str) -> Claims:
    """Return those of a case, once for all laws that read them."""
    return Claims(build_row(name), rounding=ROUNDED_SINGLE if name in SINGLE else ROUNDED)
