"""Networks of Hugging Face's transformers as timm's: ViT, DeiT, ViT-MSN, BEiT, DINOv2, Swin and
ConvNeXt, classifiers or not.

`config.json` gives the architecture and `preprocessor_config.json` the pixels. Each family is a row
of `FAMILIES`.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from certcli.checkpoint.config_fields import class_names_in, plain_names
from certcli.checkpoint.record import Record, Replacement
from certcli.checkpoint.schema import Json
from certcli.models.converters.base import (
    COMPUTED,
    Converted,
    Renames,
    parted,
    renamed,
    require_whole_windows,
    with_joined_qkv,
)
from certcli.models.converters.transformers_config import (
    CONFIG,
    PIXELS,
    Config,
    ConvNextConfig,
    Named,
    SwinConfig,
    TokenConfig,
    decoded_config,
    input_spec,
    unknown_fields,
)
from certcli.models.converters.transformers_names import CONVNEXT_NAMES, SWIN_NAMES, TOKEN_NAMES
from certcli.models.origins import Hints
from certcli.system.errors import ArchitectureError, CheckpointError, Refused, one_line, raise_if
from certcli.system.reading import is_absent

_ACTIVATIONS = {
    "gelu": None,  # timm's default
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}


@dataclass(frozen=True)
class TimmNetwork:
    """A config's architecture in timm: name, arguments, modules with an eps of their own."""

    arch: str
    arguments: dict[str, Any]
    surgery: tuple[Replacement, ...] = ()


Described = Callable[[Any, str], TimmNetwork]


@dataclass(frozen=True)
class ModelType:
    """One `model_type` of transformers.

    Attributes:
        name: Begins the names of its classes: the classifier, also with a suffix of `suffixes`, and
            the model without.
        config: The type of its config.
        describe: Returns timm's network for a config and a class.
        names: How its tensors are renamed.
        features: The output of timm's network without a classifier, in transformers' terms.
        finish: A last conversion of the tensors.
    """

    name: str
    config: type[Config]
    describe: Described
    names: Renames
    features: str
    finish: Callable[[dict[str, Tensor], Any], dict[str, Tensor]] = lambda tensors, _: tensors
    suffixes: tuple[str, ...] = ("",)

    @property
    def headless(self) -> str:
        return f"{self.name}Model"

    @property
    def classes(self) -> list[str]:
        return [
            *(f"{self.name}ForImageClassification{suffix}" for suffix in self.suffixes),
            self.headless,
        ]


def _tokens(config: TokenConfig) -> dict[str, Any]:
    """The arguments that timm's ViT and BEiT share."""
    ratio = config.mlp_ratio
    if ratio is None:
        if config.intermediate_size is None:
            raise Refused("neither mlp_ratio nor intermediate_size is there")
        ratio = config.intermediate_size / config.hidden_size
    return {
        "img_size": config.image_size,
        "patch_size": config.patch_size,
        "in_chans": config.num_channels,
        "embed_dim": config.hidden_size,
        "depth": config.num_hidden_layers,
        "num_heads": config.num_attention_heads,
        "mlp_ratio": ratio,
        "norm_eps": config.layer_norm_eps,
        "num_classes": config.classes,
    }


def _timm_activation(config: Config) -> dict[str, Any]:
    raise_if(
        config.hidden_act not in _ACTIVATIONS,
        Refused,
        f"hidden_act '{one_line(config.hidden_act)[:40]}' is none of {', '.join(_ACTIVATIONS)}",
    )
    word = _ACTIVATIONS[config.hidden_act]
    return {} if word is None else {"act_layer": word}


def _square_side(config: Any) -> int:
    """A square image's side: on others, transformers and timm place positions differently."""
    sides = {config.image_size} if isinstance(config.image_size, int) else set(config.image_size)
    raise_if(
        len(sides) > 1,
        Refused,
        f"image_size {config.image_size}: this network is converted for square images only",
    )
    return sides.pop()


def _transformers_vit(config: TokenConfig, _: str) -> TimmNetwork:
    return TimmNetwork(
        "vit_base_patch16_224",
        {**_tokens(config), **_timm_activation(config), "qkv_bias": config.qkv_bias},
    )


