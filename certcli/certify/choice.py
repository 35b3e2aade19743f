"""Which certificate is worth having for a network, and which sigma."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from certcli.certify import noise
from certcli.certify.certificate import certified_accuracy
from certcli.certify.methods import certify, prepare
from certcli.certify.smoothing import Smoothing, SmoothingCertifier
from certcli.checkpoint import Checkpoint
from certcli.data import Images
from certcli.errors import NoBoundError

USEFUL = 0.1
"""Share of the correctly classified images that a bound must certify to be worth more than a statement of chance."""
TRIED = 256
"""Images at most on which the bound is tried."""
SIGMAS = (0.06, 0.12, 0.25, 0.5, 1.0)
TUNED = 12
"""Images at most on which a sigma is chosen."""
TUNE_N0, TUNE_SAMPLES, TUNE_ALPHA = 16, 64, 0.5
"""A median instead of a confidence: 64 samples at alpha 0.5 reach as far as 1,000 at 0.001 nearly do."""


@dataclass(frozen=True)
class Choice:
    """The method that is worth having, and why in a sentence."""

    method: str
    reason: str


def choose_method(
    checkpoint: Checkpoint, device: torch.device, images: Images, radius: float, batch_size: int
) -> Choice:
    """The proven bound where it is finite and certifies a tenth of what is correct at `radius`, else smoothing."""
    try:
        certifier = prepare("lipschitz", checkpoint, device)
    except NoBoundError as failure:
        return Choice("smoothing", f"this network has no finite bound ({failure.message}); noise needs none")
    sample = images.limit(TRIED)
    found = certified_accuracy([row for rows in certify(certifier, sample, batch_size) for row in rows], [radius])
    (share,) = found.certified.values()
    told = (
        f"the {certifier.title.partition(',')[0]} certifies {100 * share:.1f} % of {len(sample)} images at {radius:g}"
    )
    if share >= USEFUL * found.clean and share > 0:
        return Choice("lipschitz", f"{told}, with proof")
    return Choice("smoothing", f"{told}; noise certifies more, with probability")


def choose_sigma(
    classify: Callable[[Tensor], Tensor],
    classes: int,
    settings: Smoothing,
    device: torch.device,
    images: Images,
    radii: Sequence[float],
    batch_size: int,
) -> tuple[float, dict[float, float]]:
    """The sigma of `SIGMAS` with the largest mean certified accuracy over the radii, estimated; and all their shares.

    A radius that the samples of `settings` could not reach counts nothing. The noise is other noise than that which
    certifies, so the certificates do not know of the choice. Equal shares: the larger average radius.
    """
    shares: dict[float, tuple[float, float]] = {}
    for sigma in SIGMAS:
        tried = replace(settings, sigma=sigma, n0=TUNE_N0, samples=TUNE_SAMPLES, alpha=TUNE_ALPHA, enough=None)
        certifier = SmoothingCertifier(classify, classes, tried, device, batch_size, noise.TUNE)
        found = certified_accuracy([row for rows in certify(certifier, images, batch_size) for row in rows], radii)
        reach = replace(settings, sigma=sigma, enough=None).reach
        held = [share if radius < reach else 0.0 for radius, share in zip(radii, found.certified.values(), strict=True)]
        shares[sigma] = (sum(held) / len(held), min(found.average_radius, reach))
    best = max(shares, key=lambda sigma: shares[sigma])
    return best, {sigma: share for sigma, (share, _) in shares.items()}
