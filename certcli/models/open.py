"""Checkpoints from any source: certvit's own files, downloaded files, folders from the hub, timm
and hf-hub names.

Tensors do not show heads, mean or standard deviation. `OpenCheckpoint.reading` holds the origin of
each; a file that lacks one, or that fits two networks, is refused.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import timm
from torch import Tensor

from certcli.checkpoint.file import Checkpoint, read_tensors, require_weights, tensors_digest
from certcli.checkpoint.record import KEY, Record, arch_arguments
from certcli.checkpoint.schema import LONGEST_TEXT, is_name, require_statistics
from certcli.checkpoint.shipped import shipped_path
from certcli.checkpoint.tensor_files import INDEX
from certcli.models import build
from certcli.models.assumptions import RECORD, image_preparation, reading_of, rival
from certcli.models.build import OpenCheckpoint
from certcli.models.config_json import HUB_NAMES
from certcli.models.converters.base import Converted, cause
from certcli.models.converters.libraries import (
    convert_torchvision,
    convert_transformers,
    describes,
    is_transformers,
    torchvision_family,
)
from certcli.models.converters.prefixes import without_wrapping
from certcli.models.converters.wrapping import (
    TORCH_SUFFIXES,
    Bare,
    Normaliser,
    read_torch,
)
from certcli.models.hub import cache_if_unreachable, fetched, hub_failure_reason
from certcli.models.origins import KEY as ASSUMED
from certcli.models.origins import Fact, Hints, Reading, overruled
from certcli.models.timm_file import open_timm_file
from certcli.models.weights import (
    MISFITS,
    require_classifier,
    require_computed,
    require_fitting,
)
from certcli.system.errors import (
    ArchitectureError,
    CertvitError,
    CheckpointError,
    Refused,
    one_line,
    raise_if,
)
from certcli.system.reading import is_absent


def open_checkpoint(source: str, hints: Hints | None = None) -> OpenCheckpoint:
    """Open a checkpoint: a file, a folder with model.safetensors, a timm name or an `hf-hub:` name.

    Raises:
        CheckpointError: there is no such file, or it cannot be read.
        ArchitectureError: no network fits its tensors, or two do, or it has no classifier and no
        hint allows for that.
    """
    hints = hints or Hints()
    checkpoint = perturbed_at(_open_source(source, hints), hints.image_size)
    recorded = checkpoint.record.classes
    actual = build.classes_of(checkpoint.net)
    raise_if(
        bool(recorded) != bool(actual),
        ArchitectureError,
        f"the record of {source} says {recorded} classes, and its network has {actual}",
        "the file was edited, or written by another program; go back to the checkpoint it came from",
    )
    if not hints.features:
        require_classifier(checkpoint, source)
    return checkpoint


def perturbed_at(checkpoint: OpenCheckpoint, side: int | None) -> OpenCheckpoint:
    """Return the network on images of side x side, which it resizes; None for those of the record.

    It is another network: evidence about the first one is not handed on.
    """
    spec = checkpoint.record.input if side is None else checkpoint.record.input.perturbed_at(side)
    if spec == checkpoint.record.input:
        return checkpoint
    old = checkpoint.reading
    record = replace(checkpoint.record, input=spec, evidence=())
    images = Fact("images", image_preparation(record.input), "--image-size")
    facts = tuple(images if fact.name == "images" else fact for fact in old.facts)
    reading = replace(old, facts=facts)
    if record.foreign.get(ASSUMED) == old.line():  # of a foreign file, which was read just now
        record = reading.noted(record)
    resized = Checkpoint(checkpoint.tensors, record)
    return build.with_network(resized, checkpoint.net, reading, checkpoint.runtime)


def _open_source(source: str, hints: Hints) -> OpenCheckpoint:
    path = Path(source)
    try:
        exists = not is_absent(path)
        is_folder = path.is_dir()
    except OSError as failure:
        raise CheckpointError(
            f"cannot open {one_line(source)}: {failure.strerror}", "check its name and permissions"
        ) from failure
    if is_folder:
        return _from_file(weights_of(path, hints.weights), hints)
    if exists:
        return _from_file(path, hints)
    shipped = shipped_path(source)
    if shipped is not None:
        return _from_file(shipped, hints)
    if source.startswith(("hf-hub:", "hf_hub:")):
        return _from_file(fetched(source.partition(":")[2]), hints)
    if is_name(source) and timm.is_model(source):
        return _from_timm(source, hints)
    hint = "give a .safetensors file, a folder with model.safetensors, a timm name, or hf-hub:OWNER/NAME"
    near = get_close_matches(source, timm.list_models(), 1, 0.8) if is_name(source) else []
    question = f"did you mean '{near[0]}'? " if near else ""
    raise CheckpointError(f"no file {source}", f"{question}{hint}")


def _from_file(path: Path, hints: Hints) -> OpenCheckpoint:
    metadata: dict[str, str] = {}
    raise_if(not path.is_file(), CheckpointError, f"{path} is not a regular file")
    if path.suffix == ".onnx":
        from certcli.models.onnx.open import open_onnx  # which opens its network as a module

        return open_onnx(path, hints)
    if path.suffix in TORCH_SUFFIXES:
        bare = read_torch(path, hints.weights)
    else:
        tensors, metadata = read_tensors(path)
        bare = Bare(tensors)
    if KEY in metadata:
        tensors = hints.adapted(bare.tensors)
        return _with_record(Checkpoint(tensors, Record.from_json(metadata[KEY])), path, hints)
    bare = without_wrapping(bare, path, hints.weights, _ANCHORS)
    bare = replace(bare, tensors=hints.adapted(bare.tensors))
    normaliser = bare.normaliser
    all_hints = hints if normaliser is None else with_statistics(hints, normaliser, path)
    converted = _of_another_library(bare.tensors, path, all_hints)
    read_file = (
        open_timm_file(path, bare, all_hints)
        if converted is None
        else _as_timm(converted, bare.facts())
    )
    if normaliser is not None:
        read_file = replace(read_file, reading=read_with(read_file.reading, hints, normaliser))
    texts = {key: value for key, value in metadata.items() if len(key) + len(value) <= LONGEST_TEXT}
    record = read_file.reading.noted(replace(read_file.record, foreign=texts))
    try:  # as certvit's own file of it would be read
        record = Record.from_json(record.to_json())
    except CertvitError as failure:
        raise ArchitectureError(
            f"{one_line(path.name)} is described by values that no record may hold: {failure.message}",
            "check the options and the configs beside the file",
        ) from failure
    return build.with_network(
        Checkpoint(read_file.tensors, record), read_file.net, read_file.reading
    )


_ANCHORS = re.compile(
    r"((?:[^.]+\.)*?)(?:encoder\.layers\.encoder_layer_0\.ln_1\.weight"
    r"|features\.1\.0\.(attn\.qkv|block\.0)\.weight"
    r"|(\w+\.)?embeddings\.(patch_embeddings\..*|cls_token))"
)
"""Names by which `_converted` recognises another library's network, after the prefix around it."""


