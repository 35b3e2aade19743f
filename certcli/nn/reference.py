"""Reference networks, registered with timm under `certvit_*`:

- `certvit_vit_*`: plain timm vision transformers (dot-product attention, LayerNorm); `mnist` to
  `tinyimagenet` with the sizes of CertViT's Table 4. The table does not give the number of heads;
  ours are width / 32 (digits: / 16), width / 64 at 384.
- `certvit_vit_ibp_3_3_8`, `pgd_2_3_16`: the vision transformers of VNN-COMP 2023, without norms or
  with BatchNorm.
- `certvit_4c3f`, `6c2f`, `8c2f`: the small CNNs of the certified-training literature (Lee et al.
  2020, BCP). No attention.
- `certvit_4c3f_mnist`, `4c3f_cifar10`, `6c2f_cifar10`, `8c2f_cifar100`, `8c2f_tinyimagenet`,
  `certvit_l2_vit_*`: the networks of CertViT's Table 1, decoded from its parameter counts. The CNNs
  have no biases and, but on MNIST, one learnt threshold an entry (ClippedReLU). The ViTs have tied
  L2 attention and no biases but those of the norms. Their layers and MLP ratios are those which the
  counts give, not those of the paper's Table 4. At TinyImageNet ratio 1.5 with two maps of
  attention, or 0.5 with four, gives the same count as ratio 1 with three; the other rows have
  three.
- `certvit_covit_t1` to `t4`: the networks of the Cauchy paper's Table 1 without attention, one
  kernel of three taps or four, 4 or 8 blocks of width 128. The text does not say their patches: 16
  here. Those of sizes S to L have width 512 (`--arch-arg embed_dim=512`) and patches of 32 where
  its Table 2 has a star; depths and kernels stand in an appendix that was not read.
- `certvit_lip_*`: Lipschitz by design: patches, MaxMin blocks on tokens, a MaxMin head over all
  tokens. No attention. With `--arch-arg rolls=true`, as `certvit_lip_cifar10` has it, neighbours
  exchange channels before each layer.
- `certvit_lip_pyramid_cifar10_small` (1.3 million weights), `_base` (2.2) and `_large` (6.8):
  rolled channels in stages (`widths`, `depths`), 2 x 2 tokens merged between them, and the length
  of each channel over windows of tokens before the head. Without a size in its name: the one before
  these, 1.4 million.
- `certvit_lip_attention_mnist`: `certvit_lip_mnist` with hard attention between linear maps of each
  place, and one linear layer over all tokens: it needs its attention. `--arch-arg mixing=soft`
  makes that softmax, `none` takes it out.
- `certvit_sort_mnist`: Lipschitz by design; tokens are mixed by hard attention only: each channel
  of a token attends to exactly one token, chosen by the image. No softmax.
- `certvit_mix_mnist`: the same with attention's other limit, orthogonal matrices over tokens, which
  do not depend on the image. `--arch-arg mixing=none` takes the mixing out of either
  (docs/results.md).

Those that are Lipschitz by design take `--arch-arg mirror=true`, the mean over an image and its
mirror image, and `members=2`, the mean of several networks, which `certvit init --member` makes of
trained ones.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from timm.models import register_model
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from certcli.nn.lipschitz_networks import (
    LipschitzMixer,
    LipschitzPyramid,
    PlaceMixer,
    TokenMixer,
    build_members,
)
from certcli.nn.published_networks import ClassAndMeanViT, CoViT, SmallConvNet, TiedL2ViT
from certcli.system.errors import raise_if

_MNIST_STATISTICS = ((0.1307,), (0.3081,))
_IMAGENET_STATISTICS = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
_CIFAR_STATISTICS = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))


def _config(
    channels: int, side: int, classes: int, mean: Sequence[float], std: Sequence[float]
) -> dict[str, Any]:
    return {
        "input_size": (channels, side, side),
        "num_classes": classes,
        "mean": tuple(mean),
        "std": tuple(std),
        "interpolation": "bicubic",
        "crop_pct": 1.0,
    }


def _network_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return timm.create_model's arguments without those about pretrained weights."""
    return {
        key: value
        for key, value in arguments.items()
        if value is not None
        and key not in ("pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir")
    }


def _reference_vit(
    config: dict[str, Any],
    defaults: dict[str, Any],
    options: dict[str, Any],
    kind: type[VisionTransformer] = VisionTransformer,
) -> nn.Module:
    channels, side, _ = config["input_size"]
    arguments = {
        "img_size": side,
        "in_chans": channels,
        "num_classes": config["num_classes"],
        **defaults,
    }
    arguments |= _network_arguments(options)
    net = kind(**arguments)
    net.pretrained_cfg = dict(config)  # type: ignore[assignment]
    return net


