"""The table of rewrites: networks, and what users can make of them by hand without changing their
function.
"""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

import certcli.system.compat  # noqa: F401

# isort: split
import timm.layers as timm_layers

from certcli.nn.blocks import TokenBatchNorm
from certcli.nn.surgery import REPLACEMENTS
from tests.helpers.lipschitz_cases import f, of_tokens, statistics

seq = nn.Sequential
Pair = tuple[nn.Module, nn.Module]


def gain_and_shift(norm: nn.Module) -> tuple[Tensor, Tensor]:
    """Return g, s with norm(x) = g x + s in eval mode."""
    gain = norm.weight.data / (norm.running_var + norm.eps).sqrt()
    return gain, norm.bias.data - gain * norm.running_mean


def then(layer: nn.Module, gain: Tensor, shift: Tensor | float = 0.0) -> nn.Module:
    """Return g layer(x) + s as one layer, g and s along its outputs."""
    folded = copy.deepcopy(layer)
    folded.weight.data = layer.weight.data * gain.reshape(-1, *[1] * (layer.weight.dim() - 1))
    folded.bias = nn.Parameter((0 if layer.bias is None else layer.bias.data) * gain + shift)
    return folded


def with_input_affine(layer: nn.Module, gain: Tensor, shift: Tensor) -> nn.Module:
    """Return layer(g x + s) as one layer, without padding, g and s along its inputs."""
    folded = copy.deepcopy(layer)
    groups = getattr(layer, "groups", 1)
    weight = layer.weight.data

    def beside(numbers: Tensor) -> Tensor:
        rows = numbers.view(groups, -1).repeat_interleave(len(weight) // groups, 0)
        return rows.view(*weight.shape[:2], *[1] * (weight.dim() - 2))

    folded.weight.data = weight * beside(gain)
    folded.bias = nn.Parameter(layer.bias.data + (weight * beside(shift)).flatten(1).sum(1))
    return folded


def product(first: nn.Module, second: nn.Module) -> nn.Module:
    """Return second(first(x)) as one layer: `second` is linear on the outputs of `first`, a layer
    without groups.
    """
    composed = copy.deepcopy(first)
    matrix = second.weight.data.flatten(1)
    composed.weight.data = (matrix @ first.weight.data.flatten(1)).view(-1, *first.weight.shape[1:])
    composed.bias.data = second.bias.data + matrix @ first.bias.data
    return composed


def entry_products() -> nn.Module:
    """Return products of entries: behind them sizes of tensors count beside slopes."""
    return f(lambda m, x: x * x)


def bn(width: int) -> nn.Module:
    return statistics(nn.BatchNorm2d(width))


def token_bn(width: int) -> nn.Module:
    return statistics(TokenBatchNorm(width))


def folded_after(layer: nn.Module, norm: nn.Module, *rest: nn.Module) -> Pair:
    """layer, norm, rest."""
    return seq(layer, norm, *rest), seq(then(layer, *gain_and_shift(norm)), *rest)


def folded_before(norm: nn.Module, layer: nn.Module, *rest: nn.Module) -> Pair:
    """norm, layer, rest."""
    return seq(norm, layer, *rest), seq(with_input_affine(layer, *gain_and_shift(norm)), *rest)


def on_both(start: nn.Module, pair: Pair) -> Pair:
    return seq(start, pair[0]), seq(start, pair[1])


def pair_on_tokens(pair: Pair) -> Pair:
    return of_tokens(pair[0]), of_tokens(pair[1])


def same(plain: nn.Module, *extra: Callable[[nn.Module], nn.Module]) -> Pair:
    """A network, and the one that every function of `extra` makes of it in turn."""
    changed = plain
    for change in extra:
        changed = change(changed)
    return changed, plain


def residual(branch: nn.Module) -> nn.Module:
    return f(lambda m, x: x + m.parts[0](x), branch)


def layers_of_tokens(width: int = 6) -> tuple[nn.Module, nn.Module]:
    """Return a layer from tokens to this width, and one behind it."""
    return nn.Linear(8, width), nn.Linear(width, 5)


def in_residual(*, first: bool) -> Pair:
    """BatchNorm as the first layer of a branch, or as its last one."""
    wide = nn.Linear(8, 16)
    narrow = nn.Linear(16, 8)
    norm = token_bn(8)
    affine = gain_and_shift(norm)
    if first:
        branch = norm, wide, nn.ReLU(), narrow
        plain = with_input_affine(wide, *affine), nn.ReLU(), narrow
    else:
        branch = wide, nn.ReLU(), narrow, norm
        plain = wide, nn.ReLU(), then(narrow, *affine)
    return pair_on_tokens((
        seq(residual(seq(*branch)), entry_products()), seq(residual(seq(*plain)), entry_products())
    ))  # fmt: skip


def before_attention() -> Pair:
    """BatchNorm before queries, keys and values, and LayerScale after the output map."""
    attention = timm_layers.Attention(8, 2, qkv_bias=True)
    norm = token_bn(8)
    gain = torch.randn(8)
    scale = timm_layers.LayerScale(8)
    scale.gamma.data.copy_(gain)
    plain = copy.deepcopy(attention)
    plain.qkv, plain.proj = (
        with_input_affine(attention.qkv, *gain_and_shift(norm)),
        then(attention.proj, gain),
    )
    return pair_on_tokens((residual(seq(norm, attention, scale)), residual(plain)))


def before_lipschitz_attention(kind: str) -> Pair:
    attention = REPLACEMENTS.load(kind)(timm_layers.Attention(8, 2, qkv_bias=True))
    norm = token_bn(8)
    plain = copy.deepcopy(attention)
    for name in ("query", "key", "value"):
        if hasattr(plain, name):
            setattr(plain, name, with_input_affine(getattr(attention, name), *gain_and_shift(norm)))
    return pair_on_tokens((residual(seq(norm, attention)), residual(plain)))


def patches_to_tokens() -> Pair:
    """A patch embedding whose BatchNorm comes after its patches became tokens."""
    conv = nn.Conv2d(2, 6, 2, 2)
    norm = token_bn(6)
    last = nn.Linear(6, 4)
    flat = f(lambda m, x: x.flatten(2).transpose(1, 2))
    folded = then(conv, *gain_and_shift(norm))
    return seq(conv, flat, norm, last, entry_products()), seq(
        product(folded, last), flat, entry_products()
    )


def affine_of_norm(norm: nn.Module, layer: nn.Module, *, shift: bool = True) -> Pair:
    """The scale and shift of a norm over features, and the layer that follows."""
    with torch.no_grad():
        norm.weight.normal_()
        if shift:
            norm.bias.normal_()
    plain = copy.deepcopy(norm)
    plain.weight.data.fill_(1.0)
    if shift:
        plain.bias.data.zero_()
    moved = norm.bias.data if shift else torch.zeros_like(norm.weight.data)
    return seq(norm, layer, entry_products()), seq(
        plain, with_input_affine(layer, norm.weight.data, moved), entry_products()
    )


def layer_scale(kind: type, layer: nn.Module, width: int) -> Pair:
    scale = kind(width)
    scale.gamma.data.normal_()
    return seq(layer, scale, entry_products()), seq(then(layer, scale.gamma.data), entry_products())


def spread_over_pixels() -> Pair:
    """BatchNorm, the features of all pixels side by side, a linear layer."""
    conv = nn.Conv2d(2, 3, 3)
    norm = bn(3)
    last = nn.Linear(12, 5)
    gain, shift = (part.repeat_interleave(4) for part in gain_and_shift(norm))
    return (
        seq(conv, nn.ReLU(), norm, nn.Flatten(), last, entry_products()),
        seq(conv, nn.ReLU(), nn.Flatten(), with_input_affine(last, gain, shift), entry_products()),
    )


def pooled() -> Pair:
    norm = token_bn(8)
    last = nn.Linear(8, 3)
    mean = f(lambda m, x: x.mean(1))
    return pair_on_tokens(
        (
            seq(norm, mean, last, entry_products()),
            seq(mean, with_input_affine(last, *gain_and_shift(norm)), entry_products()),
        )
    )


def depthwise_then_pointwise() -> Pair:
    deep = nn.Conv2d(2, 4, 3, padding=1, groups=2)
    point = nn.Conv2d(4, 3, 1)
    whole = nn.Conv2d(2, 3, 3, padding=1)
    blocks = torch.zeros(4, 2, 3, 3)
    blocks[:2, :1], blocks[2:, 1:] = deep.weight.data[:2], deep.weight.data[2:]
    whole.weight.data = (point.weight.data.flatten(1) @ blocks.flatten(1)).view(3, 2, 3, 3)
    whole.bias.data = point.bias.data + point.weight.data.flatten(1) @ deep.bias.data
    return seq(deep, point, entry_products()), seq(whole, entry_products())


def pointwise_then_conv() -> Pair:
    point = nn.Conv2d(2, 4, 1)
    conv = nn.Conv2d(4, 3, 2)
    whole = nn.Conv2d(2, 3, 2)
    whole.weight.data = torch.einsum(
        "omkl,mi->oikl", conv.weight.data, point.weight.data[..., 0, 0]
    )
    whole.bias.data = conv.bias.data + torch.einsum("omkl,m->o", conv.weight.data, point.bias.data)
    return seq(point, conv, entry_products()), seq(whole, entry_products())


def linear_before_conv() -> Pair:
    """A linear layer on channels that lie last, then a convolution."""
    linear = nn.Linear(2, 4)
    conv = nn.Conv2d(4, 3, 2)
    point = nn.Conv2d(2, 4, 1)
    point.weight.data, point.bias.data = linear.weight.data[..., None, None], linear.bias.data
    last = f(lambda m, x: x.permute(0, 2, 3, 1))
    first = f(lambda m, x: x.permute(0, 3, 1, 2))
    return seq(last, linear, first, conv, entry_products()), seq(point, conv, entry_products())


def scaled_twice(factor: float, between: nn.Module) -> Pair:
    first, last = layers_of_tokens()
    larger = then(first, torch.full((6,), factor))
    smaller = copy.deepcopy(last)
    smaller.weight.data = last.weight.data / factor
    return pair_on_tokens(
        (
            seq(larger, between, smaller, entry_products()),
            seq(first, between, last, entry_products()),
        )
    )


def times_number(number: float) -> nn.Module:
    return f(lambda m, x: x * number)


def number(where: Callable[[float], nn.Module]) -> Pair:
    first, last = layers_of_tokens()
    return pair_on_tokens(
        (
            seq(first, where(-1.7), last, entry_products()),
            seq(product(then(first, torch.full((6,), -1.7)), last), entry_products()),
        )
    )


def shift_between(*shift: Callable[[Tensor], nn.Module]) -> Pair:
    first, last = layers_of_tokens()
    vector = 3 * torch.randn(6)
    shifted = then(first, torch.ones(6), vector)
    return pair_on_tokens(
        (
            seq(first, *[make(vector) for make in shift], last, entry_products()),
            seq(product(shifted, last), entry_products()),
        )
    )


def zero_branch(branch: Callable[[nn.Module], nn.Module], bias: float = 0.0) -> Pair:
    """A branch of weight 0 between two linear layers."""
    first, last = layers_of_tokens(8)
    dead = nn.Linear(8, 8)
    dead.weight.data.zero_()
    dead.bias.data.fill_(bias)
    return pair_on_tokens((
        seq(first, residual(branch(dead)), last, entry_products()),
        seq(product(then(first, torch.ones(8), torch.full((8,), bias)), last), entry_products()),
    ))  # fmt: skip


def scores_times(*factors: float) -> Callable[..., Tensor]:
    def attend(net: nn.Module, x: Tensor) -> Tensor:
        q, k, v = net.parts[0](x).chunk(3, -1)
        scores = q @ k.mT
        for factor in factors:
            scores = scores * factor
        return scores.softmax(-1) @ v

    return attend


def scores_times_two_numbers() -> Pair:
    norm, maps = nn.LayerNorm(8, eps=0.1), nn.Linear(8, 24)
    twice, once = (f(scores_times(*factors), maps) for factors in ((6.0, 0.5), (3.0,)))
    return pair_on_tokens((seq(norm, twice), seq(norm, once)))


def zero_scale() -> Pair:
    first, last = layers_of_tokens(8)
    dead = seq(nn.LayerNorm(8), nn.Linear(8, 8))
    return pair_on_tokens((
        seq(first, residual(seq(dead, timm_layers.LayerScale(8, 0.0))), last, entry_products()),
        seq(product(first, last), entry_products()),
    ))  # fmt: skip


def zero_norm() -> Pair:
    """A residual block whose last BatchNorm has the weight 0, as timm starts ResNets."""
    conv = nn.Conv2d(2, 2, 3, padding=1)
    norm = bn(2)
    last = nn.Conv2d(2, 3, 3)
    norm.weight.data.zero_()
    norm.bias.data.zero_()
    return seq(residual(seq(conv, norm)), last, entry_products()), seq(last, entry_products())


def resnet_block() -> Pair:
    """Two convolutions with BatchNorm, and a strided one with BatchNorm beside them."""
    convs = (
        nn.Conv2d(2, 4, 3, 2, 1, bias=False),
        nn.Conv2d(4, 4, 3, 1, 1, bias=False),
        nn.Conv2d(2, 4, 1, 2, bias=False),
    )
    norms = bn(4), bn(4), bn(4)
    fused = [then(conv, *gain_and_shift(norm)) for conv, norm in zip(convs, norms, strict=True)]

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        first, second, beside = m.parts
        return functional.relu(second(functional.relu(first(x))) + beside(x))

    pairs = [seq(conv, norm) for conv, norm in zip(convs, norms, strict=True)]
    return seq(f(forward, *pairs), entry_products()), seq(f(forward, *fused), entry_products())


def vit_with_batch_norms() -> Pair:
    """A small vision transformer with BatchNorm everywhere: embedding, blocks, pooled head."""
    embed, position, first, pool = (
        nn.Conv2d(2, 8, 2, 2),
        0.1 * torch.randn(1, 4, 8),
        token_bn(8),
        token_bn(8),
    )
    attention, last = timm_layers.Attention(8, 2, qkv_bias=True), nn.Linear(8, 3)
    mlp, second, start = (
        seq(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)),
        token_bn(8),
        token_bn(8),
    )

    def network(
        embed: nn.Module, attention: nn.Module, mlp: nn.Module, last: nn.Module
    ) -> nn.Module:
        def forward(m: nn.Module, x: Tensor) -> Tensor:
            x = m.parts[0](x) + m.position
            x = x + m.parts[1](x)
            x = x + m.parts[2](x)
            return m.parts[3](x.mean(1))

        return f(forward, embed, attention, mlp, last, position=position)

    flat = f(lambda m, x: x.flatten(2).transpose(1, 2))
    plain = copy.deepcopy(attention)
    narrow = copy.deepcopy(mlp)
    plain.qkv, narrow[0] = (
        with_input_affine(attention.qkv, *gain_and_shift(first)),
        with_input_affine(mlp[0], *gain_and_shift(second)),
    )
    return (
        network(seq(embed, flat, start), seq(first, attention), seq(second, mlp), seq(pool, last)),
        network(
            seq(then(embed, *gain_and_shift(start)), flat),
            plain,
            narrow,
            with_input_affine(last, *gain_and_shift(pool)),
        ),
    )


