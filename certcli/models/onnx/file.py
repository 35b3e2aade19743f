"""The door of ONNX files: bytes of a stranger become a parsed graph, or one line of refusal.

Protobuf makes an object of hundreds of bytes out of two bytes of a file, so the file's fields are
counted before it is parsed. Nothing beside the file is opened, and no operator is run here.
"""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from certcli.system.errors import CheckpointError, Refused, one_line
from certcli.system.reading import read_bounded

LARGEST = 2**31 - 1
"""Bytes of one protobuf message."""
MOST_FIELDS = 2**18
"""DeiT-Tiny has 20,000; so many are counted and parsed within a second and 100 MiB."""
DEEPEST = 64
EARLIEST_OPSET = 7
"""From here on tensors are broadcast as numpy's are."""
LATEST_OPSET = 26
_EXPORT = "export the network with torch.onnx.export(..., dynamo=True, external_data=False)"

_Fields = dict[int, "_Fields"]
_TEXTS: _Fields = {}
_TYPE: _Fields = {1: {2: {1: _TEXTS}}}
_TENSOR: _Fields = {13: _TEXTS}
_GRAPH: _Fields = {}
_NODE: _Fields = {5: {5: _TENSOR, 6: _GRAPH, 10: _TENSOR, 11: _GRAPH}}
_VALUE: _Fields = {2: _TYPE}
_GRAPH.update({1: _NODE, 5: _TENSOR, 11: _VALUE, 12: _VALUE, 13: _VALUE, 14: {2: _TEXTS}})
_MODEL: _Fields = {7: _GRAPH, 8: _TEXTS, 14: _TEXTS, 25: {7: _NODE}}
"""Numbers of the fields that hold messages -> the same of those messages: onnx.proto's."""


def required(name: str) -> Any:
    """Import `onnx` or `onnxruntime`, or say what to install."""
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as failure:
        raise CheckpointError(
            f"ONNX files are read with the package {name}, which is not installed",
            'pip install "certvit[onnx]"',
        ) from failure


def read_model(path: Path) -> tuple[Any, bytes]:
    """Return a file's ModelProto with one graph of ONNX's own operators, and its bytes."""
    onnx = required("onnx")
    try:
        data = read_bounded(path, LARGEST)
        _require_few_fields(data)
    except (Refused, OSError) as failure:
        raise CheckpointError(f"{path}: {one_line(failure)}", _EXPORT) from failure
    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
    except Exception as failure:  # protobuf's errors are of several types
        raise CheckpointError(
            f"{path} is no ONNX file ({one_line(failure)})", "is it complete?"
        ) from failure
    _require_one_graph(path, model)
    return model, data


def opset_of(model: Any) -> int:
    return next(
        (int(each.version) for each in model.opset_import if _is_onnx_domain(each.domain)), 0
    )


def _is_onnx_domain(domain: str) -> bool:
    return domain in ("", "ai.onnx")


def _require_one_graph(path: Path, model: Any) -> None:
    """Raise CheckpointError for what lies outside of one graph of tensors."""
    if not model.graph.node:
        raise CheckpointError(f"{path} is no ONNX network: it has no operators", _EXPORT)
    opset = opset_of(model)
    if not EARLIEST_OPSET <= opset <= LATEST_OPSET:
        raise CheckpointError(
            f"{path} is of opset {opset}, and those from {EARLIEST_OPSET} to {LATEST_OPSET} are read",
            _EXPORT,
        )
    if model.functions:
        raise CheckpointError(f"{path} has functions, which may be anything", _EXPORT)
    if model.graph.sparse_initializer:
        raise CheckpointError(f"{path} has sparse weights", _EXPORT)
    for node in model.graph.node:
        foreign = not _is_onnx_domain(node.domain)
        if foreign or any(each.HasField("g") or each.graphs for each in node.attribute):
            what = f"an operator of {one_line(node.domain)}" if foreign else "control flow"
            raise CheckpointError(
                f"{path}: {operator_name(node)} is {what}, which has no reader", _EXPORT
            )


def operator_name(node: Any) -> str:
    """Return an operator with its node's name, for messages."""
    return f"{one_line(node.op_type)[:60]} '{one_line(node.name or ', '.join(map(str, node.output)))[:100]}'"


def _require_few_fields(data: bytes) -> None:
    """Raise Refused unless the messages of a file have few fields, whatever they say."""
    count = 0
    waiting = [(0, len(data), _MODEL, 0)]
    while waiting:
        place, end, kind, depth = waiting.pop()
        while place < end:
            tag, place = _varint(data, place, end)
            if tag & 7 == 2:
                size, place = _varint(data, place, end)
                inner = kind.get(tag >> 3)
                if inner is not None:
                    waiting.append((place, min(end, place + size), inner, depth + 1))
            else:
                size = {1: 8, 5: 4}.get(tag & 7, 0)
                if tag & 7 == 0:
                    place = _varint(data, place, end)[1]
                elif not size:
                    raise Refused("it is no ONNX file")
            place += size
            count += 1
            if place > end:
                raise Refused("it is no ONNX file, or truncated")
            if count > MOST_FIELDS or depth > DEEPEST:
                raise Refused(f"it has more than {MOST_FIELDS:,} fields, or deeper than {DEEPEST}")


def _varint(data: bytes, place: int, end: int) -> tuple[int, int]:
    """Return a varint and the place behind it."""
    total = 0
    for shift in range(0, 70, 7):
        if place >= end:
            break
        byte = data[place]
        place += 1
        total |= (byte & 127) << shift
        if byte < 128:
            return total, place
    raise Refused("it is no ONNX file, or truncated")


def tensor_of(proto: Any) -> Tensor:
    """Return a stored tensor; Refused: it lies elsewhere, or its size is not that of its values."""
    onnx = required("onnx")
    if proto.data_location == onnx.TensorProto.EXTERNAL or proto.external_data:
        raise Refused("its values lie in another file")
    count = math.prod(proto.dims)
    fields = ("float_data", "int32_data", "int64_data", "double_data", "uint64_data")
    stored = 8 * max(len(proto.raw_data), *(len(getattr(proto, name)) for name in fields))
    if min(proto.dims, default=0) < 0 or count > stored:
        raise Refused(f"it has {count} values, and the file fewer")
    kinds = onnx.TensorProto
    whole = (kinds.UINT8, kinds.INT8, kinds.UINT16, kinds.INT16, kinds.INT32, kinds.INT64)
    small = (kinds.BOOL, kinds.INT4, kinds.UINT4)
    if proto.data_type not in (kinds.FLOAT, kinds.DOUBLE, kinds.FLOAT16, *small, *whole):
        raise Refused("its values are of a type that is not read")
    try:
        values = onnx.numpy_helper.to_array(proto)
        if values.dtype.kind not in "biuf" or values.dtype.itemsize < 1:
            values = values.astype("int8")  # of four bits, in a type of its own
        tensor = torch.from_numpy(values.copy())
        tensor.stored_as = proto.data_type  # type: ignore[attr-defined]
        return tensor
    except (ValueError, TypeError, AttributeError, RuntimeError) as failure:
        raise Refused(one_line(failure)) from failure
