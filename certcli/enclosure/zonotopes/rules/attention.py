"""Dot-product attention: scores, 1 / sum exp of differences, averages; written out as well.
docs/local.md, section 7.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from certcli.enclosure.operations import spelled
from certcli.enclosure.zonotopes.columns import distances, gamma, reach_of_differences, up
from certcli.enclosure.zonotopes.ellipsoids import by_fibres
from certcli.enclosure.zonotopes.fibre_attention import attend_by_fibres
from certcli.enclosure.zonotopes.form import Form, Unbounded
from certcli.enclosure.zonotopes.pointwise import apply, capped, joint_activation
from certcli.enclosure.zonotopes.products import Bilinear, crossing, matrix_product, product
from certcli.enclosure.zonotopes.rules.layers import affine
from certcli.enclosure.zonotopes.space import ZonotopeContext, rules
from certcli.engine.attention import (
    added_to_scores,
    attention_module,
    fused_attention,
    require_no_mask,
)
from certcli.engine.curves import EXP, LOG
from certcli.engine.table import NoRule, with_attributes
from certcli.engine.walk import Constant
from certcli.system.errors import raise_if

_FARTHEST = 30.0
"""Differences of scores beyond +-30 make exp's relaxation useless; the radius is then refused."""


def matrices_times(a: Tensor, b: Tensor) -> Tensor:
    """Return a b, (.., i, j) x (.., j, e) -> (.., i, e), leading axes broadcast.

    Many small products are a few large ones; `@` would repeat what is broadcast.
    """
    return torch.einsum("...ij,...je->...ie", a, b)


SCORES = Bilinear(lambda a, b: matrices_times(a, b.mT), lambda r, b: r @ b, lambda a, r: r.mT @ a)
AVERAGES = Bilinear(matrices_times, lambda r, b: r @ b.mT, lambda a, r: a.mT @ r)


def scores(q: Form, k: Form) -> Form:
    """q k^T, (1, h, i, e) x (1, h, j, e) -> (1, h, i, j), up to what is the same in a row.

    The keys are centred over the tokens first: q . mean(k) shifts whole rows of scores, which
    softmax cannot see.
    """
    k = k.linear(
        lambda t: t - t.mean(-2, keepdim=True),
        lambda t: t + t.mean(-2, keepdim=True),
        k.shape[-2] + 4,
        lambda r: r - r.mean(-2, keepdim=True),
    )
    joint = matrix_product(q, k, SCORES, keyed=True)
    return product(q, k, SCORES, k.shape[-1], _score_square, crossing) if joint is None else joint


def _score_square(a: Tensor, b: Tensor) -> Tensor:
    """|T_ij|_F^2 of T_ij = sum_e a_ie b_je^T, from the Gram matrices of both: (m, 1, h, i, e) ->
    (1, h, i, j).
    """
    first = torch.einsum("m...ie,m...if->...ief", a, a).flatten(-2)
    second = torch.einsum("m...je,m...jf->...jef", b, b).flatten(-2)
    return first @ second.mT


def softmax(x: Form) -> Form:
    """p_j = exp(z_j - log sum_k exp z_k), last axis, z_j = x_j - sum_k w_k x_k, w near p.

    At w = p the sum does not move to first order, so that its logarithm costs next to nothing.
    Differences of scores give bounds beside it: p_j = 1 / sum_k exp(x_k - x_j).
    """
    x = x.worked()
    low, high = _bounds(x)
    weight = x.centre.softmax(-1)
    z = x.linear(
        lambda t: t - (weight * t).sum(-1, keepdim=True),
        lambda t: t + (weight * t).sum(-1, keepdim=True),
        x.shape[-1] + 4,
        lambda r: r - weight * r.sum(-1, keepdim=True),
    )
    if not bool((z.radius <= _FARTHEST).all()):
        raise Unbounded("scores that differ by more than exp can follow")
    # exp is convex: the sum of its chords is no larger than that of its values above
    below, _ = z.interval()
    smallest_sum = below.exp().sum(-1, keepdim=True) * (1 - gamma(x.shape[-1] + 256))
    total = apply(EXP, z).linear(
        lambda t: t.sum(-1, keepdim=True),
        lambda t: t.sum(-1, keepdim=True),
        x.shape[-1],
        lambda r: r.expand(*r.shape[:-1], x.shape[-1]),
    )
    level = apply(LOG, total, smallest_sum).solid()  # one symbol a row, shared by its probabilities
    share = z + level.linear(
        lambda t: -t.expand(*t.shape[:-1], x.shape[-1]),
        lambda t: t.expand(*t.shape[:-1], x.shape[-1]),
        transposed=lambda r: -r.sum(-1, keepdim=True),
    )
    bottom = low.log() - 2.0**-40 * (1 + low.log().abs())
    top = high.log() + 2.0**-40 * (1 + high.log().abs())
    probabilities = capped(joint_activation(EXP, share, bottom, top.clamp_max(0.0)), low, high)
    return replace(probabilities, row_sum_error=x.centre.new_zeros(()))


