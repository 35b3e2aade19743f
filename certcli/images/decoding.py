"""Image files are opened here: what they take is known before a library allocates it.

They become pixels of a network's input, ahead of their use, in threads; small ones once. Results do
not depend on it.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from certcli.checkpoint.record import InputSpec
from certcli.system.errors import DataError, Refused, one_line, raise_if
from certcli.system.reading import open_regular

LARGEST_RESIZED = 2**24
"""Pixels of an image after resizing its short side, before the crop."""
FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "PPM", "TIFF")
"""Formats that are tried, for any file name: Pillow would pass PostScript to an interpreter."""
MOST_PIXELS = 2**26
"""Pixels of a stored image, 67 million: some 270 MB where it is decoded to four bytes a pixel."""

_ROOM = threading.Condition()
_decoding = [0]
"""Pixels of the images that all threads decode at this moment: MOST_PIXELS at most."""
_WEBP_START = 30
"""Bytes of a WebP file up to the end of its size."""


@contextmanager
def opened_image(path: Path) -> Iterator[Image.Image]:
    """Open an image file whose pixels are not decoded yet.

    Raises:
        DataError: it is no file, or describes more than MOST_PIXELS pixels.
    """
    try:
        with open_regular(path) as file:
            start = file.read(_WEBP_START)
    except Refused as refusal:
        raise DataError(f"{path} cannot be read: {refusal}", "remove it") from refusal
    size = _webp_size(start)
    # Pillow makes several canvases of a WebP file as it opens it, whatever its few bytes hold
    _require_size(path, size)
    with _in_turn(size), Image.open(path, formats=FORMATS) as image:
        _require_size(path, image.size)
        if size == (0, 0):
            with _in_turn(image.size):
                yield image
        else:
            yield image


@contextmanager
def _in_turn(size: tuple[int, int]) -> Iterator[None]:
    """Wait until the image fits beside those that other threads decode, however many they are."""
    pixels = min(size[0] * size[1], MOST_PIXELS)
    with _ROOM:
        _ROOM.wait_for(lambda: _decoding[0] + pixels <= MOST_PIXELS)
        _decoding[0] += pixels
    try:
        yield
    finally:
        with _ROOM:
            _decoding[0] -= pixels
            _ROOM.notify_all()


def _require_size(path: Path, size: tuple[int, int]) -> None:
    raise_if(
        size[0] * size[1] > MOST_PIXELS,
        DataError,
        f"image {path}, {size[1]}x{size[0]}, has more than {MOST_PIXELS:,} pixels",
        "make it smaller, or remove it",
    )


def _webp_size(start: bytes) -> tuple[int, int]:
    """Return (width, height) of a WebP file by its first bytes, (0, 0) of any other file."""
    if start[:4] != b"RIFF" or start[8:12] != b"WEBP" or len(start) < _WEBP_START:
        return 0, 0
    kind = start[12:16]
    if kind == b"VP8X":
        width = int.from_bytes(start[24:27], "little") + 1
        return width, int.from_bytes(start[27:30], "little") + 1
    if kind == b"VP8L":
        bits = int.from_bytes(start[21:25], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if kind == b"VP8 ":
        width = int.from_bytes(start[26:28], "little") & 0x3FFF
        return width, int.from_bytes(start[28:30], "little") & 0x3FFF
    return 0, 0


def _pixel_transform(spec: InputSpec) -> Any:
    """Return timm's evaluation transform (resize, crop) without the normalisation, which the
    network holds.

    Its border, where the images have one, has the colour of the mean.
    """
    import certcli.system.compat  # noqa: F401

    # isort: split
    from timm.data import create_transform

    whole: Any = create_transform(
        input_size=spec.size,
        is_training=False,
        interpolation=spec.interpolation,
        crop_pct=spec.crop_pct,
        crop_mode=spec.crop_mode,
        mean=spec.mean,
        std=spec.std,
    )
    last = whole.transforms.pop()
    if type(last).__name__ != "Normalize":
        raise AssertionError("timm's transform ends in another step than the normalisation")
    return whole


class Decoder:
    """Read an image file, (c, h, w) in [0, 1]; DataError: broken, or of an unknown scale."""

    def __init__(self, spec: InputSpec) -> None:
        self.channels = spec.size[0]
        self.short_side = max(spec.size[1:]) / min(1.0, spec.crop_pct)
        self.transform = _pixel_transform(spec)
        grey = replace(spec, size=(1, *spec.size[1:]), mean=spec.mean[:1], std=spec.std[:1])
        self.grey = _pixel_transform(grey)

    def __call__(self, path: Path) -> Tensor:
        try:
            with opened_image(path) as image:
                short, long = sorted(image.size)
                raise_if(  # resizing its short side would make it huge
                    self.short_side**2 * long > LARGEST_RESIZED * short,
                    DataError,
                    f"image {path}, {image.height}x{image.width}, would be resized to more than {LARGEST_RESIZED:,} pixels",
                    "crop it, or remove it",
                )
                return self._pixels(image, path).clamp(0, 1)
        except DataError:
            raise
        except Exception as failure:  # decoders of hostile bytes raise errors of any type
            raise DataError(
                f"cannot read image {path} ({one_line(failure)})", "remove it, or fetch it again"
            ) from failure

    def _pixels(self, image: Image.Image, path: Path) -> Tensor:
        # 16 bits a pixel: Pillow's own conversion to 8 clips at 255
        if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
            scaled = Image.fromarray(np.asarray(image, dtype=np.float32) / np.float32(65535))
            return self.grey(scaled).expand(self.channels, -1, -1)
        raise_if(
            image.mode in ("I", "F"),
            DataError,
            f"image {path} has {image.mode} pixels, whose white is not known",
            "save it with 8 or 16 bits",
        )
        return self.transform(image.convert("L" if self.channels == 1 else "RGB"))


MOST = 8
"""Threads by default at most: beyond, decoders wait for memory."""

SMALL = 3 * 64 * 64
"""Entries of an image that is decoded once: for a small network, decoding would take a fifth of
each training step."""
ROOM = 1 << 28
"""Bytes for decoded images, beyond which they are decoded again."""


def usual_workers() -> int:
    """Return this process's share of the machine's cores, at most MOST."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    processes = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, min(MOST, cores // max(1, int(processes) if processes.isdecimal() else 1)))


