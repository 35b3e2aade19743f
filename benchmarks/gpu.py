"""What each command takes on a GPU: seconds, memory of GPU and host, images a second. `make gpu`
runs it.

    python -m benchmarks.gpu [--arch vit_base_patch16_224] [--images 64] [--against-cpu]
        [--only NAME,...]

Every row is a command line as it would be typed, in a process of its own (the seconds hold its
start), on random weights and random images in files: neither decides the time, apart from what an
attack has to do. Memory of the GPU is what torch allocated at most, that of the host the largest
resident set. --against-cpu runs the rows that prove something on the CPU as well and compares them
record by record: bounds and radii within 1e-4, of every image the same class, the same pixels and
the same certificates at the radii asked about. Without the device nothing is measured, and it says
so.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image

CLASSES = 10
RADIUS = 0.01
"""At which shares are shown, and certificates must be the same."""
SAME = 1e-4
"""Relative, of bounds and radii: each norm is at most 5e-7 above the exact one, with another eigensolver on a GPU, and the
bound of a ViT is a product of some hundred norms."""
MEASURED = ("seconds",)
"""Of a record: what differs between any two runs."""


@dataclass(frozen=True)
class Row:
    """One command line. images: how many it judges or learns from; proves: whether a CPU must say
    the same.

    records: a file of one record an image, written where there is something to compare.
    """

    name: str
    words: tuple[str, ...]
    images: int = 0
    proves: bool = False
    records: str | None = None


@dataclass(frozen=True)
class Taken:
    """What a row took. gpu: bytes, None on a CPU. output: its JSON, where it gives one. records: by
    image, in order.
    """

    seconds: float
    gpu: int | None
    host: int
    output: dict
    records: tuple[dict, ...] = ()


def rows(count: int, batch: int) -> list[Row]:
    """The chain from a fresh network on, in an order in which each finds its input."""
    data = ("--dataset", "images", "--batch-size", str(batch))
    judged = (*data, "--limit", str(count), "--json", "-e", str(RADIUS))
    certify = ("certify", "plain.safetensors", *judged)
    return [
        Row("lipschitz", ("lipschitz", "plain.safetensors", "--json"), 0, True),
        Row(
            "audit",
            ("audit", "plain.safetensors", *judged, "--method", "lipschitz", "-a", "pgd-20"),
            count,
        ),
        Row(
            "adapt",
            ("adapt", "plain.safetensors", "--dataset", "images", "-o", "adapted.safetensors"),
            count,
        ),
        Row(
            "constrain",
            ("constrain", "adapted.safetensors", "--dataset", "images", "-o", "small.safetensors"),
            count,
        ),
        Row(
            "certify lipschitz",
            ("certify", "adapted.safetensors", *judged, "--method", "lipschitz"),
            count,
            True,
            "bound.jsonl",
        ),
        Row(
            "certify smoothing",
            (*certify, "--method", "smoothing", "--sigma", "0.25", "--samples", "1000"),
            count,
        ),
        Row("attack pgd-20", ("attack", "plain.safetensors", *judged, "-a", "pgd-20"), count),
        Row(
            "finetune, an epoch",
            (
                "finetune",
                "plain.safetensors",
                *data,
                "--loss",
                "ce",
                "--epochs",
                "1",
                "-o",
                "tuned.safetensors",
            ),
            count,
        ),
    ]


def make_images(folder: Path, side: int, count: int, channels: int) -> None:
    """Write noise into class folders of train/, val/ and test/, `count` images each."""
    generator = np.random.default_rng(0)
    for part in ("train", "val", "test"):
        for number in range(count):
            place = folder / part / f"class{number % CLASSES}"
            place.mkdir(parents=True, exist_ok=True)
            pixels = generator.integers(0, 256, (side, side, 3), dtype=np.uint8)
            Image.fromarray(pixels if channels == 3 else pixels[..., 0]).save(
                place / f"{number}.png"
            )


_RUN = """
import json, resource, sys
from certcli.cli.main import run
code = 0
try:
    run()
except SystemExit as end:
    code = end.code or 0
import torch
gpu = torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else None
host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
print(json.dumps({"gpu": gpu, "host": host}), file=open("taken.json", "w"))
sys.exit(code)
"""


def take(row: Row, folder: Path, device: str) -> Taken:
    """Run a row in `folder`. RuntimeError with the command's last words when it fails."""
    files = [] if row.records is None else ["--records", row.records]
    options = ["--force"] if files or "-o" in row.words else []
    words = [*row.words, "--quiet", "--device", device, *files, *options]
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", _RUN, *words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = time.perf_counter() - started
    if done.returncode:
        raise RuntimeError(
            f"certvit {' '.join(words)}: exit code {done.returncode}: {done.stderr.strip()[-400:]}"
        )
    about = json.loads((folder / "taken.json").read_text())
    output = json.loads(done.stdout) if "--json" in row.words else {}
    lines = [] if row.records is None else (folder / row.records).read_text().splitlines()[1:]
    return Taken(seconds, about["gpu"], about["host"], output, tuple(map(json.loads, lines)))


