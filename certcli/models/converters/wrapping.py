"""How state dicts are wrapped: in dictionaries, under prefixes, averaged weights beside others."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from os.path import commonprefix
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from certcli.checkpoint.file import require_numbers
from certcli.checkpoint.torch_file import load_plain
from certcli.models.converters.alignment import (
    alignments,
    harmless,
    require_merged,
    without_weight_norm,
)
from certcli.models.converters.base import by_name
from certcli.models.provenance import Fact
from certcli.system.errors import ArchitectureError, CheckpointError, one_line

TORCH_SUFFIXES = (".pth", ".th", ".pt", ".bin", ".ckpt", ".tar")
_RAW = ("state_dict", "model", "model_state_dict", "module", "net", "network", "params", "student")
_EMA = (
    "model_ema",
    "state_dict_ema",
    "ema",
    "ema_state_dict",
    "ema_model",
    "params_ema",
    "teacher",
)
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
_DEEPEST = 8
"""Dictionaries within dictionaries; a file may hold one that contains itself."""


@dataclass(frozen=True)
class Normaliser:
    """Statistics (x - mean) / std that a file holds before its network.

    Attributes:
        names: The tensors' names in the file.
    """

    names: tuple[str, str]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def origin(self) -> str:
        return f"the file's {' and '.join(repr(name) for name in self.names)}"


@dataclass(frozen=True)
class Bare:
    """A state dict, and the wrapping that was taken off it.

    Attributes:
        keys: The keys under which it lay in dictionaries.
        prefix: The prefix that all its names had.
        original: Whether timm's filter renamed the tensors.
        normaliser: The pixel statistics that it holds beside the network.
        private: The parts `_name` that its names had.
        computed: The weights that were computed of those of a weight norm.
        aside: The file's names that are none of the network's.
        doubts: A sentence for each reason why the network may be another one than its author's.
    """

    tensors: dict[str, Tensor]
    keys: tuple[str, ...] = ()
    prefix: str = ""
    original: bool = False
    normaliser: Normaliser | None = None
    private: tuple[str, ...] = ()
    computed: tuple[str, ...] = ()
    aside: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()

    @property
    def whole(self) -> dict[str, Tensor]:
        """The tensors under their prefix."""
        return {self.prefix + name: value for name, value in self.tensors.items()}

    def undecided(self, weights: str | None) -> str | None:
        """Return `weights`, unless it named a dictionary, which was chosen."""
        is_key = bool(self.keys) and weights in (self.keys[-1], "/".join(self.keys))
        return None if is_key else weights

    @property
    def averaged(self) -> bool:
        """Tell whether a key or a prefix names averaged weights."""
        return any(word in _EMA for word in (*self.keys, *self.prefix.split(".")))

    def facts(self) -> list[Fact]:
        """Return what was taken off and renamed."""
        facts = (
            [Fact("weights", " / ".join(f"'{key}'" for key in self.keys), "the file")]
            if self.keys
            else []
        )
        parts = (*self.private, *((self.prefix,) if self.prefix else ()))
        facts += [Fact("names", f"without {_some(parts)}", "the file")] if parts else []
        facts += [Fact("computed", _some(self.computed), "a weight norm")] if self.computed else []
        facts += [Fact("set aside", _some(self.aside), "the file")] if self.aside else []
        by_filter = Fact("tensors", "renamed", "timm's filter for the original repository")
        return [*facts, by_filter] if self.original else facts


def read_torch(path: Path, weights: str | None) -> Bare:
    """Return the state dict of a .pth, .pt, .bin, .ckpt or .pth.tar file; nothing but tensors and
    plain values is unpickled.

    Args:
        weights: "raw", "ema" or the key of the wanted weights, where the file holds several.
    """
    loaded = load_plain(path)
    candidates = _networks(loaded)
    if not candidates:
        raise CheckpointError(f"{path} {_content(loaded)}", "save the network's state_dict()")
    names_prefix = any(
        str(name).startswith(f"{weights}.") for names in candidates.values() for name in names
    )
    keys = _choice(list(candidates), candidates, path, None if names_prefix else weights)
    state_dict = candidates[keys]
    tensors = {str(name): value.detach() for name, value in state_dict.items()}
    if len(tensors) < len(state_dict):
        raise CheckpointError(f"{path} has two tensors of one name")
    for name, value in tensors.items():
        plain = (
            value.layout == torch.strided
            and not value.is_quantized
            and not value.is_meta
            and not value.is_nested
        )
        if not plain or value.numel() * value.element_size() > value.untyped_storage().nbytes():
            raise CheckpointError(
                f"tensor '{one_line(name)}' of {path} is not a plain tensor with values of its own"
            )
    require_numbers(tensors, path.name)
    return Bare(tensors, keys)


Recognised = Callable[[Mapping[str, Tensor]], bool]
StateDicts = dict[tuple[str, ...], Mapping[Any, Tensor]]
"""Dictionaries of tensors, by the keys under which they lie."""


def _networks(loaded: Any) -> StateDicts:
    """Return the dictionaries of tensors in a file, without those much smaller than the largest.

    A dictionary of tensors is found by its structure, not by its key: below keys that are texts,
    and in lists of one dictionary. So the state of an optimiser, which has numbers as keys, is
    none.
    """
    loaded = _only(loaded)
    if _is_state_dict(loaded) and loaded:
        return {(): loaded}
    networks: StateDicts = {}
    waiting: list[tuple[tuple[str, ...], Any]] = [((), loaded)]
    visited = set()
    for keys, value in waiting:  # grows as it is read
        if keys and _is_state_dict(value) and value:
            networks[keys] = value
        elif isinstance(value, Mapping) and len(keys) < _DEEPEST and id(value) not in visited:
            visited.add(id(value))
            inner = ((str(key), _only(below)) for key, below in value.items() if _is_text(key))
            waiting += [((*keys, key), below) for key, below in inner if isinstance(below, Mapping)]
    largest = max(map(_values, networks.values()), default=0)
    return {keys: value for keys, value in networks.items() if 16 * _values(value) >= largest}


def _only(value: Any) -> Any:
    """Return the one dictionary of a list of one."""
    return value[0] if isinstance(value, list | tuple) and len(value) == 1 else value


def _is_text(key: Any) -> bool:
    return isinstance(key, str)


def _values(state_dict: Mapping[Any, Tensor]) -> int:
    return sum(value.numel() for value in state_dict.values())


def _content(loaded: Any) -> str:
    """Return what a file without a dictionary of tensors holds instead."""
    if isinstance(loaded, Mapping):
        keys = ", ".join(f"'{one_line(key)[:40]}'" for key in list(loaded)[:6])
        return f"holds {keys or 'nothing'}, and none of them is a dictionary of tensors"
    return f"holds a {type(loaded).__name__}, not a dictionary of tensors"


def _is_state_dict(loaded: Any) -> bool:
    return isinstance(loaded, Mapping) and all(
        isinstance(value, Tensor) for value in loaded.values()
    )


def _choice(
    places: list[tuple[str, ...]],
    state_dicts: Mapping[tuple[str, ...], Mapping[Any, Tensor]],
    path: Path,
    weights: str | None,
) -> tuple[str, ...]:
    """Return the keys of the wanted weights, of several that are equal the first.

    Raises:
        ArchitectureError: several that differ lie side by side, and nobody chose; or none is the
        one that was chosen.
    """
    if weights not in (None, "raw", "ema"):
        named = [keys for keys in places if weights in (keys[-1] if keys else None, "/".join(keys))]
        if not named:
            raise ArchitectureError(
                f"{path.name} holds no weights '{one_line(weights)[:80]}'",
                f"it holds {_named(places)}",
            )
        places = named
    averaged = [keys for keys in places if set(keys) & set(_EMA)]
    raw = [keys for keys in places if keys not in averaged]
    if raw and averaged:
        if weights is None and not _all_equal([state_dicts[keys] for keys in places]):
            raise ArchitectureError(
                f"{path.name} holds raw weights ({_named(raw)}) and averaged ones ({_named(averaged)}): which network is "
                "meant?",
                "--weights raw or --weights ema",
            )
        places = averaged if weights == "ema" else raw
    if not _all_equal([state_dicts[keys] for keys in places]):
        raise ArchitectureError(
            f"{path.name} holds the weights of several networks, {_named(places)}: which is meant?",
            f"--weights {'/'.join(max(places[:2], key=bool))}",
        )
    return places[0]


def _named(places: list[tuple[str, ...]]) -> str:
    return ", ".join(f"'{one_line('/'.join(keys))[:60]}'" for keys in places[:6])


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(f"'{one_line(name)[:80]}'" for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def _all_equal(state_dicts: list[Mapping[Any, Tensor]]) -> bool:
    first = state_dicts[0]
    return all(_are_equal(first, other) for other in state_dicts[1:])


def _are_equal(first: Mapping[Any, Tensor], other: Mapping[Any, Tensor]) -> bool:
    return first.keys() == other.keys() and all(
        value.dtype == other[name].dtype and torch.equal(value, other[name])
        for name, value in first.items()
    )


def unwrapped(
    bare: Bare, path: Path, weights: str | None, roots: Callable[[Mapping[str, Tensor]], list[str]]
) -> Bare:
    """Return the state dict without the prefix that all its names share, without a normaliser
    beside the network, and without what training stored beside another library's network.

    Where some are under a prefix of raw and the others under one of averaged weights, `weights`
    says which are read.

    Args:
        roots: Tells under which prefixes names lie by which a converter recognises its network.

    Raises:
        ArchitectureError: the file holds no weights of the wanted kind, or nobody chose between
        two; or a name says that the weights are not its tensors alone.
    """
    tensors, private = _without_private(bare.tensors)
    tensors, computed = without_weight_norm(tensors)
    require_merged(path, tensors)
    taken = ""
    normaliser = None
    while True:
        firsts = {name.partition(".")[0] for name in tensors}
        if len(firsts) == 2 and firsts & set(_RAW) and firsts & set(_EMA):
            parts: StateDicts = {}
            for first in sorted(firsts):
                parts[(first,)] = _below(tensors, f"{first}.")
            (chosen,) = _choice(list(parts), parts, path, weights)
            tensors = {
                name: value for name, value in tensors.items() if name.startswith(f"{chosen}.")
            }
        if normaliser is None:
            tensors, normaliser = _without_normaliser(tensors)
        prefix = _shared_prefix(tensors, lambda names: "" in roots(names))
        if prefix is None:
            break
        tensors = _below(tensors, prefix)
        taken += prefix
    bare = replace(bare, tensors=tensors, prefix=taken, normaliser=normaliser)
    bare = replace(bare, computed=tuple(computed), private=private)
    if places := roots(tensors):
        bare = _rooted(bare, path, weights, places)
    has_averaged = any(name.partition(".")[0] in _EMA for name in tensors)
    if weights in ("raw", "ema") and not has_averaged and bare.averaged != (weights == "ema"):
        kinds = ("raw", "averaged") if bare.averaged else ("averaged", "raw")
        raise ArchitectureError(
            f"{path.name} holds no {kinds[0]} weights, only {kinds[1]} ones",
            f"leave out --weights {weights}",
        )
    return bare


def aligned(bare: Bare, path: Path, weights: str | None, wanted: Collection[str]) -> Bare:
    """Return the tensors by the network's names, where the file's are these with parts added.

    What lies beside the network is left out if no forward pass reads it; what may change the
    function stays, and does not fit. Where the file holds no whole network of these names, `bare`.

    Raises:
        ArchitectureError: it holds two networks and nobody chose.
    """
    tensors = bare.whole
    if tensors.keys() == set(wanted):
        return replace(bare, tensors=tensors, prefix="")
    networks = alignments(tensors, wanted)
    if not networks:
        return bare
    places: StateDicts = {
        tuple(root.split(".")[:-1]): each.tensors for root, each in networks.items()
    }
    chosen = _choice(list(places), places, path, bare.undecided(weights))
    network = networks["".join(f"{part}." for part in chosen)]
    shared = commonprefix([name.split(".")[:-1] for name in network.names.values()])
    root = "".join(f"{part}." for part in shared)
    others = {name for each in networks.values() for name in each.names.values()}
    strange = [
        name
        for name in network.aside
        if name not in others and not harmless(name, tensors[name], root)
    ]
    added = [
        f"'{one_line(name)}' is taken for '{target}': what else the module around it computes, no tensor shows"
        for target, name in sorted(network.names.items())
        if not name.endswith(target)
    ]
    left = by_name((name.removeprefix(root), tensors[name]) for name in strange)
    aside = (*bare.aside, *(name for name in network.aside if name not in strange))
    whole = by_name([*network.tensors.items(), *left.items()])
    return replace(bare, tensors=whole, prefix=root, aside=aside, doubts=tuple(added[:1]))


def _below(tensors: Mapping[Any, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors under the prefix, without it."""
    return {
        name.removeprefix(prefix): value
        for name, value in tensors.items()
        if name.startswith(prefix)
    }


