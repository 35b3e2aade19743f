"""Which images a network was made with, by its lineage, and how many of others are among them.

A step that trains or calibrates keeps the digests of its images' pixels, as the network takes them:
all of few, a seeded sample of many, six bytes each (two images of a million share one with a chance
of 4e-9). Of a sample the share found is an estimate. What a file says of itself may be left out by
who wrote it: images that are not found here need not be new.
"""

import base64
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from msgspec import Meta

from certcli.checkpoint import file, schema
from certcli.checkpoint.record import SEEN, Record
from certcli.images.labelled import Images
from certcli.system.errors import Refused

LISTED = 4096
"""Images of a step whose digests are kept: 32 KB of text."""
BYTES = 6
_SEED = 20260102
TRAINED = "training"
CALIBRATED = "calibration"
KINDS = {"finetune": TRAINED, "adapt": CALIBRATED, "constrain": CALIBRATED}
"""What each command does with its images."""


class _SeenFields(schema.StrictStruct):
    dataset: schema.Dataset
    split: schema.Text
    images: Annotated[int, Meta(ge=1, le=2**53)]
    digests: Annotated[str, Meta(max_length=schema.LONGEST_TEXT)]


@dataclass(frozen=True)
class Seen:
    """What a step of a lineage keeps. listed: digests of all, or sampled, of `images`; or none.

    Attributes:
        resized: the network takes images of another size now, so a digest that differs says nothing.
    """

    command: str
    dataset: str
    split: str
    images: int
    listed: tuple[str, ...] = ()
    resized: bool = False

    @property
    def is_complete(self) -> bool:
        """Tell whether an image that is not listed was not used."""
        return self.sampled == 1 and not self.resized

    @property
    def kind(self) -> str:
        return KINDS[self.command]

    @property
    def sampled(self) -> float:
        """SeenShare of the step's images that are listed."""
        return min(1.0, len(self.listed) / self.images)


@dataclass(frozen=True)
class SeenShare:
    """How many of `of` images a network has seen. exactly: or estimated from a sample."""

    kind: str
    images: int
    of: int
    exactly: bool

    def __str__(self) -> str:
        about = "" if self.exactly else "about "
        verb = "is a" if self.images == 1 else "are"
        return f"{about}{self.images:,} of these {self.of:,} images {verb} {self.kind} image{'s' * (self.images != 1)}"


def kept_of(images: Images) -> dict[str, Any]:
    """What a step keeps of its images, as its parameter `SEEN`."""
    listed = images.limit(LISTED, _SEED)
    digests = sorted(bytes.fromhex(digest[: 2 * BYTES]) for digest in listed.pixel_digests.values())
    text = base64.urlsafe_b64encode(b"".join(digests)).decode()  # a record holds no "/", so no path
    return {"dataset": images.name, "split": images.split, "images": len(images), "digests": text}


def remember_images(checkpoint: file.Checkpoint, images: Images) -> file.Checkpoint:
    *before, last = checkpoint.record.lineage
    step = replace(last, parameters={**last.parameters, SEEN: kept_of(images)})
    return replace(checkpoint, record=replace(checkpoint.record, lineage=(*before, step)))


def listed_in(text: str) -> tuple[str, ...]:
    """The digests of a step, one an image; ValueError when the text is none of them."""
    raw = base64.b64decode(text, altchars=b"-_", validate=True)
    return tuple(raw[start : start + BYTES].hex() for start in range(0, len(raw), BYTES))


def seen_by(record: Record) -> list[Seen]:
    """What the steps of a lineage keep, as far as it can be read; an old step lists no images."""
    sources = []
    for step in record.lineage:
        if step.command not in KINDS:
            continue
        try:
            fields = schema.convert_json(step.parameters.get(SEEN), _SeenFields)
            listed = listed_in(fields.digests)
        except (Refused, ValueError):
            name, count = step.parameters.get("dataset"), step.parameters.get("images")
            if (
                step.command == "finetune"
                and isinstance(name, str)
                and type(count) is int
                and 0 < count < 2**53
            ):
                sources.append(Seen(step.command, name, "train", count))
            continue
        sources.append(
            Seen(
                step.command,
                fields.dataset,
                fields.split,
                fields.images,
                listed,
                record.input.resized is not None,
            )
        )
    return sources


def seen_shares(sources: Sequence[Seen], images: Images) -> list[SeenShare]:
    """Of training and of calibration images, the share among these; kinds without one are left out."""
    shares_of = []
    for kind in (TRAINED, CALIBRATED):
        steps = [step for step in sources if step.kind == kind and step.listed]
        if not steps:
            continue
        stands_for: dict[str, float] = {}
        for step in sorted(steps, key=lambda step: step.sampled):
            stands_for |= dict.fromkeys(step.listed, 1 / step.sampled)
        weights = [
            stands_for.get(digest[: 2 * BYTES], 0.0) for digest in images.pixel_digests.values()
        ]
        count = min(len(images), round(sum(weights)))
        if count:
            exactly = all(step.sampled == 1 for step in steps)
            shares_of.append(SeenShare(kind, count, len(images), exactly))
    return shares_of


def unlisted(sources: Sequence[Seen], images: Images) -> Seen | None:
    """A step that trained on this dataset, by name, and does not list all its images."""
    possible = (
        step
        for step in sources
        if step.kind == TRAINED and step.dataset == images.name and not step.is_complete
    )
    return next(possible, None) if images.split in ("train", "all") else None


def trained_on(sources: Sequence[Seen], images: Images) -> bool:
    """Whether these images' training part, by name, was trained on: exact where all are listed."""
    return any(
        not step.is_complete or bool(seen_shares([step], images.limit(64, _SEED)))
        for step in sources
        if (step.kind, step.dataset, step.split) == (TRAINED, images.name, "train")
    )


def doubts(record: Record, images: Images) -> tuple[dict[str, Any], list[str]]:
    """Shares of seen images for a document, and sentences about them."""
    sources = seen_by(record)
    shares_of = seen_shares(sources, images)
    sentences = [f"{share}: their figures are not those of new images" for share in shares_of]
    old = unlisted(sources, images)
    if old is not None and not any(share.kind == TRAINED for share in shares_of):
        sentences.append(
            f"the network was trained on {old.images:,} images of {old.dataset}; its file does not say which: some of these "
            "may be among them"
        )
    return {
        share.kind: {"images": share.images, "exact": share.exactly} for share in shares_of
    }, sentences
