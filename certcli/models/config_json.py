"""The description of a foreign file: from options, then config.json, then timm's configuration."""

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import timm
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor, nn

from certcli.checkpoint.config_fields import DEFAULT_CROP, ConfigFields, decode_config
from certcli.checkpoint.record import Record
from certcli.checkpoint.tensor_files import INDEX
from certcli.models import build
from certcli.models.converters.base import pixel_input, read_config
from certcli.models.origins import Hints, overruled
from certcli.system.errors import ArchitectureError, CheckpointError, raise_if
from certcli.system.reading import is_absent

CONFIG = "config.json"
HUB_NAMES = ("model.safetensors", INDEX, "pytorch_model.bin", "pytorch_model.pth")
"""Names that the hub's libraries give to weights; which of them comes first differs between libraries."""
TIMM = "timm's own"
_PIXELS = "one mean and one positive std a channel, of pixels in [0, 1]"


def config_path(path: Path) -> Path:
    return path.parent / CONFIG


def config_beside(path: Path, hints: Hints) -> tuple[ConfigFields | None, list[str]]:
    """Return config.json beside the file, None where it is not used, and sentences on its
    differences to the options.

    Raises:
        ArchitectureError: it may belong to another file: weights under timm's own name lie there
            too, or the file's name is that of another architecture.
    """
    config = config_path(path)
    if is_absent(config):
        return None, []
    read = partial(decode_config, decides=not hints.logits)
    try:
        fields = read_config(
            config, read, "it needs what timm writes: architecture, num_classes, ..."
        )
    except CheckpointError as failure:
        if hints.arch is None:
            raise
        return None, [f"not used: {failure.message}"]
    if hints.arch is not None and _architecture_stem(hints.arch) != _architecture_stem(
        fields.architecture
    ):
        return None, [f"--arch says {hints.arch}, {CONFIG} {fields.architecture}: it is not used"]
    why = None if hints.as_stated else _of_another(path, fields)
    raise_if(
        why is not None and hints.arch is None,
        ArchitectureError,
        f"is {config} about {path.name}? {why}",
        "--arch NAME for another network, --as-stated if it is",
    )
    if why is not None:
        return None, [f"{CONFIG} is not used: {why}"]
    return fields, [*fields.doubts, *_overruled_fields(fields, hints)]


def _architecture_stem(name: str) -> str:
    return name.split(".")[0]


def _of_another(path: Path, fields: ConfigFields) -> str | None:
    """Return why the config may belong to another file, or None."""
    arch = _architecture_stem(fields.architecture)
    called = path.name.lower()
    names = timm.list_models()
    named = max((name for name in names if called.startswith(name)), key=len, default=None)
    family = re.split(r"[^a-z0-9]", called)[0]
    families = {name.partition("_")[0] for name in names}
    if (named is not None and named != arch) or (
        family in families and family != arch.partition("_")[0]
    ):
        return f"it says {arch}, and the file is called {path.name}"
    other = next((name for name in HUB_NAMES if not is_absent(path.parent / name)), None)
    if path.name not in HUB_NAMES and other is not None:
        return f"{other} lies there too"
    return None


def _overruled_fields(fields: ConfigFields, hints: Hints) -> list[str]:
    """Return a sentence for each option that overrules config.json."""
    about = fields.pretrained_cfg
    options = [("--mean", hints.mean, about.mean), ("--std", hints.std, about.std)]
    arguments = [
        (f"--arch-arg {key}", value, fields.model_args.get(key))
        for key, value in hints.arch_args.items()
    ]
    return overruled([*options, *arguments], CONFIG)


def describe_timm_file(
    path: Path, hints: Hints, config: ConfigFields | None, tensors: Mapping[str, Tensor]
) -> tuple[Record, dict[str, str], nn.Module]:
    """Return the record of a foreign file, from config.json or, without it, the options; the origin of
    its values, by argument of the architecture, "architecture", "mean", "std", "view"; the network.
    """
    origins = dict.fromkeys(hints.arch_args, "--arch-arg")
    origins |= {key: f"--{key}" for key in ("mean", "std") if getattr(hints, key) is not None}
    if config is not None:
        said = {"architecture": CONFIG, "mean": CONFIG, "std": CONFIG}
        said["view"] = CONFIG if config.pretrained_cfg.crop_pct is not None else "by default"
        origins = {**dict.fromkeys(config.model_args, CONFIG), **said, **origins}
        if not config.pretrained_cfg.states_images:
            origins |= dict.fromkeys(
                {"mean", "std", "view"} - {key for key in ("mean", "std") if getattr(hints, key)},
                TIMM,
            )
            has_classes = config.num_classes is not None and not hints.features
            classes = {"num_classes": config.num_classes} if has_classes else {}
            arguments = {**classes, **config.model_args, **hints.arch_args}
            as_hints = replace(hints, arch=config.architecture, arch_args=arguments)
            record, net = _from_hints(as_hints, tensors, path)
            record = replace(record, class_names=_class_names_of_labels(config, record.classes))
        else:
            record = _from_config(config_path(path), config, hints, tensors)
            net = build.build(record, like=tensors)
    else:
        origins = {"architecture": "--arch", "mean": TIMM, "std": TIMM, "view": TIMM} | origins
        record, net = _from_hints(hints, tensors, path)
    return record, origins, net


