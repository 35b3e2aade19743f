"""`Real` never rounds down: against exact fractions."""

import math
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from certcli.lipschitz.bound import bound_document
from certcli.lipschitz.numerics.real import INF, ONE, ZERO, Real, as_real, real_sum

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


def test_sum_of_nothing_is_zero() -> None:
    assert real_sum([]) == ZERO


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
