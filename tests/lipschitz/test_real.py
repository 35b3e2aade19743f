"""`Real` never rounds down: against exact fractions.

Weights so small that their products underflow float64: no bound loses them.
"""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from certcli.lipschitz.bound import bound_document
from certcli.lipschitz.network import bound_network
from certcli.lipschitz.numerics.arithmetic import Arithmetic, Matrix
from certcli.lipschitz.numerics.outward import frobenius_norm
from certcli.lipschitz.numerics.real import INF, ONE, ZERO, Real, as_real
from tests.helpers.slopes import IMAGE

mantissas = st.floats(0.5, 1.0, exclude_max=True)
reals = st.builds(Real, mantissas, st.integers(-5000, 5000)) | st.just(ZERO)
floats = st.floats(0.0, 1e300)


def exact(x: Real) -> Fraction:
    return Fraction(x.mantissa) * Fraction(2) ** x.exponent


@given(reals, reals)
def test_operations_round_up_by_at_most_two_ulps(a: Real, b: Real) -> None:
    for result, truth in ((a + b, exact(a) + exact(b)), (a * b, exact(a) * exact(b))):
        assert truth <= exact(result) <= truth * (1 + Fraction(1, 2**51))


@given(reals, reals.filter(lambda x: x.mantissa > 0))
def test_division_and_root_round_up(a: Real, b: Real) -> None:
    assert exact(a) <= exact(a / b) * exact(b) <= exact(a) * (1 + Fraction(1, 2**51))
    root = exact(a.sqrt())
    assert exact(a) <= root * root <= exact(a) * (1 + Fraction(1, 2**50))


@given(reals, reals)
def test_order_is_that_of_the_numbers(a: Real, b: Real) -> None:
    assert (a < b) == (exact(a) < exact(b))
    assert (a == b) == (exact(a) == exact(b))
    assert max(a, b) >= min(a, b)


@given(floats)
def test_floats_convert_exactly_and_back(x: float) -> None:
    assert exact(as_real(x)) == Fraction(x)
    assert float(as_real(x)) >= x


@given(reals)
def test_json_is_exact(a: Real) -> None:
    assert Real.from_json(a.to_json()) == a


@given(reals)
@example(Real(0.75 + 2.0**-30, -1060))  # of which float64 keeps 14 digits
def test_float_never_lies_below(a: Real) -> None:
    value = float(a)
    assert math.isinf(value) or Fraction(value) >= exact(a)


@given(reals)
def test_infinity_absorbs(a: Real) -> None:
    assert INF + a == INF == a + INF
    assert INF * a == INF == a * INF  # also for 0: what cannot be bounded stays unbounded
    assert a < INF
    assert Real.from_json(INF.to_json()) == INF


def test_products_beyond_float64_keep_their_logarithm() -> None:
    total = ONE
    for _ in range(1000):
        total = total * as_real(1e30)
    assert total.finite
    assert (
        abs(total.log10() - 30_000) < 1e-6
    )  # 1000 roundings of 1e-16 each, and log10 in double precision
    assert math.isinf(float(total))
    assert str(total).endswith("e+30000")


@given(reals)
def test_what_is_shown_is_a_bound_too(a: Real) -> None:
    exact = Fraction(a.mantissa) * Fraction(2) ** a.exponent
    assert exact <= Fraction(str(a)) <= exact * Fraction(101, 100)  # three digits at least


def test_zero_and_infinity_have_one_form_and_other_numbers_none() -> None:
    assert Real(0.0, 7) == ZERO
    assert Real(math.inf, 7) == INF
    assert str(Real(1 - 2.0**-40, 20)) == "1.05e+6"
    assert str(Real(0.999999, 20) * (1e6 / 2**20)) == "1.00e+6"
    assert (
        str(as_real(math.nextafter(1e-307, 1))) == "1.01e-307"
    )  # whose logarithm is rounded below -307
    for wrong in (-1.0, math.nan):
        with pytest.raises(ValueError, match="not a number >= 0"):
            Real(wrong)


def test_a_bound_beyond_float64_differs_from_none_in_json() -> None:
    huge = bound_document(Real(0.5, 4001))
    assert huge["upper"] == "inf"
    assert huge["upper_finite"] is True
    assert huge["log10_upper"] == pytest.approx(
        4000 * math.log10(2)
    )  # display precision is not at stake here
    assert bound_document(INF) == {
        "upper": "inf", "log10_upper": None, "upper_finite": False, "upper_text": "inf",
    }  # fmt: skip


def thin(*sizes: tuple[int, int, float]) -> nn.Sequential:
    """Linear layers (inputs, outputs, every weight)."""
    net = nn.Sequential(
        *(nn.Linear(inputs, outputs, bias=False) for inputs, outputs, _ in sizes)
    ).double()
    with torch.no_grad():
        for layer, (_, _, weight) in zip(net, sizes, strict=True):
            layer.weight.fill_(weight)
    return net.eval()


def test_products_below_the_numbers_of_float64_are_not_lost() -> None:
    """2e-324 is no float64: of 32 x 96 products nothing is left. The norm of a matrix of ones (m,
    n) is sqrt(m n).
    """
    result = bound_network(
        nn.Sequential(nn.Flatten(), *thin((32, 32, 1e-160), (32, 3, 2e-164))), IMAGE, 3
    )
    exact = as_real(1e-160) * 2e-164 * 32.0 * math.sqrt(96) * (1 - 1e-12)
    assert exact <= result.upper


