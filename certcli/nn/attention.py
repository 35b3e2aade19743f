"""What the Lipschitz attentions share: heads, the output map, and the positions of the attention they replace."""

import math
from typing import ClassVar, Self

import torch
from timm.models.swin_transformer import get_relative_position_index
from torch import Tensor, nn

from certcli.nn.attention_weights import AttentionShape, AttentionWeights
from certcli.system.errors import ArchitectureError


class LipschitzAttention(nn.Module):
    """x -> proj(mix(x)): (b, n, d) -> (b, n, out). A subclass defines `mix`, and `start` from the weights of the old one.

    window: Swin's windows are the batch axis, and the learned relative position bias is added to the logits, under timm's
    names `relative_position_bias_table` and `relative_position_index`. gated: heads are (1 - g_h) P_h v_h + g_h B_h v_h
    with ConViT's constant positional map B_h and gate g_h, under timm's names `pos_proj` and `gating_param`.
    """

    title: ClassVar[str] = "this attention"
    relative_position_index: Tensor

    def __init__(
        self,
        width: int,
        heads: int,
        head_width: int,
        bias: bool,
        out_width: int,
        proj_bias: bool,
        window: tuple[int, int] | None = None,
        gated: bool = False,
    ) -> None:
        super().__init__()
        self.num_heads, self.head_dim = heads, head_width
        self.window_size, self.gated = window, gated
        self.proj = nn.Linear(heads * head_width, out_width, bias=proj_bias)
        if window is not None:
            cells = (2 * window[0] - 1) * (2 * window[1] - 1)
            self.relative_position_bias_table = nn.Parameter(torch.zeros(cells, heads))
            self.register_buffer("relative_position_index", get_relative_position_index(*window), persistent=False)
        if gated:
            self.pos_proj = nn.Linear(3, heads)
            self.gating_param = nn.Parameter(torch.ones(heads))

    @classmethod
    def replacing(cls, old: nn.Module) -> Self:
        """One with the widths, heads, biases and positions of a known attention; its weights are not read."""
        return cls(**vars(AttentionShape.of(old)))

    def mix(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The input of `proj`: (b, n, d) -> (b, n, h * dh). mask (m, n, n): added to the logits, b a multiple of m."""
        raise NotImplementedError

    def start(self, weights: AttentionWeights) -> None:
        """Closed-form start from the weights of the attention that this one replaces."""
        raise NotImplementedError

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, mask: Tensor | None = None
    ) -> Tensor:
        if attn_mask is not None or is_causal:
            raise ArchitectureError(f"{self.title} takes no mask but that of shifted windows")
        return self.proj(self.mix(x, mask))

    def split_heads(self, features: Tensor) -> Tensor:
        """(b, n, h * dh) -> (b, h, n, dh)."""
        b, n, _ = features.shape
        return features.view(b, n, self.num_heads, self.head_dim).transpose(1, 2)

    def average(self, logits: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """[P_h v_h]_h with the positions of this layer: (b, h, n, n), (b, h, n, dh) -> (b, n, h * dh)."""
        b, h, n, _ = logits.shape
        if self.window_size is not None:
            logits = logits + self.position_bias()
        if mask is not None:
            logits = (logits.view(-1, len(mask), h, n, n) + mask.to(logits.dtype).unsqueeze(1)).view(b, h, n, n)
        weights = logits.softmax(dim=-1)
        if self.gated:
            gate = torch.sigmoid(self.gating_param).view(1, -1, 1, 1)
            positions = self.pos_proj(self.get_rel_indices(n)).permute(0, 3, 1, 2).softmax(dim=-1)
            weights = (1 - gate) * weights + gate * positions
        return (weights @ values).transpose(1, 2).reshape(b, n, -1)

    def position_bias(self) -> Tensor:
        """(h, n, n): Swin's table, read at the relative position of every pair of tokens."""
        n = len(self.relative_position_index)
        return self.relative_position_bias_table[self.relative_position_index.view(-1)].view(n, n, -1).permute(2, 0, 1)

    def get_rel_indices(self, n: int) -> Tensor:
        """(x, y, x^2 + y^2) from token to token of a square grid, (1, n, n, 3): what ConViT's `pos_proj` reads."""
        side = math.isqrt(n)
        if side * side != n:
            raise ArchitectureError(f"gated positional attention needs a square grid of tokens, not {n} of them")
        weight = self.pos_proj.weight
        steps = torch.arange(side, dtype=weight.dtype, device=weight.device)
        offset = steps.view(1, -1) - steps.view(-1, 1)
        x = offset.repeat(side, side)
        y = offset.repeat_interleave(side, dim=0).repeat_interleave(side, dim=1)
        return torch.stack([x, y, x**2 + y**2], dim=-1).unsqueeze(0)

    def start_positions(self, weights: AttentionWeights) -> None:
        """Copy the relative position bias, or the positional map and its gate."""
        if self.window_size is not None and weights.position_bias is not None:
            pairs = weights.position_bias.permute(1, 2, 0).reshape(-1, self.num_heads)
            table = self.relative_position_bias_table.data
            table[self.relative_position_index.view(-1)] = pairs.to(table)
        if self.gated and weights.gate is not None:
            assert weights.gate_weight is not None
            assert weights.gate_bias is not None
            self.gating_param.data.copy_(weights.gate)
            self.pos_proj.weight.data.copy_(weights.gate_weight)
            self.pos_proj.bias.data.copy_(weights.gate_bias)

    def start_proj(self, weights: AttentionWeights) -> None:
        """Copy the output map."""
        copy_linear(self.proj, weights.proj_weight, weights.proj_bias)

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, head_dim={self.head_dim}"


def copy_linear(layer: nn.Linear, weight: Tensor, bias: Tensor | None) -> None:
    """Put a map into `layer`; a bias that one of the two lacks counts as zero."""
    layer.weight.data.copy_(weight)
    if layer.bias is not None:
        layer.bias.data.zero_() if bias is None else layer.bias.data.copy_(bias)


def tied_query(weights: AttentionWeights, head: int) -> Tensor:
    """W_h (dh, d) with 2 W_h^T W_h / sqrt(dh) the best positive approximation of rank dh to scale W_Q,h^T W_K,h.

    L2 logits are (2 q_i.q_j - |q_j|^2) / sqrt(dh) up to a constant of the row; dot-product logits are scale q_i.k_j. The
    nearest symmetric matrix to A is (A + A^T) / 2, its nearest positive semidefinite one of rank dh keeps the dh largest
    positive eigenvalues (Eckart-Young for symmetric matrices).
    """
    product = weights.head(weights.query, head).T @ weights.head(weights.key, head)
    product = product * (weights.scale * math.sqrt(weights.head_dim))
    values, vectors = torch.linalg.eigh((product + product.T) / 2)
    top, directions = values[-weights.head_dim :].clamp_min(0), vectors[:, -weights.head_dim :]
    # a direction that the logits do not use still carries values: give it a small weight instead of none
    floor = 1e-2 * top.max().clamp_min(1e-12)
    return (top.clamp_min(floor) / 2).sqrt().unsqueeze(1) * directions.T
