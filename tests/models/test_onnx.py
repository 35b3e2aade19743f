"""ONNX files: the network that is read is the one that was exported, with its bounds and radii."""

import contextlib
import io
import math
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from torch import Tensor, nn

import certvit
from certcli.checkpoint.record import InputSpec
from certcli.enclosure.zonotopes.domain import l2_ball
from certcli.enclosure.zonotopes.network import LocalNetwork
from certcli.engine.table import NoRule
from certcli.models.in_memory import open_module
from certcli.models.onnx import open as door
from certcli.models.onnx.file import read_model
from certcli.models.onnx.open import Runtime, network_of_onnx
from certcli.models.pixels import PixelModel
from certcli.nn.attention import LipschitzAttention
from certcli.nn.surgery import REPLACEMENTS
from certcli.system.errors import CertvitError, NoBoundError, UsageError
from tests.helpers.enclosed import ZONOTOPES, Enclosed
from tests.helpers.grids import EVERY, crossed
from tests.helpers.lipschitz_cases import RULES, build_row
from tests.helpers.onnx_graph import Node, graph_of
from tests.helpers.slopes import IMAGE

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

SIZE = (3, 16, 16)


def one_block_vit() -> nn.Module:
    return timm.create_model(
        "vit_tiny_patch16_224",
        img_size=16,
        patch_size=8,
        embed_dim=24,
        depth=1,
        num_heads=3,
        num_classes=4,
    )


def small_swin() -> nn.Module:
    return timm.create_model(
        "swin_tiny_patch4_window7_224",
        img_size=16,
        patch_size=4,
        window_size=2,
        embed_dim=8,
        depths=(2,),
        num_heads=(2,),
        num_classes=4,
    )


def small_resnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, 2, 1, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(24, 4),
    )


NETWORKS = {"vit": one_block_vit, "swin": small_swin, "resnet": small_resnet}


