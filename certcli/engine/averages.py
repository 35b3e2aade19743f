"""Averages over windows and interpolation: a matrix along each of the last axes, one list of
names."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from certcli.engine.table import NoRule, RuleTable, with_attributes
from certcli.system.errors import raise_if

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Separable:
    """The Kronecker product of matrices (out, in), in float64, on the last axes.

    Attributes:
        averages: whether rows are >= 0 with sums <= 1.
    """

    matrices: tuple[Tensor, ...]
    why: str
    averages: bool = True

    def __call__(self, x: Tensor, *, absolute: bool = False) -> Tensor:
        """Return the map of tensors (..., *in), or with the matrices' absolute entries."""
        for axis, matrix in enumerate(self.matrices, -len(self.matrices)):
            entries = (matrix.abs() if absolute else matrix).to(x)
            x = (x.movedim(axis, -1) @ entries.mT).movedim(-1, axis)
        return x

    @property
    def transposed(self) -> "Separable":
        """Return the transpose."""
        return Separable(tuple(matrix.T for matrix in self.matrices), self.why, averages=False)

    @property
    def terms(self) -> int:
        """Return the longest sum, with room for the rounding of entries."""
        return math.prod(int((m != 0).sum(1).max()) for m in self.matrices) + 64

    @property
    def whole(self) -> bool:
        """Tell whether it is the mean over all entries of these axes."""
        return self.averages and all(len(m) == 1 and bool((m > 0).all()) for m in self.matrices)


def pair(value: Any) -> tuple[int, int]:
    return (int(value), int(value)) if isinstance(value, int) else (int(value[0]), int(value[-1]))


def over_windows(
    shape: Shape,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: Any = None,
    *,
    axes: int,
) -> Separable:
    if divisor_override is not None:
        raise NoRule("average pooling with another divisor")
    steps = pair(stride if stride not in (None, [], ()) else kernel_size)
    options = zip(shape[-axes:], pair(kernel_size), steps, pair(padding), strict=False)
    matrices = []
    for size, k, s, p in options:
        line = torch.eye(size, dtype=torch.float64).unsqueeze(0)
        matrices.append(F.avg_pool1d(line, k, s, p, ceil_mode, count_include_pad)[0].T)
    return Separable(tuple(matrices), "average over windows")


def adaptive(shape: Shape, output_size: Any, *, axes: int) -> Separable:
    """torch's windows are [floor(i size / count), ceil((i + 1) size / count))."""
    sizes = shape[-axes:]
    counts = output_size if isinstance(output_size, (list, tuple)) else [output_size] * axes
    matrices = []
    for size, number in zip(sizes, counts, strict=True):
        count = size if number is None else number
        matrix = torch.zeros(count, size, dtype=torch.float64)
        for row, window in enumerate(adaptive_windows(size, count)):
            matrix[row, window.start : window.stop] = 1 / len(window)
        matrices.append(matrix)
    return Separable(tuple(matrices), "average over adaptive windows")


