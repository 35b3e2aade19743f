"""Proven spectral norms of attention layers, head by head."""

from dataclasses import dataclass

from torch import nn

from certcli.lipschitz.numerics.spectral import spectral_norms
from certcli.models.build import own_name


@dataclass(frozen=True)
class HeadNorms:
    """|W_h|_2 of each head's rows of one map (q, k, v or the tied query), rounded up."""

    path: str
    map: str
    upper: tuple[float, ...]


def head_norms(model: nn.Module) -> list[HeadNorms]:
    """Return the norms of all linear maps `qkv`, `q`, `k`, `v`, `query` of modules with
    `num_heads`, split into heads.
    """
    norms_of = []
    for path, module in model.named_modules():
        heads = getattr(module, "num_heads", None)
        if not isinstance(heads, int):
            continue
        for name, child in module.named_children():
            if not isinstance(child, nn.Linear) or name not in ("qkv", "q", "k", "v", "query"):
                continue
            parts = ("q", "k", "v") if name == "qkv" else (name,)
            if child.out_features % (heads * len(parts)):
                continue
            for part, weight in zip(parts, child.weight.detach().chunk(len(parts)), strict=True):
                norms = spectral_norms(list(weight.chunk(heads)))
                norms_of.append(HeadNorms(own_name(model, f"{path}.{name}"), part, tuple(norms)))
    return norms_of
