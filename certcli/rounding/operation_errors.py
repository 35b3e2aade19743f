"""What one operation's rounding adds, by sizes of executed tensors. Proofs: docs/soundness.md."""

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import certcli.system.compat  # noqa: F401 (before timm)

# isort: split
import torch
from timm.layers import LayerScale
from torch import Tensor

from certcli.engine.table import NoRule, RuleTable
from certcli.engine.trace import Moved, place_of
from certcli.engine.walk import Call, Constant
from certcli.lipschitz.numerics.convolution import Geometry
from certcli.lipschitz.numerics.real import INF, ONE, ZERO, Real, as_real
from certcli.models.pixels import PixelNormalize
from certcli.nn.blocks import ConvexResidual, WeightedResidual
from certcli.rounding.arithmetics import (
    FLOAT64,
    LinearMap,
    Precision,
    Stored,
    compounded,
    covers,
    error_of,
    largest,
    length,
)

rules = RuleTable("executed")


@dataclass(frozen=True)
class Executed:
    """Bounds on an executed tensor: its l2 norm, its longest row (last axis), its largest |entry|.

    Attributes:
        deviation: from below, of every row's entries.
        shortest: from below, of every row's length.
    """

    shape: tuple[int, ...]
    total: Real
    fibre: Real
    peak: Real
    deviation: float = 0.0
    shortest: float = 0.0

    def within_reach(self, error: Real) -> "Executed":
        """Return the sizes with lower bounds that hold for all rows up to this far away."""
        away = float(error) * (1 + 2.0**-40) if error.finite else math.inf
        root = math.sqrt(self.shape[-1]) if self.shape else 1.0
        return replace(
            self,
            deviation=max(0.0, self.deviation - away / root * (1 + 2.0**-40)),
            shortest=max(0.0, self.shortest - away),
        )

    def within(self, total: Real) -> "Executed":
        """Return the lesser bounds of a tensor of this norm."""
        return self.within_all(total, total, total, 0.0)

    def within_all(self, total: Real, fibre: Real, peak: Real, deviation: float) -> "Executed":
        """Return the lesser bounds."""
        return Executed(
            self.shape,
            min(self.total, total),
            min(self.fibre, fibre),
            min(self.peak, peak),
            deviation,
        )


@dataclass(frozen=True)
class Followed:
    """A tensor of the graph: its place among those that were followed, and its shape.

    Attributes:
        hides: scores, some of which a constant -inf replaces in every arithmetic; they count as 0.
    """

    place: int
    shape: tuple[int, ...]
    hides: bool = False

    @property
    def entries(self) -> int:
        return math.prod(self.shape)

    @property
    def rows(self) -> int:
        """How many fibres there are along the last axis."""
        return self.entries // max(1, self.shape[-1])


Sizes = Callable[[Followed], Executed]
Rounding = Callable[[Sizes], Real]
"""From the sizes of executed operands to the l2 norm of what rounding adds to the result; infinite
where it may overflow.
"""


@dataclass(frozen=True)
class Steep:
    """A rounding, and a slope that is less where rows are long: by sizes of all tensors between."""

    rounding: Rounding
    slope: Rounding

    def __call__(self, sizes: Sizes) -> Real:
        return self.rounding(sizes)


@dataclass(frozen=True)
class OfResult:
    """A rounding by the size of the exact function of executed operands, which is finite only near an
    image: share |f| + rest, where no |f| is above `largest`."""

    share: float
    rest: Real
    largest: float

    def __call__(self, sizes: Sizes) -> Real:
        return INF

    def near(self, total: Real, peak: Real) -> Real:
        return total * self.share + self.rest if peak < self.largest else INF


