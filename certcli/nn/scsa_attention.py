"""Scaled cosine attention: queries, keys, values on (nearly) unit spheres, Lipschitz everywhere."""

import math

import torch
from torch import Tensor, nn

from certcli.nn.attention import LipschitzAttention, copy_linear
from certcli.nn.attention_weights import AttentionShape, AttentionWeights

EPS = 1.0
"""Added to the squared norms. Another value only changes units: (t W, t^2 eps) is the same function as (W, eps)."""


class CosineAttention(LipschitzAttention):
    """x -> W_O [nu_h softmax(tau_h q k^T) v]_h with rows q, k, v = w / sqrt(|w|^2 + eps) of w = W
    x: (b, n, d) -> (b, n, d).

    nu and tau: one learned number a head, 1 at first; eps = 1 is fixed. Source: Qi et al. 2023
    (LipsFormer), section 3.2.
    """

    title = "scaled cosine similarity attention"

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__(shape)
        self.query, self.key, self.value = (
            nn.Linear(shape.width, shape.inner, bias=shape.bias) for _ in range(3)
        )
        self.tau = nn.Parameter(torch.ones(shape.heads))
        self.nu = nn.Parameter(torch.ones(shape.heads))

    def mix(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return [nu_h P_h v_h]_h, the input of `proj`: (b, n, d) -> (b, n, h * dh)."""
        q, k, v = (self._rows(layer, x) for layer in (self.query, self.key, self.value))
        logits = self.tau.view(-1, 1, 1) * q @ k.transpose(-2, -1)
        return self.average(logits, self.nu.view(-1, 1, 1) * v, mask)

    def _rows(self, layer: nn.Linear, x: Tensor) -> Tensor:
        w = self.split_heads(layer(x))
        return w * (w.square().sum(dim=-1, keepdim=True) + EPS).rsqrt()

    def start(self, weights: AttentionWeights) -> None:
        """Set W / s_h, tau_h = 2 scale s_q s_k, nu_h = sqrt(2) s_v: the old function on rows of
        typical norms.

        s_h^2 = |W_h|_F^2 + |b_h|^2 is the mean square of |W_h u + b_h| over u with E u u^T = I, as
        behind a LayerNorm. At
        |w| = s the new row is w / sqrt(2 s^2): tau and nu undo that. Both maps grow with s: larger norms are shortened.
        """
        heads = self.num_heads
        maps = (weights.query, weights.key, weights.value)
        sizes = []
        biases = (weights.query_bias, weights.key_bias, weights.value_bias)
        for layer, weight, bias in zip(
            (self.query, self.key, self.value), maps, biases, strict=True
        ):
            square = weight.double().square().sum(1) + (
                0 if bias is None else bias.double().square()
            )
            size = square.view(heads, -1).sum(1).sqrt().clamp_min(1e-6)
            each = size.repeat_interleave(self.head_dim)
            copy_linear(layer, weight / each.unsqueeze(1), None if bias is None else bias / each)
            sizes.append(size)
        self.tau.data.copy_(2 * weights.scale * sizes[0] * sizes[1])
        self.nu.data.copy_(math.sqrt(2) * sizes[2])
        copy_linear(self.proj, weights.proj_weight, weights.proj_bias)
        self.start_positions(weights)


build = CosineAttention.replacing
