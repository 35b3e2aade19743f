"""Attention whose scores are divided by their own size (LipschitzNorm): Lipschitz everywhere, with a constant O(1) in n."""

from typing import Any

import torch
from torch import Tensor, nn

from certcli.nn.attention import LipschitzAttention, copy_linear
from certcli.nn.attention_weights import AttentionWeights

FLOOR = 1e-12
"""Least divisor of the scores, for queries, keys or values that are all zero. Part of the layer: the proof allows it."""


class LipschitzNormAttention(LipschitzAttention):
    """x -> W_O [softmax(q k^T / M_h) v]_h, M_h = max(|Q| max|k_j|, |Q| max|v_j|, max|k_j| max|v_j|): (b, n, d) -> (b, n, d).

    |Q| is the Frobenius norm of the head's queries of one image (or window). Scores shrink like 1 / sqrt(n): with many
    tokens the layer is close to a mean of values. Source: Dasoulas, Scaman, Virmaux 2021, section 4.
    """

    title = "LipschitzNorm attention"

    def __init__(
        self, width: int, heads: int, head_width: int, bias: bool, out_width: int, proj_bias: bool, **positions: Any
    ) -> None:
        super().__init__(width, heads, head_width, bias, out_width, proj_bias, **positions)
        inner = heads * head_width
        self.query, self.key, self.value = (nn.Linear(width, inner, bias=bias) for _ in range(3))

    def mix(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """[P_h v_h]_h, the input of `proj`: (b, n, d) -> (b, n, h * dh)."""
        q, k, v = (self.split_heads(layer(x)) for layer in (self.query, self.key, self.value))
        all_queries = q.flatten(2).norm(dim=-1)
        key, value = (rows.norm(dim=-1).amax(dim=-1) for rows in (k, v))
        size = torch.maximum(torch.maximum(all_queries * key, all_queries * value), key * value).clamp_min(FLOOR)
        return self.average(q @ k.transpose(-2, -1) / size[..., None, None], v, mask)

    def start(self, weights: AttentionWeights) -> None:
        """All maps as they were; the division by M_h is what changes."""
        copy_linear(self.query, weights.query, weights.query_bias)
        copy_linear(self.key, weights.key, weights.key_bias)
        copy_linear(self.value, weights.value, weights.value_bias)
        self.start_proj(weights)
        self.start_positions(weights)


def build(old: nn.Module) -> LipschitzNormAttention:
    """LipschitzNorm attention with the widths, heads, biases and positions of a timm attention."""
    return LipschitzNormAttention.replacing(old)
