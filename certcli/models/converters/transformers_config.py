"""The two configs of transformers beside a file, as typed values: the architecture, and how images become its input."""

from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct

from certcli.checkpoint.arch_args import LARGEST_SIZE, MOST_LAYERS
from certcli.checkpoint.record import InputSpec
from certcli.checkpoint.schema import MOST_CLASSES, Channels, Json, Name, PerChannel, Side, decode
from certcli.models.converters.base import T, pixel_input, read_config
from certcli.models.hints import Hints
from certcli.system.errors import ArchitectureError

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


class Config(Struct, kw_only=True):
    """The fields that all families share; what else a config holds is not read."""

    model_type: Name
    architectures: Annotated[list[Name], Meta(max_length=8)] = []
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
    layer_scale_init_value: float = 0.1


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
    layer_scale_init_value: float = 1e-6
    layer_norm_eps: Epsilon


class Pixels(Struct, kw_only=True):
    """preprocessor_config.json."""

    image_mean: PerChannel | None = None
    image_std: PerChannel | None = None
    do_normalize: bool = True
    do_rescale: bool = True
    rescale_factor: Annotated[float, Meta(gt=0, le=1)] = 1 / 255
    offset: bool = False
    resample: Annotated[int, Meta(ge=0, le=5)] | None = None
    size: Json | int | None = None
    crop_size: Json | int | None = None
    do_center_crop: bool = False
    do_resize: bool = True
    crop_pct: Annotated[float, Meta(ge=0.25, le=4)] | None = None


def decoded(config: Path, wanted: type[T]) -> T:
    return read_config(
        config, lambda text: decode(text, wanted), "fetch it again, as transformers wrote it"
    )


def input_spec(
    config: Any, path: Path, hints: Hints
) -> tuple[InputSpec, dict[str, str], list[str]]:
    """Return the pixels, the origins of their facts, and doubts; options come before preprocessor_config.json.

    Raises:
        ArchitectureError: neither says how pixels are normalised.
    """
    pixels = decoded(path, Pixels) if path.is_file() else None
    mean, std, origin = _statistics(pixels)
    origins = {name: f"--{name}" if getattr(hints, name) else origin for name in ("mean", "std")}
    mean, std = hints.mean or mean, hints.std or std
    if mean is None or std is None:
        raise ArchitectureError(
            f"nothing beside {path.parent / CONFIG} says how the pixels are normalised",
            f"put {PIXELS} beside it, or pass --mean and --std",
        )
    sides = config.image_size
    height, width = (sides, sides) if isinstance(sides, int) else sides
    resample = None if pixels is None else pixels.resample
    view = _RESAMPLING[2 if resample is None else resample], _crop(pixels, min(height, width))
    spec = pixel_input(
        (config.num_channels, height, width), mean, std, view, f"check {PIXELS}, --mean and --std"
    )
    origins["view"] = "by default" if pixels is None else PIXELS
    made, doubts = None if pixels is None else _made(pixels), []
    if made is not None and made != [height, width]:
        sizes = ["x".join(map(str, each)) for each in (made, (height, width))]
        doubts.append(
            f"{PIXELS} makes images of {sizes[0]}, and this is the network for {sizes[1]}, as {CONFIG} says: on the others "
            "transformers computes another function"
        )
    return spec, origins, doubts


def _statistics(
    pixels: Pixels | None,
) -> tuple[tuple[float, ...] | None, tuple[float, ...] | None, str]:
    """Mean and std of pixels in [0, 1]: (255 f x - m) / s = (x - m / (255 f)) / (s / (255 f)), f the rescale factor."""
    if pixels is None:
        return None, None, ""
    if pixels.offset:
        raise ArchitectureError(
            f"{PIXELS} subtracts an offset after rescaling, which is not converted"
        )
    scale = 255 * pixels.rescale_factor if pixels.do_rescale else 255.0
    scale = 1.0 if abs(scale - 1) < 1e-6 else scale  # 0.00392156862745098 is 1 / 255 in 16 digits
    if not pixels.do_normalize:
        return (0.0,), (1 / scale,), PIXELS
    if pixels.image_mean is None or pixels.image_std is None:
        return None, None, PIXELS
    return (
        tuple(value / scale for value in pixels.image_mean),
        tuple(value / scale for value in pixels.image_std),
        PIXELS,
    )


def _made(pixels: Pixels) -> list[int] | None:
    """The height and width of the images that the processor makes; None where they depend on the image, or are not said."""
    size = pixels.crop_size if pixels.do_center_crop else pixels.size if pixels.do_resize else None
    if isinstance(size, dict):
        sides = [size.get("height"), size.get("width")]
        if pixels.crop_pct is not None and sides == [None, None]:  # ConvNeXt's crop of its own
            sides = [size.get("shortest_edge")] * 2
    else:
        sides = [size, size]
    found = [side for side in sides if isinstance(side, int)]
    return found if len(found) == 2 else None


def _crop(pixels: Pixels | None, side: int) -> float:
    """The share of the resized image that the network sees."""
    if pixels is None:
        return 1.0
    if pixels.crop_pct is not None:
        return pixels.crop_pct
    whole = pixels.size.get("shortest_edge") if isinstance(pixels.size, dict) else pixels.size
    if pixels.do_center_crop and isinstance(whole, int) and whole >= side:
        return side / whole
    return 1.0
