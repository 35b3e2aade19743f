"""A time budget becomes a number of steps, once: `--time-budget 10m` is planned from a few measured steps."""

import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from certcli.system.errors import UsageError

MARGIN = 0.95
"""Share of the budget that is planned for: steps vary, and reading the clock is not free."""
EVALUATION_SHARE = 0.1
"""Validation may take this share of the time; beyond it a sample of the validation images must do."""
FEWEST_VALIDATION_IMAGES = 500
WARM_UP_STEPS = 2
MEASURED_STEPS = (5, 40)
"""At least, and at most; between them measuring stops after `MEASURED_SHARE` of the budget."""
MEASURED_SHARE = 0.02

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class Costs:
    """Measured seconds: of a step, of validating one image, of saving the state, of the final bound, of a certificate."""

    step: float
    image: float
    saving: float
    bound: float
    certificate: float


@dataclass(frozen=True)
class Plan:
    """steps: optimiser steps in all; validation_limit: None for all validation images."""

    steps: int
    validation_limit: int | None


def parse_duration(text: str) -> float:
    """Seconds: "90", "90s", "10m", "1.5h". UsageError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip().lower())
    seconds = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if seconds <= 0:
        raise UsageError(f"'{text}' is not a length of time", "--time-budget 90s, 10m or 1h")
    return seconds


def measure_steps(step: Callable[[], object], budget: float) -> float:
    """Mean seconds of a training step after a warm-up: the mean, not the median, is what many steps add up to."""
    for _ in range(WARM_UP_STEPS):
        step()
    fewest, most = MEASURED_STEPS
    seconds: list[float] = []
    while len(seconds) < fewest or (len(seconds) < most and sum(seconds) < MEASURED_SHARE * budget):
        started = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)
    return statistics.fmean(seconds)


def affordable_steps(available: float, costs: Costs, batches: int, validation: int) -> Plan:
    """The most steps with  steps * step + epochs * (evaluation + saving) + proof <= MARGIN * available, at least one.

    available: seconds left of the budget; batches: steps an epoch; validation: images. Each epoch, also a begun one, is
    evaluated and saved once. When validation would take more than a tenth of the time, so few images are used that it
    does not, but not fewer than 500 where there are so many.
    """
    left = max(0.0, available * MARGIN - costs.bound)
    epochs = max(1.0, left / (batches * costs.step))
    affordable = int(EVALUATION_SHARE * left / max(epochs * costs.image + costs.certificate, 1e-12))
    images = min(validation, max(affordable, FEWEST_VALIDATION_IMAGES))
    left -= images * costs.certificate
    around = images * costs.image + costs.saving
    whole = int(max(0.0, left) // (batches * costs.step + around))
    rest = left - whole * (batches * costs.step + around) - around
    begun = min(batches - 1, int(max(0.0, rest) / costs.step))
    return Plan(max(1, whole * batches + begun), None if images == validation else images)
