"""Arrays, tensors, loaders, data sets and generators become `Images`."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from certcli.api.arguments import shown_value
from certcli.checkpoint.record import Record
from certcli.images import datasets
from certcli.images.labelled import Images
from certcli.system.errors import DataError, UsageError, one_line
from certcli.system.memory import free_bytes

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
    if _is_array(data):
        return _array(data, "images"), labels
    data = [data] if _is_item(data) else data
    if isinstance(data, bytes) or not _iterable(data):
        raise DataError(f"{shown_value(data)} holds no images", _KNOWN)
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


def _image_batches(batches: Iterable[Any]) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield images (b, c, h, w) and labels (b,) of each item."""
    for item in _items(batches):
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
        is_pair = _is_pair(item) and _dimensions(item[0]) is not None
        return (item[0], item[1]) if is_pair else (item, None)
    if len(item) > 2:
        raise DataError(
            f"an item of {len(item)} parts is no pair of images and labels",
            "pass pairs: ((item[0], item[1]) for item in loader), if these are images and labels",
        )
    return item[0], item[1] if len(item) == 2 else None


def _items(data: Any) -> Iterator[Any]:
    """Yield the items of an iterable, or of a map-style data set with length and indices."""
    if hasattr(data, "__iter__"):
        yield from data
        return
    for number in range(len(data)):
        yield data[number]


def _iterable(data: Any) -> bool:
    return hasattr(data, "__iter__") or (hasattr(data, "__len__") and hasattr(data, "__getitem__"))


def _is_item(data: Any) -> bool:
    """Whether this is one item of a loader: a dictionary, an image of PIL, images and their labels."""
    if isinstance(data, (tuple, list)):
        return len(data) > 1 and _holds_image(data[0]) and not _holds_image(data[1])
    return isinstance(data, Mapping) or _of_pil(data)


def _holds_image(value: Any) -> bool:
    return (_dimensions(value) or 0) >= 3 or _of_pil(value)


def _of_pil(value: Any) -> bool:
    return type(value).__module__.startswith("PIL.")


def _is_array(value: Any) -> bool:
    return isinstance(value, (Tensor, np.ndarray))


def _is_pair(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and len(value) == 2


def _dimensions(value: Any) -> int | None:
    return value.ndim if _is_array(value) else None


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
        raise DataError(f"{what} are a tensor or an array, not {shown_value(value)}", hint)
    try:
        array = np.ascontiguousarray(value)
        return torch.as_tensor(array.astype(array.dtype.newbyteorder("="), copy=False))
    except (TypeError, ValueError, RuntimeError) as failure:
        raise DataError(
            f"{what} are a tensor or an array, not {shown_value(value)}", _KNOWN
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
