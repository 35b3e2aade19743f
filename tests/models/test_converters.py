"""Files of other libraries: the converted network computes the original's logits, or the file is
refused in one line.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torchvision.models import VisionTransformer
from torchvision.models.convnext import CNBlockConfig, ConvNeXt
from torchvision.models.swin_transformer import (
    PatchMergingV2,
    SwinTransformer,
    SwinTransformerBlockV2,
)

from certcli.checkpoint.file import Checkpoint
from certcli.models import build
from certcli.models.converters import libraries
from certcli.models.converters.base import renamed
from certcli.models.converters.transformers_families import FAMILIES
from certcli.models.open import open_checkpoint
from certcli.models.origins import Hints
from certcli.system.errors import ArchitectureError
from tests.models.transformers_logits import FILE, PIXELS, headless, seeded_images, weights

TRANSFORMERS: dict[str, dict[str, Any]] = json.loads(FILE.read_text())


def transformers_folder(
    row: Mapping[str, Any],
    folder: Path,
    pixels: Mapping[str, Any] = PIXELS,
    tensors: Mapping[str, Tensor] | None = None,
    **config: Any,
) -> str:
    save_file(
        weights(row["shapes"]) if tensors is None else dict(tensors), folder / "model.safetensors"
    )
    (folder / "config.json").write_text(json.dumps({**row["config"], **config}))
    (folder / "preprocessor_config.json").write_text(json.dumps(pixels))
    return str(folder)


def headless_folder(row: Mapping[str, Any], folder: Path, **more: Tensor) -> str:
    model = row["config"]["architectures"][0].partition("ForImage")[0] + "Model"
    return transformers_folder(
        row, folder, tensors={**headless(row), **more}, architectures=[model]
    )


@torch.no_grad()
def require_recorded_logits(name: str, folder: Path) -> tuple[Checkpoint, Tensor]:
    """Require a row's network, opened here, to compute the logits that transformers did."""
    row = TRANSFORMERS[name]
    checkpoint = open_checkpoint(transformers_folder(row, folder))
    logits = seeded_outputs(checkpoint)
    expected = torch.tensor(row["logits"], dtype=torch.float64)
    # float64 sums in another order
    torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9)
    return checkpoint, logits


@torch.no_grad()
def seeded_outputs(checkpoint: Checkpoint) -> Tensor:
    return build.load(checkpoint, dtype=torch.float64)(seeded_images(checkpoint.record.input.size))


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_outputs_of_transformers_are_kept(name: str, tmp_path: Path) -> None:
    checkpoint, logits = require_recorded_logits(name, tmp_path)
    row = TRANSFORMERS[name]
    assert row["config"]["architectures"][0] in checkpoint.reading.line()
    ends = open_checkpoint(headless_folder(row, tmp_path), Hints(features=True))
    features = torch.tensor(row["features"], dtype=torch.float64)
    torch.testing.assert_close(seeded_outputs(ends), features, rtol=1e-9, atol=1e-9)
    assert "features" in {fact.name for fact in ends.reading.facts}
    saved = tmp_path / "saved.safetensors"
    checkpoint.write(saved)
    assert torch.equal(seeded_outputs(open_checkpoint(str(saved))), logits)


def without_logits() -> list[str]:
    """Return the classes that are converted, classifiers and models without a head, of which no
    logits are recorded.
    """
    recorded = {name for row in TRANSFORMERS.values() for name in row["config"]["architectures"]}
    headless = {name.partition("ForImage")[0] + "Model" for name in recorded}
    converted = {name for family in FAMILIES.values() for name in family.classes}
    return sorted(converted - recorded - headless)


def test_every_family_has_recorded_logits() -> None:
    assert without_logits() == []
    types = {row["config"]["model_type"] for row in TRANSFORMERS.values()}
    assert types == {*FAMILIES}
    names = {libraries.torchvision_family(make().state_dict()) for make, _ in TORCHVISION.values()}
    assert names == {*libraries.TORCHVISION}


