"""Fibres of a form in ellipsoids {R f: |f|_2 <= 1}, for what a sum cancels and for fewer symbols:
docs/local.md, 1 and 5.
"""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from certcli.enclosure.zonotopes.columns import TINY, Block, alike, gamma, lengths, norm1, runs, up
from certcli.enclosure.zonotopes.form import Form, Image, Linear
from certcli.enclosure.zonotopes.space import Space

_SQUARINGS = 4
"""Of a matrix before its norm is taken: for rank k the bound is at most k^(1/32) times |X|_2."""

_JOINED = 1536
"""Entries of a tensor up to which all pairs of them have a number each."""
_ROUNDING = 2.0**-40
"""Of sizes, in the weight of a matrix that may cancel to 0."""
_STRIP = 96
"""Rows of a product with its own transpose that are computed at once."""
_MOST = 0.7
"""Part of the columns that may be left before they are worth a copy."""


class Gram(NamedTuple):
    """One group by its sum of B B^T, (fibres, d, d), over `terms` columns.

    Attributes:
        sizes: s, (fibres, d): entry ij is off by at most gamma s_i s_j, and G_ii is at most s_i^2;
            None: s_i^2 = G_ii.
    """

    matrix: Tensor
    terms: int
    sizes: Tensor | None = None

    @property
    def lengths(self) -> Tensor:
        """Return s, (fibres, d)."""
        diagonal = self.matrix.diagonal(dim1=-2, dim2=-1)
        return diagonal.clamp_min(0).sqrt() if self.sizes is None else self.sizes

    @property
    def length(self) -> Tensor:
        """Return about sqrt(trace), a weight in (1.2): (fibres,), above 0."""
        trace = self.matrix.diagonal(dim1=-2, dim2=-1).sum(-1).clamp_min(0)
        return (trace + _ROUNDING * self.lengths.square().sum(-1)).sqrt() + TINY

    def scaled(self, factor: Tensor) -> "Gram":
        """Return that of the columns times a number a fibre, (fibres, 1)."""
        sizes = None if self.sizes is None else up(self.sizes * factor.abs())
        return Gram(self.matrix * (factor * factor)[..., None], self.terms, sizes)

    def mapped(self, image: Image) -> "Gram":
        """Return that of L times the columns of the image's source."""
        shape = image.source.shape

        def of_rows(t: Tensor, run: Linear) -> Tensor:
            """Apply L to the last axis: (fibres, k, d) -> (fibres, k, e)."""
            return fibres(run(t.movedim(1, 0).reshape(-1, *shape))).movedim(0, 1)

        matrix = of_rows(of_rows(self.matrix, image.apply).mT, image.apply)
        sizes = up(of_rows(self.lengths[:, None], image.absolute)[:, 0], image.terms)
        return Gram(matrix, 2 * (self.terms + 2 * image.terms), sizes)


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


def as_fibre(x: Form, *, for_grams: bool = False) -> Form:
    """Return x with all its entries in one fibre, (1, N), once for all readers of its Grams.

    Args:
        for_grams: without columns that its Grams do not need.
    """
    # a form may be read with another space
    name = f"joined {x.space.limit} {x.space.by_fibres} {for_grams}"
    return x.once(name, lambda: _as_fibre(x, x.image_of, for_grams))


def _as_fibre(x: Form, image: Image | None, for_grams: bool) -> Form:
    direct = image is None or image.source.centre.numel() > x.centre.numel()  # and closer
    if for_grams and not direct:  # all but the ball part is read in the image's source
        x = replace(x, space=replace(x.space, squares=False), gens=x.ball, blocks=())
    whole = replace(x, image_of=None).linear(lambda t: t.reshape(len(t), 1, -1))
    if image is None or direct:
        return whole

    def of_one_fibre(run: Linear) -> Linear:
        return lambda t: run(t.reshape(len(t), *image.source.shape)).reshape(len(t), 1, -1)

    maps = (of_one_fibre(image.apply), of_one_fibre(image.absolute))
    return replace(whole, image_of=Image(as_fibre(image.source), *maps, image.terms, True))


