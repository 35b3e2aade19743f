"""--method smoothing made ready: the network at its sigma, behind a denoiser if one is named."""

from dataclasses import replace
from typing import Any

import torch

from certcli.certify.smoothing.denoiser import read_denoiser
from certcli.certify.smoothing.functions import classifier
from certcli.certify.smoothing.in_memory import from_memory
from certcli.certify.smoothing.method import SmoothingCertifier
from certcli.certify.smoothing.options import Smoothing
from certcli.certify.smoothing.pixel_denoiser import DenoiserSource, PixelDenoiser
from certcli.checkpoint.file import Checkpoint
from certcli.system.errors import DataError


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
    """Return the certifier under noise, behind the denoiser that is named."""
    source = _denoiser(checkpoint, options)
    options.require_reach()  # before the network is built
    about: dict[str, Any] = {}
    denoiser = None
    if source is not None:
        denoiser = source.at(options.sigma)
        _require_stated(denoiser, options)
        options = replace(options, denoiser=denoiser.digest)
        about = {**denoiser.about, "denoiser_line": denoiser.line}
    classify = classifier(checkpoint, device, options.precision, denoiser)
    return SmoothingCertifier(classify, checkpoint.record.classes, options, device, about=about)
