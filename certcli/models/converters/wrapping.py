"""How people wrap a state dict: in dictionaries, under prefixes, with averaged weights beside the raw ones."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from certcli.checkpoint.file import require_numbers
from certcli.models.reading import Fact
from certcli.system.errors import ArchitectureError, CheckpointError, one_line

TORCH_SUFFIXES = (".pth", ".pt", ".bin", ".ckpt", ".tar")
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
_PREFIXES = (
    "module.",
    "_orig_mod.",
    "model.",
    "net.",
    "network.",
    "backbone.",
    "encoder.",
    *(f"{name}." for name in _EMA),
)
_DEEPEST = 8
"""Dictionaries within dictionaries; a file may hold one that contains itself."""


@dataclass(frozen=True)
class Bare:
    """A state dict, and the wrapping that was taken off it.

    Attributes:
        keys: The keys under which it lay in dictionaries.
        prefix: The prefix that all its names had.
        original: Whether timm's filter renamed the tensors.
    """

    tensors: dict[str, Tensor]
    keys: tuple[str, ...] = ()
    prefix: str = ""
    original: bool = False

    @property
    def averaged(self) -> bool:
        """Tell whether a key or a prefix names averaged weights."""
        return any(word in _EMA for word in (*self.keys, *self.prefix.split(".")))

    def facts(self) -> list[Fact]:
        """Return what was taken off and renamed."""
        found = (
            [Fact("weights", " / ".join(f"'{key}'" for key in self.keys), "the file")]
            if self.keys
            else []
        )
        found += [Fact("names", f"without '{self.prefix}'", "the file")] if self.prefix else []
        by_filter = Fact("tensors", "renamed", "timm's filter for the original repository")
        return [*found, by_filter] if self.original else found


def read_torch(path: Path, weights: str | None) -> Bare:
    """Return the state dict of a .pth, .pt, .bin, .ckpt or .pth.tar file; nothing but tensors and plain values is unpickled.

    Args:
        weights: "raw" or "ema", where the file holds both.
    """
    try:
        with torch.serialization.safe_globals(
            [argparse.Namespace]
        ):  # training scripts save their options beside
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as failure:  # of hostile bytes, the restricted unpickler raises anything
        raise CheckpointError(
            f"{path} cannot be read as plain tensors ({one_line(failure)[:160]})",
            "convert it to safetensors where it can be trusted",
        ) from failure
    keys: list[str] = []
    while isinstance(loaded, Mapping) and not _is_state_dict(loaded) and len(keys) < _DEEPEST:
        inner = _choice(
            [key for key in (*_RAW, *_EMA) if isinstance(loaded.get(key), Mapping)], path, weights
        )
        if inner is None:
            break
        keys.append(inner)
        loaded = loaded[inner]
    if not _is_state_dict(loaded):
        raise CheckpointError(f"{path} is not a dictionary of tensors")
    tensors = {str(name): value.detach() for name, value in loaded.items()}
    if len(tensors) < len(loaded):
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
    return Bare(tensors, tuple(keys))


def _is_state_dict(loaded: Any) -> bool:
    return isinstance(loaded, Mapping) and all(
        isinstance(value, Tensor) for value in loaded.values()
    )


def _choice(keys: list[str], path: Path, weights: str | None) -> str | None:
    """The key of the wanted weights; ArchitectureError where raw and averaged ones lie side by side and nobody chose."""
    raw = next((key for key in keys if key in _RAW), None)
    averaged = next((key for key in keys if key in _EMA), None)
    if raw is None or averaged is None:
        return raw or averaged
    if weights is None:
        raise ArchitectureError(
            f"{path.name} holds raw weights ('{raw}') and averaged ones ('{averaged}'): which network is meant?",
            "--weights raw or --weights ema",
        )
    return raw if weights == "raw" else averaged


def unwrapped(bare: Bare, path: Path, weights: str | None) -> Bare:
    """Return the state dict without the prefix that all its names share.

    Where some are under a prefix of raw and the others under one of averaged weights, `weights` says which are read.

    Raises:
        ArchitectureError: the file holds no weights of the wanted kind, or nobody chose between two.
    """
    found, taken = bare.tensors, ""
    while True:
        firsts = {name.partition(".")[0] for name in found}
        if len(firsts) == 2 and firsts & set(_RAW) and firsts & set(_EMA):
            chosen = _choice(sorted(firsts), path, weights)
            found = {name: value for name, value in found.items() if name.startswith(f"{chosen}.")}
        prefix = next(
            (each for each in _PREFIXES if found and all(name.startswith(each) for name in found)),
            None,
        )
        if prefix is None:
            break
        found = {name.removeprefix(prefix): value for name, value in found.items()}
        taken += prefix
    bare = Bare(found, bare.keys, taken)
    if weights is not None and bare.averaged != (weights == "ema"):
        kinds = ("raw", "averaged") if bare.averaged else ("averaged", "raw")
        raise ArchitectureError(
            f"{path.name} holds no {kinds[0]} weights, only {kinds[1]} ones",
            f"leave out --weights {weights}",
        )
    return bare
