"""The arithmetics in which a network is executed: how much one operation loses in each, how its
numbers are
stored, what a linear map of them loses, and constants that it computes.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from certcli.engine.table import NoRule
from certcli.engine.trace import MOVING, Computed, Moved, place_of
from certcli.engine.tracer import tensors_in
from certcli.lipschitz.numerics.arithmetic import Arithmetic
from certcli.lipschitz.numerics.convolution import Geometry
from certcli.lipschitz.numerics.outward import frobenius_norm
from certcli.lipschitz.numerics.real import INF, ZERO, Real, as_real
from certcli.lipschitz.numerics.spectral import spectral_norms

ALGORITHMS = {
    "moves": "entries are moved, chosen, compared or stored; nothing else is rounded",
    "entries": "a few rounded operations of each entry, in any order, fused or not",
    "function": "an elementary function within its arithmetic's `function`",
    "any order": "sums of products in any order, blocked or fused; no Winograd, Strassen, Fourier",
    "two passes": "a mean, then the deviations from it",
    "Welford": "mean and variance updated together, in one piece or in parts that are joined",
    "one pass": "E[x^2] - E[x]^2",
    "softmax": "scores less their maximum, in one piece or in blocks with a running maximum",
}
"""What is none of these has no rule: it is refused, or written among the assumptions."""

_Rule = TypeVar("_Rule", bound=Callable[..., Any])


def covers(*names: str) -> Callable[[_Rule], _Rule]:
    """State the algorithms that a rule's bound holds for."""

    def stated(rule: _Rule) -> _Rule:
        rule.__dict__["algorithms"] = tuple(names)
        return rule

    return stated


def covered(rule: Callable[..., Any]) -> tuple[str, ...]:
    """Return the algorithms that a rule states, none where it says nothing."""
    names: tuple[str, ...] = vars(rule).get("algorithms", ())
    return names


REAL = "real"


@dataclass(frozen=True)
class Precision:
    """An arithmetic: a result t of one operation is stored as t (1 + d) + e with |d| <= unit and
    |e| <= tiny.

    Attributes:
        tiny: What a result below the normal range loses, kept or flushed to zero.
        largest: The largest finite number.
        function: Relative error of exp, log, erf, tanh, roots and reciprocals.
        factor: Relative error of each factor of a product in a matrix product or a convolution.
        wide: The arithmetic in which sums and what happens inside softmax are kept; itself where
            None.
    """

    name: str
    dtype: torch.dtype
    unit: float
    tiny: float
    largest: float
    function: float
    factor: float = 0.0
    wide: "Precision | None" = None

    def fits(self, *sizes: Real) -> bool:
        """Tell whether numbers of these sizes never overflow, roundings on their way included."""
        return all(size * 2.0 < self.largest for size in sizes)

    @property
    def sums(self) -> "Precision":
        return self if self.wide is None else self.wide

    @property
    def stored(self) -> Real:
        """Return the relative error of a result stored, stored with a bias, and scaled."""
        return compounded(as_real(3 * self.unit))

    def order(self, terms: int) -> Real:
        """Return the error of a sum of `terms` products and a bias, in any order, relative to the
        sum of their |terms|.

        Source: gamma_n of Higham 2002, section 3.1.
        """
        roundings = (terms + 8) * self.sums.unit
        return as_real(roundings) / (1 - roundings) if roundings <= 0.25 else INF

    def products(self, terms: int) -> Real:
        """Return the error of such a sum once it is stored, relative to the sum of its |terms|."""
        return compounded(self.order(terms) + 2 * self.factor + 3 * self.unit)

    def lost(self, terms: int, entries: float) -> Real:
        """Return the l2 norm of underflow in `entries` inner products of `terms` terms."""
        each = as_real(4.0) * self.tiny + as_real(4.0 * (terms + 8)) * self.sums.tiny
        return each * as_real(entries).sqrt()


def compounded(total: Real) -> Real:
    """Return prod (1 + a_i) - 1 <= s + s^2, rounded up, s = sum a_i, a_i >= 0; inf above 1/2."""
    return total + total * total if total <= 0.5 else INF


FLOAT64 = Precision(
    "float64", torch.float64, 2.0**-53, 2.0**-1022, torch.finfo(torch.float64).max, 2.0**-46
)
FLOAT32 = Precision(
    "float32", torch.float32, 2.0**-24, 2.0**-126, torch.finfo(torch.float32).max, 2.0**-18
)
PRECISIONS: dict[str, Precision] = {
    precision.name: precision
    for precision in (
        FLOAT64,
        FLOAT32,
        Precision(
            "tf32", torch.float32, 2.0**-24, 2.0**-126, FLOAT32.largest, 2.0**-18, factor=2.0**-10
        ),
        Precision(
            "bf16",
            torch.bfloat16,
            2.0**-8,
            2.0**-126,
            torch.finfo(torch.bfloat16).max,
            2.0**-7,
            wide=FLOAT32,
        ),
        Precision("fp16", torch.float16, 2.0**-11, 2.0**-24, 65504.0, 2.0**-10, wide=FLOAT32),
    )
}
"""By name. Elementary functions of float64 are within 2^-46 as in `enclosure.rounding`; those of
float32 within 32 units of
the last place (torch's fast exp on CPUs is allowed 20); those of half precisions are computed in float32, then rounded. The
factors of TF32 may be cut off."""


