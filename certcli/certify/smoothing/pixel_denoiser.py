"""What every denoiser is to smoothing: a function of noisy pixels for one sigma, with a digest.

Of diffusion models one step, deterministic. Source: Carlini, Tramer, Dvijotham, Rice, Sun & Kolter
2023, (Certified!!) adversarial robustness for free.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from certcli.evaluation.radii import rounded_down, rounded_up
from certcli.models.diffusion import EPSILON, SAMPLE, Schedule
from certcli.nn.unet import UNet, noise_to_signal
from certcli.system.errors import ArchitectureError, UsageError


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
    """A denoiser as read; `at`: its function for a sigma; per_sigma: it differs by sigma."""

    @property
    def per_sigma(self) -> bool: ...

    def at(self, sigma: float) -> PixelDenoiser: ...


def millions(net: nn.Module) -> str:
    """Return the number of parameters in words: "1.3M parameters"."""
    count = sum(value.numel() for value in net.parameters())
    return f"{count:,} parameters" if count < 10_000 else f"{count / 1e6:.3g}M parameters"


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
            "network": asdict(net.shape),
            "schedule": asdict(schedule),
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

    per_sigma: ClassVar[bool] = True
    net: UNet
    schedule: Schedule
    digest: str
    kind: str = "diffusers UNet2DModel"

    def at(self, sigma: float) -> OneShot:
        return OneShot(self.net, self.schedule, sigma, self.digest, self.kind).eval()


def step_of(schedule: Schedule, sigma: float) -> int:
    """Return the step of noise nearest to 2 sigma on [-1, 1]; UsageError beyond the schedule."""
    ratios = noise_to_signal(schedule.alpha_bars)
    # the last step without signal is beyond every sigma
    ratios = ratios[ratios.isfinite() & (ratios > 0)]
    low = float(ratios.min()) / 2
    high = float(ratios.max()) / 2
    if not low <= sigma <= high:
        raise UsageError(
            f"--sigma {sigma:g} is outside the denoiser's schedule",
            f"its steps are for sigma {rounded_up(low, 4)} to {rounded_down(high, 4)}",
        )
    return int((ratios.log() - math.log(2 * sigma)).abs().argmin())
