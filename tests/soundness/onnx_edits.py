"""ONNX files of strangers: random edits of bytes and of what they say."""

import random
from typing import Any

from certcli.models.onnx.call import READERS
from tests.soundness.edits import edit_bytes

NUMBERS = (-(2**63), -(2**31), -5, -1, 0, 1, 2, 3, 8, 1000, 10**6, 10**12, 2**31, 2**63 - 1)


def edited_onnx(data: bytes, rng: random.Random) -> bytes:
    """Return the file with a few bytes changed, or with an operator, a number or a tensor changed."""
    import onnx

    if rng.random() < 0.3:
        return edit_bytes(data, rng)
    model = onnx.ModelProto.FromString(data)
    for _ in range(rng.choice((1, 1, 2))):
        edit = rng.choice((edit_node, edit_numbers, edit_tensor, edit_sizes))
        edit(model.graph, rng)
    return model.SerializeToString()


def edit_node(graph: Any, rng: random.Random) -> None:
    node = rng.choice(graph.node)
    names = [name for other in graph.node for name in (*other.input, *other.output)]
    kind = rng.randrange(5)
    if kind == 0:
        node.op_type = rng.choice([*READERS, "If", "Loop", "Scan", "NonZero"])
    elif kind == 1 and node.input:
        node.input[rng.randrange(len(node.input))] = rng.choice([*names, "", "nowhere"])
    elif kind == 2:
        node.domain = "com.example"
    elif kind == 3:
        node.ClearField(rng.choice(("attribute", "input", "output")))
    else:
        node.output.append(rng.choice(names))


def edit_numbers(graph: Any, rng: random.Random) -> None:
    """Change an attribute, as shapes, axes and kernels are."""
    attributes = [one for node in graph.node for one in node.attribute]
    if attributes:
        one = rng.choice(attributes)
        one.i, one.f = rng.choice(NUMBERS), rng.choice((float("nan"), 1e38, -1.0, 0.0))
        if one.ints:
            one.ints[rng.randrange(len(one.ints))] = rng.choice(NUMBERS)


def edit_tensor(graph: Any, rng: random.Random) -> None:
    """Change whole numbers, which are shapes, or the size, type or place of a tensor."""
    import onnx

    stored = [one.t for node in graph.node for one in node.attribute if one.HasField("t")]
    whole = [one for one in stored if one.data_type == onnx.TensorProto.INT64]
    tensor = rng.choice([*graph.initializer, *stored, *whole * 3])
    kind = rng.randrange(4)
    if kind == 0 and tensor in whole:
        values = onnx.numpy_helper.to_array(tensor).copy().reshape(-1)
        values[rng.randrange(len(values))] = rng.choice(NUMBERS)
        tensor.CopyFrom(onnx.numpy_helper.from_array(values.reshape(tuple(tensor.dims))))
    elif kind == 1:
        tensor.dims.append(rng.choice(NUMBERS))
    elif kind == 2:
        tensor.data_type = rng.randrange(25)
    else:
        tensor.data_location = 1
        entry = tensor.external_data.add()
        entry.key, entry.value = "location", "evil.pth"


def edit_sizes(graph: Any, rng: random.Random) -> None:
    sizes = graph.input[0].type.tensor_type.shape.dim
    sizes[rng.randrange(len(sizes))].dim_value = rng.choice(NUMBERS)
