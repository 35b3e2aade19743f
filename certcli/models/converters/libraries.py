"""Networks of torchvision and of Hugging Face's transformers as timm's.

torchvision: VisionTransformer, SwinTransformer (both versions), ConvNeXt. A state dict has no config:
sizes are read off the tensors. Heads of a ViT, pixel statistics and crop are those of the published
network of the same sizes; for other sizes the options must give them. transformers: `config.json`
gives the architecture and `preprocessor_config.json` the pixels.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from certcli.checkpoint.config_fields import class_names_in, plain_names
from certcli.checkpoint.record import InputSpec, Record
from certcli.checkpoint.schema import Json
from certcli.models.converters.base import (
    COMPUTED,
    Converted,
    Renames,
    parted,
    pixel_input,
    renamed,
    require_whole_windows,
    tensors_by_name,
    with_joined_qkv,
)
from certcli.models.converters.transformers_config import (
    CONFIG,
    PIXELS,
    Named,
    decoded_config,
    input_spec,
    unknown_fields,
)
from certcli.models.converters.transformers_families import FAMILIES
from certcli.models.origins import Hints
from certcli.system.errors import ArchitectureError, CheckpointError, Refused, one_line, raise_if
from certcli.system.reading import is_absent

_VIT_NAMES: Renames = (
    (r"^class_token$", "cls_token"),
    (r"^conv_proj\.", "patch_embed.proj."),
    (r"^encoder\.pos_embedding$", "pos_embed"),
    (r"^encoder\.layers\.encoder_layer_(\d+)\.", r"blocks.\1."),
    (r"\.ln_(\d)\.", r".norm\1."),
    (r"\.self_attention\.in_proj_", ".attn.qkv."),
    (r"\.self_attention\.out_proj\.", ".attn.proj."),
    (r"\.mlp\.(0|linear_1)\.", ".mlp.fc1."),
    (r"\.mlp\.(3|linear_2)\.", ".mlp.fc2."),
    (r"^encoder\.ln\.", "norm."),
    (r"^heads\.(?:\w+\.)*(\w+)$", r"head.\1"),
)
_SWIN_NAMES: Renames = (
    (r"^features\.0\.0\.", "patch_embed.proj."),
    (r"^features\.0\.2\.", "patch_embed.norm."),
    (r"^features\.([1357])\.", lambda match: f"layers.{int(match[1]) // 2}.blocks."),
    (r"^features\.([246])\.", lambda match: f"layers.{int(match[1]) // 2}.downsample."),
    (r"\.mlp\.0\.", ".mlp.fc1."),
    (r"\.mlp\.3\.", ".mlp.fc2."),
    (r"^head\.(?:\w+\.)*(\w+)$", r"head.fc.\1"),
)
_CONVNEXT_NAMES: Renames = (
    (r"^features\.0\.", "stem."),
    (r"^features\.([1357])\.", lambda match: f"stages.{int(match[1]) // 2}.blocks."),
    (r"^features\.([246])\.", lambda match: f"stages.{int(match[1]) // 2}.downsample."),
    (r"\.block\.0\.", ".conv_dw."),
    (r"\.block\.2\.", ".norm."),
    (r"\.block\.3\.", ".mlp.fc1."),
    (r"\.block\.5\.", ".mlp.fc2."),
    (r"\.layer_scale$", ".gamma"),
    (r"^classifier\.0\.", "head.norm."),
    (r"^classifier\.2\.(?:\w+\.)*(\w+)$", r"head.fc.\1"),
)
_PUBLISHED = {
    ("vit", 16, 768, (12,)): "vit_b_16",
    ("vit", 32, 768, (12,)): "vit_b_32",
    ("vit", 16, 1024, (24,)): "vit_l_16",
    ("vit", 32, 1024, (24,)): "vit_l_32",
    ("vit", 14, 1280, (32,)): "vit_h_14",
    ("swin", 4, 96, (2, 2, 6, 2)): "swin_t",
    ("swin", 4, 96, (2, 2, 18, 2)): "swin_s",
    ("swin", 4, 128, (2, 2, 18, 2)): "swin_b",
    ("swin_v2", 4, 96, (2, 2, 6, 2)): "swin_v2_t",
    ("swin_v2", 4, 96, (2, 2, 18, 2)): "swin_v2_s",
    ("swin_v2", 4, 128, (2, 2, 18, 2)): "swin_v2_b",
    ("convnext", 4, 96, (3, 3, 9, 3)): "convnext_tiny",
    ("convnext", 4, 96, (3, 3, 27, 3)): "convnext_small",
    ("convnext", 4, 128, (3, 3, 27, 3)): "convnext_base",
    ("convnext", 4, 192, (3, 3, 27, 3)): "convnext_large",
}
"""torchvision's name of a published network, by family, patch, first width and blocks a stage."""
_VIT_HEADS = {768: 12, 1024: 16, 1280: 16}


