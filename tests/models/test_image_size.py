"""--image-size: images of another size than the network's own, which its first layer resizes."""

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

import certvit
from certcli.certify.smoothing.functions import smoothed_classifier
from certcli.certify.smoothing.pixel_denoiser import PixelDenoiser
from certcli.checkpoint.file import Checkpoint
from certcli.checkpoint.record import InputSpec, Record
from certcli.models.open import open_checkpoint
from certcli.models.origins import Hints
from certcli.models.pixels import PixelModel, PixelResize, ResizedPixels
from certcli.models.visible_part import seen_part
from certcli.system.errors import CheckpointError, UsageError
from tests.helpers.commands import certvit as command

DIGITS = "certvit/digits"
OWN = InputSpec(size=(1, 8, 8), mean=(0.5,), std=(0.5,))


def opened_at(side: int) -> Any:
    return open_checkpoint(DIGITS, Hints(image_size=side))


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ((12, 10), (8, 14)),
        ((1, 5), (3, 3)),
        ((7, 7), (7, 2)),
        ((2, 1), (7, 9)),
        ((32, 32), (56, 28)),
    ],
)
def test_the_resize_is_bilinear_interpolation_with_antialiasing(
    source: tuple[int, int], target: tuple[int, int]
) -> None:
    images = torch.rand(2, 3, *source, dtype=torch.float64)
    resize = PixelResize(source, target)
    expected = interpolate(images, target, mode="bilinear", antialias=True)
    assert resize(images).shape == expected.shape
    assert torch.allclose(resize(images), expected, rtol=0, atol=1e-15)


def test_a_record_keeps_the_size_and_one_without_it_keeps_its_bytes() -> None:
    own = open_checkpoint(DIGITS).record
    assert "resized" not in own.to_json()
    other = opened_at(12).record
    assert Record.from_json(other.to_json()) == other
    assert (other.input.size, other.input.resized) == ((1, 12, 12), (8, 8))
    assert other.input.perturbed_at(8) == own.input  # its own size again
    assert other.input.perturbed_at(16).resized == (8, 8)


def test_another_size_is_another_network() -> None:
    digests = {opened_at(side).digest for side in (8, 12, 16)} | {open_checkpoint(DIGITS).digest}
    assert len(digests) == 3


@pytest.mark.parametrize("sides", [[0, 8], [8], [8, 8, 8], [5000, 8], "8x8"])
def test_sides_that_no_network_has_are_refused(sides: Any) -> None:
    record = json.loads(opened_at(12).record.to_json())
    record["input"]["resized"] = sides
    with pytest.raises(CheckpointError):
        Record.from_json(json.dumps(record))


def test_a_network_loaded_from_its_module_is_the_same_function() -> None:
    """load(network(x)) is x, with the resize; not of a module whose matrices somebody changed."""
    checkpoint = opened_at(12)
    images = torch.rand(3, 1, 12, 12)
    module = certvit.network(checkpoint)
    for stated in ({}, {"mean": 0, "std": 1}, {"mean": 0.5, "std": 0.5}):
        loaded = certvit.load(module, **stated)
        assert loaded.record.input == checkpoint.record.input
        assert torch.equal(certvit.network(loaded)(images), module(images))
    assert isinstance(module.normalize, ResizedPixels)
    module.normalize.resize.rows.mul_(2)
    doubled = certvit.load(module, input_size=(1, 12, 12), mean=0, std=1)
    assert torch.equal(certvit.network(doubled)(images), module(images))


def test_a_module_takes_an_image_size_too() -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    images = torch.rand(5, 1, 6, 6)
    opened = certvit.load(module, mean=0.2, std=0.5, input_size=(1, 4, 4), image_size=6)
    small = interpolate(images, (4, 4), mode="bilinear", antialias=True)
    assert torch.allclose(certvit.network(opened)(images), module((small - 0.2) / 0.5), atol=1e-5)
    # one linear map: the bound of its two factors is at most their product
    whole = module[1].weight @ torch.kron(*_resize_matrices((6, 6), (4, 4))).float() / 0.5
    exact = float(torch.linalg.matrix_norm(whole.detach(), 2))
    assert exact <= float(certvit.bound(opened).upper)


def _resize_matrices(source: tuple[int, int], target: tuple[int, int]) -> tuple[Tensor, Tensor]:
    resize = PixelResize(source, target)
    return resize.rows, resize.columns


class Halves(PixelDenoiser):
    """Half of each pixel; tells the sizes that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: set[tuple[int, ...]] = set()

    def forward(self, pixels: Tensor) -> Tensor:
        self.sizes.add(tuple(pixels.shape[1:]))
        return pixels / 2


def test_a_denoiser_works_at_the_size_of_the_images_and_the_resize_comes_behind_it() -> None:
    denoiser = Halves()
    noisy = torch.randn(4, 1, 12, 12)
    smoothed = smoothed_classifier(opened_at(12), torch.device("cpu"), "float32", denoiser)
    own = certvit.network(DIGITS)
    small = interpolate(noisy / 2, (8, 8), mode="bilinear", antialias=True)
    with torch.no_grad():
        assert torch.allclose(smoothed(noisy), own(small), atol=1e-5)
    assert denoiser.sizes == {(1, 12, 12)}


def test_tokens_are_not_dropped_where_a_pixel_belongs_to_several() -> None:
    """Patches are certified in the pixels of the images; tokens are patches of the resized ones."""
    model = PixelModel(OWN.perturbed_at(16), _plain_network())
    with pytest.raises(UsageError, match="resizes the images"):
        seen_part(model, "tokens")
    assert seen_part(model, "auto").hides == "pixels"
    assert seen_part(PixelModel(OWN, _plain_network()), "auto").hides == "tokens"


def _plain_network() -> nn.Module:
    return timm.create_model(
        "vit_tiny_patch16_224", img_size=8, patch_size=4, in_chans=1, embed_dim=8, depth=1,
        num_heads=2, num_classes=3,
    ).eval()  # fmt: skip


def test_commands_take_images_of_that_size(tmp_path: Path) -> None:
    """A written checkpoint keeps the size; records are of the network at their size alone."""
    digits = ("--dataset", "digits")
    few = (*digits, "--limit", "3")
    written = tmp_path / "at12.safetensors"
    result = command("certify", DIGITS, "--image-size", 12, *few, "-e", 0.2, "-o", written)
    assert "resized to 8x8 by the first layer" in result.output
    assert Checkpoint.read(written).record.input.size == (1, 12, 12)
    command("verify", written, written, *digits)
    records = tmp_path / "r.jsonl"
    smoothing = ("--method", "smoothing", "--sigma", 0.25, "--n0", 10, "--samples", 50)
    command("certify", written, *few, *smoothing, "-e", 0.1, "--records", records)
    command("verify", records, DIGITS, "--image-size", 12, *digits)
    command("verify", records, DIGITS, *digits, code=6)


def test_training_images_may_be_among_those_of_another_size() -> None:
    """Their digests are of the pixels of then: none matches, and that shows nothing."""
    options = ("--dataset", "digits", "--split", "train", "--limit", 20, "-e", 0.2)
    assert (
        "20 of these 20 images are training images" in command("certify", DIGITS, *options).output
    )
    other = command("certify", DIGITS, "--image-size", 12, *options).output
    assert "some of these may be among them" in " ".join(other.split())
