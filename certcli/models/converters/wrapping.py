"""How people wrap a state dict: in dictionaries, under prefixes, with averaged weights beside the raw ones."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from certcli.checkpoint.file import require_numbers
from certcli.system.errors import ArchitectureError, CheckpointError, one_line

TORCH_SUFFIXES = (".pth", ".pt", ".bin", ".ckpt", ".tar")
_RAW = ("state_dict", "model", "model_state_dict", "module", "net", "network", "params", "student")
_EMA = ("model_ema", "state_dict_ema", "ema", "ema_state_dict", "ema_model", "params_ema", "teacher")
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
WEIGHTS = ("raw", "ema")


def read_torch(path: Path, weights: str | None) -> dict[str, Tensor]:
    """Return the state dict of a .pth, .pt, .bin, .ckpt or .pth.tar file; nothing but tensors and plain values is unpickled.

    Args:
        weights: "raw" or "ema", where the file holds both.
    """
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):  # training scripts save their options beside
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as failure:  # of hostile bytes, the restricted unpickler raises anything
        raise CheckpointError(
            f"{path} cannot be read as plain tensors ({one_line(failure)[:160]})",
            "convert it to safetensors where it can be trusted",
        ) from failure
    while isinstance(loaded, Mapping) and not _is_state_dict(loaded):
        inner = _choice([key for key in (*_RAW, *_EMA) if isinstance(loaded.get(key), Mapping)], path, weights)
        if inner is None:
            break
        loaded = loaded[inner]
    if not _is_state_dict(loaded):
        raise CheckpointError(f"{path} is not a dictionary of tensors")
    tensors = {str(name): value.detach() for name, value in loaded.items()}
    for name, value in tensors.items():
        plain = value.layout == torch.strided and not value.is_quantized and not value.is_meta and not value.is_nested
        if not plain or value.numel() * value.element_size() > value.untyped_storage().nbytes():
            raise CheckpointError(f"tensor '{one_line(name)}' of {path} is not a plain tensor with values of its own")
    require_numbers(tensors, path.name)
    return tensors


def _is_state_dict(loaded: Any) -> bool:
    return isinstance(loaded, Mapping) and all(isinstance(value, Tensor) for value in loaded.values())


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


def unwrapped(tensors: Mapping[str, Tensor], path: Path, weights: str | None) -> tuple[dict[str, Tensor], str]:
    """Return the tensors without the prefixes that all of them share, and those prefixes.

    Where some are under a prefix of raw and the others under one of averaged weights, `weights` says which are read.
    """
    found, taken = dict(tensors), ""
    while True:
        firsts = {name.partition(".")[0] for name in found}
        if len(firsts) == 2 and firsts & set(_RAW) and firsts & set(_EMA):
            chosen = _choice(sorted(firsts), path, weights)
            found = {name: value for name, value in found.items() if name.startswith(f"{chosen}.")}
        prefix = next((each for each in _PREFIXES if found and all(name.startswith(each) for name in found)), None)
        if prefix is None:
            return found, taken
        found = {name.removeprefix(prefix): value for name, value in found.items()}
        taken += prefix
