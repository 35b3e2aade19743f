"""Configs of the hub, old and new: read as timm reads the folder, or refused, or doubted; never
read over in silence.

`hub_configs` holds configs as timm and transformers wrote them over the years, with small networks
in place of large ones.
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
import timm
from timm.data import create_transform, resolve_data_config

from certcli.images.decoding import Decoder
from certcli.models import build
from certcli.models.open import open_checkpoint
from certcli.system.errors import CertvitError
from tests.helpers.commands import attempt, certvit, document
from tests.models.test_converters import TRANSFORMERS, transformers_folder

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


@pytest.mark.parametrize(
    "name", sorted(name for name in TIMM if "label" in name or "flat_c" in name)
)
def test_names_of_classes_are_used(name: str, tmp_path: Path) -> None:
    if name in REFUSED:
        return
    hub_folder(TIMM[name], tmp_path)
    names = open_checkpoint(str(tmp_path)).record.class_names
    expected = {
        "flat_classes": ("d", "c", "b", "a"),
        "flat_id2label": ("wolf", "dog"),
        "vit_labels_too_few": None,
        "flat_convnext": None,
    }
    assert names == expected.get(name, ("dog", "apple", "cat"))


@pytest.mark.parametrize("name", ["vit_new", "flat_vit"])
@pytest.mark.parametrize("inside", [False, True])
def test_any_new_field_is_a_doubt(name: str, inside: bool, tmp_path: Path) -> None:
    """The law of the closed world: a field that nobody has heard of is never read over."""
    config = copy.deepcopy(TIMM[name])
    (config.get("pretrained_cfg", config) if inside else config)["zzz_new"] = {"a": 1}
    clean = copy.deepcopy(TIMM[name])
    hub_folder(clean, tmp_path)
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
