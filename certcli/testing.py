"""Assertions about networks for pytest, whose failures show figures. Documented in docs/api.md."""

from typing import Any, Unpack

from certcli import api
from certcli.api import arguments
from certcli.api.door import speaks_python
from certcli.api.options import AttackOptions, MethodOptions, Radius, Words
from certcli.certify.methods import Method
from certcli.evaluation.intervals import PASSED, UNDECIDED, Demand, judge_all
from certcli.evaluation.threat import Norm, Threat
from certcli.report.document import Share


class NotDecidedError(AssertionError):
    """The interval of the share holds the demand: more images decide it."""


@speaks_python
def assert_certified(
    source: api.Network,
    images: api.Data,
    labels: api.Labels = None,
    radii: Radius = 0.25,
    at_least: float = 0.5,
    *,
    method: Method = "lipschitz",
    denoiser: Any = None,
    device: str = "cpu",
    batch_size: int = 128,
    **options: Unpack[MethodOptions],
) -> Share:
    """Fail unless the share of images certified and correct at a radius (pixel l2) reaches
    `at_least`; return the share.

    The lower end of the share's 95 % interval must reach it. Network, images and options are those
    of `api.certify`; radii is one radius.

    Raises:
        AssertionError: the upper end does not reach it.
        NotDecidedError: the interval holds `at_least`.
    """
    radius = arguments.one_radius(radii)
    certificates = api.certify(
        source,
        images,
        labels,
        method=method,
        denoiser=denoiser,
        device=device,
        batch_size=batch_size,
        **options,
    )
    hits = sum(row.holds_at(Threat("l2", radius)) for row in certificates)
    _require(
        hits, len(certificates), at_least, f"certified at l2 {radius:g} by {method}", proven=True
    )
    return Share.of(hits, len(certificates))


@speaks_python
def assert_bound(source: api.Network, at_most: float) -> float:
    """Fail unless the proven Lipschitz bound is finite and at most `at_most`; return it."""
    bound_result = api.bound(source)
    value = float(bound_result.upper)
    assert value <= at_most, (
        f"the proven bound is {bound_result.upper} ({bound_result.bound.why or 'finite'}), {at_most:g} was demanded"
    )
    return value


@speaks_python
def assert_robust(
    source: api.Network,
    images: api.Data,
    labels: api.Labels = None,
    radii: Radius = 0.25,
    at_least: float = 0.5,
    *,
    attacks: Words = ("pgd",),
    norm: Norm = "l2",
    device: str = "cpu",
    batch_size: int = 128,
    **settings: Unpack[AttackOptions],
) -> float:
    """Fail unless the share of images that withstand the attacks at a radius reaches `at_least`;
    return it.

    This can only show that a network is not robust. The interval decides, as in `assert_certified`.
    Attacks and settings are those of `api.attack`; radii is one radius.
    """
    radius = arguments.one_radius(radii)
    (result,) = api.attack(
        source,
        images,
        labels,
        radii=radius,
        attacks=attacks,
        norm=norm,
        device=device,
        batch_size=batch_size,
        **settings,
    )
    hits = round(result.robust * result.images)
    what = f"left by {', '.join(result.attacks)}"
    _require(hits, result.images, at_least, f"{what} at {norm} {radius:g}", proven=False)
    return float(result.robust)


def _require(hits: int, images: int, at_least: float, what: str, *, proven: bool) -> None:
    """Raise AssertionError unless hits among images, by interval, are at least `at_least`."""
    look = judge_all(hits, images, Demand(at_least))
    if look.verdict == PASSED:
        return
    message = f"{look.counted(1, proven=proven)} are {what}; {100 * at_least:g} % were demanded"
    if look.verdict == UNDECIDED:
        raise NotDecidedError(f"{message}: not decided, more images decide it")
    raise AssertionError(message)
