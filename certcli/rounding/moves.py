"""Operations that move, choose, copy or compare entries: errors go where the numbers go."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from certcli.rounding.algorithms import covers
from certcli.rounding.running_error import (
    Error,
    ExecutedOperation,
    Sorted,
    TensorPiece,
    WithError,
    rule,
)


def spread(op: ExecutedOperation, x: Any, entries: int) -> Tensor | None:
    """Return the size of x's error once x is copied along other axes to `entries` entries."""
    size = op.size(x)
    return None if size is None else size * math.sqrt(max(1.0, entries / max(1, x.numel())))


def rooted(sizes: Sequence[Tensor]) -> Tensor | None:
    """sqrt(sum of squares); None of nothing."""
    return torch.linalg.vector_norm(torch.stack(list(sizes))) if sizes else None


@rule(
    "view", "_unsafe_view", "_reshape_alias", "permute", "transpose", "t", "slice", "select", "squeeze", "unsqueeze",
    "clone", "roll", "flip", "rot90", "detach", "alias", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle",
    "diagonal", "tril", "triu", "lift_fresh", "constant_pad_nd", "diag_embed", "copy",
)  # fmt: skip
@covers("moves")
def moved(op: ExecutedOperation, x: Tensor, *others: Any, **named: Any) -> WithError:
    """Entries go to one place at most: a piece stays a piece. `copy` takes the second's."""
    value = op.run()
    note = op.note(x)
    if op.name == "copy":
        return value, spread(op, others[0], value.numel())
    size = op.size(x)
    return value, Error(size, note) if size is not None and isinstance(note, TensorPiece) else size


@rule("split", "split_with_sizes", "unbind")
@covers("moves")
def cut(op: ExecutedOperation, x: Tensor, *_: Any) -> WithError:
    value = op.run()
    size = op.size(x)
    if size is None:
        return value, None
    whole = object()
    return value, [Error(size, TensorPiece(whole, place, size)) for place in range(len(value))]


def _together(op: ExecutedOperation, tensors: Sequence[Tensor]) -> Tensor | None:
    """Error of several tensors: pieces of one tensor have, together, no more than it has."""
    wholes: dict[int, Tensor] = {}
    places = set()
    sizes = []
    for x in tensors:
        size = op.size(x)
        note = op.note(x)
        if size is None:
            continue
        if isinstance(note, TensorPiece) and (id(note.cut), note.place) not in places:
            places.add((id(note.cut), note.place))
            wholes[id(note.cut)] = note.whole
        else:
            sizes.append(size)
    return rooted([*sizes, *wholes.values()])


@rule("cat", "stack")
@covers("moves")
def joined(op: ExecutedOperation, tensors: Sequence[Tensor], *_: Any) -> WithError:
    """Of max(a, b) and min(a, b) the error of a and b: sorting has slope 1."""
    value = op.run()
    notes = [op.note(x) for x in tensors]
    if (
        len(notes) == 2
        and all(isinstance(note, Sorted) for note in notes)
        and notes[0].name != notes[1].name
    ):
        one, other = notes[0].pair
        if one is not other and notes[1].pair[0] is one and notes[1].pair[1] is other:
            return value, _together(op, (one, other))
    return value, _together(op, tensors)


@rule("maximum", "minimum")
@covers("moves")
def larger(op: ExecutedOperation, a: Tensor, b: Tensor) -> WithError:
    value = op.run()
    if op.exact:
        return value, None
    if a.shape == b.shape:
        size = _together(op, (a, b)) if a is not b else op.size(a)
        return value, Error(size, Sorted(op.name, (a, b)))  # type: ignore[arg-type]
    return value, rooted(
        [size for x in (a, b) if (size := spread(op, x, value.numel())) is not None]
    )


@rule("expand", "repeat")
@covers("moves")
def repeated(op: ExecutedOperation, x: Tensor, *counts: Any, **_: Any) -> WithError:
    value = op.run()
    return value, spread(op, x, value.numel())


@rule(
    "index", "gather", "index_select", "unfold", "im2col", "reflection_pad1d", "reflection_pad2d", "reflection_pad3d",
    "replication_pad1d", "replication_pad2d", "replication_pad3d", "upsample_nearest1d", "upsample_nearest2d",
    "upsample_nearest3d", "embedding",
)  # fmt: skip
@covers("moves")
def copied_to_places(op: ExecutedOperation, x: Tensor, *rest: Any, **named: Any) -> WithError:
    """sqrt of the most copies of an entry, counted by running it on the entries' numbers."""
    value = op.run()
    size = op.size(x)
    places = [*rest, *named.values()]
    flat = [y for group in places for y in (group if isinstance(group, (list, tuple)) else [group])]
    op.require(all(op.size(y) is None for y in flat), "places that depend on rounded numbers")
    if size is None:
        return value, None
    numbers = torch.arange(1, x.numel() + 1, device=x.device, dtype=torch.float64).view(x.shape)
    indices = op.call(numbers, *rest, **named).flatten().long()
    return value, size * math.sqrt(float(indices.bincount(minlength=2)[1:].max()))


