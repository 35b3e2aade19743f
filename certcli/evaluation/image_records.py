"""Records of images, one type each, in memory, between processes and in a line of a file: what is
certified of an image, and what became of it under attack. Decoding a line is the check of its
ranges; whether it is true only computing it again tells (`evaluation.records`).
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from msgspec import UNSET, Meta, Struct, UnsetType
from msgspec.structs import force_setattr

from certcli.checkpoint.schema import MOST_CLASSES, Count, Json, Name, Text, decode_json
from certcli.evaluation import evidence, record_lines
from certcli.evaluation.threat import Norm, Threat, attacked_radius, proven_radius
from certcli.system.errors import DataError, Refused

if TYPE_CHECKING:
    from torch import Tensor

    Radius = float
    Picture = Tensor | None
else:
    Radius = record_lines.Length | Literal["inf"]
    Picture = None  # of no file

Class = Annotated[int, Meta(ge=0, lt=MOST_CLASSES)]
PixelDigest = Annotated[str, Meta(pattern=r"\A[0-9a-f]{16}\Z")]
ClassName = Annotated[str, Meta(pattern=r"\A[0-9]{1,9}\Z")]
Splits = Annotated[str, Meta(pattern=r"\A[-0-9. ]+\Z")]
"""A tree of splits at signs of units, in preorder."""
LONGEST_LINE = 2**20
"""Bytes of a line; the longest that certvit writes is a header of some thousand."""
HINT = "certvit certify or attack ... --records FILE writes them"
PICTURES = ("image", "adversarial")
"""Fields that no file has: tensors (c, h, w) on the CPU, when kept."""
SAME = 1e-3
"""Relative: how far two distances may differ. Gradient steps in float32 may end in other digits."""


class ImageRecord(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What records have in common. In a file: `pixels`, the digest of the image, and the name of
    its file, if it has one. order: of the fields of a line; optional: those that it has where they
    say something.
    """

    order: ClassVar[tuple[str, ...]] = ()
    optional: ClassVar[tuple[str, ...]] = ()
    file: Text | UnsetType = UNSET
    pixels: PixelDigest | UnsetType = UNSET

    if TYPE_CHECKING:  # of all records, in another order
        index: int
        label: int

    def __eq__(self, other: object) -> bool:
        """Tell whether both are the same line, whatever pictures they keep."""
        return type(self) is type(other) and self.to_json() == other.to_json()

    def to_json(self) -> Json:
        """Return the line as plain values; infinity is "inf"."""
        names = [name for name in self.order or self.__struct_fields__ if name not in PICTURES]
        fields = {name: getattr(self, name) for name in names}
        return {
            name: "inf" if value == math.inf else value
            for name, value in fields.items()
            if value is not UNSET and (value or name not in self.optional)
        }


class Certificate(ImageRecord, frozen=True):
    """radius: pixel l2, rounded down. failure: 0.0 for a proof, alpha for a Monte Carlo statement.

    Attributes:
        prediction: None when the method abstains.
        rung: which of a method's ways it was that gave the radius.
        seconds: what this image took, 0.0 where images are certified a batch at a time.
        splits: of the neighbourhood, at signs of units, that its proof takes: class -> tree.
    """

    optional: ClassVar[tuple[str, ...]] = ("rung", "seconds", "splits")
    index: Count
    label: Class
    prediction: Class | None
    radius: Radius
    method: Name
    failure: Annotated[float, Meta(ge=0, lt=1)]
    rung: Text = ""
    seconds: record_lines.Length = 0.0
    splits: Annotated[dict[ClassName, Splits], Meta(max_length=MOST_CLASSES)] = {}

    def __post_init__(self) -> None:
        if self.radius == "inf":
            force_setattr(self, "radius", math.inf)
        if self.prediction is None and self.held:
            patches = isinstance(self.held, tuple)
            what = "what cannot change its class," if patches else "a radius"
            raise ValueError(f"it states {what} and no class")

    @property
    def correct(self) -> bool:
        return self.prediction == self.label

    @property
    def held(self) -> float | tuple[str, ...]:
        """What cannot change the class: images within a radius, or patches, as they are spelled."""
        return self.radius

    def holds_at(self, threat: Threat) -> bool:
        """Certified and correct at this radius (0: correct); False against patches."""
        return (
            self.correct
            and isinstance(threat.size, (int, float))
            and (threat.size == 0 or self.radius > threat.size)
        )

    def checked(self, status: evidence.Status, why: str) -> evidence.Claim:
        """Return what this certificate states, with the result of checking it."""
        return evidence.Claim(
            f"image {self.index}: class {self.prediction}, {self.held}", status, why
        )

    def proven_again(self, prediction: int | None, proven: bool) -> evidence.Claim:
        """Judge the claim by the class that the network gives now, and whether its radius is
        proven.
        """
        if self.prediction != prediction:
            why = f"class {self.prediction} is stated, the network says {prediction}"
            return self.checked("refuted", why)
        radius = f"radius {proven_radius(self.radius)} is"
        if proven:
            return self.checked("verified", f"{radius} proven again")
        return self.checked("refuted", f"{radius} stated, and not proven by this method")