def may_join(*shapes: tuple[int, ...]) -> bool:
    """Tell whether tensors are small enough for a matrix of all pairs of their entries."""
    return all(math.prod(shape) <= _JOINED for shape in shapes)


def fibres(columns: Tensor) -> Tensor:
    """Return columns (k, *s, d) as (k, fibres, d)."""
    return columns.reshape(len(columns), -1, columns.shape[-1])


def rest_gram(x: Form) -> Gram:
    """Return (1.2) of all of a form that is not its ball part, computed once."""
    return x.once("rest gram", lambda: _rest_gram(x))


def _rest_gram(x: Form) -> Gram:
    slack = fibres(x.slack[None])[0]
    if x.image_of is not None and x.image_of.of_fibres:
        return enclosing([rest_gram(x.image_of.source).mapped(x.image_of)], slack)
    parts: list[Part] = [(fibres(part), width) for width, part in alike(x.box, x.blocks)]
    square: list[Part] = [(fibres(x.square), x.space.square)] if x.space.squares else []
    return enclosing(square + parts, slack)


def whole_gram(x: Form) -> Gram:
    """Return (1.2) of all of a form that is not its centre, computed once."""
    rest = rest_gram(x)
    zero = torch.zeros_like(rest.lengths)
    return x.once("gram of all", lambda: enclosing([*ball_parts(x), rest], zero))


def ball_gram(x: Form) -> Gram:
    """Return (1.2) of a form's ball part."""
    (part,) = ball_parts(x)
    if isinstance(part, Gram):
        return part
    return enclosing([part], part[0].new_zeros(part[0].shape[1:]))


def root(parts: Iterable[Part], slack: Tensor) -> Tensor:
    """Return R (fibres, d, d) with {sum of the parts + t: |t| <= slack} inside {R f: |f|_2 <= 1}."""
    return factor(enclosing(parts, slack))


def enclosing(parts: Iterable[Part], slack: Tensor) -> Gram:
    """Return a computed G with (u.z)^2 <= u^T G u for all z = sum of the parts + t, |t| <= slack.

    Args:
        slack: (fibres, d). For any l_g > 0, (sum_g |B_g^T u|)^2 <= sum l_g * sum |B_g^T u|^2 / l_g.
    """
    gram = torch.diag_embed(slack)
    total = up(slack.sum(-1), slack.shape[-1])
    terms = slack.shape[-1]
    squares = None  # of sizes: by Cauchy and Schwarz their squares add up as the matrices do
    for part in parts:
        if isinstance(part, Gram):  # any length will do
            length = part.length
            gram.addcdiv_(part.matrix, length[:, None, None])
            if part.sizes is not None:
                square = part.sizes.square() / length[:, None]
                squares = square if squares is None else squares + square
            total = up(total + length)
            terms += part.terms
            continue
        columns, width = part
        # one axis after the other: five times as fast
        norms = [torch.linalg.vector_norm(strip, dim=2) for strip in columns.split(_STRIP, 2)]
        length = torch.stack(norms).norm(dim=0).unflatten(0, (-1, width)).norm(dim=1)
        if not bool(length.any()):  # below 1e-150, which `factor`'s room is above
            continue
        length = length + TINY
        _add_outer(gram, columns, norms, length.repeat_interleave(width, 0))
        total = total + norm1(length)
        terms += len(columns)
    for start in range(0, gram.shape[-1], _STRIP):
        end = start + _STRIP
        gram[:, end:, start:end] = gram[:, start:end, end:].mT
    result = Gram(gram.mul_(total[:, None, None]), terms + 16)
    if squares is None:
        return result
    # the diagonal has what all other parts add
    return result._replace(sizes=up((result.lengths.square() + total[:, None] * squares).sqrt(), 8))


