"""From a parsed ONNX graph to a torch module of the operations that certvit has theorems for."""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from certcli.models.onnx import arithmetic, layers, shapes  # noqa: F401 (which register readers)
from certcli.models.onnx.call import Call, NoReader, read_call
from certcli.models.onnx.file import operator_name, opset_of, required, tensor_of
from certcli.models.onnx.patterns import join
from certcli.models.onnx.program import LARGEST_TENSOR, Program
from certcli.models.weights import MISFITS
from certcli.system.errors import ArchitectureError, CheckpointError, Refused, one_line

_TYPES = {1: torch.float32, 11: torch.float64}


def network_of_onnx(path: Path, model: Any) -> tuple[nn.Module, tuple[int, ...]]:
    """Return the network, one image's batch axis first, and the size of one input.

    The tensors are float32, or float64 where one of them has no equal in float32.

    Raises:
        CheckpointError: the graph is broken, too large, or not of images to one result.
        ArchitectureError: an operator has no reader; its name and its node's.
    """
    graph = model.graph
    constants = {each.name: _stored_tensor(path, each) for each in graph.initializer}
    source, size, dtype = _image_input(path, graph, constants)
    stored = sum(each.numel() for each in constants.values())
    program = Program(size, dtype, stored)
    values: dict[str, Any] = {**constants, source: program.image, "": None}
    for node in graph.node:
        try:
            results = read_call(_call(program, node, values, opset_of(model)))
        except NoReader as failure:
            raise ArchitectureError(
                f"{path}: {operator_name(node)}: {one_line(failure)}",
                "docs/howto/certify-what-you-deploy.md lists the operators that are read",
            ) from failure
        except MISFITS as failure:
            raise CheckpointError(
                f"{path}: {operator_name(node)}: {one_line(failure)}"
            ) from failure
        values.update(zip(node.output, results))
    result = values.get(graph.output[0].name)
    if not isinstance(result, fx.Node):
        raise CheckpointError(f"{path}: its result does not depend on its input")
    program.graph.output(result)
    join(program)
    return program.network(), size


def _stored_tensor(path: Path, tensor: Any) -> Tensor:
    try:
        return tensor_of(tensor)
    except Refused as failure:
        name = one_line(tensor.name)[:100]
        raise CheckpointError(
            f"{path}: tensor '{name}': {one_line(failure)}",
            "export the network with external_data=False",
        ) from failure


def _image_input(
    path: Path, graph: Any, constants: dict[str, Tensor]
) -> tuple[str, tuple[int, ...], torch.dtype]:
    """Return the name, the size without the batch, and the type of the one input."""
    inputs = [each for each in graph.input if each.name not in constants]
    if len(inputs) != 1 or len(graph.output) != 1:
        raise CheckpointError(
            f"{path} has {len(inputs)} inputs and {len(graph.output)} outputs",
            "a network of images has one of each",
        )
    kind = inputs[0].type.tensor_type
    sizes = [each.dim_value for each in kind.shape.dim]
    if len(sizes) < 2 or min(sizes[1:]) < 1 or sizes[0] not in (0, 1):
        lacks = ", which has no axis of images" if len(sizes) == 1 else ", 0 for any"
        raise CheckpointError(
            f"{path} states the input {sizes or 'without sizes'}{lacks}",
            "export it with one image, or any number of images, of one size",
        )
    if math.prod(sizes[1:]) > LARGEST_TENSOR:
        raise CheckpointError(f"{path}: its images have more than {LARGEST_TENSOR:,} values")
    if kind.elem_type not in _TYPES:
        raise CheckpointError(f"{path}: its input is of a type that is not read", "export float32")
    return inputs[0].name, tuple(sizes[1:]), _TYPES[kind.elem_type]


def _call(program: Program, node: Any, values: dict[str, Any], opset: int) -> Call:
    unset = [name for name in node.input if name not in values]
    if unset:
        raise Refused(f"its input '{one_line(unset[0])[:100]}' is not in the file")
    value_of = required("onnx").helper.get_attribute_value
    attributes = {each.name: _attribute_value(value_of(each)) for each in node.attribute}
    inputs = [values[name] for name in node.input]
    return Call(program, node.op_type, opset, inputs, attributes, len(node.output))


def _attribute_value(value: Any) -> Any:
    """Return an attribute as a number, bytes, a tuple of them, or a tensor."""
    if isinstance(value, (int, float, bytes)):
        return value
    return tensor_of(value) if hasattr(value, "data_type") else tuple(value)
