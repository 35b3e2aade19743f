"""An optimiser step: the gradient of a batch, sharpened, clipped, applied."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from certcli.finetune.losses import NEEDS_CHAIN
from certcli.finetune.objective import Batch, Objective
from certcli.finetune.penalties import SpectralPenalty
from certcli.finetune.sam import climbed
from certcli.finetune.settings import FinetuneSettings
from certcli.images.labelled import Images
from certcli.models.pixels import PixelModel
from certcli.system.errors import CertvitError
from certcli.system.processes import ALONE, Team
from certcli.system.products import fast_products
from certcli.system.torch_modes import seed_all

_APART = 0x9E3779B97F4A7C15
"""Difference of the seeds of two processes: far more than the number of steps."""

START = 0.2
"""Share of the radius at which the ramp begins. Losses through a chain begin at 0 with cross entropy, as published."""


class Diverged(CertvitError):
    """The loss or the weights became NaN or infinite; the best weights before that are kept."""

    code = 1

    def __init__(self, message: str) -> None:
        super().__init__(
            message,
            "the best weights so far are kept; try a smaller --lr, a longer --warmup, or --clip-grad 1",
        )


class Descent:
    """Change the weights by the gradient of the loss at given images.

    Each of several processes takes its part of every batch. Their gradients are added, and all make
    the same step.

    Args:
        pairs: gives the trainable pair constants; called once a gradient.
        sharded: each process holds and steps rows of the weights, which share their gradients.
    """

    def __init__(
        self,
        model: PixelModel,
        settings: FinetuneSettings,
        objective: Objective,
        optimisers: list[torch.optim.Optimizer],
        pairs: Callable[[], Tensor | None],
        team: Team = ALONE,
        sharded: bool = False,
    ) -> None:
        self.settings = settings
        self.objective = objective
        self.team = team
        self.sharded = sharded
        self.optimisers = optimisers
        self.pairs = pairs
        self.parameters = [
            p for group in optimisers for part in group.param_groups for p in part["params"]
        ]
        self.penalty = None if settings.msvp is None else SpectralPenalty(model.net, settings.msvp)

    def step(
        self, train: Images, positions: Tensor, share: float, where: str, number: int
    ) -> float:
        """Make step `number` at a share of the training, and return the mean loss before it.

        Dropout draws from global generators. Inside, they depend on seed, step and process alone,
        so that a run can resume.

        Args:
            where: names the step in an error.

        Raises:
            Diverged: the loss is not finite.
        """
        with fast_products(self.objective.model):
            return self._step(train, positions, share, where, number)

    def _step(
        self, train: Images, positions: Tensor, share: float, where: str, number: int
    ) -> float:
        settings = self.settings
        device = self.objective.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            seed_all((settings.seed * 1_000_003 + number + self.team.rank * _APART) % 2**63)
            # the run's own generator orders the images, the same in all processes
            if self.team.several:
                self.objective.generator.manual_seed(torch.initial_seed())
            start = 0.0 if settings.loss in NEEDS_CHAIN else START
            ramp = (
                1.0 if settings.ramp == 0 else min(1.0, start + (1 - start) * share / settings.ramp)
            )
            epsilon = settings.epsilon * ramp
            local_part, weight = self._own(positions)
            batch = self.objective.prepare(train, local_part, share)
            loss = self._gradient(batch, weight, epsilon, where)
            if settings.sam > 0:
                with climbed(self.parameters, settings.sam):
                    self._gradient(batch, weight, epsilon, where)
        if settings.clip_grad is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters, settings.clip_grad)
        for optimiser in self.optimisers:
            optimiser.step()
        return loss

    def expect(self, train: Images, *steps: Tensor) -> None:
        """Let the files of this step's images and of the following steps' be read ahead."""
        train.expect([position for part in steps for position in self._own(part)[0].tolist()])

    def _own(self, part: Tensor) -> tuple[Tensor, float]:
        """Return this process's images of a batch, and their weight; where too few, all."""
        size = self.team.size
        local_part = part.tensor_split(size)[self.team.rank] if len(part) >= size else part
        return local_part, len(local_part) / len(part) if len(part) >= size else 1 / size

    def _gradient(self, batch: Batch, weight: float, epsilon: float, where: str) -> float:
        """Set every `.grad` to that of the mean loss over all processes; return the mean."""
        for optimiser in self.optimisers:
            optimiser.zero_grad(set_to_none=True)
        loss = self.objective.value(batch, self.pairs, epsilon) * weight
        if self.penalty is not None:  # it reads the weights alone: each process adds its share
            loss = loss + self.penalty() / self.team.size
        value = float(loss.detach())
        if not self.team.several:
            _require_finite_loss(value, where)
        # of sharded weights the backward pass takes the mean over the processes
        (loss * self.team.size if self.sharded else loss).backward()
        if not self.team.several:
            return value
        added = torch.tensor(value, dtype=torch.float64)
        summed = [] if self.sharded else self.parameters
        self.team.add_up([added, *(p.grad for p in summed if p.grad is not None)])
        _require_finite_loss(float(added), where)  # here, where all processes see it
        return float(added)

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return the penalty's vectors."""
        return {} if self.penalty is None else {"penalty": dict(self.penalty.vectors)}

    def load(self, parts: dict[str, dict[str, Tensor]]) -> None:
        if self.penalty is not None:
            self.penalty.vectors = {path: value.clone() for path, value in parts["penalty"].items()}


def _require_finite_loss(loss: float, where: str) -> None:
    if not math.isfinite(loss):
        raise Diverged(f"the loss became {loss} at {where}")
