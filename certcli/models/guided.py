"""A state dict of OpenAI's guided-diffusion or improved-diffusion becomes the UNet of
`certcli.nn.unet` and its noise schedule.

Widths, levels, attention and the kind of each block follow from the tensors. The rest are flags of
their scripts, which no tensor shows: those of a published file by its name, else a JSON object
beside the file. None has a default that would be a guess.

Source: Nichol & Dhariwal 2021, Improved denoising diffusion probabilistic models; Dhariwal & Nichol
2021, Diffusion models beat GANs; the README of each repository (names of the flags, and their
values for the published files).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from certcli.checkpoint.file import tensors_digest
from certcli.checkpoint.schema import StrictStruct, decode_json
from certcli.models.converters.base import read_config
from certcli.models.diffusion import (
    EPSILON,
    SAMPLE,
    Schedule,
    Steps,
    require_channels,
)
from certcli.models.weights import load_weights, misfit
from certcli.nn.unet import DEEPEST, RESNET_DOWN, RESNET_UP, Resampling, UNet, UNetShape, Width
from certcli.system.errors import ArchitectureError, one_line, raise_if
from certcli.system.reading import is_absent

MARK = "input_blocks.0.0.weight"
"""A tensor of every such UNet, and of no other network that is read."""
GROUPS = 32


class Flags(StrictStruct):
    """What no tensor shows, under the names of the scripts' flags; None: the file does not say."""

    noise_schedule: Literal["linear", "cosine"]
    diffusion_steps: Steps
    num_heads: Width | None = None
    num_head_channels: Width | None = None
    use_new_attention_order: bool | None = None
    rescale_timesteps: bool | None = None
    predict_xstart: bool = False


_GUIDED = Flags("linear", 1000, num_head_channels=64, use_new_attention_order=False)
_IMPROVED = Flags(
    "cosine", 4000, num_heads=4, use_new_attention_order=False, rescale_timesteps=True
)
_BEDROOM = Flags("linear", 1000, num_heads=1)
PUBLISHED: Mapping[str, Flags] = {
    "256x256_diffusion_uncond.pt": _GUIDED,
    "lsun_bedroom.pt": _GUIDED,
    "lsun_cat.pt": _GUIDED,
    "lsun_horse.pt": _GUIDED,
    "lsun_horse_nodropout.pt": _GUIDED,
    "cifar10_uncond_50M_500K.pt": _IMPROVED,
    "cifar10_uncond_vlb_50M_500K.pt": _IMPROVED,
    "imagenet64_uncond_100M_1500K.pt": _IMPROVED,
    "imagenet64_uncond_vlb_100M_1500K.pt": _IMPROVED,
    "lsun_uncond_100M_1200K_bs128.pt": _BEDROOM,
    "lsun_uncond_100M_2400K_bs64.pt": _BEDROOM,
}
"""Name of a published file -> its flags, by its README and the scripts' defaults."""


@dataclass(frozen=True)
class GuidedShape(UNetShape):
    """A shape that may also fix the number of heads, which are then as wide as a level allows; and
    whose waves of t need not be as many as the first level has channels.
    """

    num_heads: int | None = None
    num_channels: int = 0

    @property
    def waves(self) -> int:
        return self.num_channels

    def head_width(self, width: int) -> int:
        return width // self.num_heads if self.num_heads else super().head_width(width)


@dataclass(frozen=True)
class GuidedSchedule(Schedule):
    """A schedule whose network may be told t as a part of a thousand steps."""

    rescale_timesteps: bool = False

    def time_of(self, step: int) -> float:
        return step * 1000 / self.num_train_timesteps if self.rescale_timesteps else step


def read_guided(
    tensors: Mapping[str, Tensor], path: Path, channels: int
) -> tuple[UNet, GuidedSchedule, str]:
    """Return the UNet, its schedule and the digest of its tensors.

    Raises:
        ArchitectureError: it is another network than an unconditional UNet for this number of
            channels, or a flag is missing that decides its function.
        CheckpointError: the file of flags is broken.
    """
    raise_if(
        any(name.startswith("label_emb.") for name in tensors),
        ArchitectureError,
        f"the denoiser {path} is conditional: it wants the class of each image",
        "an unconditional model, such as 256x256_diffusion_uncond.pt",
    )
    raise_if(
        not any(name.startswith("output_blocks.") for name in tensors),
        ArchitectureError,
        f"{path} has no output_blocks: it is half a UNet, such as a classifier of noisy images",
    )
    flags = _flags(path)
    try:
        layout = _Layout.of(tensors)
        shape = _guided_shape(tensors, layout, flags)
        require_channels(shape, channels, str(path))
        _require_heads(shape, flags, path)
        with torch.device("meta"):
            net = UNet(shape)
        converted = _by_unet_names(tensors, layout, shape, flags)
    except (LookupError, ValueError, TypeError, RuntimeError) as failure:
        raise ArchitectureError(
            f"the tensors of {path} fit no UNet of guided-diffusion: {one_line(failure)[:120]}"
        ) from failure
    schedule = _guided_schedule(flags, path)
    why = misfit(net, converted)
    raise_if(
        why, ArchitectureError, f"the tensors of {path} fit no UNet of guided-diffusion: {why}"
    )
    load_weights(net, converted)
    return net.eval().requires_grad_(False), schedule, tensors_digest(converted)


