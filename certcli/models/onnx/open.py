"""ONNX files as checkpoints: the torch network of a parsed graph, and ONNX Runtime beside it.

What is proven is about the network of the operations that certvit has theorems for, as the file's
operators say it. ONNX Runtime runs the file itself, image by image: it rewrites graphs and computes
in float32, so that its logits differ by rounding. Where they differ by more, a doubt says so.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from certcli.checkpoint.file import Checkpoint
from certcli.models.build import OpenCheckpoint, load, with_network
from certcli.models.in_memory import open_module
from certcli.models.onnx import arithmetic, layers, shapes  # noqa: F401 (which register readers)
from certcli.models.onnx.call import Call, NoReader, read_call
from certcli.models.onnx.file import operator_name, opset_of, read_model, required, tensor_of
from certcli.models.onnx.patterns import join
from certcli.models.onnx.program import LARGEST_TENSOR, Program
from certcli.models.origins import Fact, Hints
from certcli.models.pixels import PixelModel
from certcli.models.weights import MISFITS
from certcli.nn.layers import Rounded
from certcli.system.errors import ArchitectureError, CheckpointError, Refused, UsageError, one_line

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


ROUNDING = 2.0**-12
"""Of an image's largest logit, what roundings in float32 may make: 1e-6 to 5e-5 in exports of ViT, DeiT and Swin."""


class Runtime:
    """A session with ONNX Runtime's own options, on the CPU. name: of the program and the session."""

    def __init__(self, path: Path, data: bytes) -> None:
        onnxruntime = required("onnxruntime")
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = torch.get_num_threads()
        self.name = f"ONNX Runtime {onnxruntime.__version__}, default session, CPU"
        self.path = path
        with self._refusing():
            self.session = onnxruntime.InferenceSession(
                data, options, providers=["CPUExecutionProvider"]
            )

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """Turn its errors, which are of its own types, into a CheckpointError."""
        try:
            yield
        except Exception as failure:
            raise CheckpointError(
                f"{self.path}: {self.name}, does not run it ({one_line(failure)})"
            ) from failure

    def run(self, inputs: Tensor) -> Tensor:
        """Return the file's outputs (b, ...) in float64 for inputs (b, ...) of its own scale."""
        source: Any = self.session.get_inputs()[0]
        kind = torch.float64 if source.type == "tensor(double)" else torch.float32
        values = inputs.to(kind).numpy()
        with self._refusing():
            rows = [self.session.run(None, {source.name: one[None]})[0] for one in values]
            return torch.from_numpy(np.concatenate(rows)).double()

    def differences(self, model: PixelModel, batches: Iterable[Tensor]) -> list[str]:
        """Return a doubt where logits of images (b, c, h, w) in [0, 1] differ beyond rounding."""
        count, differing, turned, farthest = 0, 0, 0, 0.0
        weight = next(model.parameters(), torch.zeros(()))
        for pixels in batches:
            with torch.inference_mode():
                inputs = model.normalize(pixels.to(weight.device, weight.dtype))
                ours = model.net(inputs).double().cpu()
                theirs = self.run(inputs.cpu())
            if theirs.shape != ours.shape:
                raise CheckpointError(f"{self.path}: {self.name}, gives other shapes")
            distance = (ours - theirs).abs().amax(1)
            differs = ~(distance <= ROUNDING * ours.abs().amax(1))
            count += len(pixels)
            differing += int(differs.sum())
            turned += int((ours.argmax(1) != theirs.argmax(1)).sum())
            farthest = max(farthest, float(distance.amax()))
        if not differing:
            return []
        holds = "smoothing alone is of" if has_steps(model) else "nothing here holds for"
        return [
            f"{self.name}: of {count} images {differing} have other logits than the network that is read from the file, by "
            f"up to {farthest:.2g}, and {turned} another class: {holds} what it runs"
        ]


def has_steps(net: nn.Module) -> bool:
    """Tell whether a network rounds activations to steps, as a quantised file does."""
    return any(isinstance(part, Rounded) for part in net.modules())


class RunByRuntime(nn.Module):
    """What ONNX Runtime answers, with the gradients of the network that is read."""

    def __init__(self, net: nn.Module, runtime: Runtime) -> None:
        super().__init__()
        self.net = net
        self.runtime = runtime

    def forward(self, inputs: Tensor) -> Tensor:
        answers = self.runtime.run(inputs.detach().cpu()).to(inputs)
        if not torch.is_grad_enabled():
            return answers
        ours: Tensor = self.net(inputs)
        return answers + (ours - ours.detach())


def open_onnx(path: Path, hints: Hints) -> OpenCheckpoint:
    """Open an ONNX file of images; their mean and std are in `hints`."""
    model, data = read_model(path)
    net, size = network_of_onnx(path, model)
    if len(size) != 3:
        raise CheckpointError(
            f"{path} takes inputs of size {size}, and an image has (channels, height, width)",
            "certvit certify NET.onnx --vnnlib SPEC answers queries about other inputs",
        )
    if hints.mean is None or hints.std is None:
        raise UsageError(
            f"{path} does not say the mean and std of its pixels",
            "give --mean and --std; 0 and 1 if it takes pixels in [0, 1]",
        )
    runtime = Runtime(path, data)
    opened = open_module(net, hints.mean, hints.std, size, features=hints.features)
    kinds = Counter(type(part).__name__ for part in net.children())
    parts = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    digest = hashlib.sha256(data).hexdigest()
    facts = (
        Fact("architecture", f"ONNX, opset {opset_of(model)}: {parts}", f"sha256 {digest[:16]}"),
        Fact("mean", " ".join(f"{one:g}" for one in hints.mean), "--mean"),
        Fact("std", " ".join(f"{one:g}" for one in hints.std), "--std"),
        Fact("compared with", runtime.name, "on the images"),
    )
    ignored = [name for name in hints.given if name not in ("--mean", "--std")]
    doubts = [f"{path.name} describes its network: {', '.join(ignored)} ignored"] * bool(ignored)
    noise = torch.rand(2, *size, generator=torch.Generator().manual_seed(0))
    try:
        doubts += runtime.differences(load(opened), [noise])
    except (LookupError, RuntimeError, ValueError) as failure:
        raise CheckpointError(
            f"{path} does not take two images at once ({one_line(failure)})",
            "export it with an axis of any number of images",
        ) from failure
    reading = replace(opened.reading, facts=facts, doubts=tuple(doubts))
    record = reading.noted(opened.record)
    vars(opened.net)["num_classes"] = record.classes  # where every other network says it
    return with_network(Checkpoint(opened.tensors, record), opened.net, reading, runtime)
