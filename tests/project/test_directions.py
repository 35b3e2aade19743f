"""Numbers with a direction are rounded in it: on screens, in pages and in JSON."""

import ast
import random
import re
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

from certcli.evaluation.intervals import FEW, counted, interval_text, share_interval
from certcli.evaluation.radii import (
    attacked_percent,
    percent_ends,
    power_of_ten,
    proven_percent,
    rounded_down,
    rounded_up,
)
from certcli.lipschitz.bound import log10_or_none
from certcli.lipschitz.numerics.real import Real

ROOM = Path(__file__).parents[2] / "certcli"
DIRECTED = re.compile(
    r"radius|radii|upper|lower|slope|norm\b|bound|robust|certified|interval|reach|\blow\b|\bhigh\b"
    r"|median_norm|withstood|attention_weight"
)
NEAREST = {
    "grey_levels(radius, size)": "how large a radius is, in words",
    "first - rung.log10_upper": "a difference of two bounds",
    "lower.log10()": "nine digits in the refusal of a report",
}
"""Formatted to the nearest digit, and why that is no claim."""


def rounded_to_nearest() -> Iterator[tuple[str, str]]:
    """Yield file and expression of each `{number:.4g}` whose number has a direction by its name."""
    for path in sorted(ROOM.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FormattedValue) and node.format_spec is not None:
                spec = ast.unparse(node.format_spec)
                expression = ast.unparse(node.value)
                if re.search(r"\.\d+[gfe%]", spec) and DIRECTED.search(expression):
                    yield str(path.relative_to(ROOM)), expression


def test_no_screen_rounds_a_number_with_a_direction_to_the_nearest_digit() -> None:
    left = [one for one in rounded_to_nearest() if one[1] not in NEAREST]
    assert not left, left


def test_texts_of_numbers_are_on_their_side() -> None:
    draw = random.Random(0)
    for _ in range(2000):
        number = draw.random() * 10.0 ** draw.randint(-12, 12)
        digits = draw.randint(1, 7)
        assert Fraction(rounded_down(number, digits)) <= Fraction(number)
        assert Fraction(rounded_up(number, digits)) >= Fraction(number)
        log10 = draw.uniform(-400, 400)
        assert float(power_of_ten(log10, 1).removeprefix("10^")) >= log10 - 1e-12 * abs(log10)


def test_texts_of_shares_and_intervals_are_on_their_side() -> None:
    draw = random.Random(0)
    for _ in range(500):
        images = draw.randint(1, 3000)
        hits = draw.randint(0, images)
        exact = Fraction(100 * hits, images)
        assert Fraction(proven_percent(hits / images).removesuffix(" %")) <= exact
        assert Fraction(attacked_percent(hits / images).removesuffix(" %")) >= exact
        ends = share_interval(hits, images)
        texts = [
            percent_ends(ends),
            re.findall(r"interval (\S+ to \S+)", interval_text(hits, images))[0],
        ]
        if images >= FEW:
            texts += re.findall(r"interval (\S+ to \S+)\)", counted(hits, images))
        for text in texts:
            low, high = map(Fraction, text.split(" to "))
            assert low <= 100 * Fraction(ends[0])
            assert high >= 100 * Fraction(ends[1])


def test_a_logarithm_in_json_is_not_below_the_bound() -> None:
    draw = random.Random(0)
    for _ in range(500):
        value = Real(draw.uniform(0.5, 1), draw.choice([0, 1, 3, 20, -40, 900, 5000]))
        log10 = log10_or_none(value)
        assert log10 is not None
        # in 2^-200 of ln: mantissa and power apart, both with 60 digits
        assert _power_above(log10, value)
    assert log10_or_none(Real(1.0)) == 0.0


def _power_above(log10: float, value: Real) -> bool:
    from decimal import Decimal, localcontext

    with localcontext() as context:
        context.prec = 60
        exact = Decimal(value.mantissa).log10() + value.exponent * Decimal(2).log10()
        return Decimal(log10) >= exact
