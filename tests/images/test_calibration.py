"""Calibration images: synthetic ones have the statistics of photographs, and each network gets a
fitting default.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from certcli.checkpoint.file import Checkpoint
from certcli.checkpoint.record import InputSpec
from certcli.images import calibration, datasets
from certcli.images.labelled import CACHE_BYTES, at_once
from certcli.system.errors import DataError

SIZES = [(3, 96, 96), (3, 32, 32), (1, 28, 28), (4, 40, 56)]


def spec(size: tuple[int, int, int]) -> InputSpec:
    return InputSpec(size, (0.5,) * size[0], (0.5,) * size[0])


def power_slope(images: torch.Tensor) -> float:
    """d log power / d log frequency of the mean spectrum: (n, c, h, w) square -> a number. White
    noise has 0.
    """
    grey = images.double().mean(1).numpy()
    side = grey.shape[-1]
    window = np.hanning(side)
    spectrum = (
        np.abs(np.fft.fft2((grey - grey.mean((1, 2), keepdims=True)) * window * window[:, None]))
        ** 2
    ).mean(0)
    across = np.fft.fftfreq(side)
    frequency = np.hypot(across[:, None], across[None])
    chosen = (frequency > 2.5 / side) & (frequency < 0.4)
    return float(np.polyfit(np.log(frequency[chosen]), np.log(spectrum[chosen]), 1)[0])


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_synthetic_photographs_are_pixels_of_the_input_size(size: tuple[int, int, int]) -> None:
    images = calibration.synthetic_photographs(spec(size), 12)
    pixels, _ = images.tensors()
    assert pixels.shape == (12, *size)
    assert float(pixels.min()) >= 0.0
    assert float(pixels.max()) <= 1.0
    assert torch.equal((pixels * 255).round() / 255, pixels)
    assert float(pixels.flatten(1).std(1).min()) > 0.02  # none is blank
    assert images.classes == ()


def test_their_power_falls_with_frequency_as_that_of_photographs_does() -> None:
    """Photographs: -2, and steeper where optics blur; 200 of Imagenette at 224 px, windowed alike,
    -2.7 to -3.3.
    """
    pixels, _ = calibration.synthetic_photographs(spec((3, 96, 96)), 24).tensors()
    assert -3.5 < power_slope(pixels) < -1.7
    assert (
        abs(power_slope(torch.rand(24, 3, 96, 96, generator=torch.Generator().manual_seed(0))))
        < 0.3
    )


def test_they_have_edges_unlike_noise_of_the_same_spectrum() -> None:
    """Kurtosis of differences between neighbours: 3 for Gaussian noise; edges make it large, as in
    photographs.
    """
    pixels, _ = calibration.synthetic_photographs(spec((3, 96, 96)), 24).tensors()
    leaves = torch.tensor([number for number in range(24) if number % 4])
    slope = (pixels[leaves, :, :, 1:] - pixels[leaves, :, :, :-1]).double().flatten(1)
    kurtosis = (slope**4).mean(1) / (slope**2).mean(1) ** 2
    assert float(kurtosis.median()) > 6.0


def test_equal_arguments_give_equal_images_and_the_count_changes_none() -> None:
    first, again, more = (
        calibration.synthetic_photographs(spec((3, 32, 32)), n, 5).tensors()[0] for n in (4, 4, 6)
    )
    assert torch.equal(first, again)
    assert torch.equal(first, more[:4])
    assert not torch.equal(
        first, calibration.synthetic_photographs(spec((3, 32, 32)), 4, 6).tensors()[0]
    )


@pytest.mark.parametrize(
    ("size", "remembers", "expected"),
    [
        ((1, 8, 8), None, "digits"),
        ((1, 28, 28), "torch/mnist", "digits"),
        ((1, 28, 28), None, calibration.PHOTOGRAPHS),
        ((3, 32, 32), None, calibration.PHOTOGRAPHS),
        ((3, 32, 32), "torch/cifar10", calibration.PHOTOGRAPHS),
        ((3, 32, 32), "digits", "digits"),
        ((3, 32, 32), "a-folder-that-is-not-here", calibration.PHOTOGRAPHS),
    ],
)
def test_the_default_fits_the_network(
    tiny: Checkpoint, size: tuple[int, int, int], remembers: str | None, expected: str
) -> None:
    record = replace(tiny.record, input=spec(size), dataset=remembers)
    found = calibration.calibration_images(record, 10)
    assert (found.name, len(found)) == (expected, 10)
    assert next(found.batches(10))[1].shape == (10, *size)


def test_a_named_dataset_is_never_replaced(tiny: Checkpoint) -> None:
    with pytest.raises(DataError, match="unknown dataset"):
        calibration.calibration_images(tiny.record, 10, dataset="not-there")
    with pytest.raises(DataError, match="leaves none"):
        calibration.synthetic_photographs(tiny.record.input, 0)


@pytest.mark.parametrize(
    ("count", "most", "out"),
    [(3, None, 0), (9, 5, 4), (10, None, 2), (11, None, 3), (50, 60, 10), (50, 20, 30)],
)
def test_every_fifth_image_is_held_out_or_more(
    tiny: Checkpoint, count: int, most: int | None, out: int
) -> None:
    images = datasets.load_dataset("digits", tiny.record.input, "train").limit(count)
    seen, unseen = calibration.hold_out(images, limit=most)
    assert (len(seen), len(unseen)) == (count - out, out)
    assert not set(seen.indices.tolist()) & set(unseen.indices.tolist())


@pytest.mark.parametrize("side", [8, 224, 5000])
def test_what_runs_at_once_fits_the_cache_of_a_cpu_and_fills_a_gpu(side: int) -> None:
    count = at_once(50, (3, side, side), "cpu")
    assert 1 <= count <= 50
    assert count == 1 or count * 3 * side * side * 4 <= CACHE_BYTES
    assert count == 50 or (count + 1) * 3 * side * side * 4 > CACHE_BYTES
    assert at_once(50, (3, side, side), "cuda") == 50
