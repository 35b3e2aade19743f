"""Datasets by name or folder: images in [0, 1] of a network's input size, labels of its classes."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from certcli.checkpoint.record import InputSpec
from certcli.images.folders import load_folder, unlabelled
from certcli.images.labelled import Images, require_split, split_training
from certcli.images.names import DIGITS, PHOTOGRAPHS, TORCHVISION, order_note, require_named
from certcli.system.errors import DataError, one_line, raise_if

LARGEST_RAW = 2**28
"""Bytes of one of the files of the datasets like MNIST, of which the largest has 47 MB."""
SEEN_FROM = 32
"""Pixels a side from which on a photograph shows anything."""


def photographs_suit(spec: InputSpec) -> bool:
    """Return whether a network of this input can be asked about photographs."""
    return spec.size[0] == 3 and min(spec.size[1:]) >= SEEN_FROM


def load_dataset(
    name: str, spec: InputSpec, split: str | None = None, data_dir: Path | None = None
) -> Images:
    """Load a dataset by name or path, its images in the size of `spec`. DataError says what is
    missing.

    Args:
        name: "digits" and "photographs" (embedded, the latter without labels), "torch/mnist",
            "torch/cifar10", ... (with `data_dir`), or a folder.
        split: train, val, test, or None for the one to evaluate on.
    """
    require_named(name)
    if name == DIGITS:
        return _digits(spec, split or "test")
    if name == PHOTOGRAPHS:
        return _photographs(spec)
    if name in TORCHVISION:
        return _torchvision_images(name, spec, split or "test", data_dir)
    folder = Path(name).resolve()  # a record keeps the folder's name, and "." has none
    try:
        return load_folder(folder, spec, split)
    except (OSError, ValueError) as failure:
        raise DataError(
            f"cannot read folder {one_line(name)} ({one_line(failure)})",
            "check name and permissions",
        ) from failure


def require_classes(
    images: Images, classes: int, class_names: Sequence[str] | None = None
) -> Images:
    """Return the dataset with labels of the model's classes; DataError where they do not fit.

    Folders of ImageNet synset names are mapped to the indices of a 1,000-class model.
    """
    raise_if(
        images.unlabelled,
        DataError,
        f"the images of '{images.name}' have no labels",
        "one folder a class, or a labels.csv; audit, attack and certify need no labels",
    )
    mapping = imagenet_indices(images.classes) if classes == 1000 else None
    if mapping is not None:
        return replace(
            images,
            labels=mapping[images.labels],
            note="; ".join(filter(None, (images.note, "synset folders mapped to ImageNet"))),
        )
    raise_if(
        len(images.classes) != classes,
        DataError,
        f"dataset '{images.name}' has {len(images.classes)} classes, the checkpoint's network has {classes}",
        next(
            (part for part in images.note.split("; ") if "is not read" in part),
            "use the dataset it was trained for, or one with the same classes",
        ),
    )
    if not class_names or all(name.isdigit() for name in images.classes):
        notes = filter(None, (images.note, order_note(images.classes)))
        return replace(images, note="; ".join(notes))
    return _numbered_by_name(images, class_names)


def _numbered_by_name(images: Images, class_names: Sequence[str]) -> Images:
    """Return the images with the network's number for each class, by its name.

    Case, blanks, '-' and '_' do not count. DataError where a name is not the network's.
    """
    number_of = {_plain_name(name): number for number, name in enumerate(class_names)}
    strange = [name for name in images.classes if _plain_name(name) not in number_of]
    if strange or len(number_of) < len(class_names):
        shown = one_line(", ".join(class_names[:6]))[:120]
        raise DataError(
            f"dataset '{images.name}' has other class names than the network: "
            f"'{one_line(strange[0] if strange else images.classes[0])[:80]}' is not among {shown}"
            f"{', ...' if len(class_names) > 6 else ''}",
            f"name the folders by the network's classes, or by their numbers, 0 to {len(class_names) - 1}",
        )
    order = [number_of[_plain_name(name)] for name in images.classes]
    raise_if(
        len(set(order)) < len(order),
        DataError,
        f"dataset '{images.name}' has two classes of one name of the network",
    )
    if order == list(range(len(order))):
        return images
    names = sorted(images.classes, key=lambda name: number_of[_plain_name(name)])
    note = "labels are the network's numbers for the folders' names"
    return replace(
        images,
        classes=tuple(names),
        labels=torch.tensor(order)[images.labels],
        note="; ".join(filter(None, (images.note, note))),
    )


def _plain_name(name: str) -> str:
    return re.sub(r"[\s_-]+", " ", name.strip().casefold())


def imagenet_indices(names: Sequence[str]) -> Tensor | None:
    """Return ImageNet's indices of synsets (n01440764, ...), or None. DataError: unknown."""
    if len(names) > 1000 or not all(re.fullmatch(r"n\d{8}", name) for name in names):
        return None
    import certcli.system.compat  # noqa: F401

    # isort: split
    from timm.data import ImageNetInfo

    index_of = {
        synset: index for index, synset in enumerate(ImageNetInfo("imagenet-1k").label_names())
    }
    strange = [name for name in names if name not in index_of]
    if strange:
        raise DataError(f"folder '{strange[0]}' is not one of ImageNet's 1,000 synsets")
    return torch.tensor([index_of[name] for name in names])


