"""Datasets: named, or a folder of class folders, as fixed-order batches of pixel images in [0, 1] with their indices."""

import csv
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate

from certcli.errors import DataError
from certcli.provenance import InputSpec
from certcli.schema import one_line

Batch = tuple[Tensor, Tensor, Tensor]
"""(indices (b,) int64, images (b, c, h, w) float32 in [0, 1], labels (b,) int64)"""

IMAGE_SUFFIXES = frozenset((".png", ".jpg", ".jpeg", ".bmp", ".webp", ".ppm", ".pgm", ".tif", ".tiff"))
VALIDATION_SHARE = 0.1
_SPLIT_SEED = 20260101  # fixed for ever: the validation images of a dataset must be the same in every run


@dataclass(frozen=True)
class Images:
    """Labelled images in a fixed order. `fetch(positions)` returns pixel images (b, c, h, w) in [0, 1]."""

    name: str
    split: str
    classes: tuple[str, ...]
    labels: Tensor
    indices: Tensor
    fetch: Callable[[Sequence[int]], Tensor]
    note: str = ""

    def __len__(self) -> int:
        return len(self.labels)

    def batches(self, batch_size: int) -> Iterator[Batch]:
        """All images once, in order. `indices` are positions in the whole split, whatever --limit selected."""
        for start in range(0, len(self), batch_size):
            positions = list(range(start, min(start + batch_size, len(self))))
            yield self.indices[positions], self.fetch(positions), self.labels[positions]

    def select(self, positions: Sequence[int]) -> "Images":
        """The images at these positions, in this order, keeping their indices."""
        chosen = list(positions)
        return replace(
            self,
            labels=self.labels[chosen],
            indices=self.indices[chosen],
            fetch=lambda asked: self.fetch([chosen[position] for position in asked]),
        )

    def limit(self, count: int | None, seed: int = 0) -> "Images":
        """A seeded, class-balanced sample of `count` images, in the order of the split."""
        if count is None or count >= len(self):
            return self
        if count < 1:
            raise DataError(f"a limit of {count} images leaves none")
        return self.select(sorted(_balanced(self.labels, count, seed)))

    def per_class(self, count: int, seed: int = 0) -> "Images":
        """`count` images of every class."""
        chosen: list[int] = []
        generator = torch.Generator().manual_seed(seed)
        for label in self.labels.unique().tolist():
            members = (self.labels == label).nonzero().flatten()
            chosen += members[torch.randperm(len(members), generator=generator)][:count].tolist()
        return self.select(sorted(chosen))

    @cached_property
    def digests(self) -> dict[int, str]:
        """Index of each image -> sha256 of its label and its pixels as fetched, the first 16 hex digits."""
        found: dict[int, str] = {}
        for indices, pixels, labels in self.batches(256):
            rows = pixels.detach().cpu().contiguous().numpy()
            for index, label, row in zip(indices.tolist(), labels.tolist(), rows, strict=True):
                head = f"{label}\0{row.dtype.str}\0{row.shape}\0"
                found[index] = hashlib.sha256(head.encode() + row.tobytes()).hexdigest()[:16]
        return found

    @cached_property
    def digest(self) -> str:
        """sha256 of these images: index, label and pixels of each, in order. The name of the dataset has no part in it."""
        lines = (f"{index} {digest}\n" for index, digest in self.digests.items())
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def tensors(self) -> tuple[Tensor, Tensor]:
        """All images and labels at once, for sets that fit in memory."""
        return torch.cat([images for _, images, _ in self.batches(1024)]), self.labels


def _balanced(labels: Tensor, count: int, seed: int) -> list[int]:
    """Positions of `count` images, the classes in turn, each class in a seeded random order."""
    generator = torch.Generator().manual_seed(seed)
    classes = labels.unique()
    queues = []
    # the classes in a random order too: of a set with one image a class, the first N would all be neighbours
    for label in classes[torch.randperm(len(classes), generator=generator)].tolist():
        members = (labels == label).nonzero().flatten()
        queues.append(members[torch.randperm(len(members), generator=generator)].tolist())
    chosen: list[int] = []
    depth = 0
    while len(chosen) < count:
        chosen += [queue[depth] for queue in queues if depth < len(queue)][: count - len(chosen)]
        depth += 1
    return chosen


