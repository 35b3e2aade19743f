"""Operations that move, repeat or drop the entries of one tensor: one list of names for all domains.

What a domain needs to know of one is where each entry goes. It is run on numbers of the entries for
that, so no argument of any spelling is read here or in a domain.
"""

import functools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from certcli.engine.table import NoRule, RuleTable
from certcli.engine.walk import Constant
from certcli.system.errors import raise_if

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Move:
    """x -> function(x, *args, **named), whose entries are entries of x or `filled`, beside them.

    Constants among the arguments choose places.
    """

    function: Callable[..., Any] = field(compare=False)
    args: tuple[Any, ...] = field(default=(), compare=False)
    named: dict[str, Any] = field(default_factory=dict, compare=False)
    filled: float = 0.0
    key: Any = field(init=False)

    def __post_init__(self) -> None:
        """Moves of equal arguments are equal; constants are compared as objects."""
        text = repr((self.args, self.named))
        constants = constants_in((self.args, self.named))
        object.__setattr__(self, "key", object() if constants else (self.function, text))

    def __call__(self, x: Tensor) -> Any:
        """Return the tensor, or several, with 0 where `filled` stands."""
        args, named = replaced(
            (self.args, self.named),
            lambda part: part.tensor.to(x.device) if isinstance(part, Constant) else part,
        )
        return self.function(x, *args, **named)

    def places(self, shape: Shape) -> list[Tensor]:
        """Return which entry of x, in a row, each entry of each result is; -1 beside x."""
        numbers = torch.arange(1, math.prod(shape) + 1).view(shape)
        # these kernels know no integers
        results = self(numbers.double() if self.function in (F.pad, F.unfold) else numbers)
        return [part.long() - 1 for part in ([results] if isinstance(results, Tensor) else results)]

    def stays(self, shape: Shape) -> bool:
        """Tell whether every result is x itself."""
        return not self.filled and _stays_put(self, shape)

    def several(self, shape: Shape) -> bool:
        """Tell whether the results are a list."""
        return _several(self, shape)


@functools.lru_cache(maxsize=512)
def _several(move: Move, shape: Shape) -> bool:
    return not isinstance(move(torch.zeros(shape)), Tensor)


@functools.lru_cache(maxsize=512)
def _stays_put(move: Move, shape: Shape) -> bool:
    return all(
        tuple(part.shape) == shape and torch.equal(part.flatten(), torch.arange(part.numel()))
        for part in move.places(shape)
    )


def leaves(x: Any, kind: Any) -> list[Any]:
    """Return what is of a kind among nested arguments, in order."""
    if isinstance(x, dict):
        x = list(x.values())
    if isinstance(x, slice):
        x = [x.start, x.stop, x.step]
    if isinstance(x, (list, tuple)):
        return [leaf for part in x for leaf in leaves(part, kind)]
    return [x] if isinstance(x, kind) else []


def constants_in(x: Any) -> list[Tensor]:
    """Return the constant tensors among arguments."""
    return [constant.tensor for constant in leaves(x, Constant)]


def replaced(x: Any, change: Callable[[Any], Any]) -> Any:
    """Return nested arguments with each leaf changed."""
    if isinstance(x, dict):
        return {name: replaced(part, change) for name, part in x.items()}
    if isinstance(x, (list, tuple)) and not isinstance(x, torch.Size):
        return type(x)(replaced(part, change) for part in x)
    return change(x)


Describe = Callable[..., Move]
_LIST: list[tuple[Describe, tuple[Any, ...], tuple[str, ...]]] = []


def _register_move(
    *functions: Any, methods: tuple[str, ...] = ()
) -> Callable[[Describe], Describe]:
    def register(describe: Describe) -> Describe:
        _LIST.append((describe, functions, methods))
        return describe

    return register


def _name_move(function: Any, *functions: Any, methods: tuple[str, ...] = ()) -> None:
    """Add an operation that runs `function` with the arguments that it is called with."""
    _register_move(*functions, methods=methods)(
        lambda x, *args, **named: Move(function, args, named)
    )


# columns are not laid out as the traced tensor was: a view of it may need a copy
_name_move(Tensor.reshape, torch.reshape, methods=("reshape", "view"))
for _name in (
    "flatten", "squeeze", "unsqueeze", "permute", "transpose", "movedim", "swapaxes", "unbind",
    "chunk", "split", "tensor_split", "split_with_sizes", "narrow", "select", "roll", "flip", "repeat_interleave", "tile",
    "broadcast_to", "index_select", "clone",
):  # fmt: skip
    # a method takes what its function takes, and more
    _name_move(getattr(Tensor, _name), getattr(torch, _name), methods=(_name,))
