"""Patches as they are spelled, which cells they meet, and passes over views: hidden cells do not
enter, and batches of one size give the same bits.
"""

import itertools
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from certcli.certify.options import Patches
from certcli.certify.patch import passes
from certcli.certify.patch.certifier import PatchCertifier, Prediction, Predictor, defended
from certcli.certify.patch.double_masking import DoubleMasking, Voting
from certcli.certify.patch.passes import NONE, MaskedPasses
from certcli.evaluation.threat import Patch
from certcli.models.pixels import Grid, KeptTokens, PixelModel, SeenPart, band_views, seen_part
from certcli.system.errors import UsageError
from tests.helpers.patches import GRID, ONE_IMAGE, half_normalised, patch_places, views_as_pixels


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
            intervals = passes.cover(length, patch, cell, count)
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
    views = passes.square_masks(grid, patch, 3)
    every = torch.stack(patch_places(grid, patch))

    def covered(some: Tensor) -> bool:
        return bool(
            (~(views_as_pixels(some, grid)[:, None] & every[None]).flatten(2).any(dim=2))
            .any(dim=0)
            .all()
        )

    assert covered(views)
    holes = 0
    for index in range(len(views)):
        rows, columns = (~views[index]).nonzero().unbind(1)
        smaller = views.clone()
        narrower = views.clone()
        smaller[index, rows.min()], narrower[index, :, columns.max()] = True, True
        left_out = views[[other for other in range(len(views)) if other != index]]
        for mutant in (smaller, narrower, left_out):
            holes += not covered(mutant)
            if covered(mutant):
                DoubleMasking(grid, [patch], 3).use(mutant, grid, [patch])
            else:
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
    sets = passes.met_views(views, grid, patch)
    assert all(bool((found <= sets).all(dim=1).any()) for found in met)
    assert all(bool((found == met).all(dim=1).any()) for found in sets)


def vit(arch: str = "vit_tiny_patch16_224", **given: Any) -> PixelModel:
    torch.manual_seed(0)
    shape = {
        "img_size": 16,
        "patch_size": 4,
        "in_chans": 3,
        "num_classes": 5,
        "embed_dim": 24,
        "depth": 2,
        "num_heads": 2,
    }
    net = timm.create_model(arch, **{**shape, **given})
    for weight in net.parameters():  # timm starts heads and tokens near zero
        nn.init.normal_(weight, std=0.2)
    return half_normalised(net, (3, 16, 16))


TOKENS = {
    "class token": vit,
    "average": lambda: vit(global_pool="avg", class_token=False, fc_norm=False),
    "registers": lambda: vit(reg_tokens=3),
    "registers without positions": lambda: vit(reg_tokens=2, no_embed_class=True),
    "no positions": lambda: vit(pos_embed="none"),
    "distilled": lambda: vit("deit_tiny_distilled_patch16_224"),
    "rectangles": lambda: vit(patch_size=(2, 8)),
}


@pytest.mark.parametrize("name", TOKENS)
def test_dropped_tokens_are_out_of_the_pass(name: str) -> None:
    part = seen_part(TOKENS[name](), "tokens")
    assert isinstance(part, KeptTokens)
    pixels = torch.rand(4, 3, 16, 16)
    views = torch.ones(4, *part.grid.shape, dtype=torch.bool)
    torch.testing.assert_close(
        part(pixels, views), part.model(pixels), rtol=1e-4, atol=1e-4
    )  # sums in another order
    views[:, 0, 1] = False
    hidden = ~views_as_pixels(views, part.grid)
    other = torch.where(hidden[:, None], torch.rand(4, 3, 16, 16), pixels)
    assert torch.equal(part(pixels, views), part(other, views))
    assert not torch.equal(
        part(pixels, views), part(pixels, ~views | (torch.rand(views.shape[1:]) > 2))
    )


@pytest.mark.parametrize("hide", ["tokens", "pixels"])
def test_hidden_pixels_do_not_enter(hide: str) -> None:
    part = seen_part(vit(), hide)
    views = passes.square_masks(part.grid, Patch(4, 4), 2)
    pixels = torch.rand(len(views), 3, 16, 16)
    hidden = ~views_as_pixels(views, part.grid)
    other = torch.where(hidden[:, None], torch.full_like(pixels, float("nan")), pixels)
    assert torch.equal(part(pixels, views), part(other, views))


class Company(nn.Module):
    """Logits that depend on the place in the batch, as those of a kernel may."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.flatten(1)) + 1e-6 * torch.arange(len(x))[:, None]


def test_passes_that_depend_on_their_company_need_a_lead() -> None:
    torch.manual_seed(0)
    part = SeenPart(half_normalised(Company(), (1, 8, 8)), Grid(8, 8, (1, 1)))
    defence = DoubleMasking(part.grid, [Patch(2, 2)], 2)
    passes = MaskedPasses(part, defence.views, 4)
    assert passes.determinism.difference > 0
    assert "measured" in passes.determinism.told(4)
    pixels = torch.rand(6, 1, 8, 8)
    leads = passes.answers(pixels, [(image, 0) for image in range(6)])
    assert [one.firm for one in leads] == [one.lead > passes.determinism.margin for one in leads]
    labels = [one.prediction for one in defence.predict(passes, pixels)]
    assert sum(bool(one.proven) for one in defence.certify(passes, pixels, labels)) > 0
    passes.determinism = type(passes.determinism)(1e3, 1)
    assert all(not one.proven for one in defence.certify(passes, pixels, labels))


class Scaled(nn.Module):
    """By the brightest pixel of the batch: a patch in one pass darkens all others."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(36, 2)
        self.head.weight.data = torch.full((2, 36), 0.05) * torch.tensor([[1.0], [-1.0]])
        self.head.bias.data = torch.tensor([-0.7, 0.7])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled = x / (x.max() + 1e-3)
        return self.head(scaled.flatten(1))


