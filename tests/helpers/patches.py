"""What tests of patch certificates share: places of patches, views as pixels, networks on pixels."""

import itertools

import torch
from torch import Tensor, nn

from certcli.checkpoint.record import InputSpec
from certcli.evaluation.threat import Patch
from certcli.models.pixels import Grid, PixelModel

GRID = Grid(4, 5, (1, 1))
ONE_IMAGE = torch.zeros(1, 1, 4, 5)


def patch_places(grid: Grid, patch: Patch) -> list[Tensor]:
    """The pixels (height, width) bool of one such patch, at every place."""
    found = []
    for top, left in itertools.product(
        range(grid.height - patch.height + 1), range(grid.width - patch.width + 1)
    ):
        pixels = torch.zeros(grid.height, grid.width, dtype=torch.bool)
        pixels[top : top + patch.height, left : left + patch.width] = True
        found.append(pixels)
    return found


def views_as_pixels(views: Tensor, grid: Grid) -> Tensor:
    """Views as pixels: (m, rows, columns) -> (m, height, width)."""
    down, across = grid.cell
    return views.repeat_interleave(down, 1).repeat_interleave(across, 2)[
        :, : grid.height, : grid.width
    ]


def half_normalised(net: nn.Module, size: tuple[int, int, int]) -> PixelModel:
    spec = InputSpec(
        size=size,
        mean=(0.5,) * size[0],
        std=(0.5,) * size[0],
        interpolation="bicubic",
        crop_pct=1.0,
    )
    return PixelModel(spec, net.eval()).eval()
