"""Assertions about networks for pytest, whose failures show figures. Documented in docs/api.md."""

from typing import Any

from certcli import api
from certcli.evaluation.threat import Threat
from certcli.evaluation.verdicts import PASSED, UNDECIDED, Demand, whole
from certcli.report.document import Share
from certcli.system.errors import UsageError


class NotDecidedError(AssertionError):
    """The interval of the share holds the demand: more images decide it."""


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
    """Fail unless the share of images certified and correct at `radius` (pixel l2) reaches
    `at_least`; return the share.

    The lower end of the share's 95 % interval must reach it. Network, images and options are those
    of `api.certify`.

    Raises:
        AssertionError: the upper end does not reach it.
        NotDecidedError: the interval holds `at_least`.
    """
    _require_share(at_least)
    certificates = api.certify(network, images, labels, method=method, **options)
    hits = sum(row.holds_at(Threat("l2", radius)) for row in certificates)
    _require(
        hits, len(certificates), at_least, f"certified at l2 {radius:g} by {method}", proven=True
    )
    return Share.of(hits, len(certificates))


def assert_bound(network: api.Network, at_most: float) -> float:
    """Fail unless the proven Lipschitz bound is finite and at most `at_most`; return it."""
    bound_result = api.bound(network)
    value = float(bound_result.upper)
    assert value <= at_most, (
        f"the proven bound is {bound_result.upper} ({bound_result.bound.why or 'finite'}), {at_most:g} was demanded"
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
    """Fail unless the share of images that withstand the attacks at `radius` reaches `at_least`;
    return it.

    This can only show that a network is not robust. The interval decides, as in `assert_certified`.
    Attacks and settings are those of `api.attack`.
    """
    _require_share(at_least)
    (result,) = api.attack(network, images, labels, radii=(radius,), **settings)
    hits = round(result.robust * result.images)
    what = f"left by {', '.join(result.attacks)}"
    _require(hits, result.images, at_least, f"{what} at l2 {radius:g}", proven=False)
    return float(result.robust)


def _require(hits: int, images: int, at_least: float, what: str, *, proven: bool) -> None:
    """Raise AssertionError unless hits among images, by interval, are at least `at_least`."""
    look = whole(hits, images, Demand(at_least))
    if look.verdict == PASSED:
        return
    message = f"{look.counted(1, proven=proven)} are {what}; {100 * at_least:g} % were demanded"
    if look.verdict == UNDECIDED:
        raise NotDecidedError(f"{message}: not decided, more images decide it")
    raise AssertionError(message)


def _require_share(at_least: float) -> None:
    if not 0 <= at_least <= 1:
        raise UsageError(f"at_least {at_least:g} is no share", "0.4 means 40 %")
