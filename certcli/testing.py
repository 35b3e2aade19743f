"""For tests of people who train networks: an assertion about a checkpoint, as `pytest` shows it.

from certcli.testing import assert_certified

def test_the_model_is_robust(images, labels):
    assert_certified("model.safetensors", images, labels, radius=0.25, at_least=0.4)
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from certcli import api
from certcli.evaluation.threat import Threat
from certcli.report.document import Share
from certcli.system.errors import UsageError


def assert_certified(
    checkpoint: str | Path | Any,
    images: Tensor | str,
    labels: Tensor | Sequence[int] | None = None,
    radius: float = 0.25,
    at_least: float = 0.5,
    *,
    method: str = "lipschitz",
    **options: Any,
) -> Share:
    """Fails unless the share of images certified and correct at `radius` (pixel l2) is `at_least`; returns the share.

    images (n, c, h, w) in [0, 1] with labels (n,), or the name of a dataset. method, options: of `api.certify`.
    """
    _require_share(at_least)
    found = api.certify(checkpoint, images, labels, method=method, **options)
    hits = sum(row.holds_at(Threat("l2", radius)) for row in found)
    share = Share.of(hits, len(found))
    low, high = share.interval
    told = (
        f"{hits} of {len(found)} images ({100 * share.share:.1f} %, 95 % interval {100 * low:.0f} to {100 * high:.0f}) are "
        f"certified at l2 {radius:g} by {method}; {100 * at_least:g} % were demanded"
    )
    assert share.share >= at_least, told
    return share


def assert_bound(checkpoint: str | Path | Any, at_most: float) -> float:
    """Fails unless the proven Lipschitz bound is finite and `at_most`; returns it."""
    found = api.bound(checkpoint)
    value = float(found.upper)
    assert value <= at_most, (
        f"the proven bound is {found.upper} ({found.bound.why or 'finite'}), {at_most:g} was demanded"
    )
    return value


def assert_robust(
    checkpoint: str | Path | Any,
    images: Tensor | str,
    labels: Tensor | Sequence[int] | None = None,
    radius: float = 0.25,
    at_least: float = 0.5,
    *,
    attacks: Sequence[str] = ("pgd",),
    **options: Any,
) -> float:
    """Fails unless the share of images that withstand the attacks at `radius` is `at_least`; returns it.

    That attacks find nothing proves nothing: this can only show that a network is not robust.
    """
    _require_share(at_least)
    found = api.attack(checkpoint, images, labels, radii=(radius,), attacks=attacks, **options)
    robust = found[-1].robust
    told = f"{100 * robust:.1f} % of {found[-1].images} images withstand {', '.join(attacks)} at l2 {radius:g}"
    assert robust >= at_least, f"{told}; {100 * at_least:g} % were demanded"
    return float(robust)


def _require_share(at_least: float) -> None:
    if not 0 <= at_least <= 1:
        raise UsageError(f"at_least {at_least:g} is no share", "0.4 stands for 40 %")