@dataclass(frozen=True, kw_only=True)
class Operation(Call):
    """The first argument of every rule.

    Attributes:
        made: how the network made the constants that are not its own.
        vanished: why results so far have no bound, whatever their operands.
        as_traced: constants are the numbers that float64 gave: the network's, whoever computed them.
    """

    path: str = ""
    kind: str = ""
    shape: Any = ()
    precision: Precision
    made: Moved
    vanished: list[str] = field(default_factory=list)
    as_traced: bool = False

    @property
    def entries(self) -> int:
        return math.prod(self.shape)

    def require(self, condition: bool, reason: str) -> None:
        if not condition:
            raise NoRule(f"its rounding at the neighbours of an image is not known: {reason}")

    def require_own(self, tensor: Tensor) -> None:
        """Raise NoRule for a computed constant: rounded, or chosen by rounded numbers."""
        stays = self.as_traced or place_of(tensor) in self.made.storages
        self.require(stays, "a constant that the network computes")

    def stored(self, tensor: Tensor) -> Stored:
        """Return the network's own tensor as stored: whole, a part, or its entries moved."""
        self.require_own(tensor)
        return Stored.of(tensor, self.precision)

    def operand(self, tensor: Tensor) -> Stored:
        """Return a constant summand or factor; of a computed one numbers of executed size."""
        if self.as_traced or place_of(tensor) in self.made.storages:
            return self.stored(tensor)
        # from real numbers on, there and in float64, in which the graph has it
        error = error_of(tensor, self.precision, self.made) + error_of(tensor, FLOAT64, self.made)
        return Stored(
            tensor.detach().double().abs() + error, torch.full_like(tensor, error).double(), 0.0
        )

    def tensor(self, x: Any) -> Tensor:
        """Return a constant argument of the call."""
        self.require(
            isinstance(x, (Constant, Tensor)),
            "an operand that should be constant depends on the image",
        )
        return x.tensor if isinstance(x, Constant) else x

    def factor(self, x: Any) -> Stored:
        """Return a constant or a number as it is stored."""
        if isinstance(x, Constant):
            return self.stored(x.tensor)
        return Stored.of(torch.tensor(float(x), dtype=torch.float64), self.precision)

    def map(
        self, weight: Tensor, bias: Tensor | None, geometry: Geometry | None = None
    ) -> LinearMap:
        for tensor in (weight, bias):
            if tensor is not None:
                self.stored(tensor)
        return LinearMap(weight, bias, self.precision, geometry)

    def underflow(self, entries: float | None = None) -> Real:
        return self.precision.lost(1, self.entries if entries is None else entries)


@rules.module(PixelNormalize)
@covers("entries")
def pixels(op: Operation, module: PixelNormalize, x: Followed) -> Rounding:
    """(x - mean) / std: the difference and the quotient are rounded, mean and std are stored."""
    mean, std = (Stored.of(part, op.precision) for part in (module.mean, module.std))
    smallest = float(std.number.abs().min()) - float(std.farthest)
    op.require(smallest > 0, "a deviation of 0")
    relative = compounded(as_real(4 * op.precision.unit) + std.farthest / smallest)
    root = as_real(float(x.entries)).sqrt()

    def rounding(sizes: Sizes) -> Real:
        difference = sizes(x).total + largest(mean.number) * root
        return (difference * relative + mean.farthest * root * 2.0) / smallest + op.underflow()

    return rounding


@dataclass(frozen=True)
class Operand:
    """Any operand of a call, repeated to `entries` entries: its size as executed, and how far a
    constant is off.
    """

    size: Callable[[Sizes], Real]
    shift: Real

    @classmethod
    def of(cls, op: Operation, x: Any, entries: int | None = None) -> "Operand":
        entries = op.entries if entries is None else entries
        if isinstance(x, Followed):
            root = as_real(entries / max(1, x.entries)).sqrt()
            return cls(lambda sizes: sizes(x).total * root, ZERO)
        if isinstance(x, Constant):
            stored = op.operand(x.tensor)
            root = as_real(entries / max(1, x.tensor.numel())).sqrt()
            shift = stored.moved * root
            size = length(stored.number) * root + shift
        else:
            size = as_real(abs(float(x))) * as_real(float(entries)).sqrt()
            shift = size * (2 * op.precision.unit)
            size = size + shift
        op.require(size.finite, "a constant that is not finite")
        return cls(lambda sizes: size, shift)


