"""From command-line words to objects: device, checkpoint, images, output path. Everything heavy is imported inside."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from certcli.system.errors import DataError, UsageError, one_line
from certcli.system.processes import local_rank, team

if TYPE_CHECKING:
    import torch

    from certcli.checkpoint.file import Checkpoint
    from certcli.checkpoint.record import Record
    from certcli.cli.shared.output import Sink
    from certcli.images.labelled import Images
    from certcli.models.hints import Hints


def pick_device(name: str) -> torch.device:
    """`auto` takes CUDA where there is one, else the CPU; of several processes each takes the GPU of its number.

    UsageError for a device that is not there.
    """
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and team().several:
        name = f"cuda:{local_rank()}"
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, ValueError) as failure:
        raise UsageError(f"no device '{name}' here", "--device auto, cpu, cuda, cuda:1, mps") from failure
    return device


def return_large_blocks() -> None:
    """Ask glibc to hand blocks of 4 MiB and more back at once, where there is a glibc.

    By default it keeps freed matrices for later: an audit of ViT-B then peaks at twice its file, with this at 1.4 times.
    """
    import ctypes
    import sys

    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).mallopt(-3, 4 * 2**20)  # M_MMAP_THRESHOLD


def hints(
    arch: str | None,
    arch_args: list[str],
    mean: str | None,
    std: str | None,
    norm_eps: float | None = None,
    as_stated: bool = False,
    weights: str | None = None,
) -> Hints:
    from certcli.models.hints import Hints

    arguments = parse_arguments(arch_args) | ({} if norm_eps is None else {"norm_eps": norm_eps})
    return Hints(arch, arguments, _floats("--mean", mean), _floats("--std", std), as_stated, _weights(weights))


def _weights(given: str | None) -> Literal["raw", "ema"] | None:
    if given not in (None, "raw", "ema"):
        raise UsageError(f"--weights {given}: raw or ema")
    return given  # type: ignore[return-value]


def parse_arguments(pairs: list[str]) -> dict[str, Any]:
    """key=value strings, the value as JSON where it is JSON."""
    import json

    found: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not key:
            raise UsageError(f"'{one_line(pair)[:80]}' is not KEY=VALUE")
        try:
            found[key] = json.loads(text)
        except (ValueError, RecursionError):
            found[key] = text
    return found


def _floats(option: str, text: str | None) -> tuple[float, ...] | None:
    if text is None:
        return None
    try:
        return tuple(float(part) for part in text.replace(",", " ").split())
    except ValueError as failure:
        raise UsageError(
            f"{option} '{text}' is not a list of numbers", f"{option} 0.5 or {option} 0.48,0.45,0.41"
        ) from failure


def default_output(source: str, command: str, shards: bool = False) -> Path:
    """<stem>.<command>.safetensors beside the source; in the current folder for a network that is named, not read.

    shards: the index of several files.
    """
    from certcli.checkpoint.shards import ENDING, stem

    path, ending = Path(source), ENDING if shards else ".safetensors"
    if path.is_dir():
        return path / f"model.{command}{ending}"
    parent = path.parent if path.exists() else Path()
    return parent / f"{stem(path).replace(':', '_').replace('/', '_')}.{command}{ending}"


def size_in_bytes(option: str, text: str) -> int:
    """\"500M\" or \"2G\" -> bytes: powers of 1024; 500MB and 2GB of 1000, as disks and the hub count."""
    number = text.upper().removesuffix("B")
    base = 1000 if text.upper().endswith("B") else 1024
    try:
        found = int(float(number.rstrip("KMG")) * base ** ("KMG".find(number[-1:]) + 1))
    except (ValueError, OverflowError):
        found = 0
    if found < 1:
        raise UsageError(f"{option} '{text}' is not a size", f"{option} 500M, or {option} 2G")
    return found


