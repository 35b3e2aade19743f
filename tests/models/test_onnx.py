"""ONNX files: the network that is read is the one that was exported, with its bounds and radii."""

import io
from pathlib import Path

import pytest
import timm
import torch
from torch import Tensor, nn

import certvit
from certcli.models.onnx.file import read_model
from certcli.models.onnx.network import network_of

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

SIZE = (3, 16, 16)


def small_vit() -> nn.Module:
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


NETWORKS = {"vit": small_vit, "swin": small_swin, "resnet": small_resnet}


def filled(net: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(3)
    for value in net.parameters():
        width = value[0].numel() if value.dim() > 1 else 16
        value.data = torch.randn(value.shape, generator=generator) * width**-0.5
    for part in net.modules():
        if isinstance(part, (nn.LayerNorm, nn.BatchNorm2d)):
            part.weight.data += 1
    return net.eval()


def exported(net: nn.Module, path: Path, opset: int, dynamo: bool = False) -> Path:
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


def relative(ours: Tensor, theirs: Tensor) -> float:
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
    """Constants in the file are float32: its bounds differ from those of the network by 1e-6."""
    net = filled(NETWORKS[name]())
    path = exported(net, tmp_path / "net.onnx", opset, dynamo)
    read, size = network_of(path, read_model(path)[0])
    images = torch.rand(2, *SIZE, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    with torch.no_grad():
        logits = net.double()(images)
        assert relative(read.double()(images), logits) < 1e-6
    assert size == SIZE
    net.float()
    ours = certvit.load(path, mean=0.5, std=0.5)
    theirs = certvit.load(net, mean=0.5, std=0.5, input_size=SIZE)
    assert ours.reading.doubts == ()
    assert certvit.bound(ours).upper <= certvit.bound(theirs).upper * (1 + 1e-6)
    if name == "vit":
        labels = certvit.network(theirs)(images.float()).argmax(1)
        radii = [
            [
                row.radius
                for row in certvit.certify(each, images, labels, method="local", effort="norms")
            ]
            for each in (ours, theirs)
        ]
        assert min(radii[1]) > 0
        assert radii[0] == pytest.approx(radii[1], rel=1e-3)
