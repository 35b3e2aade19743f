"""What smoothing speaks of: the network run on noisy pixels, alone or behind a denoiser."""

import torch
from torch import Tensor, nn

from certcli.certify.smoothing import noise
from certcli.certify.smoothing.pixel_denoiser import PixelDenoiser
from certcli.checkpoint.file import Checkpoint
from certcli.engine.replay import close, logits_agree, movement_of_margins, noise_like
from certcli.engine.watched_run import rows_are_apart
from certcli.models import build
from certcli.models.onnx.runtime import RunByRuntime, has_steps
from certcli.models.pixels import PixelModel
from certcli.system.errors import UsageError
from certcli.system.memory import out_of_memory

DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}
BESIDE = (
    "no certificate by smoothing: the network's logits of an image depend on the images beside it"
)
CLIMBED = 16
"""Draws whose mean an attack on the smoothed classifier climbs on."""


class Classifier(nn.Module):
    """Noisy float32 pixels -> logits, normalised in float32; the networks run in `precision`."""

    def __init__(
        self, model: PixelModel, precision: str, denoiser: PixelDenoiser | None = None
    ) -> None:
        super().__init__()
        self.kind = DTYPES[precision]
        self.precision = precision
        self.normalize, self.net = model.normalize, build.converted(model, self.kind).net
        self.denoiser = None if denoiser is None else denoiser.to(self.kind)
        if self.denoiser is not None and self.denoiser.channels_last:
            # two thirds of the time on a CPU
            self.denoiser.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._apart: dict[int, bool] = {}
        self.eval()

    def forward(self, noisy: Tensor) -> Tensor:
        return self.run(self.prepare(noisy))

    def prepare(self, noisy: Tensor) -> Tensor:
        """What is done to each pixel on its own: up to the denoiser, or the network."""
        if self.denoiser is not None and self.denoiser.takes_float32:
            return noisy
        return (noisy if self.denoiser is not None else self._normalised(noisy)).to(self.kind)

    def _normalised(self, pixels: Tensor) -> Tensor:
        normalised: Tensor = self.normalize(pixels)
        return normalised

    def run(self, prepared: Tensor) -> Tensor:
        """Prepared pixels -> logits, one at a time unless rows are proven apart at this size."""
        size = len(prepared)
        if size < 2 or torch.is_grad_enabled():  # an attack's gradients are no votes
            return self.logits(prepared)
        if size not in self._apart:
            self._apart[size] = rows_are_apart(self.logits, prepared)
            self._require_alone(prepared, self.logits(prepared))
        if self._apart[size]:
            return self.logits(prepared)
        return torch.cat([self.logits(row[None]) for row in prepared])

    @property
    def networks(self) -> list[nn.Module]:
        return [self.net] if self.denoiser is None else [self.net, self.denoiser]

    def _require_alone(self, prepared: Tensor, logits: Tensor) -> None:
        """UsageError where a row's logits depend on its batch, or on torch's inference mode.

        Draws of a batch would not be independent, and the count of votes would say nothing.
        """
        if logits.shape[0] != len(prepared) or not bool(torch.isfinite(logits).all()):
            return  # the caller says so
        rows = sorted({0, len(prepared) // 2, len(prepared) - 1})
        with torch.inference_mode(not torch.is_inference_mode_enabled()), torch.no_grad():
            alone = torch.cat([self.logits(prepared[row : row + 1].clone()) for row in rows])
        tolerance = torch.finfo(self.kind).eps ** 0.5 * movement_of_margins(logits)
        if not close(logits[rows], alone, tolerance):
            raise UsageError(BESIDE)

    def logits(self, prepared: Tensor) -> Tensor:
        """Return the logits, without a look at what a batch has to do with them."""
        try:
            if self.denoiser is not None:
                prepared = self._normalised(self.denoiser(prepared).float()).to(self.kind)
            logits: Tensor = self.net(prepared)
        except RuntimeError as failure:
            if self.kind == torch.float32 or out_of_memory(failure):
                raise
            raise UsageError(
                f"this network does not run in {self.precision} ({failure})", "--precision float32"
            ) from failure
        return logits.float()


def smoothed_classifier(
    checkpoint: Checkpoint,
    device: torch.device,
    precision: str,
    denoiser: PixelDenoiser | None = None,
) -> Classifier:
    """Return the checkpoint's network as smoothing runs it: a quantised file's by ONNX Runtime."""
    model = build.load(checkpoint, device)
    if denoiser is not None:
        denoiser.require_size(model.input_size)
    require_rows_alone(model)
    classifier = Classifier(model, precision, None if denoiser is None else denoiser.to(device))
    runtime = getattr(checkpoint, "runtime", None)
    if runtime is not None and has_steps(model):
        classifier.net = RunByRuntime(classifier.net, runtime)
    return classifier


@torch.no_grad()
def require_rows_alone(model: PixelModel) -> None:
    """UsageError where logits depend on the batch: its draws would not be independent."""
    weight = next(model.parameters(), torch.zeros(()))
    images = noise_like(torch.empty(3, *model.input_size, dtype=weight.dtype, device=weight.device))
    try:
        together = model(images)
        alone = torch.cat([model(image[None]) for image in images])
    except RuntimeError:  # of single images, or not in this precision: the run itself says so
        return
    if bool(torch.isfinite(alone).all()) and not logits_agree(together, alone, movement_of_margins):
        raise UsageError(BESIDE)


class Smoothed(nn.Module):
    """log mean softmax f(x + sigma z) over a few fixed z: what an attack on g climbs."""

    def __init__(self, classify: nn.Module, sigma: float, seed: int) -> None:
        super().__init__()
        self.classify = classify
        self.sigma = sigma
        self.seed = seed
        self.eval()

    def forward(self, pixels: Tensor) -> Tensor:
        names = [0] * CLIMBED
        shape = pixels.shape[1:]
        drawn = noise.normals(self.seed, names, range(CLIMBED), shape, pixels.device, noise.ATTACK)
        noisy = pixels[:, None] + self.sigma * drawn.to(pixels.dtype)
        shares = self.classify(noisy.flatten(0, 1)).softmax(dim=1)
        return shares.unflatten(0, (len(pixels), CLIMBED)).mean(dim=1).clamp_min(1e-30).log()
