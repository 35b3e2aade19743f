"""Operators with weights and those over neighbours: the modules of torch that have theorems."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from certcli.models.onnx.call import Call, reads


def with_weights(module: nn.Module, **tensors: Tensor | None) -> nn.Module:
    """Return the module with its weights and statistics set; None: it has no such tensor."""
    for name, value in tensors.items():
        if value is None or name in module._buffers:
            module.register_buffer(name, value) if value is not None else None
        else:
            setattr(module, name, nn.Parameter(value.contiguous(), requires_grad=False))
    return module


def linear(weight: Tensor, bias: Tensor | None) -> Any:
    """Return x -> W x + b for W (out, in)."""
    shape = nn.Linear(1, 1, bias=bias is not None)
    shape.out_features, shape.in_features = weight.shape
    return with_weights(shape, weight=weight, **({} if bias is None else {"bias": bias}))


@reads("MatMul")
def product(call: Call) -> Any:
    a, b = call.value(0), call.value(1)
    if isinstance(a, fx.Node) and isinstance(b, Tensor) and b.dim() == 2:
        return call.apply(linear(b.T, None), a)
    return call.apply(torch.matmul, a, b)


@reads("Gemm")
def gemm(call: Call) -> Any:
    weight, bias = call.tensor(1), call.constant(2)
    call.require(call.attribute("transA", 0) == 0 and weight.dim() == 2, "a transposed image")
    alpha, beta = call.attribute("alpha", 1.0), call.attribute("beta", 1.0)
    call.require(alpha == 1 and beta == 1, "factors other than 1")
    weight = weight if call.attribute("transB", 0) else weight.T
    if bias is not None:
        bias = bias.expand(1, len(weight)).reshape(-1)
    return call.apply(linear(weight, bias), call.value(0))


def _padding(call: Call, axes: int) -> tuple[list[int], list[int]]:
    """Return what is added before and after each axis."""
    call.require(call.attribute("auto_pad", "NOTSET") in ("NOTSET", "VALID"), "automatic padding")
    pads = list(call.attribute("pads", [0] * 2 * axes))
    call.require(len(pads) == 2 * axes and min(pads) >= 0, "its padding")
    return pads[:axes], pads[axes:]


@reads("Conv")
def convolution(call: Call) -> Any:
    weight, bias, x = call.tensor(1), call.constant(2), call.value(0)
    axes = weight.dim() - 2
    call.require(axes in (1, 2) and isinstance(x, fx.Node), "other than images")
    kernel = list(weight.shape[2:])
    call.require(list(call.attribute("kernel_shape", kernel)) == kernel, "two sizes of its kernel")
    before, after = _padding(call, axes)
    if before != after:
        sides = [n for pair in reversed(list(zip(before, after, strict=True))) for n in pair]
        x = call.apply(functional.pad, x, sides)
        before = [0] * axes
    groups = call.attribute("group", 1)
    build: Any = nn.Conv2d if axes == 2 else nn.Conv1d
    module = build(
        weight.shape[1] * groups,
        len(weight),
        tuple(kernel),
        tuple(call.attribute("strides", [1] * axes)),
        tuple(before),
        tuple(call.attribute("dilations", [1] * axes)),
        groups,
        bias is not None,
        device="meta",
    )
    tensors = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
    return call.apply(with_weights(module, **tensors), x)


def layer_norm(weight: Tensor, bias: Tensor | None, eps: float) -> nn.Module:
    module = nn.LayerNorm(len(weight), eps, bias=bias is not None, device="meta")
    return with_weights(module, weight=weight, **({} if bias is None else {"bias": bias}))


@reads("LayerNormalization")
def layer_normalisation(call: Call) -> Any:
    rank = len(call.shape())
    call.require(call.axis(-1, rank) == rank - 1, "several axes")
    call.require(call.attribute("stash_type", 1) == 1, "another type inside")
    eps = call.attribute("epsilon", float(np.float32(1e-5)))
    weight = call.tensor(1)
    call.require(tuple(weight.shape) == call.shape()[-1:], "weights of another shape")
    return call.apply(layer_norm(weight, call.constant(2), eps), call.value(0))


@reads("BatchNormalization")
def batch_normalisation(call: Call) -> Any:
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


@reads("Softmax", "LogSoftmax")
def softmax(call: Call) -> Any:
    rank = len(call.shape())
    axis = call.axis(-1 if call.opset >= 13 else 1, rank)
    call.require(call.opset >= 13 or axis == rank - 1, "several axes at once")
    build = nn.Softmax if call.op == "Softmax" else nn.LogSoftmax
    return call.apply(build(axis - rank), call.value())


@reads("GlobalAveragePool")
def global_average(call: Call) -> Any:
    return call.apply(nn.AdaptiveAvgPool2d(1), call.value())


@reads("MaxPool", "AveragePool")
def pool(call: Call) -> Any:
    kernel: Any = tuple(call.attribute("kernel_shape"))
    call.require(len(kernel) == 2 == len(call.shape()) - 2, "other than images")
    before, after = _padding(call, 2)
    call.require(before == after, "uneven padding")
    strides = tuple(call.attribute("strides", (1, 1)))
    call.require(call.attribute("ceil_mode", 0) == 0, "ragged windows")
    dilations = tuple(call.attribute("dilations", (1, 1)))
    if call.op == "MaxPool":
        call.require(call.attribute("storage_order", 0) == 0, "columns first")
        module: nn.Module = nn.MaxPool2d(kernel, strides, tuple(before), dilations)
    else:
        counts = bool(call.attribute("count_include_pad", 0))
        call.require(dilations == (1, 1), "dilated windows")
        module = nn.AvgPool2d(kernel, strides, (before[0], before[1]), False, counts)
    return call.apply(module, call.value())
