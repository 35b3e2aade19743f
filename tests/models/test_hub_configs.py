"""Configs of the hub, old and new: read as timm reads the folder, or refused, or doubted; never
read over in silence.

`hub_configs` holds configs as timm and transformers wrote them over the years, with small networks
in place of large ones. Files whose function no network of timm computes are refused in one line.
"""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

import certcli.system.compat  # noqa: F401 (before timm: torchvision must be importable)

# isort: split
from collections.abc import Callable

import timm
from timm.data import create_transform, resolve_data_config
from torch import Tensor
from torchvision.models import VisionTransformer

from certcli.checkpoint.config_fields import class_names_in
from certcli.images.decoding import Decoder
from certcli.models import build
from certcli.models.open import open_checkpoint
from certcli.models.origins import Hints
from certcli.system.errors import ArchitectureError, CertvitError, CheckpointError
from tests.helpers.commands import attempt, certvit, document
from tests.models.test_converters import (
    SMALL,
    STATISTICS,
    TORCHVISION,
    TRANSFORMERS,
    prefixed,
    save_in,
    transformers_folder,
    vit_net,
)
from tests.models.transformers_logits import PIXELS, weights

FOLDER = Path(__file__).parent / "hub_configs"
TIMM = {path.stem: json.loads(path.read_text()) for path in sorted((FOLDER / "timm").iterdir())}
OTHERS = {
    path.stem: json.loads(path.read_text()) for path in sorted((FOLDER / "transformers").iterdir())
}
DOUBTED = {
    "vit_border": "border",
    "vit_unknown_field": "channel_order",
    "vit_unknown_top_field": "normalize",
    "vit_two_architectures": "two architectures",
    "vit_labels_too_few": "names its classes",
    "name_and_empty": "timm would take mean",
    "name_only": "timm would take mean",
    "flat_other_statistics": "is not timm's own",
    "flat_squash": "is not timm's own",
}
"""Configs that are read with a doubt, and a word of it. All others are read without one, but for these:"""
LABELLED = ("dog", "apple", "cat")
NAMED = {
    "flat_classes": ("d", "c", "b", "a"),
    "flat_id2label": ("wolf", "dog"),
    "vit_labels_too_few": None,
}
"""Names of the classes, where they are not `LABELLED`."""
REFUSED = {"vit_no_statistics": "does not say mean", "vit_label_offset": "label_offset"}


def picture(folder: Path) -> Path:
    """Return an image of 60 x 100 pixels whose sides and middle differ."""
    image = Image.new("RGB", (100, 60), (120, 30, 200))
    image.paste((250, 10, 10), (0, 0, 20, 60))
    image.paste((10, 250, 40), (85, 0, 100, 40))
    image.save(folder / "x.png")
    return folder / "x.png"