def torchvision_family(tensors: Mapping[str, Tensor]) -> str | None:
    """Return the one of `TORCHVISION` whose names the tensors have, or None."""
    if "encoder.layers.encoder_layer_0.ln_1.weight" in tensors:
        return "vit"
    if "features.1.0.attn.qkv.weight" in tensors:
        return "swin_v2" if "features.1.0.attn.logit_scale" in tensors else "swin"
    return "convnext" if "features.1.0.block.0.weight" in tensors else None


def convert_torchvision(tensors: Mapping[str, Tensor], family: str, hints: Hints) -> Converted:
    """Return a state dict of torchvision in timm's terms.

    Raises:
        ArchitectureError: its sizes are of no published network, and the options do not say what
        its tensors cannot.
    """
    about = TORCHVISION[family]
    network_tensors, computed = parted(renamed(tensors, about.names), COMPUTED)
    width, channels, patch, _ = network_tensors[about.first].shape
    arguments = about.sizes({**network_tensors, **computed}, hints)
    classes = network_tensors[about.head].shape[0]
    depths = arguments["depths"] if "depths" in arguments else [arguments["depth"]]
    published = _PUBLISHED.get((family, patch, width, tuple(depths)))
    if family == "vit" and "num_heads" not in hints.arch_args:
        raise_if(
            published is None,
            ArchitectureError,
            f"a torchvision ViT of width {width} and depth {depths[0]}: its number of heads cannot be known from its tensors",
            "--arch-arg num_heads=...",
        )
        arguments["num_heads"] = _VIT_HEADS[width]
    side = arguments["img_size"]
    spec, origins = _published_input(family, published, (channels, side, side), hints)
    arguments |= {"patch_size": patch, "in_chans": channels, "num_classes": classes}
    arguments |= hints.arch_args
    if family == "convnext":
        del arguments["img_size"]  # a size of the images only
    record = Record(arch=about.arch, arch_args=arguments, input=spec, classes=classes)
    origins |= dict.fromkeys(hints.arch_args, "--arch-arg")
    name = published or family
    doubts = [] if hints.arch is None else [f"the tensors are torchvision's {name}: --arch ignored"]
    doubts += [
        f"'{one_line(key)}' is the head: what stands before it in its Sequential, no tensor shows"
        for key in tensors
        if re.fullmatch(r"(heads|head|classifier\.2)\.(\w+\.)*[1-9]\d*\.weight", key)
    ]
    finished = about.finish(network_tensors)
    return Converted(finished, record, f"torchvision's {name}", origins, tuple(doubts), computed)


def _count(tensors: Mapping[str, Tensor], pattern: str) -> int:
    """Return the count of numbers that names have; ValueError unless 0, 1, 2, ..."""
    numbers = {int(match[1]) for name in tensors if (match := re.match(pattern, name))}
    raise_if(
        not numbers or max(numbers) != len(numbers) - 1,
        ValueError,
        "its blocks are not numbered from 0 on",
    )
    return len(numbers)


def _vit_arguments(tensors: Mapping[str, Tensor], hints: Hints) -> dict[str, Any]:
    """Return the arguments of timm's ViT that give the tensors these shapes."""
    width, _, patch, _ = tensors["patch_embed.proj.weight"].shape
    return {
        "depth": _count(tensors, r"blocks\.(\d+)\."),
        "img_size": patch * math.isqrt(tensors["pos_embed"].shape[1] - 1),
        "embed_dim": width,
        "mlp_ratio": tensors["blocks.0.mlp.fc1.weight"].shape[0] / width,
        "norm_eps": 1e-6,
    }


def _depths(tensors: Mapping[str, Tensor], stages: str) -> list[int]:
    """Return the number of blocks of each stage; `stages` is what a name has before its number."""
    count = _count(tensors, stages + r"(\d+)\.blocks\.")
    return [_count(tensors, f"{stages}{stage}" + r"\.blocks\.(\d+)\.") for stage in range(count)]


