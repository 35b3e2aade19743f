"""Images to calibrate on: a dataset, or synthetic images with the spectrum and the edges of
photographs.

Photographs share two properties that networks respond to: the power of a spatial frequency f falls
like 1/f^2, and regions of one colour and texture end in sharp edges where objects occlude each
other. "Dead leaves" have both: shapes whose sizes follow a power law fall on each other, each with
a flat colour blended with 1/f noise. Nothing is downloaded or licensed. Source: Lee, Mumford &
Huang 2001 (dead leaves); Field 1987 (1/f); Baradad et al. 2021 (networks learn from such images).
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from certcli.checkpoint.record import InputSpec, Record
from certcli.images import datasets
from certcli.images.labelled import Images
from certcli.system.errors import DataError, raise_if

PHOTOGRAPHS = "synthetic photographs"
DIGITS = "digits"

_TEXTURES = 24
_FINE = 96
"""Sides below this are drawn at twice the size and averaged, as a camera does, so that edges are
smooth."""

Array = np.ndarray[Any, np.dtype[Any]]


def calibration_images(
    record: Record,
    count: int,
    seed: int = 0,
    dataset: str | None = None,
    data_dir: Path | None = None,
    judges: int = 0,
) -> Images:
    """Return `count` images to calibrate this network on: training images of `dataset`, else of the
    record's dataset.

    Where the record's dataset is not found here, the images are those of `default_for`. DataError
    for a missing `dataset`.

    Args:
        judges: most further images of the same kind, where these are not made on the spot.
    """
    name = record.dataset if dataset is None else dataset
    if name is not None:
        try:
            images = datasets.load_dataset(name, record.input, "train", data_dir)
            return images.limit(count + judges, seed)
        except DataError:  # a record holds a folder's name without its path
            if dataset is not None:
                raise
    return default_for(record, count, seed, judges)


def default_for(record: Record, count: int, seed: int, judges: int) -> Images:
    """Return digits for a network of digits, else synthetic photographs of the input size."""
    remembered = (record.dataset or "").lower()
    if record.input.size == (1, 8, 8) or remembered in (DIGITS, "torch/mnist", "mnist"):
        return datasets.load_dataset(DIGITS, record.input, "train").limit(count + judges, seed)
    return synthetic_photographs(record.input, count, seed)


def synthetic_photographs(spec: InputSpec, count: int, seed: int = 0) -> Images:
    """Make `count` images of `spec`'s size in [0, 1], multiples of 1/255, without classes;
    deterministic.

    One in four is 1/f noise, the others are dead leaves over such noise. Image number k does not
    depend on `count`.
    """
    raise_if(count < 1, DataError, f"a limit of {count} images leaves none")
    channels, height, width = spec.size
    scale = 2 if min(height, width) < _FINE else 1
    size = (channels, scale * height, scale * width)
    random = np.random.default_rng([seed, 0])
    bank = np.stack(
        [_noise(size, 1.0 + 0.6 * number / _TEXTURES, random) for number in range(_TEXTURES)]
    )
    pixels = np.empty((count, *spec.size), dtype=np.uint8)
    for number in range(count):
        random = np.random.default_rng([seed, 1, number])
        if number % 4 == 0:
            image = _noise(size, 1.0 + 0.5 * random.random(), random)
        else:
            image = bank[int(random.integers(len(bank)))].copy()
            _drop_leaves(image, bank, random)
        image = _blurred(image, int(random.integers(3)))
        if scale > 1:
            image = image.reshape(channels, height, scale, width, scale).mean((2, 4))
        pixels[number] = np.rint(255.0 * image.clip(0.0, 1.0))
    stored = torch.from_numpy(pixels)

    def fetch(positions: Sequence[int]) -> torch.Tensor:
        return stored[list(positions)].float().div_(255)

    return Images(
        name=PHOTOGRAPHS,
        split="made on the spot",
        classes=(),
        labels=torch.zeros(count, dtype=torch.long),
        indices=torch.arange(count),
        fetch=fetch,
    )


def hold_out(images: Images, share: int = 5, limit: int | None = None) -> tuple[Images, Images]:
    """Return (images to calibrate on, images held out), both in order.

    Every `share`-th image is held out, none of fewer than 2 * `share`; or more, so that at most
    `most` calibrate.
    """
    count = len(images)
    count_out = max(
        0 if count < 2 * share else -(-count // share), 0 if limit is None else count - limit
    )
    held_out = {row * count // count_out for row in range(count_out)}
    return images.select([row for row in range(count) if row not in held_out]), images.select(
        sorted(held_out)
    )


def _noise(size: tuple[int, int, int], slope: float, random: np.random.Generator) -> Array:
    """Return noise (c, h, w) of amplitude 1/f^slope, channels correlated as in daylight."""
    channels, height, width = size
    down = np.fft.fftfreq(height)[:, None]
    across = np.fft.rfftfreq(width)[None]
    frequency = np.sqrt(down * down + across * across)
    frequency[0, 0] = 1.0 / max(height, width)
    weight = (frequency**-slope).astype(np.float32)
    white = random.standard_normal(size, dtype=np.float32)
    shaped = np.fft.irfft2(np.fft.rfft2(white) * weight, s=(height, width)).astype(np.float32)
    shaped -= shaped.mean((1, 2), keepdims=True)
    shaped /= shaped.std((1, 2), keepdims=True) + 1e-12
    mixing = 0.35 * random.standard_normal((channels, channels)) + 0.6
    mixed = np.tensordot(mixing.astype(np.float32), shaped, 1)
    mixed /= mixed.std() + 1e-12
    level = 0.45 + 0.1 * random.standard_normal((channels, 1, 1))
    return (level + 0.22 * mixed).clip(0.0, 1.0).astype(np.float32)


def _blurred(image: Array, times: int) -> Array:
    """Convolve with [1 2 1] / 4 along both axes, `times` times."""
    for _ in range(times):
        padded = np.pad(image, [(0, 0), (1, 1), (1, 1)], mode="edge")
        rows = 0.25 * padded[:, :-2] + 0.5 * padded[:, 1:-1] + 0.25 * padded[:, 2:]
        image = 0.25 * rows[..., :-2] + 0.5 * rows[..., 1:-1] + 0.25 * rows[..., 2:]
    return image


def _drop_leaves(image: Array, bank: Array, random: np.random.Generator) -> None:
    """Draw ellipses and polygons on the image, the large ones first; radii follow a power law.

    Args:
        image: (c, h, w) float32, drawn on.
        bank: textures, (n, c, h, w) float32.
    """
    channels, height, width = image.shape
    side = min(height, width)
    radii = np.sort(random.pareto(1.2, int(random.integers(20, 200))) + 0.3)[::-1] * (side / 24)
    for radius in np.minimum(radii, 0.55 * side).tolist():
        x = random.uniform(-0.08, 1.08) * width
        y = random.uniform(-0.08, 1.08) * height
        angle = random.uniform(0.0, 2.0 * np.pi)
        tint = random.random(channels, dtype=np.float32)
        colour = random.random()
        share = random.uniform(0.2, 0.8)
        flat = random.uniform(0.4, 1.0)
        corners = int(random.integers(3, 8)) if random.random() < 0.5 else 0
        texture = bank[int(random.integers(len(bank)))]
        rows, columns = (
            slice(max(0, int(place - radius)), max(0, int(place + radius) + 2)) for place in (y, x)
        )
        pixels = image[:, rows, columns]
        if not pixels.size:
            continue
        down = (np.arange(height)[rows, None] - y) / radius
        across = (np.arange(width)[columns] - x) / radius
        inside = down**2 + across**2 <= 1
        if corners:  # each side cuts the disc
            for turn in random.uniform(0.0, 2.0 * np.pi, corners) + angle:
                inside &= np.cos(turn) * across + np.sin(turn) * down <= flat
        else:
            aside = (np.cos(angle) * down - np.sin(angle) * across) / flat
            inside = (np.cos(angle) * across + np.sin(angle) * down) ** 2 + aside**2 <= 1
        grey = tint.mean()
        tint = grey + colour * (tint - grey)  # most things are nearly grey
        leaf = share * tint[:, None, None] + (1 - share) * texture[:, rows, columns]
        np.copyto(pixels, leaf, where=inside)