# names of the same kernels, which run on columns only under the first
_name_move(Tensor.movedim, torch.moveaxis, methods=("moveaxis",))
_name_move(Tensor.transpose, torch.swapdims, methods=("swapdims",))
for _name in ("contiguous", "detach", "unflatten", "t", "expand", "repeat", "unfold"):
    _name_move(getattr(Tensor, _name), methods=(_name,))
for _function in (
    F.unfold,
    F.pixel_shuffle,
    F.pixel_unshuffle,
    F.channel_shuffle,
    operator.getitem,
):
    _name_move(_function, _function)


@_register_move(methods=("view_as", "reshape_as"))
def _shaped_like(x: Any, other: Any) -> Move:
    return Move(Tensor.reshape, (_shape_of_other(other),))


@_register_move(methods=("expand_as",))
def _repeated_like(x: Any, other: Any) -> Move:
    return Move(Tensor.expand, (_shape_of_other(other),))


def _shape_of_other(x: Any) -> Shape:
    return tuple(x.tensor.shape if isinstance(x, Constant) else x.shape)


@_register_move(getattr)
def _transposed_attribute(x: Any, name: str) -> Move:
    """x.T and x.mT."""
    raise_if(
        name != "mT" and (name != "T" or len(x.shape) != 2),
        NoRule,
        f"no theorem for the attribute '{name}'",
    )
    return Move(torch.transpose, (-2, -1))


@_register_move(F.pad)
def _padding_move(x: Any, pad: Any, mode: str = "constant", value: Any = None) -> Move:
    """Constants around a tensor (or a crop, for negative numbers), or entries of it."""
    if value is not None and not (isinstance(value, (int, float)) and math.isfinite(value)):
        raise NoRule(f"padding with {value}")
    if mode == "constant":
        return Move(F.pad, (tuple(pad),), filled=float(value or 0.0))
    raise_if(
        mode not in ("reflect", "replicate", "circular") or len(x.shape) != 4,
        NoRule,
        f"padding mode {mode}",
    )
    return Move(F.pad, (tuple(pad), mode))


FUNCTIONS = tuple(function for _, functions, _ in _LIST for function in functions)
METHODS = tuple(method for _, _, methods in _LIST for method in methods)
"""All names."""


def _shape(x: Any) -> Shape:
    return tuple(x.shape)


def register_moves(
    table: RuleTable,
    values: type | tuple[type, ...],
    transfer: Callable[[Any, Any, Move], Any],
    shape_of: Callable[[Any], Shape] = _shape,
) -> None:
    """Register all names in a domain's table. Of results that are x itself its value is returned.

    Args:
        values: the types of the domain's values.
        transfer: (context, value, move) -> value(s).
        shape_of: the shape of the tensor that was traced where a value stands for several.
    """
    for describe, functions, methods in _LIST:
        rule = _move_rule(describe, values, transfer, shape_of)
        table.function(*functions)(rule)
        table.method(*methods)(rule)


def _move_rule(
    describe: Describe, values: Any, transfer: Any, shape_of: Callable[[Any], Shape]
) -> Any:
    def depends(x: Any) -> bool:
        parts = [x.start, x.stop, x.step] if isinstance(x, slice) else x
        several = isinstance(parts, (list, tuple))
        return any(map(depends, parts)) if several else isinstance(x, values)

    def rule(ctx: Any, x: Any, *args: Any, **named: Any) -> Any:
        if isinstance(x, (list, tuple)) and describe is _LIST_ITEM:
            return x[args[0]]
        others = (*args, *named.values())
        described = describe(x, *args, **named)
        if not isinstance(x, values):
            raise_if(
                not isinstance(x, Constant),
                NoRule,
                "a rearrangement of something else than one tensor",
            )
            return Constant(described(x.tensor))
        raise_if(
            depends((described.args, *described.named.values())),
            NoRule,
            "a rearrangement by a tensor that depends on the image",
        )
        if any(isinstance(other, torch.dtype) for other in others):
            raise NoRule("a view as another dtype")
        shape = shape_of(x)
        if described.stays(shape):
            return [x] if described.several(shape) else x
        return transfer(ctx, x, described)

    return rule


_LIST_ITEM = next(describe for describe, functions, _ in _LIST if operator.getitem in functions)
