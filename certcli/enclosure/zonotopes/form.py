"""Affine forms: an enclosure of one tensor of the network over all images of a ball.

A form is the set of all  c + A e + Q vec(e e^T) + B n + s,  where e (|e|_2 <= 1) places the image
in its ball, n are box symbols (|n|_inf <= 1) and groups of symbols (|n_g|_2 <= 1), and s is any
tensor with |s| <= slack entry by entry. e and n mean the same in every form of a walk, so
differences of forms cancel. vec(e e^T) lists
e_a^2 and sqrt(2) e_a e_b (a < b): its l2 norm is |e|^2 <= 1. Source of the l2 + box form: Bonaert
et al. 2021 (multi-norm zonotopes); the columns for e e^T are ours. Proofs: docs/local.md.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from certcli.enclosure.zonotopes.backward import (
    BACK,
    Node,
    Pull,
    adjoint,
    rearranging,
    transposing,
)
from certcli.enclosure.zonotopes.columns import (
    Block,
    Blocks,
    Reach,
    every_block,
    gamma,
    norm1,
    norm2,
    over,
    pairs,
    quadratic_radius,
    reach_of,
    runs,
    summed,
    up,
    weights,
)
from certcli.enclosure.zonotopes.space import Bounds, Space
from certcli.engine.table import NoRule

Linear = Callable[[Tensor], Tensor]
_ENTRYWISE = ("length", "rise", "fall", "ball", "squares", "quadratic", "reach")
"""What is computed of an entry's columns alone."""
SIGNLESS = ("length", "ball", "squares", "quadratic", "reach")
"""Those of them that are of -x as of x."""
_OF_IMAGE = frozenset({"gram", *_ENTRYWISE[:-1]})
"""What is computed of the columns before the box symbols alone, which many operations leave."""
_LARGEST = 2**27
"""Entries of the columns that one operation may make of the symbols of single fibres: a gigabyte.
"""


_ROUNDING = 1e-11
"""Of a form's size: slack that is less says next to nothing, and is of roundings alone."""


ONE_BY_ONE = "several images at once, where they need ways of their own"


class Unbounded(Exception):
    """A neighbourhood is too large for a finite enclosure; the message names the place."""


class Image(NamedTuple):
    """L of a form: L and |L| on (k, *s), and the longest inner product in L.

    Attributes:
        of_fibres: L maps each fibre for itself.
    """

    source: "Form"
    apply: Linear
    absolute: Linear
    terms: int
    of_fibres: bool = False

    def then(self, apply: Linear, absolute: Linear, terms: int) -> "Image":
        """Return the image of a further map."""
        return Image(
            self.source,
            lambda t: apply(self.apply(t)),
            lambda t: absolute(self.absolute(t)),
            self.terms + terms,
        )