def filled(net: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(3)
    for value in net.parameters():
        width = value[0].numel() if value.dim() > 1 else 16
        value.data = torch.randn(value.shape, generator=generator) * width**-0.5
    for part in net.modules():
        if isinstance(part, (nn.LayerNorm, nn.BatchNorm2d)):
            part.weight.data += 1
    return net.eval()


def exported_onnx(
    net: nn.Module, path: Path, opset: int, dynamo: bool = False, image: Tensor | None = None
) -> Path:
    """Write a network as a batch of one; the older exporter names the batch and takes any."""
    if image is None:
        image = torch.rand(1, *SIZE, generator=torch.Generator().manual_seed(1))
    if dynamo:
        pytest.importorskip("onnxscript")
        options = {"opset_version": opset, "verbose": False, "external_data": False}
        torch.onnx.export(net, (image,), str(path), dynamo=True, **options)
        return path
    stream = io.BytesIO()
    options = {"opset_version": opset, "input_names": ["x"], "dynamic_axes": {"x": {0: "b"}}}
    torch.onnx.export(net, (image,), stream, dynamo=False, **options)
    path.write_bytes(stream.getvalue())
    return path


QUICK = (
    "layer-norm-linear", "quick-gelu", "maxmin", "attention", "attention-l2-untied", "mixed-tokens", "floor-norm",
    "attention-cosine", "attention-lipschitz-norm-after-norm", "attention-l2-windows", "attention-l2-gated",
)  # fmt: skip
"""Of the rows of the test table; CERTVIT_SOUNDNESS takes all that every way reads, with radii."""
INF = float("inf")
LARGER = {
    # f p + G: a sum of two branches, in place of one theorem for both
    "attention-l2-gated": (1.012, 1.0), "attention-cosine-after-norm": (1.67, 1.0), "lerp": (3.5, 1.0),
    # parts of the channels are moved, and stand beside each other: the root of the parts' number
    "rolled": (2.01, 1.01), "rolled-between-linear": (1.36, 1.01), "sort-partly": (2.83, 2.04),
    # curves as products and quotients; gelu-tanh by the older exporter alone
    "hard-mish": (22.0, 1.01), "hard-swish": (5.3, 1.0), "soft-pairs": (502.0, 1.01), "gelu-tanh": (428.0, 24.2),
    "soft-pairs-partly": (2250.0, 1.01),
    # norms between maps and products; pixels scaled by numbers below 0; one query that no image changes
    "attention-qk-norm": (1.01, 7.9), "normalize-then-square": (2.7, INF), "normalize-square": (2.7, INF),
    "attention-pool": (2.14, INF),
}  # fmt: skip
"""What stays as it is written -> how many times larger the bound and smaller a radius may be."""
OTHERWISE = {
    "what is recognised is proven better than what the row writes": (
        "attention-written", "attention-fused", "conv-transposed",
    ),
    "written out, and no theorem for a part": (
        "rms-norm-2d", "rms-norm-act-2d", "simple-norm", "simple-norm-2d", "l2-normalize", "response-norm",
        "sort-shift-of-one", "attention-channels", "attention-windows-cosine", "attention-positional",
        "spelled-rounded-curves", "unfold", "index", "curves", "slices", "fold", "resize", "roll-flat",
    ),
    "no exporter writes it, or no reader reads it, in one of the ways": (
        "conv-dilated", "conv1d", "rms-norm", "rms-norm-torch", "avg-pool-1d", "leaky", "avg-pool-ceil", "adaptive",
        "global-pool", "cat-pool", "conv-same-uneven", "conv-circular", "variances", "deviations", "mish", "softplus",
        "upsample",
        "mirror", "conv-reflect", "attention-torch", "attention-torch-layer", "attention-causal", "spellings", "parts",
        "attention-moving-mask", "mix-orthogonal", "mix-matrices", "constant-branches", "choice-of-scores",
        "add-product", "conv-3d", "conv-3d-patches", "adaptive-max", "adaptive-3d", "adaptive-1d",
    ),
    "no classifier": (
        "linear-function", "mean-of-fewer", "shifted-transposed", "matrix-transpose", "constant-matrix",
        "constant-matrices",
    ),
}  # fmt: skip
COMPARED = [row for row in RULES if not any(row in names for names in OTHERWISE.values())]


def proven_numbers(opened: Any, images: Tensor, labels: Tensor) -> list[float]:
    """Return the logarithm of the global bound, and, where the local method has rules, radii or, of
    the quick rows, what one walk leaves of the margins' gain: 1 over their loss near the image.
    """
    numbers = [certvit.bound(opened).upper.log10()]
    with contextlib.suppress(NoBoundError, NoRule):
        if EVERY:
            rows = certvit.certify(opened, images, labels, method="local", effort="zonotope")
            return numbers + [row.radius for row in rows]
        logits = certvit.network(opened).double()(images)[0]
        margins = (logits[labels] - logits)[torch.arange(len(logits)) != labels]
        numbers += (1 / (margins - torch.tensor(margins_near(opened, images)))).tolist()
    return numbers


def margins_near(opened: Any, pixels: Tensor) -> list[float]:
    """Return the bound that one walk proves of each margin near an image (1, c, h, w)."""
    model = certvit.network(opened).double()
    ball = l2_ball(pixels.double(), 1e-4, squares_up_to=0, limit=1, by_fibres=True)
    label = int(model(pixels.double()).argmax())
    found: list[float] = LocalNetwork(model, opened.record.input.size).margins(ball, label).tolist()
    return found


def by_the_older_exporter(net: nn.Module, image: Tensor, folder: Path) -> nn.Module:
    stream = io.BytesIO()
    torch.onnx.export(net, (image,), stream, dynamo=False, opset_version=17)
    (folder / "net.onnx").write_bytes(stream.getvalue())
    return network_of_onnx(folder / "net.onnx", read_model(folder / "net.onnx")[0])[0]


def by_the_newer_exporter(net: nn.Module, image: Tensor, folder: Path) -> nn.Module:
    newer = exported_onnx(net, folder / "newer.onnx", 20, dynamo=True, image=image)
    return network_of_onnx(newer, read_model(newer)[0])[0]


WAYS: dict[str, Callable[[nn.Module, Tensor, Path], nn.Module]] = {
    "onnx": by_the_older_exporter,
    "export": lambda net, image, folder: torch.export.export(net, (image,)).module(),
    **({"newer": by_the_newer_exporter} if EVERY else {}),
}


def read_both_ways(
    net: nn.Module, image: Tensor, folder: Path, ways: Iterable[str] = tuple(WAYS)
) -> dict[str, nn.Module]:
    return {way: WAYS[way](net, image, folder) for way in ways}


@pytest.mark.parametrize("row", COMPARED if EVERY else QUICK)
def test_equal_functions_have_equal_bounds_and_radii(tmp_path: Path, row: str) -> None:
    """In float64. An ONNX file has eps, 1 - t and Python's numbers as float32: that is 3e-8."""
    net = build_row(row)
    net = (
        net if net(torch.rand(1, *IMAGE).double()).dim() == 2 else nn.Sequential(net, nn.Flatten())
    ).eval()
    image = torch.rand(1, *IMAGE, generator=torch.Generator().manual_seed(1)).double()
    labels = net((image - 0.4) / 0.3).argmax(1)
    upper, *radii = proven_numbers(open_module(net, 0.4, 0.3, IMAGE), image, labels)
    larger, smaller = LARGER.get(row, (1.0, 1.0))
    for way, read in read_both_ways(net, image, tmp_path).items():
        with torch.no_grad():
            assert torch.allclose(read.double()(image), net(image), rtol=1e-6, atol=1e-6), way
        ours, *others = proven_numbers(open_module(read, 0.4, 0.3, IMAGE), image, labels)
        closeness = 1e-9 if way == "export" else 4e-8
        assert ours <= upper + math.log10(larger) + closeness, way
        assert larger > 1 or ours >= upper - closeness, way
        assert smaller == INF or len(others) >= len(radii), way
        pairs = zip(others, radii)
        worse = smaller if EVERY else max(smaller, larger)
        assert all(one * worse >= other * (1 - 1e-6) for one, other in pairs), way


ALIKE = (
    ("Add", "Sub", "Mul", "Div", "Max", "Min"),
    ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceL2"),
    ("Sqrt", "Reciprocal", "Erf", "Sigmoid", "Exp"),
)
"""Operators that an edited file may have in place of each other."""


def nearly_the_same(data: bytes, rng: random.Random) -> bytes:
    """Return the file with another operator, order of inputs, or number."""
    model = onnx.ModelProto.FromString(data)
    node = rng.choice(model.graph.node)
    node.op_type = rng.choice(next((ops for ops in ALIKE if node.op_type in ops), [node.op_type]))
    if rng.random() < 0.3:
        node.input[:] = rng.sample(list(node.input), len(node.input))
    stored = [one.t for each in model.graph.node for one in each.attribute if one.HasField("t")]
    tensor = rng.choice([*model.graph.initializer, *stored])
    values = onnx.numpy_helper.to_array(tensor).copy()
    if values.dtype.kind == "f":
        values.flat[rng.randrange(values.size)] += rng.choice((0.0, 0.1))
    tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))
    return bytes(model.SerializeToString())


