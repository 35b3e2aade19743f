"""Maximum singular value penalisation of attention: large query, key and value maps cost."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from certcli.lipschitz.numerics.convolution_estimate import block_norms
from certcli.system.errors import ArchitectureError

KINDS = ("q", "k", "v")


@dataclass(frozen=True)
class AttentionMap:
    """A weight (or its transpose) whose rows are maps of some kinds in turn, split into heads."""

    weight: Tensor
    kinds: tuple[str, ...]
    heads: int
    transposed: bool = False

    def blocks(self, chosen: tuple[str, ...]) -> Tensor:
        """Return the heads' matrices of the chosen kinds: (chosen kinds * heads, rows, columns)."""
        weight = self.weight.T if self.transposed else self.weight
        split = weight.reshape(len(self.kinds), -1, weight.shape[1])
        if len(chosen) < len(split):
            split = split[[self.kinds.index(kind) for kind in chosen]]
        return split.reshape(len(chosen) * self.heads, -1, weight.shape[1])


class SpectralPenalty:
    """sum over layers and heads of l_q sigma(W_q)^2 + l_k sigma(W_k)^2 + l_v sigma(W_v)^2 -> (),
    with gradient.

    Norms are estimated by power iteration, one step a call from the vectors of the call before, all
    matrices of one shape at once. In a tied L2 attention W_q is the query map, and the rows of
    `proj` are the value map; it has no key map.
    Source: Hu et al. 2024 (SpecFormer), equations 11 to 13.

    Args:
        weights: (l_q, l_k, l_v).

    Attributes:
        vectors: singular vectors that the next call starts from.

    Raises:
        ArchitectureError: the network has no attention.
    """

    def __init__(self, net: nn.Module, weights: tuple[float, float, float]) -> None:
        strength = dict(zip(KINDS, weights, strict=True))
        self._groups: dict[tuple[int, int], list[tuple[AttentionMap, tuple[str, ...]]]] = {}
        self.vectors: dict[str, Tensor] = {}
        maps = list(attention_maps(net))
        if not maps:
            raise ArchitectureError(
                "there is no attention whose query, key and value maps could be penalised",
                "drop --msvp",
            )
        factors: dict[tuple[int, int], list[float]] = {}
        for each in maps:
            chosen = tuple(kind for kind in each.kinds if strength[kind] > 0)
            if not chosen:
                continue
            with torch.no_grad():
                _, rows, columns = each.blocks(chosen).shape
            self._groups.setdefault((rows, columns), []).append((each, chosen))
            factors.setdefault((rows, columns), []).extend(
                strength[kind] for kind in chosen for _ in range(each.heads)
            )
        self._factors = {shape: torch.tensor(values) for shape, values in factors.items()}

    def __call__(self) -> Tensor:
        """Return the penalty, in float32 also under autocast."""
        total: Tensor | None = None
        for shape, members in self._groups.items():
            device = members[0][0].weight.device
            with torch.autocast(device.type, enabled=False):
                blocks = torch.cat([each.blocks(chosen) for each, chosen in members])
                norms = block_norms(blocks, self.vectors, f"{shape[0]}x{shape[1]}")
                self._factors[shape] = self._factors[shape].to(device)
                term = (self._factors[shape] * norms.square()).sum()
            total = term if total is None else total + term
        return torch.zeros(()) if total is None else total


def attention_maps(net: nn.Module) -> Iterator[AttentionMap]:
    """Yield all attentions' maps: timm's (`qkv`; ConViT's `qk`, `v`; `q`, `k`, `v`) and ours."""
    for module in net.modules():
        heads = getattr(module, "num_heads", None)
        if not isinstance(heads, int):
            continue

        def has(name: str, kinds: int = 1, owner: Any = module, count: int = heads) -> bool:
            layer = getattr(owner, name, None)
            return isinstance(layer, nn.Linear) and layer.out_features % (kinds * count) == 0

        qkv: Any = getattr(module, "qkv", None)
        out: Any = getattr(module, "proj", None)
        names: dict[str, tuple[str, ...]] = {}
        if has("qkv", 3) and (
            not isinstance(out, nn.Linear) or 3 * out.in_features == qkv.out_features
        ):
            names = {"qkv": KINDS}
        elif has("qk", 2) and has("v"):
            names = {"qk": ("q", "k"), "v": ("v",)}
        elif has("query"):
            names = {name: (name[0],) for name in ("query", "key", "value") if has(name)}
        elif has("q") and has("k") and has("v"):
            names = {name: (name,) for name in KINDS}
        for name, kinds in names.items():
            layer: Any = getattr(module, name)
            yield AttentionMap(layer.weight, kinds, heads)
        if "query" in names and "value" not in names and isinstance(out, nn.Linear):
            yield AttentionMap(out.weight, ("v",), heads, transposed=True)
