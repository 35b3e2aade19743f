"""What every converter returns, and how it renames tensors."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from certcli.checkpoint.record import InputSpec, Record
from certcli.checkpoint.schema import require_pixel_statistics
from certcli.system.errors import ArchitectureError, CheckpointError, Refused, one_line, raise_if
from certcli.system.reading import read_bounded

Renames = Sequence[tuple[str, str | Callable[[re.Match[str]], str]]]
"""Rows (regular expression, replacement), applied to a name one after the other."""

T = TypeVar("T")

COMPUTED = r"relative_position_index$|relative_coords_table$"
"""Tensors that timm's network computes itself."""

ALONE = "save the state_dict() of the network alone"
"""What to do about tensors of other things beside the network's."""


@dataclass(frozen=True)
class Converted:
    """A file in timm's terms.

    Attributes:
        source: The network that was recognised, for the reading line ("transformers'
            ViTForImageClassification").
        origins: The origin of each fact of the record, by fact (`certcli.models.assumptions`).
        doubts: A sentence for each reason why the network may be another one than its author's.
        computed: The file's copies of tensors that timm's network computes itself.
        features: The output, in the other library's terms, of a network without a classifier.
    """

    tensors: dict[str, Tensor]
    record: Record
    source: str
    origins: Mapping[str, str]
    doubts: tuple[str, ...] = ()
    computed: Mapping[str, Tensor] = field(default_factory=dict)
    features: str | None = None


def require_whole_windows(
    side: int, patch: int, stages: int, window: int, *, shrinks: bool = False
) -> None:
    """Raise ArchitectureError unless the windows of every Swin stage cover the tokens of a square
    image exactly.

    At the edge, transformers and torchvision pad a window in other places than timm.

    Args:
        shrinks: Whether a window is never larger than its stage, as in timm and in transformers'
            Swin v2.
    """
    tokens = [side / patch / 2**stage for stage in range(stages)]
    raise_if(
        any(count % 1 or count % (min(window, count) if shrinks else window) for count in tokens),
        ArchitectureError,
        f"{side} pixels are {', '.join(f'{count:g}' for count in tokens)} tokens in Swin's stages, no whole "
        f"windows of {window}: timm's Swin would compute another function",
        "the image size that it was trained with: --arch-arg img_size=... for torchvision's",
    )


def read_config(config: Path, read: Callable[[bytes], T], hint: str) -> T:
    """Return what a config beside a file says, by `read`; CheckpointError where it cannot."""
    try:
        return read(read_bounded(config))
    except (Refused, OSError) as failure:
        raise CheckpointError(f"{config} cannot be used: {one_line(failure)}", hint) from failure


def pixel_input(
    size: tuple[int, int, int],
    mean: Sequence[float],
    std: Sequence[float],
    view: tuple[Any, ...],
    hint: str,
) -> InputSpec:
    """Return the input; one mean or std stands for every channel. ArchitectureError where they fit
    no image in [0, 1].

    Args:
        view: the filter that resizes images, the share of them that is left after the crop, and the
            crop's mode.
    """
    means, stds = (
        tuple(values) * size[0] if len(values) == 1 else tuple(values) for values in (mean, std)
    )
    try:
        require_pixel_statistics(size, means, stds)
    except Refused as refusal:
        raise ArchitectureError(str(refusal), hint) from refusal
    return InputSpec(size, means, stds, *view)


def tensors_by_name(pairs: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return the pairs as a dictionary; ArchitectureError where two tensors would get one name."""
    tensors_of: dict[str, Tensor] = {}
    for name, value in pairs:
        raise_if(
            name in tensors_of,
            ArchitectureError,
            f"two tensors of the file are timm's '{one_line(name)}'",
            ALONE,
        )
        tensors_of[name] = value
    return tensors_of


def renamed(tensors: Mapping[str, Tensor], table: Renames) -> dict[str, Tensor]:
    """Return the tensors under the names that the table's rows make of theirs, in order."""
    rows = [(re.compile(pattern), template) for pattern, template in table]

    def new(name: str) -> str:
        for pattern, template in rows:
            name = pattern.sub(template, name)
        return name

    origins: dict[str, str] = {}
    for name in tensors:
        target = new(name)
        if target in origins:
            raise ArchitectureError(
                f"two tensors of the file are timm's '{one_line(target)}': '{one_line(origins[target])}' and "
                f"'{one_line(name)}'",
                ALONE,
            )
        origins[target] = name
    return {target: tensors[name] for target, name in origins.items()}


def parted(
    tensors: Mapping[str, Tensor], pattern: str
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the tensors whose names do not match the pattern, and those whose names do."""
    matching = {name: value for name, value in tensors.items() if re.search(pattern, name)}
    return {name: value for name, value in tensors.items() if name not in matching}, matching


def with_joined_qkv(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Stack query, key and value of every attention into timm's one matrix `qkv`.

    An attention whose key has no bias (BEiT, Swin v2) keeps `q_bias` and `v_bias`, as timm's does.
    """
    new: list[tuple[str, Tensor]] = []
    used: set[str] = set()
    for name in tensors:
        path = name.removesuffix("query.weight")
        parts = [f"{path}{part}" for part in ("query", "key", "value")]
        if path == name or not all(f"{part}.weight" in tensors for part in parts):
            continue
        new.append((f"{path}qkv.weight", torch.cat([tensors[f"{part}.weight"] for part in parts])))
        biases = [tensors.get(f"{part}.bias") for part in parts]
        present = [bias for bias in biases if bias is not None]
        if len(present) == 3:
            new.append((f"{path}qkv.bias", torch.cat(present)))
        else:
            keys = (f"{path}{letter}_bias" for letter in "qkv")
            new += [(key, bias) for key, bias in zip(keys, biases, strict=True) if bias is not None]
        used |= {f"{part}.{kind}" for part in parts for kind in ("weight", "bias")}
    return tensors_by_name(
        [*new, *((name, value) for name, value in tensors.items() if name not in used)]
    )
