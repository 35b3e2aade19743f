"""Operators with weights and those over neighbours: the modules of torch that have theorems."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from certcli.models.onnx.call import Call, permuted, reads_operators
from certcli.models.onnx.program import shape_of


def with_weights(module: nn.Module, **tensors: Tensor | None) -> nn.Module:
    """Return the module with its weights and statistics set; None: it has no such tensor."""
    for name, value in tensors.items():
        if value is None or name in module._buffers:
            module.register_buffer(name, value) if value is not None else None
        else:
            setattr(module, name, nn.Parameter(value.contiguous(), requires_grad=False))
    return module


def linear_module(weight: Tensor, bias: Tensor | None) -> Any:
    """Return x -> W x + b for W (out, in)."""
    shape = nn.Linear(1, 1, bias=bias is not None)
    shape.out_features, shape.in_features = weight.shape
    return with_weights(shape, weight=weight, bias=bias)


@reads_operators("MatMul")
def read_product(call: Call) -> Any:
    a, b = map(call.value, (0, 1))
    if isinstance(a, fx.Node) and isinstance(b, Tensor) and b.dim() == 2:
        return call.apply(linear_module(b.T, None), a)
    if isinstance(a, Tensor) and a.dim() == 2 and isinstance(b, fx.Node) and len(shape_of(b)) > 1:
        rank = len(shape_of(b))  # W x = (x^T W^T)^T
        turned = [*range(rank - 2), rank - 1, rank - 2]
        return permuted(call, call.apply(linear_module(a, None), permuted(call, b, turned)), turned)
    return call.apply(torch.matmul, a, b)


@reads_operators("Gemm")
def read_gemm(call: Call) -> Any:
    weight, bias = call.tensor(1), call.constant(2)
    call.require(call.attribute("transA", 0) == 0 and weight.dim() == 2, "a transposed image")
    alpha, beta = call.attribute("alpha", 1.0), call.attribute("beta", 1.0)
    weight = weight if call.attribute("transB", 0) else weight.T
    weight = weight if alpha == 1 else weight.double() * alpha  # exact
    if bias is not None:
        bias = bias.expand(1, len(weight)).reshape(-1)
        bias = bias if beta == 1 else bias.double() * beta
    return call.apply(linear_module(weight, bias), call.value(0))


def _windows(call: Call, kernel: Sequence[int]) -> tuple[list[int], ...]:
    """Return how windows (kernel) lie along each axis, strides and dilations, and what is added
    before and after it.
    """
    ones = [1] * len(kernel)
    strides = list(call.attribute("strides", ones))
    dilations = list(call.attribute("dilations", ones))
    pads = list(call.attribute("pads", [0, 0] * len(kernel)))
    automatic = call.attribute("auto_pad", "NOTSET")
    if automatic.startswith("SAME") and call.op != "ConvTranspose":
        sizes = zip(call.shape()[2:], kernel, strides, dilations, strict=True)
        added = [max((-(-n // s) - 1) * s + (k - 1) * d + 1 - n, 0) for n, k, s, d in sizes]
        less, more = [one // 2 for one in added], [one - one // 2 for one in added]
        pads = less + more if automatic == "SAME_UPPER" else more + less
    else:
        call.require(automatic in ("NOTSET", "VALID"), "automatic padding")
    call.require(len(pads) == 2 * len(kernel) and min(pads) >= 0, "its padding")
    return strides, dilations, pads[: len(kernel)], pads[len(kernel) :]


_CONVOLUTIONS: dict[tuple[str, int], Any] = {
    ("Conv", 1): nn.Conv1d,
    ("Conv", 2): nn.Conv2d,
    ("ConvTranspose", 2): nn.ConvTranspose2d,
}


@reads_operators("Conv", "ConvTranspose")
def read_convolution(call: Call) -> Any:
    weight, bias, x = call.tensor(1), call.constant(2), call.value(0)
    kernel = list(weight.shape[2:])
    form = call.op, len(kernel)
    call.require(form in _CONVOLUTIONS and isinstance(x, fx.Node), "other than images")
    call.require(list(call.attribute("kernel_shape", kernel)) == kernel, "two sizes of its kernel")
    strides, dilations, padding, after = _windows(call, kernel)
    groups = call.attribute("group", 1)
    channels = [weight.shape[1] * groups, len(weight)]
    more: dict[str, Any] = {}
    if call.op == "ConvTranspose":
        call.require(padding == after, "uneven padding")
        more = {"output_padding": tuple(call.attribute("output_padding", [0] * len(kernel)))}
        channels.reverse()
    elif padding != after:
        pairs = list(zip(padding, after, strict=True))
        x = call.apply(functional.pad, x, [n for pair in reversed(pairs) for n in pair])
        padding = [0] * len(kernel)
    module = _CONVOLUTIONS[form](
        *channels,
        tuple(kernel),
        tuple(strides),
        tuple(padding),
        dilation=tuple(dilations),
        groups=groups,
        bias=bias is not None,
        device="meta",
        **more,
    )
    return call.apply(with_weights(module, weight=weight, bias=bias), x)


def layer_norm_module(weight: Tensor, bias: Tensor | None, eps: float) -> nn.Module:
    module = nn.LayerNorm(len(weight), eps, bias=bias is not None, device="meta")
    return with_weights(module, weight=weight, bias=bias)


@reads_operators("LayerNormalization")
def read_layer_norm(call: Call) -> Any:
    rank = len(call.shape())
    call.require(call.axis(-1, rank) == rank - 1, "several axes")
    call.require(call.attribute("stash_type", 1) == 1, "another type inside")
    eps = call.attribute("epsilon", float(np.float32(1e-5)))
    weight = call.tensor(1)
    call.require(tuple(weight.shape) == call.shape()[-1:], "weights of another shape")
    return call.apply(layer_norm_module(weight, call.constant(2), eps), call.value(0))


@reads_operators("BatchNormalization")
def read_batch_norm(call: Call) -> Any:
    weight, bias, mean, variance = (call.tensor(place) for place in range(1, 5))
    call.attribute("momentum", 0.9)
    call.require(call.attribute("training_mode", 0) == 0, "statistics of the batch")
    call.require(call.attribute("spatial", 1) == 1, "statistics of each place")
    eps = call.attribute("epsilon", float(np.float32(1e-5)))
    build = nn.BatchNorm2d if len(call.shape()) == 4 else nn.BatchNorm1d
    module = with_weights(
        build(len(weight), eps), weight=weight, bias=bias, running_mean=mean, running_var=variance
    )
    return call.apply(module, call.value(0))


@reads_operators("Softmax", "LogSoftmax")
def read_softmax(call: Call) -> Any:
    rank = len(call.shape())
    axis = call.axis(-1 if call.opset >= 13 else 1, rank)
    call.require(call.opset >= 13 or axis == rank - 1, "several axes at once")
    build = nn.Softmax if call.op == "Softmax" else nn.LogSoftmax
    return call.apply(build(axis - rank), call.value())


@reads_operators("InstanceNormalization", "GroupNormalization")
def read_group_norm(call: Call) -> Any:
    """Of an instance each channel is a group; before opset 21 weights were those of groups."""
    weight, bias = call.tensor(1), call.tensor(2)
    channels = call.shape()[1]
    call.require(len(weight) == len(bias) == channels, "weights of groups")
    call.require(call.attribute("stash_type", 1) == 1, "another type inside")
    groups = channels if call.op == "InstanceNormalization" else call.attribute("num_groups")
    eps = call.attribute("epsilon", float(np.float32(1e-5)))
    module = nn.GroupNorm(groups, channels, eps, device="meta")
    return call.apply(with_weights(module, weight=weight, bias=bias), call.value(0))


@reads_operators("Resize", "Upsample")
def read_resize(call: Call) -> Any:
    """Nearest by whole factors, rounded down, and linear between the pixels' middles or corners."""
    resize = call.op == "Resize"
    call.require(not resize or call.opset >= 11, "its rules before opset 11")
    target = _resized_sizes(call, resize)
    mode = call.attribute("mode", "nearest")
    about = "half_pixel" if resize else "asymmetric"
    about = call.attribute("coordinate_transformation_mode", about)
    rounding = call.attribute("nearest_mode", "round_prefer_floor" if resize else "floor")
    for name in ("cubic_coeff_a", "exclude_outside", "extrapolation_value"):
        call.attribute(name, 0)  # of other modes
    call.require(call.attribute("antialias", 0) == 0, "antialiasing")
    middles = about in ("half_pixel", "pytorch_half_pixel")
    if mode == "nearest":
        sizes = zip(target, call.shape(), strict=True)
        call.require(all(new % old == 0 for new, old in sizes), "other than whole factors")
        down = rounding.startswith("round_") if middles else rounding == "floor"
        call.require(down and (middles or about == "asymmetric"), f"{rounding} of {about}")
        return call.apply(nn.Upsample(target[2:], mode="nearest"), call.value())
    call.require(mode == "linear" and (middles or about == "align_corners"), f"{mode} of {about}")
    call.require(min(target[2:]) > 1, "one pixel")
    return call.apply(
        nn.Upsample(target[2:], mode="bilinear", align_corners=not middles), call.value()
    )


