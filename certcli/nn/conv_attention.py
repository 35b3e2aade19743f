"""Tokens mixed by parallel one-dimensional convolutions instead of attention: linear, so its constant is exact."""

from torch import Tensor, nn

from certcli.nn.attention_weights import AttentionShape, AttentionWeights
from certcli.system.errors import ArchitectureError

KERNEL = 3
"""Taps over the token axis: each token and its two neighbours in the order of the sequence."""


class ConvAttention(nn.Module):
    """x -> W_O [K_h * x]_h, * the zero-padded convolution over the token axis: (b, n, d) -> (b, n, d).

    One kernel (head_dim, d, 3) a head; the heads side by side are one convolution. The class token, where there is one,
    is the first of the sequence. Source: the token mixing of CoViT as CertViT compares with it.
    """

    def __init__(
        self, width: int, heads: int, head_width: int, bias: bool, out_width: int, proj_bias: bool, kernel: int = KERNEL
    ) -> None:
        super().__init__()
        self.num_heads, self.head_dim = heads, head_width
        self.convolution = nn.Conv1d(width, heads * head_width, kernel, padding=kernel // 2, bias=bias)
        self.proj = nn.Linear(heads * head_width, out_width, bias=proj_bias)

    def mix(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """[K_h * x]_h, the input of `proj`: (b, n, d) -> (b, n, h * dh)."""
        if mask is not None:
            raise ArchitectureError("convolutions over tokens take no mask")
        return self.convolution(x.transpose(1, 2)).transpose(1, 2)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        if attn_mask is not None or is_causal:
            raise ArchitectureError("convolutions over tokens take no mask")
        return self.proj(self.mix(x))

    def start(self, weights: AttentionWeights) -> None:
        """Every tap W_V / taps, the local mean of the old values; the output map as it was."""
        taps = self.convolution.kernel_size[0]
        self.convolution.weight.data.copy_((weights.value / taps).unsqueeze(-1).expand(-1, -1, taps))
        if self.convolution.bias is not None:
            bias = weights.value_bias
            self.convolution.bias.data.zero_() if bias is None else self.convolution.bias.data.copy_(bias)
        self.proj.weight.data.copy_(weights.proj_weight)
        if self.proj.bias is not None and weights.proj_bias is not None:
            self.proj.bias.data.copy_(weights.proj_bias)

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, head_dim={self.head_dim}"


def build(old: nn.Module, kernel: int = KERNEL) -> ConvAttention:
    """Token convolutions with the widths, heads and biases of a timm attention that knows no positions of its own."""
    shape = AttentionShape.of(old)
    if shape.window is not None:
        raise ArchitectureError("conv-attention would lose the windows' relative position bias and mask")
    if shape.gated:
        raise ArchitectureError("conv-attention would lose the gated positions of ConViT's GPSA")
    if kernel < 1 or kernel % 2 == 0:
        raise ArchitectureError(f"a token convolution needs an odd kernel, not {kernel}")
    return ConvAttention(
        shape.width, shape.heads, shape.head_width, shape.bias, shape.out_width, shape.proj_bias, kernel
    )
