"""The record of schema 1: a checkpoint's own description, canonical JSON under one metadata key."""

import json
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

from msgspec import Meta

from certcli.checkpoint.schema import (
    LARGEST_SIZE,
    LONGEST_RECORD,
    LONGEST_TEXT,
    MOST_CLASSES,
    Channels,
    Classes,
    CropMode,
    CropPct,
    Dataset,
    Digest,
    Interpolation,
    Json,
    Name,
    Path,
    PerChannel,
    Seed,
    Side,
    Text,
    convert_json,
    decode_json,
    require_bounded_json,
    require_pixel_statistics,
    surgery_arguments,
)
from certcli.system.errors import CheckpointError, Refused, one_line, raise_if
from certcli.system.reading import LARGEST_SIDE

KEY = "certvit"
SCHEMA = 1
SEEN = "seen"
"""The parameter of a step with the digests of the images it used
(`certcli.evaluation.image_doubts`)."""
MEAN = "mean"
"""The step that makes one network of several, whose lineages come before it, one after the
other."""


# of an architecture's arguments: numbers, switches, plain words; no file, code or weights
MOST_LAYERS = 512  # of an argument that repeats a module
MOST_ENTRIES = 1024  # of all lists in an architecture's arguments

# Words for files, URLs, callables, weights, devices, and results other than logits. Swin v2's
# pretrained window sizes and every drop_path are numbers of the architecture.
_FORBIDDEN = re.compile(
    r"checkpoint|pretrained(?!_window_sizes?\Z)|cache_|feature(s_only|_cls|_cfg)|out_indices|scriptable|exportable|no_jit"
    r"|pruned|(device|dtype)\Z"
    r"|(.*_)?(cfg|config|fn|func|cls|file|filename|dir|url|hub|id|weights|state_dict|args|kwargs|filter)s?\Z"
    r"|(?!(.*_)?drop_path\Z)(.*_)?paths?\Z"
)
_REPEATS = re.compile(
    r".*(depth|layers|blocks|repeats|stages|num_rep|branches|levels|block_num|num_block)"
)
_SIZES = re.compile(
    r".*(img_size|input_size|resolution|feat_size|grid_size|window|patch_size|stride|kernel)"
)
_WORD = re.compile(r"[A-Za-z0-9_.+\-]{0,64}\Z")
_KEY = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}\Z")


def arch_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments as JSON scalars and lists; Refused: a file, URL, callable or weights."""
    raise_if(len(arguments) > 128, Refused, f"{len(arguments)} architecture arguments")
    checked: dict[str, Any] = {}
    for key, value in arguments.items():
        raise_if(
            not isinstance(key, str) or not _KEY.match(key),
            Refused,
            f"architecture argument {one_line(repr(key))[:80]} is no name of an argument",
        )
        raise_if(
            _FORBIDDEN.match(key),
            Refused,
            f"architecture argument '{key}' is not taken from a file or the command line",
        )
        checked[key] = _plain_argument(key, value, [MOST_ENTRIES], 3)
        pair = key in ("img_size", "input_size") and isinstance(value, (list, tuple))
        raise_if(
            pair
            and (len(value) != 2 or not all(isinstance(side, int) and side > 0 for side in value)),
            Refused,
            f"architecture argument '{key}' is {one_line(value)[:80]}, not a height and a width",
        )
    return checked


def _plain_argument(key: str, value: Any, entries: list[int], depth: int) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        limits = ((_REPEATS, MOST_LAYERS), (_SIZES, LARGEST_SIDE))
        limit = next((most for words, most in limits if words.match(key)), LARGEST_SIZE)
        shown = str(value) if abs(value) < 10**18 else "an integer of more than 18 digits"
        beyond = f"architecture argument '{key}' is {shown}, beyond {limit:,}"
        raise_if(not -limit <= value <= limit, Refused, beyond)
        return value
    if isinstance(value, float):
        raise_if(
            not math.isfinite(value) or abs(value) > 1e6,
            Refused,
            f"architecture argument '{key}' is {value}",
        )
        return value
    if isinstance(value, str):
        raise_if(
            not _WORD.match(value),
            Refused,
            f"architecture argument '{key}' is {one_line(repr(value))[:80]}: only plain words pass",
        )
        return value
    if isinstance(value, (list, tuple)) and depth:
        entries[0] -= len(value)
        raise_if(
            entries[0] < 0,
            Refused,
            f"architecture argument '{key}' has more than {MOST_ENTRIES:,} entries",
        )
        return [_plain_argument(key, item, entries, depth - 1) for item in value]
    raise Refused(
        f"architecture argument '{key}' is a {type(value).__name__}: only JSON scalars and lists pass"
    )


@dataclass(frozen=True)
class InputSpec:
    """Pixel images the network takes: (channels, height, width) in [0, 1], then (x - mean) / std as
    its first layer.

    Attributes:
        resized: Height and width to which the first layer resizes the images before that; None
            where they have the network's own size.
    """

    size: tuple[Channels, Side, Side]
    mean: PerChannel
    std: PerChannel
    interpolation: Interpolation = "bicubic"
    crop_pct: CropPct = 1.0
    crop_mode: CropMode = "center"
    resized: tuple[Side, Side] | None = None

    def perturbed_at(self, side: int) -> "InputSpec":
        """Return the input whose images, in which radii are measured, are side x side."""
        sides = self.resized or self.size[1:]
        size = (self.size[0], side, side)
        return replace(self, size=size, resized=None if sides == size[1:] else sides)


_LATER: dict[str, Any] = {"crop_mode": "center", "resized": None}
"""Fields of `InputSpec` that came later, with the value at which a record leaves them out: older
records keep their bytes."""


@dataclass(frozen=True)
class Replacement:
    """A module swapped after construction: `kind` names a builder of `certcli.nn.surgery`."""

    path: Path
    kind: str
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LineageStep:
    """One command that made these tensors from the parent's."""

    command: Name
    parameters: Mapping[str, Any]
    seed: Seed
    versions: Mapping[Text, Text]
    parent: Digest | None

    @property
    def shown(self) -> dict[str, Any]:
        """Return the parameters without the digests of images."""
        return {name: value for name, value in self.parameters.items() if name != SEEN}