@pytest.mark.parametrize("rows", [2, 8])
def test_passes_that_move_with_what_lies_beside_them_are_refused(rows: int) -> None:
    part = SeenPart(half_normalised(Scaled(), (1, 6, 6)), Grid(6, 6, (1, 1)))
    defence = DoubleMasking(part.grid, [Patch(2, 2)], 3)
    with pytest.raises(UsageError, match="depend on the images beside it"):
        MaskedPasses(part, defence.views, rows)
    MaskedPasses(part, defence.views, 1)  # a pass without company


def test_passes_without_finite_logits_give_no_class() -> None:
    """A patch that breaks every pass that sees it (here by NaN pixels) leaves the proven class."""
    part = SeenPart(half_normalised(nn.Sequential(nn.Flatten(), nn.Linear(20, 3)), (1, 4, 5)), GRID)
    part.model.net[1].weight.data.zero_()
    for defence in (
        DoubleMasking(GRID, [Patch(1, 1)], 2),
        Voting(GRID, [Patch(1, 1)], "columns", 1, 3),
    ):
        passes = MaskedPasses(part, defence.views, 4)
        (clean,) = defence.certify(passes, ONE_IMAGE, [int(part.model.net[1].bias.argmax())])
        assert clean.proven
        broken = ONE_IMAGE.clone()
        broken[0, 0, 1, 2] = float("nan")
        assert defence.predict(passes, broken)[0].prediction == clean.prediction
        everywhere = torch.full_like(ONE_IMAGE, float("nan"))
        assert not any(answer.firm for answer in passes.answers(everywhere, [(0, 0), (0, 1)]))
        for label in (0, NONE):  # as which `predict` asks for a proof
            assert defence.certify(passes, everywhere, [label])[0].proven == ()


def test_patches_are_proven_where_that_is_asked_for() -> None:
    part = SeenPart(half_normalised(nn.Sequential(nn.Flatten(), nn.Linear(20, 3)), (1, 4, 5)), GRID)
    part.model.net[1].weight.data.zero_()
    patch = Patch(1, 1)
    top = int(part.model.net[1].bias.argmax())
    defence = DoubleMasking(GRID, [patch], 2)
    defended = object.__new__(Predictor)
    defended.defended = PatchCertifier(defence, MaskedPasses(part, defence.views, 4), [patch])
    images = torch.cat([ONE_IMAGE, torch.full_like(ONE_IMAGE, float("nan"))])
    assert defended(images) == [Prediction(top), Prediction(None)]
    assert defended(images, prove=True) == [Prediction(top, (str(patch),)), Prediction(None)]


class Counting(SeenPart):
    hides = "pixels"

    def forward(self, pixels: Tensor, views: Tensor) -> Tensor:
        self.rows = [*getattr(self, "rows", []), len(pixels)]
        logits: Tensor = self.model(pixels)
        return logits


def test_batches_always_have_one_size() -> None:
    part = Counting(half_normalised(nn.Sequential(nn.Flatten(), nn.Linear(20, 3)), (1, 4, 5)), GRID)
    defence = DoubleMasking(GRID, [Patch(2, 2)], 2)
    defence.certify(MaskedPasses(part, defence.views, 4), torch.rand(3, 1, 4, 5), [0, 1, 2])
    assert set(part.rows) == {4}


SWIN = {"img_size": 32, "window_size": 4, "embed_dim": 8, "depths": (1, 1), "num_heads": (1, 1)}


@pytest.mark.parametrize(
    ("arch", "shape"),
    [("resnet10t", {}), ("swin_tiny_patch4_window7_224", SWIN)],
    ids=["convolutions", "windows"],
)
def test_networks_without_tokens_to_drop_say_so(arch: str, shape: dict[str, Any]) -> None:
    net = timm.create_model(arch, num_classes=5, **shape)
    model = half_normalised(net, (3, 32, 32))
    with pytest.raises(
        UsageError, match=f"{type(net).__name__} is neither timm's VisionTransformer"
    ):
        seen_part(model, "tokens")
    part = seen_part(model, "auto")
    assert part.hides == "pixels"
    assert "VisionTransformer" in part.why


def test_pixels_are_hidden_where_masks_would_leave_no_token() -> None:
    """And records of either hiding are understood, with the number of their procedure."""
    few = defended(vit(), Patches(["11"]))
    assert few.parameters["hide"] == "pixels"
    assert "hide the whole image" in few.remark
    by_tokens = defended(vit(), Patches(["2"], "double-masking:4"))
    for certifier in (few, by_tokens):
        assert defended(vit(), Patches.of(certifier.parameters)).parameters == certifier.parameters
    with pytest.raises(UsageError, match="hide the whole image"):
        defended(vit(), Patches(["11"], hide="tokens"))
