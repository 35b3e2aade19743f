"""Assertions about networks for pytest, whose failures show figures. Documented in docs/api.md."""

from typing import Any

from certcli import api
from certcli.evaluation.intervals import counted
from certcli.evaluation.threat import Threat
from certcli.report.document import Share
from certcli.system.errors import UsageError


def assert_certified(
    network: api.Network,
    images: api.Data,
    labels: api.Labels = None,
    radius: float = 0.25,
    at_least: float = 0.5,
    *,
    method: str = "lipschitz",
    **options: Any,
) -> Share:
    """Fail unless the share of images certified and correct at `radius` (pixel l2) reaches `at_least`; return the share.

    Network, images and options are those of `api.certify`.
    """
    _require_share(at_least)
    found = api.certify(network, images, labels, method=method, **options)
    hits = sum(row.holds_at(Threat("l2", radius)) for row in found)
    share = Share.of(hits, len(found))
    assert share.share >= at_least, (
        f"{counted(hits, len(found), digits=1)} are certified at l2 {radius:g} by {method}; "
        f"{100 * at_least:g} % were demanded"
    )
    return share


def assert_bound(network: api.Network, at_most: float) -> float:
    """Fail unless the proven Lipschitz bound is finite and at most `at_most`; return it."""
    found = api.bound(network)
    value = float(found.upper)
    assert value <= at_most, (
        f"the proven bound is {found.upper} ({found.bound.why or 'finite'}), {at_most:g} was demanded"
    )
    return value


def assert_robust(
    network: api.Network,
    images: api.Data,
    labels: api.Labels = None,
    radius: float = 0.25,
    at_least: float = 0.5,
    **settings: Any,
) -> float:
    """Fail unless the share of images that withstand the attacks at `radius` reaches `at_least`; return it.

    This can only show that a network is not robust. Attacks and settings are those of `api.attack`.
    """
    _require_share(at_least)
    (found,) = api.attack(network, images, labels, radii=(radius,), **settings)
    assert found.robust >= at_least, (
        f"{counted(round(found.robust * found.images), found.images, digits=1, proven=False)} withstand "
        f"{', '.join(found.attacks)} at l2 {radius:g}; {100 * at_least:g} % were demanded"
    )
    return float(found.robust)


def _require_share(at_least: float) -> None:
    if not 0 <= at_least <= 1:
        raise UsageError(f"at_least {at_least:g} is no share", "0.4 stands for 40 %")
