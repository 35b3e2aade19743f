"""Files of other libraries: the converted network computes the original's logits, or the file is refused
in one line. What is assumed of others' files, and traps in which a wrong network fits.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
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
from certcli.checkpoint.record import InputSpec
from certcli.enclosure.zonotopes.domain import l2_ball
from certcli.enclosure.zonotopes.network import LocalNetwork
from certcli.evaluation.image_doubts import chance_doubt, image_doubts
from certcli.images.labelled import Images
from certcli.lipschitz.network import prove_network
from certcli.models import build
from certcli.models.assumptions import OWN, RECORD
from certcli.models.converters import libraries
from certcli.models.converters.base import renamed
from certcli.models.converters.transformers_families import FAMILIES
from certcli.models.open import open_checkpoint
from certcli.models.origins import Hints
from certcli.nn.blocks import TokenBatchNorm
from certcli.system.errors import ArchitectureError
from tests.helpers.commands import console
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


RGB = InputSpec((3, 32, 32), (0.5,) * 3, (0.5,) * 3)


@pytest.mark.parametrize(
    ("norm", "fc_norm"), [("identity", False), ("batchnorm", False), ("batchnorm", True)]
)
def test_the_competitions_networks_load_by_name_and_have_bounds(norm: str, fc_norm: bool) -> None:
    arguments = {"norm_layer": norm, "depth": 1, "fc_norm": fc_norm}
    model = build.load(build.initialise("certvit_vit_pgd_2_3_16", arguments, RGB, 10, seed=0))
    names = build.tensors_of(model).keys()
    assert ("blocks.0.norm1.running_mean" in names) == (norm == "batchnorm")
    assert ("fc_norm.running_mean" in names) == fc_norm
    assert not any(isinstance(module, nn.LayerNorm) for module in model.modules())
    assert prove_network(model, 10).upper.finite
    pixels = torch.rand(
        1, 3, 32, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    ball = l2_ball(pixels, 1e-6, squares_up_to=0, limit=1, by_fibres=True)
    assert bool(LocalNetwork(model.double(), (3, 32, 32)).margins(ball, 0).isfinite().all())


def test_batch_norm_over_tokens_is_torchs() -> None:
    ours = TokenBatchNorm(6)
    theirs = nn.BatchNorm1d(6)
    tokens = 2 + torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for norm in (ours, theirs):
            norm.weight.copy_(torch.linspace(-1, 2, 6))
            norm.bias.copy_(torch.linspace(3, -3, 6))
    assert torch.equal(ours(tokens), theirs(tokens.mT).mT), "in training"
    assert torch.equal(ours.running_var, theirs.running_var)  # type: ignore[arg-type]
    assert torch.equal(ours(tokens[:, 0]), theirs(tokens[:, 0])), "a pooled token"
    torch.testing.assert_close(ours.eval()(tokens), theirs.eval()(tokens.mT).mT)


WORDS: list[tuple[str, dict[str, Any], str]] = [
    ("no norm", {"norm_layer": "torch.nn.Identity"}, "one of batchnorm"),
    ("no activation", {"act_layer": "tanhh"}, "one of celu"),
    ("a list", {"act_layer": ["relu"]}, "act_layer is a word"),
    ("eps", {"norm_eps": 0}, "norm_eps"),
    ("eps as text", {"norm_eps": "small"}, "norm_eps"),
    ("nothing with an eps", {"norm_eps": 1e-5, "norm_layer": "identity"}, "no norm with an eps"),
    ("maps", {"norm_layer": "rmsnorm2d", "depth": 1}, "rmsnorm2d|image"),
]


@pytest.mark.parametrize(("name", "arguments", "named"), WORDS, ids=[row[0] for row in WORDS])
def test_other_words_are_refused(name: str, arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ArchitectureError, match=named):
        build.load(
            build.initialise(
                "certvit_vit_digits", arguments, InputSpec((1, 8, 8), (0.5,), (0.5,)), 10, seed=0
            )
        )


def test_eps_is_that_of_every_norm() -> None:
    net = build.create("vit_tiny_patch16_224", {"depth": 1, "norm_eps": 1e-5}, initialise=False)
    assert {module.eps for module in net.modules() if isinstance(module, nn.LayerNorm)} == {1e-5}
    own = build.create(
        "convnext_atto", {"norm_eps": 1e-3}, initialise=False
    )  # timm's constructor knows the word
    assert 1e-3 in {getattr(module, "eps", None) for module in own.modules()}


@dataclass(frozen=True)
class Trap:
    """A file called `name` with the weights of certvit_vit_digits, beside it `config`, read with
    `hints`.
    """

    hints: Hints
    said: str
    name: str = "model.safetensors"
    config: dict[str, Any] | None = None
    beside: str = ""


ARCH = "certvit_vit_digits"
CONFIG: dict[str, Any] = {
    "architecture": ARCH,
    "num_classes": 10,
    "num_features": 64,
    "global_pool": "token",
    "pretrained_cfg": {"input_size": [1, 8, 8], "mean": [0.5], "std": [0.5], "crop_pct": 0.9},
}


def hints_of(**arguments: Any) -> Hints:
    return Hints(ARCH, arguments)


def trap_file(trap: Trap, folder: Path) -> str:
    net = build.create(ARCH, {}, initialise=True)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(3.0)  # attention and GELU far from linear
    save_file(net.state_dict(), folder / trap.name)
    if trap.beside:
        save_file(net.state_dict(), folder / trap.beside)
    if trap.config is not None:
        (folder / "config.json").write_text(json.dumps(trap.config))
    return str(folder / trap.name)


QUESTIONS = {
    "heads": Trap(hints_of(num_heads=8), r"num_heads=8 and without \(heads 4\)"),
    "heads, with a config": Trap(Hints(None, {"num_heads": 8}), "num_heads=8", config=CONFIG),
    "activation": Trap(hints_of(act_layer="relu"), r"act_layer=relu and without \(activation GELU\)"),
    "pooling": Trap(hints_of(global_pool="avg", fc_norm=False), r"pooling token"),
    "eps": Trap(hints_of(norm_eps=1.0), "norm_eps=1"),
    "config of another architecture": Trap(Hints(), "is called vit_tiny", "vit_tiny_patch16_224.safetensors", CONFIG),
    "config of another family": Trap(Hints(), "the file is called deit", "deit-a1b2.safetensors", CONFIG),
    "config of the file beside it": Trap(Hints(), "lies there too", "n.safetensors", CONFIG, "model.safetensors"),
    "config of other features": Trap(Hints(), "num_features 192", config={**CONFIG, "num_features": 192}),
    "config of another pooling": Trap(Hints(), "global_pool avg", config={**CONFIG, "global_pool": "avg"}),
}  # fmt: skip


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_file_that_fits_two_networks_is_a_question(name: str, tmp_path: Path) -> None:
    trap = QUESTIONS[name]
    path = trap_file(trap, tmp_path)
    with pytest.raises(ArchitectureError, match=trap.said) as asked:
        open_checkpoint(path, trap.hints)
    assert asked.value.code == 4
    assert "--as-stated" in asked.value.hint
    open_checkpoint(path, replace(trap.hints, as_stated=True))  # the answer


WARNINGS = {
    "statistics": Trap(Hints(None, {}, (0.4,)), "--mean says 0.4, config.json 0.5: the option is taken", config=CONFIG),
    "arguments": Trap(
        Hints(None, {"drop_rate": 0.1}), "drop_rate says 0.1, config.json 0.2",
        config={**CONFIG, "model_args": {"drop_rate": 0.2}},
    ),
    "architecture": Trap(hints_of(), "config.json vit_tiny_patch16_224: it is not used",
                         config={**CONFIG, "architecture": "vit_tiny_patch16_224"}),
    "config of the file beside it": Trap(hints_of(), "lies there too", "n.safetensors", CONFIG, "model.safetensors"),
    "a config that departs": Trap(Hints(), "config.json is believed: the tensors fit .* num_heads=8",
                                  config={**CONFIG, "model_args": {"num_heads": 8}}),
    "a broken config": Trap(hints_of(), "not used: .*config.json", config={"architecture": 5}),
}  # fmt: skip


@pytest.mark.parametrize("name", WARNINGS)
def test_an_overruled_value_is_reported(name: str, tmp_path: Path) -> None:
    trap = WARNINGS[name]
    opened = open_checkpoint(trap_file(trap, tmp_path), trap.hints)
    assert len(opened.reading.doubts) == 1
    assert re.search(trap.said, opened.reading.doubts[0])


AGREED = {
    "nothing given": Trap(hints_of(), ""),
    "the same heads": Trap(hints_of(num_heads=4), ""),
    "torch's eps": Trap(hints_of(norm_eps=1e-5), ""),
    "a config": Trap(Hints(), "", config=CONFIG),
    "a config by name": Trap(hints_of(), "", config=CONFIG),
    "one mean for all": Trap(Hints(None, {}, (0.5,), (0.5,)), "", config=CONFIG),
    "a lone file of another name": Trap(Hints(), "", "best.safetensors", CONFIG),
}


@pytest.mark.parametrize("name", AGREED)
def test_an_agreeing_file_raises_no_doubt(name: str, tmp_path: Path) -> None:
    trap = AGREED[name]
    assert open_checkpoint(trap_file(trap, tmp_path), trap.hints).reading.doubts == ()


def test_each_fact_says_where_it_came_from(tmp_path: Path) -> None:
    hints = Hints(None, {"norm_eps": 1e-5}, (0.25,))
    told = open_checkpoint(trap_file(Trap(hints, "", config=CONFIG), tmp_path), hints)
    facts = {fact.name: (fact.value, fact.origin) for fact in told.reading.facts}
    assert facts == {
        "architecture": (ARCH, "config.json"),
        "heads": ("4", OWN),
        "norm": ("LayerNorm eps 1e-05, pre-norm", "--arch-arg"),
        "activation": ("GELU", OWN),
        "pooling": ("token", OWN),
        "mean": ("0.25", "--mean"),
        "std": ("0.5", "config.json"),
        "images": ("1x8x8 bicubic, crop 0.9", "config.json"),
    }
    told.write(tmp_path / "ours.safetensors")
    again = open_checkpoint(
        str(tmp_path / "ours.safetensors"), Hints(ARCH, {"num_heads": 8}, (0.1,))
    )
    assert {fact.origin for fact in again.reading.facts} == {RECORD}
    assert again.reading.doubts == (
        "ours.safetensors carries its own record: --arch, --mean, --arch-arg num_heads ignored",
    )
    assert again.digest == told.digest
    assert "1e-05, pre-norm (--arch-arg)" in again.record.foreign["assumed"]


def test_every_report_begins_with_the_assumptions(tmp_path: Path) -> None:
    path = trap_file(Trap(Hints(), "", config=CONFIG), tmp_path)
    code, out, err = console("lipschitz", path, "--mean", "0.4", "--no-estimate", "--json")
    assert code == 0
    network = json.loads(out)["network"]
    assert network["mean"] == {"value": "0.4", "from": "--mean"}
    assert network["doubts"] == ["--mean says 0.4, config.json 0.5: the option is taken"]
    assert network["doubts"][0] in err
    code, out, _ = console(
        "certify",
        path,
        "--dataset",
        "digits",
        "--limit",
        "20",
        "--method",
        "lipschitz",
        "-e",
        "0.1",
    )
    assert out.startswith("network: certvit_vit_digits (config.json); heads 4")


PHOTOGRAPHS = [(30, "color"), (30, "grey"), (1, "color")]


@pytest.mark.parametrize(("count", "kind"), PHOTOGRAPHS)
def test_unfit_images_are_reported(count: int, kind: str) -> None:
    pixels = torch.rand(count, 3 if kind == "color" else 1, 4, 4).expand(-1, 3, -1, -1)
    images = Images(
        "some",
        "test",
        ("a", "b"),
        torch.zeros(count, dtype=torch.long),
        torch.arange(count),
        lambda chosen: pixels[list(chosen)],
    )
    said = " ".join(image_doubts(images, 3))
    assert ("are grey" in said) == (kind == "grey")
    assert ("one image" in said) == (count == 1)


@pytest.mark.parametrize(
    ("right", "count", "classes", "doubted"),
    [(0, 8, 1000, True), (2, 8, 10, False), (0, 8, 10, True), (10, 100, 10, True), (30, 100, 10, False), (1, 1, 10, False),
     (0, 1, 10, False), (50, 100, 2, True), (20, 30, 2, False), (480, 1000, 2, True)],
)  # fmt: skip
def test_an_accuracy_about_chance_is_doubted(
    right: int, count: int, classes: int, doubted: bool
) -> None:
    assert (chance_doubt(right, count, classes) is not None) == doubted
