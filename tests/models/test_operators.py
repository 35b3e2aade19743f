"""Every operator that has a reader, as ONNX Runtime computes it; programs of torch.export: the network
and the bound of the module that was exported.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import certvit
from certcli.models.onnx import arithmetic, layers, shapes  # noqa: F401 (which register readers)
from certcli.models.onnx.call import READERS
from certcli.models.onnx.file import read_model
from certcli.models.onnx.open import network_of_onnx
from certcli.system.errors import ArchitectureError, CertvitError, CheckpointError
from tests.helpers.commands import attempt
from tests.helpers.onnx_graph import Node, graph_of
from tests.models.test_onnx import NETWORKS, SIZE, filled, margins_near

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
_STATE = onnxruntime.capi.onnxruntime_pybind11_state
Failure = (
    _STATE.Fail,
    _STATE.InvalidArgument,
    _STATE.InvalidGraph,
    _STATE.RuntimeException,
    _STATE.NotImplemented,
)
"""What ONNX Runtime raises where an operator does not take a shape."""

OPERAND = (4, 4, 6)
_RANDOM = np.random.default_rng(4)


def normal(*shape: int) -> Any:
    return _RANDOM.normal(size=shape).astype(np.float32)


def integer_list(*numbers: int) -> Any:
    return np.array(numbers)


FOUR, ROW = normal(4), normal(6)
PLACES = integer_list(3, 0, 2, 1, 5, 4)
Row = tuple[str, list[Any], dict[str, Any]]
"""Operator; its inputs, "x" the image (b, 4, 4, 6) and "" left out; its attributes."""
ROWS: list[Row] = [
    *((op, ["x"], {}) for op in ("Relu", "Sigmoid", "Tanh", "HardSwish", "Softplus", "Softsign")),
    *((op, ["x"], {}) for op in ("Mish", "LeakyRelu", "Elu", "Celu", "Selu", "HardSigmoid")),
    *((op, ["x"], {}) for op in ("Erf", "Sin", "Cos", "Atan", "Neg", "Abs", "Exp", "Ceil", "Floor")),
    *((op, ["x"], {}) for op in ("Identity", "Dropout", "Softmax", "LogSoftmax", "Reciprocal")),
    *((op, ["x"], {}) for op in ("GlobalAveragePool", "GlobalMaxPool", "Flatten")),
    *((op, ["x", ROW], {}) for op in ("Add", "Sub", "Mul", "Div", "Max", "Min")),
    ("PRelu", ["x", np.float32(0.2)], {}),
    ("Sum", ["x", ROW, "x"], {}),
    ("Sub", [np.float32(0.3), "x"], {}),
    ("Gelu", ["x"], {}),
    ("Gelu", ["x"], {"approximate": "tanh"}),
    ("LeakyRelu", ["x"], {"alpha": 0.3}),
    ("Elu", ["x"], {"alpha": 0.7}),
    ("Celu", ["x"], {"alpha": 0.7}),
    ("Selu", ["x"], {"alpha": 1.5, "gamma": 0.8}),
    ("HardSigmoid", ["x"], {"alpha": 0.4, "beta": 0.3}),
    ("PRelu", ["x", normal(4, 1, 1)], {}),
    ("Sqrt", [np.abs(ROW)], {}),
    ("Log", [np.abs(ROW)], {}),
    ("Pow", ["x", np.float32(2)], {}),
    ("Clip", ["x", np.float32(-0.5), np.float32(0.7)], {}),
    ("Cast", ["x"], {"to": 1}),
    ("Where", [np.array([True, False] * 3), "x", ROW], {}),
    *((op, [ROW, ROW[::-1].copy()], {}) for op in ("Equal", "Less", "Greater")),
    *((op, [ROW, ROW[::-1].copy()], {}) for op in ("LessOrEqual", "GreaterOrEqual")),
    *((op, [ROW > 0, FOUR[:1] > 0], {}) for op in ("And", "Or")),
    ("Not", [ROW > 0], {}),
    ("Mod", [PLACES - 3, integer_list(2)], {}),
    ("Div", [PLACES - 3, integer_list(2)], {}),
    ("Shape", [normal(3, 2)], {"end": 1}),
    ("Size", [normal(3, 2)], {}),
    ("ConstantOfShape", [integer_list(6)], {"value": np.array([3], np.float32)}),
    ("Range", [np.array(7), np.array(-5), np.array(-2)], {}),
    ("DequantizeLinear", [PLACES.astype(np.int8), np.float32(0.3), np.int8(2)], {}),
    ("QuantizeLinear", [30 * ROW, np.float32(0.3), np.uint8(90)], {}),
    ("QuantizeLinear", [np.array([0.25, -0.25, 0.75], np.float32).repeat(2), np.float32(0.5), np.int8(1)], {}),
    ("DequantizeLinear", [(9 * ROW).astype(np.int8), np.abs(ROW), PLACES.astype(np.int8)], {"axis": 0}),
    ("Constant", [], {"value": ROW}),
    ("Constant", [], {"value_ints": [1, 2, 3, 4, 5, 6]}),
    ("MatMul", ["x", normal(6, 5)], {}),
    ("MatMul", [normal(3, 4), "x"], {}),
    ("Conv", ["x", normal(8, 2, 3, 2), normal(8)], {"group": 2, "pads": [1, 0, 0, 1]}),
    ("Conv", ["x", normal(3, 4, 2, 3)], {"auto_pad": "SAME_LOWER", "strides": [3, 2]}),
    ("Conv", ["x", normal(3, 4, 2, 3)], {"auto_pad": "SAME_UPPER", "strides": [1, 2]}),
    (
        "ConvTranspose",
        ["x", normal(4, 3, 2, 3), normal(6)],
        {"group": 2, "strides": [2, 3], "pads": [1, 1, 1, 1], "output_padding": [1, 2]},
    ),
    ("BatchNormalization", ["x", FOUR, normal(4), normal(4), np.abs(normal(4))], {}),
    ("LayerNormalization", ["x", ROW, normal(6)], {"epsilon": 0.01}),
    ("InstanceNormalization", ["x", FOUR, normal(4)], {}),
    ("GroupNormalization", ["x", FOUR, normal(4)], {"num_groups": 2}),
    ("MaxPool", ["x"], {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "strides": [2, 1]}),
    ("AveragePool", ["x"], {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "strides": [1, 3]}),
    ("AveragePool", ["x"], {"kernel_shape": [3, 3], "auto_pad": "SAME_UPPER"}),
    ("Resize", ["x", "", np.array([1, 1, 2, 3], np.float32)], {}),
    ("Resize", ["x", "", "", integer_list(1, 4, 4, 12)], {"nearest_mode": "round_prefer_ceil"}),
    (
        "Resize",
        ["x", "", np.array([1, 1, 3, 2], np.float32)],
        {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"},
    ),
    ("Resize", ["x", "", "", integer_list(1, 4, 7, 9)], {"mode": "linear"}),
    (
        "Resize",
        ["x", "", "", integer_list(1, 4, 7, 9)],
        {"mode": "linear", "coordinate_transformation_mode": "align_corners"},
    ),
    ("DepthToSpace", ["x"], {"blocksize": 2}),
    ("DepthToSpace", ["x"], {"blocksize": 2, "mode": "CRD"}),
    ("SpaceToDepth", ["x"], {"blocksize": 2}),
    ("Einsum", ["x", normal(4, 6, 3)], {"equation": "bchw,cwo->bcho"}),
    ("Reshape", ["x", integer_list(0, 2, -1, 3)], {}),
    ("Transpose", ["x"], {"perm": [0, 3, 1, 2]}),
    ("Unsqueeze", ["x", integer_list(1, -1)], {}),
    ("Squeeze", [normal(1, 6, 1), integer_list(0, 2)], {}),
    ("Split", ["x", integer_list(1, 3)], {"axis": 1}),
    ("Slice", ["x", integer_list(5, 1), integer_list(0, 3), integer_list(3, 1), integer_list(-2, 1)], {}),
    ("Gather", ["x", integer_list(2, 0)], {"axis": -1}),
    ("Gather", ["x", np.array([[1, 0], [2, 2]])], {"axis": 1}),
    ("Concat", ["x", normal(1, 4, 2, 6), "x"], {"axis": 2}),
    ("Expand", [FOUR[:1], integer_list(6)], {}),
    ("Tile", ["x", integer_list(1, 2, 1, 1)], {}),
    ("Pad", ["x", integer_list(0, 0, 1, 2, 0, 0, 0, 1), np.float32(0.4)], {}),
    *((f"Reduce{name}", ["x", integer_list(1, -1)], {}) for name in ("Mean", "Max", "Min", "L1", "L2")),
    *((f"Reduce{name}", ["x", integer_list(2)], {"keepdims": 0}) for name in ("Sum", "SumSquare")),
    ("ReduceProd", [np.stack([PLACES, PLACES + 1]), integer_list(0)], {}),
]  # fmt: skip
OLD: list[Row] = [
    ("Upsample", ["x"], {"scales": [1.0, 1.0, 2.0, 3.0]}),
    ("Gemm", ["f", normal(96, 3), normal(3)], {"alpha": 0.7, "beta": 0.3}),
    ("Gemm", ["f", normal(3, 96), normal(1)], {"transB": 1}),
    ("BatchNormalization", ["f", *(np.abs(normal(96)) for _ in range(4))], {}),
]
"""Of opset 8; "f" is the image (b, 96)."""


def written_operator(path: Path, row: Row, opset: int, size: tuple[int, ...] = OPERAND) -> Path:
    """Write y = op(...), or x times op(...) of constants."""
    op, inputs, attributes = row
    names = [each if isinstance(each, str) else f"c{place}" for place, each in enumerate(inputs)]
    constants = {
        name: each for name, each in zip(names, inputs, strict=True) if not isinstance(each, str)
    }
    for name, value in attributes.items():
        is_array = isinstance(value, np.ndarray)
        attributes[name] = onnx.numpy_helper.from_array(value) if is_array else value
    depends = not {"x", "f"}.isdisjoint(names)
    outputs = ["y", "z"] if op == "Split" else ["y" if depends else "c"]
    nodes: list[Node] = [("Flatten", ["x"], ["f"]), (op, names, outputs, attributes)]
    if not depends:
        nodes += [("Cast", ["c"], ["d"], {"to": 1}), ("Mul", ["x", "d"], ["y"])]
    path.write_bytes(graph_of(nodes, sizes=(1, *size), opset=opset, **constants))
    return path


def test_every_reader_computes_what_onnx_runtime_does(tmp_path: Path) -> None:
    """Of each of two images; those of older opsets are the last rows."""
    assert {row[0] for row in (*ROWS, *OLD)} == READERS.keys()
    images = torch.from_numpy(normal(2, *OPERAND))
    for place, row in enumerate((*ROWS, *OLD)):
        path = written_operator(tmp_path / f"{place}.onnx", row, 21 if place < len(ROWS) else 8)
        net, _ = network_of_onnx(path, read_model(path)[0])
        require_same(net, path, images, row)


def require_same(net: nn.Module, path: Path, images: torch.Tensor, row: Row) -> None:
    """A network computes what ONNX Runtime does of each image."""
    session = onnxruntime.InferenceSession(path.read_bytes())
    theirs = np.concatenate([session.run(None, {"x": x[None].numpy()})[0] for x in images])
    ours = net.double()(images.double()).detach().numpy()
    assert ours.shape == theirs.shape, row
    assert (np.abs(ours - theirs) <= 1e-5 * (1 + np.abs(theirs))).all(), row


@pytest.mark.parametrize("size", [(4, 6), (6,)])
def test_of_lines_and_rows_a_reader_does_the_same_or_refuses(
    tmp_path: Path, size: tuple[int, ...]
) -> None:
    images = torch.from_numpy(normal(1, *size))
    compared = set()
    for place, row in enumerate(ROWS):
        path = written_operator(tmp_path / f"{place}.onnx", row, 21, size)
        try:
            onnxruntime.InferenceSession(path.read_bytes()).run(None, {"x": images.numpy()})
            net, _ = network_of_onnx(path, read_model(path)[0])
        except (CertvitError, *Failure):
            continue
        require_same(net, path, images, row)
        compared.add(row[0])
    assert len(compared) > 30


PIXELS: dict[str, Any] = {"mean": 0.5, "std": 0.25}


def exported_program(net: nn.Module, images: int = 2) -> Any:
    batch = {0: torch.export.Dim.DYNAMIC} if images > 1 else None
    return torch.export.export(net, (torch.rand(images, *SIZE),), dynamic_shapes=(batch,))


@pytest.mark.parametrize(("name", "images"), [("vit", 1), ("swin", 2), ("resnet", 2)])
def test_a_program_has_the_bound_of_its_module(name: str, images: int) -> None:
    net = filled(NETWORKS[name]())
    program = exported_program(net, images)
    native = certvit.load(net, **PIXELS, input_size=SIZE)
    pixels = torch.rand(2, *SIZE)
    upper = certvit.bound(native).upper
    assert upper.finite
    margins = margins_near(native, pixels[:1])
    for source in (program, program.module()):
        opened = certvit.load(source, **PIXELS)
        assert opened.record.input.size == SIZE
        assert certvit.bound(opened).upper.log10() == upper.log10()
        if source is program:
            assert margins_near(opened, pixels[:1]) == pytest.approx(margins, rel=1e-6)
        # sums of the same numbers, in the order of a fused attention or of a written one
        assert torch.allclose(
            certvit.network(opened)(pixels), certvit.network(native)(pixels), atol=1e-5
        )


class Aliased(nn.Module):
    """y is read after it was changed through a view of it."""

    def forward(self, x: Tensor) -> Tensor:
        y = 2 * x.flatten(1)[:, :4] - 1
        y.view(-1, 2, 2).relu_()
        return y


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (Aliased(), "changes a tensor that is read elsewhere"),
        (nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(768, 4)).train(), "dropout in training"),
        (nn.Sequential(nn.BatchNorm2d(3), nn.Flatten()).train(), "statistics of the batch|changes a tensor"),
    ],
)  # fmt: skip
def test_what_a_graph_without_memory_would_not_compute_is_refused(
    net: nn.Module, message: str
) -> None:
    with pytest.raises(ArchitectureError, match=message):
        certvit.load(exported_program(net), **PIXELS)


def test_an_operation_without_a_rule_is_named() -> None:
    class Summed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.flatten(1)[:, :4].cumsum(1)

    result = certvit.bound(certvit.load(exported_program(Summed().eval()), mean=0, std=1))
    assert not result.upper.finite
    assert "cumsum" in result.bound.why


def test_files_of_programs_are_refused_with_the_call_that_helps(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(768, 4)).eval()
    torch.export.save(exported_program(net), tmp_path / "net.pt2")
    torch.jit.trace(net, torch.rand(1, *SIZE)).save(str(tmp_path / "net.pt"))
    for name, kind in (("net.pt2", "torch.export"), ("net.pt", "TorchScript")):
        failure = attempt("lipschitz", tmp_path / name, "--mean", 0, "--std", 1).exception
        assert isinstance(failure, CheckpointError)
        assert f"a program of {kind}, and reading it runs code" in failure.message
        assert "torch.onnx.export(model, (image,)" in failure.hint
