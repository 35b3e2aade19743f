"""Modules whose theorem is not the sum of their parts. Proofs: docs/bounds.md, section 7."""

from typing import Any

import torch
from timm.models.convit import GPSA
from torch import Tensor, nn

from certcli.engine.table import runs_known_code
from certcli.lipschitz.context import Context
from certcli.lipschitz.numerics.spectral import up
from certcli.lipschitz.rules.matmul_attention import Mix, attend
from certcli.lipschitz.rules.shapes import moved, reshaped
from certcli.lipschitz.rules.slice_concat import select
from certcli.lipschitz.table import rules
from certcli.lipschitz.value import Value


def _known_parts(module: GPSA) -> bool:
    maps = (module.qk, module.v, module.proj, module.pos_proj)
    return all(runs_known_code(part, nn.Linear) for part in maps) and all(
        any(runs_known_code(part, kind) for kind in (nn.Dropout, nn.Identity))
        for part in (module.attn_drop, module.proj_drop)
    )


@rules.module(GPSA, when=_known_parts)
def gated_positional_attention(ctx: Context, module: GPSA, x: Value) -> Value:
    """W_O [(1 - g_h) P_h(x) v_h + g_h B_h v_h]_h with constant row-stochastic B_h: Theorem 7.1.

    The layer divides by the row sums, which are (1 - g) + g = 1.
    """
    x = ctx.settle(x) if x.pending is not None and x.pending.axis != -1 else x
    b, n, width = x.shape
    heads = module.num_heads
    arith = ctx.arith
    split = (b, n, 2, heads, width // heads)
    qk = moved(ctx, reshaped(ctx, ctx.fold(x, module.qk.weight, module.qk.bias), split), (2, 0, 3, 1, 4))
    by_head = (b, heads, n, width // heads)
    query, key = (select(ctx.at(by_head), qk, number) for number in (0, 1))
    value = reshaped(ctx, ctx.fold(x, module.v.weight, module.v.bias), (b, n, heads, width // heads))
    value = moved(ctx, value, (0, 2, 1, 3))
    scale: Any = arith.const(up(float(module.scale), 2))
    with torch.no_grad():
        mixes = positional_mixes(ctx, module, n)
    out = attend(ctx.at(by_head), query, key, value, scale, mixes)
    merged = reshaped(ctx, moved(ctx, out, (0, 2, 1, 3)), (b, n, width))
    return ctx.fold(merged, module.proj.weight, module.proj.bias)


def positional_mixes(ctx: Context, module: Any, n: int) -> list[Mix]:
    """1 - g_h and g_h |B_h| of a layer with ConViT's `pos_proj`, `gating_param` and `get_rel_indices`."""
    weight, bias = module.pos_proj.weight.double(), module.pos_proj.bias.double()
    scores: Tensor = module.get_rel_indices(n).double() @ weight.T + bias
    positions = scores.permute(0, 3, 1, 2).softmax(dim=-1)[0]
    mixes: list[Mix] = []
    for head, gate in zip(positions, module.gating_param.double().sigmoid().tolist(), strict=True):
        # scores below 1e5 in float64: probabilities within a relative 1e-9; a matrix of averages is at most sqrt(n)
        ctx.require(float(scores.abs().max()) < 1e5, "positional scores beyond 1e5")
        computed = ctx.arith.sigma(ctx.arith.matrix(head), f"{ctx.path}.positions.{len(mixes)}")
        sigma = ctx.arith.minimum(computed * ctx.arith.const(1 + 1e-9), ctx.arith.sqrt(ctx.arith.const(float(n))))
        slack = 2.0**-40
        mixes.append(Mix(ctx.arith.const(1.0 - gate + slack), ctx.arith.const(gate + slack) * sigma))
    return mixes
