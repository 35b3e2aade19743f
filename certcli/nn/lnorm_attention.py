"""Scores divided by their size (LipschitzNorm): Lipschitz everywhere, with O(1) in n."""

import torch
from torch import Tensor, nn

from certcli.nn.attention import LipschitzAttention, copy_linear
from certcli.nn.attention_weights import AttentionShape, AttentionWeights

FLOOR = 1e-12
"""Least divisor of the scores, for queries, keys or values that are all zero. The proof covers it."""


class LipschitzNormAttention(LipschitzAttention):
    """x -> W_O [softmax(q k^T / M_h) v]_h, M_h = max(|Q| max|k_j|, |Q| max|v_j|, max|k_j|
    max|v_j|): (b, n, d) -> (b, n, d).

    |Q| is the Frobenius norm of the head's queries of one image (or window). Scores shrink like 1 / sqrt(n): with many
    tokens the layer is close to a mean of values. Source: Dasoulas, Scaman, Virmaux 2021, section
    4.
    """

    title = "LipschitzNorm attention"

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__(shape)
        self.query, self.key, self.value = (
            nn.Linear(shape.width, shape.inner, bias=shape.bias) for _ in range(3)
        )

    def mix(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return [P_h v_h]_h, the input of `proj`: (b, n, d) -> (b, n, h * dh)."""
        q, k, v = (self.split_heads(layer(x)) for layer in (self.query, self.key, self.value))
        all_queries = q.flatten(2).norm(dim=-1)
        key, value = (rows.norm(dim=-1).amax(dim=-1) for rows in (k, v))
        size = torch.maximum(
            torch.maximum(all_queries * key, all_queries * value), key * value
        ).clamp_min(FLOOR)
        return self.average(q @ k.transpose(-2, -1) / size[..., None, None], v, mask)

    def start(self, weights: AttentionWeights) -> None:
        """Copy all maps; only the division by M_h is new."""
        copy_linear(self.query, weights.query, weights.query_bias)
        copy_linear(self.key, weights.key, weights.key_bias)
        copy_linear(self.value, weights.value, weights.value_bias)
        copy_linear(self.proj, weights.proj_weight, weights.proj_bias)
        self.start_positions(weights)


build = LipschitzNormAttention.replacing
