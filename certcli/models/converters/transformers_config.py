"""transformers' two configs, as typed values: the architecture, and how images become its input."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct
from msgspec.structs import fields

from certcli.checkpoint.config_fields import LOGITS_ALONE, other_problem, unknown_in
from certcli.checkpoint.record import MOST_LAYERS, InputSpec
from certcli.checkpoint.schema import (
    LARGEST_SIZE,
    MOST_CLASSES,
    PIXEL_SCALE,
    Channels,
    Json,
    Name,
    PerChannel,
    Side,
    Statistic,
    decode_json,
)
from certcli.models.converters.base import T, pixel_input, read_config
from certcli.models.origins import Hints
from certcli.system.errors import ArchitectureError, one_line, raise_if
from certcli.system.reading import is_absent

CONFIG = "config.json"
PIXELS = "preprocessor_config.json"
_RESAMPLING = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")
"""Pillow's numbers of its filters, by which transformers names them."""

Size = Annotated[int, Meta(ge=1, le=LARGEST_SIZE)]
Layers = Annotated[int, Meta(ge=1, le=MOST_LAYERS)]
Sides = Side | Annotated[list[Side], Meta(min_length=2, max_length=2)]
"""A list: msgspec 0.22 crashes on a union of a number and a tuple."""
Ratio = Annotated[float, Meta(gt=0, le=64)]
Epsilon = Annotated[float, Meta(gt=0, le=1)]
LayerScale = Annotated[float, Meta(ge=0, le=1e3)]
Lengths = dict[str, Side | None]


class Named(Struct, kw_only=True):
    """What a config of any network of transformers says of its class."""

    model_type: Name = "none"
    architectures: Annotated[list[Name], Meta(max_length=8)] | None = None


class Config(Named, kw_only=True):
    """The fields that all families share; what else a config holds is not read."""

    num_channels: Channels = 3
    id2label: Annotated[dict[str, str], Meta(max_length=MOST_CLASSES)] | None = None
    num_labels: Annotated[int, Meta(ge=1, le=MOST_CLASSES)] | None = None
    hidden_act: str

    @property
    def classes(self) -> int:
        return len(self.id2label) if self.id2label else self.num_labels or 2


class TokenConfig(Config, kw_only=True):
    """Transformers of one width: ViT, DeiT, ViT-MSN, BEiT, DINOv2."""

    hidden_size: Size
    num_hidden_layers: Layers
    num_attention_heads: Size
    intermediate_size: Size | None = None
    mlp_ratio: Ratio | None = None
    layer_norm_eps: Epsilon
    image_size: Sides
    patch_size: Sides
    qkv_bias: bool = True
    use_swiglu_ffn: bool = False
    num_register_tokens: Annotated[int, Meta(ge=0, le=1024)] = 0
    use_mean_pooling: bool = True
    use_absolute_position_embeddings: bool = False
    use_relative_position_bias: bool = False
    use_shared_relative_position_bias: bool = False
    layer_scale_init_value: LayerScale = 0.1


class SwinConfig(Config, kw_only=True):
    image_size: Sides
    patch_size: Side
    embed_dim: Size
    depths: Annotated[list[Layers], Meta(min_length=1, max_length=8)]
    num_heads: Annotated[list[Size], Meta(min_length=1, max_length=8)]
    window_size: Side
    pretrained_window_sizes: Annotated[
        list[Annotated[int, Meta(ge=0, le=1024)]], Meta(max_length=8)
    ] = []
    mlp_ratio: Ratio
    qkv_bias: bool = True
    use_absolute_embeddings: bool = False
    layer_norm_eps: Epsilon


class ConvNextConfig(Config, kw_only=True):
    image_size: Sides
    patch_size: Side
    hidden_sizes: Annotated[list[Size], Meta(min_length=4, max_length=4)]
    depths: Annotated[list[Layers], Meta(min_length=4, max_length=4)]
    layer_scale_init_value: LayerScale = 1e-6
    layer_norm_eps: Epsilon


class Pixels(Struct, kw_only=True):
    """preprocessor_config.json."""

    image_mean: PerChannel | Statistic | None = None
    image_std: PerChannel | Statistic | None = None
    do_normalize: bool = True
    do_rescale: bool = True
    rescale_factor: Annotated[float, Meta(gt=0, le=1)] = 1 / 255
    offset: bool | None = False
    rescale_offset: bool | None = False
    do_flip_channel_order: bool | None = False
    do_pad: bool | None = False
    include_top: bool | None = None
    resample: Annotated[int, Meta(ge=0, le=5)] | None = None
    size: Lengths | Side | list[Side] | None = None
    crop_size: Lengths | Side | None = None
    do_center_crop: bool | None = False
    do_resize: bool | None = True
    crop_pct: Annotated[float, Meta(ge=0.25, le=4)] | None = None
    image_processor_type: str | None = None
    feature_extractor_type: str | None = None
    auto_map: Any = None

    @property
    def processor(self) -> str | None:
        """The processor's class, without the suffixes of its versions."""
        named = self.image_processor_type or self.feature_extractor_type
        if named is None:
            return None
        for suffix in ("Fast", "Pil", "ImageProcessor", "FeatureExtractor"):
            named = named.removesuffix(suffix)
        return named