@rule("where", "masked_fill")
@covers("moves")
def chosen(op: ExecutedOperation, *tensors: Any) -> WithError:
    """`where` keeps an entry of either, `masked_fill` an entry or number, by an exact mask."""
    mask = tensors[0] if op.name == "where" else tensors[1]
    op.require(op.size(mask) is None, "a choice by rounded numbers")
    value = op.run()
    others = [x for x in tensors if x is not mask]
    return value, rooted(
        [size for x in others if (size := spread(op, x, value.numel())) is not None]
    )


@rule("_to_copy")
@covers("moves")
def copied(op: ExecutedOperation, x: Tensor, *_: Any, **__: Any) -> WithError:
    """To a type that holds the numbers: floating point from integers, float64 from float32."""
    value = op.run()
    size = op.size(x)
    if size is not None:
        op.require(value.dtype == torch.float64, f"a rounded number becomes {value.dtype}")
        return value, size.to(value.device)
    if value.is_floating_point():
        op.require(
            not x.is_complex() and torch.equal(value.to(x), x), f"{x.dtype} becomes {value.dtype}"
        )
    return value, None


@rule("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full")
@covers("moves")
def made_of_shape(op: ExecutedOperation, x: Tensor, *numbers: Any, **_: Any) -> WithError:
    op.require(
        not any(isinstance(number, Tensor) for number in numbers), "a number that may be rounded"
    )
    return op.run(), None


@rule("_local_scalar_dense")
@covers("moves")
def read_back(op: ExecutedOperation, x: Tensor) -> WithError:
    op.require(op.size(x) is None, "a rounded number is read back into Python")
    return op.run(), None


@rule("relu", "abs", "neg", "clamp", "clamp_min", "clamp_max", "hardtanh")
@covers("moves")
def passed_on(op: ExecutedOperation, x: Tensor, *limits: Any, **named: Any) -> WithError:
    """Slope 1 and no rounding."""
    value = op.run()
    op.require(
        all(op.size(limit) is None for limit in [*limits, *named.values()]),
        "limits that are rounded",
    )
    return value, spread(op, x, value.numel())


@rule("amax", "amin")
@covers("moves")
def largest(op: ExecutedOperation, x: Tensor, *_: Any, **__: Any) -> WithError:
    return op.run(), op.size(x)


@rule("max", "min", "sort", "adaptive_max_pool2d", "adaptive_max_pool3d", "max_pool2d_with_indices",
      "max_pool3d_with_indices")  # fmt: skip
@covers("moves")
def with_places(op: ExecutedOperation, x: Tensor, *options: Any, **named: Any) -> WithError:
    """Result 2 is places, which rounding may change. An entry may lie in several windows."""
    value = op.run()
    size = op.size(x)
    op.require(not any(isinstance(y, Tensor) for y in options), "two tensors")
    if size is None or isinstance(value, Tensor):
        return value, size
    windows = 1.0
    if op.name.startswith("adaptive"):
        windows = windows_of_entry(x.shape, options[0])
    elif "pool" in op.name:
        plain = len(options) < 4 or options[3] in (1, [1] * len(options[3]))
        kernel = list(options[0])
        if len(kernel) == 1:  # one number for all axes
            kernel *= 3 if "3d" in op.name else 2
        windows = overlap(kernel, options[1] if len(options) > 1 and options[1] else kernel, plain)
    return value, [size * math.sqrt(windows), torch.full_like(size, torch.inf)]


def overlap(kernel: Sequence[int], stride: Sequence[int], plain: bool = True) -> float:
    """Return the largest number of windows that an entry lies in; plain: no dilation."""
    if not plain:
        return float(math.prod(kernel))
    steps = list(stride) * (len(kernel) if len(stride) == 1 else 1)
    return float(math.prod(-(-k // s) for k, s in zip(kernel, steps, strict=True)))


def windows_of_entry(sizes: Sequence[int], counts: Sequence[int]) -> float:
    """Return the same of adaptive pooling: windows overlap unless they divide the size."""
    sizes = list(sizes)[-len(counts) :]
    return float(
        math.prod(
            1 if s % c == 0 else 2 if c <= s else c for s, c in zip(sizes, counts, strict=True)
        )
    )
