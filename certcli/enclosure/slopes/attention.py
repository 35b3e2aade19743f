"""Pulls of attention: p = softmax(s q k^T), p v. Proofs: docs/local.md, 13."""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from certcli.enclosure.operations import spelled
from certcli.enclosure.slopes.layers import through
from certcli.enclosure.slopes.products import inner, times
from certcli.enclosure.slopes.pulls import PullContext, Pulled, pulls
from certcli.enclosure.zonotopes.direction import number
from certcli.enclosure.zonotopes.form import Form
from certcli.enclosure.zonotopes.rules.attention import multiplied
from certcli.enclosure.zonotopes.rules.layers import negative
from certcli.engine.attention import attention_module, fused_attention
from certcli.engine.table import with_attributes


def relative(x: Form, weight: Tensor, axis: int) -> Form:
    """x less its average by these weights (of about sum 1) along an axis, the same for all along it."""
    return x.linear(
        lambda t: t - (weight * t).sum(axis, keepdim=True),
        lambda t: t + (weight.abs() * t).sum(axis, keepdim=True),
        x.shape[axis] + 4,
    )


def of_scores(p: Form, gradient: Form) -> Form:
    """p (g - <p, g>) row by row: what is the same in a row of g drops out, as p sums to 1."""
    gradient = relative(gradient.worked(), p.centre, -1).worked()
    along = inner(p, gradient)
    spread = along.linear(lambda t: t.expand(*t.shape[:-1], p.shape[-1]))
    return times(p, (gradient + negative(spread)).worked()).worked()


def attend_back(ctx: PullContext, scale: float) -> tuple[Form, Form, Form]:
    """Return the gradients of q, k and v, heads (w, h, n, e).

    Rows of p sum to 1, so that values count up to what all share; rows of the scores' gradient sum to
    0, so that keys do, too.
    """
    q, k, v, p = (ctx.inner[name] for name in "qkvp")
    gradient = ctx.gradient.worked()
    weight = p.centre.mean(-2)[..., None]  # (w, h, j, 1)
    values = ctx.once("values", lambda: relative(v, weight, -2).linear(lambda t: t.mT).worked())
    keys = ctx.once("keys", lambda: relative(k, weight, -2).worked())
    of_v = multiplied(ctx.once("p^T", lambda: p.linear(lambda t: t.mT)), gradient)
    of_s = of_scores(p, multiplied(gradient, values)).scale(number(scale, gradient))
    of_q = multiplied(of_s, keys)
    of_k = multiplied(of_s.linear(lambda t: t.mT), ctx.once("q solid", q.worked))
    return of_q, of_k, of_v


@attention_module(pulls)
def attention(
    ctx: PullContext, module: Any, x: Form, attn_mask: Any = None, is_causal: bool = False
) -> Pulled:
    heads = module.num_heads
    width = heads * module.head_dim
    back = through(module.proj.weight, ctx.gradient)
    back = back.linear(lambda t: t.unflatten(-1, (heads, -1)).transpose(-3, -2))
    ctx = PullContext(ctx.node, back, ctx.inner, ctx.token)
    parts = [
        through(
            module.qkv.weight[i * width : (i + 1) * width],
            part.linear(lambda t: t.transpose(-3, -2).flatten(-2)),
        )
        for i, part in enumerate(attend_back(ctx, module.scale))
    ]
    of_q = parts[0] if ctx.token is None else placed(parts[0], ctx.token, x.shape[1])
    return [(x, of_q + parts[1] + parts[2])]


def placed(x: Form, token: int, tokens: int) -> Form:
    """Return a gradient (1, 1, d) at one of the tokens, 0 at others: (1, tokens, d)."""
    return x.linear(lambda t: F.pad(t, (0, 0, token, tokens - 1 - token)))


@fused_attention(pulls)
def attention_function(
    ctx: PullContext, query: Any, key: Form, value: Form, mask: Any, scale: float | None
) -> Pulled:
    width = query.tensor.shape[-1] if not isinstance(query, Form) else query.shape[-1]
    parts = attend_back(ctx, scale if scale is not None else width**-0.5)
    both = zip((query, key, value), parts, strict=True)
    return [(of, part) for of, part in both if isinstance(of, Form)]


@spelled(pulls, "product of matrices")
def product_of_matrices(ctx: PullContext, x: Form, y: Form) -> Pulled:
    gradient = ctx.gradient.worked()
    of_first = ctx.once("second^T", lambda: y.linear(lambda t: t.mT).worked())
    of_second = ctx.once("first^T", lambda: x.linear(lambda t: t.mT).worked())
    return [(x, multiplied(gradient, of_first)), (y, multiplied(of_second, gradient))]


@spelled(pulls, "softmax")
def softmax_of_rows(
    ctx: PullContext, x: Form, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None
) -> Pulled:
    p = ctx.once("solid", lambda: ctx.inner["p"].solid())
    return [(x, of_scores(p, ctx.gradient))]


pulls.module(nn.Softmax)(with_attributes(softmax_of_rows, "dim"))
