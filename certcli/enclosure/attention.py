"""Dot-product attention: scores, probabilities as 1 / sum exp of differences, averages. Proofs: docs/local.md, section 7."""

import torch
from torch import Tensor

from certcli.enclosure.form import Form, Unbounded, folded
from certcli.enclosure.functions import EXP, RECIPROCAL
from certcli.enclosure.pointwise import Fit, apply, chosen, fits
from certcli.enclosure.products import product
from certcli.enclosure.rounding import gamma, up

_FARTHEST = 30.0
"""Differences of scores beyond +-30 make exp's relaxation useless; the radius is then refused."""


def scores(q: Form, k: Form) -> Form:
    """q k^T, (1, h, i, e) x (1, h, j, e) -> (1, h, i, j), up to what is the same in a row.

    The keys are centred over the tokens first: q . mean(k) shifts whole rows of scores, which softmax cannot see.
    """
    tokens, width = k.shape[-2], k.shape[-1]
    k = k.linear(lambda t: t - t.mean(-2, keepdim=True), lambda t: t + t.mean(-2, keepdim=True), terms=tokens + 4)
    return product(q, k, lambda a, b: a @ b.mT, width, _score_square)


def _score_square(a: Tensor, b: Tensor) -> Tensor:
    """|T_ij|_F^2 of T_ij = sum_e a_ie b_je^T, from the Gram matrices of both: (m, 1, h, i, e) -> (1, h, i, j)."""
    first = torch.einsum("mzhie,mzhif->zhief", a, a).flatten(-2)
    second = torch.einsum("mzhje,mzhjf->zhjef", b, b).flatten(-2)
    return first @ second.mT


def _average_square(a: Tensor, b: Tensor) -> Tensor:
    """The same for sum_j a_ij b_je^T: (m, 1, h, i, j) x (m, 1, h, j, e) -> (1, h, i, e)."""
    first = torch.einsum("mzhij,mzhik->zhijk", a, a).flatten(-2)
    second = torch.einsum("mzhje,mzhke->zhejk", b, b).flatten(-2)
    return first @ second.mT


def softmax(x: Form) -> Form:
    """p_ij = 1 / sum_k exp(x_ik - x_ij) on the last axis, from the differences alone."""
    x = x.solid()
    space, count = x.space, x.shape[-1]
    rows = x.shape[:-1]
    flat = x.gens.flatten(1, -2).permute(1, 2, 0).contiguous()  # (rows, k, columns)
    balls, rests = _distances(flat, x)
    columns, slopes, centre, slack, least, most = [], [], [], [], [], []
    for j in range(count):
        ball, rest = balls[..., j, :].view(x.shape), rests[..., j, :].view(x.shape)
        distance = x.centre - x.centre[..., j : j + 1]
        apart = gamma(0) * (x.centre.abs() + x.centre[..., j : j + 1].abs())  # what `distance` may be off by
        rest = up(rest + apart)
        reach = up(ball + rest)
        if not bool((reach <= _FARTHEST).all()):
            raise Unbounded("scores that differ by more than exp can follow")
        low, high = distance - up(reach), distance + up(reach)
        # low and high themselves are rounded
        low, high = low - gamma(0) * low.abs(), high + gamma(0) * high.abs()
        fit = _pick(distance, low, high, ball, rest, space.squares)
        own = torch.arange(count, device=x.centre.device) == j  # exp(0) = 1 exactly
        constant = torch.where(own, 1.0, fit.constant)
        slope = torch.where(own, 0.0, fit.slope)
        curve = torch.where(own, 0.0, fit.curve)
        error = torch.where(own, 0.0, fit.error) + slope.abs() * apart
        error = error + curve.abs() * (2 * ball * rest + rest * rest / 2)
        spread = constant.abs() + slope.abs() * reach + curve.abs() * (ball * ball + rest * rest)
        centre.append((constant + curve * rest * rest / 2).sum(-1))
        slack.append(up(error.sum(-1) + gamma(count + 8) * spread.sum(-1), count + 8))
        slopes.append(slope)
        least.append((torch.where(own, 1.0, low.exp()).sum(-1) * (1 - gamma(count + 256))).clamp_min(1.0))
        most.append(torch.where(own, 1.0, high.exp()).sum(-1) * (1 + gamma(count + 256)))
        if space.squares:
            gap = (flat[..., : space.ball] - flat[:, j : j + 1, : space.ball]).mT  # (rows, m, k)
            square = (gap * curve.flatten(0, -2)[:, None]) @ gap.mT
            columns.append(folded(square.movedim(0, -1).reshape(space.ball, space.ball, *rows), space))
    slope = torch.stack(slopes, -2)  # (*rows, j, k)
    # sum_k slope_jk (g_k - g_j) for all columns g at once
    steep = slope.flatten(0, -3)
    mixed = steep @ flat - flat * steep.sum(-1, keepdim=True)
    gens = mixed.permute(2, 0, 1).reshape(x.gens.shape)
    if space.squares:
        gens[space.ball : x.fixed] += torch.stack(columns, -1)
    size = x.radius[..., None]
    loss = gamma(2 * count + 8) * (slope.abs() @ size + slope.abs().sum(-1, keepdim=True) * size)
    total = Form(space, torch.stack(centre, -1), gens, up(torch.stack(slack, -1) + loss[..., 0]), x.blocks)
    low, high = torch.stack(least, -1), torch.stack(most, -1)
    return capped(apply(RECIPROCAL, total, low, high), (1 / high) * (1 - gamma(4)), up(1 / low, 4))