_OFF: tuple[Any, ...] = (None, False, 0, {}, [], "")
"""Values that switch a field off."""
_PROCESSORS = frozenset(("ViT", "DeiT", "Beit", "Bit", "ConvNext", "CLIP", "Siglip", "Swin"))
"""Processors that resize, crop, rescale and normalise by the fields above, and do nothing else."""
_HARMLESS_PIXELS = frozenset(
    (
        *("processor_class", "do_convert_rgb", "data_format", "input_data_format", "device"),
        *("return_tensors", "disable_grouping", "default_to_square", "do_reduce_labels"),
        *("reduce_labels", "_valid_processor_keys", "use_fast", "pad_size", "size_divisor"),
        *("crop_margin", "pad_and_return_pixel_mask"),
    )
)
_HARMLESS_CONFIG = frozenset(
    (
        "problem_type",  # judged by other_problem
        # training, and the pretext tasks before it
        *("attention_probs_dropout_prob", "hidden_dropout_prob", "drop_path_rate", "dropout"),
        *("attention_dropout", "classifier_dropout", "initializer_range", "initializer_factor"),
        *("use_mask_token", "mask_ratio", "vocab_size", "encoder_stride", "norm_pix_loss"),
        *("semantic_loss_ignore_index", "layer_norm_init", "num_labels", "label2id"),
        # other outputs and other heads
        *("pooler_act", "pooler_output_size", "out_features", "out_indices", "stage_names"),
        *("out_feature_indexes", "use_auxiliary_head", "auxiliary_loss_weight", "pool_scales"),
        *("auxiliary_channels", "auxiliary_num_convs", "auxiliary_concat_input", "apply_layernorm"),
        *("reshape_hidden_states", "output_attentions", "output_hidden_states", "return_dict"),
        *("add_fpn", "segmentation_indices", "add_cross_attention", "is_encoder_decoder"),
        # of Swin and ConvNeXt, which follow from others
        *("hidden_size", "num_layers", "path_norm", "num_stages", "layerscale_value"),
        # how the file was written
        *("_name_or_path", "transformers_version", "torch_dtype", "dtype", "torchscript"),
        *("finetuning_task", "task_specific_params", "_attn_implementation", "tie_word_embeddings"),
        *("use_bfloat16", "attn_implementation", "_commit_hash", "model_name", "backbone"),
        *("chunk_size_feed_forward", "id2color", "output_stride", "_num_labels"),
    )
)
"""Fields that do not change the logits of the classes that certvit converts."""


def decoded_config(config: Path, kind: type[T]) -> T:
    """Return a config beside a file as the structure `kind`; CheckpointError where it is none."""
    return read_config(
        config, partial(decode_json, kind=kind), "fetch it again, as transformers wrote it"
    )


def input_spec(
    config: Any, path: Path, hints: Hints
) -> tuple[InputSpec, dict[str, str], list[str]]:
    """Return the pixels, the origins of their facts, and doubts; options come before
    preprocessor_config.json.

    Raises:
        ArchitectureError: neither says how pixels are normalised.
    """
    is_there = not is_absent(path)
    pixels = decoded_config(path, Pixels) if is_there else Pixels(do_resize=False)
    is_given = hints.mean is not None and hints.std is not None
    mean, std = _pixel_statistics(pixels, is_given)
    origins = {name: f"--{name}" if getattr(hints, name) else PIXELS for name in ("mean", "std")}
    mean = hints.mean or mean
    std = hints.std or std
    if mean is None or std is None:
        raise ArchitectureError(
            f"nothing beside {path.parent / CONFIG} says how the pixels are normalised",
            f"put {PIXELS} beside it, or pass --mean and --std",
        )
    sides = config.image_size
    height, width = (sides, sides) if isinstance(sides, int) else sides
    view = (
        _RESAMPLING[2 if pixels.resample is None else pixels.resample],
        _crop(pixels, min(height, width)),
        _crop_mode(pixels),
    )
    spec = pixel_input(
        (config.num_channels, height, width), mean, std, view, f"check {PIXELS}, --mean and --std"
    )
    origins["view"] = PIXELS if is_there else "by default"
    preprocessed = _made(pixels)
    doubts = [*_processor_doubts(pixels), *(unknown_fields(path, Pixels) if is_there else ())]
    if preprocessed is not None and preprocessed != [height, width]:
        sizes = ["x".join(map(str, each)) for each in (preprocessed, (height, width))]
        doubts.append(
            f"{PIXELS} makes images of {sizes[0]}, and this is the network for {sizes[1]}, as {CONFIG} says: on the others "
            "transformers computes another function"
        )
    return spec, origins, doubts