def _deit(config: TokenConfig, architecture: str) -> TimmNetwork:
    arguments = {**_tokens(config), **_timm_activation(config), "qkv_bias": config.qkv_bias}
    if architecture.endswith("WithTeacher"):
        return TimmNetwork("deit_base_distilled_patch16_224", arguments)
    return TimmNetwork("vit_base_patch16_224", {**arguments, "reg_tokens": 1})


def _dinov2(config: TokenConfig, architecture: str) -> TimmNetwork:
    raise_if(
        config.use_swiglu_ffn,
        Refused,
        "use_swiglu_ffn: such an MLP is not converted; timm's own vit_giant_patch14_dinov2 has it",
    )
    arguments = {
        **_tokens(config),
        **_timm_activation(config),
        "qkv_bias": config.qkv_bias,
        "init_values": 1e-5,
    }
    # its head reads the mean of the patches too
    has_classifier = architecture.endswith("ForImageClassification")
    return TimmNetwork(
        "certvit_dinov2_classifier" if has_classifier else "vit_small_patch14_dinov2", arguments
    )


def _dinov2_registers(config: TokenConfig, architecture: str) -> TimmNetwork:
    network = _dinov2(config, architecture)
    return TimmNetwork(
        network.arch, {**network.arguments, "reg_tokens": config.num_register_tokens}
    )


def _beit(config: TokenConfig, _: str) -> TimmNetwork:
    raise_if(
        not config.use_mean_pooling,
        Refused,
        "use_mean_pooling is false: a BEiT that ends in its class token is not converted",
    )
    if config.use_relative_position_bias or config.use_shared_relative_position_bias:
        _square_side(config)
    raise_if(
        config.hidden_act != "gelu",
        Refused,
        f"timm's BEiT has no activation '{one_line(config.hidden_act)[:40]}'",
    )
    return TimmNetwork(
        "beit_base_patch16_224",
        {
            **_tokens(config),
            "init_values": config.layer_scale_init_value or None,
            "use_abs_pos_emb": config.use_absolute_position_embeddings,
            "use_rel_pos_bias": config.use_relative_position_bias,
            "use_shared_rel_pos_bias": config.use_shared_relative_position_bias,
        },
    )


def _transformers_swin(config: SwinConfig, _: str) -> TimmNetwork:
    second = config.model_type == "swinv2"
    raise_if(
        config.use_absolute_embeddings or not config.qkv_bias,
        Refused,
        "use_absolute_embeddings and attention without qkv_bias have no counterpart in timm's Swin",
    )
    if config.layer_norm_eps != 1e-5:  # transformers' other norms keep 1e-5
        raise Refused(
            f"layer_norm_eps is {config.layer_norm_eps:g}: only Swin's own 1e-5 is converted"
        )
    require_whole_windows(
        _square_side(config),
        config.patch_size,
        len(config.depths),
        config.window_size,
        shrinks=second,
    )
    activation = _timm_activation(config)
    raise_if(
        activation and not second, Refused, f"timm's Swin has no activation '{config.hidden_act}'"
    )
    arguments = {
        "img_size": config.image_size,
        "patch_size": config.patch_size,
        "in_chans": config.num_channels,
        "embed_dim": config.embed_dim,
        "depths": config.depths,
        "num_heads": config.num_heads,
        "window_size": config.window_size,
        "mlp_ratio": config.mlp_ratio,
        "num_classes": config.classes,
        **activation,
    }
    if second:
        return TimmNetwork(
            "swinv2_tiny_window8_256",
            {**arguments, "pretrained_window_sizes": config.pretrained_window_sizes},
        )
    return TimmNetwork("swin_tiny_patch4_window7_224", arguments)


def _transformers_convnext(config: ConvNextConfig, _: str) -> TimmNetwork:
    arguments = {
        "patch_size": config.patch_size,
        "in_chans": config.num_channels,
        "dims": config.hidden_sizes,
        "depths": config.depths,
        "num_classes": config.classes,
        **_timm_activation(config),
    }
    # the other norms have timm's 1e-6
    last = Replacement("head.norm", "norm-eps", {"eps": config.layer_norm_eps})
    if config.model_type == "convnextv2":
        return TimmNetwork("convnextv2_tiny", arguments, (last,))
    arguments["ls_init_value"] = 1e-6 if config.layer_scale_init_value > 0 else None
    return TimmNetwork("convnext_tiny", arguments, (last,))


