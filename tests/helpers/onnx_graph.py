"""Small ONNX files, written operator by operator."""

from typing import Any

import numpy as np
import pytest

SIZE = (1, 4, 4)
Node = tuple[Any, ...]
"""(operator, names of its inputs, names of its results), and perhaps its attributes."""


def graph_of(
    nodes: list[Node], *, sizes: tuple[Any, ...] = ("b", *SIZE), opset: int = 17, **tensors: Any
) -> bytes:
    """Return a file with input x, result y, these operators and constants."""
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    stored = []
    for name, value in tensors.items():
        if not isinstance(value, onnx.TensorProto):
            value = onnx.numpy_helper.from_array(np.asarray(value))
        value.name = name
        stored.append(value)
    graph = helper.make_graph(
        [helper.make_node(*node[:3], **(node[3] if len(node) > 3 else {})) for node in nodes],
        "g",
        [helper.make_tensor_value_info("x", kind, sizes)],
        [helper.make_tensor_value_info("y", kind, None)],
        stored,
    )
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.example", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
