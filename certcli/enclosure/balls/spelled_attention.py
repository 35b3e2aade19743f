"""Attention that is written out: products of matrices, and softmax over the last axis. docs/local.md,
10.4.
"""

import operator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from certcli.enclosure.balls.ball import Near, settled
from certcli.enclosure.balls.layers import fibres
from certcli.enclosure.balls.table import BallContext, rules
from certcli.enclosure.zonotopes.rounding import FUNCTION, gamma, up
from certcli.enclosure.zonotopes.rules.spelled import require_rows
from certcli.engine.table import NoRule, with_attributes
from certcli.engine.walk import Constant


@rules.function(operator.matmul, torch.matmul, torch.bmm)
@rules.method("matmul", "bmm")
def product_of_matrices(ctx: BallContext, x: Any, y: Any) -> Near:
    """|dx_i Y + X_i dY + dx_i dY| <= |dx_i| |Y|_F + |X_i| |dY|_F + |dx_i| |dY|_F, row by row."""
    if isinstance(x, Constant) or isinstance(y, Constant):
        raise NoRule("a product of matrices with a constant")
    x = settled(x)
    y = settled(y)
    if x.shape[:-2] != y.shape[:-2] or min(len(x.shape), len(y.shape)) < 3:
        raise NoRule("a product of matrices that repeats a tensor")
    length = fibres(x.centre)
    matrix = _frobenius(fibres(y.centre))
    moved = _frobenius(y.fibre)
    fibre = up(x.fibre * matrix + length * moved + x.fibre * moved, 8)
    return Near.of(x.centre @ y.centre, fibre).noisy(
        up(gamma(x.shape[-1] + 4) * length * matrix, 4)
    )


def _frobenius(rows: Tensor) -> Tensor:
    """Return |Y|_F, rounded up, from the lengths of its rows: (.., j) -> (.., 1)."""
    return up(torch.linalg.vector_norm(rows, dim=-1, keepdim=True), rows.shape[-1] + 2)


@rules.function(torch.softmax, F.softmax)
@rules.method("softmax")
def softmax_of_rows(
    ctx: BallContext, x: Any, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None
) -> Near:
    """Softmax has slope 1/2: the norm of diag(p) - p p^T, whose absolute rows sum to 2 p (1 - p)."""
    x = settled(x)
    require_rows(len(x.shape), dim, dtype)
    centre = x.centre.softmax(-1)
    count = x.shape[-1]
    return Near.of(centre, up(x.fibre / 2), up(x.whole / 2)).noisy(
        (FUNCTION + gamma(count + 64)) * fibres(centre)
    )


rules.module(nn.Softmax)(with_attributes(softmax_of_rows, "dim"))
