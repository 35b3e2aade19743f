"""Limits on building a described network: no needless initialisation, nothing far too large."""

import contextlib
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from certcli.system.errors import ArchitectureError
from certcli.system.torch_modes import OperationMode

MOST_VALUES = 2**33  # of a new network: 32 GiB of float32
SPARE_VALUES = 2**26  # for values beside the parameters: position indices, window masks
# for computations: some constructors run their first layers once, to learn a shape
SPARE_WORK = 2**31
MOST_STEPS = 400_000
SPARE_STEPS = 4_000


class Building(OperationMode):
    """Skip random fills, with operations on their results, and count all values that constructors
    make.

    Skipped values are replaced later. Memory that is never written is never paged in, so building
    costs none. Tensors with a skipped fill stay alive until the mode ends, so that no other tensor
    gets their memory and is mistaken for them.

    Args:
        like: The tensors of the network. Values are counted before they are made; a few times more
            than these tensors hold are an ArchitectureError, since a few numbers in a file can
            describe more than a machine has.
    """

    _FILLS = frozenset(f"aten::{name}_" for name in ("normal", "uniform", "random", "trunc_normal"))
    _AFTERWARDS = frozenset(
        f"aten::{name}_" for name in ("erfinv", "mul", "add", "clamp", "div", "sub", "log")
    )
    _COMPARISONS = frozenset(("aten::lt", "aten::gt", "aten::le", "aten::ge"))

    def __init__(
        self, like: Mapping[str, Tensor] | None = None, *, initialise: bool = False
    ) -> None:
        super().__init__()
        self.unset: dict[int, Tensor] = {}
        self.initialise = initialise
        self.stored = None if like is None else sum(tensor.numel() for tensor in like.values())
        self.values = MOST_VALUES if self.stored is None else 8 * self.stored + SPARE_VALUES
        self.work = MOST_VALUES if self.stored is None else 64 * self.stored + SPARE_WORK
        self.steps = MOST_STEPS if like is None else SPARE_STEPS + 200 * len(like)

    def seen(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = func._schema.name
        if not self.initialise and args and isinstance(args[0], Tensor):
            if name in self._FILLS:
                self.unset[args[0].data_ptr()] = args[0]
                return args[0]
            if name in self._AFTERWARDS and args[0].data_ptr() in self.unset:
                return args[0]
            if name in self._COMPARISONS and args[0].data_ptr() in self.unset:
                # torch draws a truncated normal until all values are in range, which unset memory
                # may never be
                return torch.zeros((), dtype=torch.bool, device=args[0].device)
        if all(result.alias_info is None for result in func._schema.returns):
            self._take(_values_made(name, args), any(isinstance(part, Tensor) for part in args))
        return func(*args, **kwargs)

    def _take(self, values: int, computed: bool) -> None:
        self.steps -= 1
        self.work -= values
        if not computed:
            self.values -= values
        if min(self.steps, self.work, self.values, self.values - values if computed else 0) < 0:
            about = (
                "any network here may have"
                if self.stored is None
                else f"the {self.stored:,} values that are stored"
            )
            raise ArchitectureError(
                f"the architecture describes a network much larger than {about}",
                "check --arch and --arch-arg",
            )


_POINTWISE = frozenset(
    f"aten::{name}"
    for name in (
        *(
            "add",
            "sub",
            "rsub",
            "mul",
            "div",
            "pow",
            "eq",
            "ne",
            "lt",
            "gt",
            "le",
            "ge",
            "where",
            "maximum",
            "minimum",
        ),
        *(
            "remainder",
            "floor_divide",
            "fmod",
            "atan2",
            "hypot",
            "bitwise_and",
            "bitwise_or",
            "bitwise_xor",
        ),
        *("logical_and", "logical_or", "logical_xor", "mm"),  # mm: (n, 1) times (1, m)
    )
)


def _values_made(name: str, args: tuple[Any, ...]) -> int:
    """Return how many values an operation makes, by a size argument or by broadcasting."""
    shapes = [tuple(part.shape) for part in args if isinstance(part, Tensor)]
    if shapes:
        largest = max(map(math.prod, shapes))
        if len(shapes) > 1 and name in _POINTWISE:
            with contextlib.suppress(RuntimeError):  # mm of shapes that do not broadcast
                largest = max(largest, math.prod(torch.broadcast_shapes(*shapes)))
        sizes = [part for part in args if isinstance(part, (list, tuple)) and part]
        sizes = [part for part in sizes if all(isinstance(side, int) for side in part)]
        return max([largest, *(math.prod(map(abs, part)) for part in sizes)])
    if args and isinstance(args[0], (list, tuple)):
        if all(isinstance(side, int) for side in args[0]):
            return math.prod(args[0])
        return sum(part.numel() for part in args[0] if isinstance(part, Tensor))
    numbers = [
        abs(part) for part in args if isinstance(part, (int, float)) and not isinstance(part, bool)
    ]
    return int(max(numbers, default=1))
