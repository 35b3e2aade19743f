"""The layers of pixels: resizing and normalisation, which every network has before its own."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from certcli.checkpoint.record import InputSpec
from certcli.checkpoint.schema import require_statistics
from certcli.system.errors import ArchitectureError, Refused


class PixelResize(nn.Module):
    """x -> R_h x R_w^T, bilinear interpolation with antialiasing: (b, c, h, w) -> (b, c, h', w').

    Two products with stored matrices, whose rows sum to 1: bounds, enclosures and rounding take them
    as linear layers.
    """

    rows: Tensor
    columns: Tensor

    def __init__(self, source: tuple[int, ...], target: tuple[int, ...]) -> None:
        super().__init__()
        for name, sides in zip(("rows", "columns"), zip(source, target, strict=True), strict=True):
            self.register_buffer(name, _resize_matrix(*sides), persistent=False)

    def forward(self, pixels: Tensor) -> Tensor:
        wide = functional.linear(pixels, self.columns.to(pixels.dtype))
        high = functional.linear(wide.transpose(2, 3), self.rows.to(pixels.dtype))
        return high.transpose(2, 3)


def _resize_matrix(source: int, target: int) -> Tensor:
    """Return the matrix (target, source) that resizes one side."""
    # an image, since torch interpolates maps of width 1 wrongly with antialiasing
    unit = torch.eye(source, dtype=torch.float64)[None, None]
    size = (target, source)
    return functional.interpolate(unit, size, mode="bilinear", antialias=True)[0, 0]


class PixelNormalize(nn.Module):
    """x -> (x - mean) / std per channel: (b, c, h, w) -> (b, c, h, w). Bounds include it."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        super().__init__()
        try:
            require_statistics(mean, std)
        except Refused as refusal:
            raise ArchitectureError(f"no normalisation of pixels: {refusal}") from refusal
        self.register_buffer(
            "mean", torch.tensor(mean, dtype=torch.float64).view(-1, 1, 1), persistent=False
        )
        self.register_buffer(
            "std", torch.tensor(std, dtype=torch.float64).view(-1, 1, 1), persistent=False
        )

    def forward(self, pixels: Tensor) -> Tensor:
        return (pixels - self.mean.to(pixels.dtype)) / self.std.to(pixels.dtype)


class ResizedPixels(nn.Module):
    """Resize, then normalise: the first layer of a network on images of another size than its own."""

    def __init__(self, resize: PixelResize, normalize: PixelNormalize) -> None:
        super().__init__()
        self.resize = resize
        self.normalize = normalize

    @property
    def mean(self) -> Tensor:
        return self.normalize.mean

    @property
    def std(self) -> Tensor:
        return self.normalize.std

    def forward(self, pixels: Tensor) -> Tensor:
        normalised: Tensor = self.normalize(self.resize(pixels))
        return normalised


class PixelModel(nn.Module):
    """A network with its normalisation: pixels in [0, 1] -> logits, (b, c, h, w) -> (b, k)."""

    def __init__(self, spec: InputSpec, net: nn.Module) -> None:
        super().__init__()
        normalize = PixelNormalize(spec.mean, spec.std)
        self.normalize: PixelNormalize | ResizedPixels = (
            normalize
            if spec.resized is None
            else ResizedPixels(PixelResize(spec.size[1:], spec.resized), normalize)
        )
        self.net = net
        self.input_size = spec.size

    def forward(self, pixels: Tensor) -> Tensor:
        if pixels.dtype == torch.float32 and self.is_double:
            pixels = pixels.double()  # exact
        return self.net(self.normalize(pixels))

    @property
    def resize(self) -> PixelResize | None:
        """The first step, where the images are not of the network's own size."""
        return self.normalize.resize if isinstance(self.normalize, ResizedPixels) else None

    @property
    def resized(self) -> tuple[int, int] | None:
        """Height and width to which the first step resizes the images."""
        resize = self.resize
        return None if resize is None else (len(resize.rows), len(resize.columns))

    @property
    def is_double(self) -> bool:
        """Tell whether the network computes in float64, as for a file with float64 weights."""
        return next((weight.dtype for weight in self.net.parameters()), None) == torch.float64
