"""Multi-head attention of forms whose errors are symbols of one token each: docs/local.md, 7."""

import itertools
import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from certcli.enclosure.zonotopes.columns import (
    FUNCTION,
    Blocks,
    gamma,
    norm1,
    norm2,
    reach_of,
    runs,
    up,
)
from certcli.enclosure.zonotopes.ellipsoids import (
    Part,
    factor,
    grouped,
    pairing,
    root,
    whole_gram,
)
from certcli.enclosure.zonotopes.form import ONE_BY_ONE, Form, Unbounded

_FARTHEST = 30.0
"""Scores that move further say nothing of probabilities; the radius is then refused."""


@dataclass(frozen=True)
class Operand:
    """One head's queries, keys or values, (n, e).

    Attributes:
        ball, columns: of the image, (b, n, e), and of the tokens' own symbols, (m, n, e).
        form: all of it, (1, n, e).
    """

    centre: Tensor
    ball: Tensor
    columns: Tensor
    slack: Tensor
    size: Tensor
    form: Form

    @staticmethod
    def of(x: Form) -> "Operand":
        """Return the operand of a form (1, n, e) all of whose symbols are the tokens' own."""
        return Operand(x.centre[0], x.ball[:, 0], x.box[:, 0], x.slack[0], x.size[0], x)

    def root(self) -> Tensor:
        """Return R, (n, e, e): what is not the centre lies in {R f: |f|_2 <= 1}."""
        return factor(whole_gram(self.form))


@dataclass(frozen=True)
class HeadBounds:
    """One head near its centre: p_ij = w_ij (1 + z_ij) + e_ij, z linear, sums over j.

    Attributes:
        weight: w, (i, j).
        ball: w z of the ball part, (b, i, j).
        of_query, of_key: w z of token i's own symbols, (m, i, j); w_ij q_i . k_j of token j's.
        error, change: bounds of |e| and |p - w|, (i, j).
        roots: of the values, (j, e, e).
        relative: values less the average, (i, j, e).
        centre: the average, (i, e).
        rounding: what rounding moves the result by, (i, e).
    """

    weight: Tensor
    ball: Tensor
    of_query: Tensor
    of_key: Tensor
    error: Tensor
    change: Tensor
    roots: Tensor
    relative: Tensor
    centre: Tensor
    rounding: Tensor


def attend_by_fibres(
    q: Form, k: Form, v: Form, heads: int, scale: float, token: int | None
) -> Form:
    """softmax(scale q k^T) v for heads side by side: (1, i, h e), (1, j, h e) x 2 -> (1, i, h e).

    All symbols are the tokens' own.

    Args:
        token: the only query, in place of all.
    """
    if q.space.images > 1:
        raise Unbounded(ONE_BY_ONE)
    q = q.scale(torch.tensor(scale, dtype=torch.float64, device=q.centre.device))
    queries, keys, values = (operands(x, heads) for x in (q, k, v))
    bounds = [
        head_bounds(query, key, value, q.blocks)
        for query, key, value in zip(queries, keys, values, strict=True)
    ]
    centre = torch.cat([head.centre for head in bounds], -1)[None]
    slack = torch.cat([head.rounding for head in bounds], -1)[None]
    places = torch.arange(k.shape[1]) if token is None else torch.tensor([token])
    places = places.to(centre.device)
    ball = [
        weighted_sum(head.ball, head.relative) + head.weight @ value.ball
        for head, value in zip(bounds, values, strict=True)
    ]
    rows = torch.arange(len(places), device=centre.device)
    of_itself = [
        weighted_sum(head.of_query, head.relative)
        + head.of_key[:, rows, places, None] * head.relative[rows, places]
        + head.weight[rows, places, None] * value.columns[:, places]
        for head, value in zip(bounds, values, strict=True)
    ]
    gens = torch.cat([torch.cat(ball, -1), torch.cat(of_itself, -1)])[:, None]
    form = Form(q.space, centre, gens, slack, q.blocks)
    parts = itertools.chain(
        *(errors(head, place, heads) for place, head in enumerate(bounds)),
        others(bounds, values, places, q.blocks),
    )
    form = grouped(form, root(parts, torch.zeros_like(centre[0])))
    if token is None:
        return form
    return replace(form, blocks=tuple(block.at(token) for block in form.blocks))


def operands(x: Form, heads: int) -> list[Operand]:
    """Return each head's part of queries, keys or values (1, n, h e)."""
    width = x.shape[-1] // heads
    starts = range(0, x.shape[-1], width)
    return [Operand.of(x.linear(operator.itemgetter((..., slice(i, i + width))))) for i in starts]


def weighted_sum(weights: Tensor, relative: Tensor) -> Tensor:
    """sum_j weights_ij relative_ij: (m, i, j) x (i, j, e) -> (m, i, e)."""
    return (weights.transpose(0, 1) @ relative).transpose(0, 1)


