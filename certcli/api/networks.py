"""Networks and images of Python: opened, written, told apart; arrays, tensors, loaders and
generators become `Images`.
"""

import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from certcli.api import arguments, door
from certcli.checkpoint.file import Checkpoint
from certcli.checkpoint.record import Record
from certcli.images import datasets
from certcli.images.labelled import Images
from certcli.models import build, in_memory, open, origins
from certcli.models.pixels import PixelModel
from certcli.models.weights import require_classifier, require_features
from certcli.system.errors import DataError, UsageError, one_line, plain_text
from certcli.system.memory import free_bytes

Network = nn.Module | ExportedProgram | str | Path | Checkpoint
Data = Any
"""A str, Images, or what `images_of` takes: arrays, tensors, loaders, data sets, generators."""
Labels = Any
"""None, or (n,) whole numbers: a tensor, an array or a sequence."""


@door.speaks_python
def load(
    source: Network,
    *,
    mean: in_memory.Statistics | None = None,
    std: in_memory.Statistics | None = None,
    input_size: tuple[int, int, int] | None = None,
    arch: str | None = None,
    arch_args: Mapping[str, Any] | None = None,
    as_stated: bool = False,
    weights: str | None = None,
    features: bool = False,
    image_size: int | None = None,
) -> build.OpenCheckpoint:
    """Open a network; its modules are built or copied once. Doubts on reading are warnings.

    Args:
        source: A module in memory, a file, a folder, a timm or `hf-hub:` name.
        mean, std: Pixel statistics, one value or one a channel, where the source has none.
        input_size: (c, h, w), for a module without a timm configuration.
        arch, arch_args: Name and arguments of the architecture, for a file without a record.
        as_stated: Believe `arch_args` and config.json where the tensors fit another network too.
        weights: "raw", "ema" or a key: the weights to read of a file that holds several.
        features: The network has no classifier; `bound` and `slope` are then those of its features.
        image_size: Side of the images, and of the pixels in which radii are measured, where it is
            not the network's own: its first layer resizes them.
    """
    about_files = {
        "arch": arch,
        "arch_args": arch_args,
        "as_stated": as_stated or None,
        "weights": weights,
    }
    about_modules = {
        "mean": mean,
        "std": std,
        "input_size": input_size,
        "features": features or None,
    }
    if isinstance(source, Checkpoint):
        arguments.require_option_names(
            arguments.names_with_values(about_files | about_modules), (), "load of an open network"
        )
        return open.perturbed_at(build.with_network(source), image_size)
    if isinstance(source, ExportedProgram):
        source = source.module()
    if isinstance(source, nn.Module):
        arguments.require_option_names(
            arguments.names_with_values(about_files), about_modules, "load of a module"
        )
        opened = in_memory.open_module(source, mean, std, input_size, features=features)
        return open.perturbed_at(opened, image_size)
    if input_size is not None:
        raise UsageError(
            "the input_size of a file is that of its architecture", "arch_args={'img_size': 224}"
        )
    hints = origins.Hints(
        arch,
        arch_args or {},
        in_memory.statistics_per_channel(mean),
        in_memory.statistics_per_channel(std),
        as_stated,
        weights,
        features,
        image_size=image_size,
    )
    opened = open.open_checkpoint(str(source), hints)
    if features:
        require_features(opened, str(source))
    for doubt in opened.reading.doubts:
        warnings.warn(plain_text(arguments.in_python(doubt)), stacklevel=3)
    return opened


@door.speaks_python
def save(checkpoint: Checkpoint, path: str | Path, *, force: bool = False) -> None:
    """Write a checkpoint atomically; replace an existing file only with `force`."""
    if checkpoint.record.arch.startswith(in_memory.PREFIX):
        raise UsageError(
            "a module in memory has no architecture that a file could name",
            "torch.save its state_dict, and load the file with arch=... if timm can build it",
        )
    checkpoint.write(Path(path), force)


@door.speaks_python
def history(source: Network) -> Record:
    """Return the unverified record: architecture, input, surgery, lineage, evidence."""
    return load(source).record


@door.speaks_python
def network(source: Network, *, double: bool = False, device: str = "cpu") -> PixelModel:
    """Return the network in eval mode, pixels in [0, 1] -> logits; its first layer normalises."""
    return (build.load_double if double else build.load)(load(source), torch.device(device))


@door.speaks_python
def images(
    source: Network,
    dataset: str,
    *,
    split: str | None = None,
    limit: int | None = None,
    seed: int = 0,
    data_dir: str | Path | None = None,
) -> Images:
    """Return images of a dataset in the network's input size, labelled where they can be."""
    return dataset_images(
        load(source).record, dataset, split, None if data_dir is None else Path(data_dir)
    ).limit(limit, seed)