def grouped(width: int) -> nn.Module:
    return nn.Conv2d(width, 2 * width, 2, groups=2)


def positive_maps() -> nn.Module:
    return seq(nn.Conv2d(2, 4, 1), nn.Sigmoid())


REWRITES: dict[str, Callable[[], Pair]] = {
    "conv, BN": lambda: folded_after(nn.Conv2d(2, 4, 3, padding=1), bn(4), entry_products()),
    "patches, BN": lambda: folded_after(nn.Conv2d(2, 4, 2, 2), bn(4), entry_products()),
    "grouped conv, BN": lambda: folded_after(nn.Conv2d(2, 4, 3, padding=1, groups=2), bn(4), entry_products()),
    "conv, BN, BN": lambda: on_both(nn.Conv2d(2, 4, 3), folded_before(bn(4), nn.Conv2d(4, 4, 1), entry_products())),
    "BN, conv": lambda: folded_before(bn(2), nn.Conv2d(2, 4, 3), entry_products()),
    "BN, patches": lambda: folded_before(bn(2), nn.Conv2d(2, 4, 2, 2), entry_products()),
    "BN, grouped conv": lambda: on_both(positive_maps(), folded_before(bn(4), grouped(4), entry_products())),
    "BN, conv, BN": lambda: on_both(positive_maps(), folded_before(bn(4), nn.Conv2d(4, 3, 2), bn(3), entry_products())),
    "linear, BN": lambda: pair_on_tokens(folded_after(nn.Linear(8, 5), token_bn(5), entry_products())),
    "BN, linear": lambda: pair_on_tokens(folded_before(token_bn(8), nn.Linear(8, 5), entry_products())),
    "vectors, BN, linear": lambda: on_both(
        nn.Flatten(), folded_before(statistics(nn.BatchNorm1d(32)), nn.Linear(32, 5), entry_products())
    ),
    "BN in a branch": lambda: in_residual(first=False),
    "BN before a branch": lambda: in_residual(first=True),
    "BN before attention": before_attention,
    "BN before L2 attention": lambda: before_lipschitz_attention("l2-attention"),
    "BN before L2 attention, untied": lambda: before_lipschitz_attention("l2-untied-value-attention"),
    "BN before cosine attention": lambda: before_lipschitz_attention("scsa-attention"),
    "patches as tokens, BN, linear": patches_to_tokens,
    "BN, pixels side by side, linear": spread_over_pixels,
    "BN, mean, linear": pooled,
    "ResNet's block": resnet_block,
    "ViT with BN": vit_with_batch_norms,
    "LayerNorm's scale": lambda: pair_on_tokens(affine_of_norm(nn.LayerNorm(8, eps=0.1), nn.Linear(8, 5))),
    "RMSNorm's scale": lambda: pair_on_tokens(affine_of_norm(nn.RMSNorm(8, eps=0.1), nn.Linear(8, 5), shift=False)),
    "GroupNorm's scale": lambda: on_both(positive_maps(), affine_of_norm(nn.GroupNorm(2, 4, eps=0.1), nn.Conv2d(4, 3, 2))),
    "SimpleNorm's scale": lambda: pair_on_tokens(
        affine_of_norm(timm_layers.SimpleNorm(8, eps=0.1), nn.Linear(8, 5), shift=False)
    ),
    "LayerScale": lambda: pair_on_tokens(layer_scale(timm_layers.LayerScale, nn.Linear(8, 5), 5)),
    "LayerScale of maps": lambda: layer_scale(timm_layers.LayerScale2d, nn.Conv2d(2, 4, 3, padding=1), 4),
    "linear, linear": lambda: pair_on_tokens((
        seq(*(layers := (nn.Linear(8, 16), nn.Linear(16, 5))), entry_products()), seq(product(*layers), entry_products())
    )),
    "conv, pointwise conv": lambda: (
        seq(*(layers := (nn.Conv2d(2, 4, 3, 1, 1), nn.Conv2d(4, 3, 1))), entry_products()),
        seq(product(*layers), entry_products()),
    ),
    "depthwise conv, pointwise conv": depthwise_then_pointwise,
    "pointwise conv, conv": pointwise_then_conv,
    "linear, moved, conv": linear_before_conv,
    "a scale moved over ReLU": lambda: scaled_twice(3.0, nn.ReLU()),
    "a scale moved": lambda: scaled_twice(0.3, nn.Identity()),
    "a number between": lambda: number(times_number),
    "a number that divides": lambda: number(lambda c: f(lambda m, x: x / (1 / c))),
    "a learnt number": lambda: number(lambda c: f(lambda m, x: x * m.c, c=torch.tensor(c))),
    "a vector added": lambda: shift_between(lambda v: f(lambda m, x: x + m.v, v=v)),
    "a vector subtracted": lambda: shift_between(lambda v: f(lambda m, x: x - m.v, v=-v)),
    "a vector it is subtracted from": lambda: shift_between(lambda v: f(lambda m, x: -(-m.v - x), v=v)),
    "vectors that cancel": lambda: shift_between(
        lambda v: f(lambda m, x: x + m.v, v=100 * v), lambda v: f(lambda m, x: x - m.v, v=99 * v)
    ),
    "a branch of weight 0": lambda: zero_branch(lambda dead: dead),
    "a branch of weight 0 and its bias": lambda: zero_branch(lambda dead: dead, bias=2.0),
    "a branch times 0": lambda: zero_branch(lambda dead: seq(nn.Linear(8, 8), nn.GELU(), times_number(0.0))),
    "a branch that ends in 0": lambda: zero_branch(lambda dead: seq(nn.Linear(8, 8), nn.GELU(), dead)),
    "a branch of scale 0": zero_scale,
    "scores times two numbers": scores_times_two_numbers,
    "a branch whose BN is 0": zero_norm,
    "dropouts": lambda: pair_on_tokens(same(
        seq(nn.Linear(8, 8), nn.Linear(8, 5), entry_products()),
        lambda net: seq(
            net[0], nn.Dropout(0.5), nn.AlphaDropout(0.3), nn.Dropout1d(0.2), nn.FeatureAlphaDropout(0.2),
            timm_layers.DropPath(0.2), f(lambda m, x: functional.dropout(x, 0.3, training=False)), *net[1:]
        ),
    )),
    "dropouts of maps": lambda: same(
        seq(nn.Conv2d(2, 4, 3), bn(4), entry_products()),
        lambda net: seq(net[0], nn.Dropout2d(0.5), nn.Dropout3d(0.5), timm_layers.DropBlock2d(0.3), *net[1:]),
    ),
    "identities": lambda: same(
        seq(nn.Conv2d(2, 4, 3), bn(4), entry_products()),
        lambda net: seq(net[0], nn.Identity(), f(lambda m, x: x.contiguous().clone() * 1 + 0), *net[1:]),
    ),
    "flattened and back": lambda: same(
        seq(nn.Conv2d(2, 4, 3), bn(4), entry_products()),
        lambda net: seq(net[0], nn.Flatten(2), nn.Unflatten(2, (2, 2)), *net[1:]),
    ),
    "moved and back": lambda: same(
        seq(nn.Conv2d(2, 4, 3), bn(4), nn.Conv2d(4, 2, 2), entry_products()),
        lambda net: seq(net[0], f(lambda m, x: x.permute(0, 2, 3, 1).permute(0, 3, 1, 2)), net[1],
                        f(lambda m, x: x.transpose(1, 2).mT.mT.transpose(2, 1)), *net[2:]),
    ),
    "heads split and merged": lambda: pair_on_tokens(same(
        seq(nn.Linear(8, 8), nn.Linear(8, 5), entry_products()),
        lambda net: seq(
            net[0], f(lambda m, x: x.view(-1, 4, 2, 4).transpose(1, 2).transpose(1, 2).flatten(2)), *net[1:]
        ),
    )),
}  # fmt: skip
