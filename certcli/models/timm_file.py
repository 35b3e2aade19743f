"""A file with timm's names, or of the repository that timm took, as the network that it belongs to.

State dicts of DINOv2, BEiT, Swin, ConvNeXt and OpenCLIP are converted by timm's own filters. Where
nothing fits, the refusal says what the tensors look like, or which option reads them.
"""

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

from torch import Tensor, nn

from certcli.checkpoint.config_fields import ConfigFields
from certcli.checkpoint.file import Checkpoint
from certcli.checkpoint.record import Record
from certcli.models import build
from certcli.models.assumptions import reading_of, rival, statistics_doubts
from certcli.models.build import OpenCheckpoint
from certcli.models.config_json import (
    Description,
    config_beside,
    config_image_doubts,
    config_path,
    describe_timm_file,
    require_consistent_config,
)
from certcli.models.converters.alignment import cause, rivals
from certcli.models.converters.base import ALONE
from certcli.models.converters.prefixes import aligned
from certcli.models.converters.wrapping import Bare
from certcli.models.origins import Hints
from certcli.models.weights import FITTING_HINT, headless, require_computed, require_fitting
from certcli.system.errors import (
    ArchitectureError,
    CertvitError,
    one_line,
)

_RESAMPLED = re.compile(r"pos_embed|patch_embed|relative_position|head")
"""Tensors whose shape may differ before the filter: embeddings of another image size, and heads that it renames."""


def filtered(tensors: Mapping[str, Tensor], net: nn.Module) -> dict[str, Tensor] | None:
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
    if layer is not None:
        raise ArchitectureError(
            f"'{one_line(layer)}' belongs to a representation layer, which timm's network lacks"
        )
    options = (
        {"adapt_layer_scale": True}
        if "adapt_layer_scale" in inspect.signature(convert).parameters
        else {}
    )
    resampling = [name for name in vars(module) if name.startswith(("resample_", "resize_"))]
    try:
        with mock.patch.dict(vars(module), dict.fromkeys(resampling, _refuse)):
            return dict(convert(dict(tensors), net, **options))
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


def appearance(tensors: Mapping[str, Tensor]) -> str:
    """What the tensors' names and shapes tell, and what they cannot."""
    embedding = tensors.get("patch_embed.proj.weight")
    qkv = tensors.get("blocks.0.attn.qkv.weight")
    if embedding is None or qkv is None or embedding.dim() != 4:
        whose = next(
            (
                words
                for pattern, words in _OTHERS
                if any(re.search(pattern, name) for name in tensors)
            ),
            None,
        )
        if whose is not None:
            return f"has no certvit record; its tensors have the names of {whose}"
        examples = ", ".join(sorted(tensors)[:2])
        return f"has no certvit record, and its tensors ({examples}, ...) are not those of a timm vision transformer"
    width = embedding.shape[0]
    channels = embedding.shape[1]
    patch = embedding.shape[2]
    depth = len({match[1] for name in tensors if (match := re.match(r"blocks\.(\d+)\.", name))})
    return (
        f"looks like a timm vision transformer (width {width}, depth {depth}, patch {patch}, {channels} channels), but "
        "its number of heads, mean and std cannot be known from its tensors"
    )


Tensors = Mapping[str, Tensor]
_PATCHES = "patch_embed.proj.weight"
_DISTILLED = {192: "deit_tiny", 384: "deit_small", 768: "deit_base"}
"""Widths of timm's distilled networks."""


@dataclass(frozen=True)
class Advice:
    """A tensor that the network lacks or has in another shape, and options that give it."""

    tensor: str
    options: str


def advice(net: nn.Module, tensors: Tensors) -> list[Advice]:
    """Return what the file's tensors advise, the most telling first."""
    expected = net.state_dict()
    return [each for rule in _RULES for each in rule(tensors, expected)]


def _distilled(tensors: Tensors, expected: Tensors) -> Iterator[Advice]:
    if "dist_token" not in tensors or "dist_token" in expected:
        return
    width = int(tensors["dist_token"].shape[-1])
    named = _DISTILLED.get(width, "deit_tiny")
    size = "" if width in _DISTILLED else f" --arch-arg embed_dim={width}"
    yield Advice("dist_token", f"--arch {named}_distilled_patch16_224{size}")


def _registers(tensors: Tensors, expected: Tensors) -> Iterator[Advice]:
    if "reg_token" in tensors and "reg_token" not in expected:
        yield Advice("reg_token", f"--arch-arg reg_tokens={tensors['reg_token'].shape[1]}")