@pytest.mark.parametrize(
    "row",
    [
        *("attention", "attention-l2-windows", "attention-l2-gated", "attention-cosine-after-norm"),
        *("attention-lipschitz-norm-after-norm", "floor-norm-linear", "gelu", "maxmin"),
    ],
)
def test_what_is_joined_computes_what_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: str
) -> None:
    """Of the file, and of edited ones, in which a pattern is only almost there."""
    images = torch.rand(3, *IMAGE, generator=torch.Generator().manual_seed(1)).double() * 3 - 1
    net = nn.Sequential(build_row(row), nn.Flatten()).eval()
    path = exported_onnx(net, tmp_path / "net.onnx", 17, image=images[:1])
    data = path.read_bytes()
    rng = random.Random(7)
    compared = 0
    for trial in range(1000 if EVERY else 14):
        path.write_bytes(nearly_the_same(data, rng) if trial else data)
        try:
            model = read_model(path)[0]
            joined, _ = network_of_onnx(path, model)
            with monkeypatch.context() as patch, torch.no_grad():
                patch.setattr(door, "join", lambda program: None)
                written = network_of_onnx(path, model)[0].double()(images)
        except (CertvitError, RuntimeError):
            continue
        with torch.no_grad():
            ours = joined.double()(images)
        assert torch.allclose(ours, written, rtol=1e-7, atol=1e-7, equal_nan=True), trial
        compared += 1
    assert compared > 5