@rules.method("add", "add_", "sub", "sub_")
@rules.function(
    operator.add, operator.iadd, torch.add, operator.sub, operator.isub, torch.sub, torch.subtract,
    torch.rsub,
)  # fmt: skip
@covers("entries")
def added(op: Operation, a: Any, b: Any, alpha: float = 1) -> Rounding:
    """The result is rounded, and alpha b; a constant is stored first."""
    factor = abs(float(alpha))
    one, other = Operand.of(op, a), Operand.of(op, b)
    error = one.shift + other.shift * factor
    roundings = compounded(as_real(4 * op.precision.unit)) if alpha != 1 else op.precision.unit
    return lambda sizes: (
        (one.size(sizes) + other.size(sizes) * factor) * roundings
        + error
        + op.underflow() * (1 if alpha == 1 else 1 + factor)
    )


def scaled(op: Operation, x: Followed, factor: Stored) -> Rounding:
    """Each entry times its factor, which is stored."""
    relative = largest(factor.number) * compounded(as_real(3 * op.precision.unit)) + factor.farthest
    root = as_real(op.entries / x.entries).sqrt()
    return lambda sizes: sizes(x).total * root * relative + op.underflow()


rules.module(LayerScale)(
    covers("entries")(lambda op, module, x: scaled(op, x, op.stored(module.gamma)))
)


@rules.method("div", "div_", "true_divide")
@rules.function(operator.truediv, operator.itruediv, torch.div, torch.true_divide)
@covers("entries")
def divided(op: Operation, x: Any, divisor: Any) -> Rounding:
    """x / d, or x times a rounded 1 / d: |1/d' - 1/d| <= |d' - d| / (|d'| |d|)."""
    op.require(not isinstance(divisor, Followed), "a division by what depends on the image")
    stored = op.factor(divisor)
    smallest = float(stored.number.abs().min()) - float(stored.farthest)
    op.require(smallest > 0, "a division by 0")
    relative = compounded(as_real(4 * op.precision.unit) + stored.farthest / smallest) / smallest
    root = as_real(op.entries / x.entries).sqrt()
    return lambda sizes: sizes(x).total * root * relative + op.underflow() * (ONE + ONE / smallest)


@rules.method("mean", "sum")
@rules.function(torch.mean, torch.sum)
@covers("any order")
def summed(op: Operation, x: Followed, *_: Any, **__: Any) -> Rounding:
    """gamma sum |x_i| (/ n for means) <= gamma |x| sqrt(n) or gamma |x| / sqrt(n) of n terms."""
    averaged, count = op.kind == "mean", x.entries // max(1, op.entries)
    root = as_real(float(count)).sqrt()
    products = op.precision.products(count)

    def rounding(sizes: Sizes) -> Real:
        whole = sizes(x).total * root
        if not op.precision.fits(whole):
            return INF
        return (whole / count if averaged else whole) * products + op.precision.lost(
            count, op.entries
        )

    return rounding


@rules.module(ConvexResidual)
@covers("entries", "function")
def convex_residual(
    op: Operation, module: ConvexResidual, x: Followed, branch: Followed
) -> Rounding:
    """(1 - t) x + t f: t = sigmoid(theta) has slope 1/4, and an error of its own."""
    theta = op.stored(module.theta)
    share = theta.moved + 4 * op.precision.function
    return lambda sizes: (
        (sizes(x).total + sizes(branch).total) * compounded(share + 4 * op.precision.unit)
        + op.underflow()
    )


@rules.module(WeightedResidual)
@covers("entries")
def weighted_residual(
    op: Operation, module: WeightedResidual, x: Followed, branch: Followed
) -> Rounding:
    scale = op.stored(module.scale)
    size, relative = largest(scale.number), compounded(as_real(4 * op.precision.unit))

    def rounding(sizes: Sizes) -> Real:
        added_branch = sizes(branch).total
        return (
            (sizes(x).total + size * added_branch) * relative
            + scale.moved * added_branch
            + op.underflow()
        )

    return rounding
