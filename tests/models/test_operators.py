"""Every operator that has a reader, as ONNX Runtime computes it; programs of torch.export: the network
and the bound of the module that was exported. What an ONNX file of a stranger may not do: each is
refused in one line, before anything is made.
"""

import random
import resource
from collections.abc import Callable
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
from tests.helpers.grids import EVERY
from tests.helpers.onnx_graph import SIZE as GREY
from tests.helpers.onnx_graph import Node, graph_of
from tests.models.test_onnx import NETWORKS, SIZE, filled, margins_near
from tests.soundness.edits import edited_onnx

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
    for source in (program, program.module()):
        opened = certvit.load(source, **PIXELS)
        assert opened.record.input.size == SIZE
        assert certvit.bound(opened).upper.log10() == upper.log10()
        if source is program and (name == "vit" or EVERY):
            margins = margins_near(native, pixels[:1])
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


def test_without_the_package_one_line_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "net.onnx").write_bytes(b"x")
    monkeypatch.setitem(__import__("sys").modules, "onnx", None)
    done = attempt("lipschitz", tmp_path / "net.onnx")
    assert getattr(done.exception, "code", done.exit_code) == 3
    assert 'pip install "certvit[onnx]"' in getattr(done.exception, "hint", done.output)


WEIGHT = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
FLAT: list[Any] = [("Flatten", ["x"], ["f"])]
LINEAR: list[Any] = [*FLAT, ("MatMul", ["f", "w"], ["y"])]


def changed_model(change: Callable[[Any], None], nodes: list[Any] = LINEAR) -> bytes:
    model = pytest.importorskip("onnx").ModelProto.FromString(graph_of(nodes, w=WEIGHT))
    change(model)
    return model.SerializeToString()


def move_values_outside(model: Any) -> None:
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = 1
    entry = tensor.external_data.add()
    entry.key, entry.value = "location", "../../../etc/passwd"


def function(model: Any) -> None:
    model.functions.add().name = "f"


def control(model: Any) -> None:
    one = model.graph.node[1].attribute.add()
    one.name, one.type = "then_branch", 5
    one.g.name = "inner"


def file_of_huge_constants(name: str, *inputs: str, **attributes: Any) -> bytes:
    """Return a file whose constants would be 10^12 numbers."""
    nodes = [(name, list(inputs), ["c"], attributes), *FLAT, ("MatMul", ["f", "w"], ["z"])]
    nodes.append(("Add", ["z", "c"], ["y"]))
    many = np.array([10**6, 10**6])
    return graph_of(
        nodes,
        w=WEIGHT,
        many=many,
        one=np.ones((1, 1), np.float32),
        zero=np.array(0),
        end=np.array(10**12),
        step=np.array(1),
        row=np.ones((1, 10**4), np.float32),
        column=np.ones((10**4, 1), np.float32),
    )


