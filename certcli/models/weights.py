"""A network is built within the limits of its tensors, which become its weights: all and no others.

Copies beyond `IN_MEMORY` bytes are memory-mapped files. A file's name is removed once it is mapped,
and its space is reserved: nothing is left behind, and no later write fails. TMPDIR names the folder;
where it has no space, copies are made in memory.
"""

import contextlib
import math
import os
import tempfile
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from certcli.checkpoint.file import FLOATS, INTEGERS, Checkpoint
from certcli.models.converters.wrapping import first_names
from certcli.system.errors import ArchitectureError, UsageError, one_line, raise_if
from certcli.system.memory import free_bytes
from certcli.system.torch_modes import OperationMode

MISFITS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Errors of torch and Python where a tensor is missing, or does not fit an operation."""
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


FITTING_HINT = "name the architecture with --arch (and --arch-arg key=value), or put timm's config.json beside the file"
"""The hint where nothing but the misfit is known."""


def load_weights(
    net: nn.Module,
    tensors: Mapping[str, Tensor],
    *,
    copy: bool = False,
    dtype: torch.dtype | None = None,
) -> None:
    """Set the weights of `net` to exactly these tensors; ArchitectureError names those that do not
    fit.

    Args:
        copy: Copy all tensors. Without it, the network shares those whose type need not change.
    """
    require_fitting(net, tensors)
    # half precision is widened, and single beside double. This is exact: bound and forward pass use
    # the same numbers
    double = any(value.dtype == torch.float64 for value in tensors.values())
    wide = dtype or (torch.float64 if double else torch.float32)
    dtypes = {
        name: wide if value.is_floating_point() else value.dtype for name, value in tensors.items()
    }
    copied = {name: value for name, value in tensors.items() if copy or value.dtype != dtypes[name]}
    net.load_state_dict({**tensors, **copies(copied, dtypes)}, strict=True, assign=True)


def require_fitting(net: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Raise ArchitectureError unless `net` has exactly these tensors."""
    why = misfit(net, tensors)
    raise_if(why, ArchitectureError, why, FITTING_HINT)


def misfit(net: nn.Module, tensors: Mapping[str, Tensor]) -> str:
    """Return where `net` has other tensors than these, "" where it has exactly these."""
    expected = net.state_dict()
    missing = sorted(expected.keys() - tensors.keys())
    surplus = sorted(tensors.keys() - expected.keys())
    problems = [f"missing {first_names(missing)}"] if missing else []
    problems += [f"unexpected {first_names(surplus)}"] if surplus else []
    both = [(name, tensors[name], expected[name]) for name in sorted(expected) if name in tensors]
    problems += [
        f"'{name}' is {_value_kind(value)} where the architecture has {_value_kind(expected)} values"
        for name, value, expected in both
        if _value_kind(value) != _value_kind(expected)
    ][:3]
    shapes = [
        f"'{name}' is {tuple(value.shape)}, the architecture wants {tuple(expected.shape)}"
        for name, value, expected in both
        if value.shape != expected.shape
    ]
    problems += shapes[:3] + ([f"and {len(shapes) - 3} more shapes"] if len(shapes) > 3 else [])
    return f"architecture and tensors disagree: {'; '.join(problems)}" if problems else ""


def require_computed(net: nn.Module, stored: Mapping[str, Tensor]) -> None:
    """Raise ArchitectureError unless tensors that the network computes itself are, in the file,
    what it computes.

    A difference is allowed up to four roundings of the file's type, which logarithms may differ by.
    """
    buffers = dict(net.named_buffers())
    for name, value in stored.items():
        raise_if(
            name not in buffers,
            ArchitectureError,
            f"architecture and tensors disagree: unexpected '{one_line(name)}'",
        )
        expected = buffers[name].double().flatten()
        rounding = 4 * torch.finfo(value.dtype).eps if value.dtype.is_floating_point else 0.0
        allowed = rounding * float(expected.abs().max()) if len(expected) else 0.0
        same = value.numel() == len(expected)
        raise_if(
            not (same and torch.allclose(value.double().flatten(), expected, rtol=0, atol=allowed)),
            ArchitectureError,
            f"'{one_line(name)}' is not the one that timm's network computes: another window, or an edited file",
        )


