"""What every converter returns, and how it renames tensors."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from certcli.checkpoint.record import Record

Renames = Sequence[tuple[str, str | Callable[[re.Match[str]], str]]]
"""Rows (regular expression, replacement), applied to a name one after the other."""


@dataclass(frozen=True)
class Converted:
    """A file in timm's terms.

    source: what was recognised, for the reading line ("transformers' ViTForImageClassification").
    origins: where a fact of the record came from, by fact (`certcli.models.assumptions`).
    doubts: what may make the network another one than its author's, a sentence each.
    """

    tensors: dict[str, Tensor]
    record: Record
    source: str
    origins: Mapping[str, str]
    doubts: tuple[str, ...] = ()


def renamed(tensors: Mapping[str, Tensor], table: Renames) -> dict[str, Tensor]:
    """Return the tensors under the names that the table's rows make of theirs, in order."""
    rows = [(re.compile(pattern), template) for pattern, template in table]
    found: dict[str, Tensor] = {}
    for name, value in tensors.items():
        for pattern, template in rows:
            name = pattern.sub(template, name)
        found[name] = value
    return found


def dropped(tensors: Mapping[str, Tensor], pattern: str) -> dict[str, Tensor]:
    """Return the tensors without those whose name matches: the network of timm computes them or never reads them."""
    return {name: value for name, value in tensors.items() if not re.search(pattern, name)}


def joined(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Stack query, key and value of every attention into timm's one matrix `qkv`.

    An attention whose key has no bias (BEiT, Swin v2) keeps `q_bias` and `v_bias`, as timm's does.
    """
    found = {name: value for name, value in tensors.items() if not re.search(r"\.(query|key|value)\.", name)}
    for name in tensors:
        if not name.endswith(".query.weight"):
            continue
        path = name.removesuffix("query.weight")
        parts = [tensors.get(f"{path}{part}.weight") for part in ("query", "key", "value")]
        biases = [tensors.get(f"{path}{part}.bias") for part in ("query", "key", "value")]
        found[f"{path}qkv.weight"] = torch.cat([part for part in parts if part is not None])
        if all(bias is not None for bias in biases):
            found[f"{path}qkv.bias"] = torch.cat([bias for bias in biases if bias is not None])
        else:
            kept = zip(("q_bias", "k_bias", "v_bias"), biases, strict=True)
            found |= {path + key: bias for key, bias in kept if bias is not None}
    return found
