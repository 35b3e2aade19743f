"""Norm layers that are Lipschitz with a useful constant."""

import torch
from torch import Tensor, nn

from certcli.errors import ArchitectureError


class CenterNorm(nn.Module):
    """x -> d / (d - 1) * weight * (x - mean(x)) + bias over the last dimension: (..., d) -> (..., d).

    Linear, so its Lipschitz constant is d / (d - 1) * sigma(diag(weight) P), P the projection off the constant vectors.
    Source: Qi et al. 2023 (LipsFormer), eq. 4.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        if width < 2:
            raise ArchitectureError("CenterNorm needs at least two features")
        self.width = width
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(dim=-1, keepdim=True)
        return centred * (self.weight * (self.width / (self.width - 1))) + self.bias

    def extra_repr(self) -> str:
        return str(self.width)


def build_center_norm(old: nn.Module) -> CenterNorm:
    """CenterNorm of the width of a LayerNorm over the last dimension."""
    shape = getattr(old, "normalized_shape", None)
    if shape is None or len(shape) != 1:
        raise ArchitectureError(f"{type(old).__name__} is not a LayerNorm over the last dimension")
    return CenterNorm(int(shape[0]))


def build_identity(old: nn.Module) -> nn.Identity:
    return nn.Identity()