def _from_config(
    config: Path, fields: ConfigFields, hints: Hints, tensors: Mapping[str, Tensor]
) -> Record:
    about = fields.pretrained_cfg
    arguments = {**fields.model_args, **hints.arch_args}
    if (class_count := _classes(tensors, hints, fields.num_classes)) is not None:
        arguments.setdefault("num_classes", class_count)
    arguments = {**_of_input_size(fields), **arguments}
    mean = hints.mean or about.mean
    std = hints.std or about.std
    classes: Any = arguments.get("num_classes", about.num_classes)
    needed = {"input_size": about.input_size, "mean": mean, "std": std, "num_classes": classes}
    missing = [name for name, value in needed.items() if value is None]
    raise_if(
        missing,
        ArchitectureError,
        f"{config} does not say {', '.join(missing)}",
        "add it, or pass --mean and --std",
    )
    raise_if(
        not isinstance(classes, int),
        CheckpointError,
        f"{config} cannot be used: num_classes is no number",
    )
    assert about.input_size is not None
    view = (
        about.interpolation or "bicubic",
        about.crop_pct or DEFAULT_CROP,
        about.crop_mode or "center",
    )
    spec = pixel_input(
        _input_size(about.input_size, arguments), mean or (), std or (), view, _PIXELS
    )
    return Record(
        fields.architecture, arguments, spec, classes, _class_names_of_labels(fields, classes)
    )


def _class_names_of_labels(config: ConfigFields, classes: int) -> tuple[str, ...] | None:
    """Return the names of the classes, where there is one for each."""
    names = config.class_names
    return names if names is not None and len(names) == classes else None


def _of_input_size(config: ConfigFields) -> dict[str, Any]:
    """Return what timm derives from input_size: channels, and a fixed-size network's size."""
    about = config.pretrained_cfg
    if about.input_size is None:
        return {}
    channels, height, width = about.input_size
    arguments: dict[str, Any] = {} if channels == 3 else {"in_chans": channels}
    is_flexible = config.model_args.get("dynamic_img_size") or (
        config.model_args.get("strict_img_size") is False
    )
    if about.fixed_input_size and not is_flexible:
        arguments["img_size"] = [height, width]
    return arguments


def _input_size(
    input_size: tuple[int, int, int], arguments: Mapping[str, Any]
) -> tuple[int, int, int]:
    """Return the input's size: that of the network's own arguments, else the stated one."""
    channels, height, width = input_size
    side = arguments.get("img_size")
    if isinstance(side, int):
        height = width = side
    elif isinstance(side, (list, tuple)) and len(side) == 2:
        height, width = side
    return int(arguments.get("in_chans") or channels), height, width


def config_image_doubts(config: ConfigFields, record: Record, hints: Hints) -> list[str]:
    """Return doubts about a config's images: none described, or within a border."""
    spec = record.input
    if spec.crop_mode == "border":
        return [
            f"{CONFIG} puts images within a border (crop_mode border): its pixels count in every radius"
        ]
    if config.pretrained_cfg.states_images:
        return []
    usual = {"mean": IMAGENET_DEFAULT_MEAN, "std": IMAGENET_DEFAULT_STD}
    other = [
        f"{name} {' '.join(map(str, values))}"
        for name, values in usual.items()
        if getattr(hints, name) is None and getattr(spec, name) != values
    ]
    if not other:
        return []
    return [
        f"{CONFIG} says nothing of its images: those of {record.arch} are taken; timm would take {', '.join(other)}"
    ]


def _classes(
    tensors: Mapping[str, Tensor], hints: Hints, config_classes: int | None = None
) -> int | None:
    """Return the number of classes: by the last layer, else 0 for features, else as stated."""
    head = tensors.get("head.weight", tensors.get("head.fc.weight"))
    rows = int(head.shape[0]) if head is not None and head.dim() else 0
    return rows or (0 if hints.features else config_classes)


def _from_hints(
    hints: Hints, tensors: Mapping[str, Tensor], path: Path
) -> tuple[Record, nn.Module]:
    """Return record and network of `hints.arch`; what is not given for images is timm's."""
    arguments = dict(hints.arch_args)
    if (classes := _classes(tensors, hints)) is not None:
        arguments.setdefault("num_classes", classes)
    assert hints.arch is not None
    net = build.create(hints.arch, arguments, initialise=False, like=tensors)
    config: Mapping[str, Any] = getattr(net, "pretrained_cfg", None) or {}
    mean = hints.mean or config.get("mean") or ()
    std = hints.std or config.get("std") or ()
    raise_if(
        not mean or not std,
        ArchitectureError,
        f"{path} does not say how its images were normalised, and timm has no configuration of '{hints.arch}'",
        "pass --mean and --std, one value a channel",
    )
    size = build.input_size_of(net) or tuple(config.get("input_size") or (0, 0, 0))
    channels = arguments.get("in_chans", max(size[0], len(hints.mean or ()), len(hints.std or ())))
    side = arguments.get("img_size") or size[1:]
    height, width = (side, side) if isinstance(side, int) else tuple(side)
    view = (str(config.get("interpolation") or "bicubic"), float(config.get("crop_pct") or 1.0))
    spec = pixel_input((channels, int(height), int(width)), mean, std, view, _PIXELS)
    return Record(hints.arch, arguments, spec, build.classes_of(net)), net


def require_consistent_config(
    fields: ConfigFields, net: nn.Module, config: Path, hints: Hints
) -> None:
    """Raise ArchitectureError where config.json contradicts the network that it names."""
    for name in ("num_features", "global_pool"):
        said = getattr(fields, name)
        actual = getattr(net, name, None)
        comparable = isinstance(actual, (int, str)) and isinstance(said, (int, str))
        raise_if(
            comparable and said != actual and name not in hints.arch_args and not hints.as_stated,
            ArchitectureError,
            f"{config} says {name} {said}, and the network that it names has {actual}: is it about this file?",
            f"--arch-arg {name}=..., or --as-stated if the rest of it is right",
        )