ARITHMETIC: dict[str, Callable[[Arithmetic, Matrix, Matrix], Any]] = {
    "matmul": lambda arith, a, b: arith.sigma(arith.matmul(a, b)),
    "columns": lambda arith, a, b: arith.sigma(arith.scale_columns(a, b.tensor[:, 0])),
    "rows": lambda arith, a, b: arith.sigma(arith.scale_rows(arith.transpose(a), b.tensor[:, 0])),
    "number": lambda arith, a, b: arith.sigma(arith.scale(a, float(b.tensor[0, 0]))),
    "thin": lambda arith, a, b: arith.sigma_product(
        arith.rows(a, 0, 3), arith.rows(arith.transpose(b), 0, 3)
    ),
    "carried": lambda arith, a, b: arith.sigma(
        arith.matmul(Matrix(0 * a.tensor, frobenius_norm(a.tensor)), b)
    ),
}


@pytest.mark.parametrize(
    "exponents", [(-540, -530), (-1000, -60), (-60, -1010), (-1020, 1000), (-500, -500)]
)
@pytest.mark.parametrize("name", ARITHMETIC)
def test_the_error_of_a_product_covers_underflow(name: str, exponents: tuple[int, int]) -> None:
    """The same product of matrices of ordinary size, times a power of two, is the oracle."""
    torch.manual_seed(0)
    a = torch.randn(40, 40, dtype=torch.float64)
    b = torch.randn(40, 40, dtype=torch.float64)
    if name == "carried":
        a = torch.eye(40, dtype=torch.float64)
    arith = Arithmetic()
    compute = ARITHMETIC[name]
    ordinary = compute(arith, Matrix(a), Matrix(b))
    small = compute(
        arith,
        *(Matrix(torch.ldexp(m, torch.tensor(e))) for m, e in zip((a, b), exponents, strict=True)),
    )
    exact = Real(ordinary.mantissa, ordinary.exponent + sum(exponents)) * (
        1 - 1e-5
    )  # 1e-6: looseness of both norms
    if name != "carried":
        assert exact <= small
    else:  # an error of |a| = sqrt(40) stands for any matrix of that norm, eye() for one
        assert (
            as_real(float(torch.linalg.matrix_norm(b, 2)))
            * as_real(2.0 ** (sum(exponents) // 2))
            * (2.0 ** (sum(exponents) - sum(exponents) // 2))
            * (1 - 1e-12)
            <= small
        )


def test_sums_of_errors_are_not_below_the_exact_ones() -> None:
    for products, *terms in (
        (10**9, (1e-289,)),
        (7, (0.1, 0.3), (0.7,)),
        (3, (1e-200, 1e-160)),
        (1, (1e200, 1e80), (0.1,)),
    ):
        exact = products * Fraction(2) ** -1022 + sum(
            math.prod(map(Fraction, factors)) for factors in terms
        )
        assert (
            exact
            <= Fraction(Arithmetic()._error(products, *terms))
            <= exact * (1 + Fraction(1, 2**49))
        )
    arith = Arithmetic()
    known = Matrix(torch.ones(2, 2).double(), 0.1)
    gains = torch.tensor([-3.0, -2.0])
    for scaled in (
        arith.scale_rows(known, gains),
        arith.scale_columns(known, gains),
        arith.scale(known, -3.0),
    ):
        assert (
            3 * Fraction(0.1)
            <= Fraction(scaled.error)
            <= 3 * Fraction(0.1) * (1 + Fraction(1, 2**40))
        )


@pytest.mark.parametrize(
    "sizes", [(1e200, 1e250), (1e-200, 1e-170), (1 - 2.0**-32, 1.0), (0.0, 5e-324)]
)
def test_the_longest_row_of_a_constant_is_found(
    sizes: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = -torch.tensor([[sizes[0]] * 4, [sizes[1]] * 4], dtype=torch.float64)
    if sizes[1] == 1:  # within its rounding argmax may take any row
        monkeypatch.setattr(torch.Tensor, "argmax", lambda lengths: 0)
    assert exact(2 * as_real(sizes[1])) <= exact(Arithmetic().longest(rows)) * (
        1 + Fraction(1, 2**40)
    )


def test_of_products_one_of_which_overflows_each_has_its_norm() -> None:
    torch.manual_seed(0)
    a = Matrix(torch.randn(3, 8).double())
    b = Matrix(torch.randn(3, 9).double())
    first, second = Arithmetic().sigma_products([(a, b), (Matrix(a.tensor * 2.0**700), b)], "")
    exact = float(torch.linalg.matrix_norm(a.tensor.T @ b.tensor, 2)) * (1 - 1e-12)  # rounded here
    assert exact <= first <= exact * (1 + 1e-6)
    assert as_real(exact) * 2.0**700 <= second


def test_pairs_of_logits_that_nearly_agree_are_not_lost() -> None:
    net = nn.Sequential(nn.Flatten(), *thin((32, 3, 1e-170))).eval()
    with torch.no_grad():
        net[1].weight[1:] *= -1
    pairs = bound_network(net, IMAGE, 3).pairs
    assert float(pairs[0, 1]) >= 2e-170 * math.sqrt(32) * (1 - 1e-12)
    assert float(pairs[0, 1]) <= 2e-170 * math.sqrt(32) * (1 + 1e-6)
