"""Activations of slope at most 1."""

import torch
from torch import Tensor, nn


class MaxMin(nn.Module):
    """(a, b) -> (max(a, b), min(a, b)) on the two halves of the last dimension: (..., 2m) -> (..., 2m).

    A permutation of coordinates at every point, hence an isometry piece by piece: Lipschitz constant 1 in l2, and no
    gradient norm is lost. Source: Anil, Lucas, Grosse 2019 (GroupSort with groups of two).
    """

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] % 2:
            raise ValueError(f"MaxMin compares the two halves of {x.shape[-1]} features: an even number is needed")
        first, second = x.chunk(2, dim=-1)
        return torch.cat([torch.maximum(first, second), torch.minimum(first, second)], dim=-1)


def build_maxmin(old: nn.Module) -> MaxMin:
    return MaxMin()


def build_relu(old: nn.Module) -> nn.ReLU:
    return nn.ReLU()
