"""Fibres of a form in ellipsoids {R f: |f|_2 <= 1}, for what a sum cancels: docs/local.md, 5."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from certcli.enclosure.zonotopes.form import Form
from certcli.enclosure.zonotopes.rounding import TINY, gamma, norm1, up
from certcli.enclosure.zonotopes.symbols import Block, runs

_SQUARINGS = 3
"""Of a matrix before its norm is taken: for rank k the bound is at most k^(1/16) times |X|_2."""


class Gram(NamedTuple):
    """One group by its sum of B B^T, (fibres, d, d), over `terms` columns."""

    matrix: Tensor
    terms: int

    def scaled(self, factor: Tensor) -> "Gram":
        """Return that of the columns times a number a fibre, (fibres, 1)."""
        return Gram(self.matrix * (factor * factor)[..., None], self.terms)


Part = tuple[Tensor, int] | Gram
"""Columns (k, fibres, d) in groups of a width: symbols with |n|_2 <= 1 for each group."""


def ball_parts(x: Form) -> list[Part]:
    """Return the columns of a form's ball part: one group, or box symbols."""
    return [(fibres(x.ball), 1) if x.space.boxed else Gram(x.ball_gram, x.space.ball)]


def scaled_parts(parts: list[Part], factor: Tensor) -> list[Part]:
    """Return the parts of a form times a number a fibre, (fibres, 1)."""
    return [
        part.scaled(factor) if isinstance(part, Gram) else (part[0] * factor, part[1])
        for part in parts
    ]


def rest_parts(x: Form) -> list[Part]:
    """Return the columns of all of a form that is not its ball part; slack is `root`'s."""
    parts = [(fibres(part), block.width) for block, part in runs(x.box, x.blocks)]
    return [(fibres(x.square), x.space.square), *parts] if x.space.squares else parts


def fibres(columns: Tensor) -> Tensor:
    """Return columns (k, *s, d) as (k, fibres, d)."""
    return columns.reshape(len(columns), -1, columns.shape[-1])


def root(parts: Iterable[Part], slack: Tensor) -> Tensor:
    """Return R (fibres, d, d) with {sum of the parts + t: |t| <= slack} inside {R f: |f|_2 <= 1}."""
    return factor(*enclosing(parts, slack))


def enclosing(parts: Iterable[Part], slack: Tensor) -> Gram:
    """Return a computed G with (u.z)^2 <= u^T G u for all z = sum of the parts + t, |t| <= slack.

    Its entry ij is off by what an inner product of `terms` terms loses: gamma sqrt(G_ii G_jj).

    Args:
        slack: (fibres, d). For any l_g > 0, (sum_g |B_g^T u|)^2 <= sum l_g * sum |B_g^T u|^2 / l_g.
    """
    gram = torch.diag_embed(slack)
    total = up(slack.sum(-1), slack.shape[-1])
    terms = slack.shape[-1]
    for part in parts:
        if isinstance(part, Gram):  # any length will do
            matrix = part.matrix
            length = matrix.diagonal(dim1=1, dim2=2).sum(-1).sqrt() + TINY
            gram = gram + matrix / length[:, None, None]
            total = up(total + length)
            terms += part.terms
            continue
        columns, width = part
        grouped = columns.unflatten(0, (-1, width))
        # one axis after the other: five times as fast
        length = torch.linalg.vector_norm(grouped, dim=3).norm(dim=1)
        if not bool(length.any()):  # below 1e-150, which `factor`'s room is above
            continue
        length = length + TINY
        scaled = (grouped / length.sqrt()[:, None, :, None]).flatten(0, 1).movedim(0, -1)
        gram = gram + scaled @ scaled.mT
        total = total + norm1(length)
        terms += len(columns)
    return Gram(total[:, None, None] * gram, terms + 16)


