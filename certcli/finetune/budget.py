"""Turn a time budget (`--time-budget 10m`) into steps: by a few, then by each epoch's pace."""

import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from certcli.system.errors import UsageError

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

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


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


def parse_duration(text: str) -> float:
    """Return the seconds of "90", "90s", "10m" or "1.5h". UsageError for any other text."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip().lower())
    seconds = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if seconds <= 0:
        raise UsageError(f"'{text}' is not a length of time", "--time-budget 90s, 10m or 1h")
    return seconds


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


def share_done(step: int, total: int, changes: Sequence[tuple[int, int]] = ()) -> float:
    """Return the share of the schedule before a step: linear in the steps, and continuous where the
    plan changed.

    Args:
        changes: for each earlier plan, the step at which it ended and the total that it had.
    """
    start = 0
    done = 0.0
    for changed, former in changes:
        done += (1 - done) * (changed - start) / (former - start)
        start = changed
    return done + (1 - done) * (step - start) / (total - start)
