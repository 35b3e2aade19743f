"""Training behind masks runs the certifier's passes, on the parts of images that were named."""

from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from certcli.certify.patch.certifier import defended
from certcli.certify.patch.masks import square_masks
from certcli.certify.patch.options import Patches
from certcli.evaluation.threat import Patch
from certcli.finetune.augment import Hiding
from certcli.models.pixels import PixelModel
from certcli.models.views import Grid, band_views, square_views
from tests.helpers.patches import half_normalised


def token_count() -> PixelModel:
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "img_size": 16,
        "patch_size": 4,
        "embed_dim": 24,
        "depth": 2,
        "num_heads": 2,
        "num_classes": 5,
    }
    return half_normalised(timm.create_model("vit_tiny_patch16_224", **shape), (3, 16, 16))


def flat_network() -> PixelModel:
    torch.manual_seed(0)
    return half_normalised(nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 5)), (3, 16, 16))


IMAGES = torch.rand(8, 3, 16, 16, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("network", [token_count, flat_network])
def test_a_training_pass_is_the_pass_of_the_certifier(network: Callable[[], PixelModel]) -> None:
    """Bit for bit, in batches of one size; and no gradient reaches the pixels that are hidden."""
    model = network()
    cell = defended(model, Patches(["2"], "voting", band_width=1)).passes.part.grid.cell
    certifier = defended(model, Patches(["2"], "double-masking", cell=cell))
    hiding = Hiding(model, ("bands:1",), torch.Generator())
    assert hiding.part.grid == certifier.passes.part.grid
    assert hiding.part.hides == certifier.passes.part.hides
    views = certifier.passes.views[torch.arange(8) * 5 % len(certifier.passes.views)]
    pixels = IMAGES.clone().requires_grad_(True)
    found = hiding.logits(pixels, views)
    for row in range(8):
        alone = hiding.logits(IMAGES[row : row + 1], views[row : row + 1])
        assert torch.equal(
            alone, certifier.passes.part(IMAGES[row : row + 1], views[row : row + 1])
        )
        torch.testing.assert_close(
            found[row], alone[0], rtol=1e-4, atol=1e-4
        )  # BLAS sums by the batch's shape
    found.square().sum().backward()
    assert pixels.grad is not None
    reached = pixels.grad.abs().sum(dim=1) > 0
    down, across = hiding.part.grid.cell
    assert not bool(
        (reached & ~views.repeat_interleave(down, 1).repeat_interleave(across, 2)).any()
    )
    assert bool(reached.flatten(1).any(dim=1).all())


def test_bands_are_those_that_vote() -> None:
    hiding = Hiding(token_count(), ("bands:2",), torch.Generator().manual_seed(0))
    bands = {tuple(view.flatten().tolist()) for view in band_views(hiding.part.grid, "columns", 2)}
    drawn = hiding.draw(
        IMAGES.repeat(8, 1, 1, 1), lambda views: pytest.fail("bands ask for no loss")
    )
    assert {tuple(view.flatten().tolist()) for view in drawn} == bands


def test_greedy_squares_are_the_worst_of_their_round() -> None:
    """The first alone, the second beside the first: no other place has a larger loss."""
    hiding = Hiding(token_count(), ("cutout-greedy:2x8",), torch.Generator().manual_seed(0))
    squares = square_views(hiding.part.grid, 8)
    weights = torch.randn(8, *hiding.part.grid.shape, generator=torch.Generator().manual_seed(1))

    def losses(views: Tensor) -> Tensor:
        return (weights * views).flatten(1).sum(dim=1)

    drawn = hiding.draw(IMAGES, losses)
    for row, view in enumerate(drawn):
        alone = torch.stack([losses(square[None].expand(8, -1, -1))[row] for square in squares])
        pairs = torch.stack(
            [
                losses((squares[alone.argmax()] & square)[None].expand(8, -1, -1))[row]
                for square in squares
            ]
        )
        assert float(losses(drawn)[row]) == float(pairs.max())
        assert not bool((view & ~squares[alone.argmax()]).any())
    assert len({tuple(view.flatten().tolist()) for view in drawn}) > 2  # each image has its own


def test_random_squares_are_all_pairs_of_places() -> None:
    hiding = Hiding(token_count(), ("cutout-random:2x8",), torch.Generator().manual_seed(0))
    squares = square_views(hiding.part.grid, 8)
    pairs = {tuple((a & b).flatten().tolist()) for a in squares for b in squares}
    drawn = hiding.draw(
        IMAGES.repeat(80, 1, 1, 1), lambda views: pytest.fail("random places ask for no loss")
    )
    assert {tuple(view.flatten().tolist()) for view in drawn} == pairs


def test_squares_of_the_example_are_the_masks_of_its_certificate() -> None:
    grid = Grid(224, 224, (16, 16))
    assert torch.equal(square_views(grid, 96), square_masks(grid, Patch(32, 32), 3))


def test_validation_sees_every_view_and_the_same_each_time() -> None:
    hiding = Hiding(
        token_count(), ("bands:1", "cutout-greedy:1x8"), torch.Generator().manual_seed(0)
    )
    many = IMAGES[:1].expand(26, -1, -1, -1)
    first = hiding.validated(many)
    assert torch.equal(first, hiding.validated(many))
    assert len(torch.unique(first.detach(), dim=0)) == 4 + 9
