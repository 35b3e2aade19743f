"""What `certvit audit` found, as one document: typed, decodable, and published as
docs/schema/audit.json.

Shares carry the number of images they are shares of. A value that was not measured is absent
(null), never 0; `skipped` says why; `doubts` why its numbers may say little. `upper` is the string
"inf" where float64 is too small for the bound or where there is none: `upper_finite` says which.
"""

import inspect
import json
import math
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from certcli.checkpoint.schema import MOST_CLASSES, Log10, Measured, Number, Seed, Upper
from certcli.checkpoint.schema import Share as Unit
from certcli.evaluation import intervals, threat

Natural = Annotated[int, Meta(ge=0, le=2**53)]
Class = Annotated[int, Meta(ge=-1, le=MOST_CLASSES)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Length = Annotated[float, Meta(ge=0, le=threat.LARGEST)]
Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$")]


class _Part(Struct, kw_only=True, forbid_unknown_fields=True):
    pass


class Share(_Part):
    """hits of images; interval: 95 %, Clopper and Pearson, for the share among all images that
    these are a sample of.
    """

    hits: Natural
    images: Natural
    share: Unit
    interval: tuple[Unit, Unit]

    def __post_init__(self) -> None:
        if not self.images or self.hits / self.images != self.share:
            raise ValueError(f"{self.hits} of {self.images} is not the share {self.share}")
        ends = intervals.share_interval(self.hits, self.images)
        if not all(math.isclose(*pair, abs_tol=1e-9) for pair in zip(self.interval, ends)):
            raise ValueError(f"{self.interval} is not the interval of {self.hits} of {self.images}")

    @staticmethod
    def of(hits: int, images: int) -> "Share":
        return Share(
            hits=hits,
            images=images,
            share=hits / images,
            interval=intervals.share_interval(hits, images),
        )


class Network(_Part):
    """The audited network.

    Args:
        name: the source as it was given, without its folders.
        reading: the assumptions about the file, each with its origin.
        path: the file below the root of its git repository; None for a file outside every
            repository.
    """

    name: str
    arch: str
    classes: Natural
    input: list[Natural]
    parameters: Natural
    reading: dict[str, Any]
    path: str | None = None


class Dataset(_Part):
    """digest: of the images that were judged at most, label and pixels of each."""

    name: str
    split: str
    images: Natural
    digest: Digest


class Block(_Part):
    """A part of the network, in order of execution: log10 of its proven constant, and what it does
    to the bound.
    """

    path: str
    kind: str
    log10: Number
    text: str
    why: str


class GlobalBound(_Part):
    """The proven bound |f(x) - f(y)| <= upper |x - y|, pixel l2, for all images in [0, 1]."""

    upper: Upper
    upper_finite: bool
    log10_upper: Log10 | None
    upper_text: str
    why: str
    drivers: str
    blocks: list[Block]
    seconds: Seconds


class Slope(_Part):
    """A slope that some image really has: no bound, a measured value below it."""

    lower: Measured
    images: Natural
    of: str
    seconds: Seconds


class CertifiedShares(_Part):
    """Certificates of one method on the first images. failure: chance that one certificate is
    wrong; 0 for a proof.

    Attributes:
        about: which network the statement is about.
        parameters: what `certify` needs to find the same again.
    """

    method: str
    promise: str
    failure: Annotated[float, Meta(ge=0, lt=1)]
    arithmetic: str
    domain: str
    about: str
    title: str
    statement: str
    dataset: Dataset
    clean: Share
    certified: dict[str, Share]
    average_radius: Length
    abstained: Unit
    parameters: dict[str, Any]
    seconds: Seconds


class PatchShares(_Part):
    """Certificates of the classifier that is defended against patches (`certify --method patch`),
    for each size of them.

    Attributes:
        clean, certified: of the defended classifier. Its shares are not comparable with those at a
            radius.
    """

    procedure: str
    arithmetic: str
    title: str
    statement: str
    dataset: Dataset
    clean: Share
    certified: dict[str, Share]
    parameters: dict[str, Any]
    seconds: Seconds


class AttackShares(_Part):
    """What attacks left, in turn, at ascending radii. fooled: of the correct images, how many fell
    at each radius.

    Attributes:
        fooled_8bit: of these, how many adversarial images fool it as 8-bit files, too.
        largest: of these, the largest change of a single pixel value, in [0, 1].
    """

    attacks: list[str]
    norm: str
    dataset: Dataset
    clean: Share
    robust: dict[str, Share]
    fooled: dict[str, Natural]
    median_norm: Length | None
    settings: dict[str, Any]
    seconds: Seconds
    fooled_8bit: dict[str, Natural] = {}
    largest: dict[str, Unit] = {}


class PatchAttack(_Part):
    """What an attack with patches left of the network itself, without masks: place and pixels of
    one patch were searched.
    """

    patch: str
    dataset: Dataset
    clean: Share
    robust: Share
    seconds: Seconds


class ImageRow(_Part):
    """One image. radius: certified, by method; "inf" where nothing changes the class. withstood: at
    each radius. proven: patches that do not change the class behind masks. file: below the
    dataset's folder, where the dataset is one.
    """

    index: Natural
    label: Class
    prediction: Class | None = None
    radius: dict[str, Length | Literal["inf"]] = {}
    withstood: dict[str, bool] = {}
    proven: list[str] = []
    adversarial_prediction: Class | None = None
    norm: Length | None = None
    file: str | None = None


class Skipped(_Part):
    """A stage that was not done, and why. for_time: more time would have done it."""

    stage: str
    why: str
    for_time: bool = False


Verdict = Literal["passed", "failed", "not decided"]
"""By the interval of the share: its lower end meets the demand, its upper end misses it, or
neither."""


class GateResult(_Part):
    """One gate of --fail-on. measured: at the look that decided (`docs/audit.md`); null where the
    quantity was not.
    """

    fail_on: str
    passed: bool
    verdict: Verdict
    measured: Number | Literal["inf"] | None
    reason: str


class GateReport(_Part):
    """verdict: failed where one gate failed, else not decided where one is not."""

    passed: bool
    verdict: Verdict
    reasons: list[str]
    judged: list[GateResult]


class LineageStep(_Part):
    """One step of the lineage, as the file tells it."""

    command: str
    parameters: dict[str, Any]
    seed: Seed
    parent: str | None


class Machine(_Part):
    """Where an audit ran: the last digits of sums, and how many images fitted into its time, depend
    on it.
    """

    cpu: str
    threads: Natural
    device: str


class Change(_Part):
    """One figure of two audits; before: by the word of the earlier one. alike: of the same threat
    and images, else `why`.
    """

    figure: str
    before: str
    after: str
    alike: bool
    why: str = ""


class Audit(_Part):
    """The document of `certvit audit --json` and `--report FILE.json`.

    Attributes:
        headline: the answer in one sentence.
        points: the same in three lines: attacked, proven, and what else holds.
        scale: how large the radius is.
        reference: the same figures of a published network.
        date: UTC, ISO 8601.
        changes: against the audit of --compare.
        left_out: what an anonymous document does not say.
        computed: seconds of the CPU, like those of its stages; all of them on another device.
    """

    schema: Literal[1]
    command: Literal["audit"]
    checkpoint: Digest
    network: Network
    verdict: list[str]
    doubts: list[str]
    next: list[str]
    bound: GlobalBound | None
    slope: Slope | None
    dataset: Dataset | None
    clean: Share | None
    certificates: list[CertifiedShares]
    attack: AttackShares | None
    skipped: list[Skipped]
    gate: GateReport
    lineage: list[LineageStep]
    reproduce: str
    budget: Seconds
    seconds: Seconds
    versions: dict[str, str]
    records: list[ImageRow]
    patched: PatchShares | None = None
    patch_attack: PatchAttack | None = None
    headline: str = ""
    points: list[str] = []
    scale: str = ""
    reference: str = ""
    attention_weight: Measured | None = None
    date: str = ""
    machine: Machine | None = None
    changes: list[Change] = []
    computed: Seconds = 0.0
    left_out: str = ""


def to_json(part: Struct) -> dict[str, Any]:
    return json.loads(msgspec.json.encode(part))


def from_json(text: str | bytes) -> Audit:
    """Inverse of `to_json`, checked; Refused when it is no such document."""
    from certcli.checkpoint.schema import decode_json

    return decode_json(text, Audit)


def written_schema() -> str:
    """docs/schema/audit.json, as `python -m certcli.report.document` prints it and a test compares
    it.
    """
    described: dict[str, Any] = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "certvit audit",
        **msgspec.json.schema(Audit),
    }
    for part in (described, *described["$defs"].values()):
        if "description" in part:  # msgspec before 0.23 keeps a docstring's indentation
            part["description"] = inspect.cleandoc(part["description"])
    return json.dumps(described, indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    import sys

    sys.stdout.write(written_schema())