def _add_outer(gram: Tensor, columns: Tensor, norms: list[Tensor], lengths: Tensor) -> None:
    """Add sum_k x_k x_k^T / lengths_k of each fibre to strips of rows from the diagonal on.

    Most symbols are of few fibres, or of few entries of a long one: what is 0 is left out.

    Args:
        gram: (fibres, d, d); columns (k, fibres, d); norms: of each strip, 0 where columns are;
            lengths: (k, fibres).
    """
    sparse = any(int(norm.count_nonzero()) <= _MOST * norm.numel() for norm in norms)
    for some in [slice(i, i + 1) for i in range(len(gram))] if sparse else [slice(None)]:
        for start, norm in zip(range(0, columns.shape[-1], _STRIP), norms, strict=True):
            strip = columns[:, some, start : start + _STRIP]
            rest = columns[:, some, start:]
            inverse = 1 / lengths[:, some]
            used = norm[:, some].any(1).nonzero()[:, 0]
            if len(used) <= _MOST * len(columns):
                strip, rest, inverse = strip[used], rest[used], inverse[used]
            strip = (strip * inverse[..., None]).permute(1, 2, 0)
            gram[some, start : start + _STRIP, start:].baddbmm_(strip, rest.movedim(0, 1))


def of_products(first: Gram, second: Gram, scale: Tensor) -> Tensor:
    """Return R with {scale * y * z entry by entry} inside {R f: |f|_2 <= 1}, scale (fibres, d).

    For y = S f, z = T f': sum_i u_i y_i z_i = f^T S^T diag(u) T f' <= |S^T diag(u) T|_F, whose square is
    u^T (S S^T * T T^T) u, * entry by entry (Schur's product).
    """
    matrix = first.matrix * second.matrix * (scale[..., None] * scale[..., None, :])
    sizes = up(first.lengths * second.lengths * scale.abs(), 8)
    return factor(Gram(matrix, 2 * (first.terms + second.terms), sizes))


def of_matrix_products(first: Gram, second: Gram, shape: tuple[int, int, int, int]) -> Gram:
    """Return G with (sum u_bij y_bik z_bkj)^2 <= u^T G u, for y and z of the two: (1, b i j, b i
    j).

    For y = S f, z = T f' the sum is f^T X f', X = sum u_bij S_bik^T T_bkj, and |X|_F^2 = u^T G u for
    G_bij,b'i'j' = sum_kk' (S S^T)_bik,b'i'k' (T T^T)_bkj,b'k'j'.

    Args:
        shape: b, i, k, j; y is (b, i, k) and z (b, k, j), each as one fibre.
    """
    batch, rows, inner, columns = shape
    y = first.matrix.view(batch, rows, inner, batch, rows, inner).permute(0, 3, 1, 4, 2, 5)
    z = second.matrix.view(batch, inner, columns, batch, inner, columns).permute(0, 3, 1, 4, 2, 5)
    blocks = y.reshape(batch**2, rows**2, inner**2) @ z.reshape(batch**2, inner**2, columns**2)
    blocks = blocks.view(batch, batch, rows, rows, columns, columns)
    matrix = blocks.permute(0, 2, 4, 1, 3, 5).reshape(1, batch * rows * columns, -1)
    lengths = first.lengths.view(batch, rows, inner) @ second.lengths.view(batch, inner, columns)
    terms = 2 * (first.terms + second.terms) + inner * inner
    return Gram(matrix, terms, up(lengths.view(1, -1), inner))


def factor(gram: Gram) -> Tensor:
    """Return R with G <= R R^T for all symmetric G >= 0 that differ from `gram` by what it may be
    off
    by, entry by entry.

    R is a Cholesky factor of gram + room, proven by its residue; or sqrt(trace) where that fails.
    """
    width = gram.matrix.shape[-1]
    # trace of G, above the computed one; and of the matrix of sizes, which is no less
    trace = up(gram.lengths.square().sum(-1), gram.terms + width)
    rounding = gamma(gram.terms) * trace  # the Frobenius norm of what the matrix may be off by
    room = 2 * rounding + 16 * gamma(width) * trace
    raised = gram.matrix.clone()
    raised.diagonal(dim1=-2, dim2=-1).add_(room[:, None])
    lower, failed = torch.linalg.cholesky_ex(raised)
    lost_in_factor = rounding + gamma(2 * width + 16) * (trace + 2 * width * room)
    missing = up(_residue(raised, lower) + lost_in_factor, width * width)
    proven = (failed == 0) & (missing <= room)
    if bool(proven.all()):
        return lower
    ball = up(trace.sqrt(), 4)[:, None, None] * torch.eye(width).to(lower)  # NaN is not bounded
    return torch.where(proven[:, None, None], lower, ball)


