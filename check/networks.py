"""The networks that this checker rebuilds from a record: timm's ViT, DeiT and Swin, and certvit's
reference networks.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np

from check.norms import ONE, Array, Interval, Unknown, extreme, length
from check.tensors import GELU_SLOPE, Layers, Node, Tensor, fit

HEADS = {"tiny": 3, "small": 6, "medium": 8, "base": 12, "large": 16, "digits": 4, "mnist": 4, "cifar10": 6, "cifar100": 6,
         "tinyimagenet": 6, "ibp": 3, "pgd": 3}  # fmt: skip
SHAPES = ("num_classes|img_size|in_chans|depths?|embed_dim|patch_size|mlp_ratio|qkv_bias|init_values|widths?|windows|heads?|"
          "patch")  # fmt: skip


def sort_pairs(t: Array, distance: int = 0, across: int = 0) -> Array:
    """Return entries at this distance (half a token for MaxMin, and behind `across`) as maximum and
    minimum, by image.
    """
    if across:
        return np.concatenate(
            (sort_pairs(t[..., :across], distance), sort_pairs(t[..., across:])), axis=2
        )
    grouped = t.reshape(len(t), -1, 2, distance or t.shape[-1] // 2)
    return np.stack([grouped.max(axis=2), grouped.min(axis=2)], axis=2).reshape(t.shape)


def rebuild(
    tensors: Mapping[str, Array], function: Mapping[str, Any], images: Array | None = None
) -> Tensor:
    """Return the logits of a record's `function`, their last map pending, at images (b, c, h, w)
    where it can follow them.
    """
    if "resized" in function:
        raise Unknown("images that the first layer resizes")
    arch = str(function["arch"])
    layers = Layers(tensors)
    options = {
        k: v
        for k, v in function["arch_args"].items()
        if not re.fullmatch(SHAPES, k.rstrip("_0123456789"))
    }
    x = Tensor(Node("pixels", "identity", ONE), lambda: ONE, batch=images)
    if match := re.fullmatch(
        r"(?:vit|deit3?)_([a-z]+)_patch\d+_\d+|certvit_vit_([a-z]+\d*)(?:_\d_3_\d+)?", arch
    ):
        output = vit(layers, x, function, HEADS.get(match[1] or match[2], 0), options)
    elif re.fullmatch(r"swin_(tiny|small|base|large)_patch4_window\d+_\d+", arch):
        output = swin(layers, x, function)
        options = {
            name: value
            for name, value in options.items()
            if name not in ("depths", "num_heads", "window_size")
        }
    elif re.fullmatch(r"certvit_[468]c[23]f", arch):
        output = convnet(layers, x, function)
    elif match := re.fullmatch(
        r"certvit_(lip|sort|mix|lip_attention|lip_pyramid)_(digits|mnist|cifar10)(_small|_base|_large)?",
        arch,
    ):
        across = int(options.pop("across", 128)) if match[1] == "lip_attention" else 0
        mixing = "roll" if options.pop("rolls", 0) else options.pop("mixing", match[1])
        features = (
            pyramid if match[1] == "lip_pyramid" else partial(mixer, mixing=mixing, across=across)
        )
        members = layers.each(
            "members.{}"
        )  # side by side, each at the image and, if asked, at its mirror image (11.5)
        fit("members", len(members) or 1, options.pop("members", 1))
        mirrored = replace(x, batch=None if images is None else images[..., ::-1])
        views = [x, mirrored] if options.pop("mirror", False) else [x]
        paths = [f"{path}." for path in members] or [""]
        parts = [features(layers, view, function, at=path) for view in views for path in paths]
        output = layers.linear(parts[0].beside(*parts[1:]), "head" if members else "head.out")
    else:
        raise Unknown(f"the architecture {arch}")
    unread = [
        name
        for name in tensors
        if name not in layers.read and not name.endswith(("_index", "attn_mask"))
    ]
    if strange := [*function["surgery"], *options, *unread]:
        raise Unknown(f"{strange[0]!r:.80} of {arch}")
    fit("logits", output.width, function["classes"] or output.width)
    return output


def vit(
    layers: Layers, x: Tensor, function: Mapping[str, Any], heads: int, options: dict[str, Any]
) -> Tensor:
    """A pre-norm vision transformer with GELU and a class token; certvit's two without norms have
    ReLU and a mean.
    """
    normed = not re.search("_(ibp|pgd)_", function["arch"])
    eps = float(options.pop("norm_eps", 1e-6))
    heads = int(options.pop("num_heads", heads))
    act = GELU_SLOPE if normed else ONE
    x, patches = layers.patches(x, "patch_embed.proj", function)
    prefix, position = layers.weight("cls_token", 3)[0], layers.weight("pos_embed", 3)[0]
    tokens = patches + len(prefix)
    fit("pos_embed", len(position) in (tokens, patches), True)
    x = replace(x, batch=None, size=lambda x=x: extreme(max, x.size(), *map(length, prefix)))  # type: ignore[misc]
    x = x.shifted(position, len(position))
    for block in layers.each("blocks.{}"):
        for number, part in (("1", "attn"), ("2", "mlp")):
            branch = layers.norm(x, f"{block}.norm{number}", eps) if normed else x
            attends = (
                layers.attention(branch, f"{block}.attn", heads, tokens, "5.1")
                if part == "attn"
                else None
            )
            branch = attends or layers.mlp(branch, f"{block}.mlp", act)
            scale = f"{block}.ls{number}"
            if f"{scale}.gamma" in layers.tensors and branch.pending:
                branch = replace(
                    branch, pending=branch.pending.scaled(scale, layers.weight(f"{scale}.gamma", 1))
                )
            x = x.plus(branch, block)
    return layers.linear(layers.norm(x, "norm", eps) if normed else x.mean("", tokens), "head")


def swin(layers: Layers, x: Tensor, function: Mapping[str, Any]) -> Tensor:
    """Windows and heads as the table of positions has them; every second block is shifted, if there
    are several windows.
    """
    eps, first = 1e-5, (side := function["size"][1] // 4)
    x, patches = layers.patches(x, "patch_embed.proj", function)
    x = layers.norm(replace(x, batch=None), "patch_embed.norm", eps).settled()
    for number, stage in enumerate(layers.each("layers.{}")):
        side = first >> number
        if number:
            merged = layers.norm(replace(x, width=4 * x.width), f"{stage}.downsample.norm", eps)
            x = layers.linear(merged, f"{stage}.downsample.reduction").settled()
        for place, block in enumerate(layers.each(f"{stage}.blocks.{{}}")):
            table = layers.weight(
                f"{block}.attn.relative_position_bias_table", 2
            )  # constants in the scores (5.2)
            heads = table.shape[1]
            window = (round(len(table) ** 0.5) + 1) // 2
            fit(
                block,
                (side**2 << 2 * number, side % window, len(table)),
                (patches, 0, (2 * window - 1) ** 2),
            )
            normal = layers.norm(x, f"{block}.norm1", eps)
            theorem = "7.2" if place % 2 and side > window else "5.2"
            x = x.plus(layers.attention(normal, f"{block}.attn", heads, window**2, theorem), block)
            x = x.plus(
                layers.mlp(layers.norm(x, f"{block}.norm2", eps), f"{block}.mlp", GELU_SLOPE), block
            )
    return layers.linear(
        layers.norm(x, "norm", eps).mean("head.global_pool.pool", side**2), "head.fc"
    )


def mixer(
    layers: Layers, x: Tensor, function: Mapping[str, Any], mixing: str, across: int, at: str
) -> Tensor:
    """Patches, linear layers (placed: one a place) and MaxMin on tokens, sorted or mixed; a head on
    all or on their mean.
    """
    (x, patches), placed = layers.patches(x, f"{at}embed", function), across > 0
    fit(
        "token mixing",
        mixing in ("orthogonal", "mix", "sort", "lip_attention", "none", "lip", "roll"),
        True,
    )
    x = x if placed else x.shifted(layers.weight(f"{at}position", 2), patches)
    for number, path in enumerate(layers.each(f"{at}maps.{{}}" if placed else f"{at}layers.{{}}")):
        x = layers.mixing(x, path, patches, placed) if placed else x
        if mixing in ("orthogonal", "mix"):
            x = layers.mixing(x, f"{at}mixings.{number}", patches)
        elif (
            mixing == "roll"
        ):  # quarters of the channels move by a token: none, down, right and both (11.4)
            x = rolled(x, f"{at}rolls.{number}", number, patches)
        elif placed or mixing != "lip":
            x = x.shifted(layers.weight(f"{at}mixings.{number}.shift", 2), patches)
        if mixing in ("sort", "lip_attention"):
            distance = (across or x.width) << number % max(1, patches.bit_length() - 1)
            x = x.curved(
                f"{at}mixings.{number}", ONE, partial(sort_pairs, distance=distance, across=across)
            )
        x = x if placed else layers.linear(x, path).curved(f"{at}act", ONE, sort_pairs)
    x = (
        replace(x, width=x.width * patches)
        if placed or mixing in ("lip", "roll")
        else x.mean("", patches)
    )
    return flat_head(layers, x, at)


def rolled(x: Tensor, path: str, number: int, tokens: int) -> Tensor:
    """Quarters of the channels move by a token, none, down, right and both; back where `number` is
    odd (11.4).
    """
    s = (-1) ** number
    grid = np.arange(tokens * x.width).reshape(round(tokens**0.5), -1, 4, x.width // 4)
    order = np.stack(
        [np.roll(grid[:, :, i], (s * (i & 1), s * (i >> 1)), (0, 1)) for i in range(4)], 2
    ).ravel()
    return x.curved(path, ONE, lambda t: t.reshape(len(t), -1)[:, order].reshape(t.shape))


def pyramid(layers: Layers, x: Tensor, function: Mapping[str, Any], at: str) -> Tensor:
    """Stages of rolled channels, linear layers and MaxMin, between them 2 x 2 tokens merged;
    lengths over windows (11.6).
    """
    x, tokens = layers.patches(x, f"{at}embed", function)
    side = round(tokens**0.5)
    for number, stage in enumerate(layers.each(f"{at}stages.{{}}")):
        if number:
            fit(stage, side % 2, 0)
            x = in_windows(x, side, side // 2)
            side = side // 2
            x = layers.linear(x, f"{stage}.merge")
        x = x.shifted(layers.weight(f"{stage}.position", 2), side**2)
        x = x.curved(f"{stage}.act", ONE, sort_pairs) if number else x
        for place, path in enumerate(layers.each(f"{stage}.layers.{{}}")):
            x = layers.linear(rolled(x, f"{stage}.rolls.{place}", place, side**2), path)
            x = x.curved(f"{stage}.act", ONE, sort_pairs)
    first = layers.tensors.get(
        f"{at}head.hidden.0.weight", layers.tensors.get("head.out.weight", np.zeros((1, 1)))
    )
    windows = round((first.shape[-1] / x.width) ** 0.5)
    fit(f"{at}pool", (windows > 0 and side % windows, windows**2 * x.width), (0, first.shape[-1]))
    plain = in_windows(x.settled(), side, windows)
    reach = side // windows
    width = x.width
    lengths = lambda t: np.sqrt((t.reshape(*t.shape[:2], reach**2, width) ** 2).sum(axis=2))  # noqa: E731
    x = plain.charged(f"{at}pool", ONE).at(plain, lengths, reach**2, Fraction(1))
    return flat_head(layers, replace(x, width=windows**2 * width), at)


def in_windows(x: Tensor, side: int, windows: int) -> Tensor:
    """Put the tokens of each of windows x windows windows side by side, row by row: entries move,
    and tokens get longer.
    """
    reach = side // windows
    grid = (-1, windows, reach, windows, reach, x.width)
    width = reach**2 * x.width
    batch = None
    if x.batch is not None:
        batch = x.batch.reshape(grid).transpose(0, 1, 3, 2, 4, 5).reshape(-1, windows**2, width)
    return replace(x, batch=batch, size=lambda: Interval.of(reach) * x.size(), width=width)


def flat_head(layers: Layers, x: Tensor, at: str) -> Tensor:
    """Linear layers and MaxMin on all tokens side by side, up to the last layer."""
    x = replace(x, batch=None if x.batch is None else x.batch.reshape(len(x.batch), -1))
    for path in layers.each(f"{at}head.hidden.{{}}"):
        x = layers.linear(x, path).curved(f"{at}head.act", ONE, sort_pairs)
    return x


def convnet(layers: Layers, x: Tensor, function: Mapping[str, Any]) -> Tensor:
    """Convolutions of kernel 3 (stride 1) and 4 (stride 2) with a border of one pixel, linear
    layers, ReLU.
    """
    x, (high, wide) = replace(x, width=function["size"][0]), function["size"][1:]
    for number, path in enumerate(layers.each("features.{}", 2)):
        kernel = layers.weight(f"{path}.weight", 4).shape[2:]
        fit(
            path,
            (kernel in ((3, 3), (4, 4)), any(function["mean"]), {*function["std"]}),
            (True, False, {1.0}),
        )
        x = layers.convolution(x, path, kernel[0] - 2, (high, wide)).curved(
            f"features.{2 * number + 1}", ONE, np.copy
        )
        high, wide = ((n + 2 - kernel[0]) // (kernel[0] - 2) + 1 for n in (high, wide))
    x = replace(x, width=x.width * high * wide)
    for number, path in enumerate(layers.each("hidden.{}", 2)):
        x = layers.linear(x, path).curved(f"hidden.{2 * number + 1}", ONE, np.copy)
    return layers.linear(x, "head")
