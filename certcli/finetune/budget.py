"""A time budget becomes a number of steps, once: `--time-budget 10m` is planned from a few measured steps."""

import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from certcli.errors import UsageError

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
class Plan:
    """steps: optimiser steps in all; validation_limit: None for all validation images; step_seconds: as measured."""

    steps: int
    validation_limit: int | None
    step_seconds: float


def parse_duration(text: str) -> float:
    """Seconds: "90", "90s", "10m", "1.5h". UsageError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip().lower())
    seconds = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if seconds <= 0:
        raise UsageError(f"'{text}' is not a length of time", "--time-budget 90s, 10m or 1h")
    return seconds


def measure_steps(step: Callable[[], None], budget: float) -> float:
    """Median seconds of one training step, after a warm-up."""
    for _ in range(WARM_UP_STEPS):
        step()
    fewest, most = MEASURED_STEPS
    seconds: list[float] = []
    while len(seconds) < fewest or (len(seconds) < most and sum(seconds) < MEASURED_SHARE * budget):
        started = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def plan(
    available: float,
    step_seconds: float,
    image_seconds: float,
    proof_seconds: tuple[float, float],
    batches: int,
    validation: int,
) -> Plan:
    """The most steps with  steps * step + epochs * evaluation + proof <= available * MARGIN, and at least one.

    available: seconds left of the budget; image_seconds: of evaluating one validation image; proof_seconds: of the final
    bound, and of certifying one image with it; batches: steps an epoch; validation: images. Each epoch, also a begun
    one, is evaluated once. When that would take more than a tenth of the time, so few images are used that it does not,
    but not fewer than 500 where there are so many.
    """
    left = max(0.0, available * MARGIN - proof_seconds[0])
    epoch_seconds = batches * step_seconds
    epochs = max(1.0, left / epoch_seconds)
    affordable = int(EVALUATION_SHARE * left / max(epochs * image_seconds + proof_seconds[1], 1e-12))
    images = min(validation, max(affordable, FEWEST_VALIDATION_IMAGES))
    left -= images * proof_seconds[1]
    evaluation = images * image_seconds
    whole = int(max(0.0, left) // (epoch_seconds + evaluation))
    rest = left - whole * (epoch_seconds + evaluation) - evaluation
    begun = min(batches - 1, int(max(0.0, rest) / step_seconds))
    return Plan(max(1, whole * batches + begun), None if images == validation else images, step_seconds)
