"""Turn a time budget (`--time-budget 10m`) into steps, by a few and then by each epoch's pace; and
say how long a run takes."""

import copy
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from certcli.finetune.loop import Trainer
from certcli.images.labelled import Images

MARGIN = 0.95
"""Share of the budget that the plan fills: steps vary, and reading the clock is not free."""
EVALUATION_SHARE = 0.1
"""Validation on all images may take this share of the time; else a sample of them validates."""
FEWEST_VALIDATION_IMAGES = 500
WARM_UP_STEPS = 2
MEASURED_STEPS = (5, 40)
"""The fewest and the most; between them measuring stops after `MEASURED_SHARE` of the budget."""
MEASURED_SHARE = 0.02
TOLERANCE = 0.1
"""A plan stands while the steps that are left differ from those that fit by at most this share."""


@dataclass(frozen=True)
class Costs:
    """Seconds of a step, of validating an image, of saving, of the bound, of a certificate."""

    step: float
    image: float
    saving: float
    bound: float
    certificate: float


@dataclass(frozen=True)
class TrainingPlan:
    """The optimiser steps of the whole run, and the number of validation images; None: all."""

    steps: int
    validation_limit: int | None


def measure_steps(step: Callable[[], object], budget: float) -> float:
    """Return the mean seconds of a step after a warm-up: many steps add up to the mean."""
    for _ in range(WARM_UP_STEPS):
        step()
    fewest, maximum = MEASURED_STEPS
    seconds: list[float] = []
    while len(seconds) < fewest or (
        len(seconds) < maximum and sum(seconds) < MEASURED_SHARE * budget
    ):
        started = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)
    return statistics.fmean(seconds)


def affordable_steps(available: float, costs: Costs, batches: int, validation: int) -> TrainingPlan:
    """Return the most steps with steps * step + epochs * (evaluation + saving) + proof <= MARGIN *
    available, at least 1.

    Each epoch, also a begun one, is evaluated and saved once. Where validation on all images would
    take more than a tenth of the time, the plan takes fewer images, but at least 500.

    Args:
        available: seconds left of the budget.
        batches: steps an epoch.
        validation: number of validation images.
    """
    time_left = max(0.0, available * MARGIN - costs.bound)
    epochs = max(1.0, time_left / (batches * costs.step))
    affordable = int(
        EVALUATION_SHARE * time_left / max(epochs * costs.image + costs.certificate, 1e-12)
    )
    images = min(validation, max(affordable, FEWEST_VALIDATION_IMAGES))
    time_left -= images * costs.certificate
    around = images * costs.image + costs.saving
    whole = int(max(0.0, time_left) // (batches * costs.step + around))
    rest = time_left - whole * (batches * costs.step + around) - around
    first_steps = min(batches - 1, int(max(0.0, rest) / costs.step))
    return TrainingPlan(
        max(1, whole * batches + first_steps), None if images == validation else images
    )


def changed_total(step: int, total: int, pace: float, time_left: float, batches: int) -> int:
    """Return the steps of a run that fit after an epoch's end: `total` while those left are right
    to TOLERANCE.

    Machines change their speed by factors of two within minutes, so that a plan from a few steps
    may leave half of the time unused, or take twice of it.

    Args:
        pace: seconds a step so far, evaluation and saving included.
        time_left: seconds of the budget that are left for steps.
        batches: steps an epoch; the run ends with a whole one, where one fits.
    """
    fitting = int(max(0.0, time_left * MARGIN) / pace)
    if abs(fitting - (total - step)) <= TOLERANCE * (total - step):
        return total
    return step + (fitting - fitting % batches if fitting >= batches else fitting)


def shortened_total(step: int, total: int, pace: float, time_left: float, batches: int) -> int:
    """Return the steps of a run that fit, within an epoch: fewer where its rest has no time.

    Where further epochs are planned, the pace at this epoch's end corrects their number.

    Args:
        time_left: seconds of the budget that are left for steps of this epoch.
    """
    fitting = changed_total(step, total, pace, time_left, batches)
    rest = min(total - step, -step % batches)
    return fitting if fitting - step < rest else total


SAID_STEPS = 2
SAID_IMAGES = 32
"""Steps and validation images that are measured before a run says how long it takes."""
PLANNED_IMAGES = 256
"""Validation images that are measured before a time budget becomes a number of steps."""
LONG = 100
"""Seconds; a duration of as many is given in minutes."""


@contextmanager
def _rehearsal(trainer: Trainer, train: Images) -> Iterator[tuple[Tensor, ...]]:
    """Yield batches of positions to train on; the trainer is as before at the end."""
    before = copy.deepcopy(trainer.state())
    batches = torch.randperm(len(train), generator=trainer.generator).split(
        trainer.settings.batch_size
    )
    trainer.model.train()
    yield batches
    trainer.model.eval()
    trainer.restore(before)


def _seconds_per_image(trainer: Trainer, sample: Images) -> float:
    trainer.model.eval()
    started = time.perf_counter()
    trainer.evaluate(sample)
    return (time.perf_counter() - started) / len(sample)


def plan_for_budget(
    trainer: Trainer, train: Images, validation: Images, budget: float, around: Costs
) -> Costs:
    """Turn a time budget into the trainer's `steps` and, where time is short and none is given,
    its `validation_limit`.

    Args:
        budget: seconds left.
        around: seconds of saving, bound and certificate.

    Returns:
        These, with the seconds of a step and of validating an image.
    """
    started = time.perf_counter()
    with _rehearsal(trainer, train) as batches:
        step = measure_steps(
            lambda: trainer.learn(train, batches[trainer.step % len(batches)], 0.0), budget
        )
        sample = validation.limit(PLANNED_IMAGES)
        _seconds_per_image(trainer, sample)  # the first one is slower
        image = _seconds_per_image(trainer, sample)
    costs = replace(around, step=step, image=image)
    available = budget - (time.perf_counter() - started)
    plan = affordable_steps(available, costs, trainer.batches(train), len(validation))
    limit = trainer.settings.validation_limit or plan.validation_limit
    trainer.settings = replace(trainer.settings, steps=plan.steps, validation_limit=limit)
    return costs


def expected_duration(trainer: Trainer, train: Images, validation: Images) -> str:
    """Return the sentence that says how long a run takes, from a few steps and validations."""
    with _rehearsal(trainer, train) as batches:
        for positions in batches[:SAID_STEPS]:
            started = time.perf_counter()  # the first step is slower: the last one's clock counts
            trainer.learn(train, positions, 0.0)
        step = time.perf_counter() - started
        image = _seconds_per_image(trainer, validation.limit(SAID_IMAGES))
    steps = trainer.total_steps(train)
    epochs = -(-steps // trainer.batches(train))
    settings = trainer.settings
    judges = len(validation.limit(settings.validation_limit, settings.seed))
    seconds = steps * step + epochs * judges * image
    about = f"{seconds / 60:.0f} min" if seconds >= LONG else f"{max(1, round(seconds))} s"
    return f"this takes about {about}: {steps} steps of {step:.2g} s, {epochs} epochs"