def _changeable(
    make: Callable[..., nn.Module],
    config: dict[str, Any],
    shape: dict[str, Any],
    options: dict[str, Any],
) -> nn.Module:
    """Build make(channels=, side=, classes=, **shape), or the mean of `members` such networks.

    Args:
        config: The architecture's own inputs, their statistics, and its number of classes.
        options: What the caller of timm.create_model passes, which changes each of these. Other
            channels than the config's all have its first channel's statistics.
    """
    arguments = _network_arguments(options)
    channels = arguments.pop("in_chans", config["input_size"][0])
    side = arguments.pop("img_size", config["input_size"][1])
    if channels != config["input_size"][0]:
        config = {
            **config,
            **{name: tuple(config[name][:1]) * channels for name in ("mean", "std")},
        }
    classes = arguments.pop("num_classes", config["num_classes"])
    member = lambda **own_shape: make(channels=channels, side=side, classes=classes, **own_shape)  # noqa: E731
    net = build_members(member, shape | arguments)
    net.pretrained_cfg = {**config, "input_size": (channels, side, side)}  # type: ignore[assignment]
    return net


def _convnet(
    config: dict[str, Any],
    convolutions: Sequence[Sequence[int]],
    widths: Sequence[int],
    options: dict[str, Any],
    **form: bool,
) -> nn.Module:
    argument_names = {
        "in_chans",
        "img_size",
        "num_classes",
        "bias",
        "clipped",
        "convolutions",
        "widths",
    }
    unknown = sorted(_network_arguments(options).keys() - argument_names)
    raise_if(unknown, TypeError, f"unknown arguments {unknown}")
    shape = {"convolutions": convolutions, "widths": widths, **form}
    return _changeable(SmallConvNet, config, shape, options)