def _channels(tensors: Tensors, expected: Tensors) -> Iterator[Advice]:
    first = tensors.get(_PATCHES)
    usual = expected.get(_PATCHES)
    if first is None or usual is None or first.dim() != usual.dim():
        return
    if first.shape[1] != usual.shape[1] and first.shape[0] == usual.shape[0]:
        yield Advice(_PATCHES, f"--arch-arg in_chans={first.shape[1]}")
    if first.shape[2:] != usual.shape[2:]:
        yield Advice(_PATCHES, f"--arch-arg patch_size={first.shape[2]}")


def _width_advice(tensors: Tensors, expected: Tensors) -> Iterator[Advice]:
    first = tensors.get(_PATCHES)
    usual = expected.get(_PATCHES)
    if first is not None and usual is not None and first.shape[0] != usual.shape[0]:
        yield Advice(
            _PATCHES, f"--arch-arg embed_dim={first.shape[0]} and --arch-arg num_heads=..."
        )


def _surplus(ending: str, options: str) -> Callable[[Tensors, Tensors], Iterator[Advice]]:
    """Return the rule for a tensor of this ending, which the network has with these options only."""

    def rule(tensors: Tensors, expected: Tensors) -> Iterator[Advice]:
        name = next((name for name in sorted(tensors) if name.endswith(ending)), None)
        if name is not None and not any(other.endswith(ending) for other in expected):
            yield Advice(name, options)

    return rule


_RULES: tuple[Callable[[Tensors, Tensors], Iterator[Advice]], ...] = (
    _distilled,
    _registers,
    _width_advice,
    _channels,
    _surplus("fc_norm.weight", "--arch-arg global_pool=avg"),
    _surplus(".ls1.gamma", "--arch-arg init_values=1e-5"),
    _surplus(".q_norm.weight", "--arch-arg qk_norm=true"),
    _surplus("norm_pre.weight", "--arch-arg pre_norm=true"),
)


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
        raise ArchitectureError(f"{path} {appearance(shown)}", _MISSING_HINT)
    description, net = _described_network(path, bare, hints, config)
    if net.state_dict().keys() != bare.tensors.keys():
        bare = aligned(bare, path, hints.weights, net.state_dict().keys())
        description, net = _described_network(
            path, bare, hints, config
        )  # the head's rows are read now
    record = description.record
    try:
        bare = _fitting_tensors(bare, net)
    except ArchitectureError as failure:
        if not hints.features and _ends_in_features(bare, record):
            raise headless(str(path)) from None
        advised = advice(net, bare.tensors)
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
            f"{path} is another network than {record.arch} as named: it has '{one_line(advised[0].tensor)}' "
            f"{tuple(bare.tensors[advised[0].tensor].shape)} ({_misfit(net, bare.tensors)})",
            " ".join(each.options for each in advised),
        ) from failure
    if config is not None:
        require_consistent_config(config, net, config_path(path), hints)
    if not hints.as_stated:
        why = rival(net, record, bare.tensors, hints.arch_args)
        if why is not None:
            raise ArchitectureError(
                f"which network is {path.name}? {why}",
                "--as-stated if it was trained with these arguments; else leave them out",
            )
        if (
            config is not None
            and (why := rival(net, record, bare.tensors, config.model_args)) is not None
        ):
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
    reading = reading_of(net, record, description.origins, doubts=doubts).with_facts(bare.facts())
    return build.with_network(Checkpoint(bare.tensors, record), net, reading)


def _described_network(
    path: Path, bare: Bare, hints: Hints, config: ConfigFields | None
) -> tuple[Description, nn.Module]:
    description = describe_timm_file(path, hints, config, bare.tensors)
    return description, description.net or build.build(description.record, like=bare.tensors)


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


def _misfit(net: nn.Module, tensors: Mapping[str, Tensor]) -> str:
    """Return where network and tensors disagree, "" where they fit."""
    try:
        require_fitting(net, tensors)
        return ""
    except ArchitectureError as failure:
        return failure.message


def _fitting_tensors(bare: Bare, net: nn.Module) -> Bare:
    """Return the tensors by the network's names, perhaps by timm's filter; refuse others."""
    tensors = bare.tensors
    try:
        require_fitting(net, tensors)
        return bare
    except ArchitectureError:
        matching = filtered(tensors, net)
        if (matching is None or _misfit(net, matching)) and bare.prefix:
            matching = filtered(bare.whole, net)  # OpenCLIP's begin with `visual`
        if matching is not None and not _misfit(net, matching):
            buffers = {name for name, _ in net.named_buffers()}
            require_computed(
                net,
                {
                    name: value
                    for name, value in tensors.items()
                    if name in buffers - matching.keys()
                },
            )
            return replace(bare, tensors=matching, original=True)
        raise


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
