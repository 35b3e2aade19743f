"""ONNX files: the network that is read is the one that was exported, with its bounds and radii."""

import io
from pathlib import Path

import pytest
import timm
import torch
from torch import Tensor, nn

import certvit
from certcli.models.onnx.file import read_model
from certcli.models.onnx.network import network_of_onnx
from tests.helpers.onnx_graph import Node, graph_of

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
        patch_size=2,
        window_size=4,
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


def exported_onnx(net: nn.Module, path: Path, opset: int, dynamo: bool = False) -> Path:
    """Write a network as a batch of one; the older exporter names the batch and takes any."""
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


def relative_distance(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize(
    ("name", "opset", "dynamo"),
    [
        ("vit", 14, False),
        ("vit", 17, False),
        ("vit", 20, True),
        ("swin", 16, False),
        ("swin", 18, True),
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
        logits = net.double()(images)
        assert relative_distance(read.double()(images), logits) < 1e-6
    assert size == SIZE
    net.float()
    ours = certvit.load(path, mean=0.5, std=0.5)
    theirs = certvit.load(net, mean=0.5, std=0.5, input_size=SIZE)
    assert ours.reading.doubts == ()
    assert certvit.bound(ours).upper <= certvit.bound(theirs).upper * (1 + 1e-6)
    labels = certvit.network(theirs)(images.float()).argmax(1)
    radii = [
        [
            row.radius
            for row in certvit.certify(each, images, labels, method="local", effort="norms")
        ]
        for each in (ours, theirs)
    ]
    assert max(radii[1]) > 0
    # an exporter folds statistics into the convolution before them: one map in place of two
    assert all(one >= other * (1 - 1e-3) for one, other in zip(*radii, strict=True))


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


def test_files_of_equal_weights_and_other_operators_have_other_digests(tmp_path: Path) -> None:
    path = exported_onnx(filled(small_resnet()), tmp_path / "net.onnx", 17)
    digests = set()
    for op in ("Relu", "Tanh", "Sigmoid"):
        model = read_model(path)[0]
        for node in model.graph.node:
            node.op_type = op if node.op_type == "Relu" else node.op_type
        path.write_bytes(model.SerializeToString())
        checkpoint = certvit.load(path, mean=0.5, std=0.5)
        assert certvit.load(path, mean=0.5, std=0.5).digest == checkpoint.digest
        digests.add(checkpoint.digest)
        path = exported_onnx(filled(small_resnet()), tmp_path / "net.onnx", 17)
    assert len(digests) == 3


def test_what_is_recognised_has_the_factors_of_the_file(tmp_path: Path) -> None:
    """GELU of a rounded sqrt(2), and scores times a number that is not 1 / sqrt(width)."""

    class Spelled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(16)
            self.maps = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
            self.head = nn.Linear(16, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(x.reshape(-1, 48, 16))
            q, k, v = (part(x).reshape(-1, 48, 2, 8).permute(0, 2, 1, 3) for part in self.maps[:3])
            mixed = ((q * 0.4) @ (k * 0.7).transpose(-1, -2) / 0.9).softmax(-1) @ v
            x = x + self.maps[3](mixed.permute(0, 2, 1, 3).reshape(-1, 48, 16))
            x = 0.3 * x * (1 + torch.erf(x / 1.5))
            return self.head(x.mean(1))

    net = filled(Spelled())
    path = exported_onnx(net, tmp_path / "net.onnx", 17)
    read, _ = network_of_onnx(path, read_model(path)[0])
    kinds = {type(part).__name__: part for part in read.children()}
    assert {"Attention", "GELU"} <= set(kinds)
    images = torch.rand(2, *SIZE, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    with torch.no_grad():
        assert relative_distance(read.double()(images), net.double()(images)) < 1e-6
    assert kinds["Attention"].scale == pytest.approx(0.4 * 0.7 / 0.9, rel=1e-7)