def of_products(first: Gram, second: Gram, scale: Tensor) -> Tensor:
    """Return R with {scale * y * z entry by entry} inside {R f: |f|_2 <= 1}, scale (fibres, d).

    For y = S f, z = T f': sum_i u_i y_i z_i = f^T S^T diag(u) T f' <= |S^T diag(u) T|_F, whose square is
    u^T (S S^T * T T^T) u, * entry by entry (Schur's product).
    """
    matrix = first.matrix * second.matrix * (scale[..., None] * scale[..., None, :])
    return factor(matrix, 2 * (first.terms + second.terms))


def factor(gram: Tensor, terms: int) -> Tensor:
    """Return R with G <= R R^T for all symmetric G >= 0 that differ from `gram` by the rounding of
    inner products of `terms` terms, entry by entry.

    R is a Cholesky factor of gram + room, proven by its residue; or sqrt(trace) where that fails.
    """
    width = gram.shape[-1]
    eye = torch.eye(width, dtype=gram.dtype, device=gram.device)
    trace = up(gram.diagonal(dim1=-2, dim2=-1).sum(-1), terms + width)[..., None, None]
    rounding = gamma(terms) * trace  # the Frobenius norm of what gram may be off by
    room = 2 * rounding + 16 * gamma(width) * trace
    raised = gram + room * eye
    lower, failed = torch.linalg.cholesky_ex(raised)
    residue = torch.linalg.matrix_norm(raised - lower @ lower.mT)[..., None, None]
    lost_in_factor = rounding + gamma(2 * width + 16) * (trace + 2 * width * room)
    proven = (failed == 0)[..., None, None] & (up(residue + lost_in_factor, width * width) <= room)
    return torch.where(proven, lower, up(trace.sqrt(), 4) * eye)


def pairing(first: Tensor, second: Tensor) -> Tensor:
    """Return sup |(R f) . (R' f')| over |f|_2, |f'|_2 <= 1, that is |R^T R'|_2, rounded up: (.., d, d)
    -> (..).
    """
    size = up(_frobenius(first) * _frobenius(second), 4)
    loss = gamma(first.shape[-2]) * size
    return torch.minimum(up(spectral(first.mT @ second) + loss, 4), size)


def _frobenius(matrix: Tensor) -> Tensor:
    return up(torch.linalg.matrix_norm(matrix), matrix.shape[-1] * matrix.shape[-2])


def spectral(matrix: Tensor, squarings: int = _SQUARINGS) -> Tensor:
    """Above |X|_2 <= |X|_F, by |X^T X|_2, off by at most gamma |X|_F^2: (.., n, m) -> (..)."""
    size = _frobenius(matrix)
    if not squarings:
        return size
    loss = gamma(matrix.shape[-2]) * size * size
    further = up(spectral(matrix.mT @ matrix, squarings - 1) + loss, 4)
    return torch.minimum(up(further.sqrt(), 4), size)


def grouped(x: Form, root: Tensor, places: Tensor | None = None) -> Form:
    """Return x + R f, for a group of symbols f a fibre: R (fibres, d, d).

    Args:
        places: of R's fibres among those of x; None: they are all.
    """
    width = root.shape[-1]
    count = x.centre.numel() // width
    if places is None:
        places = torch.arange(count, device=root.device)
    if x.space.by_fibres:
        root = root.new_zeros(count, width, width).index_copy(0, places, root)
        columns = root.permute(2, 0, 1).reshape(width, *x.shape)
        blocks = (*x.blocks, Block.fresh(width, width, of_fibres=True))
        return Form(x.space, x.centre, torch.cat([x.gens, columns]), x.slack, blocks)
    gens = x.gens.new_zeros(len(x.gens) + len(root) * width, *x.shape)
    gens[: len(x.gens)] = x.gens
    rows = gens[len(x.gens) :].view(len(root), width, count, width)
    rows[torch.arange(len(root), device=root.device), :, places] = root.mT
    blocks = (*x.blocks, Block.fresh(len(root) * width, width))
    return Form(x.space, x.centre, gens, x.slack, blocks)
