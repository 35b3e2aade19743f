"""Where no certificate is tried: a bound far beyond the radius."""

import pytest

from certcli.certify.hopeless import HOPELESS, hopeless


@pytest.mark.parametrize(
    ("log10_bound", "radius", "tried"),
    [
        (None, 0.5, True),
        (400.0, 0.0, True),  # the share at a radius of 0 is clean accuracy
        (HOPELESS, 1.0, True),
        (HOPELESS + 1e-9, 1.0, False),
        (HOPELESS + 0.5, 0.1, True),
        (HOPELESS + 1.5, 0.1, False),
    ],
)
def test_a_bound_far_beyond_the_radius_is_not_tried(
    log10_bound: float | None, radius: float, tried: bool
) -> None:
    assert (hopeless(log10_bound, radius) is None) is tried
