"""An evaluation as stages: attacks that run together, their norm, their radii, their images."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from msgspec import structs
from torch import Tensor, nn

from certcli.attack.judge import select_certified
from certcli.attack.run import attack_images, require_correct
from certcli.attack.settings import AttackSettings, Planned, planned_attacks, preset
from certcli.checkpoint.record import Record
from certcli.evaluation import perturbation, record_lines, threat
from certcli.evaluation.image_records import AttackRecord, Certificate
from certcli.evaluation.records import RecordFile, deal_records
from certcli.images.labelled import Images, sent
from certcli.models.onnx.open import has_steps
from certcli.system import errors, processes

RECORD_KEYS = ("task", "epsilon", "index")
"""What tells one record of a run from another."""
Portion = tuple[int, list[int]]
"""What is attacked together: the number of the task, positions among its images."""

DEFAULT_ATTACK = "pgd"
DEFAULT_RADIUS = 0.5


@dataclass(frozen=True)
class Stage:
    """Attacks that share a norm, at ascending radii. No radius: each image at its certified one."""

    norm: perturbation.Norm
    radii: tuple[float, ...]
    plan: tuple[Planned, ...]
    independent: bool

    def ready(self, net: nn.Module, record: Record, settings: AttackSettings) -> "Stage":
        """The stage for a network: its draws' seed, the crafting precision, its number of classes;
        and Square, too, where it rounds to steps, whose gradients are guesses.
        """
        seed, precision, classes = settings.seed, settings.precision, record.classes
        plans = [
            replace(
                entry,
                settings=replace(
                    entry.settings, seed=seed, classes=classes, precision=precision, restart=0
                ),
            )
            for entry in self.plan
        ]
        height, width = record.input.size[1:]
        fits = self.norm == "linf" or height == width >= 5
        if fits and has_steps(net) and "square" not in [entry.attack for entry in plans]:
            plans.append(replace(plans[0], label="square", attack="square"))
        return replace(self, plan=tuple(plans))


def stages_of(
    names: Sequence[str],
    preset_name: str | None,
    norm: str | None,
    radii: Sequence[float],
    settings: AttackSettings,
    *,
    certified: bool = False,
) -> tuple[Stage, ...]:
    """Attacks by name, or a preset, -> the stages. None and empty values are defaults.

    A preset runs its attacks independently and fixes what they may spend; one of a single part may
    move to other radii. With `certified`, no radius means each image's own. UsageError on an
    unknown name or on wishes that contradict.
    """
    chosen = tuple(sorted(set(radii)))
    for radius in chosen:
        perturbation.Region("l2", radius)  # refuses what is no radius
    if preset_name is not None:
        return _preset_stages(preset_name, names, norm, chosen, settings, certified)
    threat.require_norm(norm or "l2")
    planned = planned_attacks(list(names) or [DEFAULT_ATTACK], settings)
    if not chosen and not certified:
        chosen = (DEFAULT_RADIUS,)
    return (Stage("linf" if norm == "linf" else "l2", chosen, planned, False),)


def _preset_stages(
    name: str,
    names: Sequence[str],
    norm: str | None,
    radii: tuple[float, ...],
    settings: AttackSettings,
    certified: bool,
) -> tuple[Stage, ...]:
    paper = preset(name)
    if names or norm is not None or certified:
        raise errors.UsageError(
            f"the preset {name} fixes attacks, norm and images",
            "leave out the preset or the other option",
        )
    if settings != AttackSettings(
        seed=settings.seed, precision=settings.precision, pixels=settings.pixels
    ):
        raise errors.UsageError(
            f"the preset {name} fixes the steps of its attacks",
            "or name the attacks with --attack",
        )
    if radii and len(paper.parts) > 1:
        raise errors.UsageError(
            f"the preset {name} has {len(paper.parts)} parts with radii of their own",
            "leave out --epsilon",
        )
    return tuple(
        Stage(part.region.norm, radii or (part.region.radius,), part.plan, True)
        for part in paper.parts
    )


def in_norm(
    stages: Sequence[Stage], norm: perturbation.Norm, named: str | None
) -> tuple[Stage, ...]:
    """The stages in the norm that certificates speak of; UsageError where another was named."""
    if named not in (None, norm):
        raise errors.UsageError(
            f"the certified radii are {norm} radii, they bound no attack in {named}",
            "leave out --norm",
        )
    return tuple(replace(stage, norm=norm) for stage in stages)


@dataclass(frozen=True)
class StageTask:
    """A stage and its images; `own`: index -> the radius at which it alone is attacked.

    `certified`: all of the images are certified, so the network must at least classify them
    correctly.
    """

    stage: Stage
    images: Images
    own: Mapping[int, float] | None = None
    certified: bool = False

    def __len__(self) -> int:
        """The number of records."""
        return len(self.images) * (1 if self.own is not None else len(self.stage.radii))

    def portions(self, batch_size: int) -> Iterator[list[int]]:
        """Positions of what is attacked together."""
        for start in range(0, len(self.images), batch_size):
            yield list(range(start, min(start + batch_size, len(self.images))))

    def rounds(self, indices: Sequence[int]) -> list[tuple[perturbation.Region, list[float]]]:
        """The regions to the images of a batch, in order, and each image's radius under them."""
        norm = self.stage.norm
        if self.own is not None:
            radii = [self.own[index] for index in indices]
            return [(perturbation.Region.each(norm, radii), radii)]
        return [
            (perturbation.Region(norm, radius), [radius] * len(indices))
            for radius in self.stage.radii
        ]