def test_labels_out_of_order_or_alike(tmp_path: Path) -> None:
    for labels, names in (
        ({"2": "c", "0": "a", "1": "b"}, ("a", "b", "c")),
        ({"0": "a", "1": "b", "5": "c"}, None),
        ({"0": "a", "1": "a", "2": "b"}, None),
    ):
        folder = transformers_folder(TRANSFORMERS["vit"], tmp_path, id2label=labels)
        checkpoint = open_checkpoint(folder, Hints(arch_args={"num_heads": 4}))
        assert (checkpoint.record.classes, checkpoint.record.class_names) == (3, names)
        assert checkpoint.reading.doubts == (
            "config.json describes the architecture: --arch-arg num_heads ignored",
        )


def torchvision_swin(**parts: Any) -> nn.Module:
    return SwinTransformer([4, 4], 8, [1, 2], [1, 2], [4, 4], num_classes=3, **parts)


def torchvision_swin_v2() -> nn.Module:
    return torchvision_swin(block=SwinTransformerBlockV2, downsample_layer=PatchMergingV2)


STATISTICS: dict[str, Any] = {"mean": (0.5,), "std": (0.25,)}
TORCHVISION: dict[str, tuple[Callable[[], nn.Module], Hints]] = {
    "vit": (
        lambda: VisionTransformer(16, 8, 2, 2, 16, 24, num_classes=3),
        Hints(None, {"num_heads": 2}, **STATISTICS),
    ),
    "swin": (torchvision_swin, Hints(None, {"img_size": 32}, **STATISTICS)),
    "swin, version 2": (
        torchvision_swin_v2,
        Hints(None, {"img_size": 32}, **STATISTICS),
    ),
    "convnext": (
        lambda: ConvNeXt(
            [
                CNBlockConfig(4, 6, 1),
                CNBlockConfig(6, 8, 1),
                CNBlockConfig(8, 8, 2),
                CNBlockConfig(8, None, 1),
            ],
            num_classes=3,
        ),
        Hints(None, {"img_size": 32}, **STATISTICS),
    ),
}


@pytest.mark.parametrize("name", TORCHVISION)
def test_torchvision_logits_are_kept(name: str, tmp_path: Path) -> None:
    make, hints = TORCHVISION[name]
    theirs = make().eval()
    random = weights({key: value.shape for key, value in theirs.named_parameters()})
    theirs.load_state_dict(random, strict=False)
    torch.save(theirs.state_dict(), tmp_path / "weights.pth")
    checkpoint = open_checkpoint(str(tmp_path / "weights.pth"), hints)
    model = build.load(checkpoint, dtype=torch.float64)
    pixels = seeded_images(checkpoint.record.input.size)
    with torch.no_grad():
        torch.testing.assert_close(
            model(pixels), theirs.double()((pixels - 0.5) / 0.25), rtol=1e-9, atol=1e-9
        )
    assert "torchvision" in checkpoint.reading.line()


def vit_net() -> dict[str, Tensor]:
    net = timm.create_model(
        "vit_tiny_patch16_224", img_size=16, embed_dim=12, depth=1, num_classes=3
    )
    return weights({key: value.shape for key, value in net.state_dict().items()})


SMALL = {"img_size": 16, "embed_dim": 12, "depth": 1}


def prefixed(prefix: str) -> dict[str, Tensor]:
    return {prefix + name: value for name, value in vit_net().items()}


