"""What a changed network keeps of the one it was: end to end, on images that took no part in the change."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from certcli.checkpoint.record import Record
from certcli.evaluation.doubts import image_doubts
from certcli.evaluation.intervals import share_interval
from certcli.images import datasets
from certcli.images.calibration import DIGITS, PHOTOGRAPHS
from certcli.images.labelled import Images
from certcli.system.errors import DataError, UsageError

KEPT_BYTES = 2**27
"""Most bytes of judging images that are kept, 220 of 224 x 224 pixels: several networks are judged by them."""

FEW = 50
"""Fewer images than this say little: the interval of an agreement of 98 % is wider than ten points."""


ERROR_SHARE = 2.0
"""On images without classes the logits may be off by this many times the share of first choices that may change.

First choices among classes that an image does not show are near ties, and fall long before those of a network's own images
do. Measured on two networks of photographs (1,000 and 10 classes): the share of their own images that changed its first
choice was .35 to .60 of the logits' error on synthetic ones, for errors from 5 to 15 %.
"""


@dataclass(frozen=True)
class Fidelity:
    """same: how many of `images` keep their first choice. error: |z - z0|_F / |z0|_F over all logits z of the images.

    right_before, right_after: how many labels are met, None where no label is known.
    """

    images: int
    same: int
    error: float
    right_before: int | None = None
    right_after: int | None = None

    @property
    def agreement(self) -> float:
        return self.same / self.images

    def to_json(self) -> dict[str, Any]:
        """Shares with their 95 % intervals (Clopper & Pearson): what the sample says about all images like these."""
        found: dict[str, Any] = {
            "images": self.images,
            "logits_error": self.error,
            "agreement": self.agreement,
            "agreement_interval": list(share_interval(self.same, self.images)),
        }
        for name, right in (("accuracy_before", self.right_before), ("accuracy_after", self.right_after)):
            found[name] = None if right is None else right / self.images
            found[f"{name}_interval"] = None if right is None else list(share_interval(right, self.images))
        return found


class Witness:
    """Remembers what a network says about images, to be asked later what has changed. KEPT_BYTES of images are held."""

    def __init__(self, model: nn.Module, images: Images, labels: Tensor | None = None, batch_size: int = 50) -> None:
        """labels (images,) where they mean the network's classes: see `known_labels`. DataError without images."""
        if len(images) == 0:
            raise DataError("no image is left to judge the result by", "a larger --limit")
        self.images, self.labels, self.batch_size = images, labels, batch_size
        self._pixels: list[Tensor] = []
        self.before = self.logits(model)

    def logits(self, model: nn.Module) -> Tensor:
        """(images, classes) float64, on the CPU."""
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        with torch.inference_mode():
            parts = [model(pixels.to(device)) for pixels in self._batches()]
            found = torch.cat(parts).double().cpu()
        return found.clone()

    def _batches(self) -> Iterator[Tensor]:
        """The images, read from the disk and decoded again only as far as they did not fit."""
        yield from self._pixels
        held = sum(part.numel() * part.element_size() for part in self._pixels)
        rest = self.images.select(list(range(sum(map(len, self._pixels)), len(self.images))))
        for _, pixels, _ in rest.batches(self.batch_size) if len(rest) else ():
            held += pixels.numel() * pixels.element_size()
            if held <= KEPT_BYTES:
                self._pixels.append(pixels)
            yield pixels

    def compare(self, after: Tensor) -> Fidelity:
        """What logits (images, classes) of the changed network have in common with the first ones."""
        choice, old = after.argmax(1), self.before.argmax(1)
        return Fidelity(
            images=len(old),
            same=int((choice == old).sum()),
            error=float((after - self.before).norm() / self.before.norm().clamp_min(1e-300)),
            right_before=None if self.labels is None else int((old == self.labels).sum()),
            right_after=None if self.labels is None else int((choice == self.labels).sum()),
        )

    def reach(self, after: Tensor) -> Tensor:
        """(images,) the t >= 0 at which z0 + t (z - z0) leaves its first choice, inf where it never does.

        The t at which the first choice stays are an interval, a cut of half-lines: min over classes k of
        margin_k / (margin_k - margin'_k) where the margin shrinks.
        """
        top = self.before.argmax(1, keepdim=True)
        margin = self.before.gather(1, top) - self.before
        shrinks = margin - (after.gather(1, top) - after)
        times = torch.where(shrinks > 0, margin / shrinks.clamp_min(1e-300), torch.inf)
        return times.scatter(1, top, torch.inf).amin(1)

    def doubts(self, record: Record) -> list[str]:
        """Why these images may say little about the network: sentences for its user."""
        found = []
        count, classes = self.before.shape
        if count < FEW:
            found.append(f"only {count} images judge the result, which says little: a larger --limit")
        found += [doubt for doubt in image_doubts(self.images, record.input.size[0]) if count > 1]
        choices = len(self.before.argmax(1).unique())
        if choices == 1 and count > 1:
            found.append("all images get the same first choice: their agreement says nothing")
        if self.labels is not None:
            right = int((self.before.argmax(1) == self.labels).sum())
            if share_interval(right, count)[0] <= 1 / classes:
                found.append(
                    f"the network as it was is right on {right} of {count} images, about chance: are these its classes?"
                )
        return found


def keeps(found: Fidelity, keep: float, witness: Witness) -> bool:
    """Whether enough first choices stay; on images without classes, whether the logits do (ERROR_SHARE)."""
    if not witness.images.classes:
        return found.error <= ERROR_SHARE * (1 - keep)
    return found.same >= keep * found.images


def allowed_share(witness: Witness, logits: Tensor, found: Fidelity, keep: float, most: float = 4.0) -> float:
    """The largest t such that z0 + t (z - z0) keeps enough, by the rule of `keeps`; at most `most`, which is far."""
    if not witness.images.classes:
        return min(most, ERROR_SHARE * (1 - keep) / max(found.error, 1e-12))
    reach = witness.reach(logits).sort().values
    may_go = found.images - math.ceil(keep * found.images)
    return min(most, float(reach[may_go]))


def check_keep(keep: float) -> None:
    """UsageError unless 0 < keep <= 1."""
    if not 0 < keep <= 1:
        raise UsageError(f"--keep must lie between 0 and 1, not {keep:g}", "--keep 0.95 keeps 95 of 100 first choices")


def known_labels(images: Images, record: Record) -> tuple[Tensor | None, str]:
    """(labels that mean the network's classes, ""), or (None, why they do not)."""
    if images.name == PHOTOGRAPHS:
        return None, ""
    if images.name == DIGITS and record.dataset is None and record.input.size != (1, 8, 8):
        return None, "the digits' labels are not this network's classes"
    try:
        return datasets.require_classes(images, record.classes, record.class_names).labels, ""
    except DataError as failure:
        return None, failure.message