def evaluation_images(
    record: Record,
    dataset: str | None,
    data_dir: Path | None,
    split: str | None,
    limit: int | None,
    seed: int,
    sink: Sink,
) -> Images:
    """The images to judge a network by: --dataset, else the one it was trained on; with labels that fit its classes.

    Without --split, of a dataset that was trained on in part, those that training left out.
    """
    from certcli.evaluation.seen import seen_by, trained_on
    from certcli.images import datasets

    name = dataset or record.dataset
    if name is None:
        raise DataError(
            "no --dataset given, and the checkpoint does not say what it was trained on", "--dataset digits"
        )

    def load(split: str | None) -> Images:
        return datasets.require_classes(
            datasets.load(name, record.input, split, data_dir), record.classes, record.class_names
        )

    images = load(split)
    if split is None and images.split in ("train", "all") and trained_on(seen_by(record), images):
        whole, images = images, load("val")
        sink.note(
            f"images: the {len(images)} of {len(whole)} that training left out (val); --split {whole.split} takes all"
        )
    if images.note:
        sink.note(images.note)
    if dataset is None:
        sink.note(f"images: {images.name} ({images.split}), which the checkpoint was trained on")
    chosen = images.limit(limit, seed)
    doubt_images(chosen, record, sink)
    return chosen


def doubt_images(images: Images, record: Record, sink: Sink) -> None:
    """Say why these images may say little about this network."""
    from certcli.evaluation.doubts import image_doubts

    for doubt in image_doubts(images, record.input.size[0]):
        sink.doubt(doubt)


def say_seen(record: Record, images: Images, sink: Sink) -> dict[str, Any]:
    """Say in the first line how many of these images the network was trained or calibrated on; for documents the same."""
    from certcli.evaluation.seen import doubts

    found, said = doubts(record, images)
    for doubt in said:
        sink.doubt(doubt, first=True)
    return found


def doubt_accuracy(share: float, images: Images, checkpoint: Checkpoint, sink: Sink) -> None:
    """Say it where the share of right answers is about chance, or far below what the record knows."""
    from certcli.evaluation.doubts import accuracy_doubts

    for doubt in accuracy_doubts(round(share * len(images)), len(images), checkpoint):
        sink.warn(doubt)


def calibration_images(
    record: Record, dataset: str | None, data_dir: Path | None, limit: int, seed: int, sink: Sink
) -> Images:
    """Images to calibrate on, labels unused; which default serves which network is `certcli.images.calibration`'s to say."""
    from certcli.images import calibration

    images = calibration.calibration_images(record, limit, seed, dataset, data_dir)
    if dataset is not None:
        origin = ""
    elif record.dataset in (images.name, f"torch/{images.name}"):
        origin = ", which the checkpoint was trained on"
    else:
        origin = ", by default: --dataset takes images like those it was trained on"
    sink.note(f"calibration images: {len(images)} of {images.name} ({images.split}){origin}")
    if images.note:
        sink.note(images.note)
    if dataset is None and record.dataset is not None and record.dataset not in (images.name, f"torch/{images.name}"):
        sink.warn(f"the checkpoint was trained on {record.dataset}, which is not found here: --dataset, --data-dir")
    return images


def say_wider(before: Checkpoint, after: Checkpoint, sink: Sink) -> None:
    """Say that what is written has wider numbers than what was read: networks are changed in float32, or float64."""
    old, new = ({str(t.dtype)[6:] for t in ckpt.tensors.values() if t.is_floating_point()} for ckpt in (before, after))
    if old - new:
        sink.note(f"written as {', '.join(sorted(new))}; the numbers that were read are {', '.join(sorted(old))}")


def remember_dataset(record: Record, images: Images) -> Record:
    """The record with the name of the dataset (never a path), and its class names where they are those of the network.

    Ten synset folders beside 1,000 classes name ten of them, at other numbers.
    """
    named = len(images.classes) == record.classes and not images.classes[0].isdigit()
    names = images.classes if named else None
    return replace(record, dataset=images.name, class_names=names)
