"""What every converter returns, how it renames tensors, and which tensors of a file are those of a network.

A program that wraps a network adds parts to its names: a prefix, or a part within. So a name of the
file is read as the network's name that is left without the added parts, if it is the only one.
"""

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
        other = origins.setdefault(target, name)
        raise_if(
            other != name,
            ArchitectureError,
            f"two tensors of the file are timm's '{one_line(target)}': '{one_line(other)}' and "
            f"'{one_line(name)}'",
            ALONE,
        )
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


_TRAINING = re.compile(
    r"(\w+_)?(loss(es)?|criteri(on|a)|metrics?|acc(uracy)?|auroc|optimi[sz]ers?|schedulers?)(_\w+)?\."
)
"""A module by which training judges or steps: its forward pass is not the network's."""
_COUNTER = re.compile(r"(^|\.)((total|num|n|global)_[a-z]+|count(er)?|steps?|epochs?)$")
"""One whole number that counts: operations, averaged models, steps."""
_CAUSES: tuple[tuple[str, str, str], ...] = (
    (
        r"(^|[._])(lora|ia3|hada|loha|lokr|oft|boft|vera|dora|adalora)_|(^|\.)base_layer\.|(^|\.)modules_to_save\.",
        "belongs to an adapter that is not merged into the weights",
        "merge it first: save the state_dict() of model.merge_and_unload()",
    ),
    (
        r"(^|\.)_?flat_param",
        "is a shard of FSDP",
        "gather the weights first: save a full state_dict (StateDictType.FULL_STATE_DICT)",
    ),
    (
        r"_(orig|mask)$",
        "belongs to a pruned layer",
        "make it one tensor first: torch.nn.utils.prune.remove(module, name)",
    ),
    (
        r"(^|\.)parametrizations\.|_[uv]$",
        "belongs to a parametrized layer",
        "make it one tensor first: torch.nn.utils.parametrize.remove_parametrizations(module, name)",
    ),
    (
        r"(^|\.)(weight_scale(_inv)?|scales?|zero_points?|SCB|absmax|_packed_params|q(weight|zeros))(\.|$)",
        "is a scale of quantised weights",
        "save the network's weights as floating numbers, before they are quantised",
    ),
)
"""Names by which libraries store what changes the weights, what it is, and how it is undone."""
_COMPUTED = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
"""Types in which torch takes norms."""
_MOST_NETWORKS = 64
_DEEPEST = 12
"""Parts that programs add in front of a name, at most."""


def cause(
    names: Iterable[str], causes: Sequence[tuple[str, str, str]] = _CAUSES
) -> tuple[str, str] | None:
    """Return what a tensor without a place is that changes weights, by its name, and a hint."""
    ordered = sorted(names)
    for pattern, what, hint in causes:
        name = next((name for name in ordered if re.search(pattern, name)), None)
        if name is not None:
            return f"'{one_line(name)}' {what}", hint
    return None


def harmless(name: str, value: Tensor, root: str = "") -> bool:
    """Tell whether no forward pass of the network under `root` reads the tensor.

    It is a counter, or a part of a loss or a metric that lies beside the network or a module around
    it. A tensor within the network is never one of the latter.
    """
    if value.numel() == 1 and _COUNTER.search(name):
        return not value.is_complex() and float(value).is_integer()
    around = root.split(".")
    while around and name.startswith(f"{around[0]}."):
        name = name.removeprefix(f"{around.pop(0)}.")
    return _TRAINING.match(name) is not None


def require_merged(path: Path, names: Iterable[str]) -> None:
    """Raise ArchitectureError where an adapter lies beside the weights: the base is another network."""
    what, hint = cause(names, _CAUSES[:1]) or ("", "")
    raise_if(what, ArchitectureError, f"{path.name}: {what}", hint)


