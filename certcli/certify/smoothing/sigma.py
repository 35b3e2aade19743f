"""--method smoothing made ready: the sigma that is named, or one that suits a few images."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from certcli.certify.certificate import certified_accuracy
from certcli.certify.methods import certify
from certcli.certify.smoothing import noise
from certcli.certify.smoothing.denoiser import read_denoiser
from certcli.certify.smoothing.functions import classifier
from certcli.certify.smoothing.in_memory import from_memory
from certcli.certify.smoothing.method import SmoothingCertifier
from certcli.certify.smoothing.options import AUTO, Smoothing
from certcli.certify.smoothing.pixel_denoiser import DenoiserSource, PixelDenoiser
from certcli.checkpoint.file import Checkpoint
from certcli.evaluation.threat import Threat
from certcli.images.labelled import Images
from certcli.system.errors import DataError

SIGMAS = (0.06, 0.12, 0.25, 0.5, 1.0)
TUNED = 12
"""Images at most on which a sigma is chosen."""
TUNE_N0 = 16
TUNE_SAMPLES = 64
TUNE_ALPHA = 0.5
"""A median instead of a confidence: 64 samples at alpha 0.5 reach as far as 1,000 at 0.001 nearly do."""


def choose_sigma(
    classify_at: Callable[[float], nn.Module],
    classes: int,
    settings: Smoothing,
    device: torch.device,
    images: Images,
    radii: Sequence[float],
) -> tuple[float, dict[float, float]]:
    """Return the sigma of `SIGMAS` of largest mean certified accuracy, estimated; and all shares.

    `classify_at(sigma)` is the function that is smoothed with sigma: a diffusion model before it is
    another one for each. A radius that the samples of `settings` could not reach counts nothing.
    The noise is other noise than that which certifies, so the certificates do not know of the
    choice. Equal shares: the larger average radius.
    """
    shares: dict[float, tuple[float, float]] = {}
    for sigma in SIGMAS:
        exact = replace(settings, sigma=sigma, enough=None, decide=False)
        tried = replace(exact, n0=TUNE_N0, samples=TUNE_SAMPLES, alpha=TUNE_ALPHA)
        certifier = SmoothingCertifier(classify_at(sigma), classes, tried, device, noise.TUNE)
        reach = exact.reach
        rows = [row for batch in certify(certifier, images, settings.batch_size) for row in batch]
        accuracy = certified_accuracy(rows, [Threat("l2", radius) for radius in radii])
        certified = [
            share if radius < reach else 0.0
            for radius, share in zip(radii, accuracy.certified.values(), strict=True)
        ]
        shares[sigma] = (
            sum(certified) / len(certified),
            min(accuracy.average_radius or 0.0, reach),
        )
    best = max(shares, key=lambda sigma: shares[sigma])
    return best, {sigma: share for sigma, (share, _) in shares.items()}


def _denoiser(checkpoint: Checkpoint, options: Smoothing) -> DenoiserSource | None:
    """Read the denoiser that is named; DataError where records are of one and none is named."""
    channels = checkpoint.record.input.size[0]
    if options.denoiser_module is not None:
        return from_memory(options.denoiser_module, channels)
    file = options.denoiser_file
    if file is None:
        if options.denoiser is None:
            return None
        message = f"these certificates are of the network behind a denoiser, digest {options.denoiser[:16]}"
        raise DataError(message, "name its file: --denoiser FILE")
    return read_denoiser(file, channels)


def _require_stated(denoiser: PixelDenoiser, options: Smoothing) -> None:
    """Where records state a digest, raise DataError unless it is of this denoiser at this sigma."""
    if options.denoiser not in (None, denoiser.digest):
        raise DataError(
            f"{options.denoiser_file} is another denoiser (digest {denoiser.digest[:16]}) "
            f"than that of the records: {str(options.denoiser)[:16]}"
        )


def prepare(checkpoint: Checkpoint, device: torch.device, options: Smoothing) -> SmoothingCertifier:
    """Return the certifier under noise; `options.tuning` chooses a sigma that is "auto"."""
    denoiser = _denoiser(checkpoint, options)
    about: dict[str, Any] = {}
    if options.tuning is None:
        options.require_reach()  # before the network is built

    def classify_at(sigma: float) -> nn.Module:
        before = None if denoiser is None else denoiser.at(sigma)
        return classifier(checkpoint, device, options.precision, before)

    if options.sigma == AUTO and options.tuning is not None:
        images = options.tuning.images()
        differ = denoiser is not None and denoiser.per_sigma
        alike = None if differ else classify_at(SIGMAS[0])
        sigma, shares = choose_sigma(
            (lambda sigma: alike) if alike is not None else classify_at,
            checkpoint.record.classes,
            options,
            device,
            images,
            options.tuning.radii,
        )
        options = replace(options, sigma=sigma)
        tried = {f"{tried:g}": share for tried, share in shares.items()}
        about = {"sigma_chosen": {"split": images.split, "images": len(images), "shares": tried}}
    if denoiser is not None:
        exact = denoiser.at(options.deviation)
        _require_stated(exact, options)
        options = replace(options, denoiser=exact.digest)
        about |= exact.about
        about["denoiser_line"] = exact.line
    classify = classify_at(options.deviation)
    return SmoothingCertifier(classify, checkpoint.record.classes, options, device, about=about)
