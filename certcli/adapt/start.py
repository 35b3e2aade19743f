"""Where new parts start: from the old weights alone, and in closed form by least squares.

On a scaled stream the convex residual (1 - t) y + t f(y) computes the old function exactly, for any
t: with y_k = x_k / s_k and s_{k+1} = s_k / (1 - t), the old x + g(x) is (1 - t) y + t f(y) for f(y)
= g(s_k y) (1 - t) / (t s_k). The scale is 1 again after a norm that divides.
"""

import certcli.system.compat  # noqa: F401 (before timm: torchvision must be importable)

# isort: split
import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from timm.layers.attention import Attention
from timm.models.convit import GPSA, MHSA
from timm.models.swin_transformer import SwinTransformerBlock, WindowAttention
from torch import Tensor, nn

from certcli.adapt.descend import Pairs, Shards
from certcli.adapt.plan import Family, Half, Section, adapted_family, part_at, token_counts
from certcli.adapt.settings import AdaptSettings
from certcli.checkpoint.record import Record
from certcli.lipschitz.rules.lipschitz_attention import l2_mixing_constant
from certcli.models import build
from certcli.models.pixels import PixelModel
from certcli.nn.attention import AttentionWeights
from certcli.nn.attention_variants import (
    CosineAttention,
    L2Attention,
    L2UntiedValueAttention,
    LipschitzNormAttention,
)
from certcli.nn.blocks import CenterNorm, ConvexResidual, FloorNorm
from certcli.system.torch_modes import seed_all


def deviations(rows: Tensor) -> Tensor:
    """Return the standard deviation of each row: (..., d) -> (t,) float64.

    By LayerNorm's kernel, six times as fast as a variance in float64; the rows' precision is enough.
    """
    values = rows.float()
    reciprocals = torch.native_layer_norm(values, values.shape[-1:], None, None, 1e-30)[2]
    return reciprocals.flatten().double().reciprocal()


def best_affine_map(
    shards: Shards,
    pairs: Pairs,
    like: nn.Linear,
    outputs: int,
    ridge: float,
    prior: Tensor | None = None,
    offset: bool = True,
) -> Tensor:
    """Minimise sum |W x + b - y|^2 + ridge |(W, b) - prior|^2 over (W, b): x (t, m), y (t, n).

    Products keep the precision of the rows; sums are float64. The ridge, relative to the mean
    eigenvalue, holds directions that the images hardly excite at the prior (or 0). On a digits ViT
    1e-4 against 1e-6 costs one point of relative error a block, and the bound is 400 to 4,000 times
    smaller.

    Args:
        like: a layer of m inputs, on the device of the pairs.
        outputs: n.

    Returns:
        (m [+ 1], n), its last row the offset.
    """
    size = like.in_features + offset
    zeros = torch.zeros(size, size + outputs, dtype=torch.float64, device=like.weight.device)

    def sums_of(shard: int) -> list[Tensor]:
        sums = torch.zeros_like(zeros)
        for x, y in pairs(shard):
            rows = torch.cat([x, torch.ones(len(x), 1).to(x)], dim=1) if offset else x
            sums[:, :size] += rows.T @ rows
            sums[:, size:] += rows.T @ y.to(rows)
        return [sums]

    gram, cross = shards.total(sums_of, [zeros])[0].split([size, outputs], dim=1)
    strength = ridge * gram.diagonal().mean().clamp_min(1e-30)
    cross = cross if prior is None else cross + strength * prior.to(cross)
    return torch.linalg.solve(gram + strength * torch.eye(size).to(gram), cross)


def fit_layer(
    layer: nn.Linear, shards: Shards, pairs: Pairs, ridge: float = 1e-4, keep: bool = False
) -> None:
    """Set the layer to the best affine map of its inputs to target outputs.

    Args:
        pairs: (inputs (t, m), target outputs (t, n)).
        keep: the layer's weights are the prior, in place of 0.
    """
    offset = layer.bias is not None
    prior = None
    if keep:
        rows = [layer.weight.detach().T, *([layer.bias.detach()[None]] if offset else [])]
        prior = torch.cat(rows)
    solution = best_affine_map(shards, pairs, layer, layer.out_features, ridge, prior, offset)
    layer.weight.data.copy_(solution[: layer.in_features].T.to(layer.weight))
    if offset:
        layer.bias.data.copy_(solution[-1].to(layer.bias))


