"""Where no certificate is tried, which networks are enclosed, and when a certificate is worth having."""

import pytest

from certcli.certify.certificate import Certificate
from certcli.certify.method_choice import HOPELESS, is_useful, local_effort, why_hopeless
from certcli.models import build


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
    assert (why_hopeless(log10_bound, radius) is None) is tried


def rows(correct: int, certified: int) -> list[Certificate]:
    """Return certificates of correct images, and of one wrong image that is certified, too."""
    radii = [1.0] * certified + [0.1] * (correct - certified)
    right = [Certificate(i, 3, 3, radius, "box", 0.0) for i, radius in enumerate(radii)]
    return [*right, Certificate(len(right), 3, 4, 1.0, "box", 0.0)]


@pytest.mark.parametrize(
    ("correct", "certified", "useful"),
    [(20, 2, True), (20, 1, False), (0, 0, False), (5, 1, True), (5, 0, False)],
)
def test_a_tenth_of_the_correct_images_makes_a_certificate_useful(
    correct: int, certified: int, useful: bool
) -> None:
    assert is_useful(rows(correct, certified), 0.5) is useful


@pytest.mark.parametrize(("width", "effort"), [(32, "auto"), (4096, "norms")])
def test_networks_of_large_tensors_are_not_enclosed(width: int, effort: str) -> None:
    arguments = {"embed_dim": width, "depth": 1, "num_heads": 1, "mlp_ratio": 1}
    checkpoint = build.initialise("certvit_vit_digits", arguments | {"patch_size": 2})
    assert local_effort(build.load(checkpoint)) == effort
