"""Token mixing without a softmax: convolutions over tokens, orthogonal matrices, sorted pairs.

Proofs: docs/bounds.md, sections 10.3 and 11.
"""

import math
from dataclasses import replace

from torch import Tensor, nn

from certcli.engine.table import runs_known_code
from certcli.lipschitz.context import Context
from certcli.lipschitz.numerics.arithmetic import Matrix, Scalar
from certcli.lipschitz.numerics.convolution_estimate import Geometry
from certcli.lipschitz.numerics.outward import up
from certcli.lipschitz.table import rules
from certcli.lipschitz.value import Value
from certcli.nn.attention_variants import ConvAttention
from certcli.nn.layers import ChannelRoll, MaxMin, OrthogonalMixing, SoftMaxMin, TokenMaxMin

LARGEST = 80.0
"""Largest logarithm of a temperature: its inverse is finite in float32."""


def _centred_convolution(module: ConvAttention) -> bool:
    """Tell whether the layer is one centred, zero-padded kernel that keeps the number of tokens."""
    conv = module.convolution
    return (
        runs_known_code(conv, nn.Conv1d)
        and runs_known_code(module.proj, nn.Linear)
        and (conv.stride, conv.dilation, conv.groups, conv.padding_mode) == ((1,), (1,), 1, "zeros")
        and conv.kernel_size[0] % 2 == 1
        and conv.padding == (conv.kernel_size[0] // 2,)
    )


@rules.module(ConvAttention, when=_centred_convolution)
def token_convolution_bound(
    ctx: Context, module: ConvAttention, x: Value, attn_mask: object = None, is_causal: bool = False
) -> Value:
    """The norm of one convolution with the taps W_O K_t M, where M was pending on each token."""
    tokens = x.shape[-2]
    arith = ctx.arith
    conv = module.convolution
    proj = module.proj
    x = ctx.on_axis(x)
    pending = x.pending
    taps = conv.kernel_size[0]
    # W_O on all taps at once; the error of this product is one on its entries (Frobenius), however
    # they are arranged
    flat = arith.matmul(arith.matrix(proj.weight), arith.matrix(conv.weight.flatten(1)))
    out = proj.out_features
    width = conv.in_channels
    stacked = Matrix(
        flat.tensor.view(out, width, taps).transpose(1, 2).reshape(out * taps, width), flat.error
    )
    before = None if pending is None else pending.effective(arith)
    if before is not None:
        stacked = arith.matmul(stacked, before)
    kernel = stacked.tensor.view(out, taps, -1).transpose(1, 2)
    geometry = Geometry((1,), ((taps // 2, taps // 2),), (1,), 1, (tokens,))
    # the operator is a sum over taps, each off by at most the error of all of them
    sigma = arith.convolution(
        kernel.contiguous(), up(stacked.error * taps), geometry, f"{ctx.path}.convolution"
    )
    plain = replace(x, waiting=None) if pending is not None else x
    of_values, of_result = (ctx.column(layer.bias) for layer in (conv, proj))

    def fibre() -> Scalar:
        # a token of the result is [W_O K_t]_t times a window of tokens M u + b, plus W_O b_K + b_O
        token = plain.size.fibre_along(-1) if pending is None else plain.size.fibre
        if before is not None:
            token = arith.sigma(before, f"{ctx.path}.before") * token
        if pending is not None:
            token = token + arith.length(pending.bias)
        longest = arith.sigma(flat, f"{ctx.path}.window") * token * arith.root(taps)
        if of_values is not None:
            longest = longest + arith.length(arith.matmul(arith.matrix(proj.weight), of_values))
        return longest + arith.length(of_result)

    why = f"zero-padded convolution of {taps} taps over {tokens} tokens, with the output map folded in"
    return ctx.chain(plain, sigma, why, fibre)


@rules.module(ChannelRoll)
def channel_roll(ctx: Context, module: ChannelRoll, x: Value) -> Value:
    """A permutation of entries: 1. A token gets quarters of four tokens: at most twice the
    longest."""
    x = ctx.settle(x)
    arith = ctx.arith
    size = x.size.along(-1).arranged(x.shape, -1, 4.0)
    return ctx.charge(x, arith.const(1.0), "channels that move by a token: a permutation", size)


def _plain_maps(module: OrthogonalMixing) -> bool:
    return all(runs_known_code(part, nn.Linear) and part.bias is None for part in module.maps)


@rules.module(OrthogonalMixing, when=_plain_maps)
def orthogonal_mixing_bound(ctx: Context, module: OrthogonalMixing, x: Value) -> Value:
    """[M_h x_h]_h + p: heads are disjoint, so max_h |M_h|, taken from the matrices as they are."""
    arith = ctx.arith
    norms = [
        arith.sigma(arith.matrix(part.weight), f"{ctx.path}.maps.{h}")  # type: ignore[arg-type]
        for h, part in enumerate(module.maps)
    ]
    why = f"{len(norms)} heads mix their tokens by matrices: the largest of their spectral norms"
    return _mixed_tokens(ctx, x, arith.largest(norms), module.shift, why, before=False)


def _known_pairs(module: TokenMaxMin) -> bool:
    pair = any(runs_known_code(module.pair, kind) for kind in (MaxMin, SoftMaxMin))
    return pair and runs_known_code(module.within, MaxMin)


@rules.module(TokenMaxMin, when=_known_pairs)
def token_max_min_bound(ctx: Context, module: TokenMaxMin, x: Value) -> Value:
    """Disjoint pairs of entries of x + p, each mapped with slope 1, without growth: 1."""
    how = "pairs of tokens sorted in each channel: a permutation at every point"
    if isinstance(module.pair, SoftMaxMin):
        ctx.require(
            bool(module.pair.log_temperature.detach().abs() < LARGEST),
            "a temperature that is 0 or infinite",
        )
        how = "softmax averages of pairs of tokens in each channel, their distance divided by the largest slope"
    return _mixed_tokens(
        ctx, x, ctx.arith.const(1.0), module.shift, how, columns=module.across == x.shape[-1]
    )


def _mixed_tokens(
    ctx: Context,
    x: Value,
    constant: Scalar,
    shift: Tensor,
    why: str,
    before: bool = True,
    columns: bool = True,
) -> Value:
    """Return the value after a mixing with this constant; the shift p comes before or after it.

    Args:
        columns: each channel of all tokens is mapped to itself, so that columns grow by the
            constant at most.
    """
    x = ctx.settle(x)
    arith = ctx.arith
    windows, rest = divmod(math.prod(x.shape), shift.numel())
    ctx.require(
        not rest, f"tokens of shape {tuple(x.shape)}, which a shift of {shift.numel()} does not fit"
    )
    old = x.size

    def shift_norm() -> Scalar:
        length = arith.length(arith.matrix(shift.reshape(-1, 1)))
        return constant * length if before else length

    # tokens themselves may grow
    return ctx.chain(
        x,
        constant,
        why,
        lambda: constant * (old.fibre_along(-2) if columns else old.total) + shift_norm(),
        axis=-2,
        total=lambda: constant * old.total + shift_norm() * arith.root(windows),
    )
