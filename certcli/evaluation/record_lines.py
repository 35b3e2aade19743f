"""The door for records: each line becomes typed, ranged values, or one sentence says why not.

Nothing is taken from a line that is not a field here. Whether a line is true is not decided here:
`evaluation.resumed` computes lines again.
"""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from certcli.checkpoint.schema import (
    MOST_CLASSES,
    Count,
    Dataset,
    Digest,
    Json,
    Name,
    Text,
    decode_json,
    require_bounded_json,
)
from certcli.evaluation import intervals
from certcli.evaluation.threat import LARGEST, MOST_IMAGES, Kind, Norm
from certcli.images.labelled import Images
from certcli.system.errors import DataError, Refused

LONGEST_LINE = 2**20
"""Bytes of a line; the longest that certvit writes is a header of some thousand."""
HINT = "certvit certify or attack ... --records FILE writes them"

Class = Annotated[int, Meta(ge=0, lt=MOST_CLASSES)]
Length = Annotated[float, Meta(ge=0, le=LARGEST)]
"""A radius, a distance between images, or seconds."""
Draws = Annotated[int, Meta(ge=1, le=intervals.MOST_DRAWS)]
Pixels = Annotated[str, Meta(pattern=r"\A[0-9a-f]{16}\Z")]
PatchKey = Annotated[str, Meta(pattern=r"\A([1-9][0-9]{0,2}:)?[1-9][0-9]{0,5}x[1-9][0-9]{0,5}\Z")]
Patches = Annotated[list[PatchKey], Meta(min_length=1, max_length=32)]
Side = Annotated[int, Meta(ge=1, le=4096)]
ClassName = Annotated[str, Meta(pattern=r"\A[0-9]{1,9}\Z")]
Splits = Annotated[str, Meta(pattern=r"\A[-0-9. ]+\Z")]
"""A tree of splits at signs of units, in preorder."""


class _Fields(Struct, forbid_unknown_fields=True):
    pass


class JudgedImages(Struct, frozen=True, forbid_unknown_fields=True):
    """Which images: the dataset's name, the split, how many, and the digest of their contents."""

    name: Dataset
    split: Text
    images: Annotated[int, Meta(ge=1, le=MOST_IMAGES)]
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
    norm: Kind | list[Norm]
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


def _shortened(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 48 else f"{text[:16]}..."


class _Record(_Fields, kw_only=True):
    index: Count
    label: Class
    pixels: Pixels
    file: Text | UnsetType = UNSET


class CertificateFields(_Record):
    """A record of certify."""

    prediction: Class | None
    radius: Length | Literal["inf"]
    method: Name
    failure: Annotated[float, Meta(ge=0, lt=1)]
    rung: Text = ""
    seconds: Length = 0.0
    splits: Annotated[dict[ClassName, Splits], Meta(max_length=MOST_CLASSES)] = {}

    def __post_init__(self) -> None:
        if self.prediction is None and self.radius != 0:
            raise ValueError("it states a radius and no class")


class AttackedFields(_Record):
    """A record of attack: misclassified, broken, or neither."""

    prediction: Class
    adversarial_prediction: Class
    robust: Annotated[dict[Text, bool | None], Meta(min_length=1, max_length=1000)]
    norm: Length | None
    l2: Length | None
    epsilon: Length
    kind: Norm
    broken_by: Text | None
    task: Count
    as_8bit: bool | None = None

    def __post_init__(self) -> None:
        outcomes = set(self.robust.values())
        broken = self.broken_by is not None
        if (self.norm is None) != (self.l2 is None):
            raise ValueError("it states one of norm and l2")
        if self.prediction != self.label:
            fits = outcomes == {False} and not broken and self.norm == 0
        elif self.norm is None:
            fits = outcomes == {True} and not broken and self.adversarial_prediction == self.label
        else:
            fits = self.broken_by is not None and self.robust.get(self.broken_by) is False
            fits = fits and self.adversarial_prediction != self.label
        fits = fits and (self.as_8bit is None or self.broken_by is not None)
        if not fits:
            raise ValueError("prediction, robust, norm and broken_by contradict each other")


class PatchCertificateFields(_Record):
    """A record of certify against patches. counts: how many passes voted for each class."""

    prediction: Class | None
    method: Literal["patch"]
    failure: Annotated[float, Meta(ge=0, le=0)]
    proven: Annotated[list[PatchKey], Meta(max_length=32)]
    seconds: Length = 0.0
    votes: Annotated[
        list[Annotated[int, Meta(ge=-1, lt=MOST_CLASSES)]], Meta(max_length=65_536)
    ] = []
    counts: Annotated[dict[str, Count], Meta(max_length=65_536)] = {}

    def __post_init__(self) -> None:
        if self.prediction is None and self.proven:
            raise ValueError("it states what cannot change its class, and no class")
        if self.counts != {str(top): count for top, count in Counter(self.votes).items()}:
            raise ValueError("its votes and their counts contradict each other")


class PatchAttackedFields(_Record):
    """A record of attack --norm patch. corner: (top, left) of a patch that breaks it."""

    kind: Literal["patch"]
    patch: PatchKey
    prediction: Class | None
    adversarial_prediction: Class | None
    robust: Annotated[dict[Text, bool], Meta(min_length=1, max_length=1)]
    corner: Annotated[list[Count], Meta(min_length=2, max_length=2)] | None

    def __post_init__(self) -> None:
        right = self.prediction == self.label
        broken = self.corner is not None
        changed = self.adversarial_prediction != self.prediction
        if (
            broken is not changed
            or (broken and not right)
            or set(self.robust.values()) != {right and not broken}
        ):
            raise ValueError("prediction, robust and corner contradict each other")


RECORDS: dict[tuple[str, bool], type[Struct]] = {
    ("certify", False): CertificateFields,
    ("certify", True): PatchCertificateFields,
    ("attack", False): AttackedFields,
    ("attack", True): PatchAttackedFields,
}
"""By command, and whether its threat is a patch."""


class PatchOptions(_Fields):
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


def parse_records(data: bytes, path: Path) -> tuple[Run, list[Json], list[int]]:
    """Header, plain records, and the end of each complete line; DataError names a bad line."""
    header: Run | None = None
    rows: list[Json] = []
    ends: list[int] = []
    start = 0
    while (end := data.find(b"\n", start)) >= 0:
        kind = "the header of certvit's records" if header is None else "a record"
        try:
            if end - start > LONGEST_LINE:
                raise Refused(f"a line of {end - start:,} bytes")
            line = data[start:end].decode()
            if header is None:
                header = decode_json(line, Run)
            else:
                rows.append(
                    msgspec.to_builtins(
                        decode_json(line, RECORDS[header.command, header.norm == "patch"])
                    )
                )
        except (Refused, UnicodeError) as failure:
            raise DataError(
                f"line {len(ends) + 1} of {path} is not {kind} ({failure})", HINT
            ) from failure
        ends.append(end + 1)
        start = end + 1
    if header is None:
        raise DataError(f"{path} holds no records", HINT)
    return header, rows, ends