class Ahead:
    """Images by position, (b, c, h, w) in the order of the positions; errors of `read` are raised
    when an image is fetched.

    Args:
        read: position -> one image (c, h, w).
        workers: Threads; 0 reads in the caller's thread.
    """

    def __init__(self, read: Callable[[int], Tensor], workers: int | None = None) -> None:
        self._read = read
        self.workers = usual_workers() if workers is None else workers
        self._pool: ThreadPoolExecutor | None = None
        self._waiting: dict[int, Future[Tensor]] = {}
        self._decoded: dict[int, Tensor] = {}
        self._room = ROOM

    def __call__(self, positions: Sequence[int]) -> Tensor:
        in_turn = self.workers == 0 or (len(positions) == 1 and positions[0] not in self._waiting)
        if not in_turn:
            self._start(positions)
        return torch.stack([self._image(position) for position in positions])

    def _image(self, position: int) -> Tensor:
        decoded = self._decoded.get(position)
        if decoded is not None:
            return decoded.float().div_(255)
        waiting = self._waiting.pop(position, None)
        image = self._read(position) if waiting is None else waiting.result()
        if image.numel() <= min(SMALL, self._room):
            decoded = (image * 255).round().to(torch.uint8)
            # not of 16 bits: its bytes are all of it
            if torch.equal(decoded.float().div_(255), image):
                self._decoded[position] = decoded
                self._room -= image.numel()
        return image

    def expect(self, positions: Sequence[int]) -> None:
        """Start reading exactly these images, in this order; drop all others."""
        if self.workers == 0:
            return
        expected = set(positions)
        for position in [position for position in self._waiting if position not in expected]:
            self._waiting.pop(position).cancel()
        self._start(positions)

    def _start(self, positions: Sequence[int]) -> None:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.workers, thread_name_prefix="certvit-images")
        for position in positions:
            if position not in self._waiting and position not in self._decoded:
                self._waiting[position] = self._pool.submit(self._read, position)