def open_classifier(source: Network) -> build.OpenCheckpoint:
    """Open a network; ArchitectureError where it ends in features."""
    checkpoint = load(source)
    require_classifier(checkpoint, "the network")
    return checkpoint


def judged_images(
    checkpoint: build.OpenCheckpoint, images: Data, labels: Labels, *, labelled: bool = True
) -> Images:
    """Return the images; warn where the file's own program answers otherwise on them."""
    chosen = images_from(checkpoint.record, images, labels, labelled=labelled)
    for doubt in checkpoint.differences(pixels for _, pixels, _ in chosen.batches(32)):
        warnings.warn(plain_text(arguments.in_python(doubt)), stacklevel=3)
    return chosen


_MEMORY = 0.5
"""Share of the free memory that images from a generator may take."""
_IMAGE_KEYS = ("pixel_values", "image", "images", "img")
_LABEL_KEYS = ("labels", "label", "target", "targets")
_KNOWN = "an array or tensor (n, c, h, w), batches of (images, labels), or the name of a dataset"


def dataset_images(
    record: Record, dataset: str, split: str | None = None, folder: Path | None = None
) -> Images:
    """Return images of a dataset by name, or in a folder, that fit the record's network."""
    images = datasets.load_dataset(dataset, record.input, split, folder)
    if not record.classes:
        return images
    return datasets.require_classes(images, record.classes, record.class_names)


def images_from(record: Record, data: Any, labels: Any, *, labelled: bool = True) -> Images:
    """Return images that fit the record's network, with labels; zeros where none are needed.

    Args:
        data: `Images`, the name of a dataset, an array or tensor (n, c, h, w), one image (c, h, w),
            a pair (images, labels), or an iterable of images, batches, or pairs of them with
            labels: a list, DataLoader, Dataset or generator.
        labels: (n,), beside images that do not bring their own.

    Raises:
        DataError: images or labels do not fit the network, or are no images.
        UsageError: there are labels beside images that have their own.
    """
    if isinstance(data, (Images, str)):
        if labels is not None:
            raise UsageError("these images have labels of their own", "leave out labels")
        return dataset_images(record, data) if isinstance(data, str) else data
    pixels, labels = _collected(data, labels)
    pixels = _fitting_images(pixels, tuple(record.input.size))
    if labels is None and labelled:
        raise DataError(
            "images without labels",
            "give the labels (n,) beside them: only correct images are certified",
        )
    classes = max(record.classes, 1)
    answers = torch.zeros(len(pixels)) if labels is None else _array(labels, "labels")
    answers = _fitting_labels(answers, len(pixels), classes)
    names = record.class_names or tuple(str(number) for number in range(record.classes))
    return Images(
        "tensors",
        "given",
        names,
        answers,
        torch.arange(len(answers)),
        lambda positions: pixels[list(positions)],
    )


def _collected(data: Any, labels: Any) -> tuple[Tensor, Any]:
    """Return one tensor of images, and the labels beside them or among them."""
    if isinstance(data, (Tensor, np.ndarray)):
        return _array(data, "images"), labels
    data = [data] if _is_item(data) else data
    indexed = hasattr(data, "__len__") and hasattr(data, "__getitem__")
    if isinstance(data, bytes) or not (hasattr(data, "__iter__") or indexed):
        raise DataError(f"{arguments.shown_value(data)} holds no images", _KNOWN)
    batches: list[Tensor] = []
    answers: list[Tensor] = []
    room = _MEMORY * free_bytes()
    for pixels, batch_labels in _image_batches(data):
        batches.append(pixels)
        if batch_labels is not None:
            answers.append(batch_labels)
        room -= pixels.nbytes
        if room < 0:
            raise DataError(
                "the images do not fit into memory together",
                "pass a part of them, or the name of a dataset",
            )
    if not batches:
        raise DataError("there are no images: the iterable is empty", "a generator is read once")
    if any(one.shape[1:] != batches[0].shape[1:] for one in batches):
        raise DataError("the images have several sizes", _KNOWN)
    if not answers:
        return torch.cat(batches), labels
    if labels is not None:
        raise DataError(
            "labels are passed twice, beside the images and with them", "pass them once"
        )
    if len(answers) != len(batches):
        raise DataError("some of the images come without labels", _KNOWN)
    return torch.cat(batches), torch.cat(answers)


