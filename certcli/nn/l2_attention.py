"""L2 self-attention, queries tied to keys: Lipschitz with tied values, else on bounded rows."""

import math

import torch
from torch import Tensor, nn

from certcli.nn.attention import LipschitzAttention, copy_linear, tied_query
from certcli.nn.attention_weights import AttentionShape, AttentionWeights


class L2Attention(LipschitzAttention):
    """x -> W_O [P_h q_h]_h with q_h = W_h x and P_h,ij ~ exp(-|q_h,i - q_h,j|^2 / sqrt(dh)): (b, n,
    d) -> (b, n, d).

    This is Kim et al.'s F = [P_h x A_h W_V,h]_h W_O with A_h = W_h W_h^T / sqrt(dh): since x A_h
    W_V,h = (x W_h) (W_h^T W_V,h / sqrt(dh)), the value and output maps act one after the other on
    P_h q_h and are stored as their product, `proj`. The factor A_h is what makes it Lipschitz:
    values must be a function of the tied queries.

    With a bias b_h in the queries the logits do not change and the output gains a constant.
    Source: Kim, Papamakarios, Mnih 2021, section 3.2.
    """

    title = "L2 attention"

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__(shape)
        self.query = nn.Linear(shape.width, shape.inner, bias=shape.bias)

    def mix(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return [P_h q_h]_h, the input of `proj`: (b, n, d) -> (b, n, h * dh)."""
        q = self.split_heads(self.query(x))
        return self.average(l2_logits(q), q, mask)

    def start(self, weights: AttentionWeights) -> None:
        """Set tied queries by `tied_query`, `proj` to least squares: W_O,h W_V,h W_h^+."""
        queries = [tied_query(weights, h) for h in range(self.num_heads)]
        copy_linear(self.query, torch.cat(queries), None)
        outputs = weights.proj_weight.double().split(self.head_dim, dim=1)
        values = [weights.head(weights.value, h) for h in range(self.num_heads)]
        maps = [
            o @ v @ torch.linalg.pinv(q) for o, v, q in zip(outputs, values, queries, strict=True)
        ]
        bias = weights.proj_bias
        if weights.value_bias is not None:
            constant = weights.proj_weight.double() @ weights.value_bias.double()
            bias = constant if bias is None else constant + bias.double()
        copy_linear(self.proj, torch.cat(maps, dim=1), bias)
        self.start_positions(weights)


def l2_logits(q: Tensor) -> Tensor:
    """Return -|q_i - q_j|^2 / sqrt(dh), up to a constant of the row: (b, h, n, dh) -> (b, h, n, n)."""
    # -|q_i - q_j|^2 = 2 q_i.q_j - |q_j|^2 - |q_i|^2, and softmax over j does not see |q_i|^2
    return (2 * q @ q.transpose(-2, -1) - q.square().sum(-1).unsqueeze(-2)) / math.sqrt(q.shape[-1])


class L2UntiedValueAttention(LipschitzAttention):
    """x -> W_O [P_h W_V,h x]_h, P_h,ij ~ exp(-|q_h,i - q_h,j|^2 / sqrt(dh)), q_h = W_h x: (b, n, d)
    -> (b, n, d).

    The form of the published code. Without the factor A_h it is not Lipschitz on R^(n x d): along
    the null space of W_h, values grow while the attention weights stay. It has a bound on rows of
    bounded norm (docs/bounds.md, 6.3).
    """

    title = "L2 attention with untied values"

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__(shape)
        self.query = nn.Linear(shape.width, shape.inner, bias=shape.bias)
        self.value = nn.Linear(shape.width, shape.inner, bias=shape.bias)

    def mix(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return [P_h v_h]_h, the input of `proj`: (b, n, d) -> (b, n, h * dh)."""
        return self.average(
            l2_logits(self.split_heads(self.query(x))), self.split_heads(self.value(x)), mask
        )

    def start(self, weights: AttentionWeights) -> None:
        """Set tied queries by `tied_query`; copy values and the output map."""
        copy_linear(
            self.query, torch.cat([tied_query(weights, h) for h in range(self.num_heads)]), None
        )
        copy_linear(self.value, weights.value, weights.value_bias)
        copy_linear(self.proj, weights.proj_weight, weights.proj_bias)
        self.start_positions(weights)


build = L2Attention.replacing
build_untied = L2UntiedValueAttention.replacing
