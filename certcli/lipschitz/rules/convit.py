"""ConViT's gated positional attention. Proof: docs/bounds.md, section 7.1."""

import operator

from timm.models.convit import GPSA
from torch import nn

from certcli.engine.moves import Move
from certcli.engine.table import runs_known_code
from certcli.lipschitz.context import Context
from certcli.lipschitz.numerics.outward import up
from certcli.lipschitz.rules.attention_positions import positional_gates
from certcli.lipschitz.rules.matmul_attention import attend
from certcli.lipschitz.rules.moves import moved, rearranged, reshaped
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
    split = (b, n, 2, heads, width // heads)
    qk = moved(
        ctx, reshaped(ctx, ctx.fold(x, module.qk.weight, module.qk.bias), split), (2, 0, 3, 1, 4)
    )
    by_head = (b, heads, n, width // heads)
    query, key = (rearranged(ctx, qk, Move(operator.getitem, (number,))) for number in (0, 1))
    value = reshaped(
        ctx, ctx.fold(x, module.v.weight, module.v.bias), (b, n, heads, width // heads)
    )
    value = moved(ctx, value, (0, 2, 1, 3))
    scale = ctx.arith.const(up(float(module.scale), 2))
    out = attend(ctx.at(by_head), query, key, value, scale, positional_gates(ctx, module, n))
    merged = reshaped(ctx, moved(ctx, out, (0, 2, 1, 3)), (b, n, width))
    return ctx.fold(merged, module.proj.weight, module.proj.bias)