_ARITHMETIC = Arithmetic()


@dataclass(frozen=True)
class Stored:
    """A tensor rounded to nearest. number: the stored one, in float64, infinite at overflow."""

    number: Tensor
    difference: Tensor
    flushed: float

    @classmethod
    def of(cls, tensor: Tensor, precision: Precision) -> "Stored":
        exact = tensor.detach().double()
        number = exact.to(precision.dtype).double()
        normal = torch.finfo(precision.dtype).tiny
        small = (
            float(((number != 0) & (number.abs() < normal)).sum())
            if precision.tiny >= normal
            else 0.0
        )
        return cls(number, number - exact, math.sqrt(small) * normal)

    @property
    def moved(self) -> Real:
        """Return |stored - exact|_2 over all entries, numbers below normal range flushed to 0."""
        return length(self.difference) + self.flushed

    @property
    def farthest(self) -> Real:
        """The largest entry of |stored - exact|."""
        return largest(self.difference) + self.flushed


def length(x: Tensor) -> Real:
    """Return |x|_2 over all entries, rounded up; infinite with an infinite entry."""
    return as_real(frobenius_norm(x)) if bool(torch.isfinite(x).all()) else INF


def largest(x: Tensor) -> Real:
    """Return the largest |entry|; infinite with NaN."""
    return as_real(float(x.abs().max().nan_to_num(nan=math.inf))) if x.numel() else ZERO


class LinearMap:
    """x -> W x + b on rows as an arithmetic executes it, or a convolution on positions.

    Attributes:
        weight: (out, in) of a linear layer, (out, in, ...) of a convolution, whose geometry says
            where it is applied.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        precision: Precision,
        geometry: Geometry | None = None,
    ) -> None:
        self.precision = precision
        self.geometry = geometry
        self.weight = Stored.of(weight, precision)
        self.bias = None if bias is None else Stored.of(bias, precision)
        self.terms, self.out = weight[0].numel(), len(weight)

    def _norm(self, operator: Tensor) -> Real:
        if not bool(torch.isfinite(operator).all()):
            return INF
        if not bool(operator.any()):
            return ZERO
        if self.geometry is not None and len(self.geometry.stride) > 2:
            return _by_windows(operator, self.geometry)
        if self.geometry is not None:
            return _ARITHMETIC.convolution(operator, 0.0, self.geometry)
        return _ARITHMETIC.sigma(_ARITHMETIC.matrix(operator))

    @cached_property
    def norm(self) -> Real:
        """|W| as it is stored."""
        return self._norm(self.weight.number)

    @cached_property
    def mass(self) -> Real:
        """| |W| |, of absolute values."""
        return self._norm(self.weight.number.abs())

    @cached_property
    def moved(self) -> Real:
        """|stored W - W|, at most its Frobenius norm at every position."""
        if self.weight.flushed:
            return self._norm(self.weight.difference.abs() + self.weight.flushed)
        return self._norm(self.weight.difference)

    @cached_property
    def shift(self) -> Real:
        """|b| as it is stored."""
        return ZERO if self.bias is None else length(self.bias.number)

    def reach(self, x: Real) -> Real:
        """Return |W x + b| as executed, without its own rounding, for an x of this length."""
        return self.norm * x + self.shift

    def rounding(self, x: Real, rows: float = 1.0) -> Real:
        """Return |executed - exact| for executed inputs of norm x over all rows.

        What storing W and b moves, the factors that are rounded, the products, their sum in any
        order, and the result. Every addition makes a sum of some of the terms t, which is at most
        (sum |t| + |sum t|) / 2, and loses u of it.
        """
        p = self.precision
        root = as_real(rows).sqrt()
        mass = self.mass * x + self.shift * root
        size = self.norm * x + self.shift * root
        if not p.sums.fits(mass):
            return INF
        error = self.moved * x + (ZERO if self.bias is None else self.bias.moved * root)
        # (W + dW)(x + dx) - W x with |dW| <= f |W| and |dx|_2 <= f |x|_2; 1 + 2^-8 is above f^2
        factors = mass * (p.factor * (1 + 2.0**-8)) + self.norm * x * p.factor
        mass = mass * (1 + 4 * p.factor)
        size = size + factors
        sums = ((mass + size) * 0.5 + mass * p.order(self.terms)) * ((self.terms + 8) * p.sums.unit)
        inside = factors + sums + mass * (2 * p.sums.unit)
        return error + inside + (size + inside) * p.stored + p.lost(self.terms, rows * self.out)


def _by_windows(kernel: Tensor, geometry: Geometry) -> Real:
    """max over groups of |W| sqrt(windows of a voxel), W the kernel as a matrix: docs/bounds.md,
    2.3.
    """
    parts = kernel.flatten(1).chunk(geometry.groups)
    taps = zip(kernel.shape[2:], geometry.stride, geometry.dilation, strict=True)
    count = math.prod(-(-k * math.gcd(s, d) // s) for k, s, d in taps)
    largest = max(spectral_norms([part for part in parts if bool(part.any())]))
    return as_real(largest) * as_real(float(count)).sqrt()


class BlockMap(LinearMap):
    """x -> [W_h x_h]_h on the parts x_h of x: linear maps of disjoint parts, so that of each norm
    the largest counts.

    Attributes:
        weight: (parts, out, in).
    """

    def __init__(self, weight: Tensor, precision: Precision) -> None:
        super().__init__(weight, None, precision)
        self.terms, self.out = weight.shape[2], len(weight) * weight.shape[1]

    def _norm(self, operator: Tensor) -> Real:
        if not bool(torch.isfinite(operator).all()):
            return INF
        return as_real(max(spectral_norms(list(operator)))) if bool(operator.any()) else ZERO


_UP = 1 + 2.0**-30
"""Above the roundings of the sums and products in a rule."""


def error_of(x: Tensor, p: Precision, moves: Moved) -> float:
    """Bound |executed - exact| of a constant's entries; NoRule where there is no bound."""
    place = place_of(x)
    if place in moves.storages:
        return float(Stored.of(x, p).farthest) if x.is_floating_point() else 0.0
    step = moves.computed.get(place)
    rule = None if step is None else _RULES.get(step.name)
    if step is None or rule is None or tensors_in(step.kwargs):
        by = "" if step is None else f" by '{step.name}'"
        raise NoRule(
            f"its rounding at the neighbours of an image is not known: a constant that the network computes{by}"
        )
    errors = [_error(operand, p, moves) for operand in step.args]
    sizes = [max(map(_most, tensors_in(a))) + e if tensors_in(a) else _number(a)
             for a, e in zip(step.args, errors, strict=True)]  # fmt: skip
    error = rule(p, step, sizes, errors) * _UP + 4 * p.tiny
    return error if _most(step.result) + error < p.largest else math.inf