@dataclass(frozen=True)
class Evidence:
    """A result about the function with this digest (tensors, architecture, surgery, input,
    classes).

    Evidence with another digest than its checkpoint's is stale.
    """

    command: Text
    parameters: Mapping[str, Any]
    result: Mapping[str, Any]
    digest: Digest


@dataclass(frozen=True)
class Record:
    """Everything that rebuilds the network from its tensors, and the history of the tensors."""

    arch: Name
    arch_args: Mapping[str, Any]
    input: InputSpec
    classes: Classes
    class_names: Annotated[tuple[Text, ...], Meta(max_length=MOST_CLASSES)] | None = None
    dataset: Dataset | None = None
    surgery: Annotated[tuple[Replacement, ...], Meta(max_length=4 * MOST_LAYERS)] = ()
    lineage: Annotated[tuple[LineageStep, ...], Meta(max_length=10_000)] = ()
    evidence: Annotated[tuple[Evidence, ...], Meta(max_length=1000)] = ()
    foreign: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """Canonical JSON: sorted keys, no spaces, nothing that differs between two equal runs."""
        about = asdict(self)
        for name, absent in _LATER.items():
            if about["input"][name] == absent:
                del about["input"][name]
        return json.dumps(
            {"schema": SCHEMA, **about},
            sort_keys=True,
            separators=(",", ":"),
            allow_nan=False,
        )

    def function(self) -> dict[str, Any]:
        """Return the fields that decide the function, as JSON equal for equal functions."""
        spec = self.input
        return {
            "arch": self.arch,
            "arch_args": arch_arguments(self.arch_args),
            "classes": self.classes,
            "surgery": [
                {"path": item.path, "kind": item.kind, "args": dict(item.args)}
                for item in self.surgery
            ],
            "size": list(spec.size),
            "mean": [float(value) for value in spec.mean],
            "std": [float(value) for value in spec.std],
            "interpolation": spec.interpolation,
            "crop_pct": float(spec.crop_pct),
            **{
                name: list(value) if name == "resized" else value
                for name, absent in _LATER.items()
                if (value := getattr(spec, name)) != absent
            },
        }

    @staticmethod
    def from_json(text: str) -> "Record":
        """Invert `to_json`.

        Raises:
            CheckpointError: the text is no record of schema 1, or describes more than a machine
            has.
        """
        try:
            return _decode_record(text)
        except Refused as refusal:
            raise CheckpointError(
                f"the checkpoint's certvit record cannot be read: {refusal}",
                "it was edited, or written by another program or version; go back to the checkpoint it came from",
            ) from refusal

    def with_evidence(self, entry: Evidence) -> "Record":
        """Return the record with `entry` replacing older evidence of its parameters."""
        older = [
            old
            for old in self.evidence
            if (old.command, old.parameters) != (entry.command, entry.parameters)
        ]
        return replace(self, evidence=(*older, entry))


def _decode_record(text: str) -> Record:
    raise_if(
        len(text) > LONGEST_RECORD,
        Refused,
        f"{len(text):,} characters; a record has at most {LONGEST_RECORD:,}",
    )
    raw = decode_json(text, Json)
    schema = raw.pop("schema", None)
    other = f"schema {one_line(schema)[:80]}; this certvit reads schema {SCHEMA}"
    raise_if(type(schema) is not int or schema != SCHEMA, Refused, other)
    record = convert_json(raw, Record)
    _require_fields(raw, record)
    _require_fields(_LATER | raw["input"], record.input)
    for name in ("surgery", "lineage", "evidence"):
        for entry, item in zip(raw[name], getattr(record, name), strict=True):
            _require_fields(entry, item)
    arch_arguments(record.arch_args)
    require_pixel_statistics(record.input.size, record.input.mean, record.input.std)
    if record.input.resized is not None:
        shown = (record.input.size[0], *record.input.resized)
        require_pixel_statistics(shown, record.input.mean, record.input.std)
    raise_if(record.classes == 1, Refused, "classes: 1, and one class leaves nothing to decide")
    for item in record.surgery:
        surgery_arguments(item.path, item.kind, item.args)
    steps: tuple[Any, ...] = (*record.lineage, *record.evidence)
    for step in steps:
        require_bounded_json(step.parameters)
        require_bounded_json(getattr(step, "result", None))
    raise_if(
        any(len(part) > LONGEST_TEXT for pair in record.foreign.items() for part in pair),
        Refused,
        f"foreign: a text of more than {LONGEST_TEXT:,} characters",
    )
    return record


def _require_fields(raw: Mapping[str, Any], value: Any) -> None:
    """Refuse JSON without a field (its default would be read), or with one not read."""
    names = {entry.name for entry in fields(value)}
    for name in sorted(raw.keys() ^ names):
        raise Refused(
            f"the field '{one_line(name)[:80]}' is {'missing' if name in names else 'unknown'}"
        )


def versions() -> dict[str, str]:
    """Return the versions of the libraries, the threads and the processor's instructions: the last
    digits of a step's sums depend on them."""
    import torch

    versions_of = {
        "threads": str(torch.get_num_threads()),
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }
    for package in ("certvit", "torch", "timm", "torchattacks"):
        with suppress(PackageNotFoundError):
            versions_of[package] = version(package)
    return versions_of