def _image_batches(batches: Any) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield images (b, c, h, w) and labels (b,) of each item."""
    items = (
        batches if hasattr(batches, "__iter__") else map(batches.__getitem__, range(len(batches)))
    )
    for item in items:
        image, label = _image_and_label(item)
        pixels = _array(image, "images")
        single = pixels.dim() == 3
        answers = None if label is None else _array(label, "labels")
        if single:
            pixels = pixels[None]
            answers = None if answers is None else answers.reshape(1, -1).squeeze(1)
        yield pixels, answers


def _image_and_label(item: Any) -> tuple[Any, Any]:
    """Return image and label of an item of a loader, None where it has no label.

    A dictionary (of `datasets`, transformers) has one entry of each kind, or is refused.
    """
    if isinstance(item, Mapping):
        images, labels = ([k for k in item if k in keys] for keys in (_IMAGE_KEYS, _LABEL_KEYS))
        if len(images) != 1 or len(labels) > 1:
            names = one_line(", ".join(map(str, item)))[:120]
            raise DataError(
                f"a dictionary of {names} is no pair of images and labels",
                "pass pairs: ((batch['pixel_values'], batch['labels']) for batch in loader)",
            )
        return item[images[0]], item[labels[0]] if labels else None
    if not isinstance(item, (tuple, list)) or not item or not _holds_image(item[0]):
        pair = isinstance(item, (tuple, list)) and len(item) == 2
        is_pair = pair and isinstance(item[0], (Tensor, np.ndarray))
        return (item[0], item[1]) if is_pair else (item, None)
    if len(item) > 2:
        raise DataError(
            f"an item of {len(item)} parts is no pair of images and labels",
            "pass pairs: ((item[0], item[1]) for item in loader), if these are images and labels",
        )
    return item[0], item[1] if len(item) == 2 else None


def _is_item(data: Any) -> bool:
    """Whether this is one item of a loader: a dictionary, an image of PIL, images and their labels."""
    if isinstance(data, (tuple, list)):
        return len(data) > 1 and _holds_image(data[0]) and not _holds_image(data[1])
    return isinstance(data, Mapping) or _of_pil(data)


def _holds_image(value: Any) -> bool:
    array = isinstance(value, (Tensor, np.ndarray))
    return (array and value.ndim >= 3) or _of_pil(value)


def _of_pil(value: Any) -> bool:
    return type(value).__module__.startswith("PIL.")


def _array(value: Any, what: str) -> Tensor:
    """Return a tensor on the CPU of what holds numbers."""
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, (list, tuple)) and value and _of_pil(value[0]):
        value = value[0]
    if isinstance(value, (str, bytes, Mapping)) or _of_pil(value):
        hint = (
            "transform=torchvision.transforms.ToTensor() in the data set, or ToTensor()(image)"
            if what == "images"
            else "integers"
        )
        raise DataError(
            f"{what} are a tensor or an array, not {arguments.shown_value(value)}", hint
        )
    try:
        array = np.ascontiguousarray(value)
        return torch.as_tensor(array.astype(array.dtype.newbyteorder("="), copy=False))
    except (TypeError, ValueError, RuntimeError) as failure:
        raise DataError(
            f"{what} are a tensor or an array, not {arguments.shown_value(value)}", _KNOWN
        ) from failure


def _fitting_images(pixels: Tensor, size: tuple[int, ...]) -> Tensor:
    """Return float32 images (n, c, h, w) in [0, 1] of the network's size."""
    pixels = pixels[None] if pixels.dim() == 3 and tuple(pixels.shape) == size else pixels
    if pixels.dim() != 4 or tuple(pixels.shape[1:]) != size or not len(pixels):
        turned = pixels.dim() == 4 and tuple(pixels.shape[1:]) == (*size[1:], size[0])
        hint = "channels come first: x.transpose(0, 3, 1, 2)" if turned else "(n, c, h, w), n > 0"
        raise DataError(
            f"images of shape {tuple(pixels.shape)} do not fit a network of {size}", hint
        )
    if not pixels.is_floating_point():
        hint = "x / 255, as floats: pixels lie in [0, 1], and the network normalises them itself"
        raise DataError(f"pixels of type {str(pixels.dtype).removeprefix('torch.')}", hint)
    pixels = pixels.float()
    if not bool(((pixels >= 0) & (pixels <= 1)).all()):
        normalised = bool((pixels < 0).any()) and bool((pixels.abs() < 20).all())
        hint = "leave Normalize out" if normalised else "divide by 255"
        hint = f"{hint}: the network normalises them itself"
        raise DataError("pixels must lie in [0, 1]", hint)
    return pixels


def _fitting_labels(labels: Tensor, count: int, classes: int) -> Tensor:
    """Return int64 labels (n,), each a class of the network."""
    if tuple(labels.shape) != (count,):
        one_hot = tuple(labels.shape) == (count, classes)
        raise DataError(
            f"labels of shape {tuple(labels.shape)} do not fit {count} images and {classes} classes",
            "y.argmax(1) of one-hot labels" if one_hot else f"({count},), one label an image",
        )
    whole = labels.real.long()
    wrong = (whole != labels) | (whole < 0) | (whole >= classes)
    if bool(wrong.any()):
        first = labels[wrong][0].item()
        cause = "is no whole number" if whole[wrong][0] != first else "is no class"
        raise DataError(
            f"label {first} {cause} of the network, which has {classes} classes",
            f"whole numbers from 0 to {classes - 1}",
        )
    return whole