def disagreement(here: object, there: object, path: str = "") -> str | None:
    """The first place where two outputs differ by more than sums in another order; None when there
    is none.
    """
    if isinstance(here, dict) and isinstance(there, dict):
        if here.keys() != there.keys():
            return f"{path}: other fields"
        pairs = ((f"{path}.{key}", here[key], there[key]) for key in here if key not in MEASURED)
        return next(
            (
                difference
                for key, one, other in pairs
                if (difference := disagreement(one, other, key))
            ),
            None,
        )
    if isinstance(here, list) and isinstance(there, list) and len(here) == len(there):
        pairs = ((f"{path}[{number}]", one, there[number]) for number, one in enumerate(here))
        return next(
            (
                difference
                for key, one, other in pairs
                if (difference := disagreement(one, other, key))
            ),
            None,
        )
    if isinstance(here, float) and isinstance(there, float):
        return (
            None
            if here == there or abs(here - there) <= SAME * abs(there)
            else f"{path}: {here} and {there}"
        )
    return None if here == there else f"{path}: {here} and {there}"


def proven(taken: Taken) -> dict:
    """What a row proves: bounds, shares, and of every image whether it is certified. What was
    measured may differ.
    """
    names = ("upper", "log10_upper", "clean", "certified", "bound")
    values = {name: taken.output[name] for name in names if name in taken.output}
    return values | {
        "record": [{**row, "holds": float(row["radius"]) > RADIUS} for row in taken.records]
    }


def beside(here: Taken, there: Taken) -> str:
    """How much faster, and whether the same was proven: else how many records differ, and where
    first.
    """
    one = proven(here)
    other = proven(there)
    difference = disagreement(one, other)
    if difference is None:
        same = f"the same, {len(here.records)} records" if here.records else "the same"
    else:
        pairs = zip(one["record"], other["record"], strict=False)
        differing = sum(disagreement(*pair) is not None for pair in pairs)
        same = (
            f"{differing} of {len(here.records)} records differ, {difference}"
            if differing
            else difference
        )
    return f"{there.seconds / here.seconds:.1f} times faster, {same}"


def table(options: argparse.Namespace, folder: Path, device: str) -> list[str]:
    """The Markdown table of all rows, made in `folder`."""
    from certcli.cli.shared.inputs import parse_arguments
    from certcli.models import build

    arguments = {"num_classes": CLASSES, **parse_arguments(options.arch_arg)}
    net = build.create(options.arch, arguments, initialise=False)
    spec = build.spec_of(net, size=build.input_size_of(net))
    build.initialise(options.arch, arguments, spec, CLASSES, 0).write(
        folder / "plain.safetensors", force=True
    )
    make_images(folder / "images", spec.size[1], options.images, spec.size[0])
    name = torch.cuda.get_device_name() if device.startswith("cuda") else "CPU"
    lines = [
        f"{options.arch}, {name}, torch {torch.__version__}, {options.images} images of {spec.size[1]} x {spec.size[2]}, "
        f"batches of {options.batch_size}",
        "",
        "| command | seconds | images a second | GPU memory, GiB | host memory, GiB | beside the CPU |",
        "|---|---|---|---|---|---|",
    ]
    names = None if options.only is None else options.only.split(",")
    for row in rows(options.images, options.batch_size):
        if names is not None and row.name not in names:
            continue
        try:
            taken = take(row, folder, device)
            other = take(row, folder, "cpu") if options.against_cpu and row.proves else None
        except RuntimeError as failure:  # the rows after it still say something
            lines.append(f"| {row.name} | failed | | | | {failure} |")
            print(lines[-1], file=sys.stderr, flush=True)
            continue
        compared = "" if other is None else beside(taken, other)
        rate = f"{row.images / taken.seconds:.2f}" if row.images else ""
        gpu = "" if taken.gpu is None else f"{taken.gpu / 2**30:.2f}"
        lines.append(
            f"| {row.name} | {taken.seconds:.1f} | {rate} | {gpu} | {taken.host / 2**30:.2f} | {compared} |"
        )
        print(lines[-1], file=sys.stderr, flush=True)
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arch", default="vit_base_patch16_224")
    parser.add_argument("--arch-arg", action="append", default=[])
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--against-cpu", action="store_true")
    parser.add_argument(
        "--only", help="names of rows, comma-separated; each finds what those before it wrote"
    )
    options = parser.parse_args()
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        print("no CUDA device here: nothing was measured (--device cpu tries the rows on the CPU)")
        return 0
    with tempfile.TemporaryDirectory(prefix="certvit-gpu-") as folder:
        lines = table(options, Path(folder), options.device)
    print("\n".join(lines))
    return int(any("| failed |" in line for line in lines))


if __name__ == "__main__":
    sys.exit(main())
