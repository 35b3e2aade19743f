"""A file with timm's names, or of the repository that timm took, as the network that it belongs to.

State dicts of DINOv2, BEiT, Swin, ConvNeXt and OpenCLIP are converted by timm's own filters. Where
nothing fits, the refusal says what the tensors look like, or which option reads them.
"""

import inspect
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from certcli.checkpoint.file import Checkpoint
from certcli.checkpoint.record import Record
from certcli.models import build
from certcli.models.assumptions import reading_of, rival, statistics_doubts
from certcli.models.build import OpenCheckpoint
from certcli.models.config_json import (
    config_beside,
    config_image_doubts,
    config_path,
    describe_timm_file,
    require_consistent_config,
)
from certcli.models.converters.base import ALONE, cause, rivals
from certcli.models.converters.prefixes import aligned
from certcli.models.converters.wrapping import Bare
from certcli.models.origins import Hints
from certcli.models.weights import FITTING_HINT, headless, misfit, require_computed
from certcli.system.errors import (
    ArchitectureError,
    CertvitError,
    one_line,
    raise_if,
)

_RESAMPLED = re.compile(r"pos_embed|patch_embed|relative_position|head")
"""Tensors whose shape may differ before the filter: embeddings of another image size, and heads that it renames."""


def _filtered(tensors: Mapping[str, Tensor], net: nn.Module) -> dict[str, Tensor] | None:
    """Return the tensors as timm's `checkpoint_filter_fn` for the network renames them; None where
    timm has no filter.

    Raises:
        ArchitectureError: the filter would resample an embedding, or drop a layer: another function
        than the file's.
    """
    module: Any = sys.modules[type(net).__module__]
    convert = getattr(module, "checkpoint_filter_fn", None)
    expected = net.state_dict()
    wrong = [
        name
        for name in tensors.keys() & expected.keys()
        if tensors[name].shape != expected[name].shape
    ]
    if convert is None or not all(_RESAMPLED.search(name) for name in wrong):
        return None  # tensors of other widths: no renaming makes them fit
    layer = next((name for name in tensors if "pre_logits" in name), None)
    raise_if(
        layer is not None,
        ArchitectureError,
        f"'{one_line(layer)}' belongs to a representation layer, which timm's network lacks",
    )
    scaled = inspect.signature(convert).parameters.keys() & {"adapt_layer_scale"}
    resampling = [name for name in vars(module) if name.startswith(("resample_", "resize_"))]
    try:
        with mock.patch.dict(vars(module), dict.fromkeys(resampling, _refuse)):
            return dict(convert(dict(tensors), net, **dict.fromkeys(scaled, True)))
    except CertvitError:
        raise
    except Exception:  # the filter expects other names
        return None


def _refuse(*_: Any, **__: Any) -> None:
    raise ArchitectureError(
        "the file's embeddings are for another image or patch size: resampled, they are another network",
        "--arch-arg img_size=... for the size that it was trained with",
    )


_OTHERS = (
    (
        r"^(text_model|vision_model)\.",
        "transformers' CLIPModel or SiglipModel, which is no classifier",
    ),
    (
        r"^visual\.|^logit_scale$|^token_embedding\.",
        "an OpenCLIP model: a tower needs its timm architecture",
    ),
    (
        r"^(encoder|decoder)\.(block|layers)\.\d+\.(layer|self_attn)",
        "a sequence-to-sequence transformer",
    ),
    (r"^model\.layers\.\d+\.self_attn", "a language model"),
    (
        r"^(decoder_blocks|decoder_embed|mask_token)",
        "a pre-trained autoencoder (MAE), which has no classifier",
    ),
    (r"^layer1\.\d+\.conv1\.", "a ResNet: name timm's architecture, such as --arch resnet50"),
    (r"^(input_blocks|down_blocks|time_embed)", "a diffusion model"),
)
"""Names of tensors, and whose they are."""