def openclip(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """An image tower of OpenCLIP, whose projection is the head, beside a tensor of the text's
    tower.
    """
    rows = [
        (r"^blocks\.", "transformer.resblocks."), (r"patch_embed\.proj", "conv1"), (r"^pos_embed", "positional_embedding"),
        (r"^cls_token", "class_embedding"), (r"^norm_pre", "ln_pre"), (r"^norm\.", "ln_post."), (r"\.norm(\d)", r".ln_\1"),
        (r"qkv\.", "in_proj_"), (r"attn\.proj", "attn.out_proj"), (r"fc1", "c_fc"), (r"fc2", "c_proj"),
        (r"^head.weight", "proj"),
    ]  # fmt: skip
    network_tensors = renamed(
        {name: value for name, value in tensors.items() if name != "head.bias"}, rows
    )
    network_tensors |= {
        "proj": network_tensors["proj"].T.contiguous(),
        "class_embedding": network_tensors["class_embedding"].flatten(),
    }
    network_tensors["positional_embedding"] = network_tensors["positional_embedding"][0]
    return {f"visual.{name}": value for name, value in network_tensors.items()} | {
        "token_embedding.weight": torch.ones(2, 2)
    }


_SWIN_SHAPE = {
    "img_size": 32,
    "patch_size": 4,
    "embed_dim": 8,
    "depths": [1, 1],
    "num_heads": [1, 2],
    "window_size": 4,
}
_VIT_SHAPE = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2}
ORIGINAL: dict[str, tuple[str, dict[str, Any], Callable[[dict[str, Tensor]], dict[str, Tensor]]]] = {
    "Swin": (  # its merges end a stage
        "swin_tiny_patch4_window7_224",
        _SWIN_SHAPE,
        lambda found: renamed(found, [(r"layers\.1\.downsample", "layers.0.downsample"), (r"head\.fc\.", "head.")]),
    ),
    "DINOv2": (
        "vit_small_patch14_dinov2", {**_VIT_SHAPE, "init_values": 0.1}, lambda found: {**found, "mask_token": torch.ones(1)}
    ),
    "ConvNeXt": (
        "convnext_tiny",
        {"dims": [4, 6, 8, 10], "depths": [1, 1, 2, 1]},
        lambda found: renamed(
            found,
            [
                (r"stages\.(\d)\.blocks", r"stages.\1"), (r"stages\.(\d)\.downsample", r"downsample_layers.\1"),
                (r"^stem", "downsample_layers.0"), (r"conv_dw", "dwconv"), (r"mlp\.fc(\d)", r"pwconv\1"),
                (r"head\.norm", "norm"), (r"head\.fc", "head"),
            ],
        ),
    ),
    "OpenCLIP": ("vit_base_patch32_clip_224", {**_VIT_SHAPE, "num_classes": 3}, openclip),
}  # fmt: skip
"""Architecture, arguments, and timm's tensors under the names of the repository that the network is from."""


def original_network(name: str) -> nn.Module:
    arch, arguments, _ = ORIGINAL[name]
    net = timm.create_model(arch, **{"num_classes": 3, **arguments}).eval()
    net.load_state_dict(weights({key: value.shape for key, value in net.state_dict().items()}))
    if name == "OpenCLIP":
        nn.init.zeros_(net.head.bias)
    return net


@pytest.mark.parametrize("name", ORIGINAL)
def test_original_names_pass_timms_own_filter(name: str, tmp_path: Path) -> None:
    arch, arguments, names = ORIGINAL[name]
    tensors = dict(original_network(name).state_dict())
    path = save_in(tmp_path, {"model": names(tensors)})
    found = open_checkpoint(path, Hints(arch, arguments))
    assert found.tensors.keys() == tensors.keys()
    assert all(torch.equal(found.tensors[key], value) for key, value in tensors.items())
    assert "timm's filter" in found.reading.line()


def test_an_original_index_is_the_one_that_timm_computes(tmp_path: Path) -> None:
    arch, arguments, names = ORIGINAL["Swin"]
    net = original_network("Swin")
    index = "layers.0.blocks.0.attn.relative_position_index"
    for value in (net.get_buffer(index), net.get_buffer(index).roll(1)):
        path = save_in(tmp_path, {**names(dict(net.state_dict())), index: value})
        if torch.equal(value, net.get_buffer(index)):
            assert (
                open_checkpoint(path, Hints(arch, arguments)).tensors.keys()
                == net.state_dict().keys()
            )
            continue
        with pytest.raises(ArchitectureError, match="relative_position_index"):
            open_checkpoint(path, Hints(arch, arguments))


def save_in(folder: Path, tensors: dict[str, Any]) -> str:
    torch.save(tensors, folder / "weights.pth")
    return str(folder / "weights.pth")
