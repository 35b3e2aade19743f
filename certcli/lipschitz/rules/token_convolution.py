"""Convolutions over the token axis: linear, so one operator norm. Proof: docs/bounds.md, section 10.3."""

from dataclasses import replace
from typing import Any

from torch import nn

from certcli.engine.table import runs_known_code
from certcli.lipschitz.context import Context
from certcli.lipschitz.numerics.arithmetic import Matrix, Scalar
from certcli.lipschitz.numerics.convolution_estimate import Geometry
from certcli.lipschitz.numerics.spectral import up
from certcli.lipschitz.table import rules
from certcli.lipschitz.value import Value
from certcli.nn.conv_attention import ConvAttention


def _plain(module: ConvAttention) -> bool:
    """One centred, zero-padded kernel that keeps the number of tokens; else the layer is traced through."""
    conv = module.convolution
    return (
        runs_known_code(conv, nn.Conv1d)
        and runs_known_code(module.proj, nn.Linear)
        and (conv.stride, conv.dilation, conv.groups, conv.padding_mode) == ((1,), (1,), 1, "zeros")
        and conv.kernel_size[0] % 2 == 1
        and conv.padding == (conv.kernel_size[0] // 2,)
    )


@rules.module(ConvAttention, when=_plain)
def token_convolution(
    ctx: Context, module: ConvAttention, x: Value, attn_mask: Any = None, is_causal: bool = False
) -> Value:
    """The norm of one convolution with the taps W_O K_t M, M what was pending on each token."""
    ctx.require(attn_mask is None and not is_causal, "a convolution over tokens with a mask")
    ctx.require(len(x.shape) == 3, "tokens of another shape than (b, n, d)")
    arith, tokens, conv, proj = ctx.arith, int(x.shape[-2]), module.convolution, module.proj
    x = ctx.on_last_axis(x)
    pending = x.pending
    taps = conv.kernel_size[0]
    # W_O on all taps at once; the error of this product is one on its entries (Frobenius), however they are arranged
    flat = arith.matmul(arith.matrix(proj.weight), arith.matrix(conv.weight.flatten(1)))
    out, width = proj.out_features, conv.in_channels
    stacked = Matrix(flat.tensor.view(out, width, taps).transpose(1, 2).reshape(out * taps, width), flat.error)
    before = None if pending is None else pending.effective(arith)
    if before is not None:
        stacked = arith.matmul(stacked, before)
    kernel = stacked.tensor.view(out, taps, -1).transpose(1, 2)
    geometry = Geometry((1,), ((taps // 2, taps // 2),), (1,), 1, (tokens,))
    # the operator is a sum over taps, each off by at most the error of all of them
    sigma = arith.convolution(kernel.contiguous(), up(stacked.error * taps), geometry, f"{ctx.path}.convolution")
    plain = replace(x, waiting=None) if pending is not None else x
    pieces = [None if layer.bias is None else arith.matrix(layer.bias.reshape(-1, 1)) for layer in (conv, proj)]

    def fibre() -> Scalar:
        # a token of the result is [W_O K_t]_t times a window of tokens M u + b, plus W_O b_K + b_O
        radius = plain.size.fibre_along(-1) if pending is None else plain.size.fibre
        token = radius if before is None else arith.sigma(before, f"{ctx.path}.before") * radius
        if pending is not None and pending.bias is not None:
            token = token + arith.length(pending.bias)
        longest = arith.sigma(flat, f"{ctx.path}.window") * token * arith.sqrt(arith.const(float(taps)))
        if pieces[0] is not None:
            longest = longest + arith.length(arith.matmul(arith.matrix(proj.weight), pieces[0]))
        return longest if pieces[1] is None else longest + arith.length(pieces[1])

    why = f"zero-padded convolution of {taps} taps over {tokens} tokens, with the output map folded in"
    return ctx.chain(plain, sigma, why, fibre)