def _residue(matrix: Tensor, lower: Tensor) -> Tensor:
    """Return |A - L L^T|_F of symmetric A, from rows beyond the diagonal: (.., d, d) -> (..)."""
    squares = matrix.new_zeros(len(matrix))
    for start in range(0, matrix.shape[-1], _STRIP):
        rows = lower[:, start : start + _STRIP, : start + _STRIP]  # 0 beyond
        columns = lower[:, start:, : start + _STRIP].mT
        rest = matrix[:, start : start + _STRIP, start:].baddbmm(rows, columns, alpha=-1)
        squares += 2 * torch.linalg.vector_norm(rest, dim=(1, 2)).square()
        squares -= torch.linalg.vector_norm(rest[..., :_STRIP], dim=(1, 2)).square()
    return squares.sqrt()


def pairing(first: Tensor, second: Tensor) -> Tensor:
    """Return sup |(R f) . (R' f')| over |f|_2, |f'|_2 <= 1, that is |R^T R'|_2, rounded up: (.., d,
    d)
    -> (..).
    """
    size = up(_gram_frobenius(first) * _gram_frobenius(second), 4)
    loss = gamma(first.shape[-2]) * size
    return torch.minimum(up(spectral(first.mT @ second) + loss, 4), size)


def _gram_frobenius(matrix: Tensor) -> Tensor:
    return up(torch.linalg.matrix_norm(matrix), matrix.shape[-1] * matrix.shape[-2])


def spectral(matrix: Tensor, squarings: int = _SQUARINGS) -> Tensor:
    """Above |X|_2 <= |X|_F, by |X^T X|_2, off by at most gamma |X|_F^2: (.., n, m) -> (..)."""
    size = _gram_frobenius(matrix)
    if not squarings:
        return size
    loss = gamma(matrix.shape[-2]) * size * size
    further = up(spectral(matrix.mT @ matrix, squarings - 1) + loss, 4)
    return torch.minimum(up(further.sqrt(), 4), size)


def grouped(
    x: Form, root: Tensor, places: Tensor | None = None, *, of_fibres: bool = False
) -> Form:
    """Return x + R f, for a group of symbols f a fibre: R (fibres, d, d).

    Args:
        places: of R's fibres among those of x; None: they are all.
        of_fibres: as symbols of single fibres.
    """
    block = group_of(x.space, root, of_fibres=of_fibres)
    wider = x.widened(block).sized(x, lambda size: size)
    wider._reach_cache.update(x._reach_cache)
    return filled(wider, block, root, places)


def group_of(space: Space, root: Tensor, *, of_fibres: bool = False) -> Block:
    """Return a new block for R f, a group of symbols f for each of the fibres of R."""
    of_fibres = of_fibres or space.by_fibres
    count, width, _ = root.shape
    return Block.fresh(width if of_fibres else count * width, width, of_fibres)


def filled(x: Form, block: Block, root: Tensor, places: Tensor | None = None) -> Form:
    """Write R f into the columns of a block of x, which are 0; return x."""
    width = root.shape[-1]
    count = x.centre.numel() // width
    places = torch.arange(count, device=root.device) if places is None else places
    whole = root.new_zeros(count, width, width).index_copy(0, places, root)
    columns = x.columns_of(block)
    if block.of_fibres:
        columns.copy_(whole.permute(2, 0, 1).reshape(width, *x.shape))
    else:
        rows = columns.view(len(root), width, count, width)
        rows[torch.arange(len(root), device=root.device), :, places] = root.mT
    reach = up(torch.linalg.vector_norm(whole, dim=-1).view(x.shape), width)
    for cache, name in ((x._cache, "size"), (x._reach_cache, "reach")):
        if name in cache:
            cache[name] = up(cache[name] + reach)
    return x


