"""Measure a few steps and validations of a run: what a time budget affords, and how long it takes."""

import copy
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from certcli.finetune.budget import Costs, affordable_steps, measure_steps
from certcli.finetune.loop import Trainer
from certcli.images.labelled import Images

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
