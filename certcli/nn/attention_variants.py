"""Attentions in place of timm's: tied L2, scaled cosine, LipschitzNorm; and what mixes tokens
without scores: convolutions over them, orthogonal matrices.

Each has a Lipschitz constant everywhere, or (L2 with untied values) on bounded rows:
docs/bounds.md, sections 6 and 10.
"""

import math

import torch
from torch import Tensor, nn

from certcli.nn.attention import (
    AttentionReplacement,
    AttentionShape,
    AttentionWeights,
    LipschitzAttention,
    copy_linear,
    tied_query,
)
from certcli.nn.layers import OrthogonalMixing
from certcli.system.errors import ArchitectureError, raise_if


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
    maps = ("query",)

    def mix(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return [P_h q_h]_h, the input of `proj`: (b, n, d) -> (b, n, h * dh)."""
        q = self.split_heads(self.query(x))
        return self.average(l2_logits(q), q, mask)

    def start(self, weights: AttentionWeights) -> None:
        """Set tied queries by `tied_query`, `proj` to least squares: W_O,h W_V,h W_h^+."""
        super().start(weights)
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
    maps = ("query", "value")

    def mix(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return [P_h v_h]_h, the input of `proj`: (b, n, d) -> (b, n, h * dh)."""
        return self.average(
            l2_logits(self.split_heads(self.query(x))), self.split_heads(self.value(x)), mask
        )

    def start(self, weights: AttentionWeights) -> None:
        """Set tied queries by `tied_query`; copy values and the output map."""
        super().start(weights)
        queries = [tied_query(weights, h) for h in range(self.num_heads)]
        copy_linear(self.query, torch.cat(queries), None)


EPS = 1.0
"""Added to the squared norms. Another value only changes units: (t W, t^2 eps) is the same function as (W, eps)."""


class CosineAttention(LipschitzAttention):
    """x -> W_O [nu_h softmax(tau_h q k^T) v]_h with rows q, k, v = w / sqrt(|w|^2 + eps) of w = W
    x: (b, n, d) -> (b, n, d).

    nu and tau: one learned number a head, 1 at first; eps = 1 is fixed. Source: Qi et al. 2023
    (LipsFormer), section 3.2.
    """

    title = "scaled cosine similarity attention"
    maps = ("query", "key", "value")

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__(shape)
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
        super().start(weights)
        heads = self.num_heads
        sizes = []
        for name in self.maps:
            weight, bias = getattr(weights, name), getattr(weights, f"{name}_bias")
            square = weight.double().square().sum(1) + (
                0 if bias is None else bias.double().square()
            )
            size = square.view(heads, -1).sum(1).sqrt().clamp_min(1e-6)
            each = size.repeat_interleave(self.head_dim)
            copy_linear(
                getattr(self, name),
                weight / each.unsqueeze(1),
                None if bias is None else bias / each,
            )
            sizes.append(size)
        self.tau.data.copy_(2 * weights.scale * sizes[0] * sizes[1])
        self.nu.data.copy_(math.sqrt(2) * sizes[2])


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
    maps = ("query", "key", "value")

    def mix(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return [P_h v_h]_h, the input of `proj`: (b, n, d) -> (b, n, h * dh)."""
        q, k, v = (self.split_heads(layer(x)) for layer in (self.query, self.key, self.value))
        all_queries = q.flatten(2).norm(dim=-1)
        key, value = (rows.norm(dim=-1).amax(dim=-1) for rows in (k, v))
        size = torch.maximum(
            torch.maximum(all_queries * key, all_queries * value), key * value
        ).clamp_min(FLOOR)
        return self.average(q @ k.transpose(-2, -1) / size[..., None, None], v, mask)


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


build_l2_attention = L2Attention.replacing
build_l2_untied_value_attention = L2UntiedValueAttention.replacing
build_cosine_attention = CosineAttention.replacing
build_lipschitz_norm_attention = LipschitzNormAttention.replacing


def build_conv_attention(old: nn.Module, kernel: int = KERNEL) -> ConvAttention:
    """Build token convolutions with the shape of a timm attention without positions of its own."""
    shape = AttentionShape.of(old)
    shape.require_no_positions("conv-attention")
    require_odd(kernel)
    return ConvAttention(shape, kernel)


def require_odd(kernel: int) -> None:
    """Raise ArchitectureError for a kernel without a middle, which would not keep the tokens' number."""
    raise_if(
        kernel < 1 or kernel % 2 == 0,
        ArchitectureError,
        f"a token convolution needs an odd kernel, not {kernel}",
    )


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
