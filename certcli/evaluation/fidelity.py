"""Compare a changed network with the original, on images that took no part in the change."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from certcli.checkpoint.record import Record
from certcli.evaluation.image_doubts import chance_doubt, image_doubts
from certcli.evaluation.intervals import share_interval, upper_confidence
from certcli.images import calibration, datasets, labelled
from certcli.system import errors, torch_modes

CACHED_BYTES = 2**27
"""Most bytes of images that are cached between networks: 220 images of 224 x 224 pixels."""

FEW = 50
"""With fewer images the interval of an agreement of 98 % is wider than ten points."""

CHANGED_PER_ERROR = 1.0
"""On real images, the share of changed first choices is at most this many times the logit error on
synthetic photographs.

First choices among classes that an image does not show are near ties and change early, so on synthetic photographs the
logits judge. This factor and LOGITS_PER_ERROR held for every network of colour images that was measured, up to
PREDICTABLE (docs/trials.md).
"""

DOUBT = 0.1
"""The probability that an `agreement_at_least` on images of a dataset is missed, by the luck of the
draw of judges.
"""

TRIAL_SHARE = 3
"""A trial runs this fraction of the held-out images, 1 in 3: those with the smallest margins."""

LEAST_JUDGES = 100
"""Fewest images that a trial runs; all, where there are fewer."""

MOST_RANKED = 20
"""Changed first choices that are enough to know their share (`ReferenceLogits.changed_at_most`)."""

MANY_JUDGES = 500
"""More judging images than these hardly allow a larger change."""

LOGITS_PER_ERROR = 2.0
"""On real images, the logit error is at most this many times the one on synthetic photographs."""

LEAST_EXPECTED = 0.01
"""A smaller logit error on synthetic photographs says no more about real ones than this."""

PREDICTABLE = 0.3
"""Largest logit error on synthetic photographs that predicts real ones."""


@dataclass(frozen=True)
class Fidelity:
    """The agreement of two networks on `images` images.

    Args:
        same: the number of images that keep their first choice.
        error: |z - z0|_F / |z0|_F over all logits z.
        agreement_at_least: see `ReferenceLogits.changed_at_most`.
        right_before, right_after: the number of correct first choices; None where no label is
            known.
    """

    images: int
    same: int
    error: float
    agreement_at_least: float
    right_before: int | None = None
    right_after: int | None = None

    @property
    def agreement(self) -> float:
        return self.same / self.images

    def to_json(self) -> dict[str, Any]:
        """Return shares with their 95 % intervals (Clopper & Pearson)."""
        fields: dict[str, Any] = {
            "images": self.images,
            "logits_error": self.error,
            "agreement": self.agreement,
            "agreement_interval": list(share_interval(self.same, self.images)),
            "agreement_at_least": self.agreement_at_least,
        }
        for name, right in (
            ("accuracy_before", self.right_before),
            ("accuracy_after", self.right_after),
        ):
            fields[name] = None if right is None else right / self.images
            fields[f"{name}_interval"] = (
                None if right is None else list(share_interval(right, self.images))
            )
        return fields


class ReferenceLogits:
    """The logits of the original network on some images, for comparison with changed networks."""

    def __init__(
        self,
        model: nn.Module,
        images: labelled.Images,
        labels: Tensor | None = None,
        batch_size: int = 50,
    ) -> None:
        """Compute the logits. labels: (images,), see `known_labels`."""
        self.images = images
        self.labels = labels
        self.batch_size = batch_size
        if len(images):
            parameter = next(model.parameters(), torch.empty(0))
            size = images.fetch([0]).shape[1:]
            self.batch_size = labelled.at_once(batch_size, size, parameter.device)
        self._pixels: list[Tensor] = []
        self.before = self.logits(model)

    def logits(self, model: nn.Module) -> Tensor:
        """Return the logits of `model`: (images, classes) float64, on the CPU."""
        return _logits_of(model, self._batches())

    def trial_logits(self, model: nn.Module) -> Tensor:
        """Return logits of `model` where first choices may change, of the original elsewhere.

        The judges of a dataset are compared by those that change first (`changed_at_most`), and
        these have small margins. Photographs without classes are compared by all their logits.
        """
        count = max(len(self.before) // TRIAL_SHARE, LEAST_JUDGES)
        if not self.images.classes or count >= len(self.before):
            return self.logits(model)
        best = self.before.topk(min(2, self.before.shape[1])).values
        nearest = (best[:, 0] - best[:, -1]).argsort()[:count].sort().values
        logits = self.before.clone()
        logits[nearest] = _logits_of(model, self._batches_of(nearest))
        return logits

    def _batches(self) -> Iterator[Tensor]:
        """Yield the images in batches; those beyond CACHED_BYTES are read from the disk each time."""
        yield from self._pixels
        cached_bytes = sum(part.numel() * part.element_size() for part in self._pixels)
        rest = self.images.select(list(range(sum(map(len, self._pixels)), len(self.images))))
        for _, pixels, _ in rest.batches(self.batch_size) if len(rest) else ():
            cached_bytes += pixels.numel() * pixels.element_size()
            if cached_bytes <= CACHED_BYTES:
                self._pixels.append(pixels)
            yield pixels

    def _batches_of(self, rows: Tensor) -> Iterator[Tensor]:
        """Yield the images at these rows, which ascend, in batches."""
        early = rows[rows < sum(map(len, self._pixels))]
        if len(early):
            yield from torch.cat(self._pixels)[early].split(self.batch_size)
        if len(early) < len(rows):
            late = self.images.select(rows[len(early) :].tolist())
            yield from (pixels for _, pixels, _ in late.batches(self.batch_size))

    def compare(self, after: Tensor) -> Fidelity:
        """Compare the logits (images, classes) of a changed network with the original ones."""
        choice = after.argmax(1)
        old = self.before.argmax(1)
        error = float((after - self.before).norm() / self.before.norm().clamp_min(1e-300))
        changed = self.changed_at_most(after) if self.images.classes else CHANGED_PER_ERROR * error
        return Fidelity(
            images=len(old),
            same=int((choice == old).sum()),
            error=error,
            agreement_at_least=max(0.0, 1 - changed),
            right_before=None if self.labels is None else int((old == self.labels).sum()),
            right_after=None if self.labels is None else int((choice == self.labels).sum()),
        )

    def reach(self, after: Tensor) -> Tensor:
        """Return t >= 0 at which z0 + t (z - z0) leaves its first choice, or inf: (images,).

        This t is the least margin_k / (margin_k - margin'_k) over the classes k whose margin
        shrinks.
        """
        top = self.before.argmax(1, keepdim=True)
        margin = self.before.gather(1, top) - self.before
        shrinks = margin - (after.gather(1, top) - after)
        times = torch.where(shrinks > 0, margin / shrinks.clamp_min(1e-300), torch.inf)
        return times.scatter(1, top, torch.inf).amin(1)

    def changed_at_most(self, after: Tensor) -> float:
        """Return the most of all such images that change, with probability 1 - DOUBT.

        The margins tell more than a count: of n = 40 images 98 % are 39.2. On the line from the old
        logits to `after` the k-th image changes at t_k, when at most the share p of all images has
        changed, the 1 - DOUBT quantile of Beta(k, n - k + 1) (an order statistic). This share grows
        at least in proportion to t, so p / t_k at t = 1. k is a fifth of the images, at most
        MOST_RANKED, or all that changed. The growth is an assumption, and measured
        (docs/trials.md). Near ties break it, so the share is at least the median of the same
        Beta for k that changed.
        """
        if not bool(after.isfinite().all()):
            return 1.0
        reach = self.reach(after).sort().values
        count = len(reach)
        changed = int((reach < 1).sum())
        rank = max(1, min(count // 5, MOST_RANKED), changed)
        by_margins = upper_confidence(rank - 1, count, DOUBT) / max(float(reach[rank - 1]), 1e-12)
        return min(
            1.0, max(by_margins, upper_confidence(changed - 1, count, 0.5) if changed else 0.0)
        )

    def doubts(self, record: Record) -> list[str]:
        """Return sentences for the user on why these images may say little about the network."""
        doubts = []
        count, classes = self.before.shape
        if count < FEW:
            doubts.append(
                f"only {count} images judge the result, which says little: a larger --limit"
            )
        doubts += [doubt for doubt in image_doubts(self.images, record.input.size[0]) if count > 1]
        choices = len(self.before.argmax(1).unique())
        if choices == 1 and count > 1:
            doubts.append("all images get the same first choice: their agreement says nothing")
        if self.labels is not None:
            doubts += filter(
                None,
                [chance_doubt(int((self.before.argmax(1) == self.labels).sum()), count, classes)],
            )
        return doubts


def _logits_of(model: nn.Module, batches: Iterable[Tensor]) -> Tensor:
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    with torch.inference_mode(), torch_modes.fast_products(model):
        logits = torch.cat([model(pixels.to(device)) for pixels in batches]).double().cpu()
    return logits.clone()


def expected_on_real(fidelity: Fidelity, channels: int) -> dict[str, float]:
    """Return what networks with `found` on synthetic photographs keep on real ones; {}: unknown.

    Strokes on black are no photographs: on grey images the logits were off up to eight times as
    far.

    Args:
        channels: of the network's images.
    """
    if channels == 1 or fidelity.error > PREDICTABLE:
        return {}
    return {
        "logits_error_at_most": max(LEAST_EXPECTED, LOGITS_PER_ERROR * fidelity.error),
        "agreement_at_least": max(0.0, 1 - max(LEAST_EXPECTED, CHANGED_PER_ERROR * fidelity.error)),
    }


def keeps_enough(fidelity: Fidelity, keep: float) -> bool:
    """Return whether a share `keep` of first choices stays, by margins; see `allowed_share`."""
    return allowed_share(fidelity, keep) >= 1 and (keep < 1 or fidelity.same == fidelity.images)


def allowed_share(fidelity: Fidelity, keep: float, limit: float = 4.0) -> float:
    """Return the largest t <= `limit` for which the logits z0 + t (z - z0) keep the top-1 prediction
    of a share `keep` of the images; for a share of 1 at most half an image is expected to change.
    """
    room = 1 - keep if keep < 1 else 0.5 / fidelity.images
    return min(limit, room / max(1 - fidelity.agreement_at_least, 1e-12))


def check_keep(keep: float) -> None:
    """Raise UsageError unless 0 < keep <= 1."""
    if not 0 < keep <= 1:
        raise errors.UsageError(
            f"--keep must lie between 0 and 1, not {keep:g}",
            "--keep 0.95 preserves 95 of 100 top-1 predictions",
        )


def known_labels(images: labelled.Images, record: Record) -> tuple[Tensor | None, str]:
    """Return (labels, "") where they mean the network's classes, else (None, the reason)."""
    if images.name == calibration.PHOTOGRAPHS:
        return None, ""
    if (
        images.name == calibration.DIGITS
        and record.dataset is None
        and record.input.size != (1, 8, 8)
    ):
        return None, "the digits' labels are not this network's classes"
    try:
        return datasets.require_classes(images, record.classes, record.class_names).labels, ""
    except errors.DataError as failure:
        return None, failure.message