def _shared_prefix(tensors: Mapping[str, Tensor], recognised: Recognised) -> str | None:
    """Return the first part of all names; None where they share none, or are recognised with it
    only.
    """
    firsts = {name.partition(".")[0] for name in tensors}
    if len(firsts) != 1 or not all("." in name for name in tensors):
        return None
    (first,) = firsts
    prefix = f"{first}."
    if len(tensors) == 1 and first not in (*_RAW, *_EMA):
        return None
    lost = recognised(tensors) and not recognised(_below(tensors, prefix))
    return None if lost else prefix


def _rooted(bare: Bare, path: Path, weights: str | None, roots: Collection[str]) -> Bare:
    """Return the network of another library that lies under one of these prefixes, with what lies
    beside it and may belong to it.
    """
    places: StateDicts = {tuple(root.split(".")[:-1]): _below(bare.tensors, root) for root in roots}
    chosen = _choice(list(places), places, path, bare.undecided(weights))
    root = "".join(f"{part}." for part in chosen)
    below = _below(bare.tensors, root)
    others = tuple(other for other in roots if other != root and not root.startswith(other))
    aside = []
    beside = {}
    for name, value in bare.tensors.items():
        is_other = bool(others) and name.startswith(others)
        if is_other or harmless(name, value, root):
            aside.append(name)
        elif not name.startswith(root):
            beside[name] = value
    tensors = {name: value for name, value in below.items() if root + name not in aside}
    whole = by_name([*tensors.items(), *beside.items()])
    return replace(bare, tensors=whole, prefix=bare.prefix + root, aside=tuple(aside))


def _without_private(
    tensors: Mapping[str, Tensor],
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Return the tensors without the parts `_name` of names, but the last: a wrapper's own module;
    and these parts.

    So FSDP, DDP, activation checkpoints and compilers call the module that they wrap.
    """
    pattern = re.compile(r"(?<![^.])_\w+\.")
    private = sorted({part for name in tensors for part in pattern.findall(name)})
    public = by_name((pattern.sub("", name), value) for name, value in tensors.items())
    return public, tuple(private)


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
        if not (value.is_floating_point() and std.is_floating_point()):
            continue
        if value.numel() == std.numel() and 1 <= value.numel() <= _MOST_CHANNELS:
            normaliser = Normaliser((name, std_name), _numbers(value), _numbers(std))
            rest = {key: each for key, each in tensors.items() if key not in (name, std_name)}
            return rest, normaliser
    return tensors, None


def _numbers(value: Tensor) -> tuple[float, ...]:
    """Return the values as decimal numbers: a float32 of 0.485 is written 0.485."""
    return tuple(float(f"{number:.8g}") for number in value.double().flatten().tolist())