def _dinov2_tensors(tensors: dict[str, Tensor], config: TokenConfig) -> dict[str, Tensor]:
    """Registers have no position in transformers: zeros in timm's embedding, which covers them."""
    if "reg_token" not in tensors:
        return tensors
    position = tensors["pos_embed"]
    registers = torch.zeros_like(tensors["reg_token"])
    return {**tensors, "pos_embed": torch.cat([position[:, :1], registers, position[:, 1:]], dim=1)}


def _swin_tensors(tensors: dict[str, Tensor], config: SwinConfig) -> dict[str, Tensor]:
    """transformers merges patches at the end of a stage, timm at the start of the next."""
    return renamed(
        tensors,
        [(r"^layers\.(\d+)\.downsample", lambda match: f"layers.{int(match[1]) + 1}.downsample")],
    )


def _deit_tensors(tensors: dict[str, Tensor], config: TokenConfig) -> dict[str, Tensor]:
    """timm's network with two heads has a distillation token of its own name."""
    if "head_dist.weight" not in tensors or "reg_token" not in tensors:
        return tensors
    return renamed(tensors, [("^reg_token$", "dist_token")])


def _convnext_tensors(tensors: dict[str, Tensor], config: ConvNextConfig) -> dict[str, Tensor]:
    """The global response norm of version 2 has axes of length 1 before its channels."""
    return {name: value.flatten() if ".grn." in name else value for name, value in tensors.items()}


_CLASS_TOKEN = "last_hidden_state[:, 0], the class token after the last norm"
_MEAN_TOKEN = "pooler_output, the mean of the tokens after the last norm"
_MEAN_OF_IMAGE = "pooler_output, the norm of the mean over the image"
FAMILIES: Mapping[str, ModelType] = {
    "vit": ModelType("ViT", TokenConfig, _transformers_vit, TOKEN_NAMES, _CLASS_TOKEN),
    "vit_msn": ModelType("ViTMSN", TokenConfig, _transformers_vit, TOKEN_NAMES, _CLASS_TOKEN),
    "deit": ModelType(
        "DeiT", TokenConfig, _deit, TOKEN_NAMES, _CLASS_TOKEN, _deit_tensors, ("", "WithTeacher")
    ),
    "beit": ModelType(
        "Beit", TokenConfig, _beit, TOKEN_NAMES, "pooler_output, the norm of the patches' mean"
    ),
    "dinov2": ModelType("Dinov2", TokenConfig, _dinov2, TOKEN_NAMES, _CLASS_TOKEN),
    "dinov2_with_registers": ModelType(
        "Dinov2WithRegisters",
        TokenConfig,
        _dinov2_registers,
        TOKEN_NAMES,
        _CLASS_TOKEN,
        _dinov2_tensors,
    ),
    "swin": ModelType(
        "Swin", SwinConfig, _transformers_swin, SWIN_NAMES, _MEAN_TOKEN, _swin_tensors
    ),
    "swinv2": ModelType(
        "Swinv2", SwinConfig, _transformers_swin, SWIN_NAMES, _MEAN_TOKEN, _swin_tensors
    ),
    "convnext": ModelType(
        "ConvNext", ConvNextConfig, _transformers_convnext, CONVNEXT_NAMES, _MEAN_OF_IMAGE
    ),
    "convnextv2": ModelType(
        "ConvNextV2",
        ConvNextConfig,
        _transformers_convnext,
        CONVNEXT_NAMES,
        _MEAN_OF_IMAGE,
        _convnext_tensors,
    ),
}
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
        network = family.describe(config, architecture)
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
    network_tensors = family.finish(with_joined_qkv(network_tensors), config)
    record = Record(
        arch=network.arch,
        arch_args={**network.arguments, **({} if features is None else {"num_classes": 0})},
        input=spec,
        classes=config.classes if features is None else 0,
        class_names=_config_class_names(config.id2label) if features is None else None,
        surgery=network.surgery,
    )
    origins = {**dict.fromkeys((*network.arguments, "architecture"), CONFIG), **origins}
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


def _config_class_names(labels: Mapping[str, str] | None) -> tuple[str, ...] | None:
    """Return the classes by names that folders could have, in the order of their numbers."""
    names = class_names_in(dict(labels or {}))
    return None if names is None else plain_names(names)
