"""Start new parts from the old weights alone, without images.

On a scaled stream the convex residual (1 - t) y + t f(y) computes the old function exactly, for any
t: with y_k = x_k / s_k and s_{k+1} = s_k / (1 - t), the old x + g(x) is (1 - t) y + t f(y) for f(y)
= g(s_k y) (1 - t) / (t s_k). The scale is 1 again after a norm that divides.
"""

import certcli.system.compat  # noqa: F401 (before timm: torchvision must be importable)

# isort: split
import math
from dataclasses import dataclass
from typing import Any

import torch
from timm.layers.attention import Attention
from timm.models.convit import GPSA, MHSA
from timm.models.swin_transformer import SwinTransformerBlock, WindowAttention
from torch import nn

from certcli.adapt.families import Family, Half, Section, part_at
from certcli.adapt.start import fold_gain
from certcli.lipschitz.rules.lipschitz_attention import l2_mixing_constant
from certcli.nn.attention import AttentionWeights
from certcli.nn.attention_variants import (
    CosineAttention,
    L2Attention,
    L2UntiedValueAttention,
    LipschitzNormAttention,
)
from certcli.nn.norms import CenterNorm, FloorNorm
from certcli.nn.residual import ConvexResidual

_LINEAR_READERS = (
    Attention, WindowAttention, GPSA, MHSA, L2Attention, L2UntiedValueAttention, CosineAttention, LipschitzNormAttention
)  # fmt: skip


@dataclass(frozen=True)
class HalfScale:
    """A residual half: y -> keep y + share f(y), to a stream of scale 1/after."""

    keep: float
    share: float
    after: float


Scales = dict[tuple[str, Half], HalfScale]


def carry_over(old_net: Any, new_net: Any, family: Family, tokens: dict[str, int]) -> Scales:
    """Start every new part from the weights of the old part, and return the scale of each half.

    Parts that both networks have keep their weights.

    Args:
        tokens: path of a block -> the number of tokens that its attention mixes.
    """
    new_state = new_net.state_dict()
    for name, tensor in old_net.state_dict().items():
        if name in new_state and new_state[name].shape == tensor.shape:
            new_state[name].copy_(tensor)
    scales: Scales = {}
    scale = 1.0
    halves = 2 * sum(step.kind == "block" for step in family.body(new_net))
    for name in family.embed_norms:
        start_norm(part_at(old_net, name), part_at(new_net, name), 1.0)
    for old, new in zip(family.body(old_net), family.body(new_net), strict=True):
        if old.kind == "merge":
            start_norm(old.module.norm, new.module.norm, 1 / scale)
            scale = 1.0
        elif old.kind == "tokens":
            new_net.cls_token.data.div_(scale)
        else:
            scale = _carry_block(old, new, scale, scales, halves, tokens[old.path])
    divided = False
    for name in family.end_norms:
        norm = part_at(new_net, name)
        start_norm(part_at(old_net, name), norm, 1.0 if divided else 1 / scale)
        divided = divided or (norm is not None and not isinstance(norm, nn.Identity))
    if not divided and scale != 1.0:
        for layer in head_layers(new_net):
            layer.weight.data.mul_(scale)
    return scales


def head_layers(net: Any) -> list[nn.Linear]:
    """Return the linear layers that read the network's last features."""
    layers = [getattr(net, "head", None), getattr(net, "head_dist", None)]
    layers[0] = getattr(layers[0], "fc", layers[0])
    return [layer for layer in layers if isinstance(layer, nn.Linear)]


def start_norm(old: Any, new: Any, deviation: float) -> None:
    """Copy LayerNorm's gain and offset for rows of about this deviation, which becomes a floor."""
    if not isinstance(new, (CenterNorm, FloorNorm)):
        return
    gain = torch.ones_like(new.weight) if old.weight is None else old.weight.detach()
    if isinstance(new, FloorNorm):
        new.floor.fill_(deviation)
    else:
        gain = gain * ((new.width - 1) / (new.width * deviation))
    new.weight.data.copy_(gain)
    new.bias.data.zero_() if old.bias is None else new.bias.data.copy_(old.bias.detach())


def _carry_block(
    old: Section,
    new: Section,
    scale: float,
    scales: Scales,
    halves: int,
    tokens: int,
) -> float:
    attention = new.module.attn
    if hasattr(attention, "start"):
        attention.start(AttentionWeights.of(old.module.attn))
    half: Half
    for half in (1, 2):
        norm = getattr(new.module, f"norm{half}")
        start_norm(getattr(old.module, f"norm{half}"), norm, 1 / scale)
        residual = getattr(new.module, f"residual{half}", None)
        keep = share = 1.0
        if isinstance(residual, ConvexResidual):
            # At unit norms this share gives trunk and attention equal parts of the bound. A
            # LayerNorm's eps matters on a small stream, so there the stream shrinks only by two
            # over the whole network.
            share = 1 / (1 + l2_mixing_constant(tokens)) if half == 1 else 0.5
            if isinstance(norm, nn.LayerNorm):
                share = 1 - 0.5 ** (1 / halves)
            residual.theta.data.fill_(math.log(share / (1 - share)))
            share = float(torch.sigmoid(residual.theta.double()))
            keep = 1 - share
        output = output_map(new.module, half)
        gamma = getattr(getattr(old.module, f"ls{half}", None), "gamma", None)
        if gamma is not None:
            fold_gain(output, gamma.detach())
        fold_gain(output, keep / (share * scale))
        scales[(new.path, half)] = HalfScale(keep, share, scale / keep)
        scale = scale / keep
    return scale


def output_map(block: Any, half: Half) -> nn.Linear:
    """Return the last linear map of a residual branch."""
    layer: nn.Linear = block.attn.proj if half == 1 else block.mlp.fc2
    return layer


def branch_inputs(block: Any, half: Half) -> list[nn.Linear]:
    """Return the linear maps that read the normed stream."""
    if half == 2:
        return [block.mlp.fc1]
    width = block.mlp.fc1.in_features
    return [
        part
        for part in block.attn.modules()
        if isinstance(part, nn.Linear) and part is not block.attn.proj and part.in_features == width
    ]


def reads_linearly(block: Any, half: Half) -> bool:
    """Return whether only the input maps read the normed stream; token mixing reads it too."""
    if half == 2:
        return True
    padded = False
    if isinstance(block, SwinTransformerBlock):  # the zeros around a window stand for normed tokens
        resolution: Any = block.input_resolution
        padded = any(
            side % window for side, window in zip(resolution, block.window_size, strict=True)
        )
    return not padded and type(block.attn) in _LINEAR_READERS
