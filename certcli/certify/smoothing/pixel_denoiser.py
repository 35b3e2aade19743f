"""What every denoiser is to smoothing: a function of noisy pixels for one sigma, with a digest.

Of diffusion models one step, deterministic. Source: Carlini, Tramer, Dvijotham, Rice, Sun & Kolter
2023, (Certified!!) adversarial robustness for free. From Python: a module from noisy pixels to
pixels, or diffusers' UNet and scheduler.
"""

import copy
import hashlib
import inspect
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from certcli.checkpoint.file import require_weights, tensors_digest
from certcli.evaluation.threat import rounded_down, rounded_up
from certcli.models.diffusion import EPSILON, LATENT, SAMPLE, Schedule, assembled
from certcli.models.program import program_digest
from certcli.nn.unet import UNet
from certcli.system.errors import ArchitectureError, UsageError, one_line


class PixelDenoiser(nn.Module):
    """Noisy pixels (b, c, h, w), images in [0, 1] -> pixels of that shape, each image on its own.

    digest: of all that decides the function. line: what it is, for a person; about: for the
    document. takes_float32: it is handed float32 pixels, whatever the precision of the run.
    channels_last: its maps may lie in that order, in which convolutions are faster.
    """

    digest = ""
    line = ""
    about: Mapping[str, Any] = {}
    takes_float32: ClassVar[bool] = False
    channels_last: ClassVar[bool] = True

    def require_size(self, size: tuple[int, int, int]) -> None:
        """Raise ArchitectureError where it cannot take images of this size, (c, h, w)."""


class DenoiserSource(Protocol):
    """A denoiser as read; `at`: its function for a sigma."""

    def at(self, sigma: float) -> PixelDenoiser: ...


def millions(net: nn.Module) -> str:
    """Return the number of parameters in words: "1.3M parameters"."""
    count = sum(value.numel() for value in net.parameters())
    return f"{count:,} parameters" if count < 10_000 else f"{count / 1e6:.3g}M parameters"


ALWAYS: Mapping[str, Mapping[str, Any]] = {
    "network": {"center_input_sample": False, "mid_block_scale_factor": 1.0},
    "schedule": {"trained_betas": None, "rescale_betas_zero_snr": False},
}
"""Fields that have one value by now, which digests of records cover."""


class OneShot(PixelDenoiser):
    """Noisy pixels x + sigma z, images in [0, 1] -> x0 in [0, 1].

    x_t = a (2 (x + sigma z) - 1) with a = 1 / sqrt(1 + 4 sigma^2) and s = 2 sigma a; t is the step
    of the schedule whose noise-to-signal ratio is nearest to 2 sigma, in the logarithm. x0 follows
    from the prediction and is clipped to [-1, 1]. A head that also predicts the variance has twice
    the channels; the mean comes first.

    Args:
        digest: of the network's tensors. The attribute `digest` also covers shape, schedule and t.
        kind: the format that it was read from.
    """

    takes_float32 = True

    def __init__(
        self,
        net: UNet,
        schedule: Schedule,
        sigma: float,
        digest: str,
        kind: str = "diffusers UNet2DModel",
    ) -> None:
        super().__init__()
        self.net = net
        self.prediction = schedule.prediction_type
        self.step = step_of(schedule, sigma)
        self.time = schedule.time_of(self.step)
        self.signal = 1 / math.sqrt(1 + 4 * sigma**2)
        self.noise = 2 * sigma * self.signal
        parameters = {
            "tensors": digest,
            "network": {**ALWAYS["network"], **asdict(net.shape)},
            "schedule": {**ALWAYS["schedule"], **asdict(schedule)},
            "step": self.step,
        }
        text = json.dumps(parameters, sort_keys=True, separators=(",", ":"))
        self.digest = hashlib.sha256(text.encode()).hexdigest()

        self.line = (
            f"{kind}, {millions(net)}, {schedule.name} schedule, {self.prediction}, "
            f"t = {self.step} at sigma {sigma:g}"
        )
        self.about = {
            "denoiser_step": self.step,
            "denoiser_prediction": self.prediction,
            "denoiser_parameters": sum(value.numel() for value in net.parameters()),
        }

    def require_size(self, size: tuple[int, int, int]) -> None:
        """Raise ArchitectureError where levels do not divide a side: nothing is resized.

        A resize would mix the noise of neighbouring pixels, and the UNet expects white noise.
        """
        _, height, width = size
        factor = self.net.shape.factor
        if height % factor or width % factor:
            raise ArchitectureError(
                f"the denoiser halves its images {factor.bit_length() - 1} times: "
                f"sides must be multiples of {factor}, the network's are {height} x {width}",
                f"--image-size N with a multiple of {factor}: the network resizes behind the denoiser",
            )

    def forward(self, pixels: Tensor) -> Tensor:
        kind = self.net.conv_in.weight.dtype
        noisy = self.signal * (2 * pixels.float() - 1)
        steps = torch.full((len(pixels),), self.time, device=pixels.device)
        predicted = self.net(noisy.to(kind), steps)[:, : pixels.shape[1]].float()
        return (self._clean(noisy, predicted).clamp(-1, 1) + 1) / 2

    def _clean(self, noisy: Tensor, predicted: Tensor) -> Tensor:
        if self.prediction == EPSILON:
            return (noisy - self.noise * predicted) / self.signal
        if self.prediction == SAMPLE:
            return predicted
        return self.signal * noisy - self.noise * predicted


@dataclass(frozen=True)
class Diffusion:
    """A UNet and its schedule, another function for each sigma; digest: of the tensors."""

    net: UNet
    schedule: Schedule
    digest: str
    kind: str = "diffusers UNet2DModel"

    def at(self, sigma: float) -> OneShot:
        return OneShot(self.net, self.schedule, sigma, self.digest, self.kind).eval()


def step_of(schedule: Schedule, sigma: float) -> int:
    """Return the step of noise nearest to 2 sigma on [-1, 1]; UsageError beyond the schedule."""
    signal = schedule.alpha_bars
    ratios = ((1 - signal) / signal).sqrt()  # the noise's deviation at each step, images in [-1, 1]
    ratios = ratios[ratios.isfinite()]  # a last step without signal is beyond every sigma
    low = float(ratios.min()) / 2
    high = float(ratios.max()) / 2
    if not low <= sigma <= high:
        raise UsageError(
            f"--sigma {sigma:g} is outside the denoiser's schedule",
            f"its steps are for sigma {rounded_up(low, 4)} to {rounded_down(high, 4)}",
        )
    return int((ratios.log() - math.log(2 * sigma)).abs().argmin())


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
    return _module_source(denoiser)


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


def _module_source(module: nn.Module) -> ModuleSource:
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