def fitting(constant: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a constant that broadcasts to this shape. NoRule where it would repeat the tensor."""
    padded = (1,) * (len(shape) - constant.dim()) + tuple(constant.shape)
    if len(padded) > len(shape) or any(
        length not in (1, side) for length, side in zip(padded, shape, strict=True)
    ):
        raise NoRule("an operation that repeats a tensor")
    return constant


@dataclass(frozen=True)
class Form:
    """centre (*s); gens (ball + square + box, *s); slack (*s) >= 0; blocks: of box and groups.

    Attributes:
        node: what the tensor is in terms of those before it, where a tape is kept.
        row_sum_error: how far the sums of rows (last axis) are from 1, (); None: unknown.
        image_of: what the form is a linear image of, up to a constant and to slack.
    """

    space: Space
    centre: Tensor
    gens: Tensor
    slack: Tensor
    blocks: Blocks = ()
    node: Node | None = None
    row_sum_error: Tensor | None = None
    image_of: "Image | None" = field(default=None, repr=False, compare=False)
    _cache: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    _image_cache: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    _reach_cache: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.centre.shape)

    @property
    def consistent(self) -> bool:
        """Return whether all parts have the shape of one tensor."""
        parts = [
            self.gens.shape[1:],
            self.slack.shape,
            self.shape if self.node is None else self.node.shape,
        ]
        columns = self.fixed + sum(block.columns for block in self.blocks)
        return len(self.gens) == columns and all(tuple(part) == self.shape for part in parts)

    def of_image(self, place: int) -> "Form":
        """Return what the form of several images says of one."""
        if self.space.images == 1:
            return self
        reach = self.space.reach
        if reach is not None:
            reach = reach[0][:, place], reach[1][:, place]
        space = replace(self.space, images=1, reach=reach)
        part = slice(place, place + 1)
        return Form(space, self.centre[part], self.gens[:, part], self.slack[part], self.blocks)

    def somewhere(self) -> list[Tensor]:
        """Return the symbols of the image and two far points, from a fixed generator."""
        generator = torch.Generator().manual_seed(24)
        move = torch.randn(self.space.ball, generator=generator, dtype=torch.float64)
        move = move.to(self.centre)
        far = move.sign() if self.space.boxed else move / move.norm()
        if self.space.reach is None:
            return [torch.zeros_like(move), far, -far]
        fall, rise = self.space.reach
        return [torch.zeros_like(move), *(torch.clamp(e, -fall, rise) for e in (far, -far))]

    def at(self, e: Tensor) -> Tensor:
        """Return the image at these symbols; the form is a ball of images."""
        return self.centre + torch.tensordot(e, self.ball, dims=1)

    def farthest(self, e: Tensor, truth: Tensor) -> Tensor:
        """Return how far the truth lies outside the form at e, by entry: > 0 by rounding only."""
        e = self.space.symbols(e)
        columns = [e]
        if self.space.squares:
            first, second = pairs(self.space.ball)
            weight = weights(self.space.ball, 1.0, 2**0.5, e.device, 0)
            columns.append(e[first] * e[second] * weight)
        middle = self.centre + torch.tensordot(torch.cat(columns), self.gens[: self.fixed], dims=1)
        return (truth - middle).abs() - self.box_radius

    @property
    def fixed(self) -> int:
        """Return the number of columns before the box symbols."""
        return self.space.ball + self.space.square

    @property
    def ball(self) -> Tensor:
        return self.gens[: self.space.ball]

    @property
    def box(self) -> Tensor:
        return self.gens[self.fixed :]

    def once(self, name: str, compute: Callable[[], Any]) -> Any:
        """Return what `compute` did when it was first asked for by this name."""
        cache = self._cache_of(name)
        if name not in cache:
            cache[name] = compute()
        return cache[name]

    def _cache_of(self, name: str) -> dict[str, Any]:
        if name == "reach":
            return self._reach_cache
        return self._image_cache if name in _OF_IMAGE else self._cache

    def known(self, of: "Form", change: Linear, names: Sequence[str] = _ENTRYWISE) -> "Form":
        """Return this form with what is known of the columns of `of`, after `change`, (k, *s)."""
        names = [name for name in names if name in of._cache_of(name)]
        if names:
            facts = change(torch.stack([of._cache_of(name)[name] for name in names]))
            for name, fact in zip(names, facts, strict=True):
                self._cache_of(name)[name] = fact
        return self

    @property
    def ball_gram(self) -> Tensor:
        """Return A A^T of each fibre, (fibres, d, d), as computed."""
        columns = self.ball.reshape(self.space.ball, -1, self.shape[-1]).movedim(0, -1)
        return self.once("gram", lambda: columns @ columns.mT)

    @property
    def ball_length(self) -> Tensor:
        """Return sup |A e| entry by entry, as if the image could move in all directions."""
        return self.once(
            "length", lambda: norm1(self.ball) if self.space.boxed else norm2(self.ball)
        )

    @property
    def ball_rise(self) -> Tensor:
        """Return sup A e entry by entry."""
        return self.once("rise", lambda: self._moved(self.space.reach))

    @property
    def ball_fall(self) -> Tensor:
        """Return sup -A e entry by entry."""
        reach = self.space.reach
        return self.once("fall", lambda: self._moved(None if reach is None else reach[::-1]))

    def _moved(self, reach: Reach | None) -> Tensor:
        coordinates = self.space.coordinates
        if reach is None:
            return self.ball_length
        if coordinates is None:
            return (norm1 if self.space.boxed else norm2)(self.ball, reach)
        among_pixels = norm2(coordinates.lifted(self.ball), reach)
        return torch.minimum(
            up(among_pixels + coordinates.lost(self.ball_length)), self.ball_length
        )

    @property
    def ball_radius(self) -> Tensor:
        """Return sup |A e| entry by entry."""
        return self.once("ball", lambda: torch.maximum(self.ball_rise, self.ball_fall))

    @property
    def square(self) -> Tensor:
        return self.gens[self.space.ball : self.fixed]

    @property
    def box_radius(self) -> Tensor:
        """Return sup |B n + s| entry by entry."""
        return self.once("box", lambda: up(self.reach + self.slack))

    @property
    def reach(self) -> Tensor:
        """Return sup |B n| entry by entry."""
        return self.once("reach", lambda: reach_of(self.box, self.blocks))

    @property
    def rest_radius(self) -> Tensor:
        """Return sup |Q vec(e e^T) + B n + s| entry by entry."""
        compute = lambda: quadratic_radius(self.square, self.square_length, self.space.ball)  # noqa: E731
        return self.once("rest", lambda: up(self.once("quadratic", compute) + self.box_radius))

    @property
    def square_length(self) -> Tensor:
        """Return the l2 norm of the columns of e e^T entry by entry."""
        return self.once("squares", lambda: norm2(self.square))

    @property
    def radius(self) -> Tensor:
        return self.once("radius", lambda: up(self.ball_radius + self.rest_radius))

    @property
    def size(self) -> Tensor:
        """Return an upper bound of |c| + sum |columns|, to which rounding errors are relative.

        What is made of another form without many products has a bound from its size.
        """
        return self.once("size", lambda: up(self.centre.abs() + self.deviation))

    @property
    def deviation(self) -> Tensor:
        """Return an upper bound of sum |columns|, no less than sup |x - c|."""
        return self.once(
            "deviation", lambda: up(self.ball_length + self.square_length + self.box_radius)
        )

    def sized(self, like: "Form", bound: Callable[[Tensor], Tensor]) -> "Form":
        """Return this form; where the size of `like` is known, with the bound of its own from that."""
        if "size" in like._cache:
            self._cache["size"] = up(bound(like.size))
        return self

    def interval(self) -> tuple[Tensor, Tensor]:
        """Return entrywise bounds, rounded outward."""
        radius = self.rest_radius + gamma(4) * self.size
        return self.centre - up(self.ball_fall + radius), self.centre + up(self.ball_rise + radius)

    def bounds(self) -> Bounds:
        """Return the form's sizes and least deviation of a row: centring lengthens nothing.

        Of several images, what holds for each.
        """
        away = self.deviation  # `radius` would take longer
        whole = self._cache["size"] = up(self.centre.abs() + away)
        width = self.shape[-1]
        rows = norm2(whole.movedim(-1, 0))
        centred = torch.linalg.vector_norm(self.centre - self.centre.mean(-1, keepdim=True), dim=-1)
        rounding = gamma(2 * width + 16) * norm2(self.centre.movedim(-1, 0))
        smallest = (centred - rounding - norm2(away.movedim(-1, 0))).amin() * (
            width**-0.5 * (1 - 2.0**-40)
        )
        total = norm2(rows.reshape(self.space.images, -1).mT).amax()
        facts = (total, rows.amax(), whole.amax(), smallest.clamp_min(0.0))
        return Bounds(*map(float, facts))

    def linear(
        self,
        apply: Linear,
        absolute: Linear | None = None,
        terms: int = 0,
        transposed: Linear | None = None,
    ) -> "Form":
        """Return the form of L x, for linear L and (no selection) |L| on (k, *s) -> (k, *t).

        Args:
            terms: the longest inner product in L; 0 for a selection or rearrangement of entries
                (|L| = L, no rounding).
            transposed: L^T, (k, *t) -> (k, *s); it is found by differentiation, slower, where it is
                not given.
        """
        centre = apply(self.centre[None])[0]
        gens = apply(self.gens)
        if absolute is None:
            node = self.arranged(apply, centre)
            form = Form(self.space, centre, gens, apply(self.slack[None])[0], self.blocks, node)
            form = form.known(self, apply)
            form = form.imaged(self, apply, apply, 0)
            return form.sized(self, lambda size: apply(size[None])[0])
        error = self.slack + gamma(terms) * self.size
        node = None
        if self.node is not None:  # going back sums over the results, at most all of them
            rounding = up(
                absolute(gamma(terms + centre.numel() + BACK) * self.size[None])[0], terms
            )
            pull = adjoint(apply, self.shape) if transposed is None else transposing(transposed)
            node = self.then(tuple(centre.shape), pull, error=rounding)
        slack = up(absolute(error[None])[0], terms)
        form = Form(self.space, centre, gens, slack, self.blocks, node)
        form = form.imaged(self, apply, absolute, terms)
        return form.sized(self, lambda size: up(absolute(size[None])[0], terms) + slack)

    def imaged(self, of: "Form", apply: Linear, absolute: Linear, terms: int) -> "Form":
        """Return the form, L of another, as an image of what that is one of."""
        if of.image_of is None:
            return self
        return replace(self, image_of=of.image_of.then(apply, absolute, terms))

    def image(
        self, apply: Linear, absolute: Linear, terms: int, back: Linear, *, of_fibres: bool = False
    ) -> "Form":
        """Return `linear`, as an image of this form: what follows may read its Gram matrix."""
        whole = Image(self, apply, absolute, terms, of_fibres)
        return replace(self.linear(apply, absolute, terms, back), image_of=whole)

    def then(
        self,
        shape: tuple[int, ...],
        pull: Pull,
        constant: Tensor | None = None,
        error: Tensor | None = None,
    ) -> Node | None:
        """Return the node of L x + constant +- error, where nodes are kept."""
        return None if self.node is None else Node(shape, (self.node,), pull, constant, error)

    def arranged(self, apply: Linear, centre: Tensor) -> Node | None:
        """Return the node of a selection or rearrangement; its adjoint sums repeated entries."""
        if self.node is None:
            return None
        rounding = up(gamma(centre.numel() + BACK) * apply(self.size[None])[0])
        return self.then(tuple(centre.shape), rearranging(apply, self.centre), None, rounding)

    def doubted(self, error: Tensor | float) -> "Form":
        """Return x with an extra entrywise error of at most `error`."""
        node = self.then(
            self.shape, lambda rows: (rows,), None, up(error + gamma(BACK) * self.size)
        )
        row_sum_error = self.row_sum_error
        if row_sum_error is not None:
            largest = torch.as_tensor(error).to(self.centre).amax()
            row_sum_error = up(row_sum_error + self.shape[-1] * largest, 4)
        slack = up(self.slack + error)
        form = replace(
            self, slack=slack, node=node, row_sum_error=row_sum_error, image_of=None, _cache={}
        )
        return form.sized(self, lambda size: size + error)

    def over(self, divisor: Tensor) -> "Form":
        """Return x / divisor (broadcast to the shape of x)."""
        return self.linear(lambda t: t / divisor, lambda t: t / divisor.abs(), terms=1)

    def choose(self, token: int) -> "Form":
        """Return the one token at this place of axis 1, (1, n, d) -> (1, 1, d)."""
        if not self.has_fibres_own:
            return self.linear(lambda t: t[:, :, token : token + 1])
        if self.centre.dim() != 3 or len(self.centre) != self.space.images:
            raise NoRule("a choice of tokens that are not the fibres of one image")
        chosen = self.linear(lambda t: t[:, :, token : token + 1])
        return replace(chosen, blocks=tuple(block.at(token) for block in self.blocks))

    @property
    def has_fibres_own(self) -> bool:
        """Return whether some symbols are of one fibre each."""
        return any(block.of_fibres for block in self.blocks)

    def with_common_symbols(self) -> "Form":
        """Return the form with the symbols of its fibres side by side, for maps that mix fibres.

        Raises:
            Unbounded: the columns are too many.
        """
        if not self.has_fibres_own:
            return self
        width = self.shape[-1]
        images = self.space.images
        fibres = self.centre.numel() // (images * width)
        columns = [self.gens[: self.fixed]]
        blocks = []
        for block, part in runs(self.box, self.blocks):
            if block.of_fibres:
                if len(part) * fibres * self.centre.numel() > _LARGEST:
                    raise Unbounded("an operation that mixes tokens, of too many symbols")
                spread = part.new_zeros(fibres, len(part), images, fibres, width)
                spread.diagonal(dim1=0, dim2=3).copy_(
                    part.reshape(len(part), images, fibres, width).mT
                )
                part = spread.view(-1, *self.shape)
                block = block.of_all(fibres)
            columns.append(part)
            blocks.append(block)
        common = replace(self, gens=torch.cat(columns), blocks=tuple(blocks), _cache={})
        return common.sized(self, lambda size: size)

    def shift(self, constant: Tensor) -> "Form":
        """Return x + constant (broadcast to the shape of x)."""
        constant = fitting(constant, self.shape)
        slack = up(self.slack + gamma(0) * (self.centre.abs() + constant.abs()))
        node = None
        if self.node is not None:
            whole = constant.expand(self.shape)
            node = self.then(
                self.shape, lambda rows: (rows,), whole, up(gamma(BACK) * (self.size + whole.abs()))
            )
        form = replace(
            self, centre=self.centre + constant, slack=slack, node=node, row_sum_error=None,
            _cache={},
        )  # fmt: skip
        return form.sized(self, lambda size: size + constant.abs() + slack)

    def scale(self, factor: Tensor) -> "Form":
        """Return factor * x entry by entry (broadcast to the shape of x), for an exact factor."""
        factor = fitting(factor, self.shape)
        size = up(factor.abs() * self.size)
        slack = up(factor.abs() * self.slack + gamma(1) * size)
        node = self.then(self.shape, lambda rows: (rows * factor,), None, up(gamma(BACK) * size))
        form = Form(self.space, self.centre * factor, self.gens * factor, slack, self.blocks, node)
        form = form.known(self, lambda facts: up(facts * factor.abs()), SIGNLESS)
        form = form.imaged(self, lambda t: t * factor, lambda t: t * factor.abs(), 1)
        return form.sized(self, lambda _: size + slack)

    def __add__(self, other: "Form") -> "Form":
        terms = (self.gens, self.blocks, None), (other.gens, other.blocks, None)
        gens, blocks = summed(terms, self.shape, self.fixed)
        size = self.size + other.size
        slack = up(self.slack + other.slack + gamma(0) * size)
        node = None
        if self.node is not None and other.node is not None:
            pull = lambda rows: (rows, rows)  # noqa: E731
            node = Node(self.shape, (self.node, other.node), pull, None, up(gamma(BACK) * size))
        form = Form(self.space, self.centre + other.centre, gens, slack, blocks, node)
        return form.sized(self, lambda _: size + slack)

    def solid(self) -> "Form":
        """Make each entry's slack a box symbol, where allowed: later maps can cancel it."""
        if not self.space.limit:
            return self
        by_fibres = self.space.by_fibres or self.has_fibres_own
        count = self.shape[-1] if by_fibres else self.centre.numel() // self.space.images
        block = Block.fresh(count, of_fibres=by_fibres)
        wider = replace(self.widened(block), slack=torch.zeros_like(self.slack), node=self.node)
        columns = wider.columns_of(block).view(count, -1, count)
        columns.diagonal(dim1=0, dim2=2).copy_(self.slack.reshape(-1, count))
        if "reach" in self._reach_cache:
            wider._reach_cache["reach"] = self.box_radius
        return wider.sized(self, lambda size: size)

    def widened(self, block: Block) -> "Form":
        """Return the form with zeros for a block's columns, among those of its width."""
        count = sum(other.width <= block.width for other in self.blocks)
        start = self.fixed + sum(other.columns for other in self.blocks[:count])
        zeros = self.gens.new_zeros(block.columns, *self.shape)
        gens = torch.cat([self.gens[:start], zeros, self.gens[start:]])
        blocks = (*self.blocks[:count], block, *self.blocks[count:])
        return Form(
            self.space, self.centre, gens, self.slack, blocks, _image_cache=self._image_cache
        )

    def columns_of(self, block: Block) -> Tensor:
        """Return the columns of a block where they lie, (columns, *s)."""
        before = self.blocks[: self.blocks.index(block)]
        start = self.fixed + sum(other.columns for other in before)
        return self.gens[start : start + block.columns]

    def worked(self) -> "Form":
        """`solid` where slack exceeds rounding errors, for maps that mix entries."""
        return self.solid() if bool((self.slack > _ROUNDING * self.size).any()) else self

    @staticmethod
    def aligned(forms: list["Form"]) -> list["Form"]:
        """Return the forms over one common list of symbols; missing columns are zero."""
        blocks = every_block(*(form.blocks for form in forms))
        return [
            form
            if form.blocks == blocks
            else replace(form, gens=over(form.gens, form.blocks, blocks, form.fixed), blocks=blocks)
            for form in forms
        ]
