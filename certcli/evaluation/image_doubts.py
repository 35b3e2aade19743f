"""Why images may say little: few, grey, of another size, with another network's labels, or seen
before.

Which images a network was made with, its lineage says. A step that trains or calibrates keeps the
digests of its images' pixels, as the network takes them: all of few, a seeded sample of many, six
bytes each (two images of a million share one with a chance of 4e-9). Of a sample the share found is
an estimate. What a file says of itself may be left out by who wrote it: images that are not found
here need not be new.
"""

import base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from msgspec import Meta
from torch import Tensor, nn

import certcli.system.compat  # noqa: F401 (before timm: torchvision must be importable)

# isort: split
from timm.data.constants import (
    IMAGENET_DEFAULT_MEAN,
    IMAGENET_DEFAULT_STD,
    IMAGENET_INCEPTION_MEAN,
    IMAGENET_INCEPTION_STD,
    OPENAI_CLIP_MEAN,
    OPENAI_CLIP_STD,
)

from certcli.checkpoint import file, schema
from certcli.checkpoint.record import SEEN, Record
from certcli.evaluation import evidence, intervals
from certcli.images.labelled import Images, sent
from certcli.system.errors import Refused, one_line

_LOOKED_AT = 8
_UNSURE = 2 / 3
"""A share of right answers from which on nobody asks for another reading of the network."""
_LEVEL = 1e-3
"""Chance at most that a network read as it was trained is asked about all the same, were both
readings equally good.
"""
_STATISTICS = {
    "ImageNet's": (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD),
    "Inception's": (IMAGENET_INCEPTION_MEAN, IMAGENET_INCEPTION_STD),
    "CLIP's": (OPENAI_CLIP_MEAN, OPENAI_CLIP_STD),
    "no": ((0.0,) * 3, (1.0,) * 3),
}
"""(mean, std) in common use, as timm names them."""
_FAR = 0.1
"""Smallest distance of the whole interval below an earlier accuracy that makes a doubt."""


def image_doubts(images: Images, channels: int) -> list[str]:
    """Sentences about the images alone; `channels` of the network."""
    doubts = []
    if len(images) == 1:
        doubts.append("one image: every share is 0 % or 100 %, and says little about the network")
    if channels == 3 and images.classes:
        _, pixels, _ = next(images.batches(min(len(images), _LOOKED_AT)))
        if bool((pixels == pixels[:, :1]).all()):
            doubts.append(f"the images of {images.name} are grey, the network sees colour")
    return doubts


def right_of(
    model: nn.Module, images: Images, batch_size: int = 32, labels: Tensor | None = None
) -> list[bool]:
    """Tell of each image whether its label, or that of `labels` (n,), is the top logit."""
    weight = next(model.parameters(), torch.zeros(()))
    with torch.inference_mode():
        predictions = [
            model(sent(pixels, weight.device).to(weight.dtype)).argmax(1).cpu()
            for _, pixels, _ in images.batches(batch_size)
        ]
    correct: list[bool] = (
        torch.cat(predictions) == (images.labels if labels is None else labels)
    ).tolist()
    return correct


def chance_doubt(right: int, count: int, classes: int) -> str | None:
    """Return a doubt about an accuracy that is about that of guessing."""
    if not intervals.chance_level(right, count, classes):
        return None
    if intervals.share_interval(right, count)[1] < 1 / classes:
        return (
            f"the network is right on {right} of {count} images, fewer than by chance: is this a permutation of the classes "
            "of its training? Folders named 0, 1, ... fix an order"
        )
    return (
        f"the network is right on {right} of {count} images, about chance: are these its classes, its mean and std, and is "
        "it the network it is taken for?"
    )


def accuracy_doubts(right: int, count: int, checkpoint: file.Checkpoint) -> list[str]:
    """Near chance, or far below what the checkpoint's own record has found of this very network."""
    chance = chance_doubt(right, count, checkpoint.record.classes)
    if chance is not None:
        return [chance]
    fresh = (
        evidence.understood(entry)
        for entry in checkpoint.record.evidence
        if entry.digest == checkpoint.digest
    )
    accuracies = [
        (entry.command, entry.result.clean)
        for entry in fresh
        if entry and hasattr(entry.result, "clean")
    ]
    high = intervals.share_interval(right, count)[1]
    return [
        f"the network is right on {right} of {count} images, its record on {100 * clean:.0f} % ({command}): are these images "
        "like those?"
        for command, clean in accuracies
        if high < clean - _FAR
    ][:1]


