"""Attention with fixed orthogonal weights: heads multiply values by an orthogonal token matrix."""

from torch import Tensor, nn

from certcli.nn.attention import AttentionReplacement, copy_linear
from certcli.nn.attention_weights import AttentionShape, AttentionWeights
from certcli.nn.orthogonal_mixing import OrthogonalMixing
from certcli.system.errors import ArchitectureError


class OrthogonalAttention(AttentionReplacement):
    """x -> W_O ([M_h W_V,h x]_h + p), M_h (n, n) orthogonal: (b, n, d) -> (b, n, d), for n tokens
    and no other number.

    The limit of attention whose weights do not depend on the image. Constant |W_O| max_h |M_h|
    |W_V|, by the parts.
    """

    title = "orthogonal token mixing"

    def __init__(self, shape: AttentionShape, tokens: int) -> None:
        super().__init__(shape)
        self.value = nn.Linear(shape.width, shape.inner, bias=shape.bias)
        self.mixing = OrthogonalMixing(tokens, shape.inner, shape.heads)
        self.proj = nn.Linear(shape.inner, shape.out_width, bias=shape.proj_bias)

    def mix(self, x: Tensor) -> Tensor:
        """Return [M_h v_h]_h + p, the input of `proj`: (b, n, d) -> (b, n, h * dh)."""
        return self.mixing(self.value(x))

    def start(self, weights: AttentionWeights) -> None:
        """Copy values and the output map; set M_h = I: the matrices have to be learned from images."""
        copy_linear(self.value, weights.value, weights.value_bias)
        for matrix in self.mixing.maps:
            nn.init.eye_(matrix.weight)  # type: ignore[arg-type]
        nn.init.zeros_(self.mixing.shift)
        copy_linear(self.proj, weights.proj_weight, weights.proj_bias)


def build_orthogonal_attention(old: nn.Module, tokens: int | None = None) -> OrthogonalAttention:
    """Build orthogonal mixing of `tokens` tokens, shaped as timm's plain attention."""
    shape = AttentionShape.of(old)
    shape.require_no_positions("orthogonal-attention")
    if tokens is None or tokens < 1:
        raise ArchitectureError("orthogonal-attention needs its number of tokens")
    return OrthogonalAttention(shape, tokens)
