"""Activations of slope at most 1."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

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
        return _sorted(x)


def _sorted(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([torch.maximum(first, second), torch.minimum(first, second)], dim=-1)


class _Sorted(torch.autograd.Function):
    """MaxMin with a backward pass of products: torch.maximum's, of masks, takes 4 times as long."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return _sorted(x)

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
            return _StraightThrough.apply(x)
        return torch.round(x)


class _StraightThrough(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.round(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


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