def adaptive_windows(size: int, count: int) -> list[range]:
    """Return torch's windows; each holds a pixel."""
    return [range(i * size // count, -(-(i + 1) * size // count)) for i in range(count)]


def interpolation_matrices(
    shape: Shape,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
    *,
    dtype: torch.dtype,
) -> Separable:
    """Read off the identity, axis by axis. dtype: in which the nearest pixel is decided."""
    raise_if(
        len(shape) != 4 or mode not in ("nearest", "bilinear", "bicubic"),
        NoRule,
        f"interpolation mode {mode}",
    )
    sizes, scales = (
        list(x) if isinstance(x, (tuple, list)) else [x] * 2 for x in (size, scale_factor)
    )
    smooth: dict[str, Any] = (
        {} if mode == "nearest" else {"align_corners": align_corners, "antialias": antialias}
    )
    matrices = []
    for old, new, scale in zip(shape[-2:], sizes, scales, strict=True):
        picture = torch.eye(old, dtype=dtype if mode == "nearest" else torch.float64)
        target: Any = {"size": (new, old)}
        if scale is not None:
            target = {"scale_factor": (float(scale), 1.0)}
            smooth["recompute_scale_factor"] = recompute_scale_factor
        resized = F.interpolate(picture[None, None], mode=mode, **target, **smooth)[0, 0]
        matrices.append(resized.double())
    return Separable(tuple(matrices), f"{mode} interpolation", averages=False)


_WINDOWS = "kernel_size", "stride", "padding", "ceil_mode", "count_include_pad"
MAX_WINDOWS = "kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices"
_RESIZE = "size", "scale_factor", "mode", "align_corners", "recompute_scale_factor"


def _of_one_tensor(
    values: type | tuple[type, ...],
    transfer: Callable[[Any, Any, Separable], Any],
    describe: Callable[..., Separable],
    **fixed: Any,
) -> Any:
    """Return a rule that hands over a tensor and its map."""

    def apply(ctx: Any, x: Any, *args: Any, **named: Any) -> Any:
        if not isinstance(x, values):
            raise NoRule("an average of something else than one tensor")
        shape: Shape = tuple(getattr(x, "shape", ()))
        return transfer(ctx, x, describe(shape, *args, **named, **fixed))

    return apply


def register_averages(
    table: RuleTable,
    values: type | tuple[type, ...],
    transfer: Callable[[Any, Any, Separable], Any],
    mark: Callable[[Any], Any] = lambda rule: rule,
) -> None:
    """Register all names in a domain's table; transfer: (context, value, map) -> value.

    Args:
        mark: adds to each rule what the domain notes of it.
    """
    of_lines, of_maps = (
        mark(_of_one_tensor(values, transfer, over_windows, axes=axes)) for axes in (1, 2)
    )
    table.function(F.avg_pool1d, torch.avg_pool1d)(of_lines)
    table.function(F.avg_pool2d)(of_maps)
    table.module(nn.AvgPool1d)(with_attributes(of_lines, *_WINDOWS))
    table.module(nn.AvgPool2d)(with_attributes(of_maps, *_WINDOWS, "divisor_override"))
    for axes, function in (*enumerate(_ADAPTIVE, 1), (1, torch.adaptive_avg_pool1d)):
        table.function(function)(mark(_of_one_tensor(values, transfer, adaptive, axes=axes)))


def register_interpolation(
    table: RuleTable,
    values: type | tuple[type, ...],
    transfer: Callable[[Any, Any, Separable], Any],
) -> None:
    """Register all names in a domain's table, as `register_averages` does."""

    def resized(ctx: Any, x: Any, *args: Any, **named: Any) -> Any:
        dtype = getattr(ctx, "dtype", None) or torch.float64
        return _of_one_tensor(values, transfer, interpolation_matrices, dtype=dtype)(
            ctx, x, *args, **named
        )

    table.function(F.interpolate)(resized)
    table.module(nn.Upsample, nn.UpsamplingBilinear2d, nn.UpsamplingNearest2d)(
        with_attributes(resized, *_RESIZE)
    )


_ADAPTIVE = F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d


@functools.lru_cache(maxsize=64)
def window_places(
    shape: tuple[int, int],
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    ceil_mode: bool,
) -> Tensor:
    """Return which entries of a map (h, w) lie in each window of max pooling: (h', w', k).

    In place of what lies in the padding stands an entry that does not. NoRule: a window of padding.
    """
    numbers = torch.arange(1, math.prod(shape) + 1, dtype=torch.float64).view(1, 1, *shape)
    pooled = F.max_pool2d(numbers, kernel, stride, padding, dilation, ceil_mode)
    raise_if(
        not bool(pooled.isfinite().all()),
        NoRule,
        "a window of max pooling that lies in the padding",
    )
    rows, columns = pooled.shape[-2:]
    beyond = [
        max(0, (count - 1) * s + d * (k - 1) + 1 - size - 2 * p)
        for count, s, d, k, size, p in zip(
            (rows, columns), stride, dilation, kernel, shape, padding, strict=True
        )
    ]
    around = F.pad(
        numbers, (padding[1], padding[1] + beyond[1], padding[0], padding[0] + beyond[0])
    )
    places = F.unfold(around, kernel, dilation, 0, stride)[0].T.long()
    places = torch.where(places > 0, places, pooled.flatten()[:, None].long()) - 1
    return places.view(rows, columns, -1)
