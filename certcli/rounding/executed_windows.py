"""What rounding adds in convolutions, and in averages over windows. Proofs: docs/soundness.md."""

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from certcli.engine.table import with_attributes
from certcli.lipschitz.numerics.convolution_estimate import Geometry
from certcli.lipschitz.numerics.real import INF, Real, as_real
from certcli.lipschitz.rules.convolution import numbers, padding_of, pads_with_zeros
from certcli.lipschitz.rules.repeat_pad import pair
from certcli.rounding.algorithms import covers
from certcli.rounding.moves import overlap, windows_of_entry
from certcli.rounding.operation_errors import Followed, Operation, Rounding, Sizes, rules


def _runs_nnpack() -> bool:
    """Return whether torch may convolve batches of 16 and more by NNPACK on this processor."""
    nnpack, onednn = torch.backends.nnpack, torch.backends.mkldnn
    replaced = onednn.is_available() and onednn.enabled
    return not replaced and nnpack.is_available() and torch._C._get_nnpack_enabled()


@rules.function(
    torch.conv1d, torch.conv2d, torch.conv3d, functional.conv1d, functional.conv2d, functional.conv3d
)  # fmt: skip
@covers("any order")
def convolution(
    op: Operation,
    x: Followed,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Rounding:
    """A linear map, whose zeros beside the image are exact."""
    require_plain_convolutions(op)
    kernel = op.tensor(weight)
    axes = kernel.dim() - 2
    steps, spread = (tuple(numbers(part, axes)) for part in (stride, dilation))
    pads = padding_of(padding, tuple(kernel.shape[2:]), spread)
    geometry = Geometry(steps, pads, spread, groups, tuple(x.shape[-axes:]))
    layer = op.map(kernel, None if bias is None else op.tensor(bias), geometry)
    return lambda sizes: layer.rounding(sizes(x).total, op.entries // layer.out)


def require_plain_convolutions(op: Operation) -> None:
    op.require(
        not (op.precision.dtype == torch.float32 and _runs_nnpack()),
        "NNPACK's convolutions by Winograd's and Fourier's transforms, which torch runs without "
        "oneDNN; torch.backends.nnpack.set_flags(False) ends them",
    )


rules.module(nn.Conv1d, nn.Conv2d, nn.Conv3d, when=pads_with_zeros)(
    with_attributes(convolution, "weight", "bias", "stride", "padding", "dilation", "groups")
)


@rules.module(nn.ConvTranspose2d)
@covers("any order")
def transposed_convolution(
    op: Operation, module: nn.ConvTranspose2d, x: Followed, output_size: Any = None
) -> Rounding:
    """The adjoint of a convolution: an entry is a sum of at most (inputs of a group) |kernel|
    products.
    """
    require_plain_convolutions(op)
    pads = padding_of(module.padding, tuple(module.kernel_size), tuple(module.dilation))
    stride: Any = tuple(module.stride)
    dilation: Any = tuple(module.dilation)
    geometry = Geometry(stride, pads, dilation, module.groups, tuple(x.shape[-2:]), transposed=True)
    layer = op.map(module.weight, module.bias, geometry)
    layer.terms = module.weight[:, 0].numel() // module.groups
    layer.out = module.out_channels
    return lambda sizes: layer.rounding(sizes(x).total, op.entries // layer.out)


@rules.function(functional.avg_pool2d)
@covers("any order")
def averaged(
    op: Operation,
    x: Followed,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    *_: Any,
    axes: int = 2,
) -> Rounding:
    """A window at an edge may hold one entry only; none is divided by less than it holds."""
    kernel = pair(kernel_size)[:axes]
    steps = pair(kernel_size if stride in (None, [], ()) else stride)[:axes]
    count = math.prod(kernel)
    plain = not any(pair(padding)[:axes]) and not ceil_mode
    return _means(op, x, count if plain else 1, count, overlap(kernel, steps))


@rules.function(functional.avg_pool1d, torch.avg_pool1d)
@covers("any order")
def averaged_lines(op: Operation, x: Followed, *args: Any, **named: Any) -> Rounding:
    return averaged(op, x, *args, **named, axes=1)


_WINDOWS = "kernel_size", "stride", "padding", "ceil_mode"
rules.module(nn.AvgPool2d)(with_attributes(averaged, *_WINDOWS))
rules.module(nn.AvgPool1d)(with_attributes(averaged_lines, *_WINDOWS))


@rules.function(
    functional.adaptive_avg_pool1d, functional.adaptive_avg_pool2d, functional.adaptive_avg_pool3d,
    torch.adaptive_avg_pool1d,
)  # fmt: skip
@covers("any order")
def averaged_adaptively(op: Operation, x: Followed, output_size: Any) -> Rounding:
    assert op.call is not None
    axes = int(op.call.kind[-2])  # adaptive_avg_pool2d
    op.require(axes < 3 or op.precision.wide is None, "sums of volumes in half precision")
    sizes = x.shape[-axes:]
    counts = op.call.shape[-axes:]
    op.require(all(c <= s for s, c in zip(sizes, counts, strict=True)), "a pooling that enlarges")
    fewest, most_entries = (
        math.prod(s // c + more * (s % c > 0) for s, c in zip(sizes, counts, strict=True))
        for more in (0, 2)
    )
    return _means(op, x, fewest, most_entries, windows_of_entry(sizes, counts))


def _means(op: Operation, x: Followed, fewest: int, entries: int, windows: float) -> Rounding:
    """A mean of k entries is <= its window's length / sqrt(k); entries lie in some windows."""
    share = (as_real(windows) / fewest).sqrt() * op.precision.products(entries)

    def rounding(sizes: Sizes) -> Real:
        if not op.precision.fits(sizes(x).peak * float(entries)):
            return INF
        return sizes(x).total * share + op.precision.lost(entries, op.entries)

    return rounding