_clipped = partial(_convnet, bias=False, clipped=True)
_4C = [(32, 3, 1), (32, 4, 2), (64, 3, 1), (64, 4, 2)]
_6C = [(32, 3, 1), (32, 3, 1), (32, 4, 2), (64, 3, 1), (64, 3, 1), (64, 4, 2)]
_8C = [
    (64, 3, 1),
    (64, 3, 1),
    (64, 4, 2),
    (128, 3, 1),
    (128, 3, 1),
    (128, 4, 2),
    (256, 3, 1),
    (256, 4, 2),
]
_8C_UNPADDED = [(*layer, 0 if layer[2] == 2 else 1) for layer in _8C]
_CIFAR10 = _config(3, 32, 10, *_CIFAR_STATISTICS)
_COMPETITION = _config(3, 32, 10, (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
_COMPETITION_SHAPE = {
    "embed_dim": 48,
    "mlp_ratio": 2.0,
    "act_layer": nn.ReLU,
    "norm_layer": nn.Identity,
    "global_pool": "avg",
    "pool_include_prefix": True,
    "fc_norm": False,
}
_GREY = (1, 28, 10, (0.0,), (1.0,))
_COLOUR = ((0.0,) * 3, (1.0,) * 3)
_TOKENS = {"patch": 14, "width": 256, "depth": 4, "heads": 16, "head": [256]}


def _reference_shape(
    patch: int, width: int, depth: int, heads: int, ratio: float
) -> dict[str, Any]:
    return {
        "patch_size": patch,
        "embed_dim": width,
        "depth": depth,
        "num_heads": heads,
        "mlp_ratio": ratio,
    }


def _covit(depth: int, kernels: int, options: dict[str, Any]) -> nn.Module:
    config = _config(3, 224, 10, *_CIFAR_STATISTICS)
    shape = _reference_shape(16, 128, depth, 1, 4.0) | {"kernels": kernels}
    return _reference_vit(config, shape, options, kind=CoViT)


def _pyramid(widths: Sequence[int], depths: Sequence[int], options: dict[str, Any]) -> nn.Module:
    shape = {"patch": 4, "widths": widths, "depths": depths, "windows": 4, "head": [256]}
    return _changeable(LipschitzPyramid, _config(3, 32, 10, *_COLOUR), shape, options)


_NETWORKS: dict[str, Callable[[dict[str, Any]], nn.Module]] = {
    # plain ViTs; all but the first have the sizes of CertViT's Table 4
    "vit_digits": partial(
        _reference_vit, _config(1, 8, 10, (0.5,), (0.5,)), _reference_shape(2, 64, 2, 4, 2.0)
    ),
    "vit_mnist": partial(
        _reference_vit, _config(1, 28, 10, *_MNIST_STATISTICS), _reference_shape(7, 128, 6, 4, 4.0)
    ),
    "vit_cifar10": partial(_reference_vit, _CIFAR10, _reference_shape(4, 192, 6, 6, 3.0)),
    "vit_cifar100": partial(
        _reference_vit,
        _config(3, 32, 100, *_CIFAR_STATISTICS),
        _reference_shape(4, 192, 12, 6, 3.0),
    ),
    "vit_tinyimagenet": partial(
        _reference_vit,
        _config(3, 64, 200, *_IMAGENET_STATISTICS),
        _reference_shape(4, 384, 12, 6, 3.0),
    ),
    # VNN-COMP 2023; norm_layer=batchnorm for those whose BatchNorm is not folded into their weights
    "vit_ibp_3_3_8": partial(
        _reference_vit,
        _COMPETITION,
        {**_COMPETITION_SHAPE, "patch_size": 8, "depth": 3, "num_heads": 3},
    ),
    "vit_pgd_2_3_16": partial(
        _reference_vit,
        _COMPETITION,
        {**_COMPETITION_SHAPE, "patch_size": 16, "depth": 2, "num_heads": 3},
    ),
    # DINOv2 of the small size with a linear classifier on class token and mean
    "dinov2_classifier": partial(
        _reference_vit,
        _config(3, 224, 1000, *_IMAGENET_STATISTICS),
        {"patch_size": 14, "embed_dim": 384, "depth": 12, "num_heads": 6, "init_values": 1e-5},
        kind=ClassAndMeanViT,
    ),
    # with biases and ReLU; 4c3f has 1,973,536 weights beside them
    "4c3f": partial(_convnet, _config(*_GREY), _4C, [512, 512]),
    "6c2f": partial(_convnet, _config(3, 32, 10, *_COLOUR), _6C, [512]),
    "8c2f": partial(_convnet, _config(3, 64, 200, *_COLOUR), _8C, [256]),
    # CertViT's Table 1 as its parameter counts decode: no biases, learnt thresholds but on MNIST
    "4c3f_mnist": partial(_convnet, _config(*_GREY), _4C, [512, 512], bias=False),
    "4c3f_cifar10": partial(_clipped, _config(3, 32, 10, *_COLOUR), _4C, [512, 512]),
    "6c2f_cifar10": partial(_clipped, _config(3, 32, 10, *_COLOUR), _6C, [512]),
    "8c2f_cifar100": partial(_clipped, _config(3, 32, 100, *_COLOUR), _8C_UNPADDED, [256]),
    "8c2f_tinyimagenet": partial(_clipped, _config(3, 64, 200, *_COLOUR), _8C_UNPADDED, [256]),
    # its ViTs, whose column "MLP ratio" holds the number of heads
    "l2_vit_mnist": partial(
        _reference_vit,
        _config(1, 28, 10, *_MNIST_STATISTICS),
        _reference_shape(7, 128, 6, 4, 4.0),
        kind=TiedL2ViT,
    ),
    "l2_vit_cifar10": partial(
        _reference_vit, _CIFAR10, _reference_shape(4, 192, 10, 3, 4.0), kind=TiedL2ViT
    ),
    "l2_vit_cifar100": partial(
        _reference_vit,
        _config(3, 32, 100, *_CIFAR_STATISTICS),
        _reference_shape(4, 192, 12, 3, 4.0),
        kind=TiedL2ViT,
    ),
    "l2_vit_tinyimagenet": partial(
        _reference_vit,
        _config(3, 64, 200, *_IMAGENET_STATISTICS),
        _reference_shape(4, 384, 12, 3, 1.0),
        kind=TiedL2ViT,
    ),
    # the Cauchy paper's CoViTs
    "covit_t1": partial(_covit, 4, 1),
    "covit_t2": partial(_covit, 4, 4),
    "covit_t3": partial(_covit, 8, 1),
    "covit_t4": partial(_covit, 8, 4),
    "lip_digits": partial(
        _changeable,
        LipschitzMixer,
        _config(1, 8, 10, (0.0,), (1.0,)),
        {"patch": 2, "width": 32, "depth": 1, "head": [128, 128]},
    ),
    "lip_mnist": partial(
        _changeable,
        LipschitzMixer,
        _config(*_GREY),
        {"patch": 7, "width": 64, "depth": 2, "head": [512, 512, 256]},
    ),
    "lip_cifar10": partial(
        _changeable,
        LipschitzMixer,
        _config(3, 32, 10, *_COLOUR),
        {"patch": 4, "width": 96, "depth": 2, "head": [512, 512, 256]},
    ),
    "lip_pyramid_cifar10": partial(_pyramid, [64, 256], [2, 4]),
    "lip_pyramid_cifar10_small": partial(_pyramid, [64, 256], [2, 3]),
    "lip_pyramid_cifar10_base": partial(_pyramid, [96, 384], [2, 3]),
    "lip_pyramid_cifar10_large": partial(_pyramid, [192, 768], [3, 5]),
    "lip_attention_mnist": partial(
        _changeable,
        PlaceMixer,
        _config(*_GREY),
        {"patch": 14, "width": 256, "depth": 6, "mixing": "sort", "across": 128},
    ),
    "sort_mnist": partial(_changeable, TokenMixer, _config(*_GREY), {**_TOKENS, "mixing": "sort"}),
    "mix_mnist": partial(
        _changeable, TokenMixer, _config(*_GREY), {**_TOKENS, "mixing": "orthogonal"}
    ),
}

SHAPES: dict[str, dict[str, Any]] = {
    "certvit_lip_mnist": {"patch": 14, "width": 256, "depth": 1},
    "certvit_lip_cifar10": {"width": 128, "depth": 3, "head": [256, 256], "rolls": True},
}
"""Arguments of a new network where none are given. A record names what differs from the defaults above, which stay."""


def _register(name: str, make: Callable[[dict[str, Any]], nn.Module]) -> None:
    def build(pretrained: bool = False, **options: Any) -> nn.Module:
        return make(options)

    build.__name__ = f"certvit_{name}"
    register_model(build)


for _name, _make in _NETWORKS.items():
    _register(_name, _make)