def narrowed(x: Form) -> Form:
    """Return x with groups of one fibre's own symbols as groups of no more than it has entries."""
    width = x.shape[-1]
    columns = [x.gens[: x.fixed]]
    blocks = []
    for block, part in runs(x.box, x.blocks):
        if block.of_fibres and block.width > width:
            groups = fibres(part).unflatten(0, (-1, block.width)).permute(0, 2, 3, 1).flatten(0, 1)
            roots = factor(Gram(groups @ groups.mT, block.width)).unflatten(
                0, (-1, fibres(part).shape[1])
            )
            part = roots.permute(0, 3, 1, 2).reshape(-1, *x.shape)
            block = Block.fresh(len(part), width, of_fibres=True)
        columns.append(part)
        blocks.append(block)
    gens = torch.cat(columns)
    fresh: dict[str, Any] = {"image_of": None, "_cache": {}, "_reach_cache": {}}
    return replace(x, gens=gens, blocks=tuple(blocks), **fresh)


def reduced(x: Form) -> Form:
    """Reduce the symbols to the limit: those whose loss is least become one ellipsoid a fibre.

    Slack becomes symbols where it is worth it, so that no rounding error is counted once a layer
    again and again.
    """
    limit = x.space.limit
    count = x.centre.numel()
    if not limit:
        return x
    if x.space.by_fibres:
        return by_fibres(x)
    if len(x.box) + count <= limit or not x.blocks:
        return x.worked()
    blocks, columns, dropped = _sorted_out(x, max(0, limit - count))
    gens = torch.cat([x.gens[: x.fixed], *columns])
    zero = torch.zeros_like(x.slack)
    reduced = Form(x.space, x.centre, gens, zero, blocks, _image_cache=x._image_cache)
    return replace(grouped(reduced, root(dropped, fibres(x.slack[None])[0])), node=x.node)


def by_fibres(x: Form) -> Form:
    """Return x with all but its ball part in one ellipsoid a fibre, of the fibre's own symbols."""
    if not x.blocks and not bool(x.slack.any()):
        return x
    ellipsoids = factor(rest_gram(x))
    zero = torch.zeros_like(x.slack)
    bare = Form(x.space, x.centre, x.gens[: x.fixed], zero, _image_cache=x._image_cache)
    return replace(grouped(bare, ellipsoids), node=x.node)


def _sorted_out(x: Form, capacity: int) -> tuple[tuple[Block, ...], list[Tensor], list[Part]]:
    """Return blocks and columns of at most `capacity` symbols of x, and the rest of it.

    What is kept has new names: a column that another form still holds is treated as independent of
    it, which only widens.
    """
    places = [(part.unflatten(0, (-1, width)), width) for width, part in alike(x.box, x.blocks)]
    losses = [_loss(groups.flatten(0, 1), width) / width for groups, width in places]
    widths = torch.cat([torch.full((len(groups),), width) for groups, width in places])
    order = torch.argsort(torch.cat(losses), descending=True, stable=True).cpu()
    keep = torch.zeros(len(widths), dtype=torch.bool)
    keep[order[widths[order].cumsum(0) <= capacity]] = True
    blocks = []
    columns = []
    dropped: list[Part] = []
    for (groups, width), chosen in zip(
        places, keep.split([len(groups) for groups, _ in places]), strict=True
    ):
        if bool(chosen.any()):
            columns.append(groups[chosen].flatten(0, 1))
            blocks.append(Block.fresh(len(columns[-1]), width))
        if not bool(chosen.all()):
            dropped.append((fibres(groups[~chosen].flatten(0, 1)), width))
    return tuple(blocks), columns, dropped


def _loss(columns: Tensor, width: int) -> Tensor:
    """Return of each group how much more it says of all entries than of one."""
    flat = lengths(columns.flatten(1), width)
    return flat.sum(1) - flat.amax(1)
