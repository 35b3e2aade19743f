"""Networks and images of Python: opened, written, told apart."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from certcli.api import arguments, data, errors
from certcli.api.door import speaks_python
from certcli.checkpoint.file import Checkpoint
from certcli.checkpoint.record import Record
from certcli.images.labelled import Images
from certcli.models import build, in_memory, origins
from certcli.models.build import OpenCheckpoint
from certcli.models.open import open_checkpoint, perturbed_at
from certcli.models.pixels import PixelModel
from certcli.models.weights import require_classifier, require_features
from certcli.system.errors import UsageError, plain_text

Network = nn.Module | ExportedProgram | str | Path | Checkpoint
Data = Any
"""A str, Images, or what `data.images_of` takes: arrays, tensors, loaders, data sets, generators."""
Labels = Any
"""None, or (n,) whole numbers: a tensor, an array or a sequence."""


@speaks_python
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
) -> OpenCheckpoint:
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
        errors.require_option_names(
            arguments.names_with_values(about_files | about_modules), (), "load of an open network"
        )
        return perturbed_at(build.with_network(source), image_size)
    if isinstance(source, ExportedProgram):
        source = source.module()
    if isinstance(source, nn.Module):
        errors.require_option_names(
            arguments.names_with_values(about_files), about_modules, "load of a module"
        )
        opened = in_memory.open_module(source, mean, std, input_size, features=features)
        return perturbed_at(opened, image_size)
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
    opened = open_checkpoint(str(source), hints)
    if features:
        require_features(opened, str(source))
    for doubt in opened.reading.doubts:
        warnings.warn(plain_text(errors.in_python(doubt)), stacklevel=3)
    return opened


@speaks_python
def save(checkpoint: Checkpoint, path: str | Path, *, force: bool = False) -> None:
    """Write a checkpoint atomically; replace an existing file only with `force`."""
    if checkpoint.record.arch.startswith(in_memory.PREFIX):
        raise UsageError(
            "a module in memory has no architecture that a file could name",
            "torch.save its state_dict, and load the file with arch=... if timm can build it",
        )
    checkpoint.write(Path(path), force)


@speaks_python
def history(source: Network) -> Record:
    """Return the unverified record: architecture, input, surgery, lineage, evidence."""
    return load(source).record


@speaks_python
def network(source: Network, *, double: bool = False, device: str = "cpu") -> PixelModel:
    """Return the network in eval mode, pixels in [0, 1] -> logits; its first layer normalises."""
    return (build.load_double if double else build.load)(load(source), torch.device(device))


@speaks_python
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
    return data.dataset_images(
        load(source).record, dataset, split, None if data_dir is None else Path(data_dir)
    ).limit(limit, seed)


def open_classifier(source: Network) -> OpenCheckpoint:
    """Open a network; ArchitectureError where it ends in features."""
    checkpoint = load(source)
    require_classifier(checkpoint, "the network")
    return checkpoint


def judged_images(
    checkpoint: OpenCheckpoint, images: Data, labels: Labels, *, labelled: bool = True
) -> Images:
    """Return the images; warn where the file's own program answers otherwise on them."""
    chosen = data.images_from(checkpoint.record, images, labels, labelled=labelled)
    for doubt in checkpoint.differences(pixels for _, pixels, _ in chosen.batches(32)):
        warnings.warn(plain_text(errors.in_python(doubt)), stacklevel=3)
    return chosen