def tasks_of(
    stages: Sequence[Stage],
    images: Images,
    certificates: Mapping[int, Certificate] | None = None,
) -> tuple[StageTask, ...]:
    """Stages on images; with certificates, only images certified beyond a radius, or at their own.

    DataError when none is certified there, or when the certificates speak of other images.
    """
    if certificates is None:
        return tuple(StageTask(stage, images) for stage in stages)
    tasks: list[StageTask] = []
    for stage in stages:
        if not stage.radii:
            chosen = select_certified(images, certificates, 0.0)
            # the whole box lies within its diagonal, so an unbounded radius asks for no more than
            # that
            entries = float(chosen.fetch([0])[0].numel()) if len(chosen) else 0.0
            diagonal = entries**0.5 if stage.norm == "l2" else 1.0
            indices = chosen.indices.tolist()
            tasks.append(
                StageTask(
                    stage, chosen, {i: min(certificates[i].radius, diagonal) for i in indices}, True
                )
            )
        for radius in stage.radii:
            tasks.append(
                StageTask(
                    replace(stage, radii=(radius,)),
                    select_certified(images, certificates, radius),
                    certified=True,
                )
            )
    empty = next((task for task in tasks if not len(task.images)), None)
    if empty is not None:
        at = f" beyond {threat.proven_radius(empty.stage.radii[0])}" if empty.stage.radii else ""
        raise errors.DataError(
            f"none of the {len(images)} images is certified{at}",
            "certify more of them, or another radius",
        )
    return tuple(tasks)


def parameters_of(
    tasks: Sequence[StageTask], settings: AttackSettings, **more: Any
) -> dict[str, Any]:
    """Return, for evidence, all that decides the numbers, as plain values; `more` joins them."""
    images = tasks[0].images
    about = {"dataset": images.name, "split": images.split, "images": len(images)}
    return {**about, **_named_stages(tasks), "settings": asdict(settings), **more}


def _named_stages(tasks: Sequence[StageTask]) -> dict[str, list[Any]]:
    return {
        "attacks": [[entry.label for entry in task.stage.plan] for task in tasks],
        "radii": [list(task.stage.radii) for task in tasks],
        "norm": [task.stage.norm for task in tasks],
        "independent": [task.stage.independent for task in tasks],
    }


def attack_run(
    tasks: Sequence[StageTask],
    settings: AttackSettings,
    batch_size: int,
    checkpoint: str,
    images: Images,
    **more: Any,
) -> record_lines.Run:
    """What decides the records. The batch size does: what is attacked together draws from one
    seed."""
    spent = {
        f"task {number} {entry.label}": {**asdict(entry.settings), "attack": entry.attack}
        for number, task in enumerate(tasks)
        for entry in task.stage.plan
    }
    chosen = {
        f"task {number} images": {
            "attacked": _digest_of_plan(task.images.indices.tolist()),
            "at": _digest_of_plan(sorted(radii.items())),
        }
        for number, task in enumerate(tasks)
        if (radii := task.own or {}) or task.certified
    }
    stages = _named_stages(tasks)
    method = stages.pop("attacks")
    independent = stages.pop("independent")
    decided = {"independent": independent, "batch_size": batch_size, **more, **chosen, **spent}
    return record_lines.Run.of(
        "attack", checkpoint, images, method, **stages, parameters={**asdict(settings), **decided}
    )