def alignments(tensors: Mapping[str, Tensor], expected: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return each whole network in the file, by the prefix under which it lies: the file's name of
    each of its tensors.

    Args:
        expected: The names of the network's tensors.
    """
    targets = sorted(expected)
    target_of = _reader(targets)
    candidates: dict[str, list[str]] = {}
    for name in tensors:
        target = target_of(name)
        if target is not None:
            candidates.setdefault(target, []).append(name)
    networks: dict[str, dict[str, str]] = {}
    if candidates.keys() != set(targets):
        return networks
    for root in _roots(candidates):
        names = {target: root + target for target in targets}
        if not all(name in tensors for name in names.values()):
            under = {
                target: [name for name in group if name.startswith(root)]
                for target, group in candidates.items()
            }
            if any(len(group) != 1 for group in under.values()):
                continue
            names = {target: group[0] for target, group in under.items()}
        if names not in networks.values():
            networks[root] = names
    return networks


def rivals(tensors: Mapping[str, Tensor], expected: Iterable[str]) -> tuple[str, str, str] | None:
    """Return a name of the network, and two of the file that could both be meant; None without."""
    target_of = _reader(expected)
    first: dict[str, str] = {}
    for name in sorted(tensors):
        target = target_of(name)
        if target is not None and first.setdefault(target, name) != name:
            return target, first[target], name
    return None


def _reader(expected: Iterable[str]) -> Callable[[str], str | None]:
    """Return the function from a file's name to the network's that is left without added parts.

    Added are parts that no name of the network has, those in front of one of its names, and a
    number before the last part: a layer's place in a Sequential.
    """
    targets = frozenset(expected)
    parts = {part for name in targets for part in name.split(".")}
    firsts = {name.partition(".")[0] for name in targets}

    def target_of(name: str) -> str | None:
        rest = [part for part in name.split(".") if part in parts or part.isdecimal()]
        if name.rpartition(".")[2] not in rest[-1:]:
            return None
        while rest:
            in_sequential = rest[-2:-1] and rest[-2].isdecimal()
            for option in (rest, [*rest[:-2], rest[-1]] if in_sequential else rest):
                if ".".join(option) in targets:
                    return ".".join(option)
            if rest.pop(0) in firsts:  # a part of the network is no prefix of another one
                return None
        return None

    return target_of


def _roots(candidates: Mapping[str, list[str]]) -> list[str]:
    """Return the prefixes under which one tensor lies, the shortest first."""
    names = min(candidates.values(), key=len)
    roots = {""}
    for name in names:
        parts = name.split(".")[:-1][:_DEEPEST]
        roots |= {".".join(parts[: count + 1]) + "." for count in range(len(parts))}
    return sorted(roots, key=lambda root: (root.count("."), root))[:_MOST_NETWORKS]


def without_weight_norm(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """Return the tensors with each weight g v / |v| of a weight norm computed, and these names.

    g is `W.original0` (or W_g) and v `W.original1` (or W_v); the norm is over the axes where g has
    length 1. ArchitectureError: a norm is zero or g has another shape.
    """
    result = dict(tensors)
    computed = []
    for name in tensors:
        match = re.fullmatch(r"(.*?)(?:parametrizations\.(\w+)\.original0|(weight)_g)", name)
        if match is None:
            continue
        target = f"{match[1]}{match[2] or match[3]}"
        other = name[:-1] + "1" if match[2] else name[:-1] + "v"
        if other not in tensors or target in tensors:
            continue
        gains = tensors[name]
        directions = tensors[other]
        axes = [axis for axis in range(gains.dim()) if gains.shape[axis] == 1]
        if (
            gains.dim() != directions.dim()
            or not axes
            or {gains.dtype, directions.dtype} - _COMPUTED
        ):
            continue
        norms = torch.linalg.vector_norm(directions, dim=axes, keepdim=True)
        raise_if(
            norms.shape != gains.shape or not bool((norms > 0).all()),
            ArchitectureError,
            f"'{one_line(name)}' and '{one_line(other)}' are no weight norm: of other shapes, or of norm zero",
        )
        del result[name], result[other]
        result[target] = directions * (gains / norms)
        computed.append(target)
    return result, computed