@pytest.mark.parametrize(
    ("name", "chosen"), crossed(["l2", "scsa", "lnorm", "l2-untied-value"], [*WAYS])
)
def test_attentions_of_shifted_windows_are_recognised(
    tmp_path: Path, name: str, chosen: str
) -> None:
    """With a table of positions in every window, and a mask of their own in some."""
    net = small_swin()
    for layer in net.layers:
        for block in layer.blocks:
            block.attn = REPLACEMENTS.load(f"{name}-attention")(block.attn)
    net = filled(net).double()
    image = torch.rand(1, *SIZE, generator=torch.Generator().manual_seed(1)).double()
    upper = certvit.bound(open_module(net, 0.5, 0.5, SIZE)).upper.log10()
    for way, read in read_both_ways(net, image, tmp_path, (chosen,)).items():
        with torch.no_grad():
            assert torch.allclose(read.double()(image), net(image), rtol=1e-6, atol=1e-6), way
        ours = open_module(read, 0.5, 0.5, SIZE)
        parts = certvit.network(ours).modules()
        assert len([part for part in parts if isinstance(part, LipschitzAttention)]) == 2, way
        closeness = 1e-9 if way == "export" else 4e-8
        assert certvit.bound(ours).upper.log10() == pytest.approx(upper, abs=closeness), way


@pytest.mark.parametrize("name", ["digits", "mnist"])
def test_shipped_networks_have_their_bounds_and_radii_however_they_are_read(
    tmp_path: Path, name: str
) -> None:
    """certvit/digits differs by 4.5e-8: its module, too, computes 1 - t of its residuals in float32."""
    native = certvit.load(f"certvit/{name}")
    spec = native.record.input
    image = torch.rand(1, *spec.size, generator=torch.Generator().manual_seed(1))
    upper = certvit.bound(native).upper.log10()
    net: Any = certvit.network(native).net.float()
    for way, read in read_both_ways(net, image, tmp_path).items():
        opened = open_module(read, spec.mean, spec.std, spec.size)
        exactly = pytest.approx(upper, abs=1e-9 if name == "mnist" else 3e-8)
        assert certvit.bound(opened).upper.log10() == exactly, way
        if EVERY:
            margins = margins_near(native, image)
            assert margins_near(opened, image) == pytest.approx(margins, rel=1e-5), way


