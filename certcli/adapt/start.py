"""Closed-form starts: the parameters of a new part that least squares finds from the old part."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from certcli.adapt.calibration_shards import Pairs, Shards
from certcli.nn.norms import CenterNorm


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
    outputs = layer.out_features
    solution = best_affine_map(shards, pairs, layer, outputs, ridge, prior, offset)
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
