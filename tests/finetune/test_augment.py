"""Training images: moved, mirrored, mixed as said; attacked within the ball, by a network that is left
as it was; behind masks the passes are the certifier's, on the parts of images that were named.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import certcli.system.compat  # noqa: F401 (lets torchvision be imported)

# isort: split
import pytest
import timm
import torch
from torch import Tensor, nn

from certcli.certify.options import Patches
from certcli.certify.patch.certifier import defended
from certcli.certify.patch.passes import square_masks
from certcli.checkpoint.file import Checkpoint
from certcli.evaluation.perturbation import Region, image_norms
from certcli.evaluation.threat import Patch
from certcli.finetune import augment as moves
from certcli.finetune.augment import Adversary, Hiding
from certcli.finetune.settings import FinetuneSettings
from certcli.images import datasets
from certcli.models import build
from certcli.models.pixels import Grid, PixelModel, band_views, square_views
from certcli.system.errors import UsageError
from tests.helpers.patches import half_normalised


def numbered_pixels(b: int = 6, side: int = 8) -> Tensor:
    """Images whose every pixel names its image and place."""
    return (torch.arange(b * side * side).view(b, 1, side, side) + 1).float()


def test_translations_move_each_image_as_a_whole() -> None:
    images = numbered_pixels()
    generator = torch.Generator().manual_seed(0)
    moved = moves.translate(images, 2, "constant", generator)
    visited = set()
    for image, original in zip(moved, images, strict=True):
        wide = torch.nn.functional.pad(original, (2, 2, 2, 2))
        places = [
            (y, x)
            for y in range(5)
            for x in range(5)
            if torch.equal(image, wide[:, y : y + 8, x : x + 8])
        ]
        assert len(places) == 1
        visited.add(places[0])
    assert len(visited) > 2  # each image by its own amount
    flipped = moves.flip(images, generator)
    same = [torch.equal(f, i) for f, i in zip(flipped, images, strict=True)]
    mirrored = [torch.equal(f, i.flip(2)) for f, i in zip(flipped, images, strict=True)]
    assert [a or b for a, b in zip(same, mirrored, strict=True)] == [True] * len(images)
    assert 0 < sum(same) < len(images)


@pytest.mark.parametrize("channels", [3, 1])
def test_colours_change_by_an_own_amount_each_and_stay_in_range(channels: int) -> None:
    image = torch.rand(1, channels, 6, 6, generator=torch.Generator().manual_seed(1))
    images = image.repeat(20, 1, 1, 1)
    jittered, again = (
        moves.augment_batch(
            images, ("color-jitter:0.4",), torch.zeros(1), torch.Generator().manual_seed(0)
        )
        for _ in range(2)
    )
    assert torch.equal(images, image.repeat(20, 1, 1, 1))
    assert jittered.shape == images.shape
    assert 0 <= float(jittered.min()) <= float(jittered.max()) <= 1
    assert len({tuple(image.flatten().tolist()) for image in jittered}) == 20
    assert torch.equal(jittered, again)


@pytest.mark.parametrize("side", [28, 8])
def test_warped_images_stay_close_and_in_range_and_half_stay_themselves(side: int) -> None:
    ramp = torch.linspace(0.2, 0.8, side).expand(
        200, 2, side, side
    )  # a pixel to the right is 0.6 / (side - 1) brighter
    noise = torch.rand(200, 2, side, side, generator=torch.Generator().manual_seed(1))
    for images in (ramp, noise, noise[:1], torch.zeros(3, 1, 1, 5)):
        given = images.clone()
        warped = moves.augment_batch(
            images, ("warp",), torch.zeros(1), torch.Generator().manual_seed(0)
        )
        assert torch.equal(images, given)
        assert (warped.shape, warped.dtype) == (images.shape, images.dtype)
        assert 0 <= float(warped.min()) <= float(warped.max()) <= 1
    moved = (moves.warp(ramp, torch.Generator().manual_seed(0)) - ramp) * (side - 1) / 0.6
    changed = moved.abs().flatten(1).amax(1) > 1e-3
    assert 60 < int(changed.sum()) < 140  # of 200 at one half: a chance of 1e-8 to lie outside
    inside = moved[changed][:, :, side // 7 : -(side // 7), side // 7 : -(side // 7)]
    assert 0.2 < float(inside.square().mean().sqrt()) < 2  # pixels
    assert float(inside.abs().max()) < 6
    assert torch.allclose(moved[:, 0], moved[:, 1], atol=1e-4)  # channels move together
    assert float(inside.mean(dim=(1, 2, 3)).std()) > 0.1  # each image by its own map


def test_cutout_greys_squares_inside_each_image_and_nothing_else() -> None:
    images = numbered_pixels(b=40)
    grey = torch.full((1, 1, 1, 1), -1.0)
    cut = moves.augment_batch(images, ("cutout:1x3",), grey, torch.Generator().manual_seed(0))
    assert torch.equal(cut == images, cut != -1.0)
    places = set()
    for image in cut[:, 0]:
        rows, columns = (image == -1.0).nonzero().T
        assert len(rows) == 9
        assert (rows.max() - rows.min(), columns.max() - columns.min()) == (2, 2)
        places.add((int(rows.min()), int(columns.min())))
    assert len(places) > 10
    assert {0, 5} <= {place for both in places for place in both}  # borders included
    two = moves.augment_batch(images, ("cutout:2x3",), grey, torch.Generator().manual_seed(0))
    assert 9 < int((two == -1.0).flatten(1).sum(1).max()) <= 18
    with pytest.raises(UsageError, match="do not fit"):
        moves.augment_batch(images, ("cutout:2x8",), grey, torch.Generator())


@contextmanager
def watched_hooks(model: nn.Module) -> Iterator[None]:
    """The network is left as it was: no hook, same mode, same gradients."""
    mode = model.training
    yield
    assert model.training is mode
    assert not any(module._forward_hooks or module._backward_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("kind", ["fgsm", "pgd"])
@pytest.mark.parametrize("norm", ["l2", "linf"])
@pytest.mark.parametrize("masks", [{}, {"ard_prm": 0.5}], ids=["", "masked"])
def test_attacked_images_stay_in_the_ball_and_cost_more(
    kind: str, norm: str, masks: dict, tiny: Checkpoint
) -> None:
    radius = 0.5 if norm == "l2" else 0.1
    settings = FinetuneSettings(
        loss="ce",
        adversarial=kind,
        attack_norm=norm,
        attack_epsilon=radius,
        attack_steps=FinetuneSettings.attack_steps if kind == "fgsm" else 5,
        **masks,
    )
    model = build.load(tiny).train()
    images, labels = datasets.load_dataset("digits", tiny.record.input, "train").limit(60).tensors()
    adversary = Adversary(model, settings, torch.Generator().manual_seed(0))

    def error(logits: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(logits, labels, reduction="sum")

    with watched_hooks(model):
        adversarial = adversary.attack(model, images, labels, 0.0)
    region = Region(norm, radius)  # type: ignore[arg-type]
    # a step in float32 may pass the radius by its rounding
    assert float(image_norms(adversarial - images, region.norm).max()) <= radius * (1 + 1e-5)
    assert 0 <= float(adversarial.min()) <= float(adversarial.max()) <= 1
    with torch.no_grad():
        assert float(error(model(adversarial))) > float(error(model(images)))


def test_ard_drops_attention_gradients_and_prm_perturbations(tiny: Checkpoint) -> None:
    torch.manual_seed(0)
    images = torch.rand(3, 1, 8, 8)
    common = {
        "loss": "ce",
        "adversarial": "pgd",
        "attack_norm": "l2",
        "attack_steps": 3,
    }
    adversary = Adversary(
        build.load(tiny), FinetuneSettings(**common, ard_prm=1.0), torch.Generator()
    )  # type: ignore[arg-type]
    net = adversary.model.net
    pixels = images.clone().requires_grad_(True)
    with adversary._attention_dropped(1.0):
        adversary.model(pixels).square().sum().backward()
    dropped = pixels.grad
    with torch.no_grad():
        whole = adversary.model(images)
    for block in net.blocks:
        block.attn.register_forward_hook(lambda module, args, out: out.detach())
    pixels.grad = None
    adversary.model(pixels).square().sum().backward()
    assert torch.equal(dropped, pixels.grad)
    assert torch.equal(adversary.model(images), whole)  # values pass on, gradients do not
    assert [adversary.share_left(share) for share in (0.0, 0.125, 0.25, 0.9)] == [
        1.0,
        0.5,
        0.0,
        0.0,
    ]
    assert torch.equal(adversary._masked(images + 0.1, images, 1.0), images)
    assert torch.equal(adversary._masked(images + 0.1, images, 0.0), images + 0.1)
    half = adversary._masked(images + 0.1, images, 0.5) != images
    patches = half.view(3, 2, 4, 2, 4).transpose(2, 3).flatten(3).float().mean(3)
    assert set(patches.flatten().tolist()) == {0.0, 1.0}  # whole patches


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
    cell = defended(model, Patches(["2"], "voting:1")).passes.part.grid.cell
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


def test_squares_of_the_example_are_the_masks_of_its_certificate() -> None:
    grid = Grid(224, 224, (16, 16))
    assert torch.equal(square_views(grid, 96), square_masks(grid, Patch(32, 32), 3))
