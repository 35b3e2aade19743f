"""The steepest slope of each margin near an image, measured: what no bound may lie below."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from certcli.evaluation.radii import Norm
from certcli.lipschitz.estimate import copies_of, slopes_below

_STARTS = 3
_STEPS = 30
_INSIDE = 1 - 2.0**-30
"""Of the radius: images stay within it whatever is rounded."""


class Margins(nn.Module):
    """x -> rows . f(x), a row an image: (b, c, h, w) -> (b, 1)."""

    rows: Tensor

    def __init__(self, model: nn.Module, rows: Tensor) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("rows", rows)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = (self.model(x) * self.rows).sum(1, keepdim=True)
        return out


def steepest_slopes(
    model: nn.Module, image: Tensor, label: int, radius: float, norm: Norm
) -> Tensor:
    """Return a slope that each margin z_label - z_j has within `radius` of an image, rounded down: (k,).

    By ascent of the gradient's length from a few places; 0 at j = label.
    """
    with torch.no_grad():
        count = model(image).shape[1]
    eye = torch.eye(count, dtype=image.dtype, device=image.device)
    margins = Margins(model, eye[label] - eye)
    places = _ascent(margins, image, radius, norm)
    gradients = _gradients(margins, places)[0]
    directions = gradients.sign() if norm == "linf" else gradients
    idle = ~directions.flatten(1).any(1)
    directions = torch.where(idle[:, None, None, None], torch.ones_like(directions), directions)
    slopes = slopes_below(copies_of(margins), places, directions)
    if norm == "linf":  # |J v| / |v|_inf for signs v
        slopes = slopes * directions.flatten(1).norm(dim=1) * (1 - 2.0**-40)
    return slopes


def _ascent(margins: Margins, image: Tensor, radius: float, norm: Norm) -> Tensor:
    """Return where each margin has the longest gradient that was met: (k, c, h, w)."""
    generator = torch.Generator().manual_seed(0)
    count = len(margins.rows)
    longest = image.new_full((count,), -1.0)
    places = image.repeat(count, 1, 1, 1)
    for start in range(_STARTS):
        move = torch.randn(places.shape, generator=generator, dtype=image.dtype).to(image)
        x = _into_ball(image, image + move * (start > 0), radius, norm)
        for step in range(_STEPS):
            gradients, rising = _gradients(margins, x, second=True)
            length = _norm_of_images(gradients, norm)
            better = length > longest
            longest = torch.where(better, length, longest)
            places = torch.where(better[:, None, None, None], x, places)
            share = 0.5 if step < _STEPS // 2 else 0.15
            x = _into_ball(
                image, x + share * radius * _steepest_direction(rising, norm), radius, norm
            )
    return places


def _gradients(margins: Margins, x: Tensor, second: bool = False) -> tuple[Tensor, Tensor]:
    """Return each margin's gradient at its image, and that of its length (0 where it has none)."""
    x = x.detach().clone().requires_grad_(True)
    rising: Any = None
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        (gradients,) = torch.autograd.grad(margins(x).sum(), x, create_graph=second)
        if second and gradients.requires_grad:
            lengths = gradients.flatten(1).norm(dim=1).sum()
            (rising,) = torch.autograd.grad(lengths, x, allow_unused=True)
    return gradients.detach(), torch.zeros_like(x).detach() if rising is None else rising


def _norm_of_images(gradients: Tensor, norm: Norm) -> Tensor:
    return gradients.flatten(1).norm(p=1 if norm == "linf" else 2, dim=1)


def _steepest_direction(rising: Tensor, norm: Norm) -> Tensor:
    if norm == "linf":
        return rising.sign()
    return rising / rising.flatten(1).norm(dim=1).clamp_min(1e-300)[:, None, None, None]


def _into_ball(image: Tensor, x: Tensor, radius: float, norm: Norm) -> Tensor:
    """Return images of [0, 1] within the radius: of the box first, which is convex."""
    move = x.clamp(0, 1) - image
    if norm == "linf":
        return image + move.clamp(-radius * _INSIDE, radius * _INSIDE)
    length = move.flatten(1).norm(dim=1).clamp_min(1e-300)
    return image + move * (radius * _INSIDE / length).clamp(max=1)[:, None, None, None]
