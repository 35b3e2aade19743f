"""Files of other libraries that certvit refuses in one line, because no network of timm computes
their function.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision.models import VisionTransformer

from certcli.models.in_memory import open_module
from certcli.models.open import open_checkpoint
from certcli.models.origins import Hints
from certcli.system.errors import ArchitectureError, CheckpointError
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


REFUSED: dict[str, tuple[Callable[[Path], str], Hints, str]] = {
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


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_converted_is_refused(name: str, tmp_path: Path) -> None:
    make, hints, named = REFUSED[name]
    with pytest.raises((ArchitectureError, CheckpointError), match=named):
        open_checkpoint(make(tmp_path), hints)


def test_old_hooks_of_spectral_norm_have_a_hint() -> None:
    """They compute the weight in a hook, and torch cannot copy it after its first use."""
    module = nn.Sequential(torch.nn.utils.spectral_norm(nn.Conv2d(1, 2, 3)), nn.Flatten())
    module(torch.zeros(1, 1, 4, 4))
    with pytest.raises(ArchitectureError) as refused:
        open_module(module, 0.0, 1.0, (1, 4, 4))
    assert "remove_spectral_norm(module.0)" in refused.value.hint
