"""The families of transformers' networks in timm's terms: architecture, arguments, names of tensors.

Each family is a row of `FAMILIES`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from certcli.checkpoint.record import Replacement
from certcli.models.converters.base import Renames, renamed, require_whole_windows
from certcli.models.converters.transformers_config import (
    Config,
    ConvNextConfig,
    SwinConfig,
    TokenConfig,
)
from certcli.system.errors import Refused, one_line, raise_if

TOKEN_NAMES: Renames = (
    (r"^(vit|deit|beit|dinov2|dinov2_with_registers)\.", ""),
    (r"^embeddings\.(cls|mask)_token$", r"\1_token"),
    (r"^embeddings\.distillation_token$", "reg_token"),
    (r"^embeddings\.register_tokens$", "reg_token"),
    (r"^embeddings\.position_embeddings$", "pos_embed"),
    (r"^embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
    (r"^(encoder\.layer|layers)\.", "blocks."),
    (r"\.layernorm_before\.", ".norm1."),
    (r"\.layernorm_after\.", ".norm2."),
    (r"\.attention\.(output\.dense|o_proj)\.", ".attn.proj."),
    (r"\.attention\.attention\.", ".attn."),
    (
        r"\.attention\.q_proj\.",
        ".attn.query.",
    ),  # transformers 5 in memory; its files keep the names of 4
    (r"\.attention\.k_proj\.", ".attn.key."),
    (r"\.attention\.v_proj\.", ".attn.value."),
    (r"\.intermediate\.dense\.", ".mlp.fc1."),
    (r"\.output\.dense\.", ".mlp.fc2."),
    (r"\.layer_scale(\d)\.lambda1$", r".ls\1.gamma"),
    (r"\.lambda_(\d)$", r".gamma_\1"),
    (r"^encoder\.relative_position_bias\.", "rel_pos_bias."),
    (r"\.attn\.relative_position_bias\.", ".attn."),
    (r"^layernorm\.", "norm."),
    (r"^pooler\.layernorm\.", "fc_norm."),
    (r"^(cls_)?classifier\.", "head."),
    (r"^distillation_classifier\.", "head_dist."),
)

SWIN_NAMES: Renames = (
    (r"^swin(v2)?\.", ""),
    (r"^embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
    (r"^embeddings\.norm\.", "patch_embed.norm."),
    (r"^encoder\.", ""),
    (r"\.layernorm_before\.", ".norm1."),
    (r"\.layernorm_after\.", ".norm2."),
    (r"\.attention\.output\.dense\.", ".attn.proj."),
    (r"\.attention\.self\.", ".attn."),
    (r"\.continuous_position_bias_mlp\.", ".cpb_mlp."),
    (r"\.intermediate\.dense\.", ".mlp.fc1."),
    (r"\.output\.dense\.", ".mlp.fc2."),
    (r"^layernorm\.", "norm."),
    (r"^classifier\.", "head.fc."),
)

CONVNEXT_NAMES: Renames = (
    (r"^convnext(v2)?\.", ""),
    (r"^embeddings\.patch_embeddings\.", "stem.0."),
    (r"^embeddings\.layernorm\.", "stem.1."),
    (r"^encoder\.", ""),
    (r"\.downsampling_layer\.", ".downsample."),
    (r"^(stages\.\d+)\.layers\.", r"\1.blocks."),
    (r"\.dwconv\.", ".conv_dw."),
    (r"\.layernorm\.", ".norm."),
    (r"\.pwconv(\d)\.", r".mlp.fc\1."),
    (r"\.grn\.", ".mlp.grn."),
    (r"\.layer_scale_parameter$", ".gamma"),
    (r"^layernorm\.", "head.norm."),
    (r"^classifier\.", "head.fc."),
)

_ACTIVATIONS = {
    "gelu": None,  # timm's default
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}


TimmNetwork = tuple[str, dict[str, Any], tuple[Replacement, ...]]
"""A config's architecture in timm: name, arguments, modules with an eps of their own."""
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
    finish: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict
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


def _activation_argument(config: Config) -> dict[str, Any]:
    """Return timm's argument for the config's activation: none where it is timm's own default.

    Raises:
        Refused: timm's networks have no such activation.
    """
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


