"""What an attacker may change: a ball around an image in the box [0, 1], or a patch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from certcli.evaluation.threat import Norm, Patch, require_norm, require_radii
from certcli.system.errors import UsageError


def image_norms(delta: Tensor, norm: Norm) -> Tensor:
    """|delta|_2 or |delta|_inf of each image, in float64: (b, c, h, w) -> (b,)."""
    flat = delta.double().flatten(1)
    return flat.norm(dim=1) if norm == "l2" else flat.abs().amax(dim=1)


def beside_pixels(values: Tensor, like: Tensor) -> Tensor:
    """One value an image, beside its pixels: (b,) -> (b, 1, 1, 1)."""
    return values.view(-1, *[1] * (like.dim() - 1))


def per_image(values: Tensor, like: Tensor) -> Tensor:
    """One number an image, as a factor of its pixels: (b,) -> (b, 1, 1, 1), in the dtype of `like`."""
    return beside_pixels(values.to(like.dtype), like)


@dataclass(frozen=True)
class Region:
    """All images x' in [0, 1] with |x' - x| <= radius (pixel units).

    Attributes:
        own: (b,) float64, a radius for each image of a batch, where they differ; `radius` is then
            the largest of them.
        where: (b, 1, h, w) bool, the pixels that may change, where not all may: `Region.within`.
    """

    norm: Norm
    radius: float
    own: Tensor | None = field(default=None, compare=False)
    where: Tensor | None = field(default=None, compare=False)

    @staticmethod
    def within(patch: Patch, corners: Sequence[tuple[int, int]], images: Tensor) -> "Region":
        """Any pixels in such a patch at corners (top, left): a ball of radius 1 in linf there."""
        where = torch.zeros(
            len(images), 1, *images.shape[2:], dtype=torch.bool, device=images.device
        )
        for row, (top, side) in enumerate(corners):
            where[row, :, top : top + patch.height, side : side + patch.width] = True
        return Region("linf", 1.0, where=where)

    @staticmethod
    def each(norm: Norm, radii: Sequence[float]) -> "Region":
        """One radius for each image of a batch."""
        checked = [Region(norm, radius).radius for radius in radii]
        return Region(norm, max(checked), torch.tensor(checked, dtype=torch.float64))

    def of(self, rows: Tensor) -> "Region":
        """The region to the images of a batch at these positions (or under this mask)."""
        radii, where = (
            None if part is None else part[rows.to(part.device)] for part in (self.own, self.where)
        )
        return replace(self, own=radii, where=where)

    def radii(self, images: Tensor) -> Tensor:
        """(b,) float64, on the images' device."""
        if self.own is None:
            return torch.full(
                (len(images),), self.radius, dtype=torch.float64, device=images.device
            )
        return self.own.to(images.device)

    def __post_init__(self) -> None:
        require_norm(self.norm)
        if not 0 <= self.radius < float("inf"):
            raise UsageError(f"radius {self.radius} is not a finite number >= 0")

    def project(self, adversarial: Tensor, images: Tensor) -> Tensor:
        """Nearest point of the ball, then of the box: (b, c, h, w) x 2 -> (b, c, h, w).

        Clipping to the box after the ball keeps the point in the ball, because `images` lie in the
        box.
        """
        delta = adversarial - images
        if self.norm == "linf":
            limit = per_image(self.radii(images), images)
            delta = torch.minimum(torch.maximum(delta, -limit), limit)
        else:
            length = image_norms(delta, "l2").clamp_min(1e-30)
            delta = delta * per_image((self.radii(images) / length).clamp_max(1.0), delta)
        point = (images + delta).clamp(0.0, 1.0)
        return point if self.where is None else torch.where(self.where, point, images)

    def random_start(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Return where an ascent begins: (b, c, h, w) -> (b, c, h, w).

        linf: uniform in the ball; l2: direction and length are. Nearly all of an l2 ball of many
        dimensions lies at its edge: an ascent from a uniform point of it begins as far away as it
        may ever be, and breaks fewer images. Clipped to the box. Source: torchattacks' PGDL2.
        """
        return self._drawn(images, generator, lambda share, pixels: share)

    def random_point(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """A point drawn uniformly from the ball, clipped to the box: (b, c, h, w) -> (b, c, h, w)."""
        return self._drawn(images, generator, lambda share, pixels: share ** (1 / pixels))

    def _drawn(
        self, images: Tensor, generator: torch.Generator, length: Callable[[Tensor, int], Tensor]
    ) -> Tensor:
        """length: the step's l2, as a share of the radius, from uniform numbers and pixels."""
        shape = images.shape
        device = images.device
        if self.norm == "linf":
            delta = (2 * torch.rand(shape, generator=generator).to(device) - 1) * per_image(
                self.radii(images), images
            )
        else:
            delta = torch.randn(shape, generator=generator).to(device)
            share = length(torch.rand(shape[0], generator=generator).to(device), delta[0].numel())
            delta = delta * per_image(
                share * self.radii(images) / image_norms(delta, "l2").clamp_min(1e-30), delta
            )
        return self.project(images + delta.to(images.dtype), images)

    def steepest(self, gradient: Tensor) -> Tensor:
        """Direction of norm 1 of a linear function's steepest growth: (b, c, h, w) -> same."""
        if self.norm == "linf":
            return gradient.sign()
        return gradient / per_image(image_norms(gradient, "l2").clamp_min(1e-30), gradient)

    def contains(self, adversarial: Tensor, images: Tensor) -> Tensor:
        """Which images lie in the closed ball and in the box, by exact comparison: -> (b,) bool.

        The difference is taken in float64, where it is exact for float32 pixels.
        """
        inside = image_norms(adversarial.double() - images.double(), self.norm) <= self.radii(
            images
        )
        boxed = ((adversarial >= 0) & (adversarial <= 1)).flatten(1).all(dim=1)
        if self.where is not None:
            inside = inside & ((adversarial == images) | self.where).flatten(1).all(dim=1)
        return inside & boxed


def growing(norm: Norm, radii: Sequence[float]) -> list[Region]:
    """One region a radius, ascending, each once. UsageError when there is none."""
    return [Region(norm, radius) for radius in require_radii(radii)]
