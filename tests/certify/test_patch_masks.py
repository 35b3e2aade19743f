"""Patches as they are spelled, and which cells they meet: pixel by pixel, at all places."""

import itertools

import pytest
import torch
from torch import Tensor

from certcli.certify.patch import masks
from certcli.certify.patch.double_masking import DoubleMasking
from certcli.certify.patch.options import Patches
from certcli.evaluation.threat import Patch
from certcli.models.visible_part import Grid, band_views
from certcli.system.errors import UsageError
from tests.helpers.patches import patch_places, views_as_pixels


def test_rows_and_patches_are_few() -> None:
    def asked(rows: int, count: int) -> Patches:
        return Patches.of({"patches": ["2"] * count, "rows": rows})

    assert [asked(*most).rows for most in ((1, 1), (4096, 32))] == [1, 4096]
    for wrong in ((0, 1), (4097, 1), (1, 33)):
        with pytest.raises(UsageError, match="rows is between"):
            asked(*wrong)


@pytest.mark.parametrize(
    ("text", "patch", "spelled"),
    [
        ("32", Patch(32, 32), "32x32"),
        ("16x64", Patch(64, 16), "16x64"),
        ("2%", Patch(32, 32), "32x32"),
        ("1%", Patch(23, 23), "23x23"),
        ("2:32", Patch(32, 32, 2), "2:32x32"),
        ("3:2x5", Patch(5, 2, 3), "3:2x5"),
        ("100%", Patch(224, 224), "224x224"),
    ],
)
def test_patches_are_read_and_spelled(text: str, patch: Patch, spelled: str) -> None:
    assert Patch.read(text, (224, 224)) == patch
    assert str(patch) == spelled
    assert Patch.read(spelled, (224, 224)) == patch


@pytest.mark.parametrize(
    "text", ["", "0", "-3", "3x", "x3", "300", "3x300", "0%", "101%", "0:3", "3.5", "1e2", "2:2:3"]
)
def test_what_is_no_patch_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        Patch.read(text, (224, 224))


@pytest.mark.parametrize("cell", [[], [8], [8, 8, 8], [8, 8.0], [True, 8]])
def test_what_is_no_cell_is_refused(cell: list[int]) -> None:
    with pytest.raises(UsageError, match="pixels"):
        Patches(["1"], cell=cell)


# covers


def test_intervals_cover_every_place_of_every_patch() -> None:
    """Exhaustive for sides up to 13: the cells that a patch meets lie within one interval."""
    for length, cell, count in itertools.product(range(2, 14), (1, 2, 3, 5), range(1, 6)):
        for patch in range(1, length + 1):
            intervals = masks.cover(length, patch, cell, count)
            assert len(intervals) <= count
            assert len({stop - start for start, stop in intervals}) == 1
            for start in range(length - patch + 1):
                first = start // cell
                last = (start + patch - 1) // cell
                assert any(a <= first and last < b <= -(-length // cell) for a, b in intervals), (
                    length,
                    cell,
                    patch,
                )


@pytest.mark.parametrize(
    "grid", [Grid(7, 9, (1, 1)), Grid(8, 11, (2, 3)), Grid(9, 7, (4, 2))], ids=str
)
@pytest.mark.parametrize("patch", [Patch(2, 2), Patch(1, 3), Patch(3, 1), Patch(1, 1)], ids=str)
def test_masks_hide_every_place_and_a_hole_is_found(grid: Grid, patch: Patch) -> None:
    """Pixel by pixel; then one mask after the other is made smaller by a row or a column, or left
    out.
    """
    views = masks.square_masks(grid, patch, 3)
    every = torch.stack(patch_places(grid, patch))

    def covered(some: Tensor) -> bool:
        return bool(
            (~(views_as_pixels(some, grid)[:, None] & every[None]).flatten(2).any(dim=2))
            .any(dim=0)
            .all()
        )

    assert covered(views)
    assert masks.hole(views, grid, patch) is None
    holes = 0
    for index in range(len(views)):
        rows, columns = (~views[index]).nonzero().unbind(1)
        smaller = views.clone()
        narrower = views.clone()
        smaller[index, rows.min()], narrower[index, :, columns.max()] = True, True
        left_out = views[[other for other in range(len(views)) if other != index]]
        for mutant in (smaller, narrower, left_out):
            assert (masks.hole(mutant, grid, patch) is None) == covered(mutant)
            holes += not covered(mutant)
            if not covered(mutant):
                with pytest.raises(UsageError, match="no mask hides"):
                    DoubleMasking(grid, [patch], 3).use(mutant, grid, [patch])
    assert holes > 0


@pytest.mark.parametrize("patch", [Patch(2, 2), Patch(3, 1), Patch(1, 2, 2)], ids=str)
@pytest.mark.parametrize("grid", [Grid(5, 6, (1, 1)), Grid(6, 7, (2, 3))], ids=str)
@pytest.mark.parametrize("kind", ["columns", "rows", "blocks"])
def test_the_bands_that_a_patch_meets(kind: str, grid: Grid, patch: Patch) -> None:
    """Against pixels: each place's bands are within one of the sets, and each set is that of some
    places.
    """
    views = band_views(grid, kind, 1)
    single = patch_places(grid, Patch(patch.height, patch.width))
    every = single if patch.count == 1 else [a | b for a, b in itertools.product(single, single)]
    met = torch.stack(
        [(views_as_pixels(views, grid) & pixels).flatten(1).any(dim=1) for pixels in every]
    )
    sets = masks.met_views(views, grid, patch)
    assert all(bool((found <= sets).all(dim=1).any()) for found in met)
    assert all(bool((found == met).all(dim=1).any()) for found in sets)
