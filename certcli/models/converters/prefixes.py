"""The prefixes and parts that programs add to the names of a network, and what they store beside it."""

import itertools
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from certcli.models.converters.base import (
    ALONE,
    alignments,
    harmless,
    renamed,
    require_merged,
    tensors_by_name,
    without_weight_norm,
)
from certcli.models.converters.wrapping import (
    EMA,
    RAW,
    Bare,
    Normaliser,
    StateDicts,
    chosen_weights,
)
from certcli.system.errors import ArchitectureError, one_line, raise_if

_STATISTICS = {
    "mean": "std",
    "_mean": "_std",
    "means": "stds",
    "mu": "sigma",
    "image_mean": "image_std",
    "pixel_mean": "pixel_std",
    "norm_mean": "norm_std",
}
"""Names of a mean, each with that of its standard deviation."""
_MOST_CHANNELS = 4
"""Values of such a pair at most."""


def without_wrapping(bare: Bare, path: Path, weights: str | None, anchors: re.Pattern[str]) -> Bare:
    """Return the state dict without the prefix that all its names share, without a normaliser
    beside the network, and without what training stored beside another library's network.

    Where some are under a prefix of raw and the others under one of averaged weights, `weights`
    says which are read.

    Args:
        anchors: Names by which a converter recognises its network, after a prefix, the first group.

    Raises:
        ArchitectureError: the file holds no weights of the wanted kind, or nobody chose between
        two; or a name says that the weights are not its tensors alone.
    """
    # parts `_name` but the last: so FSDP, DDP, activation checkpoints and compilers call what they wrap
    pattern = re.compile(r"(?<![^.])_\w+\.")
    private = tuple(sorted({part for name in bare.tensors for part in pattern.findall(name)}))
    tensors, computed = without_weight_norm(renamed(bare.tensors, [(pattern.pattern, "")]))
    require_merged(path, tensors)
    taken = ""
    normaliser = None
    while True:
        firsts = {name.partition(".")[0] for name in tensors}
        if len(firsts) == 2 and firsts & set(RAW) and firsts & set(EMA):
            parts: StateDicts = {
                (first,): _tensors_under(tensors, f"{first}.") for first in sorted(firsts)
            }
            (chosen,) = chosen_weights(list(parts), parts, path, weights)
            tensors = {
                name: value for name, value in tensors.items() if name.startswith(f"{chosen}.")
            }
        if normaliser is None:
            tensors, normaliser = _without_normaliser(tensors)
        prefix = _shared_prefix(tensors, anchors)
        if prefix is None:
            break
        tensors = _tensors_under(tensors, prefix)
        taken += prefix
    bare = replace(bare, tensors=tensors, prefix=taken, normaliser=normaliser)
    bare = replace(bare, computed=tuple(computed), private=private)
    if places := _roots_of(tensors, anchors):
        bare = _network_under_root(bare, path, weights, places)
    has_averaged = any(name.partition(".")[0] in EMA for name in tensors)
    if weights in ("raw", "ema") and not has_averaged and bare.averaged != (weights == "ema"):
        kinds = ("raw", "averaged") if bare.averaged else ("averaged", "raw")
        raise ArchitectureError(
            f"{path.name} holds no {kinds[0]} weights, only {kinds[1]} ones",
            f"leave out --weights {weights}",
        )
    return bare


def aligned(bare: Bare, path: Path, weights: str | None, expected: Collection[str]) -> Bare:
    """Return the tensors renamed to `expected`, if the file has each of these names, with or without
    parts added, in a network under one root.

    Other tensors are left out if no forward pass reads them; what may change the function stays, and
    will not fit. Where the file holds no whole network of these names, `bare` itself is returned.

    Args:
        expected: The names of the tensors of timm's network.
        weights: The user's choice, where a file holds several networks: "raw" or "ema".

    Raises:
        ArchitectureError: it holds two networks and nobody chose.
    """
    tensors = bare.whole
    if tensors.keys() == set(expected):
        return replace(bare, tensors=tensors, prefix="")
    networks = alignments(tensors, expected)
    if not networks:
        return bare
    places: StateDicts = {
        tuple(root.split(".")[:-1]): {target: tensors[name] for target, name in names.items()}
        for root, names in networks.items()
    }
    chosen = chosen_weights(list(places), places, path, bare.undecided(weights))
    own_names = networks["".join(f"{part}." for part in chosen)]
    parents = [name.split(".")[:-1] for name in own_names.values()]
    ends = zip(min(parents), max(parents), strict=False)
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], ends)
    root = "".join(f"{part}." for part, _ in same)
    others = {name for names in networks.values() for name in names.values()}
    strange = [
        name for name in sorted(tensors.keys() - others) if not harmless(name, tensors[name], root)
    ]
    added = [
        f"'{one_line(name)}' is taken for '{target}': what else the module around it computes, no tensor shows"
        for target, name in sorted(own_names.items())
        if not name.endswith(target)
    ]
    for name in strange:
        other = own_names.get(name.removeprefix(root))
        raise_if(
            other is not None,
            ArchitectureError,
            f"{path.name} holds '{one_line(other)}' and '{one_line(name)}': which is the network's?",
            ALONE,
        )
    surplus = tensors_by_name((name.removeprefix(root), tensors[name]) for name in strange)
    unread = sorted(tensors.keys() - set(own_names.values()) - set(strange))
    whole = tensors_by_name([*places[chosen].items(), *surplus.items()])
    return replace(
        bare, tensors=whole, prefix=root, aside=(*bare.aside, *unread), doubts=tuple(added[:1])
    )


