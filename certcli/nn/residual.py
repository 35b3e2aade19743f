"""Residual connections with a bound below 1 + L, and timm's blocks with them for additions."""

from typing import Any

import torch
from timm.models.convit import Block as ConvitBlock
from timm.models.swin_transformer import SwinTransformerBlock
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from certcli.system.errors import ArchitectureError


class ConvexResidual(nn.Module):
    """(x, f) -> (1 - t) x + t f, t = sigmoid(theta) in (0, 1): constant (1 - t) + t L_f."""

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


class _AddsByModules:
    residual1: ConvexResidual | WeightedResidual
    residual2: ConvexResidual | WeightedResidual


class ResidualBlock(_AddsByModules, Block):
    """timm's pre-norm ViT block, with the same parts and names, and its two additions as modules."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        x = self.residual1(x, self.drop_path1(self.ls1(self.attn(self.norm1(x)))))
        return self.residual2(x, self.drop_path2(self.ls2(self.mlp(self.norm2(x)))))


class ResidualConvitBlock(_AddsByModules, ConvitBlock):
    """ConViT's block with its two additions as modules."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.residual1(x, self.drop_path(self.attn(self.norm1(x))))
        return self.residual2(x, self.drop_path(self.mlp(self.norm2(x))))


class ResidualSwinBlock(_AddsByModules, SwinTransformerBlock):
    """Swin's block, additions as modules; windows, shift, mask its own. (b, h, w, c) -> same."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.residual1(x, self.drop_path1(self._attn(self.norm1(x))))
        return self.residual2(x, self.drop_path2(self.mlp(self.norm2(x))))


_WITH_RESIDUALS: dict[type[nn.Module], type[nn.Module]] = {
    Block: ResidualBlock,
    ConvitBlock: ResidualConvitBlock,
    SwinTransformerBlock: ResidualSwinBlock,
}


def _with_residuals(
    block: Any, residual: type[ConvexResidual] | type[WeightedResidual]
) -> nn.Module:
    """Return the block itself, which from now on adds by modules."""
    kind = _WITH_RESIDUALS.get(type(block))
    if kind is None:
        raise ArchitectureError(
            f"residuals of {type(block).__name__} cannot be replaced, only those of the blocks of timm's ViT, Swin and ConViT"
        )
    block.__class__ = kind
    block.residual1, block.residual2 = residual(), residual()
    return block


def build_convex(old: nn.Module) -> nn.Module:
    return _with_residuals(old, ConvexResidual)


def build_weighted(old: nn.Module) -> nn.Module:
    return _with_residuals(old, WeightedResidual)


def attention_weight(model: nn.Module) -> float | None:
    """Return the largest weight of an attention branch in its residual sum: t if convex, |a| if
    weighted, 1 if plain.

    None for a network without attention.
    """
    shares = []
    for module in model.modules():
        if isinstance(module, ResidualBlock):
            residual = module.residual1
            value = (
                torch.sigmoid(residual.theta)
                if isinstance(residual, ConvexResidual)
                else residual.scale.abs()
            )
            shares.append(float(value))
        elif hasattr(module, "attn") and hasattr(module, "norm1"):
            shares.append(1.0)
    return max(shares) if shares else None