def load(name: str, spec: InputSpec, split: str | None = None, data_dir: Path | None = None) -> Images:
    """A dataset by name or path, its images in the size that `spec` names.

    name: "digits" (embedded), "torch/mnist", "torch/cifar10", "torch/cifar100", "torch/fashion_mnist" (with `data_dir`),
    or a folder. split: train, val, test, or None for the one to evaluate on. DataError says what is missing.
    """
    if name == "digits":
        return _digits(spec, split or "test")
    if name.startswith("torch/"):
        return _torchvision(name, spec, split or "test", data_dir)
    try:
        folder = Path(name).resolve()  # a record keeps the folder's name, and "." has none
        if folder.is_dir():
            return _folder(folder, spec, split)
    except (OSError, ValueError) as failure:
        raise DataError(
            f"cannot read folder {one_line(name)} ({one_line(failure)})", "check name and permissions"
        ) from failure
    raise DataError(
        f"unknown dataset '{name}'",
        "a folder of class folders, 'digits', or torch/mnist, torch/fashion_mnist, torch/cifar10, torch/cifar100",
    )


def require_classes(images: Images, classes: int, class_names: Sequence[str] | None = None) -> Images:
    """The dataset with labels that mean the model's classes, or DataError.

    A folder of ImageNet synset names beside a 1,000-class model is mapped to the model's indices.
    """
    if classes == 1000 and len(images.classes) <= 1000 and all(_is_synset(name) for name in images.classes):
        mapping = _imagenet_indices(images.classes)
        return replace(
            images, labels=mapping[images.labels], note=_join(images.note, "synset folders mapped to ImageNet")
        )
    if len(images.classes) != classes:
        raise DataError(
            f"dataset '{images.name}' has {len(images.classes)} classes, the checkpoint's network has {classes}",
            "use the dataset it was trained for, or one with the same classes",
        )
    if class_names and not images.classes[0].isdigit() and tuple(class_names) != images.classes:
        raise DataError(f"dataset '{images.name}' has other class names than the checkpoint was trained on")
    return images


def _join(*notes: str) -> str:
    return "; ".join(note for note in notes if note)


def _is_synset(name: str) -> bool:
    return len(name) == 9 and name[0] == "n" and name[1:].isdigit()


def _imagenet_indices(synsets: Sequence[str]) -> Tensor:
    import certcli.compat  # noqa: F401

    # isort: split
    from timm.data import ImageNetInfo

    known = {synset: index for index, synset in enumerate(ImageNetInfo("imagenet-1k").label_names())}
    strange = [name for name in synsets if name not in known]
    if strange:
        raise DataError(f"folder '{strange[0]}' is not one of ImageNet's 1,000 synsets")
    return torch.tensor([known[name] for name in synsets])


def _in_memory(
    name: str, split: str, classes: Sequence[str], pixels: Tensor, labels: Tensor, scale: float, spec: InputSpec
) -> Images:
    """Integer pixels (n, c, h, w) in memory; `scale` is the pixel value of white."""
    fit, note = _resizer(tuple(pixels.shape[1:]), spec)
    return Images(
        name=name,
        split=split,
        classes=tuple(classes),
        labels=labels.long(),
        indices=torch.arange(len(labels)),
        fetch=lambda positions: fit(pixels[list(positions)].float() / scale),
        note=note,
    )


def _resizer(size: tuple[int, ...], spec: InputSpec) -> tuple[Callable[[Tensor], Tensor], str]:
    """The map from stored images to the network's input size, and a note when it is not the identity."""
    if size == spec.size:
        return (lambda images: images), ""
    channels, height, width = spec.size

    def fit(images: Tensor) -> Tensor:
        if images.shape[1] == 1 and channels > 1:
            images = images.repeat(1, channels, 1, 1)
        elif images.shape[1] > 1 and channels == 1:
            images = images.mean(dim=1, keepdim=True)
        elif images.shape[1] != channels:
            raise DataError(f"images of {images.shape[1]} channels do not fit a network of {channels}")
        resized = interpolate(images, (height, width), mode="bilinear", antialias=True, align_corners=False)
        return resized.clamp(0, 1)

    note = f"images of size {'x'.join(map(str, size))} were resized to {'x'.join(map(str, spec.size))}"
    return fit, note


def _split_training(labels: Tensor, split: str) -> Tensor:
    """Positions of the fixed 90 % (train) or 10 % (val) of a training set that has no validation split of its own."""
    count = max(1, round(VALIDATION_SHARE * len(labels)))
    validation = torch.zeros(len(labels), dtype=torch.bool)
    validation[_balanced(labels, count, _SPLIT_SEED)] = True
    return (validation if split == "val" else ~validation).nonzero().flatten()


def _require_split(name: str, split: str, known: Sequence[str]) -> None:
    if split not in known:
        raise DataError(f"dataset '{name}' has no split '{split}'", f"--split {' or '.join(known)}")


