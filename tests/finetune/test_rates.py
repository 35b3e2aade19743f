"""Learning rates: each schedule starts and ends where its text says, and is torch's where it has it."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch.optim import lr_scheduler

from certcli.finetune.option_texts import FLOOR, RISE, SCHEDULES, one_cycle, rate_curve
from certcli.system.errors import UsageError

LR = 1e-3
Torch = Callable[[torch.optim.Optimizer, int], lr_scheduler.LRScheduler]
AS_TORCH: dict[str, Torch] = {
    "cosine:1e-5": lambda optimiser, steps: lr_scheduler.CosineAnnealingLR(
        optimiser, steps, eta_min=1e-5
    ),
    "steps:0.2@0.5,0.6,0.7,0.8": lambda optimiser, steps: lr_scheduler.MultiStepLR(
        optimiser, [int(place * steps) for place in (0.5, 0.6, 0.7, 0.8)], 0.2
    ),
    "exponential:5e-6": lambda optimiser, steps: lr_scheduler.ExponentialLR(
        optimiser, (5e-6 / LR) ** (1 / steps)
    ),
    "exponential:5e-6@0.5": lambda optimiser, steps: lr_scheduler.LambdaLR(
        optimiser, lambda step: (5e-6 / LR) ** (max(0, step - steps / 2) / (steps / 2))
    ),
}
ENDS = {
    "cosine": (1, FLOOR),
    "steps": (1, 0.01),
    "one-cycle": (1 / 25, 1 / 250_000),
    "cosine:1e-5": (1, 1e-2),
    "steps:0.2@0.5,0.6,0.7,0.8": (1, 0.2**4),
    "exponential:5e-6": (1, 5e-3),
    "exponential:5e-6@0.5": (1, 5e-3),
}
"""Schedule -> its first and last rate, relative to --lr."""


@pytest.mark.parametrize("text", ENDS)
def test_a_schedule_starts_and_ends_as_its_text_says(text: str) -> None:
    curve = rate_curve(text, LR, warmup=0)
    assert (curve(0.0), curve(1.0)) == pytest.approx(ENDS[text], rel=1e-12)
    rates = [curve(share / 200) for share in range(201)]
    assert all(0 < rate <= 1 for rate in rates)
    if text != "one-cycle":
        assert all(later <= earlier for earlier, later in pairwise(rates))


def test_every_schedule_has_rows() -> None:
    assert {text.partition(":")[0] for text in ENDS} == SCHEDULES.keys()
    assert {schedule.example for schedule in SCHEDULES.values()} <= ENDS.keys()


@pytest.mark.parametrize("text", AS_TORCH)
def test_a_schedule_with_numbers_is_that_of_torch(text: str) -> None:
    steps = 40
    optimiser = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=LR)
    schedule = AS_TORCH[text](optimiser, steps)
    curve = rate_curve(text, LR, warmup=0)
    for step in range(steps):
        assert LR * curve(step / steps) == pytest.approx(
            optimiser.param_groups[0]["lr"], rel=1e-9
        ), step
        optimiser.step()
        schedule.step()


@pytest.mark.parametrize("text", ENDS)
def test_a_warm_up_rises_and_leaves_the_rest(text: str) -> None:
    curve, plain = rate_curve(text, LR, warmup=0.1), rate_curve(text, LR, warmup=0)
    assert [curve(share) for share in (0.1, 0.4, 0.9)] == [plain(s) for s in (0.1, 0.4, 0.9)]
    if SCHEDULES[text.partition(":")[0]].warms:
        assert 0 < curve(0.0) < curve(0.05) < curve(0.1)
    else:
        assert curve(0.05) == plain(0.05)


@pytest.mark.parametrize(
    "text",
    ["linear", "cosine:", "cosine:0", "cosine:1", "cosine:a", "steps:0.2", "steps:2@0.5"]
    + ["steps:0.2@0.6,0.5", "steps:0.2@1.5", "exponential", "exponential:1e-6@1", "one-cycle:1"],
)  # fmt: skip
def test_a_schedule_without_meaning_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="schedule"):
        rate_curve(text, LR, warmup=0)


def test_one_cycle_is_that_of_torch() -> None:
    steps = 40
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimiser = torch.optim.SGD([parameter], lr=1.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, max_lr=1.0, total_steps=steps, pct_start=RISE, cycle_momentum=False
    )
    for step in range(steps):
        # torch ends its rise at step RISE * total - 1, and the run at step total - 1
        share = step / (RISE * steps - 1) * RISE
        if step > RISE * steps - 1:
            share = RISE + (1 - RISE) * (step - (RISE * steps - 1)) / (steps - RISE * steps)
        assert optimiser.param_groups[0]["lr"] == pytest.approx(
            one_cycle(share), rel=1e-6, abs=1e-9
        )
        optimiser.step()
        if step < steps - 1:
            schedule.step()
