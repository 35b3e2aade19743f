"""Sums and products, and operations that move, choose or average entries."""

import math
import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from certcli.enclosure.zonotopes.backward import BACK, Node
from certcli.enclosure.zonotopes.columns import gamma, up
from certcli.enclosure.zonotopes.ellipsoids import reduced
from certcli.enclosure.zonotopes.form import Form, fitting
from certcli.enclosure.zonotopes.needed_tokens import chosen_token
from certcli.enclosure.zonotopes.pointwise import RECIPROCAL, apply
from certcli.enclosure.zonotopes.products import TIMES, product, scaled
from certcli.enclosure.zonotopes.space import ZonotopeContext, rules
from certcli.engine.moves import Move, register_moves
from certcli.engine.table import NoRule, RuleTable
from certcli.engine.walk import Constant


def arranged(function: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """function(x, ...) for a function that moves or drops entries of one tensor."""
    if not isinstance(x, Form):
        raise NoRule("a rearrangement of something else than one tensor")

    def run(t: Tensor) -> Any:
        return function(t, *args, **kwargs)

    centre = run(x.centre)
    require_entries([centre] if isinstance(centre, Tensor) else centre)
    slack = run(x.slack)
    columns = torch.vmap(run)(x.gens)
    if isinstance(centre, Tensor):
        return Form(x.space, centre, columns, slack, x.blocks, x.arranged(torch.vmap(run), centre))
    forms = []
    for i, (c, g, s) in enumerate(zip(centre, columns, slack, strict=True)):
        forms.append(Form(x.space, c, g, s, x.blocks, x.arranged(_part(torch.vmap(run), i), c)))
    return forms


def require_entries(parts: Iterable[Tensor]) -> None:
    """Raise NoRule for a part without entries, which has neither bounds nor a longest row."""
    if any(part.numel() == 0 for part in parts):
        raise NoRule("a part of a tensor without entries")


def _part(run: Callable[[Tensor], Any], index: int) -> Callable[[Tensor], Tensor]:
    return lambda t: run(t)[index]


def register_choices(table: RuleTable) -> None:
    """Register in a domain's table x[:, r] and its like where of x only the token read was kept."""
    table.functions[operator.getitem] = _choosing(table.functions[operator.getitem], 0)
    table.functions[torch.select] = _choosing(table.functions[torch.select], 1)
    table.methods["select"] = _choosing(table.methods["select"], 1)


def _choosing(rule: Callable[..., Any], place: int) -> Callable[..., Any]:
    def choose(ctx: Any, x: Any, *args: Any, **named: Any) -> Any:
        chosen = not isinstance(x, (list, tuple)) and chosen_token(ctx.node) is not None
        if chosen and x.shape[1] == 1:
            args = ((args[0][0], 0, *args[0][2:]),) if place == 0 else (args[0], 0)
        return rule(ctx, x, *args, **named)

    return choose


def _move(ctx: Any, x: Form, move: Move) -> Any:
    """What is put in beside the entries of x does not move."""
    out = arranged(move, x)
    if not move.filled:
        return out
    (places,) = move.places(x.shape)
    return out.shift((places < 0).to(x.centre) * move.filled)


register_moves(rules, Form, _move)
register_choices(rules)


def register_types(table: RuleTable) -> None:
    """Register in a domain's table the calls that leave a tensor of float64 as it is."""

    @table.function(F.dropout)
    def at_rest(
        ctx: Any, x: Any, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Any:
        """Dropout in eval mode."""
        if training and p:
            raise NoRule("dropout in training mode")
        return x

    @table.method("to", "type_as")
    def same(ctx: Any, x: Any, *types: Any, **named: Any) -> Any:
        """Called with float64, or with a tensor of it, alone."""
        targets = [*types, *named.values()]
        if not targets or any(
            getattr(kind, "dtype", kind) != torch.float64 and not hasattr(kind, "centre")
            for kind in targets
        ):
            raise NoRule("a change of a tensor's type or place")
        return x


register_types(rules)


@rules.method("mean")
@rules.function(torch.mean)
def mean(ctx: ZonotopeContext, x: Form, dim: Any, keepdim: bool = False) -> Form:
    dims = summed_axes(x.shape, dim, "mean")
    average = lambda t: t.mean([d + 1 for d in dims], keepdim)  # noqa: E731
    return x.linear(average, average, terms=math.prod(x.shape[d] for d in dims) + 2)


@rules.method("sum")
@rules.function(torch.sum)
def total(ctx: ZonotopeContext, x: Form, dim: Any = None, keepdim: bool = False) -> Form:
    dims = summed_axes(x.shape, dim)
    added = lambda t: t.sum([d + 1 for d in dims], keepdim)  # noqa: E731
    return x.linear(added, added, terms=math.prod(x.shape[d] for d in dims))


def summed_axes(shape: tuple[int, ...], dim: Any, what: str = "sum") -> list[int]:
    """Return the axes of a sum or mean. NoRule: over the batch, or over all."""
    axes = [] if dim is None else [dim] if isinstance(dim, int) else list(dim)
    dims = sorted({d % len(shape) for d in axes})
    if 0 in dims or not dims:
        raise NoRule(f"a {what} over the batch")
    return dims


def unsqueezed(parts: Any, dim: int, move: Callable[..., Any]) -> list[Any]:
    """Return values and constants with a new axis, as `torch.stack` joins them."""
    return [
        Constant(part.tensor.unsqueeze(dim))
        if isinstance(part, Constant)
        else part.unsqueeze(dim)
        if isinstance(part, Tensor)
        else move(torch.unsqueeze, part, dim)
        for part in parts
    ]


@rules.function(torch.stack)
def stack(ctx: ZonotopeContext, parts: Any, dim: int = 0) -> Form:
    return cat(ctx, unsqueezed(parts, dim, arranged), dim)


@rules.function(torch.cat, torch.concat)
def cat(ctx: ZonotopeContext, parts: Any, dim: int = 0) -> Form:
    if len(parts) == 1 and isinstance(parts[0], Form):
        return parts[0]
    tensors = [part.tensor if isinstance(part, Constant) else part for part in parts]
    first = next(part for part in tensors if isinstance(part, Form))
    axis = dim % len(first.shape)
    if axis == 0:
        raise NoRule("a concatenation along the batch")
    return joined(tensors, axis)


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


def constant_operand(value: Any, centre: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a constant that broadcasts to one of this shape, of centre's type and place."""
    tensor = value.tensor if isinstance(value, Constant) else value
    return fitting(torch.as_tensor(tensor, dtype=centre.dtype, device=centre.device), shape)


def register_arithmetic(
    table: RuleTable,
    kind: Any,
    add: Callable[[Any, Any], Any],
    negative: Callable[[Any], Any],
    multiply: Callable[[Any, Any], Any],
    arranged: Callable[..., Any],
    settle: Callable[[Any], Any] = lambda x: x,
) -> None:
    """Register sums and products of two tensors, and of a tensor with a constant.

    Args:
        kind: The domain's values, which have `shift` and `scale` for constants.
        add, negative, multiply: For values of one shape.
        arranged: (function, value) -> the value after a function that moves entries.
        settle: Makes a value speak of the tensor itself, and leaves a constant as it is.
    """

    def repeated(x: Any, y: Any) -> Any:
        """Return x in the shape of x + y."""
        tensor = y.tensor if isinstance(y, Constant) else y
        shape = torch.broadcast_shapes(x.shape, getattr(tensor, "shape", ()))
        return x if x.shape == shape else arranged(lambda t: t.expand(shape).contiguous(), x)

    def pair(x: Any, y: Any) -> tuple[Any, Any]:
        """Return both operands in the shape of the result, a value first."""
        x = settle(x)
        y = settle(y)
        if not isinstance(x, kind):
            x, y = y, x
        x = repeated(x, y)
        if not isinstance(y, kind):
            return x, constant_operand(y, x.centre, x.shape)
        return x, repeated(y, x)

    @table.function(operator.add, operator.iadd, torch.add)
    @table.method("add", "add_")
    def plus(ctx: Any, x: Any, y: Any) -> Any:
        x, y = pair(x, y)
        return add(x, y) if isinstance(y, kind) else x.shift(y)

    @table.function(operator.sub, operator.isub, torch.sub)
    @table.method("sub", "sub_")
    def minus(ctx: Any, x: Any, y: Any) -> Any:
        y = settle(y)
        if isinstance(y, kind):
            return plus(ctx, x, negative(y))
        x = repeated(settle(x), y)
        return x.shift(-constant_operand(y, x.centre, x.shape))

    @table.function(operator.neg, torch.neg)
    @table.method("neg")
    def opposite(ctx: Any, x: Any) -> Any:
        return negative(settle(x))

    @table.function(operator.mul, operator.imul, torch.mul)
    @table.method("mul", "mul_")
    def multiplied(ctx: Any, x: Any, y: Any) -> Any:
        x, y = pair(x, y)
        return multiply(x, y) if isinstance(y, kind) else x.scale(y)


def negative(x: Form) -> Form:
    return x.linear(torch.neg, lambda t: t)


# where two streams meet is the place to keep the number of symbols within its limit
register_arithmetic(
    rules,
    Form,
    lambda x, y: reduced(x + y),
    negative,
    lambda x, y: product(x.worked(), y.worked(), TIMES, 1),
    arranged,
)


@rules.function(operator.truediv, operator.itruediv, torch.div)
@rules.method("div")
def divide(ctx: ZonotopeContext, x: Any, y: Any) -> Form:
    """By a number, or by one number above 0 a row."""
    if isinstance(x, Form) and isinstance(y, Form) and y.shape == (*x.shape[:-1], 1):
        return scaled(x.worked(), apply(RECIPROCAL, y.worked()).solid())
    if not isinstance(x, Form) or not isinstance(y, (int, float)) or y == 0:
        raise NoRule("a division by something other than a number")
    return x.linear(lambda t: t / y, lambda t: t / abs(y), terms=1)
