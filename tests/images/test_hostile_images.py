"""Small or endless files take little: sizes are known before a library allocates. Broken, hostile and
ambiguous files of folders are refused in one line.
"""

import json
import os
import shutil
import struct
import time
import tracemalloc
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from certcli.checkpoint.file import read_tensors
from certcli.checkpoint.record import InputSpec
from certcli.evaluation.records import read_records
from certcli.images import datasets, decoding
from certcli.images.decoding import Decoder
from certcli.images.folders import LARGEST_TABLE
from certcli.system.errors import CheckpointError, DataError
from certcli.system.reading import LARGEST_REPORT
from tests.helpers.commands import UNREADABLE, console

SPEC = InputSpec((1, 8, 8), (0.5,), (0.5,))


def webp(kind: bytes, width: int, height: int) -> bytes:
    """Return the first bytes of a WebP file of this size, and little more."""
    if kind == b"VP8X":
        body = b"\0" * 4 + (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    elif kind == b"VP8L":
        body = b"\x2f" + ((width - 1) | (height - 1) << 14).to_bytes(4, "little") + b"\0" * 8
    else:
        body = b"\0\0\0\x9d\x01\x2a" + struct.pack("<HH", width, height) + b"\0" * 8
    chunk = kind + struct.pack("<I", len(body)) + body
    return b"RIFF" + struct.pack("<I", len(chunk) + 4) + b"WEBP" + chunk


@pytest.mark.parametrize("kind", [b"VP8X", b"VP8L", b"VP8 "])
def test_a_webp_of_a_few_bytes_is_refused_before_pillow_opens_it(
    kind: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.webp"
    path.write_bytes(webp(kind, 16_383, 16_383))
    monkeypatch.setattr(Image, "open", lambda *_, **__: pytest.fail("Pillow opened it"))
    with pytest.raises(DataError, match=r"16383x16383.*more than"):
        Decoder(SPEC)(path)


@pytest.mark.parametrize("lossless", [False, True])
def test_the_size_of_a_webp_is_pillows(lossless: bool, tmp_path: Path) -> None:
    for size in ((1, 1), (8, 300), (16_383, 2)):
        path = tmp_path / "x.webp"
        Image.new("RGB", size, (9, 200, 3)).save(path, lossless=lossless)
        assert decoding._webp_size(path.read_bytes()[:30]) == size
    Image.new("RGBA", (7, 9), (9, 200, 3, 90)).save(path)
    assert decoding._webp_size(path.read_bytes()[:30]) == (7, 9)


@pytest.mark.parametrize("suffix", ["png", "bmp", "ppm", "tif"])
def test_every_format_has_the_limit(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Image.new("L", (30, 30)).save(tmp_path / f"x.{suffix}")
    monkeypatch.setattr(decoding, "MOST_PIXELS", 800)
    with pytest.raises(DataError, match="more than 800 pixels"):
        Decoder(SPEC)(tmp_path / f"x.{suffix}")


def test_a_table_of_a_terabyte_is_refused_unread(tmp_path: Path) -> None:
    Image.new("L", (8, 8)).save(tmp_path / "y.png")
    table = tmp_path / "labels.csv"
    for size, reason in ((2**40, "bytes"), (LARGEST_TABLE, "a line of")):
        with table.open("wb") as file:
            file.truncate(size)
        tracemalloc.start()
        with pytest.raises(DataError, match=reason):
            datasets.load_dataset(str(tmp_path), SPEC, "all")
        assert tracemalloc.get_traced_memory()[1] < 2**25
        tracemalloc.stop()


def test_a_table_of_excel_is_read(tmp_path: Path) -> None:
    Image.new("L", (8, 8)).save(tmp_path / "y.png")
    (tmp_path / "labels.csv").write_bytes(b"\xef\xbb\xbffile,class\r\ny.png,a\r\ny.png,b\r\n")
    assert datasets.load_dataset(str(tmp_path), SPEC, "all").labels.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("count", "labels", "reason"),
    [(3, [0, 1], "3 images and 2 labels"), (2, [0, 11], "labels up to 11"), (0, [], "no images")],
)
def test_files_of_mnist_that_contradict_each_other_get_a_sentence(
    count: int, labels: list[int], reason: str, tmp_path: Path
) -> None:
    folder = tmp_path / "MNIST" / "raw"
    folder.mkdir(parents=True)
    for part in ("train", "t10k"):
        images = struct.pack(">4i", 2051, count, 28, 28) + b"\0" * (784 * count)
        (folder / f"{part}-images-idx3-ubyte").write_bytes(images)
        text = struct.pack(">2i", 2049, len(labels)) + bytes(labels)
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(text)
    with pytest.raises(DataError, match=f"contradict each other: {reason}|no readable"):
        datasets.load_dataset("torch/mnist", SPEC, "test", tmp_path)


def test_threads_decode_no_more_pixels_together_than_one_image_may_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "MOST_PIXELS", 1000)
    for number in range(12):
        Image.new("L", (20, 20)).save(tmp_path / f"{number}.{'webp' if number % 3 == 0 else 'png'}")
    together: list[int] = []

    def read(path: Path) -> None:
        with decoding.opened_image(path) as image:
            image.load()
            together.append(decoding._decoding[0])
            time.sleep(0.01)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(read, sorted(tmp_path.iterdir())))
    assert max(together) == 800
    assert decoding._decoding == [0]