BAD: dict[str, Callable[[], bytes]] = {
    "empty": lambda: b"",
    "text": lambda: b"# a network",
    "truncated": lambda: graph_of(LINEAR, w=WEIGHT)[:-9],
    "messages of two bytes": lambda: b"\x3a\x80\x80\x80\x02" + b"\x0a\x00" * 2**21,
    "nested groups": lambda: b"\x3b" * 10**6,
    "values elsewhere": lambda: changed_model(move_values_outside),
    "functions": lambda: changed_model(function),
    "control flow": lambda: changed_model(control),
    "another domain": lambda: graph_of(
        [*FLAT, ("MatMul", ["f", "w"], ["y"], {"domain": "com.example"})], w=WEIGHT
    ),
    "a missing tensor": lambda: graph_of(LINEAR),
    "NaN": lambda: graph_of(LINEAR, w=WEIGHT * np.float32("nan")),
    "NaN as a number": lambda: graph_of(
        [*LINEAR[:1], ("MatMul", ["f", "w"], ["z"]), ("Mul", ["z", "n"], ["y"])],
        w=WEIGHT,
        n=np.float32("nan"),
    ),
    "no sizes": lambda: graph_of(LINEAR, sizes=("b", 1, "h", "w"), w=WEIGHT),
    "four images at once": lambda: graph_of(LINEAR, sizes=(4, *GREY), w=WEIGHT),
    "an image of 10^12 pixels": lambda: graph_of(LINEAR, sizes=(1, 1, 10**6, 10**6), w=WEIGHT),
    "nothing of the image": lambda: graph_of([("Relu", ["w"], ["y"])], w=WEIGHT),
    "one image alone": lambda: graph_of(
        [
            ("Reshape", ["x", "rows"], ["r"]),
            ("MatMul", ["r", "three"], ["m"]),
            ("Reshape", ["m", "flat"], ["y"]),
        ],
        rows=np.array([1, 4, 4]),
        three=np.ones((3, 4, 4), np.float32),
        flat=np.array([1, 48]),
    ),
    "ConstantOfShape": lambda: file_of_huge_constants("ConstantOfShape", "many"),
    "Expand": lambda: file_of_huge_constants("Expand", "one", "many"),
    "Tile": lambda: file_of_huge_constants("Tile", "one", "many"),
    "Range": lambda: file_of_huge_constants("Range", "zero", "end", "step"),
    "a sum of all pairs": lambda: file_of_huge_constants("Add", "row", "column"),
    "a product of all pairs": lambda: file_of_huge_constants("MatMul", "column", "row"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_refused_in_one_line_before_anything_is_made(
    tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Memory may grow by what the packages take that read any file."""
    path = tmp_path / "net.onnx"
    path.write_bytes(BAD[name]())
    certvit_of_another(tmp_path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError) as failure:
        certvit.load(path, mean=0.5, std=0.5)
    assert "\n" not in str(failure.value)
    assert "Traceback" not in capfd.readouterr().err
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**19  # KiB


def certvit_of_another(folder: Path) -> None:
    """Read a good file first, so that what is imported once is there."""
    path = folder / "good.onnx"
    path.write_bytes(graph_of(LINEAR, w=WEIGHT))
    assert certvit.load(path, mean=0.5, std=0.5).record.classes == 3


@pytest.mark.parametrize(
    ("op", "words"),
    [
        *(
            (op, "it has no reader")
            for op in ("RandomNormalLike", "NonZero", "ArgMax", "ScatterND")
        ),
        ("DynamicQuantizeLinear", "its scale depends on the image.*smoothing takes"),
    ],
)
def test_an_operator_without_a_reader_is_refused_by_its_name_and_its_node_s(
    tmp_path: Path, op: str, words: str
) -> None:
    path = tmp_path / "net.onnx"
    nodes = [*FLAT, (op, ["f"], ["r"], {"name": "/block/it"}), ("MatMul", ["r", "w"], ["y"])]
    path.write_bytes(graph_of(nodes, w=WEIGHT))
    with pytest.raises(ArchitectureError, match=f"{op} '/block/it': {words}"):
        certvit.load(path, mean=0.5, std=0.5)


def test_names_that_are_no_text_are_shown_in_a_line(tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    nodes = [*FLAT, ("Tan", ["f"], ["no-text"]), ("MatMul", ["no-text", "w"], ["y"])]
    path.write_bytes(graph_of(nodes, w=WEIGHT).replace(b"no-text", b"\xff" * 7))
    with pytest.raises(ArchitectureError, match="Tan"):
        certvit.load(path, mean=0.5, std=0.5)


def test_what_a_reader_does_not_ask_for_is_refused(tmp_path: Path) -> None:
    """An attribute or input that nobody reads would change what the operator means."""
    path = tmp_path / "net.onnx"
    for node in (
        ("Relu", ["f"], ["r"], {"negative": 1}),
        ("Relu", ["f", "w"], ["r"]),
        ("Softmax", ["f"], ["r", "s"]),
        ("QuantizeLinear", ["f", "scale", "zero"], ["r"], {"saturate": 0}),
    ):
        nodes = [*FLAT, node, ("MatMul", ["r", "w"], ["y"])]
        path.write_bytes(graph_of(nodes, w=WEIGHT, scale=np.float32(1), zero=np.uint8(3)))
        with pytest.raises(ArchitectureError, match=node[0]):
            certvit.load(path, mean=0.5, std=0.5)


def four_bits(value: int) -> Any:
    onnx = pytest.importorskip("onnx")
    return onnx.helper.make_tensor("z", onnx.TensorProto.INT4, (), [value])


@pytest.mark.parametrize(
    ("between", "zero", "scale", "words"),
    [
        ([], np.uint8(3), 1.0, "quantised values, which DequantizeLinear alone reads"),
        ([("DequantizeLinear", ["q", "s", "z"], ["r"])], four_bits(3), 1.0, "with 8 or 16 bits"),
        ([("DequantizeLinear", ["q", "s", "z"], ["r"])], np.uint8(3), -1.0, "not above 0"),
        ([("DequantizeLinear", ["q", "s", "z"], ["r"])], np.uint8(3), [1.0, 2.0], "zero points"),
        (
            [("DequantizeLinear", ["q", "s", "z"], ["r"])],
            np.array([3, 4], np.uint8),
            [1.0, 2.0],
            "scales of channels",
        ),
    ],
)
def test_steps_that_are_not_read_are_refused(
    tmp_path: Path, between: list[Any], zero: Any, scale: Any, words: str
) -> None:
    quantised = ("QuantizeLinear", ["f", "s", "z"], ["q" if between else "r"])
    nodes = [*FLAT, quantised, *between, ("MatMul", ["r", "w"], ["y"])]
    path = tmp_path / "net.onnx"
    path.write_bytes(graph_of(nodes, opset=21, w=WEIGHT, s=np.array(scale, np.float32), z=zero))
    with pytest.raises(CheckpointError, match=words):
        certvit.load(path, mean=0.5, std=0.5)


def test_no_matrix_is_made_of_a_wide_row_that_is_centred(tmp_path: Path) -> None:
    """x - mean(x) of 10^5 numbers stays as it is written: its matrix would have 10^10."""
    path = tmp_path / "net.onnx"
    nodes = [("ReduceMean", ["x"], ["m"], {"axes": [-1]}), ("Sub", ["x", "m"], ["c"])]
    nodes += [
        ("GlobalMaxPool", ["c"], ["g"]),
        ("Flatten", ["g"], ["f"]),
        ("MatMul", ["f", "one"], ["y"]),
    ]
    path.write_bytes(graph_of(nodes, sizes=(1, 1, 1, 10**5), one=np.ones((1, 3), np.float32)))
    assert certvit.load(path, mean=0, std=1).record.classes == 3


def test_a_file_that_mixes_its_batch_is_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    mixed = ("ReduceMean", ["f"], ["m"], {"axes": [0], "keepdims": 1})
    nodes = [*FLAT, mixed, ("Add", ["f", "m"], ["s"]), ("MatMul", ["s", "w"], ["y"])]
    path.write_bytes(graph_of(nodes, sizes=(1, *GREY), w=WEIGHT))
    with pytest.warns(UserWarning, match="other logits"):
        checkpoint = certvit.load(path, mean=0.5, std=0.5)
    assert certvit.bound(checkpoint).upper == float("inf")


def test_edited_files_are_read_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No other error, and no other file is opened. More: python -m tests.soundness.file_fuzz."""
    nodes = [
        ("Shape", ["x"], ["s"]),
        ("Slice", ["s", "zero", "one"], ["b"]),
        ("Concat", ["b", "rest"], ["t"], {"axis": 0}),
        ("Reshape", ["x", "t"], ["f"]),
        ("MatMul", ["f", "w"], ["z"]),
        ("Softmax", ["z"], ["p"], {"axis": -1}),
        ("Transpose", ["p"], ["q"], {"perm": [1, 0]}),
        ("Transpose", ["q"], ["y"], {"perm": [1, 0]}),
    ]
    data = graph_of(nodes, w=WEIGHT, zero=np.array([0]), one=np.array([1]), rest=np.array([16]))
    rng = random.Random(5)
    path = tmp_path / "net.onnx"
    outcomes = set()
    for _ in range(150):
        path.write_bytes(edited_onnx(data, rng))
        try:
            certvit.load(path, mean=0.5, std=0.5)
            outcomes.add(0)
        except CertvitError as failure:
            outcomes.add(failure.code if "\n" not in failure.message else "lines")
    assert outcomes == {0, 3, 4}
