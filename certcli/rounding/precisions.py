"""The arithmetics in which a network is executed: how much one operation loses in each."""

from dataclasses import dataclass

import torch

from certcli.lipschitz.numerics.real import INF, Real, as_real

REAL = "real"


@dataclass(frozen=True)
class Precision:
    """An arithmetic: a result t of one operation is stored as t (1 + d) + e with |d| <= unit and
    |e| <= tiny.

    Attributes:
        tiny: What a result below the normal range loses, kept or flushed to zero.
        largest: The largest finite number.
        function: Relative error of exp, erf, tanh and roots.
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
"""By name. Elementary functions of float64 are within 2^-46 as in `enclosure.rounding`; those of float32 within 32 units of
the last place (torch's fast exp on CPUs is allowed 20); those of half precisions are computed in float32, then rounded. The
factors of TF32 may be cut off."""