@pytest.mark.parametrize(
    ("pixels", "labels"),
    [
        (torch.zeros(2, 28, 28, dtype=torch.uint8), torch.tensor([float("nan"), 1.0])),
        (torch.zeros(2, 28, 28, dtype=torch.uint8), ["seven", "two"]),
        (torch.zeros(2, 28, 28, dtype=torch.uint8), torch.zeros(2, 3, dtype=torch.int64)),
        (torch.full((2, 28, 28), float("nan")), torch.tensor([7, 2])),
        ("images", torch.tensor([7, 2])),
    ],
)
def test_processed_files_of_mnist_hold_bytes_and_whole_numbers(
    tmp_path: Path, pixels: Any, labels: Any
) -> None:
    (tmp_path / "MNIST" / "processed").mkdir(parents=True)
    for name in ("training.pt", "test.pt"):
        torch.save((pixels, labels), tmp_path / "MNIST" / "processed" / name)
    with pytest.raises(DataError, match=r"contradict|no readable"):
        datasets.load_dataset("torch/mnist", SPEC, "test", tmp_path)


def test_a_sparse_file_of_mnist_is_refused_unread(tmp_path: Path) -> None:
    (tmp_path / "MNIST" / "raw").mkdir(parents=True)
    with (tmp_path / "MNIST" / "raw" / "t10k-images-idx3-ubyte").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(DataError, match="1,099,511,627,776 bytes"):
        datasets.load_dataset("torch/mnist", SPEC, "test", tmp_path)


def test_a_report_that_no_run_writes_is_refused_by_its_size(tmp_path: Path) -> None:
    """Each of its bytes would take five in memory."""
    with (tmp_path / "r.json").open("wb") as file:
        file.truncate(LARGEST_REPORT + 1)
    done = console("verify", tmp_path / "r.json")
    assert (done.code, "67,108,865 bytes, more than" in done.err) == (3, True)


def test_records_and_a_tensor_of_a_terabyte_are_refused_unread(tmp_path: Path) -> None:
    records = tmp_path / "r.jsonl"
    with records.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(DataError, match="1,099,511,627,776 bytes"):
        read_records(records, "certify")
    about = {"x": {"dtype": "F32", "shape": [2**38], "data_offsets": [0, 2**40]}}
    text = json.dumps(about).encode()
    checkpoint = tmp_path / "x.safetensors"
    with checkpoint.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + 2**40)
    with pytest.raises(CheckpointError, match="1024 GiB"):
        read_tensors(checkpoint)


GREY, COLOUR = InputSpec((1, 8, 8), (0.5,), (0.5,)), InputSpec((3, 8, 8), (0.5,) * 3, (0.5,) * 3)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder as the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("spec", [GREY, COLOUR], ids=["grey", "colour"])
@pytest.mark.parametrize("suffix", ["png", "tif", "pgm"])
def test_16_bits_a_pixel_are_scaled_not_clipped(here: Path, spec: InputSpec, suffix: str) -> None:
    """Clipped at 255, 20 digits had 80 % clean accuracy, not 95."""
    rows = np.linspace(0, 65535, 64).round().astype(np.uint16).reshape(8, 8)
    for name in ("a", "b"):
        (here / "d" / name).mkdir(parents=True)
        try:
            Image.fromarray(rows).save(here / "d" / name / f"x.{suffix}")
        except OSError:
            pytest.skip(f"this pillow writes no {suffix} of 16 bits")
    pixels, _ = datasets.load_dataset("d", spec, "all").tensors()
    expected = torch.from_numpy(rows.astype(np.float32) / 65535).expand(2, spec.size[0], 8, 8)
    assert float((pixels - expected).abs().max()) <= 1e-6  # float32 of values up to 1


