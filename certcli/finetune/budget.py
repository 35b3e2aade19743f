"""Turn a time budget (`--time-budget 10m`) into steps, by a few and then by each epoch's pace; and
say how long a run takes."""

import copy
import time
from dataclasses import dataclass, replace

import torch

from certcli.finetune.loop import Trainer
from certcli.images.labelled import Images

MARGIN = 0.95
"""Share of the budget that the plan fills: steps vary, and reading the clock is not free."""
EVALUATION_SHARE = 0.1
"""Validation on all images may take this share of the time; else a sample of them validates."""
FEWEST_VALIDATION_IMAGES = 500
MEASURED_STEPS = 4
"""The first of them, which is slower, does not count."""
MEASURED_IMAGES = 64
"""Validation images that are measured, after a batch of them that does not count."""
TOLERANCE = 0.1
"""A plan stands while the steps that are left differ from those that fit by at most this share."""
LONG = 100
"""Seconds; a duration of as many is given in minutes."""


@dataclass(frozen=True)
class Costs:
    """Seconds of a step, of validating an image, of saving, of the bound, of a certificate."""

    step: float
    image: float
    saving: float = 0.0
    bound: float = 0.0
    certificate: float = 0.0


def measured_costs(trainer: Trainer, train: Images, validation: Images) -> Costs:
    """Return the seconds of a step and of validating an image; the trainer is as before then."""
    before = copy.deepcopy(trainer.state())
    order = torch.randperm(len(train), generator=trainer.generator)
    batches = order.split(trainer.settings.batch_size)
    sample = validation.limit(MEASURED_IMAGES)
    clocks = []
    trainer.model.train()
    for number in range(MEASURED_STEPS):
        trainer.learn(train, batches[number % len(batches)], 0.0)
        clocks.append(time.perf_counter())
    trainer.model.eval()
    for _ in range(2):
        started = time.perf_counter()
        trainer.evaluate(sample)
    image = (time.perf_counter() - started) / len(sample)
    trainer.restore(before)
    return Costs((clocks[-1] - clocks[0]) / (MEASURED_STEPS - 1), image)


def affordable_steps(
    available: float, costs: Costs, batches: int, validation: int
) -> tuple[int, int]:
    """Return the steps of a run and the number of images that validate it.

    The most steps with steps * step + epochs * (images * image + saving) + images * certificate +
    bound <= MARGIN * available, at least 1; a begun epoch counts for its share, and one more is
    evaluated and saved. Where validation on all images would take more than EVALUATION_SHARE of
    the time, fewer images validate.

    Args:
        available: seconds left of the budget.
        batches: steps an epoch.
        validation: number of validation images.
    """
    time_left = max(0.0, available * MARGIN - costs.bound)
    epochs = max(1.0, time_left / (batches * costs.step))
    affordable = EVALUATION_SHARE * time_left / (epochs * costs.image + costs.certificate + 1e-12)
    images = min(validation, max(int(affordable), FEWEST_VALIDATION_IMAGES))
    around = images * costs.image + costs.saving
    time_left -= images * costs.certificate + around
    return max(1, int(time_left / (costs.step + around / batches))), images


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


def plan_for_budget(
    trainer: Trainer, train: Images, validation: Images, ends: float, around: Costs
) -> Costs:
    """Turn a time budget into the trainer's `steps` and, where time is short and none is given,
    its `validation_limit`.

    Args:
        ends: the end of the budget, on the clock.
        around: seconds of saving, bound and certificate.

    Returns:
        These, with the seconds of a step and of validating an image.
    """
    measured = measured_costs(trainer, train, validation)
    costs = replace(around, step=measured.step, image=measured.image)
    batches = trainer.batches(train)
    steps, images = affordable_steps(ends - time.perf_counter(), costs, batches, len(validation))
    limit = trainer.settings.validation_limit
    if limit is None and images < len(validation):
        limit = images
    trainer.settings = replace(trainer.settings, steps=steps, validation_limit=limit)
    return costs


def expected_duration(trainer: Trainer, train: Images, validation: Images) -> str:
    """Return the sentence that says how long a run takes, from a few steps and validations."""
    costs = measured_costs(trainer, train, validation)
    steps = trainer.total_steps(train)
    epochs = -(-steps // trainer.batches(train))
    settings = trainer.settings
    judges = len(validation.limit(settings.validation_limit, settings.seed))
    seconds = steps * costs.step + epochs * judges * costs.image
    about = f"{seconds / 60:.0f} min" if seconds >= LONG else f"{max(1, round(seconds))} s"
    return f"this takes about {about}: {steps} steps of {costs.step:.2g} s, {epochs} epochs"