def permutation_doubt(images: Images, predictions: Sequence[int], classes: int) -> str | None:
    """Whether another numbering of the classes makes the network right on significantly more images.

    The numbering that agrees with most answers is fitted on every second image of each class, and
    judged on the others, by a sign test: on the same ones it would always seem better.
    """
    labels = images.labels[: len(predictions)]
    answers = torch.tensor(predictions)
    fitted = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique():
        fitted[(labels == label).nonzero().flatten()[::2]] = True
    right = (labels == answers)[~fitted].tolist()
    if not right or sum(right) >= _UNSURE * len(right):
        return None
    from scipy.optimize import linear_sum_assignment  # a second of a busy machine

    counts = torch.zeros(classes, classes)
    counts.index_put_((labels[fitted], answers[fitted]), torch.tensor(1.0), accumulate=True)
    # a class without answers stays where it is
    weights = counts * (classes + 1) + torch.eye(classes)
    number = torch.from_numpy(linear_sum_assignment(weights.numpy(), maximize=True)[1])
    renumbered = (number[labels] == answers)[~fitted].tolist()
    if sum(renumbered) < len(right) / 2 or not _significantly_better(right, renumbered, _LEVEL):
        return None
    changed = [label for label in labels.unique().tolist() if number[label] != label]
    names = one_line(", ".join(f"{images.classes[k]} {int(number[k])}" for k in changed[:6]))[:160]
    return (
        f"the network is right on {int((labels == answers).sum())} of {len(labels)} images, and on "
        f"{int((number[labels] == answers).sum())} if the classes are numbered in another order ({names}"
        f"{', ...' * (len(changed) > 6)}): name the folders, or the classes in labels.csv, by the numbers of its training"
    )


def better_statistics(
    model: nn.Module, images: Images, right: list[bool]
) -> Iterator[tuple[str, list[str]]]:
    """Yield pixel statistics in common use that are right on significantly more of the images (a
    sign test), each better than those before: a sentence about them, and the options that give
    them.

    model.normalize holds `mean` and `std`, (c, 1, 1). right: of the first len(right) images, which
    the network as it is read gets right.
    """
    normalize: Any = model.normalize
    mean = normalize.mean
    std = normalize.std
    if sum(right) >= _UNSURE * len(right) or len(mean) != 3:
        return
    best = sum(right)
    for name, statistics in _STATISTICS.items():
        try:
            normalize.mean, normalize.std = (
                mean.new_tensor(values).view(-1, 1, 1) for values in statistics
            )
            correct = right_of(model, images.select(range(len(right))))
        finally:
            normalize.mean, normalize.std = mean, std
        if sum(correct) > best and _significantly_better(right, correct, _LEVEL / len(_STATISTICS)):
            best = sum(correct)
            options = [
                "--mean",
                _typed_statistics(statistics[0]),
                "--std",
                _typed_statistics(statistics[1]),
            ]
            yield (
                f"with {name} pixel statistics the network is right on {best} of {len(correct)} images, as it is read on "
                f"{sum(right)}: its mean and std seem to be wrong (try {' '.join(options)})",
                options,
            )


def _typed_statistics(values: Sequence[float]) -> str:
    return ",".join(str(value) for value in (values[:1] if len(set(values)) == 1 else values))


def _significantly_better(right: list[bool], other: list[bool], level: float) -> bool:
    """P[Binomial(n, 1/2) >= k] <= level: of n images that one reading gets right, k are one's."""
    from scipy.special import betainc

    better = sum(b and not a for a, b in zip(right, other, strict=True))
    worse = sum(a and not b for a, b in zip(right, other, strict=True))
    return better > 0 and float(betainc(better, worse + 1, 0.5)) <= level


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
        return f"{about}{self.images:,} of these {self.of:,} images are {self.kind} images"


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