def _error(operand: Any, p: Precision, moves: Moved) -> float:
    """Return the error of an argument: of a list the largest one, of a number that of storing it."""
    if tensors_in(operand):
        return max(error_of(x, p, moves) for x in tensors_in(operand))
    return _number(operand) * 2 * p.unit


def _number(operand: Any) -> float:
    return abs(float(operand)) if isinstance(operand, (int, float)) else 0.0


def _most(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


def _matrices(p: Precision, step: Computed, sizes: list[float], errors: list[float]) -> float:
    """gamma |X| |W| of executed operands, |X| e_W + |W| e_X, and as much of a bias."""
    x, w = (
        operand.double().abs() + e for operand, e in zip(step.args[-2:], errors[-2:], strict=True)
    )
    bias = (sizes[0], errors[0]) if step.name == "addmm" else (0.0, 0.0)
    passed = float(x.sum(-1).max()) * errors[-1] + float(w.sum(-2).max()) * errors[-2]
    rounding = (_most(x @ w) + bias[0]) * float(p.products(x.shape[-1]))
    return rounding + passed + bias[1] + float(p.lost(x.shape[-1], 1.0))


def _product(p: Precision, step: Computed, sizes: list[float], errors: list[float]) -> float:
    return sizes[0] * errors[1] + sizes[1] * errors[0] + 3 * p.unit * sizes[0] * sizes[1]


def _sum(p: Precision, step: Computed, sizes: list[float], errors: list[float]) -> float:
    return (
        errors[0] + errors[1] + 3 * p.unit * (sizes[0] + sizes[1]) if not step.kwargs else math.inf
    )


_RULES: dict[str, Callable[[Precision, Computed, list[float], list[float]], float]] = {
    "mm": _matrices,
    "addmm": _matrices,
    "mul": _product,
    "add": _sum,
    "sub": _sum,
    "sigmoid": lambda p, step, sizes, errors: errors[0] / 4 + 4 * p.function,
    "tanh": lambda p, step, sizes, errors: errors[0] + 2 * p.function,
    # |exp(e) - 1| <= 2 |e| for |e| <= 1
    "exp": lambda p, step, sizes, errors: (
        2 * (errors[0] + p.function) * _most(step.result) * (1 + 2 * errors[0])
        if errors[0] <= 1
        else math.inf
    ),
    **dict.fromkeys(
        (*MOVING, "relu", "clamp", "clamp_min", "clamp_max", "neg"),
        lambda p, step, sizes, errors: max(errors),
    ),
}
