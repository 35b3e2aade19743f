"""Tied L2 self-attention: Lipschitz on all of R^(n x d), unlike dot-product attention."""

import math

from timm.layers.attention import Attention
from torch import Tensor, nn

from certcli.errors import ArchitectureError


class L2Attention(nn.Module):
    """x -> W_O [P_h q_h]_h with q_h = W_h x and P_h,ij ~ exp(-|q_h,i - q_h,j|^2 / sqrt(dh)): (b, n, d) -> (b, n, d).

    This is Kim et al.'s F = [P_h x A_h W_V,h]_h W_O with A_h = W_h W_h^T / sqrt(dh): since x A_h W_V,h =
    (x W_h) (W_h^T W_V,h / sqrt(dh)), the value and output maps act one after the other on P_h q_h and are stored as their
    product, `proj`. The factor A_h is what makes it Lipschitz: values must be a function of the tied queries.

    With a bias b_h in the queries the logits do not change and the output gains a constant.
    Source: Kim, Papamakarios, Mnih 2021, section 3.2.
    """

    def __init__(self, width: int, heads: int, head_width: int, bias: bool, out_width: int, proj_bias: bool) -> None:
        super().__init__()
        self.num_heads = heads
        self.head_dim = head_width
        self.query = nn.Linear(width, heads * head_width, bias=bias)
        self.proj = nn.Linear(heads * head_width, out_width, bias=proj_bias)

    def mix(self, x: Tensor) -> Tensor:
        """[P_h q_h]_h, the input of `proj`: (b, n, d) -> (b, n, h * dh)."""
        b, n, _ = x.shape
        q = self.query(x).view(b, n, self.num_heads, self.head_dim).transpose(1, 2)
        # -|q_i - q_j|^2 = 2 q_i.q_j - |q_j|^2 - |q_i|^2, and softmax over j does not see |q_i|^2
        logits = (2 * q @ q.transpose(-2, -1) - q.square().sum(-1).unsqueeze(-2)) / math.sqrt(self.head_dim)
        return (logits.softmax(dim=-1) @ q).transpose(1, 2).reshape(b, n, -1)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        if attn_mask is not None or is_causal:
            raise ArchitectureError("L2 attention takes no mask")
        return self.proj(self.mix(x))

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, head_dim={self.head_dim}"


def require_plain_attention(old: nn.Module) -> Attention:
    """`old`, if it is timm's Attention with no option that this replacement would silently drop."""
    if type(old) is not Attention:
        raise ArchitectureError(f"L2 attention replaces timm's Attention, not {type(old).__name__}")
    for name in ("q_norm", "k_norm", "norm"):
        if not isinstance(getattr(old, name, nn.Identity()), nn.Identity):
            raise ArchitectureError(f"L2 attention does not know the option '{name}' of timm's Attention")
    if getattr(old, "gate", None) is not None:
        raise ArchitectureError("L2 attention does not know the option 'gated' of timm's Attention")
    return old


def build(old: nn.Module) -> L2Attention:
    """L2 attention with the widths, heads and biases of a timm Attention."""
    attention = require_plain_attention(old)
    head_width = attention.qkv.out_features // (3 * attention.num_heads)
    return L2Attention(
        attention.qkv.in_features,
        attention.num_heads,
        head_width,
        bias=attention.qkv.bias is not None,
        out_width=attention.proj.out_features,
        proj_bias=attention.proj.bias is not None,
    )
