"""What operations that choose entries say in every local domain, and convolutions, written once
over its values.
"""

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from certcli.enclosure.operations import (
    Settle,
    axes_of,
    constant_operand,
    repeated,
    shape_of,
    stored,
)
from certcli.enclosure.zonotopes.needed_tokens import chosen_token
from certcli.engine.averages import MAX_WINDOWS, adaptive_windows, pair, window_places
from certcli.engine.table import NoRule, RuleTable, with_attributes
from certcli.engine.walk import Constant
from certcli.system.errors import raise_if

CONVOLUTIONS: dict[int, Callable[..., Tensor]] = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}


def register_convolutions(table: RuleTable, values: Any, convolve: Callable[..., Any]) -> None:
    """Register (context, value, weight, bias, options of torch's function) -> value."""

    def rule(
        ctx: Any, x: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0,
        dilation: Any = 1, groups: int = 1,
    ) -> Any:  # fmt: skip
        raise_if(
            not isinstance(x, values) or any(isinstance(part, values) for part in (weight, bias)),
            NoRule,
            "a convolution whose weight depends on the image",
        )
        weight, bias = (stored(part, x.centre) for part in (weight, bias))
        raise_if(
            len(x.shape) != weight.dim() or x.shape[0] != 1,
            NoRule,
            "a convolution of something other than one image",
        )
        options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
        return convolve(ctx, x, weight, bias, options)

    table.function(torch.conv1d, torch.conv2d, torch.conv3d, F.conv1d, F.conv2d, F.conv3d)(rule)
    table.module(nn.Conv1d, nn.Conv2d, nn.Conv3d, when=lambda m: m.padding_mode == "zeros")(
        with_attributes(rule, "weight", "bias", "stride", "padding", "dilation", "groups")
    )


def register_maxima(table: RuleTable, values: Any, larger: Callable[..., Any]) -> None:
    """Register maxima and minima of two: larger(ctx, x, y, sign), of values or a value and a
    constant, for max(x, y) and sign -1 for -max(-x, -y).
    """

    def rule(sign: float) -> Callable[..., Any]:
        def apply(ctx: Any, x: Any, y: Any) -> Any:
            raise_if(
                not isinstance(y, (*values, Constant)), NoRule, "a maximum that returns indices"
            )
            x, y = (x, y) if isinstance(x, values) else (y, x)
            other = y if isinstance(y, values) else constant_operand(y, x.centre, x.shape)
            raise_if(
                other.shape != x.shape and isinstance(y, values),
                NoRule,
                "a maximum that repeats a tensor",
            )
            return larger(ctx, x, other, sign)

        return apply

    for names, sign in ((("maximum", "max"), 1.0), (("minimum", "min"), -1.0)):
        table.function(*(getattr(torch, name) for name in names))(rule(sign))
        table.method(*names)(rule(sign))


def register_largest(table: RuleTable, settle: Settle, pool: Callable[..., Any]) -> None:
    """Register pool(ctx, value, places (*t, k), sign): of each k entries at flat places the largest,
    with sign -1 the least.
    """

    def max_pool(
        ctx: Any, x: Any, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1,
        ceil_mode: bool = False, return_indices: bool = False,
    ) -> Any:  # fmt: skip
        raise_if(
            return_indices or len(x.shape) != 4,
            NoRule,
            "max pooling that returns indices, or of other than maps",
        )
        steps = kernel_size if stride in (None, [], ()) else stride
        kernel, *geometry = map(pair, (kernel_size, steps, padding, dilation))
        inside = window_places(x.shape[-2:], kernel, *geometry, ceil_mode)
        maps = _flat_places(x.shape)[..., :1, :1, None]
        return pool(ctx, settle(x), maps + inside, 1.0)

    table.function(F.max_pool2d, torch.max_pool2d)(max_pool)
    table.module(nn.MaxPool2d)(with_attributes(max_pool, *MAX_WINDOWS))

    def adaptive(axes: int) -> Callable[..., Any]:
        def rule(ctx: Any, x: Any, output_size: Any, return_indices: bool = False) -> Any:
            raise_if(return_indices, NoRule, "max pooling that returns indices")
            counts = output_size if isinstance(output_size, (list, tuple)) else [output_size] * axes
            places = _flat_places(x.shape)
            for axis, count in enumerate(counts, len(x.shape) - axes):
                windows = adaptive_windows(x.shape[axis], count or x.shape[axis])
                # the last entry of a shorter window stands there again
                index = torch.tensor([
                    [min(window.start + i, window.stop - 1) for i in range(max(map(len, windows)))] for window in windows
                ])  # fmt: skip
                split = places.index_select(axis, index.flatten()).unflatten(axis, index.shape)
                places = split.movedim(axis + 1, -1)
            return pool(ctx, settle(x), places.flatten(len(x.shape)), 1.0)

        return rule

    table.function(F.adaptive_max_pool1d)(adaptive(1))
    table.function(F.adaptive_max_pool2d)(adaptive(2))
    table.module(nn.AdaptiveMaxPool2d)(with_attributes(adaptive(2), "output_size"))

    for name, sign in (("amax", 1.0), ("amin", -1.0)):
        table.function(getattr(torch, name))(_largest_along(settle, pool, sign))
        table.method(name)(_largest_along(settle, pool, sign))


