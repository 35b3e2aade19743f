"""A file with timm's names, or of the repository that timm took, as the network that it belongs to."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from torch import Tensor, nn

import certcli.system.compat  # noqa: F401 (before timm: torchvision must be importable)
from certcli.checkpoint.config_fields import ConfigFields
from certcli.checkpoint.file import Checkpoint
from certcli.checkpoint.record import Record
from certcli.models import build
from certcli.models.advice import advice
from certcli.models.architecture_clues import appearance
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
from certcli.models.converters.original import filtered
from certcli.models.converters.prefixes import aligned
from certcli.models.converters.wrapping import Bare
from certcli.models.overrides import Hints
from certcli.models.weights import FITTING_HINT, headless, require_computed, require_fitting
from certcli.system.errors import (
    ArchitectureError,
    one_line,
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
