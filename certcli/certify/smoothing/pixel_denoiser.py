"""What every denoiser is to smoothing: a function of noisy pixels for one sigma, with a digest."""

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

from torch import nn


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