def _largest_along(settle: Settle, pool: Callable[..., Any], sign: float) -> Callable[..., Any]:
    def rule(ctx: Any, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
        dims = axes_of(x.shape, dim, "maximum")
        sizes = [1 if d in dims else size for d, size in enumerate(x.shape)]
        shape = sizes if keepdim else [size for d, size in enumerate(sizes) if d not in dims]
        raise_if(len(shape) < 2, NoRule, "a maximum of all of an image")
        places = _flat_places(x.shape).movedim(dims, [*range(-len(dims), 0)])
        return pool(ctx, settle(x), places.reshape(*shape, -1), sign)

    return rule


def _flat_places(shape: tuple[int, ...]) -> Tensor:
    """Return the flat place of each entry."""
    return torch.arange(math.prod(shape)).view(shape)


def register_fixed_choices(table: RuleTable, values: Any, mixed: Callable[..., Any]) -> None:
    """Register choices by a constant mask, of two values or a value and finite numbers: mixed(ctx,
    x, share, y, 1 - share), shares of 0 and 1 of the result's shape.
    """

    @table.function(torch.where)
    def where(ctx: Any, mask: Any, x: Any, y: Any) -> Any:
        raise_if(isinstance(mask, values), NoRule, "a choice that depends on the image")
        kind = torch.as_tensor(mask.tensor if isinstance(mask, Constant) else mask).dtype
        raise_if(kind != torch.bool, NoRule, "a choice by numbers: a 2 would count twice")
        centre = (x if isinstance(x, values) else y).centre
        taken = constant_operand(mask, centre, shape_of(mask, x, y)).expand(shape_of(mask, x, y))
        return mixed(ctx, x, taken, y, 1 - taken)

    @table.method("where")
    def where_method(ctx: Any, x: Any, mask: Any, y: Any) -> Any:
        return where(ctx, mask, x, y)

    @table.function(torch.masked_fill)
    @table.method("masked_fill", "masked_fill_")
    def masked_fill(ctx: Any, x: Any, mask: Any, value: Any) -> Any:
        return where(ctx, mask, value, x)


def mixed_values(
    values: Any, settle: Settle, add: Callable[[Any, Any], Any], arranged: Callable[..., Any]
) -> Callable[..., Any]:
    """Return `mixed` of `register_fixed_choices` for values that can be added."""

    def mixed(ctx: Any, *parts: Any) -> Any:
        pairs = list(zip(parts[::2], parts[1::2], strict=True))
        shape = tuple(parts[1].shape)
        moving = [
            repeated(settle(part), shape, arranged).scale(share)
            for part, share in pairs
            if isinstance(part, values)
        ]
        total = functools.reduce(add, moving)
        for part, share in pairs:
            if not isinstance(part, values):
                filled = constant_operand(part, total.centre, shape) * share
                raise_if(
                    not bool(filled.isfinite().all()), NoRule, "filling with an infinite number"
                )
                total = total.shift(filled)
        return total

    return mixed


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


def register_types(table: RuleTable) -> None:
    """Register in a domain's table the calls that leave a tensor of float64 as it is."""

    @table.function(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d)
    def at_rest(
        ctx: Any, x: Any, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Any:
        """Dropout in eval mode."""
        raise_if(training and p, NoRule, "dropout in training mode")
        return x

    @table.method("to", "type_as")
    def same(ctx: Any, x: Any, *types: Any, **named: Any) -> Any:
        """Called with float64, or with a tensor of it, alone."""
        targets = [*types, *named.values()]
        raise_if(
            not targets
            or any(
                getattr(kind, "dtype", kind) != torch.float64 and not hasattr(kind, "centre")
                for kind in targets
            ),
            NoRule,
            "a change of a tensor's type or place",
        )
        return x