def _flags(path: Path) -> Flags:
    """Return the flags beside the file, or those of a published file of that name."""
    description = path.with_suffix(".json")
    if not is_absent(description):
        names = ", ".join(Flags.__struct_fields__)
        hint = f"it may hold flags of guided-diffusion, {names}: the tensors say the rest"
        return read_config(description, partial(decode_json, kind=Flags), hint)
    raise_if(
        path.name not in PUBLISHED,
        ArchitectureError,
        f"{path} is a UNet of guided-diffusion under no published name: "
        "no tensor says its schedule and its heads",
        f'write them into {description}: {{"noise_schedule": "linear", "diffusion_steps": 1000, '
        '"num_head_channels": 64, "use_new_attention_order": false}, with the values of its '
        "training",
    )
    return PUBLISHED[path.name]


def _require_flag(is_stated: bool, path: Path, flag: str, why: str) -> None:
    """Raise ArchitectureError where a flag is missing, or stated twice, that no tensor shows."""
    raise_if(
        not is_stated,
        ArchitectureError,
        f"{path}: {why}, and no tensor says it",
        f"write {flag} into {path.with_suffix('.json')}",
    )


def _require_heads(shape: GuidedShape, flags: Flags, path: Path) -> None:
    """Raise ArchitectureError unless the flags say how attention is cut, and widths allow it."""
    _require_flag(
        (flags.num_heads is None) != (flags.num_head_channels is None),
        path,
        "num_heads or num_head_channels",
        "it attends with a number of heads or a width",
    )
    widths = {shape.block_out_channels[-1]}
    levels = zip(shape.block_out_channels, shape.down_block_types, strict=True)
    widths |= {width for width, kind in levels if "Attn" in kind}
    for width in sorted(widths):
        divisor = flags.num_heads or flags.num_head_channels
        assert divisor is not None
        raise_if(
            width % divisor,
            ArchitectureError,
            f"{path}: {width} channels are not cut into heads by {divisor}",
        )
    several = any(shape.head_width(width) < width for width in widths)
    _require_flag(
        not several or flags.use_new_attention_order is not None,
        path,
        "use_new_attention_order",
        "queries, keys and values lie in one of two orders",
    )


def _guided_schedule(flags: Flags, path: Path) -> GuidedSchedule:
    steps = flags.diffusion_steps
    _require_flag(
        steps == 1000 or flags.rescale_timesteps is not None,
        path,
        "rescale_timesteps",
        f"the network may count its {steps} steps in 1000",
    )
    first = 0.1 / steps  # betas of a thousand steps, so that all steps together add as much noise
    return GuidedSchedule(
        num_train_timesteps=steps,
        beta_start=first,
        beta_end=200 * first,
        beta_schedule="linear" if flags.noise_schedule == "linear" else "squaredcos_cap_v2",
        prediction_type=SAMPLE if flags.predict_xstart else EPSILON,
        rescale_timesteps=bool(flags.rescale_timesteps),
    )


PARTS: Mapping[str, str] = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
    "group_norm": "norm",
    "to_out.0": "proj_out",
}
"""Part of a residual block or an attention -> its name in the file."""
ENDS: Mapping[str, str] = {
    "conv_in": "input_blocks.0.0",
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
    "mid_block.resnets.0": "middle_block.0",
    "mid_block.attentions.0": "middle_block.1",
    "mid_block.resnets.1": "middle_block.2",
}
"""Prefix of a module of every such UNet -> its prefix in the file."""