def unknown_fields(path: Path, struct: type[Struct], decides: bool = True) -> list[str]:
    """Return a sentence where a config's field is neither used nor harmless.

    Args:
        decides: refuse a network that does not decide by its largest logit.
    """
    harmless = _HARMLESS_PIXELS if struct is Pixels else _HARMLESS_CONFIG
    raw = decoded_config(path, Json)
    used = {field.name for field in fields(struct)} | harmless
    problem = other_problem(raw)
    if problem is not None and decides:
        hint = "delete problem_type to judge the largest logit"
        raise ArchitectureError(f"{path.name}: {problem}", hint)
    doubts = [] if problem is None else [problem + LOGITS_ALONE]
    return doubts + unknown_in(raw, used, path.name, _OFF)


def _processor_doubts(pixels: Pixels) -> list[str]:
    """Return a sentence for a processor whose code is not known to do what its fields say."""
    named = one_line(pixels.image_processor_type or pixels.feature_extractor_type)[:80]
    strange = pixels.processor is not None and pixels.processor not in _PROCESSORS
    doubts = [f"{PIXELS} is of {named}, which certvit does not know: it is read as ViT's"] * strange
    code = f"{PIXELS} names code of its repository (auto_map), which is not run"
    return [*doubts, code] if pixels.auto_map else doubts


def _pixel_statistics(
    pixels: Pixels, is_given: bool
) -> tuple[tuple[float, ...] | None, tuple[float, ...] | None]:
    """Mean and std of pixels in [0, 1]: (255 f x - m) / s = (x - m / (255 f)) / (s / (255 f)), f
    the rescale factor.

    Args:
        is_given: Whether options give both, so that a config which leaves them open is no obstacle.
    """
    steps = {
        "subtracts an offset after rescaling (offset)": pixels.offset,
        "subtracts an offset after rescaling (rescale_offset)": pixels.rescale_offset,
        "turns the channels round (do_flip_channel_order)": pixels.do_flip_channel_order,
        "pads images (do_pad)": pixels.do_pad,
        "normalises twice (include_top)": pixels.include_top or pixels.processor == "EfficientNet",
    }
    strange = [words for words, is_on in steps.items() if is_on]
    raise_if(
        strange,
        ArchitectureError,
        f"{PIXELS} {', '.join(strange)}, which is not converted",
        "convert the network to one of pixels in [0, 1] with a mean and a std",
    )
    mean = _channel_values(pixels.image_mean)
    std = _channel_values(pixels.image_std)
    if not pixels.do_rescale:
        is_bytes = pixels.do_normalize and mean is not None and max(mean) > PIXEL_SCALE
        raise_if(
            not is_bytes and not is_given,
            ArchitectureError,
            f"{PIXELS} does not rescale (do_rescale false): it takes pixels of 0 to 255, or images that are in [0, 1] "
            "already, and does not say which",
            "pass --mean and --std of pixels in [0, 1]",
        )
    scale = 255 * pixels.rescale_factor if pixels.do_rescale else 255.0
    scale = 1.0 if abs(scale - 1) < 1e-6 else scale  # 0.00392156862745098 is 1 / 255 in 16 digits
    if not pixels.do_normalize:
        return (0.0,), (1 / scale,)
    if mean is None or std is None:
        return None, None
    return tuple(value / scale for value in mean), tuple(value / scale for value in std)


def _channel_values(values: tuple[float, ...] | float | None) -> tuple[float, ...] | None:
    return (values,) if isinstance(values, int | float) else values


def _crop_mode(pixels: Pixels) -> str:
    """Return how the processor resizes: to a height and a width both sides, to a shortest edge one."""
    if not pixels.do_resize or pixels.crop_pct is not None:
        return "center"
    size = pixels.size
    if isinstance(size, dict):
        return "squash" if {"height", "width"} <= size.keys() else "center"
    is_square = pixels.processor not in ("CLIP", "Bit", "ConvNext")
    return "squash" if isinstance(size, int) and is_square else "center"


def _made(pixels: Pixels) -> list[int] | None:
    """The processor's image height and width; None: it depends on the image, or is unstated."""
    size = pixels.crop_size if pixels.do_center_crop else pixels.size if pixels.do_resize else None
    sides: list[object] = [size, size]
    if isinstance(size, dict):
        sides = [size.get("height"), size.get("width")]
        if pixels.crop_pct is not None and sides == [None, None]:  # ConvNeXt's crop of its own
            sides = [size.get("shortest_edge")] * 2
    lengths = [side for side in sides if isinstance(side, int)]
    return lengths if len(lengths) == 2 else None


def _crop(pixels: Pixels, side: int) -> float:
    """The share of the resized image that the network sees."""
    if pixels.crop_pct is not None:
        return pixels.crop_pct
    whole = pixels.size
    if isinstance(whole, dict):
        whole = whole.get("shortest_edge", whole.get("height"))
    if pixels.do_center_crop and isinstance(whole, int) and whole >= side:
        return side / whole
    return 1.0
