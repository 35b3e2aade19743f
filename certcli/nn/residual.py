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


Residual = type[ConvexResidual] | type[WeightedResidual]


class ResidualBlock(nn.Module):
    """timm's pre-norm ViT block, with the same parts and names, and its two additions as modules."""

    def __init__(self, block: Block, residual: Residual) -> None:
        super().__init__()
        self.norm1 = block.norm1
        self.attn = block.attn
        self.ls1 = block.ls1
        self.drop_path1 = block.drop_path1
        self.norm2 = block.norm2
        self.mlp = block.mlp
        self.ls2 = block.ls2
        self.drop_path2 = block.drop_path2
        self.residual1, self.residual2 = residual(), residual()

    def forward(self, x: Tensor) -> Tensor:
        x = self.residual1(x, self.drop_path1(self.ls1(self.attn(self.norm1(x)))))
        return self.residual2(x, self.drop_path2(self.ls2(self.mlp(self.norm2(x)))))


class ResidualConvitBlock(nn.Module):
    """ConViT's block with its two additions as modules."""

    def __init__(self, block: ConvitBlock, residual: Residual) -> None:
        super().__init__()
        self.norm1 = block.norm1
        self.attn = block.attn
        self.norm2 = block.norm2
        self.mlp = block.mlp
        self.drop_path = block.drop_path
        self.residual1, self.residual2 = residual(), residual()

    def forward(self, x: Tensor) -> Tensor:
        x = self.residual1(x, self.drop_path(self.attn(self.norm1(x))))
        return self.residual2(x, self.drop_path(self.mlp(self.norm2(x))))


class ResidualSwinBlock(SwinTransformerBlock):
    """Swin's block, additions as modules; windows, shift, mask its own. (b, h, w, c) -> same."""

    def __init__(self, block: SwinTransformerBlock, residual: Residual) -> None:
        nn.Module.__init__(self)
        for name in (
            "input_resolution",
            "window_size",
            "shift_size",
            "window_area",
            "dynamic_mask",
        ):
            setattr(self, name, getattr(block, name))
        self.norm1 = block.norm1
        self.attn = block.attn
        self.drop_path1 = block.drop_path1
        self.norm2 = block.norm2
        self.mlp = block.mlp
        self.drop_path2 = block.drop_path2
        mask: Any = block.attn_mask
        self.register_buffer("attn_mask", mask, persistent=False)
        self.residual1, self.residual2 = residual(), residual()

    def forward(self, x: Tensor) -> Tensor:
        x = self.residual1(x, self.drop_path1(self._attn(self.norm1(x))))
        return self.residual2(x, self.drop_path2(self.mlp(self.norm2(x))))


def _with_residuals(old: nn.Module, residual: Residual) -> nn.Module:
    if type(old) is Block:
        return ResidualBlock(old, residual)
    if type(old) is SwinTransformerBlock:
        return ResidualSwinBlock(old, residual)
    if type(old) is ConvitBlock:
        return ResidualConvitBlock(old, residual)
    raise ArchitectureError(
        f"residuals of {type(old).__name__} cannot be replaced, only those of the blocks of timm's ViT, Swin and ConViT"
    )


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