@dataclass(frozen=True)
class _Layout:
    """How blocks are counted in a file: `layers` residual blocks a level on the way down, one more
    on the way up; attending: levels with attention, in the order of the way down.
    """

    layers: int
    attending: tuple[bool, ...]
    by_resnet: bool

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> "_Layout":
        """Count the blocks: each level but the last one ends its way up with a step."""
        step = re.compile(r"output_blocks\.\d+\.[12]\.(conv|in_layers\.0)\.weight")
        steps = [match[1] for name in tensors if (match := step.fullmatch(name))]
        outputs = {name.split(".")[1] for name in tensors if name.startswith("output_blocks.")}
        levels = 1 + len(steps)
        layers = len(outputs) // levels - 1
        raise_if(
            levels > DEEPEST or not 1 <= layers <= DEEPEST,
            ValueError,
            f"{levels} levels of {layers} residual blocks",
        )
        firsts = [1 + level * (layers + 1) for level in range(levels)]
        attending = tuple(f"input_blocks.{first}.1.qkv.weight" in tensors for first in firsts)
        return cls(layers, attending, "conv" not in steps)

    def names(self) -> dict[str, str]:
        """Return prefix of a module of `UNet` -> its prefix in the file."""
        names = dict(ENDS)
        directions = (
            ("down", "input", self.attending, self.layers, "op"),
            ("up", "output", self.attending[::-1], self.layers + 1, "conv"),
        )
        for direction, side, attending, layers, convolution in directions:
            for level, attends_here in enumerate(attending):
                new = f"{direction}_blocks.{level}"
                first = level * (self.layers + 1) + (direction == "down")
                for layer in range(layers):
                    block = f"{side}_blocks.{first + layer}"
                    names[f"{new}.resnets.{layer}"] = f"{block}.0"
                    if attends_here:
                        names[f"{new}.attentions.{layer}"] = f"{block}.1"
                if level < len(attending) - 1:
                    # a step between levels: a residual block, or one convolution
                    ahead = (
                        f"{first + layers}.0"
                        if direction == "down"
                        else f"{first + layers - 1}.{1 + attends_here}"
                    )
                    step = ("", "") if self.by_resnet else (".conv", f".{convolution}")
                    names[f"{new}.{direction}samplers.0{step[0]}"] = (
                        f"{side}_blocks.{ahead}{step[1]}"
                    )
        return names

    def kinds(self, plain: str, attention: str, resnet: str) -> tuple[Any, ...]:
        without = resnet if self.by_resnet else plain
        return tuple(attention if attends_here else without for attends_here in self.attending)


def _guided_shape(tensors: Mapping[str, Tensor], layout: _Layout, flags: Flags) -> GuidedShape:
    """Return the shape that the tensors show; LookupError where one of them is missing."""
    firsts = [1 + level * (layout.layers + 1) for level in range(len(layout.attending))]
    widths = tuple(len(tensors[f"input_blocks.{first}.0.out_layers.3.bias"]) for first in firsts)
    rows = len(tensors["input_blocks.1.0.emb_layers.1.bias"])
    waves = tensors["time_embed.0.weight"].shape[1]
    raise_if(waves % 2, ValueError, f"an odd number of waves of t, {waves}")
    resampling: Resampling = "resnet" if layout.by_resnet else "conv"
    return GuidedShape(
        in_channels=tensors[MARK].shape[1],
        out_channels=len(tensors["out.2.bias"]),
        block_out_channels=widths,
        layers_per_block=layout.layers,
        down_block_types=layout.kinds("DownBlock2D", "AttnDownBlock2D", RESNET_DOWN),
        up_block_types=layout.kinds("UpBlock2D", "AttnUpBlock2D", RESNET_UP)[::-1],
        downsample_type=resampling,
        upsample_type=resampling,
        resnet_time_scale_shift="scale_shift" if rows == 2 * widths[0] else "default",
        attention_head_dim=flags.num_head_channels,
        attn_norm_num_groups=GROUPS,
        num_heads=flags.num_heads,
        num_channels=waves,
        time_embedding_dim=len(tensors["time_embed.0.bias"]),
    )


def _by_unet_names(
    tensors: Mapping[str, Tensor], layout: _Layout, shape: GuidedShape, flags: Flags
) -> dict[str, Tensor]:
    """Return all tensors under the names of `UNet`; one without a place there keeps its name, so
    that the weights are refused when they are loaded.
    """
    prefixes = {old: new for new, old in layout.names().items()}
    parts = {"": "", **{old: f".{new}" for new, old in PARTS.items()}}
    converted: dict[str, Tensor] = {}
    for name, value in tensors.items():
        stem, _, kind = name.rpartition(".")
        words = stem.split(".")
        candidates = (stem, ".".join(words[:3]), ".".join(words[:2]))
        prefix = next((one for one in candidates if one in prefixes), stem)
        part = stem[len(prefix) + 1 :]
        new = prefixes.get(prefix, "")
        # attention is a convolution of kernel 1 over the pixels: the same map as a linear one
        matrix = value.flatten(1) if part in ("qkv", "proj_out") and kind == "weight" else value
        if part == "qkv":
            for target, rows in zip(
                ("to_q", "to_k", "to_v"), _cut_qkv(matrix, shape, flags), strict=True
            ):
                converted[f"{new}.{target}.{kind}"] = rows
        else:
            is_renamed = bool(new) and part in parts
            converted[f"{new}{parts[part]}.{kind}" if is_renamed else name] = matrix
    return converted


def _cut_qkv(rows: Tensor, shape: GuidedShape, flags: Flags) -> tuple[Tensor, ...]:
    """Return rows of queries, keys, values: ordered by head before, in thirds now."""
    if flags.use_new_attention_order is False:
        width = shape.head_width(len(rows) // 3)
        heads = rows.unflatten(0, (-1, 3, width))
        return tuple(part.flatten(0, 1) for part in heads.unbind(1))
    return rows.chunk(3)
