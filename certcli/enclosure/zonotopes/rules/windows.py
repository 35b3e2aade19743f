"""Convolutions, averages and maxima over windows, and maxima of two tensors."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from certcli.enclosure.zonotopes.ellipsoids import reduced
from certcli.enclosure.zonotopes.form import Form
from certcli.enclosure.zonotopes.pointwise import relu
from certcli.enclosure.zonotopes.rules.layers import stored
from certcli.enclosure.zonotopes.rules.shapes import constant_operand, mean, negative
from certcli.enclosure.zonotopes.table import ZonotopeContext, rules
from certcli.engine.averages import (
    MAX_WINDOWS,
    Separable,
    pair,
    register_averages,
    register_interpolation,
    window_places,
)
from certcli.engine.table import NoRule, RuleTable, with_attributes

CONVOLUTIONS: dict[int, Callable[..., Tensor]] = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}
_OPTIONS = "weight", "bias", "stride", "padding", "dilation", "groups"


def register_convolutions(table: RuleTable, values: Any, convolve: Callable[..., Any]) -> None:
    """Register (context, value, weight, bias, options of torch's function) -> value."""

    def rule(
        ctx: Any, x: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0,
        dilation: Any = 1, groups: int = 1,
    ) -> Any:  # fmt: skip
        if not isinstance(x, values) or any(isinstance(part, values) for part in (weight, bias)):
            raise NoRule("a convolution whose weight depends on the image")
        weight, bias = (None if part is None else stored(part, x.centre) for part in (weight, bias))
        if len(x.shape) != weight.dim() or x.shape[0] != 1:
            raise NoRule("a convolution of something other than one image")
        options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
        return convolve(ctx, x, weight, bias, options)

    table.function(torch.conv1d, torch.conv2d, torch.conv3d, F.conv1d, F.conv2d, F.conv3d)(rule)
    table.module(nn.Conv1d, nn.Conv2d, nn.Conv3d, when=lambda m: m.padding_mode == "zeros")(
        with_attributes(rule, *_OPTIONS)
    )


def convolution(
    ctx: ZonotopeContext, x: Form, weight: Tensor, bias: Tensor | None, options: dict[str, Any]
) -> Form:
    def run(t: Tensor, kernel: Tensor) -> Tensor:
        out = CONVOLUTIONS[kernel.dim()](t.flatten(0, 1), kernel, None, **options)
        return out.view(*t.shape[:2], *out.shape[1:])

    terms = weight[0].numel()
    out = x.worked().linear(lambda t: run(t, weight), lambda t: run(t, weight.abs()), terms=terms)
    return out if bias is None else out.shift(bias.view(-1, *[1] * (weight.dim() - 2)))


register_convolutions(rules, Form, convolution)


def averaged(ctx: ZonotopeContext, x: Form, averaging: Separable) -> Form:
    """Entry by entry a sum with a few roundings of its weights."""
    axes = len(averaging.matrices)
    if averaging.whole:
        return mean(ctx, x, tuple(range(-axes, 0)), keepdim=True)
    absolute = functools.partial(averaging, absolute=True)
    return x.worked().linear(averaging, absolute, terms=averaging.terms)


register_averages(rules, Form, averaged)
register_interpolation(rules, Form, averaged)


def larger_of(x: Form, y: Form) -> Form:
    """max(x, y) = x + max(y - x, 0), whose error later maps can cancel."""
    return reduced(x + relu(y + negative(x)).solid())


def register_maxima(table: RuleTable, values: Any, larger: Callable[..., Any]) -> None:
    """Register maxima and minima of two: larger(x, y, sign), of values or a value and a constant,
    for max(x, y) and sign -1 for -max(-x, -y).
    """

    def rule(sign: float) -> Callable[..., Any]:
        def apply(ctx: Any, x: Any, y: Any) -> Any:
            x, y = (x, y) if isinstance(x, values) else (y, x)
            other = y if isinstance(y, values) else constant_operand(y, x.centre, x.shape)
            if other.shape != x.shape and isinstance(y, values):
                raise NoRule("a maximum that repeats a tensor")
            return larger(x, other, sign)

        return apply

    for name, sign in (("maximum", 1.0), ("minimum", -1.0)):
        table.function(getattr(torch, name))(rule(sign))
        table.method(name)(rule(sign))


def _larger(x: Form, y: Form | Tensor, sign: float) -> Form:
    """Of a constant y: y + max(x - y, 0), or y - max(y - x, 0)."""
    if isinstance(y, Form):
        return larger_of(x, y) if sign > 0 else negative(larger_of(negative(x), negative(y)))
    above = x.shift(-y)
    return (relu(above) if sign > 0 else negative(relu(negative(above)))).shift(y)


register_maxima(rules, Form, _larger)


def register_max_pooling(table: RuleTable, pool: Callable[..., Any]) -> None:
    """Register max pooling of maps (b, c, h, w): (context, value, places (h', w', k)) -> value."""

    def rule(
        ctx: Any, x: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1,
        ceil_mode: bool = False, return_indices: bool = False,
    ) -> Any:  # fmt: skip
        if return_indices or len(x.shape) != 4:
            raise NoRule("max pooling that returns indices, or of other than maps")
        steps = kernel_size if stride in (None, [], ()) else stride
        kernel, *geometry = map(pair, (kernel_size, steps, padding, dilation))
        return pool(ctx, x, window_places(x.shape[-2:], kernel, *geometry, ceil_mode))

    table.function(F.max_pool2d, torch.max_pool2d)(rule)
    table.module(nn.MaxPool2d)(with_attributes(rule, *MAX_WINDOWS))


def max_pool(ctx: ZonotopeContext, x: Form, places: Tensor) -> Form:
    """The largest of the first two entries of each window, of this and the next, and so on."""

    def entry(number: int) -> Form:
        chosen = places[..., number].to(x.centre.device)
        return x.linear(lambda t: t.flatten(-2)[..., chosen])

    return functools.reduce(larger_of, map(entry, range(places.shape[-1])))


register_max_pooling(rules, max_pool)
