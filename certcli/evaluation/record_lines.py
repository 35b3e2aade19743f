"""The header of a file of records: which run wrote them, in typed, ranged values."""

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from certcli.checkpoint.schema import (
    Dataset,
    Digest,
    Json,
    Name,
    StrictStruct,
    Text,
    require_bounded_json,
)
from certcli.evaluation import intervals, threat
from certcli.images.labelled import Images

Length = Annotated[float, Meta(ge=0, le=threat.LARGEST)]
"""A radius, a distance between images, or seconds."""
Draws = Annotated[int, Meta(ge=1, le=intervals.MOST_DRAWS)]
PatchKey = Annotated[str, Meta(pattern=r"\A([1-9][0-9]{0,2}:)?[1-9][0-9]{0,5}x[1-9][0-9]{0,5}\Z")]
Patches = Annotated[list[PatchKey], Meta(min_length=1, max_length=32)]
Side = Annotated[int, Meta(ge=1, le=4096)]


class JudgedImages(Struct, frozen=True, forbid_unknown_fields=True):
    """Which images: the dataset's name, the split, how many, and the digest of their contents."""

    name: Dataset
    split: Text
    images: Annotated[int, Meta(ge=1, le=threat.MOST_IMAGES)]
    digest: Digest


class Run(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All that decides the records of a file: two runs that are equal write the same records.

    Attributes:
        checkpoint: digest of the network's function.
        method: of certificates, or the attacks in order.
        norm: of the radii.
        radii: at which images were attacked, empty for certificates, which find their own.
        parameters: of the method.
        network: what was assumed in reading it, which decides nothing.
    """

    schema: Literal["certvit-records/1"] = "certvit-records/1"
    command: Literal["certify", "attack"]
    checkpoint: Digest
    dataset: JudgedImages
    method: Name | list[list[Text]]
    norm: threat.Kind | list[threat.Norm]
    radii: list[list[Length]] = []
    parameters: Json = {}
    network: Json = {}

    def __post_init__(self) -> None:
        require_bounded_json(self.parameters)
        require_bounded_json(self.network)

    @staticmethod
    def of(command: Any, checkpoint: str, images: Images, method: Any, **more: Any) -> "Run":
        """The run of a command on these images; `more` are the other fields."""
        return Run(
            command=command,
            checkpoint=checkpoint,
            dataset=JudgedImages(**describe_images(images)),
            method=method,
            **more,
        )

    def to_json(self) -> Json:
        """Plain values, as they come back from a file."""
        plain: Json = json.loads(
            json.dumps(msgspec.to_builtins(self), sort_keys=True, allow_nan=False)
        )
        del plain["network"]
        return plain

    def differences(self, other: "Run") -> Iterator[str]:
        """Yield "seed is 0 there and 1 here", for all in which `other` (there) differs."""
        here = dict(_flat_fields(self.to_json()))
        there = dict(_flat_fields(other.to_json()))
        for name in [*here, *(name for name in there if name not in here)]:
            if here.get(name) != there.get(name):
                yield f"{name} is {_shortened(there.get(name))} there and {_shortened(here.get(name))} here"


def describe_images(images: Images) -> Json:
    """Return `JudgedImages` of these images as plain values."""
    return {
        "name": images.name,
        "split": images.split,
        "images": len(images),
        "digest": images.digest,
    }


def _flat_fields(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat_fields(inner, f"{path} {key}" if path else key)
    else:
        yield path, value


def spelled_values(values: Mapping[str, Any]) -> Iterator[str]:
    """Values by name, nested ones by paths of names; empty values and `no` are left out."""
    for name, value in _flat_fields(dict(values)):
        several = list(value) if isinstance(value, (list, tuple)) else [value]
        if any(isinstance(item, (Mapping, list, tuple)) for item in several):
            yield f"{name}: {len(several)} entries"
        elif value is True:
            yield name
        elif value is not None and value is not False and value not in ("", [], ()):
            numbers = (f"{one:.4g}" if isinstance(one, float) else str(one) for one in several)
            yield f"{name}={' '.join(numbers)}"


def _shortened(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 48 else f"{text[:16]}..."


class PatchOptions(StrictStruct):
    """Parameters of a defence against patches. cell: (height, width) hidden together."""

    procedure: Literal["double-masking", "voting"]
    patches: Patches
    hide: Literal["tokens", "pixels"]
    cell: Annotated[list[Side], Meta(min_length=2, max_length=2)]
    rows: Side
    masks: Annotated[int, Meta(ge=2, le=12)] | UnsetType = UNSET
    bands: Literal["columns", "rows", "blocks"] | UnsetType = UNSET
    band_width: Side | UnsetType = UNSET

    def __post_init__(self) -> None:
        is_set = tuple(part is not UNSET for part in (self.masks, self.bands, self.band_width))
        if is_set != (
            (True, False, False) if self.procedure == "double-masking" else (False, True, True)
        ):
            raise ValueError(f"these are not the parameters of {self.procedure}")
