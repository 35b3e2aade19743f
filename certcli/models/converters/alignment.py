"""Which tensors of a file are those of a network, where its names have more parts than the network's.

A program that wraps a network adds parts to its names: a prefix, or a part within. So a name of the
file is read as the network's name that is left without the added parts, if it is the only one.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from certcli.system.errors import ArchitectureError, one_line, raise_if

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


@dataclass(frozen=True)
class Aligned:
    """The tensors of one network, by its names.

    Attributes:
        names: The file's name of each.
        aside: The file's names that are none of the network's.
    """

    tensors: dict[str, Tensor]
    names: Mapping[str, str]
    aside: tuple[str, ...]


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
    why = cause(names, _CAUSES[:1])
    if why is not None:
        raise ArchitectureError(f"{path.name}: {why[0]}", why[1])


def alignments(tensors: Mapping[str, Tensor], expected: Iterable[str]) -> dict[str, Aligned]:
    """Return each whole network in the file, by the prefix under which it lies.

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
    networks: dict[str, Aligned] = {}
    choices: set[frozenset[str]] = set()
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
        chosen = frozenset(names.values())
        if chosen not in choices:
            choices.add(chosen)
            aside = tuple(sorted(tensors.keys() - chosen))
            ordered = {target: tensors[names[target]] for target in names}
            networks[root] = Aligned(ordered, names, aside)
    return networks


def rivals(tensors: Mapping[str, Tensor], expected: Iterable[str]) -> tuple[str, str, str] | None:
    """Return a name of the network, and two of the file that could both be meant; None without."""
    target_of = _reader(expected)
    first: dict[str, str] = {}
    for name in sorted(tensors):
        target = target_of(name)
        if target is not None and target in first:
            return target, first[target], name
        if target is not None:
            first[target] = name
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
