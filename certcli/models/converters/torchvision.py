"""Image classifiers of torchvision as timm's networks: VisionTransformer, SwinTransformer (both
versions), ConvNeXt.

A state dict has no config: sizes are read off the tensors. Heads of a ViT, pixel statistics and
crop are those of the published network of the same sizes; for other sizes the options must give
them.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from certcli.checkpoint.record import InputSpec, Record
from certcli.models.converters.base import (
    COMPUTED,
    Converted,
    Renames,
    parted,
    pixel_input,
    renamed,
    require_whole_windows,
    tensors_by_name,
)
from certcli.models.origins import Hints
from certcli.system.errors import ArchitectureError, one_line, raise_if

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


@dataclass(frozen=True)
class SizedNetwork:
    """A torchvision network as (timm's architecture, its arguments, tensors by timm's names)."""

    family: str
    arch: str
    arguments: dict[str, Any]
    tensors: dict[str, Tensor]
    size: tuple[int, int, int]
    published: str | None
    computed: Mapping[str, Tensor] = field(default_factory=dict)


def torchvision_family(tensors: Mapping[str, Tensor]) -> str | None:
    """Return the one of `FAMILIES` whose names the tensors have, or None."""
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
    network = FAMILIES[family](tensors, hints)
    spec, origins = _published_input(network, hints)
    arguments = {**network.arguments, **hints.arch_args}
    if family == "convnext":
        arguments.pop("img_size", None)  # a size of the images only
    classes = int(network.arguments["num_classes"])
    record = Record(arch=network.arch, arch_args=arguments, input=spec, classes=classes)
    origins |= dict.fromkeys(hints.arch_args, "--arch-arg")
    name = network.published or family
    doubts = [] if hints.arch is None else [f"the tensors are torchvision's {name}: --arch ignored"]
    doubts += [
        f"'{one_line(key)}' is the head: what stands before it in its Sequential, no tensor shows"
        for key in tensors
        if re.fullmatch(r"(heads|head|classifier\.2)\.(\w+\.)*[1-9]\d*\.weight", key)
    ]
    source = f"torchvision's {name}"
    return Converted(network.tensors, record, source, origins, tuple(doubts), network.computed)


def _count(tensors: Mapping[str, Tensor], pattern: str) -> int:
    """Return the count of numbers that names have; ValueError unless 0, 1, 2, ..."""
    numbers = {int(match[1]) for name in tensors if (match := re.match(pattern, name))}
    raise_if(
        not numbers or max(numbers) != len(numbers) - 1,
        ValueError,
        "its blocks are not numbered from 0 on",
    )
    return len(numbers)


def _torchvision_vit(tensors: Mapping[str, Tensor], hints: Hints) -> SizedNetwork:
    network_tensors = renamed(tensors, _VIT_NAMES)
    width, channels, patch, _ = network_tensors["patch_embed.proj.weight"].shape
    depth = _count(network_tensors, r"blocks\.(\d+)\.")
    grid = math.isqrt(network_tensors["pos_embed"].shape[1] - 1)
    published = _PUBLISHED.get(("vit", patch, width, (depth,)))
    heads = hints.arch_args.get("num_heads", None if published is None else _VIT_HEADS[width])
    if heads is None:
        raise ArchitectureError(
            f"a torchvision ViT of width {width} and depth {depth}: its number of heads cannot be known from its tensors",
            "--arch-arg num_heads=...",
        )
    arguments = {
        "img_size": patch * grid,
        "patch_size": patch,
        "in_chans": channels,
        "embed_dim": width,
        "depth": depth,
        "num_heads": heads,
        "mlp_ratio": network_tensors["blocks.0.mlp.fc1.weight"].shape[0] / width,
        "norm_eps": 1e-6,
        "num_classes": network_tensors["head.weight"].shape[0],
    }
    side = patch * grid
    return SizedNetwork(
        "vit", "vit_base_patch16_224", arguments, network_tensors, (channels, side, side), published
    )


def _blocks_a_stage(tensors: Mapping[str, Tensor], pattern: str) -> list[int]:
    stages = _count(tensors, pattern + r"(\d+)\.blocks\.")
    return [_count(tensors, f"{pattern}{stage}" + r"\.blocks\.(\d+)\.") for stage in range(stages)]


def _torchvision_swin(tensors: Mapping[str, Tensor], hints: Hints) -> SizedNetwork:
    second = torchvision_family(tensors) == "swin_v2"
    network_tensors, computed = parted(renamed(tensors, _SWIN_NAMES), COMPUTED)
    width, channels, patch, _ = network_tensors["patch_embed.proj.weight"].shape
    depths = _blocks_a_stage(network_tensors, r"layers\.")
    firsts = [f"layers.{stage}.blocks.0.attn." for stage in range(len(depths))]
    if second:
        window = (tensors["features.1.0.attn.relative_coords_table"].shape[1] + 1) // 2
        heads = [network_tensors[f"{path}logit_scale"].shape[0] for path in firsts]
        network_tensors = _without_key_bias(network_tensors)
    else:
        table = network_tensors["layers.0.blocks.0.attn.relative_position_bias_table"]
        window = (math.isqrt(table.shape[0]) + 1) // 2
        heads = [network_tensors[f"{path}relative_position_bias_table"].shape[1] for path in firsts]
    side = _image_side(hints, 256 if second else 224)
    require_whole_windows(side, patch, len(depths), window)
    arguments = {
        "img_size": side,
        "patch_size": patch,
        "in_chans": channels,
        "embed_dim": width,
        "depths": depths,
        "num_heads": heads,
        "window_size": window,
        "mlp_ratio": network_tensors["layers.0.blocks.0.mlp.fc1.weight"].shape[0] / width,
        "num_classes": network_tensors["head.fc.weight"].shape[0],
    }
    family, arch = (
        ("swin_v2", "swinv2_tiny_window8_256")
        if second
        else ("swin", "swin_tiny_patch4_window7_224")
    )
    published = _PUBLISHED.get((family, patch, width, tuple(depths)))
    return SizedNetwork(
        family, arch, arguments, network_tensors, (channels, side, side), published, computed
    )


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


def _torchvision_convnext(tensors: Mapping[str, Tensor], hints: Hints) -> SizedNetwork:
    network_tensors = renamed(tensors, _CONVNEXT_NAMES)
    network_tensors = {
        name: value.flatten() if name.endswith(".gamma") and value.shape[1:] == (1, 1) else value
        for name, value in network_tensors.items()
    }
    width, channels, patch, _ = network_tensors["stem.0.weight"].shape
    depths = _blocks_a_stage(network_tensors, r"stages\.")
    arguments = {
        "patch_size": patch,
        "in_chans": channels,
        "dims": [
            network_tensors[f"stages.{stage}.blocks.0.gamma"].shape[0]
            for stage in range(len(depths))
        ],
        "depths": depths,
        "num_classes": network_tensors["head.fc.weight"].shape[0],
    }
    published = _PUBLISHED.get(("convnext", patch, width, tuple(depths)))
    side = _image_side(hints, 224)
    return SizedNetwork(
        "convnext", "convnext_tiny", arguments, network_tensors, (channels, side, side), published
    )


FAMILIES = {
    "vit": _torchvision_vit,
    "swin": _torchvision_swin,
    "swin_v2": _torchvision_swin,
    "convnext": _torchvision_convnext,
}


def _image_side(hints: Hints, usual: int) -> int:
    side = hints.arch_args.get("img_size", usual)
    if not isinstance(side, int):
        raise ArchitectureError(
            "img_size of a torchvision network is one number", "--arch-arg img_size=..."
        )
    return side


def _published_input(network: SizedNetwork, hints: Hints) -> tuple[InputSpec, dict[str, str]]:
    """Pixel statistics, filter and crop of the published network, unless the options say otherwise."""
    mean = hints.mean
    std = hints.std
    interpolation = "bilinear"
    crop = 1.0
    origin = f"torchvision's own for {network.published}"
    origins = {"mean": "--mean", "std": "--std", "view": "by default"}
    if network.published is not None:
        from torchvision.models import get_model_weights

        views = [weights.transforms() for weights in get_model_weights(network.published)]
        view = next((each for each in views if each.crop_size[0] == network.size[1]), views[0])
        mean = mean or tuple(view.mean)
        std = std or tuple(view.std)
        interpolation = view.interpolation.value
        crop = view.crop_size[0] / view.resize_size[0]
        origins = {
            name: f"--{name}" if getattr(hints, name, None) else origin for name in ("mean", "std")
        }
        origins["view"] = origin
    if mean is None or std is None:
        raise ArchitectureError(
            f"no published {network.family} of torchvision has these sizes: nothing says how its pixels are normalised",
            "pass --mean and --std, one value a channel",
        )
    view = interpolation, crop
    return pixel_input(network.size, mean, std, view, "one mean and one std a channel"), origins