def _bounds(x: Form) -> tuple[Tensor, Tensor]:
    """Return bounds of p_j = 1 / sum_k exp(x_k - x_j) from the intervals of the differences."""
    count = x.shape[-1]
    reach = _score_distances(x.gens.flatten(1, -2), x).view(
        *x.shape[:-1], count, count
    )  # (*rows, j, k)
    distance = x.centre[..., None, :] - x.centre[..., :, None]
    reach = up(reach + gamma(0) * (x.centre[..., None, :].abs() + x.centre[..., :, None].abs()))
    reach = reach * (1 - torch.eye(count, dtype=reach.dtype, device=reach.device))  # x_j - x_j = 0
    terms = count + 256
    smallest = (distance - reach).exp().sum(-1) * (1 - gamma(terms)) - gamma(4)
    largest = (distance + reach).exp().sum(-1) * (1 + gamma(terms))
    return (1 - gamma(4)) / largest, up(1 / smallest.clamp_min(1.0), 4).clamp_max(1.0)


def _score_distances(columns: Tensor, x: Form) -> Tensor:
    """sup |x_k - x_j - (c_k - c_j)|: (rows, j, k), from the columns (columns, rows, k)."""
    ball = x.space.ball
    fixed = x.fixed
    near = distances(columns[:ball].permute(1, 2, 0), 1.0 if x.space.boxed else 2.0)
    square = distances(columns[ball:fixed].permute(1, 2, 0), 2.0)
    rest = reach_of_differences(columns[fixed:], x.blocks)
    slack = x.slack.flatten(0, -2)
    return up(near + square + rest + slack[:, :, None] + slack[:, None, :], 6)


def average(p: Form, v: Form) -> Form:
    """p v for probabilities p whose rows sum to 1: (w, h, i, j) x (w, h, j, e) -> (w, h, i, e).

    o = w v + (p - w) (v - w v) for any w with sum 1 in each row: values count relative to their
    average alone. Where the sums are s, (s - 1) w v is missing, |s - 1| <= `row_sum_error`.
    """
    row_sum_error = p.row_sum_error
    p = p.solid() if bool(p.slack.any()) else p
    tokens = v.shape[-2]
    weight = p.centre / p.centre.sum(-1, keepdim=True)
    # p = p - weight (sum p - 1): an identity for probabilities, and deviations then sum to 0 up to
    # rounding
    spread = p.linear(
        lambda t: t - weight * t.sum(-1, keepdim=True),
        lambda t: t + weight.abs() * t.sum(-1, keepdim=True),
        2 * tokens + 4,
        lambda r: r - (weight * r).sum(-1, keepdim=True),
    ).shift(weight)
    common = weight.mean(-2, keepdim=True)  # (1, h, 1, j), the same for all rows
    middle = v.linear(
        lambda t: matrices_times(common, t),
        lambda t: common.abs() @ t,
        tokens,
        lambda r: common.mT @ r,
    )
    ones = v.linear(
        lambda t: t - (middle.gens if t is v.gens else matrices_times(common, t)),
        lambda t: t + common.abs() @ t,
        tokens + 4,
        lambda r: r - common.mT @ r.sum(-2, keepdim=True),
    )
    out = multiplied(spread, ones)
    out = out + middle.linear(lambda t: t.expand(*t.shape[:-2], out.shape[-2], t.shape[-1]))
    if row_sum_error is None or not bool(row_sum_error > 0):
        return out
    return out.doubted(up(row_sum_error * (weight.abs() @ v.size), tokens + 2))


def matmul(x: Form, y: Form) -> Form:
    """x y: (.., i, j) x (.., j, e) -> (.., i, e); averages where the rows of x are probabilities."""
    if x.row_sum_error is not None:
        return average(x, y)
    return multiplied(x.worked(), y.worked())


def multiplied(x: Form, y: Form) -> Form:
    joint = matrix_product(x, y, AVERAGES, keyed=False)
    if joint is not None:
        return joint
    return product(
        x,
        y,
        AVERAGES,
        x.shape[-1],
        lambda a, b: _score_square(a, b.mT),
        lambda x, y: crossing(x, y.linear(lambda t: t.mT)),
    )


