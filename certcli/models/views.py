"""Views: which cells of an image a pass sees.

An image (height, width) is cut into cells of (cell height, cell width) pixels, the last ones
smaller where the sides do not divide: tokens, where tokens are dropped. A view is a grid of cells,
True where seen: (rows, columns) bool.
"""

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from certcli.system.errors import UsageError


@dataclass(frozen=True)
class Grid:
    """height, width: pixels of the image. cell: pixels of a cell, (height, width)."""

    height: int
    width: int
    cell: tuple[int, int]

    @property
    def shape(self) -> tuple[int, int]:
        """Cells: (rows, columns)."""
        return -(-self.height // self.cell[0]), -(-self.width // self.cell[1])


def band_views(grid: Grid, kind: str, width: int) -> Tensor:
    """Views (m, rows, columns) of `width` columns (or rows, or a block), at each wrapped place."""
    rows, columns = grid.shape
    across = [_ring(columns, width)] if kind != "rows" else []
    down = [_ring(rows, width)] if kind != "columns" else []
    sides = {"columns": columns, "rows": rows, "blocks": min(rows, columns)}
    if not 1 <= width < sides[kind]:
        raise UsageError(
            f"bands of {width} {kind}: the image has {rows} rows and {columns} columns of cells",
            f"a width between 1 and {sides[kind] - 1}",
        )
    vertical = down[0] if down else torch.ones(1, rows, dtype=torch.bool)
    horizontal = across[0] if across else torch.ones(1, columns, dtype=torch.bool)
    return (vertical[:, None, :, None] & horizontal[None, :, None, :]).flatten(0, 1)


def _ring(cells: int, width: int) -> Tensor:
    """(cells, cells) bool: row i sees `width` cells from i on, those beyond the end at the start."""
    places = (torch.arange(cells)[:, None] + torch.arange(width)) % cells
    return torch.zeros(cells, cells, dtype=torch.bool).scatter_(1, places, True)


def square_views(grid: Grid, side: int, places: int = 3) -> Tensor:
    """Views (m, rows, columns), each without a square of `side` pixels, at places x places places
    from border to border.

    On a grid of tokens the square covers whole tokens. UsageError where it does not fit.
    """
    shape = [-(-side // cell) for cell in grid.cell]
    if any(size >= cells for size, cells in zip(shape, grid.shape, strict=True)):
        raise UsageError(
            f"squares of {side} pixels leave nothing of an image of {grid.width} x {grid.height}",
            "smaller",
        )
    corners = [
        sorted({round(step * (cells - size) / (places - 1)) for step in range(places)})
        for size, cells in zip(shape, grid.shape, strict=True)
    ]
    views = torch.ones(len(corners[0]) * len(corners[1]), *grid.shape, dtype=torch.bool)
    for view, (top, left) in zip(views, itertools.product(*corners), strict=True):
        view[top : top + shape[0], left : left + shape[1]] = False
    return views