def _appearance(tensors: Mapping[str, Tensor]) -> str:
    """What the tensors' names and shapes tell, and what they cannot."""
    embedding = tensors.get("patch_embed.proj.weight")
    qkv = tensors.get("blocks.0.attn.qkv.weight")
    if embedding is None or qkv is None or embedding.dim() != 4:
        words = [
            words for pattern, words in _OTHERS if any(map(re.compile(pattern).search, tensors))
        ]
        if words:
            return f"has no certvit record; its tensors have the names of {words[0]}"
        examples = ", ".join(sorted(tensors)[:2])
        return f"has no certvit record, and its tensors ({examples}, ...) are not those of a timm vision transformer"
    width, channels, patch = embedding.shape[:3]
    depth = len({match[1] for name in tensors if (match := re.match(r"blocks\.(\d+)\.", name))})
    return (
        f"looks like a timm vision transformer (width {width}, depth {depth}, patch {patch}, {channels} channels), but "
        "its number of heads, mean and std cannot be known from its tensors"
    )


_PATCHES = "patch_embed.proj.weight"
_DISTILLED = {192: "deit_tiny", 384: "deit_small", 768: "deit_base"}
"""Widths of timm's distilled networks."""
_SURPLUS = (
    ("reg_token", "--arch-arg reg_tokens={1}"),
    ("fc_norm.weight", "--arch-arg global_pool=avg"),
    (".ls1.gamma", "--arch-arg init_values=1e-5"),
    (".q_norm.weight", "--arch-arg qk_norm=true"),
    ("norm_pre.weight", "--arch-arg pre_norm=true"),
)
"""Ends of names that a network has with these options only; in braces an axis of the tensor."""
_PATCH_SIZES = ("embed_dim={} and --arch-arg num_heads=...", "in_chans={}", "patch_size={}")
"""Options of the first axes of the map of patches."""


def _advised(net: nn.Module, tensors: Mapping[str, Tensor]) -> list[tuple[str, str]]:
    """Return tensors that the network lacks or has in another shape, each with options that give
    it, the most telling first."""
    expected = net.state_dict()
    advised = []
    if "dist_token" in tensors and "dist_token" not in expected:
        width = int(tensors["dist_token"].shape[-1])
        size = "" if width in _DISTILLED else f" --arch-arg embed_dim={width}"
        named = _DISTILLED.get(width, "deit_tiny")
        advised.append(("dist_token", f"--arch {named}_distilled_patch16_224{size}"))
    sides = (each.get(_PATCHES, torch.zeros(())).shape[:3] for each in (tensors, expected))
    for options, size, usual in zip(_PATCH_SIZES, *sides):
        if size != usual:
            advised.append((_PATCHES, f"--arch-arg {options.format(size)}"))
    for ending, options in _SURPLUS:
        surplus = [name for name in sorted(tensors) if name.endswith(ending)]
        if surplus and not any(name.endswith(ending) for name in expected):
            advised.append((surplus[0], options.format(*tensors[surplus[0]].shape)))
    return advised


_MISSING_HINT = (
    "put timm's config.json beside it, or pass --arch NAME, with --arch-arg num_heads=... --mean ... --std ... where it is "
    "not timm's own"
)


