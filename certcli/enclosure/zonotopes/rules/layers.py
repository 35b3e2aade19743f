"""What modules and operations do to forms; everything else is refused by name. docs/local.md."""

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from timm.layers import LayerScale
from timm.layers.attention import Attention
from timm.layers.norm import LayerNorm as TimmLayerNorm
from torch import Tensor, nn
from torch.nn import functional as F

import certcli.engine.activations  # noqa: F401 (for the names it enters)
from certcli.enclosure.choices import (
    CONVOLUTIONS,
    mixed_values,
    register_choices,
    register_convolutions,
    register_fixed_choices,
    register_largest,
    register_maxima,
    register_types,
)
from certcli.enclosure.operations import (
    NOTHING,
    register_arithmetic,
    register_joins,
    register_layers,
    register_linear,
    register_norms,
    register_scaled_norms,
    register_sums,
    require_entries,
)
from certcli.enclosure.zonotopes.backward import BACK, Node
from certcli.enclosure.zonotopes.columns import gamma, up
from certcli.enclosure.zonotopes.direction import number
from certcli.enclosure.zonotopes.ellipsoids import narrowed, reduced
from certcli.enclosure.zonotopes.form import Form, Unbounded
from certcli.enclosure.zonotopes.normalisation import centred, layer_norm
from certcli.enclosure.zonotopes.pointwise import activation, apply, relu
from certcli.enclosure.zonotopes.products import TIMES, product, scaled
from certcli.enclosure.zonotopes.space import ZonotopeContext, rules
from certcli.engine.averages import (
    Separable,
    register_averages,
    register_interpolation,
)
from certcli.engine.curves import (
    NAMED,
    RECIPROCAL,
    STEEP,
    Curve,
    Line,
    register_curves,
    unknown_derivative,
)
from certcli.engine.moves import Move, register_moves
from certcli.engine.table import NoRule
from certcli.nn.layers import ClippedReLU, MaxMin, Rounded
from certcli.nn.norms import CenterNorm, FloorNorm, Spread


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


def _part(run: Callable[[Tensor], Any], index: int) -> Callable[[Tensor], Tensor]:
    return lambda t: run(t)[index]


def _move(ctx: Any, x: Form, move: Move) -> Any:
    """What is put in beside the entries of x does not move."""
    out = arranged(move, x)
    if not move.filled:
        return out
    (places,) = move.places(x.shape)
    return out.shift((places < 0).to(x.centre) * move.filled)


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


def negative(x: Form) -> Form:
    return x.linear(torch.neg, lambda t: t)


RELU = Line(0.0, 0.0, ((0.0, 1.0),))
NORMS = (nn.LayerNorm, TimmLayerNorm, FloorNorm)
TOKENWISE = (
    nn.Linear,
    *NORMS,
    CenterNorm,
    *(module for named in NAMED for module in named.modules if module is not ClippedReLU),
    *NOTHING,
    LayerScale,
)
QUERIES = (Attention,)
FIBREWISE = (*TOKENWISE, MaxMin, ClippedReLU)
"""Modules whose rules keep the symbols of a fibre (the entries along the last axis) its own."""
SUMMING = (nn.Linear, *NOTHING)
"""Modules that read an activation's errors as symbols of single fibres in any walk."""
FIBREWISE_FUNCTIONS = (
    operator.add, operator.iadd, operator.sub, operator.isub, operator.mul, operator.imul, operator.neg,
    torch.add, torch.sub, torch.mul, torch.neg, F.linear, F.rms_norm, F.layer_norm, torch.layer_norm,
    *(function for named in NAMED + STEEP for function in named.functions),
)  # fmt: skip


def affine(x: Form, weight: Tensor, bias: Tensor | None) -> Form:
    """W x + b on the last axis; single entries' errors become symbols that W can cancel."""
    wider = len(weight) > weight.shape[1]
    if wider and not x.space.by_fibres:
        x = x.with_common_symbols()
    x = x.worked()
    absolute = weight.abs().T
    maps = (lambda t: t @ weight.T, lambda t: t @ absolute, weight.shape[1], lambda r: r @ weight)
    out = x.image(*maps, of_fibres=True) if wider else x.linear(*maps)
    if not x.space.by_fibres and out.has_fibres_own:
        out = narrowed(out).with_common_symbols()
    if bias is not None:
        out = out.shift(bias)
    return out


def relaxed(ctx: ZonotopeContext, x: Form, curve: Curve) -> Form:
    """f(x), of a broken line as a sum of ReLUs, exact at its ends. NoRule: no relaxation."""
    line = curve.line
    if line is None:
        if curve.second is unknown_derivative:
            raise NoRule(f"no relaxation of {curve.name} with these options")
        if curve.relative and not bool((x.interval()[0] > 0).all()):
            where = ctx.node.meta["path"] or "the network"
            raise Unbounded(f"{where}: {curve.name} of something that may be 0 or below")
        return activation(curve, x)
    if line == RELU:
        return relu(x)
    whole = x.scale(number(line.slope, x))
    size = whole.size
    for place, rise in line.kinks:
        opened = relu(x.shift(-number(place, x))).scale(number(rise, x))
        whole = whole + opened
        size = size + opened.size
    # places, rises and the start are rounded
    return whole.shift(number(line.start, x)).doubted(gamma(8) * size)