class PatchCertificate(Certificate, frozen=True, kw_only=True):
    """Against patches, without a radius.

    Attributes:
        proven: patches, as spelled, that do not change the class.
        votes: the class of each pass, if any; counts: how many passes voted for each.
    """

    order: ClassVar[tuple[str, ...]] = (
        "index", "label", "prediction", "method", "failure", "seconds", "proven", "votes", "counts", "file", "pixels",
    )  # fmt: skip
    optional: ClassVar[tuple[str, ...]] = ("votes", "counts")
    radius: Literal[0] = 0
    method: Literal["patch"] = "patch"
    failure: Annotated[float, Meta(ge=0, le=0)] = 0.0
    proven: Annotated[tuple[record_lines.PatchKey, ...], Meta(max_length=32)]
    votes: Annotated[
        tuple[Annotated[int, Meta(ge=-1, lt=MOST_CLASSES)], ...], Meta(max_length=65_536)
    ] = ()
    counts: Annotated[dict[str, Count], Meta(max_length=65_536)] = {}

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.counts != {str(top): count for top, count in Counter(self.votes).items()}:
            raise ValueError("its votes and their counts contradict each other")

    @property
    def held(self) -> tuple[str, ...]:
        return self.proven

    def holds_at(self, threat: Threat) -> bool:
        return self.correct and (threat.size == 0 or threat.key in self.proven)


def counts_of_votes(votes: Sequence[int]) -> dict[str, int]:
    """Return how many passes voted for each class, the most first."""
    counts = sorted(Counter(votes).items(), key=lambda item: (-item[1], item[0]))
    return {str(top): count for top, count in counts}


class AttackRecord(ImageRecord, frozen=True):
    """One image at one radius. `kind` is the norm's name, `epsilon` the radius in pixel units.

    Attributes:
        robust: per attack, did the image withstand it? False for a misclassified image; None where
            the attack was not run, because an earlier one had broken the image.
        norm: smallest |x' - x| found in the region's norm, None if none; 0 for a misclassified
            image.
        l2: the same perturbation in l2.
        as_8bit: whether the adversarial image still has another class than the label once it is
            rounded to 8 bits a value, as a file holds it; None where there is none.
        task: in a file, the number of the task.
        image, adversarial: (c, h, w) on the CPU, when kept.
    """

    index: Count
    label: Class
    prediction: Class
    adversarial_prediction: Class
    robust: Annotated[dict[Text, bool | None], Meta(min_length=1, max_length=1000)]
    norm: record_lines.Length | None
    l2: record_lines.Length | None
    epsilon: record_lines.Length
    kind: Norm
    broken_by: Text | None
    as_8bit: bool | None = None
    task: Count | UnsetType = UNSET
    image: Picture = None
    adversarial: Picture = None

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

    @property
    def correct(self) -> bool:
        return self.prediction == self.label

    @property
    def fell(self) -> bool:
        return self.correct and self.norm is not None

    @property
    def withstood(self) -> bool:
        return all(outcome is True for outcome in self.robust.values())

    @property
    def at(self) -> str:
        return f"{self.epsilon:g}"

    @property
    def outcome(self) -> str:
        """What became of the image, in words."""
        if not self.correct:
            return f"class {self.prediction}"
        if self.norm is None:
            return "withstood"
        return f"broken by {self.broken_by} at distance {attacked_radius(self.norm, 4)}"

    def agrees(self, other: "AttackRecord") -> bool:
        """Tell whether both are records of the same attack. Distances may differ by `SAME`."""
        for mine, its in ((self.norm, other.norm), (self.l2, other.l2)):
            if (mine is None) != (its is None):
                return False
            if abs((mine or 0.0) - (its or 0.0)) > SAME * (its or 0.0):
                return False
        return all(getattr(self, name) == getattr(other, name) for name in _REPEATED)


