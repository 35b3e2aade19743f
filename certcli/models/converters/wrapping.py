"""How state dicts are wrapped: in dictionaries, under prefixes, averaged weights beside others."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from certcli.checkpoint.file import require_weights
from certcli.checkpoint.torch_file import load_plain
from certcli.models.origins import Fact
from certcli.system.errors import ArchitectureError, CheckpointError, one_line, raise_if

TORCH_SUFFIXES = (".pth", ".th", ".pt", ".bin", ".ckpt", ".tar", ".pt2")
RAW = ("state_dict", "model", "model_state_dict", "module", "net", "network", "params", "student")
EMA = (
    "model_ema",
    "state_dict_ema",
    "ema",
    "ema_state_dict",
    "ema_model",
    "params_ema",
    "teacher",
)
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
        return any(word in EMA for word in (*self.keys, *self.prefix.split(".")))

    def facts(self) -> list[Fact]:
        """Return what was taken off and renamed."""
        parts = (*self.private, *filter(None, [self.prefix]))
        keys = " / ".join(f"'{key}'" for key in self.keys)
        facts = (
            (self.keys, Fact("weights", keys, "the file")),
            (parts, Fact("names", f"without {first_names(parts)}", "the file")),
            (self.computed, Fact("computed", first_names(self.computed), "a weight norm")),
            (self.aside, Fact("set aside", first_names(self.aside), "the file")),
            (
                self.original,
                Fact("tensors", "renamed", "timm's filter for the original repository"),
            ),
        )
        return [fact for is_there, fact in facts if is_there]


def read_torch(path: Path, weights: str | None) -> Bare:
    """Return the state dict of a .pth, .pt, .bin, .ckpt or .pth.tar file; nothing but tensors and
    plain values is unpickled.

    Args:
        weights: "raw", "ema" or the key of the wanted weights, where the file holds several.
    """
    loaded = load_plain(path)
    candidates = _networks(loaded)
    holds = f"a {type(loaded).__name__}, not a dictionary of tensors"
    if isinstance(loaded, Mapping):
        keys_text = ", ".join(f"'{one_line(key)[:40]}'" for key in list(loaded)[:6])
        holds = f"{keys_text or 'nothing'}, and none of them is a dictionary of tensors"
    hint = "save the network's state_dict()"
    raise_if(not candidates, CheckpointError, f"{path} holds {holds}", hint)
    names_prefix = any(
        str(name).startswith(f"{weights}.") for names in candidates.values() for name in names
    )
    keys = chosen_weights(list(candidates), candidates, path, None if names_prefix else weights)
    state_dict = candidates[keys]
    tensors = {str(name): value.detach() for name, value in state_dict.items()}
    raise_if(len(tensors) < len(state_dict), CheckpointError, f"{path} has two tensors of one name")
    for name, value in tensors.items():
        plain = (
            value.layout == torch.strided
            and not value.is_quantized
            and not value.is_meta
            and not value.is_nested
        )
        raise_if(
            not plain or value.numel() * value.element_size() > value.untyped_storage().nbytes(),
            CheckpointError,
            f"tensor '{one_line(name)}' of {path} is not a plain tensor with values of its own",
        )
    require_weights(tensors, path.name)
    return Bare(tensors, keys)


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
            inner = (
                (str(key), _only(below)) for key, below in value.items() if isinstance(key, str)
            )
            waiting += [((*keys, key), below) for key, below in inner if isinstance(below, Mapping)]
    largest = max(map(_value_count, networks.values()), default=0)
    return {keys: value for keys, value in networks.items() if 16 * _value_count(value) >= largest}


def _only(value: Any) -> Any:
    """Return the one dictionary of a list of one."""
    return value[0] if isinstance(value, list | tuple) and len(value) == 1 else value


def _value_count(state_dict: Mapping[Any, Tensor]) -> int:
    return sum(value.numel() for value in state_dict.values())


def _is_state_dict(loaded: Any) -> bool:
    return isinstance(loaded, Mapping) and all(
        isinstance(value, Tensor) for value in loaded.values()
    )


def chosen_weights(
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
        raise_if(
            not named,
            ArchitectureError,
            f"{path.name} holds no weights '{one_line(weights)[:80]}'",
            f"it holds {_places_in_words(places)}",
        )
        places = named
    averaged = [keys for keys in places if set(keys) & set(EMA)]
    raw = [keys for keys in places if keys not in averaged]
    if raw and averaged:
        raise_if(
            weights is None and not _all_equal([state_dicts[keys] for keys in places]),
            ArchitectureError,
            f"{path.name} holds raw weights ({_places_in_words(raw)}) and averaged ones "
            f"({_places_in_words(averaged)}): which network is meant?",
            "--weights raw or --weights ema",
        )
        places = averaged if weights == "ema" else raw
    raise_if(
        not _all_equal([state_dicts[keys] for keys in places]),
        ArchitectureError,
        f"{path.name} holds the weights of several networks, {_places_in_words(places)}: which is meant?",
        f"--weights {'/'.join(max(places[:2], key=bool))}",
    )
    return places[0]


def _places_in_words(places: list[tuple[str, ...]]) -> str:
    return ", ".join(f"'{one_line('/'.join(keys))[:60]}'" for keys in places[:6])


def first_names(names: Sequence[str]) -> str:
    shown = ", ".join(f"'{one_line(name)[:80]}'" for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def _all_equal(state_dicts: list[Mapping[Any, Tensor]]) -> bool:
    first, *others = state_dicts
    return all(
        first.keys() == other.keys()
        and all(
            value.dtype == other[name].dtype and torch.equal(value, other[name])
            for name, value in first.items()
        )
        for other in others
    )
