"""Layers of slope at most 1: activations, token mixing, and heads that lose no gradient norm.

Softmax attention averages tokens, which shrinks their differences, so it cannot be orthogonal. Two
of its limits are: fixed weights, with which a head multiplies its tokens by an orthogonal matrix
(no longer a function of the image), and weights of 0 or 1, with which every channel of a token
attends to exactly one token (still a function of the image). Proofs: docs/bounds.md, section 11.
A head on the mean of n tokens loses a factor sqrt(n); these put the tokens side by side.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from certcli.system.errors import ArchitectureError, raise_if

SOFTMAX_SLOPE = 1.1996788
"""A little more than the largest slope of u tanh u, 1.19967864...: the root of r tanh r = 1 is its place and its value.

The excess, 1.1e-7, is more than the rounding of 1/r to float32."""


class MaxMin(nn.Module):
    """(a, b) -> (max(a, b), min(a, b)) on the two halves of the last dimension: (..., 2m) -> (...,
    2m).

    A permutation of coordinates at every point, hence an isometry piece by piece: Lipschitz
    constant 1 in l2, and no gradient norm is lost. Source: Anil, Lucas, Grosse 2019 (GroupSort with
    groups of two).
    """

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] % 2:
            raise ValueError(
                f"MaxMin compares the two halves of {x.shape[-1]} features: an even number is needed"
            )
        if torch.is_grad_enabled() and x.requires_grad:
            return _Sorted.apply(x)
        return _larger_then_smaller(x)


def _larger_then_smaller(x: Tensor) -> Tensor:
    """Return the larger of each x[..., i] and x[..., i + m], then the smaller: both (..., 2m)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([torch.maximum(first, second), torch.minimum(first, second)], dim=-1)