def capped(x: Form, low: Tensor, high: Tensor) -> Form:
    """x, or the middle of [low, high] with nothing but slack where that is narrower."""
    half = up((high - low) / 2, 2) + gamma(4) * high.abs()
    narrower = half < x.rest_radius  # what the ball part says is shared with other entries and stays worth more
    zero = torch.zeros((), dtype=x.centre.dtype, device=x.centre.device)
    return Form(
        x.space,
        torch.where(narrower, (low + high) / 2, x.centre),
        torch.where(narrower, zero, x.gens),
        torch.where(narrower, half, x.slack),
        x.blocks,
    )


def _distances(flat: Tensor, x: Form) -> tuple[Tensor, Tensor]:
    """sup |A e| and sup |Q vec(e e^T) + B n| of all differences x_k - x_j: (rows, j, k), from columns (rows, k, g)."""
    ball, fixed, exact = x.space.ball, x.fixed, "donot_use_mm_for_euclid_dist"
    near = [
        up(torch.cdist(part, part, p=p, compute_mode=exact), part.shape[-1] + 4)
        for part, p in ((flat[..., :ball], 2.0), (flat[..., ball:fixed], 2.0), (flat[..., fixed:], 1.0))
    ]
    return near[0], up(near[1] + near[2])


def _pick(distance: Tensor, low: Tensor, high: Tensor, ball: Tensor, rest: Tensor, bend: bool) -> Fit:
    flat, bent = fits(EXP, distance, low, high)
    return chosen(flat, bent, ball, rest) if bend else flat


def average(p: Form, v: Form) -> Form:
    """p v for probabilities p whose rows sum to 1: (1, h, i, j) x (1, h, j, e) -> (1, h, i, e).

    o = w v + (p - w) (v - w v) for any w with sum 1 in each row: values count relative to their average alone.
    """
    p = p.solid()
    tokens = v.shape[-2]
    weight = p.centre / p.centre.sum(-1, keepdim=True)
    # p = p - weight (sum p - 1): an identity for probabilities, and deviations then sum to 0 up to rounding
    spread = p.linear(
        lambda t: t - weight * t.sum(-1, keepdim=True),
        lambda t: t + weight.abs() * t.sum(-1, keepdim=True),
        terms=2 * tokens + 4,
    ).shift(weight)
    common = weight.mean(-2, keepdim=True)  # (1, h, 1, j), the same for all rows
    middle = v.linear(lambda t: common @ t, lambda t: common.abs() @ t, terms=tokens)
    ones = v.linear(lambda t: t - common @ t, lambda t: t + common.abs() @ t, terms=tokens + 4)
    out = product(spread, ones, lambda a, b: a @ b, tokens, _average_square)
    return out + middle.linear(lambda t: t.expand(*t.shape[:-2], out.shape[-2], t.shape[-1]))


def attend(q: Form, k: Form, v: Form, scale: float) -> Form:
    """softmax(scale q k^T) v, heads (1, h, n, e)."""
    factor = torch.tensor(scale, dtype=torch.float64, device=q.centre.device)
    return average(softmax(scores(q.scale(factor), k)), v)
