"""What an ONNX file of a stranger may not do: each is refused in one line, before anything is made."""

import random
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import certvit
from certcli.system.errors import ArchitectureError, CertvitError, CheckpointError
from tests.helpers.commands import attempt
from tests.helpers.onnx_graph import SIZE, graph_of
from tests.soundness.edits import edited_onnx


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
    "four images at once": lambda: graph_of(LINEAR, sizes=(4, *SIZE), w=WEIGHT),
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
    path.write_bytes(graph_of(nodes, sizes=(1, *SIZE), w=WEIGHT))
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