def _digits(spec: InputSpec, split: str) -> Images:
    """The embedded 1,797 digits; origin, licence and split in certcli/embedded/README.md."""
    _require_split("digits", split, ("train", "val", "test"))
    source = files("certcli").joinpath("embedded/digits.npz")
    with source.open("rb") as handle, np.load(handle, allow_pickle=False) as stored:
        chosen = stored["split"] == ("train", "val", "test").index(split)
        pixels = torch.from_numpy(stored["images"][chosen]).unsqueeze(1)
        labels = torch.from_numpy(stored["labels"][chosen])
    return _in_memory("digits", split, [str(digit) for digit in range(10)], pixels, labels, 16.0, spec)


_TORCHVISION = {
    "torch/mnist": "MNIST",
    "torch/fashion_mnist": "FashionMNIST",
    "torch/kmnist": "KMNIST",
    "torch/cifar10": "CIFAR10",
    "torch/cifar100": "CIFAR100",
}


def _torchvision(name: str, spec: InputSpec, split: str, data_dir: Path | None) -> Images:
    """A torchvision dataset that lies in `data_dir`; nothing is downloaded."""
    if name not in _TORCHVISION:
        raise DataError(f"unknown dataset '{name}'", f"one of: {', '.join(_TORCHVISION)}")
    _require_split(name, split, ("train", "val", "test"))
    if data_dir is None:
        raise DataError(f"dataset '{name}' needs --data-dir", "the folder that holds torchvision's files")
    import certcli.compat  # noqa: F401

    # isort: split
    import torchvision

    try:
        stored: Any = getattr(torchvision.datasets, _TORCHVISION[name])(
            root=str(data_dir), train=split != "test", download=False
        )
    except Exception as failure:  # torchvision's readers of broken files raise whatever their parsing trips over
        raise DataError(
            f"no readable {_TORCHVISION[name]} files in {data_dir} ({one_line(failure)})",
            f"--data-dir names the folder that holds {_TORCHVISION[name]}'s own folder",
        ) from failure
    pixels = torch.as_tensor(stored.data)
    pixels = pixels.unsqueeze(1) if pixels.dim() == 3 else pixels.permute(0, 3, 1, 2)
    images = _in_memory(name, split, stored.classes, pixels, torch.as_tensor(stored.targets), 255.0, spec)
    if split == "test":
        return images
    chosen = images.select(_split_training(images.labels, split).tolist())
    return replace(chosen, indices=torch.arange(len(chosen)))


def _folder(folder: Path, spec: InputSpec, split: str | None) -> Images:
    """A folder of class folders, or one that holds train/, val/, test/ of such folders; named as the folder itself is."""
    return replace(_part_of_folder(folder, spec, split), name=folder.resolve().name)


def _part_of_folder(folder: Path, spec: InputSpec, split: str | None) -> Images:
    parts = [part for part in ("train", "val", "test") if (folder / part).is_dir()]
    if (folder / "validation").is_dir() and "val" not in parts:
        parts.append("validation")
    if not parts:
        whole = _class_folder(folder, spec, split or "all")
        if split in (None, "all"):
            return whole
        _require_split(folder.name, split, ("all", "train", "val"))
        return whole.select(_split_training(whole.labels, split).tolist())
    wanted = split or ("test" if "test" in parts else parts[-1])
    if wanted == "val" and "validation" in parts:
        wanted = "validation"
    if wanted in parts and not (wanted == "train" and not {"val", "validation"} & set(parts)):
        return _class_folder(folder / wanted, spec, wanted)
    if wanted in ("train", "val") and "train" in parts:
        whole = _class_folder(folder / "train", spec, wanted)
        return whole.select(_split_training(whole.labels, wanted).tolist())
    _require_split(folder.name, wanted, parts)
    raise AssertionError("unreachable")


def _class_folder(folder: Path, spec: InputSpec, split: str) -> Images:
    listing = folder / "labels.csv"
    if listing.is_file() and not any(child.is_dir() for child in folder.iterdir()):
        paths, labels, classes = _listed(folder, listing)
    else:
        paths, labels, classes = _foldered(folder)
    strange = next((name for name in classes if not name.isprintable()), None)
    if strange is not None:
        raise DataError(f"{folder} has a class whose name does not print: {strange!a}", "rename it")
    decode = Decoder(spec)

    def fetch(positions: Sequence[int]) -> Tensor:
        return torch.stack([decode(paths[position]) for position in positions])

    return Images(folder.name, split, tuple(classes), torch.tensor(labels), torch.arange(len(paths)), fetch)


