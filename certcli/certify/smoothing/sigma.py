"""--method smoothing made ready: the sigma that is named, or one that suits a few images."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import nn

from certcli.certify.certificate import certified_accuracy
from certcli.certify.methods import certify
from certcli.certify.smoothing import noise
from certcli.certify.smoothing.denoiser import Denoiser, read_denoiser
from certcli.certify.smoothing.functions import classifier
from certcli.certify.smoothing.method import Smoothing, SmoothingCertifier
from certcli.checkpoint.file import Checkpoint
from certcli.images.labelled import Images
from certcli.system.errors import DataError, UsageError

SIGMAS = (0.06, 0.12, 0.25, 0.5, 1.0)
TUNED = 12
"""Images at most on which a sigma is chosen."""
TUNE_N0, TUNE_SAMPLES, TUNE_ALPHA = 16, 64, 0.5
"""A median instead of a confidence: 64 samples at alpha 0.5 reach as far as 1,000 at 0.001 nearly do."""


def choose_sigma(
    classify: nn.Module,
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
        shares[sigma] = (sum(held) / len(held), min(found.average_radius or 0.0, reach))
    best = max(shares, key=lambda sigma: shares[sigma])
    return best, {sigma: share for sigma, (share, _) in shares.items()}


def _denoiser(checkpoint: Checkpoint, options: Mapping[str, Any]) -> Denoiser | None:
    """The denoiser that is named (denoiser_file); where records state one (denoiser, its digest), it must be that one."""
    file, stated = options.get("denoiser_file"), options.get("denoiser")
    if file is None and stated is None:
        return None
    if file is None:
        told = f"these certificates are of the network behind a denoiser, digest {str(stated)[:16]}"
        raise DataError(told, "name its file: --denoiser FILE")
    net = read_denoiser(file, checkpoint.record.input.size[0])
    if stated is not None and stated != net.digest:
        raise DataError(
            f"{file} is another denoiser (digest {net.digest[:16]}) than that of the records: {str(stated)[:16]}"
        )
    return net


def prepare(checkpoint: Checkpoint, device: torch.device, options: Mapping[str, Any] = {}) -> SmoothingCertifier:
    """The checkpoint under noise. options: the fields of `Smoothing`, batch_size, and for a sigma that is to be chosen
    ("auto") the images to choose it on and the radii to choose it for; denoiser_file, and denoiser as records state it.
    """
    names = {item.name for item in fields(Smoothing)}
    given = {name: value for name, value in options.items() if name in names and value is not None}
    automatic = given.get("sigma") == "auto"
    settings = Smoothing(**{**given, "sigma": 1.0, "enough": None} if automatic else given)
    denoiser = _denoiser(checkpoint, options)
    classify = classifier(checkpoint, device, settings.precision, denoiser)
    classes, batch_size = checkpoint.record.classes, options.get("batch_size", 128)
    about: dict[str, Any] = {}
    stated = {} if denoiser is None else {"denoiser": denoiser.digest}
    if automatic and "tuning_images" not in options:
        raise UsageError("there are no images to choose a sigma on", "name it: --sigma 0.25")
    if automatic:
        images = options["tuning_images"]()
        sigma, shares = choose_sigma(classify, classes, settings, device, images, options["radii"], batch_size)
        settings = Smoothing(**{**given, "sigma": sigma})
        tried = {f"{tried:g}": share for tried, share in shares.items()}
        about = {"sigma_chosen": {"split": images.split, "images": len(images), "shares": tried}}
    return SmoothingCertifier(classify, classes, settings, device, batch_size, about=about, stated=stated)
