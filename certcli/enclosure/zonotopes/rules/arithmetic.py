"""Sums, products and quotients of forms; their entries moved, joined, summed and chosen. docs/local.md."""

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from certcli.enclosure.operations import (
    axes_of,
    constant_operand,
    register_choices,
    register_fixed_choices,
    require_entries,
    shape_of,
    spelled,
)
from certcli.enclosure.zonotopes.backward import BACK, Node
from certcli.enclosure.zonotopes.columns import gamma, up
from certcli.enclosure.zonotopes.ellipsoids import reduced
from certcli.enclosure.zonotopes.form import Form
from certcli.enclosure.zonotopes.pointwise import apply
from certcli.enclosure.zonotopes.products import TIMES, product, scaled
from certcli.enclosure.zonotopes.space import ZonotopeContext, rules
from certcli.engine.curves import RECIPROCAL
from certcli.engine.moves import Move, register_moves
from certcli.engine.table import NoRule
from certcli.engine.walk import Constant
from certcli.system.errors import raise_if


def arranged(function: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """function(x, ...) for a function that moves or drops entries of one tensor."""
    if not isinstance(x, Form):
        raise NoRule("a rearrangement of something else than one tensor")

    def run(t: Tensor) -> Any:
        return function(t, *args, **kwargs)

    each = run if x.space.images == 1 else _image_by_image(run)
    centre = each(x.centre)
    require_entries([centre] if isinstance(centre, Tensor) else centre)
    slack = each(x.slack)
    columns = torch.vmap(each)(x.gens)
    if isinstance(centre, Tensor):
        return Form(x.space, centre, columns, slack, x.blocks, x.arranged(torch.vmap(run), centre))
    forms = []
    for i, (c, g, s) in enumerate(zip(centre, columns, slack, strict=True)):
        forms.append(Form(x.space, c, g, s, x.blocks, x.arranged(_part(torch.vmap(run), i), c)))
    return forms


def _image_by_image(run: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """Return what runs on each image of a batch alone, as it was traced: (1, *s) -> (1, *t)."""

    def alone(t: Tensor) -> Tensor:
        raise_if(t.dim() < 2 or t.shape[1] != 1, NoRule, "several images in an axis that moves")
        return t.squeeze(1)

    def each(t: Tensor) -> Any:
        out = torch.vmap(run)(t.unsqueeze(1))
        return alone(out) if isinstance(out, Tensor) else [alone(part) for part in out]

    return each


def _part(run: Callable[[Tensor], Any], index: int) -> Callable[[Tensor], Tensor]:
    return lambda t: run(t)[index]


def _move(ctx: ZonotopeContext, x: Form, move: Move) -> Any:
    """What is put in beside the entries of x does not move."""
    out = arranged(move, x)
    if not move.filled:
        return out
    (places,) = move.places(_of_one(x, x.shape))
    return out.shift((places < 0).to(x.centre) * move.filled)


def repeated(x: Form, shape: tuple[int, ...]) -> Form:
    """Return a form in this shape, its entries repeated."""
    if x.shape == shape:
        return x
    alike = len(shape) == len(x.shape) or x.space.images == 1
    raise_if(not alike, NoRule, "several images in an operation that repeats them")
    repeats: Form = arranged(lambda t: t.expand(_of_one(x, shape)).contiguous(), x)
    return repeats


def _of_one(x: Form, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return what a shape of several images is of one."""
    return (shape[0] // x.space.images, *shape[1:])


def negative(x: Form) -> Form:
    return x.linear(torch.neg, lambda t: t)


def _operands(x: Any, y: Any) -> tuple[Form, Form | Tensor]:
    """Return both operands in the shape of the result, a form first."""
    if not isinstance(x, Form):
        x, y = y, x
    x = repeated(x, shape_of(x, y))
    if not isinstance(y, Form):
        return x, constant_operand(y, x.centre, x.shape)
    return x, repeated(y, x.shape)


@spelled(rules, "sum")
def sum_of_forms(ctx: ZonotopeContext, x: Any, y: Any) -> Form:
    """Where two streams meet is the place to keep the number of symbols within its limit."""
    x, y = _operands(x, y)
    return reduced(x + y) if isinstance(y, Form) else x.shift(y)


@spelled(rules, "difference")
def difference_of_forms(ctx: ZonotopeContext, x: Any, y: Any) -> Form:
    if isinstance(y, Form):
        return sum_of_forms(ctx, x, negative(y))
    x = repeated(x, shape_of(x, y))
    return x.shift(-constant_operand(y, x.centre, x.shape))


@spelled(rules, "negative")
def negated_form(ctx: ZonotopeContext, x: Form) -> Form:
    return negative(x)


@spelled(rules, "product")
def product_of_forms(ctx: ZonotopeContext, x: Any, y: Any) -> Form:
    x, y = _operands(x, y)
    return product(x.worked(), y.worked(), TIMES, 1) if isinstance(y, Form) else x.scale(y)


@spelled(rules, "quotient")
def quotient_of_forms(ctx: ZonotopeContext, x: Any, y: Any) -> Form:
    """By constants, or by one number a row."""
    moving = isinstance(x, Form)
    if moving and isinstance(y, Form) and y.shape == (*x.shape[:-1], 1):
        return scaled(x.worked(), apply(RECIPROCAL, y.worked()).solid())
    raise_if(
        not moving or isinstance(y, Form),
        NoRule,
        "a division by something other than constants, or one number a row",
    )
    divisor = constant_operand(y, x.centre, x.shape)
    raise_if(bool((divisor == 0).any()), NoRule, "a division by 0")
    return x.over(divisor)


def over_axes(x: Form, dims: Sequence[int], keepdim: bool, reduce: Any) -> Form:
    """The mean or sum over axes."""
    run = lambda t: reduce(t, [d + 1 for d in dims], keepdim)  # noqa: E731
    return x.linear(run, run, terms=math.prod(x.shape[d] for d in dims) + 2)


def _along_axes(function: Any, what: str) -> Callable[..., Form]:
    def rule(ctx: ZonotopeContext, x: Form, dim: Any = None, keepdim: bool = False) -> Form:
        return over_axes(x, axes_of(x.shape, dim, what), keepdim, function)

    return rule


for _function, _name in ((torch.sum, "sum"), (torch.mean, "mean")):
    rules.function(_function)(_along_axes(_function, _name))
    rules.method(_name)(_along_axes(_function, _name))


def joined(parts: list[Form | Tensor], axis: int) -> Form:
    """torch.cat of forms and constants along an axis >= 1 of the tensor."""
    forms = Form.aligned([part for part in parts if isinstance(part, Form)])
    like = forms[0]
    waiting = iter(forms)
    full = []
    for part in parts:
        if isinstance(part, Form):
            full.append(next(waiting))
        else:
            constant = part.to(like.centre)
            constant = constant.expand(like.space.images * len(constant), *constant.shape[1:])
            none = constant.new_zeros(len(like.gens), *constant.shape)
            full.append(Form(like.space, constant, none, torch.zeros_like(constant), like.blocks))
    return Form(
        like.space,
        torch.cat([part.centre for part in full], axis),
        torch.cat([part.gens for part in full], axis + 1),
        torch.cat([part.slack for part in full], axis),
        like.blocks,
        _joined(full, axis),
    )


def _joined(parts: list[Form], axis: int) -> Node | None:
    """Return the node with the forms as parents, and the other parts as its constant."""
    nodes = [part.node for part in parts if part.node is not None]
    if not nodes:
        return None
    lengths = [part.shape[axis] for part in parts]
    constant = torch.cat(
        [torch.zeros_like(part.centre) if part.node is not None else part.centre for part in parts],
        axis,
    )

    def pull(rows: Tensor) -> list[Tensor]:
        cut = rows.split(lengths, axis + 1)
        return [piece for piece, part in zip(cut, parts, strict=True) if part.node is not None]

    rounding = up(gamma(BACK) * torch.cat([part.size for part in parts], axis))
    return Node(tuple(constant.shape), tuple(nodes), pull, constant, rounding)


def _tensors_of(parts: Any) -> list[Any]:
    return [part.tensor if isinstance(part, Constant) else part for part in parts]


@rules.function(torch.cat, torch.concat, torch.concatenate)
def concatenated(ctx: ZonotopeContext, parts: Any, dim: int = 0) -> Form:
    tensors = _tensors_of(parts)
    if len(tensors) == 1 and isinstance(tensors[0], Form):
        return tensors[0]
    axis = dim % len(next(part for part in tensors if isinstance(part, Form)).shape)
    raise_if(axis == 0, NoRule, "a concatenation along the batch")
    return joined(tensors, axis)


@rules.function(torch.stack)
def stacked_forms(ctx: ZonotopeContext, parts: Any, dim: int = 0) -> Form:
    unsqueezed = [
        part.unsqueeze(dim) if isinstance(part, Tensor) else arranged(torch.unsqueeze, part, dim)
        for part in _tensors_of(parts)
    ]
    return concatenated(ctx, unsqueezed, dim)


def mixed_forms(ctx: ZonotopeContext, *parts: Any) -> Form:
    """Return the sum of forms and numbers, each times its share of 0 and 1."""
    pairs = list(zip(parts[::2], parts[1::2], strict=True))
    shape = tuple(parts[1].shape)
    moving = [repeated(part, shape).scale(share) for part, share in pairs if isinstance(part, Form)]
    total = functools.reduce(operator.add, moving)
    for part, share in pairs:
        if not isinstance(part, Form):
            filled = constant_operand(part, total.centre, shape) * share
            raise_if(not bool(filled.isfinite().all()), NoRule, "filling with an infinite number")
            total = total.shift(filled)
    return total


register_moves(rules, Form, _move, lambda x: _of_one(x, x.shape))
register_choices(rules)
register_fixed_choices(rules, mixed_forms)
