"""Programs of torch.export as networks: aten's operations become the modules that have theorems.

Only from Python: to read a `.pt2` file runs code of it. Each operation is read as ONNX's of the same
meaning is, for a batch of one; what has no reader stays as it is, and what has no rule for it says
so by its name.
"""

import operator
from collections.abc import Callable, Sequence
from types import BuiltinFunctionType
from typing import Any, TypeGuard

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.fx.node import map_aggregate, map_arg
from torch.nn import functional

from certcli.models.onnx import arithmetic, layers, shapes  # noqa: F401 (which register readers)
from certcli.models.onnx.call import Call, read_call
from certcli.models.onnx.layers import linear_module
from certcli.models.onnx.patterns import join
from certcli.models.onnx.program import Program, on_meta, shape_of
from certcli.models.weights import MISFITS
from certcli.system.errors import ArchitectureError, Refused, one_line, raise_if

OPSET = 20
_MODULES: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
    "silu": nn.SiLU,
    "mish": nn.Mish,
    "hardswish": nn.Hardswish,
    "hardsigmoid": nn.Hardsigmoid,
}
_BINARY = {"add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv}
_SAME = ("alias", "clone", "contiguous", "detach", "detach_", "lift_fresh_copy")
_RESHAPED = ("_unsafe_view", "flatten", "reshape", "unflatten", "view")


class Batch(int):
    """A size that grows with the number of images, at one image."""


def is_exported(module: nn.Module) -> TypeGuard[fx.GraphModule]:
    """Tell whether this is what `ExportedProgram.module()` returns: a graph of aten's operations."""
    nodes = module.graph.nodes if isinstance(module, fx.GraphModule) else ()
    return any(isinstance(node.target, OpOverload) for node in nodes)


def network_of_program(module: fx.GraphModule) -> tuple[nn.Module, Any]:
    """Return the network of a program, and the size of one image.

    Raises:
        ArchitectureError: it is not of one batch of images to one tensor, or changes a tensor that
            it reads again.
    """
    reader = _Reader(module)
    for node in module.graph.nodes:
        try:
            reader.read(node)
        except MISFITS as failure:
            raise ArchitectureError(
                f"the program's {one_line(node)} ({one_line(node.target)}): {one_line(failure)}",
                "torch.export.export(model.eval(), (one image,)), without decompositions",
            ) from failure
    join(reader.program)
    return reader.program.network(), reader.size


class _Reader:
    """Reads a program node by node; `values` of its nodes are those of `Program`, and numbers."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module
        images = [node for node in module.graph.nodes if node.op == "placeholder"]
        image: Any = images[0].meta.get("val") if len(images) == 1 else None
        raise_if(
            not isinstance(image, Tensor) or image.dim() < 2,
            ArchitectureError,
            f"the program takes {len(images)} inputs, and a network of images one batch",
        )
        self.size = tuple(int(side) for side in image.shape[1:])
        stored = sum(tensor.numel() for tensor in module.state_dict().values())
        self.program = Program(self.size, image.dtype, stored)
        self.values: dict[fx.Node, Any] = {}

    def read(self, node: fx.Node) -> None:
        """Give a node its value, or the graph its result."""
        args, kwargs = map_aggregate(
            (node.args, node.kwargs),
            lambda value: self.values[value] if isinstance(value, fx.Node) else value,
        )
        if node.op == "placeholder":
            self.values[node] = self.program.image
        elif node.op == "get_attr":
            self.values[node] = operator.attrgetter(str(node.target))(self.module).detach()
        elif node.op == "output":
            (result,) = args[0] if isinstance(args[0], (tuple, list)) else args
            self.program.graph.output(result)
        elif node.op == "call_function":
            self.values[node] = self._called(node, args, kwargs)
        elif node.users:
            raise Refused("a part of a program that is not read")

    def _called(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        target: Any = node.target
        if not isinstance(target, OpOverload):
            result = target(*args, **kwargs)
            return Batch(result) if any(isinstance(each, Batch) for each in args) else result
        name = target._schema.name.removeprefix("aten::")
        raise_if(
            target._schema.is_mutable and not _is_fresh(node.args[0], node),
            Refused,
            "it changes a tensor that is read elsewhere",
        )
        inputs: list[fx.Node] = []
        map_arg((args, kwargs), inputs.append)
        if name == "sym_size":
            size = shape_of(args[0])[args[1]]
            return Batch(size) if args[1] == 0 else size
        reader = _READERS.get(name.removesuffix("_") if target._schema.is_mutable else name)
        if reader is None or not inputs:
            builtins = [getattr(place, name, None) for place in (torch, functional) if inputs]
            own = (each for each in builtins if isinstance(each, BuiltinFunctionType))
            # torch's function that is aten's operation
            return self.program.apply(next(own, target), *args, **kwargs)
        if name in _RESHAPED:
            return _aten_reshape(self.program, target, *args, **kwargs)
        return reader(self.program, *args, **kwargs)


def _is_fresh(node: Any, user: fx.Node) -> bool:
    """Tell whether nothing but `user` reads a node's memory: no view, and no other user."""
    if not isinstance(node, fx.Node) or len(node.users) != 1 or user not in node.users:
        return False
    target = node.target
    if not isinstance(target, OpOverload):
        return False
    if target._schema.is_mutable:
        return _is_fresh(node.args[0], node)
    return all(each.alias_info is None for each in target._schema.returns)


def _op(program: Program, op: str, *inputs: Any, outputs: int = 1, **attributes: Any) -> Any:
    """Return the results of ONNX's operator of these inputs, one of one."""
    results = read_call(Call(program, op, OPSET, list(inputs), attributes, outputs))
    return results if outputs > 1 else results[0]


def _aten_reshape(program: Program, target: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """The first size stands for what grows with the batch, or the one that is the batch's."""
    sizes = list(target(on_meta(x).contiguous(), *args, **kwargs).shape)
    asked = args[0] if args and isinstance(args[0], (list, tuple)) else ()
    places = [place for place, size in enumerate(asked) if isinstance(size, Batch)]
    sizes[places[0] if places else 0] = -1
    return program.apply("reshape", x, sizes)


def _aten_attention(
    program: Program, query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    raise_if(
        is_causal or dropout_p or enable_gqa,
        Refused,
        "attention with dropout, over earlier tokens or with shared heads",
    )
    rank = len(shape_of(key))
    turned = program.apply("permute", key, [*range(rank - 2), rank - 1, rank - 2])
    scores = program.apply(torch.matmul, query, turned)
    factor = shape_of(query)[-1] ** -0.5 if scale is None else float(scale)
    scores = program.apply(operator.mul, scores, factor)
    if attn_mask is not None:
        scores = program.apply(operator.add, scores, attn_mask)
    return program.apply(torch.matmul, program.apply(nn.Softmax(-1), scores), value)


def _aten_binary(function: Callable[..., Any]) -> Callable[..., Any]:
    def reader(
        program: Program, a: Any, b: Any, *, alpha: float = 1, rounding_mode: Any = None
    ) -> Any:
        raise_if(
            alpha != 1 or rounding_mode is not None,
            Refused,
            "a factor, or a quotient that is rounded",
        )
        return program.apply(function, _as_number(a, b), _as_number(b, a))

    return reader


def _as_number(value: Any, other: Any) -> Any:
    """Return a number, or a constant of one that is spread over a node, as a float."""
    alone = isinstance(value, Tensor) and value.numel() == 1 and isinstance(other, fx.Node)
    alone = alone and value.dim() <= len(shape_of(other))
    return float(value) if alone or isinstance(value, (int, float)) else value


def _aten_convolution(
    program: Program, x: Any, weight: Tensor, bias: Tensor | None = None, stride: Any = (1, 1),
    padding: Any = (0, 0), dilation: Any = (1, 1), groups: int = 1,
) -> Any:  # fmt: skip
    raise_if(isinstance(padding, str), Refused, "padding by a word")
    return _op(
        program, "Conv", x, weight, bias, strides=stride, pads=[*padding, *padding], dilations=dilation, group=groups
    )  # fmt: skip


def _aten_batch_norm(
    program: Program, x: Any, weight: Any, bias: Any, mean: Tensor, variance: Tensor, training: bool,
    momentum: float, eps: float, cudnn: bool,
) -> Any:  # fmt: skip
    raise_if(training, Refused, "statistics of the batch: export model.eval()")
    weight = torch.ones_like(mean) if weight is None else weight
    bias = torch.zeros_like(mean) if bias is None else bias
    return _op(program, "BatchNormalization", x, weight, bias, mean, variance, epsilon=eps)


def _aten_layer_norm(
    program: Program, x: Any, shape: Sequence[int], weight: Any = None, bias: Any = None,
    eps: float = 1e-5, cudnn: bool = True,
) -> Any:  # fmt: skip
    if len(shape) != 1 or weight is None:
        return program.apply(nn.LayerNorm(list(shape), eps, elementwise_affine=False), x)
    return program.apply(layers.layer_norm_module(weight, bias, eps), x)


def _aten_rms_norm(
    program: Program, x: Any, shape: Sequence[int], weight: Any = None, eps: float | None = None
) -> Any:
    module = nn.RMSNorm(list(shape), eps, elementwise_affine=weight is not None)
    return program.apply(layers.with_weights(module, weight=weight), x)


def _aten_dropout(program: Program, x: Any, p: float, train: bool) -> Any:
    raise_if(train and p, Refused, "dropout in training: export model.eval()")
    return x


def _aten_slice(
    program: Program, x: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Any:
    places = range(*slice(start, end, step).indices(shape_of(x)[dim]))
    if len(places) == shape_of(x)[dim]:
        return x
    ends = (torch.tensor([each]) for each in (places.start, places.stop, dim, step))
    return _op(program, "Slice", x, *ends)


def _aten_split(program: Program, x: Any, sizes: int | Sequence[int], dim: int = 0) -> Any:
    whole = shape_of(x)[dim]
    parts = (
        [min(sizes, whole - at) for at in range(0, whole, sizes)]
        if isinstance(sizes, int)
        else sizes
    )
    return _op(program, "Split", x, torch.tensor(parts), axis=dim, outputs=len(parts))


def _aten_transpose(program: Program, x: Any, first: int = 0, second: int = 1) -> Any:
    order = list(range(len(shape_of(x))))
    order[first], order[second] = order[second], order[first]
    return _op(program, "Transpose", x, perm=order)


_READERS: dict[str, Callable[..., Any]] = {
    **{name: lambda p, x, kind=kind: p.apply(kind(), x) for name, kind in _MODULES.items()},
    **{name: _aten_binary(function) for name, function in _BINARY.items()},
    **{name: lambda p, x, **_: x for name in _SAME},
    **dict.fromkeys(_RESHAPED, _aten_reshape),
    "scaled_dot_product_attention": _aten_attention,
    "conv2d": _aten_convolution,
    "batch_norm": _aten_batch_norm,
    "layer_norm": _aten_layer_norm,
    "rms_norm": _aten_rms_norm,
    "max_pool2d": lambda p, x, kernel, stride=(), padding=0, dilation=1, ceil=False: p.apply(
        nn.MaxPool2d(kernel, stride or kernel, padding, dilation, ceil_mode=ceil), x
    ),
    "dropout": _aten_dropout,
    **dict.fromkeys(
        ("clamp", "clamp_min"), lambda p, x, min=None, max=None: p.apply(torch.clamp, x, min, max)
    ),
    "linalg_vector_norm": lambda p, x, order=2, dim=None, keepdim=False, *, dtype=None: p.apply(
        torch.linalg.vector_norm, x, order, dim, keepdim
    ),
    "slice": _aten_slice,
    "split": _aten_split,
    "split_with_sizes": _aten_split,
    "chunk": lambda p, x, chunks, dim=0: _aten_split(p, x, -(-shape_of(x)[dim] // chunks), dim),
    "transpose": _aten_transpose,
    "t": _aten_transpose,
    "mean": lambda p, x, dim=None, keepdim=False, *, dtype=None: _op(
        p, "ReduceMean", x, torch.tensor(dim or range(len(shape_of(x)))), keepdims=int(keepdim)
    ),
    "unbind": lambda p, x, dim=0: [
        _op(p, "Gather", x, torch.tensor(place), axis=dim) for place in range(shape_of(x)[dim])
    ],
    "expand": lambda p, x, sizes, implicit=False: _op(
        p, "Expand", x, torch.tensor([max(int(size), 1) for size in sizes])
    ),
    "linear": lambda p, x, weight, bias=None: p.apply(linear_module(weight, bias), x),
    "hardtanh": lambda p, x, *args: p.apply(functional.hardtanh, x, *args),
    "leaky_relu": lambda p, x, *args: p.apply(functional.leaky_relu, x, *args),
    "relu6": lambda p, x: p.apply(functional.relu6, x),
    "gelu": lambda p, x, approximate="none": p.apply(nn.GELU(approximate), x),
    "softmax": lambda p, x, dim, dtype=None: p.apply(
        nn.Softmax(dim % len(shape_of(x)) - len(shape_of(x))), x
    ),
    "einsum": lambda p, equation, values, path=None: p.apply(torch.einsum, equation, *values),
    "matmul": lambda p, a, b: p.apply(torch.matmul, a, b),
    "bmm": lambda p, a, b: p.apply(torch.matmul, a, b),
    "adaptive_avg_pool2d": lambda p, x, size: p.apply(nn.AdaptiveAvgPool2d(size), x),
    "permute": lambda p, x, order: p.apply("permute", x, list(order)),
    "select": lambda p, x, dim, index: _op(p, "Gather", x, torch.tensor(index), axis=dim),
    "expand_as": lambda p, x, other: _op(p, "Expand", x, torch.tensor(shape_of(other))),
    "squeeze": lambda p, x, dim: p.apply("squeeze", x, dim),
    "unsqueeze": lambda p, x, dim: p.apply("unsqueeze", x, dim),
    "cat": lambda p, parts, dim=0: _op(p, "Concat", *parts, axis=dim),
    "roll": lambda p, x, shifts, dims=(): p.apply(torch.roll, x, list(shifts), list(dims)),
    "pad": lambda p, x, sides, mode="constant", value=None: p.apply(
        functional.pad, x, list(sides), mode, value
    ),
}
"""Operations of aten, and what they are in torch's own words; others stay."""
