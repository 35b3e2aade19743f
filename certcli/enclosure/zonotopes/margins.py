"""Prove margins from the last form: a lower bound of every difference of logits."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from certcli.enclosure.zonotopes.ascent import coupled
from certcli.enclosure.zonotopes.backward import Node, lower
from certcli.enclosure.zonotopes.branching import BranchSearch, Limit
from certcli.enclosure.zonotopes.columns import gamma, matrices, norm2, up
from certcli.enclosure.zonotopes.form import Form
from certcli.enclosure.zonotopes.normalisation import rows_mapped, signs
from certcli.nn.blocks import spread_of

Further = Callable[[Node, Tensor], Tensor]
"""The last node and rows of it, least bound first -> bounds of these rows; once one is not
positive, any of the others.
"""


def optimised(node: Node, rows: Tensor) -> Tensor:
    """Return bounds by slopes of ascent (l2: parabolas, too), up to the first not positive."""
    search = BranchSearch(node, rows, Limit(domains=0))
    if not search.ascent.curved:
        return search.prove()
    bounds = rows.new_full((len(rows),), -torch.inf)
    for i in range(len(rows)):
        bounds[i] = coupled(node, rows[i : i + 1])
        if not bounds[i] > 0:
            break
    return bounds


def nothing_further(node: Node, rows: Tensor) -> Tensor:
    """Return no bound: for numbers, not signs, a walk and one way back suffice."""
    return rows.new_full((len(rows),), -torch.inf)


def lower_bounds(x: Form, further: Further = optimised) -> Tensor:
    """Return c + inf A e - max(0, -lambda_min(Q)) - sup |B n| - slack entry by entry, rounded down:
    below the form's minimum.

    Args:
        further: tried on entries that are not positive then, where there is a way back.
    """
    below = x.ball_fall + x.box_radius
    if x.space.squares:
        below = below + descent(x)
    bounds = x.centre - up(below + gamma(4) * x.centre.abs(), 8)
    return bounds if x.node is None else _going_back(x.node, bounds, further)


def _going_back(node: Node, bounds: Tensor, further: Further) -> Tensor:
    """Return the larger of `found` and backward bounds; neither positive: `further` ones."""
    rows = torch.eye(bounds.numel(), dtype=bounds.dtype, device=bounds.device).view(
        -1, *bounds.shape
    )
    flat = torch.maximum(bounds.flatten(), lower(node, rows))
    order = torch.argsort(flat)
    unproven = order[~(flat[order] > 0)]
    if len(unproven):
        flat[unproven] = torch.maximum(flat[unproven], further(node, rows[unproven]))
    return flat.view(bounds.shape)


def descent(x: Form) -> Tensor:
    """Above max(0, -e^T M e), |e| <= 1, M symmetric, of each entry's columns for e e^T.

    From a computed M = V diag(l) V^T + R: e^T M e >= min(0, l_min) (1 + |V^T V - I|_F) - |R|_F,
    whatever V and l are; and |M|_2 is at most the columns' norm.
    """
    m = x.space.ball
    if not x.space.squares:
        return torch.zeros_like(x.centre)
    matrix = matrices(x.square, m)
    if not bool(torch.isfinite(matrix).all()):
        return torch.full_like(x.centre, torch.inf)
    values, vectors = torch.linalg.eigh(matrix)
    largest = values.abs().amax(-1)
    rest = matrix - (vectors * values[:, None]) @ vectors.mT
    skew = vectors.mT @ vectors - torch.eye(m, dtype=matrix.dtype, device=matrix.device)
    rounding = gamma(m * m + m) * (4 * m * largest + torch.linalg.vector_norm(matrix, dim=(1, 2)))
    turned = 1 + torch.linalg.vector_norm(skew, dim=(1, 2)) + gamma(m * m) * m
    bound = (
        (-values[:, 0]).clamp_min(0) * turned
        + torch.linalg.vector_norm(rest, dim=(1, 2)) * (1 + gamma(m * m))
        + rounding
    )
    return torch.minimum(norm2(x.square), up(bound, 8).reshape(x.centre.shape))


def differences(
    weight: Tensor, bias: Tensor | None, label: int | Tensor, executed: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return w_label - w_j, b_label - b_j, j != label, and how far the biases may be off.

    Args:
        label: or one an image, (images,); all results then have an axis of images at the front.
        executed: how far execution moves z_i - z_j, (k, k); as if it were the biases' error.
    """
    top = torch.as_tensor(label, device=weight.device)[..., None]
    others = torch.arange(len(weight) - 1, device=weight.device)
    others = others + (others >= top)
    rows = weight[top] - weight[others]
    zero = rows.new_zeros(others.shape)
    executed_change = zero if executed is None else executed[top, others]
    if bias is None:
        return rows, zero, executed_change
    return (
        rows,
        bias[top] - bias[others],
        gamma(0) * (bias[top].abs() + bias[others].abs()) + executed_change,
    )


def linear_logits(x: Form, weight: Tensor, bias: Tensor | None) -> Form:
    """Return z = weight x + bias: (1, d) -> (1, k)."""
    z = rows_mapped(x, weight, x.shape[-1] + 2)
    return z if bias is None else z.shift(bias)


def linear_margins(
    x: Form,
    weight: Tensor,
    bias: Tensor | None,
    label: int | Tensor,
    executed: Tensor | None = None,
) -> Form:
    """Return z_label - z_j, j != label, z = weight x + bias: (1, d) -> (1, k - 1)."""
    rows, offset, doubt = differences(weight, bias, label, executed)
    return rows_mapped(x, rows, x.shape[-1] + 2).shift(offset).doubted(up(doubt))


def normalised_margins(
    x: Form,
    norm: Any,
    weight: Tensor,
    bias: Tensor | None,
    label: int | Tensor,
    executed: Tensor | None = None,
) -> Form:
    """Return what has the signs of z_label - z_j, z = weight LN(x) + bias: (1, d) -> (1, k - 1)."""
    gain = norm.weight
    beta = norm.bias
    rows, offset, doubt = differences(weight, bias, label, executed)
    width = rows.shape[-1]
    if beta is not None:
        offset = offset + rows @ beta
        doubt = doubt + gamma(width + 4) * (rows.abs() @ beta.abs() + offset.abs())
    folded = rows if gain is None else rows * gain
    return signs(x, spread_of(norm), folded, offset, up(doubt))