def _of_another_library(
    tensors: Mapping[str, Tensor], path: Path, hints: Hints
) -> Converted | None:
    """Return the file in timm's terms where its names are another library's, else None."""
    family = torchvision_family(tensors)
    by_transformers = is_transformers(tensors) or (hints.arch is None and describes(path))
    library = "transformers" if by_transformers else f"torchvision's {family}"
    try:
        if by_transformers:
            return convert_transformers(tensors, path, hints)
        return None if family is None else convert_torchvision(tensors, family, hints)
    except CertvitError:
        raise
    except MISFITS as failure:
        if isinstance(failure, LookupError) and (why := cause(tensors)):
            raise ArchitectureError(f"{path}: {why[0]}", why[1]) from failure
        lacks = "lacks " if isinstance(failure, LookupError) else ""
        modules = sorted({name.partition(".")[0] for name in tensors})
        raise ArchitectureError(
            f"{path} has the names of {library}, and tensors that do not fit them ({lacks}{one_line(failure)[:160]})",
            f"by their first parts, it has {one_line(', '.join(modules))}: is one a layer of another network, or renamed?",
        ) from failure


def _as_timm(converted: Converted, facts: Sequence[Fact]) -> OpenCheckpoint:
    """Return timm's network of the same function; ArchitectureError: tensors missing or left."""
    record = converted.record
    tensors = converted.tensors
    net = build.build(record, like=tensors)
    try:
        require_fitting(net, tensors)
        require_computed(net, converted.computed)
    except ArchitectureError as failure:
        why = cause(tensors.keys() - net.state_dict().keys())
        raise ArchitectureError(
            f"{converted.source}, by timm's names: {failure.message}"
            + (f"; {why[0]}" if why else ""),
            why[1] if why else "its config may belong to another file",
        ) from failure
    default = f"{converted.source}, converted"
    ends = [] if converted.features is None else [Fact("features", converted.features, default)]
    reading = reading_of(net, record, converted.origins, default, converted.doubts).with_facts(
        [*ends, *facts]
    )
    return build.with_network(Checkpoint(tensors, record), net, reading)


def _with_record(checkpoint: Checkpoint, path: Path, hints: Hints) -> OpenCheckpoint:
    """Open a file of certvit's own: its record describes the network, and options are ignored."""
    ignored = f"{path.name} carries its own record: {', '.join(hints.given)} ignored"
    doubts = [ignored] if hints.given else []
    net = build.build(checkpoint.record, like=checkpoint.tensors)
    reading = reading_of(net, checkpoint.record, {}, RECORD, doubts)
    return build.with_network(checkpoint, net, reading)


