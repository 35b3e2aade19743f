"""Residual connections with a bound below 1 + L, and timm's block with them in place of its additions."""

import torch
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from certcli.errors import ArchitectureError


class ConvexResidual(nn.Module):
    """(x, f) -> (1 - t) x + t f with t = sigmoid(theta) in (0, 1): Lipschitz constant (1 - t) + t L_f."""

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor, branch: Tensor) -> Tensor:
        share = torch.sigmoid(self.theta)
        return (1 - share) * x + share * branch


class WeightedResidual(nn.Module):
    """(x, f) -> x + a f with a learned scalar a: Lipschitz constant 1 + |a| L_f."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, branch: Tensor) -> Tensor:
        return x + self.scale * branch


class ResidualBlock(nn.Module):
    """timm's pre-norm ViT block, part for part and name for name, with its two additions as modules."""

    def __init__(self, block: Block, residual: type[ConvexResidual] | type[WeightedResidual]) -> None:
        super().__init__()
        self.norm1, self.attn, self.ls1, self.drop_path1 = block.norm1, block.attn, block.ls1, block.drop_path1
        self.norm2, self.mlp, self.ls2, self.drop_path2 = block.norm2, block.mlp, block.ls2, block.drop_path2
        self.residual1, self.residual2 = residual(), residual()

    def forward(self, x: Tensor) -> Tensor:
        x = self.residual1(x, self.drop_path1(self.ls1(self.attn(self.norm1(x)))))
        return self.residual2(x, self.drop_path2(self.ls2(self.mlp(self.norm2(x)))))


def _require_plain(old: nn.Module) -> Block:
    if type(old) is not Block:
        raise ArchitectureError(
            f"residuals of {type(old).__name__} cannot be replaced, only those of timm's plain ViT Block"
        )
    return old


def build_convex(old: nn.Module) -> ResidualBlock:
    return ResidualBlock(_require_plain(old), ConvexResidual)


def build_weighted(old: nn.Module) -> ResidualBlock:
    return ResidualBlock(_require_plain(old), WeightedResidual)
