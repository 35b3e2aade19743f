"""Operators that move entries: reshapes, slices, joins, sums over axes."""

import math
import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional

from certcli.models.onnx.call import READERS, Call, permuted, reads_operators
from certcli.models.onnx.program import shape_of

_FAR = 2**62
"""A slice's end for "to the last one", within int64."""


@reads_operators("Reshape")
def read_reshape(call: Call) -> Any:
    sizes = call.numbers(1) or []
    whole = call.shape()
    if not call.attribute("allowzero", 0):
        sizes = [whole[place] if size == 0 else size for place, size in enumerate(sizes)]
    return _reshape_images(call, call.value(), sizes)


def _reshape_images(call: Call, value: Any, sizes: list[int]) -> Any:
    """Of a node the first axis is the batch, or begins with it: the file's 1 is any number."""
    whole = math.prod(shape_of(value))
    if isinstance(value, fx.Node) and sizes:
        rest = math.prod(size for size in sizes if size != -1)
        sizes = [whole // rest if size == -1 else size for size in sizes]
        call.require(math.prod(sizes) == whole, f"{whole} values in the shape {sizes}")
        sizes = [-1, *sizes[1:]]
    return call.apply("reshape", value, sizes)


@reads_operators("Flatten")
def read_flatten(call: Call) -> Any:
    sizes = call.shape()
    axis = call.attribute("axis", 1) % (len(sizes) + 1)
    return _reshape_images(call, call.value(), [math.prod(sizes[:axis]), math.prod(sizes[axis:])])


@reads_operators("Transpose")
def read_transpose(call: Call) -> Any:
    rank = len(call.shape())
    return permuted(call, call.value(), list(call.attribute("perm", range(rank)[::-1])))


@reads_operators("Squeeze", "Unsqueeze")
def read_squeeze(call: Call) -> Any:
    axes = call.listed("axes", 1, 13)
    sizes = list(call.shape())
    if axes is None:
        call.require(call.op == "Squeeze", "axes that are left out")
        axes = [place for place, size in enumerate(sizes) if size == 1]
    rank = len(sizes) + (len(axes) if call.op == "Unsqueeze" else 0)
    call.require(all(-rank <= axis < rank for axis in axes), f"axes {axes} of {rank}")
    result = call.value()
    places = sorted({axis % rank for axis in axes}, reverse=call.op == "Squeeze")
    for axis in places:
        call.require(call.op == "Unsqueeze" or sizes[axis] == 1, f"axis {axis} is not 1 long")
        result = call.apply(call.op.lower(), result, axis)
    return result


@reads_operators("Split")
def read_split(call: Call) -> Any:
    sizes = call.shape()
    axis = call.axis(0, len(sizes))
    count = call.attribute("num_outputs", call.outputs)
    call.require(0 < count == call.outputs, "another number of parts")
    parts = call.listed("split", 1, 13) or [-(-sizes[axis] // count)] * count
    parts[-1] += sizes[axis] - sum(parts) if call.opset >= 18 else 0
    call.require(sum(parts) == sizes[axis] and min(parts) >= 0, f"parts {parts} of {sizes[axis]}")
    starts = [sum(parts[:place]) for place in range(len(parts))]
    return [
        call.apply("narrow", call.value(), axis, start, part)
        for start, part in zip(starts, parts, strict=True)
    ]


@reads_operators("Slice")
def read_slice(call: Call) -> Any:
    starts, ends, axes, steps = (
        call.listed(name, place, 10)
        for place, name in enumerate(("starts", "ends", "axes", "steps"), 1)
    )
    sizes = call.shape()
    call.require(starts is not None and ends is not None, "no beginning or end")
    starts, ends = starts or [], ends or []
    axes = list(range(len(starts))) if axes is None else axes
    result = call.value()
    for start, end, axis, step in zip(starts, ends, axes, steps or [1] * len(starts), strict=True):
        places = range(
            *slice(max(start, -_FAR), min(max(end, -_FAR), _FAR), step).indices(sizes[axis])
        )
        if step == 1 and len(places) < sizes[axis]:
            result = call.apply("narrow", result, axis % len(sizes), places.start, len(places))
        elif step > 0 and step != 1:
            index = (*[slice(None)] * (axis % len(sizes)), slice(places.start, places.stop, step))
            result = call.apply(operator.getitem, result, index)
        elif step < 0:
            result = call.apply("index_select", result, axis, torch.tensor(places))
    return result


@reads_operators("Gather")
def read_gather(call: Call) -> Any:
    index = call.tensor(1)
    sizes = call.shape()
    axis = call.axis(0, len(sizes))
    size = sizes[axis]
    within = not index.is_floating_point() and bool(((index >= -size) & (index < size)).all())
    call.require(within, f"an index outside of {size}")
    index = index % max(size, 1)
    if index.dim() == 0:
        return call.apply(
            operator.getitem, call.value(), (*[slice(None)] * axis, int(index.item()))
        )
    result = call.apply("index_select", call.value(), axis, index.reshape(-1))
    if index.dim() == 1:
        return result
    return _reshape_images(call, result, [*sizes[:axis], *index.shape, *sizes[axis + 1 :]])


@reads_operators("Concat")
def read_concatenation(call: Call) -> Any:
    values = [call.value(place) for place in range(len(call.inputs))]
    rank = len(shape_of(values[0]))
    axis = call.axis(1, rank)
    first = next((each for each in values if isinstance(each, fx.Node)), None)
    if first is not None and any(isinstance(each, Tensor) for each in values):
        call.require(axis != 0, "constants beside images")
        batch = call.apply("size", first, 0)
        whole = (-1,) * (rank - 1)
        values = [
            call.apply("expand", each, batch, *whole) if isinstance(each, Tensor) else each
            for each in values
        ]
    return call.apply(torch.cat, values, axis)


@reads_operators("Expand")
def read_expand(call: Call) -> Any:
    sizes = call.numbers(1) or []
    rank = len(call.shape())
    sizes = [1] * (rank - len(sizes)) + sizes
    spread = [
        -1 if size == 1 and place >= len(sizes) - rank else size for place, size in enumerate(sizes)
    ]
    return call.apply("expand", call.value(), *spread)


@reads_operators("Pad")
def read_pad(call: Call) -> Any:
    amounts = call.listed("pads", 1, 11) or []
    rank = len(call.shape())
    axes = call.numbers(3) or list(range(rank))
    call.require(call.attribute("mode", "constant") == "constant", "padding other than by a number")
    call.require(len(amounts) == 2 * len(axes) and min(amounts, default=0) >= 0, "its amounts")
    fill = (call.scalar(2) if call.opset >= 11 else call.attribute("value", 0.0)) or 0.0
    sides = [(0, 0)] * rank
    for axis, *side in zip(axes, amounts[: len(axes)], amounts[len(axes) :], strict=True):
        sides[axis] = (side[0], side[1])
    if not any(amounts):
        return call.value()
    return call.apply(
        functional.pad, call.value(), [n for side in reversed(sides) for n in side], value=fill
    )


_REDUCED = {
    "ReduceMean": torch.mean, "ReduceSum": torch.sum, "ReduceMax": torch.amax, "ReduceMin": torch.amin,
    "ReduceL1": torch.sum, "ReduceSumSquare": torch.sum,
}  # fmt: skip
_BEFORE: dict[str, tuple[Any, ...]] = {"ReduceL1": (torch.abs,), "ReduceSumSquare": (torch.pow, 2)}
"""What of each entry is summed."""


@reads_operators(*_REDUCED, "ReduceL2", "ReduceProd")
def read_reduction(call: Call) -> Any:
    axes = call.listed("axes", 1, 13 if call.op == "ReduceSum" else 18)
    keep = bool(call.attribute("keepdims", 1))
    skips = call.attribute("noop_with_empty_axes", 0)
    if not axes:
        if skips:
            call.require(call.op not in (*_BEFORE, "ReduceL2"), "no axes")
            return call.value()
        axes = list(range(len(call.shape())))
    if call.op == "ReduceProd":
        call.require(len(axes) == 1, "a product over several axes")
        return call.apply(torch.prod, call.tensor(0), axes[0], keep)
    if call.op == "ReduceL2":
        return call.apply(torch.linalg.vector_norm, call.value(), 2, axes, keep)
    summed = call.value()
    if call.op in _BEFORE:
        function, *further = _BEFORE[call.op]
        summed = call.apply(function, summed, *further)
    return call.apply(_REDUCED[call.op], summed, axes, keep)


@reads_operators("DepthToSpace", "SpaceToDepth")
def read_pixel_blocks(call: Call) -> Any:
    """Channels to squares of pixels, or back: the entries are numbered (c, row, column) or so."""
    side = call.attribute("blocksize")
    batch, channels, height, width = call.shape()
    if call.op == "SpaceToDepth":
        sizes = [channels, height // side, side, width // side, side]
        order, merged = [3, 5, 1, 2, 4], [channels * side * side, height // side, width // side]
    else:
        channels //= side * side
        columns_first = call.attribute("mode", "DCR") == "CRD"
        sizes = [channels, side, side] if columns_first else [side, side, channels]
        sizes += [height, width]
        order = [1, 4, 2, 5, 3] if columns_first else [3, 4, 1, 5, 2]
        merged = [channels, height * side, width * side]
    parts = _reshape_images(call, call.value(), [batch, *sizes])
    return _reshape_images(call, call.apply("permute", parts, [0, *order]), [batch, *merged])


READERS["Tile"] = lambda call: call.apply("repeat", call.value(), *(call.numbers(1) or []))
READERS["Einsum"] = lambda call: call.apply(
    torch.einsum, call.attribute("equation"), *map(call.value, range(len(call.inputs)))
)
