"""Affine forms: an enclosure of one tensor of the network over all images of a ball.

A form is the set of all  c + A e + Q vec(e e^T) + B n + s,  where e (|e|_2 <= 1) places the image
in its ball, n are box symbols (|n|_inf <= 1) and groups of symbols (|n_g|_2 <= 1), and s is any
tensor with |s| <= slack entry by entry. e and n mean the same in every form of a walk, so
differences of forms cancel. vec(e e^T) lists
e_a^2 and sqrt(2) e_a e_b (a < b): its l2 norm is |e|^2 <= 1. Source of the l2 + box form: Bonaert
et al. 2021 (multi-norm zonotopes); the columns for e e^T are ours. Proofs: docs/local.md.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

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
from certcli.enclosure.zonotopes.executed import Bounds
from certcli.enclosure.zonotopes.quadratic import pairs, quadratic_radius, weights
from certcli.enclosure.zonotopes.rounding import Reach, gamma, norm1, norm2, up
from certcli.enclosure.zonotopes.space import Space
from certcli.enclosure.zonotopes.symbols import Block, Blocks, reach_of, runs
from certcli.engine.table import NoRule

Linear = Callable[[Tensor], Tensor]
_LARGEST = 2**27
"""Entries of the columns that one operation may make of the symbols of single fibres: a gigabyte."""


class Unbounded(Exception):
    """A neighbourhood is too large for a finite enclosure; the message names the place."""


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
        image_of: x and W where the form is W x on the last axis, up to a constant and to slack.
    """

    space: Space
    centre: Tensor
    gens: Tensor
    slack: Tensor
    blocks: Blocks = ()
    node: Node | None = None
    row_sum_error: Tensor | None = None
    image_of: "tuple[Form, Tensor] | None" = field(default=None, repr=False, compare=False)
    _cache: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

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

    def somewhere(self) -> list[Tensor]:
        """Return the symbols of the image and two far points, from a fixed generator."""
        generator = torch.Generator().manual_seed(24)
        move = torch.randn(self.space.ball, generator=generator, dtype=torch.float64).to(
            self.centre
        )
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
            weight = weights(self.space.ball, diagonal=1.0, off_diagonal=2**0.5, like=e, axes=0)
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
        if name not in self._cache:
            self._cache[name] = compute()
        return self._cache[name]

    @property
    def ball_gram(self) -> Tensor:
        """Return A A^T of each fibre, (fibres, d, d), as computed."""
        return self.once("gram", self._ball_gram)

    def _ball_gram(self) -> Tensor:
        columns = self.ball.reshape(self.space.ball, -1, self.shape[-1]).movedim(0, -1)
        return columns @ columns.mT

    @property
    def ball_length(self) -> Tensor:
        """Return sup |A e| entry by entry, as if the image could move in all directions."""
        return self.once(
            "length", lambda: norm1(self.ball) if self.space.boxed else norm2(self.ball)
        )

    @property
    def ball_rise(self) -> Tensor:
        """Return sup A e entry by entry."""
        reach = self.space.reach
        return self.ball_length if reach is None else self.once("rise", lambda: self._moved(reach))

    @property
    def ball_fall(self) -> Tensor:
        """Return sup -A e entry by entry."""
        reach = self.space.reach
        return (
            self.ball_length
            if reach is None
            else self.once("fall", lambda: self._moved(reach[::-1]))
        )

    def _moved(self, reach: Reach) -> Tensor:
        coordinates = self.space.coordinates
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
        return self.once("box", lambda: up(reach_of(self.box, self.blocks) + self.slack))

    @property
    def rest_radius(self) -> Tensor:
        """Return sup |Q vec(e e^T) + B n + s| entry by entry."""
        return self.once(
            "rest", lambda: up(quadratic_radius(self.square, self.space.ball) + self.box_radius)
        )

    @property
    def radius(self) -> Tensor:
        return self.once("radius", lambda: up(self.ball_radius + self.rest_radius))

    @property
    def size(self) -> Tensor:
        """Return an upper bound of |c| + sum |columns|, to which rounding errors are relative."""
        return self.once(
            "size",
            lambda: up(self.centre.abs() + self.ball_length + norm2(self.square) + self.box_radius),
        )

    def interval(self) -> tuple[Tensor, Tensor]:
        """Return entrywise bounds, rounded outward."""
        radius = self.rest_radius + gamma(4) * self.size
        return self.centre - up(self.ball_fall + radius), self.centre + up(self.ball_rise + radius)

    def bounds(self) -> Bounds:
        """Return the form's sizes and least deviation of a row: centring lengthens nothing."""
        away = up((self.size - self.centre.abs()).clamp_min(0))  # `radius` would take longer
        whole = up(self.centre.abs() + away)
        width = self.shape[-1]
        rows = norm2(whole.movedim(-1, 0))
        centred = torch.linalg.vector_norm(self.centre - self.centre.mean(-1, keepdim=True), dim=-1)
        rounding = gamma(2 * width + 16) * norm2(self.centre.movedim(-1, 0))
        smallest = (centred - rounding - norm2(away.movedim(-1, 0))).amin() * (
            width**-0.5 * (1 - 2.0**-40)
        )
        facts = (norm2(rows.flatten()), rows.amax(), whole.amax(), smallest.clamp_min(0.0))
        return Bounds(*(part.view(1) for part in facts))

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
            return Form(self.space, centre, gens, apply(self.slack[None])[0], self.blocks, node)
        error = self.slack + gamma(terms) * self.size
        node = None
        if self.node is not None:  # going back sums over the results, at most all of them
            rounding = up(
                absolute(gamma(terms + centre.numel() + BACK) * self.size[None])[0], terms
            )
            pull = adjoint(apply, self.shape) if transposed is None else transposing(transposed)
            node = self.then(tuple(centre.shape), pull, error=rounding)
        return Form(
            self.space, centre, gens, up(absolute(error[None])[0], terms), self.blocks, node
        )

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
        return Form(self.space, self.centre, self.gens, slack, self.blocks, node, row_sum_error)

    def known_as(self, node: Node | None) -> "Form":
        return replace(self, node=node, _cache=self._cache)

    def choose(self, token: int) -> "Form":
        """Return the one token at this place of axis 1, (1, n, d) -> (1, 1, d)."""
        if not self.has_fibres_own:
            return self.linear(lambda t: t[:, :, token : token + 1])
        if self.centre.dim() != 3 or len(self.centre) != 1:
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
        fibres = self.centre.numel() // width
        columns = [self.gens[: self.fixed]]
        blocks = []
        for block, part in runs(self.box, self.blocks):
            if block.of_fibres:
                if len(part) * fibres * self.centre.numel() > _LARGEST:
                    raise Unbounded("an operation that mixes tokens, of too many symbols")
                spread = part.new_zeros(fibres, len(part), fibres, width)
                spread.diagonal(dim1=0, dim2=2).copy_(
                    part.reshape(len(part), fibres, width).permute(0, 2, 1)
                )
                part = spread.view(-1, *self.shape)
                block = block.of_all(fibres)
            columns.append(part)
            blocks.append(block)
        return Form(
            self.space, self.centre, torch.cat(columns), self.slack, tuple(blocks), self.node,
            self.row_sum_error,
        )  # fmt: skip

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
        return Form(self.space, self.centre + constant, self.gens, slack, self.blocks, node)

    def scale(self, factor: Tensor) -> "Form":
        """Return factor * x entry by entry (broadcast to the shape of x), for an exact factor."""
        factor = fitting(factor, self.shape)
        slack = up(factor.abs() * (self.slack + gamma(1) * self.size))
        rounding = up(factor.abs() * gamma(BACK) * self.size)
        node = self.then(self.shape, lambda rows: (rows * factor,), None, rounding)
        return Form(self.space, self.centre * factor, self.gens * factor, slack, self.blocks, node)

    def __add__(self, other: "Form") -> "Form":
        x, y = Form.aligned([self, other])
        slack = up(self.slack + other.slack + gamma(0) * (self.size + other.size))
        node = None
        if self.node is not None and other.node is not None:
            rounding = up(gamma(BACK) * (self.size + other.size))
            node = Node(
                self.shape, (self.node, other.node), lambda rows: (rows, rows), None, rounding
            )
        return Form(self.space, x.centre + y.centre, x.gens + y.gens, slack, x.blocks, node)

    def solid(self) -> "Form":
        """Make each entry's slack a box symbol, where allowed: later maps can cancel it."""
        if not self.space.limit:
            return self
        by_fibres = self.space.by_fibres or self.has_fibres_own
        count = self.shape[-1] if by_fibres else self.centre.numel()
        gens = self.gens.new_zeros(len(self.gens) + count, *self.shape)
        gens[: len(self.gens)] = self.gens
        columns = gens[len(self.gens) :].view(count, -1, count)
        columns.diagonal(dim1=0, dim2=2).copy_(self.slack.reshape(-1, count))
        blocks = (*self.blocks, Block.fresh(count, of_fibres=by_fibres))
        return Form(self.space, self.centre, gens, torch.zeros_like(self.slack), blocks, self.node)

    def worked(self) -> "Form":
        """`solid` where slack exceeds rounding errors, for maps that mix entries."""
        return (
            self.solid()
            if bool((self.slack > 1e-9 * (self.ball_radius + self.box_radius)).any())
            else self
        )

    @staticmethod
    def aligned(forms: list["Form"]) -> list["Form"]:
        """Return the forms over one common list of symbols; missing columns are zero."""
        blocks = tuple(dict.fromkeys(block for form in forms for block in form.blocks))
        return [_over(form, blocks) for form in forms]


def _over(x: Form, blocks: Blocks) -> Form:
    if x.blocks == blocks:
        return x
    columns = dict(runs(x.box, x.blocks))
    gens = x.gens.new_zeros(x.fixed + sum(block.columns for block in blocks), *x.shape)
    gens[: x.fixed] = x.gens[: x.fixed]
    for block, part in runs(gens[x.fixed :], blocks):
        if block in columns:
            part.copy_(columns[block])
    return replace(x, gens=gens, blocks=blocks, _cache=x._cache)
