"""Tied L2 logits with values of their own: Lipschitz on bounded rows only (behind a LayerNorm), unlike `l2_attention`."""

from typing import Any

import torch
from torch import Tensor, nn

from certcli.nn.attention import LipschitzAttention, copy_linear, tied_query
from certcli.nn.attention_weights import AttentionWeights
from certcli.nn.l2_attention import l2_logits


class L2UntiedValueAttention(LipschitzAttention):
    """x -> W_O [P_h W_V,h x]_h, P_h,ij ~ exp(-|q_h,i - q_h,j|^2 / sqrt(dh)), q_h = W_h x: (b, n, d) -> (b, n, d).

    The form that published code runs. Without the factor A_h it is not Lipschitz on R^(n x d): along directions that W_h
    does not see, values grow without the weights noticing. It has a bound where all rows do (docs/bounds.md, 6.3).
    """

    title = "L2 attention with untied values"

    def __init__(
        self, width: int, heads: int, head_width: int, bias: bool, out_width: int, proj_bias: bool, **positions: Any
    ) -> None:
        super().__init__(width, heads, head_width, bias, out_width, proj_bias, **positions)
        self.query = nn.Linear(width, heads * head_width, bias=bias)
        self.value = nn.Linear(width, heads * head_width, bias=bias)

    def mix(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """[P_h v_h]_h, the input of `proj`: (b, n, d) -> (b, n, h * dh)."""
        return self.average(l2_logits(self.split_heads(self.query(x))), self.split_heads(self.value(x)), mask)

    def start(self, weights: AttentionWeights) -> None:
        """Tied queries by `tied_query`; values and the output map as they were."""
        copy_linear(self.query, torch.cat([tied_query(weights, h) for h in range(self.num_heads)]), None)
        copy_linear(self.value, weights.value, weights.value_bias)
        self.start_proj(weights)
        self.start_positions(weights)


def build(old: nn.Module) -> L2UntiedValueAttention:
    """L2 attention with untied values, with the widths, heads, biases and positions of a timm attention."""
    return L2UntiedValueAttention.replacing(old)
