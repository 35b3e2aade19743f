"""Curves and texts of the pages that open from a disk."""

import random
from collections.abc import Sequence

import pytest

from certcli.report.audit_page import certified_steps
from certcli.report.page import HtmlPage, Table, proven_steps, render


def value_at(points: Sequence[tuple[float, float]], radius: float) -> float:
    """Return the height of the drawn curve: at a point's own radius the share before it still holds."""
    return next(share for at, share in reversed(points) if at < radius)


@pytest.mark.parametrize("seed", range(20))
def test_curves_of_asked_shares_are_never_above_what_is_certified(seed: int) -> None:
    draw = random.Random(seed)
    radii = [draw.choice([-1.0, 0.0, draw.uniform(0, 2)]) for _ in range(30)]
    exact = certified_steps(radii)
    asked = sorted(draw.uniform(0.1, 2) for _ in range(draw.randint(1, 4)))
    shares = [(at, sum(radius >= at for radius in radii) / len(radii)) for at in asked]
    curve = proven_steps([(0.0, sum(radius >= 0 for radius in radii) / len(radii)), *shares])
    for _ in range(200):
        at = draw.uniform(1e-6, asked[-1])
        assert value_at(curve, at) <= value_at(exact, at)
    for at, share in shares:
        assert value_at(curve, at) == share


def test_what_stands_between_backticks_is_code_and_stays_escaped() -> None:
    page = HtmlPage(
        title="x",
        subtitle="",
        verdict=["."],
        tables=[Table("t", ["a"], [["1"]], note="run `certvit verify <x>`, <b>")],
        curves=[],
        curve_note="",
        commands=[],
        facts=[],
    )
    text = render(page)
    assert "<code>certvit verify &lt;x&gt;</code>, &lt;b&gt;" in text