def _foldered(folder: Path) -> tuple[list[Path], list[int], list[str]]:
    classes = sorted(child.name for child in folder.iterdir() if child.is_dir() and not child.name.startswith("."))
    if not classes:
        raise DataError(f"{folder} holds no class folders", "one folder a class, its images inside")
    paths: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        found = sorted(_images_below(folder / name))
        if not found:
            raise DataError(f"class folder {folder / name} holds no images", "remove it, or put its images there")
        paths += found
        labels += [label] * len(found)
    return paths, labels, classes


def _images_below(folder: Path) -> Iterator[Path]:
    """Image files at any depth; OSError where a folder cannot be read: its images would be missing in silence."""

    def stop(failure: OSError) -> None:
        raise failure

    for parent, _, names in os.walk(folder, onerror=stop):
        for name in names:
            path = Path(parent, name)
            if path.suffix.lower() in IMAGE_SUFFIXES:
                if not path.is_file():
                    raise DataError(f"{path} is not a regular file", "remove it")
                yield path


def _listed(folder: Path, listing: Path) -> tuple[list[Path], list[int], list[str]]:
    """Images beside a labels.csv with a header, whose columns include a file name and a class (index or name)."""
    try:
        with listing.open(newline="", encoding="utf-8") as handle:
            rows = list(csv.DictReader(handle, restkey="", restval=""))
    except (UnicodeError, csv.Error) as failure:
        raise DataError(
            f"{listing} is not a table of text ({one_line(failure)})", "columns 'file' and 'class'"
        ) from failure
    columns = list(rows[0]) if rows else []
    name_column = next((c for c in columns if c.lower() in ("file", "filename", "path", "image", "name")), None)
    class_column = next((c for c in columns if c.lower() in ("synset", "wnid", "class", "label", "index")), None)
    if name_column is None or class_column is None:
        shown = one_line(", ".join(columns) or "none")
        raise DataError(f"{listing} needs the columns 'file' and 'class'", f"it has: {shown}")
    empty = next((row for row in rows if not row[name_column] or not row[class_column]), None)
    if empty is not None:
        raise DataError(f"{listing} has a row without file or class", f"line {rows.index(empty) + 2}")
    classes = sorted({row[class_column] for row in rows})
    paths = [folder / row[name_column] for row in rows]
    for row, path in zip(rows, paths, strict=True):
        if ".." in path.parts or Path(row[name_column]).is_absolute():
            raise DataError(f"{listing} names {one_line(row[name_column])}, which is not in its folder")
        if not path.is_file():
            raise DataError(f"{listing} names {one_line(path.name)}, which does not exist")
    return paths, [classes.index(row[class_column]) for row in rows], classes


def _pixel_transform(spec: InputSpec) -> Callable[[Image.Image], Tensor]:
    """timm's evaluation transform (resize, centre crop) up to pixels in [0, 1]: normalisation belongs to the network."""
    import certcli.compat  # noqa: F401

    # isort: split
    from timm.data import create_transform

    channels = spec.size[0]
    transform: Callable[[Image.Image], Tensor] = create_transform(
        input_size=spec.size,
        is_training=False,
        interpolation=spec.interpolation,
        crop_pct=spec.crop_pct,
        mean=(0.0,) * channels,
        std=(1.0,) * channels,
    )
    return transform


class Decoder:
    """An image file as pixels (c, h, w) in [0, 1]; DataError for what is no image, or has no known scale.

    Only the formats of IMAGE_SUFFIXES are tried, whatever the name says: Pillow would hand PostScript to an interpreter.
    """

    FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "PPM", "TIFF")

    def __init__(self, spec: InputSpec) -> None:
        self.channels = spec.size[0]
        self.transform = _pixel_transform(spec)
        self.grey = _pixel_transform(replace(spec, size=(1, *spec.size[1:])))

    def __call__(self, path: Path) -> Tensor:
        try:
            if not path.is_file():
                raise DataError(f"{path} is not a regular file", "remove it")
            with Image.open(path, formats=self.FORMATS) as image:
                return self._pixels(image, path).clamp(0, 1)
        except DataError:
            raise
        except Exception as failure:  # decoders of hostile bytes raise anything; a decompression bomb has its own error
            raise DataError(
                f"cannot read image {path} ({one_line(failure)})", "remove it, or fetch it again"
            ) from failure

    def _pixels(self, image: Image.Image, path: Path) -> Tensor:
        # 16 bits a pixel: Pillow's own conversion to 8 clips at 255
        if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
            scaled = Image.fromarray(np.asarray(image, dtype=np.float32) / np.float32(65535))
            return self.grey(scaled).expand(self.channels, -1, -1)
        if image.mode in ("I", "F"):
            raise DataError(
                f"image {path} has {image.mode} pixels, whose white is not known", "save it with 8 or 16 bits"
            )
        return self.transform(image.convert("L" if self.channels == 1 else "RGB"))
