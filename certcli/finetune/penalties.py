"""Maximum singular value penalisation of attention: large query, key and value maps cost."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from certcli.lipschitz.numerics.trainable import estimated_block_norms
from certcli.system.errors import ArchitectureError

KINDS = ("q", "k", "v")


@dataclass(frozen=True)
class AttentionMap:
    """The map of one kind within a weight (or its transpose): its rows, split into heads."""

    weight: Tensor
    kind: str
    place: int
    kinds: int
    heads: int
    transposed: bool = False

    def blocks(self) -> Tensor:
        """Return the heads' matrices: (heads, rows, columns)."""
        weight = self.weight.T if self.transposed else self.weight
        return weight.chunk(self.kinds)[self.place].unflatten(0, (self.heads, -1))


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
        self.strengths = dict(zip(KINDS, weights, strict=True))
        self.vectors: dict[str, Tensor] = {}
        maps = list(attention_maps(net))
        if not maps:
            raise ArchitectureError(
                "there is no attention whose query, key and value maps could be penalised",
                "drop --msvp",
            )
        self._alike: dict[tuple[int, ...], list[AttentionMap]] = {}
        for each in maps:
            if self.strengths[each.kind] > 0:
                with torch.no_grad():
                    shape = tuple(each.blocks().shape[1:])
                self._alike.setdefault(shape, []).append(each)

    def __call__(self) -> Tensor:
        """Return the penalty, in float32 also under autocast."""
        total = torch.zeros(())
        for (rows, columns), members in self._alike.items():
            device = members[0].weight.device
            with torch.autocast(device.type, enabled=False):
                blocks = torch.cat([each.blocks() for each in members])
                norms = estimated_block_norms(blocks, self.vectors, f"{rows}x{columns}")
                factors = [self.strengths[each.kind] for each in members for _ in range(each.heads)]
                squares = torch.tensor(factors, device=device) * norms.square()
                total = total.to(device) + squares.sum()
        return total


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
            for place, kind in enumerate(kinds):
                yield AttentionMap(layer.weight, kind, place, len(kinds), heads)
        if "query" in names and "value" not in names and isinstance(out, nn.Linear):
            yield AttentionMap(out.weight, "v", 0, 1, heads, transposed=True)
