"""Maximum singular value penalisation of attention: smaller query, key and value maps, paid for in the loss."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from certcli.lipschitz.numerics.power import block_norms
from certcli.system.errors import ArchitectureError, UsageError

KINDS = ("q", "k", "v")


@dataclass(frozen=True)
class _Part:
    """Some rows of one weight (or of its transpose), kind by kind: they are split into heads."""

    path: str
    weight: Tensor
    kinds: tuple[str, ...]
    heads: int
    transposed: bool = False

    def blocks(self, wanted: tuple[str, ...], per_head: bool) -> Tensor:
        """(wanted kinds * heads, rows, columns)."""
        weight = self.weight.T if self.transposed else self.weight
        split = weight.reshape(len(self.kinds), -1, weight.shape[1])
        chosen = [self.kinds.index(kind) for kind in wanted]
        split = split if len(chosen) == len(split) else split[chosen]
        return split.reshape(len(wanted) * self.heads, -1, weight.shape[1]) if per_head else split


class SpectralPenalty:
    """sum over layers and heads of l_q sigma(W_q)^2 + l_k sigma(W_k)^2 + l_v sigma(W_v)^2 -> (), with gradient.

    weights: (l_q, l_k, l_v); per_head: a term for each head, else one for the matrix of all heads. Norms are estimated by
    power iteration, one step a call from the vectors of the last one, all matrices of one shape at once. Of a tied L2
    attention W_q counts as the query map and the rows of `proj`, head by head, as the value map; it has no key map.
    Errors: ArchitectureError if no attention is found. Source: Hu et al. 2024 (SpecFormer), equations 11 to 13.
    """

    def __init__(self, net: nn.Module, weights: tuple[float, float, float], per_head: bool = True) -> None:
        if len(weights) != 3 or any(not 0 <= weight < float("inf") for weight in weights):
            raise UsageError(f"the penalty takes three finite weights of at least 0 (q, k, v), not {weights}")
        strength = dict(zip(KINDS, weights, strict=True))
        self._groups: dict[tuple[int, int], list[tuple[_Part, tuple[str, ...]]]] = {}
        self._vectors: dict[str, Tensor] = {}
        self._per_head = per_head
        self.names: list[str] = []
        parts = list(_attention_parts(net))
        if not parts:
            raise ArchitectureError(
                "there is no attention whose query, key and value maps could be penalised", "drop --msvp"
            )
        factors: dict[tuple[int, int], list[float]] = {}
        for part in parts:
            wanted = tuple(kind for kind in part.kinds if strength[kind] > 0)
            if not wanted:
                continue
            with torch.no_grad():
                blocks = part.blocks(wanted, per_head)
            shape = (blocks.shape[1], blocks.shape[2])
            self._groups.setdefault(shape, []).append((part, wanted))
            each = len(blocks) // len(wanted)
            factors.setdefault(shape, []).extend(strength[kind] for kind in wanted for _ in range(each))
            self.names += [f"{part.path}.{kind}" for kind in wanted]
        self._factors = {shape: torch.tensor(values) for shape, values in factors.items()}

    def __call__(self) -> Tensor:
        """The penalty; in float32 also under autocast."""
        total: Tensor | None = None
        for shape, members in self._groups.items():
            device = members[0][0].weight.device
            with torch.autocast(device.type, enabled=False):
                blocks = torch.cat([part.blocks(wanted, self._per_head) for part, wanted in members])
                norms = block_norms(blocks, self._vectors, f"{shape[0]}x{shape[1]}")
                if self._factors[shape].device != device:
                    self._factors[shape] = self._factors[shape].to(device)
                term = (self._factors[shape] * norms.square()).sum()
            total = term if total is None else total + term
        return torch.zeros(()) if total is None else total

    def state(self) -> dict[str, Tensor]:
        """What the next call starts from."""
        return dict(self._vectors)

    def load(self, state: Mapping[str, Tensor]) -> None:
        self._vectors = {name: value.clone() for name, value in state.items()}


def _attention_parts(net: nn.Module) -> Iterator[_Part]:
    """The maps of every attention layer: timm's (`qkv`; ConViT's `qk` and `v`; `q`, `k`, `v`) and ours (`query`, ...)."""
    for path, module in net.named_modules():
        heads = getattr(module, "num_heads", None)
        if not isinstance(heads, int):
            continue

        def part(name: str, kinds: tuple[str, ...], owner: Any = module, at: str = path, count: int = heads) -> _Part:
            return _Part(f"{at}.{name}", getattr(owner, name).weight, kinds, count)

        def has(name: str, kinds: int = 1, owner: Any = module, count: int = heads) -> bool:
            layer = getattr(owner, name, None)
            return isinstance(layer, nn.Linear) and layer.out_features % (kinds * count) == 0

        out: Any = getattr(module, "proj", None)
        if has("qkv", 3) and (not isinstance(out, nn.Linear) or 3 * out.in_features == module.qkv.out_features):
            yield part("qkv", KINDS)
        elif has("qk", 2) and has("v"):
            yield part("qk", ("q", "k"))
            yield part("v", ("v",))
        elif has("query"):
            yield part("query", ("q",))
            if has("key"):
                yield part("key", ("k",))
            if has("value"):
                yield part("value", ("v",))
            elif isinstance(out, nn.Linear):
                yield _Part(f"{path}.proj", out.weight, ("v",), heads, transposed=True)
        elif has("q") and has("k") and has("v"):
            for name in KINDS:
                yield part(name, (name,))