def attend(
    q: Form,
    k: Form,
    v: Form,
    scale: float,
    added: Tensor | None = None,
    inner: dict[str, Any] | None = None,
) -> Form:
    """softmax(scale q k^T + added) v, heads (w, h, n, e); w: the windows of one image, or 1.

    Args:
        inner: where q, k, v and the probabilities are put down.
    """
    factor = torch.tensor(scale, dtype=torch.float64, device=q.centre.device)
    alike = scores(q.scale(factor), k)
    p = softmax(alike if added is None else alike.shift(added.to(alike.centre)))
    p = replace(p.solid(), row_sum_error=p.row_sum_error)
    if inner is not None:
        inner |= {"q": q, "k": k, "v": v, "p": p}
    return average(p, v)


@attention_module(rules)
def attention(
    ctx: ZonotopeContext, module: Any, x: Form, attn_mask: Any = None, is_causal: bool = False
) -> Form:
    """timm's multi-head attention, for the queries that are read later."""
    require_no_mask(attn_mask, is_causal)
    x = x.worked()
    heads = module.num_heads
    inner = heads * module.head_dim
    token = ctx.token
    if x.space.by_fibres and not all(block.of_fibres for block in x.blocks):
        x = by_fibres(x)

    def part(index: int, of: Form) -> Form:
        weight = module.qkv.weight[index * inner : (index + 1) * inner]
        absolute = weight.abs().T
        out = of.image(
            lambda t: t @ weight.T, lambda t: t @ absolute, weight.shape[1], lambda r: r @ weight
        )
        # a bias of the keys shifts whole rows of scores, which softmax cannot see
        if module.qkv.bias is not None and index != 1:
            out = out.shift(module.qkv.bias[index * inner : (index + 1) * inner])
        if of.space.by_fibres:
            return out
        return out.linear(lambda t: t.unflatten(-1, (heads, -1)).transpose(-3, -2))

    asking = x if token is None else x.linear(lambda t: t[:, :, token : token + 1])
    if x.space.by_fibres:
        out = attend_by_fibres(part(0, asking), part(1, x), part(2, x), heads, module.scale, token)
        return affine(out, module.proj.weight, module.proj.bias)
    out = attend(part(0, asking), part(1, x), part(2, x), module.scale, None, ctx.inner)
    return affine(
        out.linear(lambda t: t.transpose(-3, -2).flatten(-2)),
        module.proj.weight,
        module.proj.bias,
    )


def constant_form(constant: Tensor, like: Any) -> Form:
    """Return a constant as a form of the walk that `like` is of."""
    if not isinstance(like, Form):
        raise NoRule("attention over something constant")
    constant = constant.expand(like.space.images * len(constant), *constant.shape[1:])

    def nothing(t: Tensor) -> Tensor:
        return t.new_zeros(len(t), *constant.shape)

    form = like.linear(nothing, nothing, transposed=lambda r: r.new_zeros(len(r), *like.shape))
    return form.shift(constant.to(like.centre))


@fused_attention(rules)
def attention_function(
    ctx: ZonotopeContext, query: Form, key: Form, value: Form, mask: Any, scale: float | None
) -> Form:
    if isinstance(query, Constant):  # a learned query, of pooling by attention
        query = constant_form(query.tensor, key)
    if not all(isinstance(part, Form) and len(part.shape) == 4 for part in (query, key, value)):
        raise NoRule("attention over something constant")
    added = added_to_scores(mask, (*query.shape[:-1], key.shape[-2]))
    scale = scale if scale is not None else query.shape[-1] ** -0.5
    return attend(query, key, value, scale, added, ctx.inner)


@spelled(rules, "product of matrices")
def matrix_product_of_forms(ctx: ZonotopeContext, x: Any, y: Any) -> Form:
    both = isinstance(x, Form) and isinstance(y, Form)
    raise_if(not both, NoRule, "a product of matrices with a constant")
    repeats = x.shape[:-2] != y.shape[:-2] or min(len(x.shape), len(y.shape)) < 3
    raise_if(repeats, NoRule, "a product of matrices that repeats a tensor")
    return matmul(x, y)


@spelled(rules, "softmax")
def softmax_of_form_rows(
    ctx: ZonotopeContext, x: Form, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None
) -> Form:
    axes = len(x.shape)
    raise_if(
        dim is None or dim % axes != axes - 1 or axes < 2 or dtype is not None,
        NoRule,
        "softmax over another axis than the last",
    )
    ctx.inner["p"] = softmax(x)
    probabilities: Form = ctx.inner["p"]
    return probabilities


rules.module(nn.Softmax)(with_attributes(softmax_of_form_rows, "dim"))