def _plain_transformer(config: TokenConfig, architecture: str) -> TimmNetwork:
    """ViT, ViT-MSN, DeiT and DINOv2, whose blocks are timm's own."""
    arguments = {**_tokens(config), **_activation_argument(config), "qkv_bias": config.qkv_bias}
    if not config.model_type.startswith("dinov2"):
        if architecture.endswith("WithTeacher"):
            return "deit_base_distilled_patch16_224", arguments, ()
        distilled = {"reg_tokens": 1} if config.model_type == "deit" else {}
        return "vit_base_patch16_224", {**arguments, **distilled}, ()
    raise_if(
        config.use_swiglu_ffn,
        Refused,
        "use_swiglu_ffn: such an MLP is not converted; timm's own vit_giant_patch14_dinov2 has it",
    )
    arguments["init_values"] = 1e-5
    if config.model_type == "dinov2_with_registers":
        arguments["reg_tokens"] = config.num_register_tokens
    # its head reads the mean of the patches too
    has_classifier = architecture.endswith("ForImageClassification")
    arch = "certvit_dinov2_classifier" if has_classifier else "vit_small_patch14_dinov2"
    return arch, arguments, ()


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
    further = {
        "init_values": config.layer_scale_init_value or None,
        "use_abs_pos_emb": config.use_absolute_position_embeddings,
        "use_rel_pos_bias": config.use_relative_position_bias,
        "use_shared_rel_pos_bias": config.use_shared_relative_position_bias,
    }
    return "beit_base_patch16_224", {**_tokens(config), **further}, ()


def _transformers_swin(config: SwinConfig, _: str) -> TimmNetwork:
    """Swin and Swin v2; Refused where timm's network would compute something else."""
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
    activation = _activation_argument(config)
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
        arguments["pretrained_window_sizes"] = config.pretrained_window_sizes
    arch = "swinv2_tiny_window8_256" if second else "swin_tiny_patch4_window7_224"
    return arch, arguments, ()


def _transformers_convnext(config: ConvNextConfig, _: str) -> TimmNetwork:
    """ConvNeXt and ConvNeXt v2, whose last norm alone has the config's eps."""
    arguments = {
        "patch_size": config.patch_size,
        "in_chans": config.num_channels,
        "dims": config.hidden_sizes,
        "depths": config.depths,
        "num_classes": config.classes,
        **_activation_argument(config),
    }
    # the other norms have timm's 1e-6
    last = Replacement("head.norm", "norm-eps", {"eps": config.layer_norm_eps})
    if config.model_type == "convnextv2":
        return "convnextv2_tiny", arguments, (last,)
    arguments["ls_init_value"] = 1e-6 if config.layer_scale_init_value > 0 else None
    return "convnext_tiny", arguments, (last,)


def _with_positions(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Insert zeros for the registers' positions: timm's embedding has them, transformers' does not."""
    if "reg_token" not in tensors:
        return tensors
    position = tensors["pos_embed"]
    registers = torch.zeros_like(tensors["reg_token"])
    return {**tensors, "pos_embed": torch.cat([position[:, :1], registers, position[:, 1:]], dim=1)}


def _with_merging(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Move the merging of patches from the end of a stage, transformers' place, to the next's start."""
    return renamed(
        tensors,
        [(r"^layers\.(\d+)\.downsample", lambda match: f"layers.{int(match[1]) + 1}.downsample")],
    )


def _with_distillation_token(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the second token by timm's name of it in a network of two heads: 'dist_token'."""
    return renamed(
        tensors, [("^reg_token$", "dist_token")] if "head_dist.weight" in tensors else []
    )


def _with_flat_norms(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the global response norms' weights as (channels,), of (1, 1, 1, channels)."""
    return {name: value.flatten() if ".grn." in name else value for name, value in tensors.items()}


_CLASS_TOKEN = "last_hidden_state[:, 0], the class token after the last norm"
_MEAN_TOKEN = "pooler_output, the mean of the tokens after the last norm"
_MEAN_OF_IMAGE = "pooler_output, the norm of the mean over the image"
FAMILIES: Mapping[str, ModelType] = {
    "vit": ModelType("ViT", TokenConfig, _plain_transformer, TOKEN_NAMES, _CLASS_TOKEN),
    "vit_msn": ModelType("ViTMSN", TokenConfig, _plain_transformer, TOKEN_NAMES, _CLASS_TOKEN),
    "deit": ModelType(
        "DeiT",
        TokenConfig,
        _plain_transformer,
        TOKEN_NAMES,
        _CLASS_TOKEN,
        _with_distillation_token,
        ("", "WithTeacher"),
    ),
    "beit": ModelType(
        "Beit", TokenConfig, _beit, TOKEN_NAMES, "pooler_output, the norm of the patches' mean"
    ),
    "dinov2": ModelType("Dinov2", TokenConfig, _plain_transformer, TOKEN_NAMES, _CLASS_TOKEN),
    "dinov2_with_registers": ModelType(
        "Dinov2WithRegisters",
        TokenConfig,
        _plain_transformer,
        TOKEN_NAMES,
        _CLASS_TOKEN,
        _with_positions,
    ),
    "swin": ModelType(
        "Swin", SwinConfig, _transformers_swin, SWIN_NAMES, _MEAN_TOKEN, _with_merging
    ),
    "swinv2": ModelType(
        "Swinv2", SwinConfig, _transformers_swin, SWIN_NAMES, _MEAN_TOKEN, _with_merging
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
        _with_flat_norms,
    ),
}