def _digest_of_plan(values: Sequence[Any]) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Campaign:
    """Tasks ready for a model: source crafts in its place; `keep_images`: of first successes.

    Each portion draws from its own seed, in every process and order: resumed records are those of
    an uninterrupted run.
    """

    model: nn.Module
    tasks: Sequence[StageTask]
    settings: AttackSettings
    batch_size: int
    source: nn.Module | None = None
    keep_images: bool = False

    @property
    def portions(self) -> list[Portion]:
        return [
            (number, part)
            for number, task in enumerate(self.tasks)
            for part in task.portions(self.batch_size)
        ]

    def keys(self, portion: Portion) -> list[tuple[int, float, int]]:
        """`RECORD_KEYS` of a portion's records, in order."""
        number, positions = portion
        indices = self.tasks[number].images.indices[positions].tolist()
        rounds = [radii for _, radii in self.tasks[number].rounds(indices)]
        return [
            (number, radius, index)
            for radii in rounds
            for radius, index in zip(radii, indices, strict=True)
        ]

    def attack(self, portion: Portion, ahead: int = 1) -> list[AttackRecord]:
        """Records of a portion; `ahead` is read meanwhile. Images get the model's device, dtype.

        DataError when an image that is certified is misclassified as it stands.
        """
        number, positions = portion
        task = self.tasks[number]
        like = next(self.model.parameters())
        pixels = task.images.fetch(positions)
        labels = task.images.labels[positions]
        task.images.expect_at(positions[0] + ahead * self.batch_size, self.batch_size)
        indices = task.images.indices[positions]
        rows: list[AttackRecord] = []
        for row in attack_images(
            self.model,
            [(indices, sent(pixels, like.device).to(like.dtype), labels)],
            task.stage.plan,
            [region for region, _ in task.rounds(indices.tolist())],
            self.settings,
            independent=task.stage.independent,
            source=self.source,
            keep_images=self.keep_images,
        ):
            shown = row.fell and not any(other.index == row.index and other.fell for other in rows)
            pictures = {} if shown else {"image": None, "adversarial": None}
            rows.append(structs.replace(row, task=number, **pictures))
        if task.certified:
            require_correct(rows)
        return rows

    def run(
        self,
        file: RecordFile | None = None,
        team: processes.Team = processes.ALONE,
    ) -> Iterator[tuple[int, list[AttackRecord]]]:
        """(task's number, records of a portion), in order; what `file` holds is read.

        Only the leader of several processes is handed records, without images.
        """

        def find(portion: Portion) -> list[AttackRecord]:
            return self.attack(portion, team.size)

        def require(portion: Portion, rows: list[AttackRecord]) -> None:
            require_stage(rows, self.tasks[portion[0]].stage, file)

        dealt = deal_records(self.portions, self.keys, find, AttackRecord, file, team, require)
        for (number, _), rows in zip(self.portions, dealt, strict=False):
            yield number, rows

    def hits(self, portion: Portion, rows: Sequence[AttackRecord]) -> int:
        """Count the records that a gate speaks of, and that meet it: the first task's at its
        smallest radius.
        """
        task = self.tasks[0]
        smallest = min(task.stage.radii, default=None)
        at_first = [row for row in rows if task.own is not None or row.epsilon == smallest]
        return sum(row.withstood for row in at_first if portion[0] == 0)


def require_stage(rows: Sequence[AttackRecord], stage: Stage, file: RecordFile | None) -> None:
    """DataError for records of a file in another norm or by other attacks than the stage's."""
    labels = [entry.label for entry in stage.plan]
    for row in rows:
        if row.kind != stage.norm or list(row.robust) != labels:
            statement = f"image {row.index} was attacked in {row.kind} by {', '.join(row.robust)}"
            raise errors.DataError(
                f"{file.path if file else 'the file'} contradicts itself: {statement}",
                "attack again, without --resume",
            )


def pixels_of(
    task: StageTask, records: Sequence[AttackRecord], like: Tensor
) -> tuple[Tensor, Tensor]:
    """Images and labels of records, where and as `like` is: (b, c, h, w), (b,)."""
    places = {index: place for place, index in enumerate(task.images.indices.tolist())}
    positions = [places[record.index] for record in records]
    pixels = task.images.fetch(positions)
    return pixels.to(like.device, like.dtype), task.images.labels[positions].to(like.device)
