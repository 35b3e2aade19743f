"""The shape and the weights of an attention to be replaced: the shape builds the new one, the
weights start it.

Only timm's Attention, Swin's WindowAttention and ConViT's GPSA and MHSA are read. An option that a
replacement would drop is refused by name.
"""

from dataclasses import dataclass
from typing import Any

import torch
from timm.layers.attention import Attention
from timm.models.convit import GPSA, MHSA
from timm.models.swin_transformer import WindowAttention
from torch import Tensor, nn

from certcli.system.errors import ArchitectureError

_NORM_OPTIONS = {"q_norm": "qk_norm", "k_norm": "qk_norm", "norm": "scale_norm"}


@dataclass(frozen=True)
class AttentionShape:
    """Widths, heads, biases and positions of an attention, read without its weights.

    Attributes:
        window: (height, width) of Swin's windows, whose relative position bias is kept, or None.
        gated: Whether the attention holds ConViT's gated positional map.
    """

    width: int
    heads: int
    head_width: int
    bias: bool
    out_width: int
    proj_bias: bool
    window: tuple[int, int] | None = None
    gated: bool = False

    @staticmethod
    def of(old: nn.Module) -> "AttentionShape":
        """Read `old`'s shape; ArchitectureError: unknown, or an option would be lost."""
        attention = _require_known_attention(old)
        inputs, inner = _qkv_maps(attention)
        window = tuple(attention.window_size) if type(attention) is WindowAttention else None
        return AttentionShape(
            width=inputs[0].in_features,
            heads=attention.num_heads,
            head_width=inner // attention.num_heads,
            bias=inputs[0].bias is not None,
            out_width=attention.proj.out_features,
            proj_bias=attention.proj.bias is not None,
            window=window,
            gated=type(attention) is GPSA,
        )

    @property
    def inner(self) -> int:
        """Width of all heads together."""
        return self.heads * self.head_width

    def require_no_positions(self, name: str) -> None:
        """Raise ArchitectureError where the replacement `name` would lose positions."""
        if self.window is not None:
            raise ArchitectureError(
                f"{name} would lose the windows' relative position bias and mask"
            )
        if self.gated:
            raise ArchitectureError(f"{name} would lose the gated positions of ConViT's GPSA")


@dataclass
class AttentionWeights:
    """The maps of a dot-product attention: softmax(scale q k^T + position_bias) v, then `proj`.

    Attributes:
        query, key, value: (heads * head_dim, width); their biases (heads * head_dim,) or None.
        proj_weight: (out, heads * head_dim).
        position_bias: (heads, n, n) for windows of n tokens, else None.
        gate, gate_weight, gate_bias: (heads,), (heads, 3) and (heads,) of ConViT's positional map,
            else None.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    query_bias: Tensor | None
    key_bias: Tensor | None
    value_bias: Tensor | None
    proj_weight: Tensor
    proj_bias: Tensor | None
    scale: float
    num_heads: int
    head_dim: int
    position_bias: Tensor | None = None
    gate: Tensor | None = None
    gate_weight: Tensor | None = None
    gate_bias: Tensor | None = None

    @staticmethod
    def of(old: nn.Module) -> "AttentionWeights":
        """Read the weights of `old`; ArchitectureError as for `AttentionShape.of`."""
        attention = _require_known_attention(old)
        layers, inner = _qkv_maps(attention)
        weight = torch.cat([layer.weight.detach() for layer in layers])
        bias = (
            None if layers[0].bias is None else torch.cat([layer.bias.detach() for layer in layers])
        )
        query, key, value = weight.split(inner)
        query_bias, key_bias, value_bias = (None, None, None) if bias is None else bias.split(inner)
        weights = AttentionWeights(
            query,
            key,
            value,
            query_bias,
            key_bias,
            value_bias,
            proj_weight=attention.proj.weight.detach(),
            proj_bias=None if attention.proj.bias is None else attention.proj.bias.detach(),
            scale=float(attention.scale),
            num_heads=attention.num_heads,
            head_dim=inner // attention.num_heads,
        )
        if type(attention) is WindowAttention:
            weights.position_bias = attention._get_rel_pos_bias()[0].detach()
        if type(attention) is GPSA:
            weights.gate = attention.gating_param.detach()
            weights.gate_weight, weights.gate_bias = (
                attention.pos_proj.weight.detach(),
                attention.pos_proj.bias.detach(),
            )
        return weights

    def head(self, tensor: Tensor, number: int) -> Tensor:
        """Return the rows of one head, in float64."""
        return tensor[number * self.head_dim : (number + 1) * self.head_dim].double()


def _qkv_maps(attention: Any) -> tuple[list[nn.Linear], int]:
    """Return the layers whose outputs, side by side, are queries, keys, values; their widths."""
    layers = [attention.qk, attention.v] if type(attention) is GPSA else [attention.qkv]
    return layers, sum(layer.out_features for layer in layers) // 3


def _require_known_attention(old: nn.Module) -> Any:
    kind = type(old)
    where = f"{kind.__name__} of {kind.__module__}"
    if kind not in (Attention, WindowAttention, GPSA, MHSA):
        raise ArchitectureError(
            f"no replacement for {where}",
            "attentions that can be replaced: timm's Attention, Swin's WindowAttention, ConViT's GPSA and MHSA",
        )
    for name, option in _NORM_OPTIONS.items():
        if not isinstance(getattr(old, name, nn.Identity()), nn.Identity):
            raise ArchitectureError(
                f"the option '{option}' ('{name}') of {where} would be lost in a replacement"
            )
    if getattr(old, "gate", None) is not None:
        raise ArchitectureError(f"the option 'gated' of {where} would be lost in a replacement")
    for name in ("qkv", "qk", "v", "proj", "pos_proj"):
        part = getattr(old, name, None)
        if part is not None and type(part) is not nn.Linear:
            raise ArchitectureError(
                f"'{name}' of {where} is a {type(part).__name__}, not a plain linear layer"
            )
    return old
