"""What rounding adds in convolutions, and in averages over windows. Proofs: docs/soundness.md."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from certcli.engine.averages import Separable, register_averages
from certcli.engine.table import with_attributes
from certcli.lipschitz.numerics.convolution import Geometry
from certcli.lipschitz.numerics.real import INF, Real
from certcli.lipschitz.numerics.spectral import spectral_norms
from certcli.lipschitz.rules.convolution import numbers, padding_of, pads_with_zeros
from certcli.rounding.algorithms import covers
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


@covers("any order")
def averaged(op: Operation, x: Followed, averaging: Separable) -> Rounding:
    """gamma | |M| | |x|, whose norm is at most the product of those of each axis."""
    p = op.precision
    volumes = len(averaging.matrices) > 2 and p.wide is not None
    op.require(not volumes, "sums of volumes in half precision")
    entries = averaging.terms - 64
    share = p.products(entries)
    for norm in spectral_norms(list(averaging.matrices)):
        share = share * (norm * (1 + 2.0**-40))  # 1 / count is rounded

    def rounding(sizes: Sizes) -> Real:
        if not p.fits(sizes(x).peak * float(entries)):
            return INF
        return sizes(x).total * share + p.lost(entries, op.entries)

    return rounding


register_averages(rules, Followed, averaged, covers("any order"))
