"""Attentions that replace timm's: the shape and weights of the old one, and the bases of the
new ones.

Only timm's Attention, Swin's WindowAttention and ConViT's GPSA and MHSA are read. An option that a
replacement would drop is refused by name.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch
from timm.layers.attention import Attention
from timm.models.convit import GPSA, MHSA
from timm.models.swin_transformer import WindowAttention, get_relative_position_index
from torch import Tensor, nn

from certcli.system.errors import ArchitectureError, raise_if

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
        raise_if(
            self.gated, ArchitectureError, f"{name} would lose the gated positions of ConViT's GPSA"
        )


@dataclass
class AttentionWeights:
    """The maps of a dot-product attention: softmax(scale q k^T + position_bias) v, then `proj`.

    Attributes:
        query, key, value: (heads * head_dim, width); their biases (heads * head_dim,) or None.
        proj_weight: (out, heads * head_dim).
        position_bias: (heads, n, n) for windows of n tokens, else None.
        gate: ConViT's gate and positional map, by their names.
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
    gate: Mapping[str, Tensor] = field(default_factory=dict)

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
            names = ("gating_param", "pos_proj.weight", "pos_proj.bias")
            weights.gate = {name: attention.get_parameter(name).detach() for name in names}
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
    raise_if(
        kind not in (Attention, WindowAttention, GPSA, MHSA),
        ArchitectureError,
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


class AttentionReplacement(nn.Module):
    """x -> proj(mix(x)): (b, n, d) -> (b, n, out). A subclass makes `proj` and its other maps, in
    the order of its state.
    """

    title: ClassVar[str]
    proj: nn.Linear

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__()
        self.num_heads = shape.heads
        self.head_dim = shape.head_width

    @classmethod
    def replacing(cls, old: nn.Module) -> Self:
        """Build one with the shape of a known attention, without reading its weights."""
        return cls(AttentionShape.of(old))

    def mix(self, x: Tensor) -> Tensor:
        """Return the input of `proj`: (b, n, d) -> (b, n, h * dh)."""
        raise NotImplementedError

    def start(self, weights: AttentionWeights) -> None:
        """Set all weights in closed form from those of the attention that this one replaces."""
        raise NotImplementedError

    def forward(
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        **of_windows: Tensor | None,
    ) -> Tensor:
        if attn_mask is not None or is_causal:
            raise ArchitectureError(f"{self.title} takes no mask but that of shifted windows")
        return self.proj(self.mix(x, **of_windows))

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, head_dim={self.head_dim}"


class LipschitzAttention(AttentionReplacement):
    """An attention that keeps the positions of the one it replaces, under timm's names.

    For Swin, windows are the batch axis and a learned relative position bias is added to the logits
    (`relative_position_bias_table`, `relative_position_index`). For ConViT, heads are (1 - g_h) P_h
    v_h + g_h B_h v_h with a constant positional map B_h and a gate g_h (`pos_proj`,
    `gating_param`).
    """

    maps: ClassVar[tuple[str, ...]]
    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    relative_position_index: Tensor

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__(shape)
        window = shape.window
        heads = shape.heads
        self.window_size = window
        self.gated = shape.gated
        self.proj = nn.Linear(shape.inner, shape.out_width, bias=shape.proj_bias)
        if window is not None:
            cells = (2 * window[0] - 1) * (2 * window[1] - 1)
            self.relative_position_bias_table = nn.Parameter(torch.zeros(cells, heads))
            self.register_buffer(
                "relative_position_index", get_relative_position_index(*window), persistent=False
            )
        if shape.gated:
            self.pos_proj = nn.Linear(3, heads)
            self.gating_param = nn.Parameter(torch.ones(heads))
        for name in self.maps:
            setattr(self, name, nn.Linear(shape.width, shape.inner, bias=shape.bias))

    def mix(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the input of `proj`: (b, n, d) -> (b, n, h * dh).

        Args:
            mask: (m, n, n), added to the logits; b is a multiple of m.
        """
        raise NotImplementedError

    def split_heads(self, features: Tensor) -> Tensor:
        """Split the heads: (b, n, h * dh) -> (b, h, n, dh)."""
        b, n, _ = features.shape
        return features.view(b, n, self.num_heads, self.head_dim).transpose(1, 2)

    def average(self, logits: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """Return [P_h v_h]_h with positions: (b, h, n, n), (b, h, n, dh) -> (b, n, h * dh)."""
        b, h, n, _ = logits.shape
        if self.window_size is not None:
            logits = logits + self.position_bias()
        if mask is not None:
            logits = (
                logits.view(-1, len(mask), h, n, n) + mask.to(logits.dtype).unsqueeze(1)
            ).view(b, h, n, n)
        weights = logits.softmax(dim=-1)
        if self.gated:
            gate = torch.sigmoid(self.gating_param).view(1, -1, 1, 1)
            positions = self.pos_proj(self.get_rel_indices(n)).permute(0, 3, 1, 2).softmax(dim=-1)
            weights = (1 - gate) * weights + gate * positions
        return (weights @ values).transpose(1, 2).reshape(b, n, -1)

    def position_bias(self) -> Tensor:
        """Return Swin's table at the relative position of every pair of tokens: (h, n, n)."""
        n = len(self.relative_position_index)
        return (
            self.relative_position_bias_table[self.relative_position_index.view(-1)]
            .view(n, n, -1)
            .permute(2, 0, 1)
        )

    def get_rel_indices(self, n: int) -> Tensor:
        """Return (x, y, x^2 + y^2) of tokens in a square grid, for `pos_proj`: (1, n, n, 3)."""
        side = math.isqrt(n)
        raise_if(
            side * side != n,
            ArchitectureError,
            f"gated positional attention needs a square grid of tokens, not {n} of them",
        )
        weight = self.pos_proj.weight
        steps = torch.arange(side, dtype=weight.dtype, device=weight.device)
        offset = steps.view(1, -1) - steps.view(-1, 1)
        x = offset.repeat(side, side)
        y = offset.repeat_interleave(side, dim=0).repeat_interleave(side, dim=1)
        return torch.stack([x, y, x**2 + y**2], dim=-1).unsqueeze(0)

    def start(self, weights: AttentionWeights) -> None:
        """Copy the maps and the relative position bias, or the positional map and its gate."""
        for name in self.maps:
            copy_linear(
                getattr(self, name), getattr(weights, name), getattr(weights, f"{name}_bias")
            )
        copy_linear(self.proj, weights.proj_weight, weights.proj_bias)
        if self.window_size is not None and weights.position_bias is not None:
            pairs = weights.position_bias.permute(1, 2, 0).reshape(-1, self.num_heads)
            table = self.relative_position_bias_table.data
            table[self.relative_position_index.view(-1)] = pairs.to(table)
        for name, value in weights.gate.items() if self.gated else ():
            self.get_parameter(name).data.copy_(value)


def copy_linear(layer: nn.Linear | nn.Conv1d, weight: Tensor, bias: Tensor | None) -> None:
    """Copy a map into `layer`; a missing bias is zero."""
    layer.weight.data.copy_(weight)
    if layer.bias is not None:
        layer.bias.data.zero_() if bias is None else layer.bias.data.copy_(bias)


def tied_query(weights: AttentionWeights, head: int) -> Tensor:
    """Return W_h (dh, d) with 2 W_h^T W_h / sqrt(dh) the best positive approximation of rank dh to
    scale W_Q,h^T W_K,h.

    L2 logits are (2 q_i.q_j - |q_j|^2) / sqrt(dh) up to a constant of the row; dot-product logits
    are scale q_i.k_j. The nearest symmetric matrix to A is (A + A^T) / 2, its nearest positive
    semidefinite one of rank dh keeps the dh largest positive eigenvalues (Eckart-Young for
    symmetric matrices).
    """
    product = weights.head(weights.query, head).T @ weights.head(weights.key, head)
    product = product * (weights.scale * math.sqrt(weights.head_dim))
    values, vectors = torch.linalg.eigh((product + product.T) / 2)
    top = values[-weights.head_dim :].clamp_min(0)
    directions = vectors[:, -weights.head_dim :]
    # a direction that the logits do not use still carries values: give it a small weight instead of
    # none
    floor = 1e-2 * top.max().clamp_min(1e-12)
    return (top.clamp_min(floor) / 2).sqrt().unsqueeze(1) * directions.T