def _resized_sizes(call: Call, resize: bool) -> tuple[int, ...]:
    """Return the sizes that an operator asks for, which must be whole."""
    call.constant(1)  # of Resize, a region that other modes read
    scales = None if call.opset < 9 else call.constant(2 if resize else 1)
    sizes = call.numbers(3) if resize else None
    if sizes is None:
        factors = call.attribute("scales") if scales is None else scales.flatten().tolist()
        exact = [size * factor for size, factor in zip(call.shape(), factors, strict=True)]
        sizes = [int(size) for size in exact]
        call.require(sizes == exact, "sizes that are rounded")
    images = len(sizes) == 4 and tuple(sizes[:2]) == call.shape()[:2]
    call.require(images and min(sizes) > 0, "other than images")
    return tuple(sizes)


@reads_operators("GlobalAveragePool")
def read_global_average(call: Call) -> Any:
    if len(call.shape()) == 4:
        return call.apply(nn.AdaptiveAvgPool2d(1), call.value())
    return call.apply(torch.mean, call.value(), list(range(2, len(call.shape()))), True)


@reads_operators("GlobalMaxPool")
def read_global_maximum(call: Call) -> Any:
    return call.apply(torch.amax, call.value(), list(range(2, len(call.shape()))), True)


@reads_operators("MaxPool", "AveragePool")
def read_pool(call: Call) -> Any:
    kernel: Any = tuple(call.attribute("kernel_shape"))
    call.require(len(kernel) == 2 == len(call.shape()) - 2, "other than images")
    steps, dilations, before, after = _windows(call, kernel)
    call.require(before == after, "uneven padding")
    strides: Any = tuple(steps)
    padding: Any = tuple(before)
    call.require(call.attribute("ceil_mode", 0) == 0, "ragged windows")
    if call.op == "MaxPool":
        call.require(call.attribute("storage_order", 0) == 0, "columns first")
        module: nn.Module = nn.MaxPool2d(kernel, strides, padding, (dilations[0], dilations[1]))
    else:
        counts = bool(call.attribute("count_include_pad", 0))
        call.require(dilations == [1, 1], "dilated windows")
        module = nn.AvgPool2d(kernel, strides, padding, False, counts)
    return call.apply(module, call.value())