def _swin_arguments(tensors: Mapping[str, Tensor], hints: Hints) -> dict[str, Any]:
    """Return the arguments of timm's Swin that give the tensors these shapes at the image's side."""
    width, _, patch, _ = tensors["patch_embed.proj.weight"].shape
    depths = _depths(tensors, r"layers\.")
    firsts = [f"layers.{stage}.blocks.0.attn." for stage in range(len(depths))]
    second = f"{firsts[0]}logit_scale" in tensors
    if second:
        window = (tensors[f"{firsts[0]}relative_coords_table"].shape[1] + 1) // 2
        heads = [tensors[f"{path}logit_scale"].shape[0] for path in firsts]
    else:
        tables = [tensors[f"{path}relative_position_bias_table"].shape for path in firsts]
        window = (math.isqrt(tables[0][0]) + 1) // 2
        heads = [table[1] for table in tables]
    side = _image_side(hints, 256 if second else 224)
    require_whole_windows(side, patch, len(depths), window)
    return {
        "img_size": side,
        "embed_dim": width,
        "depths": depths,
        "num_heads": heads,
        "window_size": window,
        "mlp_ratio": tensors["layers.0.blocks.0.mlp.fc1.weight"].shape[0] / width,
    }


def _without_key_bias(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Drop the key's third of Swin v2's bias, which torchvision zeroes in each forward pass."""
    pairs: list[tuple[str, Tensor]] = []
    for name, value in tensors.items():
        path = name.removesuffix("qkv.bias")
        if name.endswith(".attn.qkv.bias"):
            query, _, values = value.chunk(3)
            pairs += [(f"{path}q_bias", query.clone()), (f"{path}v_bias", values.clone())]
        else:
            pairs.append((name, value))
    return tensors_by_name(pairs)


def _convnext_arguments(tensors: Mapping[str, Tensor], hints: Hints) -> dict[str, Any]:
    """Return the arguments of timm's ConvNeXt that give the tensors these shapes."""
    depths = _depths(tensors, r"stages\.")
    firsts = [f"stages.{stage}.blocks.0.gamma" for stage in range(len(depths))]
    return {
        "dims": [tensors[name].shape[0] for name in firsts],
        "depths": depths,
        "img_size": _image_side(hints, 224),
    }


def _with_flat_scales(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the scale of a layer as (channels,), of torchvision's (channels, 1, 1)."""
    return {
        name: value.flatten() if name.endswith(".gamma") and value.shape[1:] == (1, 1) else value
        for name, value in tensors.items()
    }


@dataclass(frozen=True)
class TorchvisionFamily:
    """A kind of torchvision's networks.

    Attributes:
        names: How its tensors are renamed.
        first, head: The weights, by timm's names, of the map of patches and of the head.
        sizes: Returns arguments of the architecture, by the tensors and the options.
        finish: A last conversion of the tensors.
    """

    arch: str
    names: Renames
    first: str
    head: str
    sizes: Callable[[Mapping[str, Tensor], Hints], dict[str, Any]]
    finish: Callable[[Mapping[str, Tensor]], dict[str, Tensor]] = dict


_SWIN = (_SWIN_NAMES, "patch_embed.proj.weight", "head.fc.weight", _swin_arguments)
TORCHVISION = {
    "vit": TorchvisionFamily(
        "vit_base_patch16_224", _VIT_NAMES, "patch_embed.proj.weight", "head.weight", _vit_arguments
    ),
    "swin": TorchvisionFamily("swin_tiny_patch4_window7_224", *_SWIN),
    "swin_v2": TorchvisionFamily("swinv2_tiny_window8_256", *_SWIN, _without_key_bias),
    "convnext": TorchvisionFamily(
        "convnext_tiny",
        _CONVNEXT_NAMES,
        "stem.0.weight",
        "head.fc.weight",
        _convnext_arguments,
        _with_flat_scales,
    ),
}


def _image_side(hints: Hints, usual: int) -> int:
    side = hints.arch_args.get("img_size", usual)
    message = "img_size of a torchvision network is one number"
    raise_if(not isinstance(side, int), ArchitectureError, message, "--arch-arg img_size=...")
    return int(side)


def _published_input(
    family: str, published: str | None, size: tuple[int, int, int], hints: Hints
) -> tuple[InputSpec, dict[str, str]]:
    """Pixel statistics, filter and crop of the published network, unless the options say otherwise."""
    mean = hints.mean
    std = hints.std
    filtered = ("bilinear", 1.0)
    origin = f"torchvision's own for {published}"
    origins = {"mean": "--mean", "std": "--std", "view": "by default"}
    if published is not None:
        from torchvision.models import get_model_weights

        views = [weights.transforms() for weights in get_model_weights(published)]
        view = next((each for each in views if each.crop_size[0] == size[1]), views[0])
        mean = mean or tuple(view.mean)
        std = std or tuple(view.std)
        filtered = (view.interpolation.value, view.crop_size[0] / view.resize_size[0])
        origins = {
            name: f"--{name}" if getattr(hints, name, None) else origin for name in ("mean", "std")
        }
        origins["view"] = origin
    if mean is None or std is None:
        raise ArchitectureError(
            f"no published {family} of torchvision has these sizes: nothing says how its pixels are normalised",
            "pass --mean and --std, one value a channel",
        )
    return pixel_input(size, mean, std, filtered, "one mean and one std a channel"), origins


_POOLER = "pooler.dense.weight"
_UNUSED = r"^mask_token$|^pooler\.dense\."
"""Tensors that neither a classifier nor the features read."""


def is_transformers(tensors: Mapping[str, Tensor]) -> bool:
    """Whether names are of transformers' vision models: all begin with `embeddings`."""
    return any(
        re.match(r"(\w+\.)?embeddings\.(patch_embeddings|cls_token)", name) for name in tensors
    )


def describes(path: Path) -> bool:
    """Tell whether the config beside a file is transformers': it names no architecture of timm."""
    try:
        raw = decoded_config(path.parent / CONFIG, Json)
    except CheckpointError:
        return False
    names = {key for key in ("model_type", "architectures") if raw.get(key)}
    return bool(names) and "architecture" not in raw and raw.get("model_type") != "timm_wrapper"


def convert_transformers(tensors: Mapping[str, Tensor], path: Path, hints: Hints) -> Converted:
    """Return a checkpoint of transformers in timm's terms, from the two configs beside it.

    Raises:
        ArchitectureError: the model is none of `FAMILIES`, or a config leaves its function open.
    """
    config_file = path.parent / CONFIG
    raise_if(
        is_absent(config_file),
        ArchitectureError,
        f"{path} has the names of transformers, and no {CONFIG} beside it says its heads and eps",
        f"put its {CONFIG} and {PIXELS} beside it",
    )
    about = decoded_config(config_file, Named)
    architecture = about.architectures[0] if about.architectures else ""
    family = FAMILIES.get(about.model_type)
    if family is None or architecture not in family.classes:
        raise ArchitectureError(
            f"{config_file} describes transformers' {one_line(architecture or about.model_type)} (model_type "
            f"{one_line(about.model_type)}), which certvit does not convert",
            f"it converts {', '.join(name for each in FAMILIES.values() for name in each.classes)}",
        )
    config = decoded_config(config_file, family.config)
    try:
        arch, arguments, surgery = family.describe(config, architecture)
    except Refused as refusal:
        raise ArchitectureError(f"{config_file}: {refusal}") from refusal
    spec, origins, doubts = input_spec(config, path.parent / PIXELS, hints)
    doubts += unknown_fields(config_file, family.config, not hints.logits)
    network_tensors = renamed(tensors, family.names)
    features = None
    if architecture == family.headless:
        features = family.features + (
            "; pooler_output comes after it" if _POOLER in network_tensors else ""
        )
    network_tensors, computed = parted(parted(network_tensors, _UNUSED)[0], COMPUTED)
    network_tensors = family.finish(with_joined_qkv(network_tensors))
    names = None if features else class_names_in(dict(config.id2label or {}))
    record = Record(
        arch=arch,
        arch_args={**arguments, **({} if features is None else {"num_classes": 0})},
        input=spec,
        classes=config.classes if features is None else 0,
        class_names=None if names is None else plain_names(names),
        surgery=surgery,
    )
    origins = {**dict.fromkeys((*arguments, "architecture"), CONFIG), **origins}
    if ignored := [option for option in hints.given if option.startswith("--arch")]:
        doubts.append(f"{CONFIG} describes the architecture: {', '.join(ignored)} ignored")
    return Converted(
        network_tensors,
        record,
        f"transformers' {architecture}",
        origins,
        tuple(doubts),
        computed,
        features,
    )
