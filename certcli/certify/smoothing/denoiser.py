"""A denoiser before a classifier that never saw noise: DnCNN, or diffusion, from file or folder.

Source: Zhang, Zuo, Chen, Meng & Zhang 2017 (the network); Salman, Sun, Yang, Kapoor & Kolter 2020,
Denoised smoothing: a provable defense for pretrained classifiers (its use, and the names of the
tensors as they published them).
"""

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from certcli.certify.options import Smoothing
from certcli.certify.smoothing.pixel_denoiser import (
    DenoiserSource,
    Diffusion,
    PixelDenoiser,
    from_memory,
    millions,
)
from certcli.checkpoint.file import Checkpoint, tensors_digest
from certcli.models.diffusion import read_diffusers, unwrapped_tensors
from certcli.models.guided import MARK, read_guided
from certcli.models.hub import fetched_diffusers
from certcli.system.errors import ArchitectureError, CheckpointError, DataError
from certcli.system.reading import is_absent

EPS = 1e-4
"""Of the batch normalisations, as published: it is no tensor, so a file cannot say it."""
DEEPEST = 64
HUB = "hf-hub:"
_KIND = "DnCNN: convolutions 3 x 3 and batch normalisations named dncnn.N.weight, ... or dncnn.N.running_mean, ..."


class Denoiser(PixelDenoiser):
    """Noisy pixels (b, c, h, w) -> x - dncnn(x): a chain of convolutions, norms and ReLUs.

    digest: of its tensors, which with this class decide the function.
    """

    def __init__(self, channels: int, width: int, depth: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
        for _ in range(depth - 2):
            layers += [
                nn.Conv2d(width, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width, eps=EPS),
                nn.ReLU(),
            ]
        layers.append(nn.Conv2d(width, channels, 3, padding=1, bias=False))
        self.dncnn = nn.Sequential(*layers)

    def forward(self, pixels: Tensor) -> Tensor:
        denoised: Tensor = pixels - self.dncnn(pixels)
        return denoised

    def at(self, sigma: float) -> "Denoiser":
        """Return the denoiser itself: it is one function for every sigma."""
        return self


def read_denoiser(path: Path, channels: int) -> DenoiserSource:
    """Return the denoiser in a file or folder for this number of channels; `hf-hub:` downloads it.

    Raises:
        ArchitectureError: it is neither a DnCNN nor an unconditional diffusion model.
    """
    if str(path).startswith(HUB):
        path = fetched_diffusers(str(path).removeprefix(HUB))
    if is_absent(path):
        raise CheckpointError(
            f"no denoiser {path}",
            "a DnCNN, a folder of diffusers, a guided-diffusion file, or hf-hub:OWNER/NAME",
        )
    if path.is_dir():
        return Diffusion(*read_diffusers(path, channels))
    tensors = unwrapped_tensors(path)
    if MARK in tensors:
        return Diffusion(*read_guided(tensors, path, channels), "guided-diffusion UNet")
    first = tensors.get("dncnn.0.weight")
    numbers = [
        int(match[1])
        for name in tensors
        if (match := re.fullmatch(r"dncnn\.(\d{1,3})\.weight", name))
    ]
    depth = 2 + (max(numbers, default=0) - 2) // 3
    if first is None or first.dim() != 4 or not 2 <= depth <= DEEPEST:
        raise ArchitectureError(
            f"{path} is no denoiser that certvit knows",
            f"it knows {_KIND}; a folder of diffusers; a UNet of guided-diffusion ({MARK}, ...)",
        )
    if first.shape[1] != channels:
        raise ArchitectureError(
            f"the denoiser {path} is for {first.shape[1]} channels, the network for {channels}"
        )
    with torch.device("meta"):
        net = Denoiser(channels, len(first), depth)
    net.line = f"DnCNN of {depth} layers, {millions(net)}, one for every sigma"
    net.digest = tensors_digest(_load_exactly(net, tensors, path))
    for parameter in net.parameters():
        parameter.requires_grad_(False)
    return net.eval()


def _load_exactly(net: Denoiser, tensors: Mapping[str, Tensor], path: Path) -> dict[str, Tensor]:
    """Load exactly these tensors into the network; return those that decide its function."""
    expected = net.state_dict()
    optional = {name for name in expected if name.endswith("num_batches_tracked")}
    wrong = sorted((expected.keys() - optional) ^ (tensors.keys() - optional))
    wrong += [
        name
        for name in expected.keys() & tensors.keys()
        if expected[name].shape != tensors[name].shape
    ]
    if wrong:
        raise ArchitectureError(
            f"{path} is no DnCNN of {len(net.dncnn)} layers: '{wrong[0]}' is missing, unknown or of another shape",
            f"it knows {_KIND}",
        )
    counted = {name: torch.zeros((), dtype=torch.long) for name in optional}
    plain = {name: tensors[name].float() for name in expected if name not in optional}
    net.load_state_dict({**plain, **counted}, strict=True, assign=True)
    return plain


def named_denoiser(checkpoint: Checkpoint, options: Smoothing) -> DenoiserSource | None:
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
