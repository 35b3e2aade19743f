"""`finetune --denoiser`: what noisy images pass before the network, in training as in smoothing."""

from pathlib import Path

import torch

from certcli.certify.smoothing.denoiser import read_denoiser
from certcli.certify.smoothing.pixel_denoiser import PixelDenoiser
from certcli.cli.shared.output import Sink
from certcli.system.errors import UsageError


def read(
    path: Path | None, noise: float, size: tuple[int, int, int], device: torch.device, sink: Sink
) -> PixelDenoiser | None:
    """Return the denoiser for this noise and images (c, h, w); UsageError without noise."""

    if path is None:
        return None
    if noise == 0:
        raise UsageError("--denoiser needs noise to remove", "--noise 0.25")
    denoiser = read_denoiser(path, size[0]).at(noise).to(device)
    denoiser.require_size(size)
    sink.note(f"denoiser: {denoiser.line}")
    return denoiser
