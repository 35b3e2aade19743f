"""Peak memory of certvit on small files that ask for much: `python -m benchmarks.floods [NAME ...]`.

Each flood is made in a folder of its own, given to a command in a child process, and deleted. The
table shows the bytes that the file takes on the disk, the exit code, the line of the error, the
child's peak memory and its seconds. The row `nothing` is a command on a sound file, of the same size
as the others without a flood.
"""

import argparse
import gzip
import json
import os
import pickle
import struct
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import torch
from PIL import Image
from safetensors.torch import save_file

Words = list[str]
Flood = Callable[[Path, Path], Words]
"""(an empty folder, a sound checkpoint) -> the words of the command, the hostile files made."""

LIPSCHITZ = ["lipschitz", "--no-estimate"]
FLOODS: dict[str, Flood] = {}


def flood(function: Flood) -> Flood:
    FLOODS[function.__name__.replace("_", " ")] = function
    return function


@flood
def nothing(folder: Path, sound: Path) -> Words:
    return [*LIPSCHITZ, str(sound)]


@flood
def table_of_a_terabyte_without_a_line(folder: Path, sound: Path) -> Words:
    Image.new("L", (8, 8)).save(folder / "y.png")
    with (folder / "labels.csv").open("wb") as file:
        file.truncate(2**40)
    return ["attack", str(sound), "--dataset", str(folder)]


@flood
def table_of_30000_classes(folder: Path, sound: Path) -> Words:
    Image.new("L", (8, 8)).save(folder / "y.png")
    lines = ["file,class", *(f"y.png,{number:05}" for number in range(30_000))]
    (folder / "labels.csv").write_text("\n".join(lines))
    return ["attack", str(sound), "--dataset", str(folder)]


@flood
def thirty_thousand_class_folders(folder: Path, sound: Path) -> Words:
    Image.new("L", (8, 8)).save(folder / "y.png")
    for number in range(30_000):
        place = folder / "data" / f"{number:05}"
        place.mkdir(parents=True)
        os.link(folder / "y.png", place / "y.png")
    return ["attack", str(sound), "--dataset", str(folder / "data")]


def _webp(width: int, height: int) -> bytes:
    body = b"\x2f" + ((width - 1) | (height - 1) << 14).to_bytes(4, "little") + b"\0" * 8
    chunk = b"VP8L" + struct.pack("<I", len(body)) + body
    return b"RIFF" + struct.pack("<I", len(chunk) + 4) + b"WEBP" + chunk


@flood
def webp_of_16383_squared(folder: Path, sound: Path) -> Words:
    for number in range(16):
        (folder / f"{number}.webp").write_bytes(_webp(16_383, 16_383))
    return ["predict", str(sound), str(folder)]


@flood
def webp_of_8192_squared_times_16(folder: Path, sound: Path) -> Words:
    for number in range(16):
        (folder / f"{number}.webp").write_bytes(_webp(8_192, 8_192))
    return ["predict", str(sound), str(folder)]


def _png(side: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    packer = zlib.compressobj(9)
    row = b"\0" * (3 * side + 1)
    data = b"".join(packer.compress(row) for _ in range(side)) + packer.flush()
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


@flood
def png_of_20000_squared(folder: Path, sound: Path) -> Words:
    (folder / "x.png").write_bytes(_png(20_000))
    return ["predict", str(sound), str(folder)]


@flood
def sixteen_png_of_8000_squared(folder: Path, sound: Path) -> Words:
    for number in range(16):
        (folder / f"{number}.png").write_bytes(_png(8_000))
    return ["predict", str(sound), str(folder)]


@flood
def jpeg_of_65500_squared(folder: Path, sound: Path) -> Words:
    Image.new("L", (16, 16)).save(folder / "x.jpg")
    data = bytearray((folder / "x.jpg").read_bytes())
    place = data.index(b"\xff\xc0") + 5
    data[place : place + 4] = struct.pack(">HH", 65_500, 65_500)
    (folder / "x.jpg").write_bytes(data)
    return ["predict", str(sound), str(folder)]


def _header(path: Path, about: object, size: int = 4) -> Words:
    text = json.dumps(about).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * size)
    return [*LIPSCHITZ, str(path)]


def _dimensions(folder: Path, count: int) -> Words:
    tensor = {"dtype": "F32", "shape": [1] * count, "data_offsets": [0, 4]}
    return _header(folder / "x.safetensors", {"x": tensor})


@flood
def header_of_1000_dimensions(folder: Path, sound: Path) -> Words:
    return _dimensions(folder, 1_000)


@flood
def header_of_100000_dimensions(folder: Path, sound: Path) -> Words:
    return _dimensions(folder, 100_000)


@flood
def header_of_a_million_tensors(folder: Path, sound: Path) -> Words:
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    return _header(folder / "x.safetensors", {str(number): empty for number in range(1_000_000)})


@flood
def header_nested_deeply(folder: Path, sound: Path) -> Words:
    text = b'{"x":' + b"[" * 10**6 + b"]" * 10**6 + b"}"
    (folder / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    return [*LIPSCHITZ, str(folder / "x.safetensors")]


@flood
def sparse_tensor_of_a_terabyte(folder: Path, sound: Path) -> Words:
    path = folder / "x.safetensors"
    _header(path, {"x": {"dtype": "F32", "shape": [2**38], "data_offsets": [0, 2**40]}}, 0)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + 2**40)
    return [*LIPSCHITZ, str(path)]