def bomb(folder: Path) -> None:
    """A few bytes that describe 20,000 x 20,000 pixels."""
    bytes_ = bytearray((folder / "b" / "y.png").read_bytes())
    bytes_[16:24] = struct.pack(">II", 20_000, 20_000)
    bytes_[29:33] = struct.pack(">I", zlib.crc32(bytes_[12:29]))
    (folder / "a" / "x.png").write_bytes(bytes_)


def broken(folder: Path) -> None:
    good = folder / "b" / "y.png"
    (folder / "a" / "x.png").write_bytes(good.read_bytes()[:40])


def table(content: bytes) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        Image.new("L", (8, 8)).save(folder / "y.png")
        for name in ("a", "b"):
            shutil.rmtree(folder / name)
        (folder / "labels.csv").write_bytes(content)

    return spoil


def unreadable(kind: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        table(b"")(folder)
        (folder / "labels.csv").unlink()
        UNREADABLE[kind](folder / "labels.csv")

    return spoil


def split_with_a_lost_table(folder: Path) -> None:
    """Beside other folders, train and test are splits because of their tables."""
    for split in ("train", "test"):
        (folder / split).mkdir()
        (folder / split / "labels.csv").symlink_to("no-such-file")


POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(code-ran) (w) file\n"
FOLDERS: list[tuple[str, Callable[[Path], object], str]] = [
    ("fifo", lambda folder: os.mkfifo(folder / "a" / "x.png"), "x.png"),
    ("bomb", bomb, "x.png"),
    ("postscript", lambda folder: (folder / "a" / "x.png").write_bytes(POSTSCRIPT), "x.png"),
    ("broken link", lambda folder: (folder / "a" / "x.png").symlink_to("no-such-file"), "x.png"),
    # without its class, those after it would have other numbers
    (
        "a class: broken link",
        lambda folder: (folder / "aa").symlink_to("nothing"),
        "aa cannot be read",
    ),
    (
        "a class: circle of links",
        lambda folder: (folder / "aa").symlink_to("aa"),
        "aa cannot be read",
    ),
    ("a split's table: broken link", split_with_a_lost_table, "labels.csv"),
    (
        "unknown scale",
        lambda folder: Image.new("F", (8, 8), 1000.0).save(folder / "a" / "x.tif"),
        "white",
    ),
    ("truncated image", broken, "x.png"),
    ("unprintable class", lambda folder: (folder / "a").rename(folder / "\x1b[31m"), "print"),
    ("binary table", table(b"file,class\n\xff\xfe\x00,1\n"), "labels.csv"),
    ("NUL in table", table(b"file,class\ny\0.png,1\n"), ""),
    ("no columns", table(b""), "labels.csv"),
    ("short row", table(b"file,class\ny.png\n"), "labels.csv"),
    ("long row", table(b"file,class\ny.png,1,2,3\nz.png,1,2\n"), "z.png"),
    ("huge field", table(b"file,class\n" + b"x" * 200_000 + b",1\n"), "labels.csv"),
    ("outside", table(b"file,class\n../y.png,1\n"), "y.png"),
    ("absolute", table(b"file,class\n/dev/zero,1\n"), "zero"),
    *(
        (f"table: {kind}", unreadable(kind), "labels.csv")
        for kind in UNREADABLE
        if kind != "a folder"
    ),
    ("absent", table(b"file,class\nz.png,1\n"), "z.png"),
]


@pytest.mark.parametrize(("name", "spoil", "named"), FOLDERS, ids=[row[0] for row in FOLDERS])
def test_a_folder_of_images_is_refused_in_one_line(
    here: Path, name: str, spoil: Callable[[Path], object], named: str
) -> None:
    for number, part in enumerate(("a", "b")):
        (here / "d" / part).mkdir(parents=True)
        Image.new("L", (8, 8), 80 * number).save(here / "d" / part / "y.png")
    spoil(here / "d")
    with pytest.raises(DataError) as caught:
        datasets.load_dataset("d", GREY, "all").tensors()
    assert named in caught.value.message
    assert caught.value.message.isprintable()


def test_a_folder_that_cannot_be_read_is_not_an_empty_one(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images in a subfolder without permission would be missing in silence."""
    (here / "d" / "a" / "closed").mkdir(parents=True)
    Image.new("L", (8, 8)).save(here / "d" / "a" / "y.png")
    scandir = os.scandir

    def denied(path: Any = ".") -> Any:
        if Path(path).name == "closed":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises(DataError, match="Permission denied"):
        datasets.load_dataset("d", GREY, "all")
