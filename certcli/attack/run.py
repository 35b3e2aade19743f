"""From batches to records: attacks in order, each on the images that are still standing; and from
records to shares with intervals."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from certcli.attack import catalogue, judge, watched_model
from certcli.attack.settings import AttackSettings, Craft, Planned, planned_attacks
from certcli.evaluation import perturbation
from certcli.evaluation.image_records import AttackRecord
from certcli.evaluation.intervals import Interval, share_interval
from certcli.images.labelled import Batch
from certcli.system.errors import DataError, UsageError


def attack_images(
    model: nn.Module,
    batches: Iterable[Batch],
    names: Sequence[str | Planned],
    regions: perturbation.Region | Sequence[perturbation.Region],
    settings: AttackSettings,
    *,
    independent: bool = False,
    source: nn.Module | None = None,
    keep_images: bool = False,
) -> Iterator[AttackRecord]:
    """One record an image and region: is there an attack among `names` with argmax f(x') != y, |x'
    - x| <= radius?

    Misclassified images are not attacked; an image that one attack breaks is not shown to the next,
    unless `independent` asks for the share of each attack alone. `source` crafts the images that
    `model` is tested on (transfer). A name may carry steps: "pgd-20".

    Several regions are of one norm and grow (`growing`): what breaks an image at one radius breaks
    it at all larger ones, so the curve falls by construction, and each image is attacked until its
    first failure only. A region with a radius for each image fits one batch only. UsageError when
    no attack is named or a model is in training mode.
    """
    regions = [regions] if isinstance(regions, perturbation.Region) else regions
    planned = planned_attacks(names, settings)
    for entry in planned:
        norms = catalogue.ATTACKS[entry.attack].norms
        if regions[0].norm not in norms:
            message = (
                f"{entry.attack} is an attack in {' and '.join(norms)}, not in {regions[0].norm}"
            )
            raise UsageError(message, "margin-pgd and fab know both norms")
    for kind in (model, source):
        if kind is not None and kind.training:
            raise UsageError("the model is in training mode", "call model.eval() before an attack")
    for indices, images, labels in batches:
        labels = labels.to(images.device)
        batch = _Standing(model, images, labels, planned, settings)
        for region in regions:
            batch.reopen()
            for entry in planned:
                batch.attack(entry, region, source, independent)
            yield from batch.records(indices, region, keep_images)


class _Standing:
    """The state of one batch: who has fallen to whom, and at which smallest norm."""

    def __init__(
        self,
        model: nn.Module,
        images: Tensor,
        labels: Tensor,
        planned: Sequence[Planned],
        settings: AttackSettings,
    ) -> None:
        self.model = model
        self.labels = labels
        self.among_8bit = settings.pixels == "8bit"
        self.images = images = judge.rounded_to_8bit(images) if self.among_8bit else images
        self.as_8bit: list[bool | None] = [None] * len(images)
        self.samples = settings.samples
        self.seed = settings.seed
        with watched_model.seeded(images, self.seed):
            self.prediction = judge.predict_classes(model, images, self.samples)
        self.correct = self.prediction == labels
        self.adversarial, self.adversarial_predictions = images.clone(), self.prediction.clone()
        self.norm = torch.where(self.correct, float("inf"), 0.0).double()
        self.broken_by: list[str | None] = [None] * len(images)
        self.outcome = {
            entry.label: [None if right else False for right in self.correct.tolist()]
            for entry in planned
        }

    def reopen(self) -> None:
        """A larger radius: what fell has fallen, what withstood is open."""
        for outcome in self.outcome.values():
            outcome[:] = [False if passed is False else None for passed in outcome]

    def _open(self, label: str, independent: bool) -> list[int]:
        """Rows that this attack may still break."""
        standing = [row for row, passed in enumerate(self.outcome[label]) if passed is not False]
        return standing if independent else [row for row in standing if self.broken_by[row] is None]

    def _verdict(
        self, rows: Tensor, candidates: Tensor, limit: perturbation.Region
    ) -> judge.Judgement:
        images = self.images[rows]
        labels = self.labels[rows]
        before = self.prediction[rows]
        if self.among_8bit:
            candidates = judge.nearest_within(candidates, images, limit)
        with watched_model.seeded(images, self.seed):  # a random net draws in the verdict too
            return judge.judge_points(
                self.model,
                images,
                labels,
                candidates,
                limit,
                prediction=before,
                samples=self.samples,
                exactly=self.among_8bit,
            )

    def attack(
        self,
        entry: Planned,
        region: perturbation.Region,
        source: nn.Module | None,
        independent: bool,
    ) -> None:
        """Run an attack and its restarts on the rows it may still break; record what it broke."""
        craft: Craft = catalogue.ATTACKS.load(entry.attack)
        outcome = self.outcome[entry.label]
        standing = self._open(entry.label, independent)
        for row in standing:
            outcome[row] = True
        # the crafting model, or the image before it is rounded, cannot say what is solved
        early = source is None and not self.among_8bit
        settings = entry.settings if early else replace(entry.settings, stop_early=False)
        for restart in range(settings.restarts if catalogue.ATTACKS[entry.attack].random else 1):
            if not standing:
                return
            rows = torch.tensor(standing, device=self.images.device)
            images = self.images[rows]
            labels = self.labels[rows]
            turn = replace(settings, restart=restart)
            limit = region.of(rows)
            candidates = craft(source or self.model, images, labels, limit, turn)
            self._note(rows, self._verdict(rows, candidates, limit), entry.label)
            standing = [row for row in standing if outcome[row]]

    def _note(self, rows: Tensor, verdict: judge.Judgement, label: str) -> None:
        for row in rows[verdict.success].tolist():
            self.outcome[label][row] = False
            self.broken_by[row] = self.broken_by[row] or label
        nearer = (verdict.success & (verdict.norm < self.norm[rows])).nonzero().flatten()
        self.norm[rows[nearer]] = verdict.norm[nearer]
        self.adversarial[rows[nearer]] = verdict.adversarial[nearer]
        self.adversarial_predictions[rows[nearer]] = verdict.adversarial_prediction[nearer]
        self._judge_rounded(rows[nearer])

    def _judge_rounded(self, rows: Tensor) -> None:
        """Note whether the adversarial images of these rows are some as 8-bit files, too."""
        if not len(rows):
            return
        with watched_model.seeded(self.images[rows], self.seed):
            classes = judge.predict_classes(
                self.model, judge.rounded_to_8bit(self.adversarial[rows]), self.samples
            )
        for row, fooled in zip(rows.tolist(), (classes != self.labels[rows]).tolist(), strict=True):
            self.as_8bit[row] = fooled

    def records(
        self, indices: Tensor, region: perturbation.Region, keep_images: bool
    ) -> Iterator[AttackRecord]:
        lengths = perturbation.image_norms(
            self.adversarial.double() - self.images.double(), "l2"
        ).tolist()
        norms = self.norm.tolist()
        radii = region.radii(self.images).tolist()
        labels = self.labels.tolist()
        predictions = self.prediction.tolist()
        adversarial_predictions = self.adversarial_predictions.tolist()
        for row, index in enumerate(indices.tolist()):
            fallen = norms[row] < float("inf")
            yield AttackRecord(
                index=index,
                label=labels[row],
                prediction=predictions[row],
                adversarial_prediction=adversarial_predictions[row],
                robust={label: outcome[row] for label, outcome in self.outcome.items()},
                norm=norms[row] if fallen else None,
                l2=lengths[row] if fallen else None,
                epsilon=radii[row],
                kind=region.norm,
                broken_by=self.broken_by[row],
                as_8bit=self.as_8bit[row],
                image=self.images[row].cpu().clone() if keep_images else None,
                adversarial=self.adversarial[row].cpu().clone() if keep_images else None,
            )


@dataclass(frozen=True)
class RobustAccuracy:
    """Shares with 95 % Clopper-Pearson intervals for "clean", "robust" and each attack's label.

    Attributes:
        robust: withstood every attack.
        attacks: withstood this one (and, when solved images left the batch, all that ran before it,
            those at smaller radii among them).
        median_norm: of the smallest perturbations found among correctly classified images; None
            when none was found.
        fooled: how many of the correct images fell.
        fooled_8bit: of these, how many adversarial images are some as 8-bit files, too.
    """

    clean: float
    robust: float
    attacks: dict[str, float]
    images: int
    intervals: dict[str, Interval]
    epsilon: float
    kind: str
    median_norm: float | None
    fooled: int = 0
    fooled_8bit: int = 0


def robust_accuracy(records: Iterable[AttackRecord]) -> RobustAccuracy:
    """The summary of one radius' records; DataError: none, or several radii or attacks."""
    rows = list(records)
    if not rows:
        raise DataError("no image was attacked")
    first = rows[0]
    labels = list(first.robust)
    if any(
        (row.epsilon, row.kind, list(row.robust)) != (first.epsilon, first.kind, labels)
        for row in rows
    ):
        raise DataError(
            "records of several radii or attacks do not have one summary", "use curve(records)"
        )
    counts = {
        "clean": sum(row.correct for row in rows),
        "robust": sum(row.withstood for row in rows),
        **{label: sum(row.robust[label] is True for row in rows) for label in labels},
    }
    norms = sorted(row.norm for row in rows if row.correct and row.norm is not None)
    return RobustAccuracy(
        clean=counts["clean"] / len(rows),
        robust=counts["robust"] / len(rows),
        attacks={label: counts[label] / len(rows) for label in labels},
        images=len(rows),
        intervals={name: share_interval(count, len(rows)) for name, count in counts.items()},
        epsilon=first.epsilon,
        kind=first.kind,
        median_norm=norms[len(norms) // 2] if norms else None,
        fooled=sum(row.fell for row in rows),
        fooled_8bit=sum(row.fell and row.as_8bit is True for row in rows),
    )


def robust_curve(records: Iterable[AttackRecord]) -> tuple[RobustAccuracy, ...]:
    """One summary a radius, ascending, from the records of `attack_images`."""
    groups: dict[float, list[AttackRecord]] = {}
    for record in records:
        groups.setdefault(record.epsilon, []).append(record)
    return tuple(robust_accuracy(groups[radius]) for radius in sorted(groups))


def require_correct(records: Iterable[AttackRecord]) -> None:
    """DataError when a certified image is misclassified: the records are of another checkpoint."""
    for record in records:
        if not record.correct:
            raise DataError(
                f"image {record.index} is certified as class {record.label}, this network says {record.prediction}",
                "the records belong to another checkpoint: certify this one",
            )