_REPEATED = (
    "index", "label", "prediction", "adversarial_prediction", "robust", "epsilon", "kind", "broken_by",
)  # fmt: skip


class PatchRecord(ImageRecord, frozen=True):
    """One image attacked by patches of one size. corner: (top, left) of a patch that breaks it.

    Attributes:
        robust: of the attack by patches alone.
        adversarial: (c, h, w), the image with that patch.
    """

    index: Count
    label: Class
    kind: Literal["patch"]
    patch: record_lines.PatchKey
    prediction: Class | None
    adversarial_prediction: Class | None
    robust: Annotated[dict[Text, bool], Meta(min_length=1, max_length=1)]
    corner: tuple[Count, Count] | None
    adversarial: Picture = None

    def __post_init__(self) -> None:
        right = self.prediction == self.label
        broken = self.corner is not None
        changed = self.adversarial_prediction != self.prediction
        if (
            broken is not changed
            or (broken and not right)
            or self.withstood is not (right and not broken)
        ):
            raise ValueError("prediction, robust and corner contradict each other")

    @property
    def withstood(self) -> bool:
        return all(self.robust.values())

    @property
    def at(self) -> str:
        return self.patch

    @property
    def outcome(self) -> str:
        """What became of the image, in words."""
        if self.corner is None:
            return "withstood" if self.withstood else f"class {self.prediction}"
        return f"class {self.adversarial_prediction} by a patch at {self.corner}"

    def agrees(self, other: "PatchRecord") -> bool:
        """Tell whether both are records of the same attack."""
        return self.to_json() == {**self.to_json(), **other.to_json()}


RECORDS: Mapping[tuple[str, bool], type[ImageRecord]] = {
    ("certify", False): Certificate,
    ("certify", True): PatchCertificate,
    ("attack", False): AttackRecord,
    ("attack", True): PatchRecord,
}
"""By command, and whether its threat is a patch."""
OF_FILES = ("pixels", "task")
"""Fields that records of a file have."""


def parse_records(data: bytes, path: Path) -> tuple[record_lines.Run, list[Any], list[int]]:
    """Header, records, and the end of each complete line; DataError names a bad line."""
    header: record_lines.Run | None = None
    rows: list[Any] = []
    ends: list[int] = []
    start = 0
    while (end := data.find(b"\n", start)) >= 0:
        kind = "the header of certvit's records" if header is None else "a record"
        try:
            if end - start > LONGEST_LINE:
                raise Refused(f"a line of {end - start:,} bytes")
            line = data[start:end].decode()
            if header is None:
                header = decode_json(line, record_lines.Run)
            else:
                row = decode_json(line, RECORDS[header.command, header.norm == "patch"])
                if missing := [name for name in OF_FILES if getattr(row, name, "") is UNSET]:
                    raise Refused(f"Object missing required field `{missing[0]}`")
                rows.append(row)
        except (Refused, UnicodeError) as failure:
            raise DataError(
                f"line {len(ends) + 1} of {path} is not {kind} ({failure})", HINT
            ) from failure
        ends.append(end + 1)
        start = end + 1
    if header is None:
        raise DataError(f"{path} holds no records", HINT)
    return header, rows, ends