def _images_in_memory(
    name: str,
    split: str,
    classes: Sequence[str],
    pixels: Tensor,
    labels: Tensor,
    scale: float,
    spec: InputSpec,
) -> Images:
    """Return images from integer pixels (n, c, h, w), whose white is `scale`."""
    fit, note = resizer(tuple(pixels.shape[1:]), spec)
    return Images(
        name=name,
        split=split,
        classes=tuple(classes),
        labels=labels.long(),
        indices=torch.arange(len(labels)),
        fetch=lambda positions: fit(pixels[list(positions)].float() / scale),
        note=note,
    )


def resizer(size: tuple[int, ...], spec: InputSpec) -> tuple[Callable[[Tensor], Tensor], str]:
    """Return the map from stored images to the input size, and a note unless it is identity."""
    if size == spec.size:
        return (lambda images: images), ""
    channels, height, width = spec.size

    def fit(images: Tensor) -> Tensor:
        if images.shape[1] == 1 and channels > 1:
            images = images.repeat(1, channels, 1, 1)
        elif images.shape[1] > 1 and channels == 1:
            images = images.mean(dim=1, keepdim=True)
        elif images.shape[1] != channels:
            raise DataError(
                f"images of {images.shape[1]} channels do not fit a network of {channels}"
            )
        resized = interpolate(
            images, (height, width), mode="bilinear", antialias=True, align_corners=False
        )
        return resized.clamp(0, 1)

    note = (
        f"images of size {'x'.join(map(str, size))} were resized to {'x'.join(map(str, spec.size))}"
    )
    return fit, note


def _digits(spec: InputSpec, split: str) -> Images:
    """Load the embedded 1,797 digits; origin, licence and split: certcli/embedded/README.md."""
    require_split("digits", split, ("train", "val", "test"))
    source = files("certcli").joinpath("embedded/digits.npz")
    with source.open("rb") as handle, np.load(handle, allow_pickle=False) as stored:
        chosen = stored["split"] == ("train", "val", "test").index(split)
        pixels = torch.from_numpy(stored["images"][chosen]).unsqueeze(1)
        labels = torch.from_numpy(stored["labels"][chosen])
    return _images_in_memory(
        "digits", split, [str(digit) for digit in range(10)], pixels, labels, 16.0, spec
    )


def _photographs(spec: InputSpec) -> Images:
    """Load the embedded photographs; origin and licences: certcli/embedded/README.md."""
    folder = Path(str(files("certcli").joinpath("embedded/photographs")))
    return unlabelled(PHOTOGRAPHS, "all", sorted(folder.glob("*.jpg")), spec)


def _torchvision_images(name: str, spec: InputSpec, split: str, data_dir: Path | None) -> Images:
    """Load a torchvision dataset from `data_dir`; nothing is downloaded."""
    require_split(name, split, ("train", "val", "test"))
    if data_dir is None:
        raise DataError(
            f"dataset '{name}' needs --data-dir", "the folder that holds torchvision's files"
        )
    import certcli.system.compat  # noqa: F401

    # isort: split
    import torchvision

    for path in (data_dir / TORCHVISION[name]).glob("*/*"):
        if path.stat().st_size > LARGEST_RAW:  # torchvision reads a file whole
            raise DataError(f"{path} has {path.stat().st_size:,} bytes", f"fetch {name} again")
    try:
        stored: Any = getattr(torchvision.datasets, TORCHVISION[name])(
            root=str(data_dir), train=split != "test", download=False
        )
    except Exception as failure:  # torchvision's readers of broken files raise errors of any type
        raise DataError(
            f"no readable {TORCHVISION[name]} files in {data_dir} ({one_line(failure)})",
            f"--data-dir names the folder that holds {TORCHVISION[name]}'s own folder",
        ) from failure
    _require_consistent_files(name, data_dir, stored.data, stored.targets, len(stored.classes))
    pixels = torch.as_tensor(stored.data)
    pixels = pixels.unsqueeze(1) if pixels.dim() == 3 else pixels.permute(0, 3, 1, 2)
    images = _images_in_memory(
        name, split, stored.classes, pixels, torch.as_tensor(stored.targets), 255.0, spec
    )
    if split == "test":
        return images
    chosen = images.select(split_training(images.labels, split).tolist())
    return replace(chosen, indices=torch.arange(len(chosen)))


def _require_consistent_files(
    name: str, data_dir: Path, stored: Any, labels: Sequence[int] | Tensor, classes: int
) -> None:
    """Raise DataError where a dataset's files disagree: torchvision reads each alone."""
    count = len(stored)
    try:
        numbers = torch.as_tensor(labels)
    except (TypeError, ValueError, RuntimeError):
        numbers = torch.empty(0)
    reason = ""
    if numbers.is_floating_point() or numbers.is_complex() or numbers.dim() != 1:
        reason = "labels that are no whole numbers"
    elif not isinstance(stored, (Tensor, np.ndarray)) or str(stored.dtype)[-5:] != "uint8":
        reason = "pixels that are no bytes"
    elif count != len(numbers):
        reason = f"{count:,} images and {len(numbers):,} labels"
    elif not count:
        reason = "no images"
    elif int(numbers.min()) < 0 or int(numbers.max()) >= classes:
        reason = f"labels up to {int(numbers.max())} of {classes} classes"
    raise_if(
        reason,
        DataError,
        f"the files of '{name}' in {data_dir} contradict each other: {reason}",
        "fetch them again, all of one version",
    )