class _Sorted(torch.autograd.Function):
    """MaxMin with a backward pass of products: torch.maximum's, of masks, takes 4 times as long."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return _larger_then_smaller(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        first, second = inputs[0].chunk(2, dim=-1)
        # 1 or 0 at once: a mask that is converted takes twice as long
        ctx.save_for_backward(first.clone().ge_(second))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        first, second = gradient.chunk(2, dim=-1)
        stays = (first - second) * ctx.saved_tensors[0]
        return torch.cat([second + stays, first - stays], dim=-1)


class SoftMaxMin(nn.Module):
    """(a, b) -> m +- tanh(d/T) d/r with m = (a + b)/2, d = (a - b)/2, on the two halves: (..., 2m)
    -> (..., 2m).

    m +- tanh(d/T) d are the averages of a and b under softmax weights of (a, b)/T and of -(a, b)/T.
    Dividing their distance from the mean by r, the root of r tanh r = 1, makes the Lipschitz
    constant 1 for every T (docs/bounds.md, 11.3).
    """

    def __init__(self) -> None:
        super().__init__()
        self.log_temperature = nn.Parameter(torch.tensor(-2.0))

    def forward(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        mean = (first + second) / 2
        half = (first - second) / 2
        offset = half * torch.tanh(half * torch.exp(-self.log_temperature)) * (1 / SOFTMAX_SLOPE)
        return torch.cat([mean + offset, mean - offset], dim=-1)


class Rounded(nn.Module):
    """x -> the nearest whole number, of two the even one; a gradient passes as through x itself.

    A staircase: it has no Lipschitz constant, and lies within 1/2 of x.
    """

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and x.requires_grad:
            return x + (torch.round(x) - x).detach()  # both are exact
        return torch.round(x)


class ClippedReLU(nn.Module):
    """x -> max(min(x, theta), 0) with one learnt threshold theta an entry: (b, *shape) -> (b,
    *shape).

    Lipschitz constant 1 in l2. A threshold of at most 0 makes its entry 0 for every x. Source:
    Huang et al. 2021 (Local-Lip), section 4, ReLU-theta; the networks of CertViT's Table 1 have it.
    """

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__()
        self.threshold = nn.Parameter(torch.ones(tuple(shape)))

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1:] != self.threshold.shape:  # broadcast, one entry would move several
            raise ValueError(
                f"{tuple(x.shape[1:])} entries, {tuple(self.threshold.shape)} thresholds"
            )
        return torch.minimum(x, self.threshold).clamp_min(0.0)


def build_maxmin(old: nn.Module) -> MaxMin:
    return MaxMin()


def build_relu(old: nn.Module) -> nn.ReLU:
    return nn.ReLU()


class OrthogonalMixing(nn.Module):
    """x -> [M_h x_h]_h + p, x_h the h-th group of channels, M_h (n, n), p (n, d): (b, n, d) -> (b,
    n, d).

    Attention with weights that do not depend on the image. Its Lipschitz constant is max_h |M_h|: 1
    while the matrices are orthogonal, as they are at the start and stay under the optimiser
    `stiefel`. p tells places apart for the activation that follows.
    """

    def __init__(self, tokens: int, width: int, heads: int) -> None:
        super().__init__()
        raise_if(
            heads < 1 or width % heads,
            ArchitectureError,
            f"{heads} heads do not divide a width of {width}",
        )
        self.heads = heads
        self.maps = nn.ModuleList(nn.Linear(tokens, tokens, bias=False) for _ in range(heads))
        for matrix in self.maps:
            nn.init.orthogonal_(matrix.weight)  # type: ignore[arg-type]
        self.shift = nn.Parameter(torch.zeros(tokens, width))

    def forward(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        matrices = torch.stack([matrix.weight for matrix in self.maps])  # type: ignore[misc]
        grouped = (
            x.reshape(b, n, self.heads, d // self.heads)
            .permute(2, 1, 0, 3)
            .reshape(self.heads, n, -1)
        )
        mixed = torch.bmm(matrices, grouped).reshape(self.heads, n, b, -1).permute(2, 1, 0, 3)
        return mixed.reshape(b, n, d) + self.shift

    def extra_repr(self) -> str:
        return f"heads={self.heads}"


class TokenMaxMin(nn.Module):
    """Tokens i and i + stride, shifted by p, meet in their first `across` channels; the others meet
    in MaxMin within a token.

    Hard attention: a pair becomes its maximum and minimum, channel by channel. y_ic = sum_j
    P^c_ij(x) (x + p)_jc, where P^c(x) is the permutation of tokens that sorts the pair in channel
    c, so that each output entry attends to exactly one token, and which one depends on the image. A
    permutation of entries at every point, continuous where two are equal: Lipschitz constant 1. The
    learned p (n, d) sets the offset at which a pair swaps: far from 0 it makes a fixed routing.
    With `soft` the pair becomes `SoftMaxMin`'s softmax averages. (b, n, d) -> (b, n, d).
    """

    def __init__(
        self, tokens: int, width: int, stride: int, across: int | None = None, soft: bool = False
    ) -> None:
        super().__init__()
        raise_if(
            stride < 1 or tokens % (2 * stride),
            ArchitectureError,
            f"{tokens} tokens do not fall into pairs at a distance of {stride}",
        )
        self.across = width if across is None else across
        raise_if(
            not 0 < self.across <= width or (width - self.across) % 2,
            ArchitectureError,
            f"{self.across} of {width} channels cannot meet across tokens: an even rest is needed",
        )
        self.stride = stride
        self.shift = nn.Parameter(0.1 * torch.randn(tokens, width))
        self.pair: nn.Module = SoftMaxMin() if soft else MaxMin()
        self.within = MaxMin()

    def forward(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        shifted = x + self.shift
        groups = (b, n // (2 * self.stride), -1)
        # the two halves of a group are its tokens at a distance of `stride`
        if self.across == d:
            return self.pair(shifted.reshape(groups)).reshape(b, n, d)
        across, within = shifted.split([self.across, d - self.across], dim=-1)
        met = self.pair(across.reshape(groups)).reshape(b, n, self.across)
        return torch.cat([met, self.within(within)], dim=-1)

    def extra_repr(self) -> str:
        return f"stride={self.stride}, across={self.across}"


class ChannelRoll(nn.Module):
    """Move three quarters of the channels by one token: down, right, and both, around the edges:
    (b, side^2, d) -> the same.

    A permutation of entries: Lipschitz constant 1. A linear layer behind it maps each token's own
    first quarter, and the other quarters of three neighbours: a window of 2 x 2 tokens. Source:
    LipNeXt (Hu et al. 2026); here both axes. With `back` the channels move up and left.
    """

    def __init__(self, side: int, width: int, back: bool = False) -> None:
        super().__init__()
        raise_if(
            width % 4,
            ArchitectureError,
            f"a width of {width} does not fall into quarters",
            "a multiple of 4",
        )
        self.side = side
        self.step = -1 if back else 1

    def forward(self, x: Tensor) -> Tensor:
        still, down, right, both = x.unflatten(1, (self.side, self.side)).chunk(4, dim=-1)
        step = self.step
        rolled = [still, down.roll(step, 1), right.roll(step, 2), both.roll((step, step), (1, 2))]
        return torch.cat(rolled, dim=-1).flatten(1, 2)

    def extra_repr(self) -> str:
        return f"side={self.side}, step={self.step}"


class TokenShift(nn.Module):
    """x -> x + p: (b, n, d) -> (b, n, d). A token mixing without the mixing, for comparisons."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.shift = nn.Parameter(0.1 * torch.randn(tokens, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


