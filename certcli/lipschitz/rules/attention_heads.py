"""Multi-head attention: its linear maps head by head, and the sums that bound all heads together.

The output of head h moves by at most sum_t c_th |dy_th| over its maps y_t (queries, keys, values),
and every head has an output of its own. Proofs: docs/bounds.md, section 5.4.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import nn

from certcli.engine.table import NoRule, runs_known_code
from certcli.lipschitz.context import Context
from certcli.lipschitz.numerics.arithmetic import Arithmetic, Matrix, Scalar
from certcli.lipschitz.numerics.outward import up
from certcli.lipschitz.value import Value
from certcli.nn.attention import LipschitzAttention


@dataclass(frozen=True)
class HeadMap:
    """u -> W u + b on |u| <= radius, the pending map folded in; head h has W's h-th rows."""

    arith: Arithmetic
    matrix: Matrix
    bias: Matrix | None
    heads: int
    radius: Scalar
    name: str

    @cached_property
    def whole(self) -> Scalar:
        """|W|."""
        return self.arith.sigma(self.matrix, self.name)

    @cached_property
    def slopes(self) -> list[Scalar]:
        """|W_h|."""
        return self.arith.sigmas(
            [self._part(self.matrix, h) for h in range(self.heads)], f"{self.name}.head"
        )

    @cached_property
    def reach(self) -> list[Scalar]:
        """Radius of the rows W_h u + b_h about b_h."""
        return [slope * self.radius for slope in self.slopes]

    @property
    def norms(self) -> list[Scalar]:
        """Largest norm of a row W_h u + b_h."""
        if self.bias is None:
            return self.reach
        lengths = [self.arith.length(self._part(self.bias, h)) for h in range(self.heads)]
        return [reach + length for reach, length in zip(self.reach, lengths, strict=True)]

    def _part(self, matrix: Matrix, h: int) -> Matrix:
        width = matrix.shape[0] // self.heads
        return self.arith.rows(matrix, h * width, (h + 1) * width)


def head_maps(
    ctx: Context, x: Value, module: LipschitzAttention, *names: str
) -> tuple[Value, list[HeadMap]]:
    """Return the tokens an attention's maps act on, and the maps, by their layers' names."""
    maps = []
    for name in names:
        layer = getattr(module, name)
        ctx.require(runs_known_code(layer, nn.Linear), "a replaced linear layer")
        folded = ctx.fold(x, layer.weight, layer.bias)
        pending = folded.pending
        assert pending is not None
        matrix = pending.effective(ctx.arith)
        if matrix is None:
            raise AssertionError("a linear layer has a matrix")
        size = folded.size.fibre
        place = f"{ctx.path}.{name}"
        maps.append(HeadMap(ctx.arith, matrix, pending.bias, module.num_heads, size, place))
    return replace(folded, waiting=None), maps


def require_bounded(ctx: Context, x: Value, what: str) -> None:
    """Raise NoRule where nothing bounds the length of a token."""
    if ctx.arith.rigorous and not x.size.fibre.finite:
        raise NoRule(
            f"{what} is not Lipschitz on tokens of unbounded norm (no norm layer before it)"
        )


Term = tuple[Sequence[Scalar], HeadMap]


def combined(
    arith: Arithmetic,
    terms: Sequence[Term],
    pairs: tuple[Sequence[Scalar], tuple[HeadMap, HeadMap, HeadMap]] | None = None,
) -> Scalar:
    """Return a bound on |(do_h)_h| / |du| for |do_h| <= sum_t c_th |dy_th|: term by term or head by
    head.

    Args:
        terms: (c_t, y_t) for each t; c_t holds one factor a head.
        pairs: (c, three maps) of one more term, c_h times the two largest of the three |dy_h|.

    Source: docs/bounds.md, section 5.4.
    """
    heads = range(len(terms[0][0]))
    by_term = [_term(arith, weights, moving) for weights, moving in terms]
    by_head = [
        arith.total([weights[h] * moving.slopes[h] for weights, moving in terms]) for h in heads
    ]
    if pairs is not None:
        weights, maps = pairs
        by_term += [_term(arith, weights, moving) for moving in maps]
        for h in heads:
            a, b, c = (moving.slopes[h] for moving in maps)
            by_head[h] = by_head[h] + weights[h] * arith.largest([a + b, a + c, b + c])
    return arith.minimum(arith.total(by_term), arith.root_sum_of_squares(by_head))


def _term(arith: Arithmetic, weights: Sequence[Scalar], moving: HeadMap) -> Scalar:
    """Return |diag(c_1, .., c_1, c_2, ..) W|, rows times their head's factor; it grows with c_h."""
    top = arith.largest(weights)
    numbers = (
        [float(weight) for weight in weights]
        if arith.rigorous
        else torch.stack(list(weights)).tolist()
    )
    scale = max(numbers)
    if min(numbers) == scale or not 0 < scale < math.inf:
        return top * moving.whole
    if arith.rigorous:  # relative to the largest, rounded up: no overflow
        gains = torch.tensor([up(number / scale, 2) for number in numbers], dtype=torch.float64)
    else:
        gains = torch.stack([weight / top for weight in weights])
    rows = gains.repeat_interleave(moving.matrix.shape[0] // moving.heads)
    return top * arith.sigma(arith.scale_rows(moving.matrix, rows), f"{moving.name}.weighted")


def mixed(
    ctx: Context,
    module: LipschitzAttention,
    x: Value,
    constant: Scalar,
    why: str,
    norms: Callable[[], list[Scalar]],
) -> Value:
    """Return the value after [P_h v_h]_h, with this constant, and `proj`, which stays pending.

    Args:
        norms: Computes the largest norm of a row of v_h for each head; rows of P_h v_h (gated or
            not) are averages.
    """
    ctx.require(runs_known_code(module.proj, nn.Linear), "a replaced linear layer")
    shape = (*x.shape[:-1], module.num_heads * module.head_dim)
    features = ctx.chain(
        x, constant, why, lambda: ctx.arith.root_sum_of_squares(norms()), shape=shape
    )
    return ctx.fold(features, module.proj.weight, module.proj.bias, f"{ctx.path}.proj")
