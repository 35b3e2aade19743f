"""A denoiser from Python: a module from noisy pixels to pixels, or diffusers' UNet and scheduler."""

import copy
import hashlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from certcli.certify.smoothing.pixel_denoiser import (
    DenoiserSource,
    Diffusion,
    PixelDenoiser,
    millions,
)
from certcli.checkpoint.file import require_weights, tensors_digest
from certcli.models.diffusion import LATENT, assembled
from certcli.models.program import program_digest
from certcli.system.errors import ArchitectureError, UsageError, one_line

SIGMA = "sigma"
"""A module whose forward has a parameter of this name gets the sigma."""


class ModuleAtSigma(PixelDenoiser):
    """A module, told the sigma where it asks for it; it must keep the shape of its input."""

    channels_last = False

    def __init__(self, module: nn.Module, sigma: float | None, digest: str) -> None:
        super().__init__()
        self.module = module
        self.arguments = {} if sigma is None else {SIGMA: sigma}
        self.digest = hashlib.sha256(f"{digest} {self.arguments}".encode()).hexdigest()
        place = "one for every sigma" if sigma is None else f"at sigma {sigma:g}"
        self.line = f"{type(module).__name__} in memory, {millions(module)}, {place}"

    @torch.no_grad()
    def require_size(self, size: tuple[int, int, int]) -> None:
        """Raise ArchitectureError unless an image maps to one of this size, reproducibly."""
        pixels = torch.rand(1, *size, generator=torch.Generator().manual_seed(0))
        name = type(self.module).__name__
        try:
            answers = [self(pixels) for _ in range(2)]
        except ArchitectureError:
            raise
        except Exception as failure:  # of the user's own code
            raise ArchitectureError(
                f"the denoiser {name} does not take images (1, {', '.join(map(str, size))}): "
                f"{type(failure).__name__}: {one_line(failure)[:120]}",
                "it must map noisy pixels (b, c, h, w), images in [0, 1], to pixels of that shape",
            ) from failure
        if not bool(torch.isfinite(answers[0]).all()):
            raise ArchitectureError(f"the denoiser {name} gives NaN or infinite pixels")
        if not torch.equal(*answers):
            raise ArchitectureError(
                f"the denoiser {name} gives another output each time: it must be a function of "
                "the pixels",
                "no random numbers and no memory in its forward",
            )

    def forward(self, pixels: Tensor) -> Tensor:
        denoised = self.module(pixels, **self.arguments)
        if not isinstance(denoised, Tensor) or denoised.shape != pixels.shape:
            what = (
                tuple(denoised.shape) if isinstance(denoised, Tensor) else type(denoised).__name__
            )
            raise ArchitectureError(
                f"the denoiser {type(self.module).__name__} returns {what} "
                f"for pixels {tuple(pixels.shape)}"
            )
        return denoised


@dataclass(frozen=True)
class ModuleSource:
    """A copy of a module, and the digest of its tensors, structure, plain attributes and code."""

    module: nn.Module
    digest: str
    per_sigma: bool

    def at(self, sigma: float) -> ModuleAtSigma:
        return ModuleAtSigma(self.module, sigma if self.per_sigma else None, self.digest).eval()


def from_memory(denoiser: Any, channels: int) -> DenoiserSource:
    """Return the denoiser that an object of Python is, copied; later changes of it do not count.

    Args:
        denoiser: a module, diffusers' (unet, scheduler), or a pipeline that holds both.

    Raises:
        UsageError: it is none of these, or a UNet without its schedule.
        ArchitectureError: its function is not known from its tensors and its code.
    """
    parts = _unet_and_scheduler(denoiser)
    if parts is not None:
        return Diffusion(*_diffusers(*parts, channels))
    if not isinstance(denoiser, nn.Module):
        raise UsageError(
            f"denoiser={type(denoiser).__name__}: no denoiser",
            "a module, a path, or (unet, scheduler)",
        )
    if type(denoiser).__name__.startswith("UNet2D"):
        raise UsageError(
            f"a {type(denoiser).__name__} does not know its schedule", "denoiser=(unet, scheduler)"
        )
    return _module(denoiser)


def _unet_and_scheduler(denoiser: Any) -> tuple[Any, Any] | None:
    if isinstance(denoiser, (tuple, list)) and len(denoiser) == 2:
        return denoiser[0], denoiser[1]
    if not (hasattr(denoiser, "unet") and hasattr(denoiser, "scheduler")):
        return None
    latent = [name for name in LATENT if getattr(denoiser, name, None) is not None]
    if latent:
        raise ArchitectureError(
            f"a {type(denoiser).__name__} has a {latent[0]}: it is no model of pixels alone",
            "an unconditional model of pixels, such as a DDPMPipeline",
        )
    return denoiser.unet, denoiser.scheduler


def _diffusers(unet: Any, scheduler: Any, channels: int) -> tuple[Any, Any, str]:
    """Read diffusers' objects by what they say of themselves; diffusers is not imported."""
    described = []
    for part in (unet, scheduler):
        config = getattr(part, "config", None)
        if not isinstance(config, Mapping):
            raise UsageError(
                f"denoiser: a {type(part).__name__} has no config of diffusers",
                "denoiser=(unet, scheduler), a UNet2DModel and a DDPMScheduler",
            )
        described.append({"_class_name": type(part).__name__, **config})

    def stored() -> dict[str, Tensor]:
        state = {name: value.detach().cpu().clone() for name, value in unet.state_dict().items()}
        require_weights(state, "the denoiser")
        return state

    return assembled(described[0], described[1], stored, channels, f"the {type(unet).__name__}")


def _module(module: nn.Module) -> ModuleSource:
    name = type(module).__name__
    for part in module.modules():
        hooks = (part._forward_hooks, part._forward_pre_hooks)
        if any(hooks) or "forward" in vars(part):
            raise ArchitectureError(
                f"the denoiser {name} has hooks or a replaced forward, which no digest can cover",
                "a module of your own that calls it",
            )
    try:
        net = copy.deepcopy(module).cpu().eval().requires_grad_(False)
    except Exception as failure:  # copying runs code of the module
        raise ArchitectureError(
            f"the denoiser {name} cannot be copied: {one_line(failure)[:120]}"
        ) from failure
    takes_sigma = SIGMA in inspect.signature(net.forward).parameters
    tensors: dict[str, Tensor] = {}
    tensors |= dict(net.named_parameters(remove_duplicate=False))
    tensors |= dict(net.named_buffers(remove_duplicate=False))
    parts = dict(net.named_modules())
    places = [
        (path, key, value) for path, part in parts.items() for key, value in vars(part).items()
    ]
    tensors |= {f"{path}.{key}": value for path, key, value in places if isinstance(value, Tensor)}
    require_weights(tensors, f"the denoiser {name}")
    digest = hashlib.sha256(f"{tensors_digest(tensors)} {program_digest(net)}".encode()).hexdigest()
    return ModuleSource(net, digest, takes_sigma)