@flood
def pth_with_deflated_records(folder: Path, sound: Path) -> Words:
    torch.save({"x": torch.zeros(2**26)}, folder / "stored.pth")
    stored = zipfile.ZipFile(folder / "stored.pth")
    with zipfile.ZipFile(folder / "x.pth", "w", zipfile.ZIP_DEFLATED) as deflated:
        for name in stored.namelist():
            deflated.writestr(name, stored.read(name))
    (folder / "stored.pth").unlink()
    return [*LIPSCHITZ, str(folder / "x.pth")]


@flood
def pth_of_a_pickle_that_repeats(folder: Path, sound: Path) -> Words:
    content = b"\x80\x02" + b"]" + b"q\x00" + b"(" + b"h\x00" * 10**7 + b"e."
    with zipfile.ZipFile(folder / "x.pth", "w") as archive:
        archive.writestr("x/data.pkl", content)
        archive.writestr("x/version", "3\n")
    return [*LIPSCHITZ, str(folder / "x.pth")]


@flood
def numpy_header_of_a_terabyte(folder: Path, sound: Path) -> Words:
    text = b"{'descr': '<f8', 'fortran_order': False, 'shape': (137438953472,), }\n"
    (folder / "x.npy").write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text)
    return [*LIPSCHITZ, str(folder / "x.npy")]


@flood
def old_pickle_as_checkpoint(folder: Path, sound: Path) -> Words:
    (folder / "x.bin").write_bytes(pickle.dumps({"x": b"\0" * 2**20}))
    return [*LIPSCHITZ, str(folder / "x.bin")]


@flood
def mnist_of_a_terabyte(folder: Path, sound: Path) -> Words:
    (folder / "MNIST" / "raw").mkdir(parents=True)
    with (folder / "MNIST" / "raw" / "t10k-images-idx3-ubyte").open("wb") as file:
        file.truncate(2**40)
    return ["attack", str(sound), "--dataset", "torch/mnist", "--data-dir", str(folder)]


@flood
def mnist_of_a_gzip_bomb(folder: Path, sound: Path) -> Words:
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name in ("images-idx3", "labels-idx1"):
        with gzip.open(raw / f"t10k-{name}-ubyte.gz", "wb", 9) as file:
            for _ in range(256):
                file.write(b"\0" * 2**20)
    return ["attack", str(sound), "--dataset", "torch/mnist", "--data-dir", str(folder)]


def _config(folder: Path, text: bytes) -> Words:
    save_file({"head.weight": torch.zeros(2, 2)}, folder / "model.safetensors")
    (folder / "config.json").write_bytes(text)
    return [*LIPSCHITZ, str(folder)]


@flood
def config_nested_deeply(folder: Path, sound: Path) -> Words:
    return _config(folder, b"[" * 10**7)


@flood
def config_of_200_megabytes(folder: Path, sound: Path) -> Words:
    return _config(folder, b'{"architecture": "' + b"x" * (200 * 2**20) + b'"}')


@flood
def report_of_200_megabytes(folder: Path, sound: Path) -> Words:
    (folder / "report.json").write_bytes(b'{"schema": 1, "why": "' + b"x" * (200 * 2**20) + b'"}')
    return ["verify", str(folder / "report.json"), str(sound)]


@flood
def records_with_a_line_of_a_terabyte(folder: Path, sound: Path) -> Words:
    with (folder / "r.jsonl").open("wb") as file:
        file.truncate(2**40)
    return ["verify", str(folder / "r.jsonl"), str(sound), "--dataset", "digits"]


_MEASURE = """
import json, os, subprocess, sys, time
started = time.perf_counter()
child = subprocess.Popen(sys.argv[1:], stdout=subprocess.DEVNULL)
_, status, usage = os.wait4(child.pid, 0)
print(json.dumps([os.waitstatus_to_exitcode(status), usage.ru_maxrss, time.perf_counter() - started]))
"""
"""A program between this process and the command: what a child counts as its peak begins with the
memory of the process that started it, and this one imports torch and makes the files."""


def _measured(words: Words) -> tuple[int, str, float, float]:
    """Return exit code, first line of the error, peak MB and seconds of a command."""
    command = [sys.executable, "-I", "-S", "-c", _MEASURE]
    result = subprocess.run(
        [*command, sys.executable, "-m", "certcli", *words], capture_output=True, text=True
    )
    code, peak, seconds = json.loads(result.stdout)
    errors = [line for line in result.stderr.splitlines() if line.startswith("certvit:")]
    return code, errors[0] if errors else "", peak / 1024, seconds


def _on_disk(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("floods", nargs="*", metavar="FLOOD", help=f"of: {', '.join(FLOODS)}")
    wanted = parser.parse_args().floods or list(FLOODS)
    if unknown := set(wanted) - set(FLOODS):
        parser.error(f"no such flood: {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory() as name:
        sound = Path(name) / "sound.safetensors"
        command = [sys.executable, "-m", "certcli", "init", "certvit_lip_mnist", "-o", str(sound)]
        subprocess.run([*command, "--quiet"], check=True, stdout=subprocess.DEVNULL)
        print("| flood | on disk, kB | code | peak, MB | seconds | answer |")
        print("|---|---|---|---|---|---|")
        for title in wanted:
            folder = Path(name) / title.replace(" ", "-")
            folder.mkdir()
            words = FLOODS[title](folder, sound)
            size = _on_disk(folder) // 1024
            code, said, peak, seconds = _measured(words)
            said = said.removeprefix("certvit: ").replace(str(folder), "")[:110]
            print(
                f"| {title} | {size:,} | {code} | {peak:.0f} | {seconds:.1f} | {said} |", flush=True
            )
            subprocess.run(["rm", "-r", str(folder)], check=True)


if __name__ == "__main__":
    main()