def head_bounds(q: Operand, k: Operand, v: Operand, blocks: Blocks) -> HeadBounds:
    """Enclose one head's probabilities and what its values are relative to their average.

    Raises:
        Unbounded: scores may move too far.
    """
    tokens, width = k.centre.shape
    scores = q.centre @ k.centre.T
    weight = scores.softmax(-1)
    # the stored weights against softmax of the stored scores: exp of rounded differences, one sum
    spread = (scores.amax(-1, keepdim=True) - scores.amin(-1, keepdim=True)) + 1
    relative_error = 4 * (gamma(tokens + 16) * spread + FUNCTION)
    rounding_rate = gamma(4 * width + 4 * tokens + 64) + 4 * relative_error
    ball = q.ball @ k.centre.T + (k.ball @ q.centre.T).mT
    ball -= (weight * ball).sum(-1, keepdim=True)
    middle = weight @ k.centre
    of_query = q.columns @ k.centre.T - (q.columns * middle).sum(-1, keepdim=True)
    of_key = (k.columns @ q.centre.T).mT
    sizes = q.size @ k.size.T
    # |q_i . k_j| beyond its linear part
    pairs = pairing(q.root()[:, None], k.root()[None])
    second_order = up(pairs + q.size @ k.slack.T + q.slack @ k.size.T, 2 * width + 8)

    def average(t: Tensor) -> Tensor:
        return up((weight * t).sum(-1, keepdim=True) * (1 + 2 * relative_error), tokens)

    def relative_to_average(t: Tensor) -> Tensor:
        """Above |x_ij - average of x_i| for independent |x_ij| <= t_ij."""
        others = average(t) * (1 + gamma(tokens + 16) + 4 * relative_error) - weight * t
        return up((1 - weight).clamp_min(0) * t + others.clamp_min(0))

    # rounding does not cancel, as what all scores of a row share does
    rounding = rounding_rate * (sizes + average(sizes))
    beyond = up(relative_to_average(second_order) + rounding, 2 * width + 8)
    key = relative_to_average(reach_of(of_key, blocks))
    length = norm1(ball) if q.form.space.boxed else norm2(ball)
    linear = up(length + reach_of(of_query, blocks) + key)
    far = up(linear + beyond)
    if not bool((far <= _FARTHEST).all()):
        raise Unbounded("scores that differ by more than exp can follow")
    bend = up(far * far / 2 * far.exp() * (1 + FUNCTION), 4)
    denominator = up(average(bend) * (1 + 2 * relative_error) + 2 * relative_error * average(far))
    below = 2 * relative_error * average(far)
    odds = up(
        beyond + torch.maximum(bend, (1 + far) * denominator) + 4 * below * (1 + far + bend), 8
    )
    error = up(weight * ((1 + 2 * relative_error) * odds + 2 * relative_error * (1 + far)), 8)
    change = up(weight * linear + error, 4)
    centre = weight @ v.centre
    relative = v.centre - centre[:, None]
    values = (v.size + v.centre.abs())[None] + centre.abs()[:, None]
    weighted = (weight * (1 + 2 * relative_error))[..., None] * values
    rounding = (weighted * (1 + 2 * sizes[..., None]) + error[..., None] * values).sum(1)
    rounding = rounding_rate * (rounding + 2 * average(sizes) * weighted.sum(1))
    return HeadBounds(
        weight,
        weight * ball,
        weight * of_query,
        weight * of_key,
        error,
        change,
        v.root(),
        relative,
        centre,
        up(rounding + weight @ v.slack, 2 * tokens + 16),
    )


def errors(head: HeadBounds, place: int, heads: int) -> Iterator[Part]:
    """Yield the columns of sum_j e_ij relative_ij and of sum_j (p - w)_ij (v_j - its centre)."""
    width = head.relative.shape[-1]

    def beside(columns: Tensor) -> Tensor:
        out = columns.new_zeros(*columns.shape[:-1], heads * width)
        out[..., place * width : (place + 1) * width] = columns
        return out

    yield beside((head.error[..., None] * head.relative).transpose(0, 1)), 1
    crossed = head.change.T[:, None, :, None] * head.roots.mT[:, :, None]
    yield beside(crossed.flatten(0, 1)), width


def others(
    heads: list[HeadBounds], values: list[Operand], places: Tensor, blocks: Blocks
) -> Iterator[Part]:
    """Yield what the own symbols of each token do to the results of the other tokens."""
    for token in range(heads[0].weight.shape[1]):
        columns = torch.cat(
            [
                head.of_key[:, :, token, None] * head.relative[:, token]
                + head.weight[:, token, None] * value.columns[:, None, token]
                for head, value in zip(heads, values, strict=True)
            ],
            -1,
        )
        columns[:, places == token] = 0
        for block, part in runs(columns, blocks):
            yield part, block.width