def hub_folder(config: dict[str, Any], folder: Path) -> nn.Module:
    """Write the folder, and return timm's network of it; timm is given no field that stops it."""
    known = copy.deepcopy(config)
    for name in ("channel_order", "hf_hub", "id2label", "label2id"):
        for fields in (known, known.get("pretrained_cfg", {})):
            fields.pop(name, None)
    (folder / "config.json").write_text(json.dumps(known))
    torch.manual_seed(0)
    model: nn.Module = timm.create_model(f"local-dir:{folder}", pretrained=False).eval()
    save_file(model.state_dict(), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return model


@pytest.mark.parametrize("name", TIMM)
def test_a_config_is_read_as_timm_reads_it_or_not_without_a_word(name: str, tmp_path: Path) -> None:
    model = hub_folder(TIMM[name], tmp_path)
    if name in REFUSED:
        with pytest.raises(CertvitError, match=REFUSED[name]):
            open_checkpoint(str(tmp_path))
        return
    read = open_checkpoint(str(tmp_path))
    doubts = " ".join(read.reading.doubts)
    assert (DOUBTED[name] in doubts) if name in DOUBTED else not doubts, doubts
    assert read.record.class_names == NAMED.get(name, LABELLED if "label" in name else None)
    if name in ("name_and_empty", "name_only"):
        return  # other statistics than timm's, and the doubt says so
    spec = read.record.input
    stated = resolve_data_config(model=model)
    assert spec.size == tuple(stated["input_size"])
    assert spec.mean == pytest.approx(stated["mean"])
    assert spec.std == pytest.approx(stated["std"])
    view = (spec.interpolation, spec.crop_pct, spec.crop_mode)
    assert view == tuple(stated[key] for key in ("interpolation", "crop_pct", "crop_mode"))
    path = picture(tmp_path)
    image = Image.open(path).convert("L" if spec.size[0] == 1 else "RGB")
    with torch.no_grad():
        expected = model(create_transform(**stated, is_training=False)(image)[None])
        split_images = build.load(read)(Decoder(spec)(path)[None])
    torch.testing.assert_close(split_images, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["vit_new", "flat_vit"])
@pytest.mark.parametrize(("inside", "value"), [(False, {"a": 1}), (True, False), (True, 0)])
def test_any_new_field_is_a_doubt(name: str, inside: bool, value: Any, tmp_path: Path) -> None:
    """The law of the closed world: a field that nobody has heard of is never read over."""
    config = copy.deepcopy(TIMM[name])
    (config.get("pretrained_cfg", config) if inside else config)["zzz_new"] = value
    hub_folder(copy.deepcopy(TIMM[name]), tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "zzz_new" in " ".join(open_checkpoint(str(tmp_path)).reading.doubts)


SQUASHED = ("bilinear", 1.0, "squash")
HALF = ((0.5,) * 3, (0.5,) * 3)
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
READ: dict[str, tuple[Any, Any]] = {
    "vit_2023": (HALF, SQUASHED),
    "vit_2021": (HALF, SQUASHED),
    "vit_fast": (HALF, SQUASHED),
    "deit": (IMAGENET, ("bicubic", 0.8, "squash")),
    "beit": (HALF, SQUASHED),
    "dinov2": (IMAGENET, ("bicubic", 0.8, "center")),
    "no_normalisation": (((0.0,) * 3, (1.0,) * 3), SQUASHED),
    "rescaled_to_two": (((0.25,) * 3, (0.25,) * 3), SQUASHED),
    "one_number": (((0.5,) * 3, (0.25,) * 3), SQUASHED),
    "of_bytes": (HALF, SQUASHED),
    "convnext": (IMAGENET, ("bicubic", 0.875, "center")),
}
"""Statistics of pixels in [0, 1], and filter, crop and mode, worked out by hand from transformers' processors."""
SAID = {
    "own_code": "auto_map",
    "unknown_processor": "PvtImageProcessor",
    "unknown_field": "do_equalize",
    "another_size": "makes images of 12x12",
}
NOT_READ = {
    "no_rescaling": "does not say which",
    "no_statistics": "how the pixels are normalised",
    "rescale_offset": "rescale_offset",
    "offset": "offset",
    "channels_turned": "do_flip_channel_order",
    "padded": "do_pad",
    "efficientnet": "include_top",
}


def test_every_config_of_transformers_has_its_reading() -> None:
    assert OTHERS.keys() == {*READ, *SAID, *NOT_READ}


@pytest.mark.parametrize("name", OTHERS)
def test_a_processor_is_used_doubted_or_refused(name: str, tmp_path: Path) -> None:
    folder = transformers_folder(TRANSFORMERS["vit"], tmp_path, OTHERS[name])
    if name in NOT_READ:
        with pytest.raises(CertvitError, match=NOT_READ[name]):
            open_checkpoint(folder)
        return
    read = open_checkpoint(folder)
    if name in SAID:
        assert SAID[name] in " ".join(read.reading.doubts)
        return
    (mean, std), view = READ[name]
    spec = read.record.input
    assert not read.reading.doubts
    assert spec.mean == pytest.approx(mean)
    assert spec.std == pytest.approx(std)
    assert (spec.interpolation, spec.crop_pct, spec.crop_mode) == view


def test_any_new_field_of_transformers_is_a_doubt(tmp_path: Path) -> None:
    folder = Path(transformers_folder(TRANSFORMERS["vit"], tmp_path, OTHERS["vit_2023"]))
    folder = folder if folder.is_dir() else folder.parent
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "rope_theta": 100.0}))
    assert "rope_theta" in " ".join(open_checkpoint(str(folder)).reading.doubts)


@pytest.mark.parametrize("library", ["timm", "transformers"])
def test_of_a_network_with_several_labels_the_logits_alone_are_bounded(
    library: str, tmp_path: Path
) -> None:
    """Its margins decide nothing: no other command takes it, nor does an option about them."""
    if library == "timm":
        hub_folder(TIMM["vit_new"], tmp_path)
    else:
        transformers_folder(TRANSFORMERS["vit"], tmp_path, OTHERS["vit_2023"])
    certain = document("lipschitz", tmp_path, "--no-estimate")
    path = tmp_path / "config.json"
    several = {"problem_type": "multi_label_classification"}
    path.write_text(json.dumps({**json.loads(path.read_text()), **several}))
    shown = certvit("lipschitz", tmp_path, "--dataset", "photographs").stdout
    assert "no margin, class or radius is judged" in shown
    assert "correct on" not in shown
    report = document("lipschitz", tmp_path, "--no-estimate")
    assert report["proof"] == certain["proof"]
    assert "multi_label_classification" in " ".join(report["network"]["doubts"])
    saved = tmp_path / "report.json"
    saved.write_text(json.dumps(report))
    certvit("verify", saved, tmp_path)
    for words in (("--around", 0.1), ("-o", tmp_path / "new.safetensors")):
        certvit("lipschitz", tmp_path, *words, code=2)
    for command in ("certify", "attack", "audit"):
        with pytest.raises(CertvitError, match="does not decide by its largest logit"):
            raise attempt(command, tmp_path, "--dataset", "digits").exception


