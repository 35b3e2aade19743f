"""Adversarial examples: as tensors, to be saved and checked by others, and a few to look at.

What an evaluation found: shares of every task, flags, and one document for programs.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median_low
from typing import Any

import torch
from msgspec import structs
from torch import Tensor, nn

from certcli.attack import checks, run, stages
from certcli.attack.settings import AttackSettings
from certcli.evaluation import perturbation, threat
from certcli.evaluation.image_records import AttackRecord, Certificate
from certcli.evaluation.records import RecordBatch, Resumed, compute_again


def collect(
    records: Iterable[AttackRecord], size: tuple[int, int, int] = (1, 1, 1)
) -> dict[str, Tensor]:
    """Records of fallen images with pixels -> tensors by name, a row an image, in order.

    images, adversarial, perturbations (n, c, h, w); labels, predictions, adversarial_predictions,
    indices (n,) int64; norms, l2_norms, epsilons (n,) float64. norms are measured in float64 on
    exactly the saved tensors, so the perturbation (a float32 difference, which rounds) is for the
    eye and `adversarial` for the proof.

    as_8bit (n,) bool: whether the image, rounded to 8 bits a value, still has another class than
    its label.

    Of several records of one image (a curve) the first, that of the smallest radius. size: of
    images where there are none.
    """
    first_records: dict[int, AttackRecord] = {}
    for record in records:
        first_records.setdefault(record.index, record)
    rows = list(first_records.values())
    images = _stacked((row.image for row in rows), size)
    adversarial = _stacked((row.adversarial for row in rows), size)
    return {
        "images": images,
        "adversarial": adversarial,
        "perturbations": adversarial - images,
        "labels": torch.tensor([row.label for row in rows]),
        "predictions": torch.tensor([row.prediction for row in rows]),
        "adversarial_predictions": torch.tensor([row.adversarial_prediction for row in rows]),
        "indices": torch.tensor([row.index for row in rows]),
        "as_8bit": torch.tensor([row.as_8bit is True for row in rows]),
        "norms": _float64(row.norm for row in rows),
        "l2_norms": _float64(row.l2 for row in rows),
        "epsilons": _float64(row.epsilon for row in rows),
    }


def _stacked(images: Iterable[Tensor | None], size: tuple[int, int, int]) -> Tensor:
    """Return the images that are there, (n, c, h, w)."""
    present = [image for image in images if image is not None]
    return torch.stack(present) if present else torch.empty(0, *size)


def _float64(values: Iterable[float | None]) -> Tensor:
    """None, nothing was found, becomes inf."""
    return torch.tensor(
        [float("inf") if value is None else value for value in values], dtype=torch.float64
    )


ROWS = 4


def choose_exhibits(records: Sequence[AttackRecord], count: int = ROWS) -> list[AttackRecord]:
    """The first `count` images that fell, at that radius; those that fall as 8-bit files lead."""
    chosen: dict[int, AttackRecord] = {}
    for record in sorted(records, key=lambda record: record.as_8bit is not True):
        if record.fell and record.image is not None:
            chosen.setdefault(record.index, record)
    return list(chosen.values())[:count]


CHECKED = (4, 32)
"""Images that the checks look at, at least and at most."""
SHARE = 0.1
"""Of the run's passes that the checks may take, beyond those of the fewest images."""
PASSES = 3
"""Of an image through the network: at the image, at the image again, after FGSM's step."""

USUAL = 8
"""Of the portions of an earlier run, one in this number is attacked again where nothing rests on
them.
"""


