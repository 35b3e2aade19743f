"""Tokens mixed by parallel 1-d convolutions instead of attention: linear, its constant exact."""

from torch import Tensor, nn

from certcli.nn.attention import AttentionReplacement, copy_linear
from certcli.nn.attention_weights import AttentionShape, AttentionWeights
from certcli.system.errors import ArchitectureError

KERNEL = 3
"""Taps over the token axis: each token and its two neighbours in the order of the sequence."""


class ConvAttention(AttentionReplacement):
    """x -> W_O [K_h * x]_h, * the zero-padded convolution over the token axis: (b, n, d) -> (b, n,
    d).

    One kernel (head_dim, d, 3) a head; the heads side by side are one convolution. The class token,
    where there is one, is the first of the sequence. Source: the token mixing of CoViT, of the Cauchy
    paper.
    """

    title = "a convolution over tokens"

    def __init__(self, shape: AttentionShape, kernel: int = KERNEL) -> None:
        super().__init__(shape)
        self.convolution = nn.Conv1d(
            shape.width, shape.inner, kernel, padding=kernel // 2, bias=shape.bias
        )
        self.proj = nn.Linear(shape.inner, shape.out_width, bias=shape.proj_bias)

    def mix(self, x: Tensor) -> Tensor:
        """Return [K_h * x]_h, the input of `proj`: (b, n, d) -> (b, n, h * dh)."""
        return self.convolution(x.transpose(1, 2)).transpose(1, 2)

    def start(self, weights: AttentionWeights) -> None:
        """Set every tap to W_V / taps, the local mean of the old values; copy the output map."""
        taps = self.convolution.kernel_size[0]
        copy_linear(
            self.convolution,
            (weights.value / taps).unsqueeze(-1).expand(-1, -1, taps),
            weights.value_bias,
        )
        copy_linear(self.proj, weights.proj_weight, weights.proj_bias)


def build_conv_attention(old: nn.Module, kernel: int = KERNEL) -> ConvAttention:
    """Build token convolutions with the shape of a timm attention without positions of its own."""
    shape = AttentionShape.of(old)
    shape.require_no_positions("conv-attention")
    require_odd(kernel)
    return ConvAttention(shape, kernel)


def require_odd(kernel: int) -> None:
    """Raise ArchitectureError for a kernel without a middle, which would not keep the tokens' number."""
    if kernel < 1 or kernel % 2 == 0:
        raise ArchitectureError(f"a token convolution needs an odd kernel, not {kernel}")
