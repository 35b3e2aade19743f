"""What stands around attention in a block: norms with a useful Lipschitz constant, residual
connections with a bound below 1 + L, and timm's blocks with them for additions. Also the words by
which arguments name norms and activations: closed tables from words to classes.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from timm.layers import create_act, create_norm
from timm.layers.norm import LayerNorm as TimmLayerNorm
from timm.models.convit import Block as ConvitBlock
from timm.models.swin_transformer import SwinTransformerBlock
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from certcli.system.errors import ArchitectureError, Refused, one_line, raise_if


class CenterNorm(nn.Module):
    """x -> d / (d - 1) * weight * (x - mean(x)) + bias over the last dimension: (..., d) -> (...,
    d).

    Linear, so its Lipschitz constant is d / (d - 1) * sigma(diag(weight) P), P the projection off
    the constant vectors. Source: Qi et al. 2023 (LipsFormer), eq. 4.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        raise_if(width < 2, ArchitectureError, "CenterNorm needs at least two features")
        self.width = width
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(dim=-1, keepdim=True)
        return centred * (self.weight * (self.width / (self.width - 1))) + self.bias

    def extra_repr(self) -> str:
        return str(self.width)


class FloorNorm(nn.Module):
    """x -> weight * P x / max(s, floor) + bias, P x = x - mean(x), s = |P x| / sqrt(d): (..., d) ->
    (..., d).

    A LayerNorm whose deviation never falls below `floor` > 0; above it, LayerNorm with eps = 0. P x
    / max(s, floor) is the projection of P x to the ball of radius sqrt(d) floor, divided by floor:
    slope 1 / floor, rows within sqrt(d). The floor is a buffer: stored with the weights, read by
    the bound, not trained.
    """

    floor: Tensor

    def __init__(self, width: int, floor: float = 1.0) -> None:
        super().__init__()
        raise_if(
            width < 2 or not 0 < floor < math.inf,
            ArchitectureError,
            f"FloorNorm needs two features and a positive floor, not {width} and {floor:g}",
        )
        self.width = width
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.register_buffer("floor", torch.tensor(float(floor)))

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(dim=-1, keepdim=True)
        variance = centred.square().mean(dim=-1, keepdim=True)
        # the floor comes before the root, whose slope at 0 is infinite: constant tokens keep finite
        # gradients
        return (
            centred / torch.maximum(variance, self.floor.square()).sqrt() * self.weight + self.bias
        )

    def extra_repr(self) -> str:
        return str(self.width)


class Spread(NamedTuple):
    """What a norm divides by: sqrt(max(|y|^2 / d + eps, min_variance)); min_variance is a floor's square, or 0."""

    eps: float
    min_variance: float = 0.0


def spread_of(norm: Any) -> Spread:
    """Return what a LayerNorm or a FloorNorm divides by."""
    if isinstance(norm, FloorNorm):
        return Spread(0.0, float(norm.floor) ** 2)
    return Spread(norm.eps)


class TokenBatchNorm(nn.BatchNorm1d):
    """BatchNorm of every feature over all tokens of all images: (b, n, d) -> (b, n, d). An affine
    map in eval mode.

    A pooled token (b, d), which timm's `fc_norm` takes, is normed over the images alone.

    Its tensors have the names of any norm's, `weight` and `bias`, and BatchNorm's statistics beside
    them.
    """

    def forward(self, x: Tensor) -> Tensor:
        raise_if(
            x.dim() not in (2, 3),
            ArchitectureError,
            "norm_layer=batchnorm is for tokens (b, n, d)",
            "maps take norm_layer=batchnorm2d",
        )
        if self.training:
            return super().forward(x.mT).mT if x.dim() == 3 else super().forward(x)
        mean = self.running_mean
        variance = self.running_var
        if mean is None or variance is None:
            raise ArchitectureError("a BatchNorm without statistics depends on the batch")
        scale = (
            (variance + self.eps).rsqrt()
            if self.weight is None
            else self.weight * (variance + self.eps).rsqrt()
        )
        return (x - mean) * scale if self.bias is None else (x - mean) * scale + self.bias


def norm_width(old: nn.Module) -> int:
    """Return a last-dimension LayerNorm's width; ArchitectureError for other norms."""
    shape = getattr(old, "normalized_shape", None)
    if not isinstance(old, nn.LayerNorm) or shape is None or len(shape) != 1:
        raise ArchitectureError(f"{type(old).__name__} is not a LayerNorm over the last dimension")
    return int(shape[0])


def floor_fits(old: nn.Module) -> bool:
    """Tell whether this is exactly a last-dimension LayerNorm: torch's or timm's, the same."""
    return (
        type(old) in (nn.LayerNorm, TimmLayerNorm)
        and len(getattr(old, "normalized_shape", ())) == 1
    )


def build_center_norm(old: nn.Module) -> CenterNorm:
    """Build a CenterNorm of the width of a LayerNorm over the last dimension."""
    return CenterNorm(norm_width(old))


def build_floor_norm(old: nn.Module) -> FloorNorm:
    """Build a FloorNorm of the width of a LayerNorm; its floor comes with the weights."""
    return FloorNorm(norm_width(old))


def build_norm_eps(old: nn.Module, eps: float) -> nn.Module:
    """Return the norm itself with another eps; AttributeError where it has none."""
    if not isinstance(old.eps, float):
        raise TypeError("the module has no eps")
    old.eps = eps  # type: ignore[assignment]
    return old


def build_identity(old: nn.Module) -> nn.Identity:
    return nn.Identity()


NORMS: Mapping[str, Callable[..., nn.Module]] = {
    **create_norm._NORM_MAP,
    "identity": nn.Identity,
    "batchnorm": TokenBatchNorm,  # over tokens; maps (b, c, h, w) have batchnorm2d
}
ACTIVATIONS: Mapping[str, Callable[..., nn.Module]] = create_act._ACT_LAYER_DEFAULT
_TABLES = {"norm_layer": NORMS, "act_layer": ACTIVATIONS}
NORM_EPS = "norm_eps"


def with_layers(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments, with classes for words of `norm_layer`, `act_layer`; Refused lists them."""
    options = dict(arguments)
    for key, table in _TABLES.items():
        word = options.get(key)
        if isinstance(word, str):
            raise_if(
                word not in table,
                Refused,
                f"{key}={one_line(word)}: one of {', '.join(sorted(table))}",
            )
            options[key] = table[word]
        elif word is not None:
            raise Refused(f"{key} is a word, not {one_line(repr(word))[:40]}")
    return options


def set_norm_eps(net: nn.Module, eps: float) -> None:
    """Set all norms' eps; Refused outside (0, 1], or without a norm that has one."""
    if not isinstance(eps, (int, float)) or isinstance(eps, bool) or not 0 < eps <= 1:
        raise Refused(f"{NORM_EPS} is a number in (0, 1], not {one_line(repr(eps))[:40]}")
    named = [module for module in net.modules() if "norm" in type(module).__name__.lower()]
    norms: list[Any] = [module for module in named if hasattr(module, "eps")]
    raise_if(not norms, Refused, f"{NORM_EPS}={eps:g}, and the network has no norm with an eps")
    for norm in norms:
        norm.eps = float(eps)


def takes_no_norm_eps(failure: BaseException) -> bool:
    """Tell whether a constructor refused `norm_eps` as an unknown argument."""
    return (
        isinstance(failure, TypeError)
        and NORM_EPS in str(failure)
        and "unexpected keyword" in str(failure)
    )


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