def _from_timm(name: str, hints: Hints) -> OpenCheckpoint:
    """Fetch pretrained weights through timm's loader."""
    raise_if(
        name.startswith("certvit_"),
        CheckpointError,
        f"{name} has no published weights",
        f"certvit init {name} -o {name}.safetensors",
    )
    with cache_if_unreachable() as offline:
        try:
            net = timm.create_model(name, pretrained=True, **arch_arguments(hints.arch_args)).eval()
        except Exception as failure:  # every network and hub library has its own exceptions
            raise CheckpointError(
                f"timm cannot fetch '{name}' ({offline or hub_failure_reason(failure)})",
                "check the name and the network, or download it and give the folder",
            ) from failure
    about: Any = net.pretrained_cfg or {}
    arch = str(about.get("architecture", name)).split(".")[0]
    spec = build.spec_of(net, size=build.input_size_of(net), mean=hints.mean, std=hints.std)
    record = Record(
        arch=arch, arch_args=dict(hints.arch_args), input=spec, classes=build.classes_of(net)
    )
    tensors = hints.adapted({key: value.detach() for key, value in net.state_dict().items()})
    require_weights(tensors, name)
    net = build.build(record, like=tensors)  # as every later command builds it
    why = None if hints.as_stated else rival(net, record, tensors, hints.arch_args)
    raise_if(
        why is not None,
        ArchitectureError,
        f"{name} is not published with these arguments: {why}",
        "--as-stated if it is meant",
    )
    doubts = [] if hints.arch is None else [f"{name} names its architecture: --arch ignored"]
    doubts += [] if hints.weights is None else [f"{name} is one set of weights: --weights ignored"]
    options = (("--mean", hints.mean, about.get("mean")), ("--std", hints.std, about.get("std")))
    doubts += overruled(options, f"{name} as it was published")
    origins = dict.fromkeys(hints.arch_args, "--arch-arg")
    origins |= {key: f"--{key}" for key in ("mean", "std") if getattr(hints, key) is not None}
    reading = reading_of(net, record, origins, "timm's own", doubts)
    return build.with_network(Checkpoint(tensors, reading.noted(record)), net, reading)


def with_statistics(hints: Hints, normaliser: Normaliser, path: Path) -> Hints:
    """Return the options, completed by the statistics that the file holds before its network."""
    try:
        require_statistics(normaliser.mean, normaliser.std)
    except Refused as refusal:
        raise ArchitectureError(
            f"{path} holds a normaliser around its network, {normaliser.names[0]} {_listed_statistics(normaliser.mean)} and "
            f"{normaliser.names[1]} {_listed_statistics(normaliser.std)}: {refusal}",
            "save the network inside alone, and pass --mean and --std",
        ) from refusal
    return replace(hints, mean=hints.mean or normaliser.mean, std=hints.std or normaliser.std)


def read_with(reading: Reading, hints: Hints, normaliser: Normaliser) -> Reading:
    """Return the reading with the file's statistics, and a doubt where options overrule them."""
    of_hints = {"mean": hints.mean, "std": hints.std}
    facts = tuple(
        replace(fact, origin=normaliser.origin) if of_hints.get(fact.name, fact) is None else fact
        for fact in reading.facts
    )
    options = (("--mean", hints.mean, normaliser.mean), ("--std", hints.std, normaliser.std))
    doubts = (*reading.doubts, *overruled(options, normaliser.origin))
    return replace(reading, facts=facts, doubts=doubts)


def _listed_statistics(values: Sequence[float]) -> str:
    return " ".join(f"{value:g}" for value in values)


def weights_of(folder: Path, weights: str | None) -> Path:
    """Return the folder's file of weights; of several with the same tensors the first.

    Args:
        weights: Which weights of a file that holds several, as in `read_torch`.

    Raises:
        CheckpointError: there is none, or two differ.
    """
    paths = [folder / name for name in HUB_NAMES if not is_absent(folder / name)]
    raise_if(
        not paths,
        CheckpointError,
        f"folder {folder} holds no model.safetensors, nor {INDEX} of several, nor pytorch_model.bin",
        "name the file itself",
    )
    if len(paths) == 1:
        return paths[0]
    # where none can be read, the first
    (first, its_digest), *others = list(_digests(paths, weights)) or [(paths[0], "")]
    for path, digest in others:
        raise_if(
            digest != its_digest,
            CheckpointError,
            f"folder {folder} holds two sets of weights: the tensors of {first.name} and {path.name} differ",
            f"name the file that is meant: {first}, or {path}",
        )
    return first


def _digests(paths: list[Path], weights: str | None) -> Iterator[tuple[Path, str]]:
    """Yield each file that can be read, with a digest of its tensors."""
    for path in paths:
        by_torch = path.suffix in TORCH_SUFFIXES
        try:  # a pointer of git-lfs, say, holds no other weights
            tensors = read_torch(path, weights).tensors if by_torch else read_tensors(path)[0]
        except CheckpointError:
            if path.is_file():
                continue
            raise
        yield path, tensors_digest(tensors)
