"""Image files are opened here: what they take is known before a library allocates it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image

from certcli.system.errors import DataError, Refused
from certcli.system.reading import open_regular

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
    if size[0] * size[1] > MOST_PIXELS:
        raise DataError(
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
