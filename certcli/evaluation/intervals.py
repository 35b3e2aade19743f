"""Exact binomial statements: what a count of successes says about a probability."""

from collections.abc import Callable

from certcli.evaluation.radii import percent_ends, proven_percent
from certcli.system.errors import DataError

Interval = tuple[float, float]

FEW = 30
"""Images below which a share never stands without its count and its interval: words about shares are made here."""
MOST_DRAWS = 10_000_000
"""Draws an image: nobody makes more, and a file that asks for more is not to be trusted."""

_OUTWARD = 1e-12
"""Relative. scipy's incomplete beta function and its inverse agree with exact sums to a few 1e-15: a wide margin."""


def lower_confidence(successes: int, trials: int, alpha: float) -> float:
    """Largest p with P[Binomial(trials, p) >= successes] <= alpha, rounded down: a lower bound.

    One-sided. It is the alpha quantile of Beta(successes, trials - successes + 1). Source: Clopper
    & Pearson 1934.
    """
    _require_counts(successes, trials, alpha)
    if successes == 0:
        return 0.0
    if successes == trials:
        return alpha ** (1 / trials) * (1 - _OUTWARD)
    from scipy.special import betaincinv

    return float(betaincinv(successes, trials - successes + 1, alpha)) * (1 - _OUTWARD)


def upper_confidence(successes: int, trials: int, alpha: float) -> float:
    """The smallest p with P[Binomial(trials, p) <= successes] <= alpha, rounded up."""
    _require_counts(successes, trials, alpha)
    if successes == trials:
        return 1.0
    from scipy.special import betainccinv

    return min(1.0, float(betainccinv(successes + 1, trials - successes, alpha)) * (1 + _OUTWARD))


def share_interval(successes: int, trials: int, alpha: float = 0.05) -> Interval:
    """Clopper-Pearson interval of a share with coverage 1 - alpha at least, alpha / 2 on each side.

    About the sampling of images, not about attacks that were not tried. Source: Clopper & Pearson
    1934, Biometrika 26.
    """
    return lower_confidence(successes, trials, alpha / 2), upper_confidence(
        successes, trials, alpha / 2
    )


def interval_of_few(hits: int, images: int, chance: float = 0.05) -> str:
    """Return " (95 % interval 15 to 95 %)" for fewer than 30 images, nothing for more."""
    return f" ({interval_text(hits, images, chance)} %)" if 0 < images < FEW else ""


def number_of(count: int, noun: str = "image") -> str:
    """Return "1 image", "1,200 images"."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def part_of(hits: int, images: int, noun: str = "images") -> str:
    """Return "21 of 45 images"; of few images with the interval of the share."""
    return f"{hits} of {images} {noun}{interval_of_few(hits, images)}"


def counted(
    hits: int, images: int, digits: int = 0, *, proven: bool = True, chance: float = 0.05
) -> str:
    """Return "26 of 50 images (52 %, 95 % interval 37 to 66)"; of few images no share."""
    shown = f" ({_share_in_percent(hits / images, digits, proven)}, {interval_text(hits, images, chance)})"
    return f"{hits} of {images} images{interval_of_few(hits, images, chance) or shown}"


def share_text(
    share: float, images: int | None, in_percent: Callable[[float], str] | None = None
) -> str:
    """Return a share in percent; of few images their count and the interval in its place. images:
    None if unknown; in_percent: rounds a share that has a direction.
    """
    if images is None or images >= FEW:
        return f"{100 * share:.1f} %" if in_percent is None else in_percent(share)
    return f"{round(share * images)} of {images}{interval_of_few(round(share * images), images)}"


def _share_in_percent(share: float, digits: int, proven: bool) -> str:
    return proven_percent(share, digits) if proven else f"{100 * share:.{digits}f} %"


def interval_text(hits: int, images: int, chance: float = 0.05) -> str:
    """Return "95 % interval 37 to 66", in percent. chance: that it misses the true share."""
    ends = share_interval(hits, images, chance)
    return f"{100 * (1 - chance):.3g} % interval {percent_ends(ends, 0)}"


def chance_level(right: int, images: int, classes: int) -> bool:
    """Return whether an accuracy is about that of guessing.

    Few images have to exclude one halfway between guessing and always right.
    """
    low, high = share_interval(right, images)
    return classes >= 2 and low <= 1 / classes and high < 0.5 + 0.5 / classes


def _require_counts(successes: int, trials: int, alpha: float) -> None:
    if not 0 <= successes <= trials or trials < 1:
        raise DataError(f"no share: {successes} of {trials}")
    if not 0 < alpha < 1:
        raise ValueError(f"alpha {alpha} is not between 0 and 1")