def inspect(
    model: nn.Module,
    source: nn.Module | None,
    task: stages.StageTask,
    records: Sequence[AttackRecord],
    settings: AttackSettings,
    passes: int,
) -> tuple[checks.Flag, ...]:
    """Flags about the net of the gradients, and about the attacks at the smallest radius > 0.

    The checks of attacks are left out where images have radii of their own, and with a `source`: a
    transfer may be weak.

    Args:
        records: of images of the task that were attacked already; some of them are looked at.
        passes: of one image through the network that the whole run takes; `SHARE` of them are
            spent.
    """
    radius = next((radius for radius in task.stage.radii if radius > 0), None)
    alone = task.own is not None or source is not None or radius is None
    rows = [record for record in records if alone or record.epsilon == radius]
    rows = list({record.index: record for record in rows}.values())
    smallest, largest = CHECKED
    limit = int(SHARE * passes)
    count = min(largest, max(smallest, limit // (2 * PASSES)))
    rows = rows[:: max(1, len(rows) // count)][:count]
    images, labels = stages.pixels_of(task, rows, next(model.parameters()))
    first = checks.first_pass(source or model, images, labels, seed=settings.seed)
    flags = checks.inspect_model(source or model, images, labels, first, seed=settings.seed)
    if alone or radius is None:
        return flags
    region = perturbation.Region(task.stage.norm, radius)
    attacked = checks.Attacked(images, labels, rows, task.stage.plan, region)
    rest = limit - PASSES * len(rows)
    return flags + checks.inspect_attacks(model, attacked, first, settings, rest)


@dataclass(frozen=True)
class TaskSummary:
    """The summaries of one stage, one a radius, ascending. `own_radii`: smallest, middle and largest
    radius of the images where each was attacked at its own; the summary then bears the smallest,
    which all of them were attacked at or beyond.
    """

    stage: stages.Stage
    summaries: tuple[run.RobustAccuracy, ...]
    own_radii: tuple[float, float, float] | None = None

    def to_json(self) -> list[dict[str, Any]]:
        names = ("smallest", "median", "largest")
        own_radii = (
            {}
            if self.own_radii is None
            else {"own_radii": dict(zip(names, self.own_radii, strict=True))}
        )
        return [
            {
                "norm": self.stage.norm,
                "epsilon": summary.epsilon,
                "images": summary.images,
                "clean": summary.clean,
                "robust": summary.robust,
                "attacks": summary.attacks,
                "intervals": {name: list(pair) for name, pair in summary.intervals.items()},
                "median_norm": summary.median_norm,
                "fooled": summary.fooled,
                "fooled_8bit": summary.fooled_8bit,
                "independent": self.stage.independent,
                **own_radii,
            }
            for summary in self.summaries
        ]


def summary_of(task: stages.StageTask, records: Sequence[AttackRecord]) -> TaskSummary:
    """Records of one task -> its shares. DataError when there is none."""
    if task.own is None:
        return TaskSummary(task.stage, run.robust_curve(records))
    radii = sorted(task.own.values())
    summary = run.robust_accuracy([structs.replace(record, epsilon=radii[0]) for record in records])
    return TaskSummary(task.stage, (summary,), (radii[0], median_low(radii), radii[-1]))


@dataclass(frozen=True)
class AttackFindings:
    """The whole evaluation; `first` is what a gate and the short keys of the document speak of."""

    parts: tuple[TaskSummary, ...]
    flags: tuple[checks.Flag, ...]
    resumed: Resumed | None = None

    @property
    def first(self) -> run.RobustAccuracy:
        """The first part at its smallest radius."""
        return self.parts[0].summaries[0]

    @property
    def contradiction(self) -> checks.Flag | None:
        """The flag that proves a bug, if there is one."""
        return next((flag for flag in self.flags if flag.raised and flag.check.fatal), None)

    def to_json(self) -> dict[str, Any]:
        """clean, robust, images, attacks, ... of `first`; `curve` of its norm; `parts` of all.

        `flags` are those that are raised, `checks` the names of all that were made.
        """
        rows = [row for part in self.parts for row in part.to_json()]
        names = [flag.check.name for flag in self.flags]
        first = rows[0]
        return {
            **first,
            "curve": {threat.radius_key(row["epsilon"]): row["robust"] for row in self._curve()},
            "parts": rows if len(rows) > 1 else [],
            "flags": [
                {**asdict(flag.check), "measured": flag.measured}
                for flag in checks.raised(self.flags)
            ],
            "checks": names,
            **({} if self.resumed is None else {"resumed": self.resumed.to_json()}),
        }

    def _curve(self) -> list[dict[str, Any]]:
        """Rows of the first stage's attacks; with certificates, a part for each radius."""
        stage = self.parts[0].stage
        same = [
            part
            for part in self.parts
            if part.stage.plan == stage.plan and part.stage.norm == stage.norm
        ]
        return [row for part in same for row in part.to_json()]


def findings_of(
    tasks: Sequence[stages.StageTask],
    records: Mapping[int, Sequence[AttackRecord]],
    flags: Sequence[checks.Flag],
    certificates: Mapping[int, Certificate] | None = None,
) -> AttackFindings:
    """Records by task -> the outcome; with certificates, records may hold no success at all."""
    if certificates is not None:
        every = [record for rows in records.values() for record in rows]
        radii = {index: certificate.radius for index, certificate in certificates.items()}
        flags = [*flags, checks.certified_above_attacked(every, radii)]
    return AttackFindings(
        tuple(summary_of(task, records[number]) for number, task in enumerate(tasks)), tuple(flags)
    )


def attack_again(
    campaign: Any,
    records: Iterable[Any],
    taken: int,
    gate: bool,
    every: bool,
    where: str,
) -> Resumed:
    """Attack portions of the first `taken` records again; DataError when one does not agree.

    An image is attacked together with its portion, from one seed, so a portion is the least that
    can be repeated.

    Args:
        campaign: a `Campaign`, or a `PatchCampaign`.
        records: all records, in order.
        gate: whether a share of the images must withstand what `campaign.hits` counts.
    """
    portions: list[list[Any]] = []
    remaining = iter(records)
    for portion in campaign.portions:
        if taken <= 0:
            break
        portions.append([next(remaining) for _ in campaign.keys(portion)])
        taken -= len(portions[-1])

    def disagreements(places: Sequence[int]) -> Iterator[str]:
        for place in places:
            repeated = campaign.attack(campaign.portions[place])
            for record, now in zip(portions[place], repeated, strict=True):
                if not record.agrees(now):
                    which = f"image {record.index} at {record.at} in {where}"
                    outcomes = f"it says {record.outcome}, attacked again {now.outcome}"
                    yield f"the record of {which} does not agree: {outcomes}"

    pieces = [
        RecordBatch(len(rows), campaign.hits(portion, rows))
        for portion, rows in zip(campaign.portions, portions, strict=False)
    ]
    usual = -(-len(pieces) // USUAL) if isinstance(campaign, stages.Campaign) else None
    return compute_again(pieces, disagreements, gate=gate, every=every, usual=usual)
