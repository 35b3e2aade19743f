"""Attention with fixed orthogonal weights: every head multiplies its values by one orthogonal matrix over the tokens."""

from torch import Tensor, nn

from certcli.nn.attention import copy_linear
from certcli.nn.attention_weights import AttentionShape, AttentionWeights
from certcli.nn.orthogonal_mixing import OrthogonalMixing
from certcli.system.errors import ArchitectureError


class OrthogonalAttention(nn.Module):
    """x -> W_O ([M_h W_V,h x]_h + p), M_h (n, n) orthogonal: (b, n, d) -> (b, n, d), for n tokens and no other number.

    The limit of attention whose weights do not depend on the image. Constant |W_O| max_h |M_h| |W_V|, by the parts.
    """

    def __init__(
        self, tokens: int, width: int, heads: int, head_width: int, bias: bool, out_width: int, proj_bias: bool
    ) -> None:
        super().__init__()
        self.num_heads, self.head_dim = heads, head_width
        self.value = nn.Linear(width, heads * head_width, bias=bias)
        self.mixing = OrthogonalMixing(tokens, heads * head_width, heads)
        self.proj = nn.Linear(heads * head_width, out_width, bias=proj_bias)

    def mix(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """[M_h v_h]_h + p, the input of `proj`: (b, n, d) -> (b, n, h * dh)."""
        if mask is not None:
            raise ArchitectureError("orthogonal token mixing takes no mask")
        return self.mixing(self.value(x))

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        if attn_mask is not None or is_causal:
            raise ArchitectureError("orthogonal token mixing takes no mask")
        return self.proj(self.mix(x))

    def start(self, weights: AttentionWeights) -> None:
        """Values and the output map as they were, M_h = I: the matrices have to be learned from images."""
        copy_linear(self.value, weights.value, weights.value_bias)
        for matrix in self.mixing.maps:
            nn.init.eye_(matrix.weight)  # type: ignore[arg-type]
        nn.init.zeros_(self.mixing.shift)
        copy_linear(self.proj, weights.proj_weight, weights.proj_bias)

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, head_dim={self.head_dim}"


def build(old: nn.Module, tokens: int | None = None) -> OrthogonalAttention:
    """Orthogonal mixing of so many tokens with the widths, heads and biases of a timm attention without positions."""
    shape = AttentionShape.of(old)
    if shape.window is not None:
        raise ArchitectureError("orthogonal-attention would lose the windows' relative position bias and mask")
    if shape.gated:
        raise ArchitectureError("orthogonal-attention would lose the gated positions of ConViT's GPSA")
    if tokens is None or tokens < 1:
        raise ArchitectureError("orthogonal-attention needs to be told its number of tokens")
    return OrthogonalAttention(
        tokens, shape.width, shape.heads, shape.head_width, shape.bias, shape.out_width, shape.proj_bias
    )