def compose_inputs(layers: Sequence[nn.Linear], shards: Shards, pairs: Pairs, ridge: float) -> None:
    """Set W <- W M, b <- b + W m for the best affine map (M, m) from new inputs to old inputs.

    The layers were started for the old inputs. The prior of the ridge is the identity; there is no
    m where a layer has no bias.

    Args:
        pairs: (new inputs (t, d), old inputs (t, d)).
    """
    width = layers[0].in_features
    offset = all(layer.bias is not None for layer in layers)
    identity = torch.eye(width + offset, width)
    solution = best_affine_map(shards, pairs, layers[0], width, ridge, identity, offset)
    for layer in layers:
        weight = layer.weight.detach().double()
        if offset:
            layer.bias.data.add_((weight @ solution[-1]).to(layer.bias))
        layer.weight.data.copy_((weight @ solution[:width].T).to(layer.weight))


def fold_gain(layer: nn.Linear, gain: Tensor | float) -> None:
    """Set W <- diag(gain) W, b <- gain b: fold in a LayerScale or a number after the layer."""
    gain = torch.as_tensor(gain).to(layer.weight)
    layer.weight.data.mul_(gain.unsqueeze(-1) if gain.dim() else gain)
    if layer.bias is not None:
        layer.bias.data.mul_(gain)


def fold_center_norm(norm: CenterNorm, layer: nn.Linear) -> None:
    """Set W <- d/(d-1) W diag(weight) P, b <- b + W bias: fold the norm into the next layer."""
    weight = layer.weight.detach().double()
    scaled = weight * norm.weight.detach().double() * (norm.width / (norm.width - 1))
    if layer.bias is not None:
        layer.bias.data.copy_(
            (layer.bias.detach().double() + weight @ norm.bias.detach().double()).to(layer.bias)
        )
    layer.weight.data.copy_((scaled - scaled.mean(dim=1, keepdim=True)).to(layer.weight))


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


def perform_surgery(
    record: Record, settings: AdaptSettings, teacher: PixelModel
) -> tuple[Any, Scales]:
    """Return the network after surgery and the scales of its stream, from the old weights."""
    device = next(teacher.parameters()).device
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        seed_all(settings.seed)  # for weights without a start
        net = build.build(record, initialise=True).requires_grad_(False)
        student = PixelModel(record.input, net).eval().to(device)
        family = adapted_family(teacher.net)
        tokens = token_counts(teacher, record.input.size)
        return student, carry_over(teacher.net, net, family, tokens)


def head_layers(net: Any) -> list[nn.Linear]:
    """Return the linear layers that read the network's last features."""
    head = getattr(net, "head", None)
    layers = [getattr(head, "fc", head), getattr(net, "head_dist", None)]
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
    return block.attn.proj if half == 1 else block.mlp.fc2


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


def only_inputs_read_norm(block: Any, half: Half) -> bool:
    """Tell whether nothing but `branch_inputs` reads the normed stream in this half of the block.

    Only then may the norm be folded into these maps: attention of another kind, or zeros that pad a
    window, would read the stream without the norm.
    """
    if half == 2:
        return True
    padded = False
    if isinstance(block, SwinTransformerBlock):  # the zeros around a window stand for normed tokens
        resolution: Any = block.input_resolution
        padded = any(
            side % window for side, window in zip(resolution, block.window_size, strict=True)
        )
    return not padded and type(block.attn) in _LINEAR_READERS


def fold_norms(net: Any) -> list[str]:
    """Fold the centre norms of all blocks into the next linear maps; return these norms' paths."""
    paths = []
    halves: tuple[Half, ...] = (1, 2)
    for step in adapted_family(net).body(net):
        for half in halves if step.kind == "block" else ():
            norm = getattr(step.module, f"norm{half}")
            readers = branch_inputs(step.module, half)
            # an offset moves into biases, and only linear maps may read the normed stream
            foldable = readers and all(layer.bias is not None for layer in readers)
            if (
                isinstance(norm, CenterNorm)
                and foldable
                and only_inputs_read_norm(step.module, half)
            ):
                for layer in readers:
                    fold_center_norm(norm, layer)
                setattr(step.module, f"norm{half}", nn.Identity())
                paths.append(f"{step.path}.norm{half}")
    return paths


class _Reached(Exception):
    """A run has reached the module whose input was asked for."""


def capture_input(module: nn.Module, run: Callable[[], Any]) -> Tensor:
    """Return the input of `module` during `run`, which ends there."""
    captured: list[Tensor] = []

    def stop(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        captured.append(inputs[0])
        raise _Reached

    with module.register_forward_pre_hook(stop), contextlib.suppress(_Reached):
        run()
    return captured[0]