register_curves(rules, Form, relaxed, NAMED + STEEP)


@rules.module(ClippedReLU)
def clipped_relu(ctx: ZonotopeContext, module: ClippedReLU, x: Form) -> Form:
    """max(min(x, theta), 0) = relu(theta - relu(theta - x))."""
    threshold = module.threshold.to(x.centre)
    over = relu(x.scale(-torch.ones_like(threshold)).shift(threshold))
    return relu(over.scale(-torch.ones_like(threshold)).shift(threshold))


@rules.module(Rounded)
def rounded_form(ctx: ZonotopeContext, module: Rounded, x: Form) -> Form:
    """Half a step is a symbol of its own for each entry, whichever way an entry is rounded."""
    return x.doubted(torch.full_like(x.centre, 0.5)).solid()


@rules.module(MaxMin)
def maxmin(ctx: ZonotopeContext, module: MaxMin, x: Form) -> Form:
    """With d = max(a - b, 0): max(a, b) = b + d and min(a, b) = a - d, one error for both."""
    half = x.shape[-1] // 2
    first = x.linear(lambda t: t[..., :half])
    second = x.linear(lambda t: t[..., half:])
    difference = relu(first + negative(second)).solid()
    return joined([second + difference, first + negative(difference)], len(x.shape) - 1)


def convolution(
    ctx: ZonotopeContext, x: Form, weight: Tensor, bias: Tensor | None, options: dict[str, Any]
) -> Form:
    def run(t: Tensor, kernel: Tensor) -> Tensor:
        out = CONVOLUTIONS[kernel.dim()](t.flatten(0, 1), kernel, None, **options)
        return out.view(*t.shape[:2], *out.shape[1:])

    terms = weight[0].numel()
    out = x.worked().linear(lambda t: run(t, weight), lambda t: run(t, weight.abs()), terms=terms)
    return out if bias is None else out.shift(bias.view(-1, *[1] * (weight.dim() - 2)))


def averaged(ctx: ZonotopeContext, x: Form, averaging: Separable) -> Form:
    """Entry by entry a sum with a few roundings of its weights."""
    axes = len(averaging.matrices)
    if averaging.whole:
        return over_axes(x, range(len(x.shape) - axes, len(x.shape)), True, torch.mean)
    absolute = functools.partial(averaging, absolute=True)
    return x.worked().linear(averaging, absolute, terms=averaging.terms)


def larger_of(x: Form, y: Form) -> Form:
    """max(x, y) = x + max(y - x, 0), whose error later maps can cancel."""
    return reduced(x + relu(y + negative(x)).solid())


def _larger(ctx: ZonotopeContext, x: Form, y: Form | Tensor, sign: float) -> Form:
    """Of a constant y: y + max(x - y, 0), or y - max(y - x, 0)."""
    if isinstance(y, Form):
        return larger_of(x, y) if sign > 0 else negative(larger_of(negative(x), negative(y)))
    above = x.shift(-y)
    return (relu(above) if sign > 0 else negative(relu(negative(above)))).shift(y)


def largest_of_forms(ctx: ZonotopeContext, x: Form, places: Tensor, sign: float) -> Form:
    """The largest of the first two entries of each window, of this and the next, and so on."""
    up_to_sign = x if sign > 0 else negative(x)

    def entry(chosen: Tensor) -> Form:
        return up_to_sign.linear(lambda t: t.flatten(1)[:, chosen])

    out = functools.reduce(larger_of, map(entry, places.to(x.centre.device).unbind(-1)))
    return out if sign > 0 else negative(out)


def over_axes(x: Form, dims: Sequence[int], keepdim: bool, reduce: Any) -> Form:
    """The mean or sum over axes."""
    run = lambda t: reduce(t, [d + 1 for d in dims], keepdim)  # noqa: E731
    return x.linear(run, run, terms=math.prod(x.shape[d] for d in dims) + 2)


def normalise(
    ctx: ZonotopeContext, x: Form, spread: Spread, weight: Any, bias: Any, center: bool
) -> Form:
    return layer_norm(x, spread, weight, bias, center, ctx.inner)


register_moves(rules, Form, _move)
register_choices(rules)
register_types(rules)
register_linear(rules, Form, lambda ctx, *map_of_x: affine(*map_of_x))
register_layers(rules, lambda x: x)
register_norms(rules, normalise)
register_scaled_norms(rules, lambda x: x, normalise, centred)
register_arithmetic(
    rules,
    Form,
    # where two streams meet is the place to keep the number of symbols within its limit
    lambda x, y: reduced(x + y),
    negative,
    lambda x, y: product(x.worked(), y.worked(), TIMES, 1),
    lambda x, y: scaled(x.worked(), apply(RECIPROCAL, y.worked()).solid()),
    arranged,
)
register_sums(rules, lambda x: x, over_axes)
register_joins(rules, Form, arranged, joined)
register_convolutions(rules, Form, convolution)
register_averages(rules, Form, averaged)
register_interpolation(rules, Form, averaged)
register_maxima(rules, (Form,), _larger)
register_largest(rules, lambda x: x, largest_of_forms)
register_fixed_choices(rules, Form, mixed_values(Form, lambda x: x, operator.add, arranged))