def _value_kind(tensor: Tensor) -> str:
    """Return the kind of a tensor's values; weights are floating, indices integer, masks boolean."""
    if tensor.dtype in FLOATS:
        return "floating"
    if tensor.dtype == torch.bool:
        return "boolean"
    return "integer" if tensor.dtype in INTEGERS else str(tensor.dtype).removeprefix("torch.")


def headless(source: str) -> ArchitectureError:
    return ArchitectureError(
        f"{one_line(source)} has no classifier: its network ends in features",
        "--features bounds them (certvit lipschitz); other commands need a classifier: train one "
        "on the features with timm or transformers",
    )


def require_classifier(checkpoint: Checkpoint, source: str) -> None:
    """Raise ArchitectureError for a network that ends in features."""
    if not checkpoint.record.classes:
        raise headless(source)


def require_features(checkpoint: Checkpoint, source: str) -> None:
    """Raise UsageError for a network that ends in a classifier."""
    raise_if(
        checkpoint.record.classes,
        UsageError,
        f"{one_line(source)} has a classifier of {checkpoint.record.classes} classes, and --features is for networks "
        "without",
        "leave out --features",
    )


_OWN = (Tensor, nn.Parameter)


def foreign_tensor(net: nn.Module) -> str | None:
    """Name the first tensor of a network that is of another type, or whose entries do not lie in rows.

    A theorem reads the entries of a weight. A type of another library may store something else, or
    compute something else of them: a quantised tensor, say.
    """
    for path, module in net.named_modules():
        for space in (module._parameters, module._buffers, vars(module)):
            for name, value in space.items():
                if isinstance(value, Tensor) and not is_torch_tensor(value):
                    kind = type(value).__name__ if type(value) not in _OWN else str(value.layout)
                    return f"'{f'{path}.{name}'.lstrip('.')}' ({kind})"
    return None


def is_torch_tensor(value: Tensor) -> bool:
    """Tell whether a tensor is torch's own, with its entries in rows."""
    return type(value) in _OWN and value.layout == torch.strided


IN_MEMORY = 2**30
"""Bytes up to which all copies of a network are made in memory, if they take at most a quarter of
the free memory."""

SPARED = 2**28
"""Bytes that a `Spool` keeps in memory. Lower than IN_MEMORY: its tensors are written once,
trained weights often."""

_SMALL = 2**16
"""Bytes below which a tensor is never mapped."""


def copies(tensors: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
    """Return copies of the tensors, each in its dtype."""
    total = sum(value.numel() * dtypes[name].itemsize for name, value in tensors.items())
    copy = _copied_in_memory if total <= min(IN_MEMORY, free_bytes() / 4) else _mapped_copy
    return {name: copy(value, dtypes[name]) for name, value in tensors.items()}


class Spool:
    """Keep tensors that come one by one: the first SPARED bytes in memory, all later ones
    mapped."""

    def __init__(self) -> None:
        self.held = 0

    def keep(self, value: Tensor) -> Tensor:
        """Return the tensor, or a mapped copy of it."""
        self.held += value.nbytes
        return value if self.held <= SPARED else _mapped_copy(value, value.dtype)


def _copied_in_memory(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a copy of the tensor in this dtype, in memory, its entries in rows."""
    return value.to(dtype, copy=True, memory_format=torch.contiguous_format)


def _mapped_copy(value: Tensor, dtype: torch.dtype) -> Tensor:
    size = value.numel() * dtype.itemsize
    if size <= _SMALL or value.device.type != "cpu":
        return _copied_in_memory(value, dtype)
    try:
        with tempfile.NamedTemporaryFile(prefix="certvit-") as file:
            os.posix_fallocate(file.fileno(), 0, size)
            flat = torch.from_file(file.name, shared=True, size=value.numel(), dtype=dtype)
    except (
        OSError,
        AttributeError,
        RuntimeError,
    ):  # no room, no such call on this system, no such mapping
        return _copied_in_memory(value, dtype)
    return flat.view(value.shape).copy_(value)