class FlatHead(nn.Module):
    """Tokens side by side, then linear layers with MaxMin between them: (b, n, d) -> (b, k).

    With `widths` empty it is one linear map, which suitable weights make equal to mean or
    class-token pooling and a head.
    """

    def __init__(self, features: int, widths: Sequence[int], classes: int) -> None:
        super().__init__()
        sizes = [features, *widths]
        self.hidden = nn.ModuleList(nn.Linear(i, o) for i, o in pairwise(sizes))
        self.act = MaxMin()
        self.out = nn.Linear(sizes[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for layer in self.hidden:
            x = self.act(layer(x))
        return self.out(x)


class L2Pool(nn.Module):
    """The length of each channel over each of windows x windows windows of tokens: (b, side^2, d)
    -> (b, windows^2, d).

    Lipschitz constant 1: each entry of x is in one length, which has slope 1. A gradient keeps its
    norm where no length is
    0. Unlike a flat head's, its weights do not know where in a window a feature was. Source:
      LipNeXt (Hu et al. 2026).
    """

    def __init__(self, side: int, windows: int) -> None:
        super().__init__()
        raise_if(
            windows < 1 or side % windows,
            ArchitectureError,
            f"{side} x {side} tokens do not fall into {windows} x {windows} windows",
        )
        self.side = side
        self.windows = windows

    def forward(self, x: Tensor) -> Tensor:
        reach = self.side // self.windows
        tokens = x.unflatten(1, (self.windows, reach, self.windows, reach))
        if torch.is_grad_enabled() and x.requires_grad:
            return _Lengths.apply(tokens).flatten(1, 2)
        return torch.linalg.vector_norm(tokens, dim=(2, 4)).flatten(1, 2)

    def extra_repr(self) -> str:
        return f"side={self.side}, windows={self.windows}"


class _Lengths(torch.autograd.Function):
    """l2 lengths along dims 2 and 4, with the gradient 0 where a length is 0.

    `torch.linalg.vector_norm` takes ten times as long in training. Proofs follow it all the same:
    the error of a root near 0 has no known bound, that of a norm has.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(tokens: Tensor) -> Tensor:
        return tokens.square().sum(4).sum(2).sqrt()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        tokens, length = ctx.saved_tensors
        share = torch.where(length > 0, gradient / length, 0.0)
        return tokens * share.unsqueeze(3).unsqueeze(2)


def build_flat_head(net: nn.Module, widths: Sequence[int] = ()) -> nn.Module:
    """Give a plain timm ViT a head over all tokens, in place of pooling; return it."""
    if type(net) is not VisionTransformer or net.attn_pool is not None or net.pos_embed is None:
        raise ArchitectureError(
            "a flat head replaces the head of timm's plain VisionTransformer only"
        )
    if not isinstance(net.head, nn.Linear):
        raise ArchitectureError("the network has no linear head to replace")
    raise_if(
        any(width % 2 for width in widths),
        ArchitectureError,
        f"head widths {list(widths)} must be even: MaxMin compares the two halves",
    )
    tokens = net.patch_embed.num_patches + net.num_prefix_tokens
    net.global_pool = ""
    net.head = FlatHead(tokens * net.embed_dim, widths, net.head.out_features)
    return net
