"""Proven spectral norms of attention layers, head by head."""

from dataclasses import dataclass

from torch import nn

from certcli.lipschitz.numerics.spectral import spectral_norms
from certcli.models.build import own_name

MAPS = ("qkv", "q", "k", "v", "query", "value")
"""Names of the maps of an attention: timm's, and ours, whose query may also be the key."""


@dataclass(frozen=True)
class HeadNorms:
    """|W_h|_2 of each head's rows of one map (q, k, v, the tied query, value), rounded up."""

    path: str
    map: str
    upper: tuple[float, ...]


def head_norms(model: nn.Module) -> list[HeadNorms]:
    """Return, by head, norms of maps `qkv`, `q`, `k`, `v`, `query`, `value` beside `num_heads`."""
    norms_of = []
    for path, module in model.named_modules():
        heads = getattr(module, "num_heads", None)
        if not isinstance(heads, int):
            continue
        for name, child in module.named_children():
            if not isinstance(child, nn.Linear) or name not in MAPS:
                continue
            parts = ("q", "k", "v") if name == "qkv" else (name,)
            if child.out_features % (heads * len(parts)):
                continue
            for part, weight in zip(parts, child.weight.detach().chunk(len(parts)), strict=True):
                norms = spectral_norms(list(weight.chunk(heads)))
                norms_of.append(HeadNorms(own_name(model, f"{path}.{name}"), part, tuple(norms)))
    return norms_of