Edit = Callable[[dict[str, Tensor]], dict[str, Any]]
QUERY = "vit.encoder.layer.0.attention.attention.query.weight"
INDEX = "swin.encoder.layers.0.blocks.0.attention.self.relative_position_index"


def without_entries(tensors: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key: value for key, value in tensors.items() if key != name}


def endless() -> dict[str, Any]:
    found: dict[str, Any] = {"epoch": 1}
    found["model"] = found
    return found


def edited_by(name: str, edit: Edit, **config: Any) -> Callable[[Path], str]:
    """Return what writes a checkpoint of transformers with edited tensors."""
    row = TRANSFORMERS[name]
    return lambda folder: transformers_folder(
        row, folder, tensors=edit(weights(row["shapes"])), **config
    )


def torchvision_edited(name: str, edit: Edit) -> Callable[[Path], str]:
    return lambda folder: save_in(folder, edit(dict(TORCHVISION[name][0]().state_dict())))


REFUSED_FORMAT: dict[str, tuple[Callable[[Path], str], Hints, str]] = {
    "CLIP": (
        lambda folder: save_in(folder, {"vision_model.embeddings.class_embedding": torch.ones(4)}), Hints(), "CLIPModel"
    ),
    "ResNet": (lambda folder: save_in(folder, {"layer1.0.conv1.weight": torch.ones(4, 4, 3, 3)}), Hints(), "ResNet"),
    "another image size": (
        lambda folder: save_in(folder, vit_net()), Hints("vit_tiny_patch16_224", {**SMALL, "img_size": 32}), "another image"
    ),
    "no classifier of transformers": (
        lambda folder: transformers_folder(TRANSFORMERS["vit"], folder, architectures=["ViTModel"]), Hints(), "ViTModel"
    ),
    "another activation": (
        lambda folder: transformers_folder(TRANSFORMERS["vit"], folder, hidden_act="mish"), Hints(), "hidden_act"
    ),
    "an offset of the pixels": (
        lambda folder: transformers_folder(TRANSFORMERS["vit"], folder, {**PIXELS, "offset": True}), Hints(), "offset"
    ),
    "an eps that timm's Swin has once": (
        lambda folder: transformers_folder(TRANSFORMERS["swin"], folder, layer_norm_eps=1e-3), Hints(), "layer_norm_eps"
    ),
    "a config of another file": (
        lambda folder: transformers_folder(TRANSFORMERS["vit"], folder, num_hidden_layers=3), Hints(), "disagree"
    ),
    "a representation layer": (
        lambda folder: save_in(folder, {**vit_net(), "pre_logits.fc.weight": torch.ones(12, 12)}),
        Hints("vit_tiny_patch16_224", SMALL),
        "representation",
    ),
    "half of a torchvision ViT": (
        lambda folder: save_in(
            folder, {"class_token": torch.ones(4), "encoder.layers.encoder_layer_0.ln_1.weight": torch.ones(4)}
        ),
        Hints(),
        "torchvision",
    ),
    "a class of another family": (
        lambda folder: transformers_folder(TRANSFORMERS["vit"], folder, architectures=["SwinForImageClassification"]),
        Hints(),
        "SwinForImageClassification",
    ),
    "query and key of other widths": (edited_by("vit", lambda t: {**t, QUERY: torch.ones(16, 9)}), Hints(), "do not fit"),
    "a key without its query": (edited_by("vit", lambda t: without_entries(t, QUERY)), Hints(), "unexpected"),
    "a key of no attention": (edited_by("vit", lambda t: {**t, "vit.key.weight": torch.ones(2)}), Hints(), "unexpected"),
    "two names of one tensor": (
        edited_by("vit", lambda t: {**t, QUERY.replace("attention.attention.query", "attention.q_proj"): t[QUERY] + 1}),
        Hints(),
        "two tensors",
    ),
    "another order of positions": (edited_by("swin", lambda t: {**t, INDEX: torch.zeros(16, 16).long()}), Hints(), "index"),
    "positions of no layer": (
        edited_by("swin", lambda t: {**t, INDEX.replace("layers.0", "layers.7"): torch.zeros(16, 16).long()}),
        Hints(),
        "unexpected",
    ),
    "a crop of nothing": (
        lambda folder: transformers_folder(
            TRANSFORMERS["vit"], folder, {**PIXELS, "do_center_crop": True, "size": {"shortest_edge": 10**9}}
        ),
        Hints(),
        "Expected `int` <= 4096",
    ),
    "a dictionary that contains itself": (lambda folder: save_in(folder, endless()), Hints(), "none of them is a dictionary"),
    "blocks without numbers": (
        lambda folder: save_in(folder, {**vit_net(), "blocks.x.y": torch.ones(1)}), Hints(), "looks like a timm"
    ),
    "no averaged weights": (
        lambda folder: save_in(folder, vit_net()), Hints("vit_tiny_patch16_224", SMALL, weights="ema"), "no averaged"
    ),
    "averaged weights alone": (
        lambda folder: save_in(folder, prefixed("model_ema.")),
        Hints("vit_tiny_patch16_224", SMALL, weights="raw"),
        "no raw",
    ),
    "stages up to a hundred million": (
        torchvision_edited("convnext", lambda t: {**t, "stages.99999999.blocks.0.gamma": torch.ones(4, 1, 1)}),
        TORCHVISION["convnext"][1],
        "numbered",
    ),
    "no width": (
        torchvision_edited("swin", lambda t: {**t, "features.0.0.weight": torch.ones(0, 3, 4, 4)}),
        TORCHVISION["swin"][1],
        "do not fit|disagree",
    ),
    "windows past the edge": (
        lambda folder: transformers_folder(TRANSFORMERS["swin"], folder, image_size=36), Hints(), "whole windows"
    ),
    "half a token, version 2": (
        lambda folder: transformers_folder(TRANSFORMERS["swinv2"], folder, image_size=12, window_size=3),
        Hints(),
        "1.5 tokens",
    ),
    **{
        f"{name} of images that are not square": (
            lambda folder, name=name: transformers_folder(TRANSFORMERS[name], folder, image_size=[16, 32]),
            Hints(),
            "square images only",
        )
        for name in ("swin", "swinv2", "beit", "beit, shared")
    },
    "a SwiGLU MLP": (
        lambda folder: transformers_folder(TRANSFORMERS["dinov2"], folder, use_swiglu_ffn=True), Hints(), "use_swiglu_ffn"
    ),
    "BEiT's class token": (
        lambda folder: transformers_folder(TRANSFORMERS["beit"], folder, use_mean_pooling=False), Hints(), "class token"
    ),
    "positions of another size": (
        lambda folder: transformers_folder(TRANSFORMERS["vit"], folder, image_size=32), Hints(), "pos_embed"
    ),
    "one class": (
        edited_by("vit", lambda t: {k: v[:1] if "classifier" in k else v for k, v in t.items()}, id2label={"0": "a"}),
        Hints(),
        "one class",
    ),
    "integers": (edited_by("vit", lambda t: {k: v.to(torch.int8) for k, v in t.items()}), Hints(), "is integer"),
    "a torchvision ViT of nobody's depth": (
        lambda folder: save_in(folder, dict(VisionTransformer(16, 8, 1, 2, 768, 24, num_classes=3).state_dict())),
        Hints(**STATISTICS),
        "number of heads",
    ),
    "windows past the edge, version 2": (
        lambda folder: transformers_folder(TRANSFORMERS["swinv2"], folder, image_size=48), Hints(), "whole windows"
    ),
    "windows past torchvision's edge": (
        torchvision_edited("swin, version 2", dict), Hints(None, {"img_size": 16}, **STATISTICS), "whole windows"
    ),
    "a flat table, edited": (
        torchvision_edited(
            "swin", lambda t: {**t, "features.1.0.attn.relative_position_index": torch.zeros(256).long()}
        ),
        TORCHVISION["swin"][1],
        "relative_position_index",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED_FORMAT)
def test_what_cannot_be_converted_is_refused(name: str, tmp_path: Path) -> None:
    make, hints, named = REFUSED_FORMAT[name]
    with pytest.raises((ArchitectureError, CheckpointError), match=named):
        open_checkpoint(make(tmp_path), hints)


def test_numbers_of_classes_leave_none_out() -> None:
    assert class_names_in({"dog": 1, "cat": 0}) == ("cat", "dog")
    assert class_names_in({"dog": 2, "cat": 0}) is None