def _tensors_under(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors under the prefix, without it."""
    return {
        name.removeprefix(prefix): value
        for name, value in tensors.items()
        if name.startswith(prefix)
    }


def _roots_of(tensors: Mapping[str, Tensor], anchors: re.Pattern[str]) -> list[str]:
    """Return the prefixes under which networks lie that a converter recognises."""
    return sorted({match[1] for name in tensors if (match := anchors.fullmatch(name))})


def _shared_prefix(tensors: Mapping[str, Tensor], anchors: re.Pattern[str]) -> str | None:
    """Return the first part that all names share, with its dot.

    None: they share none, or it belongs to the network's own names (no converter recognises what is
    left without it, or the one tensor would be left alone).
    """
    firsts = {name.partition(".")[0] for name in tensors}
    if len(firsts) != 1 or not all("." in name for name in tensors):
        return None
    (first,) = firsts
    prefix = f"{first}."
    if len(tensors) == 1 and first not in (*RAW, *EMA):
        return None
    recognised = "" in _roots_of(tensors, anchors)
    remains = "" in _roots_of(_tensors_under(tensors, prefix), anchors)
    return None if recognised and not remains else prefix


def _network_under_root(
    bare: Bare, path: Path, weights: str | None, roots: Collection[str]
) -> Bare:
    """Return the network of another library that lies under one of these prefixes, with what lies
    beside it and may belong to it.
    """
    places: StateDicts = {
        tuple(root.split(".")[:-1]): _tensors_under(bare.tensors, root) for root in roots
    }
    chosen = chosen_weights(list(places), places, path, bare.undecided(weights))
    root = "".join(f"{part}." for part in chosen)
    below = _tensors_under(bare.tensors, root)
    others = tuple(other for other in roots if other != root and not root.startswith(other))
    aside = []
    outside = {}
    for name, value in bare.tensors.items():
        is_other = bool(others) and name.startswith(others)
        if is_other or harmless(name, value, root):
            aside.append(name)
        elif not name.startswith(root):
            outside[name] = value
    tensors = {name: value for name, value in below.items() if root + name not in aside}
    whole = tensors_by_name([*tensors.items(), *outside.items()])
    return replace(bare, tensors=whole, prefix=bare.prefix + root, aside=tuple(aside))


def _without_normaliser(
    tensors: dict[str, Tensor],
) -> tuple[dict[str, Tensor], "Normaliser | None"]:
    """Return the tensors without one mean and one standard deviation that stand before the network,
    and these two.

    They are a pair of names from `_STATISTICS` in one module, at most one level deep, with at most
    four values each.
    """
    for name, value in tensors.items():
        module, dot, last = name.rpartition(".")
        std_name = f"{module}{dot}{_STATISTICS.get(last, '')}"
        std = tensors.get(std_name)
        if last not in _STATISTICS or std is None or "." in module:
            continue
        floating = value.is_floating_point() and std.is_floating_point()
        if floating and value.numel() == std.numel() and 1 <= value.numel() <= _MOST_CHANNELS:
            normaliser = Normaliser((name, std_name), _flat_numbers(value), _flat_numbers(std))
            rest = {key: each for key, each in tensors.items() if key not in (name, std_name)}
            return rest, normaliser
    return tensors, None


def _flat_numbers(value: Tensor) -> tuple[float, ...]:
    """Return the values as decimal numbers: a float32 of 0.485 is written 0.485."""
    return tuple(float(f"{number:.8g}") for number in value.double().flatten().tolist())