def relative_distance(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize(
    ("name", "opset", "dynamo"),
    [
        ("vit", 20, True),
        ("swin", 16, False),
        ("resnet", 12, False),
    ],
)
def test_an_export_has_the_logits_bounds_and_radii_of_its_network(
    tmp_path: Path, name: str, opset: int, dynamo: bool
) -> None:
    """Or better ones. Constants in the file are float32: bounds of equal maps differ by 1e-6."""
    net = filled(NETWORKS[name]())
    path = exported_onnx(net, tmp_path / "net.onnx", opset, dynamo)
    read, size = network_of_onnx(path, read_model(path)[0])
    images = torch.rand(2, *SIZE, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    with torch.no_grad():
        assert relative_distance(read.double()(images), net.double()(images)) < 1e-6
    assert size == SIZE
    net.float()
    ours = certvit.load(path, mean=0.5, std=0.5)
    theirs = certvit.load(net, mean=0.5, std=0.5, input_size=SIZE)
    assert ours.reading.doubts == ()
    assert certvit.bound(ours).upper <= certvit.bound(theirs).upper * (1 + 1e-6)
    if name == "swin" and not EVERY:
        return
    found, expected = (margins_near(each, images[:1]) for each in (ours, theirs))
    # an exporter folds statistics into the convolution before them: one map in place of two
    assert found == pytest.approx(expected, rel=1e-4)


def test_quantised_weights_are_the_numbers_that_they_stand_for(tmp_path: Path) -> None:
    """int8 by channel and int4: (q - zero) scale, rounded to float32 as ONNX Runtime has it."""
    helper, kinds = onnx.helper, onnx.TensorProto
    rows = torch.arange(-8, 8).repeat(3, 1)
    weights = {
        "int8": (helper.make_tensor("q", kinds.INT8, (16, 3), (rows.T * 9).flatten().tolist()), 9),
        "int4": (helper.make_tensor("q", kinds.INT4, (16, 3), rows.T.flatten().tolist()), 1),
    }
    scales = torch.tensor([0.1, 0.03, 0.7])
    for name, (stored, factor) in weights.items():
        nodes: list[Node] = [
            ("DequantizeLinear", ["q", "s"], ["w"], {"axis": 1}),
            ("Flatten", ["x"], ["f"]),
            ("MatMul", ["f", "w"], ["y"]),
        ]
        path = tmp_path / f"{name}.onnx"
        path.write_bytes(graph_of(nodes, opset=21, q=stored, s=scales.numpy()))
        # ONNX Runtime's default session rounds the inputs of such products to 8 bits, and is doubted
        with pytest.warns(UserWarning, match="other logits"):
            checkpoint = certvit.load(path, mean=0.0, std=1.0)
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
        session = onnxruntime.InferenceSession(path.read_bytes(), options)
        pixels = torch.rand(1, 1, 4, 4, generator=torch.Generator().manual_seed(1))
        as_written = torch.from_numpy(session.run(None, {"x": pixels.numpy()})[0])
        assert relative_distance(certvit.network(checkpoint)(pixels), as_written) < 1e-5
        (weight,) = (value for value in checkpoint.tensors.values() if value.dim() == 2)
        assert torch.equal(weight, (rows * factor).float() * scales[:, None])


def quantised_file(folder: Path, zero: Any, scale: float) -> Path:
    """Write two linear maps, and between them steps that the values of some images go beyond."""
    random = np.random.default_rng(5)
    nodes: list[Node] = [
        ("Flatten", ["x"], ["f"]),
        ("MatMul", ["f", "w"], ["h"]),
        ("QuantizeLinear", ["h", "s", "z"], ["q"]),
        ("DequantizeLinear", ["q", "s", "z"], ["d"]),
        ("Relu", ["d"], ["r"]),
        ("MatMul", ["r", "v"], ["y"]),
    ]
    w, v = (random.normal(size=size).astype(np.float32) for size in ((32, 8), (8, 3)))
    path = folder / "net.onnx"
    data = graph_of(
        nodes, sizes=("b", *IMAGE), opset=21, w=w, v=v, z=np.array(zero), s=np.float32(scale)
    )
    path.write_bytes(data)
    return path


STEPS = [(np.uint8(128), 0.02), (np.int8(-3), 0.03), (np.uint16(30000), 1e-4), (np.int16(9), 1e-4)]


@pytest.mark.parametrize(("zero", "scale"), STEPS)
def test_quantised_activations_lie_in_their_enclosure_as_onnx_runtime_has_them(
    tmp_path: Path, zero: Any, scale: float
) -> None:
    """Margins of random points, of corners and beyond the last step; float32 rounds them by 1e-5."""
    path = quantised_file(tmp_path, zero, scale)
    net, size = network_of_onnx(path, read_model(path)[0])
    runtime = Runtime(path, path.read_bytes())
    model = PixelModel(InputSpec(size=IMAGE, mean=(0.0,) * 2, std=(1.0,) * 2), net).double().eval()
    row = Enclosed(model)
    image = torch.rand(1, *size, generator=torch.Generator().manual_seed(1)).double()
    finite = 0
    for radius in (0.1, 2.0, *[1e-6] * EVERY):
        for walk in [*ZONOTOPES.values()][
            STEPS.index((zero, scale)) % 2 * (not EVERY) :: 1 if EVERY else 2
        ]:
            walked = walk(row, image, radius, 8)
            logits = runtime.run(torch.cat([pixels for _, pixels in walked.places]))
            margins = logits[:, [walked.label]] - logits
            others = [place for place in range(3) if place != walked.label]
            if walked.bounds is not None:
                finite += 1
                assert bool((margins[:, others] >= walked.bounds - 1e-5 * logits.abs().max()).all())
    assert finite > 2


def test_a_quantised_file_is_attacked_with_square_and_smoothed_as_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = certvit.load(quantised_file(tmp_path, np.uint8(128), 0.02), mean=0.0, std=1.0)
    assert "a staircase, which is not Lipschitz" in certvit.bound(opened).bound.why
    images = torch.rand(4, *IMAGE, generator=torch.Generator().manual_seed(1))
    pixels = images.clone().requires_grad_()
    certvit.network(opened)(pixels).amax(1).sum().backward()
    assert bool(pixels.grad.any())
    labels = certvit.network(opened)(images).argmax(1)
    assert "square" in str(certvit.attack(opened, images, labels, norm="linf", radii=[0.3]))
    smoothing: dict[str, Any] = {"method": "smoothing", "sigma": 0.1, "samples": 100}
    assert any(row.radius > 0 for row in certvit.certify(opened, images, labels, **smoothing))
    with pytest.raises(UsageError, match="as it is stored, not in bf16"):
        certvit.certify(opened, images, labels, precision="bf16", **smoothing)
    other = (int(labels[0]) + 1) % 3
    rows = torch.eye(3, dtype=torch.float64)
    monkeypatch.setattr(Runtime, "run", lambda _, inputs: rows[[other] * len(inputs)])
    (row,) = certvit.certify(opened, images[:1], labels[:1], **smoothing)
    assert row.prediction == other