def open_timm_file(path: Path, bare: Bare, hints: Hints) -> OpenCheckpoint:
    """Return the network of a file with names of timm, or of the repository that timm took."""
    config, doubts = config_beside(path, hints)
    if hints.arch is None and config is None:
        is_plain = "patch_embed.proj.weight" in bare.tensors
        shown = bare.tensors if is_plain else bare.whole
        raise ArchitectureError(f"{path} {_appearance(shown)}", _MISSING_HINT)
    record, origins, net = describe_timm_file(path, hints, config, bare.tensors)
    if net.state_dict().keys() != bare.tensors.keys():
        bare = aligned(bare, path, hints.weights, net.state_dict().keys())
        # the head's rows are read now
        record, origins, net = describe_timm_file(path, hints, config, bare.tensors)
    try:
        bare = _fitting_tensors(bare, net)
    except ArchitectureError as failure:
        if not hints.features and _ends_in_features(bare, record):
            raise headless(str(path)) from None
        advised = _advised(net, bare.tensors)
        if not advised and failure.hint != FITTING_HINT:
            raise
        changed = cause(bare.tensors.keys() - net.state_dict().keys())
        if changed is not None:
            raise ArchitectureError(f"{path}: {changed[0]}", changed[1]) from failure
        both = rivals(bare.whole, net.state_dict())
        if not advised and both is not None:
            target, first, second = (one_line(name) for name in both)
            raise ArchitectureError(
                f"{path} holds '{first}' and '{second}': which is the '{target}' of {record.arch}?",
                ALONE,
            ) from failure
        if not advised:
            other = "" if config is None else f"; or {config_path(path)} belongs to another file"
            raise ArchitectureError(
                f"{path} is another network than {record.arch} as named: {failure.message}",
                _by_cause(net, bare) + other,
            ) from failure
        raise ArchitectureError(
            f"{path} is another network than {record.arch} as named: it has '{one_line(advised[0][0])}' "
            f"{tuple(bare.tensors[advised[0][0]].shape)} ({misfit(net, bare.tensors)})",
            " ".join(options for _, options in advised),
        ) from failure
    if config is not None:
        require_consistent_config(config, net, config_path(path), hints)
    if not hints.as_stated:
        why = rival(net, record, bare.tensors, hints.arch_args)
        raise_if(
            why is not None,
            ArchitectureError,
            f"which network is {path.name}? {why}",
            "--as-stated if it was trained with these arguments; else leave them out",
        )
        why = rival(net, record, bare.tensors, {} if config is None else config.model_args)
        if why is not None:
            doubts.append(f"config.json is believed: {why}")
    doubts = [*(doubts or statistics_doubts(net, record)), *bare.doubts]
    doubts += [] if config is None else config_image_doubts(config, record, hints)
    if config is not None and config.num_classes not in (
        None,
        record.classes,
        hints.arch_args.get("num_classes"),
    ):
        head = (
            f"the head has {record.classes}: the head is taken"
            if record.classes
            else "the file has no classifier"
        )
        doubts.append(f"config.json says {config.num_classes} classes, {head}")
    reading = reading_of(net, record, origins, doubts=doubts).with_facts(bare.facts())
    return build.with_network(Checkpoint(bare.tensors, record), net, reading)


def _by_cause(net: nn.Module, bare: Bare) -> str:
    """Return what to do about tensors that are missing, left, or of other shapes."""
    expected = net.state_dict().keys()
    surplus = sorted(bare.tensors.keys() - expected)
    if surplus:
        name = one_line(bare.prefix + surplus[0])
        return (
            f"{ALONE}, without '{name}', if its answer does not depend on it; else it is "
            "of an architecture that was not named"
        )
    if expected - bare.tensors.keys():
        return "the file is not whole, or of an architecture without them: save the network's whole state_dict()"
    return "--arch-arg key=value for the sizes that it was trained with"


def _fitting_tensors(bare: Bare, net: nn.Module) -> Bare:
    """Return the tensors by the network's names, perhaps by timm's filter; refuse others."""
    tensors = bare.tensors
    why = misfit(net, tensors)
    if not why:
        return bare
    matching = _filtered(tensors, net)
    if (matching is None or misfit(net, matching)) and bare.prefix:
        matching = _filtered(bare.whole, net)  # OpenCLIP's begin with `visual`
    if matching is None or misfit(net, matching):
        raise ArchitectureError(why, FITTING_HINT)
    buffers = {name for name, _ in net.named_buffers()} - matching.keys()
    require_computed(net, {name: tensors[name] for name in tensors if name in buffers})
    return replace(bare, tensors=matching, original=True)


def _ends_in_features(bare: Bare, record: Record) -> bool:
    """Tell whether the tensors are those of the same network without a classifier."""
    arguments = {**record.arch_args, "num_classes": 0}
    try:
        _fitting_tensors(
            bare, build.create(record.arch, arguments, initialise=False, like=bare.tensors)
        )
        return True
    except ArchitectureError:
        return False
